"""Savers of a training whose checkpoints go to an object store.

Beside Holdfast the two usual ways: DCP's asynchronous save over s3fs, and `torch.save` into memory
that a thread uploads.
"""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.peers import Begun, Saver
from bench.slowdown import Training
from bench.states import State


class RemoteSaver(Saver):
    """Saves one live state under a URL again and again; done when the service has it."""

    title: str
    needs: tuple[str, ...]
    """Modules without which it is left out."""
    is_s3_only = False

    @abstractmethod
    def __init__(self, state: State, folder: Path, url: str) -> None:
        """`folder` is on a local disk."""


class HoldfastBucket(RemoteSaver):
    """A manager whose root is the bucket."""

    title = "holdfast, root in the bucket"
    needs: tuple[str, ...] = ("obstore",)

    def __init__(self, state: State, folder: Path, url: str) -> None:
        from holdfast import CheckpointManager

        self._manager = CheckpointManager(self._root(folder, url), state.components)
        self._thread = ThreadPoolExecutor(1)

    def _root(self, folder: Path, url: str) -> Any:
        return url

    def begin(self, number: int) -> Begun:
        """Save; another thread waits for all that comes of it."""
        self._manager.save(number)
        return _begun(self._thread.submit(self._manager.wait))

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()
        self._thread.shutdown()


class HoldfastTiered(HoldfastBucket):
    """Commits on the local disk, and uploads from there."""

    title = "holdfast, Tiered: disk, then bucket"

    def _root(self, folder: Path, url: str) -> Any:
        from holdfast import Tiered

        return Tiered(folder / "local", url)


class DcpAsyncFsspec(RemoteSaver):
    """`dcp.async_save` over s3fs."""

    title = "dcp.async_save over s3fs"
    needs = ("s3fs",)
    is_s3_only = True

    def __init__(self, state: State, folder: Path, url: str) -> None:
        self._state, self._url = state, url

    def begin(self, number: int) -> Begun:
        """Stage; the rest goes on in DCP's thread."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(f"{self._url}/{number}")
        found: Any = dcp.async_save(self._state.nested(), storage_writer=writer, no_dist=True)
        return _begun(getattr(found, "upload_completion", found))


class TorchBoto3(RemoteSaver):
    """`torch.save` into memory, which a thread uploads."""

    title = "torch.save into memory, boto3 in a thread"
    needs = ("boto3",)
    is_s3_only = True

    def __init__(self, state: State, folder: Path, url: str) -> None:
        import boto3

        self._state = state
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._client = boto3.client("s3")
        self._thread = ThreadPoolExecutor(1)

    def begin(self, number: int) -> Begun:
        """Serialize; the upload goes on in the thread."""
        file = io.BytesIO()
        torch.save(self._state.nested(), file)
        file.seek(0)
        key = f"{self._prefix}/{number}.pt"
        return _begun(self._thread.submit(self._client.upload_fileobj, file, self._bucket, key))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


SAVERS: Mapping[str, type[RemoteSaver]] = {
    "holdfast": HoldfastBucket,
    "holdfast-tiered": HoldfastTiered,
    "dcp-async-fsspec": DcpAsyncFsspec,
    "torch-boto3": TorchBoto3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTraining(Training):
    """A training whose checkpoints go to a store; `peer` is one of `SAVERS`."""

    url: str
    environment: Mapping[str, str]
    """Variables by which the store is found."""

    def saver(self, state: State) -> Saver:
        """See `Training.saver`."""
        os.environ.update(self.environment)
        return SAVERS[self.peer](state, self.folder, self.url)


def _begun(future: Future[Any]) -> Begun:
    return Begun(wait=future.result, done=future.done)
