"""Hugging Face's Trainer with weaveopt: the model is compiled in place before the Trainer gets it.

    torchrun --nproc-per-node 2 examples/trainer.py
    accelerate launch --config_file examples/configs/accelerate_one_host.yaml --num_processes 2 examples/trainer.py

`TrainingArguments(torch_compile_backend="weave")` is refused by accelerate, which knows a closed list of backends.
`--parallel tensor` shards the model (accelerate wants GPUs for that), `data` copies it. Exits with 1 if the loss of a
step differs from the uncompiled model's beyond rounding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.utils.logging import set_verbosity_error

import tiny_llama
import weaveopt

TOLERANCE = 1e-3


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens; every rank makes the same."""

    def __init__(self, vocabulary: int, length: int = 32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, vocabulary, (64, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make(parallel: str, hidden: int, layers: int, here: tiny_llama.Ranks) -> PreTrainedModel:
    """The same random model each time: sharded over the ranks, or whole on each of them."""
    llama = tiny_llama.config(hidden, layers, here.world)
    if parallel == "tensor":
        return tiny_llama.make(llama, torch.float32, here)
    torch.manual_seed(0)
    return LlamaForCausalLM(llama)


def losses(model: PreTrainedModel, steps: int, here: tiny_llama.Ranks) -> list[float]:
    """Trains for a few steps; the loss of each."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=here.device.type == "cpu",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(model.config.vocab_size))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.is_available()
    parser.add_argument("--parallel", choices=("tensor", "data"), default="tensor" if gpus else "data")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", default="weave")
    args = parser.parse_args()

    set_verbosity_error()
    with tiny_llama.ranks() as here:
        eager = losses(make(args.parallel, args.hidden, args.layers, here), args.steps, here)
        model = make(args.parallel, args.hidden, args.layers, here)
        model.compile(backend=args.backend)
        compiled = losses(model, args.steps, here)
        worst = max(abs(one - other) / abs(one) for one, other in zip(eager, compiled, strict=True))
        here.say(f"losses {eager} eager, {compiled} {args.backend}: largest relative difference {worst:.1e}")
        here.say(str(weaveopt.report(model)))
        return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
