"""Philox4x32-10: the known answers of Random123 (kat_vectors), and the counter layout of fpemu."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_same_bits

from fpemu.backends import oracle
from fpemu.rng import Random, indices, philox

F = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: tuple, key: tuple, answer: tuple) -> None:
    assert oracle.philox4x32(counter, key) == answer
    c0, c1, c2, c3 = counter
    first = (c0 | c1 << 32) << 2 & 2**64 - 1
    if (c0 | c1 << 32) >> 62:  # an index of 64 bits cannot reach this counter
        return
    index = np.arange(4, dtype=np.uint64) + np.uint64(first)
    words = philox(index, seed=key[0] | key[1] << 32, stream=c2 | c3 << 32)
    assert_same_bits(words, np.array(answer, np.uint32))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("stream", [0, 7, 2**33 + 5])
@pytest.mark.parametrize("first", [0, 3, 2**32 - 2, 2**34 - 1, 2**40 + 1])
def test_words_equal_the_oracle(seed: int, stream: int, first: int) -> None:
    index = np.arange(9, dtype=np.uint64) + np.uint64(first)
    want = [oracle.random_word(seed, stream, int(i)) for i in index]
    assert_same_bits(philox(index, seed, stream), np.array(want, np.uint32))


@pytest.mark.parametrize(
    ("shape", "start"), [((3, 5), (2, 1)), ((2, 2, 2), (1, 0, 3)), ((4,), (3,)), ((0, 3), (0, 0))]
)
def test_a_shard_indexes_the_whole(shape: tuple, start: tuple) -> None:
    whole = (6, 7, 9)[-len(shape) :]
    flat = np.arange(np.prod(whole), dtype=np.uint64).reshape(whole)
    part = flat[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
    random = Random(seed=1, global_shape=whole, start=start)
    assert_same_bits(indices(shape, random), np.ascontiguousarray(part))
