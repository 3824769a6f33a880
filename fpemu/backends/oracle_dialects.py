"""The oracle of the dialects: what each library computes for one block, one operation at a time.

A float32 number is its bit pattern here, because libraries show the sign and the payload of a NaN
in their codes. `mul`, `div`, `add` and `sub` are one exact operation and one rounding; `fl(...)` in
the notes below. Where the tensor's own dtype matters (microxcaling, compressed-tensors) the same
functions round to float16 or bfloat16 instead.

A NaN operand survives with its sign; of two, torch keeps the second of ``a * b`` and ``a + b`` and
the first of ``a / b``. 0/0, Inf/Inf and Inf*0 give a negative NaN, as x86 does. A NaN of the input
counts as the canonical one with its sign.

Every dialect has two halves, listed in `DIALECTS`: a scale rule, which gives the stored scale and
the float32 values that the library casts, and an element cast. The cast says what the library does
with NaN, with zeros and past the largest value; a rounding other than the row's own follows the
rules of `fpemu.casting` instead, with the library's signs of zero and its NaN codes kept.

A is a block's amax, G the tensor's, x an element, s a stored scale read as a number. Unless a note
says otherwise amaxes propagate NaN, and input that is not float32 is rounded to it first.

Where a library uses a float ``log2``, `floor_log2` and `ceil_log2` round the exact logarithm to the
dtype, to nearest. torch 2.13 does the same wherever it decides: for all float32 within 400 units in
the last place of a power of two, and for all float16 and bfloat16 values (measured on x86 with
AVX2; contiguous, strided, short and 0-d tensors agree).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fpemu.backends import Parts, Request, scales_dtype, scales_shape
from fpemu.backends import oracle as o
from fpemu.formats import BlockFormat, Format

Array = np.ndarray[Any, Any]

# Arithmetic on bit patterns ----------------------------------------------------------------------

NAN, INF, ONE, FLT_MAX = 0x7FC00000, 0x7F800000, 0x3F800000, 0x7F7FFFFF
F32 = "float32"


def bits(value: float | Fraction, kind: str = F32) -> int:
    """A finite constant, rounded once."""
    return o.to_bits(o.number(value), kind)


def _top(kind: str) -> int:
    """The pattern of +infinity."""
    exp_bits, man_bits = o.IEEE[kind]
    return ((1 << exp_bits) - 1) << man_bits


def sign(a: int, kind: str = F32) -> int:
    """The sign bit where it stands."""
    return a & 1 << sum(o.IEEE[kind])


def magnitude(a: int, kind: str = F32) -> int:
    """|a|. Patterns without a sign are ordered as the numbers are."""
    return a & ~(1 << sum(o.IEEE[kind]))


def is_nan(a: int, kind: str = F32) -> bool:
    return magnitude(a, kind) > _top(kind)


def is_finite(a: int, kind: str = F32) -> bool:
    return magnitude(a, kind) < _top(kind)


def is_zero(a: int, kind: str = F32) -> bool:
    return magnitude(a, kind) == 0


def _rounded(exact: o.Number, kind: str) -> int:
    if exact.is_nan:  # made here, not taken over: x86 sets the sign
        return o.to_bits(exact, kind) | 1 << sum(o.IEEE[kind])
    return o.to_bits(exact, kind)


def _nan_of(first: int, second: int, kind: str) -> int | None:
    """The NaN that survives, quiet."""
    quiet = 1 << o.IEEE[kind][1] - 1
    return next((a | quiet for a in (first, second) if is_nan(a, kind)), None)


def mul(a: int, b: int, kind: str = F32) -> int:
    nan = _nan_of(b, a, kind)
    return nan or _rounded(o.times(o.from_bits(a, kind), o.from_bits(b, kind)), kind)


def div(a: int, b: int, kind: str = F32) -> int:
    nan = _nan_of(a, b, kind)
    return nan or _rounded(o.over(o.from_bits(a, kind), o.from_bits(b, kind)), kind)


def add(a: int, b: int, kind: str = F32) -> int:
    nan = _nan_of(b, a, kind)
    return nan or _rounded(_plus(o.from_bits(a, kind), o.from_bits(b, kind)), kind)


def sub(a: int, b: int, kind: str = F32) -> int:
    return add(a, b if is_nan(b, kind) else b ^ 1 << sum(o.IEEE[kind]), kind)


def _plus(a: o.Number, b: o.Number) -> o.Number:
    if a.is_inf or b.is_inf:
        if a.is_inf and b.is_inf and a.negative != b.negative:
            return o.NAN
        return a if a.is_inf else b
    total = (-a.exact if a.negative else a.exact) + (-b.exact if b.negative else b.exact)
    if total == 0:  # +0, but for -0 plus -0
        return o.Number(a.negative and b.negative, Fraction(0))
    return o.number(total)


def clamp(a: int, low: float | None, high: float, kind: str = F32) -> int:
    """NaN stays; `low` None stands for ``-high``."""
    if is_nan(a, kind):
        return a
    x = o.from_bits(a, kind)
    value = -x.size if x.negative else x.size
    if value > high:
        return bits(high, kind)
    low = -high if low is None else low
    return bits(low, kind) if value < low else a


def less(a: int, b: int) -> bool:
    """a < b of two float32 values that are not negative; false for NaN."""
    return not is_nan(a) and not is_nan(b) and magnitude(a) < magnitude(b)


def amax(xs: Iterable[int], kind: str = F32, ignore_nan: bool = False) -> int:
    """The largest magnitude; a NaN wins or does not count."""
    sizes = [magnitude(a, kind) for a in xs]
    if ignore_nan:
        sizes = [a for a in sizes if a <= _top(kind)]
    return max(sizes, default=0)


def convert(a: int, source: str, target: str) -> int:
    """From one dtype into another, one rounding; a NaN keeps its sign and becomes canonical."""
    x = o.from_bits(a, source)
    return o.to_bits(x, target) | (int(x.is_nan and x.negative) << sum(o.IEEE[target]))


def read(fmt: Format, code: int) -> int:
    """A code as float32. The NaN of E4M3 becomes 0x7FF00000, as torch converts it."""
    x = o.value_of(fmt, code)
    if x.is_nan:
        return 0x7FF00000 | int(bool(code & o.grid(fmt).sign)) << 31
    return o.to_bits(x, F32)


def e4m3(fmt: BlockFormat, a: int) -> int:
    """The scale's cast: nearest even, saturating; NaN keeps its sign."""
    assert fmt.scale is not None
    if is_nan(a):
        return _signed_nan(fmt.scale, a)
    return o.round_to(fmt.scale, o.from_bits(a, F32))


def _signed_nan(fmt: Format, a: int) -> int:
    g = o.grid(fmt)
    assert g.nan is not None
    return g.nan | (g.sign if sign(a) else 0)


def scale_value(fmt: BlockFormat, code: int) -> int:
    assert fmt.scale is not None
    return read(fmt.scale, code)


# The floor and the ceiling of a rounded logarithm -------------------------------------------------

_PRECISION = {"float32": 24, "bfloat16": 8, "float16": 11}
_GUARD = 256  # bits of the bounds below


