"""The files of a checkpoint of transformers' Trainer beside its model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.format.nodes import GeneratorState
from holdfast.interop.exporting.files import ExportPlan, PlannedFile
from holdfast.interop.exporting.huggingface import FILES
from holdfast.interop.exporting.torchfile import plan_torch_file
from holdfast.interop.exporting.values import Values
from holdfast.interop.exporting.weights import Report, text_file
from holdfast.interop.source import LeftOut, Source

_FRAMEWORK = "transformers"
"""Value of `of` in the component `trainer` of the bridge from transformers."""


def plan_trainer(
    source: Source, values: Values, plan: ExportPlan, *, report: Report
) -> list[PlannedFile]:
    """Plan the files of a Trainer's checkpoint beside its model.

    Raises:
        UsageError: the source has no step.
    """
    files = []
    for component, name in (("optimizer", "optimizer.pt"), ("scheduler", "scheduler.pt")):
        if component in source.parts:
            value = values.component(component)
            files.append(plan_torch_file(source, name, value, report))
        else:
            plan.notes.append(f"no {name}: the source has no component {component!r}")
    if "rng" in source.parts:
        state = _generators(source, values)
        files.append(plan_torch_file(source, "rng_state.pth", state, report))
    files.append(_trainer_state(source, plan))
    written = {"model", "optimizer", "scheduler", "rng", "trainer", FILES}
    plan.left_out += [
        LeftOut(path=name, why="a Trainer's folder has no place for it")
        for name in source.parts
        if name not in written
    ]
    return files


def _generators(source: Source, values: Values) -> Any:
    """Return the states of the generators as a Trainer saves them."""
    part = source.part("rng")
    if not isinstance(part.tree, Mapping) or not isinstance(part.tree.get("torch"), GeneratorState):
        return values.component("rng")
    found = {
        name: values.value("rng", part.tree[name], f"rng.{name}")
        for name in ("python", "numpy")
        if name in part.tree
    }
    found["cpu"] = values.value("rng", part.tree["torch"], "rng.torch")
    devices = part.tree.get("devices") or {}
    for kind, states in devices.items():
        made = [values.value("rng", one, f"rng.devices.{kind}") for one in states]
        found[kind] = made[0] if len(made) == 1 else made
    return found


def _trainer_state(source: Source, plan: ExportPlan) -> PlannedFile:
    part = source.parts.get("trainer")
    tree = part.tree if part is not None else None
    if isinstance(tree, Mapping) and {"global_step", "log_history"} <= {*tree}:
        state = dict(tree)
    elif source.step is not None and (bridged := _of_bridge(tree)) is not None:
        state = {"global_step": source.step, **bridged["state"], **_arguments(source, bridged)}
        plan.notes += _notes_of_bridge(bridged)
    elif source.step is None:
        raise UsageError(f"{source.url}: has no step, without which no Trainer resumes")
    else:
        state = {"global_step": source.step, "epoch": 0, "log_history": [], **_batch_size(source)}
        plan.notes.append(
            "trainer_state.json has the step alone: a Trainer computes the epoch from it, and "
            "its log begins anew"
        )
    text = json.dumps(state, indent=2, sort_keys=True, default=_refuse) + "\n"
    return text_file("trainer_state.json", text)


def _of_bridge(tree: Any) -> Mapping[str, Any] | None:
    """Return what `holdfast.bridges.transformers` has saved, of several ranks that of the first."""
    first = tree[0] if isinstance(tree, list) and tree else tree
    if not isinstance(first, Mapping) or first.get("of") != _FRAMEWORK:
        return None
    return first if isinstance(first.get("state"), Mapping) else None


def _arguments(source: Source, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch size and the intervals, which a Trainer takes from the file."""
    recorded = saved.get("arguments")
    given = recorded if isinstance(recorded, Mapping) else {}
    return {**_batch_size(source), **{k: v for k, v in given.items() if v is not None}}


def _batch_size(source: Source) -> dict[str, int]:
    """Return the batch size of the data, without which a Trainer fails; 0 where it is not known."""
    part = source.parts.get("data")
    found = part.tree.get("batch_size") if part and isinstance(part.tree, Mapping) else None
    return {"train_batch_size": found if isinstance(found, int) else 0}


def _notes_of_bridge(saved: Mapping[str, Any]) -> Iterator[str]:
    yield "a plain Trainer draws the order of its data by itself, unless it is sequential"
    if saved.get("pending_loss"):
        yield (
            "the first loss that is logged is the mean since this step: the folder has no place "
            "for those not logged yet"
        )
    if names := [str(name) for name, _ in saved.get("callbacks") or ()]:
        yield f"states of callbacks are left out: {', '.join(names)}"


def _refuse(value: Any) -> Any:
    raise UsageError(f"trainer: a {type(value).__name__} has no form in trainer_state.json")
