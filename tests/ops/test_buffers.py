"""Arena buffers of `all_reduce_norm`'s kernels, as native code computes them."""

from __future__ import annotations

import pytest

from weaveopt import _native

KERNELS, BF16, FP8 = _native.GpuKernel, _native.DType.bfloat16, _native.OutKind.float8_e4m3fn
SAME = _native.OutKind.same
SCALE_BYTES = 16


def aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def sizes(needs: list[_native.BufferNeed]) -> dict[str, int]:
    return {need.name: need.num_bytes for need in needs}


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (37, 120), (4096, 8192)])
def test_gpu_buffers_hold_partial_rows_finished_rows_and_sums(world: int, tokens: int, hidden: int) -> None:
    share, row = -(-tokens // world), 2 * hidden
    for out_kind, out_row in ((SAME, row), (FP8, aligned(hidden, 16))):
        finished = out_row + SCALE_BYTES
        output = aligned(aligned(tokens * finished, 256) + tokens * row, 256)
        wanted = {
            KERNELS.ll_packet_one_shot: {"mailboxes": 2 * aligned((world - 1) * tokens * row, 256)},
            KERNELS.ll_packet_two_shot: {"mailboxes": 2 * aligned((world - 1) * share * (2 * row + finished), 256)},
            KERNELS.bulk: {"staging": aligned((world - 1) * share * row, 256), "output": output},
            KERNELS.direct: {"output": output, "partial": aligned(tokens * row, 256)},
        }
        for kernel, expected in wanted.items():
            assert sizes(_native.gpu_buffers(kernel, tokens, hidden, BF16, out_kind, world)) == expected


def test_what_peers_write_keeps_its_place_and_mailboxes_begin_empty() -> None:
    needs = [
        need for kernel in KERNELS.__members__.values() for need in _native.gpu_buffers(kernel, 9, 64, BF16, SAME, 2)
    ]
    assert {need.name for need in needs if not need.per_arena} == {"partial"}
    assert {need.name: need.fill for need in needs if need.fill is not None} == {"mailboxes": 0x80000000}
    assert all(need.num_bytes % _native.GPU_ALIGNMENT == 0 for need in needs)


def test_shm_buffers_hold_two_partial_results_and_a_share_of_both_outputs() -> None:
    needs = _native.shm_buffers(37, 3, BF16, _native.DType.float32, 2)
    assert sizes(needs) == {
        "partial": 2 * aligned(37 * 3 * 2, _native.SHM_ALIGNMENT),
        "output": aligned(19 * 3 * 4, _native.SHM_ALIGNMENT) + aligned(19 * 3 * 2, _native.SHM_ALIGNMENT),
    }
    assert [need.per_arena for need in needs] == [True, False]


def test_limits_are_those_that_messages_and_plans_count_with() -> None:
    assert _native.MAX_WORLD == 8 and _native.NUM_MAILBOXES == 2 and _native.TAG_FIELD_BITS == 24
    assert _native.NUM_CHANNELS >= 4 and _native.HEADER_BYTES % 4096 == 0
