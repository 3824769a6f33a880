"""The measures on products whose answers are known by hand; a tiny whole run and its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fpemu
from experiments import accumulation, harness, model
from experiments.accumulation import KINDS, LINES, WGRAD_LINES, Line, agreement, errors
from figures import accumulation as drawing
from figures import style
from fpemu.gemm import get_unit

ROOT = Path(__file__).resolve().parents[2]
FAST, PROMOTED, BLACKWELL = LINES[:3]
f32 = np.float32

# Measures ----------------------------------------------------------------------------------------


def test_errors_by_hand():
    found = errors(f32([2, -2, 6, 0]), np.array([3.0, -4.0, 5.0, 0.0]))
    # Off by -1, 2, 1, 0: outward -1, -2, +1, 0. Squares of exact: 9, 16, 25, 0.
    assert found["rms"] == pytest.approx((6 / 4) ** 0.5 / (50 / 4) ** 0.5)
    assert found["max"] == pytest.approx(2 / (50 / 4) ** 0.5)
    assert found["bias"] == pytest.approx(-2 / 12)
    deviation = (((-0.5) ** 2 + (-1.5) ** 2 + 1.5**2 + 0.5**2) / 3) ** 0.5
    assert found["bias_se"] == pytest.approx(deviation / 2 / 3)


def test_a_bias_is_signed_by_magnitude_not_by_value():
    exact = np.array([1.0, -1.0])
    assert errors(exact * 0.5, exact)["bias"] == -0.5
    assert errors(exact * 1.5, exact)["bias"] == 0.5
    assert errors(exact + 0.5, exact)["bias"] == 0


def test_errors_of_nothing_and_of_one():
    none = errors(np.zeros(3, f32), np.zeros(3))
    assert (none["rms"], none["max"], none["bias"], none["bias_se"]) == (None,) * 4
    assert errors(f32([3]), np.array([4.0])) == {
        "rms": 0.25, "max": 0.25, "bias": -0.25, "bias_se": None,
    }  # fmt: skip


def test_agreement_by_hand():
    found = agreement(f32([[3, 0]]), np.array([[3.0, 4.0]]), np.array([[0.0, 4.0]]))
    assert found["error"] == 4 / 5
    assert found["one_minus_cosine"] == pytest.approx(1 - 3 / 5)
    assert found["norm_change"] == -2 / 5
    assert found["cast_error"] == 3 / 4
    assert found["total_error"] == 5 / 4


def test_a_small_angle_does_not_cancel():
    exact = np.array([1.0, 0.0])
    found = agreement(np.array([1.0, 1e-9]), exact, exact)["one_minus_cosine"]
    assert found == pytest.approx(5e-19, rel=1e-6)
    assert agreement(exact * 0, exact, exact)["one_minus_cosine"] is None


# Operands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [1.0, 1.875, 255.9, 256.0, 3e-9, 1e30])
def test_full_range(top):
    factor = accumulation.full_range_factor(f32([top, -top / 3]))
    assert 128 <= float(f32(top)) * factor < 256
    assert np.frexp(factor)[0] == 0.5  # a power of two


def test_full_range_of_zeros():
    assert accumulation.full_range_factor(np.zeros(3, f32)) == 1


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "bf16", "fp16", "nvfp4", "mxfp4"])
def test_casts_say_what_they_multiplied_by(fmt):
    x = np.random.default_rng(0).standard_normal((8, 128)).astype(f32) * f32(1e-5)
    operand = accumulation.cast(x, fmt, -1)
    expected = fpemu.quantize(x.astype(np.float64), fmt, axis=-1) if fmt.endswith("4") else None
    restored = operand.values / operand.factor
    if fmt.endswith("fp4"):
        assert np.allclose(restored, expected, rtol=1e-6, atol=0)  # a float32 tensor scale
    else:
        assert np.array_equal(operand.values, operand.given)
        assert np.abs(restored - x).max() <= np.abs(x).max() / 8


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.label)
def test_a_shortened_product_is_the_product_of_the_beginning(line):
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(s).astype(f32) for s in ((5, 256), (256, 7)))
    left, right = accumulation.cast(a, line.a, -1), accumulation.cast(b, line.b, -2)
    short = [accumulation.shortened(x, 64, i) for x, i in ((left, -1), (right, -2))]
    y = accumulation.product(line, *short)
    exact = left.values[:, :64] @ right.values[:64]
    assert np.array_equal(short[0].values @ short[1].values, exact)
    assert y.shape == (5, 7)
    assert errors(y, exact)["rms"] < 1e-3
    assert np.array_equal(short[0].values, accumulation.cast(a, line.a, -1).values[:, :64])


def test_spread_takes_columns_from_everywhere():
    x = np.arange(20).reshape(2, 10)
    assert accumulation.spread(x, 5).tolist() == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
    assert accumulation.spread(x, 10) is x


# The constant case -------------------------------------------------------------------------------


def truncated_sum(k: int) -> float:
    """1.875 * k as blocks of 32 whose terms and sum keep 13 fraction bits of the largest."""
    total = 0.0
    for _ in range(k // 32):
        top = max(1.0, 2.0 ** np.floor(np.log2(total))) if total else 1.0
        quantum = top * 2.0**-13
        total = total // quantum * quantum + 32 * (1.875 // quantum * quantum)
        quantum = 2.0 ** np.floor(np.log2(total)) * 2.0**-13
        total = total // quantum * quantum
    return total


def test_the_constant_case_by_hand():
    k = 16384
    a, b = accumulation.made_up("constant", 256, k, 0)
    assert a.shape == (1, k) and b.shape == (k, 1)
    rows = list(accumulation.sweep("constant", a, b, lambda *_: None))
    bias = {(row["line"], row["k"]): row["bias"] for row in rows}
    for n in accumulation.lengths(k):
        assert bias[FAST.label, n] == pytest.approx(
            truncated_sum(n) / (1.875 * n) - 1, rel=1e-12
        ), n
        assert bias[PROMOTED.label, n] == bias[BLACKWELL.label, n] == 0
    assert bias[FAST.label, 1024] == 0
    assert bias[FAST.label, 4096] < -0.05
    # Above 2^14 every product is below the last bit that is kept: the sum stands still.
    assert truncated_sum(4 * k) == truncated_sum(k) < 0.54 * 1.875 * k


def test_truncation_can_make_sums_of_mixed_signs_grow():
    """GELU's many small negative products are cut off; step by step in plain Python."""

    def exponent(x):
        return np.frexp(np.abs(x))[1] - 1

    a, b = accumulation.made_up("growing", 1, 4096, 0)
    left, right = accumulation.cast(a, "e4m3", -1), accumulation.cast(b, "e4m3", -2)
    x, w = left.values[0], right.values[:, 0]
    total = 0.0
    for k in range(0, 4096, 32):
        p, q = x[k : k + 32], w[k : k + 32]
        top = (np.maximum(exponent(p), -6) + np.maximum(exponent(q), -6))[p * q != 0].max()
        quantum = 2.0 ** (max(top, exponent(total) if total else top) - 13)
        total = (np.trunc(p * q / quantum).sum() + np.trunc(total / quantum)) * quantum
        quantum = 2.0 ** (exponent(total) - 13)
        total = np.trunc(total / quantum) * quantum
    assert accumulation.product(FAST, left, right)[0, 0] == total > x @ w > 0


