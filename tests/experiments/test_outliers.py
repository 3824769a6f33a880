"""Outliers: known answers by hand, the pretrained model against its reference, a tiny whole run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import fpemu
from experiments import crossing, dialects, harness, measures, model, outliers, pretrained
from experiments.scalings import FAMILIES, quantizers
from figures import outliers as drawing
from fpemu.errors import FileFormatError

f32 = np.float32
BY_NAME = {row.name: row.fmt for row in quantizers()}

# Formats -----------------------------------------------------------------------------------------


def test_our_rows_equal_the_named_formats():
    x = np.random.default_rng(0).standard_normal((8, 256)).astype(f32)
    for ours, named in (
        ("FP8 tensor", "fp8_tensor_e4m3"), ("FP8 128", "fp8_block_e4m3/fp32"),
        ("INT8 tensor", "int8_tensor"),
    ):  # fmt: skip
        assert np.array_equal(fpemu.quantize(x, BY_NAME[ours]), fpemu.quantize(x, named))
    for fmt in ("FP8", "FP4", "INT8"):
        by_row = outliers.cast(x, BY_NAME[f"{fmt} row"])
        alone = [fpemu.quantize(row, BY_NAME[f"{fmt} tensor"]) for row in x]
        assert np.array_equal(by_row, np.stack(alone))


def test_integers_have_symmetric_steps():
    assert crossing.integer(4).values().max() == 7 and crossing.integer(4).min_subnormal == 1
    assert crossing.integer(4, low=True).max == 1.75
    assert np.array_equal(crossing.integer(8).values(), fpemu.formats.INT8.values())
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(f32)
    pair = next(pair for pair in crossing.pairs() if pair.name == "8-bit MX")
    assert np.array_equal(fpemu.quantize(x, pair.integer), fpemu.quantize(x, "mxint8/rceil"))
    assert np.array_equal(fpemu.quantize(x, pair.floating), fpemu.quantize(x, "mxfp8_e4m3/rceil"))


@pytest.mark.parametrize("j", [0, 8, 15, 17, 19, 24])
def test_what_a_tensor_scale_of_e4m3_flushes(j):
    """With an outlier of 2^j the scale is 448 / 2^j; what is at most 2^-10 after it becomes zero."""
    x, outlier, _ = outliers.with_outlier("value", j, np.random.default_rng(j))
    x = np.where(outlier | (np.abs(x) <= 2.0**j), x, f32(0.5))  # so that the outlier is the largest
    x[outlier] = 2.0**j
    edge = Fraction(2) ** -10 * Fraction(2) ** j / 448
    flushed = sum(1 for v in x[~outlier].tolist() if v and abs(Fraction(v)) <= edge)
    w = np.random.default_rng(1).standard_normal((4, x.shape[1])).astype(f32)
    case = outliers.Case(x, w, outlier, outlier)
    q = fpemu.quantize(x, BY_NAME["FP8 tensor"])
    share = case.measure(x, q, q.astype(np.float64), w, 0)[2]
    assert share == flushed / (x[~outlier] != 0).sum()
    assert (share < 0.01) == (j < 15) and (share == 1) == (j == 24)


def test_where_one_scale_of_a_block_leaves_nothing_of_its_neighbours():
    """E2M1: beside a value of 2^j, 6 is it, and all below 2^j / 24 becomes zero; elsewhere nothing."""
    x, outlier, group = outliers.with_outlier("value", 12, np.random.default_rng(4))
    q = fpemu.quantize(x, BY_NAME["FP4 two-level"])
    assert (q[group] == 0).all() and group.sum() == 15
    row, channel = np.argwhere(outlier)[0]
    near = np.zeros_like(group)
    near[row, channel // 16 * 16 : channel // 16 * 16 + 16] = True
    assert np.array_equal(near, group | outlier)
    assert (q[~near] == 0).mean() < 0.1
    assert (fpemu.quantize(x, BY_NAME["FP4 tensor"])[~outlier] == 0).all()


def test_a_channel_is_one_column():
    x, outlier, group = outliers.with_outlier("channel", 6, np.random.default_rng(0))
    plain, _, _ = outliers.with_outlier("channel", 0, np.random.default_rng(0))
    assert outlier.sum() == len(x) and group.sum() == 15 * len(x)
    assert np.array_equal(x[outlier], 64 * plain[outlier])
    assert np.array_equal(x[~outlier], plain[~outlier])


def test_a_rotation_is_undone():
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(f32)
    for size in (16, 128):
        turned = outliers.rotated(x, size, 7)
        assert not np.array_equal(turned, x)
        back = outliers.rotated_back(turned, size, 7)
        assert np.abs(back - x).max() < 1e-6
    assert np.array_equal(outliers.rotated_back(x, 0, 7), x)


# Measures ----------------------------------------------------------------------------------------


def test_shape_by_hand():
    x = np.zeros((2, 200), f32)
    x[:, 3] = 3, -4
    x[0, 7] = 5
    found = dict(zip(outliers.SHAPE, outliers.shape_of(x), strict=True))
    assert found["crest"] == pytest.approx(5 / math.sqrt(50 / 400))
    assert found["top1"] == pytest.approx(0.5) and found["top1pct"] == pytest.approx(1)
    assert math.isnan(found["channel_ratio"])  # the median channel is zero
    mean, second = 4 / 400, 50 / 400 - (4 / 400) ** 2
    values = [3, -4, 5] + [0] * 397
    fourth = sum((v - mean) ** 4 for v in values) / 400
    assert found["kurtosis"] == pytest.approx(fourth / second**2 - 3)
    # Blocks that are not zero: [3, 5] and [-4].
    blocks = (5 / math.sqrt(34 / 32), 4 / math.sqrt(16 / 32))
    assert found["block_crest"] == pytest.approx(sum(blocks) / 2)


def test_groups_of_channels():
    x = np.ones((2, 128), f32)
    x[:, [5, 70]] = 9, 8
    groups = outliers.groups_of(x)
    assert groups["hot"].tolist() == [5, 70]
    assert sorted(groups["near"]) == [c for c in (*range(32), *range(64, 96)) if c not in (5, 70)]
    assert groups["far"].tolist() == [*range(32, 64), *range(96, 128)]


def test_losses_by_hand():
    """One block of 32 with a value that sends its neighbours to zero, one that is exact."""
    x = np.ones((1, 64), f32)
    x[0, 0] = 96
    found = dict(zip(outliers.LOSSES, outliers.losses(x, BY_NAME["FP4 32"], 0, 0), strict=True))
    assert found["near_zeroed"] == 1 and found["far_zeroed"] == 0 and found["zeroed"] == 31 / 64
    assert found["near_db"] == 0 and math.isnan(found["far_db"]) and math.isnan(found["hot_db"])
    assert found["sqnr_db"] == found["row_db"] == pytest.approx(10 * math.log10((96**2 + 63) / 31))
    assert all(map(math.isnan, outliers.losses(x[:, :40], BY_NAME["FP4 32"], 16, 0)))


def test_intervals():
    mean, half = measures.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / math.sqrt(3), rel=0.05)
    assert measures.interval([5.0]) == (5.0, None)


# Crossings ---------------------------------------------------------------------------------------


def test_the_published_model_gives_the_published_crossings():
    for pair in crossing.pairs():
        steps = pair.integer.element.max / pair.integer.element.min_subnormal
        assert steps == 2 ** (pair.integer.element.bits - 1) - 1
        found = crossing.model_crossing(pair, steps + 1)
        if pair.published is not None:
            assert found == pytest.approx(pair.published, abs=0.01)


@pytest.mark.parametrize("k", [1.2, 2.3, 5.0])
def test_blocks_have_the_crest_that_was_asked_for(k):
    rng = np.random.default_rng(0)
    assert crossing.crest(crossing.power_blocks(50, 32, k, rng)) == pytest.approx(k, rel=1e-6)
    spikes = crossing.spike_blocks(50, 32, k, rng)
    assert len(spikes) == {1.2: 0, 5.0: 50}.get(k, len(spikes))
    assert crossing.crest(spikes) == pytest.approx(k)


def test_noises_split_off_the_largest_value():
    x = f32([[0.9, 0.3, 0.1]])  # steps of 1/8: none is exact
    fmt = next(pair.integer for pair in crossing.pairs() if pair.name == "4-bit MX")
    whole, others = crossing.noises(x, fmt)[:, 0]
    q = fpemu.quantize(x, fmt).astype(np.float64)[0]
    errors = (x.astype(np.float64)[0] - q) ** 2
    assert whole == pytest.approx(errors.sum() / (x.astype(np.float64) ** 2).sum())
    assert others == pytest.approx(errors[1:].sum() / (x.astype(np.float64)[0, 1:] ** 2).sum())


def test_crossing_by_hand():
    assert crossing.crossing([(1, 9, 5), (2, 6, 5), (4, 2, 5)]) == 2.5
    assert crossing.crossing([(1, 9, 5), (2, 6, 5)]) is None
    assert crossing.crossing([(1, 4, 5), (2, 3, 5)]) is None
    assert crossing.crossing([]) is None


def test_verdicts():
    pair = next(pair for pair in crossing.pairs() if pair.name == "4-bit MX")

    def word(pair, *found):
        rows = [{"view": "block", "crossing": k} for k in found]
        return crossing.verdict(pair, rows)["verdict"]

    assert word(pair, 2.0, None) == "reproduced"
    assert word(pair, 1.72) == "only with exact steps"
    assert word(pair, 3.0) == word(pair, None) == "contradicted"
    assert word(pair._replace(published=7.55), 3.0) == "beyond any block"
    assert word(pair._replace(published=None), 3.0) == "not published"


# The pretrained model ----------------------------------------------------------------------------

NET = pretrained.load()
needs_package = pytest.mark.skipif(
    NET is None, reason=f"{dialects.PACKAGE} is not installed ({dialects.INSTALL})"
)


def test_pieces_are_the_longest_from_the_left():
    known = dict.fromkeys(("[UNK]", "un", "una", "##ff", "##a", "##able", "x", "##x"), 0)
    assert pretrained.pieces("unaffable", known) == ["una", "##ff", "##able"]
    assert pretrained.pieces("unb", known) == ["[UNK]"]
    assert pretrained.pieces("x" * 100, known) == ["x"] + ["##x"] * 99
    assert pretrained.pieces("x" * 101, known) == ["[UNK]"]


def test_words():
    assert pretrained.words("Naïve café_(v2)\u200b\t日本 \x07$") == [
        "naive", "cafe", "_", "(", "v2", ")", "日", "本", "$",
    ]  # fmt: skip


#: From the tokenizers library, 0.23, with the package's vocabulary.
TOKENIZED = {
    "Outliers are rare; quantization (FP8, NVFP4) pays for them.": [
        2041, 14355, 2015, 2024, 4678, 1025, 24110, 3775, 9276, 1006, 1042, 2361, 2620, 1010,
        1050, 2615, 22540, 2549, 1007, 12778, 2005, 2068, 1012,
    ],
    "ΑΣ Σας": [1155, 29733, 1173, 14608, 19579],
    "İstanbul ß": [9960, 1096],
    "naïve café": [15743, 7668],
    "don't stop_here—now 3.14%": [2123, 1005, 1056, 2644, 1035, 2182, 1517, 2085, 1017, 1012, 2403, 1003],
    "x" * 101: [100],
    "日本語": [1864, 1876, 1950],
    "tab\tnew\u200bline\x07": [21628, 2047, 4179],
    "": [],
}  # fmt: skip


@needs_package
@pytest.mark.parametrize("text", TOKENIZED)
def test_the_tokenizer_agrees_with_its_reference(text):
    assert pretrained.tokens(text, NET.vocabulary) == TOKENIZED[text]


@needs_package
def test_the_forward_pass_agrees_with_its_reference():
    """Hidden states of transformers 5.24's BertModel, to the digits written here."""
    text = next(iter(TOKENIZED))
    rows = [[101, *TOKENIZED[text], 102]]
    seen = []
    states = pretrained.forward(NET, rows, lambda layer, short, x: seen.append((layer, short)))
    first = [0.21511, -0.20897, 0.15519, 0.25082]
    last = [0.39483, -0.5256, -0.26293, 0.03278]
    assert states.shape == (1, 25, 384)
    assert states[0, 0, :4].tolist() == pytest.approx(first, abs=2e-5)
    assert states[0, -1, -4:].tolist() == pytest.approx(last, abs=2e-5)
    assert float(states.double().pow(2).sum()) == pytest.approx(1226.193797, rel=1e-5)
    assert seen == [(i, short) for i in range(6) for short in ("q", "proj", "up", "down")]
    assert pretrained.batch(text * 2, NET, 2, 25).tolist() == rows * 2
    with pytest.raises(ValueError, match="the text has 23 tokens"):
        pretrained.batch(text, NET, 2, 25)


