"""Builds the content of a Lightning `.ckpt`, from which its Trainer resumes by `ckpt_path=`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.interop.exporting.files import ExportPlan
from holdfast.interop.exporting.values import Values
from holdfast.interop.source import LeftOut, Source

VERSION = "2.6.0"
"""Version of Lightning in whose form it is written, unless the source tells another."""
_VERSION_KEY = "pytorch-lightning_version"
_FRAMEWORK = "lightning"


def lightning_value(source: Source, values: Values, plan: ExportPlan) -> dict[str, Any]:
    """Return the content of a `.ckpt`, with placeholders for the tensors.

    Raises:
        UsageError: the source has no model, or no step.
    """
    if "model" not in source.parts:
        raise UsageError(f"{source.url}: no component 'model', which a .ckpt needs")
    kept = _kept(source, values)
    step = kept.get("global_step", source.step)
    if step is None:
        raise UsageError(f"{source.url}: has no step, without which no Trainer resumes")
    optimizers = [values.component(name) for name in _numbered(source, "optimizer")]
    schedulers = [values.component(name) for name in _numbered(source, "scheduler")]
    if "loops" not in kept:
        plan.notes.append(
            "the position is the step alone: Lightning begins the epoch from its first batch"
        )
    written = {"model", *_numbered(source, "optimizer"), *_numbered(source, "scheduler")}
    plan.left_out += [
        LeftOut(path=name, why="a .ckpt has no place for it")
        for name in source.parts
        if name not in {*written, *(("trainer", "state") if kept else ())}
    ]
    return {
        "epoch": kept.get("epoch", 0),
        "global_step": step,
        _VERSION_KEY: VERSION,
        "state_dict": _weights(source, values),
        "loops": _loops(step, len(schedulers)),
        "callbacks": {},
        "optimizer_states": optimizers,
        "lr_schedulers": schedulers,
        **kept,
    }


def _kept(source: Source, values: Values) -> dict[str, Any]:
    """Return the members of a `.ckpt` that a source from Lightning has kept."""
    tree = _trainer(source)
    if isinstance(bridged := tree.get("checkpoint"), Mapping):
        of_model = [name for name in tree.get("of_model", ()) if name != "state_dict"]
        return {
            **{key: values.value("trainer", one, f"trainer.{key}") for key, one in bridged.items()},
            **{name: _weights(source, values) for name in of_model},
        }
    if _VERSION_KEY not in tree:
        return {}
    found: dict[str, Any] = {}
    for name in ("trainer", "state"):
        part = source.parts.get(name)
        if part is not None and isinstance(part.tree, Mapping):
            found |= {
                key: values.value(name, node, f"{name}.{key}") for key, node in part.tree.items()
            }
    return found


def _trainer(source: Source) -> Mapping[str, Any]:
    """Return the component `trainer` of a file of Lightning, or of `holdfast.bridges.lightning`."""
    part = source.parts.get("trainer")
    if part is None or not isinstance(part.tree, Mapping):
        return {}
    return part.tree if part.tree.get("of", _FRAMEWORK) == _FRAMEWORK else {}


def _weights(source: Source, values: Values) -> Any:
    """Return the weights under their names in the LightningModule, of which they may be a part."""
    weights, part = values.component("model"), _trainer(source).get("part")
    if not isinstance(part, str):
        return weights
    return type(weights)((f"{part}.{name}", one) for name, one in weights.items())


def _numbered(source: Source, name: str) -> list[str]:
    """Return the components `name`, `name1`, `name2` and so on, in this order."""
    found = [one for one in source.parts if re.fullmatch(rf"{name}[0-9]*", one)]
    return sorted(found, key=lambda one: int(one.removeprefix(name) or 0))


def _loops(step: int, num_schedulers: int) -> dict[str, Any]:
    """Return the progress of a fit after `step` optimizer steps, at the beginning of an epoch."""
    done = {"ready": step, "completed": step}
    whole = done | {"started": step, "processed": step}
    none = dict.fromkeys(whole, 0)
    short = dict.fromkeys(done, 0)
    prefix = "epoch_loop."
    scheduled = done if num_schedulers else short
    fit = {
        "state_dict": {},
        f"{prefix}state_dict": {"_batches_that_stepped": step},
        f"{prefix}batch_progress": {"total": whole, "current": none, "is_last_batch": False},
        f"{prefix}scheduler_progress": {"total": scheduled, "current": short},
        f"{prefix}automatic_optimization.state_dict": {},
        f"{prefix}automatic_optimization.optim_progress": {
            "optimizer": {
                "step": {"total": done, "current": short},
                "zero_grad": {
                    "total": done | {"started": step},
                    "current": dict.fromkeys(("ready", "completed", "started"), 0),
                },
            }
        },
        f"{prefix}manual_optimization.state_dict": {},
        f"{prefix}manual_optimization.optim_step_progress": {"total": short, "current": short},
        f"{prefix}val_loop.state_dict": {},
        f"{prefix}val_loop.batch_progress": {
            "total": none, "current": none, "is_last_batch": False,
        },
        "epoch_progress": {"total": none, "current": none},
    }  # fmt: skip
    return {"fit_loop": fit}