# Lines -------------------------------------------------------------------------------------------


def test_lines_name_units_of_their_operands():
    for line in WGRAD_LINES:
        unit = get_unit(line.unit)
        assert len(line.label) <= 25
        if not unit.is_reference:
            elements = {f: "e2m1" if f.endswith("fp4") else f for f in (line.a, line.b)}
            assert (unit.a.name, unit.b.name) == (elements[line.a], elements[line.b])
    assert len({line.label for line in WGRAD_LINES}) == len(WGRAD_LINES)


def test_evidence_is_the_weakest():
    assert FAST.evidence == get_unit("hopper.wgmma.e4m3").evidence
    assert FAST.evidence.startswith("hardware-verified")
    assert PROMOTED.evidence == "model"  # of the recipe
    assert BLACKWELL.evidence == "model"
    assert accumulation.with_e5m2(FAST).evidence == "model"
    for line in WGRAD_LINES:
        assert accumulation.short_evidence(line.evidence) in ("HW", "model", "spec")


def test_numbers_fit_their_columns():
    for value in (0.0, 1e-12, 0.00999, 0.01, 0.123456, 10.78, 99.99, 100.0):
        assert len(accumulation.scientific(value)) <= 7
        assert len(accumulation.scientific(-value, signed=True)) <= 7
    assert accumulation.scientific(0.0) == "0"
    assert accumulation.scientific(None) == "-"
    assert accumulation.scientific(1.23e-5) == "1.2e-5"
    assert accumulation.scientific(-4e-3, signed=True) == "-4e-3"


def test_lengths():
    assert accumulation.lengths(16384) == [2**k for k in range(5, 15)]
    assert accumulation.lengths(100) == [32, 64]


# A whole run -------------------------------------------------------------------------------------

