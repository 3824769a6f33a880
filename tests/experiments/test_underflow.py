"""The study's measures on tensors whose answers are known by hand; files; a tiny whole run."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from experiments import exponents, model, underflow
from experiments.underflow import Drawn, Study, Tally
from figures import underflow as drawing

f32 = np.float32


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves out the figures, which other tests look at: drawing takes most of a tiny run."""
    monkeypatch.setattr(drawing, "draw", lambda path, out: [out / path.stem])


# Counts ------------------------------------------------------------------------------------------


def study_of(*arrays, formats=("e4m3",), kind="gradient", draws=2, deep=False) -> Study:
    names = tuple(f"t{i}" for i in range(len(arrays)))
    study = Study(formats, draws=draws, layers=names)
    for name, x in zip(names, arrays, strict=True):
        study.add(0, kind, name, np.asarray(x), deep)
    return study


def test_each_share_has_its_definition():
    # 2^-10 is half of E4M3's smallest value (ties to 0), 2^-9 is that value, 500 is beyond 448.
    (row,) = study_of(f32([1, 2**-10, 2**-9, 0, 500])).metrics()["by_format"]
    counts = ("size", "zeros", "underflow", "subnormal", "saturated", "nan", "inf")
    assert [row[key] for key in counts] == [5, 1, 1, 1, 1, 0, 0]
    assert row["underflow_share"] == 1 / 4  # of the non-zero ones
    assert row["subnormal_share"] == row["saturated_share"] == 1 / 5  # of all
    noise = (2**-10) ** 2 + (500 - 448) ** 2
    signal = 1 + (2**-10) ** 2 + (2**-9) ** 2 + 500**2
    assert row["sqnr_db_median"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)


def test_pooled_counts_stand_beside_the_worst_tensor():
    small, large = f32([1, 1, 1, 2**-12] * 25), f32([2**-12, 1])
    rows = study_of(small, large).metrics()["by_format"]
    (row,) = rows
    assert row["underflow"] == 26
    assert row["underflow_share"] == 26 / 102  # not the mean of 1/4 and 1/2
    assert (row["worst_share"], row["worst_layer"]) == (1 / 2, "t1")
    assert row["sqnr_db_worst"] <= row["sqnr_db_median"]


def test_a_tensor_of_zeros_counts_and_divides_by_nothing():
    metrics = study_of(np.zeros((4, 4), f32), deep=True).metrics()
    (row,) = metrics["by_format"]
    assert (row["zeros"], row["underflow_share"], row["worst_share"]) == (16, 0.0, 0.0)
    assert metrics["histograms"][0]["zeros"] == 16
    assert sum(metrics["histograms"][0]["counts"]) == 0
    assert metrics["rounding"][0]["kept_sr"] is None
    assert metrics["rounding"][0]["magnitude_bias_rne"] is None


def test_block_scaling_saves_what_tensor_scaling_flushes():
    x = np.full((2, 128), 2.0**-30, f32)
    x[0, 0] = 448
    formats = ("fp8_tensor_e4m3", "fp8_block_e4m3", "mxfp8_e4m3")
    rows = study_of(x, formats=formats).metrics()["by_format"]
    # Per tensor all but the large value vanish, per 128 only its row, per 32 only its block.
    assert [row["underflow"] for row in rows] == [255, 127, 31]


@pytest.mark.parametrize(("fmt", "lost_below"), [("fp16", -24), ("e5m2", -16), ("e4m3", -9)])
def test_loss_scale_moves_the_threshold_by_its_exponent(fmt, lost_below):
    """2^-30 becomes zero exactly while 2^(k-30) is at most half of the smallest value."""
    x = f32([2.0**-30, -(2.0**-30), 0])
    rows = [r for r in study_of(x).metrics()["loss_scale"] if r["format"] == fmt]
    assert [r["log2_scale"] for r in rows] == list(range(0, 25, 2))
    for row in rows:
        vanishes = row["log2_scale"] - 30 <= lost_below - 1
        assert row["underflow"] == (2 if vanishes else 0), row


