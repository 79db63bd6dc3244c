"""Copies that several threads make: from where, once each, and a block is staged when all are."""

from __future__ import annotations

import threading

import pytest
import torch

from holdfast.engine.staging.copying import Bytes, Copying, Source
from holdfast.engine.staging.image import Image
from holdfast.errors import DeadlineExceeded
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import lay_out
from holdfast.state.capture import capture


def image_of(tensors: dict[str, torch.Tensor]) -> Image:
    """An empty image for tensors."""
    (file,) = lay_out("part", capture({"part": tensors}).components["part"].specs)
    return Image(file)


def sources(image: Image, tensors: dict[str, torch.Tensor]) -> list[Source]:
    """All of the large ones."""
    return [Source(image, position, tensors[key]) for position, key in image.large_keys]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Two that lie over several blocks, the second one with strides."""
    count = BLOCK_NBYTES * 5 // 8
    return {"a": torch.rand(count), "b": torch.rand(2, count // 2).t()}


def test_each_copy_is_made_once_by_several_threads(tensors: dict[str, torch.Tensor]) -> None:
    image = image_of(tensors)
    copying = Copying([], sources(image, tensors))
    threads = [threading.Thread(target=copying.run_later) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(len(image.digests)):
        copying.wait(image, number, timeout_s=1)
    for spec, view in zip(image.file.specs, image.views, strict=True):
        assert torch.equal(view, tensors[spec.key])


def test_a_block_is_not_staged_before_anybody_has_copied(tensors: dict[str, torch.Tensor]) -> None:
    image = image_of(tensors)
    copying = Copying([], sources(image, tensors))
    with pytest.raises(DeadlineExceeded, match="staging block 0"):
        copying.wait(image, 0, timeout_s=0.001)


def test_a_copy_is_of_the_memory_that_a_tensor_had_when_it_was_planned(
    tensors: dict[str, torch.Tensor],
) -> None:
    image, tensor = image_of(tensors), tensors["a"]
    address = tensor.data_ptr()
    (planned,) = (s for s in sources(image, tensors) if s._tensor is tensor)
    before = tensor.data
    tensor.data = torch.zeros_like(before)
    first = next(iter(planned.pieces()))
    assert isinstance(first, Bytes)
    assert first.source == address
