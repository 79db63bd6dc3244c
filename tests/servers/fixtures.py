"""Fixtures of the tests that talk to real servers.

`service` is a running server; tests get those of `WORKING`, one after the other, or choose with
`@on("moto", ...)`, each in the tier of its server. `root` is the URL of a place of the test's own
there, empty, with the environment set so that a client finds it.

The clients are imported when a server is used: all tests load this file, also where no client is
installed.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from servers.cache import Unavailable
from servers.program import Program, Service, send

WORKING = ("moto", "localstack", "azurite", "gcs", "ceph")
"""Servers on which saves are to work."""
FULL = ("localstack", "azurite", "gcs", "rclone")
"""Servers of which `make test-full` has the tests; `make test` has those of moto."""
_NUMBERS = itertools.count()


@functools.cache
def _loader() -> Any:
    """Boto's loader, kept: each session would read its megabytes of JSON again, in every test."""
    from botocore.loaders import create_loader

    return functools.lru_cache(create_loader)


def on(*names: str, indirect: str = "service") -> pytest.MarkDecorator:
    """Run a test with each of these servers, in the tier of the server."""
    return pytest.mark.parametrize(indirect, in_tiers(names), indirect=True)


def in_tiers(names: Iterable[str]) -> list[ParameterSet]:
    """The servers as parameters, with the marks of the tier that starts them."""
    tiers: dict[str, tuple[pytest.MarkDecorator, ...]] = {"moto": ()}
    tiers |= dict.fromkeys(FULL, (pytest.mark.full,))
    return [pytest.param(name, marks=tiers.get(name, (pytest.mark.stores,))) for name in names]


class Servers:
    """The servers of this run, started when they are first asked for, shared by all workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._services: dict[str, Service] = {}

    def get(self, name: str) -> Service:
        """A running server; skips the test where it cannot be had, and fails under CI."""
        from servers.keeper import shared

        if name not in self._services:
            try:
                self._services[name] = self._stack.enter_context(shared(name, self._folder))
            except Unavailable as error:
                skip_or_fail(f"{name}: {error}")
        return self._services[name]

    def close(self) -> None:
        """Use none of them any more."""
        self._stack.close()


def skip_or_fail(why: str) -> None:
    """Skip a test that cannot run here, but never in continuous integration."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """All servers of this run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    found = Servers(folder / "servers")
    yield found
    found.close()


@pytest.fixture(params=in_tiers(WORKING))
def service(request: pytest.FixtureRequest, servers: Servers) -> Service:
    """A running server, shared with other tests."""
    return servers.get(request.param)


OWN_BUCKET = f"bucket-{os.getpid()}"
"""Of this process alone."""


@pytest.fixture
def gcs_service(servers: Servers) -> Service:
    """Our server of Google Cloud Storage, with a bucket of this process alone."""
    service = servers.get("gcs")
    send("PUT", f"{service.endpoint}/{OWN_BUCKET}")
    return replace(service, bucket=OWN_BUCKET)


@pytest.fixture
def own_program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Program]:
    """A server of the test's own, not started yet, which it may kill. Name it with `on`."""
    from servers.keeper import PROGRAMS

    program = PROGRAMS[request.param](tmp_path / "server")
    try:
        program.install()
    except Unavailable as error:
        skip_or_fail(f"{request.param}: {error}")
    yield program
    shutil.rmtree(program.folder, ignore_errors=True)


@pytest.fixture
def root(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty place; what the test leaves there is removed after it."""
    from servers.client import clear

    use(service, monkeypatch)
    prefix = f"run-{os.getpid()}-{next(_NUMBERS)}"
    yield service.root(prefix)
    clear(service, prefix)


def use(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients of this process find the server, and no cloud that the user has."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "GCP_")):
            monkeypatch.delenv(name)
    for name, value in {"NO_PROXY": "127.0.0.1", **service.environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("botocore.session.create_loader", _loader())
