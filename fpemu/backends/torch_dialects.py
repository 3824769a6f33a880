"""Dialects in torch: the steps of `numba_dialects` as float32 tensor operations.

Every function takes blocks as the last axis. The caller keeps denormals on and chunks small enough
to stay on its thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fpemu.dialects import (
    DECODE,
    ERRORS,
    Dialect,
    Error,
    dialect_of,
    element_nan,
    floor_log2,
    in_kind,
    to_bfloat16,
    zero_sign,
)
from fpemu.formats import BlockFormat
from fpemu.scaling import Ops, Scales, TensorScale

_INF = float("inf")
_SIGN = -(1 << 31)


class Prepared(NamedTuple):
    """Blocks ready for the cast: values (float32), scale codes and decode factors; and the values
    before the library's own steps for zeros, NaN, infinity and elements."""

    p: Tensor
    scales: Scales
    scaled: Tensor


def tensor_scale(ops: Ops, fmt: BlockFormat, amax: Tensor, given: bool) -> TensorScale:
    """The rule's; an amax that the caller gives is taken as it is."""
    dialect = dialect_of(fmt)
    assert dialect is not None
    if dialect.narrow and not given:
        amax = to_bfloat16(ops, amax)
    return dialect.tensor(ops, fmt, amax)


def prepare(ops: Ops, fmt: BlockFormat, rounding: str, x: Tensor, tensor: TensorScale) -> Prepared:
    """Amax, scale and what is cast, for blocks `x` (float32, ``(..., block)``)."""
    dialect = dialect_of(fmt)
    assert dialect is not None
    if dialect.narrow:
        x = to_bfloat16(ops, x)
    size = x.abs()
    if dialect.skip_nan:
        size = torch.where(size == size, size, _f32(ops, x, 0.0))
    amax = size.amax(-1)
    scales = dialect.block(ops, fmt, amax, tensor)
    if dialect.four is not None:
        four = dialect.four(ops, fmt, amax, tensor)
        pick = _four_is_better(ops, dialect, x, scales, four, tensor)
        scales = Scales(*(torch.where(pick, b, a) for a, b in zip(scales, four, strict=True)))
    operand = scales.multiplier.unsqueeze(-1)
    scaled = x * operand if dialect.apply == "multiply" else x / operand
    if dialect.apply == "divide-times-3":
        scaled = scaled * _f32(ops, x, 3.0)
    return Prepared(_own_steps(ops, fmt, dialect, rounding, x, operand, scaled), scales, scaled)


def _f32(ops: Ops, like: Tensor, value: float) -> Tensor:
    return ops.f32(like, value)


def _own_steps(
    ops: Ops,
    fmt: BlockFormat,
    dialect: Dialect,
    rounding: str,
    x: Tensor,
    operand: Tensor,
    p: Tensor,
) -> Tensor:
    """What a library does to the scaled elements `p` before it casts them."""
    if dialect.rounds_itself:
        return _microxcaling(ops, fmt, rounding, p, operand)
    zero = zero_sign(dialect, fmt.element)
    if zero in ("plus", "minus"):
        p = torch.where(p == 0, _f32(ops, x, 0.0 if zero == "plus" else -0.0), p)
    if dialect.wraps:
        return _wrap(ops, p, operand)
    nan = element_nan(dialect, fmt.element, ops.kind)
    # Of two NaNs torch keeps the second factor's, and the dividend's.
    x_nan = x != x
    by_nan = operand != operand
    by_nan = by_nan & ~x_nan if dialect.apply != "multiply" else by_nan
    value = torch.where(by_nan | x_nan, _f32(ops, x, 0.0 if nan.value is None else nan.value),
                        _f32(ops, x, nan.made_value))  # fmt: skip
    negative = torch.where(by_nan, operand.signbit(), torch.where(x_nan, x.signbit(), True))
    if nan.value is None:
        value = torch.full_like(value, float("nan"))
    if nan.signed:
        bits = ops.bits(value) & 0x7FFFFFFF
        value = ops.from_bits(torch.where(negative, bits | _SIGN, bits))
    if nan.inf is not None:
        finite = _f32(ops, x, nan.inf)
        p = torch.where(p.abs() == _INF, torch.where(p > 0, finite, -finite), p)
    return torch.where(p == p, p, value)


def _e2m1_unbounded(ops: Ops, a: Tensor) -> Tensor:
    """Non-negative `a` rounded to E2M1's steps, to nearest even, without a largest value."""
    step = torch.where(a < 2, _f32(ops, a, 0.5), torch.where(a < 4, _f32(ops, a, 1.0),
                                                             _f32(ops, a, 2.0)))  # fmt: skip
    return (a / step).round() * step


