"""State shared by calls of one shape: the cache, the buffers, the compiled step and its captured graphs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from weaveopt.config import Config
from weaveopt.generation.compiled_or_plain import CompiledOrPlain, one_line
from weaveopt.generation.compiling import Backend
from weaveopt.generation.loop import HostOutputs
from weaveopt.generation.masks import MaskForm
from weaveopt.generation.ranks import group_name
from weaveopt.generation.step import Buffers, ChoosingForm, Kept, chooser, run_model
from weaveopt.inductor.dynamo import forced_eager
from weaveopt.integrations.transformers.kept_managers import weights_fingerprint
from weaveopt.ops.captured_graphs import note_followed
from weaveopt.records.generation import StepReport

P = ParamSpec("P")
T = TypeVar("T")

STEPS_BEFORE_CAPTURE = 2
"""Steps of a form that run as they are: the first compiles, the second finds kernels and communicators ready."""


class GraphPool:
    """Memory that captured steps of a model share. Torch frees it with the last of them; its handle is void then."""

    def __init__(self) -> None:
        self._handle: torch.cuda._POOL_HANDLE | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def handle(self) -> torch.cuda._POOL_HANDLE:
        """The handle of the graphs that live; a new one if there are none, or after a capture that failed."""
        if self._handle is None or not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Takes a graph that was captured with the handle."""
        self._graphs.add(graph)
        note_followed(graph)

    def give_up(self) -> None:
        """Take no further graph into this memory: a capture with the handle has failed."""
        self._handle = None


@dataclass
class CapturedStep:
    """One form of choosing, and the captured step that ends with it."""

    form: ChoosingForm
    kept: Kept
    choose: CompiledOrPlain[[Tensor, Buffers, Kept], None]
    report: StepReport
    graph: torch.cuda.CUDAGraph | None = None
    num_uncaptured: int = 0


