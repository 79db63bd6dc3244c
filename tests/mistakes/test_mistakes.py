"""Line 28: a user's plausible mistakes. Each is answered by an error or a warning that names it,
deletes nothing, and leads to no other state in silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.mistakes.page import PAGE, has
from tests.mistakes.table import Case, Theme, judged
from tests.mistakes.themes import CASES, THEMES
from tests.mistakes.user import User, made

import warm

LEAST = 100


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A run of three checkpoints, and the digests of its states."""
    root = tmp_path_factory.mktemp("mistakes") / "template"
    return root, made(root)


@pytest.mark.parametrize("case", CASES, ids=lambda case: re.sub(r"[^\w=.]+", "-", case.did))
def test_a_mistake_is_answered(
    case: Case, run: tuple[Path, dict[int, str]], ram_path: Path
) -> None:
    answer = judged(case, *run, ram_path)
    assert has(PAGE.read_text("utf-8"), case, answer), "run: python -m tests.mistakes"


def test_the_table_has_each_mistake_once() -> None:
    assert len(CASES) >= LEAST
    done = [(theme.title, case.did) for theme in THEMES for case in theme.cases]
    assert len({*done}) == len(done)


def test_a_script_without_a_mistake_is_silent(
    run: tuple[Path, dict[int, str]], ram_path: Path
) -> None:
    """The judge does not take for a warning what every script hears."""
    theme = Theme("none")

    @theme.case("nothing", names="", state=None)
    def _(user: User) -> None:
        user.goes_on(num_steps=4, keep="last:9")
        user.trainer(every="1step").fit("3step")

    with pytest.raises(AssertionError, match="silence"):
        judged(theme.cases[0], *run, ram_path)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda user: next(user.folder_of(1).iterdir()).unlink(), "deleted"),
        (lambda user: user.state["progress"].update(step=9), "another one"),
        (lambda user: user.manager().load("step=2"), "that of step 2"),
    ],
)
def test_the_judge_sees_harm(
    act: object, why: str, run: tuple[Path, dict[int, str]], ram_path: Path
) -> None:
    theme = Theme("harm")
    theme.case("harm", names="")(act)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=why):
        judged(theme.cases[0], *run, ram_path)


def test_a_warning_is_shown_where_nobody_has_set_up_logging(
    run: tuple[Path, dict[int, str]], tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.mistakes.user import copied\n"
        "user = copied(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "with user.doing: user.goes_on(keep='best:los:min')"
    )
    ended = warm.run(["-c", code, run[0], tmp_path])
    assert ended.returncode == 0
    assert "the rule 'best los (min)' needs the metric 'los'" in ended.stderr
