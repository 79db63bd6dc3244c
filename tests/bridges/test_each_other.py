"""The checkpoint of each trainer, opened under each: taken over bit for bit, or refused by name."""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridges import others, trainers
from bridges.forks import assert_equal
from bridges.frameworks import needed
from bridges.trainers import TRAINERS
from holdfast.errors import HoldfastError
from marks import diagonal

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, version by version
PAGE = Path(__file__).resolve().parents[2] / "docs" / "bridges" / "index.md"
CUTS = {"within an epoch": 6, "at its end": 8}
NAMES = [*TRAINERS]


def tables() -> Iterator[list[list[str]]]:
    """The tables of the page, as rows of cells."""
    for lines in re.findall(r"(?:^\|.*\n)+", PAGE.read_text("utf-8"), re.MULTILINE):
        rows = [
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines()
        ]
        yield [row for row in rows if set(row[0]) != {"-"}]


def table(first: str) -> list[list[str]]:
    return next(found for found in tables() if found[0][0] == first)


def named(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def own_components(name: str) -> set[str]:
    """Return the components that belong to one trainer only, as the page lists them."""
    [cell] = [row[1] for row in table("trainer") if name in named(row[0])]
    return named(cell) - {"foreach", "fused"}


def framework(name: str) -> None:
    if name not in ("plain", "trainer"):
        needed(name)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "torchtitan")}
    for name in before:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Makes a root once, and copies it."""
    folder, numbers = tmp_path_factory.mktemp("saved"), itertools.count()
    made: dict[object, Path] = {}

    def root(train: Callable[..., None], *arguments: object) -> Path:
        key = (train, *arguments)
        if key not in made:
            made[key] = folder / str(next(numbers))
            train(made[key], *arguments)
        copy = folder / str(next(numbers))
        shutil.copytree(made[key], copy, symlinks=True)
        return copy

    return root


def pairs() -> list[object]:
    """All pairs at both cuts, of which `make test` runs each trainer once on each side."""
    found = []
    for (a, saves), (b, loads) in itertools.product(enumerate(NAMES), repeat=2):
        for c, cut in enumerate(CUTS):
            is_quick = (b - a) % len(NAMES) == 1 and a % 2 == c
            marks = () if is_quick else pytest.mark.full
            found.append(pytest.param(saves, loads, cut, marks=marks))
    return found


@pytest.mark.parametrize(("saves", "loads", "cut"), pairs())
def test_a_run_goes_on_under_another_trainer_as_if_it_were_one(
    saves: str, loads: str, cut: str, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 7: weights, slots, schedule, data, generators and step end as those of one run.

    What is not taken over is named by a warning, and by the table of the page.
    """
    framework(saves)
    framework(loads)
    root = saved(TRAINERS[saves], CUTS[cut])
    caplog.clear()
    TRAINERS[loads](root, trainers.GOAL)
    warned = [one.getMessage() for one in caplog.records if one.name == "holdfast"]
    left = {re.sub(r"^step-\S+ ", "", text).split(":")[0].split(".")[0] for text in warned}
    assert left == (own_components(saves) | own_components(loads) if saves != loads else set()), (
        warned
    )
    whole = saved(trainers.plain, trainers.GOAL)
    assert_equal(trainers.ending(root), trainers.ending(whole))


@pytest.mark.parametrize(("case", "loads"), diagonal([*others.CASES], NAMES))
def test_what_cannot_be_taken_over_is_refused_by_name(
    case: str, loads: str, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is dropped in silence: the page says which trainer warns, and all others refuse."""
    framework(loads)
    root, refusal = saved(others.save, case), others.CASES[case][1]
    [outcome] = [row[1] for row in table("difference") if row[0] == case]
    if loads in named(outcome):
        caplog.clear()
        TRAINERS[loads](root, others.STEPS + 1)
        assert re.search(refusal, caplog.text)
    else:
        assert outcome.startswith("refused")
        with pytest.raises(HoldfastError, match=refusal):
            TRAINERS[loads](root, others.STEPS + 1)


def test_the_page_has_every_case_and_every_trainer() -> None:
    assert [row[0] for row in table("difference")[1:]] == [*others.CASES]
    assert set().union(*(named(row[0]) for row in table("trainer")[1:])) == {*NAMES}
