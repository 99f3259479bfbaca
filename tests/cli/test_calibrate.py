"""`weaveopt calibrate`: a coarse look on two CPU ranks, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.graphs.preview import without_sensitivity
from tests.ranks import collect, run_ranks
from weaveopt import cost_model
from weaveopt.cli import calibrate
from weaveopt.cli.calibrate import NO_MULTICAST
from weaveopt.cli.main import main
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.measure import suite
from weaveopt.ops.reduction.prices.estimate import estimate_fused, estimate_unfused
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Fabric


@dataclass(frozen=True)
class Done:
    """How the command ended on a rank."""

    returncode: int
    stdout: str
    stderr: str


def _calibrate(rank: int, arguments: tuple[str, ...], hosts: bool, num_gpus: int | None) -> Done:
    if hosts:  # each rank takes itself for a host of its own
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", WEAVE_HOST=f"host{rank}")
    if num_gpus is not None:  # started without a launcher
        for name in calibrate.LAUNCHED:
            del os.environ[name]
        calibrate._num_gpus = lambda: num_gpus
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["calibrate", "--quick", *arguments])
    return Done(code, out.getvalue(), err.getvalue())


def run_calibrate(world: int, *arguments: str, hosts: bool = False, num_gpus: int | None = None) -> list[Done]:
    """On forked ranks, which have loaded torch already: `torchrun` starts them in test_calibrate_found.py."""
    return run_ranks(_calibrate, world, arguments, hosts, num_gpus, timeout_s=300, grouped=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of this host that holds groups of up to 4 ranks."""
    cpu = cost_model.load("cpu")
    assert cpu.wiring is not None
    path = tmp_path_factory.mktemp("base") / "four.json"
    here = replace(cpu.wiring, processors=len(os.sched_getaffinity(0)))
    path.write_text(cost_model.dumps(replace(cpu, name="four", wiring=here)))
    return path


