"""`fpemu.summary`: the same counts as `fpemu.stats`, and moments as exact arithmetic has them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from helpers import block_data

import fpemu
from fpemu.summary import LOWEST, Loss, summarize

FORMATS = ("e4m3", "e5m2", "fp16", "bf16", "fp8_tensor_e4m3", "fp8_block_e4m3", "mxfp8_e4m3",
           "mxfp4", "nvfp4", "nvfp4/2d", "int8_tensor")  # fmt: skip


def clean(seed: int, shape: tuple[int, int] = (96, 160)) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, shape))
    x[rng.random(shape) < 0.1] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("special", [False, True])
def test_counts_are_those_of_stats(fmt: str, axis: int, special: bool) -> None:
    x = block_data(70, 80, 3) if special else clean(1)
    if special and fmt.startswith("int8"):
        pytest.skip("int8 has no code for NaN: test_what_a_format_cannot_hold_is_said")
    row = fpemu.get_format(fmt)
    got = summarize(x, [row], axis)
    want = fpemu.stats(x, fmt, axis=axis)
    loss = got.losses[fmt]
    assert isinstance(loss, Loss)
    assert (got.size, got.zeros, got.nan, got.inf) == (want.size, want.zeros, want.nan, want.inf)
    assert (loss.saturated, loss.nan) == (want.saturated, want.nan_out)
    if not special:  # float32 results of subnormal blocks may be zero where the exact ones are not
        assert loss.underflow == want.underflow
        assert got.to_dict()["formats"][fmt]["sqnr_db"] == pytest.approx(want.sqnr_db, abs=1e-5)


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4"])
def test_underflow_is_that_of_quantize(fmt: str) -> None:
    x = block_data(70, 80, 5)
    q = fpemu.quantize(x, fmt)
    loss = summarize(x, [fpemu.get_format(fmt)]).losses[fmt]
    assert isinstance(loss, Loss)
    assert loss.underflow == int(((x != 0) & (q == 0)).sum())
    both = np.isfinite(x) & np.isfinite(q)
    error = q[both].astype(np.float64) - x[both]
    assert loss.noise == pytest.approx(float(np.sum(error**2)), rel=1e-12)


def exact_moments(x: np.ndarray) -> tuple[float, float]:
    """Mean and excess kurtosis of the finite values, in rationals."""
    values = [Fraction(float(v)) for v in x[np.isfinite(x)].ravel()]
    n = len(values)
    mean = sum(values, Fraction(0)) / n
    m2 = sum(((v - mean) ** 2 for v in values), Fraction(0)) / n
    m4 = sum(((v - mean) ** 4 for v in values), Fraction(0)) / n
    return float(mean), float(m4 / m2**2) - 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_moments_amax_and_channels(dtype: type, shift: float) -> None:
    x = (np.random.default_rng(2).standard_normal((37, 53)) ** 3 + shift).astype(dtype)
    x[3, 4], x[5, 6], x[7, 8] = np.nan, np.inf, -np.inf
    found = summarize(x, []).to_dict(top=3)
    mean, kurtosis = exact_moments(x)
    assert found["mean"] == pytest.approx(mean, rel=1e-12)
    assert found["kurtosis"] == pytest.approx(kurtosis, rel=1e-9)
    finite = np.where(np.isfinite(x), np.abs(x), 0)
    assert found["amax"] == float(finite.max())
    assert (found["nan"], found["inf"]) == (1, 2)
    order = np.argsort(-finite.max(0), kind="stable")[:3]
    rms = float(np.sqrt(np.mean(x[np.isfinite(x)].astype(np.float64) ** 2)))
    for (index, amax, ratio), want in zip(found["channels"], order, strict=True):
        assert (index, amax) == (want, float(finite[:, want].max()))
        assert ratio == pytest.approx(amax / rms, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponents_are_exact_down_to_subnormals(dtype: type) -> None:
    info = np.finfo(dtype)
    tiny = float(info.smallest_subnormal)
    x = np.array([[1, -1.5, 2, np.nextafter(dtype(2), dtype(0)), 0, -0.0, np.inf, np.nan],
                  [tiny, 3 * tiny, -7 * tiny, 8 * tiny, info.tiny, -info.max, 0.75, 1]], dtype)  # fmt: skip
    found = summarize(x, [])
    low = {np.float32: -149, np.float64: -1074}[dtype]
    want = {0: 4, 1: 1, -1: 1, low: 1, low + 1: 1, low + 2: 1, low + 3: 1,
            info.minexp: 1, info.maxexp - 1: 1}  # fmt: skip
    got = {int(k) + LOWEST: int(found.exponents[k]) for k in np.flatnonzero(found.exponents)}
    assert got == want
    exponents = found.to_dict()["exponents"]
    assert exponents["lowest"] == low
    assert sum(exponents["counts"]) + found.zeros + found.nan + found.inf == x.size


def test_subnormals_count_under_flush_denormal() -> None:
    import torch

    x = np.full((2, 32), 3e-42, np.float32)
    plain = summarize(x, [fpemu.get_format("nvfp4")]).to_dict()
    torch.set_flush_denormal(True)
    try:
        assert summarize(x, [fpemu.get_format("nvfp4")]).to_dict() == plain
    finally:
        torch.set_flush_denormal(False)
    assert plain["zeros"] == 0 and plain["exponents"]["counts"] == [64]


def test_pooling_equals_measuring_at_once() -> None:
    """For a format without a tensor scale, whose result does not depend on the split."""
    x = clean(4)
    x[11, 7], x[60, 3] = np.nan, np.inf
    row = fpemu.get_format("mxfp4")
    whole = summarize(x, [row]).to_dict()
    parts = [summarize(np.ascontiguousarray(p), [row]) for p in np.split(x, (1, 32, 70))]
    pooled = parts[0]
    for part in parts[1:]:
        pooled = pooled.pool(part)
    got = pooled.to_dict()
    assert got.pop("calls") == 4 and whole.pop("calls") == 1
    for name in ("mean", "rms", "kurtosis"):
        assert got.pop(name) == pytest.approx(whole.pop(name), rel=1e-9)
    ours, theirs = got.pop("formats")["mxfp4"], whole.pop("formats")["mxfp4"]
    for name in ("sqnr_db", "signal", "noise"):
        assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=1e-9)
    assert ours == theirs
    ratios = [channels.pop() for channels in got["channels"]]
    assert ratios == pytest.approx([channels.pop() for channels in whole["channels"]], rel=1e-9)
    assert got == whole


def test_sums_do_not_depend_on_threads() -> None:
    x = np.random.default_rng(5).standard_normal((512, 1024), dtype=np.float32)
    rows = [fpemu.get_format(name) for name in ("nvfp4", "mxfp8_e4m3")]
    try:
        found = []
        for threads in (1, 2, 3):
            fpemu.set_num_threads(threads)
            found.append(summarize(x, rows).to_dict())
    finally:
        fpemu.set_num_threads(None)
    assert found[0] == found[1] == found[2]


def test_huge_values_overflow_quietly() -> None:
    rows = [fpemu.get_format("mxfp8_e4m3")]
    huge = summarize(np.full((2, 32), 1e300) * np.array([[1], [-1]]), rows)
    found = huge.pool(summarize(np.full((1, 32), 1.7e308), rows)).to_dict()
    assert found["amax"] == 1.7e308 and found["kurtosis"] is None and found["rms"] is None


def test_what_a_format_cannot_hold_is_said() -> None:
    x = np.array([[1, np.nan]], np.float32)
    found = summarize(x, [fpemu.get_format("int8_tensor"), fpemu.get_format("nvfp4")])
    assert found.to_dict()["formats"]["int8_tensor"] == {
        "absent": "int8_tensor has no code for NaN"
    }
    again = found.pool(
        summarize(
            np.ones((1, 2), np.float32), [fpemu.get_format(f) for f in ("int8_tensor", "nvfp4")]
        )
    )
    assert again.losses["int8_tensor"] == "int8_tensor has no code for NaN"


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1.0])
def test_degenerate_tensors_give_plain_numbers(value: float) -> None:
    import json

    rows = [fpemu.get_format(name) for name in ("e4m3", "fp16", "mxfp4", "nvfp4")]
    for shape in ((0, 5), (1, 1), (3, 40)):
        found = summarize(np.full(shape, value, np.float32), rows).to_dict()
        json.dumps(found, allow_nan=False)
        assert found["kurtosis"] is None and found["size"] == shape[0] * shape[1]
