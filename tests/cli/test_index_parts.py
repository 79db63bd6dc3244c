"""Commands on a checkpoint whose index is in parts, beside the same state in one document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result

from allranks import save_on
from holdfast.format import index_parts
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

Command = Callable[..., Result]


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """The same state of three ranks in one document, and in parts."""
    one, in_parts = tmp_path / "one", tmp_path / "parts"
    save_on(3, one, [1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_parts, "MAX_FILES", 2)
        patch.setattr(index_parts, "PART_WRITERS", 1)
        save_on(3, in_parts, [1, 2])
    return one, in_parts


def files_in(root: Path) -> list[str]:
    newest, *_ = Catalog(LocalStore(root)).checkpoints()
    return sorted(newest.manifest.files)


def test_the_same_tensors_are_shown_at_the_same_places(
    holdfast: Command, roots: tuple[Path, Path]
) -> None:
    found: list[Any] = []
    for root in roots:
        document = holdfast("show", root, "--tensors", "--json").document
        # Both list the boxes of a tensor that is stored whole, or neither does.
        found.append([(one["key"], one["dtype"], one["shape"]) for one in document["tensors"]])
        places = [
            [(s["file"], s["start"], s["nbytes"]) for s in t["shards"]] for t in document["tensors"]
        ]
        found[-1] += places
    assert found[0] == found[1]
    assert "index-0003.json" in files_in(roots[1])
    assert "index-0001.json" not in files_in(roots[0])


def test_a_checkpoint_in_parts_is_verified_compared_copied_exported_and_deleted(
    holdfast: Command, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    one, in_parts = roots
    assert holdfast("verify", in_parts).code == 0
    assert holdfast("diff", one, in_parts, "--ignore", "rng").code == 0
    exported = []
    for root in roots:
        out = tmp_path / f"{root.name}.safetensors"
        assert holdfast("export", root, out, "--to", "safetensors").code == 0
        exported.append(out.read_bytes())
    assert exported[0] == exported[1]
    copied = tmp_path / "copied"
    assert holdfast("cp", in_parts, copied, "--all").code == 0
    assert files_in(copied) == files_in(in_parts)
    assert holdfast("verify", copied).code == 0
    imported = tmp_path / "imported"
    assert holdfast("import", in_parts, imported).code == 0
    assert holdfast("verify", imported).code == 0
    assert holdfast("rm", f"{copied}@step=1", "--yes", "--reason", "a test").code == 0
    assert not [path.name for path in copied.glob("step-00000001.*/index*")]
    assert [*copied.glob("step-00000002.*/index-0001.json")]


def test_damage_in_a_part_is_reported_with_its_name(
    holdfast: Command, roots: tuple[Path, Path]
) -> None:
    """D14."""
    _, root = roots
    (path,) = root.glob("step-00000002.*/index-0002.json")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    result = holdfast("verify", root)
    assert result.code != 0
    assert "index-0002.json" in result.out
    result = holdfast("show", root, "--tensors")
    assert result.code != 0
    assert "index-0002.json" in result.err
