"""The oracle: every cast and scale rule in exact rational arithmetic, one element at a time.

Slow and obviously right. It shares the rows of the format table with the other backends and
nothing else: its decoding, rounding, scale rules and random words are written again from the
standards, so that a fault in theirs cannot hide here.

A number is a sign and a size; a size is an exact `Fraction`, or infinity, or NaN. The steps that a
library carries out in float32 are an exact operation followed by one rounding, `fl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fpemu.backends import Parts, Request, element_format, scales_dtype, scales_shape
from fpemu.formats import BlockFormat, Format

Array = np.ndarray[Any, Any]

# Numbers -----------------------------------------------------------------------------------------


class Number(NamedTuple):
    """A sign and a size: a `Fraction` >= 0, ``math.inf`` or ``math.nan``."""

    negative: bool
    size: Fraction | float

    @property
    def is_nan(self) -> bool:
        return type(self.size) is float and math.isnan(self.size)

    @property
    def is_inf(self) -> bool:
        return type(self.size) is float and math.isinf(self.size)

    @property
    def is_zero(self) -> bool:
        return not self.size

    @property
    def exact(self) -> Fraction:
        assert isinstance(self.size, Fraction)
        return self.size


NAN = Number(False, math.nan)
INF = Number(False, math.inf)
ZERO = Number(False, Fraction(0))
ONE = Number(False, Fraction(1))


def number(value: float | Fraction) -> Number:
    """The exact number of a finite Python value."""
    return Number(value < 0, abs(Fraction(value)))


def times(a: Number, b: Number) -> Number:
    """Exact product, with the special cases of IEEE 754."""
    negative = a.negative != b.negative
    if a.is_nan or b.is_nan or (a.is_inf and b.is_zero) or (a.is_zero and b.is_inf):
        return NAN
    if a.is_inf or b.is_inf:
        return Number(negative, math.inf)
    return Number(negative, a.exact * b.exact)


def over(a: Number, b: Number) -> Number:
    """Exact quotient, with the special cases of IEEE 754."""
    negative = a.negative != b.negative
    if a.is_nan or b.is_nan or (a.is_inf and b.is_inf) or (a.is_zero and b.is_zero):
        return NAN
    if a.is_inf or b.is_zero:
        return Number(negative, math.inf)
    return Number(negative, Fraction(0) if b.is_inf else a.exact / b.exact)


@lru_cache(maxsize=4096)
def pow2(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def floor_log2(size: Fraction) -> int:
    """The integer e with ``2**e <= size < 2**(e+1)``."""
    e = size.numerator.bit_length() - size.denominator.bit_length()
    return e if pow2(e) <= size else e - 1


def ceil_log2(size: Fraction) -> int:
    e = floor_log2(size)
    return e if size == pow2(e) else e + 1


# IEEE 754 interchange formats: what x arrives in and what values leave in -------------------------

#: kind -> (exponent bits, mantissa bits)
IEEE = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}


@lru_cache(maxsize=1 << 17)
def from_bits(bits: int, kind: str) -> Number:
    """The number that an IEEE bit pattern stands for."""
    exp_bits, man_bits = IEEE[kind]
    negative = bool(bits >> (exp_bits + man_bits))
    exp = bits >> man_bits & (1 << exp_bits) - 1
    man = bits & (1 << man_bits) - 1
    bias = (1 << exp_bits - 1) - 1
    if exp == (1 << exp_bits) - 1:
        return Number(negative, math.nan if man else math.inf)
    if exp == 0:
        return Number(negative, man * pow2(1 - bias - man_bits))
    return Number(negative, ((1 << man_bits) + man) * pow2(exp - bias - man_bits))


def to_bits(x: Number, kind: str) -> int:
    """Round once, to nearest with ties to even, into an IEEE bit pattern; NaN is the quiet one."""
    exp_bits, man_bits = IEEE[kind]
    bias = (1 << exp_bits - 1) - 1
    sign = int(x.negative) << (exp_bits + man_bits)
    infinity = ((1 << exp_bits) - 1) << man_bits
    if x.is_nan:
        return infinity | 1 << (man_bits - 1)
    if x.is_inf:
        return sign | infinity
    if x.is_zero:
        return sign
    exp = max(floor_log2(x.exact), 1 - bias)
    step = pow2(exp - man_bits)
    steps = round(x.exact / step)  # Python rounds a Fraction to nearest, ties to even
    rounded = steps * step
    if rounded >= pow2(bias + 1):
        return sign | infinity
    if rounded < pow2(1 - bias):
        return sign | steps
    exp = floor_log2(rounded)
    return sign | (exp + bias) << man_bits | int((rounded / pow2(exp) - 1) * (1 << man_bits))


def fl(x: Number) -> Number:
    """One float32 rounding."""
    return from_bits(to_bits(x, "float32"), "float32")


FLT_MAX = from_bits(0x7F7FFFFF, "float32")

# Element formats ---------------------------------------------------------------------------------


class Grid(NamedTuple):
    """What a row of the format table means, worked out here once more."""

    man_bits: int
    emin: int  # exponent of the smallest normal number
    largest: Fraction  # the largest finite value
    max_code: int
    sign: int  # the sign bit
    inf: int | None
    nan: int | None  # canonical: positive, all ones


@lru_cache(maxsize=256)
def grid(fmt: Format) -> Grid:
    assert fmt.bias is not None
    e, m = fmt.exp_bits, fmt.man_bits
    ones = (1 << e + m) - 1
    sign = 1 << e + m if fmt.signed else 0
    emin = (1 if fmt.has_zero else 0) - fmt.bias
    inf, nan, max_code = {
        "ieee": (ones - ((1 << m) - 1), ones, ones - (1 << m)),
        "fn": (None, ones, ones - 1),
        "fnuz": (None, sign, ones),
        "finite": (None, None, ones),
    }[fmt.special]
    largest = _size_of(fmt, max_code, emin)
    return Grid(m, emin, largest, max_code, sign, inf, nan)


def _size_of(fmt: Format, magnitude: int, emin: int) -> Fraction:
    """Size of a finite code without its sign."""
    m = fmt.man_bits
    if fmt.exp_bits == 0:  # an integer
        return magnitude * pow2(emin - m)
    exp, man = magnitude >> m, magnitude & (1 << m) - 1
    if not fmt.has_zero:  # every exponent is a normal one
        return (1 + Fraction(man, 1 << m)) * pow2(emin + exp)
    if exp == 0:
        return man * pow2(emin - m)
    return (1 + Fraction(man, 1 << m)) * pow2(emin + exp - 1)


@lru_cache(maxsize=1 << 17)
def value_of(fmt: Format, code: int) -> Number:
    """The number that a code stands for; bits above the format's width are ignored."""
    g = grid(fmt)
    code &= (1 << fmt.signed + fmt.exp_bits + fmt.man_bits) - 1
    if fmt.exp_bits == 0:  # two's complement
        negative = bool(code & g.sign)
        magnitude = (g.sign << 1) - code if negative else code
        return Number(negative, _size_of(fmt, magnitude, g.emin))
    if fmt.special == "fnuz" and code == g.nan:
        return NAN
    negative, magnitude = bool(code & g.sign), code & ~g.sign
    if magnitude == g.inf:
        return Number(negative, math.inf)
    return NAN if magnitude > g.max_code else Number(negative, _size_of(fmt, magnitude, g.emin))


