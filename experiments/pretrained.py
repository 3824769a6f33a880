"""A small pretrained transformer, all-MiniLM-L6-v2: its tokenizer and forward pass in plain Python.

The files come with the package that `experiments.dialects` names; its code and its dependencies are
not needed. The model is BERT with six layers of width 384: word, position and segment embeddings,
then in each layer attention and a feed-forward of four times the width, each added to its input and
normalized after. The tokenizer is BERT's: text is cleaned, lower-cased, stripped of accents and cut
at spaces and punctuation; each word is then spelled with the longest pieces of the vocabulary, from
the left.

Sources: Devlin et al. 2018 (arXiv 1810.04805); the package's config.json and tokenizer.json.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import dialects
from fpemu import files

UNKNOWN, START, END = "[UNK]", "[CLS]", "[SEP]"
LONGEST = 100  # characters of a word; longer ones are unknown

#: The linear layers of one encoder layer: short name -> name in the file.
LINEARS = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "proj": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense",
}  # fmt: skip


class Pretrained(NamedTuple):
    """What the package's files hold."""

    weights: dict[str, Tensor]
    vocabulary: dict[str, int]
    layers: int
    heads: int
    context: int
    epsilon: float

    def weight(self, layer: int, short: str) -> Tensor:
        """A linear layer's ``W[out, in]``."""
        return self.weights[f"encoder.layer.{layer}.{LINEARS[short]}.weight"]


def load(weights: Path | None = None) -> Pretrained | None:
    """The model of the installed package, or None where the package is not installed.

    Parameters
    ----------
    weights : Path, optional
        The safetensors file; ``config.json`` and ``vocab.txt`` lie beside it.
    """
    weights = weights or dialects.packaged_weights()
    if weights is None:
        return None
    config = json.loads((weights.parent / "config.json").read_text(encoding="utf-8"))
    return Pretrained(
        {name: x for name, x in files.tensors(weights) if x.is_floating_point()},
        vocabulary(weights.parent / "vocab.txt"),
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["max_position_embeddings"],
        config["layer_norm_eps"],
    )


# Tokenizer ---------------------------------------------------------------------------------------


def vocabulary(path: Path) -> dict[str, int]:
    """Pieces and their numbers: the lines of the file, from 0."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return {piece: number for number, piece in enumerate(lines) if piece}


def tokens(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Numbers of the pieces of `text`, without start and end marks.

    Examples
    --------
    >>> tokens("Unaffable!", {"[UNK]": 0, "una": 1, "##ff": 2, "##able": 3, "!": 4})
    [1, 2, 3, 4]
    """
    return [vocabulary[piece] for word in words(text) for piece in pieces(word, vocabulary)]


def words(text: str) -> list[str]:
    """Lower-case words without accents; a punctuation mark or CJK character is a word."""
    spaced = []
    for c in text:
        if c in "\t\n\r" or unicodedata.category(c) == "Zs":
            spaced.append(" ")
        elif c in "\0\ufffd" or unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs"):
            continue
        else:
            spaced.append(f" {c} " if is_chinese(c) else c)
    # One character at a time: the tokenizer knows no final sigma.
    small = "".join(c.lower() for c in "".join(spaced))
    plain = unicodedata.normalize("NFD", small)
    cut = [f" {c} " if is_punctuation(c) else c for c in plain if unicodedata.category(c) != "Mn"]
    return "".join(cut).split()


def is_punctuation(c: str) -> bool:
    """Unicode's punctuation, and every ASCII mark that is no letter, digit or space."""
    return ("!" <= c <= "~" and not c.isalnum()) or unicodedata.category(c).startswith("P")


#: Blocks of CJK ideographs, not of the scripts that are written with spaces.
CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


def is_chinese(c: str) -> bool:
    return any(low <= ord(c) <= high for low, high in CHINESE)


def pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    """The longest pieces from the left; all of the word is unknown where one is missing."""
    found: list[str] = []
    start = 0
    while start < len(word):
        mark = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((e for e in ends if mark + word[start:e] in vocabulary), None)
        if end is None or len(word) > LONGEST:
            return [UNKNOWN]
        found.append(mark + word[start:end])
        start = end
    return found


def batch(text: str, model: Pretrained, rows: int, length: int) -> Tensor:
    """The first tokens of `text` in rows with a start and an end mark: int64 (rows, length).

    Raises
    ------
    ValueError
        Where the text is too short.
    """
    inner = length - 2
    found = tokens(text, model.vocabulary)
    if len(found) < rows * inner:
        raise ValueError(
            f"batch: the text has {len(found)} tokens; {rows} rows need {rows * inner}. Give more."
        )
    start, end = model.vocabulary[START], model.vocabulary[END]
    return torch.tensor([[start, *found[i * inner : (i + 1) * inner], end] for i in range(rows)])


# Forward pass ------------------------------------------------------------------------------------


@torch.no_grad()
def forward(
    model: Pretrained,
    numbers: Tensor | Sequence[Sequence[int]],
    watch: Callable[[int, str, Tensor], Any] = lambda *_: None,
) -> Tensor:
    """Last hidden states of rows of tokens that all count (no padding).

    Parameters
    ----------
    model : Pretrained
    numbers : int64 Tensor (rows, length)
    watch : callable
        ``(layer, short name, x)`` for the input x of every linear layer; q, k and v share one, which
        is handed out as q's.

    Returns
    -------
    float32 Tensor (rows, length, width)
    """
    w = model.weights
    numbers = torch.as_tensor(numbers)
    rows, length = numbers.shape

    def normalized(x: Tensor, name: str) -> Tensor:
        scale, shift = w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"]
        return F.layer_norm(x, scale.shape, scale, shift, model.epsilon)

    x = w["embeddings.word_embeddings.weight"][numbers]
    x = x + w["embeddings.position_embeddings.weight"][:length]
    x = normalized(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings")
    for layer in range(model.layers):
        prefix = f"encoder.layer.{layer}"

        def linear(short: str, x: Tensor, prefix: str = prefix, layer: int = layer) -> Tensor:
            if short not in "kv":
                watch(layer, short, x)
            name = f"{prefix}.{LINEARS[short]}"
            return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

        q, k, v = (
            linear(short, x).view(rows, length, model.heads, -1).transpose(1, 2)
            for short in ("q", "k", "v")
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = normalized(x + linear("proj", mixed), f"{prefix}.attention.output")
        x = normalized(x + linear("down", F.gelu(linear("up", x))), f"{prefix}.output")
    return x