@lru_cache(maxsize=4096)
def _exp2_bounds(fraction: Fraction) -> tuple[Fraction, Fraction]:
    """Lower and upper bounds of ``2**fraction``, 0 < fraction < 1 with a power-of-two denominator.

    ``2**(1/2), 2**(1/4), ...`` are repeated integer square roots, rounded down and up.
    """
    one = 1 << _GUARD
    low = high = 2 * one  # of 2**(1/2**i), scaled
    product_low = product_high = Fraction(1)
    while fraction:
        low, high = math.isqrt(low * one), math.isqrt(high * one) + 1
        fraction *= 2
        if fraction >= 1:
            product_low *= Fraction(low, one)
            product_high *= Fraction(high, one)
            fraction -= 1
    return product_low, product_high


def _below_exp2(size: Fraction, exponent: Fraction) -> bool:
    """Is ``size < 2**exponent``? The power is irrational, so they never are equal."""
    whole = math.floor(exponent)
    low, high = _exp2_bounds(exponent - whole)
    scaled = size / o.pow2(whole)
    assert scaled < low or scaled > high
    return scaled < low


def _step(n: int, away: bool, kind: str) -> Fraction:
    """Distance from the integer n to its neighbour away from zero, or toward zero."""
    exponent = abs(n).bit_length() - 1
    finer = not away and abs(n) == 1 << exponent
    return o.pow2(exponent - _PRECISION[kind] + 1 - finer)


def floor_log2(a: int, kind: str = F32) -> int:
    """``floor(log2(a))`` with the logarithm rounded to `kind`; a finite and positive."""
    size = o.from_bits(a, kind).exact
    e = o.floor_log2(size)
    if e + 1 == 0:  # the floats below 0 are dense: no logarithm rounds up to it
        return e
    half = _step(e + 1, away=e + 1 < 0, kind=kind) / 2
    return e if _below_exp2(size, e + 1 - half) else e + 1


def ceil_log2(a: int, kind: str = F32) -> int:
    """``ceil(log2(a))`` with the logarithm rounded to `kind`; a finite and positive."""
    size = o.from_bits(a, kind).exact
    e = o.floor_log2(size)
    if size == o.pow2(e):
        return e
    if e == 0:
        return 1
    half = _step(e, away=e > 0, kind=kind) / 2
    if _below_exp2(size, e + half):
        return e
    return e + 1


def pow2_bits(exponent: int, kind: str = F32) -> int:
    """``2**exponent`` in a dtype: 0, a subnormal or infinity past its ends."""
    return bits(o.pow2(exponent), kind)


# Element casts -----------------------------------------------------------------------------------


class Call(NamedTuple):
    """How one element is to be rounded."""

    own: bool  # by the row's own tie rule, that is as the library does
    rounding: str
    overflow: str
    word: int
    nbits: int


def _round(fmt: Format, a: int, call: Call) -> int:
    return o.round_to(fmt, o.from_bits(a, F32), call.rounding, call.overflow, call.word, call.nbits)


def _no_negative_zero(fmt: Format, code: int) -> int:
    return 0 if fmt.exp_bits and code == o.grid(fmt).sign else code


def _ordinary(fmt: Format, a: int, call: Call) -> int:
    """Finite or infinite, by the rules of `fpemu.casting`; an integer has no code for NaN: 0."""
    return 0 if is_nan(a) and fmt.exp_bits == 0 else _round(fmt, a, call)


def hardware(fmt: Format, a: int, call: Call) -> int:
    """PTX cvt.satfinite: NaN is the canonical one or +max; -0 and negative underflow are -0."""
    return _ordinary(fmt, a, call)


def torch_cast(fmt: Format, a: int, call: Call) -> int:
    """torch's float8 cast keeps the sign of NaN. Elements without NaN: as `hardware`."""
    if is_nan(a) and o.grid(fmt).nan is not None:
        return _signed_nan(fmt, a)
    return _ordinary(fmt, a, call)


def torchao(fmt: Format, a: int, call: Call) -> int:
    """FP4 and FP6 by integer arithmetic on float32 bits, which a NaN goes through as well: 0x7FC00000
    gives 3 (E2M1), 12 (E2M3) and 14 (E3M2), 0x7FF00000 gives 4 (E2M1). FP8 by `torch_cast`."""
    if not is_nan(a) or fmt.special != "finite" or fmt.exp_bits == 0:
        return torch_cast(fmt, a, call)
    shift = 23 - fmt.man_bits
    assert fmt.bias is not None
    odd = magnitude(a) >> shift & 1
    total = magnitude(a) + ((fmt.bias - 127) << 23) + (1 << shift - 1) - 1 + odd
    return total >> shift & 0xFF | (o.grid(fmt).sign if sign(a) else 0)


def reference(fmt: Format, a: int, call: Call) -> int:
    """By comparisons, as Python references do: -0 becomes 0, negative underflow -0. NaN passes no
    comparison: 0."""
    if is_nan(a) or is_zero(a):
        return 0
    return _ordinary(fmt, a, call)


def zero_added(fmt: Format, a: int, call: Call) -> int:
    """compressed-tensors adds a zero point: -0 becomes 0. NaN: in FP4 a zero with its sign, in FP6
    what a search past the end of its table gives, -0; FP8 as `torch_cast`; see `_zero_added_nan`."""
    if is_nan(a) and fmt.bits == 4:
        return o.grid(fmt).sign if sign(a) else 0
    if is_nan(a) and fmt.bits == 6:
        return o.grid(fmt).sign
    if is_zero(a):
        return 0
    return torch_cast(fmt, a, call)


def comparing(fmt: Format, a: int, call: Call) -> int:
    """As `reference`, but NaN becomes the largest value."""
    return 0 if is_zero(a) else _ordinary(fmt, a, call)


def not_positive(fmt: Format, a: int, call: Call) -> int:
    """ModelOpt's MXFP4 sets the sign bit of all that is not positive, +0 and NaN too; NaN has
    magnitude 0. FP8 as `torch_cast`."""
    if fmt.bits != 4:
        return torch_cast(fmt, a, call)
    g = o.grid(fmt)
    code = 0 if is_nan(a) else _round(fmt, a, call) & ~g.sign
    positive = not is_nan(a) and not is_zero(a) and not sign(a)
    return code if positive else code | g.sign


def triton_kernels(fmt: Format, a: int, call: Call) -> int:
    """NaN: magnitude 0 and its sign in FP4, as the vectors record it (the source's arithmetic gives
    magnitude 7); FP8 as `torch_cast`."""
    if is_nan(a) and fmt.special == "finite" and fmt.exp_bits:
        return o.grid(fmt).sign if sign(a) else 0
    return torch_cast(fmt, a, call)


def quark_pack(fmt: Format, a: int, call: Call) -> int:
    """Integer arithmetic on float32 bits; NaN is the largest magnitude with its sign."""
    if is_nan(a):
        return o.grid(fmt).max_code | (o.grid(fmt).sign if sign(a) else 0)
    return _round(fmt, a, call)


def quark(fmt: Format, a: int, call: Call) -> int:
    """A kernel that returns +0 for all underflow and lets Inf and NaN through; the packer then
    cuts bits out of them: Inf has mantissa 0 below all exponent bits set, NaN the quiet bit too."""
    if fmt.exp_bits == 0 or o.grid(fmt).nan is not None:
        return torch_cast(fmt, a, call)
    if is_nan(a) or (call.own and not is_finite(a)):
        code = magnitude(a) >> 23 - fmt.man_bits & o.grid(fmt).max_code
        return code | (o.grid(fmt).sign if sign(a) else 0)
    return _no_negative_zero(fmt, _round(fmt, a, call))


