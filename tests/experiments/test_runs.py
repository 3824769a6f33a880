"""The store of runs: nothing is lost, nothing is repeated, whoever is killed when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from experiments import harness, runs

ROOT = Path(__file__).resolve().parents[2]
ORIGIN = {"git": {"commit": None, "dirty": None}, "versions": {}, "device": "cpu", "cpus": 1}
POINTS = [{"task": "toy", "arm": "a", "seed": seed} for seed in range(8)]

#: Works on POINTS in a process of its own; each run appends its seed to a log when it ends.
SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from experiments import runs
runs.POLL = 0.05
folder, pause = Path(sys.argv[1]), float(sys.argv[2])
def compute(point):
    time.sleep(pause)
    with (folder / "log").open("a") as log:
        log.write(f"{{point['seed']}}\\n")
    return {{"seed": point["seed"]}}
runs.work(folder, {POINTS!r}, compute, "toy", {ORIGIN!r})
"""


def start(folder: Path, pause: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), str(pause)])


def records(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


def calls(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "log").read_text().split()]


def work(folder: Path, compute: Any, **how: Any) -> None:
    runs.work(folder, POINTS, compute, "toy", ORIGIN, **how)


# Names -------------------------------------------------------------------------------------------


def test_equal_points_have_one_name_and_others_another() -> None:
    point = {"task": "gpt", "arm": "a/b", "seed": 3, "model": {"x": 1, "y": 2}}
    turned = {"model": {"y": 2, "x": 1}, "seed": 3, "arm": "a/b", "task": "gpt"}
    assert runs.name_of(point) == runs.name_of(turned)
    assert runs.name_of(point).startswith("gpt-a_b-3-")
    others = [{**point, "model": {"x": 1, "y": 3}}, {**point, "rate": 0.1}]
    assert len({runs.name_of(p) for p in (point, *others)}) == 3


def test_a_record_says_how_it_came_about(tmp_path: Path) -> None:
    value = 1 / 3
    assert runs.run(tmp_path, POINTS[0], lambda p: {"x": value}, "toy", ORIGIN) == "ok"
    record = harness.read_record(runs.path_of(tmp_path, POINTS[0]))
    assert record["point"] == POINTS[0]
    assert record["metrics"] == {"x": 0.333333333}
    assert {*ORIGIN, "seconds", "cpu_seconds"} == set(record["provenance"])


def test_files_of_other_points_are_refused(tmp_path: Path) -> None:
    assert runs.read(tmp_path, POINTS[0]) is None
    path = runs.path_of(tmp_path, POINTS[0])
    path.write_text(json.dumps({"point": POINTS[1]}))
    with pytest.raises(ValueError, match="records another point"):
        runs.read(tmp_path, POINTS[0])
    path.write_text('{"point"')
    with pytest.raises(ValueError, match="not JSON"):
        runs.read(tmp_path, POINTS[0])


# One worker --------------------------------------------------------------------------------------


def test_a_second_start_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    seen: list[int] = []

    def compute(point: dict) -> dict:
        seen.append(point["seed"])
        return {}

    work(tmp_path, compute, going=lambda: len(seen) < 3)
    assert seen == [0, 1, 2]
    work(tmp_path, compute)
    work(tmp_path, compute)
    assert seen == list(range(8))


def test_failures_are_records_and_run_again_when_asked(tmp_path: Path) -> None:
    broken = True
    seen: list[int] = []

    def compute(point: dict) -> dict:
        seen.append(point["seed"])
        if broken and point["seed"] % 4 == 1:
            raise OSError("no luck")
        return {}

    work(tmp_path, compute)
    assert runs.tally(tmp_path, POINTS) == {"ok": 6, "failed": 2, "missing": 0}
    record = runs.read(tmp_path, POINTS[1])
    assert record is not None
    assert record["error"] == "OSError: no luck"
    work(tmp_path, compute)
    assert len(seen) == 8  # a failure is an answer, until it is forgotten
    broken = False
    assert runs.forget_failures(tmp_path, POINTS) == 2
    work(tmp_path, compute)
    assert sorted(seen[8:]) == [1, 5]
    assert runs.tally(tmp_path, POINTS) == {"ok": 8, "failed": 0, "missing": 0}


def test_an_interruption_leaves_no_record(tmp_path: Path) -> None:
    def compute(point: dict) -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, compute)
    assert records(tmp_path) == []
    with runs.claimed(runs.path_of(tmp_path, POINTS[0])) as mine:
        assert mine  # the lock went with the run


def test_a_claim_is_exclusive(tmp_path: Path) -> None:
    path = runs.path_of(tmp_path, POINTS[0])
    with runs.claimed(path) as first, runs.claimed(path) as second:
        assert first and not second
    with runs.claimed(path) as again:
        assert again


def test_a_run_that_another_finished_just_before_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = runs.claimed

    @contextmanager
    def late(path: Path) -> Iterator[bool]:
        path.write_text("theirs")
        with claimed(path) as mine:
            yield mine

    monkeypatch.setattr(runs, "claimed", late)
    runs.work(tmp_path, POINTS[:1], lambda point: {}, "toy", ORIGIN)
    assert runs.path_of(tmp_path, POINTS[0]).read_text() == "theirs"


# Several processes -------------------------------------------------------------------------------


def test_killed_in_the_middle_it_neither_loses_nor_repeats(tmp_path: Path) -> None:
    process = start(tmp_path, 0.3)
    while len(records(tmp_path)) < 2:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = records(tmp_path)
    assert 2 <= len(done) < 8
    before = {name: (tmp_path / name).read_bytes() for name in done}
    assert start(tmp_path, 0).wait() == 0
    assert records(tmp_path) == sorted(map(runs.name_of, POINTS))
    assert {name: (tmp_path / name).read_bytes() for name in done} == before
    # The killed run may have got as far as its log line, but not to its record.
    finished = calls(tmp_path)
    assert sorted(set(finished)) == list(range(8))
    assert len(finished) <= 9


def test_two_invocations_share_the_list(tmp_path: Path) -> None:
    crew = [start(tmp_path, 0.1) for _ in range(2)]
    assert [process.wait() for process in crew] == [0, 0]
    assert sorted(calls(tmp_path)) == list(range(8))
    assert len(records(tmp_path)) == 8


def test_a_worker_takes_over_what_a_killed_one_held(tmp_path: Path) -> None:
    slow = start(tmp_path, 60)
    locks = tmp_path / ".locks"
    while not (locks.exists() and any(locks.iterdir())):
        time.sleep(0.02)
    other = start(tmp_path, 0)
    while len(records(tmp_path)) < 7:
        time.sleep(0.02)
    assert other.poll() is None  # waits for the one that is held
    slow.kill()
    slow.wait()
    assert other.wait() == 0
    assert len(records(tmp_path)) == 8


def test_a_pool_of_processes(tmp_path: Path) -> None:
    counts = runs.pool(tmp_path, POINTS, dict, "toy", [], workers=2)
    assert counts == {"ok": 8, "failed": 0, "missing": 0}
    record = runs.read(tmp_path, POINTS[5])
    assert record is not None
    assert record["metrics"] == POINTS[5]
    assert record["provenance"]["versions"]["torch"]
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".json" and p.name != ".locks"]
