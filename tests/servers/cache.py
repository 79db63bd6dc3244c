"""Environments for the servers, made once under `.servers/` in the repository, which git ignores.

Each server has an environment of its own, because their pins clash with each other and with ours.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent.parent / ".servers"
INSTALL_TIMEOUT_S = 900.0


class Unavailable(Exception):
    """A server cannot be had on this machine; the message says why."""


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold an advisory lock on a file, which the kernel gives back when its holder is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def installed(name: str, recipe: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled by `recipe`; made again only when the recipe changes.

    Safe when several processes ask at once: one makes it and the others wait.
    """
    folder = CACHE / name
    stamp, text = folder / ".made", "\n".join(recipe)
    with locked(CACHE / f"{name}.lock"):
        if not stamp.exists() or stamp.read_text("utf-8") != text:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder)
            stamp.write_text(text, "utf-8")
    return folder


def python_environment(name: str, *requirements: str) -> Path:
    """The `bin` folder of a virtual environment that holds these requirements."""

    def make(folder: Path) -> None:
        command(sys.executable, "-m", "venv", str(folder))
        pip = str(folder / "bin" / "pip")
        quiet = ("--quiet", "--disable-pip-version-check")
        command(pip, "install", "--no-compile", *quiet, *requirements)

    return installed(name, requirements, make) / "bin"


def command(*words: str, cwd: Path | None = None) -> str:
    """Run a command to its end; its output. A failure raises with what it said."""
    done = subprocess.run(
        words,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def debian_packages(*packages: str) -> None:
    """Install Debian packages on this machine.

    Raises:
        Unavailable: this is no Debian, or we are not root.
    """
    if all(_has_package(package) for package in packages):
        return
    if shutil.which("apt-get") is None:
        raise Unavailable(f"needs the Debian packages {', '.join(packages)}: there is no apt-get")
    if os.geteuid() != 0:
        raise Unavailable(f"needs the Debian packages {', '.join(packages)}: only root installs")
    with locked(CACHE / "apt.lock"):
        command("apt-get", "-qq", "update")
        options = ("-qq", "-y", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0")
        command("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *options, "install", *packages)


def _has_package(package: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip() == "installed"
