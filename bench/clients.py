"""Ways to send a state to an object store and to bring it back: Holdfast, bare clients, DCP.

A bare client sends one object of as many bytes as the state has from memory, and reads it back into
the same memory; it computes no digest, commits nothing and has one object where a checkpoint has
several. All take large parts, four at once, which is the fastest for each of them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from bench.states import State

PART_NBYTES = 32 << 20
PARTS_AT_ONCE = 4
MEMORY_BUDGET = 256 << 20
_WARM_UP_NBYTES = 40 << 20
"""More than a part: every kind of request is made once."""


class Client(ABC):
    """One way to send a state and to bring it back."""

    title: str
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""
    is_s3_only = False

    def __init__(self, url: str, state: State) -> None:
        self.url = url
        self.state = state

    @abstractmethod
    def warm_up(self) -> None:
        """Make what is made once: connections, buffers, imports, a claim. Not measured."""

    @abstractmethod
    def upload(self) -> None:
        """Send all of it; returns when the service has it."""

    @abstractmethod
    def download(self) -> None:
        """Bring it back."""

    def close(self) -> None:
        """Nothing more comes."""
        return


class Holdfast(Client):
    """A manager whose root is the bucket: its second save, which claims nothing and tries nothing
    out, and a load of every byte into the live tensors, verified."""

    title = "holdfast, straight to the store"
    needs = ("obstore",)
    is_unsigned = False
    memory_budget: int | None = None

    def warm_up(self) -> None:
        """See `Client.warm_up`: the first save."""
        from holdfast import CheckpointManager
        from holdfast.store.remote import RemoteOptions, RemoteStore

        # Over https this is the default.
        options = RemoteOptions(unsigned_payload=True) if self.is_unsigned else None
        store = RemoteStore(self.url, options=options)
        self._manager = CheckpointManager(
            store, self.state.components, memory_budget=self.memory_budget
        )
        self._manager.save(1, wait=True)
        self._manager.wait()
        self.state.negate()

    def upload(self) -> None:
        """See `Client.upload`."""
        self._manager.save(2, wait=True)

    def download(self) -> None:
        """See `Client.download`."""
        self._manager.load()

    def close(self) -> None:
        """See `Client.close`."""
        self._manager.close()


class HoldfastBudget(Holdfast):
    """In waves."""

    title = "holdfast, memory_budget of 256 MiB"
    memory_budget = MEMORY_BUDGET


class HoldfastUnsigned(Holdfast):
    """As over https, where payloads are not signed."""

    title = "holdfast, payload not signed"
    is_unsigned = True
    is_s3_only = True


class Bare(Client):
    """A bare client: one object, from memory and into memory."""

    def __init__(self, url: str, state: State) -> None:
        super().__init__(url, state)
        scheme, _, rest = url.partition("://")
        self.scheme = scheme
        self.bucket, _, prefix = rest.partition("/")
        self.key = f"{prefix}/blob"
        whole = memoryview(bytearray(state.nbytes))
        for at, tensor in _places(state):
            whole[at : at + tensor.nbytes] = memoryview(tensor.detach().numpy()).cast("B")
        self.memory = whole

    def warm_up(self) -> None:
        """See `Client.warm_up`: a smaller object."""
        whole, self.memory = self.memory, self.memory[:_WARM_UP_NBYTES]
        self.upload()
        self.download()
        self.memory = whole


def _places(state: State) -> Iterator[tuple[int, Any]]:
    at = 0
    for tensor in state.flat().values():
        yield at, tensor
        at += tensor.nbytes


class Obstore(Bare):
    """obstore."""

    title = "obstore"
    needs = ("obstore",)
    is_unsigned = False

    def __init__(self, url: str, state: State) -> None:
        super().__init__(url, state)
        from obstore.store import from_url

        settings: dict[str, Any] = {"client_options": {"allow_http": True, "timeout": "300s"}}
        if self.scheme == "s3":
            settings["unsigned_payload"] = self.is_unsigned
        self._store = from_url(f"{self.scheme}://{self.bucket}", **settings)

    def upload(self) -> None:
        """See `Client.upload`."""
        import obstore

        obstore.put(
            self._store,
            self.key,
            self.memory,
            chunk_size=PART_NBYTES,
            max_concurrency=PARTS_AT_ONCE,
        )

    def download(self) -> None:
        """See `Client.download`."""
        import obstore

        at = 0
        for piece in obstore.get(self._store, self.key).stream(min_chunk_size=1 << 20):
            self.memory[at : at + len(piece)] = piece
            at += len(piece)


class ObstoreUnsigned(Obstore):
    """As over https by people who know of the option."""

    title = "obstore, payload not signed"
    is_unsigned = True
    is_s3_only = True


class Boto3(Bare):
    """boto3's transfer manager."""

    title = "boto3 transfer manager"
    needs = ("boto3",)
    is_s3_only = True

    def __init__(self, url: str, state: State) -> None:
        super().__init__(url, state)
        import boto3
        from boto3.s3.transfer import TransferConfig

        self._client = boto3.client("s3")
        self._config = TransferConfig(
            multipart_threshold=PART_NBYTES,
            multipart_chunksize=PART_NBYTES,
            max_concurrency=PARTS_AT_ONCE,
        )

    def upload(self) -> None:
        """See `Client.upload`."""
        file = _MemoryFile(self.memory)
        self._client.upload_fileobj(file, self.bucket, self.key, Config=self._config)

    def download(self) -> None:
        """See `Client.download`."""
        file = _MemoryFile(self.memory)
        self._client.download_fileobj(self.bucket, self.key, file, Config=self._config)


