"""Support for other libraries' data loaders: known limits of their resume, and skipping of items.

Looks at type names only; imports none of the packages that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from holdfast.errors import UsageError

T = TypeVar("T")

_BUFFERED = (
    "the samples in the buffer of shuffle() are lost at a resume: leave shuffle() out and give "
    "holdfast.data.Stream(shuffle=…) a number"
)


def describe_inexact(loader: object) -> str | None:
    """Describe why a resume with `loader` is known to be inexact; None: no reason is known."""
    name = _type_name(loader)
    if name == "torchdata.StatefulDataLoader":
        return _stateful(loader)
    if name == "torch.DataLoader":
        return "a torch DataLoader has no position: after a resume it starts its epoch again"
    if _is_buffered(loader):
        return f"datasets.IterableDataset: {_BUFFERED}"
    return None


def unrepeatable(source: object) -> str | None:
    """Describe why `source` gives other samples when read again, as unseeded shuffles; or None."""
    for stage in _pipeline(source):
        known = getattr(stage, "kw", {})
        is_shuffle = getattr(getattr(stage, "f", None), "__name__", "") == "_shuffle"
        if is_shuffle and known.get("seed") is None and known.get("rng") is None:
            return (
                "webdataset's shuffle() is seeded by the clock: leave it out and give the Stream "
                "shuffle=…, or give it a seed"
            )
    return None


def set_epoch(source: Any, epoch: int) -> None:
    """Set the number of the epoch that begins on a source, if it has `set_epoch` or such stages."""
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
    for stage in _pipeline(source):
        if type(getattr(stage, "epoch", None)) is int:
            stage.epoch = epoch - 1  # webdataset's stages count up when they begin


def skip(
    iterable: Iterable[T], n: int, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[T]:
    """Iterate over `iterable` after its first `n` items, which are fetched and discarded.

    For data without a position of its own. It costs the time of `n` fetches, and a resume is exact
    where the iterable gives the same items again. `progress(done, n)` is called after each skipped
    item.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise UsageError(f"n={n!r}: must be a whole number, zero or above")
    items, end = iter(iterable), object()
    for done in range(1, n + 1):
        if next(items, end) is end:
            raise UsageError(f"cannot skip {n} items: the iterable ended after {done - 1}")
        if progress is not None:
            progress(done, n)
    return items


def _stateful(loader: object) -> str | None:
    problems = []
    if _type_name(_sampler(loader)) == "torch.RandomSampler":
        problems.append("the stock RandomSampler loses its order in mid-epoch")
    if getattr(loader, "num_workers", 0) > 0:
        problems.append("the workers' random generators are not restored")
    advice = ". holdfast.data.Loader is exact" if problems else ""
    if _is_buffered(getattr(loader, "dataset", None)):
        problems.append(_BUFFERED)
    return f"StatefulDataLoader: {'; '.join(problems)}{advice}" if problems else None


def _is_buffered(source: Any) -> bool:
    """Whether datasets' IterableDataset shuffles in a buffer, which its state does not have."""
    if _type_name(source) != "datasets.IterableDataset":
        return False
    left = [getattr(source, "_ex_iterable", None)]
    while left:
        part = left.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if part is not None:
            left += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False


def _pipeline(source: Any) -> list[Any]:
    """Return the stages of a pipeline of webdataset."""
    bases = [base.__module__.split(".")[0] for base in type(source).__mro__]
    return list(source.pipeline) if "webdataset" in bases else []


def _sampler(loader: object) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "sampler", None)
    return inner if inner is not None else getattr(loader, "sampler", None)


def _type_name(value: object) -> str:
    """Return `<top package>.<class>`, as a subclass may have fixed its base."""
    own = type(value)
    return f"{own.__module__.split('.')[0]}.{own.__qualname__}"
