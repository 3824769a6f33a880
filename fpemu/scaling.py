"""Scale rules: from block amaxes to scales, each operation in its order.

A rule is a small function over the array of block amaxes (a sixteenth of the data or less), in
float32 array operations that numpy and torch carry out alike: every product and quotient is one
IEEE rounding, in the order written. A backend adds only *reduce* (block amax) and *apply* (cast
with one multiplier per block).

Two kinds of rule:

* **exponent rules** (MX): the scale is a power of two read off the amax's bits. They are data:
  `mx_threshold` gives the mantissa above which the exponent goes up by one.
* **multiplier rules** (NVFP4, FP8, INT8): functions that return the stored scale, the float32
  multiplier of x and the float32 factor of the decoded element.

Sources: OCP MX 1.0 section 6.3 (floor); cuBLAS and TransformerEngine MXFP8 (rceil); torchao
ScaleCalculationMode (ceil, even); TransformerEngine 2.20 (NVFP4, FP8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fpemu.errors import unknown
from fpemu.formats import BlockFormat, Format

Array = Any  # numpy.ndarray or torch.Tensor

FLT_MAX = float(np.finfo(np.float32).max)
INF_BITS = 0x7F800000

# Exponent rules ----------------------------------------------------------------------------------

#: Mantissa width in which MX thresholds are counted: float64's, so that float64 and integer
#: amaxes are decided exactly too. A narrower mantissa is shifted up to it.
MX_MAN_BITS = 52


def mx_threshold(rule: str, element: Format) -> int:
    """Largest 52-bit mantissa of the amax that does not raise the shared exponent.

    With amax = 2**E * (1 + M/2**52), the scale is 2**(E - emax + (M > threshold)), clamped to
    2**-127 .. 2**127. Zero gives byte 0; NaN and Inf give 0xFF.

    =========== =========================================== =================================
    mx_floor    floor(log2 amax) - emax                      never up
    mx_ceil     ceil(log2 amax) - emax                       up unless a power of two
    mx_rceil    ceil(log2(amax / max))                       up where amax > max * 2**k
    mx_even     floor(log2(amax rounded to the element's     up from 2 - 2**-(man_bits+1)
                mantissa, half up)) - emax
    =========== =========================================== =================================
    """
    if rule == "mx_floor":
        return (1 << MX_MAN_BITS) - 1
    if rule == "mx_ceil":
        return 0
    if rule == "mx_rceil":
        fraction = Fraction(element.max) / Fraction(2) ** element.emax - 1
        return int(fraction * (1 << MX_MAN_BITS))
    if rule == "mx_even":
        # int8 has no hidden bit: its 7 stored bits are 1 + 6 where the amax falls.
        man_bits = element.man_bits - element.is_integer
        return (1 << MX_MAN_BITS) - (1 << MX_MAN_BITS - man_bits - 1) - 1
    raise unknown("BlockFormat", "rule", rule, EXPONENT_RULES)


EXPONENT_RULES = ("mx_floor", "mx_rceil", "mx_ceil", "mx_even")

# Array operations shared by numpy and torch ------------------------------------------------------


class Ops(NamedTuple):
    """The few operations whose names or promotions differ between numpy and torch.

    `kind` is the dtype of x, for the rules that depend on it; `fast_scale` an optional faster
    `encode_rne` and `decode_mag` in one.
    """

    module: ModuleType
    f32: Callable[[Array, float], Array]  # constant of x's device and float32, 0-d
    bits: Callable[[Array], Array]  # float32 -> int32, same bits
    from_bits: Callable[[Array], Array]
    count: Callable[[Array], Array]  # bool -> int32
    table: Callable[[np.ndarray, Array], Array]  # entries of an int32 table
    half: Callable[[Array], Array]  # rounded to float16, as float32
    kind: str = "float32"
    note: Callable[[str, Array], Array] = lambda label, value: value
    fast_scale: Callable[[Format, Array], tuple[Array, Array]] | None = None

    def scale(self, fmt: Format | None, p: Array) -> tuple[Array, Array]:
        """Codes (int32) of non-negative float32 `p`, RNE, saturating, and their values."""
        assert fmt is not None
        if self.fast_scale is not None:
            return self.fast_scale(fmt, p)
        code = encode_rne(self, fmt, p)
        return code, decode_mag(self, fmt, code)


def _np_f32(like: np.ndarray, value: float) -> np.ndarray:
    return np.asarray(value, dtype=np.float32)


NUMPY = Ops(
    np,
    _np_f32,
    lambda a: np.asarray(a).view(np.int32),
    lambda b: np.asarray(b).view(np.float32),
    lambda mask: np.asarray(mask).astype(np.int32),
    lambda entries, index: entries[index],
    lambda a: np.asarray(a).astype(np.float16).astype(np.float32),
)


def encode_rne(ops: Ops, fmt: Format, p: Array) -> Array:
    """Codes (int32) of non-negative float32 `p` in `fmt`, RNE, saturating; NaN gives NaN."""
    xp, m = ops.module, fmt.man_bits
    drop = 23 - m
    bits = ops.bits(p) & 0x7FFFFFFF  # a NaN may have a sign
    # Normal results: round the float's own bits, then move the exponent bias.
    up = ((1 << drop - 1) - 1) + ((bits >> drop) & 1)
    normal = ((bits + up) >> drop) - ((fmt.emin + 126) << m)
    # Subnormal results: adding 2**(emin - m + 23) leaves the count of steps in the low bits.
    magic = ops.f32(p, 2.0 ** (fmt.emin - m + 23))
    safe = xp.where(bits < ((fmt.emin + 127) << 23), p, ops.f32(p, 0.0))
    subnormal = ops.bits(safe + magic) - int(np.float32(2.0 ** (fmt.emin - m + 23)).view(np.int32))
    code = xp.where(bits < ((fmt.emin + 127) << 23), subnormal, normal)
    code = xp.where(code > fmt.max_mag, xp.full_like(code, fmt.max_mag), code)
    nan = fmt.max_mag if fmt.nan_code is None else fmt.nan_code
    return xp.where(bits > INF_BITS, xp.full_like(code, nan), code)


def decode_mag(ops: Ops, fmt: Format, code: Array) -> Array:
    """float32 values of non-negative codes (int32) of `fmt`; the NaN code gives NaN."""
    xp, m = ops.module, fmt.man_bits
    normal = ops.from_bits((code + ((fmt.emin + 126) << m)) << (23 - m))
    step = ops.f32(normal, 2.0 ** (fmt.emin - m))
    value = xp.where(code < (1 << m), ops.module.asarray(code, dtype=xp.float32) * step, normal)
    return xp.where(code > fmt.max_mag, ops.f32(normal, float("nan")), value)


# Multiplier rules --------------------------------------------------------------------------------


class Scales(NamedTuple):
    """What a multiplier rule returns, one entry per block."""

    stored: Array  # int32 codes of the scale format, or float32 decode scales
    multiplier: Array  # float32: the element cast sees fl(x * multiplier)
    factor: Array  # float32: the decoded element is element * factor (* tensor_scale)


class TensorScale(NamedTuple):
    """Scalars of the whole tensor (0-d float32 arrays)."""

    encode: Array  # S: what the block rule multiplies by
    decode: Array  # tensor_scale: what multiplies the decoded value


def no_tensor_scale(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    one = ops.f32(amax, 1.0)
    return TensorScale(one, one)


def nvfp4_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """S = min(fl(2688/G), FLT_MAX), 1 where G or S is 0; tensor_scale = fl(G/2688).

    2688 = 6 * 448: the largest element times the largest scale. tensor_scale is 1 where G is 0 or
    infinite (there S = 1) and fl(1/FLT_MAX) where S was clamped.
    Source: TransformerEngine 2.20 compute_global_encode_scaling_factor_FP4.
    """
    xp = ops.module
    assert fmt.scale is not None
    top = ops.f32(amax, fmt.element.max * fmt.scale.max)
    one, largest = ops.f32(amax, 1.0), ops.f32(amax, FLT_MAX)
    quotient = top / amax
    clamped = quotient > largest
    scale = ops.note("S", xp.where(clamped, largest, quotient))
    decode = xp.where(clamped, one / largest, amax / top)
    unscaled = (amax == 0) | (scale == 0)
    return TensorScale(xp.where(unscaled, one, scale), xp.where(unscaled, one, decode))


def nvfp4_block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """scale = E4M3(fl(A * fl(S * fl(1/6)))); multiplier = min(fl(1/fl(s * fl(1/S))), FLT_MAX).

    All-zero block: scale byte 0. NaN: scale NaN. Inf: scale 448, elements saturate. A block whose
    scale underflows to 0 has multiplier FLT_MAX, so its nonzero elements become +-6 and decode to
    0. Source: TransformerEngine 2.20 compute_decoding_scaling_factor and quantize kernels.
    """
    xp, scale_format = ops.module, fmt.scale
    assert scale_format is not None
    one, largest = ops.f32(amax, 1.0), ops.f32(amax, FLT_MAX)
    per_element = one / ops.f32(amax, fmt.element.max)
    p = ops.note("fl(A*fl(S*fl(1/6)))", amax * (tensor.encode * per_element))
    stored, factor = ops.scale(scale_format, p)
    multiplier = one / (factor * (one / tensor.encode))
    multiplier = xp.where(multiplier > largest, largest, multiplier)
    return Scales(stored, multiplier, factor)


def fp8_scale(ops: Ops, top: float, amax: Array) -> Array:
    """fl(top/amax); 1 where amax is 0 or infinite; FLT_MAX where the quotient overflows."""
    xp = ops.module
    one, largest = ops.f32(amax, 1.0), ops.f32(amax, FLT_MAX)
    scale = ops.note("fl(max/A)", ops.f32(amax, top) / amax)
    scale = xp.where(scale > largest, largest, scale)
    return xp.where((amax == 0) | (amax > largest), one, scale)


def fp8_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """scale = fl(max/amax), tensor_scale = fl(1/scale) (TransformerEngine, per tensor)."""
    scale = fp8_scale(ops, fmt.element.max, amax)
    return TensorScale(scale, ops.f32(amax, 1.0) / scale)


def fp8_block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """scale = fl(max/amax) per block, stored as the decode scale fl(1/scale)."""
    scale = fp8_scale(ops, fmt.element.max, amax)
    inverse = ops.f32(amax, 1.0) / scale
    return Scales(inverse, scale, inverse)


def fp8_block_pow2(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """As `fp8_block`, the scale rounded down to a power of two by clearing its mantissa."""
    scale = fp8_scale(ops, fmt.element.max, amax)
    scale = ops.from_bits(ops.bits(scale) & INF_BITS)
    inverse = ops.f32(amax, 1.0) / scale
    return Scales(inverse, scale, inverse)


@dataclass(frozen=True)
class Rule:
    """A multiplier rule: its tensor part, its block part, and what a NaN does to a block.

    `nan` is ``"poison"`` (the block's scale becomes NaN, its codes 0) or ``"ignore"`` (the amax
    skips NaN and the element keeps it).
    """

    tensor: Callable[[Ops, BlockFormat, Array], TensorScale]
    block: Callable[[Ops, BlockFormat, Array, TensorScale], Scales] | None
    nan: str


RULES: dict[str, Rule] = {
    "nvfp4": Rule(nvfp4_tensor, nvfp4_block, "poison"),
    "nvfp4_1level": Rule(no_tensor_scale, nvfp4_block, "poison"),
    "fp8": Rule(fp8_tensor, fp8_block, "ignore"),
    "fp8_pow2": Rule(no_tensor_scale, fp8_block_pow2, "ignore"),
    "int8": Rule(fp8_tensor, None, "ignore"),
}


@lru_cache(maxsize=256)
def exponent_rule(fmt: BlockFormat) -> int | None:
    """The mantissa threshold of an exponent rule, or None for a multiplier rule."""
    return mx_threshold(fmt.rule, fmt.element) if fmt.rule in EXPONENT_RULES else None


def multiplier_rule(fmt: BlockFormat) -> Rule:
    try:
        return RULES[fmt.rule]
    except KeyError:
        raise unknown("BlockFormat", "rule", fmt.rule, (*RULES, *EXPONENT_RULES)) from None
