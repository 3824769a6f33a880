"""Triton kernels: one tile of memory is read, scaled, cast and written.

Everything that a kernel does is chosen by `tl.constexpr` arguments, so a compiled kernel holds just
the steps that are used. A `Row` (see `fpemu.backends.triton_`) has the constants of an element
format under a rounding and an overflow mode. Tiles are those of `triton_bits`.

A value is cast on one of five paths (`Row.path`):

========= ==============================================================================
"magic"   nearest even: adding 2**(23-m) times the value's power of two rounds at bit m
"random"  stochastic: random bits are added below bit m; subnormals as 64-bit fixed point
"same"    formats with float32's exponents: the same on the bits, subnormals included
"int32"   every rounding: significand and exponent taken apart, `fpemu.casting`'s recipe
"int64"   the same on 60-bit significands, for wide sources and for stochastic rounding
========= ==============================================================================

Kernels are compiled with ``enable_fp_fusion=False``: no product and sum become one FMA.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from fpemu.backends.triton_bits import (
    FLT_MAX,
    INF,
    INTERPRETED,
    MAG,
    ONE,
    QNAN,
    SIGN,
    _at,
    _bits,
    _block_cells,
    _block_max,
    _cells,
    _divided,
    _f32,
    _float,
    _least,
    _most,
    _place,
    _spread,
    _widened,
)
from fpemu.backends.triton_dialect_kernels import (
    _entered,
    _in_order,
    _replaced,
    _scaled,
    _wrapped,
)

TOP = tl.constexpr(60)  # bits of a significand on the "int64" path
INF64 = tl.constexpr(0x7FF << 52)
MAN64 = tl.constexpr((1 << 52) - 1)
MAG64 = tl.constexpr((1 << 63) - 1)
NAN64 = tl.constexpr(0x7FF8 << 48)
M0 = tl.constexpr(0xD2511F53)
M1 = tl.constexpr(0xCD9E8D57)
W0 = tl.constexpr(0x9E3779B9)
W1 = tl.constexpr(0xBB67AE85)
# Where the tables of a scale format stand behind the tensor's four scalars.
MULTIPLIERS = tl.constexpr(16)
VALUES = tl.constexpr(16 + 256)

# Rounded products --------------------------------------------------------------------------------


@triton.jit
def _times_down(a, b):
    """a * b rounded toward -infinity."""
    if INTERPRETED:
        exact = a.to(tl.float64) * b.to(tl.float64)  # at most 48 bits
        near = (a * b).to(tl.float64)
        step = tl.where(near > exact, 1, 0)
        bits = _bits(a * b)
        return _float(tl.where(bits < 0, bits + step, bits - step))
    else:
        return tl.inline_asm_elementwise(
            "mul.rm.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _times_up(a, b):
    """a * b rounded toward +infinity."""
    if INTERPRETED:
        exact = a.to(tl.float64) * b.to(tl.float64)
        near = (a * b).to(tl.float64)
        step = tl.where(near < exact, 1, 0)
        bits = _bits(a * b)
        return _float(tl.where(bits < 0, bits - step, bits + step))
    else:
        return tl.inline_asm_elementwise(
            "mul.rp.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _times_odd(a, b):
    """a * b rounded to odd: a later rounding to 16 bits is then single.

    Of the two floats beside an inexact product one is odd.
    """
    low, high = _bits(_times_down(a, b)), _bits(_times_up(a, b))
    return _float(tl.where((low & 1) != 0, low, high))


# Sources -----------------------------------------------------------------------------------------


@triton.jit
def _exact32(bits):
    """(negative, exponent, significand of 25 bits) of float32 bits."""
    a = bits & MAG
    # A float32 subnormal, read as an integer and converted, is a normal float 2**149 larger.
    tiny = a < (1 << 23)
    scaled = tl.where(tiny, _bits(a.to(tl.float32)), a)
    exp = (scaled >> 23) - tl.where(tiny, 127 + 149, 127)
    # One spare bit: then at least one bit is always discarded.
    sig = ((scaled & 0x7FFFFF) | tl.where(a != 0, 1 << 23, 0)) << 1
    return bits < 0, exp, sig


@triton.jit
def _normalised(mag):
    """(exponent, significand of `TOP` bits) of an integer below 2**53: float64 counts its bits."""
    bits = mag.to(tl.float64).to(tl.int64, bitcast=True)
    sig = tl.where(bits == 0, 0, ((bits & MAN64) | (1 << 52)) << 7)
    return (bits >> 52) - 1023, sig


@triton.jit
def _exact64(raw, KIND: tl.constexpr):
    """(negative, exponent, significand of `TOP` bits, NaN, infinite) of source elements.

    (A float64 subnormal is not normalised: it lies below every range, only its being there counts.)
    """
    if KIND == "float64":
        mag = raw & MAG64
        field = mag >> 52
        sig = ((mag & MAN64) | tl.where(field != 0, 1 << 52, 0)) << 7
        return raw < 0, field - 1023, sig, mag > INF64, mag == INF64
    elif KIND == "int64" or KIND == "uint64":
        negative = raw < 0
        if KIND == "uint64":
            negative = raw != raw
        mag = tl.where(negative, -raw, raw)  # of 64 bits, unsigned
        # Beyond 53 bits: the upper 53 of 64 first, then the low 11 at their place.
        high = (mag >> 11) & ((1 << 53) - 1)
        wide = (high >> 42) != 0
        exp, sig = _normalised(tl.where(wide, high, mag))
        low = mag & 0x7FF
        room = tl.minimum(tl.maximum(59 - exp, 0), 17)  # TOP minus the bits of `high`
        shifted = low << room
        tail = (shifted >> 11) | tl.where((shifted & 0x7FF) != 0, 1, 0)
        exp += tl.where(wide, 11, 0)
        no = raw != raw
        return negative, exp, sig | tl.where(wide, tail, 0), no, no
    elif KIND == "int32" or KIND == "uint32":
        value = raw.to(tl.int64)
        if KIND == "uint32":
            value = value & 0xFFFFFFFF
        exp, sig = _normalised(tl.abs(value))
        no = raw != raw
        return value < 0, exp, sig, no, no
    else:
        bits = _widened(raw, KIND)
        a = bits & MAG
        negative, exp, sig = _exact32(bits)
        return negative, exp.to(tl.int64), sig.to(tl.int64) << (TOP - 25), a > INF, a == INF


# Random words ------------------------------------------------------------------------------------


@triton.jit
def _philox(block, seed0, seed1, stream0, stream1):
    """The four words of Philox4x32-10 at 64-bit counters `block`."""
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream0.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + stream1.to(tl.uint32, bitcast=True)
    k0 = seed0.to(tl.uint32, bitcast=True)
    k1 = seed1.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * M0
        p1 = c2.to(tl.uint64) * M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = k0 + W0
        k1 = k1 + W1
    return c0, c1, c2, c3


# Casts -------------------------------------------------------------------------------------------


@triton.jit
def _round_up_random(discarded, word, n: tl.constexpr):
    """1 where ``floor(f * 2**n)`` and the word's top n bits carry; f = discarded / 2**32."""
    shift: tl.constexpr = 32 - n
    return ((discarded >> shift) + (word >> shift)) >> n


