"""The portable backend: the units in torch's int64 arithmetic, on any device.

Slower than the CPU kernels by far, but it needs nothing beyond torch. Scalars in float32 or
float64 appear only where every operation is exact, or is one IEEE operation by definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fpemu.formats import FP16, FP32, Format
from fpemu.gemm.request import NO_EXPONENT, Operand, Request
from fpemu.gemm.units import Unit

Tensor = torch.Tensor
_ELEMENTS = 1 << 22  # products held at a time
_MAG, _INF, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FFFFFFF


def supports(unit: Unit) -> str | None:
    """Why this backend cannot compute a unit, or None."""
    if unit.order in ("exact", "fma"):
        return "exact sums and fused multiply-adds have no portable form"
    if unit.is_reference:
        return None
    low = _low_bits(unit)
    bits = unit.F + 4 + (unit.group * unit.L).bit_length()
    if unit.group > 1:
        bits += int(unit.a.emax + unit.b.emax)
    if bits > 60 or unit.F < low:
        return f"L={unit.L}, F={unit.F} do not fit 64-bit sums"
    return None


def _low_bits(unit: Unit) -> int:
    """Bits of a product's (or a scaled group's) integer below its exponent."""
    if unit.group == 1:
        return unit.a.man_bits + unit.b.man_bits
    assert unit.scale is not None
    return sum(f.man_bits - f.emin for f in (unit.a, unit.b)) + 2 * unit.scale.man_bits


def run(request: Request, device: Any = None) -> np.ndarray:
    """D, float32 [matrices, M, N], computed on `device`; host arrays in and out."""
    unit, a, b = request.unit, request.a, request.b
    device = device or "cpu"
    if not unit.is_reference:
        request.bad = _bad(a.values, unit.a), _bad(b.values, unit.b)
    d = np.array(request.c, np.float32)
    if any(request.bad) or not request.depth:
        return d
    # Small matrices together, large ones in pieces of their rows.
    together = max(1, _ELEMENTS // max(unit.L * d.shape[1] * d.shape[2], 1))
    rows = max(1, _ELEMENTS // max(unit.L * d.shape[2], 1))
    for first in range(0, len(d), together):
        some = slice(first, first + together)
        right = _Side(request, b, unit.b, b.index[some], slice(None), device)
        for r in range(0, d.shape[1], rows):
            part = slice(r, min(r + rows, d.shape[1]))
            left = _Side(request, a, unit.a, a.index[some], part, device)
            c = _tensor(d[some, part], device)
            result = _reference(request, left, right, c) if unit.is_reference else _chain(
                request, left, right, c.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
            )  # fmt: skip
            d[some, part] = result.cpu().numpy()
    return d


def _bad(values: np.ndarray, fmt: Format) -> int:
    """How many values are none of a format: bits below its grid, or beyond its largest."""
    mag = values.view(np.uint32).astype(np.int64) & _MAG
    field = mag >> 23
    sig = (mag & 0x7FFFFF) | (field != 0) << 23
    drop = 23 - fmt.man_bits + np.maximum(fmt.emin + 127 - np.maximum(field, 1), 0)
    bad = (sig & ((1 << np.minimum(drop, 24)) - 1)) != 0
    bad |= values.view(np.uint32).astype(np.int64) & _MAG > int(np.float32(fmt.max).view(np.uint32))
    special = np.where(mag == _INF, not fmt.has_inf, not fmt.has_nan)
    return int(np.where(field == 255, special, bad).sum())


def _tensor(array: np.ndarray, device: Any) -> Tensor:
    return torch.from_numpy(np.array(array, order="C")).to(device)


class _Side:
    """Rows (or columns) of some matrices of an operand, along K: [matrices, rows, K] for both."""

    def __init__(
        self, request: Request, operand: Operand, fmt: Format, some: np.ndarray, part: slice,
        device: Any,
    ) -> None:  # fmt: skip
        unit = request.unit
        is_a = operand is request.a

        def taken(x: np.ndarray) -> Tensor:
            x = x[some]
            return _tensor((x if is_a else np.swapaxes(x, 1, 2))[:, part], device)

        self.values = taken(operand.values)
        factor = request.factor_a if is_a else request.factor_b
        self.factor = None if factor is None else taken(factor)
        if unit.is_reference:
            return
        # Sign and infinities only: what a special sum needs to know.
        self.special = torch.where(torch.isfinite(self.values), self.values.sign(), self.values)
        self.any_special = not bool(torch.isfinite(self.values).all())
        bits = self.values.view(torch.int32).to(torch.int64)
        field = (bits >> 23) & 0xFF
        sig = (bits & 0x7FFFFF) | (field != 0).to(torch.int64) << 23
        exp = field.clamp(min=1) - 127
        self.exp = exp.clamp(min=unit.emin(fmt))
        # Exact: a value of the format has no bits below these. (Finite ones: the rest is not used.)
        low = fmt.man_bits
        if unit.group > 1:
            low, self.exp = fmt.man_bits - fmt.emin, torch.zeros_like(exp)
        down = (23 - low - (exp - self.exp)).clamp(-40, 62)
        sig = torch.where(down >= 0, sig >> down.clamp(min=0), sig << (-down).clamp(min=0))
        self.sig = torch.where(bits < 0, -sig, sig)
        self.scale_sig = self.scale_exp = None
        if operand.scales is not None:
            self.scale_sig, self.scale_exp = (taken(s) for s in operand.scales[:2])
            self.size = operand.scales.size

    def at(self, k: Any, axis: int) -> tuple[Tensor, Tensor, Tensor]:
        """sig, exp and specials of the elements `k`, with an axis for the other operand."""
        return tuple(x[..., k].unsqueeze(axis) for x in (self.sig, self.exp, self.special))  # type: ignore[return-value]


# The units -----------------------------------------------------------------------------------------


def _chain(request: Request, left: _Side, right: _Side, c: Tensor) -> Tensor:
    """D, float32 values; `c` holds float32 bits."""
    unit, depth = request.unit, request.depth
    period = 32 if unit.order == "pairs" else request.period
    if not period:
        for start in range(0, depth, unit.L):
            c = _block(request, left, right, slice(start, min(start + unit.L, depth)), c)
        return _floats(c)
    for n, start in enumerate(range(0, depth, period)):
        partial = torch.zeros_like(c)
        end = min(start + period, depth)
        if unit.order == "pairs":
            index = torch.arange(start, end, device=c.device)
            for half in (0, 1):
                partial = _block(
                    request, left, right, index[(index - start) // 2 % 2 == half], partial
                )
        else:
            for k in range(start, end, unit.L):
                partial = _block(request, left, right, slice(k, min(k + unit.L, end)), partial)
        factor = None
        if left.factor is not None and right.factor is not None:
            factor = left.factor[..., :, None, n] * right.factor[..., None, :, n]
        c = _late(request.out, c, partial, factor)
    return _floats(c)


def _block(request: Request, left: _Side, right: _Side, k: Any, c: Tensor) -> Tensor:
    unit, out = request.unit, request.out
    (sa, ea, xa), (sb, eb, xb) = left.at(k, -2), right.at(k, -3)
    value = sa * sb
    exponent = torch.where(value != 0, ea + eb, NO_EXPONENT)
    special = None
    if left.any_special or right.any_special:
        special = (xa * xb).sum(-1)
    if unit.scale is not None:
        value, exponent, scale = _scaled(unit, left, right, k, value, exponent)
        special = scale if special is None else special + scale
    low = _low_bits(unit)
    zero = torch.zeros_like(c)
    mag, finite = c & _MAG, (c & _MAG) < _INF
    field = mag >> 23
    emin = (FP32 if out == "fp32" else FP16).emin
    e_c = torch.where(finite & (mag != 0), (field - 127).clamp(min=emin), NO_EXPONENT)
    E = torch.maximum(exponent.amax(-1), e_c)
    clamp = unit.clamp(out)
    if clamp is not None:
        E = E.clamp(min=clamp)
    aligned = (value.abs() << (unit.F - low)) >> (E.unsqueeze(-1) - exponent).clamp(0, 63)
    total = torch.where(value < 0, -aligned, aligned).sum(-1)
    sig = ((mag & 0x7FFFFF) | (field != 0).to(torch.int64) << 23) << 12
    down = E - (field.clamp(min=1) - 127) + (23 - unit.F) + 12
    aligned = sig >> down.clamp(0, 63)
    total = total + torch.where(finite, torch.where(c >= 1 << 31, -aligned, aligned), zero)
    result = _round(total, E - unit.F, unit, out)
    carried = torch.where(finite, 0.0, _floats(c))
    special = carried if special is None else special + carried
    return torch.where(torch.isfinite(special), result, _bits(special))


def _scaled(
    unit: Unit, left: _Side, right: _Side, k: slice, value: Tensor, exponent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Products (or groups of them) with their scales; the third says where a scale is NaN."""
    step = unit.group if unit.group > 1 else left.size
    starts = torch.arange(k.start, k.stop, step, device=value.device) // left.size
    assert left.scale_sig is not None and left.scale_exp is not None
    assert right.scale_sig is not None and right.scale_exp is not None
    sig = left.scale_sig[..., :, None, starts] * right.scale_sig[..., None, :, starts]
    exp = (left.scale_exp[..., :, None, starts] + right.scale_exp[..., None, :, starts]).to(
        torch.int64
    )
    special = (sig * 0).sum(-1)
    if unit.group == 1:
        return value, exponent + exp, special
    assert unit.scale is not None
    pad = -value.shape[-1] % unit.group
    groups = torch.nn.functional.pad(value, (0, pad)).unflatten(-1, (-1, unit.group)).sum(-1)
    units = (torch.nan_to_num(sig) * 4.0**unit.scale.man_bits).to(torch.int64)
    return groups * units, exp, special


