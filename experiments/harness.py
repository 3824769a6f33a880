"""What all experiments share: arguments, progress, records, tables.

An experiment asks one question. Its *point* is plain values (sizes, seed, formats); its *metrics*
are what it measured; both go into one *record*, a JSON file that also says how it came about (git
commit, versions, machine, seconds, arguments). Figures and the paper read records and nothing else.
A run that fails leaves a record that says ``"failed"`` and why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1  # of the record's outer layout; raise it when a key changes its meaning
LOG_SECONDS = 60  # between lines of progress in a log

# Arguments ---------------------------------------------------------------------------------------


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps a description's line breaks and names the defaults."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        said = action.default in (None, False, argparse.SUPPRESS) or "(default" in text
        return text if said else f"{text} (default: %(default)s)"


def arguments(description: str, examples: str, full: str | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments that every experiment takes.

    Parameters
    ----------
    description : str
        Usually the experiment's module docstring: ``--help`` is where a user learns what it does.
    examples : str
        Command lines to show at the end, one a line.
    full : str, optional
        Help of ``--full``, where there is such a budget.
    """
    lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    parser = argparse.ArgumentParser(
        description=description, epilog=f"examples:\n{lines}", formatter_class=Help
    )
    parser.add_argument("--quick", action="store_true", help="a small budget: see that it works")
    if full is not None:
        parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="one seed, one result")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="put record and figures here instead of results/ and figures/",
    )
    return parser


def seed(text: str) -> int:
    """A seed from the command line: an integer of at most 32 bits."""
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a seed; allowed are 0 to {(1 << 32) - 1}, for example --seed 1"
        )
    return int(text)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse, and refuse at once what would only fail later: no CUDA, an unusable ``--out``.

    ``args.budget`` is ``"quick"``, ``"default"`` or ``"full"``.
    """
    args = parser.parse_args(argv)
    full = getattr(args, "full", False)
    if args.quick and full:
        parser.error("--quick and --full are two budgets; give one of them")
    args.budget = "quick" if args.quick else "full" if full else "default"
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: this PyTorch sees no CUDA device; use --device cpu")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: is a file; name a directory, for example --out /tmp/study")
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def record_path(args: argparse.Namespace, name: str) -> Path:
    return (args.out or ROOT / "results") / f"{name}.json"


def figures_dir(args: argparse.Namespace) -> Path:
    return args.out or ROOT / "figures"


def home(args: argparse.Namespace) -> Path:
    """Where records of an experiment with ``--full`` go: that budget's are committed."""
    return args.out or ROOT / "results" / ("full" if args.budget == "full" else "local")


def drawings(args: argparse.Namespace) -> Path:
    """Where its figures go."""
    return args.out or (ROOT / "figures" / "full" if args.budget == "full" else home(args))


# Records -----------------------------------------------------------------------------------------


