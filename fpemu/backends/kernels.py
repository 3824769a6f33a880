"""CPU kernels: numba loops around one vector body, `cast16`.

`cast16` reads sixteen elements, casts them and writes values, codes or an in-range mask. What it
does is chosen by the *types* of its arguments, so numba compiles (and caches on disk) just the
combinations that are used:

* source and destination arrays: float32, `HALF` (float16 bits; numba has no float16 here) or int16
  (bfloat16 bits); destinations also uint8/uint16/uint32 (codes) and bool (the mask);
* parameters: the tuple of `clamp_params`, `rne_params` or `bias_params`;
* `mult`, `shift`, `dec`, `keep` (per block), `tensor` (per tensor), `words`: None or an array.

Layout: every kernel sees ``(outer, rows, cols)`` in C order and blocks of ``tall x wide``
elements; a *strip* is `tall` rows. Blocks along the last axis have ``tall == 1``, along another
axis ``wide == 1``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fpemu.backends import vector as V
from fpemu.backends.vector import I16, I32, I64, LANES, Vec, lanes_below, splat
from fpemu.casting import ROUNDINGS, Specials, specials, value_bits
from fpemu.formats import Format
from fpemu.rng import PHILOX_M, PHILOX_ROUNDS, PHILOX_W

HALF = np.dtype([("half", np.uint16)])
SIGN, MAG, INF, QNAN = 0x80000000, 0x7FFFFFFF, 0x7F800000, 0x7FC00000

# Parameters --------------------------------------------------------------------------------------

# Kernels tell the paths apart by the length of the parameter tuple; the general one is longest.
CLAMP_PARAMS, TIE_PARAMS, RNE_PARAMS = 6, 8, 9


def _f32_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def fits_fast(fmt: Format, rounding: str, overflow: str) -> bool:
    """Whether the float path of round-to-nearest-even serves: a signed float that has a minus zero
    and whose overflow keeps its sign."""
    return (
        rounding == "rne"
        and fmt.has_negative_zero
        and fmt.has_zero
        and 0 < fmt.man_bits < 23  # with none, the last kept bit is the hidden one
        and (overflow == "sat" or fmt.has_inf or not fmt.has_nan)
    )


def rne_params(fmt: Format, rounding: str, overflow: str, values: bool) -> tuple[int, ...]:
    """Integers of the fast path: constant shift for normals, a magic addend for subnormals."""
    drop = 23 - fmt.man_bits
    code = specials(fmt, rounding, overflow)
    if values:
        last = (MAG + SIGN) >> drop << drop
        top, over, nan = (
            _f32_bits(fmt.max),
            value_bits(fmt, code.over_pos),
            value_bits(fmt, code.nan),
        )
    else:
        last = fmt.emin + 126 << fmt.man_bits
        top, over, nan = fmt.max_mag, code.over_pos, code.nan
    # 2**(emin - m + 23): the sum's last mantissa bit is worth one subnormal step.
    magic = _f32_bits(2.0 ** (fmt.emin - fmt.man_bits + 23))
    first_normal = _f32_bits(2.0**fmt.emin)
    return (drop, (1 << drop - 1) - 1, last, first_normal, magic, top, over, nan, 32 - fmt.bits)


def clamp_params(fmt: Format, values: bool) -> tuple[int, ...]:
    """Integers of the path for scaled values: round to nearest even, saturate, NaN undefined."""
    drop = 23 - fmt.man_bits
    first, beyond = _f32_bits(2.0**fmt.emin), _f32_bits(2.0 ** (fmt.emax + 1))
    top = _f32_bits(fmt.max) if values else fmt.max_mag
    return (first, beyond, drop << 23, top, drop, 32 - fmt.bits)


def tie_params(fmt: Format, rounding: str, values: bool) -> tuple[int, ...]:
    """As `clamp_params`, to nearest with ties away (``"rna"``) or toward zero (``"rnz"``)."""
    return (*clamp_params(fmt, values), fmt.man_bits + 1 << 23, int(rounding == "rna"))


def bias_params(
    fmt: Format, rounding: str, overflow: str, values: bool, sr_bits: int = 32
) -> tuple[int, ...]:
    """Integers of the general path: every rounding of every format."""
    bias = ROUNDINGS.get(rounding, ROUNDINGS["rtz"])
    code: Specials = specials(fmt, rounding, overflow)
    ends = [value_bits(fmt, c) if values else c for c in code]
    full = 0xFFFFFFFF
    return (
        fmt.man_bits, fmt.emin + 127, fmt.max_mag, 0 if fmt.has_zero else 1, *ends,
        0 if fmt.signed else full,
        bias.half * full, bias.minus_one, bias.lsb, bias.mask_positive * full,
        bias.mask_negative * full, 0 if bias.only_even else full,
        0 if fmt.is_integer else fmt.sign_bit, (1 << fmt.bits) - 1 if fmt.is_integer else 0,
        1 if fmt.has_negative_zero else 0, _f32_bits(fmt.min_subnormal),
        full << (32 - sr_bits) & full,
    )  # fmt: skip


# The vector body ---------------------------------------------------------------------------------


def _widen_half(h: Vec) -> Vec:
    """float32 bits of float16 bits (in 32-bit lanes)."""
    magnitude = (h & 0x7FFF) << 13
    # Rebias by 2**(127 - 15): exact, and it normalises subnormals by itself.
    scaled = (magnitude.floats() * 2.0**112).bits()
    special = magnitude | INF
    return (magnitude < (0x7C00 << 13)).where(scaled, special) | ((h & 0x8000) << 16)


def load_bits(b: ir.IRBuilder, pointer: ir.Value, dtype: types.Type, mask: Vec | None) -> Vec:
    """float32 bits of sixteen source elements."""
    if dtype == types.float32:
        return V.load(b, pointer, I32, mask)
    narrow = V.load(b, pointer, I16, mask).widen()
    return _widen_half(narrow) if isinstance(dtype, types.Record) else narrow << 16


def _round_narrow(bits: Vec, drop: int) -> Vec:
    return (bits + (((bits >> drop) & 1) + ((1 << drop - 1) - 1))) >> drop


def store_bits(
    b: ir.IRBuilder, pointer: ir.Value, dtype: types.Type, bits: Vec, mask: Vec | None, stream: int
) -> None:
    """Write float32 bits as `dtype`, rounded to nearest even, NaN canonical.

    `stream`: 0, or the alignment in bytes of a store that goes past the caches.
    """
    if dtype == types.float32:
        if stream:
            slot = b.bitcast(pointer, bits.v.type.as_pointer())
            instruction = b.store(bits.v, slot, align=stream)
            one = b.module.add_metadata([ir.Constant(I32, 1)])
            instruction.set_metadata("nontemporal", one)
        else:
            V.store(b, pointer, bits, mask)
        return
    sign, a = (bits >> 16) & 0x8000, bits & MAG
    if isinstance(dtype, types.Record):
        magic = 2.0 ** (-14 - 10 + 23)
        subnormal = (a.floats() + bits.splat(_f32_bits(magic)).floats()).bits() - _f32_bits(magic)
        normal = _round_narrow(a, 13) - (112 << 10)
        narrow = (a < _f32_bits(2.0**-14)).where(subnormal, normal)
        narrow = (narrow > 0x7C00).where(0x7C00, narrow)
        quiet = 0x7E00
    else:
        narrow, quiet = _round_narrow(a, 16), 0x7FC0
    narrow = (a > INF).where(quiet, narrow | sign)
    V.store(b, pointer, narrow.narrow(I16), mask)


def _fast_values(x: Vec, p: list[Vec]) -> Vec:
    drop, up, keep, first_normal, magic, top, over, nan, _ = p
    sign, a = x & SIGN, x & MAG
    normal = (a + (((a >> drop) & 1) + up)) & keep
    subnormal = ((a.floats() + magic.floats()) - magic.floats()).bits()
    y = (a < first_normal).where(subnormal, normal)
    y = (y > top).where(over, y) | sign
    return (a > INF).where(nan, y)


def _fast_codes(x: Vec, p: list[Vec]) -> Vec:
    drop, up, rebias, first_normal, magic, top, over, nan, sign_shift = p
    a = x & MAG
    normal = ((a + (((a >> drop) & 1) + up)) >> drop) - rebias
    subnormal = (a.floats() + magic.floats()).bits() - magic
    code = (a < first_normal).where(subnormal, normal)
    code = (code > top).where(over, code) | ((x & SIGN) >> sign_shift)
    return (a > INF).where(nan, code)


def _clamped(x: Vec, p: list[Vec], values: bool) -> Vec:
    """A power of two 2**(23-m) times the value's own, added, leaves the m kept bits and rounds."""
    first, beyond, up, top, drop, sign_shift = p[:CLAMP_PARAMS]
    sign, a = x & SIGN, x & MAG
    exponent = (a & INF).max(first).min(beyond)
    magic = exponent + up
    total = a.floats() + magic.floats()
    if len(p) == TIE_PARAMS:
        # A tie went to even; the difference says which way, and the next float is the other one.
        down, away = p[CLAMP_PARAMS:]
        half = (exponent - down).floats()
        left = a.floats() - (total - magic.floats())
        back = (half.bits() ^ SIGN).floats()
        wrong = left == (away != 0).where(half, back)
        step = (away != 0).where(x.splat(1), x.splat(-1))
        total = (total.bits() + wrong.where(step, x.splat(0))).floats()
    if values:
        y = total - magic.floats()
        limit = top.floats()
        return (y < limit).where(y, limit).bits() | sign
    code = (total.bits() - magic) + ((exponent - first) >> drop)
    return code.min(top) | (sign >> sign_shift)