def _round(total: Tensor, scale: Tensor, unit: Unit, out: str) -> Tensor:
    """float32 bits of rho(total * 2**scale); |total| < 2**62."""
    mag = total.abs()
    # Position of the leading bit, from the exponent of a float64 no larger than the number.
    head = torch.where(mag >= 1 << 32, mag >> 32, mag)
    top = (
        (head.to(torch.float64).view(torch.int64) >> 52) - 1023 + torch.where(mag >= 1 << 32, 32, 0)
    )
    top = torch.where(mag == 0, 0, top)
    fmt, man = (FP16, 10) if out == "fp16" else (FP32, 13 if unit.rho == "rz_e8m13" else 23)
    drop = torch.maximum(top - man, fmt.emin - man - scale)
    d = drop.clamp(0, 62)
    up = torch.zeros_like(mag)
    if out == "fp16":
        up = torch.where(drop > 0, (1 << (d - 1).clamp(min=0)) - 1 + ((mag >> d) & 1), up)
    kept = torch.where(drop > 62, 0, (mag + up) >> d)
    # kept < 2**25 is an integer number of steps of 2**(scale + d): as float32 bits.
    exponent = scale + d
    head = (kept.to(torch.float64).view(torch.int64) >> 52) - 1023
    value = exponent + head
    shift = 23 - head
    sig = torch.where(shift >= 0, kept << shift.clamp(0, 62), kept >> (-shift).clamp(0, 62))
    normal = ((value + 127) << 23) | (sig & 0x7FFFFF)
    subnormal = kept << (exponent + 149).clamp(0, 62)
    y = torch.where(value >= -126, normal, subnormal)
    y = torch.where(value > fmt.emax, _INF, y)
    y = torch.where(kept == 0, 0, y)
    return torch.where((total < 0) & (y != 0), y | 1 << 31, y)


