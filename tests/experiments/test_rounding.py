"""experiments/rounding.py: exact moments against counting by hand, and parts that sum to the whole."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_bits, assert_same_parts

import fpemu
from experiments import expectation, harness, model, rounding, runs
from experiments.expectation import UP
from figures import rounding as drawing

GAUSS = np.random.default_rng(3).standard_normal((64, 64), dtype=np.float32)


# Exact moments -----------------------------------------------------------------------------------


def fraction_up(x: np.float32, fmt: str) -> int:
    """floor(f 2^32) of a positive value between two values of an element format."""
    grid = sorted({Fraction(v) for v in fpemu.get_format(fmt).values() if v >= 0 and v < math.inf})
    low = max(v for v in grid if v <= Fraction(float(x)))
    high = min((v for v in grid if v > low), default=low + 1)
    return math.floor((Fraction(float(x)) - low) / (high - low) * 2**32)


@pytest.mark.parametrize("fmt", ["e2m1", "e4m3", "e5m2", "e2m3"])
def test_words_that_round_up_are_counted(fmt):
    x = np.float32([0.1, 0.3, 1.1, 1.25, 1.5, 2.0, 3.3, 5.9, 1e-3])
    rounded = expectation.chances(x, fmt)
    assert rounded.words.tolist() == [fraction_up(v, fmt) for v in x]
    assert rounded.words[5] == 0  # 2 is a value of all of them


def test_words_are_counted_under_a_scale():
    """A block whose largest value is 12 has the scale 2 in MXFP4 rounded up: x/2 is what is cast."""
    x = np.zeros(32, np.float32)
    x[:4] = 12, 0.2, 2.2, 7.0
    rounded = expectation.chances(x, "mxfp4/rceil")
    assert rounded.words[:4].tolist() == [fraction_up(v / 2, "e2m1") for v in x[:4]]
    assert rounded.down[:4].tolist() == [12, 0, 2, 6]
    assert rounded.up[:4].tolist() == [12, 1, 3, 8]


@pytest.mark.parametrize("fmt", ["nvfp4", UP, "mxfp4", "fp8_tensor_e4m3", "bf16"])
@pytest.mark.parametrize("bits", [1, 3])
def test_moments_are_those_of_all_words(fmt, bits):
    """Mean and variance over every word of so many bits, counted."""
    x = GAUSS[:8]
    every = [
        fpemu.quantize(
            x, fmt, rounding="sr", sr_bits=bits, dtype="float64",
            random_bits=np.full(x.shape, k << 32 - bits, np.uint32),
        )
        for k in range(1 << bits)
    ]  # fmt: skip
    rounded = expectation.chances(x, fmt)
    np.testing.assert_allclose(expectation.mean(rounded, bits), np.mean(every, axis=0), rtol=1e-15)
    # Squares of differences lose digits of tiny variances.
    np.testing.assert_allclose(
        expectation.variance(rounded, bits), np.var(every, axis=0), rtol=1e-12, atol=1e-18
    )


def test_a_scale_rounded_up_is_the_next_one_or_the_same():
    up, nearest = fpemu.encode(GAUSS, UP), fpemu.encode(GAUSS, "nvfp4")
    steps = up.scales.astype(int) - nearest.scales
    assert set(np.unique(steps)) == {0, 1}
    clips = rounding.outside(GAUSS, "nvfp4").reshape(64, 4, 16).any(-1)
    assert (steps[clips] == 1).all() and not rounding.outside(GAUSS, UP).any()
    values = fpemu.get_format("e4m3").values()
    wanted = np.abs(GAUSS.reshape(64, 4, 16)).max(-1) * np.float32(2688 / np.abs(GAUSS).max()) / 6
    exact = np.searchsorted(values[:127], wanted.astype(np.float64) * (1 - 1e-6))
    assert np.array_equal(up.scales, exact)


def test_a_scale_that_is_exact_stays():
    """Blocks whose amax times fl(S fl(1/6)), S = 448, is an E4M3 value exactly."""
    factor = np.float32(448) * (np.float32(1) / np.float32(6))
    values = fpemu.get_format("e4m3").values()[16:126].astype(np.float32)
    near = [np.nextafter(values / factor, np.float32(side)) for side in (0, 1e9)]
    amaxes = np.stack([near[0], values / factor, near[1]])
    exact = amaxes[amaxes * factor == np.stack([values] * 3)]
    assert exact.size > 50
    x = np.zeros((1 + exact.size, 16), np.float32)
    x[0, 0], x[1:, 3] = 6, exact
    assert_same_bits(fpemu.encode(x, UP).scales[1:], fpemu.encode(x, "nvfp4").scales[1:])


def test_the_row_has_one_set_of_bits():
    for backend in ("numba", "torch"):
        parts = fpemu.encode(GAUSS, UP, backend=backend)
        assert_same_parts(parts, fpemu.encode(GAUSS, UP), GAUSS, backend)
    assert_same_bits(fpemu.quantize(GAUSS, UP), fpemu.encode(GAUSS, UP).decode(), GAUSS)


# Parts of bias and noise -------------------------------------------------------------------------


def test_parts_by_hand():
    """Scale 1 in MXFP4: 7 clips to 6, 0.2 becomes 0, the tie 1.25 becomes 1."""
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 7, 0.25, 1.25
    energy = 49 + 0.0625 + 1.5625
    row = rounding.split(x, "mxfp4", "rne")
    assert row["scale"] == pytest.approx(-7 / energy, rel=1e-14)
    assert row["dead"] == pytest.approx(-0.0625 / energy, rel=1e-14)
    assert row["grid"] == pytest.approx(-0.25 * 1.25 / energy, rel=1e-14)
    assert row["bias"] == pytest.approx((-7 - 0.0625 - 0.3125) / energy, rel=1e-14)
    assert row["scale noise"] == pytest.approx(1 / energy, rel=1e-14)
    stochastic = rounding.split(x, "mxfp4", "sr")
    assert stochastic["bias"] == stochastic["scale"] == row["scale"]
    assert stochastic["dead noise"] == pytest.approx(0.25 * 0.25 / energy, rel=1e-14)
    assert stochastic["grid noise"] == pytest.approx(0.25 * 0.25 / energy, rel=1e-14)


def test_a_scale_that_underflows_is_dead_zone_and_no_more():
    """Its operands are clipped to +-6 and decode to 0: each value has one cause."""
    x = np.zeros((2, 16), np.float32)
    x[0, 0], x[1] = 1, 1e-7
    masks = rounding.causes(x, "nvfp4")
    assert rounding.outside(x, "nvfp4")[1].all()
    assert masks["dead"][1].all() and not masks["scale"][1].any() and not masks["grid"][1].any()
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()


SOME = (
    ("nvfp4", "rne"), ("nvfp4", "sr"), ("nvfp4", "rtz"), (UP, "rne"), (UP, "sr"), ("mxfp4", "sr"),
    ("mxfp4/even", "rne"), ("fp8_tensor_e5m2", "sr"), ("nvfp4/te-4over6-mae-256", "rne"),
    ("mxfp4/qutlass-absmax", "rne"),
)  # fmt: skip


@pytest.mark.parametrize(("fmt", "way"), SOME, ids=str)
def test_parts_sum_to_the_whole(fmt, way):
    x = GAUSS * np.float32(0.7)
    row = rounding.split(x, fmt, way)
    for whole, suffix in (("bias", ""), ("noise", " noise")):
        pieces = [row[f"{cause}{suffix}"] for cause in rounding.CAUSES]
        assert math.fsum(pieces) == pytest.approx(row[whole], rel=1e-9, abs=1e-14)
    if way != "sr":
        known = fpemu.stats(x, fmt, rounding=way)
        assert row["bias"] == pytest.approx(known.bias, rel=1e-9, abs=1e-14)
        assert -10 * math.log10(row["noise"]) == pytest.approx(known.sqnr_db, rel=1e-9)


def test_block_maxima_by_hand():
    """7 clips to 6 in both blocks; 1 is exact."""
    x = np.ones((2, 32), np.float32)
    x[:, 5] = 7, -7
    row = rounding.maxima(x, "mxfp4", "sr", -1)
    assert row["clipped"] == 1 and row["others"] == 0
    assert row["worst"] == pytest.approx(1 / 7) and row["maxima"] == pytest.approx(-1 / 7)
    assert row["bias"] == pytest.approx(-14 / (98 + 62))
    along_rows = rounding.maxima(np.ascontiguousarray(x.T), "mxfp4", "sr", 0)
    assert along_rows == row


def test_nvfp4_is_biased_and_its_scale_is_why():
    nearest, up = (rounding.maxima(GAUSS, fmt, "sr", -1) for fmt in ("nvfp4", UP))
    assert 0.4 < nearest["clipped"] < 0.6 and up["clipped"] == 0
    assert nearest["bias"] < -2e-3 and abs(up["bias"]) < 1e-6
    assert nearest["maxima"] < 20 * nearest["others"] < 0


def test_draws_agree_with_the_exact_bias():
    wide = GAUSS.astype(np.float64)
    energy = (wide**2).sum()
    drawn = [
        (
            (fpemu.quantize(GAUSS, "nvfp4", rounding="sr", seed=s, dtype="float64") - wide) * wide
        ).sum()
        for s in range(100)
    ]
    error = np.std(drawn, ddof=1) / 10 / energy
    exact = rounding.split(GAUSS, "nvfp4", "sr")["bias"]
    assert abs(np.mean(drawn) / energy - exact) < 4 * error
    assert abs(exact) > 8 * error  # so that the comparison says something


# Random bits -------------------------------------------------------------------------------------


def test_bfloat16_needs_four_bits_for_e4m3():
    """Of BF16's 7 mantissa bits E4M3 cuts 4: f is k/16, and n bits cut (16 f mod 2^(4-n)) / 16."""
    k = np.arange(128)
    x = (1 + k / 128).astype(np.float32)
    row = rounding.bits_row(x, "e4m3")
    energy = float((x.astype(np.float64) ** 2).sum())
    for n in (1, 2, 3):
        lost = (k % 16) % (1 << 4 - n) / 16 / 8
        assert row["cut"][n - 1] == pytest.approx(-float((lost * x).sum()) / energy, rel=1e-12)
    assert row["cut"][3:] == [0.0] * 29
    assert rounding.first_bits(row["cut"], 0.0) == 4
    assert row["uniform"][0] == pytest.approx(-float((x / 8)[k % 16 > 0].sum()) / energy / 4)