def _general(x: Vec, p: list[Vec], shift: Vec | None, words: Vec | None, values: bool) -> Vec:
    (man_bits, emin, max_mag, offset, over_pos, over_neg, inf_pos, inf_neg, nan, unsigned,
     half_on, minus_one, lsb_on, mask_pos, mask_neg, not_only_even,
     sign_bit, integer, minus_zero, step, top_bits) = p[:21]  # fmt: skip
    zero, one = x.splat(0), x.splat(1)
    negative = x.lt_signed(0)
    a = x & MAG
    # A float32 subnormal, read as an integer and converted, is a normal float 2**149 larger.
    tiny = a < (1 << 23)
    scaled = tiny.where(a.to_f32().bits(), a)
    exponent = (scaled >> 23) - tiny.where(149, zero)
    # One spare bit below the significand: then at least one bit is always discarded.
    sig = ((scaled & 0x7FFFFF) | (a != 0).where(one << 23, zero)) << 1
    if shift is not None:
        exponent = exponent - shift
    below = (emin - exponent).max_signed(0)
    above = (exponent - emin).max_signed(0)
    discard = below + (one * 24 - man_bits)
    d = discard.min(31)
    if words is not None:
        # Top-aligned floor(fraction * 2**n) plus the top n random bits: round up on carry out.
        rest = sig & ((one << d) - 1)
        near = rest << (zero + 32 - d)
        far = sig >> (discard.max(32) - 32).min(31)
        fraction = (discard < 32).where(near, far) & top_bits
        carry = (fraction + (words & top_bits)) < fraction
        mag = (sig >> d) + carry.where(one, zero)
    else:
        half, mask = one << (d - 1), (one << d) - 1
        lsb = (sig >> d) & 1
        direction = negative.where(mask_neg, mask_pos)
        bias = (half & half_on) - minus_one + (lsb & lsb_on)
        bias = bias + (mask & direction & ((lsb - 1) | not_only_even))
        mag = (sig + bias) >> d
    mag = mag + (above << man_bits)
    mag = mag.max(offset) - offset
    if values:
        count = mag.to_f32() * step.floats()
        normal = (mag + ((emin - 1) << man_bits)) << (one * 23 - man_bits)
        small = (mag < (one << man_bits)).where(count.bits(), normal)
        signed = small | ((x & SIGN) & ((mag != 0).where(SIGN, minus_zero << 31)))
    else:
        keep_sign = negative & ((mag | minus_zero) != 0)
        signed = mag | keep_sign.where(sign_bit, zero)
        twos = (zero - mag) & integer
        signed = (negative & (integer != 0)).where(twos, signed)
    y = (mag > max_mag).where(negative.where(over_neg, over_pos), signed)
    y = (a == INF).where(negative.where(inf_neg, inf_pos), y)
    refused = negative & ((a & unsigned) != 0)
    return ((a > INF) | refused).where(nan, y)