def fouroversix(fmt: Format, a: int, call: Call) -> int:
    """RNE by three scaled ``round`` calls, then the bits of a bfloat16, with no clamp: a code of up
    to 8 bits, whose upper four run into the next nibble (see `fouroversix_packed`).

    NaN and Inf: 11, the code of the negative NaN that torch's conversion writes.
    """
    if not call.own:
        return 11 if is_nan(a) else 0 if is_zero(a) else _round(fmt, a, call)
    if is_nan(a) or magnitude(mul(a, bits(2))) >= INF:  # Inf times a mask of 0 is NaN
        return 11
    size = o.from_bits(a, F32).exact
    step = Fraction(1, 2) if size < 2 else 1 if size < 4 else 2
    rounded = o.to_bits(o.number(round(size / step) * step), "bfloat16")
    negative = bool(sign(a)) and size > 0
    if rounded == 0:
        return 8 * negative
    exponent, mantissa = rounded >> 7, rounded >> 6 & 1
    if exponent == 126 and not rounded & 0x7F:  # 0.5
        mantissa = 1
    return (8 * negative | (exponent - 126) << 1 | mantissa) & 0xFF


def fouroversix_packed(codes: list[int]) -> list[int]:
    """Codes as read back from ``byte = odd << 4 | even``: an even code of more than four bits
    reaches into its odd neighbour."""
    out = [c & 15 for c in codes]
    for i in range(1, len(codes), 2):
        out[i] |= codes[i - 1] >> 4
    return out


# Scale rules -------------------------------------------------------------------------------------


class Block(NamedTuple):
    """What a scale rule sees."""

    fmt: BlockFormat
    xs: list[int]  # float32 bits
    raw: list[int]  # bits in the tensor's dtype
    kind: str  # that dtype
    tensor: int  # G, or the number that the library derives from it once per tensor
    size: int  # elements of a whole block, which a short one is padded to

    @property
    def amax(self) -> int:
        return amax(self.xs)


class Scaled(NamedTuple):
    stored: int  # the scale's code
    cast: list[int]  # float32 bits of what is cast
    codes: list[int] | None = None  # where the library's rounding is no cast of those values


SIXTH = bits(Fraction(1, 6))  # 0x3E2AAAAB


def _largest(fmt: BlockFormat) -> Fraction:
    return o.grid(fmt.element).largest


def _scaled(block: Block, stored: int, factor: int) -> Scaled:
    return Scaled(stored, [mul(x, factor) for x in block.xs])


# TransformerEngine: NVFP4.  Source: reference_nvfp4.py; core_nvfp4.cuh and the kernels beside it.


def te_encode_scale(g: int, top: float, kernel: bool = False) -> int:
    """S = min(fl(top/G), FLT_MAX), 1 if that is 0; the kernels give 1 for G = 0 as well."""
    s = div(bits(top), g)
    if not is_nan(s) and s > FLT_MAX:
        s = FLT_MAX
    return ONE if is_zero(s) or (kernel and is_zero(g)) else s


def _te_multiplier(d: int, s: int) -> int:
    """e = min(fl(1/fl(s * fl(1/S))), FLT_MAX)."""
    e = div(ONE, mul(d, div(ONE, s)))
    return e if is_nan(e) else min(e, FLT_MAX)


def _te_scale(block: Block, a: int, s: int) -> int:
    """E4M3(fl(A * fl(S * fl(1/6))))."""
    return e4m3(block.fmt, mul(a, mul(s, SIXTH)))


def te_ref(block: Block) -> Scaled:
    """Elements fl(x * e), S from G.

    Zero block: s = 0, e = FLT_MAX, codes 0. Scale underflow: e = FLT_MAX, so non-zero x gives +-6.
    NaN in the block: s NaN, codes 0. NaN in G: all blocks. G infinite: S = 1.
    """
    s = te_encode_scale(block.tensor, 2688)
    stored = _te_scale(block, block.amax, s)
    return _scaled(block, stored, _te_multiplier(scale_value(block.fmt, stored), s))


def te_unfused(block: Block) -> Scaled:
    """As `te_ref`, with amaxes that ignore NaN and the hardware cast: a NaN element becomes +6 and
    -0 stays."""
    s = te_encode_scale(block.tensor, 2688, kernel=True)
    stored = _te_scale(block, amax(block.xs, ignore_nan=True), s)
    return _scaled(block, stored, _te_multiplier(scale_value(block.fmt, stored), s))


def te_fast(block: Block) -> Scaled:
    """The tuned kernel's use_fast_math: one bfloat16 coefficient, bf16(min(fl(S/s), bf16 max)).

    Model. The kernel takes bfloat16 tensors: other input is rounded to bfloat16 first, not `amax=`.
    Its PTX adds +0 to the product, by which -0 would become 0; the recorded vectors keep -0, and so
    does this.
    """
    s = te_encode_scale(block.tensor, 2688, kernel=True)
    stored = _te_scale(block, amax(block.xs, ignore_nan=True), s)
    ratio = min(div(s, scale_value(block.fmt, stored)), 0x7F7F0000)
    return _scaled(block, stored, _through(ratio, "bfloat16"))


def _through(a: int, kind: str) -> int:
    return convert(convert(a, F32, kind), kind, F32)


def te_4over6(mode: str, largest: int, fast: bool = False) -> Callable[[Block], Scaled]:
    """The better of two scales: s6 = E4M3(fl(fl(A/6) * S)) and s4 = E4M3(fl(that * 1.5)).

    S is from 6 * `largest`. Both candidates are quantized as in `te_ref`; s4 is taken if its error
    is strictly less. Error: a running float32 sum over the elements, in order, of |d| (mae) or
    fl(d*d) (mse), d = fl(fl(fl(fl(q*s) * G) / (6 * largest)) - x); `fast`: d = q*s - fl(x*S), with
    a NaN scale's q*s read as 98304. NaN errors compare false: s6.
    """

    def error(block: Block, scaled: Scaled, s: int) -> int:
        d = scale_value(block.fmt, scaled.stored)
        total = 0
        for x, cast in zip(block.xs, scaled.cast, strict=True):
            q = read(block.fmt.element, reference(block.fmt.element, cast, OWN))
            if fast:
                product = bits(98304) if is_nan(d) else mul(q, d)
                difference = sub(product, mul(x, s))
            else:
                value = div(mul(mul(q, d), block.tensor), bits(6 * largest))
                difference = sub(value, x)
            squared = mul(difference, difference)
            total = add(total, squared if mode == "mse" else magnitude(difference))
        return total

    def rule(block: Block) -> Scaled:
        s = te_encode_scale(block.tensor, 6 * largest)
        base = mul(div(block.amax, bits(6)), s)
        four, six = [
            _scaled(block, stored, _te_multiplier(scale_value(block.fmt, stored), s))
            for stored in (e4m3(block.fmt, mul(base, bits(1.5))), e4m3(block.fmt, base))
        ]
        return four if less(error(block, four, s), error(block, six, s)) else six

    return rule


