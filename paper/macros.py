"""Numbers of the paper: from a table of rows (`paper.rows`) to LaTeX macros.

A number stands in the text as ``\\n{name}``. This module looks every row up in its record, formats it
and writes ``numbers.tex``. A row whose record is missing, failed, from uncommitted code or of a
smaller budget stops the build, named; so does one whose place in the record is gone. Only a partial
build leaves such rows out, and then the text's sections about that record too.

    python paper/macros.py                     # the committed records -> paper/build/full/numbers.tex
    python paper/macros.py --set local --partial
    python paper/macros.py --reviewed          # the text was read against these records: remember it
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness
from paper import sets
from paper.published import PUBLISHED

PAPER = Path(__file__).resolve().parent
REVIEWED = PAPER / "reviewed.json"  # SHA-256 of each record that the text was last read against


@dataclass(frozen=True)
class Row:
    """One number.

    Parameters
    ----------
    name : str
        As the text has it, ``\\n{name}``.
    record : str
        A name of `sets.RECORDS`.
    where : str or callable
        Place in the record (`look_up`), or a function of the record.
    form : callable
        From the value to LaTeX, unit included.
    """

    name: str
    record: str
    where: str | Callable[[dict[str, Any]], Any]
    form: Callable[[Any], str]


# Looking up --------------------------------------------------------------------------------------

_PART = re.compile(r"([A-Za-z0-9_]+)((?:\[[^\]]*\])*)(?:\.|$)")


def look_up(record: Any, where: str) -> Any:
    """The value at a place: keys with dots, and ``[key=value,...]`` for the one such row of a list.

    Examples
    --------
    >>> record = {"metrics": {"rows": [{"arm": "a", "n": 1}, {"arm": "b", "n": 2}]}}
    >>> look_up(record, "metrics.rows[arm=b].n")
    2

    Raises
    ------
    LookupError
        Where a key is missing, or not exactly one row fits.
    """
    found, at = record, 0
    while at < len(where):
        part = _PART.match(where, at)
        if part is None:
            raise LookupError(f"cannot read {where[at:]!r}")
        key, choices = part.groups()
        if not isinstance(found, dict) or key not in found:
            raise LookupError(f"no key {key!r}")
        found = found[key]
        for choice in re.findall(r"\[([^\]]*)\]", choices):
            wanted = dict(pair.split("=", 1) for pair in re.split(r",(?=\w+=)", choice))
            fits = [row for row in found if all(str(row[k]) == v for k, v in wanted.items())]
            if len(fits) != 1:
                raise LookupError(f"{len(fits)} rows fit [{choice}], not one")
            found = fits[0]
        at = part.end()
    if found is None:
        raise LookupError("the record has null there")
    return found


# Forms -------------------------------------------------------------------------------------------


def whole(value: float) -> str:
    """44{,}000"""
    return f"{int(value):,}".replace(",", "{,}")


def fixed(digits: int, unit: str = "") -> Callable[[float], str]:
    """A number with so many decimals, and a unit after a thin space."""

    def form(value: float) -> str:
        if not math.isfinite(value):
            raise ValueError(f"{value} is no number to print")
        return minus(f"{value:.{digits}f}") + (f"\\,{unit}" if unit else "")

    return form


def signed(digits: int, unit: str = "") -> Callable[[float], str]:
    """As `fixed`, with a sign."""

    def form(value: float) -> str:
        return minus(f"{value:+.{digits}f}") + (f"\\,{unit}" if unit else "")

    return form


def minus(text: str) -> str:
    """A true minus sign, breakable from nothing."""
    return text.replace("-", "$-$").replace("+", "$+$")


def percent(share: float) -> str:
    """A share in percent, as the tables of the experiments have it."""
    return harness.percent(share).replace("<", "$<$").replace(">", "$>$") + "\\,\\%"


def percents(digits: int) -> Callable[[float], str]:
    """A share in percent with a sign, unless it is zero, and so many decimals."""

    def form(share: float) -> str:
        rounded = round(100 * share, digits)
        text = f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"
        return minus(text) + "\\,\\%"

    return form


def scientific(value: float) -> str:
    """1.2 * 10^-5"""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"${mantissa}\\cdot 10^{{{int(exponent)}}}$"


def interval(digits: int) -> Callable[[Sequence[float]], str]:
    """[low, high]"""
    return lambda ends: f"[{minus(f'{ends[0]:+.{digits}f}')}, {minus(f'{ends[1]:+.{digits}f}')}]"


def words(value: str) -> str:
    """Text, escaped."""
    return escape(str(value))


def code(value: str) -> str:
    """A name in typewriter."""
    return f"\\texttt{{{escape(str(value))}}}"


def raw(value: str) -> str:
    """LaTeX as it is: the body of a table."""
    return value


def escape(text: str) -> str:
    for plain in "&%$#_{}":
        text = text.replace(plain, f"\\{plain}")
    return text.replace("~", "\\textasciitilde{}").replace("^", "\\textasciicircum{}")


# Writing -----------------------------------------------------------------------------------------


def values(
    rows: Sequence[Row], chosen: sets.Set, partial: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """LaTeX by name; and records that are left out, with why (a partial build only).

    Raises
    ------
    ValueError
        Naming every number that cannot be had, and why.
    """
    names = [row.name for row in rows]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"numbers: two rows each are named {', '.join(sorted(twice))}")
    records: dict[str, dict[str, Any]] = {}
    lost: dict[str, str] = {}
    for name in dict.fromkeys(row.record for row in rows):
        try:
            records[name] = sets.read(chosen, name)
        except ValueError as error:
            lost[name] = str(error)
    found: dict[str, str] = {}
    wrong: list[str] = []
    if not partial:
        for name, why in lost.items():
            had = ", ".join(f"\\n{{{row.name}}}" for row in rows if row.record == name)
            wrong.append(f"{why} It has {had}")
    for row in rows:
        if row.record in lost:
            continue
        record = records[row.record]
        try:
            value = look_up(record, row.where) if isinstance(row.where, str) else row.where(record)
            found[row.name] = row.form(value)
        except Exception as error:
            place = f" at {row.where}" if isinstance(row.where, str) else ""
            wrong.append(
                f"\\n{{{row.name}}}: record {row.record}{place}: {type(error).__name__}: {error}"
            )
    if wrong:
        raise ValueError("numbers that cannot be had:\n  " + "\n  ".join(wrong))
    return found, lost


def made_by(chosen: sets.Set, name: str) -> str:
    """The end of a caption: command, commit, and what kind of run it was."""
    origin = sets.read(chosen, name)["provenance"]
    commits = ", ".join(
        f"\\texttt{{{commit[:7]}}}" for commit in (origin["git"]["commit"] or "none").split()
    )
    argv = [word for word in origin["argv"] if word]
    if chosen.local:  # the folder of a local run is no part of how to make it
        argv = argv[: argv.index("--out")] if "--out" in argv else argv
    text = f"\\texttt{{python {escape(' '.join(argv))}}}, commit {commits}."
    return text + (" Local run, exploratory." if chosen.local and sets.RECORDS[name].rerun else "")


def tex(chosen: sets.Set, rows: Sequence[Row], partial: bool = False) -> str:
    """The text of numbers.tex: the same records and rows give the same bytes."""
    found, lost = values(rows, chosen, partial)
    lines = ["% Made by paper/macros.py from records. Do not edit."]
    lines.append(f"\\localset{'true' if chosen.local else 'false'}")
    lines.append(f"\\partial{'true' if partial else 'false'}")
    lines += [define(f"p:{name}", text) for name, (text, _, _) in sorted(PUBLISHED.items())]
    for name in sorted(found):
        lines.append(define(f"n:{name}", found[name]))
    for name in sets.RECORDS:
        if name in lost or not chosen.path(name).exists():
            continue
        lines.append(define(f"have:{name}", ""))
        if name != "evidence":
            lines.append(define(f"made:{name}", made_by(chosen, name)))
    lines += [
        define(f"drawn:{figure}", "")
        for figure in sets.FIGURES
        if (chosen.figures / f"{figure}.pdf").exists()
    ]
    absent = [name for name in lost if name in {row.record for row in rows}]
    if absent:
        listed = ", ".join(f"\\texttt{{{escape(name)}}}" for name in absent)
        lines.append(define("n:left out", listed))
        lines.append(define("have:left out", ""))
    return "\n".join(lines) + "\n"


def define(name: str, body: str) -> str:
    return f"\\expandafter\\def\\csname {name}\\endcsname{{{body}}}"


# The text was read against these records ---------------------------------------------------------


def records_used(rows: Sequence[Row]) -> list[str]:
    return sorted({row.record for row in rows} | set(sets.FIGURES.values()))


def review(rows: Sequence[Row], path: Path = REVIEWED) -> None:
    """Remember the committed records as those that the text was read against."""
    chosen = sets.full()
    have = [name for name in records_used(rows) if chosen.path(name).exists()]
    harness.write_record(path, {name: sets.digest(chosen.path(name)) for name in have})


def unreviewed(rows: Sequence[Row], path: Path = REVIEWED) -> list[str]:
    """Records that are not those that the text was last read against."""
    chosen = sets.full()
    seen = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return [
        name
        for name in records_used(rows)
        if chosen.path(name).exists() and seen.get(name) != sets.digest(chosen.path(name))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    from paper.rows import ROWS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("full", "local"), default="full", help="default: full")
    parser.add_argument("--records", type=Path, default=sets.LOCAL, metavar="DIR",
                        help="of the local set (default: results/local)")  # fmt: skip
    parser.add_argument("--partial", action="store_true", help="leave out what has no record")
    parser.add_argument("--reviewed", action="store_true",
                        help="the text was read against the committed records")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: paper/build/<set>/")
    args = parser.parse_args(argv)
    if args.reviewed:
        review(ROWS)
        print(f"{harness.shown(REVIEWED)}: the text was read against these records")
        return 0
    chosen = sets.full() if args.set == "full" else sets.local(args.records.resolve())
    out = args.out or PAPER / "build" / args.set / "numbers.tex"
    try:
        text = tex(chosen, ROWS, args.partial)
    except ValueError as error:
        print(f"paper/macros.py: {error}", file=sys.stderr)
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{text.count('csname n:')} numbers in {harness.shown(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
