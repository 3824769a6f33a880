"""Dialects for the Triton kernels: a library's steps as constants, its rules on block amaxes.

A kernel reduces x to block amaxes, the rules of `fpemu.dialects` run on them as torch operations on
x's device, another kernel scales, casts and decodes. With two candidates per block a third kernel,
between them, says which one costs less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpemu.backends.torch_ import OPS, _denormals
from fpemu.casting import value_table
from fpemu.dialects import DECODE, ERRORS, Dialect, dialect_of, element_nan, zero_sign
from fpemu.formats import BlockFormat, Format
from fpemu.scaling import Scales, TensorScale


class Steps(NamedTuple):
    """What happens to an element before and after its cast; see `fpemu.dialects.Dialect`.

    Numbers are float32 bits.
    """

    apply: str
    narrow: bool
    skip_nan: bool
    zero: str
    nan: int  # what a NaN of x or of the operand becomes
    made: int  # and one that the operation makes
    keeps_nan: bool  # they stay NaN
    signed: bool  # with the NaN's sign
    inf: int  # what infinity becomes; -1: it stays
    wraps: bool


class Order(NamedTuple):
    """How a value is formed from an element's and its block's factor; see `Decode`."""

    ordered: bool
    plus_zero: bool
    times_number: bool
    divisor: int  # float32 bits; 0: none


class Cost(NamedTuple):
    """How a candidate is measured; see `fpemu.dialects.Error`."""

    measure: str
    top: int  # float32 bits
    fast: bool
    clamp: bool
    pairs: bool


NO_STEPS = Steps("multiply", False, False, "keep", 0, 0, False, False, -1, False)
EXACT = Order(False, False, False, 0)


def _f32_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def refusal(fmt: BlockFormat) -> str | None:
    """Why the kernels do not serve a format that follows a library, or None."""
    dialect, name = dialect_of(fmt), fmt.name
    if dialect is None:
        return f"{name!r} decodes in a library's order and does not scale by its rule"
    if dialect.rounds_itself:
        return f"{name!r} rounds elements by its library's own steps"
    if fmt.block is None or fmt.scale is None or fmt.scale.bits > 8:
        return f"{name!r} follows a library and has no block scales of at most 8 bits"
    if fmt.decode == "exact" and fmt.tensor_scaled:
        return f"{name!r} follows a library and has exact products with a tensor scale"
    if dialect.four is not None and fmt.block != (16,):
        return f"{name!r} adds the errors of blocks that are not runs of 16"
    if dialect.wraps and (len(fmt.block) > 1 or fmt.block[0] & (fmt.block[0] - 1)):
        return f"{name!r} wraps around in blocks that are no runs of a power of two"
    return None


@lru_cache(maxsize=512)
def steps_of(fmt: BlockFormat, kind: str) -> Steps:
    """The steps of a format that follows a library; `kind`: x's dtype."""
    dialect = dialect_of(fmt)
    assert dialect is not None
    nan = element_nan(dialect, fmt.element, kind)
    kept = nan.value is None
    return Steps(
        dialect.apply, dialect.narrow, dialect.skip_nan, zero_sign(dialect, fmt.element),
        _f32_bits(np.nan if nan.value is None else nan.value),
        _f32_bits(np.nan if kept else nan.made_value), kept, nan.signed,
        -1 if nan.inf is None else _f32_bits(nan.inf), dialect.wraps,
    )  # fmt: skip


def order_of(fmt: Format | BlockFormat) -> Order:
    """The order of a format's products."""
    if not isinstance(fmt, BlockFormat) or fmt.decode == "exact":
        return EXACT
    order = DECODE[fmt.decode]
    divisor = 0 if order.divisor is None else _f32_bits(order.divisor)
    return Order(True, order.plus_zero, order.amax, divisor)


def cost_of(dialect: Dialect) -> Cost:
    assert dialect.error is not None
    error, wraps = ERRORS[dialect.error], dialect.wraps
    return Cost(error.measure, _f32_bits(error.top), error.fast, not wraps, wraps)


# Rules on block amaxes ---------------------------------------------------------------------------


class Blocks(NamedTuple):
    """The tensor's two numbers, and arrays with an entry per block."""

    scalars: Tensor  # S and the stored number, float32
    stored: Tensor  # codes of the scales, uint8
    operand: Tensor  # what multiplies or divides x
    factor: Tensor  # what multiplies an element's value
    value: Tensor  # the scale's


def rules(
    fmt: BlockFormat, kind: str, amax: Tensor, given: float | None,
    choose: Callable[[Cost, Scales, Scales, Tensor], Tensor],
) -> Blocks:  # fmt: skip
    """Scales from block amaxes.

    Parameters
    ----------
    fmt, kind : BlockFormat, str
        The format, and x's dtype.
    amax : Tensor of float32
        Of every block; NaN as the dialect sees it.
    given : float, optional
        The tensor's amax, where the caller gave one.
    choose : function
        ``(cost, six, four, scalars)`` -> bool per block, where four costs less.
    """
    dialect, ops = dialect_of(fmt), OPS._replace(kind=kind)
    assert dialect is not None
    with _denormals():
        tensor = _tensor_scale(dialect, fmt, kind, amax, given)
        number = torch.where(
            tensor.decode == tensor.decode, tensor.decode, ops.f32(amax, float("nan"))
        )
        scalars = torch.stack([tensor.encode, number])
        scales = dialect.block(ops, fmt, amax, tensor)
        if dialect.four is not None:
            four = dialect.four(ops, fmt, amax, tensor)
            pick = choose(cost_of(dialect), scales, four, scalars)
            scales = Scales(*(torch.where(pick, b, a) for a, b in zip(scales, four, strict=True)))
        factor, order = scales.factor, DECODE[fmt.decode]
        if order.factor is not None:
            factor = order.factor(ops, factor, number)
    return Blocks(scalars, scales.stored.to(torch.uint8), scales.multiplier, factor, scales.factor)


def _tensor_scale(
    dialect: Dialect, fmt: BlockFormat, kind: str, amax: Tensor, given: float | None
) -> TensorScale:
    ops = OPS._replace(kind=kind)
    if not fmt.tensor_scaled:
        top = ops.f32(amax, 1.0)
    elif given is not None:
        top = ops.f32(amax, given)
    elif prod(amax.shape) == 0:
        top = ops.f32(amax, 0.0)
    else:
        top = amax.view(torch.int32).amax().view(torch.float32)  # NaN is the largest
    return dialect.tensor(ops, fmt, top)


@lru_cache(maxsize=64)
def _scale_values(scale: Format, device: torch.device) -> Tensor:
    return torch.from_numpy(value_table(scale).astype(np.float32)).to(device)


def factors(fmt: BlockFormat, scales: Tensor, number: Tensor | None) -> Tensor:
    """What multiplies element values in the format's order, from stored scales."""
    factor = DECODE[fmt.decode].factor
    assert factor is not None and fmt.scale is not None
    value = scales
    if scales.dtype != torch.float32:
        value = _scale_values(fmt.scale, scales.device)[scales.long()]
    with _denormals():
        return factor(OPS, value, OPS.f32(value, 1.0) if number is None else number)
