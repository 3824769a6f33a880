"""Build the paper as a PDF.

    python paper/build.py                      # committed records -> paper/build/full/fpemu.pdf
    python paper/build.py --set local          # results/local -> results/local/fpemu-local.pdf
    python paper/build.py --partial            # leave out what has no record yet, and say so

Checks the text, makes the numbers, checks that figures and text belong to the records, runs latexmk.
Exit status 1 where anything is missing, failed or stale; 3 where LaTeX is absent.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness
from paper import check, macros, sets
from paper.rows import ROWS

PAPER = Path(__file__).resolve().parent
PACKAGES = "latexmk texlive-latex-recommended texlive-fonts-recommended"
NO_LATEX = (
    f"there is no latexmk here; on Debian: apt-get install --no-install-recommends {PACKAGES}"
)


def problems(chosen: sets.Set, partial: bool = False) -> list[str]:
    """What stands between the set and a paper, other than numbers."""
    found = check.everything()
    for figure, why in sets.stale_figures(chosen).items():
        if not (partial and why == sets.NOT_DRAWN):
            found.append(f"figure {figure}: {why}; run make figures")
    if not chosen.local and not partial:
        found += [
            f"record {name}: it changed since the text was read against it; read the text again, then"
            " python paper/macros.py --reviewed"
            for name in macros.unreviewed(ROWS)
        ]
    return found


def latex(folder: Path, figures: Path) -> str | None:
    """Run latexmk in a folder that holds numbers.tex; returns what went wrong, or None."""
    env = {
        **os.environ,
        "TEXINPUTS": os.pathsep.join(["", str(folder), str(PAPER), str(figures), ""]),
        "BIBINPUTS": f"{PAPER}{os.pathsep}",
        "SOURCE_DATE_EPOCH": "0",  # no date in the file
        "FORCE_SOURCE_DATE": "1",
        "max_print_line": "1000",
    }
    done = subprocess.run(
        ["latexmk", "-r", str(PAPER / ".latexmkrc"), "-jobname=fpemu", str(PAPER / "main.tex")],
        cwd=folder, env=env, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    log = folder / "fpemu.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if done.returncode != 0:
        first = next((line for line in text.splitlines() if re.match(r".*:\d+: |! ", line)), "")
        return f"latexmk failed: {first or done.stderr.strip()[-300:]} (all of it: {log})"
    undefined = re.findall(r"(?:Reference|Citation) `[^']*'.*?undefined", text)
    if undefined:
        return f"undefined: {'; '.join(sorted(set(undefined)))}"
    return None


def build(chosen: sets.Set, out: Path, partial: bool = False) -> list[str]:
    """Build the PDF; returns what is wrong, nothing where it was built."""
    wrong = problems(chosen, partial)
    try:
        text = macros.tex(chosen, ROWS, partial)
    except ValueError as error:
        return [*wrong, str(error)]
    if wrong:
        return wrong
    folder = PAPER / "build" / chosen.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.tex").write_text(text, encoding="utf-8")
    if shutil.which("latexmk") is None:
        return [NO_LATEX]
    failed = latex(folder, chosen.figures)
    if failed:
        return [failed]
    if out != folder / "fpemu.pdf":
        draft = out.with_name(f".{out.name}.{os.getpid()}")
        shutil.copyfile(folder / "fpemu.pdf", draft)
        os.replace(draft, out)
    return []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("full", "local"), default="full", help="default: full")
    parser.add_argument("--records", type=Path, default=sets.LOCAL, metavar="DIR",
                        help="of the local set (default: results/local)")  # fmt: skip
    parser.add_argument("--partial", action="store_true", help="leave out what has no record")
    args = parser.parse_args(argv)
    if args.set == "full":
        chosen, out = sets.full(), PAPER / "build" / "full" / "fpemu.pdf"
    else:
        home = args.records.resolve()
        chosen, out = sets.local(home), home / "fpemu-local.pdf"
    wrong = build(chosen, out, args.partial)
    for line in wrong:
        print(f"paper/build.py: {line}", file=sys.stderr)
    if wrong:
        return 3 if wrong == [NO_LATEX] else 1
    print(harness.shown(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