def _round_to_odd(p: Vec) -> Vec:
    """float32 bits of float64 lanes, rounded to odd: a later rounding to 16 bits is then single."""
    near = p.to_f32()
    back = near.to_f64().bits() & MAG64
    exact = p.bits() & MAG64
    bits = near.bits() - (back > exact).where(1, near.bits().splat(0))
    return (back == exact).where(bits, bits | 1)


MAG64 = 0x7FFFFFFFFFFFFFFF


def _pointer(context, b, array_type, array, index):  # type: ignore[no-untyped-def]
    """Address of ``array[index]`` (a 1-D array)."""
    return b.gep(context.make_array(array_type)(context, b, array).data, [index])


@intrinsic
def cast16(  # type: ignore[no-untyped-def]
    typingctx,
    src,
    si,
    dst,
    di,
    params,
    mult,
    shift,
    dec,
    tensor,
    keep,
    block,
    words,
    wi,
    count,
    stream,
    ahead,
):
    """Cast ``src[si:si+16]`` into ``dst[di:di+16]``; see the module's docstring for the arguments.

    `block` indexes `mult`, `shift`, `dec` and `keep` where they are arrays: ``(k,)`` takes entry k
    for all lanes, a plain k takes an entry per lane from k on. `count` limits the lanes (None: all sixteen); `stream` (1, or ``(1,)`` where ``dst[di]`` is
    64-byte aligned) writes past the caches. `ahead` (None or a count) fetches the source that many elements further into the cache.
    """
    arguments = (
        src, si, dst, di, params, mult, shift, dec, tensor, keep, block, words, wi, count, stream,
        ahead,
    )  # fmt: skip

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = dict(zip(_CAST_ARGUMENTS, signature.args, strict=True))
        given = dict(zip(_CAST_ARGUMENTS, values, strict=True))

        def optional(name, element):  # type: ignore[no-untyped-def]
            kind = kinds[name]
            if isinstance(kind, types.NoneType):
                return None
            if name == "words":
                at = _pointer(context, b, kind, given[name], given["wi"])
                return V.load(b, at, element, mask)
            if name == "tensor":  # see `loops.TENSOR`
                at = _pointer(context, b, kind, given[name], ir.Constant(I64, 1))
                return splat(b, b.load(at))
            if isinstance(kind, types.Array):
                index = given["block"]
                if isinstance(kinds["block"], types.BaseTuple):
                    (index,) = cgutils.unpack_tuple(b, index)
                    at = _pointer(context, b, kind, given[name], index)
                    return splat(b, b.load(at))
                return V.load(b, _pointer(context, b, kind, given[name], index), element, mask)
            raise TypeError(f"cast16: {name} must be None or an array")

        mask = None
        if not isinstance(kinds["count"], types.NoneType):
            mask = lanes_below(b, b.trunc(given["count"], I32))
        p = [splat(b, b.trunc(v, I32)) for v in cgutils.unpack_tuple(b, given["params"])]
        source = _pointer(context, b, kinds["src"], given["src"], given["si"])
        x = load_bits(b, source, kinds["src"].dtype, mask)
        if not isinstance(kinds["ahead"], types.NoneType):
            V.prefetch(b, b.gep(source, [given["ahead"]]))
        mult = optional("mult", V.F32)
        if mult is not None:
            x = (x.floats() * mult).bits()
        out = kinds["dst"].dtype
        slot = _pointer(context, b, kinds["dst"], given["dst"], given["di"])
        keep = optional("keep", I32)
        is_values = isinstance(out, (types.Float, types.Record)) or out == types.int16
        if out == types.boolean:
            inside = ((x & MAG) <= p[0]).where(1, x.splat(0))
            V.store(b, slot, (inside if keep is None else inside & keep).narrow(V.I8), mask)
            return context.get_dummy_value()
        if len(p) in (CLAMP_PARAMS, TIE_PARAMS):
            y = _clamped(x, p, is_values)
        elif len(p) == RNE_PARAMS:
            y = (_fast_values if is_values else _fast_codes)(x, p)
        else:
            y = _general(x, p, optional("shift", I32), optional("words", I32), is_values)
        if is_values:
            dec, tensor = optional("dec", V.F32), optional("tensor", V.F32)
            factors = [f for f in (dec, tensor) if f is not None]
            if tensor is not None and out != types.float32:
                product = y.floats().to_f64()
                for factor in factors:
                    product = product * factor.to_f64()
                y = ((y & MAG) > INF).where(QNAN, _round_to_odd(product))
            else:
                # At most one product rounds; a NaN here is the canonical one of y or dec.
                for factor in factors:
                    y = (y.floats() * factor).bits()
            store_bits(b, slot, out, y, mask, _ALIGNMENT[type(kinds["stream"])])
        else:
            y = y if keep is None else y & keep
            width = out.bitwidth
            V.store(b, slot, y if width == 32 else y.narrow(ir.IntType(width)), mask)
        return context.get_dummy_value()

    return types.void(*arguments), codegen


