"""Suites of the benchmarks: what each declares, its cases without a GPU, CPU suites from end to end, and bad input."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import record, run
from benchmarks.__main__ import main
from benchmarks.ranks import Place
from benchmarks.record import Row
from benchmarks.suite import CPU, GPU, Asked, Case, Suite, UsageError, selected, words_of
from tests.house.source import ROOT
from tests.ranks import run_ranks

NUM_CASES = {
    (CPU, "all_reduce_rms_norm"): 5, (CPU, "between_hosts"): 100, (CPU, "between_hosts_calibrated"): 100,
    (CPU, "expert_prefetch"): 20, (GPU, "expert_prefetch_gpu"): 24, (GPU, "expert_pulls"): 15,
    (CPU, "generate_batch"): 2, (GPU, "generate_batch"): 6, (GPU, "generate_rollout"): 1,
    (CPU, "hosts_simulation"): 165, (CPU, "llama_hosts"): 8, (CPU, "llama_layers"): 8, (CPU, "moe_experts"): 12,
    (CPU, "moe_sharded"): 16, (CPU, "prediction"): 1, (GPU, "all_gather_gemm"): 10, (GPU, "all_reduce_rms_norm"): 32,
    (GPU, "all_reduce_host"): 5, (GPU, "all_reduce_rms_norm_ctas"): 4,
    (GPU, "all_reduce_rms_norm_shapes"): 65, (GPU, "all_reduce_sum"): 20,
    (GPU, "attention_decode"): 42, (GPU, "attention_launches"): 17, (GPU, "attention_layers"): 14,
    (GPU, "attention_tokens"): 40, (GPU, "experts_lags"): 48, (GPU, "experts_launches"): 48, (GPU, "gemm"): 20,
    (GPU, "gemm_all_reduce"): 20, (GPU, "gemm_reduce_scatter"): 20, (GPU, "generate"): 12, (GPU, "hosts_gpu"): 24,
    (GPU, "llama_layers"): 8, (GPU, "moe_blocks"): 12, (GPU, "moe_experts"): 48, (GPU, "moe_layers"): 7,
    (GPU, "moe_sharded"): 80, (GPU, "next_token"): 5, (GPU, "overlap_shapes"): 66, (GPU, "paged_attention"): 16,
    (GPU, "merged_gemm"): 45, (GPU, "paged_prompts"): 14, (GPU, "prediction"): 3,
    (GPU, "step_kernels"): 2, (GPU, "training_step"): 6, (GPU, "token_split_gpu"): 24, (CPU, "token_split_hosts"): 3,
    (CPU, "unseen_shapes"): 10, (GPU, "unseen_shapes"): 40,
}  # fmt: skip
"""Cases of a run without `--quick`, as they were measured for the result files."""


def machine_of(suite: Suite[Case]) -> str:
    return suite.needs.machines[0] if suite.needs.machines else "h200x4"


def test_suites_have_all_their_cases() -> None:
    found = {(each.needs.device, each.name): len(each.cases(Asked(machine_of(each)))) for each in run.every_suite()}
    assert found == NUM_CASES and len(run.every_suite()) == len(NUM_CASES), "names are unique on a device"


@pytest.mark.parametrize("suite", run.every_suite(), ids=lambda suite: f"{suite.needs.device}-{suite.name}")
def test_a_quick_run_has_few_cases(suite: Suite[Case]) -> None:
    cases = suite.cases(Asked(machine_of(suite), quick=True))
    assert 0 < len(cases) <= 17
    assert len({tuple(words_of(case)) for case in cases}) == len(cases)
    assert selected(cases, [" ".join(words_of(cases[0]))]) == cases[:1]
    assert suite.about and suite.ours and suite.baselines
    names = [setting.name for setting in suite.settings]
    assert len(set(names)) == len(names)
    for setting in suite.settings:
        default = setting.default
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert setting.parse(str(int(default)) if isinstance(default, bool) else text) == default


def test_results_belong_to_suites() -> None:
    """Every result file is of a suite that is there."""
    files = list((ROOT / "benchmarks" / "results").glob("*/*.json"))
    names = {suite.name for suite in run.every_suite()}
    assert len(files) >= 30
    assert {path.stem for path in files} <= names


def test_there_is_one_command_line() -> None:
    files = list((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 30
    assert [path.name for path in files if "argparse" in path.read_text()] == ["__main__.py"]


def rows_on(rank: int, name: str, world: int) -> list[Row]:
    """Rows of a quick run, in which what is compiled runs eagerly: compilers take most of a run's CPU time."""
    suite = run.suite_named(name, CPU)
    group = dist.distributed_c10d._get_default_group().group_name
    place = Place(rank, world, torch.device("cpu"), group, quick=True)
    asked = Asked("cpu", quick=True)
    with torch.compiler.set_stance("force_eager"):
        return list(run.measured(place, suite, suite.cases(asked), asked))


@pytest.mark.parametrize(
    "name", ["all_reduce_rms_norm", "llama_layers", "moe_experts", "moe_sharded", "prediction", "expert_prefetch"]
)
def test_a_suite_runs_on_cpu_ranks(name: str) -> None:
    suite = run.suite_named(name, CPU)
    world = suite.needs.worlds_of(quick=True)[0]
    found = run_ranks(rows_on, world, name, world)
    assert found[0] and all(len(rows) == len(found[0]) for rows in found)
    for row in found[0]:
        assert row.weave_us > 0 and row.ratio > 0 and row.best_baseline in row.baselines
        assert bool(suite.bound) == (row.bound_us is not None)
        if name != "prediction":
            assert set(row.baselines) == set(suite.baselines)


