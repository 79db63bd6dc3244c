"""Invariant 7, R1: combinations of libraries are killed and resumed bit for bit, or refused."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from bridges import forks
from combinations.page import PAGE, filled
from combinations.parts import OPTIMIZERS, WEIGHTS, WRAPPERS
from combinations.rows import ROWS, Row, compiles, train

LIBRARIES = {
    "torchao": ("quantization", "optim", "float8", "prototype.quantized_training"),
    "bitsandbytes": ("optim",),
    "schedulefree": (),
    "pytorch_optimizer": (),
    "peft": (),
    "accelerate": (),
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the libraries once, before the forks that use them."""
    for library, modules in LIBRARIES.items():
        for name in (library, *(f"{library}.{module}" for module in modules)):
            import_module(name)


def marked(rows: tuple[Row, ...]) -> list[object]:
    """Leave to `make test` the rows with a library or a wrapper that no earlier row has.

    Each kind of weights and each optimizer alone is in `tests/state`.
    """
    seen: set[str] = set()
    params = []
    for row in rows:
        libraries = {f"weights of {row.weights.split()[0]}", row.optimizer.split()[0]}
        new = (libraries | {*row.wrappers}) - seen - {"torch.compile inductor"}
        seen |= new
        params.append(pytest.param(row, marks=() if new else pytest.mark.full, id=str(row)))
    return params


def test_the_table_has_every_part() -> None:
    assert {row.weights for row in ROWS} == {*WEIGHTS}
    assert {row.optimizer for row in ROWS} == {*OPTIMIZERS}
    assert {name for row in ROWS for name in row.wrappers} == {*WRAPPERS}
    assert len({*ROWS}) == len(ROWS) >= 40


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", marked(ROWS))
def test_a_killed_run_ends_with_the_same_bits_or_is_refused(row: Row, ram_path: Path) -> None:
    """Invariant 7, R1."""
    expect(row, ram_path, num_ranks=2, kills=2)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "num_ranks"),
    [(row, number) for row in ROWS if row.needs_group for number in row.ranks if number != 2],
    ids=str,
)
def test_the_same_holds_on_any_number_of_ranks(row: Row, num_ranks: int, ram_path: Path) -> None:
    """Invariant 7, R1."""
    expect(row, ram_path, num_ranks, kills=2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [row for row in ROWS if not row.refused], ids=str)
def test_the_same_holds_after_ten_kills(row: Row, ram_path: Path) -> None:
    """Invariant 7, R1."""
    expect(row, ram_path, num_ranks=2, kills=10)


def expect(row: Row, folder: Path, num_ranks: int, kills: int) -> None:
    job = partial(train, row)
    if row.refused:
        expect_refusal(row, folder / "run", num_ranks)
    elif row.needs_group:
        forks.assert_kills_of_ranks_change_nothing(job, folder, num_ranks, kills=kills, seed=1)
    else:
        # A compiler makes fewer calls when it finds results of an earlier life.
        at_calls = not compiles(row)
        forks.assert_kills_change_nothing(job, folder, kills=kills, seed=1, at_calls=at_calls)


def expect_refusal(row: Row, root: Path, num_ranks: int) -> None:
    """The error names the part, in or before the first step, and nothing is saved."""
    job = partial(train, row)
    if row.needs_group:
        assert forks.finish_ranks(job, root, num_ranks) == [0] * num_ranks
    else:
        assert forks.finish(job, root) == 0
    found = forks.result(root, 0 if row.needs_group else None)["found"]
    assert row.refused in found["said"], found
    assert found["class"] == "UnsupportedState"
    assert found["batches"] <= 1
    assert found["checkpoints"] == 0


def test_the_page_lists_the_rows() -> None:
    """Run `PYTHONPATH=.:tests python -m combinations.page` after a change of the rows."""
    page = PAGE.read_text("utf-8")
    assert page == filled(page)
    assert "torchao" in page