def test_without_the_package_there_is_no_model(monkeypatch):
    monkeypatch.setattr(dialects, "packaged_weights", lambda: None)
    assert pretrained.load() is None


# A tiny run --------------------------------------------------------------------------------------

TINY = replace(
    outliers.QUICK, shape=model.Shape(width=32, layers=1, heads=2, context=32),
    training=model.Training(steps=2, batch=2, warmup=1), draws=2, exponents=(0, 8, 16, 20),
    layers=("down",), batches=2, rows=1, most=1 << 12, repeats=2, points=6, values=1 << 12,
)  # fmt: skip
NAMES = ("tensors", "channel", "value", "rotation", "crossing")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the record of a run of seconds; drawing has tests of its own."""
    out = tmp_path_factory.mktemp("outliers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(outliers.BUDGETS, "quick", TINY)
        patch.setattr(drawing, "draw", lambda record, folder: [folder / record.stem])
        assert outliers.main(["--quick", "--out", str(out)]) == 0
    return out


def test_a_tiny_run(study):
    record = harness.read_record(study / "outliers.json")
    metrics = record["metrics"]
    cells = {(r["pattern"], r["rotation"], r["family"], r["scaling"]) for r in metrics["growth"]}
    assert len(cells) == len(metrics["growth"]) == 2 * 3 * len(quantizers())
    cell = {(r["pattern"], r["rotation"], r["family"], r["scaling"]): r for r in metrics["growth"]}
    for family in FAMILIES:
        # A larger outlier never helps the others under one scale; a finer one always helps them.
        one, fine = (
            cell["channel", 0, family, scaling]["others_db"] for scaling in ("tensor", "32")
        )
        assert one[0] > one[-1] and one[-1] < 1 < fine[-1]
    two = cell["channel", 0, "FP4", "two-level"]
    assert two["others_db"][2] > 10 and two["zeroed"][-1] == 1
    rows = {(row["kind"], row["name"]): row for row in metrics["tensors"]}
    assert rows["control", "Gaussian"]["kurtosis"] == pytest.approx(0, abs=0.1)
    assert rows["GPT gradient", "0.down"]["draws"] == 1
    if NET is not None:
        # All of the weight, not a sample: 1582 as the facts have it.
        assert rows["pretrained weight", "0.down"]["kurtosis"] == pytest.approx(1582, abs=1)
        assert rows["pretrained activation", "5.down"]["draws"] == 2
    pairs = {pair["pair"]: pair for pair in metrics["pairs"]}
    assert pairs["8-bit MX"]["verdict"] == "beyond any block"
    assert len(metrics["crossings"]) == 6 * len(pairs)


@pytest.mark.slow
def test_every_figure_is_drawn(study, tmp_path):
    drawn = {
        path.name: path.read_bytes() for path in drawing.draw(study / "outliers.json", tmp_path)
    }
    assert set(drawn) == {f"outliers_{name}.{kind}" for name in NAMES for kind in ("pdf", "png")}
    for name, content in drawn.items():
        assert content.startswith(b"%PDF" if name.endswith(".pdf") else b"\x89PNG"), name


def test_curves_lie_where_the_record_says(study):
    record = harness.read_record(study / "outliers.json")
    figure = drawing.growing(record, "channel")
    rows = [
        row for row in record["metrics"]["growth"]
        if (row["pattern"], row["family"], row["rotation"]) == ("channel", "INT8", 0)
    ]  # fmt: skip
    axes = figure.axes[2]
    assert axes.get_title(loc="left") == "INT8: one scale for"
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [r["others_db"] for r in rows]
    assert {text.get_text() for text in axes.texts} == {row["scaling"] for row in rows}


def test_tables_fit_eighty_columns(study, capsys):
    outliers.show(harness.read_record(study / "outliers.json")["metrics"], harness.console())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)


def test_own_tensors(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    file = tmp_path / "mine.npz"
    x = rng.standard_normal((16, 48)).astype(f32)
    x[:, 5] *= 100
    np.savez(file, up=x, bias=x[0, :20], n=np.arange(3), bad=x * np.nan)
    assert outliers.main(["--tensor", str(file), "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "outliers_tensor.json").read_text())
    rows = {row["name"]: row for row in record["metrics"]["tensors"]}
    assert set(rows) == {"up", "bias"} and record["metrics"]["skipped"] == [
        "bad: it holds NaN or infinity"
    ]
    assert rows["up"]["top1"] > 0.99 and rows["bias"]["shape"] == [20]
    found = rows["up"]["formats"]
    assert found["INT8 tensor"][0][outliers.LOSSES.index("near_zeroed")] > 0.5
    assert found["FP4 32 H16"][0][0] is not None and found["FP4 two-level H128"][0][0] is None
    drawn = {path.name for path in tmp_path.glob("outliers_*.p*")}
    assert drawn == {f"outliers_tensor_tensors.{kind}" for kind in ("pdf", "png")}
    monkeypatch.setattr(drawing, "draw", lambda record, folder: [folder / record.stem])
    assert outliers.main(["--tensor", f"{file}:b*s", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "outliers_tensor.json").read_text())
    assert [row["name"] for row in record["metrics"]["tensors"]] == ["bias"]
    capsys.readouterr()
    assert outliers.main(["--tensor", f"{file}:down", "--out", str(tmp_path)]) == 2
    assert "no float tensor of that name; the file has up, bias" in capsys.readouterr().err


def test_wrong_arguments(tmp_path, capsys):
    assert outliers.main(["--tensor", str(tmp_path / "none.npy")]) == 2
    for argv in (["--quick", "--full"], ["--tensor", "x.npy", "--device", "cuda"]):
        with pytest.raises(SystemExit):
            outliers.parse(argv)
    assert "two budgets" in capsys.readouterr().err
    named = tmp_path / "a:b.npy"
    np.save(named, np.ones(3, f32))
    assert outliers.file_and_name(str(named)) == (named, "*")
    assert outliers.file_and_name("a/b.npz:w.*") == (Path("a/b.npz"), "w.*")
    with pytest.raises(FileFormatError, match="name"):
        outliers.matching(named, "x")
    other = {"schema": harness.SCHEMA, "experiment": "underflow", "status": "ok"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"record of .underflow"):
        drawing.draw(tmp_path / "other.json", tmp_path)
