"""`fpemu.compare` counts what differs and shows where it began."""

from __future__ import annotations

import numpy as np
import pytest

import fpemu
from fpemu.formats import TABLE

# A = 0x3DB10000 in a tensor of amax 0x3EEC0000: TransformerEngine's order gives scale byte 0x6B,
# all others 0x6A.
SPLIT = np.float32([0.08642578125, -0.0771484375, *[0.0] * 14])
AMAX = 0.4609375


def test_a_block_that_one_order_of_operations_splits() -> None:
    found = fpemu.compare(SPLIT, "nvfp4/te-ref", "nvfp4/torchao", amax=AMAX)
    assert (found.blocks, found.scales_differ, found.blocks_differ) == (1, 1.0, 1.0)
    [example] = found.examples
    assert example.scales == ("0x6b = 88", "0x6a = 80")
    last = [steps[-1] for steps in example.steps]
    assert [step.boundary for step in last] == [84.0, 84.0]
    assert [step.ulps for step in last] == [1.0, 0.0]  # just beyond the tie, and on it
    assert last[0].value == float(np.nextafter(np.float32(84), np.float32(85)))
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "turns at 84, +1 ulp" in text


def test_every_pair_of_dialects_can_be_explained() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    x *= np.float32([[1e-30], [1e-3], [1.0], [100.0]])
    for group in ("nvfp4/*", "mxfp4*", "mxfp8_e4m3*"):
        names = [n for n in fpemu.list_formats(group) if TABLE[n].block in ((16,), (32,))]
        for name in names[1:]:
            found = fpemu.compare(x, names[0], name)
            text = str(found)
            assert max(map(len, text.splitlines())) <= 80, text
            assert bool(found.blocks_differ) == bool(found.examples)


def test_shares_are_those_of_the_encodings() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 256)).astype(np.float32)
    found = fpemu.compare(x, "mxfp4", "mxfp4/rceil")
    a, b = fpemu.encode(x, "mxfp4"), fpemu.encode(x, "mxfp4/rceil")
    assert found.scales_differ == np.mean(a.scales != b.scales)
    assert found.codes_differ == np.mean(a.codes != b.codes)
    either = (a.scales != b.scales) | (a.codes != b.codes).reshape(64, 8, 32).any(-1)
    assert found.blocks_differ == np.mean(either)
    assert found.sqnr_db == (fpemu.stats(x, "mxfp4").sqnr_db, fpemu.stats(x, "mxfp4/rceil").sqnr_db)


def test_the_element_that_is_explained_is_the_first_that_differs() -> None:
    x = np.zeros((2, 48), np.float32)
    x[1, 16:32] = 6.0
    x[1, 20] = 0.25 * 3  # a tie of MXFP4 at scale 1, which ModelOpt sends toward zero
    found = fpemu.compare(x, "mxfp4/torchao-rceil", "mxfp4/modelopt", axis=1)
    by_block = {example.block: example for example in found.examples}
    assert by_block[(1, 0)].element == (1, 0)  # +0 is code 8 there
    assert found.codes_differ == np.mean(
        fpemu.encode(x, "mxfp4/torchao-rceil").codes != fpemu.encode(x, "mxfp4/modelopt").codes
    )


def test_torch_tensors_and_other_axes() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(2).standard_normal((32, 48)).astype(np.float32)
    mine = fpemu.compare(x, "nvfp4", "nvfp4/quark", axis=0)
    theirs = fpemu.compare(torch.from_numpy(x), "nvfp4", "nvfp4/quark", axis=0)
    assert (mine.scales_differ, mine.codes_differ) == (theirs.scales_differ, theirs.codes_differ)
    assert mine.examples == theirs.examples


def test_unlike_blocks_compare_by_quality_only() -> None:
    x = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    found = fpemu.compare(x, "mxfp4", "nvfp4")
    assert found.scales_differ is None and "not compared" in str(found)
    with pytest.raises(TypeError, match="element format"):
        fpemu.compare(x, "e4m3", "nvfp4")