@triton.jit
def _with_random_bits(a, word, F: tl.constexpr):
    """Bits `a` plus random ones below the last that is kept."""
    if F.sr_bits >= F.drop:
        return a + (word >> (32 - F.drop)).to(tl.int32)
    else:
        low: tl.constexpr = F.drop - F.sr_bits
        return ((a >> low) << low) + ((word >> (32 - F.sr_bits)).to(tl.int32) << low)


@triton.jit
def _fast(x, word, F: tl.constexpr, CODES: tl.constexpr):
    """Code, or float32 bits of the value, of float32 `x`: paths "magic", "random" and "same"."""
    bits = _bits(x)
    sign = bits & SIGN
    nan = x != x
    if F.path == "same":
        a = bits & MAG
        if F.stochastic:
            near = _with_random_bits(a, word, F)
        else:
            near = a + (((a >> F.drop) & 1) + ((1 << (F.drop - 1)) - 1))
        value = near & -(1 << F.drop)
        if not F.overflows:
            value = tl.minimum(value, F.max_bits)
        if CODES:
            mag = value >> F.drop
    else:
        limit = _f32(F.limit)
        if F.nan_code < 0 and F.nan_matters:
            clipped = _most(_least(x, limit), -limit)  # NaN becomes +max
            sign = _bits(clipped) & SIGN
            size = tl.abs(clipped)
        else:
            size = _least(tl.abs(x), limit)
        if F.path == "magic":
            exp = tl.maximum(_bits(size) & INF, F.first)
            magic = exp + (F.drop << 23)
            total = size + _float(magic)
            if CODES:
                mag = (_bits(total) - magic) + ((exp - F.first) >> F.drop)
            else:
                value = _bits(total - _float(magic))
        else:
            near = _with_random_bits(_bits(size), word, F)
            fixed = (size * _f32(F.steps_bits)).to(tl.uint64)  # steps, 32 bits of fraction
            count = _round_up_random(fixed, word.to(tl.uint64), F.sr_bits).to(tl.int32)
            below = size < _f32(F.first)
            if CODES:
                mag = tl.where(below, count, (near >> F.drop) - ((F.emin + 126) << F.man))
            else:
                small = _bits(count.to(tl.float32) * _f32(F.step_bits))
                value = tl.where(below, small, near & -(1 << F.drop))
        if F.overflows:
            if CODES:
                beyond = mag > F.max_mag
            else:
                beyond = value > F.max_bits
            if F.inf_code < 0:
                nan = (nan & F.nan_matters) | beyond
            elif CODES:
                mag = tl.where(beyond, F.inf_code, mag)
            else:
                value = tl.where(beyond, INF, value)
    if CODES:
        if F.integer:
            y = tl.where(sign < 0, -mag & F.mask, mag)
        else:
            y = mag | ((sign >> (32 - F.bits)) & F.sign)
            if not F.minus_zero:
                y = tl.where(mag == 0, 0, y)
        if F.nan_code >= 0 and (F.nan_matters or F.overflows):
            y = tl.where(nan, F.nan_code, y)
    else:
        y = value | sign
        if not F.minus_zero:
            y = tl.where(value == 0, 0, y)
        if F.nan_code >= 0 and (F.nan_matters or F.overflows):
            y = tl.where(nan, QNAN, y)
    return y


