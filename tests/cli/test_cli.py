"""The ``fpemu`` command: what it prints, and how it fails."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import BLOCKS, ELEMENTS
from typer.testing import CliRunner

import fpemu
from fpemu import cli, selfcheck
from fpemu.formats import Format


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == code, result.output
    return result.output


# formats -----------------------------------------------------------------------------------------


def test_formats_lists_every_format_in_80_columns() -> None:
    lines = run("formats").splitlines()
    assert max(map(len, lines)) <= 80
    first = [line.split()[0] for line in lines if line.strip()]
    for name in (*ELEMENTS, *BLOCKS):
        assert first.count(name) == 1, name


def test_formats_shows_ranges_and_rules() -> None:
    words = next(line.split() for line in run("formats", "e4m3").splitlines() if "448" in line)
    assert words == ["e4m3", "8", "1,4,3", "448", "2^-6", "2^-9", "-", "yes", "yes"]
    words = next(line.split() for line in run("formats", "nvfp4").splitlines() if "16" in line)
    assert words == ["nvfp4", "e2m1", "16", "e4m3", "nvfp4", "fp32", "4.5"]


def test_formats_selects_by_pattern() -> None:
    assert "mxfp4/even" in run("formats", "mxfp4*")
    assert "nvfp4" not in run("formats", "mxfp4*")


# table -------------------------------------------------------------------------------------------

SMALL = [name for name in ELEMENTS if fpemu.get_format(name).bits <= 16]


def rows(name: str) -> list[list[str]]:
    lines = run("table", name).splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:1] == ["code"])
    return [line.split() for line in lines[header + 1 :]]


@pytest.mark.parametrize("name", SMALL)
def test_table_has_every_code_and_exact_values(name: str) -> None:
    fmt = fpemu.get_format(name)
    assert isinstance(fmt, Format)
    found = rows(name)
    assert len(found) == 1 << fmt.bits
    for i, ((code, bits, hexed, decimal), value) in enumerate(
        zip(found, fmt.values().tolist(), strict=True)
    ):
        assert int(code, 16) == i
        assert int(bits.replace("|", ""), 2) == i
        assert len(bits.replace("|", "")) == fmt.bits
        if np.isfinite(value):
            assert Fraction(decimal) == Fraction(value) == Fraction(float.fromhex(hexed))
            assert decimal.startswith("-") == hexed.startswith("-") == (np.signbit(value) != 0)
        else:
            assert decimal == hexed == str(value)


def test_table_of_a_block_format_shows_its_elements() -> None:
    lines = run("table", "mxfp4").splitlines()
    assert "elements of mxfp4 (e2m1)" in lines[0]
    assert "fpemu table e8m0" in lines[0]
    assert lines[1:] == run("table", "e2m1").splitlines()


# inspect -----------------------------------------------------------------------------------------


def test_inspect_prints_what_stats_measures(tmp_path: Path) -> None:
    x = np.float32([[1e-9, 0.5, -3.0, 1000.0] * 16])
    np.save(tmp_path / "g.npy", x)
    out = run("inspect", str(tmp_path / "g.npy"), "--formats", "e4m3,mxfp4")
    want = fpemu.stats(x, "e4m3")
    assert (want.underflow_share, want.saturated_share) == (
        0.25,
        0.25,
    )  # 1e-9 is lost, 1000 too big
    words = next(line.split() for line in out.splitlines() if "e4m3" in line)
    assert words == ["g", "float32", "1x64", "1000", "e4m3", "25%", "25%", f"{want.sqnr_db:.2f}"]
    assert f"{fpemu.stats(x, 'mxfp4').sqnr_db:.2f}" in out
    assert "nvfp4" not in out


def test_inspect_axis_changes_blocks(tmp_path: Path) -> None:
    x = np.outer(np.float32(2.0) ** np.arange(-30, 34, dtype=np.float32), np.ones(64, np.float32))
    np.save(tmp_path / "g.npy", x.astype(np.float32))
    along, across = (
        run("inspect", str(tmp_path / "g.npy"), "-f", "mxfp4", "--axis", axis)
        for axis in ("1", "0")
    )
    assert along.split()[-2:] == ["0%", "inf"]  # a row has one scale: nothing is lost
    assert "inf" not in across.split()


def test_inspect_reads_every_kind_of_tensor(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    kinds = ("bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "bool")
    parts = {name: torch.ones(4, 32).to(getattr(torch, name)) for name in kinds}
    parts["empty"] = torch.zeros(0, 3)
    save_file(parts, tmp_path / "t.safetensors")
    out = run("inspect", str(tmp_path / "t.safetensors"), "-f", "e4m3")
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    for name in kinds:
        assert lines[name][1:4] == [name, "4x32", "1"], lines[name]
    assert lines["bfloat16"][4:] == ["e4m3", "0%", "0%", "inf"]
    assert lines["int64"][4:] == lines["empty"][4:] == ["-"] * 4


# verify ------------------------------------------------------------------------------------------


def test_verify_finds_no_difference() -> None:
    out = run("verify", "--only", "cpu", "mxfp4", "--values", "512")
    words = next(line.split() for line in out.splitlines() if line.startswith("mxfp4"))
    assert words[2:] == ["0", "0"]
    assert int(words[1].replace(",", "")) > 2 * 512


@pytest.mark.parametrize("name", ["e4m3", "nvfp4", "fp8_block_e4m3/2d", "int8_tensor"])
def test_verify_finds_a_planted_difference(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One flipped bit in one backend's codes must be counted and end in exit code 1."""
    real = selfcheck._outputs

    def planted(x, fmt, backend, options):  # type: ignore[no-untyped-def]
        parts = [np.array(part) for part in real(x, fmt, backend, options)]
        if backend == "torch":
            parts[0].flat[3] ^= 1
        return tuple(parts)

    monkeypatch.setattr(selfcheck, "_outputs", planted)
    out = run("verify", "--only", "cpu", name, "--values", "64", code=1)
    words = next(line.split() for line in out.splitlines() if line.startswith(name))
    assert words[2:] == ["0", "8"]  # one for each rounding
    assert "FAILED: 8 results differ" in out


