"""Every code block of the README and of docs is run here, or is in a list that says why it cannot be."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.cli.test_explain_docs import SHOWN
from tests.graphs.executing import without_code
from tests.house import toys
from tests.ranks import run_ranks
from weaveopt.cli.main import main
from weaveopt.records.memory import Buffer, Lifetime

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^(?:\$ )?(?:make|pip|weaveopt|torchrun|accelerate|python3?) ")
"""How a line begins that a user types into a shell."""
RUNNABLE = re.compile(
    r"^ {4}(?:import |from \w+ import )|^ {4}(?:make|pip|weaveopt|torchrun|accelerate) ", re.MULTILINE
)


@dataclass(frozen=True)
class Item:
    """A Python block, one command of a shell block, or a block that is neither. `key`: the page and its first line."""

    page: str
    kind: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def items_of(page: str, text: str) -> Iterator[Item]:
    for language, body in FENCED.findall(text):
        lines = body.replace("\\\n", " ").splitlines()
        if language == "python":
            yield Item(page, "python", body)
        elif language in ("", "bash", "sh") and TYPED.match(lines[0]):
            for line in lines:
                if TYPED.match(line) and (line.startswith("$ ") or not lines[0].startswith("$ ")):
                    command = line.removeprefix("$ ").partition(" #")[0]
                    yield Item(page, "shell", " ".join(command.split()))
        else:
            yield Item(page, language or "text", body)


@functools.cache
def items() -> dict[str, Item]:
    found = [item for page in PAGES for item in items_of(page.name, page.read_text())]
    by_key = {item.key: item for item in found}
    assert len(by_key) == len(found), "two blocks of a page begin with the same line"
    return by_key


HOSTS = "needs several hosts: make hosts-demo starts such commands on emulated ones (tests/hosts/demo.py)"
GPUS = "needs GPUs"
LANE = "five gigabytes, and what runs this test"
NOT_RUN = {
    "README.md: make run": "minutes; tests/examples/test_examples.py runs its example with a smaller model",
    "README.md: make test": "what runs this test",
    "README.md: pip install torch==2.13.0": "hundreds of megabytes; `make test` installs the same",
    "README.md: pip install .": "tests/distribution/test_packaging.py builds the wheel, and make dist installs it",
    "README.md: pip install --no-build-isolation --no-deps .": "tests/distribution/test_packaging.py builds it so",
    "README.md: make gpu-test": GPUS,
    "README.md: make gpu-bench": GPUS,
    "README.md: accelerate launch --config_file examples/configs/accelerate_two_hosts.yaml --machine_rank 0 "
    "--main_process_ip 10.0.0.1 examples/generate.py": HOSTS,
    "continuous_batching.md: found = model.generate_batch(inputs=prompts, generation_config=config, "
    "**weaveopt.continuous_batching())": "tests/integrations/test_continuous_batching.py makes such calls",
    "continuous_batching.md: accelerate launch --config_file examples/configs/accelerate_one_host.yaml "
    "--num_processes 2 examples/rollout.py": "minutes; tests/examples/test_examples.py runs it with a smaller model",
    "small-machines.md: torchrun --nproc-per-node 4 -m weaveopt calibrate --output here.json": GPUS,
    "small-machines.md: NCCL_P2P_DISABLE=1 WEAVE_FABRICS=library python -m benchmarks run token_split_gpu "
    "--machine h100x2 --set trace=traces": GPUS,
    "expert_prefetch.md: import weaveopt": "needs a checkpoint; tests/experts/test_prefetch.py compiles such models",
    "expert_prefetch.md: weaveopt.share_experts(model)  # on all ranks; for programs in which some rank may never call "
    "the model": "needs such a model; tests/experts/test_data_parallel.py shares it",
    "explain.md: schema          2": "the JSON's fields in words: tests/docs/test_docs.py holds them",
    "fabrics.md: 50 us from host to host, 10 Gbit/s; 2 cores for all ranks": "what make hosts-demo printed",
    'gemm_all_reduce.md: {"origin": "tiles", "op": "gemm_all_reduce", "variant": "tiles norm columns=256 pairs=1 '
    'ctas=4 k=4096", "world": 2,': "a part of a profile, shortened",
    "key_heads.md: parallel = weaveopt.replicated_key_heads(checkpoint, DistributedConfig(tp_size=16))": (
        "needs 16 ranks; tests/integrations/test_key_heads.py runs it on 4"
    ),
    "machines.md: WEAVE_FABRICS=host,library NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 -m weaveopt calibrate "
    "--output no-peer.json": "measures GPUs; tests/gpu/test_host_gpu.py runs what it measures",
    "machines.md: torchrun --nproc-per-node 4 -m weaveopt calibrate": (
        "a minute of all cores; tests/cli/test_calibrate_found.py starts it with --quick"
    ),
    "machines.md: torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "-m weaveopt calibrate --device cpu --base here.json --output hosts.json": HOSTS,
    "machines.md: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "-m weaveopt calibrate --base here.json --output hosts.json": "needs GPUs of several hosts",
    "machines.md: torchrun --nproc-per-node 2 -m tests.gpu.calibrate_hosts --base h100x2 --output hosts.json": GPUS,
    "versions.md: make test VERSIONS=newest TORCH=torch==2.14.1 VENV=.venv-2.14.1": LANE,
    "versions.md: make test VERSIONS=newest PYTHON=python3.13 VENV=.venv-3.13": LANE,
    "trainer.md: model = AutoModelForCausalLM.from_pretrained(checkpoint, "
    "distributed_config=DistributedConfig(tp_size=2))": (
        "accelerate wants GPUs for tensor parallelism; tests/examples/test_examples.py runs trainer.py on CPU ranks"
    ),
}
"""Blocks and commands that no test can run on CPU ranks of one host in seconds, each with its reason."""

ON_RANKS = (
    "README.md: import torch, weaveopt",
    'README.md: model = torch.compile(model, backend="weave")',
    "generate.md: import weaveopt",
    "moe_sharded.md: import weaveopt",
)
"""Python blocks on two ranks, in this order, with the names that the ones before left."""
REFUSED = 'trainer.md: Trainer(model, TrainingArguments(torch_compile_backend="weave"))'
ACCELERATE = "trainer.md: from accelerate import Accelerator"
BUFFER = "fabrics.md: Buffer(name, num_bytes, lifetime, fill=None, alignment=256)"
RULES = tuple(
    f"adding-a-rule.md: {line}"
    for line in (
        "import functools, torch, weaveopt.backend", "class TanhMatcher:", "@dataclass(frozen=True)",
        "def memory(self, chosen, context):", "class RowHalves:", "@dataclass",
    )
)  # fmt: skip
"""Python blocks that define or make something: one process, among the names of the rules that tests define."""
PYTHON = {*ON_RANKS, REFUSED, ACCELERATE, BUFFER, *RULES}
PRINTED = {f"{page}: weaveopt {command}" for page, command, _ in SHOWN}
"""Run by tests/cli/test_explain_docs.py, which compares what they print."""
SHELL = sorted(key for key, item in items().items() if item.kind == "shell" and key not in {*NOT_RUN, *PRINTED})


def test_every_block_is_run_or_listed_with_a_reason() -> None:
    handled = {*NOT_RUN, *PRINTED, *PYTHON, *SHELL}
    unknown = sorted(set(items()) - handled)
    assert not unknown, f"neither run nor listed in NOT_RUN: {unknown}"
    gone = sorted(handled - set(items()))
    assert not gone, f"no such block any more: {gone}"
    assert not PYTHON & set(NOT_RUN)
    assert all(items()[key].kind == "python" for key in PYTHON)


def test_a_new_block_would_be_found() -> None:
    page = (
        "text\n\n```\nmake new \\\n    --all  # comment\n```\n\n```python\nnew()\n```\n\n```\n$ weaveopt x\nout\n```\n"
    )
    found = [(item.kind, item.key) for item in items_of("p.md", page)]
    assert found == [("shell", "p.md: make new --all"), ("python", "p.md: new()"), ("shell", "p.md: weaveopt x")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_could_be_run_is_fenced(page: Path) -> None:
    """Indented blocks hold formulas and trees."""
    found = RUNNABLE.search(FENCED.sub("", page.read_text()))
    assert found is None, f"{page.name}: {found and found.group()!r} stands in an indented block: fence it"


@pytest.mark.parametrize("key", SHELL)
def test_commands_run(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are typed, but `explain` looks at one layer."""
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(items()[key].text)
    assert program == "weaveopt", f"{program} is not run: a list entry is missing"
    preset = ROOT / "weaveopt" / "presets" / "llama-3.3-70b.json"
    arguments = [str(preset) if each == "path/to/config.json" else each for each in arguments]
    if "--compare" in arguments:
        assert main(["explain", "llama-3.3-70b", "--layers", "1", "--format", "json", "--output", "report.json"]) == 0
        (tmp_path / "other.json").write_text((tmp_path / "report.json").read_text())
    elif arguments[0] == "explain":
        arguments += ["--layers", "1"]
    assert main(arguments) == 0, capsys.readouterr().err
    if "--output" in arguments:
        assert (tmp_path / arguments[arguments.index("--output") + 1]).stat().st_size > 0
    else:
        assert capsys.readouterr().out.strip()


SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def _checkpoints(folder: Path) -> tuple[str, str]:
    """A dense model and a mixture. Both calls of `generate` make as many tokens: one compiled step serves them."""
    torch.manual_seed(0)
    dense, mixture = folder / "dense", folder / "mixture"
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.generation_config.max_new_tokens = 200
    model.save_pretrained(dense)
    MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)).save_pretrained(mixture)
    return str(dense), str(mixture)


def _run_on_ranks(rank: int, dense: str, mixture: str) -> str:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    names: dict[str, object] = {"checkpoint": dense, "inputs": {"input_ids": torch.tensor([[1, 2, 3, 4]])}}
    with contextlib.redirect_stdout(io.StringIO()) as printed, without_code():
        for key in ON_RANKS:
            if key.startswith("moe_sharded"):
                names |= {"checkpoint": mixture, "N": 2, "DistributedConfig": DistributedConfig}
                names["AutoModelForCausalLM"] = AutoModelForCausalLM
            exec(compile(items()[key].text, key, "exec"), names)
    return printed.getvalue()


def test_python_blocks_run_on_ranks(tmp_path: Path) -> None:
    first, other = run_ranks(_run_on_ranks, 2, *_checkpoints(tmp_path), timeout_s=240)
    for printed in (first, other):
        assert "generate: batch 1" in printed and "2 calls" in printed, printed
        assert re.search(r"[1-9]\d* rewritten", printed), printed


