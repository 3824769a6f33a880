"""A second, vectorised reference for sweeps too large for the scalar oracle.

It works on values in float64, where every step below is exact, and looks the result up among the
format's listed values. `tests/spec/test_reference.py` proves it equal to the oracle. It uses the
format table and nothing else of the package.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from fpemu.formats import BlockFormat, Format

F32 = np.float32


@cache
def _listed(fmt: Format) -> np.ndarray:
    """Non-negative finite values in code order."""
    values = fmt.values()
    if fmt.exp_bits == 0:
        return values[: len(values) // 2]
    half = values[: len(values) // 2] if fmt.signed else values
    return half[np.isfinite(half)]


def _largest(fmt: Format) -> float:
    return float(np.finfo(F32).max) if fmt.name == "fp32" else float(_listed(fmt)[-1])


def _lookup(fmt: Format, size: np.ndarray) -> np.ndarray:
    """Codes of sizes on the grid."""
    if fmt.name in ("fp32", "tf32"):
        narrow = size.astype(F32)
        assert np.array_equal(narrow, size)
        return narrow.view(np.uint32).astype(np.int64) >> (23 - fmt.man_bits)
    listed = _listed(fmt)
    code = np.minimum(np.searchsorted(listed, size), len(listed) - 1)
    assert np.array_equal(listed[code], size)
    return code


def cast(
    x: np.ndarray,
    fmt: Format,
    rounding: str = "rne",
    overflow: str = "sat",
    words: np.ndarray | None = None,
    nbits: int = 32,
) -> np.ndarray:
    """Codes of float64 values (exact images of narrower floats, or float64 itself)."""
    x = np.asarray(x, dtype=np.float64)
    negative, size = np.signbit(x), np.abs(x)
    finite = np.isfinite(x)
    size = np.where(finite, size, 1.0)
    emin, m = int(np.log2(fmt.min_normal)), fmt.man_bits  # exact: a power of two
    if fmt.exp_bits == 0:
        step = np.full_like(size, fmt.min_subnormal)
    else:
        step = np.ldexp(1.0, np.maximum(np.frexp(size)[1] - 1, emin) - m)
    steps = size / step
    lower = np.floor(steps)
    f = steps - lower
    if rounding == "sr":
        assert words is not None
        top = words.astype(np.uint64) >> np.uint64(32 - nbits)
        away = np.floor(np.ldexp(f, nbits)).astype(np.uint64) + top >= np.uint64(1 << nbits)
    else:
        away = {
            "rne": (f > 0.5) | ((f == 0.5) & (lower % 2 == 1)),
            "rna": f >= 0.5,
            "rnz": f > 0.5,
            "rtz": f > 1,
            "rtp": (f > 0) & ~negative,
            "rtn": (f > 0) & negative,
            "rto": (f > 0) & (lower % 2 == 0),
        }[rounding]
    with np.errstate(over="ignore"):  # past float64's end: infinity, an overflow like the others
        rounded = (lower + away) * step
    if not fmt.has_zero:
        rounded = np.maximum(rounded, fmt.min_normal)
    over = rounded > _largest(fmt)
    top_code = int(_lookup(fmt, np.array([_largest(fmt)]))[0])
    mag = _lookup(fmt, np.where(over, _largest(fmt), rounded))

    # Past the end: the largest finite, infinity, NaN.
    sign_bit = 1 << fmt.bits - 1
    nan = {"fnuz": sign_bit, "finite": top_code}.get(fmt.special, (1 << fmt.bits - fmt.signed) - 1)
    infinity = top_code + 1 if fmt.special == "ieee" else None
    inward = np.zeros_like(negative)
    if rounding in ("rtz", "rto"):
        inward = ~inward
    elif rounding in ("rtp", "rtn"):
        inward = negative == (rounding == "rtp")
    leaves = (over & ~inward | np.isinf(x)) & (overflow == "nonsat")
    mag = np.where(np.isinf(x), top_code, mag)
    if infinity is not None:
        mag = np.where(leaves, infinity, mag)

    if not fmt.signed:
        code = np.where(negative & (x != 0), nan, mag)
    elif fmt.exp_bits == 0:
        code = np.where(negative, -mag, mag) & (2 * sign_bit - 1)
    else:
        code = np.where(negative, mag | sign_bit, mag)
        if fmt.special == "fnuz":
            code = np.where(mag == 0, 0, code)
    if infinity is None and fmt.special != "finite":
        code = np.where(leaves, nan, code)
    return np.where(np.isnan(x), nan, code).astype(fmt.code_dtype)


# Block formats, on 2-D float32 arrays with blocks along the last axis ------------------------------


class Blocks(NamedTuple):
    codes: np.ndarray
    scales: np.ndarray | None
    tensor_scale: np.ndarray | None


def _tile(fmt: BlockFormat, shape: tuple[int, ...]) -> tuple[int, ...]:
    return {0: shape, 1: (1, *(fmt.block or ())), 2: fmt.block}[len(fmt.block or ())]


def _spread(per_block: np.ndarray, fmt: BlockFormat, shape: tuple[int, ...]) -> np.ndarray:
    """One entry per block -> one per element."""
    r, c = _tile(fmt, shape)
    return np.repeat(np.repeat(per_block, r, axis=0), c, axis=1)[: shape[0], : shape[1]]


def _mx_bytes(fmt: BlockFormat, amax: np.ndarray) -> np.ndarray:
    """E8M0 codes by comparing the amax's significand with the rule's threshold."""
    element = fmt.element
    a, e = np.frexp(amax.astype(np.float64))
    a, e = 2 * a, e - 1  # 1 <= a < 2
    emax = int(np.floor(np.log2(element.max)))
    digits = element.man_bits + (element.exp_bits > 0)
    up = {
        "mx_floor": a > 2,
        "mx_ceil": a > 1,
        "mx_rceil": a > element.max / 2.0**emax,
        "mx_even": a >= 2 - 2.0**-digits,
    }[fmt.rule]
    byte = np.clip(e - emax + up + 127, 0, 254)
    byte = np.where(amax == 0, 0, byte)
    return np.where(np.isfinite(amax), byte, 255).astype(np.uint8)


def encode(x: np.ndarray, fmt: BlockFormat, rounding: str = "rne", overflow: str = "sat") -> Blocks:
    """Codes and scales of a 2-D float32 array."""
    with np.errstate(all="ignore"):
        return _encode(x, fmt, rounding, overflow)


def _encode(x: np.ndarray, fmt: BlockFormat, rounding: str, overflow: str) -> Blocks:
    assert x.ndim == 2 and x.dtype == F32
    rows, cols = x.shape
    r, c = _tile(fmt, x.shape)
    tall, wide = -(-rows // r), -(-cols // c)
    tiles = np.zeros((tall * r, wide * c), F32)
    tiles[:rows, :cols] = np.abs(x)
    tiles = tiles.reshape(tall, r, wide, c).swapaxes(1, 2).reshape(tall, wide, r * c)
    amax = np.fmax.reduce(tiles, axis=-1, initial=F32(0))
    has_nan = np.isnan(tiles).any(axis=-1)
    total = np.fmax.reduce(amax.ravel(), initial=F32(0))

    def spread(a: np.ndarray) -> np.ndarray:
        return _spread(a, fmt, x.shape)

    one, flt_max, top = F32(1), np.finfo(F32).max, F32(fmt.element.max)
    tensor_scale = None
    if fmt.rule.startswith("mx_"):
        scales = _mx_bytes(fmt, np.where(has_nan, F32(np.nan), amax))
        poisoned = scales == 255
        value = x.astype(np.float64) / np.ldexp(1.0, spread(scales).astype(np.int64) - 127)
    elif fmt.rule.startswith("nvfp4"):
        s = tensor_scale = one
        if fmt.rule == "nvfp4" and total != 0 and total != np.inf:
            quotient = F32(2688) / total
            s = min(quotient, flt_max)
            tensor_scale = one / flt_max if quotient > flt_max else total / F32(2688)
        scales = cast(amax * (s * (one / F32(6))), fmt.scale)
        scales = np.where(has_nan, 0x7F, scales).astype(np.uint8)
        poisoned = has_nan
        decoded = fmt.scale.values()[scales].astype(F32)
        multiplier = np.minimum(one / (decoded * (one / s)), flt_max)
        value = (x * spread(multiplier)).astype(np.float64)
    else:
        poisoned = np.zeros_like(has_nan)
        scale = np.minimum(top / amax, flt_max)
        scale = np.where((amax == 0) | np.isinf(amax), one, scale)
        if fmt.rule == "fp8_pow2":
            scale = np.ldexp(one, np.frexp(scale)[1] - 1).astype(F32)
        scales = one / scale
        value = (x * spread(scale)).astype(np.float64)
        if fmt.block is None:
            tensor_scale, scales = (scales.ravel()[0] if x.size else one), None
    codes = cast(value, fmt.element, rounding, overflow)
    codes = np.where(spread(poisoned), 0, codes).astype(fmt.element.code_dtype)
    return Blocks(codes, scales, np.asarray(tensor_scale, F32) if fmt.tensor_scaled else None)


def decode(parts: Blocks, fmt: BlockFormat, narrow: Format | None = None) -> np.ndarray:
    """Values in float32, or as the bits of a 16-bit float row.

    The product of a code, a scale and a tensor scale is exact in float64.
    """
    value = fmt.element.values()[parts.codes]
    with np.errstate(all="ignore"):
        if parts.scales is not None:
            scales = parts.scales
            if scales.dtype == np.uint8:
                scales = fmt.scale.values()[scales]
            value = value * _spread(scales.astype(np.float64), fmt, parts.codes.shape)
        if parts.tensor_scale is not None:
            value = value * np.float64(parts.tensor_scale)
        if narrow is not None:
            quiet = narrow.inf_code | 1 << narrow.man_bits - 1
            return np.where(np.isnan(value), quiet, cast(value, narrow, "rne", "nonsat"))
        value = value.astype(F32)
    value[np.isnan(value)] = np.nan
    return value
