"""A training for tests of shared memory: `python trained.py ROOT JSON`; a JSON line for each fact.

The options: `until` (the last step), `die` and `at` (a moment in the save of a step, of `MOMENTS`),
`once` (a file: it dies only if that is missing), `ranks` (threads of this process), `overlap`,
`manager` (further options of it), `remote` (the remote tier), and `pause` (a file, for which it
waits after step 2).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from allranks import Member, all_of, on_ranks
from holdfast import Encryption, Tiered, errors
from holdfast.events import Event
from holdfast.keys import SecretKey
from holdfast.saving import distributed, save, write_files
from holdfast.saving.handover import SharedStager
from holdfast.staging.arena import FileImage
from holdfast.staging.shared import StagingFolder

WIDTH = 8192
"""Makes one tensor large enough to be copied by itself."""


def say(**what: Any) -> None:
    os.write(1, f"{json.dumps(what)}\n".encode())  # whole, also beside other threads


def die(*args: Any, **named: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(*args: Any, **named: Any) -> None:
    raise errors.StoreError("the disk is full")


def _after(call: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **named: Any) -> Any:
        call(*args, **named)
        then()

    return both


MOMENTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "before staging": (SharedStager, "prepare_staging", lambda call: die),
    "while staging": (FileImage, "update_block", lambda call: die),
    "before the record": (StagingFolder, "record_staged", lambda call: die),
    "staged": (StagingFolder, "record_staged", lambda call: _after(call, die)),
    "making the folder": (save, "create_attempt", lambda call: die),
    "writing": (write_files._Batch, "_finish_file", lambda call: die),
    "before the index": (save, "write_index", lambda call: die),
    "before the manifest": (save, "commit", lambda call: die),
    "after the manifest": (save, "commit", lambda call: _after(call, die)),
    "settled": (StagingFolder, "settle", lambda call: _after(call, die)),
    "failed": (save, "commit", lambda call: _fail),
    "posting": (distributed.FollowingSave, "post_files", lambda call: die),
}


def strike(moment: str) -> None:
    """Replace a function of the moment by one that kills this process."""
    owner, name, make = MOMENTS[moment]
    setattr(owner, name, make(getattr(owner, name)))


def bits(member: Member) -> str:
    """A digest of every tensor of a rank."""
    found = hashlib.sha256()
    for name, data in sorted(member.bits().items()):
        found.update(name.encode() + data)
    return found.hexdigest()[:16]


def _tell_event(event: Event) -> None:
    if event.kind in ("warning", "save_failed", "rejected"):
        say(**{event.kind: event.message})


def _is_first(options: dict[str, Any]) -> bool:
    """Whether the training has not died before; of a training that dies each time always."""
    path = options.get("once")
    if path is None:
        return True
    was_there = Path(path).exists()
    Path(path).touch()
    return not was_there


def train(member: Member, root: str, options: dict[str, Any]) -> None:
    """Resume, and save at each step."""
    given = {"sinks": (_tell_event,), "on_failure": "warn", **options.get("manager", {})}
    if given.get("encrypt"):
        given["encrypt"] = Encryption(keys=SecretKey(b"k" * 32))
    place = Tiered(root, options["remote"]) if "remote" in options else root
    with member.manager(place, overlap=options.get("overlap"), **given) as manager:
        found = manager.resume()
        step = found.step if found else 0
        say(rank=member.rank, resumed=step, bits=bits(member))
        while step < options["until"]:
            while step == 2 and not Path(options.get("pause", "/")).exists():
                time.sleep(0.01)
            step += 1
            member.train()
            if step == options.get("at") and member.rank == 0 and _is_first(options):
                strike(options["die"])
            say(rank=member.rank, step=step, bits=bits(member))
            pending = manager.save(step)
            if step != options.get("at"):
                pending.wait()
            else:  # it lives on only if that save has failed
                with suppress(errors.SaveFailed):
                    pending.wait()
                die()
    say(rank=member.rank, closed=True)


def main(root: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)

    def work(one: Member) -> None:
        train(Member(one.coordinator, width=WIDTH), root, options)

    all_of(on_ranks(options.get("ranks", 1), work))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
