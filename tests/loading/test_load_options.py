"""What part of a checkpoint is read, in which order it is checked, and edits of what is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoints import StateHooks
from holdfast.errors import (
    CorruptData,
    HoldfastError,
    MismatchError,
    NoCheckpoint,
    UnsupportedVersion,
    UsageError,
)
from holdfast.format.blocks import block_digest
from holdfast.loading.search import LoadOptions
from holdfast.maintenance.retention import Deleter
from holdfast.policy.rules import All, Last
from holdfast.state.capture.edits import StateView
from holdfast.store import open_store
from holdfast.weights import load_weights
from runs import Run, new_run


def saved_run(root: Path, steps: int = 2) -> tuple[Run, Path]:
    """A run with checkpoints at steps 1 to `steps`, and the folder of the newest."""
    run = new_run()
    with run.manager(root) as manager:
        for _ in range(steps):
            run.train()
            folder = manager.save(run.counters["step"]).wait().folder
    return run, root / folder


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def set_lr(view: StateView) -> None:
    view["optimizer"]["param_groups.0.lr"] = 0.125


@pytest.mark.parametrize(
    ("options", "is_full", "proves_whole"),
    [
        ({}, True, True),
        ({"edit": set_lr}, True, False),
        ({"verify": False}, True, False),
        ({"include": ("model",)}, False, False),
        ({"skip": ("data",)}, False, False),
        ({"components": ("model",)}, False, False),
        ({"strict": False}, False, False),
        ({"rename": {}}, False, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)
def test_which_loads_make_the_run_stand_there(
    options: dict[str, Any], is_full: bool, proves_whole: bool
) -> None:
    made = LoadOptions(**options)
    assert (made.is_full, made.proves_whole) == (is_full, proves_whole)


@pytest.mark.parametrize(
    "parts",
    [{"components": ["model"]}, {"include": ["model"]}, {"skip": ["optimizer"], "strict": False}],
    ids=str,
)
def test_the_format_version_is_checked_before_anything_is_chosen(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    """D33: a load of parts does not go round the checks of the whole."""
    _, folder = saved_run(tmp_path)
    manifest = folder / "manifest.json"
    sealed = manifest.read_bytes().replace(b'"holdfast": 1', b'"holdfast": 2', 1)
    body = sealed[: sealed.rindex(b'"digest"')]
    manifest.chmod(0o600)
    manifest.write_bytes(body + f'"digest": "blake3:{block_digest(body).hex()}"}}\n'.encode())
    with new_run(1).manager(tmp_path) as manager, pytest.raises(UnsupportedVersion):
        manager.load(folder.name, **parts)
    with new_run(1).manager(tmp_path) as manager, pytest.raises(UnsupportedVersion):
        manager.load("latest", **parts)  # the older one does not quietly take its place


def test_the_index_is_checked_before_anything_is_chosen(tmp_path: Path) -> None:
    """D33."""
    _, folder = saved_run(tmp_path)
    flip(folder / "index.json", 5)
    with new_run(1).manager(tmp_path) as manager, pytest.raises(CorruptData):
        manager.load(include=["counters"])


def test_a_load_of_parts_keeps_the_bookkeeping_and_says_what_it_left(tmp_path: Path) -> None:
    """D33, D32."""
    run, _ = saved_run(tmp_path)
    other = new_run(3)
    with other.manager(tmp_path) as manager:
        loaded = manager.load(include=["model", "counters"], skip=["model.*.bias"])
    assert loaded.step == 2
    assert loaded.notes == (
        "not selected: optimizer, scheduler, rng",
        "model: not selected, unchanged: 0.bias, 1.bias, 4.bias",
    )
    assert torch.equal(other.model[0].weight, run.model[0].weight)
    assert not torch.equal(other.model[0].bias, run.model[0].bias)


def test_what_is_left_out_is_not_read(tmp_path: Path) -> None:
    run, folder = saved_run(tmp_path)
    for path in folder.glob("optimizer-*"):
        path.chmod(0o600)
        flip(path)
    other = new_run(3)
    with other.manager(tmp_path) as manager:
        with pytest.raises(CorruptData):
            manager.load(2)
        manager.load(2, skip=["optimizer"])
        manager.load(2, include=["model.0"])
        with pytest.raises(UsageError, match="skip: nothing is called"):
            manager.load(2, skip=["optimizer", "optimiser"])
    assert torch.equal(other.model[0].weight, run.model[0].weight)


def test_a_bare_text_is_no_collection(tmp_path: Path) -> None:
    saved_run(tmp_path)
    with new_run(3).manager(tmp_path) as manager:
        for argument in ("skip", "include", "components"):
            with pytest.raises(UsageError, match="collection"):
                manager.load(**{argument: "model"})


def test_what_retention_dropped_can_be_left_out_by_a_pattern(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, keep=Last(1) | All().then_drop("optimizer")) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step).wait()
        manager.wait()
        with pytest.raises(NoCheckpoint, match="dropped optimizer"):
            manager.load(1)
        assert manager.load(1, skip=["optimizer.**"]).step == 1
        assert manager.load(1, include=["model.*"]).step == 1


def test_a_resume_with_an_edit_is_a_resume(tmp_path: Path) -> None:
    """D22: the run stands at the checkpoint, and goes on with what the hook changed."""
    run, folder = saved_run(tmp_path)
    other = new_run(3)
    with other.manager(tmp_path, hooks=StateHooks(edit_load=set_lr)) as manager:
        resumed = manager.resume()
        assert resumed is not None
        assert resumed.step == 2
        assert other.optimizer.param_groups[0]["lr"] == 0.125
        assert other.bits()["0.weight"] == run.bits()["0.weight"]
        again = manager.save(2).wait()
        assert again.folder != folder.name, "the state is another one, so it is saved"


def test_an_edited_load_is_no_proof_that_a_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 4: only what was read in full may be relied on by a deletion."""
    saved_run(tmp_path)
    trusted: list[str] = []
    monkeypatch.setattr(Deleter, "trust", lambda self, entry: trusted.append(entry.folder))
    for hooks, count in ((StateHooks(edit_load=set_lr), 0), (StateHooks(), 1)):
        with new_run(3).manager(tmp_path, hooks=hooks) as manager:
            manager.resume()
        assert len(trusted) == count


