"""Roots of real runs, and a server of them that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.serve.client import Page, serving

import holdfast
from holdfast.cli.web import site
from runs import new_run

EVIL = "<script>alert(1)</script>\"'><img/src=x/onerror=alert(2)>"
"""A name that is markup in text, in attributes and in scripts."""


@pytest.fixture(scope="session", autouse=True)
def _no_holding_back() -> Iterator[None]:
    """On a busy machine each answer takes long, and would then be held back for a hundred times
    as long."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(site, "SHARE", 1e9)
        yield


@pytest.fixture(scope="session")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sessions: steps 100 to 400, then back to 200 and on to 300, with a rule."""
    root = tmp_path_factory.mktemp("serve") / "run"
    with new_run().manager(root, keep=holdfast.Last(8)) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, metrics={"loss": 30 / step}, reason="interval").wait()
    run = new_run()
    with run.manager(root, keep=holdfast.Last(8)) as manager:
        manager.resume("step=200")
        run.train()
        manager.save(300, metrics={"loss": 0.05}, tags=("paper",), reason="manual").wait()
    return root


@pytest.fixture(scope="session")
def evil_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which all that people name is markup."""
    root = tmp_path_factory.mktemp("serve") / "evil <b>run"
    state = {"model": {EVIL: torch.ones(3, 2), "plain": {EVIL: EVIL}}}
    with holdfast.CheckpointManager(root, state, config={EVIL: EVIL}) as manager:
        manager.save(1, metrics={EVIL: 1.0}, reason=EVIL, tags=(EVIL,)).wait()
        state["model"][EVIL] += 1
        manager.save(2, metrics={EVIL: 2.0}, reason=EVIL).wait()
    return root


@pytest.fixture(scope="module")
def page(run_root: Path, evil_root: Path) -> Iterator[Page]:
    """A server of both.

    It ends with the module: a clock that other tests replace would stop its timers for good.
    """
    with serving([run_root, evil_root]) as found:
        yield found
