"""Fast CPU kernels: tiles of 4 rows by 16 columns in LLVM vector IR.

One lane is one output. Operands come as float32 significands in (-2, 2) and integer exponents, so
a product of significands is one exact float32 multiplication, aligning it is a second, by a power
of two, and float-to-integer conversion truncates toward zero as the hardware does. All sums are
integer sums. An infinite or NaN significand makes its products special, and a float sum of the
products, otherwise unused, says which special value the block gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fpemu.backends import vector as V
from fpemu.backends.vector import F32, I32, I64, LANES, Vec, lanes_below, splat
from fpemu.formats import FP16, FP32, Format
from fpemu.gemm.request import NO_EXPONENT
from fpemu.gemm.units import Unit

ROWS = 4  # rows of a tile: a loaded vector of B serves as many products
INF, QNAN, MAG = 0x7F800000, 0x7FFFFFFF, 0x7FFFFFFF

# Vector helpers ----------------------------------------------------------------------------------


def _cast(v: Vec, op: str, element: ir.Type) -> Vec:
    return Vec(v.b, getattr(v.b, op)(v.v, ir.VectorType(element, LANES)))


def _ashr(v: Vec, n: Any) -> Vec:
    return Vec(v.b, v.b.ashr(v.v, v.splat(n).v))


def _finite(bits: Vec) -> Vec:
    return (bits & MAG) < INF


def _variable(b: ir.IRBuilder, element: ir.Type, name: str) -> ir.Value:
    """A vector that loops may change; LLVM keeps it in a register."""
    return cgutils.alloca_once(b, ir.VectorType(element, LANES), name=name)


def _get(b: ir.IRBuilder, slot: ir.Value) -> Vec:
    return Vec(b, b.load(slot))


# The block step ----------------------------------------------------------------------------------


class Rules:
    """A unit's numbers, scalars of the IR (32 bits); `params_of` makes them."""

    def __init__(self, b: ir.IRBuilder, params: list[ir.Value]) -> None:
        self.F, self.clamp, self.c_emin, self.keep, self.half, self.left = (
            b.trunc(p, I32) for p in params
        )


def params_of(unit: Unit, out: str) -> tuple[int, ...]:
    """F; clamp; smallest exponent of c; mask of the result's bits; whether the result is float16;
    how far c is shifted left before it is aligned."""
    clamp = unit.clamp(out)
    return (
        unit.F, NO_EXPONENT if clamp is None else clamp, (FP32 if out == "fp32" else FP16).emin,
        0xFFFFFC00 if unit.rho == "rz_e8m13" else 0xFFFFFFFF, int(out == "fp16"), max(unit.F - 23, 0),
    )  # fmt: skip


def _aligned_c(c: Vec, E: Vec, rules: Rules) -> Vec:
    """trunc(c * 2**(F - E)) with its sign, for finite c."""
    field = (c & MAG) >> 23
    sig = (c & 0x7FFFFF) | (field != 0).where(1 << 23, c.splat(0))
    down = E - field.max(1) + (splat(c.b, rules.left) - splat(c.b, rules.F) + 127 + 23)
    # An unsigned minimum: the shift is never negative, for E is at least c's exponent.
    kept = (sig << splat(c.b, rules.left)) >> down.min(31)
    negative = _ashr(c, 31)
    return (kept ^ negative) - negative


def _exponent_of_c(c: Vec, rules: Rules) -> Vec:
    exponent = ((c & MAG) >> 23) - 127
    exponent = exponent.max_signed(splat(c.b, rules.c_emin))
    return ((c & MAG) != 0).where(exponent, NO_EXPONENT)


