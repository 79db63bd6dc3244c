"""Assigns the files of a trainer's folder to components, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.interop.layouts.files import number_component

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
_WHY = {
    "training_args.bin": "a pickle of the Trainer's arguments, which only its code can read",
}
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
