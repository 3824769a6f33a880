"""The oracle as a backend: slow, for any unit a row can describe."""

from __future__ import annotations

from typing import Any

import numpy as np

from fpemu.gemm import oracle
from fpemu.gemm.request import Request
from fpemu.gemm.units import Unit


def supports(unit: Unit) -> str | None:
    return None


def run(request: Request, device: Any = None) -> np.ndarray:
    """D, float32 [matrices, M, N]."""
    unit, a, b = request.unit, request.a, request.b
    request.bad = (oracle.not_values(a.values, unit.a), oracle.not_values(b.values, unit.b))
    d = np.array(request.c)
    if any(request.bad):
        return d
    for m, (i, j) in enumerate(zip(a.index, b.index, strict=True)):
        factors = None
        if request.factor_a is not None:
            factors = request.factor_a[i], request.factor_b[j]
        d[m] = oracle.matmul(
            unit, request.out, a.values[i], b.values[j], d[m], oracle.scale_values(a.scales, i),
            oracle.scale_values(b.scales, j), 0 if a.scales is None else a.scales.size, request.period, factors,
        )  # fmt: skip
    return d