def _truncated(mag: Vec, scale: Vec, keep: Vec) -> Vec:
    """float32 bits of ``mag * 2**scale`` cut off toward zero; `mag` has 32 bits."""
    # Clearing the bit below the 24 leading ones (and some below it) makes the conversion truncate.
    bits = _cast(mag & ((mag >> 24) ^ -1), "uitofp", F32).bits()
    exponent = (bits >> 23) + scale
    man = bits & 0x7FFFFF
    subnormal = (man | (1 << 23)) >> (exponent.splat(1) - exponent).min(31)
    normal = (exponent << 23) | man
    y = exponent.lt_signed(1).where(subnormal, normal)
    y = exponent.lt_signed(255).where(y, INF) & keep
    return (mag == 0).where(0, y)


def _nearest_half(mag: Vec, scale: Vec) -> Vec:
    """float32 bits of ``mag * 2**scale`` rounded to the nearest float16, ties to even."""
    one = mag.splat(1)
    bits = _cast(mag & ((mag >> 24) ^ -1), "uitofp", F32).bits()
    top = (bits >> 23) - 127
    drop = (top - 10).max_signed(scale.splat(-24) - scale).max_signed(0).min(31)
    up = ((one << drop) >> 1) - 1 + ((mag >> drop) & 1)
    kept = (mag + (drop == 0).where(0, up)) >> drop
    power = ((scale + drop) + 127) << 23
    y = (_cast(kept, "uitofp", F32) * power.floats()).bits()
    y = (y < 0x47800000).where(y, INF)  # 65536
    return (mag == 0).where(0, y)


def _finished(t: Vec, negative: Vec, E: Vec, rules: Rules) -> Vec:
    """rho: the sum in units of 2**(E - F), modulo 2**32, with its sign, as float32 bits."""
    b = t.b
    mag, scale = (t ^ negative) - negative, E - splat(b, rules.F)
    slot = _variable(b, I32, "rho")
    with b.if_else(b.icmp_signed("!=", rules.half, ir.Constant(I32, 0))) as (to_half, to_single):
        with to_half:
            b.store(_nearest_half(mag, scale).v, slot)
        with to_single:
            b.store(_truncated(mag, scale, splat(b, rules.keep)).v, slot)
    y = _get(b, slot)
    return (y == 0).where(0, y | (negative << 31))


def _step(
    b: ir.IRBuilder,
    rules: Rules,
    length: ir.Value,
    state: list[ir.Value],
    sig_a: Callable[[int, ir.Value], ir.Value],
    exp_a: Callable[[int, ir.Value], ir.Value],
    sig_b: Callable[[ir.Value], Vec],
    exp_b: Callable[[ir.Value], Vec],
) -> None:
    """One block of `length` (even) products for every row of the tile; `state` holds c's bits."""
    rows = range(len(state))
    c = [_get(b, slot) for slot in state]
    E = [_variable(b, I32, f"E{r}") for r in rows]
    sums = [[_variable(b, I32, f"t{r}{i}") for i in (0, 1)] for r in rows]
    special = [_variable(b, F32, f"s{r}") for r in rows]
    for r in rows:
        b.store(_exponent_of_c(c[r], rules).max_signed(splat(b, rules.clamp)).v, E[r])
    with cgutils.for_range(b, length) as loop:
        exponents = exp_b(loop.index)
        for r in rows:
            e = exponents + splat(b, exp_a(r, loop.index))
            b.store(_get(b, E[r]).max_signed(e).v, E[r])
    base = []
    for r in rows:
        e = _get(b, E[r])
        base.append(splat(b, rules.F) + 127 - e)
        zero = e.splat(0)
        b.store(_finite(c[r]).where(_aligned_c(c[r], e, rules), zero).v, sums[r][0])
        b.store(zero.v, sums[r][1])
        b.store(_finite(c[r]).where(zero, c[r]).floats().v, special[r])
    two = ir.Constant(length.type, 2)
    with cgutils.for_range(b, b.udiv(length, two)) as loop:
        first = b.mul(loop.index, two)
        # Two sums, each below 2**31 for half a block; together they may pass it.
        for i in (0, 1):
            k = b.add(first, ir.Constant(length.type, i))
            exponents, sigs = exp_b(k), sig_b(k)
            for r in rows:
                product = sigs * splat(b, sig_a(r, k))
                shift = (exponents + splat(b, exp_a(r, k)) + base[r]).max_signed(0)
                aligned = product * (shift << 23).floats()
                b.store((_get(b, sums[r][i]) + _cast(aligned, "fptosi", I32)).v, sums[r][i])
                b.store((_get(b, special[r]) + product).v, special[r])
    for r in rows:
        x, y = _get(b, sums[r][0]), _get(b, sums[r][1])
        negative = _ashr(_ashr(x, 1) + _ashr(y, 1) + (x & y & 1), 31)
        result = _finished(x + y, negative, _get(b, E[r]), rules)
        b.store(_or_special(_get(b, special[r]), result).v, state[r])


