"""Saves to an object store and loads from it, beside bare clients: `python -m bench.remote`.

Without `--url` it installs and starts a server of the tests and measures against that; a bucket of
your own is `--url s3://bucket/prefix`, with the settings that the clouds' tools read. A bare client
sends one object of as many bytes as the state has from memory, and reads it back into memory; it
computes no digest, commits nothing and has one object where a checkpoint has several.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.child import in_child
from bench.command import Bench, progress
from bench.machine import PeakMemory
from bench.report import megabytes, number, results_table, seconds, times
from bench.results import Figures, Results
from bench.states import State, StateSpec, build

_SEED = 7
_PART_NBYTES = 32 << 20
_PARTS_AT_ONCE = 4
SERVERS = ("localstack", "moto", "ceph")


class Client(ABC):
    """One way to send a state and to bring it back."""

    title: str
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""

    def __init__(self, url: str, state: State) -> None:
        self.url = url
        self.state = state

    @abstractmethod
    def upload(self) -> None:
        """Send all of it; returns when the service has it."""

    @abstractmethod
    def download(self) -> None:
        """Bring it back."""


class Holdfast(Client):
    """A manager whose root is the bucket: its second save, which claims nothing and tries nothing
    out, and a load in a manager of its own."""

    title = "holdfast, straight to the store"
    needs = ("obstore",)
    is_unsigned = False
    memory_budget: int | None = None

    def __init__(self, url: str, state: State) -> None:
        super().__init__(url, state)
        self._saving = self._manager()
        self._saving.save(1, wait=True)
        self._saving.wait()
        state.negate()

    def _manager(self) -> Any:
        from holdfast import CheckpointManager
        from holdfast.store.remote import RemoteStore
        from holdfast.store.remoteopen import RemoteOptions

        store = RemoteStore(self.url, options=RemoteOptions(unsigned_payload=self.is_unsigned))
        return CheckpointManager(store, self.state.components, memory_budget=self.memory_budget)

    def upload(self) -> None:
        """See `Client.upload`."""
        self._saving.save(2, wait=True)

    def download(self) -> None:
        """See `Client.download`: into the live tensors, every byte verified."""
        self._saving.close()
        with self._manager() as manager:
            manager.load()


class HoldfastBudget(Holdfast):
    """In waves."""

    title = "holdfast, memory_budget of 256 MiB"
    memory_budget = 256 << 20


class HoldfastUnsigned(Holdfast):
    """As over https, where payloads are not signed."""

    title = "holdfast, payload not signed"
    is_unsigned = True


class _Blob(Client):
    """A bare client: one object, from memory and into memory."""

    def __init__(self, url: str, state: State) -> None:
        super().__init__(url, state)
        scheme, _, rest = url.partition("://")
        self.scheme = scheme
        self.bucket, _, prefix = rest.partition("/")
        self.key = f"{prefix}/blob"
        self.memory = memoryview(bytearray(state.nbytes))
        for at, tensor in _places(state):
            self.memory[at : at + tensor.nbytes] = tensor.detach().numpy().tobytes()


def _places(state: State) -> Iterator[tuple[int, Any]]:
    at = 0
    for tensor in state.flat().values():
        yield at, tensor
        at += tensor.nbytes


class Obstore(_Blob):
    """obstore, with parts as large as it likes best."""

    title = "obstore, 32 MiB × 4"
    needs = ("obstore",)
    is_unsigned = False

    def _store(self) -> Any:
        from obstore.store import from_url

        settings: dict[str, Any] = {"client_options": {"allow_http": True, "timeout": "300s"}}
        if self.scheme == "s3":
            settings["unsigned_payload"] = self.is_unsigned
        return from_url(f"{self.scheme}://{self.bucket}", **settings)

    def upload(self) -> None:
        """See `Client.upload`."""
        import obstore

        obstore.put(
            self._store(),
            self.key,
            self.memory,
            chunk_size=_PART_NBYTES,
            max_concurrency=_PARTS_AT_ONCE,
        )

    def download(self) -> None:
        """See `Client.download`."""
        import obstore

        at = 0
        for piece in obstore.get(self._store(), self.key).stream(min_chunk_size=1 << 20):
            self.memory[at : at + len(piece)] = piece
            at += len(piece)


class ObstoreUnsigned(Obstore):
    """As over https by people who know of the option."""

    title = "obstore, 32 MiB × 4, payload not signed"
    is_unsigned = True


class Boto3(_Blob):
    """boto3's transfer manager with its defaults: 8 MiB, 10 threads."""

    title = "boto3 transfer manager"
    needs = ("boto3",)

    def _client(self) -> Any:
        import boto3

        return boto3.client("s3")

    def upload(self) -> None:
        """See `Client.upload`."""
        self._client().upload_fileobj(io.BytesIO(self.memory), self.bucket, self.key)

    def download(self) -> None:
        """See `Client.download`."""
        target = io.BytesIO()
        self._client().download_fileobj(self.bucket, self.key, target)


