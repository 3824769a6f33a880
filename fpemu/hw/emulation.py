"""What the emulator says that an instruction gives: raw bits in, raw bits out, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from fpemu import ops
from fpemu.cvt import FORMS, rs_words
from fpemu.hw.instructions import ROUNDINGS, Instruction, get_instruction

#: The float type that holds the values of a packed source.
_FLOATS = {"fp32": np.float32, "fp16": np.float16}
#: Low bits of a TF32 register that are zero in a number; all set in the canonical NaN.
_TF32_LOW, _TF32_NAN = 13, 0x7FFFFFFF


def unsigned(bits: int) -> np.dtype:
    """The unsigned integer that holds a value of `bits` bits by itself."""
    return np.dtype(np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32)


def replay(name: str, bits: Any, rbits: Any = None) -> np.ndarray:
    """What an instruction gives, by the emulator.

    Parameters
    ----------
    name : str
        PTX name, for example ``"cvt.rn.satfinite.e4m3x2.f32"``; a key of `INSTRUCTIONS`.
    bits : ndarray of uint32 (f32 sources), uint16 (f16x2, bf16x2) or uint8 (narrower), any shape
        Source values as bits, one per element (two FP4 values are two elements). Signed integers
        of that width do, too. The last axis counts in groups of `Instruction.lanes`, value 0 of a
        group in the lowest lane: PTX's operands ``a, b`` are values 1 and 0, and ``{a, b, e, f}``
        values 3 to 0.
    rbits : ndarray of uint32, shape (..., n / lanes), optional
        One random word per group, for the ``.rs`` forms alone.

    Returns
    -------
    ndarray of uint8, uint16 or uint32
        One result per source value, in `bits`'s shape. A TF32 result is its whole 32-bit register.

    Notes
    -----
    Special values: NaN gives 0x7f (FP8), 0x7fff (float16, bfloat16), 0x7fffffff (TF32), 0xff
    (UE8M0), the largest finite value (FP6, FP4). ``cvt.rna.tf32`` cuts the low 13 bits off a NaN,
    which can make it an infinity. What that rests on is ``INSTRUCTIONS[name].source_note``.

    Raises
    ------
    ValueError
        For an unknown name, integers of another width, a last axis that the lanes do not divide,
        random words for an instruction that takes none, or none for one that does.

    Examples
    --------
    >>> import numpy as np
    >>> from fpemu import hw
    >>> x = np.float32([-1.0, np.nan]).view(np.uint32)
    >>> [hex(code) for code in hw.replay("cvt.rn.relu.f16x2.f32", x)]
    ['0x0', '0x7fff']
    """
    row = get_instruction(name, "replay")
    bits = np.asarray(bits)
    width = unsigned(row.source_bits)
    check_shapes(row, "replay", bits.dtype.name, bits.shape, _words_shape(rbits))
    bits = np.ascontiguousarray(bits).reshape(bits.shape).view(width)
    values = _values(row, bits)
    element = row.destination_format
    if element.name == "e8m0":
        values = np.abs(values)
    random = {}
    if row.form is not None:
        words = rs_words(row.form, np.asarray(rbits).view(np.uint32), where="replay")
        random = {"random_bits": words, "sr_bits": FORMS[row.form].bits}
    codes = ops.encode(
        values,
        element,
        rounding=ROUNDINGS[row.rounding],
        overflow="sat" if row.satfinite else "nonsat",
        backend=None,
        **random,
    ).codes
    if row.relu:
        negative = bits & row.source_format.sign_bit != 0
        codes = np.where(negative & ~np.isnan(values), 0, codes)
    if element.name == "tf32":
        nan = _expanded_nan(bits, row.satfinite) if row.rounding == "rna" else _TF32_NAN
        codes = np.where(np.isnan(values), nan, codes << _TF32_LOW)
    return codes.astype(unsigned(row.result_bits))


def _expanded_nan(bits: np.ndarray, satfinite: bool) -> np.ndarray:
    """What ``cvt.rna.tf32`` makes of NaN: no GPU has it, and ptxas writes it out in integers.

    The low 13 bits go. Then ``.satfinite`` takes what is infinite or NaN one TF32 step down.
    """
    cut = bits & ~np.uint32((1 << _TF32_LOW) - 1)
    return cut - np.uint32(satfinite << _TF32_LOW)


def check_shapes(
    row: Instruction,
    where: str,
    dtype: str,
    shape: tuple[int, ...],
    words: tuple[str, tuple[int, ...]] | None,
) -> None:
    """Refuse bits and random words that the instruction cannot take."""
    width = 8 * unsigned(row.source_bits).itemsize
    if dtype not in (f"uint{width}", f"int{width}"):
        raise ValueError(
            f"{where}: bits has dtype {dtype}; {row.ptx} reads {row.source} values as uint{width} or"
            f" int{width}, one per element. Use x.view."
        )
    if row.lanes > 1 and (not shape or shape[-1] % row.lanes):
        raise ValueError(
            f"{where}: bits has shape {tuple(shape)}; {row.ptx} takes {row.lanes} values at a time"
            " along the last axis. Pad it."
        )
    if (words is None) == row.random:
        what = "needs rbits, a uint32 word per group" if row.random else "takes no random words"
        raise ValueError(
            f"{where}: rbits is {'missing' if words is None else 'given'} but {row.ptx} {what}."
            f" {'Pass rbits=' if row.random else 'Leave rbits out'}."
        )
    if words is not None:
        wanted = (*shape[:-1], shape[-1] // row.lanes)
        if words[0] not in ("uint32", "int32") or tuple(words[1]) != wanted:
            raise ValueError(
                f"{where}: rbits has dtype {words[0]} and shape {tuple(words[1])}; it must be uint32"
                f" or int32 of shape {wanted}, one word per {row.lanes} values. Reshape it."
            )


def _words_shape(rbits: Any) -> tuple[str, tuple[int, ...]] | None:
    if rbits is None:
        return None
    rbits = np.asarray(rbits)
    return rbits.dtype.name, rbits.shape


def _values(row: Instruction, bits: np.ndarray) -> np.ndarray:
    """The values of source bits, in a float type that holds them exactly."""
    source = row.source_format
    if source.name in _FLOATS:
        return bits.view(_FLOATS[source.name])
    if source.name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return source.values().astype(np.float32)[bits & ((1 << source.bits) - 1)]
