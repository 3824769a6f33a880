"""Rounding and overflow as data: what a kernel must know to cast into a format.

Every backend but the oracle casts by the same integer recipe. A positive value is a significand
`sig` times a power of two. Discarding `d` low bits of it rounds to

    ``(sig + bias) >> d``

where `bias` depends on the rounding alone (`ROUNDINGS`). The result, counted in the format's
codes without sign, is the *magnitude*: magnitudes are ordered like values, carries run from
mantissa into exponent by themselves, and a magnitude above `Format.max_mag` is an overflow,
decided after rounding as IEEE 754 (7.4) asks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fpemu.errors import unknown
from fpemu.formats import Format


class Bias(NamedTuple):
    """Which parts make up the bias; with ``half = 2**(d-1)``, ``mask = 2**d - 1``.

    ``bias = [half] - [minus_one] + [lsb of the kept bits] + [mask if the sign is right]``, the
    last only where the kept bits are even if `only_even`.
    """

    half: int = 0
    minus_one: int = 0
    lsb: int = 0
    mask_positive: int = 0
    mask_negative: int = 0
    only_even: int = 0


#: Deterministic roundings. `"sr"` has no row: its bias is a random word.
ROUNDINGS: dict[str, Bias] = {
    "rne": Bias(half=1, minus_one=1, lsb=1),  # a tie reaches the next code only from an odd one
    "rna": Bias(half=1),
    "rnz": Bias(half=1, minus_one=1),
    "rtz": Bias(),
    "rtp": Bias(mask_positive=1),
    "rtn": Bias(mask_negative=1),
    "rto": Bias(mask_positive=1, mask_negative=1, only_even=1),  # odd codes stay, even ones go up
}
ROUNDING_NAMES = (*ROUNDINGS, "sr")
OVERFLOW_NAMES = ("sat", "nonsat")


class Specials(NamedTuple):
    """Codes for what is no ordinary magnitude, sign included."""

    over_pos: int
    over_neg: int
    inf_pos: int
    inf_neg: int
    nan: int


def check_rounding(rounding: str, where: str) -> None:
    if rounding not in ROUNDING_NAMES:
        raise unknown(where, "rounding", rounding, ROUNDING_NAMES)


def resolve_overflow(fmt: Format, overflow: str | None, where: str) -> str:
    if overflow is None:
        return fmt.overflow
    if overflow not in OVERFLOW_NAMES:
        raise unknown(where, "overflow", overflow, OVERFLOW_NAMES)
    return overflow


@lru_cache(maxsize=1024)
def specials(fmt: Format, rounding: str, overflow: str) -> Specials:
    """Codes of overflow, infinity and NaN under a rounding and an overflow mode.

    ``nonsat`` sends an overflow to infinity, to NaN where there is none, to the largest finite
    where there is neither. A finite value stays finite under a rounding that points inward there
    (toward zero, to odd, or the directed mode of the other sign). NaN without a NaN code becomes
    +max, as PTX ``cvt`` does for FP4 and FP6 (an integer format refuses NaN before it gets here).
    """
    top = fmt.max_mag
    negative_max = signed_code(fmt, top, True)
    nan = fmt.nan_code if fmt.nan_code is not None else top
    if overflow == "sat":
        inf_pos, inf_neg = top, negative_max
    elif fmt.inf_code is not None:
        inf_pos, inf_neg = fmt.inf_code, fmt.inf_code | fmt.sign_bit
    elif fmt.has_nan:
        inf_pos = inf_neg = nan
    else:
        inf_pos, inf_neg = top, negative_max
    inward = {"rtz": (True, True), "rto": (True, True), "rtp": (False, True), "rtn": (True, False)}
    pos_in, neg_in = inward.get(rounding, (False, False))
    over_pos = top if pos_in else inf_pos
    over_neg = negative_max if neg_in else inf_neg
    if not fmt.signed:  # every negative value is NaN
        over_neg = inf_neg = nan
    return Specials(over_pos, over_neg, inf_pos, inf_neg, nan)


def signed_code(fmt: Format, mag: int, negative: bool) -> int:
    """Code of a finite magnitude with its sign (the scalar form of what the kernels do)."""
    if not negative:
        return mag
    if fmt.is_integer:
        return -mag & (1 << fmt.bits) - 1
    if mag == 0 and not fmt.has_negative_zero:
        return 0
    return mag | fmt.sign_bit


@lru_cache(maxsize=256)
def value_table(fmt: Format) -> np.ndarray:
    """float32 value of every code of a format of at most 16 bits; NaN is 0x7FC00000.

    Shape (2**bits,), or (256,) for a narrower unsigned format: a stored byte's unused top bits
    are ignored (cuBLAS ignores the sign bit of UE4M3).
    """
    values = fmt.values().astype(np.float32)
    values[np.isnan(values)] = np.float32(np.nan)
    width = 8 if fmt.bits <= 8 else 16
    table = np.tile(values, (1 << width) // len(values))
    table.flags.writeable = False
    return table


def value_bits(fmt: Format, code: int) -> int:
    """float32 bits of the value of one code (for formats of any width)."""
    if fmt.nan_code is not None and _is_nan_code(fmt, code):
        return 0x7FC00000
    if fmt.is_integer:
        signed = code - (1 << fmt.bits) if code & fmt.sign_bit else code
        return int(np.float32(signed * fmt.min_subnormal).view(np.uint32))
    negative = bool(fmt.signed and code & fmt.sign_bit)
    mag = code & ~fmt.sign_bit
    value = np.inf if mag == fmt.inf_code else float(fmt.value_of_mag(mag))
    return int(np.float32(-value if negative else value).view(np.uint32))


def _is_nan_code(fmt: Format, code: int) -> bool:
    if fmt.special == "fnuz":
        return code == fmt.sign_bit
    mag = code & ~fmt.sign_bit
    return mag > (fmt.inf_code if fmt.inf_code is not None else fmt.max_mag)
