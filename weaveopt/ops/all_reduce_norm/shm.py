"""`all_reduce_norm` on the fabric `shm`: a site bound to its group's arena, and the call into native code."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NoReturn

import torch

from weaveopt.errors import AgreementError, ArenaError, PeerTimeoutError, WeaveError
from weaveopt.fabrics import shm as arena
from weaveopt.fabrics.replicated import expect_alike
from weaveopt.fabrics.shm import Arena
from weaveopt.ops.all_reduce_norm.call import AllReduceNormCall, SumOut
from weaveopt.ops.all_reduce_norm.native import native_form

try:
    from weaveopt import _native
except ImportError:  # built without it: arena.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
Product = tuple[Tensor, Tensor, Tensor | None]
"""`a`, `b` and what is added to `a @ b`."""

_names: dict[int, str] = {}
"""Tag -> site, for messages."""


class ShmSite:
    """One site, ready to run. Everything that does not change from call to call is an attribute."""

    __slots__ = (
        "_alike", "_arena", "_buffers", "_call", "_dtype", "_native", "_normed_dtype", "_scale", "_sum",
        "hidden", "max_tokens",
    )  # fmt: skip

    def __init__(self, call: AllReduceNormCall, native: _native.AllReduceNorm, memory: Arena) -> None:
        self.hidden = call.hidden
        self.max_tokens = call.max_tokens
        self._alike = False
        """Whether the ranks have been seen to hold the same residual and parameters."""
        self._call = call
        self._native = native
        self._arena = memory
        self._scale = call.scale
        self._dtype: torch.dtype = getattr(torch, call.dtype)
        self._normed_dtype: torch.dtype | None = None if call.norm is None else getattr(torch, call.out_dtype)
        self._sum = call.sum_out is not SumOut.NONE
        shape = (call.max_tokens, call.hidden)
        self._buffers = tuple(
            memory.tensor(call.partial_offset + parity * call.partial_bytes, shape, self._dtype) for parity in (0, 1)
        )

    @staticmethod
    def bind(call: AllReduceNormCall, text: str, forget: Callable[[], None]) -> ShmSite:
        """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        memory = arena.of(call.group)
        site = _native.AllReduceNormSite()
        # Of the whole call: ranks whose plans differ in anything notice it at the first meeting.
        site.tag = zlib.crc32(text.encode())
        site.hidden = call.hidden
        site.dtype = getattr(_native.DType, call.dtype)
        site.out_dtype = getattr(_native.DType, call.out_dtype)
        layout = _native.Layout()
        layout.partial_offset = call.partial_offset
        layout.partial_bytes = call.partial_bytes
        layout.output_offset = call.output_offset
        site.layout = layout
        site.max_tokens = call.max_tokens
        site.one_shot_max_tokens = call.one_shot_max_tokens
        site.post = native_form(call.post)
        site.norm = native_form(call.norm)
        site.sum_out = getattr(_native.SumOut, call.sum_out.value)
        site.timeout_s = call.timeout_s
        if len(memory.group.ranks) != call.world:
            raise ArenaError(f"site {call.site}: planned for {call.world} ranks, group has {len(memory.group.ranks)}")
        try:
            native = _native.AllReduceNorm(memory.native, site, torch.get_num_threads())
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        _names[site.tag] = call.site
        memory.at_close(forget)
        return ShmSite(call, native, memory)

    def run(
        self,
        tokens: int,
        partial: Tensor | None,
        product: Product | None,
        reduced_bias: Tensor | None,
        scale: Tensor | None,
        residual: Tensor | None,
        post_weight: Tensor | None,
        post_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The op on `tokens` rows of `partial`, or of `product`, which is then computed into the arena."""
        dtype = self._dtype
        if partial is not None:
            partial = self._activation(partial, tokens, "partial")
        if residual is not None:
            residual = self._activation(residual, tokens, "residual")
        if not self._alike:
            self._expect_alike(residual, reduced_bias, scale, post_weight, post_bias, weight, bias)
        pointers = [0] * 5
        fp32 = 0
        kept = []  # converted parameters live until the native call is over
        for index, parameter in enumerate((reduced_bias, post_weight, post_bias, weight, bias)):
            if parameter is not None:
                if parameter.dtype is not dtype or not parameter.is_contiguous() or parameter.numel() != self.hidden:
                    parameter = self._parameter(parameter)
                    kept.append(parameter)
                if parameter.dtype is torch.float32:
                    fp32 |= 1 << index
                pointers[index] = parameter.data_ptr()
        factor = self._scale if scale is None else self._scale * float(scale)
        like = residual if residual is not None else partial
        if like is None:
            like = self._buffers[0][:tokens]
        normed_dtype = self._normed_dtype
        if normed_dtype is None:
            normed = like.new_empty(0)
        else:
            normed = torch.empty_like(like) if normed_dtype is dtype else torch.empty_like(like, dtype=normed_dtype)
        out = torch.empty_like(like) if self._sum else like.new_empty(0)
        native = self._native
        if product is None:
            run = native.enter_and_run
        else:
            self._multiply(product, tokens)
            run = native.run
        code = run(
            tokens,
            torch.get_num_threads(),
            0 if partial is None else partial.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            pointers[0],
            pointers[1],
            pointers[2],
            pointers[3],
            pointers[4],
            normed.data_ptr(),
            out.data_ptr(),
            fp32,
            factor,
        )
        if code:
            self._fail(code)
        return normed, out

    def _expect_alike(self, residual: Tensor | None, *parameters: Tensor | None) -> None:
        """Once: every rank reduces its own rows with its own residual and parameters, so they must be the same."""
        call = self._call
        names = ("bias", "scale", "weight of the first norm", "bias of the first norm", "norm weight", "norm bias")
        values = [*zip(names, parameters, strict=True)]
        if not call.residual_sharded:
            values.append(("residual", residual))
        expect_alike(call.group, f"weave::all_reduce_norm at site {call.site}", values, call.timeout_s)
        self._alike = True

    def _multiply(self, product: Product, tokens: int) -> None:
        """Takes the group and computes the product into this rank's buffer of the coming epoch."""
        code = self._native.enter(tokens)
        if code:
            self._fail(code)
        try:
            out = self._buffers[self._native.next_parity][:tokens]
            a, b, addend = product
            if addend is None:
                torch.mm(a, b, out=out)
            else:
                torch.addmm(addend, a, b, out=out)
        except BaseException:
            self._native.leave()
            raise

    def _activation(self, x: Tensor, tokens: int, name: str) -> Tensor:
        if x.dtype is not self._dtype or x.numel() != tokens * self.hidden or x.shape[-1] != self.hidden:
            raise WeaveError(
                f"site {self._call.site}: {name} is {tuple(x.shape)} {x.dtype}, expected {tokens} rows of "
                f"{self.hidden} {self._dtype}"
            )
        return x if x.is_contiguous() else x.contiguous()

    def _parameter(self, x: Tensor) -> Tensor:
        if x.numel() != self.hidden:
            raise WeaveError(f"site {self._call.site}: a parameter is {tuple(x.shape)}, expected [{self.hidden}]")
        if x.dtype is not self._dtype and x.dtype is not torch.float32:
            x = x.float()
        return x.contiguous()

    def _fail(self, code: int) -> NoReturn:
        """Raises what `code`, or the first failure of the arena, stands for."""
        call, ranks, group = self._call, self._arena.group.ranks, self._arena.group
        where = f"weave::all_reduce_norm at site {call.site}, group {call.group!r}, rank {ranks[group.rank]}"
        codes = _native.Code
        if code == int(codes.BUSY):
            raise WeaveError(f"{where}: another thread runs an operation of the same group; run them one by one")
        status = self._arena.native.status
        peer = ranks[status.peer]
        expected = f"slot {status.slot}, expected epoch {status.expected}, seen {status.seen}"
        if status.code == codes.SITE_MISMATCH:
            error: WeaveError = AgreementError(
                f"{where}: runs {_describe(status.own_tag)}, but rank {peer} runs {_describe(status.peer_tag)} "
                f"({expected}): ranks of a group must make the same calls in the same order"
            )
        else:
            why = {
                codes.TIMEOUT: f"did not signal within {call.timeout_s:g} s",
                codes.PEER_EXITED: "exited",
                codes.PEER_FAILED: "gave up waiting itself",
            }[status.code]
            error = PeerTimeoutError(f"{where}: peer rank {peer} {why} ({expected})")
        if code == int(codes.POISONED):
            error = type(error)(f"{where}: the arena is unusable since an earlier call failed. {error}")
        raise error


def _describe(tag: int) -> str:
    site, tokens = tag >> 32, tag & 0xFFFFFFFF
    return f"site {_names.get(site, f'unknown here (tag {site:08x})')} with {tokens} tokens"
