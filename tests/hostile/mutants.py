"""Mutants: defects put into our own readers, each of which the harness has to notice."""

from __future__ import annotations

import importlib
import os
import pickle
from typing import Any

from tests.hostile.sandbox import Mutant

from holdfast.format import layout
from holdfast.format.nodes import EnumValue
from holdfast.loading import block_reader
from holdfast.state import trees as state_trees
from holdfast.state.planning import merge, plans
from holdfast.store.local import folders as localfolders
from holdfast.store.local import store as localstore


def _follow_links() -> None:
    localfolders.READ &= ~os.O_NOFOLLOW
    localfolders._NOFOLLOW = 0


def _no_name_checks() -> None:
    layout.check_file_name = lambda name: None
    layout.check_component = lambda name: None
    layout.tensor_file = lambda name, number: f"{name}/../../../outside/canary"
    localstore.check_key = lambda key: None
    localfolders.READ &= ~os.O_NOFOLLOW


def _unpickle() -> None:
    real = block_reader.read_file

    def careless(*args: Any, **options: Any) -> bytes:
        data = real(*args, **options)
        if data.startswith(b"\x80"):
            pickle.loads(data)
        return data

    block_reader.read_file = careless


def _import_enumerations() -> None:
    real = state_trees._lift_plain

    def careless(node: Any) -> Any:
        if isinstance(node, EnumValue):
            module, _, name = node.type.partition(":")
            return getattr(importlib.import_module(module), name, None)
        return real(node)

    state_trees._lift_plain = careless


def _foreign_errors() -> None:
    def careless(*args: Any, **options: Any) -> Any:
        raise KeyError("weight")

    block_reader.open_index = careless


def _half_loads() -> None:
    """Change a live tree before anything was checked."""
    real = plans.TreePlan.check

    def careless(self: Any, *args: Any) -> None:
        self._live["step"] = -1
        real(self, *args)

    plans.TreePlan.check = careless


def _copies_past_the_end() -> None:
    merge.Merge.commit = lambda self: os.kill(os.getpid(), 11)


_ENUM = "tree: enum antigravity:A, as an enumeration"
MUTANTS: dict[str, Mutant] = {
    "symbolic links are followed": Mutant(
        shows=r"open \(",
        break_=_follow_links,
        cases=(
            "symlink to a twin in place of FOLDER/model-00000.safetensors",
            "relative symlink to a twin in place of FOLDER/index.json",
            "symlink to a twin in place of FOLDER/manifest.json",
        ),
    ),
    "names are not checked": Mutant(
        shows=r"open \(", break_=_no_name_checks, cases=("path 7 '../outside/canary' as component",)
    ),
    "pickles are loaded": Mutant(
        shows="pickle.find_class", break_=_unpickle, cases=("pickle in place of model-00000.json",)
    ),
    "enumerations are imported": Mutant(
        shows="import ", break_=_import_enumerations, cases=(_ENUM,)
    ),
    "an error of another kind": Mutant(
        shows="KeyError", break_=_foreign_errors, cases=("index requires 'sharding'",)
    ),
    "live state changes before the checks": Mutant(
        shows="live state changed", break_=_half_loads, cases=("pickle in place of rng-00000.json",)
    ),
    "a crash": Mutant(shows="SIGSEGV", break_=_copies_past_the_end, cases=("manifest with codec",)),
}
