"""Values into live tensors: the same bits, whichever way each takes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.state.planning.copying import (
    LARGE_NBYTES,
    PIECE_NBYTES,
    are_plain,
    copy_bytes,
    copy_tensors,
)


@pytest.fixture(autouse=True, params=[1, 3])
def _helpers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and with two threads that help."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_large_tensors_of_every_kind_are_copied_whole(dtype: torch.dtype) -> None:
    """The last piece is an odd one."""
    stored = noise(PIECE_NBYTES // dtype.itemsize * 2 + 13, dtype=dtype)
    live = torch.zeros_like(stored)
    copy_tensors([(live, stored)])
    assert torch.equal(live.view(torch.uint8), stored.view(torch.uint8))


def test_all_ways_in_one_call() -> None:
    """Large, small, empty, strided, transposed; the second of two views of one storage."""
    side = 1200
    whole = torch.zeros(2, LARGE_NBYTES)
    lives = [
        torch.zeros(side, side),
        torch.zeros(3),
        torch.zeros(0),
        torch.zeros(side, side * 2)[:, ::2],
        torch.zeros(side, side).t(),
        whole[1],
        torch.tensor(0.0),
    ]
    pairs = [(live, noise(*live.shape)) for live in lives]
    copy_tensors(pairs)
    for live, stored in pairs:
        assert torch.equal(live, stored)
    assert not whole[0].any()


def test_a_stored_tensor_may_be_strided_too() -> None:
    """An edit of a load may bring any."""
    stored = noise(1200, 2400)[:, ::2]
    live = torch.zeros(1200, 1200)
    copy_tensors([(live, stored)])
    assert torch.equal(live, stored)


@pytest.mark.parametrize("odd", ["conjugate", "negative"])
def test_large_views_that_conjugate_or_negate(odd: str) -> None:
    """Their bytes are not their values."""
    whole = torch.zeros(LARGE_NBYTES, dtype=torch.complex64)
    view = whole.conj() if odd == "conjugate" else whole.conj().imag
    values = torch.full(view.shape, 1 + 2j if odd == "conjugate" else 2.0, dtype=view.dtype)
    copy_tensors([(view, values)])
    assert torch.equal(view, values)


@pytest.mark.parametrize("numel", [3, LARGE_NBYTES])
def test_autograd_is_told_that_a_tensor_changed(numel: int) -> None:
    """A backward through values from before the load is an error, not a wrong gradient."""
    weight = nn.Parameter(torch.ones(numel))
    loss = (weight * weight).sum()
    copy_tensors([(weight, torch.zeros(numel))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_under_inference_mode() -> None:
    """An evaluation may load weights inside of it."""
    weight = nn.Parameter(torch.ones(LARGE_NBYTES))
    with torch.inference_mode():
        copy_tensors([(weight, torch.zeros(LARGE_NBYTES))])
    assert not weight.any()


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_no_more_threads_can_start_all_is_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """Invariant 6: at a limit of processes, or while the interpreter exits."""
    real, begun = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        begun.append(thread.name)
        if len(begun) > allowed:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", start)
    pairs = [(torch.zeros(3, 1 << 20), torch.full((3, 1 << 20), float(n))) for n in range(1, 4)]
    copy_tensors(pairs)
    assert len(begun) == allowed + 1
    assert all(torch.equal(live, stored) for live, stored in pairs)


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(4, dtype=torch.complex64).conj()[:1].imag,
        torch.zeros(4, 4)[:, 1],
        torch.zeros(1).expand(4),
        torch.zeros(4).to_sparse(),
        torch.zeros(4, device="meta"),
        nn.Buffer(torch.zeros(4)).to_mkldnn(),
        torch._efficientzerotensor(4),
    ],
    ids=["conjugate", "negative", "strided", "expanded", "sparse", "meta", "mkldnn", "zeros"],
)
def test_what_is_not_its_bytes_is_not_plain(odd: torch.Tensor) -> None:
    assert are_plain([torch.zeros(4), nn.Parameter(torch.zeros(2, 2)), torch.zeros(0)])
    assert not are_plain([torch.zeros(4), odd])


def test_a_tensor_of_inference_is_not_plain() -> None:
    with torch.inference_mode():
        odd = torch.zeros(4)
    assert not are_plain([odd])


def test_bytes_are_copied_from_their_addresses() -> None:
    """Also under inference mode; autograd is told."""
    stored = [noise(number + 1) for number in range(2000)]
    live = [torch.zeros_like(tensor) for tensor in stored]
    versions = [tensor._version for tensor in live]
    addresses = [tensor.data_ptr() for tensor in stored]
    with torch.inference_mode():
        copy_bytes(live, addresses, [tensor.nbytes for tensor in stored])
    assert all(map(torch.equal, live, stored))
    assert all(tensor._version > old for tensor, old in zip(live, versions, strict=True))


def test_bytes_that_are_not_those_of_the_tensor_are_not_copied() -> None:
    """Also under `python -O`."""
    live, stored = torch.zeros(4), torch.ones(8)
    with pytest.raises(UsageError, match="another size"):
        copy_bytes([live], [stored.data_ptr()], [stored.nbytes])
    assert not live.any()