def _or_special(total: Vec, result: Vec) -> Vec:
    """`result`, or what a sum of products says where it is not finite; NaN is 0x7FFFFFFF."""
    bits = total.bits()
    return _finite(bits).where(result, ((bits & MAG) > INF).where(QNAN, bits))


def _data(
    context: Any, b: ir.IRBuilder, kind: types.Array, array: ir.Value, index: Any
) -> ir.Value:
    return b.gep(context.make_array(kind)(context, b, array).data, [index])


@intrinsic
def tile(
    typingctx, sig_a, exp_a, ai, width, sig_b, exp_b, bi, d, di, stride, blocks, length, params
):  # type: ignore[no-untyped-def]
    """`blocks` blocks of `length` products for rows ``ai, ai + width, ...`` of A and one panel of B.

    ``d[di + r*stride : ... + 16]`` are float32 bits: c on entry, D on return.
    """

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        (sa, ea, a0, wide, sb, eb, b0, out, d0, step, blocks, length, params) = values
        kinds = signature.args
        rules = Rules(b, cgutils.unpack_tuple(b, params))
        lanes = ir.Constant(I64, LANES)

        def at(n: int, array: Any, index: Any) -> Any:
            return _data(context, b, kinds[n], array, index)

        starts = [b.add(a0, b.mul(wide, ir.Constant(I64, r))) for r in range(ROWS)]
        slots = [at(7, out, b.add(d0, b.mul(step, ir.Constant(I64, r)))) for r in range(ROWS)]
        state = [_variable(b, I32, f"c{r}") for r in range(ROWS)]
        for slot, c in zip(slots, state, strict=True):
            b.store(V.load(b, slot, I32).v, c)
        with cgutils.for_range(b, blocks) as loop:
            k0 = b.mul(loop.index, length)
            pa = [(at(0, sa, b.add(s, k0)), at(1, ea, b.add(s, k0))) for s in starts]
            first = b.add(b0, b.mul(k0, lanes))
            pb = at(4, sb, first), at(5, eb, first)
            _step(
                b, rules, length, state,
                lambda r, k: b.load(b.gep(pa[r][0], [k])),
                lambda r, k: b.load(b.gep(pa[r][1], [k])),
                lambda k: V.load(b, b.gep(pb[0], [b.mul(k, lanes)]), F32),
                lambda k: V.load(b, b.gep(pb[1], [b.mul(k, lanes)]), I32),
            )  # fmt: skip
        for slot, c in zip(slots, state, strict=True):
            V.store(b, slot, _get(b, c))
        return context.get_dummy_value()

    return types.void(
        sig_a, exp_a, ai, width, sig_b, exp_b, bi, d, di, stride, blocks, length, params
    ), codegen


# Groups of exact products --------------------------------------------------------------------------


def _to_32_bits(mag: Vec) -> tuple[Vec, Vec]:
    """The leading 24 to 32 bits of a 64-bit magnitude below 2**56, and how many were cut off."""
    cut = mag.splat(0)
    for bits in (32, 40, 48):
        cut = (mag < (1 << bits)).where(cut, bits - 24)
    return (mag >> cut).narrow(I32), cut.narrow(I32)