# torchao: NVFP4.  Source: prototype/mx_formats/nvfp4_tensor.py.


def torchao_tensor(g: int, kind: str) -> int:
    """T = fl(G/2688)."""
    return div(g, bits(2688))


def torchao_tensor_cuda(g: int, kind: str) -> int:
    """fl(G * fl(1/2688)): eager CUDA multiplies by the reciprocal of every scalar divisor."""
    return mul(g, bits(Fraction(1, 2688)))


def torchao_nvfp4(cuda: bool) -> Callable[[Block], Scaled]:
    """s = E4M3(clamp(fl(fl(A/6) / T), 2^-6, 448)); elements fl(x * fl(fl(1/T) / s)).

    The floor 2^-6 is E4M3's smallest normal: a zero block has s = 0x08. G = 0 or NaN: s NaN, codes
    from NaN bits. T is stored and multiplies: fl(q * fl(s*T)).
    """

    def rule(block: Block) -> Scaled:
        t = block.tensor
        sixth = mul(block.amax, SIXTH) if cuda else div(block.amax, bits(6))
        stored = e4m3(block.fmt, clamp(div(sixth, t), 2**-6, 448))
        return _scaled(block, stored, div(div(ONE, t), scale_value(block.fmt, stored)))

    return rule


def torchao_1level(cuda: bool) -> Callable[[Block], Scaled]:
    """s = E4M3(clamp(fl(A/6), 2^-6, 448)); elements fl(x * fl(1/s))."""

    def rule(block: Block) -> Scaled:
        sixth = mul(block.amax, SIXTH) if cuda else div(block.amax, bits(6))
        stored = e4m3(block.fmt, clamp(sixth, 2**-6, 448))
        return _scaled(block, stored, div(ONE, scale_value(block.fmt, stored)))

    return rule


# ModelOpt: NVFP4.  Source: torch/quantization/qtensor/nvfp4_tensor.py, dynamic path.


def modelopt_nvfp4(block: Block) -> Scaled:
    """T = fl(G/2688); s = E4M3(clamp(p, 2^-9, 448)), p = fl(A / fl(6*T)), 1 where that is 0;
    elements fl(x / fl(s*T)).

    Zero block: s = 0x38 (1.0). Scale underflow: s = 0x01. G = 0: s NaN. NaN elements: +6.
    On CUDA only T differs (`torchao_tensor`). Decoded by fl(q * fl(s*T)).
    """
    p = div(block.amax, mul(bits(6), block.tensor))
    stored = e4m3(block.fmt, clamp(ONE if is_zero(p) else p, 2**-9, 448))
    divisor = mul(scale_value(block.fmt, stored), block.tensor)
    return Scaled(stored, [div(x, divisor) for x in block.xs])


# compressed-tensors: NVFP4.  Source: quantization/utils/helpers.py (generate_gparam,
# calculate_qparams), lifecycle/forward_helpers.py.  CUDA eager has no scalar divisor: same bits.


def compressed_tensors_tensor(g: int, kind: str) -> int:
    """S = dt(2688 * dt(1/max(G, tiny))) in the tensor's dtype, 1 where that is Inf or NaN."""
    g = convert(g, F32, kind)
    if not is_nan(g, kind):
        g = max(g, 1 << o.IEEE[kind][1])
    s = mul(div(bits(1, kind), g, kind), bits(2688, kind), kind)
    return convert(s, kind, F32) if is_finite(s, kind) else ONE


def compressed_tensors_nvfp4(block: Block) -> Scaled:
    """s = E4M3(fl(S * dt(A/6))), 0.125 where that is 0; elements fl(x / fl(s/S)).

    dt is the tensor's dtype. Zero block and scale underflow: s = 0x20. NaN: codes 0, in
    bfloat16 8. S divides: fl(q * fl(s/S)).
    """
    kind = block.kind
    sixth = convert(div(amax(block.raw, kind), bits(6, kind), kind), kind, F32)
    stored = e4m3(block.fmt, mul(block.tensor, sixth)) or 0x20
    divisor = div(scale_value(block.fmt, stored), block.tensor)
    return Scaled(stored, [_zero_added_nan(div(x, divisor), block) for x in block.xs])


def _zero_added_nan(a: int, block: Block) -> int:
    """FP4 is cast from |x|, whose NaN is positive, unless it passed through bfloat16: torch's
    conversion writes a NaN as 0xFFFF."""
    if not is_nan(a):
        return a
    if block.kind == "bfloat16":
        return NAN | 1 << 31
    return NAN if block.fmt.element.bits == 4 else a


# vLLM and FlashInfer references: NVFP4.  Sources: nvfp4_emulation_utils.py ref_nvfp4_quant;
# tests/test_helpers/utils_fp4.py ref_fp4_quant.  S = fl(2688/G) is the caller's.


def encode_scale(g: int, kind: str) -> int:
    return div(bits(2688), g)


def flashinfer(block: Block) -> Scaled:
    """s = E4M3(fl(S * fl(A * fl(1/6)))); elements fl(x * R(fl(s * R(S)))), R(0) = 0, else fl(1/y).

    Scale underflow: codes 0. A NaN element has no code there; here 0. Decoded by fl(q * fl(s/S)).
    """
    return _reciprocals(block, lambda y: 0 if is_zero(y) else div(ONE, y))


def vllm(block: Block) -> Scaled:
    """As `flashinfer` with R(y) = fl(1 / fl(y + 1e8 * (y == 0)))."""
    return _reciprocals(block, lambda y: div(ONE, bits(10**8) if is_zero(y) else y))


def _reciprocals(block: Block, r: Callable[[int], int]) -> Scaled:
    s = block.tensor
    stored = e4m3(block.fmt, mul(s, mul(block.amax, SIXTH)))
    return _scaled(block, stored, r(mul(scale_value(block.fmt, stored), r(s))))


# Four Over Six: NVFP4.  Source: quantize/pytorch/reference.py.


def _fouroversix_candidate(block: Block, most: int, top: int, expansion: float) -> Scaled:
    enc = div(bits(most * top), block.tensor)
    p = 0 if is_zero(block.tensor) else mul(div(block.amax, bits(most)), enc)
    stored = e4m3(block.fmt, mul(p, bits(expansion)))
    d = scale_value(block.fmt, stored)
    if is_zero(d):
        return Scaled(stored, [0] * len(block.xs))
    return _scaled(block, stored, div(ONE, mul(div(ONE, enc), d)))


def fouroversix_static(most: int) -> Callable[[Block], Scaled]:
    """S = fl(most*448/G); s = E4M3(fl(fl(A/most) * S)), no clamp but the cast's; elements
    fl(x * fl(1/fl(fl(1/S) * s))), 0 where s is 0.

    G = 0: s = 0. No clamp of elements: 8 and beyond wrap (`fouroversix`); NaN and Inf: 11.
    Decoded by fl(fl(q*s*G) / (most*448)).
    """
    return lambda block: _fouroversix_candidate(block, most, 448, 1.0)


def _sum16(terms: list[int]) -> int:
    """torch's sum over 16 contiguous float32: eight lanes a[j] + a[j+8], then these in order."""
    total = 0
    for j in range(8):
        lane = terms[j]
        for k in range(j + 8, len(terms), 8):
            lane = add(lane, terms[k])
        total = add(total, lane)
    return total