def test_a_failing_edit_leaves_state_and_run_as_they_were(tmp_path: Path) -> None:
    """D22, invariant 6, invariant 11."""

    def no_shape(view: StateView) -> None:
        view["model"]["0.weight"] = torch.zeros(1)

    def fails(view: StateView) -> None:
        raise ZeroDivisionError("no")

    saved_run(tmp_path)
    other = new_run(3)
    before = other.bits()
    for edit, error in ((no_shape, MismatchError), (fails, ZeroDivisionError)):
        with other.manager(tmp_path, hooks=StateHooks(edit_load=edit)) as manager:
            with pytest.raises(error):
                manager.resume()
            assert not manager.is_owner
    assert other.bits() == before


def test_an_older_checkpoint_is_edited_anew_when_the_newest_is_damaged(tmp_path: Path) -> None:
    _, folder = saved_run(tmp_path)
    path = next(folder.glob("model-*.safetensors"))
    path.chmod(0o600)
    flip(path)
    steps: list[Any] = []

    def edit(view: StateView) -> None:
        steps.append(view["counters"]["step"])
        view["counters"]["step"] += 100

    other = new_run(3)
    with other.manager(tmp_path, hooks=StateHooks(edit_load=edit)) as manager:
        resumed = manager.resume()
    assert resumed is not None
    assert resumed.step == 1
    assert steps[0] == 2
    assert steps[-1] == 1
    assert other.counters["step"] == 101


def test_damage_under_the_eyes_of_a_hook_is_damage(tmp_path: Path) -> None:
    _, folder = saved_run(tmp_path)
    path = next(folder.glob("model-*.safetensors"))
    path.chmod(0o600)
    flip(path)

    def edit(view: StateView) -> None:
        view["model"]["0.weight"] = view["model"]["0.weight"] + 1

    with new_run(3).manager(tmp_path) as manager:
        with pytest.raises(CorruptData, match="model-00000"):
            manager.load(2, edit=edit)
        assert manager.load(1, edit=edit).step == 1


