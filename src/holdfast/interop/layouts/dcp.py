"""Assigns the items of a DCP folder to components, by the keys of the state and their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import FormatError
from holdfast.format import strictjson
from holdfast.interop.layouts.files import ComponentLayout
from holdfast.interop.pickles.values import TensorView
from holdfast.interop.source import LeftOut

_COMPONENTS: Mapping[str, str] = {
    **dict.fromkeys(("model", "module", "state_dict", "model_state_dict", "app_model"), "model"),
    **dict.fromkeys(("optimizer", "optim", "optimizers", "optimizer_state_dict"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedulers", "schedulers"), "scheduler"),
    **dict.fromkeys(("data", "dataloader", "data_loader", "train_dataloader"), "data"),
    **dict.fromkeys(("rng", "rng_state", "rng_states"), "rng"),
    **dict.fromkeys(("trainer", "train_state", "trainer_state"), "trainer"),
}
"""Keys of a state that was saved → the component that they are here."""
_STEPS = ("step", "global_step", "iteration")
_MAX_JSON_NBYTES = 4 << 20
_SHARDED_OBJECT = re.compile(r"(.+)/shard_([0-9.]+)_([0-9.]+)")
_OPTIMIZER = re.compile(r"((?:chained_[0-9]+\.)?)optimizer\.(.+)")


def dcp_layout(state: Mapping[str | int, Any]) -> ComponentLayout:
    """Find the components of a state that DCP has saved.

    A tensor that no key leads to is the model's, as in torchtitan.
    """
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
        LeftOut(f"train/{name}", "another rank's; that of rank 0 is taken")
        for name in others[:1000]
        if name != "rank0.pt"
    ]
    step = _find_step(rest, None)
    return ComponentLayout(
        format="olmo-core", components=components, paths=paths, step=step, left_out=left_out
    )


def megatron_layout(items: Mapping[str, Any], common: Any) -> ComponentLayout:
    """Find the components of a `torch_dist` folder of Megatron Core.

    Its items have names alone: those of the optimizer begin with `optimizer.`, and others are the
    model's. `common` is all that is the same on each rank.
    """
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
        step=_find_step(rest, None),
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


def _find_step(*places: Any) -> int | None:
    for place in places:
        for key in _STEPS if isinstance(place, dict) else ():
            if type(place.get(key)) is int and 0 <= place[key] < 2**53:
                return int(place[key])
    return None


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(_MAX_JSON_NBYTES + 1)
    return strictjson.loads(data, what=str(path), max_nbytes=_MAX_JSON_NBYTES, max_values=100_000)