def _four_is_better(
    ops: Ops, dialect: Dialect, x: Tensor, six: Scales, four: Scales, tensor: TensorScale
) -> Tensor:
    assert dialect.error is not None
    error, clamp = ERRORS[dialect.error], not dialect.wraps
    return _error(ops, error, clamp, x, four, tensor) < _error(ops, error, clamp, x, six, tensor)


def _error(
    ops: Ops, error: Error, clamp: bool, x: Tensor, scales: Scales, tensor: TensorScale
) -> Tensor:
    """What a candidate costs per block; see `dialect_loops.candidate_error`."""
    p = x * scales.multiplier.unsqueeze(-1)
    a = p.abs()
    if clamp:
        a = torch.where(a > 6, _f32(ops, x, 6.0), a)
    q = _e2m1_unbounded(ops, a)
    q = torch.where(p < 0, -q, q)
    if clamp:
        q = torch.where(p == p, q, _f32(ops, x, 0.0))
    else:
        q = torch.where(a == _INF, _f32(ops, x, float("nan")), q)
    v = q * scales.factor.unsqueeze(-1)
    if error.fast:
        d = v - x * tensor.encode
    else:
        d = v * tensor.decode / _f32(ops, x, error.top) - x
    d = d * d if error.measure == "mse" else d.abs()
    if error.measure == "max":
        return d.amax(-1)
    if not clamp:
        half = d.shape[-1] // 2
        d = d[..., :half] + d[..., half:]
    total = torch.zeros_like(d[..., 0])
    for k in range(d.shape[-1]):
        total = total + d[..., k]
    return total


def _wrap(ops: Ops, p: Tensor, operand: Tensor) -> Tensor:
    """Values of what fouroversix packs; see `dialect_loops.wrap`."""
    a = p.abs()
    v = _e2m1_unbounded(ops, a)
    bits = ops.bits(to_bfloat16(ops, v)) >> 16
    raw = ((bits >> 7) - 126) << 1 | (bits >> 6) & 1
    raw = torch.where(v == 0, 0, torch.where(v == 0.5, 1, raw))
    raw = (raw | torch.where(p.signbit(), 8, 0)) & 0xFF
    raw = torch.where((a == a) & (a < _INF), raw, 0x0B)
    raw = torch.where(operand == -_INF, 0, raw)
    code = raw & 15
    code[..., 1::2] |= (raw[..., 0 : code.shape[-1] - 1 : 2] >> 4) & 15
    mag = code & 7
    small = mag.to(torch.float32) * _f32(ops, p, 0.5)
    value = torch.where(mag < 2, small, ops.from_bits((mag.to(torch.int32) + 252) << 22))
    value = torch.where(code & 8 != 0, -value, value)
    fits = (a < 7).unflatten(-1, (-1, 2)).all(-1).repeat_interleave(2, -1)  # per byte
    return torch.where(fits, p, value)


def _microxcaling(ops: Ops, fmt: BlockFormat, rounding: str, y: Tensor, operand: Tensor) -> Tensor:
    """Elements by a private exponent; see `dialect_loops.microxcaling`."""
    element = fmt.element
    a = in_kind(ops, torch.where(y == y, y.abs(), _f32(ops, y, 0.0)))
    man = element.man_bits - element.is_integer
    exponent = torch.zeros_like(a, dtype=torch.int32)
    if not element.is_integer:
        safe = torch.where((a > 0) & (a < _INF), a, _f32(ops, y, 1.0))
        exponent = floor_log2(ops, safe).clamp(min=element.emin)
    up = ops.from_bits((man - exponent + 127) << 23)
    down = ops.from_bits((exponent - man + 127) << 23)
    v = a * up
    if rounding == "rtz":
        r = v.floor()
    else:
        half = _f32(ops, y, 0.5)
        near, rest = in_kind(ops, v + half), in_kind(ops, v - half)
        r = near.floor()
        if rounding == "rne":
            pair = rest * half
            r = torch.where((rest >= 0) & (pair.floor() == pair), r - 1, r)
    p = r * down
    p = torch.where(p > element.max, _f32(ops, y, element.max), p)
    p = torch.where(operand == operand, p, _f32(ops, y, 0.0))
    return torch.where(y < 0, -p, p)


def in_order(ops: Ops, fmt: BlockFormat, q: Tensor, scale: Tensor, number: Tensor) -> Tensor:
    """float32 values of elements `q` and block scales in the format's decode order."""
    order = DECODE[fmt.decode]
    assert order.factor is not None
    if order.plus_zero:
        q = torch.where(q == 0, _f32(ops, q, 0.0), q)
    value = q * order.factor(ops, scale, number).unsqueeze(-1)
    if order.amax:
        value = value * number
    if order.divisor is not None:
        value = value / _f32(ops, q, order.divisor)
    return value