def code_of(fmt: Format, negative: bool, size: Fraction) -> int:
    """The code of a value that lies on the format's grid: `value_of` backwards."""
    g = grid(fmt)
    if fmt.exp_bits == 0:
        steps = int(size / pow2(g.emin - g.man_bits))
        return -steps & (g.sign << 1) - 1 if negative else steps
    if size == 0:
        return g.sign if negative and fmt.special != "fnuz" else 0
    if size < pow2(g.emin):
        magnitude = int(size / pow2(g.emin - g.man_bits))
    else:
        exp = floor_log2(size)
        man = int((size / pow2(exp) - 1) * (1 << g.man_bits))
        magnitude = (exp - g.emin + (1 if fmt.has_zero else 0)) << g.man_bits | man
    return magnitude | (g.sign if negative else 0)


# Does a value move away from zero? `f` is the discarded fraction of a step, 0 <= f < 1; `odd` tells
# whether the neighbour nearer to zero has an odd significand. A tie of two odd neighbours (a format
# with one digit, such as E8M0) goes to the larger one: IEEE 754-2019, 4.3.1.
_HALF = Fraction(1, 2)
AWAY: dict[str, Callable[[Fraction, bool, bool], bool]] = {
    "rne": lambda f, odd, negative: f > _HALF or (f == _HALF and odd),
    "rna": lambda f, odd, negative: f >= _HALF,
    "rnz": lambda f, odd, negative: f > _HALF,
    "rtz": lambda f, odd, negative: False,
    "rtp": lambda f, odd, negative: f > 0 and not negative,
    "rtn": lambda f, odd, negative: f > 0 and negative,
    "rto": lambda f, odd, negative: f > 0 and not odd,
}