def test_loss_scale_overflow_is_counted():
    rows = study_of(f32([1.0, 2.0**-4])).metrics()["loss_scale"]
    beyond = {(r["format"], r["log2_scale"]): r["saturated"] for r in rows}
    assert beyond["fp16", 14] == 0
    assert beyond["fp16", 16] == 1  # 65536 > 65504
    assert beyond["fp16", 20] == 2
    assert beyond["e4m3", 8] == 0
    assert beyond["e4m3", 10] == 1


def test_scaling_by_a_power_of_two_is_exact():
    x = np.random.default_rng(0).standard_normal(1000).astype(f32) * f32(1e-30)
    assert np.array_equal(underflow.times_power_of_two(x, 24) / f32(2**24), x)
    high = underflow.times_power_of_two(f32([3e38, np.nan]), 24)
    assert high.dtype == np.float64
    assert high[0] == float(f32(3e38)) * 2**24
    assert np.isinf(underflow.times_power_of_two(np.float64([1e308]), 24)[0])


def test_no_cast_leaves_its_tensor_changed():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(f32)
    before = x.copy()
    study_of(x, formats=("nvfp4", "fp16"), deep=True)
    assert np.array_equal(x, before)


# Histograms --------------------------------------------------------------------------------------


def test_exponent_bins():
    x = f32([1, 1.5, 2, -3.99, 4, 0, -0.0, 2**-30, np.inf, np.nan, -np.inf])
    counts = exponents.exponent_counts(x)
    found = {e + exponents.LOWEST: n for e, n in enumerate(counts) if n}
    assert found == {0: 2, 1: 2, 2: 1, -30: 1}


def test_exponents_beyond_the_ends_fall_into_the_last_bins():
    x = f32([1e-45, 2**-70, 2**100])  # the first is a subnormal float32
    counts = exponents.exponent_counts(x)
    assert (counts[0], counts[-1], counts.sum()) == (2, 1, 3)


@pytest.mark.parametrize("block", [0, 128, 32, 16])
@pytest.mark.parametrize("shape", [(5, 128), (3, 40), (7,), (2, 3, 33)])
def test_distances_equal_exact_arithmetic(block, shape):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)).astype(f32)
    x[rng.random(shape) < 0.2] = 0
    expected = [0] * (exponents.FARTHEST + 1)
    for row in [x.ravel()] if block == 0 else x.reshape(-1, shape[-1]):
        for start in range(0, len(row), block or len(row)):
            part = [abs(Fraction(float(v))) for v in row[start : start + (block or len(row))]]
            top = max(part)
            for v in part:
                if v:
                    d = next(d for d in range(1000) if top < v * 2 ** (d + 1))
                    expected[min(d, exponents.FARTHEST)] += 1
    assert exponents.distance_counts(x, block).tolist() == expected


def test_a_block_with_nan_has_no_distances():
    x = np.ones((1, 64), f32)
    x[0, 3] = np.nan
    assert exponents.distance_counts(x, 32).sum() == 32
    assert exponents.distance_counts(x, 0).sum() == 0


def test_the_largest_of_each_block():
    x = np.zeros((2, 40), f32)  # blocks of 16, 16 and 8
    x[0, 3], x[0, 17], x[0, 39] = -(2**-4), 2**-7, 2**-7
    x[0, 4] = 2**-9  # not the largest of its block
    x[1, 0] = np.nan
    counts = exponents.maximum_counts(x, 16)
    assert {e + exponents.LOWEST: n for e, n in enumerate(counts) if n} == {-4: 1, -7: 2}
    assert exponents.maximum_counts(f32(3), 16).sum() == 1  # a scalar is a block


# Definitions -------------------------------------------------------------------------------------


def test_the_help_has_every_definition_that_records_carry():
    words = " ".join(underflow.__doc__.split())
    for name, definition in underflow.DEFINITIONS.items():
        assert f" {name} {definition} " in f"{words} ", name


