"""What the servers need is made once, whoever asks, and what cannot be had is said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from servers import cache
from servers.cache import Unavailable, debian_packages, installed
from servers.fixtures import skip_or_fail


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")


def test_of_many_who_ask_at_once_one_makes_it() -> None:
    made = []

    def make(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "program").touch()
        made.append(folder)

    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: installed("it", ["one"], make), range(8)))
    assert len(made) == 1
    assert folders == {*made}


def test_another_recipe_and_a_making_that_broke_off_are_made_again() -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("the network is gone")

    with pytest.raises(OSError, match="network"):
        installed("it", ["one"], fail)
    for recipe in (["one"], ["two"]):
        (name,) = recipe
        folder = installed("it", recipe, lambda folder, name=name: (folder / name).touch())
        assert {path.name for path in folder.iterdir()} == {name, ".made"}


def test_debian_packages_need_debian_and_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cache, "_has_package", lambda package: False)
    monkeypatch.setattr(cache.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(Unavailable, match="no-such-package: only root"):
        debian_packages("no-such-package")
    monkeypatch.setattr(cache.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="no-such-package: there is no apt-get"):
        debian_packages("no-such-package")


def test_nothing_is_skipped_in_continuous_integration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="why"):
        skip_or_fail("why")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="why"):
        skip_or_fail("why")
