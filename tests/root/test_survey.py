"""A survey of a root without folders lists all files together, however many checkpoints it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from holdfast import CheckpointManager, MemoryStore
from holdfast.cli.ls import _read_root_contents
from holdfast.root.catalog import Catalog
from holdfast.store.base import ObjectInfo


class Bucket(MemoryStore):
    """Counts the listings, each of which is a request of an object store."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: Counter[str] = Counter()

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.listed[prefix] += 1
        return super().list(prefix)


def bucket_of(num_saves: int) -> tuple[Bucket, Any]:
    bucket, model = Bucket(), nn.Linear(2, 2)
    manager = CheckpointManager(bucket, {"model": model}, preflight=False, sinks=())
    for step in range(num_saves):
        with torch.no_grad():
            model.weight.fill_(step)
        manager.save(step, wait=True)
    manager.wait()
    return bucket, manager


def listings(num_saves: int) -> tuple[int, int]:
    """Listings of a save with its retention, and of `holdfast ls`."""
    bucket, manager = bucket_of(num_saves)
    before = bucket.listed.total()
    manager.save(num_saves + 1, wait=True)
    manager.wait()
    after = bucket.listed.total()
    _read_root_contents(bucket)
    of_ls = bucket.listed.total() - after
    manager.close()
    return after - before, of_ls


def test_neither_a_save_nor_ls_lists_each_checkpoint() -> None:
    assert listings(12) == listings(3)


@pytest.mark.parametrize("known", [True, False])
def test_a_survey_sees_marks_pins_and_files(known: bool) -> None:
    bucket, manager = bucket_of(3)
    manager.pin(0)
    manager.tag(1, "good")
    manager.close()
    manifests = {one.folder: one.manifest for one in Catalog(bucket).checkpoints()}
    catalog = Catalog(bucket)
    newest, tagged, pinned = catalog.checkpoints(known=manifests if known else None)
    assert (newest.step, tagged.tags, pinned.marks.pinned) == (2, ("good",), True)
    for entry in (newest, tagged, pinned):
        names = {info.key for info in catalog.files[entry.folder]}
        assert names >= {*entry.manifest.files, "manifest.json"}


def test_a_missing_file_and_a_damaged_manifest_are_found() -> None:
    bucket, manager = bucket_of(3)
    newest, middle, _ = manager.list()
    manager.close()
    bucket.delete(f"{newest.folder}/model-00000.safetensors")
    bucket.put(f"{middle.folder}/manifest.json", b"{}")
    found = _read_root_contents(bucket)
    assert found.missing[newest.folder] == ["model-00000.safetensors"]
    assert [folder for folder, _ in found.unread] == [middle.folder]