# Rounding ----------------------------------------------------------------------------------------


def test_stochastic_rounding_keeps_on_average_what_nearest_flushes():
    # A quarter of E4M3's smallest value: to nearest it is lost, stochastically one in four lives.
    x = np.full((64, 64), 2.0**-11, f32)
    x[::2] *= -1
    drawn = underflow.draw_roundings(x, "e4m3", seed=1, stream=0, draws=16)
    assert drawn.flushed == drawn.absolute == 4096 * 2**-11
    assert drawn.kept[0] == 0
    row = underflow.rounding_row([drawn])
    assert row["flushed_share"] == 1
    assert row["kept_rne"] == 0
    # Each of 16 * 4096 values is 4 with probability 1/4: deviation sqrt(3 / 65536) of the mean.
    assert abs(row["kept_sr"] - 1) < 5 * math.sqrt(3 / 65536)
    assert 0 < row["kept_sr_se"] < 3 * math.sqrt(3 / 65536)
    assert row["magnitude_bias_rne"] == -1
    assert row["bias_rne"] == 0  # signs cancel


def test_exact_values_lose_nothing_by_either_rounding():
    x = f32([[1, 2, -4, 0, 0.5] * 4])
    row = underflow.rounding_row([underflow.draw_roundings(x, "e4m3", 0, 0, 3)])
    assert row["flushed_share"] == 0
    assert row["kept_sr"] is None
    assert row["bias_sr"] == row["magnitude_bias_sr"] == row["magnitude_bias_sr_se"] == 0


def test_draws_differ_and_are_repeated_by_their_seed():
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(f32)
    one, same, other = (underflow.draw_roundings(x, "mxfp4", s, 0, 4) for s in (1, 1, 2))
    assert np.array_equal(one.product, same.product)
    assert not np.array_equal(one.product[1:], other.product[1:])
    assert len(set(one.product[1:])) == 4


def test_pooling_adds_sums_draw_by_draw():
    def drawn(name, kept, product, energy):
        return Drawn(
            flushed=2.0, absolute=8.0, total=0.0, energy=energy, kept=np.array(kept),
            signed=np.array([0.0, 4.0, 0.0]), product=np.array(product), name=name,
        )  # fmt: skip

    row = underflow.rounding_row(
        [drawn("a", [0, 2, 4], [8.0, 10, 10], 10.0), drawn("b", [0, 0, 2], [2.0, 4, 6], 4.0)]
    )
    assert row["draws"] == 2
    assert row["flushed_share"] == 4 / 16
    assert row["kept_sr"] == 1.0  # draws: (2 + 0)/4 and (4 + 2)/4
    assert row["kept_sr_se"] == pytest.approx(0.5)  # deviation sqrt(.5), over sqrt(2)
    assert row["bias_sr"] == pytest.approx((8 / 16 + 0) / 2)
    assert row["magnitude_bias_rne"] == pytest.approx(10 / 14 - 1)
    assert row["magnitude_bias_sr"] == pytest.approx((14 / 14 + 16 / 14) / 2 - 1)
    assert (row["worst_rne_layer"], row["worst_rne"]) == ("b", -0.5)
    assert (row["worst_sr_layer"], row["worst_sr"]) == ("b", pytest.approx(0.25))


def test_tensors_with_nan_are_not_rounded_and_said_to_be_left_out():
    metrics = study_of(f32([1, np.nan]), deep=True).metrics()
    assert metrics["rounding"] == []
    assert "NaN or infinity" in metrics["skipped"][0]
    assert metrics["by_format"][0]["nan"] == 1


# Capture -----------------------------------------------------------------------------------------


def test_capture_steps():
    assert underflow.capture_steps(300, 4) == [0, 100, 199, 299]
    assert underflow.capture_steps(10, 1) == [0]
    assert underflow.capture_steps(1, 3) == [0]


