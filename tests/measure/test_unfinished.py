"""Samples that a killed calibration leaves: read back, or refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from weaveopt.measure.cases.collectives import Collectives
from weaveopt.measure.cases.launch import Launches
from weaveopt.measure.clock import Sample
from weaveopt.measure.unfinished import ALONE, LONGEST_S, UnfinishedRun, _read


def test_what_was_kept_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "unfinished" / "key.pickle"
    run = _read(path)
    assert run.path == path and run.families == {}
    family = Collectives()
    run.keep(family, ALONE)
    run.keep(family, 2)
    run.keep(Launches(), ALONE)
    again = _read(path)
    known = again.known(Collectives())
    assert known == family and again.has(known, ALONE) and again.has(known, 2) and not again.has(known, 4)
    assert not again.has(Launches(), ALONE), "others need today's launches"
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing half written is left"
    again.finish()
    assert not path.exists()


def test_samples_of_another_day_are_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "key.pickle"
    _read(path).keep(Collectives(), ALONE)
    old = path.stat().st_mtime - LONGEST_S - 1.0
    os.utime(path, (old, old))
    assert _read(path) == UnfinishedRun(path)


class Evil:
    """Something that a profile's folder should never make this process run."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return print, ("run",)


@pytest.mark.parametrize(
    "text",
    [b"", b"not a pickle", pickle.dumps(Evil()), pickle.dumps({"x": ((0,), Sample(1.0, 0.1))}), pickle.dumps([1])],
)
def test_what_is_no_run_of_ours_is_measured_anew(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key.pickle"
    path.write_bytes(text)
    assert _read(path) == UnfinishedRun(path)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "measured anew" in printed.err


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    run = _read(tmp_path / "file" / "key.pickle")
    assert run.path is None
    run.keep(Collectives(), ALONE)
    lost = UnfinishedRun(tmp_path / "gone" / "key.pickle")
    lost.keep(Collectives(), ALONE)
    lost.keep(Collectives(), 2)
    assert lost.path is None and capsys.readouterr().err.count("\n") == 1
