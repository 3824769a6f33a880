"""One dot product step by step: what a unit aligns, cuts off and rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from fpemu.encoded import Encoded
from fpemu.gemm import oracle
from fpemu.gemm.api import Array, build_request, check_out, not_values
from fpemu.gemm.units import Unit, get_unit


class Term(NamedTuple):
    """One product (or group of products, or the accumulator, with k = None) in a block."""

    k: int | None
    a: float | None
    b: float | None
    exponent: int | None  # None: zero, takes no part in the alignment
    exact: Fraction
    kept: Fraction

    @property
    def cut(self) -> Fraction:
        return self.exact - self.kept


@dataclass(frozen=True)
class Block:
    """One step of the unit.

    `E` is None where nothing was aligned: the block holds special values (no terms) or zeros only,
    or `late` says that it is the addition of c after the blocks of an FP8 ``mma.sync``.
    """

    late: bool
    terms: tuple[Term, ...]
    E: int | None
    quantum: Fraction  # 2**(E - F): everything below it is cut off each term
    total: Fraction  # sum of the kept terms
    result: float  # after rho; the accumulator of the next block


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns: data, and a table when printed."""

    unit: Unit
    out: str
    c: float
    blocks: tuple[Block, ...]
    result: float
    exact: Fraction | None  # None where there are special values

    @property
    def cut(self) -> Fraction:
        """Sum of all that alignment cut off."""
        return sum((t.cut for b in self.blocks for t in b.terms), Fraction(0))

    @property
    def error(self) -> float | None:
        """result - exact, None for special results."""
        if self.exact is None or not np.isfinite(self.result):
            return None
        return float(Fraction(self.result) - self.exact)

    def __str__(self) -> str:
        unit = self.unit
        lines = [
            f"{unit.name}: blocks of {unit.L}, {unit.F} fraction bits kept, {unit.rho} -> {self.out}"
        ]
        for i, block in enumerate(self.blocks):
            lines += ["", *_block_lines(i, block, unit)]
        lines += ["", f"result  {_bits(self.result, self.out)}  {self.result!r}"]
        if self.exact is not None:
            lines.append(f"exact   {float(self.exact)!r}")
            if self.error is not None:
                lines.append(
                    f"error   {self.error:.6g}, of which cut off in alignment {float(-self.cut):.6g}"
                )
        return "\n".join(lines)


def _bits(x: float, out: str) -> str:
    array = oracle.as_result([x], out)
    return f"0x{int(array.view(f'u{array.itemsize}')[0]):0{2 * array.itemsize}X}"


def _block_lines(i: int, block: Block, unit: Unit) -> list[str]:
    if block.late:
        return [f"block {i}: partial sum added to c, rounded to nearest: {block.result!r}"]
    if block.E is None:
        return [f"block {i}: nothing to align (zeros or special values): {block.result!r}"]
    low = block.E - unit.F
    lines = [
        f"block {i}: E = {block.E}, each term cut toward zero at 2^{low}",
        f"{'k':>5} {'a':>12} {'b':>12} {'exp':>5} {'exact':>14} {'kept':>14} {'cut off':>11}",
    ]
    for t in block.terms:
        if t.exponent is None:
            continue
        name = "c" if t.k is None else str(t.k)
        a, b = ("" if x is None else f"{x:.6g}" for x in (t.a, t.b))
        cut = f"{float(t.cut):.4g}" if t.cut else ""
        lines.append(
            f"{name:>5} {a:>12} {b:>12} {t.exponent:>5} {float(t.exact):>14.8g}"
            f" {float(t.kept):>14.8g} {cut:>11}".rstrip()
        )
    zeros = sum(t.exponent is None for t in block.terms)
    if zeros:
        lines.append(f"      ({zeros} zero term{'s' * (zeros > 1)} not shown)")
    exact = sum((t.exact for t in block.terms), Fraction(0))
    lost = block.total - Fraction(block.result) if np.isfinite(block.result) else Fraction(0)
    for name, before, after, gone in (
        ("sum", f"{float(exact):.8g}", float(block.total), exact - block.total),
        ("D", "", block.result, lost),
    ):
        cut = f"{float(gone):.4g}" if gone else ""
        lines.append(f"{name:>5} {'':31} {before:>14} {after:>14.8g} {cut:>11}".rstrip())
    return lines


