"""`fpemu.identify` names the dialect that made some bits."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import BF16

import fpemu
from fpemu.identification import identify_all

NVFP4 = [
    "te-ref", "te-4over6-mae-256", "te-4over6-mse-448", "torchao", "modelopt",
    "compressed-tensors", "vllm-ref", "fouroversix-static4", "fouroversix-absmax", "quark",
]  # fmt: skip


def tensor(seed: int) -> np.ndarray:
    """bfloat16 rows of many scales: a few thousand blocks that meet E4M3's ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((256, 512)) * 2.0 ** rng.integers(-18, 1, (256, 1))
    return x.astype(np.float32).astype(BF16)


@pytest.mark.parametrize("name", NVFP4)
def test_names_the_dialect(name: str) -> None:
    x, name = tensor(1), f"nvfp4/{name}"
    made = fpemu.encode(x, name)
    found = fpemu.identify(x, made)
    assert name in found.exact, found
    # Without -0 and NaN the reference and the kernel are the same.
    assert found.best == name or (found.best, name) == ("nvfp4", "nvfp4/te-ref")
    # What is also exact must really be equal.
    for other in found.exact:
        again = fpemu.encode(x, other)
        assert np.array_equal(again.codes, made.codes) and np.array_equal(again.scales, made.scales)


@pytest.mark.parametrize("dialect", ["modelopt", "quark-pack-up", "microxcaling-floor", "ceil"])
def test_names_the_mx_dialect(dialect: str) -> None:
    x = tensor(2)
    x[::7, ::5] = 0
    made = fpemu.encode(x, f"mxfp4/{dialect}")
    found = fpemu.identify(x, made)
    assert f"mxfp4/{dialect}" in found.exact
    for other in found.exact:  # what is also exact must really be equal
        again = fpemu.encode(x, other)
        assert np.array_equal(again.codes, made.codes) and np.array_equal(again.scales, made.scales)
    assert "mxfp4/even" not in found.exact


def test_the_format_only_says_what_the_bits_mean() -> None:
    x = tensor(3)
    made = fpemu.encode(x, "nvfp4/modelopt")
    bare = fpemu.Encoded(
        made.codes, made.scales, made.tensor_scale, fpemu.get_format("nvfp4"), 1, made.dtype
    )
    assert "nvfp4/modelopt" in fpemu.identify(x, bare).exact


def test_a_calibrated_amax_is_worked_out() -> None:
    x = tensor(4)
    for name in ("nvfp4/torchao", "nvfp4/compressed-tensors", "nvfp4/te-ref"):
        made = fpemu.encode(x, name, amax=11.25)
        assert name in fpemu.identify(x, made).exact
        assert name in fpemu.identify(x, made, amax=11.25).exact


def test_one_changed_code_is_seen() -> None:
    x = tensor(5)
    made = fpemu.encode(x, "nvfp4/quark")
    made.codes[3, 100] ^= 1
    found = fpemu.identify(x, made)
    assert not found.exact
    assert found.best == "nvfp4/quark"
    assert found.matches[0].codes == 1 - 1 / x.size


def test_many_tensors() -> None:
    pairs = [(tensor(k), fpemu.encode(tensor(k), "nvfp4/torchao")) for k in (6, 7)]
    found = identify_all(pairs)
    assert "nvfp4/torchao" in found.exact
    assert found.matches[0].blocks == 2 * 256 * 32


def test_errors() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match="must agree"):
        fpemu.identify(x[:1], fpemu.encode(x, "nvfp4"))
    with pytest.raises(TypeError, match="block format"):
        fpemu.identify(x, fpemu.encode(x, "e4m3"))
    with pytest.raises(ValueError, match="no candidate"):
        fpemu.identify(x, fpemu.encode(x, "nvfp4"), candidates=["mxfp4"])
