"""Dialects: what each library computes for NVFP4 and the MX formats, operation by operation.

Libraries that compute "the same" format take the same steps in another float32 order, with other
floors, ties and treatments of zero, NaN and infinity. A `Dialect` is the data of one library: how
it turns amaxes into scales, what it does to an element before the cast, and what it makes of the
values that have no code. All arithmetic is float32, each operation rounded to nearest even, in the
order written, also where the library's result is a mistake.

The functions work on numpy arrays and torch tensors through `fpemu.scaling.Ops`. `ops.note` names
an intermediate value for `fpemu.compare`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import expm1, log
from typing import Any, NamedTuple

import numpy as np

from fpemu.formats import BlockFormat, Format
from fpemu.scaling import FLT_MAX, INF_BITS, Array, Ops, Scales, TensorScale

FLT_MIN = 2.0**-126  # the smallest normal float32
NAN, INF = float("nan"), float("inf")


class Nan(NamedTuple):
    """What a NaN that reaches the cast becomes.

    `value` is the finite value whose code the library writes (None: the format's NaN code);
    `signed` tells whether the NaN's sign bit survives. A NaN that an operation makes out of numbers
    is negative, as on x86.
    """

    value: float | None = None
    signed: bool = False
    made: float | None = None  # for a NaN that the operation itself makes; default: `value`
    inf: float | None = None  # what infinity becomes; default: the largest finite value

    @property
    def made_value(self) -> float:
        value = self.value if self.made is None else self.made
        return 0.0 if value is None else value


_PLAIN_NAN = Nan()


@dataclass(frozen=True)
class Dialect:
    """One library's way of quantizing a block.

    Parameters
    ----------
    block : function
        ``(ops, fmt, amax, tensor) -> Scales``: stored scale, operand of `apply`, decode factor.
    tensor : function
        ``(ops, fmt, amax) -> TensorScale``: ``encode`` is what `block` uses, ``decode`` the number
        that the library stores.
    four : function, optional
        The candidate that maps the block's largest value to 4 instead of 6.
    error : str, optional
        What decides between the candidates, a name in `ERRORS`; 4 wins where its error is smaller.
    apply : {"multiply", "divide", "divide-times-3", "microxcaling"}
        What happens to an element before the cast.
    skip_nan : bool
        Whether the amax ignores NaN. Otherwise a NaN makes it NaN.
    zero : {"keep", "plus", "minus", "never"}
        Sign of an element that is zero before the cast: its own, always +, always -. ``"never"``:
        whatever rounds to zero is +0.
    nan : Nan
    wraps : bool
        fouroversix has no clamp before E2M1: larger values wrap around in the packed byte. An
        operand of -Inf makes a block zero.
    narrow : bool
        The kernel exists for bfloat16 only: x is rounded to it first.
    narrow_nan : bool
        Elements go through the tensor's dtype before they are packed, which shows in NaN only.
    packs_bits : bool
        NaN and infinity are cut to the element's width like other values: exponent all ones.
    hardware : bool
        The cast is an instruction: NaN is the format's canonical one.
    """

    block: Callable[[Ops, BlockFormat, Array, TensorScale], Scales]
    tensor: Callable[[Ops, BlockFormat, Array], TensorScale]
    four: Callable[[Ops, BlockFormat, Array, TensorScale], Scales] | None = None
    error: str | None = None
    apply: str = "multiply"
    skip_nan: bool = False
    zero: str = "keep"
    nan: Nan = _PLAIN_NAN
    wraps: bool = False
    narrow: bool = False
    narrow_nan: bool = False
    packs_bits: bool = False
    hardware: bool = False

    @property
    def rounds_itself(self) -> bool:
        """Whether `apply` already rounds, so that no other rounding can be asked for."""
        return self.apply == "microxcaling"


# Tensor scales -----------------------------------------------------------------------------------


def _top(scale_max: float) -> float:
    """Largest NVFP4 value before the tensor scale: 6 times the largest block scale."""
    return 6.0 * scale_max


def _none(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    one = ops.f32(amax, 1.0)
    return TensorScale(one, one)


def _te_tensor(scale_max: float) -> Callable[[Ops, BlockFormat, Array], TensorScale]:
    """S = min(fl(top/G), FLT_MAX), 1 where S is 0; G is stored."""

    def tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
        xp = ops.module
        s = ops.f32(amax, _top(scale_max)) / amax
        s = xp.where(s > FLT_MAX, ops.f32(amax, FLT_MAX), s)
        s = xp.where(s == 0, ops.f32(amax, 1.0), s)
        return TensorScale(ops.note("S", s), amax)

    return tensor


def _te_kernel_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """As `_te_tensor`, but S is 1 where G is 0."""
    s, stored = _te_tensor(448.0)(ops, fmt, amax)
    return TensorScale(ops.module.where(amax == 0, ops.f32(amax, 1.0), s), stored)


def _torchao_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """T = fl(G/2688); stored and used."""
    t = ops.note("T = fl(G/2688)", amax / ops.f32(amax, _top(448.0)))
    return TensorScale(t, t)


def _torchao_cuda_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """T = fl(G * fl(1/2688)): torch on CUDA multiplies by the reciprocal of a Python number."""
    top = ops.f32(amax, 1.0) / ops.f32(amax, _top(448.0))
    t = ops.note("T = fl(G*fl(1/2688))", amax * top)
    return TensorScale(t, t)


def _ct_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """g = fl(2688 * fl(1/max(G, tiny))), 1 where that is NaN or infinite; g is stored.

    ``number / tensor`` in torch is the reciprocal times the number. Both operations round to the
    tensor's dtype, whose smallest normal is `tiny`.
    """
    xp = ops.module
    tiny = 2.0**-14 if ops.kind == "float16" else FLT_MIN
    g = xp.where(amax < tiny, ops.f32(amax, tiny), amax)
    g = in_kind(ops, in_kind(ops, ops.f32(amax, 1.0) / g) * ops.f32(amax, _top(448.0)))
    g = xp.where((g == g) & (g <= FLT_MAX), g, ops.f32(amax, 1.0))
    return TensorScale(ops.note("g", g), g)


def _caller_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """S = fl(2688/G), as the references' callers compute it; S is stored."""
    s = ops.note("S = fl(2688/G)", ops.f32(amax, _top(448.0)) / amax)
    return TensorScale(s, s)


def _quark_tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
    """S = fl(448 * fl(6 * fl(1/G))), another number over a tensor; S is stored."""
    s = ops.f32(amax, 448.0) * (ops.f32(amax, 6.0) * (ops.f32(amax, 1.0) / amax))
    return TensorScale(ops.note("S", s), s)


def _fouroversix_tensor(element_max: float, scale_max: float) -> Any:
    """S = fl(top/G), without a clamp; G is stored."""

    def tensor(ops: Ops, fmt: BlockFormat, amax: Array) -> TensorScale:
        s = ops.f32(amax, element_max * scale_max) / amax
        return TensorScale(ops.note("S", s), amax)

    return tensor


# NVFP4 block scales ------------------------------------------------------------------------------


def _te_block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """s = E4M3(fl(A * fl(S * fl(1/6)))); operand = min(fl(1/fl(s * fl(1/S))), FLT_MAX).

    Zero block: s = 0, operand FLT_MAX. NaN: s NaN. A scale that underflows to 0 leaves FLT_MAX, so
    that nonzero elements become +-6.
    """
    sixth = ops.f32(amax, 1.0) / ops.f32(amax, 6.0)
    p = ops.note("fl(A*fl(S*fl(1/6)))", amax * (tensor.encode * sixth))
    stored, s = ops.scale(fmt.scale, p)
    return Scales(stored, _te_operand(ops, s, tensor.encode), s)


def _te_operand(ops: Ops, s: Array, encode: Array) -> Array:
    one = ops.f32(s, 1.0)
    operand = one / (s * (one / encode))
    return ops.module.where(operand > FLT_MAX, ops.f32(s, FLT_MAX), operand)


def _te_fast_block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """As `_te_block`, but the operand is bfloat16(min(fl(S/s), largest bfloat16))."""
    sixth = ops.f32(amax, 1.0) / ops.f32(amax, 6.0)
    p = ops.note("fl(A*fl(S*fl(1/6)))", amax * (tensor.encode * sixth))
    stored, s = ops.scale(fmt.scale, p)
    largest = 2.0**127 * (2 - 2.0**-7)
    operand = tensor.encode / s
    operand = ops.module.where(operand > largest, ops.f32(s, largest), operand)
    return Scales(stored, to_bfloat16(ops, operand), s)


def to_bfloat16(ops: Ops, x: Array) -> Array:
    """float32 values rounded to bfloat16's grid, to nearest even; NaN stays."""
    bits = ops.bits(x)
    # Two shifts instead of a mask: an int32 mask with the sign bit set is no int32 literal.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16) << 16
    return ops.module.where(x == x, ops.from_bits(rounded), x)


def in_kind(ops: Ops, x: Array) -> Array:
    """float32 values rounded to the dtype of x, for libraries that compute in it."""
    if ops.kind == "bfloat16":
        return to_bfloat16(ops, x)
    return ops.half(x) if ops.kind == "float16" else x


def _fouroversix_block(divisor: float, expand: float | None, clamp: bool) -> Any:
    """s = E4M3(fl(fl(A/divisor) * S)[, times `expand`]); operand = fl(1/fl(s * fl(1/S))).

    `clamp`: TransformerEngine bounds the operand by FLT_MAX; fouroversix makes it 0 where s is 0.
    """

    def block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
        xp = ops.module
        p = ops.note(f"fl(fl(A/{divisor:g})*S)", (amax / ops.f32(amax, divisor)) * tensor.encode)
        if expand is not None:
            p = ops.note(f"times {expand:g}", p * ops.f32(amax, expand))
        if not clamp:
            p = xp.where(tensor.decode == 0, ops.f32(amax, 0.0), p)
        stored, s = ops.scale(fmt.scale, p)
        if clamp:
            return Scales(stored, _te_operand(ops, s, tensor.encode), s)
        one = ops.f32(amax, 1.0)
        operand = one / ((one / tensor.encode) * s)
        return Scales(stored, xp.where(s == 0, ops.f32(amax, 0.0), operand), s)

    return block


def _torchao_block(cuda: bool, levels: int) -> Any:
    """s = E4M3(clamp(fl(fl(A/6)/T), 2^-6, 448)); operand = fl(fl(1/T)/s); one level: T = 1.

    2^-6 is E4M3's smallest normal: subnormal scales are never used. Zero block: s = 2^-6.
    """

    def block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
        one, six = ops.f32(amax, 1.0), ops.f32(amax, 6.0)
        p = amax * (one / six) if cuda else amax / six
        if levels == 2:
            p = p / tensor.encode
        p = _at_least(ops, ops.note("scale before E4M3", p), 2.0**-6)
        stored, s = ops.scale(fmt.scale, p)
        operand = (one / tensor.encode if levels == 2 else one) / s
        return Scales(stored, _sign_of_nan(ops, operand, amax, tensor), s)

    return block


def _sign_of_nan(ops: Ops, operand: Array, amax: Array, tensor: TensorScale) -> Array:
    """x86 keeps the (positive) NaN of a block's amax and makes negative ones: from numbers, and in
    torch's maximum over a whole tensor."""
    made = (amax == amax) | (tensor.encode != tensor.encode)
    nan = ops.module.where(made, ops.f32(amax, -NAN), ops.f32(amax, NAN))
    return ops.module.where(operand == operand, operand, nan)


def _at_least(ops: Ops, x: Array, low: float) -> Array:
    return ops.module.where(x < low, ops.f32(x, low), x)


def _modelopt_block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """s = E4M3(clamp(fl(A/fl(6*T)), 2^-9, 448)), 1 where that quotient is 0; x is divided by
    fl(s*T)."""
    p = ops.note("fl(A/fl(6*T))", amax / (ops.f32(amax, 6.0) * tensor.encode))
    p = _at_least(ops, ops.module.where(p == 0, ops.f32(amax, 1.0), p), 2.0**-9)
    stored, s = ops.scale(fmt.scale, p)
    return Scales(stored, s * tensor.encode, s)


def _ct_block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """s = E4M3(fl(g * fl(A/6))), 2^-3 (E4M3's eps) where that is 0; x is divided by fl(s/g).

    A/6 is rounded to the tensor's dtype.
    """
    sixth = in_kind(ops, amax / ops.f32(amax, 6.0))
    p = ops.note("fl(g*fl(A/6))", tensor.encode * sixth)
    stored, s = ops.scale(fmt.scale, p)
    stored = ops.module.where(s == 0, ops.module.full_like(stored, 0x20), stored)
    s = ops.module.where(s == 0, ops.f32(amax, 0.125), s)
    return Scales(stored, s / tensor.encode, s)


def _reference_block(of_zero: float) -> Any:
    """s = E4M3(fl(S * fl(A * fl(1/6)))); operand = 1/fl(s * 1/S), the reciprocal of 0 being
    `of_zero`."""

    def reciprocal(ops: Ops, x: Array) -> Array:
        return ops.module.where(x == 0, ops.f32(x, of_zero), ops.f32(x, 1.0) / x)

    def block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
        sixth = ops.f32(amax, 1.0) / ops.f32(amax, 6.0)
        p = ops.note("fl(S*fl(A*fl(1/6)))", tensor.encode * (amax * sixth))
        stored, s = ops.scale(fmt.scale, p)
        return Scales(stored, reciprocal(ops, s * reciprocal(ops, tensor.encode)), s)

    return block


def _quark_block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """s = E4M3(fl(fl(A/6) * S)); x is divided by fl(s/S), 2^-23 (float32's eps) where that is 0."""
    p = ops.note("fl(fl(A/6)*S)", (amax / ops.f32(amax, 6.0)) * tensor.encode)
    stored, s = ops.scale(fmt.scale, p)
    divisor = s / tensor.encode
    divisor = ops.module.where(divisor == 0, ops.f32(amax, 2.0**-23), divisor)
    return Scales(stored, _sign_of_nan(ops, divisor, amax, tensor), s)


# MX block scales ---------------------------------------------------------------------------------


def _power(ops: Ops, byte: Array) -> Array:
    """2^(byte - 127) as float32 for bytes 0 .. 254; 255 gives NaN."""
    xp = ops.module
    bits = xp.where(byte == 0, xp.full_like(byte, 0x00400000), byte << 23)
    return ops.from_bits(xp.where(byte == 255, xp.full_like(byte, 0x7FC00000), bits))


def _inverse_power(ops: Ops, byte: Array) -> Array:
    """2^(127 - byte), NaN for 255."""
    inverse = _power(ops, ops.module.where(byte == 255, byte, 254 - byte))
    return inverse


def _exponent(amax_bits: Array) -> Array:
    return (amax_bits >> 23) & 0xFF


def _clipped(ops: Ops, value: Array, low: int, high: int) -> Array:
    xp = ops.module
    value = xp.where(value < low, xp.full_like(value, low), value)
    return xp.where(value > high, xp.full_like(value, high), value)


def _rounded_up(bits: Array, man_bits: int) -> Array:
    """Amax bits rounded half up to `man_bits` and cut to a power of two (0 and NaN too)."""
    return ((bits + (1 << 23 - man_bits - 1)) >> 23) << 23


def _man_bits(fmt: BlockFormat) -> int:
    # int8 has no hidden bit: its 7 stored bits are 1 + 6 where the amax falls.
    return fmt.element.man_bits - fmt.element.is_integer


def _torchao_mx(mode: str, old: bool) -> Any:
    """Exponent of A (`floor`), of A rounded to the element (`even`), one more where A is no power
    of two (`ceil`), minus emax, clamped.

    `old` (0.18): infinity is an exponent like others, x is divided by max(2^e, 2^-126), byte 0 too.
    Later: NaN and Inf give 255 and NaN elements; x is multiplied by 2^-e.
    """

    def block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
        xp, bits = ops.module, ops.bits(amax)
        if mode == "even":
            bits = _rounded_up(bits, _man_bits(fmt))
        exponent = _exponent(bits)
        if mode == "ceil":
            exponent = exponent + ops.count((bits & 0x7FFFFF) > 0)
        byte = _clipped(ops, exponent - fmt.element.emax, 0, 255)
        bad = amax != amax if old else ops.bits(amax) >= INF_BITS
        if mode == "even" and not old:
            bad = bad | (bits == INF_BITS)
        byte = xp.where(bad, xp.full_like(byte, 255), byte)
        factor = _power(ops, byte)
        if not old:
            return Scales(byte, _inverse_power(ops, byte), factor)
        divisor = _at_least(ops, factor, FLT_MIN)
        return Scales(byte, xp.where(byte == 255, ops.f32(amax, INF), divisor), factor)

    return block


def _round_up_byte(ops: Ops, ratio: Array, infinite: int) -> Array:
    """The byte of the smallest power of two that is not below `ratio`, by bits."""
    xp, bits = ops.module, ops.bits(ratio)
    exponent, mantissa = _exponent(bits), bits & 0x7FFFFF
    up = xp.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    byte = exponent + ops.count(up)
    byte = xp.where(bits == INF_BITS, xp.full_like(byte, infinite), byte)
    # The largest finite ratios round up to 2^128: E8M0 has none and stays at 2^127.
    byte = xp.where(
        (exponent == 254) & up, xp.full_like(byte, 255 if infinite == 255 else 254), byte
    )
    return xp.where(ratio == ratio, byte, xp.full_like(byte, 255))


def _rceil_mx(infinite: int) -> Any:
    """2^ceil(log2(fl(A * fl(1/max)))), by bits; Inf gives byte `infinite`."""

    def block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
        ratio = ops.note("fl(A*fl(1/max))", amax * ops.f32(amax, 1.0 / fmt.element.max))
        byte = _round_up_byte(ops, ratio, infinite)
        return Scales(byte, _inverse_power(ops, byte), _power(ops, byte))

    return block


def _torchao_018_rceil(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """2^ceil(log2f(fl(A/max))) with a float log2, which misses ratios just above a power of two.

    Byte 0 multiplies by 1, not 2^127; Inf gives 254 and multiplies by 2^-127.
    """
    xp = ops.module
    ratio = ops.note("fl(A/max)", amax / ops.f32(amax, fmt.element.max))
    byte = _clipped(ops, ceil_log2(ops, ratio) + 127, 0, 254)
    byte = xp.where(ratio == INF, xp.full_like(byte, 254), byte)
    byte = xp.where(ratio == ratio, byte, xp.full_like(byte, 255))
    operand = xp.where(byte == 0, ops.f32(amax, 1.0), _inverse_power(ops, byte))
    return Scales(byte, operand, _power(ops, byte))


def _modelopt_mxfp4(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """2^ceil(max(log2f(fl(A/6)), -127)) with a float log2; x is divided by it.

    NaN and Inf: byte 0 (a float to uint8 conversion), x divided by NaN or Inf.
    """
    xp = ops.module
    ratio = ops.note("fl(A/6)", amax / ops.f32(amax, fmt.element.max))
    byte = _clipped(ops, ceil_log2(ops, ratio) + 127, 0, 254)
    divisor = _power(ops, byte)
    byte = xp.where(ops.bits(amax) < INF_BITS, byte, xp.full_like(byte, 0))
    divisor = xp.where(amax == INF, ops.f32(amax, INF), divisor)
    divisor = xp.where(amax == amax, divisor, ops.f32(amax, NAN))
    return Scales(byte, divisor, _power(ops, byte))


def _modelopt_mxfp8(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """2^clamp(ceil(log2f(fl(A/448))), -127, 127), -127 where A is 0 or NaN; Inf gives 127."""
    xp = ops.module
    ratio = ops.note("fl(A/448)", amax / ops.f32(amax, fmt.element.max))
    byte = _clipped(ops, ceil_log2(ops, ratio) + 127, 0, 254)
    byte = xp.where(ratio == INF, xp.full_like(byte, 254), byte)
    byte = xp.where(ratio > 0, byte, xp.full_like(byte, 0))
    return Scales(byte, _inverse_power(ops, byte), _power(ops, byte))


def _even_byte(ops: Ops, fmt: BlockFormat, amax: Array) -> Array:
    """Quark's even_round: A rounded half up to the element's mantissa; 255 for NaN, 254 for Inf."""
    xp = ops.module
    man_bits = 8 if fmt.element.is_integer else fmt.element.man_bits  # 8 is the library's for int8
    bits = _rounded_up(ops.bits(amax), man_bits)
    # 2^-126 stands for zero, and the float log2 of a power of two is exact.
    exponent = xp.where(amax == 0, xp.full_like(bits, 1), _exponent(bits))
    # Below 2^-126 what is left is 0, whose logarithm is -Inf: clamped to -127.
    exponent = xp.where((bits == 0) & (amax > 0), xp.full_like(bits, -1000), exponent)
    byte = _clipped(ops, exponent - fmt.element.emax, 0, 254)
    byte = xp.where(bits == INF_BITS, xp.full_like(byte, 254), byte)
    return xp.where(amax == amax, byte, xp.full_like(byte, 255))


def _quark_even(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """2^(floor(log2 A') - emax), A' being A rounded half up to the element's mantissa."""
    byte = _even_byte(ops, fmt, amax)
    factor = _power(ops, byte)
    return Scales(byte, factor, factor)


def _quark_pack_even(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    byte = _even_byte(ops, fmt, amax)
    return Scales(byte, _inverse_power(ops, byte), _power(ops, byte))


def _cut_mx(up: bool, by_max: bool) -> Any:
    """The float A/max (`by_max`) or A/2^emax cut to a power of two, first raised where `up`.

    A ratio of 0 multiplies by 0; 255 (Inf, and NaN where not `up`) multiplies by 1/Inf = 0. Raising
    a NaN overflows its integer to 0.
    """

    def block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
        xp = ops.module
        divisor = fmt.element.max if by_max else 2.0**fmt.element.emax
        bits = ops.bits(ops.note(f"fl(A/{divisor:g})", amax / ops.f32(amax, divisor)))
        byte = _exponent(bits)
        if up:
            byte = byte + ops.count((bits & 0x7FFFFF) > 0)
            byte = xp.where(byte == 256, xp.full_like(byte, 0), byte)
        zero = (byte == 0) | (byte == 255)
        operand = xp.where(zero, ops.f32(amax, 0.0), _inverse_power(ops, byte))
        return Scales(byte, operand, _power(ops, byte))

    return block


def _ct_mx(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """2^(floor(log2 A') - emax), A' being A rounded half up to 1 mantissa bit (3 for FP6).

    FP8 too is rounded with FP4's mantissa. NaN, Inf and an A' that overflows: x is divided by Inf
    and byte 127 stored.
    """
    xp, man_bits = ops.module, 3 if fmt.element.bits == 6 else 1
    bits = _rounded_up(ops.bits(amax), man_bits)
    byte = _clipped(ops, _exponent(bits) - fmt.element.emax, 0, 254)
    overflow = (bits >= INF_BITS) | (bits < 0)
    if ops.kind == "float16":
        # Rounded in float16: overflows from 2^16 on, and a subnormal that does not reach 2^-14
        # leaves 0. A power below 2^-24 is 0, for which the library takes 1.
        overflow = overflow | (_exponent(bits) > 127 + 15)
        gone = (amax < 2.0**-14 * (1 - 2.0 ** -(man_bits + 1))) | (byte < 127 - 24)
        byte = xp.where(gone, xp.full_like(byte, 127), byte)
    factor = _power(ops, byte)
    return Scales(
        xp.where(overflow, xp.full_like(byte, 127), byte),
        xp.where(overflow, ops.f32(amax, INF), factor),
        xp.where(overflow, ops.f32(amax, 1.0), factor),
    )


def _fouroversix_mx(divisor: float) -> Any:
    """fl(A/divisor) raised to a power of two by bits; x is divided by it, 0 where its byte is 0."""

    def block(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
        xp = ops.module
        bits = ops.bits(ops.note(f"fl(A/{divisor:g})", amax / ops.f32(amax, divisor)))
        byte = _exponent(bits) + ops.count((bits & 0x7FFFFF) != 0)
        byte = xp.where(byte == 256, xp.full_like(byte, 0), byte)  # one byte: NaN wraps to 0
        factor = _power(ops, byte)
        operand = xp.where(byte == 255, ops.f32(amax, INF), factor)
        return Scales(byte, xp.where(byte == 0, ops.f32(amax, -INF), operand), factor)

    return block


def _qutlass_mx(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """2^floor(log2(fl(A + 1e-8))), emax not subtracted; elements are 3 times the quotient."""
    byte = _exponent(ops.bits(amax + ops.f32(amax, 1e-8)))
    factor = _power(ops, byte)
    operand = ops.module.where(byte == 255, ops.f32(amax, INF), factor)
    return Scales(byte, operand, factor)


def _microxcaling_mx(ops: Ops, fmt: BlockFormat, amax: Array, tensor: TensorScale) -> Scales:
    """2^(floor(log2(A)) - emax) with a log2 in the tensor's dtype, 2^-126 standing for A = 0.

    Above 2^127, and for NaN and Inf: NaN for the whole block. `ops.kind` is the dtype.
    """
    xp = ops.module
    safe = xp.where(amax == 0, ops.f32(amax, FLT_MIN), amax)
    byte = floor_log2(ops, safe) - fmt.element.emax + 127
    byte = _clipped(ops, byte, 0, 255)
    byte = xp.where(ops.bits(amax) < INF_BITS, byte, xp.full_like(byte, 255))
    if ops.kind == "float16":  # whose powers of two are 0 or infinity outside 2^-24 .. 2^15
        byte = xp.where((byte < 103) | (byte > 142), xp.full_like(byte, 255), byte)
    factor = _power(ops, byte)
    return Scales(byte, factor, factor)


# Float logarithms --------------------------------------------------------------------------------


#: Mantissa bits of the dtypes in which a library may compute; others are taken as float32.
KIND_BITS = {"bfloat16": 7, "float16": 10}


@lru_cache(maxsize=8)
def log2_slack(man_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """How far a float log2 with `man_bits` reaches across powers of two.

    Entry ``k + 150`` of the first array: how many float32 values just above 2^k have a logarithm
    that rounds to k. Of the second: how many just below 2^k, in steps of 2^(k-24), round up to k.
    With h half the distance between the floats beside k, those are floor(2^23 (2^h - 1)) and
    floor(2^24 (1 - 2^-h)). For ``man_bits=23`` these equal torch 2.13's log2 on the CPU.
    """
    above, below = np.zeros(300, np.int32), np.zeros(300, np.int32)
    for k in range(-149, 129):
        if k == 0:  # floats are dense around 0: nothing but 1 has the logarithm 0
            continue
        size = abs(k).bit_length() - 1
        outward = 2.0 ** (size - man_bits - 1)
        # Below a power of two the spacing halves, on the side of zero.
        inward = outward / 2 if abs(k) == 1 << size else outward
        up, down = (outward, inward) if k > 0 else (inward, outward)
        above[k + 150] = int(2.0**23 * expm1(up * log(2)))
        below[k + 150] = int(-(2.0**24) * expm1(-down * log(2)))
    return above, below


def _normal_bits(ops: Ops, x: Array) -> tuple[Array, Array]:
    """(exponent, mantissa) of positive float32 values, subnormals normalised."""
    xp = ops.module
    bits = ops.bits(x)
    tiny = bits < 0x00800000
    raised = xp.where(tiny, x, ops.f32(x, 0.0)) * ops.f32(x, 2.0**24)
    scaled = ops.bits(xp.where(tiny, raised, x))
    exponent = (scaled >> 23) - (24 * ops.count(tiny) + 127)
    return exponent, scaled & 0x7FFFFF


def floor_log2(ops: Ops, x: Array) -> Array:
    """floor(log2(x)) (int32) with the logarithm rounded to the dtype `ops.kind`; x > 0, finite."""
    below = log2_slack(KIND_BITS.get(ops.kind, 23))[1]
    exponent, mantissa = _normal_bits(ops, x)
    reach = ops.table(below, exponent + 151)  # towards 2^(exponent + 1)
    return exponent + ops.count(0x800000 - mantissa <= reach)


def ceil_log2(ops: Ops, x: Array) -> Array:
    """ceil(log2(x)) (int32) with a float32 logarithm; far below every exponent for 0."""
    xp = ops.module
    above = log2_slack(23)[0]
    exponent, mantissa = _normal_bits(ops, x)
    up = ops.count(mantissa > ops.table(above, exponent + 150))
    return xp.where(x > 0, exponent + up, xp.full_like(exponent, -1000))


# Errors of the two candidates --------------------------------------------------------------------


class Error(NamedTuple):
    """How 4-over-6 measures a candidate.

    `measure` is ``"mae"``, ``"mse"`` or ``"max"``. The decoded value is fl(fl(fl(q*s)*G)/top), or
    with `fast` the float16 product q*s against fl(x*S). Sums run over the elements in order.
    """

    measure: str
    top: float
    fast: bool = False


ERRORS = {
    "mae-256": Error("mae", _top(256.0)),
    "mae-448": Error("mae", _top(448.0)),
    "mse-256": Error("mse", _top(256.0)),
    "mse-448": Error("mse", _top(448.0)),
    "max-256": Error("max", _top(256.0)),
    "mae-fast": Error("mae", _top(256.0), fast=True),
}

# Decode orders -----------------------------------------------------------------------------------


def _itself(ops: Ops, t: Array) -> Array:
    return t


class Decode(NamedTuple):
    """How a value is formed from a code q, a block scale s and the stored number g, in float32.

    value = fl(q * factor(s, g)), then times g where `amax`, then over `divisor`, each rounded; the
    last is rounded again into the result's dtype. ``factor=None`` means the exact product
    q * s * g, rounded once. `multiplies` gives the factor that multiplies, ``tensor_scale``.
    `plus_zero`: the library's table has no -0.
    """

    factor: Callable[[Ops, Array, Array], Array] | None
    multiplies: Callable[[Ops, Array], Array] = _itself
    stores: Callable[[Ops, Array], Array] = _itself  # the way back, to one rounding
    amax: bool = False
    divisor: float | None = None
    plus_zero: bool = False

    @property
    def stores_factor(self) -> bool:
        """Whether the stored number is the factor itself."""
        return self.multiplies is _itself


def _over(top: float) -> Callable[[Ops, Array], Array]:
    return lambda ops, g: g / ops.f32(g, top)


def _times(top: float) -> Callable[[Ops, Array], Array]:
    return lambda ops, t: t * ops.f32(t, top)


def _inverse(ops: Ops, number: Array) -> Array:
    return ops.f32(number, 1.0) / number


def _te_decode(top: float) -> Decode:
    return Decode(
        lambda ops, s, g: (s * g) * (ops.f32(g, 1.0) / ops.f32(g, top)), _over(top), _times(top)
    )


def _fouroversix_decode(top: float) -> Decode:
    return Decode(lambda ops, s, g: s, _over(top), _times(top), amax=True, divisor=top)


def _or_eps(ops: Ops, s: Array, g: Array) -> Array:
    factor = s / g
    return ops.module.where(factor == 0, ops.f32(s, 2.0**-23), factor)


def _shifted(ops: Ops, s: Array, g: Array) -> Array:
    """The byte moved into float32's exponent: 0 gives 0, 255 infinity."""
    s = ops.module.where(s == 2.0**-127, ops.f32(s, 0.0), s)
    return ops.module.where(s == s, s, ops.f32(s, INF))


DECODE: dict[str, Decode] = {
    "exact": Decode(None),
    # A quarter first, so that only the result can overflow: (q * s/4) / 0.75 rounds once.
    "third": Decode(lambda ops, s, g: s * ops.f32(s, 0.25), divisor=0.75),
    "scale-first": Decode(lambda ops, s, t: s * t),
    "scale-first+0": Decode(lambda ops, s, t: s * t, plus_zero=True),
    "shifted": Decode(_shifted),
    "divided-or-eps": Decode(_or_eps, _inverse, _inverse),
    "divided": Decode(lambda ops, s, g: s / g, _inverse, _inverse),
    "te": _te_decode(_top(448.0)),
    "te-256": _te_decode(_top(256.0)),
    "fouroversix": _fouroversix_decode(6.0 * 448.0),
    "fouroversix-256": _fouroversix_decode(6.0 * 256.0),
    "fouroversix-1792": _fouroversix_decode(4.0 * 448.0),
}

# The table ---------------------------------------------------------------------------------------

_ZERO, _SEVEN = Nan(0.0), Nan(6.0)  # E2M1 codes 0 and 7
#: Bits of a NaN run through integer rounding: 3, 12 and 14 in E2M1, E2M3 and E3M2 are all 1.5.
_AO_NAN = Nan(1.5, signed=True)


def _te_4over6(scale_max: float, error: str) -> Dialect:
    return Dialect(
        _fouroversix_block(6.0, None, clamp=True), _te_tensor(scale_max),
        four=_fouroversix_block(6.0, 1.5, clamp=True), error=error, zero="plus", nan=_ZERO,
    )  # fmt: skip


def _fouroversix(error: str) -> Dialect:
    return Dialect(
        _fouroversix_block(6.0, None, clamp=False), _fouroversix_tensor(6.0, 256.0),
        four=_fouroversix_block(6.0, 1.5, clamp=False), error=error, zero="plus", wraps=True,
    )  # fmt: skip


def _torchao(cuda: bool, levels: int) -> Dialect:
    tensor = _none if levels == 1 else _torchao_cuda_tensor if cuda else _torchao_tensor
    # The NaN of an E4M3 scale has a mantissa of ones, which rounds up to code 4; others give 3.
    nan = Nan(2.0, signed=True, made=1.5)
    return Dialect(_torchao_block(cuda, levels), tensor, nan=nan)


def _mx(block: Any, **rest: Any) -> Dialect:
    return Dialect(block, _none, **rest)


_MICROXCALING = _mx(_microxcaling_mx, apply="microxcaling", zero="plus")

DIALECTS: dict[str, Dialect] = {
    "nvfp4/te-ref": Dialect(_te_block, _te_tensor(448.0), zero="plus", nan=_ZERO),
    "nvfp4/te-unfused": Dialect(_te_block, _te_kernel_tensor, skip_nan=True, nan=_SEVEN),
    "nvfp4/te-fast": Dialect(
        _te_fast_block, _te_kernel_tensor, skip_nan=True, nan=_SEVEN, narrow=True
    ),
    "nvfp4/te-4over6-mae-256": _te_4over6(256.0, "mae-256"),
    "nvfp4/te-4over6-mae-448": _te_4over6(448.0, "mae-448"),
    "nvfp4/te-4over6-mse-256": _te_4over6(256.0, "mse-256"),
    "nvfp4/te-4over6-mse-448": _te_4over6(448.0, "mse-448"),
    "nvfp4/te-4over6-mae-256-fast": _te_4over6(256.0, "mae-fast"),
    "nvfp4/torchao": _torchao(False, 2),
    "nvfp4/torchao-cuda": _torchao(True, 2),
    "nvfp4/torchao-1level": _torchao(False, 1),
    "nvfp4/torchao-1level-cuda": _torchao(True, 1),
    "nvfp4/modelopt": Dialect(
        _modelopt_block, _torchao_tensor, apply="divide", zero="plus", nan=_SEVEN
    ),
    "nvfp4/modelopt-cuda": Dialect(
        _modelopt_block, _torchao_cuda_tensor, apply="divide", zero="plus", nan=_SEVEN
    ),
    "nvfp4/compressed-tensors": Dialect(
        _ct_block, _ct_tensor, apply="divide", zero="plus", nan=_ZERO, narrow_nan=True
    ),
    "nvfp4/vllm-ref": Dialect(_reference_block(1e-8), _caller_tensor, zero="plus", nan=_ZERO),
    "nvfp4/flashinfer-ref": Dialect(_reference_block(0.0), _caller_tensor, zero="plus", nan=_ZERO),
    "nvfp4/fouroversix-static6": Dialect(
        _fouroversix_block(6.0, None, clamp=False), _fouroversix_tensor(6.0, 448.0),
        zero="plus", wraps=True,
    ),
    "nvfp4/fouroversix-static4": Dialect(
        _fouroversix_block(4.0, None, clamp=False), _fouroversix_tensor(4.0, 448.0),
        zero="plus", wraps=True,
    ),
    "nvfp4/fouroversix-mse": _fouroversix("mse-256"),
    "nvfp4/fouroversix-mae": _fouroversix("mae-256"),
    "nvfp4/fouroversix-absmax": _fouroversix("max-256"),
    "nvfp4/quark": Dialect(
        _quark_block, _quark_tensor, apply="divide", zero="never", packs_bits=True
    ),
    "mx/torchao-floor": _mx(_torchao_mx("floor", old=False), nan=_AO_NAN),
    "mx/torchao-rceil": _mx(_rceil_mx(255), nan=_AO_NAN),
    "mx/torchao-ceil": _mx(_torchao_mx("ceil", old=False), nan=_AO_NAN),
    "mx/torchao-even": _mx(_torchao_mx("even", old=False), nan=_AO_NAN),
    "mx/torchao-0.18-floor": _mx(_torchao_mx("floor", old=True), apply="divide", nan=_AO_NAN),
    "mx/torchao-0.18-rceil": _mx(_torchao_018_rceil, nan=_AO_NAN),
    "mx/torchao-0.18-ceil": _mx(_torchao_mx("ceil", old=True), apply="divide", nan=_AO_NAN),
    "mx/torchao-0.18-even": _mx(_torchao_mx("even", old=True), apply="divide", nan=_AO_NAN),
    "mx/quark-even": _mx(_quark_even, apply="divide", zero="never", packs_bits=True),
    "mx/quark-pack-up": _mx(_cut_mx(up=True, by_max=True), nan=Nan(6.0, signed=True)),
    "mx/quark-pack-down": _mx(_cut_mx(up=False, by_max=True), nan=Nan(6.0, signed=True)),
    "mx/quark-pack-even": _mx(_quark_pack_even, nan=Nan(6.0, signed=True)),
    "mx/compressed-tensors": _mx(
        _ct_mx, apply="divide", zero="plus", nan=_ZERO, narrow_nan=True
    ),
    "mx/microxcaling-nearest": _MICROXCALING,
    "mx/microxcaling-even": _MICROXCALING,
    "mx/microxcaling-floor": _MICROXCALING,
    "mx/triton-kernels-up": _mx(_cut_mx(up=True, by_max=True), nan=Nan(0.0, signed=True)),
    "mx/triton-kernels-down": _mx(_cut_mx(up=False, by_max=False), nan=Nan(0.0, signed=True)),
    "mx/te": _mx(_rceil_mx(254), skip_nan=True, hardware=True),
    "mx/modelopt": _mx(_modelopt_mxfp8),
    "mx/fouroversix-static6": _mx(_fouroversix_mx(6.0), apply="divide", zero="plus", wraps=True),
    "mx/fouroversix-static4": _mx(_fouroversix_mx(4.0), apply="divide", zero="plus", wraps=True),
    "mx/qutlass-absmax": _mx(_qutlass_mx, apply="divide-times-3", skip_nan=True, nan=_SEVEN),
}  # fmt: skip

#: Rules whose name stands for another dialect with one element format.
_BY_ELEMENT = {
    ("mx/modelopt", "e2m1"): _mx(_modelopt_mxfp4, apply="divide", zero="minus", nan=Nan(-0.0)),
}


def element_nan(dialect: Dialect, element: Format, kind: str) -> Nan:
    """What NaN becomes in `element`: formats that have a NaN code keep it, with its sign."""
    if element.is_integer:
        return Nan(0.0)
    if dialect.packs_bits and not element.has_nan:
        top = 2.0**element.emax
        return Nan(1.5 * top, signed=True, inf=top)
    if element.has_nan:
        if dialect.hardware:
            return Nan()
        # torch's conversion from bfloat16 loses the sign of what it made itself.
        return Nan(None, signed=not (dialect.narrow_nan and kind == "bfloat16"))
    if dialect.narrow_nan and (element.bits == 6 or kind == "bfloat16"):
        # Through bfloat16 every NaN is negative; FP6's search for one ends at -0.
        return Nan(-0.0)
    return dialect.nan


def zero_sign(dialect: Dialect, element: Format) -> str:
    """`Dialect.zero`, but Quark converts to FP8 with torch, which keeps signs."""
    return "keep" if dialect.zero == "never" and element.has_nan else dialect.zero


@lru_cache(maxsize=512)
def dialect_of(fmt: Format | BlockFormat) -> Dialect | None:
    """The dialect behind a format's rule, or None."""
    if not isinstance(fmt, BlockFormat):
        return None
    return _BY_ELEMENT.get((fmt.rule, fmt.element.name)) or DIALECTS.get(fmt.rule)
