"""Stores whose conditional puts are ignored or broken are refused for writing."""

from __future__ import annotations

import pytest

from holdfast.errors import PreflightFailed
from holdfast.manager import CheckpointManager
from holdfast.store import open_store
from holdfast.store.base import Store
from runs import new_run
from servers.client import broken_uploads, keys
from servers.faults import FaultProxy
from servers.fixtures import on, use
from servers.program import Service

CONDITIONS = ("if-none-match", "x-goog-if-generation-match")


def check_refused(service: Service, root: str, store: Store) -> str:
    """The first save says why it is not made, and leaves nothing. What it says."""
    with pytest.raises(PreflightFailed) as raised, manager_of(store) as manager:
        manager.save(0)
    prefix = root.removeprefix(service.root(""))
    assert keys(service, prefix) == []
    assert broken_uploads(service, root) == []
    assert root in str(raised.value)
    return str(raised.value)


def manager_of(store: Store) -> CheckpointManager:
    return new_run().manager(store, sinks=())


@on("rclone", "swift")
def test_a_store_that_ignores_or_breaks_conditions_is_refused(service: Service, root: str) -> None:
    """R25: rclone overwrites without a word; with Swift several of those who race win."""
    assert "destroy each other" in check_refused(service, root, open_store(root))


@on("localstack", "moto", "gcs")
def test_a_store_behind_a_proxy_that_drops_the_condition_is_refused(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: Azure is not among them, since its signatures cover the condition."""
    with FaultProxy(service, strip=CONDITIONS) as proxy:
        use(proxy.service, monkeypatch)
        assert "destroy each other" in check_refused(service, root, open_store(root))


def test_a_sound_store_is_accepted(root: str) -> None:
    """R25: the check raises no false alarm."""
    with manager_of(open_store(root)) as manager:
        assert manager.save(0).wait().step == 0