# numpy aligns to 16 bytes, so that much is always known; ``(1,)`` promises a whole line.
_ALIGNMENT: dict[Any, int] = {
    types.NoneType: 0,
    types.Integer: 16,
    types.IntegerLiteral: 16,
    types.UniTuple: 64,
}

_CAST_ARGUMENTS = (
    "src", "si", "dst", "di", "params", "mult", "shift", "dec", "tensor", "keep", "block", "words",
    "wi", "count", "stream", "ahead",
)  # fmt: skip


@intrinsic
def amax16(typingctx, src, si, count):  # type: ignore[no-untyped-def]
    """Largest ``|src[si + lane]|`` as float32 bits (NaN is above infinity), a uint32."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        array, index, count = values
        mask = None
        if not isinstance(signature.args[2], types.NoneType):
            mask = lanes_below(b, b.trunc(count, I32))
        pointer = _pointer(context, b, signature.args[0], array, index)
        x = load_bits(b, pointer, signature.args[0].dtype, mask)
        return (x & MAG).reduce_max()

    return types.uint32(src, si, count), codegen


def _fold_halves(b: ir.IRBuilder, u: Vec, v: Vec, group: int) -> Vec:
    """Maxima of the two halves of every run of `group` lanes, those of `u` before those of `v`."""
    low = [lane for lane in range(2 * LANES) if lane % group < group // 2]

    def pick(order: list[int]) -> Vec:
        picks = ir.Constant(ir.VectorType(I32, LANES), order)
        return Vec(b, b.shuffle_vector(u.v, v.v, picks))

    return pick(low).max(pick([lane + group // 2 for lane in low]))


@intrinsic
def amax_blocks16(typingctx, src, si, vectors, out, oi):  # type: ignore[no-untyped-def]
    """Amaxes of 16 blocks of ``16 * len(vectors)`` elements from ``src[si]`` on, as float bits.

    A tree over 16 vectors: each level folds lanes in half, so the last one holds a block a lane.
    """

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        array, index, _, top, at = values
        kind, per = signature.args[0], len(signature.args[2])

        def block(k: int) -> Vec:
            best = None
            for j in range(per):
                offset = b.add(index, ir.Constant(I64, (k * per + j) * LANES))
                a = load_bits(b, _pointer(context, b, kind, array, offset), kind.dtype, None) & MAG
                best = a if best is None else best.max(a)
            assert best is not None
            return best

        def tree(first: int, count: int) -> Vec:
            if count == 1:
                return block(first)
            half = count // 2
            return _fold_halves(b, tree(first, half), tree(first + half, half), 2 * LANES // count)

        V.store(b, _pointer(context, b, signature.args[3], top, at), tree(0, LANES))
        return context.get_dummy_value()

    return types.void(src, si, vectors, out, oi), codegen


@intrinsic
def fold16(typingctx, src, si, top, ti, skip_nan, count):  # type: ignore[no-untyped-def]
    """``top[ti:ti+16] = max(top, |src|)`` as uint32 float bits; NaN counts as 0 where `skip_nan`
    is not None."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        array, index, best, at, _, count = values
        mask = None
        if not isinstance(signature.args[5], types.NoneType):
            mask = lanes_below(b, b.trunc(count, I32))
        pointer = _pointer(context, b, signature.args[0], array, index)
        a = load_bits(b, pointer, signature.args[0].dtype, mask) & MAG
        if not isinstance(signature.args[4], types.NoneType):
            a = (a > INF).where(a.splat(0), a)
        slot = _pointer(context, b, signature.args[2], best, at)
        V.store(b, slot, V.load(b, slot, I32, mask).max(a), mask)
        return context.get_dummy_value()

    return types.void(src, si, top, ti, skip_nan, count), codegen