def _group_step(
    b: ir.IRBuilder,
    rules: Rules,
    low: ir.Value,
    groups: ir.Value,
    size: ir.Value,
    state: list[ir.Value],
    sig_a: Callable[[int, ir.Value], ir.Value],
    sig_b: Callable[[ir.Value], Vec],
    scale_a: Callable[[int, ir.Value], tuple[ir.Value, ir.Value]],
    scale_b: Callable[[ir.Value], tuple[Vec, Vec]],
) -> None:
    """One block of `groups` groups of `size` products; every group's dot product is exact.

    A group's value is an integer times ``2**(exponents of its scales - low)``.
    """
    rows = range(len(state))
    c = [_get(b, slot) for slot in state]
    E = [_variable(b, I32, f"E{r}") for r in rows]
    sums = [_variable(b, I64, f"t{r}") for r in rows]
    dots = [_variable(b, F32, f"p{r}") for r in rows]
    special = [_variable(b, F32, f"s{r}") for r in rows]
    for r in rows:
        b.store(_exponent_of_c(c[r], rules).max_signed(splat(b, rules.clamp)).v, E[r])
    with cgutils.for_range(b, groups) as loop:
        _, exponents = scale_b(loop.index)
        for r in rows:
            e = exponents + splat(b, scale_a(r, loop.index)[1])
            b.store(_get(b, E[r]).max_signed(e).v, E[r])
    F64 = b.zext(rules.F, I64)
    for r in rows:
        field = (c[r] & MAG) >> 23
        sig = (c[r] & 0x7FFFFF) | (field != 0).where(1 << 23, field.splat(0))
        down = (_get(b, E[r]) - field.max(1) + 127).min(63).widen(I64)
        kept = (sig.widen(I64) << splat(b, b.sub(F64, ir.Constant(I64, 23)))) >> down
        finite, zero = _finite(c[r]), kept.splat(0)
        b.store(finite.where(c[r].lt_signed(0).where(zero - kept, kept), zero).v, sums[r])
        b.store(finite.where(field.splat(0), c[r]).floats().v, special[r])
    low32 = b.trunc(low, I32)
    power = splat(b, b.shl(b.add(low32, ir.Constant(I32, 127)), ir.Constant(I32, 23))).floats()
    up = splat(b, b.sub(F64, low))
    with cgutils.for_range(b, groups) as loop:
        for r in rows:
            b.store(ir.Constant(ir.VectorType(F32, LANES), None), dots[r])
        first = b.mul(loop.index, size)
        with cgutils.for_range(b, size) as inner:
            k = b.add(first, inner.index)
            sigs = sig_b(k)
            for r in rows:  # small integers times a power of two: exact, fused or not
                b.store(_multiply_add(sigs, splat(b, sig_a(r, k)), _get(b, dots[r])).v, dots[r])
        sig, exponents = scale_b(loop.index)
        for r in rows:
            s, e = scale_a(r, loop.index)
            value = _get(b, dots[r]) * splat(b, s) * sig
            units = _cast(value * power, "fptosi", I32)
            down = (_get(b, E[r]) - exponents - splat(b, e)).min(63).widen(I64)
            mag = units.lt_signed(0).where(-units, units)
            kept = (mag.widen(I64) << up) >> down
            kept = units.lt_signed(0).where(-kept, kept)
            b.store((_get(b, sums[r]) + kept).v, sums[r])
            b.store((_get(b, special[r]) + value).v, special[r])
    for r in rows:
        t = _get(b, sums[r])
        negative = t.lt_signed(0)
        mag, cut = _to_32_bits(negative.where(-t, t))
        scale = _get(b, E[r]) - splat(b, rules.F) + cut
        y = _truncated(mag, scale, splat(b, rules.keep))
        y = (y == 0).where(0, y | negative.where(1 << 31, y.splat(0)))
        b.store(_or_special(_get(b, special[r]), y).v, state[r])


def _multiply_add(x: Vec, y: Vec, z: Vec) -> Vec:
    """x * y + z, fused or not as the CPU likes: only where both give the same bits."""
    kind = ir.FunctionType(x.v.type, [x.v.type] * 3)
    return Vec(x.b, x.b.call(V._declare(x.b, f"llvm.fmuladd.v{LANES}f32", kind), [x.v, y.v, z.v]))


