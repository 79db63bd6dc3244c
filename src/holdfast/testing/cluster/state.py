"""The state of simulated ranks: what each holds of a model, its optimizer and its generators.

Tensors are names and sizes only. Their bytes follow from the step and the name of the tensor, so
that every file of a checkpoint can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from blake3 import blake3
from typing_extensions import override

from holdfast.errors import UsageError
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.objects import document
from holdfast.format.tensors import TensorFile, TensorSpec, lay_out
from holdfast.saving.shares import OwnShare
from holdfast.staging.interfaces import KnownFile, Staged, StagedContent, StagingTransfer
from holdfast.state.capture.capture import Captured
from holdfast.state.components import CapturedComponent
from holdfast.state.samples import Samples
from holdfast.state.shards import Box, LocalShards
from holdfast.threads.workers import Workers

MODEL, GENERATORS = "model", "rng"
_KINDS = ("weight", "exp_avg", "exp_avg_sq", "step")
"""Tensors of a parameter: three that are sharded, and a number that all ranks hold."""
_RELATIVE_SIZES = (4, 1, 1, 4, 3, 1, 0.004)
"""Sizes of parameters, as in a transformer: matrices, and the scales of a norm."""
_GENERATORS = (
    TensorSpec("python.state", "U32", (625,)),
    TensorSpec("numpy.state.state.key", "U32", (624,)),
    TensorSpec("torch.state", "U8", (5056,)),
)
ContentOf: TypeAlias = "Callable[[str, int], bytes]"
"""Bytes of a tensor in a file, from its name there and its length."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks of a run, and the boxes of its model that each of them holds.

    With one replica it is FSDP: every rank holds another part. With more it is HSDP: groups of
    `num_ranks / num_replicas` ranks hold the whole model each.
    """

    num_ranks: int
    num_boxes: int = 8
    """Boxes of each rank, of which every fourth is a number that all ranks hold. Its random
    generators are three more."""
    num_replicas: int = 1
    ranks_per_host: int = 8
    box_nbytes: int = 16
    """Bytes of a box of average size."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_boxes", "num_replicas", "ranks_per_host", "box_nbytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_ranks % self.num_replicas:
            raise UsageError(
                f"num_ranks={self.num_ranks} must be a multiple of num_replicas={self.num_replicas}"
            )

    @property
    def num_shards(self) -> int:
        """Parts into which each sharded tensor is cut."""
        return self.num_ranks // self.num_replicas

    @property
    def num_distinct(self) -> int:
        """Distinct boxes of all ranks, with those of their generators."""
        num_sharded = sum(1 for spec in self.specs if spec.shape)
        num_whole = len(self.specs) - num_sharded
        return num_sharded * self.num_shards + num_whole + len(_GENERATORS) * self.num_ranks

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Boxes of every rank, with their shapes there."""
        found = []
        scale = self.box_nbytes * len(_RELATIVE_SIZES) / sum(_RELATIVE_SIZES) / 4
        for number in range(self.num_boxes):
            layer, kind = divmod(number, len(_KINDS))
            size = max(int(scale * _RELATIVE_SIZES[layer % len(_RELATIVE_SIZES)]), 1)
            shape = (1, size) if kind < len(_KINDS) - 1 else ()
            found.append(TensorSpec(f"layers.{layer}.{_KINDS[kind]}", "F32", shape))
        return tuple(found)

    @cached_property
    def shared_rows(self) -> dict[int, list[tuple[str, str, int]]]:
        """Component, key and number of each box of a rank, by the number of boxes."""
        return {}

    @cached_property
    def sharded_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each sharded box, by key."""
        return {spec.key: spec.shape for spec in self.specs if spec.shape}

    @cached_property
    def tree(self) -> bytes:
        """Tree of the model, the same on all ranks."""
        nodes = {spec.key: spec.nbytes for spec in self.specs}
        return document(nodes).data

    def list_boxes(
        self, rank: int
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """Yield name and shape of each tensor of a rank, and offsets and sizes of its box."""
        shards = _Shards(self, rank % self.num_shards)
        for spec in self.specs:
            held = shards.get(spec.key)
            if held is None:
                yield spec.key, spec.shape, (0,) * len(spec.shape), spec.shape
            else:
                yield spec.key, held.shape, *held.boxes[0]

    def capture_rank(self, rank: int) -> Captured:
        """Return the state of one rank, as it is captured for a save."""
        shard = rank % self.num_shards
        model = CapturedComponent(
            name=MODEL,
            kind="optimizer",
            tree=self.tree,
            tensors=_Names([spec.key for spec in self.specs]),
            specs=self.specs,
            shards=_Shards(self, shard),
        )
        generators = CapturedComponent(
            name=GENERATORS,
            kind="rng",
            tree=document({"position": rank, "names": [spec.key for spec in _GENERATORS]}).data,
            tensors=_Names([spec.key for spec in _GENERATORS]),
            specs=_GENERATORS,
            by_rank=True,
        )
        return Captured(
            components={MODEL: model, GENERATORS: generators},
            state={MODEL: self, GENERATORS: self},
            find_unsaved_parameters=dict,
        )


class _Names(Mapping[str, Any]):
    """Tensors of a component: each is its name."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    @override
    def __getitem__(self, key: str) -> Any:
        return key

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    @override
    def __len__(self) -> int:
        return len(self._keys)


class _Shards(Mapping[str, LocalShards]):
    """Boxes of one shard of the model, made when they are asked for."""

    def __init__(self, layout: Cluster, shard: int) -> None:
        self._layout = layout
        self._shard = shard
        self._sizes = layout.sharded_shapes

    @override
    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._sizes else default

    @override
    def __getitem__(self, key: str) -> LocalShards:
        rows, columns = self._sizes[key]
        view: Any = key
        return LocalShards(
            shape=(self._layout.num_shards * rows, columns),
            boxes=(Box((self._shard * rows, 0), (rows, columns)),),
            places=(Box((0, 0), (rows, columns)),),
            views=(view,),
            local_shape=(rows, columns),
        )

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    @override
    def __len__(self) -> int:
        return len(self._sizes)


class VirtualShare(OwnShare):
    """The share of a simulated rank: what several ranks hold is equal."""

    def __init__(self, captured: Captured, rank: int, host: str) -> None:
        layout: Cluster = captured.state[MODEL]
        super().__init__(captured, rank, f"{host}-{rank // layout.ranks_per_host}")
        # The same on all ranks: one list saves gigabytes where thousands of shares are kept.
        self._rows = layout.shared_rows.setdefault(len(self._rows), self._rows)

    def drop_part(self) -> None:
        """Free values derived from this rank's part of a plan; computed again if needed."""
        self._part, self._picks = None, {}
        self.num_saves = 0

    @override
    def read_samples(self, captured: Captured, rows: Sequence[int], turn: int) -> Samples:
        return Samples(joined=memoryview(bytes(len(rows))), ends=range(len(rows) + 1))


def bytes_at(step: int) -> ContentOf:
    """Return the bytes that tensors have at a step."""

    def content(name: str, nbytes: int) -> bytes:
        return blake3(f"{step} {name}".encode()).digest(nbytes)

    return content


def stage_part(part: Captured, content_of: ContentOf | None) -> Staged:
    """Lay out the files of a rank; without `content_of` all bytes are zero, and are not hashed."""
    files = {
        name: tuple(
            KnownFile(file)
            for file in lay_out(
                name,
                of_name.specs,
                apart=of_name.apart,
                first_number=(of_name.numbers or range(0)).start,
            )
        )
        for name, of_name in part.components.items()
    }
    return Staged(
        files=files,
        trees={name: of_name.tree for name, of_name in part.components.items()},
        kinds={name: of_name.kind for name, of_name in part.components.items()},
        by_rank=frozenset(n for n, of_name in part.components.items() if of_name.by_rank),
        transfer=_Transfer(content_of),
    )


class _Transfer(StagingTransfer):
    """Copies of tensors: there is nothing to copy."""

    is_early = False
    waited_s = 0.0

    def __init__(self, content_of: ContentOf | None) -> None:
        self._content_of = content_of

    @override
    def run_copies(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        pass

    @override
    def content(self, known: KnownFile) -> StagedContent:
        if self._content_of is None:
            return _ZeroContent(known.file.nbytes)
        return _Content(known.file, self._content_of)

    @override
    def cancel_copying(self, error: BaseException) -> None:
        pass

    @override
    def wait_for_threads(self, timeout_s: float) -> None:
        pass

    @override
    def release_waiters(self) -> None:
        pass


class _Content(StagedContent):
    """Bytes of a small tensor file."""

    def __init__(self, file: TensorFile, content_of: ContentOf) -> None:
        self._data = bytearray(file.nbytes)
        for spec, _, memory in file.fill_block(0, memoryview(self._data)):
            memory[:] = content_of(spec.key, spec.nbytes)

    @property
    @override
    def nbytes(self) -> int:
        return len(self._data)

    @override
    def block(self, number: int, timeout_s: float) -> memoryview:
        return memoryview(self._data)[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    @override
    def digest(self, number: int) -> bytes:
        return blake3(self.block(number, 0.0)).digest()

    @override
    def written(self, number: int) -> None:
        pass

    @override
    def is_unchanged(self, timeout_s: float) -> bool:
        return False


class _ZeroContent(_Content):
    """Bytes of a tensor file of which only the length counts."""

    _ZEROS = memoryview(bytes(BLOCK_NBYTES))
    _DIGEST = bytes(range(32))

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    @override
    def nbytes(self) -> int:
        return self._nbytes

    @override
    def block(self, number: int, timeout_s: float) -> memoryview:
        return self._ZEROS[: min(BLOCK_NBYTES, self._nbytes - number * BLOCK_NBYTES)]

    @override
    def digest(self, number: int) -> bytes:
        return self._DIGEST
