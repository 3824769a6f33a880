"""The exact oracle: tensor-core units in Python integers and fractions, one output at a time.

It shares nothing with the kernels but the tables of units and formats, and is written to be read
next to the definition in `fpemu.gemm.units`. About 10^5 multiply-adds a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from fpemu.formats import FP16, FP32, Format
from fpemu.gemm.units import Unit

NAN_BITS = {"fp32": 0x7FFFFFFF, "fp16": 0x7FFF}
_RESULT = {"fp32": FP32, "fp16": FP16}


@dataclass
class Term:
    """One addend of a block before and after alignment."""

    value: Fraction  # exact
    exponent: int | None  # None: zero, takes no part in the alignment
    units: int = 0  # what is kept, in units of 2**(E - F)


@dataclass
class Step:
    """What happened in one block of products, or in the late addition of one (no terms then)."""

    k: list[int] = field(default_factory=list)  # which products; the first of each group
    terms: list[Term] = field(default_factory=list)
    c: Term | None = None
    E: int | None = None  # None: special values, or nothing but zeros
    quantum: Fraction = Fraction(0)  # 2**(E - F)
    total: Fraction = Fraction(0)  # sum of what was kept, before the last rounding
    result: float = 0.0


# Numbers -----------------------------------------------------------------------------------------


def exponent_of(value: Fraction, emin: int) -> int:
    """Exponent of a nonzero value's significand in a format whose smallest exponent is `emin`."""
    n, d = abs(value).as_integer_ratio()
    e = n.bit_length() - d.bit_length()
    if n * (1 << max(-e, 0)) < d * (1 << max(e, 0)):
        e -= 1
    return max(e, emin)


def truncate(value: Fraction) -> int:
    """Toward zero."""
    n, d = value.as_integer_ratio()
    return n // d if n >= 0 else -(-n // d)


def nearest_even(value: Fraction) -> int:
    floor = value.numerator // value.denominator
    rest = value - floor
    return floor + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2))


def round_to(value: Fraction, fmt: Format, man_bits: int, nearest: bool) -> float:
    """`value` at `man_bits` fraction bits in `fmt`'s exponent range; past the end, infinite; +0."""
    if value == 0:
        return 0.0
    quantum = Fraction(2) ** (exponent_of(value, fmt.emin) - man_bits)
    rounded = (nearest_even if nearest else truncate)(value / quantum) * quantum
    if abs(rounded) >= Fraction(2) ** (fmt.emax + 1):
        return math.copysign(math.inf, value)
    return float(rounded) if rounded else 0.0


def final(value: Fraction, unit: Unit, out: str) -> float:
    """rho of the sheet: truncation to float32, or nearest even into float16."""
    if out == "fp16":
        return round_to(value, FP16, FP16.man_bits, nearest=True)
    return round_to(value, FP32, 13 if unit.rho == "rz_e8m13" else 23, nearest=False)


def _special_sum(values: Sequence[float]) -> float | None:
    """NaN or an infinity where the addends hold one, else None."""
    special = [v for v in values if not math.isfinite(v)]
    if not special:
        return None
    return special[0] if all(v == special[0] for v in special) else math.nan


def _product(x: float, y: float) -> float:
    """x * y, only as far as being special goes: any finite product counts as 0."""
    if math.isfinite(x) and math.isfinite(y):
        return 0.0
    return x * y  # Inf * 0 and NaN give NaN here too


# One block ---------------------------------------------------------------------------------------


def block(
    unit: Unit,
    out: str,
    a: Sequence[float],
    b: Sequence[float],
    c: float,
    scale_a: Sequence[float] = (),
    scale_b: Sequence[float] = (),
    size: int = 0,
) -> Step:
    """One block of at most `unit.L` products added to `c`.

    Parameters
    ----------
    a, b : sequences of float
        Values of the element formats.
    scale_a, scale_b : sequences of float
        Scales of the block's scale blocks, in order; empty for units without.
    size : int
        Elements that share a scale; the first of the unit's unless given.
    """
    step = Step()
    special = _special_sum([*map(_product, a, b), c, *(s * 0.0 for s in (*scale_a, *scale_b))])
    if special is not None:
        step.result = special
        return step
    if unit.group > 1:
        step.terms = _grouped(unit, a, b, scale_a, scale_b, size or unit.scale_block[0])
    else:
        step.terms = _plain(unit, a, b, scale_a, scale_b)
    fmt = _RESULT[out]
    step.c = Term(Fraction(c), exponent_of(Fraction(c), fmt.emin) if c else None)
    addends = [*step.terms, step.c]
    exponents = [t.exponent for t in addends if t.exponent is not None]
    if not exponents:
        return step
    clamp = unit.clamp(out)
    step.E = max(exponents if clamp is None else [*exponents, clamp])
    step.quantum = Fraction(2) ** (step.E - unit.F)
    for term in addends:
        term.units = truncate(term.value / step.quantum)
    step.total = sum(term.units for term in addends) * step.quantum
    step.result = final(step.total, unit, out)
    return step


