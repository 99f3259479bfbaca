"""A rank that is lost while requests are in flight: the others' requests end with an error that names it, in bounded
time, and nothing is left. `docs/faults.md` has what they say.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from transformers import GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from tests.graphs.batching import compiled, prompts
from tests.graphs.executing import without_code
from tests.graphs.models import FAMILIES, load, one_layer, save
from tests.ranks import collect
from tests.ranks.simulated import TEST_ALL

LLAMA = one_layer(next(each for each in FAMILIES if each.name == "llama"))
WORLD = 2
LOST_AT = 4
"""Step that the lost rank does not make."""
SHORT_S = 3.0
"""`timeout_s` and transformers' `cpu_group_timeout` where peers have to wait for them."""
LONG_S = 60.0
OPERATOR = (
    r"weave::all_reduce_norm at site \S+, group '0', rank 0: peer rank 1 (exited|did not signal within 3 s) \(.+\)"
)
LOOP = r"continuous batching, group '0', rank 0: peer rank 1 does not answer, exited or stopped \(.+\)"


def _on_ranks(
    rank: int, folder: str, within: bool, which: signal.Signals, timeout_s: float
) -> tuple[list[str | None], list[int], float, list[str]]:
    """Rank 0 returns its requests' errors and numbers of tokens, how long it took to hear them, and its threads."""
    model = load(LLAMA, folder, WORLD)
    lost_at = [0.0]
    place = "_generation_step" if within else "_generation_loop_body"
    config = compiled({"force": ["all_reduce_rms_norm"], "timeout_s": timeout_s})
    config.cpu_group_timeout = timeout_s
    inner = getattr(ContinuousBatchingManager, place)

    def outer(self: ContinuousBatchingManager, *args: object, **named: object) -> object:
        if getattr(self, "current_batch", 0) == LOST_AT and lost_at[0] == 0.0:
            lost_at[0] = time.monotonic()
            if rank == 1:
                Path(folder, "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), which)
        return inner(self, *args, **named)

    setattr(ContinuousBatchingManager, place, outer)
    until = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=-1)
    with without_code():
        found = model.generate_batch(prompts(3), until, config, warmup=False)
    heard_s = time.monotonic() - lost_at[0]
    if which is signal.SIGSTOP:  # nobody else ends it
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)
    names = [each.name for each in threading.enumerate() if not each.name.startswith("weaveopt-")]
    return (
        [each.error for each in found.values()],
        [len(each.generated_tokens) for each in found.values()],
        heard_s,
        names,
    )


CASES = [(True, signal.SIGKILL), (False, signal.SIGKILL), (True, signal.SIGSTOP), (False, signal.SIGSTOP)]


@pytest.mark.parametrize(("within", "which"), CASES if TEST_ALL else CASES[:2])
def test_a_lost_rank_is_named(within: bool, which: signal.Signals, tmp_path: Path) -> None:
    save(LLAMA, str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    timeout_s = LONG_S if which is signal.SIGKILL else SHORT_S
    outcomes = collect(_on_ranks, WORLD, str(tmp_path), within, which, timeout_s, timeout_s=150)
    assert isinstance(outcomes[0].value, tuple), outcomes[0].error
    errors, counts, heard_s, threads = outcomes[0].value
    assert len(errors) == 3 and counts == [LOST_AT] * 3
    for error in errors:
        assert re.fullmatch(OPERATOR if within else LOOP, str(error)), error
    # An operator's timeout, that of transformers' group, and 5 s of its own in `stop`.
    assert heard_s < (5.0 if which is signal.SIGKILL else 2 * SHORT_S + 10.0)
    assert threads == ["MainThread"], "transformers' loop has ended"
    assert {name for name in set(os.listdir("/dev/shm")) - before if "weave" in name} == set()
    assert outcomes[1].error