class _MemoryFile:
    """As much of a file as boto3 asks for, in memory that is there; `BytesIO` would copy it all."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._memory)}[whence]
        self._at = base + offset
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        stop = len(self._memory) if nbytes < 0 else self._at + nbytes
        found = bytes(self._memory[self._at : stop])
        self._at += len(found)
        return found

    def write(self, data: bytes) -> int:
        self._memory[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


class S3Torch(Bare):
    """s3torchconnector, through the AWS runtime; its parts are of 8 MiB by itself."""

    title = "s3torchconnector"
    needs = ("s3torchconnector", "boto3")
    is_s3_only = True

    def __init__(self, url: str, state: State) -> None:
        super().__init__(url, state)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        self._client = S3Client(
            os.environ["AWS_REGION"],
            endpoint=os.environ.get("AWS_ENDPOINT_URL"),
            s3client_config=S3ClientConfig(part_size=PART_NBYTES, force_path_style=True),
        )

    def upload(self) -> None:
        """See `Client.upload`. Ceph 16 sends no ETag at the end, which it takes for a failure."""
        writer = self._client.put_object(self.bucket, self.key)
        for at in range(0, len(self.memory), PART_NBYTES):
            writer.write(bytes(self.memory[at : at + PART_NBYTES]))
        try:
            writer.close()
        except Exception as error:
            if 'Header "ETag" not found' not in str(error) or not self._is_there():
                raise

    def _is_there(self) -> bool:
        import boto3

        found = boto3.client("s3").head_object(Bucket=self.bucket, Key=self.key)
        return bool(found["ContentLength"] == len(self.memory))

    def download(self) -> None:
        """See `Client.download`."""
        reader = self._client.get_object(self.bucket, self.key)
        at = 0
        while at < len(self.memory):
            found = reader.readinto(self.memory[at : at + PART_NBYTES])
            if not found:
                raise RuntimeError(f"the object ends at byte {at}")
            at += found


class DcpFsspec(Client):
    """DCP over fsspec, as its documents show it."""

    title = "dcp.save, dcp.load over s3fs"
    needs = ("s3fs",)
    is_s3_only = True

    def warm_up(self) -> None:
        """See `Client.warm_up`: a small state."""
        import torch
        import torch.distributed.checkpoint as dcp

        small = {"tensor": torch.zeros(_WARM_UP_NBYTES // 4)}
        dcp.save(small, storage_writer=self._writer("small"), no_dist=True)
        dcp.load(small, storage_reader=self._reader("small"), no_dist=True)

    def upload(self) -> None:
        """See `Client.upload`."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state.nested(), storage_writer=self._writer("dcp"), no_dist=True)

    def download(self) -> None:
        """See `Client.download`."""
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state.nested(), storage_reader=self._reader("dcp"), no_dist=True)

    def _writer(self, name: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(f"{self.url}/{name}")

    def _reader(self, name: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(f"{self.url}/{name}")


CLIENTS: Mapping[str, type[Client]] = {
    "holdfast": Holdfast,
    "holdfast-budget": HoldfastBudget,
    "holdfast-unsigned": HoldfastUnsigned,
    "obstore": Obstore,
    "obstore-unsigned": ObstoreUnsigned,
    "boto3": Boto3,
    "s3torchconnector": S3Torch,
    "dcp-fsspec": DcpFsspec,
}