def explain(
    a_row: Any, b_col: Any, unit: str | Unit, c: float = 0.0, out: str = "fp32"
) -> Explanation:
    """How `unit` adds the dot product of a row of A and a column of B to c.

    Parameters
    ----------
    a_row, b_col : 1-D array or Encoded, shape (K,)
        Values of the unit's format, or codes with scales.
    unit : str or Unit
    c : float
        Rounded to the output's type first.
    out : {"fp32", "fp16"}

    Returns
    -------
    Explanation
        `blocks` with exponents, exact and kept terms, running sums; `result`, `exact`, `error`.
        Printed, it is a table of 80 columns.

    Raises
    ------
    ValueError
        For operands of different length, or values that the unit's format does not have.

    Examples
    --------
    >>> from fpemu.gemm import explain
    >>> print(explain([1.0, 0.0078125], [1.0, 0.0078125], "hopper.wgmma.e4m3", c=2.0))
    hopper.wgmma.e4m3: blocks of 32, 13 fraction bits kept, rz_e8m13 -> fp32
    <BLANKLINE>
    block 0: E = 1, each term cut toward zero at 2^-12
        k            a            b   exp          exact           kept     cut off
        0            1            1     0              1              1
        1    0.0078125    0.0078125   -12  6.1035156e-05              0   6.104e-05
        c                               1              2              2
      sum                                       3.000061              3   6.104e-05
        D                                                             3
    <BLANKLINE>
    result  0x40400000  3.0
    exact   3.00006103515625
    error   -6.10352e-05, of which cut off in alignment -6.10352e-05
    """
    row = get_unit(unit, "explain")
    if row.is_reference:
        raise ValueError(
            f"explain: unit {row.name!r} is a reference and aligns nothing; only units with blocks"
            " can be explained. For example unit='hopper.wgmma.e4m3'."
        )
    left, right = Array(_matrix(a_row, 0), "a"), Array(_matrix(b_col, 1), "b")
    check_out(row, out, None)
    _, request = build_request(row, out, left, right, c)
    for x, operand, fmt in ((left, request.a, row.a), (right, request.b, row.b)):
        if count := oracle.not_values(operand.values, fmt):
            raise not_values(x.name, count, operand.values.size, fmt)
    a, b = request.a.values.ravel().tolist(), request.b.values.ravel().tolist()
    start = float(request.c.item())
    scales: tuple[list[float], list[float], int] = ([], [], 0)
    if request.a.scales is not None and request.b.scales is not None:
        s, t = (oracle.scale_values(x.scales, 0).ravel().tolist() for x in (request.a, request.b))  # type: ignore[union-attr]
        scales = (s, t, request.a.scales.size)
    steps = oracle.dot(row, out, a, b, start, *scales)
    blocks = tuple(_block(step, row, a, b) for step in steps)
    exact = None
    if np.isfinite([*a, *b, start, *scales[0], *scales[1]]).all() and len(a):
        exact = Fraction(start) + sum(
            (t.exact for block in blocks for t in block.terms if t.k is not None), Fraction(0)
        )
    return Explanation(row, out, start, blocks, steps[-1].result, exact)


def _matrix(x: Any, axis: int) -> Any:
    """A vector as a matrix of one row (axis 0) or column (axis 1)."""
    if isinstance(x, Encoded):
        scales = None if x.scales is None else _matrix(x.scales, axis)
        return replace(x, codes=_matrix(x.codes, axis), scales=scales, axis=1 - axis)
    x = x if hasattr(x, "ndim") else np.asarray(x)
    if x.ndim != 1:
        raise ValueError(
            f"explain: a_row and b_col are vectors of K elements, got shape {tuple(x.shape)}. Take"
            " one row of A and one column of B."
        )
    return x[None, :] if axis == 0 else x[:, None]


def _block(step: oracle.Step, unit: Unit, a: list[float], b: list[float]) -> Block:
    single = unit.group == 1
    terms = [
        Term(k, a[k] if single else None, b[k] if single else None, t.exponent, t.value,
             t.units * step.quantum)
        for k, t in zip(step.k, step.terms, strict=False)
    ]  # fmt: skip
    if step.c is not None:
        terms.append(
            Term(None, None, None, step.c.exponent, step.c.value, step.c.units * step.quantum)
        )
    return Block(not step.k, tuple(terms), step.E, step.quantum, step.total, step.result)
