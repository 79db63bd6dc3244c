"""Puts back what trainers of others leave behind in the process of the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Lightning keeps its handlers after a fit that an exception has ended."""
    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in watched}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
