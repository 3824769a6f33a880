"""Dialects against the libraries themselves, on blocks that are new each time, at zero tolerance.

FPEMU_SEED repeats a run. Where the libraries are not installed the tests skip: `make peers`.
"""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from differential import families, live

import fpemu

SEED = live.seed_of(os.environ.get("FPEMU_SEED"))


@pytest.mark.slow
@pytest.mark.parametrize("library", live.LIBRARIES)
def test_library(library: str) -> None:
    print(f"FPEMU_SEED={SEED} repeats this")
    ran = live.run_library(library, SEED)
    if ran.absent:
        pytest.skip(ran.absent)
    assert not ran.refused
    rows = live.compare(library, SEED)
    assert sum(row.blocks for row in rows) > 5000
    wrong = [f"{row.dialect}, {row.family}: {row.first}" for row in rows if row.differs]
    assert not wrong, f"FPEMU_SEED={SEED}\n" + "\n".join(wrong)
    assert not live.stale_exceptions(library, rows)


# Without the libraries -----------------------------------------------------------------------------


def ours(case: families.Case, dialect: str) -> dict[str, np.ndarray]:
    """What a library would write that agreed with fpemu."""
    fmt = fpemu.get_format(dialect)
    options = {"amax": float(case.amax)} if case.amax is not None and fmt.tensor_scaled else {}
    got = fpemu.encode(case.x, dialect, **options)
    values = fpemu.decode(got, np.float32).view(np.uint32)
    return {"scales": got.scales, "codes": got.codes, "float32": values}


@pytest.mark.parametrize("dialect", ["nvfp4/te-ref", "mxfp4/torchao-floor", "nvfp4/2d"])
def test_every_planted_difference_is_counted(dialect: str) -> None:
    rng = np.random.default_rng(1)
    case = families.Case("gaussian", families.gaussian(rng, 16))
    right = ours(case, dialect)
    row = live.compare_case("none", dialect, case, right)
    assert (row.differs, row.excepted, row.first) == (0, 0, "")
    assert row.codes[0] == row.values[0] == case.x.size
    for part, what in {"scales": "scales", "codes": "codes", "float32": "values"}.items():
        wrong = {name: array.copy() for name, array in right.items()}
        wrong[part].reshape(-1)[-1] ^= 1
        row = live.compare_case("none", dialect, case, wrong)
        assert getattr(row, what)[1] == row.differs == 1
        assert "theirs" in row.first


def test_nan_counts_as_nan_and_zeros_keep_their_sign() -> None:
    case = families.Case("one", np.zeros((1, families.COLUMNS), np.float32))
    right = ours(case, "nvfp4/torchao")  # an all-zero tensor: NaN scales there
    wrong = dict(right, scales=right["scales"] ^ 0x80)
    wrong["float32"] = right["float32"] | 1
    assert np.isnan(right["float32"].view(np.float32)).all()
    assert live.compare_case("none", "nvfp4/torchao", case, wrong).differs == 0
    right = ours(case, "mxfp4/torchao-floor")
    wrong = dict(right, float32=right["float32"] | np.uint32(1 << 31))
    assert live.compare_case("none", "mxfp4/torchao-floor", case, wrong).values[1] == case.x.size


def test_exceptions_leave_out_their_blocks_and_no_others() -> None:
    x = families.gaussian(np.random.default_rng(2), 1)
    x[0, 40] = np.nan
    case = families.Case("NaN", x)
    right = ours(case, "mxfp4/compressed-tensors")
    wrong = dict(right, scales=right["scales"] ^ np.uint8([[0, 1, 0, 0]]))
    row = live.compare_case("compressed-tensors", "mxfp4/compressed-tensors", case, wrong)
    assert (row.blocks, row.excepted, row.excepted_differ, row.differs) == (3, 1, 1, 0)
    row = live.compare_case("compressed-tensors", "mxfp4/compressed-tensors", case, right)
    assert "mx*" in live.stale_exceptions("compressed-tensors", [row])[0]
    for excepted in live.EXCEPT:  # a string would be a tuple of one-letter patterns
        assert excepted.library in live.LIBRARIES
        assert all(fpemu.list_formats(pattern) for pattern in excepted.dialects)
        assert not excepted.covers("e4m3")


def test_families_hold_what_their_names_say() -> None:
    made = families.cases(3)
    again = families.cases(3)
    for name, case in made.items():
        assert np.array_equal(live.bits_of(case.x), live.bits_of(again[name].x))
        assert case.x.shape[1] % 32 == 0
    assert {live.as_numpy(case.x).dtype.name for case in made.values()} == {"float32", "bfloat16"}
    of = {family: [c for c in made.values() if c.family == family] for family in
          ("zero tensor", "NaN in blocks", "tiny tensor amax", "huge", "log-uniform float32")}  # fmt: skip
    assert all((case.x == 0).all() for case in of["zero tensor"])
    assert all(np.isnan(case.x.astype(np.float32)).any() for case in of["NaN in blocks"])
    peaks = [np.abs(case.x.astype(np.float32)).max() for case in of["tiny tensor amax"]]
    assert min(peaks) < 2.0**-145 and max(peaks) < 2.0**-108
    assert max(np.abs(c.x.astype(np.float32)).max() for c in of["huge"]) == np.finfo(np.float32).max
    floor = min(np.abs(c.x[c.x != 0]).min() for c in of["log-uniform float32"])
    assert floor < 2.0**-130
    different = families.cases(4)["16/0"].x
    assert not np.array_equal(different, made["16/0"].x)


# The committed record ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(live.RECORD.read_text(encoding="utf-8"))


def test_record_says_that_nothing_differs(record: dict) -> None:
    assert record["status"] == "ok" and record["error"] is None
    assert set(record["metrics"]["libraries"]) == set(live.LIBRARIES)
    assert record["metrics"]["columns"] == list(live.COLUMNS)
    for dialects in record["metrics"]["live"].values():
        for dialect, by_family in dialects.items():
            assert dialect in fpemu.list_formats()
            for numbers in by_family.values():
                assert numbers[3::2] == [0, 0, 0], dialect
    assert all(row["differing"] == 0 for row in record["metrics"]["recorded"].values())


def test_record_was_made_by_this_code(record: dict) -> None:
    """The same libraries, exceptions and families: otherwise run make differential again."""
    exceptions = [[e.library, list(e.dialects), e.why] for e in live.EXCEPT]
    assert record["metrics"]["exceptions"] == exceptions
    made = families.cases(0).items()
    for dialects in record["metrics"]["live"].values():
        for dialect, by_family in dialects.items():
            block = "16/" if dialect.startswith("nvfp4") else "32/"
            known = {case.family for name, case in made if name.startswith(block)}
            assert set(by_family) <= known
