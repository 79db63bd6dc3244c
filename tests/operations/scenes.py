"""What goes wrong in operation, made for real, and the messages that a person sees.

Each scene is a function of a `Scene`, which keeps them. docs/operations.md shows all of them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.mistakes.clocks import shifted
from tests.mistakes.user import Listener, User, new_state, train

import holdfast
import warm
from holdfast import Tiered, keys
from holdfast.cli import main
from holdfast.errors import HoldfastError, TransientStoreError
from holdfast.events import Event
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore

MIB = 1 << 20


class Scene:
    """A user whose run is in trouble, and what was said in it."""

    def __init__(self, user: User, disk: Path | None = None) -> None:
        self.user = user
        self.disk = disk
        self.said: list[str] = []

    def command(self, *words: str) -> None:
        """Run a command of Holdfast; both of its streams, as a terminal shows them."""
        screen = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["holdfast", *words]),
            contextlib.redirect_stdout(screen),
            contextlib.redirect_stderr(screen),
            contextlib.suppress(SystemExit),
        ):
            main()
        self.said.append(f"$ holdfast {shlex.join(words)}\n{screen.getvalue()}")

    def raises(self, act: Callable[[], object]) -> None:
        """Do what ends with an error, and note it as Python prints it."""
        try:
            act()
        except HoldfastError as error:
            kind = type(error)
            self.said.append(f"{kind.__module__}.{kind.__name__}: {error}\n")
            return
        raise AssertionError("nothing was raised")

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Note the warnings that are logged meanwhile."""
        listener = Listener()
        logging.getLogger("holdfast").addHandler(listener)
        try:
            yield
        finally:
            logging.getLogger("holdfast").removeHandler(listener)
            self.said.extend(f"{message}\n" for message in listener.messages)


def full_disk(scene: Scene) -> None:
    """A save that does not fit, in the middle of a run."""
    assert scene.disk is not None
    state = {"model": {"x": torch.ones(12 * MIB // 4)}}
    root = scene.disk / "first"
    with holdfast.CheckpointManager(root, state, on_failure="warn") as manager:
        manager.save(1).wait()
        ballast = scene.disk / "ballast"
        free = os.statvfs(scene.disk)
        ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - 4 * MIB))
        scene.raises(manager.save(2).wait)
        ballast.unlink()
        manager.save(3).wait()
        ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - 20 * MIB))
    with holdfast.CheckpointManager(scene.disk / "second", state) as manager:
        scene.raises(lambda: manager.save(1))


def corrupt(scene: Scene) -> None:
    """One bit of the newest checkpoint has changed."""
    path = scene.user.folder_of(3) / "model-00000.safetensors"
    flip(path)
    scene.command("verify", "runs/first")
    with scene.logged():
        scene.user.manager().resume()
    scene.user.doing.close()
    scene.command("ls", "runs/first")


def lost_manifest(scene: Scene) -> None:
    """The manifest of the newest checkpoint is gone."""
    folder = scene.user.folder_of(3)
    (folder / "manifest.json").unlink()
    scene.command("ls", "runs/first")
    scene.command("gc", "runs/first", "--damaged", folder.name)


def lost_key(scene: Scene) -> None:
    """A run is encrypted, and the key is another one, or none."""
    mine, other = keys.generate(), keys.generate()
    root = scene.user.new
    with holdfast.CheckpointManager(
        root, new_state(), encrypt=holdfast.Encryption(keys=mine)
    ) as manager:
        manager.save(1, wait=True)
    scene.raises(lambda: scene.user.manager(root).resume())
    wrong = holdfast.Encryption(keys=other)
    scene.raises(lambda: scene.user.manager(root, encrypt=wrong).resume())
    scene.command("keys", "list", "runs/new")


def owned_elsewhere(scene: Scene) -> None:
    """Another process has the run."""
    with scene.user.elsewhere():
        scene.raises(lambda: scene.user.manager().resume())
        scene.command("ls", "runs/first")


def taken_over(scene: Scene) -> None:
    """Another process has taken the run from this one."""
    manager = scene.user.resumed()
    warm.run(["-c", "from tests.mistakes.user import take; take('runs/first')"])
    scene.raises(lambda: manager.save(4).wait())


def deleted(scene: Scene) -> None:
    """A checkpoint is missed."""
    scene.command("rm", "runs/first@step=1", "--reason", "the learning rate was wrong", "--yes")
    scene.command("log", "runs/first")


def deleted_by_its_rule(scene: Scene) -> None:
    """Retention has deleted it."""
    events: list[Event] = []
    with scene.user.manager(keep="last:2", sinks=[events.append]) as manager:
        manager.resume()
        scene.user.train()
        manager.save(4).wait()
    scene.said.extend(f"{event.message}\n" for event in events if event.kind == "retracted")


def late_upload(scene: Scene) -> None:
    """The bucket does not answer."""
    error = TransientStoreError("no answer within 20 s")
    fault = Fault(kind="fail", op="put", key="*/index.json", times=None, error=error)
    bucket = FaultyStore(MemoryStore("bucket/first"), [fault])
    tried = threading.Event()

    def note(event: Event) -> None:
        if event.kind == "upload_failed" and not tried.is_set():
            scene.said.append(f"{event.message}\n")
            tried.set()

    root = Tiered(scene.user.new, bucket, close_timeout_s=1)
    with holdfast.CheckpointManager(root, new_state(), sinks=[note]) as manager:
        manager.save(1).wait()
        assert tried.wait(20)
        scene.raises(lambda: manager.wait(1))
        scene.command("uploads", "runs/new")
        while "will be tried again" not in scene.said[-1]:  # it is being tried just then
            scene.said.pop()
            scene.command("uploads", "runs/new")


def wrong_clock(scene: Scene) -> None:
    """The clock was set back by a day before the restart."""
    with scene.logged(), shifted(timedelta(days=-1)):
        scene.user.goes_on(keep="daily:7")


def killed_in_a_save(scene: Scene) -> None:
    """The process died while it wrote a checkpoint."""
    done = warm.run(["-c", "from tests.operations.scenes import die_in_a_save as die; die()"])
    assert done.returncode == -signal.SIGKILL, done.stderr
    scene.command("ls", "runs/first")
    scene.command("gc", "runs/first")


def die_in_a_save() -> None:
    """Save step 4, and be killed at its last write, which would make it a checkpoint."""

    class Deadly(LocalStore):
        def put(self, key: str, *given: Any, **options: Any) -> Any:
            if key.startswith("step-00000004") and key.endswith("manifest.json"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().put(key, *given, **options)

    state = new_state()
    with holdfast.CheckpointManager(Deadly(Path("runs/first")), state) as manager:
        manager.resume()
        train(state)
        manager.save(4, wait=True)


def flip(path: Path) -> None:
    """Change one bit in a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


SCENES = (
    full_disk,
    corrupt,
    lost_manifest,
    lost_key,
    owned_elsewhere,
    taken_over,
    deleted,
    deleted_by_its_rule,
    late_upload,
    wrong_clock,
    killed_in_a_save,
)
