"""Does the text hold together with its table of numbers, its figures and its references?

    python paper/check.py

Everything here reads the sources alone, no record: every number that the text uses has a row and
every row is used; no digit stands in the text that is not a name, or one of the phrases in
allowed.txt; figures are in the table of figures; references are cited, and those cited exist.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paper import sets
from paper.published import PUBLISHED

PAPER = Path(__file__).resolve().parent


def sources(paper: Path = PAPER) -> dict[str, str]:
    """The text by file, without comments: what stands between \\begin{document} and its end."""
    main = without_comments((paper / "main.tex").read_text(encoding="utf-8"))
    found = {"main.tex": main.split(r"\begin{document}", 1)[1]}
    for path in sorted((paper / "sections").glob("*.tex")):
        found[f"sections/{path.name}"] = without_comments(path.read_text(encoding="utf-8"))
    return found


def without_comments(text: str) -> str:
    return re.sub(r"(?<!\\)%.*", "", text)


def squeezed(text: str) -> str:
    """Line breaks as spaces."""
    return re.sub(r"\s+", " ", text)


def used(texts: dict[str, str], macro: str) -> list[str]:
    """Arguments of a macro, in order, a line break counting as a space."""
    pattern = re.compile(rf"\\{macro}\s*\{{([^{{}}]*)\}}")
    return [squeezed(name) for text in texts.values() for name in pattern.findall(text)]


# Numbers -----------------------------------------------------------------------------------------


def numbers(texts: dict[str, str], rows: Sequence[str], published: Sequence[str]) -> list[str]:
    """Numbers that only the text or only the table has."""
    found = []
    for kind, names, has in (
        (
            "number",
            {name for macro in ("n", "body", "claims") for name in used(texts, macro)},
            set(rows),
        ),
        ("published number", set(used(texts, "pub")), set(published)),
    ):
        found += [
            f"the text uses the {kind} {name!r}, which no row has" for name in sorted(names - has)
        ]
        found += [
            f"the row {name!r} is a {kind} that the text does not use"
            for name in sorted(has - names)
        ]
    return found


def records(texts: dict[str, str]) -> list[str]:
    """Records that the text asks for and that no set has."""
    asked = {*used(texts, "when"), *used(texts, "made")} - {"left out", "#1"}
    return [f"the text asks for the record {name!r}, which sets.py does not have"
            for name in sorted(asked - set(sets.RECORDS))]  # fmt: skip


#: Macros whose arguments are names, not text.
_NAMES = (
    "n", "body", "pub", "made", "cite", "ref", "figref", "label", "input", "includegraphics", "bibliography",
    "bibliographystyle", "cmidrule", "url", "csname",
)  # fmt: skip
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z]*(?:[-_/.]?[A-Za-z0-9]+)*")


def allowed(paper: Path = PAPER) -> list[str]:
    """Phrases of allowed.txt; what stands after two spaces and # is the reason."""
    found = []
    for line in (paper / "allowed.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            phrase, mark, reason = line.partition("  # ")
            if not mark or not reason.strip():
                raise ValueError(f"allowed.txt: {line!r} has no reason; write  phrase  # reason.")
            found.append(phrase.strip())
    return found


def typed_digits(texts: dict[str, str], phrases: Sequence[str]) -> list[str]:
    """Digits that were typed where a measured value may belong, with what stands around them."""
    macros = "|".join(_NAMES)
    names = (
        rf"\\(?:{macros})\s*(?:\[[^\]]*\])?\{{[^{{}}]*\}}",
        r"\\(?:wide|narrow)\{[^{}]*\}\{[^{}]*\}\{[^{}]*\}",
        r"\\claims\{[^{}]*\}\{[^{}]*\}",
        r"\\(?:begin|end)\{[^{}]*\}(?:\[[^\]]*\])?",
        r"\\begin\{tabular\}.*?\\toprule",
        r"\\when\{[^{}]*\}",
        r"\\multicolumn\{\d\}\{\w\}",
        r"\\vspace\{[^{}]*\}",
        r"\\setlength\{[^{}]*\}\{[^{}]*\}",
        r"[0-9.]+\\(?:textwidth|columnwidth)",
        r"\\ifcsname .*?\\endcsname",
        r"\\csname .*?\\endcsname",
        r"\\[A-Za-z]+",
    )
    found = []
    for name, text in texts.items():
        whole = bare = squeezed(text)
        for phrase in sorted(phrases, key=len, reverse=True):
            bare = bare.replace(phrase, " " * len(phrase))
        for pattern in names:
            bare = re.sub(pattern, lambda hit: " " * len(hit.group()), bare)
        bare = _IDENTIFIER.sub(lambda hit: " " * len(hit.group()), bare)
        for hit in re.finditer(r"\d+(?:[.,]\d+)*", bare):
            around = whole[max(0, hit.start() - 30) : hit.end() + 20]
            found.append(f"{name}: {hit.group()!r} is typed by hand: ...{around}...")
    return found


def unused_phrases(texts: dict[str, str], phrases: Sequence[str]) -> list[str]:
    whole = " ".join(squeezed(text) for text in texts.values())
    return [f"allowed.txt: no text has {phrase!r}" for phrase in phrases if phrase not in whole]


# Figures and references --------------------------------------------------------------------------


def figures(texts: dict[str, str]) -> list[str]:
    """Figures that only the text or only `sets.FIGURES` has, and captions with another's record."""
    shown = {
        figure: record
        for text in texts.values()
        for figure, record in re.findall(
            r"\\(?:wide|narrow)\{([^{}]*)\}\{[^{}]*\}\{([^{}]*)\}", text
        )
    }
    plain = {f for f in used(texts, r"includegraphics(?:\[[^\]]*\])?") if f != "#1"}
    found = [f"the text shows {name!r}, which is not in sets.FIGURES"
             for name in sorted((set(shown) | plain) - set(sets.FIGURES))]  # fmt: skip
    found += [f"{name!r} is in sets.FIGURES and not in the text"
              for name in sorted(set(sets.FIGURES) - set(shown) - plain)]  # fmt: skip
    found += [f"the caption of {name!r} names the record {record!r}, not {sets.FIGURES[name]!r}"
              for name, record in shown.items() if sets.FIGURES.get(name, record) != record]  # fmt: skip
    return found


def references(texts: dict[str, str], bib: str) -> list[str]:
    """Keys that only the text or only refs.bib has; entries that say not where they are."""
    cited = {key.strip() for keys in used(texts, "cite") for key in keys.split(",")}
    cited |= {key for _, key, _ in PUBLISHED.values()}
    entries = dict(re.findall(r"@\w+\{(\w+),(.*?)\n\}", bib, flags=re.DOTALL))
    found = [f"{key!r} is cited and not in refs.bib" for key in sorted(cited - set(entries))]
    found += [f"{key!r} is in refs.bib and not cited" for key in sorted(set(entries) - cited)]
    found += [f"{key!r} in refs.bib has no arXiv number, DOI or address"
              for key, body in entries.items() if not re.search(r"arXiv:|doi:|\\url", body)]  # fmt: skip
    return found


def labels(texts: dict[str, str]) -> list[str]:
    """References to labels that nothing has."""
    made = set(used(texts, "label")) | {f"fig:{name}" for name in sets.FIGURES}
    made |= {f"tab:{name}" for text in texts.values()
             for name in re.findall(r"\\claims\{[^{}]*\}\{([^{}]*)\}", text)}  # fmt: skip
    asked = {*used(texts, "ref"), *(f"fig:{name}" for name in used(texts, "figref"))}
    return [f"\\ref{{{name}}} points nowhere" for name in sorted(asked - made)]


def everything(paper: Path = PAPER) -> list[str]:
    """All that is wrong."""
    from paper.rows import ROWS

    texts = sources(paper)
    phrases = allowed(paper)
    bib = (paper / "refs.bib").read_text(encoding="utf-8")
    return [
        *numbers(texts, [row.name for row in ROWS], list(PUBLISHED)),
        *records(texts),
        *typed_digits(texts, phrases),
        *unused_phrases(texts, phrases),
        *figures(texts),
        *references(texts, bib),
        *labels(texts),
    ]


def main() -> int:
    found = everything()
    for line in found:
        print(f"paper/check.py: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
