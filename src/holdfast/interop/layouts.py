"""Assigns the content of trainers' files and folders to components, by the names in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import FormatError
from holdfast.format import strictjson
from holdfast.interop.files import read_small_file
from holdfast.interop.pickles.values import TensorView, Unknown
from holdfast.interop.source import LeftOut


@dataclass(slots=True, kw_only=True)
class ComponentLayout:
    """The components of a file, as descriptions by name."""

    format: str = "torch"
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
    """Find components by names that people use, as in Ignite's files; None without a container."""
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


def _find_step(*places: Any) -> int | None:
    """Return the first step in dicts; values that are no dicts have none."""
    found = (
        _natural(place.get(name))
        for place in places
        for name in (_STEPS if isinstance(place, dict) else ())
    )
    return next((step for step in found if step is not None), None)


def _natural(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


STATE_FILE = "trainer_state.json"
"""File with the steps and the history of transformers' Trainer."""

_NUMBER = r"(?:_(?P<n>[0-9]{1,4}))?"
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (component, re.compile(pattern))
    for component, pattern in (
        ("model", rf"(?:model|pytorch_model){_NUMBER}\.(?:safetensors|bin)"),
        ("model", r"(?:model|pytorch_model)-[0-9]{5}-of-[0-9]{5}\.(?:safetensors|bin)"),
        ("model", r"adapter_model\.(?:safetensors|bin)"),
        ("optimizer", rf"optimizer{_NUMBER}\.(?:bin|pt)"),
        ("scheduler", rf"scheduler{_NUMBER}\.(?:bin|pt)"),
        ("data", rf"(?:sampler|dl_state_dict){_NUMBER}\.bin"),
        ("rng", rf"random_states{_NUMBER}\.pkl"),
        ("rng", rf"rng_state{_NUMBER}\.pth"),
        ("state", rf"custom_checkpoint{_NUMBER}\.pkl"),
        ("scaler", r"scaler\.pt"),
    )
)
_WHY = {"training_args.bin": "a pickle of the Trainer's arguments, which only its code can read"}
_ABOUT = ("model.safetensors.index.json", "pytorch_model.bin.index.json", STATE_FILE)
_FORMATS = (
    ("hf-trainer", (STATE_FILE,)),
    ("accelerate", ("random_states_0.pkl", "optimizer.bin")),
    ("hf-trainer", ("optimizer.pt", "scheduler.pt")),
)


@dataclass(slots=True, kw_only=True)
class FolderLayout:
    """Files of a folder by component; several files of one component are its shards."""

    format: str
    components: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    """Files that are not carried over, with the reason."""
    files: list[str] = field(default_factory=list)
    """Files that say something about others."""


def folder_layout(names: Sequence[str]) -> FolderLayout | None:
    """Find the components in a folder with these files; None if it is of no trainer."""
    format = next((name for name, files in _FORMATS if any(f in names for f in files)), None)
    if format is None:
        return None
    found = FolderLayout(format=format)
    for name in sorted(names):
        component = _match_component(name)
        if component is not None:
            found.components.setdefault(component, []).append(name)
        elif name in _WHY:
            found.others[name] = _WHY[name]
        elif name in _ABOUT:
            found.files.append(name)
    return found


def _match_component(name: str) -> str | None:
    for component, pattern in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is not None:
            return number_component(component, int(match.groupdict().get("n") or 0))
    return None


