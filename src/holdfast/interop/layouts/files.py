"""Assigns the content of a trainer's file to components, by the names in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import FormatError
from holdfast.interop.pickles.values import TensorView, Unknown
from holdfast.interop.source import LeftOut


@dataclass(slots=True, kw_only=True)
class ComponentLayout:
    """The components of a file, as descriptions by name."""

    format: str = "torch"
    """Name of the format, such as "lightning"."""
    components: dict[str, Any]
    step: int | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of components that are not to be found in their values."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Where a component is in the file, for messages; its name if absent."""
    left_out: Sequence[LeftOut] = ()
    may_be_empty: bool = False
    """Whether all of it may be left out, as it is one of several files."""


def file_layout(root: Any) -> ComponentLayout:
    """Find the components of a file by what it holds."""
    if isinstance(root, Unknown):
        raise FormatError(
            f"a whole object of {root.name} was saved, which only its code can read; "
            "save its state_dict() instead"
        )
    if not isinstance(root, dict):
        return ComponentLayout(
            components={"model" if isinstance(root, TensorView) else "state": root}
        )
    if "state_dict" in root and "pytorch-lightning_version" in root:
        return _lightning(root)
    state = root.get("state")
    if isinstance(state, dict) and "timestamp" in state and "rng" in root:
        return _composer(root, state)
    return _by_names(root) or ComponentLayout(components={_name_of(root): root})


def make_layout(component: str) -> Callable[[Any], ComponentLayout]:
    """Return the layout of a file that is one component, in a folder of several files."""
    return lambda root: ComponentLayout(components={component: root}, may_be_empty=True)


def number_component(component: str, number: int) -> str:
    """Name of the component of a kind with this number: `optimizer`, `optimizer1`, …"""
    return component if number == 0 else f"{component}{number}"


def _name_of(root: dict[Any, Any]) -> str:
    """Name the component of a dict without known names: a model, if most values are tensors."""
    tensors = sum(type(value) is TensorView for value in root.values())
    return "model" if tensors and 2 * tensors >= len(root) else "state"


class _Parts:
    """Collects components, numbers those of one kind, and records where each was found."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}
        self.paths: dict[str, str] = {}

    def add_component(self, component: str, value: Any, path: str) -> None:
        number = 0
        while number_component(component, number) in self.components:
            number += 1
        self.components[number_component(component, number)] = value
        self.paths[number_component(component, number)] = path

    def add_each(self, component: str, value: Any, path: str) -> None:
        """Add each item of a list, or of a dict by name; an empty one adds nothing."""
        items = enumerate(value) if isinstance(value, list | tuple) else value.items()
        for name, item in items:
            self.add_component(component, item, f"{path}.{name}")

    def add_rest(self, component: str, rest: dict[Any, Any]) -> None:
        """Add what is left of a dict, if anything."""
        if rest:
            self.components[component] = rest
            self.paths[component] = ""


_LIGHTNING_PLAIN = ("state_dict", "optimizer_states", "lr_schedulers")
_LIGHTNING_OWN = (
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "loops",
    "callbacks",
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_type",
    "MixedPrecision",
    "MixedPrecisionPlugin",
    "native_amp_scaling_state",
    "amp_scaling_state",
    "validation_end",
)


def _lightning(root: dict[Any, Any]) -> ComponentLayout:
    parts = _Parts()
    parts.add_component("model", root["state_dict"], "state_dict")
    for name, component in (("optimizer_states", "optimizer"), ("lr_schedulers", "scheduler")):
        if isinstance(root.get(name), list):
            parts.add_each(component, root[name], name)
    parts.add_rest("trainer", {name: root[name] for name in _LIGHTNING_OWN if name in root})
    known = (*_LIGHTNING_PLAIN, *_LIGHTNING_OWN)
    parts.add_rest("state", {name: value for name, value in root.items() if name not in known})
    step = _natural(root.get("global_step"))
    return ComponentLayout(
        format="lightning", components=parts.components, step=step, paths=parts.paths
    )


def _composer(root: dict[Any, Any], state: dict[Any, Any]) -> ComponentLayout:
    parts = _Parts()
    rest = dict(state)
    if "model" in rest:
        parts.add_component("model", rest.pop("model"), "state.model")
    for name, component in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        if isinstance(rest.get(name), dict):
            parts.add_each(component, rest.pop(name), f"state.{name}")
    if "dataset_state" in rest:
        parts.add_component("data", rest.pop("dataset_state"), "state.dataset_state")
    parts.add_component("rng", root["rng"], "rng")
    parts.add_rest("trainer", rest)
    other = {name: value for name, value in root.items() if name not in ("state", "rng")}
    parts.add_rest("state", other)
    timestamp = state["timestamp"]
    if isinstance(timestamp, dict) and isinstance(timestamp.get("Timestamp"), dict):
        timestamp = timestamp["Timestamp"]
    step = _natural(timestamp.get("batch")) if isinstance(timestamp, dict) else None
    return ComponentLayout(
        format="composer", components=parts.components, step=step, paths=parts.paths
    )


_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_state_dict", "state_dict", "model_state"), "model"),
    **dict.fromkeys(("net", "network", "module"), "model"),
    **dict.fromkeys(("optimizer", "optimizer_state_dict", "optimizer_state"), "optimizer"),
    **dict.fromkeys(("optimizers", "optim", "optim_state_dict", "opt"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "scheduler_state_dict"), "scheduler"),
    **dict.fromkeys(("lr_scheduler_state_dict", "schedulers", "lr_schedulers"), "scheduler"),
    **dict.fromkeys(("data", "data_loader", "dataloader", "sampler", "train_loader"), "data"),
    **dict.fromkeys(("rng", "rng_state", "rng_states", "random_state"), "rng"),
    **dict.fromkeys(("trainer", "engine"), "trainer"),
}
_STEPS = ("global_step", "step", "iteration", "iter", "num_updates")


def _by_names(root: dict[Any, Any]) -> ComponentLayout | None:
    """Find components by the names that people use; None without any that is a dict or a list.

    Ignite's files are of this kind: objects by the names that a user gave, and the engine's state.
    """
    found = {
        name: _NAMES[name]
        for name, value in root.items()
        if type(name) is str and name in _NAMES and isinstance(value, dict | list) and value
    }
    if not found:
        return None
    parts = _Parts()
    for name, component in found.items():
        value = root[name]
        is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
        if is_list and component in ("optimizer", "scheduler"):
            parts.add_each(component, value, name)
        else:
            parts.add_component(component, value, name)
    parts.add_rest("state", {name: value for name, value in root.items() if name not in found})
    engine = parts.components.get("trainer")
    is_ignite = isinstance(engine, dict) and {"epoch_length", "iteration"} <= engine.keys()
    return ComponentLayout(
        format="ignite" if is_ignite else "torch",
        components=parts.components,
        step=_find_step(engine if is_ignite else root),
        paths=parts.paths,
    )


def _find_step(values: Any) -> int | None:
    found = (_natural(values.get(name)) for name in _STEPS)
    return next((step for step in found if step is not None), None)


def _natural(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
