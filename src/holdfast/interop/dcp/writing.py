"""Writes tensors that are resolved one by one, in waves of a few blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor
from typing_extensions import override

from holdfast.format.layout import number_of_file
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.root.commit import SaveAttempt
from holdfast.saving.participants import SaveParticipant
from holdfast.saving.save import AttemptFiles, Tools
from holdfast.staging.interfaces import KnownFile, Staged
from holdfast.staging.pool import Pool
from holdfast.staging.waves import WaveContent, WaveTransfer

Resolve = Callable[[str, TensorSpec], Tensor]
"""Function that gives the tensor of a component with that spec."""


def write_tensors(
    attempt: SaveAttempt,
    specs: Mapping[str, Sequence[TensorSpec]],
    *,
    first: Mapping[str, int],
    resolve: Resolve,
    tools: Tools,
    pool: Pool,
) -> AttemptFiles:
    """Write tensors by component into files numbered from `first`; wait until all are durable."""
    laid_out = {
        name: tuple(map(KnownFile, lay_out(name, some, first_number=first[name])))
        for name, some in specs.items()
    }
    staged = Staged(
        files=laid_out,
        trees={},
        kinds={},
        transfer=_Resolving(
            {
                known.file.name: _Tensors(known.file.specs, partial(resolve, name))
                for name, of_component in laid_out.items()
                for known in of_component
            },
            pool,
        ),
    )
    files = AttemptFiles(attempt, staged, tools, SaveParticipant())
    files.write_attempt_files(files.iterate_tensor_files())
    return files


def places_of(files: AttemptFiles) -> dict[tuple[str, str], tuple[int, int]]:
    """Return number of the file and first byte of each tensor, by component and key."""
    return {
        (name, spec.key): (number_of_file(known.file.name), start)
        for name, of_component in files.staged.files.items()
        for known in of_component
        for spec, start in zip(known.file.specs, known.file.starts, strict=True)
    }


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a file, of which the last one asked for is kept."""

    def __init__(
        self, specs: Sequence[TensorSpec], resolve: Callable[[TensorSpec], Tensor]
    ) -> None:
        self._specs = {spec.key: spec for spec in specs}
        self._resolve = resolve
        self._last: tuple[str, Tensor] | None = None

    @override
    def __getitem__(self, key: str) -> Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._resolve(self._specs[key]))
        return self._last[1]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    @override
    def __len__(self) -> int:
        return len(self._specs)


class _Resolving(WaveTransfer):
    """Waves over tensors that exist only while their blocks are copied."""

    def __init__(self, tensors: Mapping[str, _Tensors], pool: Pool) -> None:
        super().__init__(tensors, pool)
        self._by_file = tensors

    @override
    def content(self, known: KnownFile) -> WaveContent:
        return WaveContent(known, self._by_file[known.file.name], self)
