"""Loaders of others: what is inexact has a name, and skipping is asked for."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, RandomSampler

from holdfast.data import Loader, describe_inexact, skip
from holdfast.errors import UsageError


class Named:
    """Stands for a class of a package that is not installed here: only its names are read."""

    def __init__(self, name: str, **attributes: object) -> None:
        package, _, own = name.rpartition(".")
        self.__class__ = type(own, (Named,), {"__module__": package, "__qualname__": own})
        self.__dict__.update(attributes)


def stateful(sampler: object, num_workers: int = 0) -> Named:
    batches = Named("torchdata.stateful_dataloader.sampler.BatchSampler", sampler=sampler)
    return Named(
        "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader",
        batch_sampler=batches,
        num_workers=num_workers,
    )


def test_ours_has_nothing_inexact() -> None:
    assert describe_inexact(Loader([1, 2], batch_size=1)) is None


def test_a_plain_dataloader_has_no_position() -> None:
    assert "no position" in (describe_inexact(DataLoader([1, 2])) or "")


def test_a_stateful_dataloader_with_the_stock_sampler_loses_its_order() -> None:
    """PEERS 3.9: measured with torchdata 0.11; its own RandomSampler keeps the order."""
    found = describe_inexact(stateful(RandomSampler([1, 2])))
    assert found is not None
    assert "order" in found
    assert "workers" not in found
    own = Named("torchdata.stateful_dataloader.sampler.RandomSampler")
    assert describe_inexact(stateful(own)) is None


def test_a_stateful_dataloader_with_workers_loses_their_generators() -> None:
    assert "workers" in (describe_inexact(stateful(object(), num_workers=2)) or "")


@pytest.mark.filterwarnings("ignore")
def test_real_stateful_dataloaders_are_recognised() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    stock = module.StatefulDataLoader([1, 2], sampler=RandomSampler([1, 2]))
    own = module.StatefulDataLoader([1, 2], shuffle=True)
    assert "order" in (describe_inexact(stock) or "")
    assert describe_inexact(own) is None


def test_skip_goes_forward_and_reports_each_item() -> None:
    reported: list[tuple[int, int]] = []
    rest = skip(range(5), 3, progress=lambda done, n: reported.append((done, n)))
    assert list(rest) == [3, 4]
    assert reported == [(1, 3), (2, 3), (3, 3)]


def test_skip_of_nothing_fetches_nothing() -> None:
    items = iter([1])
    assert list(skip(items, 0)) == [1]


def test_skip_beyond_the_end_is_an_error() -> None:
    with pytest.raises(UsageError, match="ended after 2"):
        skip([1, 2], 3)


@pytest.mark.parametrize("n", [-1, 1.0, True])
def test_skip_refuses_what_is_no_count(n: int) -> None:
    with pytest.raises(UsageError, match="whole number"):
        skip([1], n)