def test_enough_bits():
    assert rounding.first_bits([0.5, -0.1, 0.01, 0.0], 0.05) == 3
    assert rounding.first_bits([0.0, 0.0, 0.0], 0.0) == 1
    assert rounding.first_bits([0.5, 0.5, 0.5], 0.1) is None
    assert rounding.first_bits([0.0, 0.5, 0.0, 0.0], 0.1) == 3  # not the first that happens to fit


# GEMMs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mats() -> rounding.Mats:
    draw = torch.Generator().manual_seed(5)
    shapes = {"x": (64, 32), "w": (96, 32), "dy": (64, 96)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "arm", ["bf16", "fp8_current", "mxfp8", "mxfp4", "nvfp4 nearest", "nvfp4 -sr"]
)
def test_moments_of_nearest_rounding_are_the_layers_results(arm, mats):
    """Formats, axes, rotations and 2D blocks of `rounding` are those of `fpemu.nn`."""
    drawn = rounding.drawn_gemms(rounding.ARMS[arm], mats, 0)
    for gemm, result in drawn.items():
        mean, variance = rounding.gemm_moments(rounding.ARMS[arm], gemm, mats, {})
        assert variance == 0
        error = (mean - result.double()).norm() / mean.norm()
        # BF16 results may fall to the other side of a tie.
        assert error < (1e-4 if arm == "bf16" else 1e-6), gemm