def round_to(
    fmt: Format,
    x: Number,
    rounding: str = "rne",
    overflow: str = "sat",
    word: int = 0,
    nbits: int = 32,
) -> int:
    """The code of `x` in `fmt`.

    Parameters
    ----------
    fmt : Format
    x : Number
    rounding, overflow : str
    word : int
        The 32-bit random word of ``rounding="sr"``, of which the top `nbits` bits are used.

    Returns
    -------
    int
    """
    g = grid(fmt)
    if x.is_nan or (x.negative and not x.is_zero and not fmt.signed):
        if g.nan is None and fmt.exp_bits == 0:
            raise ValueError(f"round_to: {fmt.name} has no code for NaN. Remove NaN from x.")
        return g.max_code if g.nan is None else g.nan
    if x.is_inf:
        return _beyond(fmt, x.negative, overflow == "sat")

    # The two neighbours: whole numbers of steps, in a format whose exponent has no upper end.
    size = x.exact
    if not fmt.has_zero and size < pow2(g.emin):  # nothing below the smallest value but itself
        return g.sign if x.negative and size else 0
    if size == 0:
        return code_of(fmt, x.negative, size)
    exp = g.emin if fmt.exp_bits == 0 else max(floor_log2(size), g.emin)
    step = pow2(exp - g.man_bits)
    lower = math.floor(size / step)
    f = size / step - lower

    # One of them.
    if rounding == "sr":
        away = math.floor(f * 2**nbits) + (word >> (32 - nbits)) >= 2**nbits
    else:
        away = AWAY[rounding](f, lower % 2 == 1, x.negative)
    rounded = (lower + away) * step

    # Overflow is decided after rounding.
    if rounded <= g.largest:
        return code_of(fmt, x.negative, rounded)
    inward = rounding in ("rtz", "rto") or rounding == ("rtp" if x.negative else "rtn")
    return _beyond(fmt, x.negative, overflow == "sat" or inward)


def _beyond(fmt: Format, negative: bool, stay_finite: bool) -> int:
    """The code past the largest finite: infinity, else NaN, else the largest finite."""
    g = grid(fmt)
    if not stay_finite and g.inf is not None:
        return g.inf | (g.sign if negative else 0)
    if not stay_finite and g.nan is not None:
        return g.nan
    return code_of(fmt, negative, g.largest)


# Random words ------------------------------------------------------------------------------------


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 of Salmon et al., SC'11: ten rounds, the key bumped between them."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p2 >> 32) ^ c1 ^ k0,
            p2 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_word(seed: int, stream: int, index: int) -> int:
    """The word of the element with C-order index `index` in the whole tensor."""
    low = 0xFFFFFFFF
    block = index >> 2
    counter = (block & low, block >> 32 & low, stream & low, stream >> 32 & low)
    return philox4x32(counter, (seed & low, seed >> 32 & low))[index & 3]