@triton.jit
def _general(negative, exp, sig, nan, inf, word, F: tl.constexpr, SIG: tl.constexpr):
    """Codes (int32) of exact values ``sig * 2**(exp - SIG + 1)``, rounded once."""
    # Below emin the grid is that of emin.
    grid = tl.maximum(exp, F.emin)
    discard = grid - exp + (SIG - 1 - F.man)
    # More bits leave less than half a step of any significand, as any greater number does.
    d = tl.minimum(discard, SIG + 1)
    if F.stochastic:
        lower = sig & ((1 << d) - 1)
        fraction = lower >> tl.minimum(tl.maximum(discard - F.sr_bits, 0), 63)
        kept = (sig >> d) + ((fraction + (word >> (32 - F.sr_bits)).to(tl.int64)) >> F.sr_bits)
    else:
        odd = (sig >> d) & 1
        bias = sig - sig
        if F.half:
            bias = (1 << (d - 1)) - F.minus_one
        if F.lsb:
            bias = bias + odd
        if F.mask_positive or F.mask_negative:
            up = tl.where(negative, F.mask_negative, F.mask_positive)
            if F.only_even:
                up = up * (1 - odd)
            bias = bias + ((1 << d) - 1) * up
        kept = (sig + bias) >> d
    mag = kept + ((grid - F.emin) << F.man)
    if not F.has_zero:
        mag = tl.maximum(mag, 1 << F.man) - (1 << F.man)
    beyond = mag > F.max_mag
    mag = tl.minimum(mag, F.max_mag).to(tl.int32)
    if F.integer:
        code = tl.where(negative, -mag & F.mask, mag)
    else:
        code = tl.where(negative, mag | F.sign, mag)
        if not F.minus_zero:
            code = tl.where(mag == 0, 0, code)
    code = tl.where(beyond, tl.where(negative, F.over_neg, F.over_pos), code)
    code = tl.where(inf, tl.where(negative, F.inf_neg, F.inf_pos), code)
    if not F.signed:
        nan = nan | (negative & (sig != 0))
    return tl.where(nan, F.nan, code)


@triton.jit
def _value_of(code, F: tl.constexpr):
    """float32 bits of the values of codes (int32); NaN canonical."""
    code = code & F.mask
    if F.integer:
        signed = tl.where((code & F.sign) != 0, code - (F.sign * 2), code)
        return _bits(signed.to(tl.float32) * _f32(F.step_bits))
    mag = code & F.mag_mask
    if F.has_zero:
        normal = (mag + ((F.emin + 126) << F.man)) << (23 - F.man)
        small = _bits(mag.to(tl.float32) * _f32(F.step_bits))
        value = tl.where(mag < (1 << F.man), small, normal)
    else:
        field = mag + (F.emin + 127)
        value = tl.where(field > 0, field << 23, 1 << tl.maximum(field + 22, 0))
    if F.signed:
        value = tl.where((code & F.sign) != 0, value | SIGN, value)
    if F.fnuz:
        return tl.where(code == F.sign, QNAN, value)
    if F.inf_code >= 0:
        value = tl.where(mag == F.inf_code, (value & SIGN) | INF, value)
        return tl.where(mag > F.inf_code, QNAN, value)
    if F.nan_code >= 0:
        return tl.where(mag > F.max_mag, QNAN, value)
    return value


# Blocks ------------------------------------------------------------------------------------------


@triton.jit
def _power_bits(byte):
    """float32 bits of 2**(byte - 127), byte 0 .. 254. 2**-127 is subnormal."""
    return tl.where(byte == 0, 0x00400000, byte << 23)


@triton.jit
def _mx_byte(amax, threshold: tl.constexpr, emax: tl.constexpr):
    """E8M0 codes of block amaxes (float32 bits): the exponent rules of `fpemu.scaling`."""
    # Normalise a subnormal: its integer, exactly, is a float with the same mantissa.
    tiny = amax < 0x00800000
    bits = tl.where(tiny, _bits(amax.to(tl.float32)) - (149 << 23), amax)
    byte = (bits >> 23) + tl.where((bits & 0x7FFFFF) > threshold, 1, 0) - emax
    byte = tl.where(amax == 0, 0, tl.minimum(tl.maximum(byte, 0), 254))
    return tl.where(amax >= INF, 255, byte)


