"""One instance of each server for all test processes of a run.

Whoever uses a server holds a shared lock on a file. A keeper, a process of its own, runs the
server and ends with it when it gets that lock for itself: when nobody uses it any more, also
because they were killed. The kernel counts, so no count can be wrong.

Run as a script: `python keeper.py NAME FOLDER`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers.azure import Azurite
from servers.cache import INSTALL_TIMEOUT_S, Unavailable, locked
from servers.ceph import Ceph
from servers.google import Gcs
from servers.program import READY_S, Program, Service
from servers.s3 import LocalStack, Moto, Rclone
from servers.swift import Swift

PROGRAMS: dict[str, type[Program]] = {
    program.name: program for program in (LocalStack, Moto, Rclone, Ceph, Swift, Azurite, Gcs)
}
_POLL_S = 0.05


@contextmanager
def shared(name: str, folder: Path) -> Iterator[Service]:
    """The server `name`, started by whoever asks first and stopped after its last user.

    `folder` must be the same for all who share it. Its logs stay there.

    Raises:
        Unavailable: the server cannot be had on this machine.
        RuntimeError: it did not start; the message has its logs.
    """
    here = folder / name
    with locked(here / "users.lock", shared=True):
        with locked(here / "start.lock"):
            if not (here / "state.json").exists():
                _start_keeper(name, folder)
            state = json.loads((here / "state.json").read_text("utf-8"))
        if "unavailable" in state:
            raise Unavailable(state["unavailable"])
        if "error" in state:
            raise RuntimeError(state["error"])
        yield Service(**state)


def _start_keeper(name: str, folder: Path) -> None:
    """Start the keeper and wait until it says how that went."""
    here = folder / name
    with (here / "keeper.log").open("ab") as log:
        words = [sys.executable, str(Path(__file__)), name, str(folder)]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=log, check=True, timeout=60)
    keeper = int(done.stdout)
    deadline = time.monotonic() + INSTALL_TIMEOUT_S + READY_S
    while not (here / "state.json").exists():
        if time.monotonic() > deadline or not Path(f"/proc/{keeper}").exists():
            said = (here / "keeper.log").read_text("utf-8", "replace")
            raise RuntimeError(f"{name}: its keeper did not start it\n{said[-4000:]}")
        time.sleep(_POLL_S)


def _keep(name: str, folder: Path) -> None:
    here = folder / name
    program = PROGRAMS[name](here / "run")
    try:
        with program as service:
            _write(here, service.to_dict())
            with locked(here / "users.lock"):
                (here / "state.json").unlink()
                program.stop()
                _remove_data(program.folder)
    except Unavailable as error:
        _write(here, {"unavailable": str(error)})
    except Exception:
        _write(here, {"error": f"{traceback.format_exc()}\n{program.logs()}"})
        _remove_data(program.folder)


def _write(folder: Path, state: dict[str, Any]) -> None:
    aside = folder / "state.aside"
    aside.write_text(json.dumps(state), "utf-8")
    aside.rename(folder / "state.json")


def _remove_data(folder: Path) -> None:
    """Everything but the logs."""
    for path in folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".log":
            with suppress(OSError):
                path.unlink()


def main() -> None:
    """Say the keeper's process id and become it, as nobody's child."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    child = os.fork()
    if child:
        print(child)
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _keep(name, folder)


if __name__ == "__main__":
    main()
