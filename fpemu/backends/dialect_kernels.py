"""Vector bodies of the dialects: intrinsics on sixteen float32 elements of flat arrays.

As in `kernels`, the *types* of some arguments choose the code: None or a number.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fpemu.backends import vector as V
from fpemu.backends.kernels import INF, MAG, QNAN, SIGN, _pointer
from fpemu.backends.vector import I16, I32, I64, LANES, Vec, splat


def _load(context, b, kind, array, index) -> Vec:  # type: ignore[no-untyped-def]
    return V.load(b, _pointer(context, b, kind, array, index), V.F32)


def _store(context, b, kind, array, index, value: Vec) -> None:  # type: ignore[no-untyped-def]
    V.store(b, _pointer(context, b, kind, array, index), value)


def _given(kind: types.Type) -> bool:
    return not isinstance(kind, types.NoneType)


@intrinsic
def times16(typingctx, src, si, by, add, dst, di):  # type: ignore[no-untyped-def]
    """``dst[di:di+16] = src[si:si+16] * by + add`` in two roundings; the sum with -0 changes
    nothing, that with +0 turns -0 into +0."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        x = _load(context, b, kinds[0], values[0], values[1])
        y = x * splat(b, values[2]) + splat(b, values[3])
        _store(context, b, kinds[4], values[4], values[5], y)
        return context.get_dummy_value()

    return types.void(src, si, types.float32, types.float32, dst, di), codegen


@intrinsic
def over16(typingctx, src, si, by, add, dst, di):  # type: ignore[no-untyped-def]
    """As `times16`, divided by `by`."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        x = _load(context, b, kinds[0], values[0], values[1])
        y = x / splat(b, values[2]) + splat(b, values[3])
        _store(context, b, kinds[4], values[4], values[5], y)
        return context.get_dummy_value()

    return types.void(src, si, types.float32, types.float32, dst, di), codegen


@intrinsic
def minus_zero16(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Zeros of ``array[index:index+16]`` become -0."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kind = signature.args[0]
        x = _load(context, b, kind, values[0], values[1]).bits()
        y = ((x & MAG) == 0).where(x.splat(SIGN), x)
        _store(context, b, kind, values[0], values[1], y.floats())
        return context.get_dummy_value()

    return types.void(array, index), codegen


@intrinsic
def flush16(typingctx, array, index, limit):  # type: ignore[no-untyped-def]
    """Magnitudes up to `limit` in ``array[index:index+16]`` become +0."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kind = signature.args[0]
        x = _load(context, b, kind, values[0], values[1]).bits()
        small = (x & MAG).floats() <= splat(b, values[2])
        _store(context, b, kind, values[0], values[1], small.where(x.splat(0), x).floats())
        return context.get_dummy_value()

    return types.void(array, index, types.float32), codegen


@intrinsic
def quiet16(typingctx, array, index):  # type: ignore[no-untyped-def]
    """NaN of ``array[index:index+16]`` becomes the canonical one."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kind = signature.args[0]
        x = _load(context, b, kind, values[0], values[1]).bits()
        y = ((x & MAG) > INF).where(x.splat(QNAN), x)
        _store(context, b, kind, values[0], values[1], y.floats())
        return context.get_dummy_value()

    return types.void(array, index), codegen


@intrinsic
def widen16(typingctx, src, si, dst, di):  # type: ignore[no-untyped-def]
    """float32 values of sixteen bfloat16 bit patterns (uint16)."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        narrow = V.load(b, _pointer(context, b, kinds[0], values[0], values[1]), I16)
        _store(context, b, kinds[2], values[2], values[3], (narrow.widen() << 16).floats())
        return context.get_dummy_value()

    return types.void(src, si, dst, di), codegen


def _bfloat16_bits(x: Vec) -> Vec:
    """The upper half of float32 bits, rounded to nearest even."""
    return (x + (((x >> 16) & 1) + 0x7FFF)) >> 16