def test_an_edit_of_one_load_stands_in_for_the_hook(tmp_path: Path) -> None:
    run, _ = saved_run(tmp_path)
    other = new_run(3)

    def edit(view: StateView) -> None:
        assert list(view) == ["model"]
        view["model"]["0.bias"] = torch.zeros(16)

    with other.manager(tmp_path, hooks=StateHooks(edit_load=set_lr)) as manager:
        manager.load(include=["model"], edit=edit)
        with pytest.raises(KeyError, match="optimizer"):
            manager.load(include=["model"])
    assert other.model[0].bias.tolist() == [0.0] * 16
    assert torch.equal(other.model[0].weight, run.model[0].weight)


def test_what_a_hook_leaves_out_of_a_save_is_recorded(tmp_path: Path) -> None:
    """D22: a checkpoint says what it does not hold."""

    def edit(view: StateView) -> None:
        del view["optimizer"]

    run = new_run()
    with run.manager(tmp_path, hooks=StateHooks(edit_save=edit)) as manager:
        manager.save(1).wait()
        with pytest.raises(HoldfastError, match="optimizer"):
            manager.load(1)
        assert manager.load(1, skip=["optimizer"]).step == 1


def test_weights_of_another_model_are_renamed_chosen_and_edited(tmp_path: Path) -> None:
    """D22, A26: nothing is guessed; every difference is said by the caller, or told to him."""
    run, _ = saved_run(tmp_path)
    torch.manual_seed(5)
    mine = nn.ModuleDict({"body": nn.Linear(8, 20), "head": nn.Linear(20, 3)})
    head = mine["head"].weight.detach().clone()

    def widen(view: StateView) -> None:
        for name in ("0.weight", "0.bias"):
            old = view["model"][name]
            view["model"][name] = torch.cat([old, torch.zeros(4, *old.shape[1:])])

    rename = {"0.weight": "body.weight", "0.bias": "body.bias"}
    with pytest.raises(MismatchError) as caught:
        load_weights(tmp_path, mine, rename=rename)
    assert caught.value.missing == ["model.head.weight", "model.head.bias"]
    loaded = load_weights(tmp_path, mine, rename=rename, include=["model.body"], edit=widen)
    assert torch.equal(mine["body"].weight[:16], run.model[0].weight)
    assert torch.equal(mine["head"].weight, head)
    assert any("head.weight" in note for note in loaded.notes)


def test_without_strict_the_report_has_everything_and_nothing_is_guessed(tmp_path: Path) -> None:
    """D32, A26: also a name that differs by a prefix alone is another name."""
    saved_run(tmp_path)
    mine = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 16)), "0": nn.Linear(8, 16)})
    before = mine["net"][0].weight.detach().clone()
    loaded = load_weights(tmp_path, mine, strict=False)
    assert torch.equal(mine["net"][0].weight, before)
    assert "model.net.0.weight: not in the checkpoint, unchanged" in loaded.notes
    assert "model.1.bias: in the checkpoint only, not loaded" in loaded.notes


def test_weights_are_those_of_the_checkpoint_that_was_named(tmp_path: Path) -> None:
    """R19: by `which` of a store or in the text of a path, and no other where that is not there."""
    run, _ = saved_run(tmp_path, steps=2)
    store, model = open_store(tmp_path), run.model
    newest = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def is_newest() -> bool:
        return all(torch.equal(newest[name], t) for name, t in model.state_dict().items())

    for load in (
        lambda: load_weights(store, model, which=1),
        lambda: load_weights(store, model, which="step=1"),
        lambda: load_weights(f"{tmp_path}@step=1", model),
    ):
        assert load().step == 1
        assert not is_newest()
        assert load_weights(store, model).step == 2
        assert is_newest()
    with pytest.raises(NoCheckpoint):
        load_weights(store, model, which=3)
    with pytest.raises(UsageError, match="@step=1"):
        load_weights(tmp_path, model, which=1)