def test_course_steps():
    assert underflow.course_steps(300) == [0, 1, 3, 7, 15, 31, 63, 127, 255, 299]
    assert underflow.course_steps(256) == [0, 1, 3, 7, 15, 31, 63, 127, 255]
    assert underflow.course_steps(1) == [0]


def test_captured_tensors_are_the_layers_own():
    shape = model.Shape(width=32, layers=1, heads=2, context=32)
    gpt = model.GPT(shape, torch.Generator().manual_seed(0))
    seen = {}

    def add(kind, name, x):
        assert (kind, name) not in seen
        seen[kind, name] = x.detach().clone()

    stop = underflow.watch(gpt, add)
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))
    model.next_byte_loss(gpt, tokens[:, :-1], tokens[:, 1:]).backward()
    stop()
    assert len(seen) == 4 * len(gpt.linears())
    for name, linear in gpt.linears().items():
        x, dy = seen["activation", name], seen["gradient", name]
        assert x.shape == (64, linear.in_features)
        assert dy.shape == (64, linear.out_features)
        assert torch.equal(seen["weight", name], linear.weight)
        assert torch.equal(seen["weight gradient", name], linear.weight.grad)
        torch.testing.assert_close(dy.T @ x, linear.weight.grad)
    gpt.zero_grad()
    model.next_byte_loss(gpt, tokens[:, :-1], tokens[:, 1:]).backward()  # would add twice


def test_watching_does_not_change_training():
    shape, plan = model.Shape(32, 1, 2, 32), model.Training(steps=3, batch=2, warmup=1)
    text = model.corpus()
    losses = model.train(shape, plan, text, 0)[1]
    stops = []

    def before(step, gpt):
        stops.append(underflow.watch(gpt, lambda kind, name, x: None))

    assert model.train(shape, plan, text, 0, "cpu", before, lambda *_: stops.pop()())[1] == losses


# The whole ---------------------------------------------------------------------------------------


def test_a_tiny_run_measures_everything(study, record):
    metrics, point = record["metrics"], record["point"]
    assert point["budget"] == "quick"
    assert point["steps"] == [0, 3]
    assert metrics["text"]["sha256"] == model.corpus().sha256
    assert len(metrics["train_loss"]) == 4
    rows = {(r["step"], r["kind"], r["format"]): r for r in metrics["by_format"]}
    kinds = ("weight", "activation", "gradient", "weight gradient")
    assert set(rows) == {(s, k, f) for s in (0, 3) for k in kinds for f in underflow.FORMATS}
    assert len(metrics["loss_scale"]) == 2 * 3 * 13
    assert [r["format"] for r in metrics["rounding"]] == list(underflow.ROUNDED)
    assert metrics["layers"] == ["0.qkv", "0.proj", "0.up", "0.down", "head"]
    assert {row["kind"] for row in metrics["by_layer"]} == set(kinds)
    # Loss scale 1 is the plain cast; two ways to the same counts.
    for row in metrics["loss_scale"]:
        if row["log2_scale"] == 0:
            same = rows[row["step"], "gradient", row["format"]]
            assert {**row, "kind": "gradient"} == {**same, "log2_scale": 0}
    for row in metrics["histograms"]:
        total = rows[row["step"], row["kind"], "bf16"]
        assert sum(row["counts"]) + row["zeros"] == total["size"]
        assert row["zeros"] == total["zeros"]
    for row in metrics["below_maximum"]:
        total = rows[row["step"], "gradient", "bf16"]
        assert sum(row["counts"]) == total["size"] - total["zeros"]
    check_parts(metrics["parts"], metrics["histograms"])
    # The course has the shares of the captures, where both look, and every step between.
    assert sorted({row["step"] for row in metrics["course"]}) == [0, 1, 3]
    for row in metrics["course"]:
        assert len(row["underflow"]) == len(metrics["layers"])
        if row["step"] in point["steps"]:
            assert (
                max(row["underflow"]) == rows[row["step"], "gradient", row["format"]]["worst_share"]
            )
    last = {row["format"]: row for row in metrics["by_layer"] if row["kind"] == "gradient"}
    for row in metrics["course"]:
        if row["step"] == 3:
            assert row["underflow"] == last[row["format"]]["underflow"]
    for row in metrics["by_layer"]:
        worst = rows[3, row["kind"], row["format"]]
        assert max(row["underflow"]) == worst["worst_share"]
        if worst["underflow"]:
            at = metrics["layers"].index(worst["worst_layer"])
            assert row["underflow"][at] == worst["worst_share"]
        else:
            assert worst["worst_layer"] is None
    assert (study / "underflow.json").stat().st_size < 300_000