def _plain(
    unit: Unit,
    a: Sequence[float],
    b: Sequence[float],
    scale_a: Sequence[float],
    scale_b: Sequence[float],
) -> list[Term]:
    """Single products; an MX scale moves both value and exponent."""
    scale = Fraction(1)
    if unit.scale is not None:
        scale = Fraction(scale_a[0]) * Fraction(scale_b[0])
    shift = exponent_of(scale, -(10**6))
    terms = []
    for x, y in zip(a, b, strict=True):
        value = Fraction(x) * Fraction(y) * scale
        exponent = None
        if value:
            e_a = exponent_of(Fraction(x), unit.emin(unit.a))
            e_b = exponent_of(Fraction(y), unit.emin(unit.b))
            exponent = e_a + e_b + shift
        terms.append(Term(value, exponent))
    return terms


def _grouped(
    unit: Unit,
    a: Sequence[float],
    b: Sequence[float],
    scale_a: Sequence[float],
    scale_b: Sequence[float],
    size: int,
) -> list[Term]:
    """Exact dot products of `unit.group` elements; the exponent is the two scales' alone.

    A group whose dot product is zero still takes part in the alignment (MMA-Sim's rule; nobody has
    recorded the hardware here). A scale of zero does not.
    """
    assert unit.scale is not None
    terms = []
    for start in range(0, len(a), unit.group):
        k = slice(start, start + unit.group)
        s, t = Fraction(scale_a[start // size]), Fraction(scale_b[start // size])
        dot = sum((Fraction(p) * Fraction(q) for p, q in zip(a[k], b[k], strict=True)), Fraction(0))
        exponent = None
        if s and t:
            exponent = exponent_of(s, unit.scale.emin) + exponent_of(t, unit.scale.emin)
        terms.append(Term(dot * s * t, exponent))
    return terms


# A whole dot product -----------------------------------------------------------------------------


def dot(
    unit: Unit,
    out: str,
    a: Sequence[float],
    b: Sequence[float],
    c: float = 0.0,
    scale_a: Sequence[float] = (),
    scale_b: Sequence[float] = (),
    size: int = 0,
) -> list[Step]:
    """The steps of a dot product; the last one's `result` is D. `c` is a value of the output's type.

    `scale_a` and `scale_b` are the scales along the whole of K, one per scale block.
    """
    if not len(a):
        return [Step(result=c)]
    if unit.is_reference:
        return [Step(result=_REFERENCES[unit.order](out, list(zip(a, b, strict=True)), c))]
    if unit.order == "pairs":
        return _pairs(unit, out, a, b, c)
    size = size or (unit.scale_block[0] if unit.scale_block else unit.L)
    steps = []
    for start in range(0, len(a), unit.L):
        k = slice(start, start + unit.L)
        g = slice(start // size, (start + unit.L) // size)
        steps.append(block(unit, out, a[k], b[k], c, scale_a[g], scale_b[g], size))
        steps[-1].k = list(range(start, min(start + unit.L, len(a)), unit.group))
        c = steps[-1].result
    return steps


def _pairs(unit: Unit, out: str, a: Sequence[float], b: Sequence[float], c: float) -> list[Step]:
    """Two blocks of 16 over alternating pairs, chained from +0; c is added last, to nearest."""
    steps = []
    for start in range(0, len(a), 32):
        x, y = list(a[start : start + 32]), list(b[start : start + 32])
        chain = 0.0
        for half in (0, 1):
            k = [i for i in range(len(x)) if i // 2 % 2 == half]
            steps.append(block(unit, out, [x[i] for i in k], [y[i] for i in k], chain))
            steps[-1].k = [start + i for i in k]
            chain = steps[-1].result
        c = late(out, c, chain)
        steps.append(Step(result=c))
    return steps


def late(out: str, c: float, partial: float, factor: float = 1.0) -> float:
    """``c + factor * partial`` rounded once to nearest even: a fused multiply-add."""
    if not all(map(math.isfinite, (c, partial, factor))):
        return c + factor * partial
    return _ieee(out, Fraction(c) + Fraction(factor) * Fraction(partial), factor * partial + c)


def promoted(
    unit: Unit,
    a: Sequence[float],
    b: Sequence[float],
    c: float,
    period: int,
    factors: Sequence[float],
) -> float:
    """Partial sums of `period` products, each from +0, times a factor each, added in float32."""
    for i in range(-(-len(a) // period)):
        k = slice(i * period, (i + 1) * period)
        factor = factors[i] if len(factors) else 1.0
        c = late("fp32", c, dot(unit, "fp32", a[k], b[k])[-1].result, factor)
    return c


# References --------------------------------------------------------------------------------------


def _ieee(out: str, value: Fraction, zero: float = 0.0) -> float:
    """Nearest even; `zero` where the value is exactly 0, the value's sign where it underflows."""
    if value == 0:
        return zero
    fmt = _RESULT[out]
    return math.copysign(round_to(value, fmt, fmt.man_bits, nearest=True), value)


def _add(x: float, y: float, out: str = "fp32") -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return x + y
    return _ieee(out, Fraction(x) + Fraction(y), x + y)


def _multiply(x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return x * y
    return _ieee("fp32", Fraction(x) * Fraction(y), x * y)


def _fused(x: float, y: float, z: float) -> float:
    if not all(map(math.isfinite, (x, y, z))):
        return x * y + z
    return _ieee("fp32", Fraction(x) * Fraction(y) + Fraction(z), x * y + z)


def _sequential(out: str, pairs: list[tuple[float, float]], c: float) -> float:
    for x, y in pairs:
        c = _add(c, _multiply(x, y))
    return c


def _fma(out: str, pairs: list[tuple[float, float]], c: float) -> float:
    for x, y in pairs:
        c = _fused(x, y, c)
    return c


def _pairwise(out: str, pairs: list[tuple[float, float]], c: float) -> float:
    level = [_multiply(x, y) for x, y in pairs]
    while len(level) > 1:
        odd = [level[-1]] if len(level) % 2 else []
        level = [_add(x, y) for x, y in zip(level[0::2], level[1::2], strict=False)] + odd
    return _add(c, level[0])


def _exact(out: str, pairs: list[tuple[float, float]], c: float) -> float:
    special = _special_sum([*(_product(x, y) for x, y in pairs), c])
    if special is not None:
        return special
    return _ieee(out, sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(c)))


_REFERENCES = {"sequential": _sequential, "fma": _fma, "pairwise": _pairwise, "exact": _exact}


# Matrices ----------------------------------------------------------------------------------------


def as_result(values: Any, out: str) -> np.ndarray:
    """float32 or float16 array with the units' canonical NaN."""
    float_type, int_type = (np.float32, np.uint32) if out == "fp32" else (np.float16, np.uint16)
    with np.errstate(over="ignore"):
        array = np.array(values, float_type)
    array.view(int_type)[np.isnan(array)] = NAN_BITS[out]
    return array


def scale_values(scales: Any, matrix: int) -> np.ndarray | None:
    """Values of the block scales of one matrix of an operand."""
    return (
        None
        if scales is None
        else np.ldexp(scales.sig[matrix].astype(np.float64), scales.exp[matrix])
    )


def not_values(values: np.ndarray, fmt: Format) -> int:
    """How many values are none of a format."""
    top = Fraction(fmt.max)
    count = 0
    for x in values.ravel().tolist():
        if math.isnan(x):
            count += not fmt.has_nan
        elif math.isinf(x):
            count += not fmt.has_inf
        elif x:
            quantum = Fraction(2) ** (exponent_of(Fraction(x), fmt.emin) - fmt.man_bits)
            count += abs(Fraction(x)) > top or (Fraction(x) / quantum).denominator != 1
    return count


def matmul(
    unit: Unit,
    out: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None = None,
    scale_a: np.ndarray | None = None,
    scale_b: np.ndarray | None = None,
    size: int = 0,
    period: int = 0,
    factors: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """``a[M, K] @ b[K, N] + c[M, N]`` by `dot`, or by `promoted` where there is a period.

    Scales are [M, blocks] and [blocks, N] values, factors [M, periods] and [periods, N]; the
    product of two factors is rounded to float32.
    """
    start = np.zeros((a.shape[0], b.shape[1])) if c is None else as_result(c, out)
    result = np.zeros(start.shape)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            x, y, z = a[i].tolist(), b[:, j].tolist(), float(start[i, j])
            if period:
                f = [] if factors is None else (factors[0][i] * factors[1][:, j]).tolist()
                result[i, j] = promoted(unit, x, y, z, period, f)
            else:
                s, t = ([] if v is None else v.tolist() for v in (
                    None if scale_a is None else scale_a[i], None if scale_b is None else scale_b[:, j]
                ))  # fmt: skip
                result[i, j] = dot(unit, out, x, y, z, s, t, size)[-1].result
    return as_result(result, out)