@pytest.fixture(scope="module")
def profile(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "here.json"
    done, _ = run_calibrate(2, "--device", "cpu", "--output", str(path), "--base", str(base))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks measured" in done.stdout and "measuring GEMMs bfloat16" in done.stderr
    assert f"kept from {base}: " in done.stdout and "library.all_reduce of 4" in done.stdout
    assert "of 2" not in done.stdout.partition("kept")[2]
    return path


def test_the_profile_tells_of_everything_where_it_comes_from(profile: Path) -> None:
    assert [path.name for path in profile.parent.iterdir()] == ["here.json"], "nothing unfinished is left"
    machine = cost_model.load(str(profile))
    assert machine.name == "here" and machine.device == "cpu"
    assert {fabric.value for fabric in machine.fabrics} == {"library", "shm", "tcp"}
    kinds = {name: origin.kind for name, origin in machine.origins}
    assert kinds.pop("between") == kinds.pop("compiled") == "estimate" and set(kinds.values()) == {"measured"}
    assert machine.compiled == cost_model.load("cpu").compiled
    spreads = {name: origin.spread for name, origin in machine.origins}
    assert all(spreads[name] is not None for name in ("fused", "gloo", "memory", "gemms.bfloat16"))
    assert machine.launch is not None and machine.wiring is not None
    assert machine.wiring.processors == len(os.sched_getaffinity(0))


def test_the_profile_predicts(profile: Path) -> None:
    machine = cost_model.load(str(profile))
    small, large = (cost_model.gemm_us(machine, cost_model.Gemm(m, 1024, 1024), "bfloat16") for m in (8, 1024))
    assert 1 < small < large
    workload = Workload(64, 64, 4096, "bfloat16", 2)
    unfused = estimate_unfused(machine, workload)
    fused = estimate_fused(machine, workload, Fabric.SHM, Algorithm.TWO_SHOT)
    assert fused.us > 0 and unfused.us > fused.error_us
    assert cost_model.collective_us(machine, "all_gather", 1 << 20, 2) > 0


def test_explain_takes_the_profile(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", "llama-3.3-70b", "--tp", "2", "--layers", "1", "--machine", str(profile), "--format", "json"]
    with without_sensitivity():
        assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["name"] == "here"


def test_a_base_keeps_the_groups_that_two_ranks_cannot_measure(profile: Path, base: Path) -> None:
    four, machine = cost_model.load(str(base)), cost_model.load(str(profile))
    named, before = dict(machine.origins), dict(four.origins)
    for costs, theirs in zip(machine.fabric_costs, four.fabric_costs, strict=True):
        op = "all_reduce_norm" if costs.fabric is Fabric.SHM else "all_reduce"
        curves = costs.curves_of(op)
        kept = [curve for curve in theirs.curves_of(op) if curve.world > 2]
        assert [curve.world for curve in curves] == sorted(curve.world for curve in curves)
        assert {curve.world for curve in curves} == {2, 3, 4}
        assert [curve.points for curve in curves if curve.world > 2] == [curve.points for curve in kept]
        old, today = before[kept[0].origin], named[curves[0].origin]
        assert all(named[curve.origin] == old for curve in curves if curve.world > 2)
        assert today != old and today.kind == "measured" and today.spread is not None
    assert named[machine.memory.origin] != before[four.memory.origin], "measured anew"


def test_single_families_renew_their_own_curves_alone(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    asked = ("--device", "cpu", "--output", str(path), "--base", str(base), "--only", "reduce_scatters")
    for done in run_calibrate(2, *asked):
        assert done.returncode == 0, done.stderr[-3000:]
    four, machine = cost_model.load(str(base)), cost_model.load(str(path))
    assert machine.memory.points == four.memory.points and len(machine.gemms) == len(four.gemms)
    known = {curve.points for costs in four.fabric_costs for curve in costs.curves}
    renewed = {
        (costs.fabric, curve.op, curve.world)
        for costs in machine.fabric_costs
        for curve in costs.curves
        if curve.points not in known
    }
    assert renewed == {(Fabric.SHM, "reduce_scatter", 2)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "gemms"], "name the profile to renew with --base"),
        (["--only", "gemms", "nothing", "--base", "cpu"], "--only nothing: on cpu ranks there are launches, gemms, "),
    ],
)
def test_families_that_cannot_be_measured_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **NO_MULTICAST}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    here = replace(cost_model.load("cpu"), wiring=None)
    (tmp_path / "cpu.json").write_text(cost_model.dumps(here))
    arguments = ["cpu.json" if each == "cpu" else each for each in arguments]
    assert main(["calibrate", "--device", "cpu", *arguments, "--output", "new.json"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("nope", "--base nope: machine 'nope': neither a shipped profile nor a JSON file"),
        ("h200x4", "--base h200x4: a profile of cuda ranks, but this run measures cpu ranks"),
        ("other.json", "measured with 4096 cores"),
        ("broken.json", "not JSON"),
    ],
)
def test_bases_that_cannot_be_renewed_here_are_refused(
    base: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = cost_model.load("cpu")
    assert cpu.wiring is not None
    (tmp_path / "other.json").write_text(cost_model.dumps(replace(cpu, wiring=replace(cpu.wiring, processors=4096))))
    (tmp_path / "broken.json").write_text("{")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **NO_MULTICAST}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--device", "cpu", "--base", base, "--output", "new.json"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
    assert not (tmp_path / "new.json").exists()