class S3Torch(_Blob):
    """s3torchconnector, through the AWS runtime."""

    title = "s3torchconnector"
    needs = ("s3torchconnector",)

    def _client(self) -> Any:
        from s3torchconnector._s3client import S3Client

        return S3Client(os.environ["AWS_REGION"], os.environ.get("AWS_ENDPOINT_URL"))

    def upload(self) -> None:
        """See `Client.upload`."""
        writer = self._client().put_object(self.bucket, self.key)
        for at in range(0, len(self.memory), 8 << 20):
            writer.write(bytes(self.memory[at : at + (8 << 20)]))
        writer.close()

    def download(self) -> None:
        """See `Client.download`."""
        self._client().get_object(self.bucket, self.key).read()


class DcpFsspec(Client):
    """DCP over fsspec, as its documents show it."""

    title = "dcp.save, dcp.load over s3fs"
    needs = ("s3fs",)

    def upload(self) -> None:
        """See `Client.upload`."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(f"{self.url}/dcp")
        dcp.save(self.state.nested(), storage_writer=writer, no_dist=True)

    def download(self) -> None:
        """See `Client.download`."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        reader = FsspecReader(f"{self.url}/dcp")
        dcp.load(self.state.nested(), storage_reader=reader, no_dist=True)


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
_S3_ONLY = {"holdfast-unsigned", "obstore-unsigned", "boto3", "s3torchconnector", "dcp-fsspec"}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="GPT-like state, in 1e9 bytes")
    parser.add_argument(
        "--url", help="a place in a bucket of your own; what is written stays there"
    )
    parser.add_argument("--server", choices=SERVERS, default="localstack", help="without --url")
    parser.add_argument("--only", nargs="+", choices=[*CLIENTS], default=[*CLIENTS])


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    with _place(options, folder) as (url, environment):
        for name in options.only:
            why = _lacks(name, url)
            if why:
                results.notes[f"remote/{name}"] = why
                continue
            progress(f"  remote/{name}")
            prefix = f"{url}/{name}-{os.urandom(4).hex()}"
            outcome = in_child(_measure, name, prefix, options.size_gb, environment)
            results.add(f"remote/{name}", outcome)


@contextmanager
def _place(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """A URL and the environment in which it is found."""
    if options.url:
        yield options.url.rstrip("/"), {}
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # they bring the servers
    from servers.keeper import PROGRAMS

    with PROGRAMS[options.server](Path(tempfile.mkdtemp(dir=folder))) as service:
        yield service.root("bench"), service.environment


def _lacks(name: str, url: str) -> str | None:
    missing = [module for module in CLIENTS[name].needs if importlib.util.find_spec(module) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return "speaks S3 only" if name in _S3_ONLY and not url.startswith("s3:") else None


def _measure(name: str, url: str, size_gb: float, environment: Mapping[str, str]) -> Figures:
    os.environ.update(environment)
    state = build(StateSpec(kind="gpt", gpt_nbytes=round(size_gb * 1e9), num_small=0))
    state.fill(_SEED)
    peak = PeakMemory()  # with what the client keeps for itself, but for a bare one's own bytes
    client = CLIENTS[name](url, state)
    if isinstance(client, _Blob):
        peak = PeakMemory()
    took = {}
    for figure, call in (("upload_s", client.upload), ("download_s", client.download)):
        with peak.watch():
            began = perf_counter()
            call()
            took[figure] = [perf_counter() - began]
    wrong = state.count_wrong(_SEED, negated=True) if name.startswith("holdfast") else 0
    if wrong:
        raise RuntimeError(f"{wrong} tensors are not what was saved")
    nbytes = [float(state.nbytes)]
    return {**took, "nbytes": nbytes, "peak_extra_nbytes": [float(peak.extra_nbytes)]}


def _tables(results: Results) -> list[str]:
    titles = {f"remote/{name}": client.title for name, client in CLIENTS.items()}

    def row(case: str) -> list[str]:
        nbytes = results.median(case, "nbytes") or 0.0
        cells = []
        for figure in ("upload_s", "download_s"):
            took = results.median(case, figure)
            beside = results.ratio((case, figure), ("remote/holdfast", figure))
            cells += [seconds(took), number(nbytes / took / 1e6 if took else None, "{:.0f}")]
            cells.append(times(beside))
        return [*cells, megabytes(results.median(case, "peak_extra_nbytes"))]

    head = ["client", "upload", "MB/s", "ratio", "download", "MB/s", "ratio", "extra memory"]
    return results_table(results, "remote/", head, titles, row)


BENCH = Bench(
    name="remote",
    about="Saves to an object store and loads from it, beside bare clients.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