def _late(out: str, c: Tensor, partial: Tensor, factor: Tensor | None) -> Tensor:
    """float32 bits of c + factor * partial, rounded once."""
    x, y = _floats(partial), _floats(c)
    if factor is None:
        # Exact or rounded at 53 bits, which is enough to round again: 53 >= 2*24 + 2.
        total = x.to(torch.float64) + y.to(torch.float64)
    else:
        total = _to_odd(x.to(torch.float64) * factor.to(torch.float64), y.to(torch.float64))
    single = total.to(torch.float32)
    if out == "fp16":
        single = single.to(torch.float16).to(torch.float32)
    return _bits(single)


def _to_odd(x: Tensor, y: Tensor) -> Tensor:
    """x + y in float64, rounded to odd: rounding it to float32 is then a single rounding."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.view(torch.int64)
    # Inexact with an even last bit: the odd neighbour on the side of the error.
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    return torch.where(inexact, bits + toward, bits).view(torch.float64)


def _floats(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _bits(x: Tensor) -> Tensor:
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return torch.where(torch.isnan(x), _NAN, bits)


# References ----------------------------------------------------------------------------------------


def _reference(request: Request, left: _Side, right: _Side, c: Tensor) -> Tensor:
    """float32 sums; each torch operation is one IEEE operation."""
    if request.unit.order == "sequential":
        for k in range(request.depth):
            c = c + left.values[..., :, None, k] * right.values[..., None, :, k]
        return c
    level = [
        left.values[..., :, None, k] * right.values[..., None, :, k] for k in range(request.depth)
    ]
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = [x + y for x, y in zip(level[0::2], level[1::2], strict=False)] + odd
    return c + level[0]
