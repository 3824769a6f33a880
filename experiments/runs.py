"""A store of finished runs, and workers that fill it: kill them at any point and start them again.

A *point* is a run's question as plain values; its answer is one small JSON file, named by a hash of
the point, written under another name and then renamed. Whoever computes a point holds a lock that
the system takes back when the process ends, however it ends; so any number of processes, started
together or apart, share one list of points, no finished run is repeated and none is lost. A run
that fails leaves a file that says ``"failed"`` and why.

(POSIX: the locks are `fcntl.flock`.)
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from experiments import harness

Point = dict[str, Any]
Compute = Callable[[Point], dict[str, Any]]

DIGITS = 9  # of floats in records: differences between runs are small
POLL = 2.0  # seconds between looks at runs that others hold
#: One thread a run: sums do not depend on how many cores there are, and workers do not fight.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}  # fmt: skip

# The store ---------------------------------------------------------------------------------------


def canonical(point: Point) -> str:
    """A point as text; equal points have equal texts."""
    return json.dumps(point, sort_keys=True, separators=(",", ":"), allow_nan=False)


def name_of(point: Point) -> str:
    """File name of a point: task, arm and seed to read, and a hash that tells points apart.

    >>> name_of({"task": "gpt", "arm": "nvfp4-sr", "seed": 11, "rate": 0.001})
    'gpt-nvfp4-sr-11-52ecd5fea44872a4.json'
    """
    words = (str(point[key]).replace("/", "_") for key in ("task", "arm", "seed") if key in point)
    digest = hashlib.sha256(canonical(point).encode()).hexdigest()[:16]
    return "-".join((*words, digest)) + ".json"


def path_of(folder: Path, point: Point) -> Path:
    return folder / name_of(point)


def read(folder: Path, point: Point) -> dict[str, Any] | None:
    """The record of a point, of a failed run too; None where there is none.

    Raises
    ------
    ValueError
        Where the file is not this point's record.
    """
    path = path_of(folder, point)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"read: {path} is not JSON ({error}); delete it and run again.") from None
    if canonical(record["point"]) != canonical(point):
        raise ValueError(f"read: {path} records another point; delete it and run again.")
    return record


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Hold the right to write a record while the body runs; False where another process has it."""
    lock = path.parent / ".locks" / path.name
    lock.parent.mkdir(parents=True, exist_ok=True)
    # Lock files stay: one that is deleted may be locked twice, by its old name and by its new.
    handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


def forget_failures(folder: Path, points: Sequence[Point]) -> int:
    """Delete the records of failed runs, so that they are run again; returns how many."""
    count = 0
    for point in points:
        path = path_of(folder, point)
        with claimed(path) if path.exists() else nullcontext(False) as mine:
            record = read(folder, point) if mine else None
            if record is not None and record["status"] == "failed":
                path.unlink()
                count += 1
    return count


# One worker --------------------------------------------------------------------------------------