def words(request: Request) -> list[int]:
    """One word per element, in C order."""
    if request.random_bits is not None:
        return [int(w) for w in np.asarray(request.random_bits).ravel()]
    random, shape = request.random, request.x.shape
    assert random is not None
    if random.global_shape is None:
        where = [random.offset + i for i in range(math.prod(shape))]
    else:
        assert random.start is not None
        where = [
            _c_index([i + first for i, first in zip(index, random.start, strict=True)], random)
            for index in np.ndindex(*shape)
        ]
    return [random_word(random.seed, random.stream, i) for i in where]


def _c_index(index: list[int], random: Any) -> int:
    flat = 0
    for i, size in zip(index, random.global_shape, strict=True):
        flat = flat * size + i
    return flat


# Scale rules -------------------------------------------------------------------------------------


def largest_of(xs: Iterable[Number]) -> Number:
    """The amax: the largest size, NaN ignored, 0 for nothing."""
    return Number(False, max((x.size for x in xs if not x.is_nan), default=Fraction(0)))


def at_most(x: Number, limit: Number) -> Number:
    return limit if x.size > limit.size else x


class Scale(NamedTuple):
    """What a rule decides for one block."""

    stored: int  # the scale's code, or its float32 bits
    cast: Callable[[Number], Number] | None  # x -> what is rounded into the element format, or
    # None: the scale is NaN, every code of the block 0


def mx_scale(fmt: BlockFormat, amax: Number) -> Scale:
    """A power of two by one of the four MX rules; the element is exactly x divided by it."""
    if amax.is_nan or amax.is_inf:
        return Scale(0xFF, None)
    byte = 0
    if not amax.is_zero:
        a, element = amax.exact, grid(fmt.element)
        emax = floor_log2(element.largest)
        # Significant digits of an element: the mantissa with its leading one.
        digits = fmt.element.man_bits + (1 if fmt.element.exp_bits else 0)
        unit = pow2(floor_log2(a) - digits + 1)
        rounded_half_up = math.floor(a / unit + _HALF) * unit
        shared_exponent = {
            "mx_floor": floor_log2(a) - emax,
            "mx_ceil": ceil_log2(a) - emax,
            "mx_rceil": ceil_log2(a / element.largest),
            "mx_even": floor_log2(rounded_half_up) - emax,
        }[fmt.rule]
        byte = min(max(shared_exponent + 127, 0), 254)
    scale = Number(False, pow2(byte - 127))
    return Scale(byte, lambda x: over(x, scale))


def nvfp4_tensor(fmt: BlockFormat, amax: Number) -> tuple[Number, Number]:
    """S and tensor_scale of NVFP4 (2688 = 6 * 448)."""
    assert fmt.scale is not None
    top = number(grid(fmt.element).largest * grid(fmt.scale).largest)
    s = fl(over(top, amax))
    if amax.is_zero or s.is_zero:
        return ONE, ONE
    if s.is_inf:
        return FLT_MAX, fl(over(ONE, FLT_MAX))
    return s, fl(over(amax, top))


def nvfp4_scale(fmt: BlockFormat, amax: Number, s: Number) -> Scale:
    """E4M3(fl(A * fl(S * fl(1/6)))); elements are fl(x * min(fl(1/fl(s * fl(1/S))), FLT_MAX))."""
    assert fmt.scale is not None
    if amax.is_nan:
        nan = grid(fmt.scale).nan
        assert nan is not None
        return Scale(nan, None)
    sixth = fl(over(ONE, number(grid(fmt.element).largest)))
    byte = round_to(fmt.scale, fl(times(amax, fl(times(s, sixth)))))
    decode = fl(times(value_of(fmt.scale, byte), fl(over(ONE, s))))
    multiplier = at_most(fl(over(ONE, decode)), FLT_MAX)
    return Scale(byte, lambda x: fl(times(x, multiplier)))