TINY = accumulation.Budget(
    model.Shape(width=32, layers=1, heads=2, context=32),
    model.Training(steps=3, batch=2, warmup=2),
    size=8,
    longest=256,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("accumulation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulation, "QUICK", TINY)
        assert accumulation.main(["--quick", "--out", str(out)]) == 0
    return out


def test_the_record_holds_every_cell(run):
    record = harness.read_record(run / "accumulation.json")
    metrics = record["metrics"]
    assert record["point"]["lengths"] == [32, 64, 128, 256]
    cells = {(row["kind"], row["line"], row["k"]) for row in metrics["errors"]}
    expected = {
        (kind, line.label, k)
        for kind in KINDS
        for line in LINES
        for k in (32, 64, 128, 256)
        if kind != "layer" or k <= 4 * 32
    }
    assert cells == expected
    assert len(metrics["errors"]) == len(cells)
    rows = metrics["weight_gradients"]
    assert {(row["layer"], row["line"]) for row in rows} == {
        (layer, line.label)
        for layer in ("0.qkv", "0.proj", "0.up", "0.down")
        for line in WGRAD_LINES
    }
    for row in rows:  # adding errs less than casting does over so few products
        assert 0 <= row["error"] < row["cast_error"] < 1, row
    assert {line["label"]: line["evidence"] for line in metrics["lines"]} == {
        line.label: line.evidence for line in WGRAD_LINES
    }


def test_the_same_seed_gives_the_same_metrics_and_tables_of_80_columns(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(accumulation, "QUICK", TINY)
    monkeypatch.setattr(drawing, "draw", lambda record, folder: [folder / record.stem])
    accumulation.main(["--quick", "--out", str(tmp_path)])
    first, again = (harness.read_record(p / "accumulation.json") for p in (run, tmp_path))
    assert again["metrics"] == first["metrics"]
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for line in WGRAD_LINES:
        assert line.label in text


def test_captured_tensors_give_the_gradient_of_the_batch():
    """dY^T X of the captured tensors is the weight gradient that autograd accumulates."""
    import torch

    text = model.corpus()
    gpt, _ = model.train(TINY.shape, TINY.training, text, seed=0)
    (layer,) = accumulation.capture(gpt, ["0.up"], text, 32 * 32, 0, "cpu")
    assert all(p.grad is None for p in gpt.parameters())
    order = torch.Generator().manual_seed(2 << 32)
    starts = torch.randint(len(text.train) - 32, (32,), generator=order)
    model.next_byte_loss(gpt, *model.windows(text.train, starts, 32)).backward()
    expected = gpt.linears()["0.up"].weight.grad.numpy()
    found = layer.dy.astype(np.float64).T @ layer.x
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    for kind, shape in (("layer", (8, 32, 8)), ("wgrad", (8, 1024, 8))):
        a, b = accumulation.from_layer(kind, layer, 8)
        assert (a.shape, b.shape) == (shape[:2], shape[1:])


# Figures -----------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("accumulation_*")}


def test_another_process_draws_the_same_bytes(run, tmp_path):
    script = ROOT / "figures" / "accumulation.py"
    command = [sys.executable, str(script), str(run / "accumulation.json"), "--out", str(tmp_path)]
    surroundings = {**os.environ, "PYTHONHASHSEED": "1", "MPLBACKEND": "svg"}
    subprocess.run(command, cwd=tmp_path, env=surroundings, check=True, capture_output=True)
    drawn = files_of(tmp_path)
    names = ("error", "bias", "wgrad")
    assert set(drawn) == {f"accumulation_{n}.{kind}" for n in names for kind in ("pdf", "png")}
    assert drawn == files_of(run)


def test_the_record_shows_in_the_bytes(run, tmp_path):
    record = harness.read_record(run / "accumulation.json")
    record["metrics"]["errors"][3]["rms"] = 0.5
    for name, make, same in (("error", drawing.error, False), ("bias", drawing.bias, True)):
        for path in style.save(make(record), tmp_path / f"accumulation_{name}", record):
            assert (path.read_bytes() == files_of(run)[path.name]) == same, path.name


def test_other_records_are_not_drawn(run, tmp_path, capsys, monkeypatch):
    record = harness.read_record(run / "accumulation.json")
    path = tmp_path / "accumulation.json"
    path.write_text(json.dumps({**record, "experiment": "underflow"}))
    monkeypatch.setattr(sys, "argv", ["accumulation.py", str(path), "--out", str(tmp_path)])
    assert drawing.main() == 2
    assert "is a record of 'underflow'" in capsys.readouterr().err
    assert not files_of(tmp_path)


def test_a_bias_within_its_error_is_not_resolved():
    assert drawing.resolved({"bias": -0.3, "bias_se": 0.1})
    assert not drawing.resolved({"bias": -0.1, "bias_se": 0.1})
    assert not drawing.resolved({"bias": 0.0, "bias_se": None})
    assert drawing.resolved({"bias": -0.1, "bias_se": None})


def test_every_line_has_a_look_of_its_own():
    looks = [drawing.look(accumulation.described(line)) for line in LINES]
    assert len({(look["color"], str(look["linestyle"]), look["marker"]) for look in looks}) == 9
    assert len({look["marker"] for look in looks}) == 9


def test_an_unknown_line_still_has_a_look():
    line = replace(FAST, label="Ada E4M3", unit="ada.qmma.e4m3")
    assert isinstance(line, Line)
    assert drawing.look(accumulation.described(line))["marker"] == "o"
