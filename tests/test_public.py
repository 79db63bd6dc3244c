"""What the package shows: names that resolve, documented, and an import that costs nothing."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import holdfast
import holdfast.testing
from holdfast import version

SRC = Path(__file__).resolve().parent.parent / "src" / "holdfast"
MODULES = sorted(SRC.rglob("*.py"))


def test_every_public_name_resolves_and_is_documented() -> None:
    values = {name: getattr(holdfast, name) for name in holdfast.__all__ if name != "__version__"}
    assert [name for name, value in values.items() if not inspect.getdoc(value)] == []
    homes = {n: v.__module__ for n, v in values.items() if not isinstance(v, ModuleType)}
    assert [name for name, home in homes.items() if not home.startswith("holdfast.")] == []


def test_the_public_face_has_at_most_46_names() -> None:
    """Names that only an extender needs are imported from their own modules."""
    assert len(holdfast.__all__) <= 46


def seen_by_type_checkers(module: ModuleType) -> dict[str, str]:
    """Public name → its module, as the imports under TYPE_CHECKING have them."""
    tree = ast.parse(inspect.getsource(module))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    found = {(alias.asname, node.module) for node in imports for alias in node.names}
    return {str(name): str(home) for name, home in found}


@pytest.mark.parametrize("module", [holdfast, holdfast.testing])
def test_type_checkers_see_the_names_that_there_are(module: ModuleType) -> None:
    """With `as`, which says to them that a name is exported."""
    assert seen_by_type_checkers(module) == module._HOMES


def test_the_names_are_in_order_and_each_stands_there_once() -> None:
    names = ast.parse(inspect.getsource(holdfast))
    (table,) = (node.value for node in names.body if "_HOMES =" in ast.unparse(node)[:8])
    keys = [ast.literal_eval(key) for key in table.keys]  # type: ignore[attr-defined]
    assert keys == sorted(set(keys))


def test_the_version_is_known_without_metadata_of_a_distribution() -> None:
    """The wheel takes it from there (tests/platforms/test_wheel.py)."""
    assert holdfast.__version__ == version.__version__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Snapshot'"):
        holdfast.Snapshot  # noqa: B018


def test_dir_lists_the_public_names_before_they_are_used() -> None:
    code = "import holdfast; print(*dir(holdfast))"
    assert set(holdfast.__all__) <= set(_run(code).split())


def test_a_star_import_gives_the_public_names() -> None:
    code = "from holdfast import *; print(CheckpointManager.__name__, Last.__name__)"
    assert _run(code).split() == ["CheckpointManager", "Last"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Only the standard library, and little of it, until a name is used."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import holdfast\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = set(_run(code).split())
    assert loaded.isdisjoint({"torch", "numpy", "msgspec", "blake3", "click", "rich", "email"})


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def undocumented(tree: ast.Module, documented_by_protocols: frozenset[str]) -> Iterator[str]:
    """Public classes, functions and methods of a module that say nothing about themselves.

    A method needs no words where it is marked with `@override`, or a base class in the same module
    or a Protocol of the package has them; nor does a test in a class that is shipped, whose name is
    its claim.
    """
    if not ast.get_docstring(tree):
        yield "the module"
    said = {node.name: _said(node) for node in _public(tree) if isinstance(node, ast.ClassDef)}
    for node in _public(tree):
        if not ast.get_docstring(node) and not _is_companion(node):
            yield node.name
        if isinstance(node, ast.ClassDef):
            bases = [said.get(ast.unparse(base), set()) for base in node.bases]
            known = documented_by_protocols.union(*bases)
            for method in _public(node):
                is_told = method.name in known or method.name.startswith("test_")
                if not ast.get_docstring(method) and not is_told and not _is_companion(method):
                    yield f"{node.name}.{method.name}"


def _said(node: ast.ClassDef) -> set[str]:
    return {method.name for method in _public(node) if ast.get_docstring(method)}


def _public(
    node: ast.Module | ast.ClassDef,
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for child in node.body:
        if isinstance(child, kinds) and not child.name.startswith("_"):
            yield child


def _is_companion(node: ast.AST) -> bool:
    """A setter, an overload or an override: the getter, the implementation or the base class,
    which the type checker knows, carries the docstring."""
    names = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return any(name.endswith((".setter", "overload", "override")) for name in names)


def protocol_methods(trees: list[ast.Module]) -> frozenset[str]:
    """Methods that a Protocol of the package documents: implementations need not repeat it."""
    return frozenset(
        method.name
        for tree in trees
        for node in _public(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in node.bases)
        for method in _public(node)
        if ast.get_docstring(method)
    )


def test_every_public_thing_in_the_source_is_documented() -> None:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in MODULES}
    known = protocol_methods([*trees.values()])
    found = {str(p.relative_to(SRC)): [*undocumented(tree, known)] for p, tree in trees.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_a_missing_docstring_is_noticed() -> None:
    """The check itself can fail."""
    tree = ast.parse(
        "class A:\n  def put(self): ...\n  def b(self): ...\n  def _c(self): ...\ndef d(): ...\n"
        "class E(A):\n  'E'\n  @override\n  def b(self): ...\n"
    )
    assert list(undocumented(tree, frozenset({"put"}))) == ["the module", "A", "A.b", "d"]
