"""Draw every figure from its record.

    python paper/draw.py                       # the committed records, into figures/full
    python paper/draw.py --set local           # those of a local run, beside them
    python paper/draw.py --only dialects       # of one record

The same records give the same bytes. Exit status 1 where a record is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness
from paper import sets


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("full", "local"), default="full", help="default: full")
    parser.add_argument("--records", type=Path, default=sets.LOCAL, metavar="DIR",
                        help="of the local set (default: results/local)")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=(), choices=sorted(sets.RECORDS), metavar="RECORD",
                        help="draw those of these records alone")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the set's own folder")
    args = parser.parse_args(argv)
    chosen = sets.full() if args.set == "full" else sets.local(args.records.resolve())
    try:
        written, missing = sets.draw(chosen, args.out, args.only)
    except ValueError as error:
        print(f"paper/draw.py: {error}", file=sys.stderr)
        return 2
    pages = [path for path in written if path.suffix == ".pdf"]
    print(f"{len(pages)} figures in {harness.shown(args.out or chosen.figures)}")
    if missing:
        print(f"not drawn, no record or no script yet: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