def check_parts(parts, histograms):
    """Layers of one name add up to all gradients; every block of 16 has one largest value."""
    for whole in histograms:
        if whole["kind"] == "gradient":
            of = [row for row in parts if row["step"] == whole["step"]]
            assert {row["part"] for row in of} == {"qkv", "proj", "up", "down", "head"}
            assert sum(row["zeros"] for row in of) == whole["zeros"]
            assert np.sum([row["counts"] for row in of], axis=0).tolist() == whole["counts"]
            for row in of:
                values = sum(row["counts"]) + row["zeros"]
                assert 0 < sum(row["maxima"]) <= values / 16
                if not row["zeros"]:
                    assert sum(row["maxima"]) == values / 16


@pytest.mark.usefixtures("tiny", "undrawn")
def test_same_seed_same_metrics(record, tmp_path):
    """Figures depend on the record alone, see test_figures.py."""
    assert underflow.main(["--quick", "--out", str(tmp_path)]) == 0
    again = json.loads((tmp_path / "underflow.json").read_text())
    assert again["metrics"] == record["metrics"]


def test_a_run_that_fails_leaves_a_failed_record(tmp_path, monkeypatch):
    def broken(*_):
        raise FloatingPointError("diverged")

    monkeypatch.setattr(model, "train", broken)
    with pytest.raises(FloatingPointError):
        underflow.main(["--quick", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "underflow.json").read_text())
    assert (record["status"], record["error"]) == ("failed", "FloatingPointError: diverged")
    assert [p.name for p in tmp_path.iterdir()] == ["underflow.json"]


# A user's files ----------------------------------------------------------------------------------


