"""The examples in the docstrings of src/holdfast, each of which is run.

Not by pytest's `--doctest-modules`, which would also import the helper scripts beside the tests.
"""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SRC.rglob("*.py"))
    if ">>> " in path.read_text("utf-8")
]


def test_there_are_examples() -> None:
    assert "holdfast.data.loader" in MODULES


def test_every_example_gives_what_it_says() -> None:
    modules = [import_module(name) for name in MODULES]
    found = {m.__name__: doctest.testmod(m, optionflags=doctest.ELLIPSIS) for m in modules}
    wrong = {name: r for name, r in found.items() if r.failed or not r.attempted}
    assert wrong == {}, "what failed is printed above"
