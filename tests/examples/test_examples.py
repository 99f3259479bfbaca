"""The examples and launch configurations, as the README starts them, on two CPU ranks."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weaveopt
from tests.graphs.executing import without_code
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"
LIMIT_S = 240


def launch(*command: str) -> str:
    """Runs `python -m <command>` and returns what it prints; fails with all of it if the command does."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _run(rank: int, example: str, arguments: tuple[str, ...], codeless: bool = False) -> tuple[object, str]:
    """How an example ends on a rank, and what it prints. `codeless`: Inductor writes no code for its graphs."""
    sys.argv = [example, *arguments]
    sys.path.insert(0, str(ROOT / "examples"))
    code = without_code() if codeless else contextlib.nullcontext()
    with code, contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return ended.value.code, printed.getvalue()


def test_generate_agrees_with_eager_and_reports_what_it_rewrote() -> None:
    """On forked ranks, which have loaded torch already: tests/hosts/test_demo.py launches it."""
    shape = ("--hidden", "128", "--layers", "1", "--new-tokens", "8", "--rounds", "0")
    (code, found), (other, _) = run_ranks(_run, 2, "generate.py", shape, True, timeout_s=LIMIT_S, grouped=False)
    assert code == other == 0, found
    assert "tokens agree with eager" in found
    assert "all_reduce_rms_norm" in found and "decode" in found


def test_train_step_has_eagers_gradients() -> None:
    """On forked ranks too."""
    arguments = ("--hidden", "64", "--layers", "1", "--rounds", "1")
    (code, found), (other, _) = run_ranks(_run, 2, "train_step.py", arguments, True, timeout_s=LIMIT_S, grouped=False)
    assert code == other == 0, found
    assert "rank 0: loss" in found and "rank 1: loss" in found and "a step: eager" in found
    assert "forward" in found and "backward" in found


def test_rollout_compiles_once_and_ranks_sample_the_same_tokens() -> None:
    """On forked ranks too."""
    shape = ("--hidden", "64", "--layers", "1", "--prompts", "2", "--new-tokens", "4", "--rounds", "2")
    (code, found), (other, _) = run_ranks(_run, 2, "rollout.py", shape, True, timeout_s=LIMIT_S, grouped=False)
    assert code == other == 0, found
    assert "round 1: mean reward" in found and "policy-gradient step" in found
    assert "all_reduce_rms_norm" in found and "graphs that all rounds ran: 1\n" in found


def test_trainer_has_eagers_losses() -> None:
    """On forked ranks too."""
    arguments = ("--hidden", "64", "--layers", "1", "--steps", "2")
    (code, found), (other, _) = run_ranks(_run, 2, "trainer.py", arguments, timeout_s=LIMIT_S, grouped=False)
    assert code == other == 0, found
    assert "largest relative difference" in found and "forward" in found and "backward" in found


def test_hand_written_block_is_rewritten() -> None:
    """On forked ranks too."""
    (code, found), (other, _) = run_ranks(_run, 2, "hand_written.py", (), timeout_s=LIMIT_S, grouped=False)
    assert code == other == 0, found
    assert found.count("1 rewritten") == 2, found


def test_accelerate_refuses_the_backends_name() -> None:
    """The README's first trap. If this fails, accelerate has opened its list, and the README can say so."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--dynamo_backend", "weave", "examples/generate.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "invalid choice: 'weave'" in done.stderr


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    """A program whose ranks only add up to their number."""
    script = tmp_path / "meet.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "sys.stdout.write(f'ranks met: {int(total)}\\n')\n"
        "dist.destroy_process_group()\n"
    )
    return str(script)


def test_ranks_of_one_host_meet(meeting: str) -> None:
    found = launch(
        "accelerate.commands.launch", "--config_file", str(CONFIGS / "accelerate_one_host.yaml"),
        "--num_processes", "2", "--main_process_port", "0", meeting,
    )  # fmt: skip
    assert found.count("ranks met: 2") == 2, found


def test_two_hosts_meet(meeting: str) -> None:
    """Both halves of the two-host configuration on this host, one rank each."""
    port = free_port()
    halves = [
        subprocess.Popen(
            [
                sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                str(CONFIGS / "accelerate_two_hosts.yaml"), "--num_processes", "2", "--machine_rank", str(host),
                "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), meeting,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in (0, 1)
    ]  # fmt: skip
    try:
        printed = [half.communicate(timeout=LIMIT_S)[0] for half in halves]
    finally:
        for half in halves:
            half.kill()
    assert [half.returncode for half in halves] == [0, 0], printed
    assert all("ranks met: 2" in text for text in printed), printed


@pytest.mark.parametrize(
    "name", ["generate.py", "train_step.py", "trainer.py", "hand_written.py", "score.py", "rollout.py"]
)
def test_examples_have_a_main(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert "def main() -> int:" in text and "sys.exit(main())" in text


def test_generate_says_so_where_the_step_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary embedding that looks at the length, and a model without a static cache."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = runpy.run_path(str(ROOT / "examples" / "generate.py"))
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=64, eos_token_id=None, rope_parameters=rope)
    prompt = torch.ones(1, 4, dtype=torch.long)
    for has_static_cache in (True, False):
        model = LlamaForCausalLM(config).eval()
        monkeypatch.setattr(LlamaForCausalLM, "_can_compile_fullgraph", has_static_cache)
        eager, woven = (example["generate"](model, prompt, 5, backend) for backend in (None, "weave"))
        assert example["difference"](eager, woven, 1e-3) is None
        assert "transformers' own loop" in example["host_share"](model, prompt, 5, 1.0)
        assert "rope: rotary embedding dynamic" in str(weaveopt.report(model))


def test_score_needs_no_dummy_call() -> None:
    """401 documents of other lengths on two ranks: 201 and 200 calls. One document: the second rank has none."""
    for count, first, second in ((401, 201, 200), (1, 1, 0)):
        shape = ("--hidden", "32", "--layers", "1", "--median", "12", "--documents", str(count))
        (code, found), (other, _) = run_ranks(
            _run, 2, "score.py", ("--backend", "eager", *shape), timeout_s=LIMIT_S, grouped=False
        )
        assert code == other == 0, found
        assert f"{count} of {count} documents scored (rank 0: {first} in" in found and f"rank 1: {second} in" in found
