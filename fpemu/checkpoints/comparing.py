"""`diff`: two checkpoints weight by weight, codes and scales by their bytes, values by their size."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log10, nan
from typing import Any

import numpy as np

from fpemu.checkpoints.coding import ieee_mode
from fpemu.checkpoints.layouts import same_codes
from fpemu.checkpoints.reading import Checkpoint, Entry, open_checkpoint
from fpemu.formats import BlockFormat

_PIECE = 1 << 18


@dataclass(frozen=True)
class Difference:
    """How one weight differs.

    ================= =========================================================================
    same              codes, scales, global scale and every value have the same bits (NaN is NaN)
    where             ``"both"``, ``"a"`` or ``"b"``: which checkpoints have the weight
    shapes, formats   of a and b
    scales            block scales, and how many differ; None where formats differ
    codes             the same of codes
    number_differs    the factor of the whole tensor has other bits
    sqnr_db           10 log10(sum a^2 / sum (a-b)^2) of the values; inf where they agree
    max_difference    largest |a - b|
    ================= =========================================================================
    """

    name: str
    where: str
    same: bool = False
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    formats: tuple[str, str] = ("", "")
    scales: tuple[int, int] | None = None
    codes: tuple[int, int] | None = None
    number_differs: bool = False
    sqnr_db: float = nan
    max_difference: float = nan


def diff(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    *,
    progress: Callable[[str, int], None] | None = None,
) -> list[Difference]:
    """Compare two checkpoints of whatever layouts.

    Parameters
    ----------
    a, b : path or Checkpoint
    progress : callable, optional
        Called with each weight's name and stored bytes in `a` when it is compared.

    Returns
    -------
    list of Difference
        One for each name, in the order of `a`; those that only `b` has come last.

    Notes
    -----
    Codes and scales are compared where both have the same element, block and scale format; a plain
    tensor's bits are its codes. Values are those that each library decodes (float32; float64 where
    stored so), summed in float64.
    """
    one = a if isinstance(a, Checkpoint) else open_checkpoint(a)
    two = b if isinstance(b, Checkpoint) else open_checkpoint(b)
    result = []
    for name, entry in one.items():
        other = two.get(name)
        result.append(
            Difference(name, "a", shapes=(entry.shape, None), formats=(_name(entry), ""))
            if other is None
            else _compare(entry, other)
        )
        if progress is not None:
            progress(name, entry.nbytes)
    result += [
        Difference(name, "b", shapes=(None, entry.shape), formats=("", _name(entry)))
        for name, entry in two.items()
        if name not in one
    ]
    return result


def _name(entry: Entry) -> str:
    return entry.format.name if entry.format is not None else entry.parts["codes"].dtype


def _compare(a: Entry, b: Entry) -> Difference:
    shapes, formats = (a.shape, b.shape), (_name(a), _name(b))
    if a.shape != b.shape:
        return Difference(a.name, "both", shapes=shapes, formats=formats)
    scales = codes = None
    number = False
    if _comparable(a, b):
        codes = _count(_codes(a), _codes(b))
        if a.layout is not None and b.layout is not None:
            scales = _count(a.scales(), b.scales())
            number = _bits(a.tensor_scale) != _bits(b.tensor_scale)
    values_same, sqnr, largest = _values(a, b)
    # Values alone do not tell: a code may differ under a scale of zero.
    alike = codes is not None and codes[0] == 0 and (scales is None or scales[0] == 0)
    same = alike and not number and values_same
    return Difference(a.name, "both", same, shapes, formats, scales, codes, number, sqnr, largest)


def _comparable(a: Entry, b: Entry) -> bool:
    if a.layout is None or b.layout is None:
        return a.layout is b.layout and a.parts["codes"].dtype == b.parts["codes"].dtype
    assert a.stored_shape is not None and b.stored_shape is not None
    rows = a.stored_shape.rows == b.stored_shape.rows
    return rows and isinstance(b.format, BlockFormat) and same_codes(a.format, b.format)


def _codes(entry: Entry) -> np.ndarray:
    if entry.layout is not None:
        return entry.codes()
    from fpemu.checkpoints.storage import read

    return read(entry.parts["codes"])


def _count(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """How many elements have other bits, of how many; -0 is not 0."""
    x, y = (np.ascontiguousarray(v).reshape(-1) for v in (a, b))
    if x.dtype != y.dtype:
        return x.size, x.size
    x, y = (v.view(f"u{v.dtype.itemsize}") if v.dtype.kind != "c" else v for v in (x, y))
    return int(np.count_nonzero(x != y)), x.size


def _bits(number: np.float32 | None) -> bytes | None:
    return None if number is None else number.tobytes()


def _values(a: Entry, b: Entry) -> tuple[bool, float, float]:
    """Whether every value has the same bits (NaN is NaN); SQNR in dB; the largest difference."""
    wide = {"F64", "I64", "U64", "I32", "U32"} & {e.parts["codes"].dtype for e in (a, b)}
    dtype = "float64" if wide else "float32"
    x, y = (_flat(entry, dtype) for entry in (a, b))
    signal = noise = largest = 0.0
    same = True
    with ieee_mode(), np.errstate(all="ignore"):
        for start in range(0, x.size, _PIECE):
            u, v = x[start : start + _PIECE], y[start : start + _PIECE]
            bits = f"u{u.dtype.itemsize}"
            other = (u.view(bits) != v.view(bits)) & ~(np.isnan(u) & np.isnan(v))
            same = same and not other.any()
            exact = u.astype(np.float64)
            error = np.where(other & (u != v), exact - v, 0.0)
            signal += float(np.square(exact[np.isfinite(exact)]).sum())
            noise += float(np.square(error).sum())
            largest = float(np.maximum(largest, np.abs(error).max(initial=0.0)))
    if noise == 0:
        return same, inf, largest
    return same, 10 * log10(signal / noise) if 0 < signal and noise < inf else -inf, largest


def _flat(entry: Entry, dtype: str) -> Any:
    return entry.values(dtype).contiguous().numpy().reshape(-1)