def test_ranks_of_two_hosts_measure_the_link_between_them(tmp_path: Path) -> None:
    before = cost_model.load("cpu")
    assert before.wiring is not None
    here = replace(before, wiring=replace(before.wiring, processors=len(os.sched_getaffinity(0))))
    (tmp_path / "one.json").write_text(cost_model.dumps(here))
    base, output = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    done = run_calibrate(2, "--device", "cpu", "--base", base, "--output", output, hosts=True)
    for each in done:
        assert each.returncode == 0, each.stderr[-3000:]
    assert "2 ranks measured" in done[0].stdout
    assert f"the link between 2 hosts, all else kept from {base}" in done[0].stdout
    machine = cost_model.load(str(tmp_path / "two.json"))
    origins = dict(machine.origins)
    link, library = machine.inter_host, fabric_costs(machine, Fabric.LIBRARY).inter_host
    assert library is not None and origins[link.origin].kind == origins[library.origin].kind == "measured"
    # Of the loopback of a machine that does other things too: no more than that it is one.
    assert 0 < link.latency_us < 5e3 and 0 < link.overhead_us < 1e3 and 1e6 < link.bytes_per_s < 1e12
    assert machine.gemms == here.gemms and machine.memory == here.memory


def test_ranks_of_two_hosts_need_the_profile_of_one(tmp_path: Path) -> None:
    for each in run_calibrate(2, "--device", "cpu", "--output", str(tmp_path / "two.json"), hosts=True):
        assert each.returncode == 2 and "calibrate on one host first, then here with --base FILE" in each.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_process_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless it has the only GPU of the host, and is not asked for CPU ranks."""
    command = ["calibrate", "--output", str(tmp_path / "a.json")]
    for num_gpus, device in ((0, "auto"), (4, "auto"), (1, "cpu")):
        monkeypatch.setattr(calibrate, "_num_gpus", lambda count=num_gpus: count)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        assert main([*command, "--device", device]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "torchrun --nproc-per-node" in error and "RANK is not set" in error
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        assert main([*command, "--device", device]) == 2
        assert "WORLD_SIZE is 1" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(command) == 2
    assert "WORLD_SIZE is 'two', expected a number" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(command) == 2
    assert "RANK is not set" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_only_gpu_of_a_host_is_measured_alone(tmp_path: Path) -> None:
    """Here a CPU rank stands in for it. What rests on peers is not measured, and so not chosen."""
    (done,) = run_calibrate(1, "--output", str(tmp_path / "alone.json"), num_gpus=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 rank measured" in done.stdout
    machine = cost_model.load(str(tmp_path / "alone.json"))
    assert Fabric.SHM not in machine.fabrics and not fabric_costs(machine, Fabric.LIBRARY).curves
    kinds = {name: origin.kind for name, origin in machine.origins}
    assert kinds["ranks"] == "estimate" and machine.gemms and kinds[machine.gemms[0].origin] == "measured"
    asked = ["explain", "llama-3.3-70b", "--layers", "1", "--tokens", "64", "--tp", "1", "--machine"]
    assert main([*asked, str(tmp_path / "alone.json")]) == 0


def _abandoned(rank: int, output: str) -> Done:
    """The last rank ends where ranks begin to measure."""

    def measuring(*_: object) -> object:
        if rank:
            os._exit(0)
        dist.barrier()
        raise AssertionError("the barrier was passed")

    suite.measure = measuring  # type: ignore[assignment]
    return _calibrate(rank, ("--device", "cpu", "--output", output), hosts=False, num_gpus=None)


def test_a_rank_that_is_lost_is_one_line(tmp_path: Path) -> None:
    left, lost = collect(_abandoned, 2, str(tmp_path / "profile.json"), timeout_s=60, grouped=False)
    assert "exit code 0" in lost.error and isinstance(left.value, Done), left.error
    said = [line for line in left.value.stderr.splitlines() if "error" in line]
    assert left.value.returncode == 2 and len(said) == 1 and "Traceback" not in left.value.stderr, left.value
    assert said[0].startswith("weaveopt: error: calibrate: another rank ended, or did not answer")
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["calibrate", "--output", str(tmp_path / "none" / "a.json")]) == 2
    assert "no directory" in capsys.readouterr().err
    assert main(["calibrate", "--output", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