@intrinsic
def narrow16(typingctx, src, si, dst, di):  # type: ignore[no-untyped-def]
    """bfloat16 bits (uint16) of sixteen float32 values, NaN canonical."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        x = _load(context, b, kinds[0], values[0], values[1]).bits()
        bits = ((x & MAG) > INF).where(x.splat(0x7FC0), _bfloat16_bits(x))
        V.store(b, _pointer(context, b, kinds[2], values[2], values[3]), bits.narrow(I16))
        return context.get_dummy_value()

    return types.void(src, si, dst, di), codegen


@intrinsic
def round16(typingctx, src, si, dst, di):  # type: ignore[no-untyped-def]
    """Sixteen float32 values on bfloat16's grid, to nearest even; NaN stays."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        x = _load(context, b, kinds[0], values[0], values[1]).bits()
        near = _bfloat16_bits(x) << 16
        y = ((x & MAG) > INF).where(x, near)
        _store(context, b, kinds[2], values[2], values[3], y.floats())
        return context.get_dummy_value()

    return types.void(src, si, dst, di), codegen


def _float16(a: Vec) -> Vec:
    """Non-negative floats below 2^16 on float16's grid, to nearest even."""
    bits = a.bits()
    near = ((bits + (((bits >> 13) & 1) + 0xFFF)) >> 13 << 13).floats()
    return (a < 2.0**-14).where((a + 0.5) - 0.5, near)  # 0.5 has steps of 2^-24


def _in_kind(a: Vec, kind: types.Type) -> Vec:
    """Non-negative floats rounded to the dtype that `narrow` stands for."""
    if isinstance(kind, types.BaseTuple):
        return _float16(a)
    return (_bfloat16_bits(a.bits()) << 16).floats() if _given(kind) else a


def _rint(a: Vec) -> Vec:
    """Integer nearest to a non-negative float, ties to even; NaN stays NaN."""
    magic = a.splat(2.0**23)
    return (a < magic).where((a + magic) - magic, a)


def _floor(a: Vec) -> Vec:
    """Floor of a float in 0 .. 2^23."""
    return a.to_int().to_f32()


def _e2m1_unbounded(a: Vec) -> Vec:
    """Non-negative `a` rounded to E2M1's steps as if it had no largest value."""
    low, mid = a < 2.0, a < 4.0
    per = low.where(a.splat(2.0), mid.where(a.splat(1.0), a.splat(0.5)))
    step = low.where(a.splat(0.5), mid.where(a.splat(1.0), a.splat(2.0)))
    return _rint(a * per) * step


@intrinsic
def error16(typingctx, src, si, operand, scale, g, s, top, squared, fast, clamp, d, di):  # type: ignore[no-untyped-def]
    """Errors of sixteen elements under a candidate scale, into ``d[di:di+16]``.

    Decoded values are fl(fl(fl(q*scale)*g)/top), compared with x; with `fast` q*scale is compared
    with fl(x*s). Magnitudes, or squares with `squared`. `clamp`: TransformerEngine's cast, which
    saturates and makes NaN 0; without, fouroversix's. The flags are None or a number.
    """

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        x = _load(context, b, kinds[0], values[0], values[1])
        p = x * splat(b, values[2])
        a = (p.bits() & MAG).floats()
        sign = p.bits() & SIGN
        if _given(kinds[9]):
            a = (a > 6.0).where(a.splat(6.0), a)
            a = (a == a).where(a, a.splat(0.0))
        else:
            a = (a.bits() == INF).where(a.bits().splat(QNAN), a.bits()).floats()
        q = (_e2m1_unbounded(a).bits() | sign).floats()
        v = q * splat(b, values[3])
        if _given(kinds[8]):
            e = v - x * splat(b, values[5])
        else:
            e = (v * splat(b, values[4])) / splat(b, values[6]) - x
        e = e * e if _given(kinds[7]) else (e.bits() & MAG).floats()
        _store(context, b, kinds[10], values[10], values[11], e)
        return context.get_dummy_value()

    f = types.float32
    return types.void(src, si, f, f, f, f, f, squared, fast, clamp, d, di), codegen


