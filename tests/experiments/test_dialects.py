"""Counts of differing blocks against plain loops and by hand; a tiny whole run and its figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fpemu
from experiments import dialects, harness, model
from experiments.dialects import Bits, Row, Study, bits_of, differing, holds, wilson
from figures import dialects as drawing

ROOT = Path(__file__).resolve().parents[2]
f32 = np.float32

# Bits --------------------------------------------------------------------------------------------


class Fake:
    """As much of an `fpemu.Encoded` as the counting reads."""

    def __init__(self, scales, codes, name="nvfp4"):
        self.format = fpemu.get_format(name)
        self.scales = np.uint8([scales])
        block = self.format.block[-1]
        self.codes = np.zeros((1, len(scales) * block), np.uint8)
        for i, row in enumerate(codes):
            self.codes[0, i * block : i * block + len(row)] = row


def made(*args) -> Bits:
    return bits_of(Fake(*args))


def products(bits: Bits) -> np.ndarray:
    return bits.values.view(f32)


def test_each_measure_by_hand():
    # Scale bytes 0x38 and 0x40 are 1 and 2; codes 2 and 4 are 1 and 2, 10 is -1, 8 is -0.
    a = made([0x38, 0x38, 0x38, 0x38, 0x38], [[2, 0], [4, 0], [2, 0], [2, 8], [0, 0]])
    b = made([0x38, 0x40, 0x38, 0x38, 0x40], [[2, 0], [2, 0], [10, 0], [2, 0], [0, 0]])
    # Equal; 2 * 1 = 1 * 2; another sign; a zero's sign; a scale of nothing.
    assert differing(a, b) == {"scale": 2, "codes": 3, "bits": 4, "values": 1}
    assert differing(a, a) == dict.fromkeys(dialects.MEASURES, 0)


def test_the_last_code_of_a_block_counts():
    codes = np.zeros((3, 32), np.uint8)
    a = made([127] * 3, codes, "mxfp4")
    codes[1, 31] = 1
    b = made([127] * 3, codes, "mxfp4")
    assert differing(a, b) == {"scale": 0, "codes": 1, "bits": 1, "values": 1}


@pytest.mark.parametrize("dtype", dialects.DTYPES)
@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4/te-fast"), ("mxfp4", "mxfp4/even")])
def test_counts_equal_those_of_compare(pair, dtype):
    x = np.random.default_rng(1).standard_normal((48, 160)).astype(f32)
    x[3] = 0
    given = dialects.as_dtype(x, dtype)
    found = differing(*(bits_of(fpemu.encode(given, name)) for name in pair))
    expected = fpemu.compare(given, *pair, examples=0)
    blocks = len(bits_of(fpemu.encode(given, pair[0])).scales)
    assert blocks == expected.blocks
    assert found["scale"] == round(expected.scales_differ * blocks)
    assert found["bits"] == round(expected.blocks_differ * blocks) > 0


def test_values_of_blocks_are_exact():
    x = np.random.default_rng(2).standard_normal((4, 64)).astype(f32)
    for name in ("nvfp4", "mxfp4"):
        encoded = fpemu.encode(x, name)
        fmt = encoded.format
        element, scale = fmt.element.values(), fmt.scale.values()
        factors = np.repeat(scale[encoded.scales], fmt.block[-1], axis=1)
        expected = [
            float(Fraction(e) * Fraction(s))
            for e, s in zip(element[encoded.codes].flat, factors.flat, strict=True)
        ]
        assert np.array_equal(products(bits_of(encoded)).ravel(), f32(expected))


def test_nan_scales_of_either_sign_are_one_byte_in_e4m3_only():
    codes = [[0, 2], [9, 2], [0, 2]]
    bits = made([0x7F, 0xFF, 0x7E], codes)
    assert bits.scales.tolist() == [0x7F, 0x7F, 0x7E]
    assert np.isnan(products(bits)).all(axis=1).tolist() == [True, True, False]
    assert (bits.values[0] == bits.values[1]).all()
    bits = made([0x7F, 0xFF, 0x7E], codes, "mxfp4")
    assert bits.scales.tolist() == [0x7F, 0xFF, 0x7E]
    assert np.isnan(products(bits)).all(axis=1).tolist() == [False, True, False]


def test_short_blocks_are_filled_up():
    bits = bits_of(fpemu.encode(np.ones((3, 20), f32), "nvfp4"))
    codes = bits.codes.view(np.uint8)
    assert codes.shape == (6, 16) and bits.scales.shape == (6,)
    assert (codes[1, 4:] == 0).all() and (codes[1, :4] == 7).all()


# Statistics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "whole"), [(0, 50), (1, 50), (25, 50), (50, 50), (3, 100_000)])
def test_wilsons_interval_solves_its_equation(part, whole):
    """Its ends p are where |share - p| is z standard deviations of a share of p."""
    share, low, high = wilson(part, whole)
    assert share == part / whole
    assert low <= share <= high
    for end, fixed in ((low, part == 0), (high, part == whole)):
        if fixed:
            assert end == share
        else:
            z = abs(share - end) / math.sqrt(end * (1 - end) / whole)
            assert z == pytest.approx(1.959964, abs=1e-5)


def test_noise_by_hand():
    x = f32([3, 4])
    assert dialects.noise(x, f32([3, 3])) == 1 / 25
    assert dialects.decibels(1 / 100) == pytest.approx(20)
    assert math.isnan(dialects.noise(x, f32([np.inf, 3])))
    assert math.isnan(dialects.noise(x * 0, x))
    assert math.isnan(dialects.decibels(0.0))
    tiny = f32([2.0**-149])
    assert dialects.noise(tiny, tiny * 0) == 1


def test_numbers_fit_their_columns():
    for part, whole in ((0, 9), (1, 100_000), (3, 10_000), (1, 300), (1, 9), (8, 9), (9, 9)):
        assert len(dialects.interval(wilson(part, whole))) <= 16
    assert len(dialects.interval(wilson(99_960, 100_000))) <= 16
    assert dialects.interval(wilson(0, 1000)) == "0 0-.38"
    assert dialects.interval(wilson(500, 1000)) == "50.0 46.9-53.1"
    for value in (0.0, 1e-7, 0.0005, 0.7912, 9.9996, 21.868):
        assert len(dialects.level(value)) <= 6
    assert [dialects.level(v) for v in (None, 0.0, 1e-7, 0.7912)] == ["-", "0", "<.001", "0.791"]


# Dialects ----------------------------------------------------------------------------------------


def test_meanings():
    by_name = {row.name: row for rows in map(dialects.rows_of, ("nvfp4", "mxfp4")) for row in rows}
    same = ["te-ref", "te-fast", "torchao", "modelopt", "quark", "te-4over6-mae-448"]
    plain = by_name["nvfp4"].meaning
    assert all(by_name[f"nvfp4/{name}"].meaning == plain for name in same)
    top256 = by_name["nvfp4/fouroversix-mse"].meaning
    assert top256 == by_name["nvfp4/te-4over6-mae-256"].meaning
    one = by_name["nvfp4/1level"].meaning
    assert one == by_name["nvfp4/torchao-1level"].meaning
    assert len({plain, top256, one, by_name["nvfp4/fouroversix-static4"].meaning}) == 4
    assert "nvfp4/2d" not in by_name
    assert len({row.meaning for name, row in by_name.items() if name.startswith("mxfp4")}) == 1
    assert by_name["nvfp4"].plain and not by_name["nvfp4/te-ref"].plain
    assert by_name["nvfp4/te-4over6-mae-448"].searches and not by_name["nvfp4/quark"].searches


def test_every_dialect_of_a_family_is_there_meanings_together_and_searches_last():
    for base in dialects.FAMILIES.values():
        rows = dialects.rows_of(base)
        known = {n for n in fpemu.list_formats(f"{base}*") if not fpemu.get_format(n).is_2d}
        assert {row.name for row in rows} == known
        assert rows[0].name == base
        changes = sum(a.meaning != b.meaning for a, b in pairwise(rows))
        assert changes == len({row.meaning for row in rows}) - 1
        for before, after in pairwise(rows):
            if before.meaning == after.meaning:
                assert before.searches <= after.searches


def test_pairs_are_of_one_meaning():
    rows = [Row(n, m, False, False) for n, m in (("a", "1"), ("b", "2"), ("c", "1"), ("d", "2"))]
    assert list(dialects.pairs(rows)) == [(0, 2), (1, 3)]


# Scales ------------------------------------------------------------------------------------------


def test_a_power_of_two_is_exact_and_other_factors_round_once():
    x = f32([[1 + 2**-23, 3.0]])
    given, plain = dialects.scaled(x, 10, 1.0, "float32")
    assert given is plain and np.array_equal(plain, x / 1024)
    c = dialects.odd_factors([0, 1, 2], 0)[0]
    _, plain = dialects.scaled(x, 3, c, "float32")
    exact = Fraction(c) / 8 * Fraction(float(x[0, 0]))
    assert abs(Fraction(float(plain[0, 0])) - exact) <= Fraction(float(np.spacing(plain[0, 0]))) / 2
    given, plain = dialects.scaled(x, 3, 1.0, "bfloat16")
    assert given.dtype == torch.bfloat16 and plain.tolist() == [[0.125, 0.375]]


def test_odd_factors_are_no_powers_of_two():
    ks = range(66)
    factors = dialects.odd_factors(ks, 5)
    assert len(set(factors)) == len(ks)
    assert all(1 < c < 2 and f32(c) == c for c in factors)
    assert factors == dialects.odd_factors(ks, 5) != dialects.odd_factors(ks, 6)


def test_where_a_dialect_holds():
    track = {
        "amax": 0.75,
        "power_sqnr_db": [20.0, 20.0, 13.0, 20.0],
        "other_sqnr_db": [20.0, 19.0, 20.0, 20.0],
    }
    assert holds(track, [0, 8, 16, 24], least=14.0) == -1 - 8
    assert holds(track, [0, 8, 16, 24], least=13.0) == -1 - 24
    assert holds({**track, "power_sqnr_db": [math.nan] * 4}, [0, 8, 16, 24], least=14.0) is None
    assert holds({**track, "other_sqnr_db": [20, math.nan, 20, 20]}, [0, 8, 16, 24], 13.0) == -1


def test_limits():
    found = dialects.limits()
    assert found["NVFP4"] == 2688 / float(np.finfo(f32).max)
    assert found["MXFP4"] == float(np.finfo(f32).tiny)
    # Just there TransformerEngine's 2688 / amax overflows.
    with np.errstate(over="ignore"):
        assert np.isinf(f32(2688) / f32(found["NVFP4"] * 0.99))
    assert np.isfinite(f32(2688) / f32(found["NVFP4"] * 1.01))


def test_rows_are_taken_from_everywhere():
    x = np.arange(40, dtype=f32).reshape(10, 4)
    assert dialects.sampled(x, 20)[:, 0].tolist() == [0, 8, 16, 24, 32]
    assert np.array_equal(dialects.sampled(x, 1000), x)
    assert dialects.sampled(x, 1).shape == (1, 4)


# A study of two tensors --------------------------------------------------------------------------


def test_counts_add_up_over_tensors_and_stand_against_the_nearest_plain_format():
    rng = np.random.default_rng(3)
    study = Study(most=1 << 20, swept=1 << 12)
    tensors = [rng.standard_normal((64, 64)).astype(f32) * s for s in (1, 1e-3)]
    for i, x in enumerate(tensors):
        study.add("weight", f"t{i}", x)
    against = study.against()
    assert against["nvfp4/te-ref"] == "nvfp4"
    assert against["mxfp4/torchao-even"] == "mxfp4/even"
    assert against["mxfp4/triton-kernels-up"] == "mxfp4/rceil"
    assert against["nvfp4/torchao-1level"] == "nvfp4/1level"
    assert against["nvfp4/fouroversix-mse"] == "nvfp4/te-4over6-mae-256"  # none is plain
    assert all(np.array_equal(c, c.T) for cs in study.counts.values() for c in cs.values())
    metrics = study.metrics(against)
    shares = {(r["dialect"], r["dtype"]): r for r in metrics["shares"]}
    names = ("mxfp4/torchao-rceil", "mxfp4/modelopt")
    for dtype in dialects.DTYPES:
        given = [dialects.as_dtype(x, dtype) for x in tensors]
        for name in names:
            counts = [
                differing(*(bits_of(fpemu.encode(x, n)) for n in (name, against[name])))["bits"]
                for x in given
            ]
            assert shares[name, dtype]["bits"][0] == sum(counts) / 256
    sqnr = {(r["dialect"], r["dtype"]): r for r in metrics["sqnr"]}
    q = [fpemu.quantize(x, "nvfp4") for x in tensors]
    mean = np.mean([dialects.noise(x, y) for x, y in zip(tensors, q, strict=True)])
    assert sqnr["nvfp4", "float32"]["sqnr_db"] == pytest.approx(-10 * math.log10(mean), abs=1e-9)
    nvfp4 = [r for r in metrics["sqnr"] if r["family"] == "NVFP4" and r["dtype"] == "float32"]
    assert min(r["lost_db"] for r in nvfp4) == 0
    assert sqnr["nvfp4", "float32"]["change_db"] == 0


def test_the_kept_tensor_does_not_change_with_its_source():
    study = Study(most=64, swept=64)
    x = np.ones((4, 32), f32)
    study.add("weight", "w", x)
    x[:] = 0
    assert (study.largest["weight"][1] == 1).all()


# Pretrained weights ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    w = torch.randn((48, 96), generator=generator)
    content = {
        "encoder.w": w,
        "encoder.v": w[:32].bfloat16(),
        "embeddings.word.weight": w.clone(),
        "encoder.bias": w[0].clone(),
        "position_ids": torch.zeros((1, 4), dtype=torch.int64),
    }
    save_file(content, path)
    return path


def test_matrices_that_are_no_embeddings(checkpoint):
    assert sorted(dialects.matrices_of(checkpoint)) == ["encoder.v", "encoder.w"]


def test_wrong_files_end_in_one_clear_error(tmp_path, capsys):
    bias = tmp_path / "bias.safetensors"
    save_file({"bias": torch.zeros(4)}, bias)
    for path, message in [(bias, "no float matrix"), (tmp_path / "none.safetensors", "no file")]:
        assert dialects.main(["--weights", str(path), "--out", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert message in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "dialects.json").exists()


def test_the_package_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.setattr(dialects, "MODULE", "fpemu_no_such_weights")
    assert dialects.packaged_weights() is None
    folder = tmp_path / "fpemu_no_such_weights"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('its dependencies are not there')")
    monkeypatch.syspath_prepend(tmp_path)
    assert dialects.packaged_weights() is None
    (folder / "model" / "model.safetensors").write_bytes(b"")
    assert dialects.packaged_weights() == folder / "model" / "model.safetensors"
    assert "fpemu_no_such_weights" not in sys.modules


def test_help_says_how_to_get_the_weights(capsys):
    with pytest.raises(SystemExit):
        dialects.parse(["--help"])
    text = capsys.readouterr().out
    assert dialects.INSTALL in text
    assert "--weights FILE" in text


# A whole run -------------------------------------------------------------------------------------

TINY = dialects.Budget(
    model.Shape(width=32, layers=1, heads=2, context=32),
    model.Training(steps=3, batch=2, warmup=2),
    most=1 << 11, swept=1 << 10, every=64,
)  # fmt: skip


def run_into(out: Path, *more: str, draw: bool = True) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialects, "QUICK", TINY)
        if not draw:  # it takes most of the time
            patch.setattr(drawing, "draw", lambda path, out: [path])
        assert dialects.main(["--quick", "--out", str(out), *more]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint) -> Path:
    out = tmp_path_factory.mktemp("dialects")
    run_into(out, "--weights", str(checkpoint))
    return out


def test_the_record_holds_every_cell(run):
    record = harness.read_record(run / "dialects.json")
    metrics = record["metrics"]
    cells = {
        (family, kind, dtype)
        for family in dialects.FAMILIES
        for kind in dialects.KINDS
        for dtype in dialects.DTYPES
    }
    assert {(m["family"], m["kind"], m["dtype"]) for m in metrics["matrices"]} == cells
    assert len(metrics["matrices"]) == len(cells)
    for m in metrics["matrices"]:
        rows = metrics["dialects"][m["family"]]
        for key in dialects.MEASURES:
            assert [len(line) for line in m[key]] == list(range(len(rows)))
        for j, line in enumerate(m["bits"]):
            for i, count in enumerate(line):
                assert (count is None) == (rows[i]["meaning"] != rows[j]["meaning"])
                if count is not None:
                    scale, codes, values = (m[k][j][i] for k in ("scale", "codes", "values"))
                    assert max(scale, codes, values) <= count <= min(m["blocks"], scale + codes)
    names = {row["name"] for rows in metrics["dialects"].values() for row in rows}
    assert {row["dialect"] for row in metrics["sqnr"]} == names
    assert len(metrics["sqnr"]) == len(names) * 5 * 2
    assert metrics["k"] == [0, 64, 96, 128]
    assert len(metrics["sweep"]) == len(names) * 2 * 2
    assert {row["kind"] for row in metrics["sweep"]} == {"pretrained weight", "gradient"}
    assert sorted(record["point"]["weights"]) == ["encoder.v", "encoder.w"]
    assert metrics["tensors"]["pretrained weight"] == 2
    assert metrics["pretrained"]["file"] == "model.safetensors"
    assert metrics["pretrained"]["package"] is None
    assert metrics["tensors"]["gradient"] == 5


def test_the_sweep_starts_with_the_tensor_itself(run, checkpoint):
    metrics = harness.read_record(run / "dialects.json")["metrics"]
    from safetensors.torch import load_file

    x = dialects.sampled(load_file(checkpoint)["encoder.w"].numpy(), TINY.swept)
    row = next(
        r
        for r in metrics["sweep"]
        if (r["dialect"], r["kind"], r["dtype"])
        == ("nvfp4/te-fast", "pretrained weight", "float32")
    )
    assert row["tensor"] == "encoder.w"
    pair = (bits_of(fpemu.encode(x, n)) for n in ("nvfp4/te-fast", "nvfp4"))
    assert row["power_bits"][0] == differing(*pair)["bits"] > 0
    small = (x.astype(np.float64) * 2.0**-128 * metrics["factors"][-1]).astype(f32)
    pair = (bits_of(fpemu.encode(small, n)) for n in ("nvfp4/te-fast", "nvfp4"))
    assert row["other_bits"][-1] == differing(*pair)["bits"]


def test_the_same_seed_gives_the_same_metrics_and_tables_of_80_columns(
    run, checkpoint, tmp_path, capsys
):
    run_into(tmp_path, "--weights", str(checkpoint), draw=False)
    first, again = (harness.read_record(p / "dialects.json") for p in (run, tmp_path))
    assert again["metrics"] == first["metrics"]
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for family in dialects.FAMILIES.values():
        for row in dialects.rows_of(family):
            assert dialects.short(row.name) in text


def test_without_pretrained_weights_it_goes_on_and_says_how_to_add_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(dialects, "MODULE", "fpemu_no_such_weights")
    run_into(tmp_path, draw=False)
    text = capsys.readouterr().out
    assert dialects.INSTALL in text
    record = harness.read_record(tmp_path / "dialects.json")
    assert record["metrics"]["pretrained"] is None
    assert drawing.swept_kinds(record["metrics"]) == ["weight", "gradient"]
    figure = drawing.matrices(record, "weight")
    assert figure.axes[0].get_title(loc="left") == "NVFP4: scale bytes differ"
    drawing.style.plt.close(figure)


# Figures -----------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("dialects*") if p.suffix != ".json"}


def test_another_process_draws_the_same_bytes(run, tmp_path):
    script = ROOT / "figures" / "dialects.py"
    command = [sys.executable, str(script), str(run / "dialects.json"), "--out", str(tmp_path)]
    surroundings = {**os.environ, "PYTHONHASHSEED": "1", "MPLBACKEND": "svg"}
    subprocess.run(command, cwd=tmp_path, env=surroundings, check=True, capture_output=True)
    drawn = files_of(tmp_path)
    names = ("", "_gradient", "_scale", "_sqnr")
    assert set(drawn) == {f"dialects{n}.{kind}" for n in names for kind in ("pdf", "png")}
    assert drawn == files_of(run)


def test_each_triangle_of_a_matrix_shows_its_dtype(run):
    metrics = json.loads(json.dumps(harness.read_record(run / "dialects.json")["metrics"]))
    places = drawing.compared(metrics["dialects"]["MXFP4"])
    names = [metrics["dialects"]["MXFP4"][i]["name"] for i in places]
    i, j = names.index("mxfp4/torchao-floor"), names.index("mxfp4/qutlass-absmax")
    before = drawing.matrix(metrics, "MXFP4", "gradient", "scale")
    for m in metrics["matrices"]:
        if (m["family"], m["kind"]) == ("MXFP4", "gradient"):
            m["blocks"] = 1000
            a, b = sorted((places[i], places[j]))
            m["scale"][b][a] = 250 if m["dtype"] == "float32" else 500
    after = drawing.matrix(metrics, "MXFP4", "gradient", "scale")
    low, high = sorted((i, j))
    assert (after[low, high], after[high, low]) == (0.25, 0.5)  # above, below the diagonal
    assert np.isnan(before.diagonal()).all()


def test_rules_stand_together_in_a_matrix(run):
    metrics = harness.read_record(run / "dialects.json")["metrics"]
    for rows in metrics["dialects"].values():
        kept = [rows[i] for i in drawing.compared(rows)]
        groups = [(r["meaning"], r["searches"], r["against"]) for r in kept]
        changes = sum(a != b for a, b in pairwise(groups))
        assert changes == len(set(groups)) - 1
        assert all(sum(r["meaning"] == s["meaning"] for s in kept) > 1 for r in kept)


def test_lines_of_one_panel_look_unlike():
    looks = [drawing.look(i) for i in range(26)]
    assert len({(k["color"], str(k["linestyle"])) for k in looks}) == 26
    assert len({(k["marker"], str(k["linestyle"])) for k in looks}) == 26  # in grey


def test_dialects_with_one_curve_share_a_line():
    rows = {
        name: [{"power_bits": bits, "other_bits": [0, 0], "blocks": 10}]
        for name, bits in {"a": [1, 2], "b": [0, 0], "c": [1, 2]}.items()
    }
    assert drawing.alike(rows, drawing.shares_of, 0) == [["a", "c"], ["b"]]


def test_other_records_are_not_drawn(run, tmp_path, capsys, monkeypatch):
    record = harness.read_record(run / "dialects.json")
    path = tmp_path / "dialects.json"
    path.write_text(json.dumps({**record, "experiment": "underflow"}))
    monkeypatch.setattr(sys, "argv", ["dialects.py", str(path), "--out", str(tmp_path)])
    assert drawing.main() == 2
    assert "is a record of 'underflow'" in capsys.readouterr().err
    assert not files_of(tmp_path)