@triton.jit
def _mx_byte64(amax, threshold: tl.constexpr, emax: tl.constexpr):
    """The same for float64 bits."""
    byte = (amax >> 52) - (1023 - 127 + emax) + tl.where((amax & MAN64) > threshold, 1, 0)
    byte = tl.minimum(tl.maximum(byte, 0), 254).to(tl.int32)
    return tl.where(amax >= INF64, 255, byte)


@triton.jit
def _fp8_scale(amax, max_bits: tl.constexpr, POW2: tl.constexpr):
    """(multiplier, decode scale) of `fpemu.scaling.fp8_block` and `fp8_block_pow2`."""
    scale = _divided(_f32(max_bits), _float(amax))
    scale = _least(scale, _f32(FLT_MAX))
    scale = tl.where((amax == 0) | (amax >= INF), _f32(ONE), scale)
    if POW2:
        scale = _float(_bits(scale) & INF)
    return scale, _divided(_f32(ONE), scale)


# Rotation ----------------------------------------------------------------------------------------


@triton.jit
def _stage(y, P: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, Q: tl.constexpr):
    """Each pair of a run that lies `H` apart becomes its sum and its difference."""
    pairs = tl.reshape(y, [P, SIZE // (2 * H), 2, H * Q])
    a, b = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    pairs = tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2])
    return tl.reshape(pairs, [P, SIZE, Q])


@triton.jit
def _rotated(x, flips, scale, SIZE: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr):
    """Hadamard transforms of runs of `SIZE` along columns (`ROWS`: along rows), in float32.

    `flips`: sign bits, SIZE of them. Stages h = 1, 2, 4, ... of ``(a + b, a - b)``, then the scale,
    then one rounding to `KIND`: the order of `fpemu.backends.butterfly`.
    """
    BR: tl.constexpr = x.shape[0]
    BC: tl.constexpr = x.shape[1]
    Q: tl.constexpr = BC if ROWS else 1  # elements between neighbours of a run
    P: tl.constexpr = BR * BC // (SIZE * Q)
    y = tl.reshape(x, [P, SIZE, Q])
    y = _float(_bits(y) ^ flips[None, :, None])
    for stage in tl.static_range(7):
        if (1 << stage) < SIZE:
            y = _stage(y, P, SIZE, 1 << stage, Q)
    y = tl.reshape(y, [BR, BC]) * scale
    if KIND == "float32":
        return y
    else:
        return _float(_widened(_narrowed(y, y != y, KIND), KIND))


# Results -----------------------------------------------------------------------------------------


@triton.jit
def _narrowed(v, nan, KIND: tl.constexpr):
    """float16 or bfloat16 bits (int16) of float32 values, to nearest even; canonical where `nan`."""
    if KIND == "bfloat16":
        if INTERPRETED:
            bits = _bits(v)
            near = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        else:
            near = v.to(tl.bfloat16).to(tl.int16, bitcast=True)
        return tl.where(nan, 0x7FC0, near).to(tl.int16)
    else:
        near = v.to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(nan, 0x7E00, near).to(tl.int16)


@triton.jit
def _result(
    bits, block, tensor, nan, OUT: tl.constexpr, BLOCK: tl.constexpr, TENSOR: tl.constexpr,
    EXACT: tl.constexpr, SHORT: tl.constexpr, NANS: tl.constexpr,
):  # fmt: skip
    """Bits, as integers, of ``value * block * tensor`` rounded once into `OUT`.

    `BLOCK`, `TENSOR`: whether that factor is there. `EXACT`: ``value * block`` is exact in float32.
    `SHORT`: the values lie on bfloat16's grid. `NANS`: `nan` says where the result is NaN.
    """
    v = _float(bits)
    if OUT == "float64":
        wide = v.to(tl.float64)
        if BLOCK:
            wide = wide * block.to(tl.float64)
        if TENSOR:
            wide = wide * tensor.to(tl.float64)
        if not NANS:
            nan = wide != wide
        return tl.where(nan, NAN64, wide.to(tl.int64, bitcast=True))
    elif SHORT and OUT == "bfloat16":
        return (bits >> 16).to(tl.int16)
    elif OUT == "float32":
        if BLOCK:
            v = v * block
        if TENSOR:
            v = v * tensor
        if not NANS:
            nan = v != v
        if BLOCK or TENSOR:
            return tl.where(nan, QNAN, _bits(v))
        else:
            return bits
    else:
        if BLOCK:
            if TENSOR or EXACT:
                v = v * block
            else:
                v = _times_odd(v, block)
        if TENSOR:
            v = _times_odd(v, tensor)
        if not NANS:
            nan = v != v
        return _narrowed(v, nan, OUT)


# Measures ----------------------------------------------------------------------------------------


@triton.jit
def _as_float64(raw, KIND: tl.constexpr):
    """float64 values of source elements (64-bit integers rounded to nearest even)."""
    if KIND == "float64":
        return raw.to(tl.float64, bitcast=True)
    elif KIND == "int32" or KIND == "int64":
        return raw.to(tl.float64)
    elif KIND == "uint32":
        return raw.to(tl.uint32, bitcast=True).to(tl.float64)
    elif KIND == "uint64":
        return raw.to(tl.uint64, bitcast=True).to(tl.float64)
    else:
        return _float(_widened(raw, KIND)).to(tl.float64)


