"""Records tell the truth about a run, whole or not at all; arguments and tables are readable."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from experiments import harness

POINT = {"seed": 3, "formats": ["nvfp4"]}


def run(path: Path, body=lambda metrics: None) -> None:
    with harness.recording(path, "trial", POINT, ["--seed", "3"]) as metrics:
        body(metrics)


def test_a_record_says_what_was_asked_measured_and_how(tmp_path):
    path = tmp_path / "deep" / "trial.json"
    run(path, lambda metrics: metrics.update(loss=[1.5, 1.25], rows=[{"step": 0}]))
    record = json.loads(path.read_text())
    assert (record["experiment"], record["status"], record["error"]) == ("trial", "ok", None)
    assert record["point"] == POINT
    assert record["metrics"] == {"loss": [1.5, 1.25], "rows": [{"step": 0}]}
    origin = record["provenance"]
    assert origin["argv"] == ["experiments/trial.py", "--seed", "3"]
    assert set(origin["git"]) == {"commit", "dirty"}
    assert origin["versions"]["numpy"] == np.__version__
    assert origin["versions"]["fpemu"]
    assert origin["device"]
    assert origin["seconds"] >= 0
    assert harness.read_record(path) == record


def test_a_failed_run_is_a_record_that_says_failed_and_raises(tmp_path):
    path = tmp_path / "trial.json"
    run(path)

    def fail(metrics):
        metrics["half"] = 1
        raise ArithmeticError("loss is NaN at step 7")

    with pytest.raises(ArithmeticError, match="step 7"):
        run(path, fail)
    record = json.loads(path.read_text())
    assert record["status"] == "failed"
    assert record["error"] == "ArithmeticError: loss is NaN at step 7"
    assert record["metrics"] == {}  # no half a result
    assert record["point"] == POINT
    with pytest.raises(ValueError, match=r"records a failure .*step 7"):
        harness.read_record(path)


def test_an_interruption_leaves_the_earlier_record(tmp_path):
    path = tmp_path / "trial.json"
    run(path, lambda metrics: metrics.update(good=1))
    before = path.read_bytes()

    def interrupt(metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, interrupt)
    assert path.read_bytes() == before


def test_a_record_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trial.json"
    run(path, lambda metrics: metrics.update(version=1))
    before = path.read_bytes()
    seen = []

    def crash(draft, target):
        seen.append(json.loads(Path(draft).read_text())["metrics"])  # complete before the rename
        assert path.read_bytes() == before
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        run(path, lambda metrics: metrics.update(version=2))
    assert seen == [{"version": 2}]
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trial.json"]  # no draft left behind


def test_what_json_cannot_hold_never_reaches_the_file(tmp_path):
    path = tmp_path / "trial.json"
    with pytest.raises(TypeError):
        run(path, lambda metrics: metrics.update(bad=object()))
    assert os.listdir(tmp_path) == []


def test_plain_values():
    given = {
        "nan": math.nan, "inf": -math.inf, "third": 1 / 3, "tuple": (1, 2.0), 5: "key",
        "scalar": np.float32(0.5), "count": np.int64(7), "flag": np.bool_(True), "none": None,
    }  # fmt: skip
    assert harness.plain(given) == {
        "nan": None, "inf": None, "third": 0.333333, "tuple": [1, 2.0], "5": "key",
        "scalar": 0.5, "count": 7, "flag": True, "none": None,
    }  # fmt: skip


def test_json_has_one_row_a_line_and_reads_back():
    value = {"metrics": {"rows": [{"a": 1, "b": [1, 2]}, {"a": 2, "b": []}], "loss": [0.5] * 99}}
    text = harness.dumps(value)
    assert json.loads(text) == value
    assert '{"a": 1, "b": [1, 2]},' in [line.strip() for line in text.splitlines()]
    assert len(text.splitlines()) == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no .*run the experiment first"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a record of schema 1"),
        (b'{"schema": 0}', "is not a record of schema 1"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, content, message):
    path = tmp_path / "trial.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        harness.read_record(path)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_state(tmp_path):
    assert harness.git_state(tmp_path) == {"commit": None, "dirty": None}

    def git(*words):
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    assert harness.git_state(tmp_path) == {"commit": None, "dirty": True}
    git("add", ".")
    git("commit", "-qm", "one")
    state = harness.git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "trial.json").write_text("{}")  # what a run writes is not a change
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "trial.pdf").write_text("%PDF")
    assert harness.git_state(tmp_path)["dirty"] is False
    (tmp_path / "figures" / "trial.py").write_text("1\n")  # a script that draws one is
    assert harness.git_state(tmp_path)["dirty"] is True
    (tmp_path / "figures" / "trial.py").unlink()
    (tmp_path / "code.py").write_text("2\n")
    assert harness.git_state(tmp_path) == {"commit": state["commit"], "dirty": True}


# Arguments ---------------------------------------------------------------------------------------


def parse(*argv):
    return harness.parse(harness.arguments("Asks a question.", "python trial.py --quick"), argv)


def test_defaults_and_places():
    args = parse()
    assert (args.quick, args.seed, args.device, args.out, args.argv) == (False, 0, "cpu", None, [])
    assert harness.record_path(args, "trial") == harness.ROOT / "results" / "trial.json"
    assert harness.figures_dir(args) == harness.ROOT / "figures"
    args = parse("--out", "there", "--seed", "7")
    assert harness.record_path(args, "trial") == Path("there/trial.json")
    assert harness.figures_dir(args) == Path("there")
    assert args.argv == ["--out", "there", "--seed", "7"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", "-1"], "allowed are 0 to 4294967295"),
        (["--seed", "4294967296"], "is not a seed"),
        (["--seed", "x"], "is not a seed"),
        (["--device", "tpu"], "invalid choice"),
        (["--out", __file__], "is a file; name a directory"),
    ],
)
def test_bad_arguments_end_in_one_clear_line(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_no_cuda_is_said_at_once(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse("--device", "cuda")
    assert "use --device cpu" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for part in ("Asks a question.", "--quick", "(default: cpu)", "examples:\n  python trial.py"):
        assert part in text


# Terminal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0"), (1.0, "100"), (1e-9, "<.001"), (0.99999, ">99.9"), (0.123456, "12.3"),
        (0.0123456, "1.23"), (0.00012, "0.012"), (0.999, "99.9"), (0.9995, ">99.9"),
    ],
)  # fmt: skip
def test_percent_never_rounds_a_trace_to_nothing_nor_almost_all_to_all(share, text):
    assert harness.percent(share) == text
    assert len(text) <= 5


def test_tables_fit_eighty_columns():
    rows = [["fp8_tensor_e4m3", *["99.9 (<.001)"] * 4]] * 2
    out = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    out.print(harness.table("Title", ["format", *"abcd"], rows))
    out.file.close()
    text = out.export_text()
    assert text.count("99.9 (<.001)") == 8  # nothing cut off
    assert max(map(len, text.splitlines())) <= 80


def test_progress_counts_and_notes(capsys):
    with harness.progress("trial", 3) as advance:
        advance()
        advance(2, "loss 1.00")
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "loss 1.00" in shown


def test_progress_in_a_log_is_a_line_a_minute(capsys, monkeypatch):
    now = iter([0, 10, 61, 62, 63])
    monkeypatch.setattr(harness.time, "monotonic", lambda: next(now))
    with harness.progress("trial", 3) as advance:
        advance(note="a")  # after 10 s
        advance(note="b")  # after 61 s
        advance(note="c")
    assert capsys.readouterr().err.split("\n") == ["trial 2/3 b", "trial 3/3 c", ""]
