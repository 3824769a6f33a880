"""Figures: bytes that depend on the record alone, and labels that do not touch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from experiments.underflow import COURSE
from figures import style, underflow

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("loss_scale", "formats", "histogram", "parts", "rounding", "layers", "course", "training")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("underflow_*")}


def test_every_figure_is_drawn_as_pdf_and_png(study):
    drawn = files_of(study)
    assert set(drawn) == {f"underflow_{n}.{kind}" for n in NAMES for kind in ("pdf", "png")}
    for name, content in drawn.items():
        assert content.startswith(b"%PDF" if name.endswith(".pdf") else b"\x89PNG"), name
        for mark in (b"CreationDate", b"ModDate", b"Matplotlib"):
            assert mark not in content, (name, mark)


def test_another_process_draws_the_same_bytes(study, tmp_path):
    """The script alone, from another folder, with another hash seed and another backend."""
    script = ROOT / "figures" / "underflow.py"
    command = [sys.executable, str(script), str(study / "underflow.json"), "--out", str(tmp_path)]
    surroundings = {**os.environ, "PYTHONHASHSEED": "1", "MPLBACKEND": "svg"}
    subprocess.run(command, cwd=tmp_path, env=surroundings, check=True, capture_output=True)
    assert files_of(tmp_path) == files_of(study)


def test_a_users_settings_do_not_show(study, record, tmp_path):
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "savefig.dpi": 10}):
        drawn = style.save(underflow.training(record), tmp_path / "underflow_training", record)
    for path in drawn:
        assert path.read_bytes() == (study / path.name).read_bytes()


def test_every_figure_is_made_and_saved_by_the_style():
    """Which keeps a user's settings out, and dates."""
    for path in (ROOT / "figures").glob("*.py"):
        if path.name not in ("style.py", "__init__.py"):
            text = path.read_text()
            for call in ("savefig(", "plt.subplots(", "plt.figure(", "pyplot"):
                assert call not in text, (path.name, call)


def test_the_record_shows_in_the_bytes(study, record, tmp_path):
    record = json.loads(json.dumps(record))
    record["metrics"]["loss_scale"][-1]["underflow_share"] = 0.5
    for name, same in (("loss_scale", False), ("training", True)):
        make = getattr(underflow, name)
        for path in style.save(make(record), tmp_path / f"underflow_{name}", record):
            assert (path.read_bytes() == (study / path.name).read_bytes()) == same, path.name


def test_failures_and_other_records_are_not_drawn(study, record, tmp_path, capsys, monkeypatch):
    path = tmp_path / "underflow.json"
    for change, message in [
        ({"status": "failed", "error": "E: no"}, "records a failure"),
        ({"experiment": "rounding"}, "is a record of 'rounding'"),
    ]:
        path.write_text(json.dumps({**record, **change}))
        monkeypatch.setattr(sys, "argv", ["underflow.py", str(path), "--out", str(tmp_path)])
        assert underflow.main() == 2
        assert message in capsys.readouterr().err
        assert files_of(tmp_path) == {"underflow.json": path.read_bytes()} or not files_of(tmp_path)


# Style -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "largest"),
    [
        (("fp16", "bf16", "tf32", "fp32"), None),  # grey: red = green = blue
        (("e4m3", "e5m2", "fp8_tensor_e4m3", "fp8_tensor_e5m2", "fp8_block_e4m3"), 2),
        (("mxfp8_e4m3", "mxfp4", "mxfp4/rceil", "mxfp6_e2m3", "mxint8"), 0),
        (("nvfp4", "nvfp4/2d", "nvfp4/1level"), 1),
    ],
)
def test_colours_by_family(names, largest):
    for name in names:
        rgb = matplotlib.colors.to_rgb(style.colour(name))
        if largest is None:
            assert len(set(rgb)) == 1, name
        else:
            assert int(np.argmax(rgb)) == largest, name


def test_lines_of_one_figure_differ_in_grey():
    def grey(name):
        return float(np.dot(matplotlib.colors.to_rgb(style.colour(name)), (0.299, 0.587, 0.114)))

    for group in (COURSE, ("fp16", "e5m2", "e4m3")):
        shades = sorted(grey(name) for name in group)
        assert min(np.diff(shades)) > 0.05, group


def test_powers_of_two():
    assert style.power_of_two(-14) == "2⁻¹⁴"
    assert style.power_of_two(0) == "2⁰"
    assert style.power_of_two(0.5) == ""


def test_zero_has_a_place_on_a_log_axis():
    figure, axes = style.new()
    style.percent_axis(axes, "y", 0.01)
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["0", "0.01", "0.1", "1", "10", "100"]
    low, high = axes.get_ylim()
    places = style.on_log([0, 0.001, 0.01, 100], 0.01)
    assert places[0] == places[1] == style.zero_place(0.01)
    assert low < places[0] < 0.01 < 100 < high
    style.plt.close(figure)


def test_labels_do_not_touch_and_stay_in_order():
    figure, axes = style.new(figsize=(3, 3))
    axes.set_ylim(0, 1)
    figure.draw_without_rendering()
    labels = [(0.5, "b", "black"), (0.501, "c", "black"), (0.49, "a", "black"), (0.9, "d", "black")]
    style.label_lines(axes, 0.5, labels, gap=9)
    figure.draw_without_rendering()
    boxes = {t.get_text(): t.get_window_extent() for t in axes.texts}
    middles = [(boxes[n].y0 + boxes[n].y1) / 2 * 72 / figure.dpi for n in "abcd"]
    assert min(np.diff(middles)) >= 9 - 1e-6
    wanted = axes.transData.transform((0.5, 0.9))[1] * 72 / figure.dpi
    assert middles[3] == pytest.approx(wanted, abs=1)  # far from the others, it stays
    style.plt.close(figure)


def test_a_saved_figure_does_not_stay_open(record, tmp_path):
    before = style.plt.get_fignums()  # tests that share the process may leave some
    figure, _ = style.new()
    assert len(style.plt.get_fignums()) == len(before) + 1
    style.save(figure, tmp_path / "trial", record)
    assert style.plt.get_fignums() == before
