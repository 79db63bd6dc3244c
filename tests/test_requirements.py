"""The locks in requirements/, which `make lock` writes from pyproject.toml."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LOCKS = sorted(set((ROOT / "requirements").glob("*.txt")) - {ROOT / "requirements" / "torch.txt"})
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = ("3.10", "3.11.7", "3.12.3", "3.13.1")


def required(extra: str) -> Iterator[Requirement]:
    """Give the requirements of the package and of an extra, those of its own extras included."""
    extras, seen = [extra], set[str]()
    texts = list(PROJECT["dependencies"])
    while extras:
        name = extras.pop()
        if name not in seen:
            seen.add(name)
            texts += PROJECT["optional-dependencies"][name]
            own = [text for text in texts if text.startswith(PROJECT["name"])]
            extras += [part for text in own for part in Requirement(text).extras]
    return (Requirement(text) for text in texts if not text.startswith(PROJECT["name"]))


def pins(lock: Path, environment: dict[str, str]) -> dict[str, str]:
    """Give the versions that a lock has for one environment, by normalized name."""
    lines = re.findall(r"^[a-z0-9].*==.*?(?= \\$)", lock.read_text("utf-8"), re.MULTILINE)
    found = [Requirement(line) for line in lines]
    return {
        canonicalize_name(r.name): next(iter(r.specifier)).version
        for r in found
        if r.marker is None or r.marker.evaluate(environment)
    }


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_has_all_that_its_extra_asks_for(lock: Path, python: str) -> None:
    environment = {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "sys_platform": "linux",
    }
    locked = pins(lock, environment) | pins_without_hashes()
    wrong = [
        str(requirement)
        for requirement in required(lock.stem)
        if (requirement.marker is None or requirement.marker.evaluate(environment))
        and not requirement.specifier.contains(
            locked.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]
    assert wrong == [], "run make lock"


def pins_without_hashes() -> dict[str, str]:
    """Give the version of torch, which is outside of the locks."""
    text = (ROOT / "requirements" / "torch.txt").read_text("utf-8")
    return dict(re.findall(r"^(torch)==(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_names_hashes_and_no_host(lock: Path) -> None:
    text = lock.read_text("utf-8")
    assert "://" not in text
    packages = re.split(r"\n(?=[a-z0-9])", text)[1:]
    assert [package for package in packages if "--hash=sha256:" not in package] == []
    assert len(packages) > 20
