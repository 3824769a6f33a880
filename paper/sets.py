"""Which records and figures the paper is made from: the committed ones, or those of a local run.

A *set* is one answer to "where is the record of that experiment, and from which figures folder".
``full`` is what is committed; ``local`` is what experiments/reproduce.py leaves behind, and is
exploratory. Nothing falls back silently: each record has one place in each set, in this table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments import harness

ROOT = Path(__file__).resolve().parents[1]
LOCAL = ROOT / "results" / "local"
NOT_DRAWN = "it has not been drawn"
SOURCES = "sources.json"  # beside the figures: which record each was drawn from

STUDIES = (
    "recipes", "ablations", "tokens", "chaos", "switch", "accumulation", "hybrid", "parts", "proxy",
    "tune", "predict",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """Where a record is.

    Parameters
    ----------
    name : str
        Of the record's file, without ``.json``.
    full : str
        Folder of the committed record.
    script : str
        The figure script of that name draws it; empty where nothing is drawn.
    rerun : bool
        Whether a local run makes its own. The comparison with other libraries needs their
        environment (``make differential``), and the evidence table is part of the package: for
        these the committed record serves both sets, and the text says so.
    """

    name: str
    full: str = "results/full"
    script: str = ""
    rerun: bool = True


RECORDS = {
    record.name: record
    for record in (
        # One budget, and that is the committed one.
        Record("accumulation", "results", "accumulation"),
        Record("dialects", "results", "dialects"),
        # Budgets: --full is the committed one.
        Record("underflow", script="underflow"),
        Record("outliers", script="outliers"),
        Record("rounding", script="rounding"),
        Record("loss_scale", script="loss_scale"),
        Record("masters", script="masters"),
        Record("jump", script="jump"),
        Record("speed", script="speed"),
        *(Record(f"loss_curves_{study}", script="loss_curves") for study in STUDIES),
        # Not rerun here.
        Record("differential", "results", rerun=False),
        Record("evidence", "fpemu", rerun=False),
    )
}

#: Figures that the paper shows, and the record of each. Scripts may draw more.
FIGURES = {
    "accumulation_wgrad": "accumulation",
    "underflow_course": "underflow",
    "underflow_histogram": "underflow",
    "loss_scale": "loss_scale",
    "masters_moves": "masters",
    "jump_around": "jump",
    "outliers_tensors": "outliers",
    "rounding_map": "rounding",
    "rounding_gradients": "rounding",
    "loss_curves_recipes": "loss_curves_recipes",
    "loss_curves_gaps": "loss_curves_recipes",
    "loss_curves_ablations": "loss_curves_ablations",
    "loss_curves_tokens": "loss_curves_tokens",
    "loss_curves_switch": "loss_curves_switch",
    "loss_curves_chaos": "loss_curves_chaos",
}


@dataclass(frozen=True)
class Set:
    """A complete choice of records.

    Parameters
    ----------
    name : {"full", "local"}
    records : callable
        Path of a `Record`.
    figures : Path
        Folder of the figures.
    """

    name: str
    records: Callable[[Record], Path]
    figures: Path

    @property
    def local(self) -> bool:
        return self.name == "local"

    def path(self, name: str) -> Path:
        return self.records(RECORDS[name])


def full(root: Path = ROOT) -> Set:
    """The committed records and figures."""
    return Set(
        "full", lambda record: root / record.full / f"{record.name}.json", root / "figures" / "full"
    )


def local(folder: Path = LOCAL, root: Path = ROOT) -> Set:
    """The records and figures of a local run."""

    def path(record: Record) -> Path:
        return (folder if record.rerun else root / record.full) / f"{record.name}.json"

    return Set("local", path, folder)


# Reading -----------------------------------------------------------------------------------------


def read(chosen: Set, name: str) -> dict[str, Any]:
    """A record that the set may use.

    Raises
    ------
    ValueError
        Where it is missing, broken, or that of a failed run; in the full set also where it was made
        from code that no commit holds, or with a smaller budget.
    """
    path = chosen.path(name)
    if name == "evidence":
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"read: {path} cannot be read ({error}); run make evidence.") from None
    try:
        record = harness.read_record(path)
    except ValueError as error:
        # Say how this set's record is made; the harness knows the experiment's default alone.
        why = str(error).removeprefix("read_record: ").split(";")[0]
        raise ValueError(f"read: {why}; run {command_of(chosen, name)}.") from None
    if not chosen.local:
        # A record that collects runs may list where each came from.
        runs = [run for run in record["metrics"].get("runs", ()) if "git" in run]
        if any(made["git"]["dirty"] is not False for made in (record["provenance"], *runs)):
            raise ValueError(
                f"read: {path} was made from changes that are in no commit; commit, and run"
                f" {' '.join(record['provenance']['argv'])} again."
            )
        if budget_of(record) not in ("full", "only"):
            raise ValueError(
                f"read: {path} has the budget {budget_of(record)!r}, the paper needs 'full'; run"
                " the experiment with --full."
            )
    return record


def command_of(chosen: Set, name: str) -> str:
    """The command that makes a record."""
    record = RECORDS[name]
    if not record.rerun:
        return f"make {name}"
    if chosen.local:
        return f"python experiments/reproduce.py --only {record.script}"
    study = (
        f" --study {name.removeprefix('loss_curves_')}" if record.script == "loss_curves" else ""
    )
    budget = " --full" if record.full == "results/full" else ""
    return f"python experiments/{record.script}.py{budget}{study}"


def budget_of(record: dict[str, Any]) -> str:
    """``"full"``, ``"default"``, ``"quick"``, or ``"only"`` where the default is the largest."""
    point = record["point"]
    budget = point.get("budget", "quick" if point.get("quick") else "only")
    return budget["name"] if isinstance(budget, dict) else budget


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Drawing -----------------------------------------------------------------------------------------


def draw(
    chosen: Set, out: Path | None = None, only: Collection[str] = (), workers: int = 2
) -> tuple[list[Path], list[str]]:
    """Draw the figures of the set, of all its records or of some.

    Writes ``sources.json`` beside them: for each figure the SHA-256 of its record and of the PDF.

    Returns
    -------
    list of Path, list of str
        The files; and the records that are missing.
    """
    out = out or chosen.figures
    wanted = [
        record for record in RECORDS.values() if record.script and (not only or record.name in only)
    ]
    there = [
        record
        for record in wanted
        if chosen.records(record).exists() and (ROOT / "figures" / f"{record.script}.py").exists()
    ]
    written: list[Path] = []
    sources: dict[str, dict[str, str]] = read_sources(out) if only else {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(draw_one, record.script, chosen.records(record), out) for record in there
        ]
        for record, job in zip(there, jobs, strict=True):
            path = chosen.records(record)
            for file in job.result():
                written.append(file)
                if file.suffix == ".pdf":
                    sources[file.stem] = {
                        "record": harness.shown(path),
                        "record_sha256": digest(path),
                        "pdf_sha256": digest(file),
                    }
    harness.write_record(out / SOURCES, dict(sorted(sources.items())))
    return written, [record.name for record in wanted if record not in there]


def read_sources(folder: Path) -> dict[str, dict[str, str]]:
    """``sources.json`` of a folder; empty where there is none."""
    try:
        found: dict[str, dict[str, str]] = json.loads((folder / SOURCES).read_text("utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found


def draw_one(script: str, record: Path, out: Path) -> list[Path]:
    """What one figure script draws from one record."""
    drawn: list[Path] = import_module(f"figures.{script}").draw(record, out)
    return drawn


def stale_figures(chosen: Set) -> dict[str, str]:
    """Figures of the paper that are missing or not those of their records, and why."""
    sources = read_sources(chosen.figures)
    found = {}
    for figure, name in FIGURES.items():
        pdf, record = chosen.figures / f"{figure}.pdf", chosen.path(name)
        if not record.exists():
            continue  # said about the record already
        if not pdf.exists() or figure not in sources:
            found[figure] = NOT_DRAWN
        elif sources[figure]["record_sha256"] != digest(record):
            found[figure] = f"{record.name} changed since it was drawn"
        elif sources[figure]["pdf_sha256"] != digest(pdf):
            found[figure] = "the file is not the one that was drawn"
    return found