class DecodeSession:
    """Steps of one batch size and cache length. One call uses it at a time, under `lock`.

    It does not hold the model, which holds the memory of all its sessions by being the key they are kept under.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: StaticCache,
        buffers: Buffers,
        backend: Backend | None,
        with_positions: bool,
        pool: GraphPool,
        weights: int,
    ) -> None:
        self.lock = threading.Lock()
        self.weights = weights
        """Fingerprint of the weights' places that captured steps read."""
        self.cache, self.buffers, self.backend = cache, buffers, backend
        self.places = HostOutputs.make(buffers.step_output)
        self._model = weakref.ref(model)
        self._masks = mask_form(model)
        self._with_positions = with_positions
        self._pool = pool
        self._group = group_name(model)
        self._config = Config() if backend is None else backend.config()
        self._run_model = self._compiled("the step", run_model, backend, (buffers.length, buffers.positions))
        self._forms: dict[Hashable, CapturedStep] = {}

    def _compiled(
        self, what: str, function: Callable[P, T], backend: Backend | None, changed: tuple[Tensor, ...]
    ) -> CompiledOrPlain[P, T]:
        return CompiledOrPlain(what, function, backend, changed, self._group, self._config)

    @property
    def slots(self) -> int:
        return self.buffers.padding.shape[1]

    @property
    def device(self) -> torch.device:
        return self.buffers.ids.device

    @property
    def forms(self) -> tuple[CapturedStep, ...]:
        return tuple(self._forms.values())

    def begin(self, input_ids: Tensor, mask: Tensor | None, next_positions: Tensor | None) -> None:
        """Buffers as before the first token: `input_ids` `[batch, prompt]`, `mask` `[batch, past + prompt]`."""
        buffers = self.buffers
        for layer in self.cache.layers:
            # Masked keys still get a weight of 0, and 0 * NaN is NaN.
            layer.keys.zero_()
            layer.values.zero_()
        buffers.length.zero_()
        buffers.padding.fill_(True)
        if mask is not None:
            buffers.padding[:, : mask.shape[1]] = mask.bool()
        buffers.history.zero_()
        buffers.history[:, : input_ids.shape[1]] = input_ids
        buffers.count.fill_(input_ids.shape[1])
        buffers.unfinished.fill_(True)
        if next_positions is not None:
            buffers.positions.copy_(next_positions)

    def allocate(self, model: PreTrainedModel) -> None:
        """Make every layer allocate its keys and values, by running one token uncompiled.

        Only the model knows their shapes on this rank. In a compiled prefill they would be allocated while tracing.
        """
        with forced_eager():
            run_model(model, self.cache, self._masks, self.buffers, self._with_positions)

    def chosen(self, form: ChoosingForm, logits: Tensor) -> CapturedStep:
        """Return the compiled token selection for `form`, with the numbers of this call; `logits` gives shapes."""
        found = self._forms.get(form.key)
        if found is None:
            backend = self.backend.for_choosing() if self.backend else None
            changed = (self.buffers.count, self.buffers.unfinished)
            choose = self._compiled("what chooses tokens", chooser(form), backend, changed)
            report = StepReport(
                batch=self.buffers.ids.shape[0],
                cache_length=self.slots,
                choice=form.text,
                backend=self.backend.name if self.backend else "none",
                captured=False,
                not_captured="" if self.device.type == "cuda" else f"there are no graphs on {self.device.type}",
            )
            kept = Kept.make(form, logits)
            found = CapturedStep(form, kept, choose, report)
            self._forms[form.key] = found
        else:
            numbers = [number for each in form.processors for number in each.numbers]
            for place, number in zip(found.kept.numbers, numbers, strict=True):
                place.copy_(number)
        return found

    def choose(self, chosen: CapturedStep, logits: Tensor) -> None:
        if chosen.form.sampled:
            # The draw stays torch's own kernel: a seed gives the samples that `torch.multinomial` would give.
            chosen.kept.noise.exponential_()
        chosen.choose(logits, self.buffers, chosen.kept)

    def step(self, chosen: CapturedStep) -> bool:
        """Launches one step; true if it was one replay."""
        if chosen.graph is None and self._may_capture(chosen):
            self._capture(chosen)
        if chosen.graph is not None:
            chosen.graph.replay()
            return True
        self._step(chosen)
        chosen.num_uncaptured += 1
        return False

    def follow_weights(self) -> None:
        """Take the places that the weights have now for those that steps read, since compiled graphs may have moved
        weights in this call (`weaveopt/inductor/prepared_inputs.py`). Steps captured before go."""
        model = self._model()
        assert model is not None, "the session outlived its model"
        weights = weights_fingerprint(model)
        if weights != self.weights:
            self.weights = weights
            for each in self._forms.values():
                each.graph, each.num_uncaptured = None, 0

    def _step(self, chosen: CapturedStep) -> None:
        model = self._model()
        assert model is not None, "the session outlived its model"
        logits = self._run_model(model, self.cache, self._masks, self.buffers, self._with_positions)
        self.choose(chosen, logits)

    def _may_capture(self, chosen: CapturedStep) -> bool:
        return (
            self.device.type == "cuda"
            and not chosen.report.not_captured
            and chosen.num_uncaptured >= STEPS_BEFORE_CAPTURE
        )

    def _capture(self, chosen: CapturedStep) -> None:
        """Captured steps do not run; what cannot be captured keeps running as it is, and the report says why."""
        graph = torch.cuda.CUDAGraph()
        self.follow_weights()
        try:
            # Other threads (NCCL's watchdog, ours) may make CUDA calls meanwhile.
            with torch.cuda.graph(graph, pool=self._pool.handle(), capture_error_mode="thread_local"):
                self._step(chosen)
        except Exception as error:
            torch.cuda.synchronize()
            self._pool.give_up()
            chosen.report = replace(chosen.report, not_captured=one_line(error))
            return
        self._pool.add(graph)
        chosen.graph = graph
        chosen.report = replace(chosen.report, captured=True)

    def report_of(self, chosen: CapturedStep) -> StepReport:
        """Report of `chosen`, with the compile failures known so far."""
        return replace(chosen.report, not_compiled=self._run_model.failure, choosing_not_compiled=chosen.choose.failure)

    def replay_us(self, chosen: CapturedStep, length: int, num_replays: int) -> float:
        """Microseconds of a replay back to back, from `length` filled positions on. Ruins what the buffers hold.

        For benchmarks. `length + num_replays` must fit the cache.
        """
        assert chosen.graph is not None, chosen.report.not_captured
        assert length + num_replays < self.slots, f"{length} + {num_replays} positions do not fit {self.slots}"
        self.buffers.length.fill_(length)
        self.buffers.count.fill_(length)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(num_replays):
            chosen.graph.replay()
        end.record()
        while not end.query():
            time.sleep(1e-4)
        us: float = begin.elapsed_time(end) * 1e3
        return us / num_replays


def mask_form(model: PreTrainedModel) -> MaskForm:
    config = model.config.get_text_config(decoder=True)
    layer_types = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
    return MaskForm(layer_types, config._attn_implementation == "eager", model.dtype)
