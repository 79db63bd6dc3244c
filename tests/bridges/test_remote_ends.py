"""Under each bridge, the last step is committed locally, whatever the remote tier does."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest

from bridges import trainers
from bridges.frameworks import needed
from bridges.trainers import TRAINERS
from holdfast import LocalStore, Tiered
from holdfast.control.stop import REQUEUE_EXIT_CODE
from marks import diagonal
from train.remotes import ENDS, KINDS, SHORT_END_S, assert_only_local, remote_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, version by version
LIGHTNINGS = {**ENDS, "SIGINT": pytest.raises(SystemExit)}
"""Lightning handles a KeyboardInterrupt by itself, so its bridge raises `SystemExit(130)`."""
STEP = 3
"""Step in which the signal comes: `every` does not save it."""


def signal_in_step(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Send this process a signal in the forward pass of a step."""
    forward, calls = trainers.Net.forward, []

    @functools.wraps(forward)  # transformers looks at its arguments
    def called(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == STEP:
            signal.raise_signal(signal.Signals[end])
        return forward(*arguments, **named)

    monkeypatch.setattr(trainers.Net, "forward", called)


@pytest.mark.parametrize(
    ("name", "kind", "end"),
    diagonal(["lightning", "transformers", "accelerate", "ignite"], KINDS, [*ENDS]),
)
def test_the_last_step_is_local_whatever_the_remote_tier_does(
    name: str,
    kind: str,
    end: str,
    ram_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a warning names it; no end waits longer than `close_timeout_s`."""
    needed(name)
    monkeypatch.setattr("holdfast.replication.upload_thread._END_S", SHORT_END_S)
    local, remote = LocalStore(ram_path), remote_of(kind)
    ends = LIGHTNINGS if name == "lightning" else ENDS
    with monkeypatch.context() as patched, ends[end] as raised:
        if end != "goal":
            signal_in_step(patched, end)
        TRAINERS[name](Tiered(local, remote, close_timeout_s=SHORT_END_S), trainers.GOAL)
    if isinstance(raised, pytest.ExceptionInfo) and raised.type is SystemExit:
        assert raised.value.code == (130 if end == "SIGINT" else REQUEUE_EXIT_CODE)
    step = trainers.GOAL if end == "goal" else STEP
    assert_only_local(local, remote, step, caplog)
    assert trainers.ending(ram_path)["step"] == step
