"""Other libraries on fresh random blocks against fpemu, bit for bit, and the record of it.

    python tests/differential/live.py [--seed N] [--out FILE] [--only LIBRARY]

The libraries run in an environment of their own (`make peers`), each in one process; see
`peer_runner.py`. Its Python is FPEMU_PEERS_PYTHON or ``.venv-peers/bin/python``. The seed is
FPEMU_SEED or a new one each time. `make differential` writes results/differential.json, from which
`fpemu.evidence` takes what it says of dialects.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
from differential.families import Case, cases
from helpers import BF16, as_numpy, bits_of

import fpemu
from experiments import harness
from fpemu import formats

RUNNER = Path(__file__).with_name("peer_runner.py")
RECORD = ROOT / "results" / "differential.json"
LIBRARIES = (
    "torchao", "torchao-git", "nvidia-modelopt", "compressed-tensors", "amd-quark", "fouroversix",
    "fouroversix-git", "transformer-engine", "microxcaling-git",
)  # fmt: skip


class Excepted(NamedTuple):
    """Blocks of a library's dialects that are not compared, and why."""

    library: str
    dialects: tuple[str, ...]  # shell-style patterns
    why: str
    blocks: Callable[
        [np.ndarray, dict[str, np.ndarray]], np.ndarray
    ]  # (x by block, theirs) -> mask

    def covers(self, dialect: str) -> bool:
        return any(fnmatch.fnmatchcase(dialect, pattern) for pattern in self.dialects)


def _has_nan(x: np.ndarray, theirs: dict[str, np.ndarray]) -> np.ndarray:
    return np.isnan(x.astype(np.float32)).any(axis=1)


def _byte_zero(x: np.ndarray, theirs: dict[str, np.ndarray]) -> np.ndarray:
    return theirs["scales"].reshape(-1) == 0


def _nan_scale(x: np.ndarray, theirs: dict[str, np.ndarray]) -> np.ndarray:
    return theirs["scales"].reshape(-1) == 255


def _step_below_normal(x: np.ndarray, theirs: dict[str, np.ndarray]) -> np.ndarray:
    return theirs["scales"].reshape(-1) < 7


def _infinite_values(x: np.ndarray, theirs: dict[str, np.ndarray]) -> np.ndarray:
    float32 = "float32" in theirs
    values = theirs["float32"].view(np.float32) if float32 else theirs["bfloat16"].view(BF16)
    return np.isinf(values.astype(np.float32)).reshape(x.shape).any(axis=1)


#: fpemu's own MX rules, which are a library's but for the codes under a NaN scale.
PLAIN = {
    f"{name}{ours}": f"{name}/torchao-{theirs}"
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")
    for ours, theirs in (("", "floor"), ("/rceil", "rceil"), ("/ceil", "ceil"), ("/even", "even"))
}

#: Each must differ somewhere, or the test says that it is out of date.
EXCEPT = (
    Excepted(
        "compressed-tensors",
        ("mx*",),
        "NaN in a block: its scale hangs on the bits of the NaN, and those on how many blocks torch"
        " reduces at once",
        _has_nan,
    ),
    Excepted(
        "fouroversix",
        ("mxfp4/*",),
        "scale byte 0: release 1.0.5 divides by zero there, commit dadfad6 does not",
        _byte_zero,
    ),
    Excepted(
        "torchao-git",
        tuple(PLAIN),
        "a NaN scale (NaN or Inf in the block, or an amax that `even` rounds past float32): codes 0"
        " under it here, the codes of NaN there",
        _nan_scale,
    ),
    Excepted(
        "torchao-git",
        ("mx*/rceil",),
        "scale byte 0: the quotient A/max is subnormal and rounded there, the rule here is exact",
        _byte_zero,
    ),
    Excepted(
        "amd-quark",
        ("mxint8/*",),
        "scales below 2^-120: the step of the library's fake quantization is 2^-126 at least",
        _step_below_normal,
    ),
    Excepted(
        "amd-quark",
        ("nvfp4/*",),
        "a quotient that overflows: fake quantization lets Inf through, and no code holds it",
        _infinite_values,
    ),
)