@pytest.mark.parametrize("arm", ["nvfp4 dy up", "mxfp4_sr_rht", "nvfp4 sr all"])
def test_moments_of_stochastic_rounding_are_those_of_draws(arm, mats):
    draws = 120
    results = [rounding.drawn_gemms(rounding.ARMS[arm], mats, seed) for seed in range(draws)]
    for gemm in ("dgrad", "wgrad"):
        mean, variance = rounding.gemm_moments(rounding.ARMS[arm], gemm, mats, {})
        drawn = torch.stack([r[gemm].double() for r in results])
        assert float(drawn.var(0).sum()) == pytest.approx(variance, rel=0.03), gemm
        off = float(((drawn.mean(0) - mean) ** 2).sum())
        assert off == pytest.approx(variance / draws, rel=0.15), gemm


def test_the_variance_of_a_product_of_two_random_operands():
    """Var(sum ab) of independent a, b: va E[b]^2 + E[a]^2 vb + va vb, over 3 terms, 2 by 4 results."""
    recipe = rounding.ARMS["nvfp4 sr all"]
    a = (torch.full((2, 3), 5.0).double(), torch.full((2, 3), 2.0).double())
    b = (torch.full((4, 3), 7.0).double(), torch.full((4, 3), 3.0).double())
    known = {("x", -1, recipe.fprop.a): a, ("w", -1, recipe.fprop.b): b}
    mean, variance = rounding.gemm_moments(recipe, "fprop", {}, known)
    assert (mean == 105).all() and mean.shape == (2, 4)
    assert variance == 2 * 4 * 3 * (2 * 49 + 25 * 3 + 2 * 3)


def test_exact_products(mats):
    exact = rounding.exact_gemms(mats)
    x, w, dy = (mats[name].double() for name in ("x", "w", "dy"))
    assert torch.equal(exact["fprop"], x @ w.T)
    assert torch.equal(exact["dgrad"], dy @ w)
    assert torch.equal(exact["wgrad"], dy.T @ x)


def test_compared_with_the_exact_result():
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    row = rounding.compared(g, 0.9 * g, 0.75)
    assert row["projection"] == pytest.approx(0.9)
    assert row["floor"] == pytest.approx(0.1)
    assert row["error"] == pytest.approx((0.01 + 0.03) ** 0.5)
    assert row["ratio"] == pytest.approx(5.0)
    assert row["snr"] == pytest.approx(0.81 * 25 / 0.75)
    exact = rounding.compared(g, g, 0.0)
    assert exact["ratio"] is None and exact["snr"] is None


