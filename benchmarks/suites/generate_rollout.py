"""Rollouts with `generate_batch`: requests whose answers differ in length, as those of sampling with an end do.

Prompts are as long as one another but for a few tokens; lengths of answers are log-normal, the same for all ways, and
enforced, so that all ways do the same work. A time is that of a whole call, transformers' warm-up in it, divided by the
tokens that were generated: microseconds a token. Ways take turns; the first turn compiles, with short answers, and does
not count. `steps`: passes of transformers' loop. The models, ways and pages are those of `generate_batch`.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from benchmarks import record
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.suites import generate_batch

BASELINES = generate_batch.BASELINES[GPU]
REQUESTS = Setting("requests", (256,), quick=(16,))
MODELS = Setting("models", ("8b",))
LAYERS = Setting("layers", 0, "at most so many (default: all that the model has)", quick=2)
PROMPT = Setting("prompt", 128)
MEDIAN = Setting("median", 400, "of the tokens of an answer", quick=8)
SIGMA = Setting("sigma", 0.7, "standard deviation of their logarithm")
PAGES = Setting("pages", 1024, "of the cache, of 256 tokens each")
WAYS = Setting("ways", BASELINES, among=BASELINES)
ROUNDS = Setting("rounds", 1)
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Case:
    model: str
    requests: int


def lengths_of(requests: int, median: int, sigma: float) -> list[int]:
    """Tokens of each answer: log-normal, at least one."""
    draw = random.Random(0)
    return [max(1, round(math.exp(draw.gauss(math.log(median), sigma)))) for _ in range(requests)]


@contextmanager
def answers_of(lengths: Mapping[tuple[int, ...], int]) -> Iterator[None]:
    """The length of the answer to each prompt, in place of the one that the call names."""
    own: Callable[..., str | None] = ContinuousBatchingManager.add_request

    @functools.wraps(own)
    def add_request(
        self: object, input_ids: Sequence[int], request_id: str | None = None, max_new_tokens: int | None = None,
        **kwargs: object,
    ) -> str | None:  # fmt: skip
        return own(self, input_ids, request_id, max_new_tokens=lengths[tuple(input_ids)], **kwargs)

    ContinuousBatchingManager.add_request = add_request
    try:
        yield
    finally:
        ContinuousBatchingManager.add_request = own


def call(
    model: PreTrainedModel, prompts: list[list[int]], lengths: Sequence[int], way: str, paged: tuple[int, int, int]
) -> tuple[float, int]:
    """Seconds of one call, and passes of its loop."""
    longest = max(lengths)
    how = GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=0, eos_token_id=-1)
    known = {tuple(prompt): length for prompt, length in zip(prompts, lengths, strict=True)}
    barrier()
    begin = perf_counter()
    with answers_of(known), generate_batch.timed_passes() as (ends, _):
        found = model.generate_batch(
            inputs=prompts, generation_config=how, progress_bar=False,
            continuous_batching_config=generate_batch.batching(way, paged),
        )  # fmt: skip
    taken_s = perf_counter() - begin
    got = [len(each.generated_tokens) for each in found.values()]
    assert got == list(lengths), f"{way}: answers of {got[:4]}... tokens, expected {lengths[:4]}..."
    return taken_s, len(ends)


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    torch._dynamo.reset()
    ways = (*asked.of(WAYS), "weave")
    for case in cases:
        page, _, tokens = generate_batch.PAGES[case.model]
        model = generate_batch.make(place, case.model, asked.of(LAYERS))
        prompts = generate_batch.prompts(model, case.requests, asked.of(PROMPT))
        lengths = lengths_of(case.requests, asked.of(MEDIAN), asked.of(SIGMA))
        paged = (page, asked.of(PAGES), tokens)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        steps: dict[str, int] = {}
        for turn in range(asked.of(ROUNDS) + 1):
            for way in ways:
                answers = lengths if turn else [WARM_UP_TOKENS] * case.requests
                seconds, steps[way] = call(model, prompts, answers, way, paged)
                place.say(f"  {way}: {seconds:.1f} s, {steps[way]} passes")
                if turn:
                    taken[way].append(seconds)
        total = sum(lengths)
        us = dict(zip(ways, slowest([statistics.median(taken[way]) * 1e6 / total for way in ways]), strict=True))
        yield record.row(
            case={"model": case.model, "layers": model.config.num_hidden_layers, "ranks": place.world,
                  "requests": case.requests},
            weave_us=us["weave"],
            baselines={way: us[way] for way in ways if way != "weave"},
            parameters={"prompt": asked.of(PROMPT), "tokens": total, "longest": max(lengths),
                        "median": asked.of(MEDIAN), "sigma": asked.of(SIGMA), "pages": asked.of(PAGES),
                        "steps": generate_batch.named(steps)},
        )  # fmt: skip


SUITES = (
    Suite(
        "generate_rollout", "a token of `generate_batch` with answers of log-normal length", Needs(GPU, 2, worlds=(2,)),
        lambda asked: product(Case, asked.of(MODELS), asked.of(REQUESTS)), rows, ours=("weave",), baselines=BASELINES,
        settings=(MODELS, REQUESTS, LAYERS, PROMPT, MEDIAN, SIGMA, PAGES, WAYS, ROUNDS),
    ),
)  # fmt: skip
