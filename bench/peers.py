"""Holdfast and its peers behind one small interface: begin a save, finish it, load.

Each peer is used as its documents say, with the fsyncs that durability needs where it makes none.
Libraries are imported inside the function that uses them, so that one missing costs its rows only.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.machine import sync_folder
from bench.states import State

MEMORY_BUDGET = 256 * 1024 * 1024
"""Bytes that the row with a budget may stage at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save under way: training may go on."""

    wait: Callable[[], object]
    """Blocks until the save is done."""
    done: Callable[[], bool]


class Saver(ABC):
    """Saves one live state again and again."""

    @abstractmethod
    def begin(self, number: int) -> Begun:
        """Save under a new number; returns when training may go on."""

    def guard(self) -> AbstractContextManager[Any]:
        """What the optimizer's step must run inside of while a save is under way."""
        return nullcontext()

    def rest(self) -> None:
        """Return when all that comes after a save is done, too."""
        return

    def close(self) -> None:
        """Give back threads and memory."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One way to load what a saver wrote last."""

    title: str
    load: Callable[[State, Path], object]
    """Loads from the folder; the values are in the live tensors afterwards if `applies`."""
    applies: bool = True
    takes_memory: Collection[str] = ("cold", "warm")
    """Which loads newly take memory for the state, of their own or, cold, for pages of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library, set up one way."""

    title: str
    saver: Callable[[State, Path], Saver]
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """Only one set-up of a library carries the readers of its files."""
    takes_memory: Collection[str] = ("stall", "durable")
    """Until when a save has newly taken memory for the state, from the second one on: of its own
    before training goes on, or for pages of files before it is durable."""
    lacks: Callable[[str], str | None] = lambda kind: None
    """Why it cannot be measured on a state of that kind here; None: it can."""


class Holdfast(Saver):
    """`CheckpointManager` with its defaults, or with more arguments."""

    def __init__(
        self, state: State, folder: Path, *, is_awaited: bool = False, **options: Any
    ) -> None:
        """`is_awaited`: `save` is to return when the checkpoint is durable."""
        from holdfast import CheckpointManager

        self._manager = CheckpointManager(folder, state.components, **options)
        self._how: dict[str, Any] = {"wait": True} if is_awaited else {}

    def begin(self, number: int) -> Begun:
        """`save()`; the pending save is waited for afterwards."""
        pending = self._manager.save(number, **self._how)
        return Begun(wait=pending.wait, done=pending.done)

    def rest(self) -> None:
        """Until old checkpoints are gone."""
        self._manager.wait()

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


