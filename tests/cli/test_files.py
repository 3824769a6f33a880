"""`fpemu.files`: what is stored comes back bit for bit, and a damaged file is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits

from fpemu.errors import FileFormatError
from fpemu.files import tensors

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

RNG = np.random.default_rng(0)
ARRAY = RNG.standard_normal((5, 7)).astype(np.float32)


def patterns(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every kind of bits, NaN included."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(RNG.integers(0, 256, size, dtype=np.uint8)).view(dtype).reshape(shape)


# What is stored comes back -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3)])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u2", "i8", "?", ">f4"])
def test_npy_round_trip(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = RNG.integers(0, 2, shape).astype(dtype)
    np.save(tmp_path / "gradients.npy", array)
    ((name, got),) = tensors(tmp_path / "gradients.npy")
    assert name == "gradients"
    assert_same_bits(got, array)


def test_npz_round_trip_in_order(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "t.npz", b=ARRAY, a=np.arange(3))
    found = dict(tensors(tmp_path / "t.npz"))
    assert list(found) == ["b", "a"]
    assert_same_bits(found["b"], ARRAY)


DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e8m0fnu", "int8", "int64", "bool"])
def test_safetensors_round_trip(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    want = torch.tensor([[True, False, True]]) if dtype == "bool" else patterns((3, 4), kind)
    safetensors_torch.save_file({"w": want}, tmp_path / "t.safetensors")
    ((name, got),) = tensors(tmp_path / "t.safetensors")
    assert (name, got.dtype, got.shape) == ("w", kind, want.shape)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_torch_names_are_dotted(tmp_path: Path) -> None:
    want = patterns((2, 4), torch.bfloat16)
    torch.save(
        {"model": {"w": want, "list": [torch.zeros(1), "text"]}, "step": 3}, tmp_path / "t.pt"
    )
    found = dict(tensors(tmp_path / "t.pt"))
    assert list(found) == ["model.w", "model.list.0"]
    assert torch.equal(found["model.w"].view(torch.uint8), want.view(torch.uint8))


def test_torch_bare_tensor_and_old_layout(tmp_path: Path) -> None:
    want = torch.arange(6.0)
    torch.save(want, tmp_path / "grad.pt", _use_new_zipfile_serialization=False)
    ((name, got),) = tensors(tmp_path / "grad.pt")
    assert name == "grad"
    assert torch.equal(got, want)


def test_pattern_selects(tmp_path: Path) -> None:
    parts = {"a.weight": torch.zeros(1), "a.bias": torch.zeros(1), "b.weight": torch.zeros(1)}
    safetensors_torch.save_file(parts, tmp_path / "t.safetensors")
    assert [n for n, _ in tensors(tmp_path / "t.safetensors", "*.weight")] == [
        "a.weight",
        "b.weight",
    ]


def test_tensors_are_read_when_their_turn_comes(tmp_path: Path) -> None:
    """A file whose second array is damaged still gives its first."""
    np.savez(tmp_path / "t.npz", first=ARRAY, second=ARRAY + 1)
    data = bytearray((tmp_path / "t.npz").read_bytes())
    at = data.index((ARRAY + 1).tobytes())
    data[at] ^= 1  # the checksum of "second" no longer fits
    (tmp_path / "t.npz").write_bytes(data)
    found = tensors(tmp_path / "t.npz")
    assert next(found)[0] == "first"
    with pytest.raises(FileFormatError, match=r"t\.npz', tensor 'second'"):
        next(found)


# What is damaged is named ------------------------------------------------------------------------


def write_all(folder: Path) -> dict[str, Path]:
    files = {s: folder / f"t.{s}" for s in ("npy", "npz", "safetensors", "pt")}
    np.save(files["npy"], ARRAY)
    np.savez(files["npz"], w=ARRAY)
    safetensors_torch.save_file({"w": torch.from_numpy(ARRAY)}, files["safetensors"])
    torch.save({"w": torch.from_numpy(ARRAY)}, files["pt"])
    return files


@pytest.mark.parametrize("keep", [0, 5, 0.3, 0.7, -1])
@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "pt"])
def test_truncated(tmp_path: Path, suffix: str, keep: float) -> None:
    path = write_all(tmp_path)[suffix]
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(FileFormatError, match=rf"t\.{suffix}'"):
        list(tensors(path))


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "pt"])
def test_mislabelled(tmp_path: Path, suffix: str) -> None:
    files = write_all(tmp_path)
    for other, path in files.items():
        if other != suffix:
            wrong = tmp_path / f"wrong_{other}.{suffix}"
            wrong.write_bytes(path.read_bytes())
            with pytest.raises(FileFormatError, match=r"wrong_"):
                list(tensors(wrong))


def test_truncated_safetensors_names_the_tensor(tmp_path: Path) -> None:
    parts = {name: torch.full((64,), 1.0) for name in ("a", "b", "c")}
    safetensors_torch.save_file(parts, tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    (tmp_path / "t.safetensors").write_bytes(data[: -64 * 4 - 1])  # ends within "b"
    with pytest.raises(FileFormatError, match="tensor 'b'"):
        list(tensors(tmp_path / "t.safetensors"))


def test_no_pickle_is_run(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileFormatError, match=r"t\.npy"):
        list(tensors(tmp_path / "t.npy"))
    torch.save({"f": Path("x"), "w": torch.zeros(1)}, tmp_path / "t.pt")
    with pytest.raises(FileFormatError, match=r"t\.pt"):
        list(tensors(tmp_path / "t.pt"))


def test_not_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array(["text"]))
    with pytest.raises(FileFormatError, match="<U4"):
        list(tensors(tmp_path / "t.npy"))
    np.save(tmp_path / "b.npy", np.zeros(3, "V2"))  # how numpy saves bfloat16
    with pytest.raises(FileFormatError, match="safetensors"):
        list(tensors(tmp_path / "b.npy"))


def test_torch_file_without_tensors(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "t.pt")
    with pytest.raises(FileFormatError, match="holds a tensor"):
        list(tensors(tmp_path / "t.pt"))


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"'\.csv'.*\.safetensors"):
        tensors(tmp_path / "t.csv")
    with pytest.raises(FileNotFoundError, match=r"no file .*t\.npy"):
        tensors(tmp_path / "t.npy")
    (tmp_path / "d.npy").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        tensors(tmp_path / "d.npy")
