"""`fpemu.quantize` as torch operators: compiled graphs, fake tensors, gradients, vmap.

Three operators in torch's registry, none of which holds arithmetic of its own:

=========================== ===================================================================
``fpemu::quantize``         a pure function of its arguments
``fpemu::quantize_seeded``  stochastic rounding whose seed is drawn, when it runs, from torch's
                            generator; tagged so that no compiler merges or folds two calls
``fpemu::within``           where the value that is cast lies in ±max: the gradient's mask
=========================== ===================================================================

They are registered through `torch.library.Library`; the decorator costs 27 us a call more.
"""

from __future__ import annotations

from ast import literal_eval
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fpemu import ops
from fpemu.backends import FLOAT_KINDS, element_format
from fpemu.casting import check_rounding, resolve_overflow
from fpemu.errors import unknown
from fpemu.formats import BlockFormat, Format, get_format

STE_NAMES = ("clip", "full")

# Arguments that an operator can carry -------------------------------------------------------------


def _spell(fmt: Any) -> Any:
    """A format as plain constants: a name stays, a row becomes the tuple of its fields."""
    if isinstance(fmt, Format):
        return (
            fmt.name, fmt.exp_bits, fmt.man_bits, fmt.bias, fmt.special, fmt.signed, fmt.has_zero,
            fmt.overflow, fmt.source,
        )  # fmt: skip
    if isinstance(fmt, BlockFormat):
        element, scale = _spell(fmt.element), _spell(fmt.scale)
        rest = (fmt.rule, fmt.tensor_scaled, fmt.rounding, fmt.decode, fmt.source)
        return (fmt.name, element, fmt.block, scale, *rest)
    return fmt


@lru_cache(maxsize=256)
def _read(text: str) -> Format | BlockFormat:
    """The row that ``repr(_spell(fmt))`` stands for."""
    row = literal_eval(text)
    if not isinstance(row, tuple):
        return get_format(row, "quantize")
    if not isinstance(row[1], tuple):
        return Format(*row)
    name, element, block, scale, *rest = row
    scale_row = None if scale is None else Format(*scale)
    return BlockFormat(name, Format(*element), block, scale_row, *rest)