@pytest.mark.parametrize("key", RULES)
def test_python_blocks_on_rules_run(key: str) -> None:
    from typing import ClassVar

    from weaveopt.measure.cases.family import Family

    names = {**vars(toys), "model": torch.nn.Linear(2, 2), "ClassVar": ClassVar, "Family": Family}
    exec(compile(items()[key].text, key, "exec"), names)


def test_the_buffer_of_the_docs_is_made() -> None:
    names = {"Buffer": Buffer, "name": "rows", "num_bytes": 64, "lifetime": Lifetime.CALL}
    assert eval(items()[BUFFER].text, names) == Buffer("rows", 64, Lifetime.CALL)


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """accelerate keeps its state for the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.usefixtures("no_accelerator")
def test_what_the_docs_call_refused_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accelerate.utils import TorchDynamoPlugin
    from transformers import Trainer, TrainingArguments

    monkeypatch.chdir(tmp_path)
    names = {each.__name__: each for each in (Trainer, TrainingArguments, TorchDynamoPlugin)}
    for line in items()[REFUSED].text.splitlines():
        with pytest.raises(ValueError, match="'WEAVE' is not a valid DynamoBackend"):
            eval(line, {**names, "model": torch.nn.Linear(2, 2)})


@pytest.mark.usefixtures("no_accelerator")
def test_accelerate_takes_the_plugin() -> None:
    model = torch.nn.Linear(2, 2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 2)))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "loader": data}
    exec(compile(items()[ACCELERATE].text, ACCELERATE, "exec"), names)
    assert isinstance(names["model"], torch._dynamo.eval_frame.OptimizedModule)