def _fused(x: Vec, y: Vec, z: Vec) -> Vec:
    """x * y + z with one rounding."""
    kind = ir.FunctionType(x.v.type, [x.v.type] * 3)
    return Vec(x.b, x.b.call(V._declare(x.b, f"llvm.fma.v{LANES}f32", kind), [x.v, y.v, z.v]))


@intrinsic
def fma(typingctx, x, y, z):  # type: ignore[no-untyped-def]
    """x * y + z of float32 with one rounding."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(F32, [F32] * 3)
        return b.call(V._declare(b, "llvm.fma.f32", kind), values)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def group_tile(  # type: ignore[no-untyped-def]
    typingctx,
    sig_a,
    ai,
    width,
    scale_a,
    exp_a,
    ag,
    blocks_a,
    sig_b,
    bi,
    scale_b,
    exp_b,
    bg,
    d,
    di,
    stride,
    blocks,
    groups,
    size,
    low,
    params,
):
    """As `tile`, in groups of `size`; row r's scales are ``scale_a[ag + r*blocks_a + group]`` and
    ``exp_a[...]``, a panel's ``scale_b[bg + 16*group : ... + 16]``."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        (sa, a0, wide, fa, ea, g0, per_row, sb, b0, fb, eb, h0, out, d0, step,
         blocks, groups, size, low, params) = values  # fmt: skip
        kinds = signature.args
        rules = Rules(b, cgutils.unpack_tuple(b, params))
        lanes = ir.Constant(I64, LANES)

        def at(n: int, array: Any, index: Any) -> Any:
            return _data(context, b, kinds[n], array, index)

        def row(start: Any, pitch: Any, r: int) -> Any:
            return b.add(start, b.mul(pitch, ir.Constant(I64, r)))

        slots = [at(12, out, row(d0, step, r)) for r in range(ROWS)]
        state = [_variable(b, I32, f"c{r}") for r in range(ROWS)]
        for slot, c in zip(slots, state, strict=True):
            b.store(V.load(b, slot, I32).v, c)
        with cgutils.for_range(b, blocks) as loop:
            g = b.mul(loop.index, groups)
            k = b.mul(g, size)
            pa = [at(0, sa, b.add(row(a0, wide, r), k)) for r in range(ROWS)]
            ga = [b.add(row(g0, per_row, r), g) for r in range(ROWS)]
            pga = [(at(3, fa, i), at(4, ea, i)) for i in ga]
            pb = at(7, sb, b.add(b0, b.mul(k, lanes)))
            gb = b.add(h0, b.mul(g, lanes))
            pgb = at(9, fb, gb), at(10, eb, gb)
            _group_step(
                b, rules, low, groups, size, state,
                lambda r, k: b.load(b.gep(pa[r], [k])),
                lambda k: V.load(b, b.gep(pb, [b.mul(k, lanes)]), F32),
                lambda r, i: (b.load(b.gep(pga[r][0], [i])), b.load(b.gep(pga[r][1], [i]))),
                lambda i: (V.load(b, b.gep(pgb[0], [b.mul(i, lanes)]), F32),
                           V.load(b, b.gep(pgb[1], [b.mul(i, lanes)]), I32)),
            )  # fmt: skip
        for slot, c in zip(slots, state, strict=True):
            V.store(b, slot, _get(b, c))
        return context.get_dummy_value()

    return types.void(
        sig_a, ai, width, scale_a, exp_a, ag, blocks_a, sig_b, bi, scale_b, exp_b, bg, d, di,
        stride, blocks, groups, size, low, params,
    ), codegen  # fmt: skip


# Late addition -------------------------------------------------------------------------------------


