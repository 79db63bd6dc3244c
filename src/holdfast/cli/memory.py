"""Memory of `holdfast run --memory`: its folder, and the saves that a dead training left in it."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from holdfast.cli.output import write_message
from holdfast.cli.supervisor import Child, ChildEnding, ChildProcess
from holdfast.errors import CorruptData, UsageError
from holdfast.launched import MEMORY
from holdfast.ownership.process import liveness, this_process
from holdfast.policy.rules import number_of_bytes
from holdfast.staging.shared import FINISH_S, SUPERVISOR, SharedFolder, Supervisor, write_record
from holdfast.system import user_number

PLACE = Path("/dev/shm")
_PREFIX = "holdfast-"


class StagingMemory:
    """Folder in shared memory in which trainings stage, for as long as this process needs it."""

    def __init__(self, budget: str) -> None:
        """Check the budget, such as "8GB"."""
        self._nbytes = number_of_bytes(budget, what="--memory ")
        self._folder: SharedFolder | None = None
        if not PLACE.is_dir():
            raise UsageError(f"--memory: needs {PLACE}, which this system lacks")
        space = os.statvfs(PLACE)
        free = space.f_bavail * space.f_frsize
        if self._nbytes > free:
            raise UsageError(
                f"--memory {budget}: {PLACE} has {free:,} bytes free. Ask for less, or make it "
                "larger (docker run --shm-size)"
            )

    def __enter__(self) -> StagingMemory:
        remove_stale_folders()
        self._folder = folder = SharedFolder(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=PLACE)))
        record = Supervisor(process=this_process(), budget_nbytes=self._nbytes)
        write_record(folder.path / SUPERVISOR, record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._folder.remove()

    @property
    def environment(self) -> dict[str, str]:
        """The environment for the command."""
        assert self._folder is not None, "in a with block"
        return {**os.environ, MEMORY: str(self._folder.path)}

    @property
    def unfinished(self) -> SharedFolder | None:
        """The folder, if it has saves that are staged whole and not known to be committed."""
        assert self._folder is not None, "in a with block"
        folders = self._folder.staging_folders()
        is_left = any(one.is_whole and not one.is_settled for one in folders)
        return self._folder if is_left else None


class FinishingChild(Child):
    """Child whose last staged save is finished after each of its ends."""

    def __init__(self, child: ChildProcess, memory: StagingMemory) -> None:
        self._child = child
        self._memory = memory

    def run_to_end(self) -> ChildEnding:
        """Start the process, wait for its end, and finish what it has left in memory."""
        ending = self._child.run_to_end()
        folder = self._memory.unfinished
        if folder is None:
            return ending
        # A process of its own, as this one imports no torch, and must not fail with it.
        command = [sys.executable, "-m", "holdfast.saving.finish", str(folder.path)]
        finished = self._child.run_to_end(command, limit_s=FINISH_S)
        if finished.returncode != 0:
            write_message(f"the save that the training had staged was not finished: {finished}")
        asked = finished.asked if ending.asked is None else ending.asked
        return replace(ending, asked=asked)

    def pause(self, delay_s: float) -> int | None:
        """Wait for `delay_s` seconds or until a stop signal; return that signal's number."""
        return self._child.pause(delay_s)


def remove_stale_folders() -> None:
    """Remove the folders of supervisors that are proven dead, with all that staged there."""
    for path in PLACE.glob(f"{_PREFIX}*"):
        try:
            if not path.is_dir() or path.stat().st_uid != user_number():
                continue
            folder = SharedFolder(path)
            processes = [folder.supervisor.process]
        except (OSError, CorruptData):
            continue  # nothing proves that it is ours
        processes += [one.process for one in folder.staging_folders() if one.process is not None]
        if all(liveness(one) == "dead" for one in processes):
            folder.remove()
