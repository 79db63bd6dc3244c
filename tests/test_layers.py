"""The layers of docs/design.md, section 7, read from the syntax trees of src/holdfast.

Every import counts, also one inside a function or under TYPE_CHECKING. What runs at import time
decides whether torch is loaded.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "holdfast"
DESIGN = SRC.parent.parent / "docs" / "design.md"

LAYERS = (
    ("errors", "events", "version"),
    ("arguments", "launched", "system"),
    ("store", "threads"),
    ("format",),
    ("state", "policy", "ranks", "keys"),
    ("root", "staging"),
    ("encryption", "results"),
    ("ownership",),
    ("control", "loading"),
    ("saving",),
    ("checkpoints", "maintenance"),
    ("replication",),
    ("session",),
    ("load_controller", "save_controller"),
    ("manager",),
    ("data", "interop", "sinks"),
    ("weights",),
    ("train", "bridges"),
    ("cli", "testing"),
)
# The same inside folders that have many parts.
INNER: dict[str, tuple[tuple[str, ...], ...]] = {
    "store": (
        ("base",),
        (
            "local",
            "memory",
            "remote",
        ),
    ),
    "threads": (
        (
            "buffers",
            "progress",
        ),
        ("workers",),
    ),
    "ranks": (
        ("coordinator",),
        (
            "hosts",
            "liveness",
            "messages",
        ),
        ("c10d",),
        ("chosen",),
    ),
    "root": (
        (
            "address",
            "best",
            "documents",
        ),
        (
            "attempts",
            "byte_ranges",
            "history",
            "history_writer",
            "single",
        ),
        ("catalog",),
        (
            "commit",
            "remaining",
            "upload_records",
        ),
    ),
    "ownership": (
        (
            "process",
            "tiered_options",
        ),
        (
            "claim",
            "tiered_catalog",
        ),
        (
            "annotations",
            "leases",
            "owner",
        ),
        (
            "access",
            "deletion",
            "tiered",
        ),
    ),
    "saving": (
        (
            "probe",
            "progress_counters",
            "recorder",
            "shares",
            "step_boundary",
            "validated",
        ),
        (
            "compression",
            "participants",
            "script_warnings",
            "settings_history",
        ),
        ("links",),
        (
            "partner_copies",
            "save_messages",
        ),
        (
            "distributed",
            "write_files",
        ),
        ("save",),
        ("handover",),
        (
            "finish",
            "saver",
        ),
    ),
    "maintenance": (
        (
            "gc",
            "preflight",
            "recorded_costs",
            "resume_plan",
            "verify_reads",
        ),
        ("encrypted",),
        ("verify",),
        ("retention",),
        (
            "delete",
            "forecast",
            "housekeeping",
        ),
    ),
    "replication": (
        ("upload",),
        (
            "copy_checkpoints",
            "queue",
            "upload_thread",
        ),
        ("hosts",),
        ("mirror",),
    ),
    "train": (
        (
            "argument_checks",
            "group",
        ),
        ("strategies",),
        ("averages",),
        (
            "outputs",
            "training",
        ),
        (
            "callbacks",
            "curves",
        ),
        (
            "loggers",
            "schedules",
            "status",
        ),
        ("step",),
        ("parts",),
        (
            "build",
            "evaluation",
        ),
        ("fit",),
        ("trainer",),
    ),
}
RANK = {folder: rank for rank, folders in enumerate(LAYERS) for folder in folders}
WITHOUT_TORCH = (
    "errors",
    "events",
    "version",
    "arguments",
    "launched",
    "system",
    "store",
    "format",
    "policy",
    "maintenance",
    "replication",
    "cli",
)
WITHOUT_TORCH_MODULES = (
    "holdfast.root.catalog",
    "holdfast.control.stop",
    "holdfast.sinks",
    "holdfast.interop.comparing.differences",
    "holdfast.interop.comparing.statistics",
    "holdfast.interop.importing",
    "holdfast.interop.opening",
    "holdfast.interop.source",
    "holdfast.ranks.messages",
    "holdfast.state.patterns",
    "holdfast.testing.ranks",
)
# The only modules that speak to other ranks: through the group's store, and by collectives. (The
# bridges to Lightning and transformers ask the trainer to.)
SPEAKERS = {
    "holdfast.bridges.ignite.run",
    "holdfast.ranks.c10d",
    "holdfast.train.group",
    "holdfast.train.strategies",
}

# The package's own lazy table may name everything; whoever drives a whole job may use it.
ROOT_USERS = ("cli", "testing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, as written in `module` at `line`."""

    module: str
    line: int
    target: str
    is_lazy: bool
    is_for_types: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """The modules of a source folder named `holdfast`, by dotted name."""

    modules: dict[str, ast.Module]
    known: dict[str, list[Import]] = field(default_factory=dict)
    """The imports of the modules that were asked for."""

    @classmethod
    def read(cls, src: Path) -> Tree:
        files = {path: path.relative_to(src.parent) for path in sorted(src.rglob("*.py"))}
        names = {
            path: ".".join(file.with_suffix("").parts).removesuffix(".__init__")
            for path, file in files.items()
        }
        return cls({names[p]: ast.parse(p.read_text("utf-8"), str(p)) for p in files})

    def imports(self, module: str) -> list[Import]:
        if module not in self.known:
            walk = self._walk(module, self.modules[module], is_lazy=False, is_for_types=False)
            self.known[module] = [*walk]
        return self.known[module]

    def _walk(
        self, module: str, node: ast.AST, *, is_lazy: bool, is_for_types: bool
    ) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in self._targets(child):
                yield Import(
                    module=module,
                    line=child.lineno,  # type: ignore[attr-defined]
                    target=target,
                    is_lazy=is_lazy,
                    is_for_types=is_for_types,
                )
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from self._walk(
                module, child, is_lazy=is_lazy or inside, is_for_types=is_for_types or types
            )

    def _targets(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            full = [f"{base}.{alias.name}" for alias in node.names]
            return [name if name in self.modules else base for name in full]
        return []


def folder(module: str) -> str:
    """The part of the package that a module belongs to; "" for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def layer_breaches(tree: Tree) -> list[str]:
    found = []
    for module in tree.modules:
        for item in tree.imports(module):
            problem = _breach(item)
            if problem:
                found.append(f"{module}:{item.line} imports {item.target}: {problem}")
    return found


def _breach(item: Import) -> str | None:
    here, there = folder(item.module), folder(item.target)
    if item.target.startswith("."):
        return "imports are absolute"
    if not (item.target + ".").startswith("holdfast."):
        return None
    if here == "":
        return None if item.is_for_types or item.is_lazy else "the package imports lazily"
    if there == "":
        return None if here in ROOT_USERS else "the package's lazy table is above this layer"
    if here not in RANK or there not in RANK:
        return "a folder that docs/design.md does not name"
    if here == there or RANK[there] < RANK[here]:
        return None
    return "upward"


def inner_breaches(tree: Tree, outer: str, levels: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports between the parts of a folder that do not go down, and parts without a level."""
    rank = {part: n for n, parts in enumerate(levels) for part in parts}
    parts = children(tree, f"holdfast.{outer}")
    found = [f"holdfast.{outer}.{part}: no level" for part in sorted(parts ^ rank.keys())]
    for (upper, lower), items in edges(tree, f"holdfast.{outer}").items():
        if rank.get(upper, 0) <= rank.get(lower, 0):
            found += [f"{item.module}:{item.line} imports {item.target}: upward" for item in items]
    return found


def circles(tree: Tree) -> list[str]:
    """Folders at any depth of which some parts import each other in a circle."""
    packages = {name.rpartition(".")[0] for name in tree.modules} - {""}
    return [f"{name}: {', '.join(stuck)}" for name in packages if (stuck := _circle(tree, name))]


def _circle(tree: Tree, package: str) -> list[str]:
    uses: dict[str, set[str]] = {part: set() for part in children(tree, package)}
    for upper, lower in edges(tree, package):
        uses[upper].add(lower)
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def children(tree: Tree, package: str) -> set[str]:
    """The modules and folders right inside a package."""
    return {part for name in tree.modules if (part := _child(name, package))}


def edges(tree: Tree, package: str) -> dict[tuple[str, str], list[Import]]:
    """(importing part, imported part) of a package, with the imports."""
    found: dict[tuple[str, str], list[Import]] = {}
    for module in tree.modules:
        upper = _child(module, package)
        for item in tree.imports(module) if upper else ():
            lower = _child(item.target, package)
            if lower and lower != upper:
                found.setdefault((upper, lower), []).append(item)
    return found


def _child(module: str, package: str) -> str:
    return (
        module.removeprefix(f"{package}.").split(".")[0] if module.startswith(f"{package}.") else ""
    )


def torch_breaches(tree: Tree) -> list[str]:
    guarded = [m for m in tree.modules if folder(m) in WITHOUT_TORCH or m in WITHOUT_TORCH_MODULES]
    found = []
    for module in guarded:
        chain = _chain_to_torch(tree, module)
        if chain:
            found.append(" -> ".join(chain))
        for item in tree.imports(module):
            if item.target.split(".")[0] == "torch" and not item.is_for_types:
                found.append(f"{module}:{item.line} imports torch")
    return found


def _chain_to_torch(tree: Tree, start: str) -> list[str] | None:
    """The shortest chain of imports that run at import time and end at torch."""
    chains, seen = [[start]], {start}
    for chain in chains:
        for target in _runs(tree, chain[-1]):
            if target.split(".")[0] == "torch":
                return [*chain, target]
            if target in tree.modules and target not in seen:
                seen.add(target)
                chains.append([*chain, target])
    return None


def _runs(tree: Tree, module: str) -> Iterator[str]:
    """What importing a module imports, the packages above each module included."""
    for item in tree.imports(module):
        if not item.is_lazy and not item.is_for_types:
            parts = item.target.split(".")
            yield from (".".join(parts[: n + 1]) for n in range(len(parts)))


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree.read(SRC)


def test_imports_go_down_only(tree: Tree) -> None:
    """Design, section 7: a layer knows only those below it."""
    assert len(tree.modules) > 10
    assert layer_breaches(tree) == []


@pytest.mark.parametrize("outer", INNER)
def test_imports_inside_a_folder_go_down_only(tree: Tree, outer: str) -> None:
    """Design, section 7: each part of a folder knows only those below it."""
    assert inner_breaches(tree, outer, INNER[outer]) == []


def test_no_folder_holds_a_circle(tree: Tree) -> None:
    """At any depth, modules and folders can be read from the bottom up."""
    assert circles(tree) == []


def test_storage_format_policy_care_and_cli_do_not_import_torch(tree: Tree) -> None:
    """Design, section 7: a listing on a machine without an accelerator pays for no torch."""
    assert torch_breaches(tree) == []


def test_few_modules_speak_to_other_ranks(tree: Tree) -> None:
    """Everything else is given a coordinator; `state` knows DTensors, `interop` DCP's storage."""
    found = {
        m
        for m in tree.modules
        for i in tree.imports(m)
        if "distributed" in i.target
        and not i.target.startswith(
            ("torch.distributed.tensor", "torch.distributed.checkpoint", "holdfast.")
        )
    }
    assert found == SPEAKERS


def test_the_layers_are_those_of_the_design() -> None:
    text = DESIGN.read_text("utf-8").replace("\n", " ")
    for levels in (LAYERS, *INNER.values()):
        assert " < ".join(", ".join(parts) for parts in levels) in text


def test_those_parts_leave_torch_out_of_a_new_process(tree: Tree) -> None:
    modules = sorted(
        m
        for m in tree.modules
        if m == "holdfast" or folder(m) in WITHOUT_TORCH or m in WITHOUT_TORCH_MODULES
    )
    modules = [m for m in modules if not m.endswith("__main__")]
    lines = "\n".join(f"import {module}" for module in modules)
    assert _loads_torch(lines) is False


def test_help_leaves_torch_out() -> None:
    run_help = (
        "from holdfast.cli import main\n"
        "sys.argv = ['holdfast', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert _loads_torch(run_help) is False


@pytest.mark.full
def test_a_new_process_with_torch_is_noticed() -> None:
    assert _loads_torch("import torch") is True


def _loads_torch(code: str) -> bool:
    script = f"import sys\n{code}\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] == "True"


def _planted(tmp_path: Path, files: dict[str, str]) -> Tree:
    src = tmp_path / "holdfast"
    for name, text in {"__init__.py": "", **files}.items():
        path = src / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return Tree.read(src)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("store/local/store.py", "from holdfast.saving import save"),
        ("store/local/store.py", "def f():\n    import holdfast.manager"),
        ("store/local/store.py", "from holdfast import manager"),
        ("store/local/store.py", "import holdfast"),
        (
            "store/local/store.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import holdfast.cli",
        ),
        ("store/local/store.py", "from . import memory"),
        ("state/capture/capture.py", "from holdfast.policy import clock"),
        ("manager.py", "import holdfast.data.loader"),
        ("cli/app.py", "from holdfast.testing import ranks"),
        ("novel/thing.py", "import holdfast.errors"),
        ("__init__.py", "import holdfast.manager"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, name: str, text: str) -> None:
    """The check itself can fail."""
    planted = {"manager.py": "", "testing/ranks.py": ""}
    assert len(layer_breaches(_planted(tmp_path, {**planted, name: text}))) == 1


def test_a_circle_and_an_upward_import_inside_a_folder_are_found(tmp_path: Path) -> None:
    """The check itself can fail."""
    files = {
        "engine/a/x.py": "from holdfast.engine.b import y",
        "engine/b/y.py": "def f():\n    import holdfast.engine.a.x",
        "engine/c.py": "",
    }
    tree = _planted(tmp_path, files)
    assert len(circles(tree)) == 1
    breaches = inner_breaches(tree, "engine", (("b",), ("a",), ("d",)))
    assert [line.split(":")[0] for line in breaches] == [
        "holdfast.engine.c",
        "holdfast.engine.d",
        "holdfast.engine.b.y",
    ]


def test_downward_imports_pass(tmp_path: Path) -> None:
    files = {
        "saving/save.py": "import torch\nfrom holdfast import errors",
        "staging/stage.py": "from holdfast.store import base",
        "manager.py": "import holdfast.saving.save",
        "testing/ranks.py": "import holdfast",
        "errors.py": "",
        "store/base.py": "",
    }
    assert layer_breaches(_planted(tmp_path, files)) == []


@pytest.mark.parametrize(
    "files",
    [
        {"format/blocks.py": "import torch"},
        {"format/blocks.py": "from torch import nn"},
        {"format/blocks.py": "def f():\n    import torch.nn"},
        {"maintenance/preflight.py": "def estimate():\n    import torch"},
        {"root/catalog.py": "import torch"},
        {
            "policy/a.py": "import holdfast.policy.b",
            "policy/b.py": "try:\n    import torch\nfinally:\n    pass",
        },
    ],
)
def test_torch_in_the_wrong_place_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    assert torch_breaches(_planted(tmp_path, files))


def test_torch_through_a_package_is_found(tmp_path: Path) -> None:
    files = {
        "root/__init__.py": "from holdfast.saving.save import save",
        "saving/save.py": "import torch",
        "maintenance/verify.py": "import holdfast.root.catalog",
        "root/catalog.py": "",
    }
    assert torch_breaches(_planted(tmp_path, files)) == [
        "holdfast.maintenance.verify -> holdfast.root -> holdfast.saving.save -> torch",
    ]


def test_torch_for_types_passes(tmp_path: Path) -> None:
    files = {
        "policy/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "saving/save.py": "import torch",
    }
    assert torch_breaches(_planted(tmp_path, files)) == []
