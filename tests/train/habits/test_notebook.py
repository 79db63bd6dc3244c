"""The card of a running fit in a notebook; IPython stands for a kernel that is not here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from holdfast.store.memory import MemoryStore
from holdfast.train import NotebookCard, ProgressBar
from train.small import make


class Kernel:
    """What a notebook's shell shows: each state of the display."""

    kernel = object()

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, html: str) -> None:
        self.shown.append(html)

    def display(self, html: str, *, display_id: bool) -> Kernel:
        self.update(html)
        return self


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    ipython: Any = ModuleType("IPython")
    display: Any = ModuleType("IPython.display")
    ipython.get_ipython = lambda: kernel
    display.HTML, display.display = str, kernel.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return kernel


def test_a_running_fit_is_a_card_in_a_notebook(kernel: Kernel) -> None:
    trainer = make(MemoryStore(), progress=True)
    assert trainer.callback(NotebookCard)
    trainer.fit(3)
    assert "value='0.0000'" in kernel.shown[0]
    assert "ended" in kernel.shown[-1]
    assert "loss" in kernel.shown[-1]
    assert "value='1.0000'" in kernel.shown[-1]


def test_elsewhere_there_is_the_bar() -> None:
    trainer = make(MemoryStore(), progress=True)
    assert trainer.callback(ProgressBar)
    trainer.fit(1)