def _offset(flat: list[int]) -> Any:
    """An offset or ``(global_shape, start)`` from the operator's list of integers."""
    if len(flat) == 1:
        return flat[0]
    return tuple(flat[: len(flat) // 2]), tuple(flat[len(flat) // 2 :])


# Operators ---------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("fpemu", "DEF")
_HEAD = "Tensor x, str fmt, str rounding, str? overflow, int axis, Tensor? amax"
_TAIL = (
    "SymInt stream, SymInt[] offset, int sr_bits, Tensor? random_bits, str ste,"
    " ScalarType? dtype, str? backend"
)
_PT2 = torch.Tag.pt2_compliant_tag
_LIBRARY.define(f"quantize({_HEAD}, SymInt seed, {_TAIL}) -> Tensor", tags=(_PT2,))
_LIBRARY.define(
    f"quantize_seeded({_HEAD}, {_TAIL}) -> Tensor",
    tags=(_PT2, torch.Tag.nondeterministic_seeded),
)
_LIBRARY.define(
    "within(Tensor x, str fmt, int axis, Tensor? amax, str? backend) -> Tensor", tags=(_PT2,)
)


def _quantize(
    x: Tensor, fmt: str, rounding: str, overflow: str | None, axis: int, amax: Tensor | None,
    seed: int | None, stream: int, offset: list[int], sr_bits: int, random_bits: Tensor | None,
    ste: str, dtype: torch.dtype | None, backend: str | None,
) -> Tensor:  # fmt: skip
    request, box = ops._request(
        "quantize", x, _read(fmt), rounding, overflow, axis, amax, seed, stream, _offset(offset),
        sr_bits, random_bits,
    )  # fmt: skip
    return box.quantized(request, dtype, None, backend)


def _quantize_seeded(
    x: Tensor, fmt: str, rounding: str, overflow: str | None, axis: int, amax: Tensor | None,
    *rest: Any,
) -> Tensor:  # fmt: skip
    return _quantize(x, fmt, rounding, overflow, axis, amax, None, *rest)


def _within(
    x: Tensor, fmt: str, axis: int, amax: Tensor | None, backend: str | None
) -> Tensor:  # fmt: skip
    request, box = ops._request(
        "quantize", x, _read(fmt), "rne", None, axis, amax, None, 0, 0, 32, None
    )
    assert isinstance(box, ops._TorchBox)
    name, module = ops._choose(request, backend, box.on_cpu)
    if name in ops.ON_TENSORS:
        return ops.quantizing(name, module).within(request)
    return torch.from_numpy(module.within(box._to_host(request)))


def _fake_quantize(
    x: Tensor, fmt: str, rounding: str, overflow: str | None, axis: int, amax: Tensor | None,
    *rest: Any,
) -> Tensor:  # fmt: skip
    """Shape and dtype of the result, and every check that needs no data."""
    dtype = rest[-2]
    box, row = ops._TorchBox(x, torch, "quantize"), _read(fmt)
    check_rounding(rounding, "quantize")
    resolve_overflow(element_format(row), overflow, "quantize")
    ops._axis(axis, x.dim(), row, "quantize")
    default = x.dtype if box.kind in FLOAT_KINDS else torch.float32
    return torch.empty_like(x, dtype=dtype or default)


def _fake_within(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


# Gradient ----------------------------------------------------------------------------------------


class _StraightThrough(torch.autograd.Function):
    """y and the mask of the gradient (None for ``ste="full"``).

    The mask takes one byte an element; x itself may be freed, or changed in place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        fmt, _, _, axis, amax = rest[:5]
        ste, _, backend = rest[-3:]
        y = op(x, *rest)
        return y, torch.ops.fpemu.within(x, fmt, axis, amax, backend) if ste == "clip" else None

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
    ) -> None:
        y, mask = output
        ctx.dtype, ctx.count = y.dtype, len(inputs)
        if mask is not None:
            ctx.mark_non_differentiable(mask)
            ctx.save_for_backward(mask)
            ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return None, _masked(ctx, grad), *(None,) * (ctx.count - 2)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> tuple[Tensor, None]:
        return _masked(ctx, tangent).to(ctx.dtype), None


def _masked(ctx: Any, gradient: Tensor) -> Tensor:
    for mask in ctx.saved_tensors:
        gradient = torch.where(mask, gradient, 0)
    return gradient


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def _differentiable(op: Any) -> Any:
    """Autograd kernel of an operator."""

    def kernel(x: Tensor, *rest: Any) -> Tensor:
        if (x.requires_grad and torch.is_grad_enabled()) or _forward_mode():
            return _StraightThrough.apply(op, x, *rest)[0]
        with torch._C._AutoDispatchBelowAutograd():
            return op(x, *rest)

    return kernel


# vmap --------------------------------------------------------------------------------------------


def _over_batch(op: Any) -> Any:
    """Batching rule: one call per sample, since block axes, tensor scales and random words belong
    to the sample."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        seeded = op is torch.ops.fpemu.quantize_seeded
        if seeded and info.randomness == "error":
            raise RuntimeError(
                "quantize: stochastic rounding without a seed under vmap with randomness='error';"
                " allowed are 'different' and 'same'. Pass seed=, or randomness to vmap."
            )
        samples = []
        state = torch.get_rng_state() if seeded and info.randomness == "same" else None
        for k in range(info.batch_size):
            if state is not None:
                torch.set_rng_state(state)
            one = (
                a.select(d, k) if isinstance(d, int) else a
                for a, d in zip(args, in_dims, strict=True)
            )  # fmt: skip
            samples.append(op(*one))
        return torch.stack(samples), 0

    return rule


for _name, _real, _fake in (
    ("quantize", _quantize, _fake_quantize),
    ("quantize_seeded", _quantize_seeded, _fake_quantize),
    ("within", _within, _fake_within),
):
    _op = getattr(torch.ops.fpemu, _name)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fpemu::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_vmap(f"fpemu::{_name}", _over_batch(_op), lib=_LIBRARY)
    if _name != "within":
        _LIBRARY.impl(_name, _differentiable(_op), "Autograd")

# The entry ---------------------------------------------------------------------------------------


def needs_op(x: Tensor) -> bool:
    """Whether something watches this call (a compiler, autograd, a transform or a tracing mode),
    so that it must go through torch's dispatcher."""
    return (
        torch.compiler.is_compiling()
        or (x.requires_grad and torch.is_grad_enabled())
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or _forward_mode()
    )


def quantize(
    x: Tensor, fmt: str | Format | BlockFormat, rounding: str, overflow: str | None, axis: int,
    amax: Any, seed: int | None, stream: int, offset: Any, sr_bits: int, random_bits: Any,
    ste: str, dtype: Any, backend: str | None,
) -> Tensor:  # fmt: skip
    """`fpemu.quantize` through the dispatcher; the arguments are its arguments, unchecked."""
    if ste not in STE_NAMES:
        raise unknown("quantize", "ste", ste, STE_NAMES)
    text = repr(_spell(fmt))
    # Only what an operator cannot carry is checked or converted here, in terms a compiler traces.
    if not isinstance(axis, int):
        axis = ops._axis(axis, x.dim(), get_format(fmt, "quantize"), "quantize")
    if amax is not None and not isinstance(amax, Tensor):
        if not isinstance(amax, (int, float)):
            amax = ops._amax(amax, get_format(fmt, "quantize"), "quantize")
        amax = torch.full((), amax, dtype=torch.float64)
    if dtype is not None:
        dtype = ops.torch_dtype(dtype, torch, "quantize")
    if random_bits is not None and not isinstance(random_bits, Tensor):
        random_bits = torch.as_tensor(random_bits)
    words = (0, 0, [0], 32)
    draws = False
    if rounding == "sr":
        if isinstance(offset, tuple):
            whole, start = ops._shard(offset, tuple(x.shape), "quantize")
            flat = [*whole, *start]
        else:
            flat = [_int64(offset, "offset", 0, (1 << 63) - 1)]
        draws = seed is None and random_bits is None
        key = 0 if seed is None else _int64(seed, "seed")
        words = (key, _int64(stream, "stream"), flat, _int64(sr_bits, "sr_bits"))
    head, tail = (x, text, rounding, overflow, axis, amax), (random_bits, ste, dtype, backend)
    op = torch.ops.fpemu.quantize_seeded if draws else torch.ops.fpemu.quantize
    args = (*head, *(words[1:] if draws else words), *tail)
    if torch._C._are_functorch_transforms_active():
        # functorch differentiates a Function only above the dispatcher.
        return _StraightThrough.apply(op, *args)[0]
    return op(*args)


def _int64(word: Any, name: str, low: int = -(1 << 63), high: int = (1 << 64) - 1) -> int:
    """A 64-bit word as the signed integer that torch passes."""
    if not (isinstance(word, int) and low <= word <= high):
        word = ops._integer(word, name, low, high, "quantize")
    return word - (1 << 64) if word >= 1 << 63 else word
