"""The little GPT: same seed, same run; the parts do what they are called."""

from __future__ import annotations

import hashlib
import sys

import pytest
import torch

from experiments import model

SHAPE = model.Shape(width=32, layers=1, heads=2, context=32)
PLAN = model.Training(steps=4, batch=2, warmup=2)


@pytest.fixture(scope="module")
def text() -> model.Corpus:
    return model.corpus()


def test_the_text_is_real_and_split_without_overlap(text):
    whole = torch.cat([text.train, text.held_out]).numpy().tobytes()
    assert hashlib.sha256(whole).hexdigest() == text.sha256
    assert len(text.held_out) == len(whole) // 10
    assert b"assert_stmt" in whole
    assert len(whole) > 300_000


def test_a_python_without_the_text_is_told_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match=r"lacks the module pydoc_data\.topics"):
        model.corpus()


def test_windows_are_shifted_by_one_byte():
    data = torch.arange(100, dtype=torch.uint8)
    inputs, targets = model.windows(data, torch.tensor([0, 10]), 4)
    assert inputs.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert targets.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_the_model_sees_no_future():
    gpt = model.GPT(SHAPE, torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % 256
    same = (gpt(tokens) == gpt(changed)).all(dim=-1)[0]
    assert same[:20].all()
    assert not same[20:].any()


def test_rate_warms_up_and_decays():
    plan = model.Training(steps=100, rate=1.0, warmup=10, final_rate=0.1)
    rates = [model.rate_at(step, plan) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_same_seed_same_run_whatever_else_draws(text):
    gpt, losses = model.train(SHAPE, PLAN, text, seed=5)
    torch.manual_seed(99)
    torch.rand(1000)
    again, same = model.train(SHAPE, PLAN, text, seed=5)
    assert losses == same
    for a, b in zip(gpt.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert losses != model.train(SHAPE, PLAN, text, seed=6)[1]
    assert len(losses) == PLAN.steps


def test_training_learns(text):
    plan = model.Training(steps=30, batch=4, warmup=5, rate=3e-3)
    gpt, losses = model.train(SHAPE, plan, text, seed=0)
    assert losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: it starts knowing nothing
    assert sum(losses[-5:]) / 5 < 4.2
    assert model.held_out_loss(gpt, text.held_out, "cpu", batch=8, limit=4096) < 4.2


def test_linears_are_all_of_them_in_order():
    gpt = model.GPT(model.Shape(32, 2, 2, 32), torch.Generator())
    parts = ["qkv", "proj", "up", "down"]
    assert list(gpt.linears()) == [f"{i}.{p}" for i in range(2) for p in parts] + ["head"]
