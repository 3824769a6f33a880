"""experiments/reproduce.py: what is run, what is not run again, and what a failure leaves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import dialects, harness, reproduce
from experiments.reproduce import Job
from paper import build, sets

WRITE = """
import json, sys
from pathlib import Path
out, name, commit, quick = sys.argv[1:]
made = {"schema": 1, "experiment": name, "status": "ok", "error": None, "point": {}, "metrics": {},
        "provenance": {"git": {"commit": commit, "dirty": False},
                       "argv": ["x", *(["--quick"] if quick == "True" else [])]}}
path = Path(out) / f"{name}.json"
runs = path.with_suffix(".count")
runs.write_text(str(int(runs.read_text()) + 1 if runs.exists() else 1))
print("working")
if name == "broken":
    sys.exit("it broke")
path.write_text(json.dumps(made))
"""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> str:
    """Three experiments that take no time, one of which fails; returns the commit."""
    commit = harness.git_state(harness.ROOT)["commit"] or "none"
    jobs = (Job("first", 1, 1), Job("broken", 1, 1), Job("last", 1, 1))
    monkeypatch.setattr(reproduce, "JOBS", jobs)
    monkeypatch.setattr(
        reproduce, "command",
        lambda job, out, quick: [sys.executable, "-c", WRITE, str(out), job.name, commit, str(quick)],
    )  # fmt: skip
    return commit


def run(out: Path, *words: str) -> list[str]:
    return reproduce.run_all(reproduce.parse(["--out", str(out), *words]), Console(quiet=True))


def count(out: Path, name: str) -> int:
    return int((out / f"{name}.count").read_text())


def test_failure_is_named_and_does_not_stop_the_others(jobs: str, tmp_path: Path) -> None:
    assert run(tmp_path) == ["broken"]
    assert (tmp_path / "last.json").exists()
    assert "it broke" in (tmp_path / "logs" / "broken.log").read_text()
    # The second time only what failed is run.
    assert run(tmp_path) == ["broken"]
    assert [count(tmp_path, name) for name in ("first", "broken", "last")] == [1, 2, 1]


def test_other_budget_or_commit_is_run_again(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "--only", "first")
    run(tmp_path, "--only", "first", "--quick")
    assert count(tmp_path, "first") == 2
    monkeypatch.setattr(harness, "git_state", lambda root: {"commit": "another", "dirty": False})
    run(tmp_path, "--only", "first", "--quick")
    assert count(tmp_path, "first") == 3


def test_main_draws_builds_and_says_what_is_missing(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(sets, "draw", lambda chosen: ([], ["masters"]))
    monkeypatch.setattr(
        build, "build",
        lambda chosen, out, partial: asked.update(name=chosen.name, out=out, partial=partial) or [],
    )  # fmt: skip
    assert reproduce.main(["--out", str(tmp_path), "--only", "first"]) == 1
    assert asked == {"name": "local", "out": tmp_path / "fpemu-local.pdf", "partial": True}
    assert "masters" in capsys.readouterr().err
    monkeypatch.setattr(sets, "draw", lambda chosen: ([], []))
    assert reproduce.main(["--out", str(tmp_path), "--only", "first"]) == 0
    assert asked["partial"] is False


def test_fresh_forgets_what_was_there(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "local"
    run(out, "--only", "first")
    monkeypatch.setattr(sets, "draw", lambda chosen: ([], []))
    monkeypatch.setattr(build, "build", lambda chosen, out, partial: [])
    reproduce.main(["--out", str(out), "--only", "first", "--fresh"])
    assert count(out, "first") == 1


def test_quick_runs_have_a_folder_of_their_own() -> None:
    local = harness.ROOT / "results" / "local"
    assert reproduce.parse([]).out == local
    assert reproduce.parse(["--quick"]).out == local / "quick"


def test_every_record_of_the_paper_is_made_here() -> None:
    made = {name for job in reproduce.JOBS for name in job.writes}
    assert made == {record.name for record in sets.RECORDS.values() if record.rerun}


def test_every_job_is_a_script() -> None:
    for job in reproduce.JOBS:
        assert (harness.ROOT / "experiments" / f"{job.name}.py").exists(), job.name


def test_the_makefile_names_the_pretrained_weights_of_the_experiments() -> None:
    text = (harness.ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"WEIGHTS := {dialects.PACKAGE}=={dialects.VERSION}\n" in text


def test_a_record_without_pretrained_weights_is_made_again_once_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("dialects", 1, 1)
    made = {
        "schema": harness.SCHEMA, "experiment": "dialects", "status": "ok", "error": None,
        "point": {}, "metrics": {"pretrained": None},
        "provenance": {"git": {"commit": "c", "dirty": False}, "argv": []},
    }  # fmt: skip
    harness.write_record(tmp_path / "dialects.json", made)
    for there, done in ((None, True), (tmp_path, False)):
        monkeypatch.setattr(dialects, "packaged_weights", lambda there=there: there)
        assert reproduce.is_done(job, tmp_path, False, "c") is done
    harness.write_record(tmp_path / "dialects.json", {**made, "metrics": {"pretrained": {}}})
    assert reproduce.is_done(job, tmp_path, False, "c")
