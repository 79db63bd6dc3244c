"""Documents made to hurt: memory, stack, code. Each is read in a process of its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.each import each
from tests.format.hostile_child import CASES
from tests.format.samples import (
    Document,
    cpu_budget_s,
    documents,
    is_refused,
    members_of,
    mutate,
    wrapped,
)
from tests.hostile.sandbox import bad, run_child

from marks import full

IN_EVERY_RUN = {
    *("manifest of 100 MB", "index of 100 MB", "header of 84 MB"),
    *("tree of 64 MiB of opening brackets", "tree with an integer of 60 million digits"),
    "tree with 100,000 keys of one hash",
}
"""A case of each kind of document, each way to be too much; the others are for the full tier."""


def test_every_run_has_cases_of_each_document() -> None:
    assert set(CASES) > IN_EVERY_RUN
    kinds = {name.split()[0] for name in CASES} - {"notes"}  # which are read as a manifest is
    assert {name.split()[0] for name in IN_EVERY_RUN} == kinds


@pytest.mark.parametrize("names", [IN_EVERY_RUN, *full({*CASES} - IN_EVERY_RUN)])
def test_a_hostile_document_is_refused_in_bounded_memory_and_time(names: set[str]) -> None:
    """R29: refused before it is expanded; the reader adds little to the document itself."""
    found = run_child("tests.format.hostile_child", *sorted(names))
    assert {one["name"] for one in found} == names
    assert bad(found) == ""


def test_the_format_reads_without_torch() -> None:
    """R27: reading documents loads no framework that could be attacked."""
    code = (
        "import sys, json; from holdfast.format import index, manifest, objects, records, tensors;"
        "print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) is False


def fuzz(document: Document, num_rounds: int, seed: int) -> None:
    """Wounds the bytes, and the text behind a fresh digest; only our errors may come."""
    rng = random.Random(seed)
    text = json.dumps(members_of(document)).encode()
    for _ in range(num_rounds):
        wounded = mutate(document.data, rng)
        refused = is_refused(document.decode, wounded)
        assert refused or not document.is_sealed or wounded == document.data
        is_refused(document.decode, wrapped(document, mutate(text, rng)))


@each("document", documents(), ids=str)
def test_fuzz(document: Document) -> None:
    """R30: a few hundred rounds for every kind of document."""
    fuzz(document, num_rounds=300, seed=1)


SWOLLEN_NBYTES = 500_000
STRIDES = {"count up": 1, "collide": 2**61 - 1}
"""By how much the numbers of one part differ from those of the next."""


def numbered(value: Any, number: int, stride: int) -> Any:
    """A variant of a part of a document, with other numbers and texts in it."""
    match value:
        case bool() | None | float():
            return value
        case int():
            return value + number * stride
        case str():
            return f"{value}{number}"
        case list():
            return [numbered(part, number, stride) for part in value]
        case _:
            return {name: numbered(part, number, stride) for name, part in value.items()}


def swollen(value: Any, stride: int) -> Iterator[Any]:
    """`value` with each of its lists and objects in turn made of very many variants of a part."""
    if not isinstance(value, list | dict):
        return
    parts = value if isinstance(value, list) else [*value.values()]
    if parts:
        part = parts[-1]
        num_parts = SWOLLEN_NBYTES // (len(json.dumps(part)) + 20)
        many = [numbered(part, number, stride) for number in range(num_parts)]
        yield many if isinstance(value, list) else {f"n{at}": one for at, one in enumerate(many)}
    for at in range(len(value)) if isinstance(value, list) else [*value]:
        for inner in swollen(value[at], stride):
            copy = value.copy()
            copy[at] = inner
            yield copy


@each("document", documents(), ids=str)
@pytest.mark.parametrize("stride", [*full(STRIDES["count up"]), STRIDES["collide"]])
def test_a_document_that_is_swollen_anywhere_takes_linear_time(
    document: Document, stride: int
) -> None:
    """R29: whichever list or object is long, and also where its numbers have one hash."""
    for members in swollen(members_of(document), stride):
        data = wrapped(document, json.dumps(members).encode())
        began = time.process_time()
        is_refused(document.decode, data)
        assert time.process_time() - began <= cpu_budget_s(len(data)), str(members)[:300]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("document", documents(), ids=str)
def test_fuzz_for_long(document: Document) -> None:
    """R30: the long tier, with a new seed each time, which the failure prints."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    fuzz(document, num_rounds=200_000, seed=seed)