def peers_python() -> Path | None:
    """The Python of the peers' environment, or None."""
    named = os.environ.get("FPEMU_PEERS_PYTHON")
    path = Path(named) if named else ROOT / ".venv-peers" / "bin" / "python"
    return path if path.exists() else None


def seed_of(text: str | None) -> int:
    """The seed that was asked for, or a new one."""
    return int(text) if text else int.from_bytes(os.urandom(4), "little")


class Ran(NamedTuple):
    """What a library said: its version and outputs, or why there are none."""

    version: str
    torch: str
    parts: dict[str, np.ndarray]
    refused: dict[str, str]
    absent: str = ""


@cache
def run_library(library: str, seed: int) -> Ran:
    """Run one library on every case of a seed."""
    python = peers_python()
    if python is None:
        return Ran("", "", {}, {}, "there is no environment for the libraries: run make peers")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.npz")
        arrays = {}
        for name, case in cases(seed).items():
            arrays[name] = bits_of(case.x)
            if case.amax is not None:
                arrays[f"{name}.amax"] = np.float32([case.amax]).view(np.uint32)
        np.savez(source, **arrays)  # type: ignore[arg-type]
        done = subprocess.run(
            [str(python), str(RUNNER), library, str(source), str(target)],
            capture_output=True, text=True, timeout=1800,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            if "ModuleNotFoundError" in last or "PackageNotFoundError" in last:
                return Ran("", "", {}, {}, f"{library} is not there ({last}): run make peers")
            raise RuntimeError(f"{library} failed: {last}\n{done.stderr[-2000:]}")
        with np.load(target) as file:
            found = {name: file[name] for name in file}
    about = json.loads(str(found.pop("__about__")))
    return Ran(about["version"], about["torch"], found, about["refused"])


class Row(NamedTuple):
    """One dialect and family: what was compared, what differs, and the first difference."""

    dialect: str
    family: str
    blocks: int  # compared
    excepted: int  # not compared, see EXCEPT
    excepted_differ: int
    scales: tuple[int, int]  # compared, differing
    codes: tuple[int, int]
    values: tuple[int, int]
    first: str = ""

    @property
    def differs(self) -> int:
        return self.scales[1] + self.codes[1] + self.values[1]


def compare(library: str, seed: int, backend: str | None = None) -> list[Row]:
    """Every dialect and family of a library, compared."""
    ran, all_cases = run_library(library, seed), cases(seed)
    rows = []
    given = list(dict.fromkeys(name.split("|")[0] for name in ran.parts))
    plain = [ours for ours, theirs in PLAIN.items() if library == "torchao-git" and theirs in given]
    for dialect in (*given, *plain):
        block = "16/" if dialect.startswith("nvfp4") else "32/"
        source = PLAIN.get(dialect, dialect)
        by_family: dict[str, list[Row]] = {}
        for name, case in all_cases.items():
            theirs = {
                part: ran.parts[f"{source}|{name}|{part}"]
                for part in ("scales", "codes", "float32", "bfloat16")
                if f"{source}|{name}|{part}" in ran.parts
            }
            if theirs and name.startswith(block):
                row = compare_case(library, dialect, case, theirs, backend)
                by_family.setdefault(case.family, []).append(row)
        rows += [_added(group) for group in by_family.values()]
    return rows


def _added(rows: list[Row]) -> Row:
    def pair(what: str) -> tuple[int, int]:
        pairs = [getattr(row, what) for row in rows]
        return sum(p[0] for p in pairs), sum(p[1] for p in pairs)

    def total(what: str) -> int:
        return sum(getattr(row, what) for row in rows)

    first = next((row.first for row in rows if row.first), "")
    return Row(
        rows[0].dialect, rows[0].family, total("blocks"), total("excepted"),
        total("excepted_differ"), pair("scales"), pair("codes"), pair("values"), first,
    )  # fmt: skip


def compare_case(
    library: str,
    dialect: str,
    case: Case,
    theirs: dict[str, np.ndarray],
    backend: str | None = None,
) -> Row:
    """One tensor: scale bytes (E4M3's two NaN are one), codes, and the library's own decoding."""
    fmt = fpemu.get_format(dialect)
    block = fmt.block[-1]
    given = case.amax is not None and fmt.tensor_scaled
    options = {"amax": float(case.amax)} if given else {}
    ours = fpemu.encode(case.x, dialect, backend=backend, **options)
    scales = as_numpy(ours.scales)

    out = np.zeros(case.x.size // block, bool)
    for row in EXCEPT:
        if row.library == library and row.covers(dialect):
            out |= row.blocks(case.x.reshape(-1, block), theirs)
    if fmt.is_2d:  # a scale of theirs is for one row of 16
        out = np.zeros(scales.size, bool)
    by_element = (
        np.zeros(case.x.shape, bool) if fmt.is_2d else out.repeat(block).reshape(case.x.shape)
    )

    counts, first, differ = {}, "", np.zeros(out.shape, bool)
    for what, wrong, skip in _differences(fmt, ours, scales, theirs):
        skipped = out.reshape(wrong.shape) if skip == "scales" else by_element
        kept = wrong & ~skipped
        seen, before = counts.get(skip, (0, 0))
        counts[skip] = (seen + int((~skipped).sum()), before + int(kept.sum()))
        if wrong.size == out.size:
            differ |= wrong.reshape(-1)
        elif not fmt.is_2d:
            differ |= wrong.reshape(-1, block).any(axis=1)
        if kept.any() and not first:
            first = f"{what}: {example(case, kept, block, ours, theirs)}"
    return Row(
        dialect, case.family, int((~out).sum()), int(out.sum()), int((differ & out).sum()),
        counts.get("scales", (0, 0)), counts.get("codes", (0, 0)), counts.get("values", (0, 0)), first,
    )  # fmt: skip


def _differences(
    fmt: Any, ours: Any, scales: np.ndarray, theirs: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, str]]:
    """(title, where they differ, what it counts as) of each part that the library gave."""
    if "scales" in theirs:
        want = theirs["scales"].reshape(scales.shape)
        wrong = scales != want
        if fmt.scale is formats.E4M3:
            wrong &= ~((scales & 127 == 127) & (want & 127 == 127))
        yield "scales", wrong, "scales"
    if "codes" in theirs:
        yield "codes", ours.codes != theirs["codes"].reshape(ours.codes.shape), "codes"
    for name, dtype in (("float32", np.dtype(np.float32)), ("bfloat16", BF16)):
        if name in theirs:
            got, want = fpemu.decode(ours, dtype), theirs[name].reshape(ours.shape).view(dtype)
            # Fake quantization keeps the sign of a zero that an int8 code cannot hold.
            signed = fmt.element.has_negative_zero
            same = bits_of(got) == bits_of(want) if signed else got == want
            yield f"decoded {name}", ~(same | np.isnan(got) & np.isnan(want)), "values"


def example(case: Case, wrong: np.ndarray, block: int, ours: Any, theirs: Any) -> str:
    """The first differing block in full, so that it can be tried by hand."""
    shape = (-1, block) if wrong.size == case.x.size else (-1, 1)
    which = int(np.argwhere(wrong.reshape(shape).any(axis=1))[0, 0])
    bits = bits_of(case.x).reshape(-1, block)[which]
    amax = case.amax if case.amax is not None else np.abs(case.x).astype(np.float32).max()
    lines = [
        f"block {which} of a {case.x.dtype} tensor with amax {np.float32(amax).view(np.uint32):08x}",
        "x      " + " ".join(f"{b:0{2 * bits.dtype.itemsize}x}" for b in bits),
    ]
    parts = {"scales": (ours.scales, 1), "codes": (ours.codes, block)}
    for part, (mine, width) in parts.items():
        mine = as_numpy(mine).reshape(-1, width)[which : which + 1].ravel()
        lines.append(f"ours   {part} " + " ".join(f"{b:02x}" for b in mine))
        if part in theirs:
            their = theirs[part].reshape(-1, width)[which : which + 1].ravel()
            lines.append(f"theirs {part} " + " ".join(f"{b:02x}" for b in their))
    for name, dtype in (("float32", np.dtype(np.float32)), ("bfloat16", BF16)):
        if name in theirs:
            got = bits_of(fpemu.decode(ours, dtype)).reshape(-1, block)[which]
            digits = 2 * dtype.itemsize
            lines.append(f"ours   {name} " + " ".join(f"{b:0{digits}x}" for b in got))
            their = theirs[name].reshape(-1, block)[which]
            lines.append(f"theirs {name} " + " ".join(f"{b:0{digits}x}" for b in their))
    return "\n    ".join(lines)


# The record --------------------------------------------------------------------------------------


def recorded() -> dict[str, dict[str, Any]]:
    """Blocks recorded by others, replayed: how many by implementation, and how many differ."""
    from golden import test_dialect_vectors as golden

    found: dict[str, dict[str, Any]] = {}
    for impl, records in golden.RECORDS.items():
        for record in records:
            dialect = golden.IMPLEMENTATIONS[impl].format(record["format"])
            row = found.setdefault(f"{dialect} < {impl}", {"version": record["version"]})
            row["blocks"] = row.get("blocks", 0) + 1
            differs = bool(golden.differing(record, dialect, "numba"))
            row["differing"] = row.get("differing", 0) + differs
    return found


COLUMNS = ("blocks", "excepted", "scales", "differing", "codes", "differing", "values", "differing")


def table(rows: list[Row]) -> dict[str, dict[str, list[int]]]:
    """dialect -> family -> numbers in the order of COLUMNS."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        numbers = [row.blocks, row.excepted, *row.scales, *row.codes, *row.values]
        found.setdefault(row.dialect, {})[row.family] = numbers
    return found


def stale_exceptions(library: str, rows: list[Row]) -> list[str]:
    """Exceptions of a library whose blocks do not differ any more."""
    return [
        f"{e.dialects}: {e.why}"
        for e in EXCEPT
        if e.library == library
        and not any(row.excepted_differ for row in rows if e.covers(row.dialect))
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=harness.Help)
    parser.add_argument("--seed", default=os.environ.get("FPEMU_SEED"), help="default: a new one")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record")
    parser.add_argument("--only", choices=LIBRARIES, help="one library; writes no record")
    args = parser.parse_args(argv)
    seed, started = seed_of(args.seed), time.perf_counter()
    print(f"seed {seed}")
    libraries, live, wrong, absent = {}, {}, 0, []
    for library in [args.only] if args.only else LIBRARIES:
        ran = run_library(library, seed)
        if ran.absent:
            print(f"{library}: {ran.absent}")
            absent.append(library)
            continue
        rows = compare(library, seed)
        libraries[library] = {"version": ran.version, "torch": ran.torch}
        live[library] = table(rows)
        stale = stale_exceptions(library, rows)
        differing = [row for row in rows if row.differs]
        wrong += len(differing) + len(ran.refused) + len(stale)
        blocks = sum(row.blocks for row in rows)
        print(
            f"{library} {ran.version}: {len(live[library])} dialects, {blocks:,} blocks", end=", "
        )
        print(f"{len(differing)} families differ" if differing else "all equal", flush=True)
        for row in differing:
            print(f"  {row.dialect}, {row.family}: {row.first}")
        for what in (*ran.refused.items(), *stale):
            print(f"  refused or out of date: {what}")
    if args.only:
        return int(wrong > 0)
    if absent:
        print(f"No record written: {', '.join(absent)} absent. Run make peers.")
        return 1
    replayed = recorded()
    wrong += sum(row["differing"] for row in replayed.values())
    provenance = {
        "git": harness.git_state(ROOT),
        "versions": harness.versions(("fpemu", "numpy", "numba", "ml_dtypes")),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "argv": ["tests/differential/live.py", "--seed", str(seed)],
        "seconds": round(time.perf_counter() - started, 1),
    }
    record = {
        "schema": harness.SCHEMA,
        "experiment": "differential",
        "status": "failed" if wrong else "ok",
        "error": f"{wrong} families, refusals or recorded rows differ" if wrong else None,
        "point": {"seed": seed, "backend": "default"},
        "provenance": provenance,
        "metrics": {
            "libraries": libraries,
            "exceptions": [[e.library, list(e.dialects), e.why] for e in EXCEPT],
            "recorded": replayed,
            "columns": list(COLUMNS),
            "live": live,
        },
    }
    write(args.out, record)
    print(f"{args.out}: {record['status']}")
    return int(wrong > 0)


def write(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all; one line a family."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(harness.dumps(record, depth=6) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
