"""The demo's verdict, table and picture, on records made by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.demo import report
from holdfast.demo.record import DemoRecord, ProcessRecord, RunRecord


def _life(first: int, last: int, began_s: float, *, digest: str | None = None) -> ProcessRecord:
    steps = [(began_s + 1.0 + 0.1 * s, s, 5.0 / s) for s in range(first + 1, last + 1)]
    return ProcessRecord(
        num_workers=0,
        began_s=began_s,
        began_at=first,
        reached=last,
        was_killed=digest is None,
        ended_s=steps[-1][0],
        digest=digest,
        steps=steps,
        saves=[(at + 0.01, step) for at, step, _ in steps if step % 5 == 0],
        stalls_s=[0.004],
        checkpoint_nbytes=1_000_000,
    )


@pytest.fixture
def record() -> DemoRecord:
    killed = [_life(0, 13, 50.0), _life(10, 22, 60.0), _life(20, 33, 70.0)]
    last = _life(25, 40, 80.0, digest="ab")
    last.flipped = "bit 3 of byte 99 of step-00000030.0004-000002-aa/model-00000.safetensors"
    last.rejected = [("step-00000030.0004-000002-aa", "model-00000.safetensors: block 0 differs")]
    killed[1].killed_in_save = 20
    return DemoRecord(
        seed=1,
        undisturbed=RunRecord(name="undisturbed", lives=[_life(0, 40, 1.0, digest="ab")]),
        killed=RunRecord(name="killed", lives=[*killed, last]),
    )


def test_equal_digests_and_losses_are_one_run(record: DemoRecord) -> None:
    assert record.is_identical
    assert record.killed.num_redone == 3 + 2 + 8
    assert json.loads(json.dumps(record.to_json()))["identical"] is True


def test_another_digest_is_another_run(record: DemoRecord) -> None:
    record.killed.lives[-1].digest = "ac"
    assert not record.is_identical


def test_two_missing_digests_are_not_equal(record: DemoRecord) -> None:
    record.killed.lives[-1].digest = record.undisturbed.lives[0].digest = None
    assert not record.is_identical


def test_one_loss_that_differs_in_its_last_bit_is_another_run(record: DemoRecord) -> None:
    at_s, step, loss = record.killed.lives[0].steps[11]
    record.killed.lives[0].steps[11] = (at_s, step, loss * (1 + 2**-52))
    assert record.num_differing_losses == 1
    assert not record.is_identical


def test_a_step_that_was_never_done_is_another_run(record: DemoRecord) -> None:
    del record.killed.lives[-1].steps[-1]
    assert record.num_differing_losses == 1


def _shown(record: DemoRecord) -> str:
    text = io.StringIO()
    report.show(Console(file=text, width=160), record)
    return text.getvalue()


def test_the_table_names_every_kill_and_what_was_rejected(record: DemoRecord) -> None:
    text = _shown(record)
    rows = [line.split() for line in text.splitlines() if "4.0 ms" in line]
    assert [row[:5] for row in rows[:3]] == [
        ["1", "13", "10", "3", "2"],
        ["2", "22", "20", "20", "2"],
        ["3", "33", "1", "25", "8"],
    ]
    assert "Flipped: bit 3 of byte 99" in text
    assert "Rejected: step-00000030" in text
    assert "block 0 differs" in text
    assert "The same run, bit for bit." in text


def test_the_table_says_loudly_when_the_runs_differ(record: DemoRecord) -> None:
    record.killed.lives[-1].digest = "ac"
    assert "THE RUNS DIFFER" in _shown(record)


def test_the_picture_is_a_png_small_enough_for_a_readme(record: DemoRecord, tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    report.draw(record, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert 10_000 < len(data) < 150_000