@intrinsic
def lead64(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Float32 elements from ``array[index]`` to the next 64-byte boundary (0 .. 15)."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        address = b.ptrtoint(_pointer(context, b, signature.args[0], values[0], values[1]), I64)
        bytes_ = b.and_(b.sub(ir.Constant(I64, 0), address), ir.Constant(I64, 63))
        return b.lshr(bytes_, ir.Constant(I64, 2))

    return types.int64(array, index), codegen


@intrinsic
def philox16(typingctx, out, oi, block, seed, stream):  # type: ignore[no-untyped-def]
    """Words of counters ``block .. block+15`` (four each, in order) into ``out[oi:oi+64]``."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        array, index, block, seed, stream = values

        def lanes64(scalar):  # type: ignore[no-untyped-def]
            return splat(b, scalar)

        low = 0xFFFFFFFF
        counter = lanes64(block) + Vec(
            b, ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        )
        x0, x1 = counter & low, counter >> 32
        x2, x3 = lanes64(stream) & low, lanes64(stream) >> 32
        k0, k1 = lanes64(seed) & low, lanes64(seed) >> 32
        for _ in range(PHILOX_ROUNDS):
            p0, p1 = x0 * PHILOX_M[0], x2 * PHILOX_M[1]
            x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 & low, (p0 >> 32) ^ x3 ^ k1, p0 & low
            k0, k1 = (k0 + PHILOX_W[0]) & low, (k1 + PHILOX_W[1]) & low
        # Two words fit one 64-bit lane; then pairs interleave.
        first, second = x0 | (x1 << 32), x2 | (x3 << 32)
        for half in (0, 1):
            order = [k // 2 + 8 * half + LANES * (k % 2) for k in range(LANES)]
            picks = ir.Constant(ir.VectorType(I32, LANES), order)
            pairs = Vec(b, b.shuffle_vector(first.v, second.v, picks))
            at = b.add(index, ir.Constant(I64, 32 * half))
            slot = _pointer(context, b, signature.args[0], array, at)
            slot = b.bitcast(slot, pairs.v.type.as_pointer())
            b.store(pairs.v, slot, align=4)
        return context.get_dummy_value()

    return types.void(out, oi, block, seed, stream), codegen


@intrinsic
def f32_of_bits(typingctx, bits):  # type: ignore[no-untyped-def]
    """float32 with the bits of a uint32."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        return b.bitcast(values[0], V.F32)

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of_f32(typingctx, value):  # type: ignore[no-untyped-def]
    """uint32 bits of a float32."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        return b.bitcast(values[0], I32)

    return types.uint32(types.float32), codegen
