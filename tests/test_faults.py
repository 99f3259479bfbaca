"""Ranks that differ, stall or die: an error on the others in bounded time, never a hang, nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch
from torch.distributed import distributed_c10d as c10d

from tests import forms
from tests.descriptors import exhausted
from tests.ranks import collect, run_ranks

TIMEOUT_S = 6.0


def _compiled(form: Callable[..., object] = forms.chain, **options: object) -> object:
    weights = forms.make_weights(torch.float32)
    settings = {"force": ["all_reduce_rms_norm"], "timeout_s": TIMEOUT_S, "compile_timeout_s": 60.0, **options}
    return torch.compile(lambda x, r: form(weights, x, r), backend="weave", options=settings)  # type: ignore[call-overload]


def _run(compiled: object, times: int = 1) -> None:
    assert callable(compiled)
    with torch.no_grad():
        for _ in range(times):
            compiled(torch.ones(1, 5, forms.INNER), torch.ones(1, 5, forms.HIDDEN))


def _told(call: Callable[[], object]) -> str:
    """The `WeaveError` that `call` raises, as text."""
    import weaveopt

    try:
        call()
    except weaveopt.WeaveError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _different_options(rank: int) -> str:
    return _told(lambda: _run(_compiled(max_tokens=64 + rank)))


def test_different_options_are_named() -> None:
    for text in run_ranks(_different_options, 2):
        assert text.startswith("AgreementError")
        assert "option max_tokens" in text and "rank 0 has 64" in text and "rank 1 has 65" in text


def _different_graphs(rank: int) -> str:
    return _told(lambda: _run(_compiled(forms.pre_norm if rank == 0 else forms.gemma_norm)))


def test_different_graphs_name_the_first_site() -> None:
    for text in run_ranks(_different_graphs, 2):
        assert text.startswith("AgreementError") and "site all_reduce" in text and "weight + 1" in text


def _never_comes(rank: int) -> str:
    if rank == 1:
        time.sleep(12)
        return "slept"
    return _told(lambda: _run(_compiled(compile_timeout_s=3.0)))


def test_a_rank_that_never_comes_is_an_error() -> None:
    first, second = run_ranks(_never_comes, 2)
    assert second == "slept"
    assert first.startswith("AgreementError") and "rank(s) 1" in first and "3 s" in first


def _dies(rank: int, how: int) -> tuple[float, str]:
    compiled = _compiled()
    _run(compiled, times=5)
    store = c10d._get_default_store()
    if rank == 1:
        store.set("victim", str(os.getpid()))
        os.kill(os.getpid(), how)
    victim = int(store.get("victim"))
    started = time.monotonic()
    told = _told(lambda: _run(compiled, times=1000))
    seconds = time.monotonic() - started
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)  # one that was stopped would be waited for
    return seconds, told


def _shm() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_a_killed_rank_ends_the_other() -> None:
    before = _shm()
    survivor, victim = collect(_dies, 2, signal.SIGKILL)
    assert "exit code -9" in victim.error
    assert isinstance(survivor.value, tuple), survivor.error
    seconds, text = survivor.value
    assert text.startswith("PeerTimeoutError") and "rank 1" in text and seconds < TIMEOUT_S + 2
    assert not {name for name in _shm() - before if "weave" in name}


def test_a_stalled_rank_ends_the_other() -> None:
    survivor, _ = collect(_dies, 2, signal.SIGSTOP)
    assert isinstance(survivor.value, tuple), survivor.error
    seconds, text = survivor.value
    assert text.startswith("PeerTimeoutError") and "rank 1" in text and TIMEOUT_S - 1 < seconds < TIMEOUT_S + 4


def _has_no_descriptors(rank: int) -> tuple[float, str]:
    compiled = _compiled()
    _run(compiled, times=5)
    with exhausted() if rank == 0 else nullcontext():
        for step in range(4):
            time.sleep(0.2 if step % 2 == rank else 0.0)  # the other one looks meanwhile whether this one is there
            _run(compiled)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        told = _told(lambda: _run(compiled, times=1000))
        return time.monotonic() - started, told


def test_a_rank_without_descriptors_goes_on_and_hears_of_a_killed_one() -> None:
    survivor, victim = collect(_has_no_descriptors, 2)
    assert "exit code -9" in victim.error
    assert isinstance(survivor.value, tuple), survivor.error
    seconds, text = survivor.value
    assert text.startswith("PeerTimeoutError") and "peer rank 1 exited" in text and seconds < 1.0