def fouroversix_adaptive(mode: str) -> Callable[[Block], Scaled]:
    """The better of s6 (6 * 256 in place of 6 * 448) and s4, whose scale is times 1.5.

    Error: sum (mae, mse, by `_sum16`) or maximum (absmax) of |d| or fl(d*d), d = fl(fl(fl(fl(q*s) *
    G) / 1536) - x), q unclamped; s4 is taken if strictly less, NaN compares false.
    """

    def error(block: Block, scaled: Scaled) -> int:
        d = scale_value(block.fmt, scaled.stored)
        terms = []
        for x, cast in zip(block.xs, scaled.cast, strict=True):
            value = div(mul(mul(_unclamped(cast), d), block.tensor), bits(1536))
            difference = sub(value, x)
            terms.append(mul(difference, difference) if mode == "mse" else magnitude(difference))
        terms += [0] * (block.size - len(terms))
        return amax(terms) if mode == "absmax" else _sum16(terms)

    def rule(block: Block) -> Scaled:
        six = _fouroversix_candidate(block, 6, 256, 1.0)
        four = _fouroversix_candidate(block, 6, 256, 1.5)
        return four if less(error(block, four), error(block, six)) else six

    return rule


def _unclamped(a: int) -> int:
    """E2M1's grid continued past 6 in steps of 2; NaN and Inf give NaN."""
    if is_nan(a) or magnitude(mul(a, bits(2))) >= INF:
        return NAN
    size = o.from_bits(a, F32).exact
    step = Fraction(1, 2) if size < 2 else 1 if size < 4 else 2
    return sign(a) | bits(round(size / step) * step)


# Quark: NVFP4.  Source: observer.get_scale with e4m3 scales; hw_emulation's CPU kernel; Pack_fp4.


def quark_tensor(g: int, kind: str) -> int:
    """T = fl(448 * fl(6 * fl(1/G)))."""
    return mul(mul(div(ONE, g), bits(6)), bits(448))


def quark_nvfp4(block: Block) -> Scaled:
    """s = E4M3(fl(fl(A/6) * T)); elements fl(x / fl(s/T)), the quotient 2^-23 where it is 0.

    Zero block: s = 0, codes 0. NaN elements: +7 or -7's code by their bits. T divides.
    """
    stored = e4m3(block.fmt, mul(div(block.amax, bits(6)), block.tensor))
    divisor = div(scale_value(block.fmt, stored), block.tensor)
    if is_zero(divisor):
        divisor = bits(2**-23)
    return Scaled(stored, [div(x, divisor) for x in block.xs])


# torchao: MX.  Source: prototype/mx_formats/mx_tensor.py, at 36027d8 and in the 0.18.0 wheel.


def _emax(fmt: BlockFormat) -> int:
    return o.floor_log2(_largest(fmt))


def _kept_bits(fmt: BlockFormat) -> int:
    """Mantissa bits of an element below its leading one."""
    return fmt.element.man_bits - (0 if fmt.element.exp_bits else 1)


def _half_up_to_power(a: int, kept: int, kind: str = F32) -> int:
    """a rounded half up to `kept` mantissa bits, then cut to a power of two; may overflow to Inf."""
    man_bits = o.IEEE[kind][1]
    return (a + (1 << man_bits - kept - 1)) >> man_bits << man_bits


def _torchao_byte(block: Block, mode: str) -> tuple[int, int]:
    """The byte before NaN and Inf are looked at, and the amax that decides them."""
    a = block.amax
    if mode == "even" and not is_nan(a):
        a = _half_up_to_power(a, _kept_bits(block.fmt))
    exponent = (a >> 23) - 127
    if mode == "ceil" and a & 0x7FFFFF:
        exponent += 1
    return min(max(exponent - _emax(block.fmt), -127), 128) + 127, a


def _inverse(byte: int) -> int:
    """2^(127 - byte), 2^-127 included; NaN for 255."""
    return NAN if byte == 255 else pow2_bits(127 - byte)


def torchao_mx(mode: str) -> Callable[[Block], Scaled]:
    """floor, ceil and even on A's bits; elements fl(x * 2^-E). A not finite (for even: after the
    rounding, so FLT_MAX counts): byte 0xFF and every element the code of a positive NaN."""

    def rule(block: Block) -> Scaled:
        byte, a = _torchao_byte(block, mode)
        byte = byte if is_finite(a) else 255
        return _scaled(block, byte, _inverse(byte))

    return rule


def torchao_rceil(block: Block) -> Scaled:
    """p = fl(A * fl(1/max)); its exponent, plus one if it has a mantissa (if subnormal: one above
    2^-127). Inf and NaN: 0xFF as in `torchao_mx`."""
    p = mul(block.amax, bits(1 / _largest(block.fmt)))
    exponent, mantissa = p >> 23, p & 0x7FFFFF
    byte = exponent + (mantissa > 0x400000 if exponent == 0 else mantissa != 0)
    byte = byte if is_finite(p) else 255
    return _scaled(block, byte, _inverse(byte))


def torchao_018(mode: str) -> Callable[[Block], Scaled]:
    """As `torchao_mx`, but only NaN gives 0xFF, elements are fl(x / X) and X is at least 2^-126:
    byte 0 decodes to half of what was cast. Byte 0xFF casts with X = Inf: codes 0, but for NaN."""

    def rule(block: Block) -> Scaled:
        byte, a = _torchao_byte(block, mode)
        byte = 255 if is_nan(a) else byte
        scale = max(byte, 1) << 23
        return Scaled(byte, [div(x, scale) for x in block.xs])

    return rule


def torchao_018_rceil(block: Block) -> Scaled:
    """byte = ceil(log2f(fl(A/max))) + 127, the logarithm a float's; Inf 254, NaN 255. Elements
    fl(x * 2^-E), but byte 0 multiplies by 1."""
    p = div(block.amax, bits(_largest(block.fmt)))
    if is_nan(p):
        return _scaled(block, 255, p)
    if not is_finite(p):
        byte = 254
    else:
        byte = 0 if is_zero(p) else max(ceil_log2(p), -127) + 127
    return _scaled(block, byte, _inverse(byte) if byte else ONE)


# Quark: MX.  Source: even_round and fake_quantize_mx; downcast_to_mxfp_torch for weights.


def _even_round(block: Block) -> int:
    """2^E as float32: A rounded half up, exponent floor - emax, clamped to +-127; NaN stays.

    int8 counts 8 kept bits there and emax 0. A = 0 counts as 2^-126, a subnormal A as 0.
    """
    a, fmt = block.amax, block.fmt
    if is_nan(a):
        return NAN
    if is_zero(a):
        a = pow2_bits(-126)
    a = _half_up_to_power(a, fmt.element.man_bits + (0 if fmt.element.exp_bits else 1))
    if not is_finite(a):
        return pow2_bits(127)
    exponent = (a >> 23) - 127
    return pow2_bits(min(max(exponent - _emax(fmt), -127), 127))