def run(
    folder: Path, point: Point, compute: Compute, experiment: str, origin: dict[str, Any]
) -> str:
    """Compute one point and write its record; returns its status, ``"ok"`` or ``"failed"``."""
    wall, cpu = time.perf_counter(), time.process_time()
    metrics: dict[str, Any] = {}
    error = None
    try:
        metrics = compute(point)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    record = {
        "schema": harness.SCHEMA,
        "experiment": experiment,
        "status": "ok" if error is None else "failed",
        "error": error,
        "point": point,
        "provenance": {
            **origin,
            "seconds": round(time.perf_counter() - wall, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
        },
        "metrics": harness.plain(metrics, DIGITS),
    }
    harness.write_record(path_of(folder, point), record)
    return record["status"]


def work(
    folder: Path,
    points: Sequence[Point],
    compute: Compute,
    experiment: str,
    origin: dict[str, Any],
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Compute every point that has no record and that nobody else computes, until all have one.

    Parameters
    ----------
    compute : callable
        From a point to its metrics.
    origin : dict
        The provenance of this process, as of `harness.provenance`.
    going : callable
        Asked before each run; False ends the work.
    """
    todo = list(points)
    while todo:
        held = []
        for point in todo:
            if not going():
                return
            path = path_of(folder, point)
            if path.exists():
                continue
            with claimed(path) as mine:
                if not mine:
                    held.append(point)
                elif not path.exists():  # or another process finished it just now
                    run(folder, point, compute, experiment, origin)
        if len(held) == len(todo):
            time.sleep(POLL)
        todo = held


# Several workers ---------------------------------------------------------------------------------


def _worker(
    folder: Path, points: Sequence[Point], compute: Compute, experiment: str, argv: Sequence[str],
    device: str, parent: int,
) -> None:  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    one_thread()
    if device == "cuda":
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
    origin = harness.provenance(experiment, argv, device)
    work(folder, points, compute, experiment, origin, going=lambda: os.getppid() == parent)


def one_thread() -> None:
    """Keep this process to one thread, torch's and ours."""
    import torch

    from fpemu.backends import threads

    torch.set_num_threads(1)
    threads.set_num_threads(1)


def pool(
    folder: Path,
    points: Sequence[Point],
    compute: Compute,
    experiment: str,
    argv: Sequence[str],
    device: str = "cpu",
    workers: int = 1,
) -> dict[str, int]:
    """Fill the store with `workers` processes and a progress bar; returns counts by status.

    Parameters
    ----------
    compute : callable
        A function of a module, so that other processes can import it.

    Returns
    -------
    dict
        Of ``"ok"``, ``"failed"`` and ``"missing"``, over all points.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [path for path in (path_of(folder, p) for p in points) if not path.exists()]
    if missing:
        os.environ.update(ONE_THREAD)  # before the children load their libraries
        context = multiprocessing.get_context("spawn")
        job = (folder, points, compute, experiment, argv, device, os.getpid())
        crew = [context.Process(target=_worker, args=job, daemon=True) for _ in range(workers)]
        for process in crew:
            process.start()
        try:
            _watch(crew, missing, len(points))
        finally:
            for process in crew:
                process.terminate()
                process.join()
    return tally(folder, points)


def _watch(crew: Sequence[Any], missing: list[Path], total: int) -> None:
    """Show how many records there are until all workers have ended."""
    with harness.progress("runs", total) as advance:
        advance(total - len(missing))
        while missing:
            alive = any(process.is_alive() for process in crew)
            done = [path for path in missing if path.exists()]
            missing = [path for path in missing if path not in done]
            if done:
                advance(len(done), note=done[-1].name.rpartition("-")[0])
            if not alive:
                return
            time.sleep(0.5)
        for process in crew:
            process.join()


def tally(folder: Path, points: Sequence[Point]) -> dict[str, int]:
    """How many points have which status."""
    counts = {"ok": 0, "failed": 0, "missing": 0}
    for point in points:
        record = read(folder, point)
        counts["missing" if record is None else record["status"]] += 1
    return counts


# Command line and record -------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many workers, and what to do with runs that are there."""
    add_workers(parser)
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--collect", action="store_true", help="run nothing; make the record")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """How many workers: as many as cores, but a rank of torchrun is one itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        "--workers", type=positive, default=1 if "RANK" in os.environ else cores, metavar="N",
        help="processes, of one thread each",
    )  # fmt: skip


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least one worker is needed")
    return int(text)


def collect(
    experiment: str,
    points: Sequence[Point],
    folder: Path,
    argv: Sequence[str],
    asked: dict[str, Any],
    judge: Callable[[Sequence[Point], Sequence[dict[str, Any]]], dict[str, Any]],
) -> dict[str, Any] | None:
    """One record of many runs, where all are there and went well; else None.

    Parameters
    ----------
    asked : dict
        What the record's point says; keys of points that all runs share stand beside, once, as
        ``"common"``.
    judge : callable
        From points and their metrics to what they say together.
    """
    found = [read(folder, point) for point in points]
    records = [record for record in found if record is not None and record["status"] == "ok"]
    if len(records) < len(points):
        return None
    common = {k: v for k, v in points[0].items() if all(k in p and p[k] == v for p in points)}
    metrics = [record["metrics"] for record in records]
    rows = [
        {**{k: v for k, v in point.items() if k not in common}, **found_}
        for point, found_ in zip(points, metrics, strict=True)
    ]
    return {
        "schema": harness.SCHEMA,
        "experiment": experiment,
        "status": "ok",
        "error": None,
        "point": {**asked, "common": common},
        "provenance": merged(experiment, [record["provenance"] for record in records], argv),
        "metrics": harness.plain({"runs": rows, **judge(points, metrics)}, 7),
    }


def merged(
    experiment: str, origins: Sequence[dict[str, Any]], argv: Sequence[str]
) -> dict[str, Any]:
    """One provenance for many runs: where they differ, a list of what occurs."""

    def all_of(values: Sequence[Any]) -> Any:
        kinds = {canonical({"": v}): v for v in values}
        return next(iter(kinds.values())) if len(kinds) == 1 else [kinds[k] for k in sorted(kinds)]

    commits = all_of([origin["git"]["commit"] for origin in origins])
    return {
        "git": {
            "commit": commits if not isinstance(commits, list) else " ".join(map(str, commits)),
            "dirty": any(origin["git"]["dirty"] is not False for origin in origins),
        },
        "versions": all_of([origin["versions"] for origin in origins]),
        "device": all_of([origin["device"] for origin in origins]),
        "cpus": all_of([origin["cpus"] for origin in origins]),
        # What makes the record from nothing; collecting alone needs the runs.
        "argv": [f"experiments/{experiment}.py", *(word for word in argv if word != "--collect")],
        "seconds": round(sum(origin["seconds"] for origin in origins), 1),
        "cpu_seconds": round(sum(origin["cpu_seconds"] for origin in origins), 1),
    }


def say_what_lacks(out: Any, name: str, folder: Path, points: Sequence[Point]) -> None:
    """Print how many runs are missing or failed, and why these did."""
    counts = tally(folder, points)
    out.print(f"{name}: {counts['failed']} runs failed, {counts['missing']} missing; start again, with --retry for those that failed")  # fmt: skip
    for point in points:
        found = read(folder, point)
        if found is not None and found["status"] == "failed":
            out.print(f"  {name_of(point)}: {found['error']}", markup=False)