class PlainFile(Saver):
    """A function that writes one file, with fsync of the file and its folder after it."""

    def __init__(self, folder: Path, name: str, write: Callable[[Path], object]) -> None:
        self._folder, self._name, self._write = folder, name, write

    def begin(self, number: int) -> Begun:
        """Write and sync; nothing is left to wait for."""
        path = self._folder / str(number) / self._name
        path.parent.mkdir()
        self._write(path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        sync_folder(path.parent)
        sync_folder(self._folder)
        return _DONE


class DcpSync(Saver):
    """`dcp.save`, which fsyncs its files itself."""

    def __init__(self, state: State, folder: Path, *, num_threads: int = 1) -> None:
        self._state, self._folder, self._num_threads = state, folder, num_threads

    def begin(self, number: int) -> Begun:
        """Save; nothing is left to wait for."""
        import torch.distributed.checkpoint as dcp

        folder = self._folder / str(number)
        writer = dcp.FileSystemWriter(folder, thread_count=self._num_threads)
        dcp.save(self._state.nested(), storage_writer=writer, no_dist=True)
        return _DONE


class DcpAsync(Saver):
    """`dcp.async_save`, with the stager it makes itself or with one kept from save to save.

    `stager` names what the kept one uses: `plain` or `shared` memory, or `pinned` shared memory.
    """

    def __init__(self, state: State, folder: Path, *, stager: str | None = None) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._state, self._folder = state, folder
        # Staging in a thread of its own needs an accelerator too.
        options = StagingOptions(
            use_pinned_memory=stager == "pinned",
            use_shared_memory=stager in ("shared", "pinned"),
            use_async_staging=stager == "pinned",
            use_non_blocking_copy=stager == "pinned",
        )
        self._stager = DefaultStager(options) if stager else None
        self._staging: Future[Any] | None = None

    def begin(self, number: int) -> Begun:
        """Stage; the write goes on in DCP's thread."""
        import torch.distributed.checkpoint as dcp

        found: Any = dcp.async_save(
            self._state.nested(),
            checkpoint_id=self._folder / str(number),
            async_stager=self._stager,
            no_dist=True,
        )
        self._staging = getattr(found, "staging_completion", None)
        written = getattr(found, "upload_completion", found)
        return Begun(wait=written.result, done=written.done)

    def guard(self) -> AbstractContextManager[Any]:
        """Its documents say: wait for the staging before the optimizer's step."""
        if self._staging is not None:
            self._staging.result()
        return nullcontext()

    def close(self) -> None:
        """Close a stager of our own."""
        if self._stager is not None:
            self._stager.close()


class TorchCheckpointing(Saver):
    """`torch_checkpointing`: asynchronous staging; no direct I/O, with which its saves fail on
    ext4. It makes no fsync."""

    def __init__(self, state: State, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._state, self._folder = state, folder
        # Its staging is asynchronous, into shared memory, and pinned where there is CUDA.
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def begin(self, number: int) -> Begun:
        """Stage and write in its thread and its process."""
        written: Any = self._manager.save(str(self._folder / str(number)), self._state.nested())
        return Begun(wait=written.result, done=written.done)

    def guard(self) -> AbstractContextManager[Any]:
        """Its lock, which waits for the staging."""
        held: AbstractContextManager[Any] = self._manager.lock()
        return held

    def close(self) -> None:
        """End its process."""
        self._manager.close()


_DONE = Begun(wait=lambda: None, done=lambda: True)
"""A save that was durable when it returned."""


def _no_argument(name: str, *, of: str = "__init__") -> Callable[[str], str | None]:
    """For a set-up that needs an argument which this version of Holdfast may not have."""

    def lacks(kind: str) -> str | None:
        from holdfast import CheckpointManager

        has = name in inspect.signature(getattr(CheckpointManager, of)).parameters
        return None if has else f"CheckpointManager.{of} has no argument {name!r} in this version"

    return lacks


def _shares_memory(kind: str) -> str | None:
    """Shared memory takes a file descriptor a tensor."""
    return "20,000 tensors in shared memory need too many descriptors" if kind == "small" else None


def _no_torch_checkpointing(kind: str) -> str | None:
    if importlib.util.find_spec("torch_checkpointing") is None:
        return "torch_checkpointing is not installed"
    return _shares_memory(kind)


def _torch_file(state: State, folder: Path) -> Saver:
    return PlainFile(folder, "state.pt", lambda path: torch.save(state.nested(), path))


def _safetensors_file(state: State, folder: Path) -> Saver:
    from safetensors.torch import save_file

    flat = {name: tensor.detach() for name, tensor in state.flat().items()}
    return PlainFile(folder, "state.safetensors", lambda path: save_file(flat, path))


def _newest(folder: Path) -> Path:
    return max(
        (path for path in folder.iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )


def _holdfast_load(
    state: State, folder: Path, *, memory_budget: int | None = None, **options: bool
) -> object:
    from holdfast import CheckpointManager

    with CheckpointManager(folder, state.components, memory_budget=memory_budget) as manager:
        return manager.load(**options)


def _holdfast_resume(state: State, folder: Path) -> object:
    from holdfast import CheckpointManager

    with CheckpointManager(folder, state.components) as manager:
        return manager.resume()


def _torch_load(folder: Path, *, mmap: bool = False) -> Any:
    return torch.load(_newest(folder) / "state.pt", weights_only=True, mmap=mmap)


def _torch_apply(state: State, folder: Path) -> None:
    loaded = _torch_load(folder)
    for name, part in state.components.items():
        if isinstance(part, dict):
            _copy_into(part, loaded[name])
        else:
            part.load_state_dict(loaded[name])


def _torch_mmap_apply(state: State, folder: Path) -> None:
    _copy_into(state.flat(), State(components=_torch_load(folder, mmap=True)).flat())


def _safetensors_load(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(_newest(folder) / "state.safetensors")
    return loaded


def _dcp_load(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(state.nested(), checkpoint_id=_newest(folder), no_dist=True)


def _torch_checkpointing_load(state: State, folder: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    # Made to save synchronously, a manager that only loads starts no process.
    manager = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig()))
    manager.load(_newest(folder), into=state.nested())
    manager.close()


def _copy_into(live: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(loaded[name])


PEERS: Mapping[str, Peer] = {
    "holdfast": Peer(
        title="holdfast",
        saver=Holdfast,
        takes_memory=(),
        readers={
            "holdfast": Reader(title="holdfast, every byte verified", load=_holdfast_load),
            "holdfast-resume": Reader(
                title="holdfast, `resume()`, the first: in place", load=_holdfast_resume
            ),
            "holdfast-unverified": Reader(
                title="holdfast, verify=False",
                load=lambda state, folder: _holdfast_load(state, folder, verify=False),
            ),
            "holdfast-in-place": Reader(
                title="holdfast, in_place=True",
                load=lambda state, folder: _holdfast_load(state, folder, in_place=True),
                takes_memory=(),
            ),
            "holdfast-in-place-unverified": Reader(
                title="holdfast, in_place=True, verify=False",
                load=lambda state, folder: _holdfast_load(
                    state, folder, in_place=True, verify=False
                ),
                takes_memory=(),
            ),
            "holdfast-bounded": Reader(
                title="holdfast, memory_budget of 256 MiB",
                load=lambda state, folder: _holdfast_load(
                    state, folder, memory_budget=MEMORY_BUDGET
                ),
                takes_memory=(),
            ),
        },
    ),
    "holdfast-awaited": Peer(
        title="holdfast, save(wait=True)",
        saver=lambda state, folder: Holdfast(state, folder, is_awaited=True),
        takes_memory=(),
        lacks=_no_argument("wait", of="save"),
    ),
    "holdfast-overlap": Peer(
        title="holdfast, overlap=True",
        saver=lambda state, folder: Holdfast(state, folder, overlap=True),
        takes_memory=(),
        lacks=_no_argument("overlap"),
    ),
    "holdfast-budget": Peer(
        title="holdfast, memory_budget of 256 MiB",
        saver=lambda state, folder: Holdfast(state, folder, memory_budget=MEMORY_BUDGET),
        takes_memory=(),
        lacks=_no_argument("memory_budget"),
    ),
    "torch": Peer(
        title="torch.save + fsync",
        saver=_torch_file,
        readers={
            "torch-bare": Reader(
                title="torch.load alone",
                load=lambda _, folder: _torch_load(folder),
                applies=False,
            ),
            "torch": Reader(title="torch.load + load_state_dict", load=_torch_apply),
            "torch-mmap": Reader(
                title="torch.load(mmap) + copy", load=_torch_mmap_apply, takes_memory=("cold",)
            ),
        },
    ),
    "safetensors": Peer(
        title="safetensors + fsync",
        saver=_safetensors_file,
        readers={
            "safetensors-bare": Reader(
                title="safetensors load_file alone",
                load=lambda _, folder: _safetensors_load(folder),
                applies=False,
                takes_memory=("cold",),
            ),
            "safetensors": Reader(
                title="safetensors load_file + copy",
                load=lambda state, folder: _copy_into(state.flat(), _safetensors_load(folder)),
                takes_memory=("cold",),
            ),
        },
    ),
    "dcp": Peer(
        title="dcp.save",
        saver=DcpSync,
        readers={"dcp": Reader(title="dcp.load", load=_dcp_load, takes_memory=("cold",))},
    ),
    "dcp-2": Peer(
        title="dcp.save, thread_count=2",
        saver=lambda state, folder: DcpSync(state, folder, num_threads=2),
    ),
    "dcp-async": Peer(title="dcp.async_save", saver=DcpAsync),
    "dcp-async-kept": Peer(
        title="dcp.async_save, kept stager",
        saver=lambda state, folder: DcpAsync(state, folder, stager="plain"),
        takes_memory=("durable",),
    ),
    "dcp-async-shared": Peer(
        title="dcp.async_save, kept stager in shared memory",
        saver=lambda state, folder: DcpAsync(state, folder, stager="shared"),
        takes_memory=("durable",),
        lacks=_shares_memory,
    ),
    "dcp-async-pinned": Peer(
        title="dcp.async_save, kept pinned stager",
        saver=lambda state, folder: DcpAsync(state, folder, stager="pinned"),
        takes_memory=("durable",),
        lacks=lambda kind: None if torch.cuda.is_available() else "pinned memory needs CUDA",
    ),
    "torch_checkpointing": Peer(
        title="torch_checkpointing (no fsync)",
        saver=TorchCheckpointing,
        takes_memory=("durable",),
        readers={
            "torch_checkpointing": Reader(
                title="torch_checkpointing load", load=_torch_checkpointing_load
            )
        },
        lacks=_no_torch_checkpointing,
    ),
}
