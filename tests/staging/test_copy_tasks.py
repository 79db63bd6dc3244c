"""Copies that several threads make: from where, once each, and a block is staged when all are."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import cast

import pytest
import torch

from holdfast.errors import DeadlineExceeded
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.manager import CheckpointManager
from holdfast.staging import in_memory as copying
from holdfast.staging.arena import FileImage
from holdfast.staging.in_memory import Bytes, ImageTransfer, Work, copy_of
from holdfast.staging.interfaces import LARGE_NBYTES, Staged
from holdfast.staging.stage import Stager
from holdfast.state.capture.capture import Capturer, capture
from holdfast.threads.workers import Workers


def image_of(tensors: dict[str, torch.Tensor]) -> FileImage:
    """An empty image for tensors."""
    (file,) = lay_out("part", capture({"part": tensors}).components["part"].specs)
    return FileImage(file)


def sources(image: FileImage, tensors: dict[str, torch.Tensor]) -> list[Work]:
    """All of the large ones."""
    return [copy_of(image, position, tensors[key]) for position, key in image.large_keys]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Two that lie over several blocks, the second one with strides."""
    count = BLOCK_NBYTES * 5 // 8
    return {"a": torch.rand(count), "b": torch.rand(2, count // 2).t()}


def test_each_copy_is_made_once_by_several_threads(tensors: dict[str, torch.Tensor]) -> None:
    image = image_of(tensors)
    copying = ImageTransfer([], sources(image, tensors))
    threads = [threading.Thread(target=copying.run_later) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(len(image.digests)):
        copying.wait_for_block(image, number, timeout_s=1)
    for spec, view in zip(image.file.specs, image.views, strict=True):
        assert torch.equal(view, tensors[spec.key])


def test_a_block_is_not_staged_before_anybody_has_copied(tensors: dict[str, torch.Tensor]) -> None:
    image = image_of(tensors)
    copying = ImageTransfer([], sources(image, tensors))
    with pytest.raises(DeadlineExceeded, match="staging block 0"):
        copying.wait_for_block(image, 0, timeout_s=0.001)


class Held:
    """A copy of one block, made when it is let go."""

    def __init__(self, image: FileImage, number: int) -> None:
        self.image = image
        self.blocks = (number,)
        self.may_go = threading.Event()

    def tasks(self) -> tuple[Held]:
        return (self,)

    def copy(self) -> None:
        assert self.may_go.wait(60)


def memory_held(staged: Staged) -> set[int]:
    """Addresses of the memory that is kept for the copies that training waits for."""
    assert isinstance(staged.transfer, ImageTransfer)
    held = cast("list[torch.UntypedStorage | None]", staged.transfer._held)
    return {storage.data_ptr() for storage in held if storage is not None}


@pytest.mark.parametrize("is_known", [False, True])
def test_memory_that_is_copied_from_by_address_stays_until_nobody_copies_from_it(
    is_known: bool,
) -> None:
    """Also where the copy fails while another thread still makes a part of it."""
    tree = {"a": torch.rand(LARGE_NBYTES)}
    if not is_known:
        tree["b"] = torch.rand(3, LARGE_NBYTES).t()  # which is not copied by address
    capturer, stager, workers = Capturer({"tree": tree}), Stager(), Workers(1, "test")
    capturer.capture()
    captured = capturer.capture()
    assert (captured.components["tree"].addresses is not None) == is_known
    staged = stager.prepare_staging(captured)
    staged.transfer.cancel_copying(MemoryError("test"))
    with pytest.raises(MemoryError):
        staged.transfer.run_copies(workers, 1, timeout_s=60)
    assert memory_held(staged) == {tree["a"].data_ptr()}
    staged = stager.prepare_staging(capturer.capture())
    assert memory_held(staged) == {tree["a"].data_ptr()}
    staged.transfer.run_copies(workers, 1, timeout_s=60)
    assert memory_held(staged) == set()
    workers.close_pool()


def test_who_waits_for_a_block_is_woken_when_that_is_staged(
    tensors: dict[str, torch.Tensor],
) -> None:
    """And not before: it is two copies that fill it."""
    image = image_of(tensors)
    held = [Held(image, number) for number in (1, 0, 1, 2)]
    copying, woken = ImageTransfer([], held), [threading.Event() for _ in range(2)]

    def wait(number: int) -> None:
        copying.wait_for_block(image, number, timeout_s=60)
        woken[number].set()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(2)]
    threads.append(threading.Thread(target=copying.run_later))
    for thread in threads:
        thread.start()
    for one, expected in zip(held, ([False, False], [True, False], [True, True]), strict=False):
        one.may_go.set()
        for number in range(2):
            assert woken[number].wait(30 if expected[number] else 0.05) == expected[number]
    held[3].may_go.set()
    for thread in threads:
        thread.join(60)


def test_a_copy_is_of_the_memory_that_a_tensor_had_when_it_was_planned(
    tensors: dict[str, torch.Tensor],
) -> None:
    image, tensor = image_of(tensors), tensors["a"]
    address = tensor.data_ptr()
    (position,) = (position for position, key in image.large_keys if key == "a")
    planned = copy_of(image, position, tensor)
    before = tensor.data
    tensor.data = torch.zeros_like(before)
    first = next(iter(planned.tasks()))
    assert isinstance(first, Bytes)
    assert first.source == address


@pytest.mark.parametrize(
    "later", [(), ("half", "none", "large"), ("step", "none", "flags", "half")]
)
@pytest.mark.parametrize("at_once", [(0, 9), (1 << 30, 9), (1 << 30, 2)], ids=str)
def test_small_tensors_are_copied_from_their_addresses(
    monkeypatch: pytest.MonkeyPatch, at_once: tuple[int, int], later: tuple[str, ...]
) -> None:
    """Of any types and sizes, also none, next to large ones, and as they are at each staging; some
    of them beside training."""
    monkeypatch.setattr(copying, "AT_ONCE_NBYTES", at_once[0])
    monkeypatch.setattr(copying, "AT_ONCE", at_once[1])
    tree = {
        "step": torch.tensor(3.0),
        "large": torch.rand(LARGE_NBYTES // 4),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.rand(3, 5).bfloat16(),
    }
    capturer, stager, workers = Capturer({"tree": tree}), Stager(), Workers(1, "test")
    for _ in range(3):
        captured = capturer.capture()
        staged = stager.prepare_staging(captured, overlapped={"tree": later})
        assert isinstance(staged.transfer, ImageTransfer)
        staged.transfer.run_copies(workers, 1, timeout_s=60)
        there = {
            spec.key: view
            for known in staged.files["tree"]
            for spec, view in zip(known.file.specs, cast(FileImage, known).views, strict=True)
        }
        if captured.components["tree"].addresses is not None:
            behind = {key for key, view in there.items() if not torch.equal(view, tree[key])}
            assert behind == {*later} - {"none"}
        staged.transfer.run_later()
        for key, view in there.items():
            assert torch.equal(view, tree[key]), key
        for name in ("step", "half", "large"):
            tree[name].add_(1)
        tree["flags"].logical_not_()
    assert captured.components["tree"].addresses is not None
    workers.close_pool()


def test_a_tensor_without_elements_lies_behind_the_last_block(tmp_path: Path) -> None:
    """In a file that is as long as its blocks."""
    length, dtype = BLOCK_NBYTES - 4096, torch.uint8
    (file,) = lay_out("tree", [TensorSpec("a", "U8", (length,)), TensorSpec("none", "U8", (0,))])
    assert file.starts[1] == file.nbytes == BLOCK_NBYTES
    tree = {"a": torch.ones(length, dtype=dtype), "none": torch.zeros(0, dtype=dtype)}
    with CheckpointManager(tmp_path, {"tree": tree}, sinks=()) as manager:
        for step in (1, 2):
            tree["a"].fill_(step)
            manager.save(step).wait()
        tree["a"].zero_()
        manager.load()
    assert tree["a"].eq(2).all()


@pytest.mark.parametrize("budget", [None, 8 << 20])
def test_the_memory_of_a_structure_is_given_back_before_that_of_another_is_taken(
    budget: int | None,
) -> None:
    tree = {"a": torch.rand(LARGE_NBYTES // 4)}
    capturer, stager = Capturer({"tree": tree}), Stager(memory_budget=budget)
    for _ in range(2):
        staged = stager.prepare_staging(capturer.capture())
    images = [weakref.ref(known) for known in staged.files["tree"]]
    del staged
    tree["b"] = torch.rand(4 * LARGE_NBYTES)
    stager.prepare_staging(capturer.capture())
    assert [image() for image in images] == [None]