@triton.jit
def _total(at, v):
    """Store the sum of a tile's numbers."""
    tl.store(at, tl.sum(tl.sum(v.to(tl.float64), axis=1), axis=0))


@triton.jit
def _top(v):
    return tl.max(tl.max(v, axis=1), axis=0)


@triton.jit
def _measure(to, x, q, q_nan, small, inside, there):
    """A tile's part of `fpemu.statistics`: its counts, sums, largest relative error, exponents."""
    a = x.to(tl.int64, bitcast=True) & MAG64
    b = q.to(tl.int64, bitcast=True) & MAG64
    x_finite = there & (a < INF64)
    both = x_finite & (b < INF64) & (q_nan == 0)
    used = both & (a != 0)
    xf = tl.where(both, x, 0.0)
    qf = tl.where(both, q, 0.0)
    error = qf - xf
    relative = tl.where(used, error / tl.where(used, x, 1.0), 0.0)
    _total(to, there & (a == 0))
    _total(to + 1, there & (a != 0) & (b == 0) & (q_nan == 0))
    _total(to + 2, there & small & (q_nan == 0))
    _total(to + 3, x_finite & (inside == 0) & (q_nan == 0))
    _total(to + 4, there & (a > INF64))
    _total(to + 5, there & (a == INF64))
    _total(to + 6, there & q_nan)
    _total(to + 7, used)
    _total(to + 8, xf * xf)
    _total(to + 9, error * error)
    _total(to + 10, qf * qf)
    _total(to + 11, xf * qf)
    _total(to + 12, relative * relative)
    _total(to + 13, error * xf)
    # Non-negative floats are ordered as their bits are.
    worst = _top(relative.to(tl.int64, bitcast=True) & MAG64)
    tl.store(to + 14, worst.to(tl.float64, bitcast=True))
    field = (b >> 52) - 1023
    counted = both & (b != 0)
    tl.store(to + 15, -_top(tl.where(counted, -field, -(1 << 20))).to(tl.float64))
    tl.store(to + 16, _top(tl.where(counted, field, -(1 << 20))).to(tl.float64))


@triton.jit
def _spread_of_amaxes(to, largest):
    """The smallest nonzero and the largest block amax of a tile; `largest` has float64 bits."""
    low = -_top(tl.where(largest > 0, -largest, -INF64))
    tl.store(to, low.to(tl.float64, bitcast=True))
    tl.store(to + 1, _top(largest).to(tl.float64, bitcast=True))


