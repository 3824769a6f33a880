"""Makes fpemu/evidence.json and docs/evidence.md from the tables and records: `make evidence`.

    python docs/make_evidence.py

Every number is taken from a record (results/differential.json), a table (units, recipes, casts) or
a test that counts it. A dialect that no library was run for is a *model*, whatever its source.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fpemu import formats
from fpemu.cvt import FORMS
from fpemu.gemm.recipes import RECIPES
from fpemu.gemm.units import UNITS
from fpemu.hw import gemms
from fpemu.hw.instructions import INSTRUCTIONS, ROUNDINGS, Instruction
from fpemu.labels import LABELS, Evidence

RECORD = ROOT / "results" / "differential.json"
HARDWARE = ROOT / "results" / "hardware"
DATA = ROOT / "fpemu" / "evidence.json"
PAGE = ROOT / "docs" / "evidence.md"

#: Inputs of tests/exhaustive/test_sixteen_bit.py: all of float16 and bfloat16, NaN apart for int8.
SIXTEEN_BIT = dict.fromkeys(formats.TABLE, 2 << 16) | {"int8": (2 << 16) - 2300}

#: What the label of a format does not cover.
NOTES = {
    "e8m0": "zero and negatives: 0x00 and 0xFF here; torch and ml_dtypes differ among themselves",
    "nvfp4": "not compared: -0 (the reference writes 0, the hardware cast and fpemu 8) and NaN",
    "nvfp4/2d": "not compared: -0 (the reference writes 0, the hardware cast and fpemu 8) and NaN",
    "nvfp4/te-ref": "the reference is not the kernel: it writes 0 for -0 and for NaN",
}
#: Why nothing was run.
UNRUN = {
    "nvfp4/1level": "TransformerEngine's block rule with S = 1; no library has it",
    "nvfp4/te-unfused": "CUDA kernels, read and not run",
    "nvfp4/te-fast": "CUDA kernel, read and not run",
    "int8_tensor": "fpemu's own: the FP8 rule with 127",
}
_READ = "kernels or code read and not run"

#: Overflow of a cast instruction in words of `quantize`.
_OVERFLOW = {True: "sat", False: "nonsat"}
#: Paths of results/hardware/ that run single matrix instructions.
_SINGLE = ("mma.sync", "tl.dot", "tl.dot_scaled")


def element_rows() -> Iterator[Evidence]:
    for name, row in formats.TABLE.items():
        if isinstance(row, formats.Format):
            yield Evidence(
                name, "spec-verified",
                "exact rational arithmetic, each rounding and overflow mode",
                SIXTEEN_BIT[name], "inputs", row.source, NOTES.get(name, ""),
            )  # fmt: skip


# Block formats and dialects ------------------------------------------------------------------------


def live_counts(record: dict[str, Any], name: str) -> tuple[list[str], list[int]]:
    """(libraries, sums over families of the record's columns) of one name."""
    metrics = record["metrics"]
    libraries, sums = [], [0] * len(metrics["columns"])
    for library, dialects in metrics["live"].items():
        if name in dialects:
            version = metrics["libraries"][library]["version"]
            libraries.append(f"{library.removesuffix('-git')} {version}")
            for numbers in dialects[name].values():
                sums = [a + b for a, b in zip(sums, numbers, strict=True)]
    return libraries, sums


def recorded_counts(record: dict[str, Any], name: str) -> tuple[int, int]:
    """(blocks recorded from a library that was run, blocks evaluated from a formula), all equal."""
    run = formula = 0
    for key, row in record["metrics"]["recorded"].items():
        if key.split(" < ")[0] == name and not row["differing"]:
            if re.search(r"\bmodel\b|re-expressed", row["version"]):
                formula += row["blocks"]
            else:
                run += row["blocks"]
    return run, formula


def block_rows(record: dict[str, Any]) -> Iterator[Evidence]:
    assert record["status"] == "ok", "a record of differences is no evidence"
    for name, row in formats.TABLE.items():
        if isinstance(row, formats.BlockFormat):
            yield block_row(record, name, row)


def block_row(record: dict[str, Any], name: str, row: formats.BlockFormat) -> Evidence:
    libraries, (blocks, excepted, scales, _, codes, _, values, _) = live_counts(record, name)
    run, formula = recorded_counts(record, name)
    if libraries:
        notes = [NOTES[name]] if name in NOTES else []
        if not codes:
            notes.append("the library gives values and no codes: those were compared")
        elif not values:
            notes.append("the library's decoding was not compared")
        if not scales:
            notes.append("its scale bytes were not compared, only what they decode to")
        if excepted:
            notes.append(f"{excepted:,} blocks not compared: {why_excepted(record, name)}")
        if run:
            notes.append(f"{run} recorded blocks equal too")
        what = " and ".join(libraries)
        return Evidence(
            name, "library-verified", what, blocks, "blocks", row.source, "; ".join(notes)
        )
    if run:
        return Evidence(name, "library-verified", "recorded outputs", run, "blocks", row.source)
    if formula:
        return Evidence(
            name, "model", "formula written from the source, not the library run", formula, "blocks",
            row.source,
        )  # fmt: skip
    return Evidence(name, *unrun(record, name), source=row.source)


def unrun(record: dict[str, Any], name: str) -> tuple[Any, str]:
    """(label, why) of a block format that nothing was run for."""
    if name in UNRUN:
        return "model", UNRUN[name]
    if name.startswith("mxint8") and "-" not in name:
        return (
            "spec-verified",
            "the rule in exact rational arithmetic; no library here has MXINT8 so",
        )
    if name.endswith("-cuda"):
        return "model", "as torch is read to compute it eagerly on CUDA; not run"
    dialect = name.partition("/")[2]
    if name.startswith("mx") and any(
        sum(recorded_counts(record, other)) or live_counts(record, other)[0]
        for other in formats.list_formats(f"mx*/{dialect}")
    ):
        return "model", "the library's rule; the library has no such element"
    return "model", _READ


def why_excepted(record: dict[str, Any], name: str) -> str:
    import fnmatch

    found = {
        why
        for library, patterns, why in record["metrics"]["exceptions"]
        if name in record["metrics"]["live"][library]
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    return "; ".join(sorted(found))


# Units, recipes, casts -----------------------------------------------------------------------------


def unit_rows() -> Iterator[Evidence]:
    probed = {row.unit for row in gemms.rows((10, 0)) if row.single}
    for name, unit in UNITS.items():
        label, _, rest = unit.evidence.partition(": ")
        if label == "hardware-verified":
            sets, count = [], 0
            parts = rest.split("; ")
            for part in parts:
                found = re.fullmatch(r"(FP\d\d output on ([\w, ]+)) \(([\d,]+) each\)", part)
                if found:
                    sets.append(found[1])
                    count += len(found[2].split(", ")) * int(found[3].replace(",", ""))
            note = "; ".join(part for part in parts if not part.endswith("each)"))
            yield Evidence(name, label, "; ".join(sets), count, "outputs", unit.source, note)
        elif label == "spec-verified":
            yield Evidence(name, label, "exact rational arithmetic", source=unit.source)
        else:
            unrun = "; its probe assembled, not run" if name in probed else ""
            what = f"the formula of a source; no recordings{unrun}"
            yield Evidence(name, "model", what, source=unit.source)


def recipe_rows() -> Iterator[Evidence]:
    for name, recipe in RECIPES.items():
        measured = name in ("cublaslt.fp8_fast", "cublaslt.fp8_slow")
        yield Evidence(
            name, "model", "the formula of a source; no recordings", source=recipe.source,
            note="six matrices of mmaemu are equal (an emulator, not a GPU)" if measured else "",
        )  # fmt: skip


def cast_rows() -> Iterator[Evidence]:
    for name, row in INSTRUCTIONS.items():
        if not row.random:
            yield Evidence(
                name, "model", _unrun_cast(row), source="PTX ISA 9.1, cvt", note=_cast_note(row)
            )
    for name, form in FORMS.items():
        label, _, what = form.evidence.partition(": ")
        assert label == "model", name
        unrun = "" if "/" in name else "assembled, not run; "
        yield Evidence(
            f"cvt.rs.{name}", "model", unrun + what, source="PTX ISA 9.1, cvt",
            note=f"cvt_rs(x, {name!r}, rbits)",
        )  # fmt: skip


def _unrun_cast(row: Instruction) -> str:
    if "sm_90" in row.targets:
        return "as the PTX ISA describes it; no GPU was run"
    return "assembled, not run; as the PTX ISA describes it"


def _cast_note(row: Instruction) -> str:
    """The call that is the same cast, where one is; else what the answer rests on."""
    if row.relu or row.packed or row.destination == "e8m0":
        return row.source_note
    options = f"rounding={ROUNDINGS[row.rounding]!r}, overflow={_OVERFLOW[row.satfinite]!r}"
    return f"quantize(x, {row.destination!r}, {options})"


# Records of GPUs -----------------------------------------------------------------------------------


def hardware() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Name -> (GPU, row of a record of `fpemu verify`): cast instructions by what evidence calls
    them, matrix instructions by unit."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(HARDWARE.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        gpu = record["gpu"]["name"].removeprefix("NVIDIA ")
        for row in record["rows"]:
            if row["inputs"] and row["part"] == "casts":
                name = row["name"]
                if INSTRUCTIONS[name].random:
                    name = f"cvt.rs.{INSTRUCTIONS[name].form}"
                found.setdefault(name, []).append((gpu, row))
            elif row["inputs"] and row["path"] in _SINGLE:
                found.setdefault(row["unit"], []).append((gpu, row))
    return found


def with_hardware(row: Evidence, runs: list[tuple[str, dict[str, Any]]]) -> Evidence:
    """A row with what GPUs gave: a label where all of it is equal, a remark where it is not."""
    differ = [
        f"{gpu}, {run['name']}: {run['different']:,} of {run['inputs']:,} differ"
        for gpu, run in runs
        if run["different"] or run.get("failed")
    ]
    if differ or not runs:
        notes = [row.note, *differ] if row.note else differ
        return replace(row, note="; ".join(notes))
    gpus = ", ".join(dict.fromkeys(gpu for gpu, _ in runs))
    paths = " and ".join(dict.fromkeys(run["path"] for _, run in runs))
    before = [row.what] if row.label == "hardware-verified" else []
    return replace(
        row, label="hardware-verified", what="; ".join([*before, f"{paths} on {gpus}"]),
        count=row.count + sum(run["inputs"] for _, run in runs), of=row.of or "inputs",
    )  # fmt: skip


# Output --------------------------------------------------------------------------------------------


def rows(record: dict[str, Any]) -> dict[str, Evidence]:
    found: dict[str, Evidence] = {}
    runs = hardware()
    for row in (*element_rows(), *block_rows(record), *unit_rows(), *recipe_rows(), *cast_rows()):
        assert row.label in LABELS and row.name not in found, row.name
        found[row.name] = with_hardware(row, runs.get(row.name, []))
    return found


def as_json(table: dict[str, Evidence]) -> str:
    keys = ("label", "what", "count", "of", "source", "note")
    defaults = Evidence("", "model", "")
    lines = []
    for name, row in table.items():
        data = {
            key: getattr(row, key) for key in keys
            if key in ("label", "what") or getattr(row, key) != getattr(defaults, key)
        }  # fmt: skip
        lines.append(f" {json.dumps(name)}: {json.dumps(data)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


HEAD = """# What each name rests on

`fpemu.evidence(name)` gives a row of this page; the page and that table are made from records
(`make evidence`), and tests fail where they claim more than the records show.

* **hardware-verified**: equal to recorded outputs of that GPU, bit for bit; or run on it beside the emulator
  (`fpemu verify`, results/hardware/), with no bit different.
* **library-verified**: equal to that version of the library, which was run on a CPU: scale bytes, codes
  and, where it says so, decoded values, at zero tolerance.
* **spec-verified**: equal to exact rational arithmetic by the published definition.
* **model**: a formula that was read in a source, and not run.

The libraries last ran on {date} with seed {seed} (`make differential`, results/differential.json): blocks of
Gaussian and log-uniform values in float32 and bfloat16, exact ties, scale boundaries, zeros of both
signs, NaN, Inf, huge and subnormal values, tiny and foreign tensor amaxes.

```python
>>> import fpemu
>>> print(fpemu.evidence("nvfp4/te-fast"))
{example}
>>> fpemu.evidence("volta.hmma.fp16").count
2000

```
"""


def as_page(table: dict[str, Evidence], record: dict[str, Any]) -> str:
    date, seed = record["provenance"]["date"], record["point"]["seed"]
    parts = [HEAD.format(date=date, seed=seed, example=table["nvfp4/te-fast"])]
    kinds = {
        "Element formats": [r.name for r in element_rows()],
        "Block formats and dialects": [r.name for r in block_rows(record)],
        "Tensor-core units": [r.name for r in unit_rows()],
        "GEMM recipes": [r.name for r in recipe_rows()],
        "Cast instructions": [r.name for r in cast_rows()],
    }
    for title, names in kinds.items():
        parts.append(f"\n## {title}\n")
        parts.append(
            "| name | label | against | compared | remarks | source |\n|---|---|---|---|---|---|"
        )
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name in names:
            r = table[name]
            groups.setdefault((r.label, r.what, r.count, r.of, r.note, r.source), []).append(name)
        for (label, what, count, of, note, source), members in groups.items():
            compared = f"{count:,} {of}" + (" each" if len(members) > 1 else "") if count else ""
            cells = (" ".join(f"`{m}`" for m in members), label, what, compared, note, source)
            parts.append("| " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


def write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def main() -> int:
    if not RECORD.exists():
        print(f"There is no {RECORD}: run make differential first.", file=sys.stderr)
        return 1
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    table = rows(record)
    write(DATA, as_json(table))
    write(PAGE, as_page(table, record))
    counts = {label: sum(row.label == label for row in table.values()) for label in LABELS}
    print(", ".join(f"{count} {label}" for label, count in counts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