@contextmanager
def recording(
    path: Path, experiment: str, point: dict[str, Any], argv: Sequence[str], device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Run the body and write its record to `path`, whether it succeeds or fails.

    Parameters
    ----------
    path : Path
        The record. It appears whole or not at all: it is written under another name first.
    experiment : str
        Name of the script, without ``.py``.
    point : dict
        What was asked: plain values only.
    argv : sequence of str
        Arguments, for the record.
    device : {"cpu", "cuda"}

    Yields
    ------
    dict
        `metrics`, empty; the body fills it in.

    Raises
    ------
    Exception
        Whatever the body raised, after a record with ``status="failed"`` is in place. An
        interruption (Ctrl-C) leaves the earlier record alone.
    """
    metrics: dict[str, Any] = {}
    origin = provenance(experiment, argv, device)
    started = time.perf_counter()

    def write(status: str, error: str | None, measured: dict[str, Any]) -> None:
        origin["seconds"] = round(time.perf_counter() - started, 1)
        record = {
            "schema": SCHEMA,
            "experiment": experiment,
            "status": status,
            "error": error,
            "point": point,
            "provenance": origin,
            "metrics": measured,
        }
        write_record(path, plain(record))

    try:
        yield metrics
    except Exception as error:
        write("failed", f"{type(error).__name__}: {error}", {})
        raise
    write("ok", None, metrics)


def provenance(experiment: str, argv: Sequence[str], device: str) -> dict[str, Any]:
    """How a record came about: code, versions, machine, command line."""
    return {
        "git": git_state(ROOT),
        "versions": versions(("fpemu", "numpy", "torch", "numba", "matplotlib")),
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "argv": [f"experiments/{experiment}.py", *argv],
        "seconds": None,
    }


def git_state(root: Path) -> dict[str, Any]:
    """Commit and whether files differ from it; ``None`` for both outside a git checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A record or figure that this very run replaces does not make the code dirty.
    changed = git(
        "status", "--porcelain", "--", ".", ":!results", ":!figures/*.pdf", ":!figures/*.png"
    )
    return {
        "commit": git("rev-parse", "--verify", "--quiet", "HEAD"),
        "dirty": None if changed is None else changed != "",
    }


def versions(names: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            # Run from a checkout, not installed: then the module says it.
            found[name] = getattr(sys.modules.get(name), "__version__", None)
    return found


def device_name(device: str) -> str:
    """Name of the GPU, or of the CPU where that is what computes."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write JSON under a temporary name, then rename: readers see the old file or the new."""
    text = dumps(record) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_record(path: Path, experiment: str | None = None) -> dict[str, Any]:
    """A record that says ``"ok"``, of a certain experiment or of any.

    Raises
    ------
    ValueError
        Where the file is no record, is the record of a failure, or of another experiment.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"read_record: there is no {path}; run the experiment first, for example"
            f" python experiments/{path.stem}.py"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"read_record: {path} is not JSON ({error}); run the experiment again."
        ) from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(
            f"read_record: {path} is not a record of schema {SCHEMA}; run the experiment again."
        )
    if record["status"] != "ok":
        raise ValueError(
            f"read_record: {path} records a failure ({record['error']}); run the experiment again."
        )
    if experiment is not None and record["experiment"] != experiment:
        raise ValueError(
            f"read_record: {path} is a record of {record['experiment']!r}, not of {experiment!r};"
            f" name a record of experiments/{experiment}.py."
        )
    return record


def plain(value: Any, digits: int = 6) -> Any:
    """JSON's view of a value: six significant digits, None for NaN and infinity, lists, dicts."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, digits) for item in value]
    if hasattr(value, "item"):  # numpy and torch scalars
        return plain(value.item(), digits)
    return value


def dumps(value: Any, depth: int = 3, indent: int = 0) -> str:
    """JSON whose first `depth` levels are spread over lines: one row of a table is one line."""
    scalars = isinstance(value, list) and not any(isinstance(v, (dict, list)) for v in value)
    if depth == 0 or not isinstance(value, (dict, list)) or not value or scalars:
        return json.dumps(value, allow_nan=False)
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {dumps(v, depth - 1, indent + 1)}" for k, v in value.items()]
    else:
        items = [dumps(v, depth - 1, indent + 1) for v in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    pad = "\n" + " " * (indent + 1)
    return first + pad + f",{pad}".join(items) + "\n" + " " * indent + last


# Terminal ----------------------------------------------------------------------------------------


@contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr; yields ``advance(amount=1, note="")``.

    Where stderr is no terminal (a log), a line a minute and one at the end.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=total, note="")
        shown, said = "", time.monotonic()

        def line() -> None:
            screen.print(f"{title} {bar.tasks[0].completed:g}/{total} {shown}", highlight=False)

        def advance(amount: float = 1, note: str | None = None) -> None:
            nonlocal shown, said
            shown = shown if note is None else note
            bar.update(task, advance=amount, note=shown)
            if bar.disable and time.monotonic() - said >= LOG_SECONDS:
                said = time.monotonic()
                line()

        yield advance
        if bar.disable:
            line()


def console() -> Console:
    """Standard output, at most 80 columns wide so that tables look the same everywhere."""
    out = Console(highlight=False)
    return out if out.width <= 80 else Console(highlight=False, width=80)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table: names left, numbers right."""
    made = Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def shown(path: Path) -> str:
    """A path as a user would type it from the checkout."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def percent(share: float) -> str:
    """A share as percent in at most five characters: exact 0 and 100 stand alone."""
    value = 100 * share
    if value in (0, 100):
        return f"{value:.0f}"
    if value < 0.001:
        return "<.001"
    if value >= 99.95:
        return ">99.9"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
