"""Ways to save, and states that say of each of their tensors at which step it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import errors
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.results import Checkpoint
from holdfast.staging.in_memory import ImageTransfer
from holdfast.staging.waves import WaveTransfer
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.local.blocks import LocalBlockWriter
from holdfast.testing.faulty import Stopped

FROZEN = 7.0
"""What is in the tensors that nobody trains."""


class Tiny:
    """A state that says of each of its tensors at which step it was written."""

    def __init__(self, num_elements: int = 64) -> None:
        tensors = [torch.zeros(num_elements) for _ in range(3)]
        self.tree: dict[str, Any] = {"step": 0, "tensors": tensors}
        self.components: dict[str, Any] = {"tiny": self.tree}

    def become(self, step: int) -> None:
        """Be the state of that step."""
        self.tree["step"] = step
        for tensor in self.tree["tensors"]:
            tensor.fill_(step)

    def step(self) -> int:
        """The step, after checking that no tensor is of another one."""
        steps = {int(value) for tensor in self.tree["tensors"] for value in tensor.unique()}
        assert steps == {self.tree["step"]}, f"mixed: {steps} and {self.tree['step']}"
        return int(self.tree["step"])


class Trained(Tiny):
    """The same, with a module that an optimizer changes, and what nobody trains."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.model = nn.ParameterList(torch.zeros(num_elements) for _ in range(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.base = [torch.full((1 << 19,), FROZEN)]
        self.components |= {"model": self.model, "optimizer": self.optimizer}
        self.components["base"] = {"base": self.base}

    def become(self, step: int) -> None:
        """Be the state of that step, by a step of the optimizer, as training does."""
        for parameter in self.model:
            parameter.grad = parameter.detach() - step
        self.optimizer.step()
        super().become(step)

    def step(self) -> int:
        """As `Tiny.step`."""
        step = super().step()
        assert all(bool((parameter == step).all()) for parameter in self.model), f"torn: {step}"
        assert not step or all(bool((tensor == FROZEN).all()) for tensor in self.base)
        return step


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to save, and the call that shows that a save went it."""

    name: str
    shown_by: tuple[type, str]
    options: dict[str, Any] = field(default_factory=dict)
    """Of the manager."""
    num_elements: int = 1 << 17
    """Of each tensor of a `Trained` that can go it."""
    num_kept: int = 1
    num_before: int = 0
    """How many saves a process makes before the first that goes it."""
    direct_io: bool | None = None

    def new_state(self) -> Tiny:
        """A state that is saved so."""
        return Trained(self.num_elements)

    def store(self, root: Path) -> LocalStore:
        """The store to save to."""
        return LocalStore(root, direct_io=self.direct_io)

    def manager(self, root: Path, state: Tiny, **options: Any) -> CheckpointManager:
        """A manager that saves so."""
        given: dict[str, Any] = {"sinks": (), "keep": Last(self.num_kept), **self.options}
        return CheckpointManager(self.store(root), state.components, **given | options)

    def have_noted(
        self, patch: Callable[[type, str, Any], object], note: Callable[[], Any]
    ) -> None:
        """Call `note` whenever a save goes this way, after `patch(class, name, call)`."""
        patch(*self.shown_by, noting(getattr(*self.shown_by), note))


_WAYS = (
    Way(name="overlap", shown_by=(ImageTransfer, "run_later"), options={"overlap": True}),
    # 38 MiB, in waves of at most 32.
    Way(
        name="waves",
        shown_by=(WaveTransfer, "content"),
        options={"memory_budget": "32MiB"},
        num_elements=3 << 20,
    ),
    # Where few are kept nothing is shared, nor what is smaller than 1 MiB, nor by the first two.
    Way(name="links", shown_by=(LocalStore, "link"), num_kept=3, num_before=2),
    Way(name="direct", shown_by=(LocalBlockWriter, "_write_direct"), direct_io=True),
)
WAYS = {way.name: way for way in _WAYS}


class Plain(Way):
    """No other way, for a state that only says its step: its first step of an optimizer would
    import for seconds."""

    def new_state(self) -> Tiny:
        """See `Way.new_state`."""
        return Tiny(self.num_elements)


PLAIN = Plain(name="plain", shown_by=(CheckpointManager, "save"))


def takes_direct(folder: Path) -> bool:
    """Whether this file system takes direct writes at all."""
    try:
        LocalStore(folder, direct_io=True).create("probe", 0).abort()
    except errors.UnsupportedStore:
        return False
    return True


def possible_ways(folder: Path) -> dict[str, Way]:
    """Those that its file system goes."""
    return {name: way for name, way in WAYS.items() if not way.direct_io or takes_direct(folder)}


def noting(call: Callable[..., Any], note: Callable[[], Any]) -> Callable[..., Any]:
    """The call, which calls `note` when it came to anything."""

    def noted(*args: Any, **named: Any) -> Any:
        found = call(*args, **named)
        if found is None or found:
            note()
        return found

    return noted


def save_and_go_on(manager: CheckpointManager, state: Tiny, step: int) -> Checkpoint:
    """Save the state of this step, and train while that is under way."""
    state.become(step)
    pending = manager.save(step)
    state.become(step + 1)
    return pending.wait()


@contextmanager
def opened(store: Store, tiny: Tiny, **options: Any) -> Iterator[CheckpointManager]:
    """A manager that is closed at the end, also when its store has stopped."""
    manager = CheckpointManager(store, tiny.components, sinks=(), preflight=False, **options)
    try:
        yield manager
    finally:
        with suppress(errors.HoldfastError, Stopped):
            manager.close()
