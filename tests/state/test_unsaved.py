"""Non-persistent buffers: a load says if they are not those of the saved model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.state.capture.capture import Capturer
from state.roundtrip import Image, image


class Rotary(nn.Module):
    def __init__(self, size: int = 6, *, factor: float = 1.0) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2)
        self.register_buffer("angles", factor / torch.arange(1.0, size + 1), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.rand(4)), persistent=False)
        self.turns.fill_(1j)


def wrapped(model: nn.Module) -> nn.Module:
    return nn.Sequential(model)


def test_a_buffer_of_the_same_values_is_silent() -> None:
    prepared = image({"model": wrapped(Rotary())}).load({"model": wrapped(Rotary())})
    assert prepared.notes == ()


@pytest.mark.parametrize("name", ["angles", "mask", "turns"])
def test_a_buffer_that_was_never_filled_is_named(name: str) -> None:
    with torch.device("meta"):
        live = wrapped(Rotary())
    live.to_empty(device="cpu")
    for other in ("angles", "mask", "turns"):
        getattr(live[0], other).copy_(getattr(Rotary(), other))
    getattr(live[0], name).fill_(0)
    prepared = image({"model": wrapped(Rotary())}).load({"model": live})
    assert [note for note in prepared.lost if f"model.0.{name}: " in note] == [*prepared.lost]
    assert len(prepared.lost) == 1


def test_what_a_device_or_a_dtype_changes_in_the_last_digits_is_silent() -> None:
    live = Rotary()
    live.angles = live.angles.to(torch.bfloat16)
    assert image({"model": Rotary()}).load({"model": live}).lost == ()


def test_a_cache_of_another_size_is_a_note() -> None:
    prepared = image({"model": Rotary()}).load({"model": Rotary(9)})
    assert prepared.lost == ()
    assert [note for note in prepared.notes if "model.angles" in note and "[9] here" in note]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_buffer_that_training_changes_is_a_cache_and_not_compared(is_replaced: bool) -> None:
    model = Rotary()
    capturer = Capturer({"model": model})
    capturer.capture()
    if is_replaced:
        model.angles = model.angles * 3
    else:
        model.angles.mul_(3)
    saved = Image(capturer.capture())
    assert saved.load({"model": Rotary(factor=7)}).lost == ()
    assert len(saved.load({"model": moved(Rotary())}).lost) == 1


def moved(model: Rotary) -> Rotary:
    model.mask.fill_(False)
    return model


def test_a_buffer_that_is_left_out_on_purpose_is_silent() -> None:
    saved = image({"model": Rotary()})
    assert saved.load({"model": Rotary(factor=2)}, skip=["model.angles"]).lost == ()