def quark_even(block: Block) -> Scaled:
    """Elements fl(x / 2^E). NaN: 0xFF; Inf: E = 127, and Inf is packed from its bits.

    Not followed: for int8 the library's step is at least 2^-126, which A < 2^-120 would show.
    """
    scale = _even_round(block)
    if is_nan(scale):
        return Scaled(255, [div(x, scale) for x in block.xs])
    byte = o.floor_log2(o.from_bits(scale, F32).exact) + 127
    if block.fmt.element.exp_bits == 0:  # scale/64, and integers in place of multiples of 1/64
        sixty_fourth = div(scale, bits(64))
        return Scaled(byte, [div(div(x, sixty_fourth), bits(64)) for x in block.xs])
    return Scaled(byte, [div(x, scale) for x in block.xs])


def _by_reciprocal(block: Block, scale: int) -> Scaled:
    """The byte is the exponent field; elements fl(x * fl(1/X)), X = 0 multiplying by 0."""
    factor = 0 if is_zero(scale) else div(ONE, scale)
    return _scaled(block, scale >> 23, factor)


def quark_pack_up(block: Block) -> Scaled:
    """X = fl(A/6) rounded up to a power of two by an integer addition, which turns NaN into 0."""
    return _by_reciprocal(block, _power_above(div(block.amax, bits(6))))


def quark_pack_down(block: Block) -> Scaled:
    """X = fl(A/6) cut to a power of two; subnormal: 0, NaN: 0xFF with codes of NaN elements only."""
    return _by_reciprocal(block, div(block.amax, bits(6)) & 0x7F800000)


def quark_pack_even(block: Block) -> Scaled:
    """X of `_even_round`."""
    return _by_reciprocal(block, _even_round(block))


def _power_above(p: int) -> int:
    return p + 0x7FFFFF & 0x7F800000


# triton_kernels: MX.  Source: numerics_details/mxfp.py downcast_to_mxfp_torch.


def triton_up(block: Block) -> Scaled:
    """X = fl(A/max) rounded up to a power of two by an integer addition: a subnormal becomes
    2^-126, NaN becomes 0. X = 0: codes 0 (or -0). Inf: 0xFF, every element times 0."""
    return _by_reciprocal(block, _power_above(div(block.amax, bits(_largest(block.fmt)))))


def triton_down(block: Block) -> Scaled:
    """X = fl(A/2^emax) cut to a power of two; subnormal: 0. NaN and Inf: 0xFF."""
    return _by_reciprocal(block, div(block.amax, pow2_bits(_emax(block.fmt))) & 0x7F800000)


# TransformerEngine: MXFP8.  Source: quantize_mxfp8.cuh, float_to_e8m0, exp2f_rcp.


def te_mxfp8(block: Block) -> Scaled:
    """p = fl(A * fl(1/max)), NaN ignored in A; byte 0xFE for Inf, else the exponent plus one if
    there is a mantissa (a subnormal: above 2^-127), at most 0xFE. Elements fl(x * 2^-E), NaN stays."""
    p = mul(amax(block.xs, ignore_nan=True), bits(1 / _largest(block.fmt)))
    exponent, mantissa = p >> 23, p & 0x7FFFFF
    byte = exponent + (mantissa > 0x400000 if exponent == 0 else mantissa != 0)
    return _scaled(block, min(byte, 0xFE), _inverse(min(byte, 0xFE)))


# ModelOpt: MX.  Source: qtensor/mxfp4_tensor.py, qtensor/mxfp8_tensor.py.


def modelopt_mx(block: Block) -> Scaled:
    """E = ceil(log2f(fl(A/max))), at least -127, the logarithm a float's.

    MXFP4: elements fl(x / 2^E); Inf or NaN in A: byte 0 and codes 8. MXFP8: fl(x * 2^-E); Inf:
    E = 127; NaN: E = -127.
    """
    p = div(block.amax, bits(_largest(block.fmt)))
    fp4 = block.fmt.element.bits == 4
    if fp4 and not is_finite(p):
        return Scaled(0, [div(x, p) for x in block.xs])
    if not is_finite(p):
        exponent = -127 if is_nan(p) else 127
    else:
        exponent = -127 if is_zero(p) else max(ceil_log2(p), -127)
    if fp4:
        return Scaled(exponent + 127, [div(x, pow2_bits(exponent)) for x in block.xs])
    return _scaled(block, exponent + 127, pow2_bits(-exponent))


# compressed-tensors: MX.  Source: quantization/utils/mxfp_utils.py, compressors/mx_utils.py.


def compressed_tensors_mx(block: Block) -> Scaled:
    """A rounded half up to 1 mantissa bit (3 for six-bit elements, never E4M3's 3), in the tensor's
    dtype; E = its exponent - emax in -127 ... 128; elements dt(x / 2^E).

    Past the dtype's range (FLT_MAX, Inf, NaN): X = Inf, whose byte wraps to 127, and codes 0. A
    scale that is 0 in float16 is replaced by 1. Zero block elsewhere: byte 0.
    """
    kind, element = block.kind, block.fmt.element
    exp_bits, man_bits = o.IEEE[kind]
    a = _half_up_to_power(amax(block.raw, kind), 3 if element.bits == 6 else 1, kind)
    a = min(a, _top(kind))  # NaN too
    bias = (1 << exp_bits - 1) - 1
    if a == _top(kind):
        exponent = 128
    else:
        exponent = (a >> man_bits) - bias - _emax(block.fmt) if a else -127
    scale = pow2_bits(min(max(exponent, -127), 128), kind)
    if is_zero(scale, kind):
        scale = bits(1, kind)
    byte = 127  # 127 + int32(Inf), its low eight bits
    if is_finite(scale, kind):
        byte = o.floor_log2(o.from_bits(scale, kind).exact) + 127
    quotients = [convert(div(x, scale, kind), kind, F32) for x in block.raw]
    return Scaled(byte, [_zero_added_nan(a, block) for a in quotients])


# QuTLASS: MXFP4.  Source: fused_quantize_mx, abs_max.


def qutlass(block: Block) -> Scaled:
    """Model. X = fl(A + 1e-8) cut to a power of two, NaN ignored; elements fl(3 * fl(x / X)), so
    that a value is q*X/3. Zero block: X = 2^-27."""
    scale = add(amax(block.xs, ignore_nan=True), bits(Fraction(1, 10**8))) & 0x7F800000
    return Scaled(scale >> 23, [mul(div(x, scale), bits(3)) for x in block.xs])


# Four Over Six: MXFP4.  Source: quantize/pytorch/reference.py.


def fouroversix_mx(most: int) -> Callable[[Block], Scaled]:
    """The exponent of fl(A/most), plus one if there is a mantissa, as a uint8: NaN wraps to 0.
    Elements fl(x / X), 0 where the byte is 0; Inf: 0xFF and X = Inf."""

    def rule(block: Block) -> Scaled:
        p = div(block.amax, bits(most))
        byte = (p >> 23) + (p & 0x7FFFFF != 0) & 0xFF
        return Scaled(byte, [div(x, byte << 23) if byte else 0 for x in block.xs])

    return rule


# microxcaling: MX.  Source: mx/mx_ops.py _quantize_mx, mx/elemwise_ops.py.