def gradients(shape=(8, 64)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-5


def write(path, x: torch.Tensor) -> None:
    if path.suffix == ".npy":
        np.save(path, x.numpy())
    elif path.suffix == ".safetensors":
        save_file({"x": x}, path)
    else:
        torch.save(x, path)


def run_on(path, *more: str):
    status = underflow.main(["--tensor", str(path), "--quick", "--out", str(path.parent), *more])
    return status, path.parent / "underflow_tensor.json"


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt"])
def test_own_tensors_in_each_kind_of_file(tmp_path, suffix, capsys, request):
    if suffix != ".npy":  # one kind is drawn
        request.getfixturevalue("undrawn")
    path = tmp_path / f"dy{suffix}"
    write(path, gradients())
    status, result = run_on(path)
    assert status == 0
    metrics = json.loads(result.read_text())["metrics"]
    expected = study_of(gradients().numpy(), formats=underflow.FORMATS, kind="tensor").metrics()
    found = {row["format"]: row["underflow"] for row in metrics["by_format"]}
    assert found == {row["format"]: row["underflow"] for row in expected["by_format"]}
    assert metrics["layers"] == ["x" if suffix == ".safetensors" else "dy"]
    assert len(metrics["rounding"]) == len(underflow.ROUNDED)
    assert (tmp_path / "underflow_tensor_histogram.png").exists() == (suffix == ".npy")
    out = capsys.readouterr().out
    assert "nvfp4" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.usefixtures("undrawn")
def test_every_float_tensor_of_a_file_is_studied_and_nothing_else(tmp_path):
    content = {
        "wide": gradients().double(),
        "layers": [{"w": gradients().bfloat16(), "step": torch.tensor([1, 2])}],
        "half": gradients().half(),
        "bytes": gradients().to(torch.float8_e5m2),
        "vector": gradients((7,)),
        "scalar": torch.tensor(1e-7),
        "empty": torch.zeros(0),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "strided": gradients().T,
    }
    path = tmp_path / "state.pt"
    torch.save(content, path)
    expected = ["wide", "layers.0.w", "half", "bytes", "vector", "scalar", "strided"]
    assert underflow.float_names(path) == expected
    status, result = run_on(path, "--formats", "nvfp4,e4m3,nvfp4/2d")
    assert status == 0
    record = json.loads(result.read_text())
    assert record["point"]["tensors"] == 7
    assert len(record["point"]["sha256"]) == 64
    rows = {row["format"]: row for row in record["metrics"]["by_format"]}
    assert rows["nvfp4"]["size"] == 5 * 512 + 7 + 1
    assert rows["nvfp4/2d"]["size"] == 5 * 512  # vectors have no tiles
    assert "vector: nvfp4/2d needs two axes" in record["metrics"]["skipped"][0]


def test_widening_is_exact():
    x = np.arange(6, dtype=">f4").reshape(2, 3)[:, ::-1] / 7
    wide = underflow.widened(x)
    assert wide.dtype == np.dtype("=f4")
    assert wide.flags.c_contiguous
    assert np.array_equal(wide, x)
    assert underflow.widened(np.float64([1 / 3]))[0] == 1 / 3
    assert underflow.widened(torch.tensor([1 / 3], dtype=torch.float64))[0] == 1 / 3
    half = torch.tensor([1 / 3, 65504.0]).half()
    assert underflow.widened(half).tolist() == half.double().tolist()


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt"])
@pytest.mark.parametrize("damage", ["half", "header", "empty", "text"])
def test_broken_files_end_in_one_clear_error(tmp_path, suffix, damage, capsys):
    path = tmp_path / f"dy{suffix}"
    write(path, gradients())
    whole = path.read_bytes()
    broken = {"half": whole[: len(whole) // 2], "header": whole[:9], "empty": b"", "text": b"hello"}
    path.write_bytes(broken[damage])
    status, result = run_on(path)
    said = capsys.readouterr()
    assert status == 2
    assert said.err.startswith("underflow: ")
    assert "dy" + suffix in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not result.exists()  # nothing ran, nothing is recorded


def test_files_without_floats_and_other_wrong_files(tmp_path, capsys):
    integers = tmp_path / "integers.npy"
    np.save(integers, np.arange(4))
    other = tmp_path / "tensor.bin"
    other.write_bytes(b"1234")
    folder = tmp_path / "folder.npy"
    folder.mkdir()
    for path, message in [
        (integers, "no float tensor with elements, got integers: int64"),
        (other, "suffix '.bin'"),
        (tmp_path / "missing.npy", "no file"),
        (folder, "folder"),
    ]:
        assert run_on(path)[0] == 2
        assert message in capsys.readouterr().err


def test_arguments_that_cannot_go_together(tmp_path, capsys):
    for argv, message in [
        (["--formats", "nvfp5"], "Did you mean 'nvfp4'?"),
        (["--formats", ","], "needs names"),
    ]:
        with pytest.raises(SystemExit):
            underflow.parse(argv)
        assert message in capsys.readouterr().err


def test_help_teaches_the_question(capsys):
    with pytest.raises(SystemExit):
        underflow.parse(["--help"])
    text = capsys.readouterr().out
    for part in ("loss scale", "stochastic rounding", "--tensor FILE", "examples:"):
        assert part in text
    assert text.count("default: eleven") == 1
    assert "('bf16'" not in text  # said in words, not as a tuple


def test_a_tally_without_tensors_is_not_mistaken_for_good_news():
    with pytest.raises(ValueError):
        Tally().row()
