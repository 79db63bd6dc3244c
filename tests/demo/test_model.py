"""The demo's model."""

from __future__ import annotations

import torch

from holdfast.demo.model import GPT
from holdfast.demo.record import Shape

TINY = Shape(width=16, num_heads=2, num_layers=2, context=12, dropout=0.0)


def test_a_byte_is_predicted_from_those_before_it_only() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    text = torch.randint(256, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.equal(before[0, 7:], after[0, 7:])


def test_a_few_steps_on_one_batch_lower_its_loss() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    windows = torch.randint(256, (4, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model.loss(windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0
