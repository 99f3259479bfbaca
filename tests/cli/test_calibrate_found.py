"""Profiles without `--output`: where they go, that ranks use them, and what a killed run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cli.test_calibrate import run_calibrate
from tests.ranks import run_ranks
from weaveopt import cost_model
from weaveopt.cli import calibrate, doctor
from weaveopt.cli.main import main
from weaveopt.cli.progress import left_s, progress
from weaveopt.fabrics import topology, user_profiles
from weaveopt.measure.session import OVERALL
from weaveopt.pipeline.context import _measured_here

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CALIBRATE = [*LAUNCH, "-m", "weaveopt.cli.main", "calibrate", "--quick", "--device", "cpu"]
LONGEST_S = 300


def start(data: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_DATA_HOME": str(data)}
    return subprocess.Popen(
        CALIBRATE, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def few_families(folder: Path) -> tuple[str, ...]:
    """Options that leave all but two families to a profile of this host."""
    cpu = cost_model.load("cpu")
    assert cpu.wiring is not None
    here = replace(cpu, wiring=replace(cpu.wiring, processors=len(os.sched_getaffinity(0))))
    (folder / "base.json").write_text(cost_model.dumps(here))
    return ("--base", str(folder / "base.json"), "--only", "gemms", "collectives")


def test_a_killed_run_keeps_what_it_had_measured_and_two_runs_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, deadline = start(tmp_path), time.monotonic() + LONGEST_S
    unfinished = tmp_path / "weaveopt" / "unfinished"
    while not list(unfinished.glob("*.pickle")):
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert user_profiles.found() == ()
    few = few_families(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(run_calibrate, 2, "--device", "cpu", *few) for _ in range(2)]
        ended = [each.result()[0] for each in both]
    (profile,) = user_profiles.found()
    name = user_profiles.file_name(user_profiles.device_name("cpu"), True, 2)
    assert profile.path.name == name and not profile.problem
    for each in ended:
        assert each.returncode == 0, each.stderr[-3000:]
        assert f"{profile.path}: 2 ranks measured" in each.stdout
    # Whichever came first began where the killed run was; the other one too, unless that had ended.
    assert any("of a run that was killed" in each.stderr for each in ended)
    assert list(unfinished.iterdir()) == [], "runs that end leave nothing"
    assert {path.name for path in profile.path.parent.iterdir()} == {name}
    doctor.run("table")
    told = capsys.readouterr().out
    assert name in told and "0 days old" in told and "measured here: " in told


def _chosen(rank: int, folders: tuple[str, ...]) -> tuple[str | None, str]:
    os.environ["XDG_DATA_HOME"] = folders[rank]
    group = str(dist.distributed_c10d._get_default_group().group_name)
    found = _measured_here({group: topology.discover(group, 60.0)}, "cpu", 2)
    return None if found.machine is None else found.machine.name, found.note


def test_ranks_use_it_where_all_of_them_have_the_same(tmp_path: Path) -> None:
    cpu, name = cost_model.load("cpu"), user_profiles.file_name(user_profiles.device_name("cpu"), True, 2)
    for word, error in (("a", 0.06), ("b", 0.06), ("c", 0.07)):
        folder = tmp_path / word / "weaveopt" / "profiles"
        folder.mkdir(parents=True)
        (folder / name).write_text(cost_model.dumps(replace(cpu, name="own", relative_error=error)))
    a, b, c, none = (str(tmp_path / word) for word in "abcd")
    assert run_ranks(_chosen, 2, (a, b)) == [("own", "")] * 2
    for others in ((a, c), (none, a)):
        for machine, note in run_ranks(_chosen, 2, others):
            assert machine is None and name in note and "the shipped one is used" in note
    assert run_ranks(_chosen, 2, (none, none)) == [(None, "")] * 2


def test_a_data_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert main(["calibrate", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is not writable: name a file with --output FILE" in error


def test_without_a_terminal_a_line_a_kind_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert left_s(0.0, 30.0, 0, 4) is None and left_s(0.0, 30.0, 3, 4) == 10.0
    with progress(True) as show:
        show(OVERALL, 0, 4)
        show("launches", 0, 1)
        show(OVERALL, 2, 4)
        show("GEMMs", 0, 9)
        show("GEMMs", 1, 9)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "weaveopt: measuring launches (0 of 4)"
    assert second.startswith("weaveopt: measuring GEMMs (2 of 4, about ") and second.endswith(" s left)")
    with progress(False) as show:
        show(OVERALL, 0, 4)
    assert capsys.readouterr().err == ""


def test_what_was_measured_is_written_where_no_profile_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that lacks one that it needs cannot be imported; that costs the look at the file alone."""
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    machine, output = cost_model.load("cpu"), tmp_path / "here.json"
    calibrate._write(machine, output)
    assert output.read_text(encoding="utf-8") == cost_model.dumps(machine)
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]
