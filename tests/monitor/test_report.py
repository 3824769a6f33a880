"""`fpemu report`: the same bytes each time, and tables that tell what the records hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fpemu import monitor, report
from fpemu.cli import app
from fpemu.errors import FileFormatError


def tensor(step: int, layer: str, kind: str, underflow: float, **more: Any) -> dict[str, Any]:
    """A record as Monitor writes it."""
    size = 100
    loss = {
        "underflow": round(underflow * size), "underflow_share": underflow, "saturated": 0,
        "saturated_share": 0.0, "nan": 0, "sqnr_db": 20.0, "signal": 1.0, "noise": 0.01,
    }  # fmt: skip
    lossless = {**loss, "underflow_share": 0.0, "sqnr_db": None, "noise": 0.0}
    return {
        "step": step, "rank": 0, "layer": layer, "kind": kind, "dtype": "float32", "shape": [10, 10],
        "calls": 1, "size": size, "zeros": 10, "nan": 0, "inf": 0, "amax": 2.5, "mean": 0.0,
        "rms": 1.0, "kurtosis": 0.5, "channels": [[3, 2.5, 2.5]],
        "exponents": {"lowest": -2, "counts": [20, 30, 40]},
        "formats": {"fp16": lossless, "nvfp4": loss}, **more,
    }  # fmt: skip


def write_run(path: Path, records: list[dict[str, Any]], **header: Any) -> Path:
    layers = dict.fromkeys((r["layer"] for r in records), "Linear")
    head = {
        "fpemu_monitor": monitor.LAYOUT, "fpemu": "0", "rank": 0, "world": 1, "every": 1, "start": 0,
        "axis": -1, "formats": ["fp16", "nvfp4"], "kinds": list(monitor.KINDS), "layers": layers,
    }  # fmt: skip
    lines = [json.dumps({**head, **header}), *map(json.dumps, records)]
    path.write_text("\n".join(lines) + "\n")
    return path


def some_records() -> list[dict[str, Any]]:
    absent = {"step": 1, "rank": 0, "layer": "a<b>", "kind": "gradient", "absent": "frozen"}
    return [
        tensor(0, "a<b>", "weight", 0.02), tensor(1, "a<b>", "weight", 0.3),
        tensor(0, "c", "weight", 0.0), tensor(1, "c", "weight", 0.00005),
        tensor(0, "c", "gradient", 0.1, nan=2), tensor(1, "c", "gradient", 0.2), absent,
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run.jsonl", some_records())


def test_the_worst_come_first(run: Path) -> None:
    found = report.worst(report.load(run), "nvfp4")
    got = [(r["layer"], r["kind"], r["step"]) for r in found]
    # Each by its worst step; NaN first, then underflow.
    assert got == [("c", "gradient", 0), ("a<b>", "weight", 1), ("c", "weight", 1)]
    row = dict(zip(report.WORST_COLUMNS, report.worst_row(found[0], "nvfp4"), strict=True))
    assert (row["underflow"], row["SQNR dB"], row["NaN, Inf"]) == ("10.0%", "20.0", "2")
    assert row["outlier channel"] == "3: 2.5x"
    assert len(report.worst(report.load(run), "nvfp4", top=1)) == 1


def test_formats_side_by_side(run: Path) -> None:
    rows = list(report.format_rows(report.load(run)))
    assert rows[0] == ("weight", "fp16", "0%", "0%", "-", "lossless", "lossless")
    assert rows[1][:5] == ("weight", "nvfp4", "15.0%", "30.0%", "a<b>")


def test_percent() -> None:
    shares = (None, 0.0, 1e-6, 1e-4, 0.0123, 0.9999999, 1.0)
    assert [report.percent(s) for s in shares] == [
        "-",
        "0%",
        "<0.01%",
        "0.01%",
        "1.2%",
        "100.0%",
        "100.0%",
    ]


def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    import matplotlib

    found = report.load(run)
    first = report.write(found, tmp_path / "one" / "page.html")
    with matplotlib.rc_context({"font.size": 20, "image.cmap": "jet", "savefig.dpi": 30}):
        second = report.write(found, tmp_path / "two" / "page.html")
    names = ["page.html", *(f"page.{n}.png" for n in (
        "underflow", "saturated", "sqnr", "amax", "kurtosis", "outliers", "exponents"))]  # fmt: skip
    assert [p.name for p in first] == [p.name for p in second] == names
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == sorted(names)  # no leftovers


def test_the_page_stands_alone(run: Path, tmp_path: Path) -> None:
    report.write(report.load(run), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "a&lt;b&gt;" in page and "a<b>" not in page
    assert not re.search(r"https?://|<script|<link", page)
    assert page.count("data:image/png;base64,") == 7
    assert set(re.findall(r'src="([^"]{0,22})', page)) == {"data:image/png;base64,"}
    assert "2 layers, 2 recorded steps (0 to 1)" in page


def test_colours_say_what_the_values_are(run: Path) -> None:
    """Darker is worse, zero is white, absent is neither."""
    import io

    import numpy as np
    from matplotlib.image import imread

    data = report.heat_maps(report.load(run), report.METRICS[0], "nvfp4")
    assert data is not None
    image = imread(io.BytesIO(data))[..., :3].mean(-1)
    assert image.min() < 0.4 and (image == 1).mean() > 0.2
    zero = write_run(run.with_name("zero.jsonl"), [tensor(0, "a", "weight", 0.0)])
    blank = report.heat_maps(report.load(zero), report.METRICS[0], "nvfp4")
    assert blank is not None
    panel = imread(io.BytesIO(blank))[..., :3].mean(-1)
    rows, columns = panel.shape
    middle = panel[rows // 2 - 5 : rows // 2 + 5, columns // 2 - 20 : columns // 2 + 20]
    assert np.all(middle == 1)


def test_many_steps_are_grouped(tmp_path: Path) -> None:
    records = [tensor(s, "a", "weight", 0.5 if s == 77 else 0.0) for s in range(300)]
    found = report.load(write_run(tmp_path / "long.jsonl", records))
    data = report.heat_maps(found, report.METRICS[0], "nvfp4")
    assert data is not None and b"the worst of each 3 recorded steps" in data


def test_one_step_and_empty_tensors(tmp_path: Path) -> None:
    nothing = {"lowest": None, "counts": []}
    empty = tensor(
        0, "a", "weight", 0.0, size=0, zeros=0, amax=0.0, kurtosis=None, exponents=nothing
    )
    run = report.load(write_run(tmp_path / "one.jsonl", [empty]))
    assert report.write(run, tmp_path / "p.html")[0].name == "p.html"


def test_which_file_is_meant(tmp_path: Path) -> None:
    records = some_records()
    for rank in (0, 1):
        write_run(tmp_path / f"run.rank{rank}.jsonl", records, rank=rank, world=2)
    assert report.find(tmp_path, 1).name == "run.rank1.jsonl"
    assert report.find(tmp_path / "run.jsonl", 1).name == "run.rank1.jsonl"
    assert report.find(tmp_path / "run", 0).name == "run.rank0.jsonl"
    write_run(tmp_path / "other.rank0.jsonl", records)
    with pytest.raises(ValueError, match="holds 2 runs"):
        report.find(tmp_path)
    with pytest.raises(FileNotFoundError, match="no run at"):
        report.find(tmp_path / "nothing")
    with pytest.raises(FileFormatError, match="has no step yet"):
        report.load(write_run(tmp_path / "empty.jsonl", []))


def test_the_command(run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run), "--format", "nvfp4", "--top", "2"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines[:5])) <= 80
    assert [line.split()[0] for line in lines[3:5]] == ["c", "a<b>"]
    assert run.with_suffix(".html").exists() and run.with_suffix(".sqnr.png").exists()
    again = CliRunner().invoke(app, ["report", str(run), "-f", "nvfp5"])
    assert again.exit_code == 2 and "Did you mean 'nvfp4'" in again.output
