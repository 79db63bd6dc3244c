"""A user with a training script, a run of three steps, and what a script can do with it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import holdfast
import warm
from holdfast.cli import main
from holdfast.data import Loader
from holdfast.train import Trainer

AS_IT_WAS = "as it was"
SAVED = (1, 2, 3)
"""Steps that the run has saved, with the metric `loss`."""


class User:
    """Acts in a folder of its own, in which `runs/first` holds a run of three checkpoints.

    `state` is a new one, as a script makes it, and is watched: it changes by `train`, or by what
    Holdfast loads.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "runs" / "first"
        self.new = folder / "runs" / "new"
        """A root that does not exist yet."""
        self.state: dict[str, Any] = {}
        self.at = ""
        """Digest of what the user has made of the state."""
        self.watch(new_state())
        self.doing = ExitStack()
        """Closes what was opened."""
        self.said: list[str] = []
        """What the command line has written to stderr."""

    def watch(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take another state, which is judged from now on."""
        self.state, self.at = state, digest(state)
        return state

    def manager(
        self, root: Any = None, state: Any = None, **options: Any
    ) -> holdfast.CheckpointManager:
        """A manager of the run, and of the state."""
        if isinstance(state, dict):
            self.watch(state)
        given = self.root if root is None else root
        made = holdfast.CheckpointManager(given, self.state if state is None else state, **options)
        return self.doing.enter_context(made)

    def resumed(self, root: Any = None, **options: Any) -> holdfast.CheckpointManager:
        """A manager that has resumed the run."""
        manager = self.manager(root, **options)
        manager.resume()
        return manager

    def goes_on(self, root: Any = None, num_steps: int = 1, **options: Any) -> None:
        """The whole script: resume, train, save after each step."""
        manager = self.manager(root, **options)
        found = manager.resume()
        step = found.step if found else 0
        for _ in range(num_steps):
            self.train()
            step += 1
            manager.save(step, metrics={"loss": 1 / step}).wait()
        manager.wait()

    def begin_again(self) -> None:
        """The script is started again."""
        self.doing = ExitStack()
        self.watch(new_state())

    @contextlib.contextmanager
    def elsewhere(self, root: str = "runs/first") -> Iterator[None]:
        """Another process has resumed the run, and trains."""
        code = f"from tests.mistakes.user import hold; hold({root!r})"
        pipe = subprocess.PIPE
        with warm.Popen(["-c", code], stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "resumed\n"
            yield
            process.communicate("end\n", timeout=60)

    def train(self) -> None:
        """One step."""
        train(self.state)
        self.at = digest(self.state)

    def folder_of(self, step: int, root: Path | None = None) -> Path:
        """The folder of a checkpoint."""
        (found,) = (self.root if root is None else root).glob(f"step-{step:08d}.*")
        return found

    def holdfast(self, *words: object) -> None:
        """The command line. What it writes to stderr counts where it fails."""
        err = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["holdfast", *map(str, words)]),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as end:
                if end.code:
                    self.said.append(f"exit {end.code}: {err.getvalue()}")
                else:
                    self.said.append(err.getvalue())

    def trainer(self, root: Any = None, **options: Any) -> Trainer:
        """A Trainer of the same model and data, of which the state is watched."""
        self.watch(new_state())
        arguments = {
            "optimizer": self.state["optimizer"],
            "data": self.state["data"],
            "loss": loss_of,
            "progress": False,
            **options,
        }
        model = arguments.pop("model", self.state["model"])
        names = {field.name for field in fields(holdfast.Checkpoints)} & arguments.keys()
        own = {name: arguments.pop(name) for name in names}
        checkpoints = holdfast.Checkpoints(self.new if root is None else root, **own)
        return Trainer(model, checkpoints=checkpoints, **arguments)


def hold(root: str) -> None:
    """Resume a run, and keep it until a line comes."""
    with holdfast.CheckpointManager(root, new_state()) as manager:
        manager.resume()
        print("resumed", flush=True)
        sys.stdin.readline()


def take(root: str) -> None:
    """Take a run over from a live process."""
    with holdfast.CheckpointManager(root, new_state(), takeover=True) as manager:
        manager.resume()


def new_state(**arguments: Any) -> dict[str, Any]:
    """The state that the user's script makes; `arguments` are those of the loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        "data": Loader(torch.arange(40.0).reshape(10, 4), **{"batch_size": 2, **arguments}),
        "progress": {"step": 0},
    }


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss."""
    loss: torch.Tensor = model(batch / 40).square().mean()
    return loss


def train(state: dict[str, Any]) -> None:
    """One step."""
    for batch in state["data"].until(step=1, start=0):
        loss_of(state["model"], batch).backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    if "scheduler" in state:
        state["scheduler"].step()
    if "progress" in state:
        state["progress"]["step"] += 1


def made(root: Path) -> dict[int, str]:
    """Make the run of three checkpoints, and give the digests of the states of steps 1 to 4."""
    state = new_state()
    digests = {}
    with holdfast.CheckpointManager(root, state) as manager:
        for step in SAVED:
            train(state)
            manager.save(step, metrics={"loss": 1 / step}).wait()
            digests[step] = digest(state)
        train(state)
        digests[SAVED[-1] + 1] = digest(state)
    return digests


def digest(state: dict[str, Any]) -> str:
    """A digest of every value of a state."""
    found = hashlib.sha256()
    for name, value in state.items():
        has_state = hasattr(value, "state_dict") and not isinstance(value, type)
        content = value.state_dict() if has_state else value
        for line in _lines(name, content):
            found.update(line)
    return found.hexdigest()


def _lines(name: str, value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _lines(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _lines(f"{name}.{at}", item)
    elif isinstance(value, torch.Tensor):
        yield (
            name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    else:
        yield f"{name}={value!r}".encode()


def copied(template: Path, folder: Path) -> User:
    """A user in an empty folder, with a copy of the run."""
    shutil.copytree(template, folder / "runs" / "first", symlinks=True)
    return User(folder)


class Listener(logging.Handler):
    """Keeps what default logging shows."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.messages.append(record.getMessage())