# Kernels -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first0", "first1", "seed0", "seed1", "stream0", "stream1"])
def quantize_kernel(
    x_ptr, out_ptr, scales_ptr, factors_ptr, values_ptr, scalars_ptr, words_ptr, flips_ptr,
    R, C, N1, TR, TC,
    x0, x1, xr, xc, o0, o1, orow, oc, s0, s1, sr, sc, w0, w1, wr, wc,
    first0, first1, seed0, seed1, stream0, stream1, rotation_scale,
    KIND: tl.constexpr, OUT: tl.constexpr, F: tl.constexpr, S: tl.constexpr, RULE: tl.constexpr,
    THRESHOLD: tl.constexpr, EMAX: tl.constexpr, TENSOR: tl.constexpr, EXACT: tl.constexpr,
    SHORT: tl.constexpr, D: tl.constexpr, ORDER: tl.constexpr, WORDS: tl.constexpr, ROTATION: tl.constexpr, ROTATE_ROWS: tl.constexpr,
    KEEP_SCALES: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, TALLP: tl.constexpr, WIDEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Values, codes, the in-range mask or measures of a tensor of (batch 0, batch 1, rows, columns).

    Sizes R, C; strides in elements, of x, the output, the scales (per block) and the random words
    or their indices. `scalars_ptr` is laid out as `fpemu.backends.loops.TENSOR`. For a dialect the
    scales are known: `scales_ptr` has each block's operand, `factors_ptr` what its element values
    are multiplied by, `values_ptr` the value of its scale.
    """
    b0, b1, tr, tc = _place(TR, TC, N1)
    row0, col0, r, c, there, rows_left, cols_left = _cells(
        tr, tc, R, C, TALL, WIDE, TALLP, WIDEP, BR, BC, FAR
    )
    if KEEP_SCALES or RULE == "dialect":
        first_block, block_at, blocks = _block_cells(
            b0, b1, tr, tc, rows_left, cols_left, s0, s1, sr, sc, TALL, WIDE, BR // TALLP,
            BC // WIDEP, FAR,
        )  # fmt: skip

    source = x_ptr + _at(b0, b1, row0, col0, x0, x1, xr, xc)
    raw = tl.load(source + (r * xr)[:, None] + (c * xc)[None, :], mask=there, other=0)

    # Random words: an uint32 each.
    word = 0
    if WORDS != "none":
        start = _at(b0, b1, row0, col0, w0, w1, wr, wc)
        if WORDS == "given":
            at = words_ptr + start + (r * wr)[:, None] + (c * wc)[None, :]
            word = tl.load(at, mask=there, other=0).to(tl.uint32)
        else:
            start += (first1.to(tl.int64) << 32) | (first0.to(tl.int64) & 0xFFFFFFFF)
            if WORDS == "fours":  # neighbours along a row share a counter
                fours = tl.arange(0, BC // 4)
                row_start = start + r.to(tl.int64) * wr
                block = (row_start.to(tl.uint64, bitcast=True) >> 2)[:, None] + fours[None, :]
                v0, v1, v2, v3 = _philox(block, seed0, seed1, stream0, stream1)
                word = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [BR, BC])
            else:
                index = start + (r.to(tl.int64) * wr)[:, None] + (c.to(tl.int64) * wc)[None, :]
                block = index.to(tl.uint64, bitcast=True) >> 2
                v0, v1, v2, v3 = _philox(block, seed0, seed1, stream0, stream1)
                lane = index & 3
                word = tl.where(lane < 2, tl.where(lane == 0, v0, v1), tl.where(lane == 2, v2, v3))

    WIDE_SOURCE: tl.constexpr = (
        KIND == "float64" or KIND == "int32" or KIND == "int64" or KIND == "uint32"
        or KIND == "uint64"
    ) and (RULE == "none" or RULE == "mx")  # fmt: skip
    CODES: tl.constexpr = OUT == "codes" or OUT == "stats"
    BLOCKS: tl.constexpr = RULE != "none" and RULE != "tensor"
    TO_SCALE: tl.constexpr = BLOCKS and RULE != "dialect"  # by the block's multiplier
    decode = _f32(ONE)
    tensor = _f32(ONE)
    bad = there
    if TENSOR or ORDER.times_number:
        tensor = tl.load(scalars_ptr + 1)
    if WIDE_SOURCE:
        negative, exp, sig, nan, inf = _exact64(raw, KIND)
        if RULE == "mx":
            key = (tl.maximum(exp + 1023, 0) << 52) | ((sig >> 7) & MAN64)
            key = key | tl.where((sig & 127) != 0, 1, 0)
            key = tl.where(inf, INF64, tl.where(nan, INF64 + 1, key))
            stored = _mx_byte64(_block_max(key, TALLP, WIDEP), THRESHOLD, EMAX)
            exp -= (_spread(stored, BR, BC, TALLP, WIDEP) - 127).to(tl.int64)
    elif RULE == "dialect":
        x = _float(_entered(raw, KIND, D.narrow))
        by = tl.load(scales_ptr + first_block + block_at, mask=blocks, other=0)
        by = _spread(by, BR, BC, TALLP, WIDEP)
        if OUT != "codes" and OUT != "within":
            decode = tl.load(factors_ptr + first_block + block_at, mask=blocks, other=0)
        if OUT == "within" or OUT == "stats":
            value = tl.load(values_ptr + first_block + block_at, mask=blocks, other=0)
            bad = _spread(value != value, BR, BC, TALLP, WIDEP)
        scaled = _scaled(x, by, D)
        if D.wraps:
            bits = _bits(_wrapped(scaled, by, WIDEP))
        else:
            bits = _bits(_replaced(scaled, x, by, D))
    else:
        bits = _widened(raw, KIND)
        if ROTATION > 0:
            flips = tl.load(flips_ptr + tl.arange(0, ROTATION))
            turned = _rotated(_float(bits), flips, rotation_scale, ROTATION, ROTATE_ROWS, KIND)
            bits = _bits(turned)
        if BLOCKS:
            a = bits & MAG
            if RULE == "fp8" or RULE == "fp8_pow2":
                a = tl.where(a > INF, 0, a)  # NaN is skipped
            amax = _block_max(a, TALLP, WIDEP)
            if RULE == "mx":
                stored = _mx_byte(amax, THRESHOLD >> 29, EMAX)
                multiplier = _float(_power_bits(254 - tl.minimum(stored, 254)))
            elif RULE == "nvfp4":
                stored = _fast(_float(amax) * tl.load(scalars_ptr + 2), 0, S, True)
                multiplier = tl.load(scalars_ptr + MULTIPLIERS + stored)
                decode = tl.load(scalars_ptr + VALUES + stored)
            else:
                multiplier, decode = _fp8_scale(amax, F.max_bits, RULE == "fp8_pow2")
                stored = _bits(decode)
        elif RULE == "tensor":
            multiplier = tl.load(scalars_ptr)
    POISON: tl.constexpr = RULE == "mx" or RULE == "nvfp4"  # whose scale can say NaN
    if RULE == "mx":
        bad = _spread(stored == 255, BR, BC, TALLP, WIDEP)
        decode = _float(_power_bits(stored))
    elif RULE == "nvfp4":
        bad = _spread(amax > INF, BR, BC, TALLP, WIDEP)

    # The cast.
    if OUT == "within" or OUT == "stats":
        if WIDE_SOURCE:
            inside = (exp < F.max_exp) | ((exp == F.max_exp) & (sig <= F.max_sig)) | (sig == 0)
            inside = inside & (nan == 0) & (inf == 0)
        else:
            x = _float(bits)
            if RULE == "dialect":
                x = scaled
            elif BLOCKS:
                x = x * _spread(multiplier, BR, BC, TALLP, WIDEP)
            elif RULE == "tensor":
                x = x * multiplier
            inside = (_bits(x) & MAG) <= F.max_bits
        if POISON or RULE == "dialect":
            inside = inside & (bad == 0)
    if OUT == "within":
        y = inside.to(tl.int8)
    else:
        if F.path == "int32" or F.path == "int64":
            if not WIDE_SOURCE:
                x = bits
                if RULE == "tensor":
                    x = _bits(_float(bits) * multiplier)
                elif TO_SCALE and RULE != "mx":
                    x = _bits(_float(bits) * _spread(multiplier, BR, BC, TALLP, WIDEP))
                if F.path == "int32":
                    negative, exp, sig = _exact32(x)
                    nan = (x & MAG) > INF
                    inf = (x & MAG) == INF
                else:
                    negative, exp, sig, nan, inf = _exact64(x, "float32")
                if RULE == "mx":
                    exp -= _spread(stored, BR, BC, TALLP, WIDEP) - 127
            y = _general(negative, exp, sig, nan, inf, word, F, 25 if F.path == "int32" else TOP)
            if not CODES:
                y = _value_of(y, F)
        else:
            x = _float(bits)
            if TO_SCALE:
                x = x * _spread(multiplier, BR, BC, TALLP, WIDEP)
            elif RULE == "tensor":
                x = x * multiplier
            y = _fast(x, word, F, CODES)
        if D.zero == "never":
            y = tl.where((y & (F.mag_mask if CODES else MAG)) == 0, 0, y)
        if CODES:
            if POISON:
                y = tl.where(bad, 0, y)
            if D.keeps_nan:  # and its sign
                y = tl.where((bits < 0) & ((bits & MAG) > INF), y | F.sign, y)
        elif ORDER.ordered:
            y = _in_order(y, _spread(decode, BR, BC, TALLP, WIDEP), tensor, ORDER)
            y = _result(y, decode, tensor, bad, OUT, False, False, True, False, False)
        else:
            if BLOCKS:
                decode = _spread(decode, BR, BC, TALLP, WIDEP)
            y = _result(y, decode, tensor, bad, OUT, BLOCKS, TENSOR, EXACT, SHORT, POISON)

    if OUT == "stats":
        x = _as_float64(raw, KIND)
        q = _value_of(y, F)
        if ORDER.ordered:
            q = _in_order(q, _spread(decode, BR, BC, TALLP, WIDEP), tensor, ORDER)
        q = _float(q).to(tl.float64)
        if BLOCKS and not ORDER.ordered:
            q = q * _spread(decode, BR, BC, TALLP, WIDEP).to(tl.float64)
        if TENSOR:
            q = q * tensor.to(tl.float64)
        q_nan = q != q
        if POISON:
            q_nan = q_nan | bad
        mag = y & F.mag_mask
        small = (mag > 0) & (mag < (1 << F.man)) & F.has_zero & (F.integer == 0)
        a = x.to(tl.int64, bitcast=True) & MAG64
        largest = _block_max(tl.where(a < INF64, a, 0), TALLP, WIDEP)
        _measure(out_ptr + tl.program_id(0).to(tl.int64) * 20, x, q, q_nan, small, inside, there)
        _spread_of_amaxes(out_ptr + tl.program_id(0).to(tl.int64) * 20 + 18, largest)
    else:
        target = out_ptr + _at(b0, b1, row0, col0, o0, o1, orow, oc)
        y = y.to(out_ptr.dtype.element_ty)
        tl.store(target + (r * orow)[:, None] + (c * oc)[None, :], y, mask=there)
    if KEEP_SCALES:
        stored = stored.to(scales_ptr.dtype.element_ty)
        tl.store(scales_ptr + first_block + block_at, stored, mask=blocks)


@triton.jit
def decode_kernel(
    codes_ptr, out_ptr, scales_ptr, tensor_ptr,
    R, C, N1, TR, TC,
    x0, x1, xr, xc, o0, o1, orow, oc, s0, s1, sr, sc,
    OUT: tl.constexpr, F: tl.constexpr, S: tl.constexpr, SCALES: tl.constexpr,
    TENSOR: tl.constexpr, EXACT: tl.constexpr, SHORT: tl.constexpr, ORDER: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, TALLP: tl.constexpr, WIDEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Values of codes and scales; `SCALES` is "none", "codes" or "float32".

    Where values are formed in an order, the scales are its factors.
    """
    b0, b1, tr, tc = _place(TR, TC, N1)
    row0, col0, r, c, there, rows_left, cols_left = _cells(
        tr, tc, R, C, TALL, WIDE, TALLP, WIDEP, BR, BC, FAR
    )

    source = codes_ptr + _at(b0, b1, row0, col0, x0, x1, xr, xc)
    code = tl.load(source + (r * xr)[:, None] + (c * xc)[None, :], mask=there, other=0)
    bits = _value_of(code.to(tl.int32), F)
    block = _f32(ONE)
    tensor = _f32(ONE)
    if SCALES != "none":
        first_block, block_at, blocks = _block_cells(
            b0, b1, tr, tc, rows_left, cols_left, s0, s1, sr, sc, TALL, WIDE, BR // TALLP,
            BC // WIDEP, FAR,
        )  # fmt: skip
        stored = tl.load(scales_ptr + first_block + block_at, mask=blocks, other=0)
        if SCALES == "codes":
            block = _float(_value_of(stored.to(tl.int32), S))
        else:
            block = _float(stored)
        block = _spread(block, BR, BC, TALLP, WIDEP)
    if TENSOR or ORDER.times_number:
        tensor = tl.load(tensor_ptr)
    if ORDER.ordered:
        bits = _in_order(bits, block, tensor, ORDER)
        y = _result(bits, block, tensor, there, OUT, False, False, True, False, False)
    else:
        y = _result(bits, block, tensor, there, OUT, SCALES != "none", TENSOR, EXACT, SHORT, False)
    target = out_ptr + _at(b0, b1, row0, col0, o0, o1, orow, oc)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(target + (r * orow)[:, None] + (c * oc)[None, :], y, mask=there)


@triton.jit
def amax_kernel(
    x_ptr, out_ptr, flips_ptr,
    R, C, N1, TR, TC,
    x0, x1, xr, xc, rotation_scale,
    KIND: tl.constexpr, ROTATION: tl.constexpr, ROTATE_ROWS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, TALLP: tl.constexpr, WIDEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Bits of the largest ``|x|`` of the tensor, x rounded to float32 (and rotated), NaN skipped."""
    b0, b1, tr, tc = _place(TR, TC, N1)
    row0, col0, r, c, there, _, _ = _cells(tr, tc, R, C, TALL, WIDE, TALLP, WIDEP, BR, BC, FAR)
    source = x_ptr + _at(b0, b1, row0, col0, x0, x1, xr, xc)
    raw = tl.load(source + (r * xr)[:, None] + (c * xc)[None, :], mask=there, other=0)
    bits = _widened(raw, KIND)
    if ROTATION > 0:
        flips = tl.load(flips_ptr + tl.arange(0, ROTATION))
        turned = _rotated(_float(bits), flips, rotation_scale, ROTATION, ROTATE_ROWS, KIND)
        bits = _bits(turned)
    a = bits & MAG
    a = tl.where(a > INF, 0, a)
    tl.atomic_max(out_ptr, tl.max(tl.reshape(a, [BR * BC]), axis=0))


@triton.jit
def scalars_kernel(
    amax_ptr, out_ptr, RULE: tl.constexpr, S: tl.constexpr, SCALED: tl.constexpr,
    top_bits: tl.constexpr, max_bits: tl.constexpr,
):  # fmt: skip
    """`fpemu.backends.loops.TENSOR` from an amax's bits: `fpemu.scaling.nvfp4_tensor`, `fp8_tensor`.

    `top_bits`: the largest element times the largest scale; `max_bits`: the largest element. Without
    `SCALED` the tensor has no scale. For rule "nvfp4" the multiplier and the value of each scale
    code follow (`nvfp4_block`): a block then needs no division.
    """
    one = _f32(ONE)
    s = one
    decode = one
    if SCALED:
        amax = tl.load(amax_ptr)
        g = _float(amax)
        if RULE == "nvfp4":
            top = _f32(top_bits)
            s = _divided(top, g)
            decode = _divided(g, top)
            clamped = s > _f32(FLT_MAX)
            decode = tl.where(clamped, _divided(one, _f32(FLT_MAX)), decode)
            s = tl.where(clamped, _f32(FLT_MAX), s)
            unscaled = (amax == 0) | (s == 0)
            s = tl.where(unscaled, one, s)
            decode = tl.where(unscaled, one, decode)
        else:
            s, decode = _fp8_scale(amax, max_bits, False)
    inverse = _divided(one, s)
    tl.store(out_ptr, s)
    tl.store(out_ptr + 1, decode)
    tl.store(out_ptr + 2, s * _divided(one, _f32(max_bits)))
    tl.store(out_ptr + 3, inverse)
    if RULE == "nvfp4":
        code = tl.arange(0, 256)
        value = _float(_value_of(code, S))
        multiplier = _least(_divided(one, value * inverse), _f32(FLT_MAX))
        tl.store(out_ptr + MULTIPLIERS + code, multiplier)
        tl.store(out_ptr + VALUES + code, value)
