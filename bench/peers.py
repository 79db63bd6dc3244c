"""Holdfast and its peers behind one small interface: begin a save, finish it, load.

Each peer is used as its documents say, with the fsyncs that durability needs where it makes none.
Libraries are imported inside the function that uses them, so that one missing costs its rows only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from bench.limits import sync_folder
from bench.states import State

Finish: TypeAlias = Callable[[], object]


class Saver(Protocol):
    """Saves one live state again and again."""

    def begin(self, number: int) -> Finish:
        """Returns when training may go on; calling the result waits until the save is durable."""
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One way to load what a saver wrote last."""

    title: str
    load: Callable[[State, Path], object]
    """Loads from the folder; the values are in the live tensors afterwards if `applies`."""
    applies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library, set up one way."""

    title: str
    saver: Callable[[State, Path], Saver]
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """Only one set-up of a library carries the readers of its files."""


class Holdfast:
    """`CheckpointManager` with its defaults."""

    def __init__(self, state: State, folder: Path) -> None:
        from holdfast import CheckpointManager

        self._manager = CheckpointManager(folder, state.components)

    def begin(self, number: int) -> Finish:
        """`save()`; the pending save is waited for afterwards."""
        return self._manager.save(number).wait

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


class PlainFile:
    """A function that writes one file, with fsync of the file and its folder after it."""

    def __init__(self, folder: Path, name: str, write: Callable[[Path], object]) -> None:
        self._folder, self._name, self._write = folder, name, write

    def begin(self, number: int) -> Finish:
        """Write and sync; nothing is left to wait for."""
        path = self._folder / str(number) / self._name
        path.parent.mkdir()
        self._write(path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        sync_folder(path.parent)
        sync_folder(self._folder)
        return _nothing

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpSync:
    """`dcp.save`, which fsyncs its files itself."""

    state: State
    folder: Path
    num_threads: int = 1

    def begin(self, number: int) -> Finish:
        """Save; nothing is left to wait for."""
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(self.folder / str(number), thread_count=self.num_threads)
        dcp.save(self.state.nested(), storage_writer=writer, no_dist=True)
        return _nothing

    def close(self) -> None:
        """Nothing to give back."""


class DcpAsync:
    """`dcp.async_save`, with the stager it makes itself or with one kept from save to save."""

    def __init__(self, state: State, folder: Path, *, keep_stager: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._state, self._folder = state, folder
        # Pinning and streams need an accelerator; shared memory takes a descriptor a tensor, and
        # 20,000 are more than a process may have. What is left to gain is memory used again.
        plain = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(plain) if keep_stager else None

    def begin(self, number: int) -> Finish:
        """Stage; the write goes on in DCP's thread."""
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(
            self._state.nested(),
            checkpoint_id=self._folder / str(number),
            async_stager=self._stager,
            no_dist=True,
        ).result

    def close(self) -> None:
        """Close a stager of our own."""
        if self._stager is not None:
            self._stager.close()


def _nothing() -> None:
    """A save that was durable when it returned."""


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


def _holdfast_load(state: State, folder: Path) -> object:
    from holdfast import CheckpointManager

    with CheckpointManager(folder, state.components) as manager:
        return manager.load()


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


def _copy_into(live: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(loaded[name])


PEERS: Mapping[str, Peer] = {
    "holdfast": Peer(
        title="holdfast",
        saver=Holdfast,
        readers={
            "holdfast": Reader(title="holdfast, every byte verified", load=_holdfast_load),
            "holdfast-resume": Reader(title="the same, claiming the run", load=_holdfast_resume),
        },
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
            "torch-mmap": Reader(title="torch.load(mmap) + copy", load=_torch_mmap_apply),
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
            ),
            "safetensors": Reader(
                title="safetensors load_file + copy",
                load=lambda state, folder: _copy_into(state.flat(), _safetensors_load(folder)),
            ),
        },
    ),
    "dcp": Peer(
        title="dcp.save",
        saver=lambda state, folder: DcpSync(state=state, folder=folder),
        readers={"dcp": Reader(title="dcp.load", load=_dcp_load)},
    ),
    "dcp-2": Peer(
        title="dcp.save, thread_count=2",
        saver=lambda state, folder: DcpSync(state=state, folder=folder, num_threads=2),
    ),
    "dcp-async": Peer(
        title="dcp.async_save",
        saver=lambda state, folder: DcpAsync(state, folder, keep_stager=False),
    ),
    "dcp-async-kept": Peer(
        title="dcp.async_save, kept stager",
        saver=lambda state, folder: DcpAsync(state, folder, keep_stager=True),
    ),
}