def fp8_scale(fmt: BlockFormat, amax: Number) -> tuple[Number, Number]:
    """The encode scale fl(max/amax), and the decode scale fl(1/scale) that is stored."""
    if amax.is_zero or amax.is_inf:
        scale = ONE
    else:
        scale = at_most(fl(over(number(grid(fmt.element).largest), amax)), FLT_MAX)
    if fmt.rule == "fp8_pow2":
        scale = Number(False, pow2(floor_log2(scale.exact)))
    return scale, fl(over(ONE, scale))


MX_RULES = ("mx_floor", "mx_rceil", "mx_ceil", "mx_even")
NVFP4_RULES = ("nvfp4", "nvfp4_1level")
FP8_RULES = ("fp8", "fp8_pow2", "int8")

# Whole arrays ------------------------------------------------------------------------------------


def numbers(x: Array, kind: str) -> list[Number]:
    """x as exact numbers, in C order."""
    flat = np.ascontiguousarray(x).ravel()
    if kind not in IEEE:
        return [number(int(v)) for v in flat]
    flat = flat.astype(flat.dtype.newbyteorder("="), copy=False)
    bits = flat.view(np.dtype(f"u{flat.itemsize}"))
    return [from_bits(b, kind) for b in bits.tolist()]


def block_of(fmt: BlockFormat, index: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The block that an element belongs to, as an index into the scales."""
    if fmt.block is None or not index:
        return ()
    if len(fmt.block) == 2:
        rows, cols = fmt.block
        return (*index[:-2], index[-2] // rows, index[-1] // cols)
    return (*index[:axis], index[axis] // fmt.block[0], *index[axis + 1 :])


class Cast(NamedTuple):
    """Everything about a call but the rounding of its elements."""

    values: list[Number | None]  # what is cast, in C order; None where the scale is NaN
    scales: Array | None
    tensor_scale: Array | None


def _float32(x: Number) -> Array:
    return np.array(to_bits(x, "float32"), dtype=np.uint32).view(np.float32)


def _prepare(request: Request) -> Cast:
    """Apply the scale rule."""
    xs, fmt, shape = numbers(request.x, request.kind), request.fmt, request.x.shape
    if isinstance(fmt, Format):
        return Cast([*xs], None, None)
    if fmt.rule not in MX_RULES:
        xs = [fl(x) for x in xs]

    blocks: dict[tuple[int, ...], list[int]] = {}
    for i, index in enumerate(np.ndindex(*shape)):
        blocks.setdefault(block_of(fmt, index, request.axis), []).append(i)

    tensor_amax = largest_of(xs)
    if request.amax is not None:
        tensor_amax = INF if math.isinf(request.amax) else number(request.amax)
    s, tensor_scale = ONE, ONE
    if fmt.rule == "nvfp4":
        s, tensor_scale = nvfp4_tensor(fmt, tensor_amax)
    elif fmt.block is None:
        s, tensor_scale = fp8_scale(fmt, tensor_amax)

    values: list[Number | None] = [*xs]
    scales, where = None, scales_shape(fmt, shape, request.axis)
    if where is not None:
        stored_bits = {1: np.uint8, 4: np.uint32}[scales_dtype(fmt).itemsize]
        scales = np.zeros(where, dtype=stored_bits)
    for index, members in blocks.items():
        block = [xs[i] for i in members]
        has_nan = any(x.is_nan for x in block)
        amax = largest_of(block)
        if fmt.rule in MX_RULES:
            scale = mx_scale(fmt, NAN if has_nan else amax)
        elif fmt.rule in NVFP4_RULES:
            scale = nvfp4_scale(fmt, NAN if has_nan else amax, s)
        elif fmt.block is None:
            scale = Scale(0, lambda x: fl(times(x, s)))
        else:
            encode_scale, decode_scale = fp8_scale(fmt, amax)
            bits = to_bits(decode_scale, "float32")
            scale = Scale(bits, lambda x, by=encode_scale: fl(times(x, by)))  # type: ignore[misc]
        if scales is not None:
            scales[index] = scale.stored
        for i in members:
            values[i] = None if scale.cast is None else scale.cast(xs[i])
    if scales is not None:
        scales = scales.view(scales_dtype(fmt))
    return Cast(values, scales, _float32(tensor_scale) if fmt.tensor_scaled else None)


# The interface -----------------------------------------------------------------------------------


def supports(request: Request) -> str | None:
    """Why the oracle cannot serve a request, or None."""
    fmt = request.fmt
    known = (*MX_RULES, *NVFP4_RULES, *FP8_RULES)
    if isinstance(fmt, BlockFormat) and fmt.rule not in known and not _is_dialect(fmt):
        return f"the oracle has no scale rule {fmt.rule!r}"
    return None


def _is_dialect(fmt: Format | BlockFormat) -> bool:
    from fpemu.backends import oracle_dialects  # which builds on this module

    return isinstance(fmt, BlockFormat) and fmt.rule in oracle_dialects.DIALECTS


def encode(request: Request) -> Parts:
    """Codes and scales of a request."""
    if _is_dialect(request.fmt):
        from fpemu.backends import oracle_dialects

        return oracle_dialects.encode(request)
    fmt = element_format(request.fmt)
    cast = _prepare(request)
    random = words(request) if request.rounding == "sr" else [0] * len(cast.values)
    codes = [
        0 if x is None else round_to(fmt, x, request.rounding, request.overflow, w, request.sr_bits)
        for x, w in zip(cast.values, random, strict=True)
    ]
    array = np.array(codes, dtype=fmt.code_dtype).reshape(request.x.shape)
    return Parts(array, cast.scales, cast.tensor_scale)


def decode(fmt: Format | BlockFormat, parts: Parts, axis: int, out: Array, kind: str) -> None:
    """Values of codes and scales, each formed exactly and rounded once (or in a dialect's order).

    Parameters
    ----------
    fmt : Format or BlockFormat
    parts : Parts
    axis : int
        Block axis, as in `Request`.
    out : ndarray
        Written; of dtype `kind`, or uint16 for bfloat16.
    kind : {"float16", "bfloat16", "float32", "float64"}
    """
    from fpemu.backends import oracle_dialects

    element = element_format(fmt)
    own_order = isinstance(fmt, BlockFormat) and fmt.decode != "exact"
    factor = ONE
    if parts.tensor_scale is not None:
        factor = from_bits(int(np.asarray(parts.tensor_scale).view(np.uint32)), "float32")
    bits = np.zeros(parts.codes.shape, dtype=f"u{out.dtype.itemsize}")
    for index in np.ndindex(*parts.codes.shape):
        value = value_of(element, int(parts.codes[index]))
        if isinstance(fmt, BlockFormat) and parts.scales is not None:
            stored = np.asarray(parts.scales)[block_of(fmt, index, axis)]
            if stored.dtype == np.float32:
                scale = from_bits(int(stored.view(np.uint32)), "float32")
            else:
                assert fmt.scale is not None
                scale = value_of(fmt.scale, int(stored))
            if own_order:
                stored_factor = to_bits(factor, "float32")
                value = oracle_dialects.value(fmt, value, scale, stored_factor)
                bits[index] = to_bits(value, kind)
                continue
            value = times(value, scale)
        bits[index] = to_bits(times(value, factor), kind)
    out[...] = bits.view(out.dtype)


def quantize(request: Request, out: Array) -> None:
    """``decode(encode(request))`` into `out`, whose dtype decides the kind (uint16: bfloat16)."""
    kind = "bfloat16" if out.dtype == np.uint16 else out.dtype.name
    decode(request.fmt, encode(request), request.axis, out, kind)


def within(request: Request) -> Array:
    """Where the value that is cast lies in +-max, ends included; NaN does not."""
    if _is_dialect(request.fmt):
        from fpemu.backends import oracle_dialects

        return oracle_dialects.within(request)
    largest = grid(element_format(request.fmt)).largest
    flat = [x is not None and x.size <= largest for x in _prepare(request).values]
    return np.array(flat, dtype=bool).reshape(request.x.shape)