# The record --------------------------------------------------------------------------------------


def test_seeds_are_pooled():
    rows = [{"data": "d", "bias": b, "cut": [b, 1.0], "snr": None} for b in (1.0, 2.0, 3.0)]
    one = rounding.pooled(rows)
    assert one["data"] == "d" and one["cut"] == [2.0, 1.0] and one["snr"] is None
    assert one["bias"]["seeds"] == [1, 2, 3] and one["bias"]["mean"] == 2
    assert one["bias"]["high"] - 2 == pytest.approx(4.3027 / 3**0.5, rel=1e-4)


TINY = rounding.Budget(
    model.Shape(width=32, layers=1, heads=2, context=32),
    model.Training(steps=2, batch=1, warmup=1),
    blocks=(0,), windows=1, seeds=2, gaussian=(2, 32), draws=2, step_draws=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, pool: Any) -> Path:
    """A run of seconds: few quantizers and recipes, those that the figures need among them."""
    out = tmp_path_factory.mktemp("rounding")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "pool", pool)
        patch.setitem(rounding.BUDGETS, "quick", TINY)
        patch.setattr(rounding, "QUANTIZERS", SOME)
        patch.setattr(rounding, "SCALED", ("nvfp4", UP))
        patch.setattr(rounding, "BIT_FORMATS", ("nvfp4", "bf16"))
        arms = ("bf16", *drawing.CONVERGING)
        patch.setattr(rounding, "ARMS", {name: rounding.ARMS[name] for name in arms})
        assert rounding.main(["--quick", "--out", str(out)]) == 0
    return out


def test_a_run_fills_its_record(study):
    record = harness.read_record(study / "rounding.json")
    metrics = record["metrics"]
    assert len(metrics["map"]) == 4 * len(SOME)
    for row in metrics["map"]:
        for seed in range(TINY.seeds):
            parts = sum(row[cause]["seeds"][seed] for cause in rounding.CAUSES)
            assert parts == pytest.approx(row["bias"]["seeds"][seed], rel=1e-4, abs=1e-9)
    assert [row["arm"] for row in metrics["steps"]] == ["bf16", *drawing.CONVERGING]
    assert [run["seed"] for run in metrics["runs"]] == [0, 1]
    assert record["point"]["budget"] == "quick" and record["point"]["arms"]["nvfp4"]
    assert {p.stem for p in study.glob("*.pdf")} == {f"rounding_{n}" for n in drawing.FIGURES}


def test_the_figures_depend_on_the_record_alone(study, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "FIGURES", {"gradients": drawing.gradients})
    for path in drawing.draw(study / "rounding.json", tmp_path):
        assert path.read_bytes() == (study / path.name).read_bytes()


def test_finished_seeds_are_not_repeated(study, monkeypatch, tmp_path, pool):
    def never(*_):
        raise AssertionError("a finished seed was measured again")

    monkeypatch.setattr(runs, "pool", pool)
    text = model.corpus()
    points = rounding.points_of(TINY, 0, "cpu")
    calls = []
    monkeypatch.setattr(rounding, "measure", lambda *a: calls.append(a[2]) or {"bias": 1.0})
    first = rounding.measured(points, tmp_path, [], "cpu")
    assert calls == [0, 1] and [r["metrics"] for r in first] == [{"bias": 1.0}] * 2
    monkeypatch.setattr(rounding, "measure", never)
    assert rounding.measured(points, tmp_path, [], "cpu") == first
    assert text.sha256 == points[0]["text"]


def test_a_failure_is_reported_and_tried_again(monkeypatch, tmp_path, pool):
    monkeypatch.setattr(runs, "pool", pool)
    points = rounding.points_of(TINY, 0, "cpu")

    def fails(*_):
        raise ValueError("no luck")

    monkeypatch.setattr(rounding, "measure", fails)
    with pytest.raises(RuntimeError, match="seed 0: ValueError: no luck"):
        rounding.measured(points, tmp_path, [], "cpu")
    monkeypatch.setattr(rounding, "measure", lambda *_: {})
    assert len(rounding.measured(points, tmp_path, [], "cpu")) == 2
    monkeypatch.setattr(runs, "pool", lambda *_: None)
    with pytest.raises(RuntimeError, match="seed 0: its process ended"):
        rounding.measured(points, tmp_path / "nothing", [], "cpu")


def test_two_budgets_are_refused(capsys):
    with pytest.raises(SystemExit):
        rounding.parse(["--quick", "--full"])
    assert "two budgets" in capsys.readouterr().err
