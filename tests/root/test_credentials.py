"""Credentials in the URL of a bucket are refused before any message can show them."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.cli.app import app
from holdfast.errors import UsageError
from holdfast.root.address import split_source
from holdfast.store import open_store

SECRETS = ("s3://AKIA:hunter2@bucket/run", "gs://hunter2@bucket/run@latest", "s3://A:hunter2@b")


@pytest.mark.parametrize("url", SECRETS)
def test_a_url_with_credentials_is_refused_without_showing_them(url: str) -> None:
    calls: list[Any] = [holdfast.load_weights, holdfast.load_file, open_store]
    calls.append(lambda given: holdfast.CheckpointManager(given, {}))
    for call in calls:
        with pytest.raises(UsageError) as refused:
            call(url)
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("command", ["ls", "verify", "du", "log", "doctor", "show", "stats"])
def test_commands_do_not_show_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app([command, SECRETS[0]], standalone_mode=False) == 2
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err
    assert "credentials" in shown.err


def test_an_at_before_a_checkpoint_is_none_of_credentials() -> None:
    assert split_source("s3://bucket@best:val/loss") == ("s3://bucket", "best:val/loss")
    assert split_source("s3://bucket/run@step=3") == ("s3://bucket/run", "step=3")
