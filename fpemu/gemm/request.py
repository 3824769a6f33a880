"""A validated matrix product: everything a backend needs, nothing it must check again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fpemu.formats import Format
from fpemu.gemm.units import Unit

NO_EXPONENT = -4096  # exponent of a zero: below that of any product that is not


class Scales(NamedTuple):
    """Block scales of an operand, split like elements: ``sig * 2**exp``.

    Shape [matrices, M, blocks] for a, [matrices, blocks, N] for b. A zero has significand 0 and
    the exponent `NO_EXPONENT`, a NaN a NaN significand.
    """

    sig: Any  # float32
    exp: Any  # int32
    size: int  # elements of K per block


@dataclass(slots=True)
class Operand:
    """One operand.

    Parameters
    ----------
    values : float32 array, contiguous
        [matrices, M, K] for a, [matrices, K, N] for b: values of the element format (which
        the backend checks, since it splits them anyway).
    index : int64 array
        Which of the matrices each matrix of the result takes.
    scales : Scales or None
    """

    values: Any
    index: Any
    scales: Scales | None = None


@dataclass(slots=True)
class Request:
    """D = A @ B + C in the arithmetic of `unit`.

    Parameters
    ----------
    c : float32 array [matrices, M, N]
        Already values of the output type.
    period : int
        0, or the length of K after which a partial sum, started from +0, is added to D in float32
        (round to nearest).
    factor_a, factor_b : float32 arrays or None
        [matrices, M, periods] and [matrices, periods, N]: the partial sum is multiplied by
        ``fl(factor_a * factor_b)`` in that addition (a fused multiply-add).
    """

    unit: Unit
    out: str
    a: Operand
    b: Operand
    c: Any
    period: int = 0
    factor_a: Any = None
    factor_b: Any = None
    progress: bool | None = None
    bad: tuple[int, int] = (0, 0)  # filled in by the backend: values of a and b not in the format

    @property
    def depth(self) -> int:
        return int(self.a.values.shape[2])

    @property
    def blocks(self) -> int:
        """Blocks of `unit.L` products, the last zero-padded."""
        return -(-self.depth // self.unit.step) * (self.unit.step // self.unit.L)

    @property
    def late(self) -> int:
        """Blocks after which a partial sum is added to D; 0: D of a block is c of the next."""
        if self.unit.order == "pairs":
            return 2
        return self.period // self.unit.L


def split_scales(values: np.ndarray, fmt: Format, size: int) -> Scales:
    """Scale values (never negative) as significands and exponents of their format.

    Subnormals keep the smallest exponent, as an element's do.
    """
    nan, zero = np.isnan(values), values == 0
    exact = np.where(
        nan | zero, 1.0, values.astype(np.float64)
    )  # float32 subnormals are normal here
    exponent = np.maximum((exact.view(np.int64) >> 52) - 1023, fmt.emin)
    # A power of two, from its bits: the product is exact.
    inverse = ((1023 - exponent) << 52).view(np.float64)
    sig = (values.astype(np.float64) * inverse).astype(np.float32)
    exponent = np.where(zero, NO_EXPONENT, np.where(nan, 0, exponent))
    return Scales(sig, exponent.astype(np.int32), size)