def test_a_run_writes_its_file_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    words = ["run", "hosts_simulation", "--machine", "gh200-infiniband"]
    assert main([*words, "--quick"]) == 0
    assert not list(tmp_path.rglob("*.json")), "a quick run writes nothing"
    assert main([*words, "--set", "kib=16,64", "--set", "hosts=2,4", "--case", "kib=64 overhead_us=0.0"]) == 0
    file = json.loads((tmp_path / "gh200-infiniband" / "hosts_simulation.json").read_text())
    assert {"suite", "machine", "host", "date", "commit", "versions", "rows"} <= set(file)
    assert [row["case"]["hosts"] for row in file["rows"]] == [2, 4]
    assert {row["case"]["kib"] for row in file["rows"]} == {64}
    told = capsys.readouterr().out
    assert "2 rows, least ratio" in told and "hosts_simulation.json" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "no_such_suite", "--machine", "x"], "found suite 'no_such_suite', expected one of all_gather_gemm"),
        (["run", "--machine", "x"], "name suites, or --all"),
        (["run", "hosts_simulation"], "arguments are required: --machine"),
        (["run", "hosts_simulation", "--machine", "x"], "needs --machine a100x4-slingshot or gh200-infiniband"),
        (["run", "llama_layers", "--device", "cpu", "--machine", "x", "--set", "layers=many"], "expected an integer"),
        (["run", "llama_layers", "--device", "cpu", "--machine", "x", "--set", "layer=1"], "has no setting layer"),
        (["run", "llama_layers", "--device", "cpu", "--machine", "x", "--set", "layers"], "expected NAME=VALUE"),
        (["run", "llama_layers", "--device", "cpu", "--machine", "x", "--set", "cases=decode"], "prefill:TOKENS or"),
        (["run", "llama_layers", "--device", "cpu", "--machine", "x", "--case", "seq=7"], "has no case 'seq=7'"),
        (["run", "llama_layers", "--device", "cpu", "--machine", "x", "--ranks", "two"], "expected numbers such as"),
        (["run", "llama_layers", "--device", "cpu", "--machine", "x", "--ranks", "1"], "cannot run with 1 rank"),
        (["run", "moe_experts", "--device", "cpu", "--machine", "x", "--set", "models=huge"], "one of wide, many"),
        (["run", "prediction", "--device", "cpu", "--machine", "x", "--set", "profile=none"], "--set profile: "),
        (["run", "--all", "--machine", "x", "--case", "seq=1"], "of suites that are named"),
        (["predict", "overlap", "--machine", "no_machine"], "--profile names another"),
        (["draw", "missing.json.gz", "--output", "x.png"], "no such file"),
        (["walk"], "invalid choice: 'walk'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message in said


def test_what_cannot_run_here_is_refused_or_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["run", "gemm_all_reduce", "--machine", "x"]) == 2
    assert capsys.readouterr().err.endswith("gemm_all_reduce needs 2 GPUs, found 1\n")
    monkeypatch.setattr(run, "run_one", lambda suite, asked: int(suite.name == "moe_experts"))
    assert main(["run", "--all", "--machine", "gh200-infiniband", "--device", "gpu", "--quick"]) == 1
    said = capsys.readouterr().out
    lines = {tuple(words[:2]): " ".join(words[2:]) for words in map(str.split, said.splitlines()) if len(words) > 3}
    assert lines["gemm_all_reduce", "gpu"] == "not run: needs 2 GPUs, found 1"
    assert lines["next_token", "gpu"] == "done in 0 s" and lines["moe_experts", "gpu"] == "failed in 0 s"
    assert lines["moe_experts", "cpu"] == "not run: needs --device cpu"
    assert "experts_lags" not in said, "by name only"


def test_every_rank_is_asked_the_same() -> None:
    """A rank's command line asks for what the run asks for."""
    asked = run.Run(("llama_layers",), Asked("m", True, {"layers": "2"}), CPU, ("a b", "c"), (2,), writes=False)
    words = asked.words("llama_layers")
    assert words[:2] == ["run", "llama_layers"] and "--quick" in words and "--no-write" in words
    assert "--set=layers=2" in words and "--case=a b" in words and "--case=c" in words


def test_filters_are_words_of_cases() -> None:
    [suite] = [each for each in run.every_suite() if each.name == "moe_sharded" and each.needs.device == GPU]
    cases = suite.cases(Asked("h200x4"))
    assert {words_of(case)[0] for case in selected(cases, ["deepseek-v3"])} == {"model=deepseek-v3"}
    assert len(selected(cases, ["model=deepseek-v3 tokens=64", "tokens=1 uniform"])) == 2 + 5
    assert selected(cases, ["deep"]) == [], "whole words"
    with pytest.raises(UsageError):
        suite.cases(Asked("h200x4", values={"tokens": "9000"}))


def test_a_suite_is_found_by_being_there() -> None:
    """Nothing names the suites but their own modules."""
    tree = ast.parse((ROOT / "benchmarks" / "run.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not texts & {name for _, name in NUM_CASES}