def microxcaling(block: Block) -> Scaled:
    """E = floor(log2(A)) - emax in -127 ... 127, the logarithm and everything else in the tensor's
    dtype; v = x / 2^E, rounded on the grid of floor(log2(|v|)).

    A rounded logarithm reaches the next power early: E and an element's grid are then one too
    large. A zero: log2 of 2^-126 (of 0 in float16). Byte 0xFF where the library's result is NaN
    throughout: E above 127, or 2^E that is 0, Inf or NaN in the dtype. -0 becomes 0; negative
    underflow stays -0 where the element has it.
    """
    kind, fmt = block.kind, block.fmt
    a = amax(block.raw, kind)
    if is_zero(a, kind):
        a = bits(o.pow2(-126), kind)
    if is_finite(a, kind):
        exponent = -127 if is_zero(a, kind) else max(floor_log2(a, kind) - _emax(fmt), -127)
        scale = pow2_bits(exponent, kind)
    if not is_finite(a, kind) or exponent > 127 or not 0 < scale < _top(kind):
        return Scaled(255, [NAN] * len(block.xs), [0] * len(block.xs))
    values = [div(x, scale, kind) for x in block.raw]
    rounding = fmt.rounding
    codes = [_microxcaling_code(fmt.element, v, rounding, kind) for v in values]
    return Scaled(exponent + 127, [convert(v, kind, F32) for v in values], codes)


def _microxcaling_code(fmt: Format, v: int, rounding: str, kind: str) -> int:
    """Scale up, round to an integer, scale down, clamp: each step rounded to the dtype.

    In float16, E5M2 comes to its ends: a quotient past 65504 stays Inf, and an exponent of 16 makes
    0 * Inf = NaN.
    """
    assert fmt.bias is not None
    g, size = o.grid(fmt), magnitude(v, kind)
    if size == 0:
        return 0
    minus = g.sign if sign(v, kind) else 0
    if not is_finite(size, kind):
        return minus | (g.max_code if g.inf is None else g.inf)
    fraction_bits = fmt.man_bits if fmt.exp_bits else fmt.man_bits - 1
    exponent = 0
    if fmt.exp_bits:
        exponent = max(floor_log2(size, kind), 1 - fmt.bias)
        size = div(size, pow2_bits(exponent, kind), kind)
    size = mul(size, pow2_bits(fraction_bits, kind), kind)
    half = bits(Fraction(1, 2), kind)
    if rounding == "rtz":
        steps = _whole(size, kind)
    else:
        steps = _whole(add(size, half, kind), kind)
        if rounding == "rne":
            rest = o.from_bits(sub(size, half, kind), kind)
            steps -= not rest.negative and rest.exact % 2 == 0
    out = div(bits(steps, kind), pow2_bits(fraction_bits, kind), kind)
    if fmt.exp_bits:
        out = mul(out, pow2_bits(exponent, kind), kind)
    if is_nan(out, kind):
        return g.max_code if g.nan is None else g.nan
    top = bits(g.largest, kind)
    exact = o.from_bits(min(out, top), kind).exact
    return o.code_of(fmt, bool(minus), exact)


def _whole(a: int, kind: str) -> int:
    return math.floor(o.from_bits(a, kind).exact)


# The table ---------------------------------------------------------------------------------------

#: How a candidate of 4over6 is cast before its error is known.
OWN = Call(True, "rne", "sat", 0, 32)

Cast = Callable[[Format, int, Call], int]
Rule = Callable[[Block], Scaled]


class Dialect(NamedTuple):
    rule: Rule
    cast: Cast
    tensor: Callable[[int, str], int] = lambda g, kind: g  # G -> what the library keeps of it
    ignore_nan: bool = False  # in G
    takes: str = F32  # the dtype that the library's kernel takes


DIALECTS: dict[str, Dialect] = {
    "nvfp4/te-ref": Dialect(te_ref, reference),
    "nvfp4/te-unfused": Dialect(te_unfused, hardware, ignore_nan=True),
    "nvfp4/te-fast": Dialect(te_fast, hardware, ignore_nan=True, takes="bfloat16"),
    "nvfp4/te-4over6-mae-256": Dialect(te_4over6("mae", 256), reference),
    "nvfp4/te-4over6-mae-448": Dialect(te_4over6("mae", 448), reference),
    "nvfp4/te-4over6-mse-256": Dialect(te_4over6("mse", 256), reference),
    "nvfp4/te-4over6-mse-448": Dialect(te_4over6("mse", 448), reference),
    "nvfp4/te-4over6-mae-256-fast": Dialect(te_4over6("mae", 256, fast=True), reference),
    "nvfp4/torchao": Dialect(torchao_nvfp4(cuda=False), torchao, torchao_tensor),
    "nvfp4/torchao-cuda": Dialect(torchao_nvfp4(cuda=True), torchao, torchao_tensor_cuda),
    "nvfp4/torchao-1level": Dialect(torchao_1level(cuda=False), torchao),
    "nvfp4/torchao-1level-cuda": Dialect(torchao_1level(cuda=True), torchao),
    "nvfp4/modelopt": Dialect(modelopt_nvfp4, comparing, torchao_tensor),
    "nvfp4/modelopt-cuda": Dialect(modelopt_nvfp4, comparing, torchao_tensor_cuda),
    "nvfp4/compressed-tensors": Dialect(
        compressed_tensors_nvfp4, zero_added, compressed_tensors_tensor
    ),
    "nvfp4/vllm-ref": Dialect(vllm, reference, encode_scale),
    "nvfp4/flashinfer-ref": Dialect(flashinfer, reference, encode_scale),
    "nvfp4/fouroversix-static6": Dialect(fouroversix_static(6), fouroversix),
    "nvfp4/fouroversix-static4": Dialect(fouroversix_static(4), fouroversix),
    "nvfp4/fouroversix-mse": Dialect(fouroversix_adaptive("mse"), fouroversix),
    "nvfp4/fouroversix-mae": Dialect(fouroversix_adaptive("mae"), fouroversix),
    "nvfp4/fouroversix-absmax": Dialect(fouroversix_adaptive("absmax"), fouroversix),
    "nvfp4/quark": Dialect(quark_nvfp4, quark, quark_tensor),
    "mx/torchao-floor": Dialect(torchao_mx("floor"), torchao),
    "mx/torchao-rceil": Dialect(torchao_rceil, torchao),
    "mx/torchao-ceil": Dialect(torchao_mx("ceil"), torchao),
    "mx/torchao-even": Dialect(torchao_mx("even"), torchao),
    "mx/torchao-0.18-floor": Dialect(torchao_018("floor"), torchao),
    "mx/torchao-0.18-rceil": Dialect(torchao_018_rceil, torchao),
    "mx/torchao-0.18-ceil": Dialect(torchao_018("ceil"), torchao),
    "mx/torchao-0.18-even": Dialect(torchao_018("even"), torchao),
    "mx/quark-even": Dialect(quark_even, quark),
    "mx/compressed-tensors": Dialect(compressed_tensors_mx, zero_added),
    "mx/microxcaling-nearest": Dialect(microxcaling, hardware),
    "mx/microxcaling-even": Dialect(microxcaling, hardware),
    "mx/microxcaling-floor": Dialect(microxcaling, hardware),
    "mx/triton-kernels-up": Dialect(triton_up, triton_kernels),
    "mx/triton-kernels-down": Dialect(triton_down, triton_kernels),
    "mx/te": Dialect(te_mxfp8, hardware),
    "mx/modelopt": Dialect(modelopt_mx, not_positive),
    "mx/quark-pack-up": Dialect(quark_pack_up, quark_pack),
    "mx/quark-pack-down": Dialect(quark_pack_down, quark_pack),
    "mx/quark-pack-even": Dialect(quark_pack_even, quark_pack),
    "mx/fouroversix-static6": Dialect(fouroversix_mx(6), fouroversix),
    "mx/fouroversix-static4": Dialect(fouroversix_mx(4), fouroversix),
    "mx/qutlass-absmax": Dialect(qutlass, hardware),
}

