"""The inner body of the Hadamard transform: one intrinsic over vectors of sixteen lanes.

A Walsh-Hadamard transform of 2**k values is k stages; stage h = 1, 2, 4, ... replaces each pair
``(a, b)`` that lies h apart by ``(a + b, a - b)``. Each sum is one float32 operation. Sixteen
lanes hold either one block (stages are shuffles) or a column each (stages are plain sums).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fpemu.backends import vector as V
from fpemu.backends.kernels import QNAN, SIGN, _pointer, load_bits, store_bits
from fpemu.backends.vector import I32, I64, LANES, Vec, lanes_below, splat


def _across_lanes(v: Vec, stages: int) -> Vec:
    """Stages 1, 2, 4, ... inside a vector: the partner's value plus or minus the lane's own."""
    for stage in range(stages):
        h = 1 << stage
        partner = [lane ^ h for lane in range(LANES)]
        upper = [SIGN if lane & h else 0 for lane in range(LANES)]
        kind = ir.VectorType(I32, LANES)
        other = Vec(v.b, v.b.shuffle_vector(v.v, v.v, ir.Constant(kind, partner)))
        own = (v.bits() ^ Vec(v.b, ir.Constant(kind, upper))).floats()
        v = other + own
    return v


def _across_rows(rows: list[Vec]) -> list[Vec]:
    """Stages 1, 2, 4, ... between vectors."""
    rows, h = list(rows), 1
    while h < len(rows):
        for k in range(len(rows)):
            if not k & h:
                a, b = rows[k], rows[k + h]
                rows[k], rows[k + h] = a + b, a - b
        h *= 2
    return rows


@intrinsic
def butterfly(  # type: ignore[no-untyped-def]
    typingctx, src, si, src_step, dst, di, dst_step, lanes, rows, flip_in, flip_out, fi, flip_step,
    scale, count,
):  # fmt: skip
    """Transform ``len(rows)`` vectors, `src_step` elements apart, over ``2**len(lanes)`` lanes and
    all rows; `lanes` and `rows` are tuples whose lengths alone count.

    `flip_in` and `flip_out` (None or uint32 arrays) hold sign bits that are XORed onto what is
    read and what is written: vector r's start at ``[fi + r * flip_step]``, one per lane where
    `lanes` is not empty, else one for the whole vector. `scale` (None or a float32) multiplies the
    result. `count` limits the lanes (None: all). Everything is read before anything is written.
    """
    arguments = (
        src, si, src_step, dst, di, dst_step, lanes, rows, flip_in, flip_out, fi, flip_step, scale,
        count,
    )  # fmt: skip

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        kinds, given = signature.args, values
        stages, height = len(kinds[6]), len(kinds[7])
        mask = None
        if not isinstance(kinds[13], types.NoneType):
            mask = lanes_below(b, b.trunc(given[13], I32))

        def at(which, start, step, r):  # type: ignore[no-untyped-def]
            index = b.add(given[start], b.mul(given[step], ir.Constant(I64, r)))
            return _pointer(context, b, kinds[which], given[which], index)

        def flips(which, r):  # type: ignore[no-untyped-def]
            if isinstance(kinds[which], types.NoneType):
                return None
            slot = at(which, 10, 11, r)
            return V.load(b, slot, I32) if stages else splat(b, b.load(slot))

        vectors = []
        for r in range(height):
            x = load_bits(b, at(0, 1, 2, r), kinds[0].dtype, mask)
            flip = flips(8, r)
            x = x if flip is None else x ^ flip
            vectors.append(_across_lanes(x.floats(), stages))
        for r, y in enumerate(_across_rows(vectors)):
            if not isinstance(kinds[12], types.NoneType):
                y = y * splat(b, given[12])
            bits, flip = y.bits(), flips(9, r)
            bits = bits if flip is None else bits ^ flip
            if kinds[3].dtype == types.float32:  # narrower stores make NaN canonical themselves
                bits = Vec(b, b.fcmp_unordered("uno", y.v, y.v)).where(QNAN, bits)
            store_bits(b, at(3, 4, 5, r), kinds[3].dtype, bits, mask, 0)
        return context.get_dummy_value()

    return types.void(*arguments), codegen