@intrinsic
def microxcaling16(typingctx, src, si, by, rule, reach, nearest, even, narrow, dst, di):  # type: ignore[no-untyped-def]
    """Sixteen elements as microxcaling rounds them; see `dialect_loops.microxcaling`."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        man, min_exp, largest = (
            splat(b, b.trunc(v, I32)) for v in cgutils.unpack_tuple(b, values[3])
        )
        # The scale is a power of two: the product with its inverse rounds as the quotient does.
        y = _load(context, b, kinds[0], values[0], values[1]) * splat(b, values[2])
        # 2^17 is beyond every element; NaN and Inf stand in blocks that are NaN throughout.
        bits, sign = (y.bits() & MAG).min(144 << 23), y.bits() & SIGN
        if isinstance(kinds[7], types.BaseTuple):
            bits = _float16(bits.floats()).bits()
        exponent = bits.splat(0)
        if _given(kinds[4]):
            steps = [splat(b, b.trunc(v, I32)) for v in cgutils.unpack_tuple(b, values[4])]
            exponent = (bits >> 23) - 127
            above = exponent + 1  # the power of two that the logarithm may reach
            negative = above.lt_signed(0)
            m = negative.where(-above, above - 1)
            across = steps[0]
            for k, step in enumerate(steps[1:]):
                across = m.lt_signed(1 << k).where(across, step)
            across = (above == 0).where(bits.splat(0), across)
            rest = bits.splat(0x800000) - (bits & 0x7FFFFF)
            exponent = (rest <= across).where(above, exponent).max_signed(min_exp)
        shift = (man - exponent) + 127
        v = bits.floats() * (shift << 23).floats()
        r = _floor(v)
        if _given(kinds[5]):
            near, half = v + 0.5, v.splat(0.5)
            left = v - half
            r = _floor(_in_kind(near, kinds[7]))
            if _given(kinds[6]):
                pair = _in_kind((left.bits() & MAG).floats(), kinds[7]) * half
                tie = (left < 0.0).where(v.splat(1.0), pair - _floor(pair)) == 0.0
                r = tie.where(r - 1.0, r)
        p = r * ((bits.splat(254) - shift) << 23).floats()
        top = largest.floats()
        p = (p > top).where(top, p)
        # A NaN block is all +0; which of two NaNs a product keeps depends on the processor.
        finite = splat(b, values[2]) == splat(b, values[2])
        p = finite.where(p, p.splat(0.0))
        nonzero = (bits == 0).where(bits.splat(0), finite.where(sign, bits.splat(0)))
        _store(context, b, kinds[8], values[8], values[9], (p.bits() | nonzero).floats())
        return context.get_dummy_value()

    return types.void(src, si, types.float32, rule, reach, nearest, even, narrow, dst, di), codegen


def _transposed(b: ir.IRBuilder, rows: list[Vec]) -> list[Vec]:
    """Columns of a 16 x 16 matrix: four rounds of exchanging blocks of half the size."""
    size = LANES // 2
    while size:
        low = [k + LANES * (k & size != 0) - (k & size) for k in range(LANES)]
        high = [k + size + LANES * (k & size != 0) - (k & size) for k in range(LANES)]
        swapped = list(rows)
        for k in range(LANES):
            if k & size == 0:
                pair = rows[k].v, rows[k + size].v
                swapped[k] = Vec(b, b.shuffle_vector(*pair, _picks(low)))
                swapped[k + size] = Vec(b, b.shuffle_vector(*pair, _picks(high)))
        rows, size = swapped, size // 2
    return rows


def _picks(order: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, LANES), order)


@intrinsic
def sums16(typingctx, d, di, largest, pairs, out, oi):  # type: ignore[no-untyped-def]
    """Sums of sixteen blocks of sixteen errors from ``d[di]`` on, into ``out[oi:oi+16]``.

    One after the other; `pairs`: the second half added to the first before that; `largest`: the
    largest instead, NaN if there is one. (None or a number each.)
    """

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds = signature.args
        rows = [
            _load(context, b, kinds[0], values[0], b.add(values[1], ir.Constant(I64, k * LANES)))
            for k in range(LANES)
        ]
        columns = _transposed(b, rows)
        if _given(kinds[3]):
            half = LANES // 2
            columns = [columns[k] + columns[k + half] for k in range(half)]
        total = columns[0].splat(0.0)
        for column in columns:
            if _given(kinds[2]):
                kept = (column <= total).where(total, column)
                total = (total == total).where(kept, total)
            else:
                total = total + column
        _store(context, b, kinds[4], values[4], values[5], total)
        return context.get_dummy_value()

    return types.void(d, di, largest, pairs, out, oi), codegen