@intrinsic
def add16(typingctx, partial, pi, d, di, factor_a, fa, factor_b, fb, half):  # type: ignore[no-untyped-def]
    """``d[di : di + 16] += partial[pi : ...]`` in float32, or rounded on to float16 where `half`.

    With factors, one fused multiply-add by ``fl(factor_a[fa] * factor_b[fb : ...])``.
    """

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        (part, p0, out, d0, left, l0, right, r0, half) = values
        kinds = signature.args
        x = V.load(b, _data(context, b, kinds[0], part, p0), F32)
        slot = _data(context, b, kinds[2], out, d0)
        c = V.load(b, slot, I32).floats()
        if isinstance(kinds[4], types.NoneType):
            y = (c + x).bits()
        else:
            s = splat(b, b.load(_data(context, b, kinds[4], left, l0)))
            s = s * V.load(b, _data(context, b, kinds[6], right, r0), F32)
            y = _fused(s, x, c).bits()
        # float32 holds the sum of two float16 values closely enough to round again: 24 >= 2*11 + 2.
        mag = y & MAG
        field = (mag >> 23).max(1)
        sig = (mag & 0x7FFFFF) | (mag < (1 << 23)).where(mag.splat(0), 1 << 23)
        narrow = _nearest_half(sig, field - (127 + 23)) | (y & (1 << 31))
        narrow = _finite(y).where(narrow, y)
        y = Vec(b, b.select(b.trunc(half, V.I1), narrow.v, y.v))
        V.store(b, slot, ((y & MAG) > INF).where(QNAN, y))
        return context.get_dummy_value()

    return types.void(partial, pi, d, di, factor_a, fa, factor_b, fb, half), codegen


# Operands ------------------------------------------------------------------------------------------


def split_params(fmt: Format, emin: int) -> tuple[int, ...]:
    """What `split16` needs to know of a format: mantissa bits, smallest exponents (the format's,
    which sets its grid, and the unit's), largest value's bits, whether Inf and NaN are values."""
    top = int(np.float32(fmt.max).view(np.uint32))
    return (fmt.man_bits, fmt.emin, emin, top, int(fmt.has_inf), int(fmt.has_nan))


@intrinsic
def split16(typingctx, src, si, count, sig, exp, di, params):  # type: ignore[no-untyped-def]
    """Significands and exponents of ``src[si : si + count]`` (at most 16 float32), zeros behind.

    Returns how many are no values of the format.
    """

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        array, index, count, sigs, exps, at, params = values
        kinds = signature.args
        p = [splat(b, b.trunc(v, I32)) for v in cgutils.unpack_tuple(b, params)]
        man_bits, emin, floor, top, has_inf, has_nan = p
        mask = lanes_below(b, b.trunc(count, I32))
        x = V.load(b, _data(context, b, kinds[0], array, index), I32, mask)
        mag = x & MAG
        field = mag >> 23
        special = field == 255
        zero, one = x.splat(0), x.splat(1)
        integer = (mag & 0x7FFFFF) | (field != 0).where(one << 23, zero)
        exponent = field.max(1) - 127
        e = exponent.max_signed(floor)
        power = ((exponent - e + (127 - 23)).max_signed(1)) << 23
        s = (_cast(integer, "sitofp", F32) * power.floats()).bits() | (x & (1 << 31))
        drop = (one * 23 - man_bits + (emin - exponent).max_signed(0)).min(24)
        off_grid = (integer & ((one << drop) - 1)) != 0
        bad = (off_grid | (mag > top)).where(one, zero)
        allowed = (mag == INF).where(has_inf, has_nan)
        bad = special.where(one - allowed, bad)
        s = special.where(x, s)
        e = special.where(zero, (mag == 0).where(NO_EXPONENT, e))
        V.store(b, _data(context, b, kinds[3], sigs, at), s.floats())
        V.store(b, _data(context, b, kinds[4], exps, at), e)
        kind = ir.FunctionType(I32, [bad.v.type])
        add = V._declare(b, f"llvm.vector.reduce.add.v{LANES}i32", kind)
        return b.zext(b.call(add, [bad.v]), I64)

    return types.int64(src, si, count, sig, exp, di, params), codegen
