"""The commands on checkpoints: what they print, in how many columns, and their exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.foreign import CASES, modelopt_nvfp4, write
from typer.testing import CliRunner

from fpemu import checkpoints, cli

torch = pytest.importorskip("torch")


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(map(str, args)))
    assert result.exit_code == code, result.output
    return result.output


def words(output: str, start: str) -> list[str]:
    return next(line.split() for line in output.splitlines() if line.startswith(start))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    return write(tmp_path / "plain", {"a.weight": x, "b.weight": x * 2, "n": torch.arange(3)})


def test_inspect_a_quantized_folder(tmp_path: Path) -> None:
    foreign = modelopt_nvfp4()
    foreign.tensors["m.a.weight"][:] = 0x80  # half zeros (+0), half -0
    foreign.tensors["m.a.weight"][0] = 0x77
    scale = foreign.tensors["m.a.weight_scale"].view(torch.uint8)
    scale[:] = 5
    scale[0, 0], scale[0, 1] = 0x7E, 0x7F
    tensors = {**foreign.tensors, "lm_head.weight": torch.zeros(4, 8), "n": torch.arange(3)}
    folder = write(tmp_path / "c", tensors, foreign.block)
    out = run("inspect", folder)
    assert max(map(len, out.splitlines())) <= 80
    assert "modelopt-nvfp4" in out.splitlines()[0] + out.splitlines()[1]
    share = f"{100 * 7 / 8:.3g}%"
    nbytes = f"{8 * 24 + 8 * 3 + 4 + 4}"
    assert words(out, "m.a") == ["m.a.weight", "nvfp4/modelopt", "8x48", nbytes, share, "8.33%"]
    assert words(out, "lm_head") == ["lm_head.weight", "fp32", "4x8", "128", "100%", "-"]
    assert words(out, "n ") == ["n", "I64", "3", "24", "-", "-"]
    assert words(out, "3 tensors") == ["3", "tensors", f"{int(nbytes) + 128 + 24}"]
    assert "lm_head" not in run("inspect", folder, "m.*")
    assert "matches 'w*'" in run("inspect", folder, "w*", code=2)
    # The file alone is a checkpoint as well; with formats, its values are measured.
    assert words(run("inspect", folder / "model.safetensors"), "m.a")[1] == "nvfp4/modelopt"
    assert words(run("inspect", folder, "m.a*", "-f", "nvfp4"), "m.a")[1:3] == ["bfloat16", "8x48"]


@pytest.mark.parametrize("case", CASES)
def test_inspect_every_layout(case: str, tmp_path: Path) -> None:
    foreign = CASES[case][1]()
    out = run("inspect", write(tmp_path / "c", foreign.tensors, foreign.block))
    assert CASES[case][0] in out
    shape = "x".join(map(str, foreign.values.shape))
    assert shape in words(out, f"{foreign.name} ")


def test_inspect_a_plain_folder(plain: Path) -> None:
    out = run("inspect", plain)
    assert words(out, "a.weight") == ["a.weight", "bf16", "32x64", "4,096", "0%", "-"]
    out = run("inspect", plain, "-f", "nvfp4", "*.weight")
    assert words(out, "a.weight")[4] == "nvfp4"


def test_convert_says_what_it_did(plain: Path, tmp_path: Path) -> None:
    out = run("convert", plain, tmp_path / "q", "--fmt", "nvfp4", "--keep", "b.*", "--keep", "c*")
    assert "q: modelopt-nvfp4" in out
    assert words(out, "        1  weights quantized") == ["1", "weights", "quantized"]
    assert words(out, "        2  plain")[0] == "2"
    assert checkpoints.open(tmp_path / "q")["b.weight"].layout is None
    run("convert", tmp_path / "q", tmp_path / "ct", "--layout", "nvfp4-pack-quantized")
    assert checkpoints.open(tmp_path / "ct").layouts == ("nvfp4-pack-quantized",)
    assert "exists" in run("convert", plain, tmp_path / "q", "--fmt", "mxfp4", code=2)
    run("convert", plain, tmp_path / "q", "--fmt", "mxfp4", "--force")
    assert checkpoints.open(tmp_path / "q").layouts == ("mxfp4-pack-quantized",)


def test_diff_exits_like_diff(plain: Path, tmp_path: Path) -> None:
    run("convert", plain, tmp_path / "q", "--fmt", "nvfp4")
    out = run("diff", plain, plain)
    assert out == "0 of 3 tensors differ.\n"
    assert words(run("diff", plain, plain, "--all"), "a.weight")[1:] == [
        "-", "0", "of", "2,048", "inf", "0",
    ]  # fmt: skip
    out = run("diff", plain, tmp_path / "q", code=1)
    assert out.splitlines()[-1] == "2 of 3 tensors differ."
    assert max(map(len, out.splitlines())) <= 80
    assert words(out, "a.weight")[1:3] == ["-", "-"]
    assert not any(line.startswith("n ") for line in out.splitlines())
    assert "no file or folder" in run("diff", plain, tmp_path / "nowhere", code=2)
    other = write(tmp_path / "o", {"a.weight": torch.zeros(3), "z": torch.zeros(1)})
    out = run("diff", plain, other, code=1)
    assert words(out, "z")[1:] == ["only", "in", "B"]
    assert words(out, "a.weight")[1:] == ["32x64", "and", "3"]


def test_diff_counts_scales_codes_and_marks_numbers(tmp_path: Path) -> None:
    foreign = modelopt_nvfp4()
    a = write(tmp_path / "a", foreign.tensors, foreign.block)
    packed = foreign.tensors["m.a.weight"].clone()
    packed[0, 0] ^= 7
    number = foreign.tensors["m.a.weight_scale_2"] * 2
    tensors = {**foreign.tensors, "m.a.weight": packed, "m.a.weight_scale_2": number}
    out = run("diff", a, write(tmp_path / "b", tensors, foreign.block), code=1)
    cells = words(out, "m.a.weight")
    assert cells[1:7] == ["0", "of", "24*", "1", "of", "384"]


@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
def test_damaged_checkpoints_end_in_one_line(command: str, tmp_path: Path) -> None:
    foreign = modelopt_nvfp4()
    folder = write(tmp_path / "c", foreign.tensors, foreign.block)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    more = {"inspect": [], "convert": [tmp_path / "o", "--fmt", "bf16"], "diff": [folder]}[command]
    result = CliRunner().invoke(cli.app, [command, str(folder), *map(str, more)])
    assert result.exit_code == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "model.safetensors" in result.stderr and "'m.a.weight" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
