"""The one kernel that runs every ``cvt``: the instruction is a constant of it."""

# mypy: ignore-errors
# Triton compiles the text of the function; its arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast_kernel(
    bits_ptr, rbits_ptr, out_ptr, groups,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, RANDOM: tl.constexpr, PACKED: tl.constexpr,
    LANES: tl.constexpr, SOURCE_BITS: tl.constexpr, RESULT_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convert `groups` groups of LANES values; signed integers hold all bits.

    Lane 0 is the lowest, in registers as in memory. An instance of ASM makes one group: its result
    word ($0) from the source registers ($1 the lowest lane or all lanes packed) and, where RANDOM,
    the random word, the last operand.
    """
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    mask: tl.constexpr = (1 << SOURCE_BITS) - 1
    first = bits_ptr + group * LANES
    operands = (tl.load(first, inside, 0).to(tl.int32),)
    if PACKED:
        word = operands[0] & mask
        for lane in tl.static_range(1, LANES):
            value = tl.load(first + lane, inside, 0).to(tl.int32)
            word |= (value & mask) << (lane * SOURCE_BITS)
        operands = (word,)
    else:
        for lane in tl.static_range(1, LANES):
            operands += (tl.load(first + lane, inside, 0),)
    if RANDOM:
        operands += (tl.load(rbits_ptr + group, inside, 0),)
    word = tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, operands, dtype=tl.int32, is_pure=True, pack=1
    )
    for lane in tl.static_range(LANES):
        code = word >> (lane * RESULT_BITS)
        if RESULT_BITS < 8:
            code &= (1 << RESULT_BITS) - 1
        tl.store(out_ptr + group * LANES + lane, code.to(out_ptr.dtype.element_ty), inside)