_COMPONENTS: Mapping[str, str] = {
    **dict.fromkeys(("model", "module", "state_dict", "model_state_dict", "app_model"), "model"),
    **dict.fromkeys(("optimizer", "optim", "optimizers", "optimizer_state_dict"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedulers", "schedulers"), "scheduler"),
    **dict.fromkeys(("data", "dataloader", "data_loader", "train_dataloader"), "data"),
    **dict.fromkeys(("rng", "rng_state", "rng_states"), "rng"),
    **dict.fromkeys(("trainer", "train_state", "trainer_state"), "trainer"),
}
"""Keys of a state that was saved → the component that they are here."""
_MAX_JSON_NBYTES = 4 << 20
_SHARDED_OBJECT = re.compile(r"(.+)/shard_([0-9.]+)_([0-9.]+)")
_OPTIMIZER = re.compile(r"((?:chained_[0-9]+\.)?)optimizer\.(.+)")


def dcp_layout(state: Mapping[str | int, Any]) -> ComponentLayout:
    """Find the components of a DCP state; tensors without a key are the model's."""
    components: dict[str, Any] = {}
    paths: dict[str, str] = {}
    rest: dict[str | int, Any] = {}
    weights: dict[str | int, Any] = {}
    for key, value in state.items():
        name = _COMPONENTS.get(key) if isinstance(key, str) else None
        if name is not None and name not in components and isinstance(value, dict | list):
            components[name], paths[name] = value, str(key)
        elif type(value) is TensorView or str(key).endswith("_extra_state"):
            weights[key] = value
        else:
            rest[key] = value
    if weights and "model" not in components:
        components = {"model": weights, **components}
    else:
        rest |= weights
    if rest:
        components["state"] = rest
    step = _find_step(rest, components.get("trainer"))
    return ComponentLayout(format="dcp", components=components, paths=paths, step=step)


def olmo_layout(folder: Path, state: Mapping[str | int, Any], trainer: Any) -> ComponentLayout:
    """Find the components of a folder of OLMo-core; `trainer` is what rank 0 has saved."""
    found = dcp_layout(state)
    rest = dict(trainer) if isinstance(trainer, dict) else {}
    components, paths = dict(found.components), {}
    for key, name in (("data_loader", "data"), ("rng", "rng")):
        if key in rest:
            components[name], paths[name] = rest.pop(key), f"train/rank0.pt.{key}"
    if rest:
        components["trainer"], paths["trainer"] = rest, "train/rank0.pt"
    config = _read_json(folder / "config.json")
    if config is not None:
        components["state"] = {**components.get("state", {}), "config": config}
    others = sorted(one.name for one in (folder / "train").glob("rank*.pt"))
    left_out = [
        LeftOut(f"train/{name}", "another rank's; rank 0's is used")
        for name in others[:1000]
        if name != "rank0.pt"
    ]
    step = _find_step(rest)
    return ComponentLayout(
        format="olmo-core", components=components, paths=paths, step=step, left_out=left_out
    )


def megatron_layout(items: Mapping[str, Any], common: Any) -> ComponentLayout:
    """Find the components of Megatron's `torch_dist`, of named items and a `common` part."""
    rest = dict(common) if isinstance(common, dict) else {}
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    components: dict[str, Any] = {}
    for name, value in _join_shards(items).items():
        match = _OPTIMIZER.fullmatch(name)
        if match:
            optimizer[match[1] + match[2]] = value
        elif name in _COMPONENTS:
            components[_COMPONENTS[name]] = value
        elif type(value) is TensorView or name.endswith("_extra_state"):
            model[name] = value
        else:
            rest[name] = value
    if not rest.get("model", True):
        del rest["model"]  # all of it is sharded
    if isinstance(rest.get("optimizer"), dict):
        optimizer |= {
            key: one for key, one in rest.pop("optimizer").items() if key not in optimizer
        }
    if "opt_param_scheduler" in rest:
        components["scheduler"] = rest.pop("opt_param_scheduler")
    components = {"model": model, "optimizer": optimizer, **components, "state": rest}
    return ComponentLayout(
        format="megatron",
        components={name: one for name, one in components.items() if one},
        step=_find_step(rest),
    )


def _join_shards(items: Mapping[str, Any]) -> dict[str, Any]:
    """Join the shards of objects: several become a list, in the order of their positions."""
    found: dict[str, Any] = {}
    shards: dict[str, list[tuple[list[int], Any]]] = {}
    for name, value in items.items():
        match = _SHARDED_OBJECT.fullmatch(name)
        if match is None:
            found[name] = value
            continue
        position = [int(one) for one in match[2].split(".") if one][:8]
        only = value[0] if type(value) is list and len(value) == 1 else value
        shards.setdefault(match[1], []).append((position, only))
    for name, several in shards.items():
        if name in found:
            raise FormatError(f"{name!r:.200}: a tensor, and an object in shards, too")
        values = [value for _, value in sorted(several, key=lambda one: one[0])]
        found[name] = values[0] if len(values) == 1 else values
    return found


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return None
    data = read_small_file(path, _MAX_JSON_NBYTES)
    return strictjson.loads(data, what=str(path), max_nbytes=_MAX_JSON_NBYTES, max_values=100_000)