# Whole arrays ------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    blocks: list[tuple[list[int], Scaled]]  # C-order indices of the members, what the rule gave
    scales: Array
    tensor_scale: Array | None


def _bits_of(x: Array, kind: str) -> tuple[list[int], str]:
    """x as bit patterns, in C order, and their dtype: float32 unless x is float16 or bfloat16."""
    kept = kind if kind in ("float16", "bfloat16") else F32
    found = []
    for value in o.numbers(x, kind):
        sign_bit = int(value.is_nan and value.negative) << sum(o.IEEE[kept])
        found.append(o.to_bits(value, kept) | sign_bit)
    return found, kept


def _prepare(request: Request) -> Prepared:
    """Apply the scale rule of a dialect, block by block."""
    fmt = request.fmt
    assert isinstance(fmt, BlockFormat) and fmt.block is not None
    dialect, shape = DIALECTS[fmt.rule], request.x.shape
    raw, kind = _bits_of(request.x, request.kind)
    xs = [_through(convert(a, kind, F32), dialect.takes) for a in raw]
    members: dict[tuple[int, ...], list[int]] = {}
    for i, index in enumerate(np.ndindex(*shape)):
        members.setdefault(o.block_of(fmt, index, request.axis), []).append(i)

    g = amax(xs, ignore_nan=dialect.ignore_nan)
    if request.amax is not None:
        g = INF if math.isinf(request.amax) else bits(request.amax)
    if is_nan(g):  # torch.max over a whole float32 tensor sets all bits of its NaN
        g = 0xFFFFFFFF
    tensor = dialect.tensor(g, kind)

    scales = np.zeros(scales_shape(fmt, shape, request.axis) or (), dtype=scales_dtype(fmt))
    blocks = []
    for index, where in members.items():
        block = Block(
            fmt, [xs[i] for i in where], [raw[i] for i in where], kind, tensor, math.prod(fmt.block)
        )
        scaled = dialect.rule(block)
        scales[index] = _canonical(fmt, scaled.stored)
        blocks.append((where, scaled))
    stored = None
    if fmt.tensor_scaled:
        stored = np.array(NAN if is_nan(tensor) else tensor, dtype=np.uint32).view(np.float32)
    return Prepared(blocks, scales, stored)


def _canonical(fmt: BlockFormat, stored: int) -> int:
    """Of E4M3's two NaNs the positive one is stored; its sign was for the codes."""
    assert fmt.scale is not None
    g = o.grid(fmt.scale)
    return g.nan if o.value_of(fmt.scale, stored).is_nan and g.nan is not None else stored


def encode(request: Request) -> Parts:
    """Codes and scales of a request for a dialect; see `fpemu.backends`."""
    fmt = request.fmt
    assert isinstance(fmt, BlockFormat)
    cast, prepared = DIALECTS[fmt.rule].cast, _prepare(request)
    own = request.rounding == fmt.rounding
    size = math.prod(request.x.shape)
    words = o.words(request) if request.rounding == "sr" else [0] * size
    flat = np.zeros(size, dtype=fmt.element.code_dtype)
    for where, scaled in prepared.blocks:
        if own and scaled.codes is not None:
            codes = scaled.codes
        else:
            codes = [
                cast(
                    fmt.element,
                    a,
                    Call(own, request.rounding, request.overflow, words[i], request.sr_bits),
                )
                for i, a in zip(where, scaled.cast, strict=True)
            ]
        flat[where] = fouroversix_packed(codes) if cast is fouroversix else codes
    return Parts(flat.reshape(request.x.shape), prepared.scales, prepared.tensor_scale)


def within(request: Request) -> Array:
    """Where the value that is cast lies in +-max, ends included; NaN does not, nor does a block
    whose scale is NaN."""
    fmt = request.fmt
    assert isinstance(fmt, BlockFormat) and fmt.scale is not None
    largest = bits(o.grid(fmt.element).largest)
    flat = np.zeros(math.prod(request.x.shape), dtype=bool)
    for where, scaled in _prepare(request).blocks:
        if not o.value_of(fmt.scale, scaled.stored).is_nan:
            flat[where] = [magnitude(a) <= largest for a in scaled.cast]
    # NaN by what it was: Four Over Six casts a number in its place.
    flat &= [not x.is_nan for x in o.numbers(request.x, request.kind)]
    return flat.reshape(request.x.shape)


# Decoding ----------------------------------------------------------------------------------------


def _te_decode(top: int) -> Callable[[int, int, int], int]:
    inverse = bits(Fraction(1, top))
    return lambda q, s, t: mul(q, mul(mul(s, t), inverse))


def _fouroversix_decode(top: int) -> Callable[[int, int, int], int]:
    return lambda q, s, t: div(mul(mul(q, s), t), bits(top))


def _shifted(s: int) -> int:
    """``byte << 23`` as float32: byte 0 is 0, not 2^-127, and 255 is infinity."""
    if is_nan(s):
        return INF
    return 0 if s == pow2_bits(-127) else s


#: decode order -> (element, scale, stored tensor number) -> value, all float32.
#: scale-first: torchao get_hp_scales; +0: ModelOpt dequantize, whose table has no -0. divided:
#: compressed-tensors _dequantize, vLLM ref_nvfp4_quant_dequant, FlashInfer's tests; or-eps: Quark
#: fake_quantize_fp4_fp6_per_group_with_scale. shifted: Quark upcast_from_mxfp_torch.
#: te: dequantize_nvfp4.cuh. fouroversix: quantize/backend.py. third: QuTLASS's alpha of 3.
DECODE: dict[str, Callable[[int, int, int], int]] = {
    "scale-first": lambda q, s, t: mul(q, mul(s, t)),
    "scale-first+0": lambda q, s, t: mul(0 if is_zero(q) else q, mul(s, t)),
    "divided": lambda q, s, t: mul(q, div(s, t)),
    "divided-or-eps": lambda q, s, t: mul(q, bits(2**-23) if is_zero(div(s, t)) else div(s, t)),
    "shifted": lambda q, s, t: mul(q, _shifted(s)),
    "te": _te_decode(2688),
    "te-256": _te_decode(1536),
    "te-1792": _te_decode(1792),
    "fouroversix": _fouroversix_decode(2688),
    "fouroversix-1792": _fouroversix_decode(1792),
    "fouroversix-256": _fouroversix_decode(1536),
}


def value(fmt: BlockFormat, q: o.Number, s: o.Number, t: int) -> o.Number:
    """The value of one element in the library's order, before its rounding into the result."""
    if fmt.decode == "third":
        return o.from_bits(_rounded(o.over(o.times(q, s), o.number(3)), F32), F32)
    product = DECODE[fmt.decode](o.to_bits(q, F32), o.to_bits(s, F32), t)
    return o.from_bits(product, F32)
