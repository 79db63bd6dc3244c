"""The demo's data."""

from __future__ import annotations

import torch

from holdfast.demo.model import Windows, standard_library_text


def test_the_text_is_python_source_and_the_same_each_time() -> None:
    text = standard_library_text(50_000)
    assert len(text) == 50_000
    assert text == standard_library_text(50_000)
    assert b"import " in text
    assert standard_library_text(10_000) == text[:10_000]


def test_every_window_lies_inside_the_text() -> None:
    windows = Windows(bytes(range(200)), 16)
    for index in range(len(windows)):
        window = windows[index]
        assert window.shape == (17,)
        assert torch.equal(window, torch.arange(int(window[0]), int(window[0]) + 17))


def test_the_offset_is_drawn_from_torchs_generator() -> None:
    windows = Windows(bytes(range(200)), 16)
    torch.manual_seed(1)
    first = [windows[3][0].item() for _ in range(20)]
    torch.manual_seed(1)
    assert [windows[3][0].item() for _ in range(20)] == first
    assert len(set(first)) > 1
