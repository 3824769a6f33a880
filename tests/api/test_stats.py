"""`fpemu.stats` against the same measures taken element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import FAST, all16, give

import fpemu


def measured(x: np.ndarray, fmt: str, **options: object) -> dict[str, float]:
    """Counts and errors from the quantized copy that `stats` does not keep."""
    wide, q = x.astype(np.float64), fpemu.quantize(x, fmt, dtype=np.float64, **options)
    both = np.isfinite(wide) & np.isfinite(q)
    a, e = wide[both], (q - wide)[both]
    used = a != 0
    found = {
        "size": x.size,
        "zeros": int((wide == 0).sum()),
        "underflow": int(((wide != 0) & (q == 0)).sum()),
        "nan": int(np.isnan(wide).sum()),
        "inf": int(np.isinf(wide).sum()),
        "nan_out": int(np.isnan(q).sum()),
        "max_rel_error": float(np.abs(e[used] / a[used]).max()),
        "rms_rel_error": float(np.sqrt(np.mean((e[used] / a[used]) ** 2))),
        "sqnr_db": 10 * math.log10((a**2).sum() / (e**2).sum()),
        "cosine": float((a * q[both]).sum() / np.sqrt((a**2).sum() * (q[both] ** 2).sum())),
    }
    nonzero = np.abs(q[both & (q != 0)])
    found["exp_min"] = int(np.frexp(nonzero.min())[1] - 1)
    found["exp_max"] = int(np.frexp(nonzero.max())[1] - 1)
    return found


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "mxfp4", "mxfp8_e5m2", "nvfp4", "nvfp4/2d",
                                 "fp8_tensor_e4m3", "fp8_block_e4m3"])  # fmt: skip
def test_counts_and_errors(fmt: str, backend: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((48, 40)) * 10 ** rng.uniform(-4, 2, (48, 1))).astype(np.float32)
    x[40], x[41, 3], x[42, 39], x[43, ::2] = 0, np.nan, np.inf, -0.0
    for rounding in ("rne", "sr"):
        options = {"rounding": rounding} | ({"seed": 4} if rounding == "sr" else {})
        s = fpemu.stats(give(backend, x), fmt, backend=backend, **options)
        for name, want in measured(x, fmt, **options).items():
            got = getattr(s, name)
            close = math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-9)
            assert got == want if isinstance(want, int) else close, (name, got, want)


def test_saturation_is_what_lies_beyond_max() -> None:
    x = np.float32([448, 448.01, -1000, np.inf, np.nan, 1e-9, 0.011, 0])
    s = fpemu.stats(x, "e4m3")
    assert (s.saturated, s.underflow, s.subnormal, s.zeros, s.nan, s.inf) == (2, 1, 1, 1, 1, 1)
    s = fpemu.stats(np.float32([7, 1]), "mxfp4")  # floor scale 1: 7 > 6
    assert s.saturated == 1


def test_scales_are_counted() -> None:
    x = np.zeros((4, 32), np.float32)
    x[1], x[2], x[3, 0] = 1, 2.0**20, np.nan
    s = fpemu.stats(x, "mxfp4")
    assert (s.blocks, s.zero_scale_share, s.nan_scale_share) == (4, 0.25, 0.25)
    assert s.amax_spread == 20 and s.nan_out == 32
    s = fpemu.stats(x[:3], "nvfp4")
    assert (s.blocks, s.saturated_scale_share) == (6, 2 / 6)


def test_edges() -> None:
    s = fpemu.stats(np.float32([1, 2]), "e4m3")
    assert s.sqnr_db == math.inf and s.max_rel_error == 0 and s.cosine == pytest.approx(1)
    empty = fpemu.stats(np.zeros(0, np.float32), "nvfp4")
    assert empty.size == 0 and empty.exp_min is None
    zeros = fpemu.stats(np.zeros(20, np.float32), "nvfp4")
    assert zeros.zeros == 20 and zeros.underflow == 0
    assert fpemu.stats(np.float32(1.5), "mxfp4").size == 1
    assert fpemu.stats(np.arange(9), "e2m1").saturated == 2
    assert fpemu.stats(all16(np.float16), "fp16").underflow == 0
    assert fpemu.stats(np.full((2, 3), np.nan, np.float32), "e4m3").nan == 6


def test_pieces_and_threads_do_not_matter() -> None:
    x = np.random.default_rng(1).standard_normal((3000, 100)).astype(np.float32)
    before = fpemu.get_num_threads()
    try:
        found = []
        for n in (1, 2):
            fpemu.set_num_threads(n)
            found.append(fpemu.stats(x, "nvfp4"))
    finally:
        fpemu.set_num_threads(before)
    assert found[0] == found[1]
    big = measured(x, "nvfp4")
    assert found[0].underflow == big["underflow"]
    assert math.isclose(found[0].sqnr_db, big["sqnr_db"], rel_tol=1e-9)


def test_prints_and_converts() -> None:
    s = fpemu.stats(np.float32([1, 2.3, 0]), "mxfp4")
    assert "mxfp4" in str(s) and "SQNR" in str(s) and "underflow" in str(s)
    d = s.to_dict()
    assert (
        d["size"] == 3
        and d["format"] == "mxfp4"
        and all(v is None or isinstance(v, (int, float, str)) for v in d.values())
    )
