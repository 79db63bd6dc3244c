"""What docs/data.md shows works, and its table is that of the code."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.data import Loader

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.filterwarnings("ignore")  # torchdata
def test_everything_on_the_page_runs_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second time goes on from the first, and nothing is warned of."""
    pytest.importorskip("torchdata")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_bytes(b"one\ntwo\nthree\n")
    caplog.set_level(logging.WARNING, logger="holdfast")
    for steps in (10, 20):
        names: dict[str, Any] = {"__name__": "page"}
        exec("\n".join(BLOCKS), names)
        assert [*tmp_path.glob("runs/data/step-00000040*")]
        assert names["step"] == 4 * 32
        assert names["place"]["batches"] == steps
        assert capsys.readouterr().out.strip() in PAGE
        assert len(next(iter(names["weighted"]))[0]) == 32
        lines = names["Lines"]("lines.txt")
        assert next(iter(lines)) == b"one\n"
        assert list(lines) == [b"two\n", b"three\n"]
    assert caplog.messages == []


def test_the_table_has_every_argument() -> None:
    rows = "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    assert re.findall(r"`(\w+)`", rows) == [*inspect.signature(Loader).parameters]
