"""Run every experiment's default budget from nothing, draw its figures and build the paper from them.

Everything goes to results/local: records, figures, a log for each experiment (logs/), and a copy of
the paper, fpemu-local.pdf, that says on its first page and in every caption that it is a local,
exploratory run. The committed records in results/ and results/full stay as they are.

Stop it at any time and start it again. An experiment whose record is there, went well, and was made
by this commit with this budget is not run again; one that was stopped begins again, except those
that keep their runs one file each (loss_curves, loss_scale, masters, jump, rounding), which go on. A failed
experiment does not stop the others: the paper then leaves its parts out and says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from experiments import harness

EXAMPLES = """
python experiments/reproduce.py                       # half an hour on two cores
python experiments/reproduce.py --quick               # minutes: see that all of it works
python experiments/reproduce.py --only underflow rounding
python experiments/reproduce.py --fresh               # forget earlier local runs first
"""


@dataclass(frozen=True)
class Job:
    """One experiment.

    Parameters
    ----------
    name : str
        Of the script.
    minutes, quick : float
        What it takes on two cores, default and quick: for the progress bar only.
    records : tuple of str
        What it writes, without ``.json``; empty: its own name.
    """

    name: str
    minutes: float
    quick: float
    records: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[str, ...]:
        return self.records or (self.name,)


STUDIES = (
    "recipes", "ablations", "tokens", "chaos", "switch", "accumulation", "hybrid", "parts", "proxy",
    "tune", "predict",
)  # fmt: skip
JOBS = (
    Job("underflow", 4, 0.5),
    Job("accumulation", 2.5, 0.5),
    Job("dialects", 2.5, 1),
    Job("outliers", 2, 1),
    Job("rounding", 2.5, 1),
    Job("loss_scale", 3, 0.5),
    Job("masters", 1, 0.5),
    Job("jump", 1, 0.5),
    Job("speed", 3, 1),
    Job("loss_curves", 6, 1, tuple(f"loss_curves_{study}" for study in STUDIES)),
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    names = [job.name for job in JOBS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES.strip().splitlines()),
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="small budgets, into results/local/quick")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names,
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="remove what earlier runs left")
    parser.add_argument("--out", type=Path, metavar="DIR", help="instead of results/local")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = harness.ROOT / "results" / "local" / ("quick" if args.quick else "")
    args.out = args.out.resolve()
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: is a file; name a directory.")
    return args


def records_of(job: Job, out: Path) -> list[dict[str, Any]] | None:
    """A job's records; None where one is missing or that of a failure."""
    try:
        return [harness.read_record(out / f"{name}.json") for name in job.writes]
    except ValueError:
        return None


def is_done(job: Job, out: Path, quick: bool, commit: str | None) -> bool:
    """Whether all records of a job are there, went well, and belong to this commit and budget.

    One that did without pretrained weights is done again when they are there.
    """
    records = records_of(job, out) or []
    origins = [record["provenance"] for record in records]
    return (
        bool(origins)
        and all(
            origin["git"]["commit"] == commit and ("--quick" in origin["argv"]) == quick
            for origin in origins
        )
        and not any(lacks_weights(record) for record in records)
    )


def lacks_weights(record: dict[str, Any]) -> bool:
    """Whether pretrained weights are installed now that the record was made without."""
    if record["metrics"].get("pretrained", ...) is not None:
        return False
    from experiments import dialects

    return dialects.packaged_weights() is not None


def command(job: Job, out: Path, quick: bool) -> list[str]:
    script = harness.ROOT / "experiments" / f"{job.name}.py"
    return [sys.executable, str(script), *(["--quick"] if quick else []), "--out", str(out)]


# Running -----------------------------------------------------------------------------------------


def run(job: Job, out: Path, quick: bool, log: TextIO, tick: Any) -> int:
    """Run one experiment, its output into a log; calls ``tick(seconds)``. Returns its status."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    log.write(f"$ {' '.join(command(job, out, quick))}\n")
    log.flush()
    process = subprocess.Popen(
        command(job, out, quick), stdout=log, stderr=subprocess.STDOUT, cwd=harness.ROOT,
        env=environment, start_new_session=True,
    )  # fmt: skip
    started = time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.5)
            tick(time.monotonic() - started)
    except BaseException:
        # The whole session: experiments have worker processes.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    return process.returncode


def last_line(path: Path) -> str:
    """What the log said last, short."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    said = (line.strip() for line in reversed(lines) if not line.startswith("$ "))
    return next((line[:60] for line in said if line), "")


def run_all(args: argparse.Namespace, out: Console) -> list[str]:
    """Run the chosen experiments with one display; returns the names of those that failed."""
    jobs = [job for job in JOBS if job.name in args.only]
    commit = harness.git_state(harness.ROOT)["commit"]
    logs = args.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    columns = (
        TextColumn("{task.description}", table_column=Column(min_width=12, no_wrap=True)),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %", table_column=Column(min_width=5, no_wrap=True)),
        TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("left"),
        TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        minutes = {job.name: job.quick if args.quick else job.minutes for job in jobs}
        whole = bar.add_task("all", total=sum(minutes.values()), note="")
        before = 0.0
        for number, job in enumerate(jobs, 1):
            expected = minutes[job.name]
            head = f"{number}/{len(jobs)} {job.name}"
            if is_done(job, args.out, args.quick, commit):
                out.print(f"{head}: done before", highlight=False)
            else:
                path = logs / f"{job.name}.log"
                mine = bar.add_task(job.name, total=expected, note="")

                def tick(
                    seconds: float, mine: Any = mine, path: Path = path,
                    expected: float = expected, before: float = before,
                ) -> None:  # fmt: skip
                    at = min(seconds / 60, 0.98 * expected)
                    bar.update(mine, completed=at, note=last_line(path))
                    bar.update(whole, completed=before + at)

                started = time.monotonic()
                with path.open("w", encoding="utf-8") as log:
                    status = run(job, args.out, args.quick, log, tick)
                bar.remove_task(mine)
                took = f"{(time.monotonic() - started) / 60:.1f} minutes"
                if status == 0 and records_of(job, args.out):
                    out.print(f"{head}: {took}", highlight=False)
                else:
                    failed.append(job.name)
                    out.print(f"{head}: FAILED after {took}, status {status}: {last_line(path)}"
                              f" ({harness.shown(path)})", highlight=False)  # fmt: skip
            before += expected
            bar.update(whole, completed=before)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run, draw, build. Returns the exit status: 0 if every part of it is there."""
    args = parse(argv)
    out = Console(stderr=True, highlight=False)
    if args.fresh and args.out.exists():
        shutil.rmtree(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = run_all(args, out)
    from paper import build, sets  # after the experiments: matplotlib is theirs until then

    chosen = sets.local(args.out)
    try:
        _, missing = sets.draw(chosen)
    except ValueError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 1
    paper = args.out / "fpemu-local.pdf"
    wrong = build.build(chosen, paper, partial=bool(missing))
    for line in wrong:
        print(f"reproduce: {line}", file=sys.stderr)
    if not wrong:
        print(harness.shown(paper))
    if missing:
        print(f"reproduce: no records of {', '.join(missing)}; the paper leaves them out",
              file=sys.stderr)  # fmt: skip
    return 1 if failed or wrong or missing else 0


if __name__ == "__main__":
    sys.exit(main())