def test_verify_says_so_when_nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = selfcheck._outputs

    def absent(x, fmt, backend, options):  # type: ignore[no-untyped-def]
        if backend == "oracle":
            return real(x, fmt, backend, options)
        raise fpemu.BackendError(f"no {backend} here")

    monkeypatch.setattr(selfcheck, "_outputs", absent)
    out = run("verify", "--only", "cpu", "e4m3", "--values", "64", code=1)
    assert "numba: not checked: no numba here" in out
    assert "no backend could be checked" in out


def test_selfcheck_counts_bits_not_values() -> None:
    zeros = np.float32([0.0, -0.0])
    assert selfcheck._count_different(zeros, np.float32([0.0, 0.0])) == 1
    nan = np.float32([np.nan])
    assert selfcheck._count_different(nan, nan) == 0
    assert selfcheck._count_different(zeros, zeros.astype(np.float64)) == 2


# Errors and start-up -----------------------------------------------------------------------------

BAD = {
    "unknown format": (("table", "e4m4"), "unknown format 'e4m4'.*Did you mean 'e4m3'"),
    "nothing matches": (("formats", "nvfp5"), "Did you mean 'nvfp4'"),
    "too many codes": (("table", "fp32"), r"2\*\*32 codes"),
    "no file": (("inspect", "nowhere.npy"), "no file 'nowhere.npy'"),
    "suffix": (("inspect", "pyproject.toml"), r"'\.toml'; allowed: \.npy"),
    "inspect format": (("inspect", "x.npy", "-f", "nvfp4,mxfp5"), "unknown format 'mxfp5'"),
    "verify": (("verify", "--only", "cpu", "nvfp5"), "Did you mean 'nvfp4'"),
    "verify part": (("verify", "--only", "gpu"), "casts, quantize, gemm and cpu are allowed"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_end_in_one_line_and_code_2(case: str) -> None:
    import re

    args, message = BAD[case]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr


def test_damaged_file_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(b"not an array")
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "t.npy")])
    assert result.exit_code == 2
    assert "t.npy" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_no_tensor_matches(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros(3))
    assert "matches 'w*'" in run("inspect", str(tmp_path / "t.npy"), "w*", code=2)


def test_version_and_module_entry() -> None:
    command = [sys.executable, "-m", "fpemu", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"fpemu {fpemu.__version__}\n"


def test_help_loads_neither_numpy_nor_torch() -> None:
    code = (
        "import sys\nfrom fpemu.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numba', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "inspect" in done.stdout


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m fpemu table fp16 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("  code")
    assert done.stderr == ""
