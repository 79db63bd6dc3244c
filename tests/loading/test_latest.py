"""What "latest" means where the newest checkpoint cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.cli.target import open_target
from holdfast.data import Loader
from holdfast.errors import CorruptData
from holdfast.ownership.access import reading
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.train import Trainer
from holdfast.train.evaluation.validation import Validation
from holdfast.weights import load_weights
from marks import diagonal
from runs import Run, new_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three steps, each of which was saved."""
    run = new_run()
    with run.manager(tmp_path / "root") as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step, wait=True)
    return tmp_path / "root"


def manifest_of(root: Path) -> Path:
    return root / str(Catalog(LocalStore(root)).attempts()[0]) / "manifest.json"


def cut(root: Path) -> None:
    path = manifest_of(root)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


def lose(root: Path) -> None:
    manifest_of(root).unlink()


def weights(root: Path, run: Run) -> object:
    return load_weights(root, run.model)


def whole(root: Path, run: Run) -> object:
    with run.manager(root) as manager:
        return manager.load()


def validated(root: Path, run: Run) -> object:
    trainer = Trainer(
        model=run.model,
        data=Loader([torch.zeros(8)], batch_size=1),
        optimizer=run.optimizer,
        loss=lambda model, batch: model(batch).mean(),
        checkpoints=root.parent / "other",
        validate=Validation(data=[torch.zeros(1, 8)]),
    )
    return trainer.validate_all(root)


def read(root: Path, run: Run) -> object:
    with reading(root) as found:
        return found


def shown(root: Path, run: Run) -> object:
    return open_target(str(root))


@pytest.mark.parametrize(
    ("call", "damage"), diagonal([weights, whole, validated, read, shown], [cut, lose])
)
def test_a_damaged_manifest_of_the_newest_is_an_error_and_no_older_one(
    root: Path, damage: Callable[[Path], None], call: Callable[[Path, Run], object]
) -> None:
    """The error names the file, and what to name for the one before; nothing was loaded. It is
    another thing with `resume`, which tells what it passes over."""
    damage(root)
    run = new_run(1)
    before = run.bits()
    with pytest.raises(CorruptData) as caught:
        call(root, run)
    assert str(manifest_of(root).parent.name) in str(caught.value)
    assert "manifest.json" in str(caught.value)
    assert "step=2" in str(caught.value)
    assert run.bits() == before
    load_weights(f"{root}@step=2", run.model)
    with new_run(1).manager(root) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        assert [folder for folder, _ in found.rejected] == [manifest_of(root).parent.name]


def test_once_the_run_went_on_from_an_older_one_that_counts(root: Path) -> None:
    """What was passed over and left behind is not the newest of the run any more."""
    cut(root)
    run = new_run()
    with run.manager(root) as manager:
        manager.resume()
        run.train()
        manager.save(4, wait=True)
    assert load_weights(root, new_run(1).model).step == 4


def test_where_the_newest_is_being_deleted_a_damaged_one_is_not_stepped_over(root: Path) -> None:
    """Each time that another one is to be taken, what lies between is looked at."""
    catalog = Catalog(LocalStore(root))
    newest, middle, oldest = catalog.checkpoints()
    found = catalog.newest(but=[newest.folder])
    assert found is not None
    assert found.folder == middle.folder
    damage = Fault(kind="truncate", op="get", key=f"{middle.folder}/manifest.json", times=None)
    catalog = Catalog(FaultyStore(LocalStore(root), [damage]))
    with pytest.raises(CorruptData, match=f"name {oldest.folder} or step=1"):
        catalog.newest(but=[newest.folder])
