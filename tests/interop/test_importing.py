"""Imports: any source becomes a checkpoint that loads, resumes and verifies like a save."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.interop.given import GivenSource
from torch import nn
from torch.optim.lr_scheduler import StepLR
from typing_extensions import override

from holdfast import CheckpointManager, load_weights
from holdfast.errors import CorruptData, UnsupportedState, UsageError
from holdfast.interop import import_checkpoint
from holdfast.interop.importing import ImportPlan, commit_import, plan_import
from holdfast.interop.opening import open_source
from holdfast.interop.renaming import RenameRules
from holdfast.interop.source import LeftOut
from holdfast.maintenance.verify import verify_root
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore


class Training:
    """A model with everything that torch's loops save beside it."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = kind(self.model.parameters(), lr=0.1, **options)
        self.scheduler = StepLR(self.optimizer, 2)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            self.model(torch.randn(5, 3)).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def source(self, step: int | None = None) -> GivenSource:
        return GivenSource(
            {
                "model": ("module", self.model.state_dict()),
                "optimizer": ("tree", copy.deepcopy(self.optimizer.state_dict())),
                "scheduler": ("tree", self.scheduler.state_dict()),
            },
            step=step,
        )

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def bits(model: nn.Module) -> list[bytes]:
    return [one.detach().numpy().tobytes() for one in model.state_dict().values()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_manager_goes_on_from_what_torch_saved(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """Invariant 7: the same bits as without the move."""
    whole, begun = Training(kind, **options), Training(kind, **options)
    whole.train(0, 6)
    begun.train(0, 3)
    plan = plan_import(begun.source(step=3))
    assert {name: one.kind for name, one in plan.taken.items()} == {
        "model": "module",
        "optimizer": "optimizer",
        "scheduler": "object",
    }
    commit_import(plan, tmp_path / "run")
    fresh = Training(kind, **options)
    with CheckpointManager(tmp_path / "run", fresh.state) as manager:
        resumed = manager.resume()
        assert resumed is not None
        assert resumed.step == 3
        fresh.train(3, 6)
    assert bits(fresh.model) == bits(whole.model)
    assert verify_root(LocalStore(tmp_path / "run")).ok


def groups_of(model: nn.Module, *, names: bool = False) -> list[dict[str, Any]]:
    """Groups as transformers makes them: weights decay, the rest does not."""
    named = [(name, one) for name, one in model.named_parameters()]
    parts = [
        [(name, one) for name, one in named if (one.ndim > 1) == decays] for decays in (True, False)
    ]
    return [
        {"params": part if names else [one for _, one in part], "weight_decay": decay}
        for part, decay in zip(parts, (0.1, 0.0), strict=True)
    ]


@pytest.mark.parametrize("names", [False, True])
def test_groups_are_told_apart_by_shapes_or_by_recorded_names(names: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(groups_of(model, names=names), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    tree = named_tree(model, optimizer)
    assert tree["groups"] == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias"],
    ]
    state = {name: optimizer.state[one] for name, one in model.named_parameters()}
    assert {name: tuple(tree["shapes"][name]) for name in state} == {
        name: tuple(slots["exp_avg"].shape) for name, slots in state.items()
    }


def named_tree(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    plan = plan_of(model, optimizer, **options)
    assert all("equal shapes" in note for note in plan.notes)
    assert plan.taken["optimizer"].kind == "optimizer"
    return plan.taken["optimizer"].tree


def plan_of(model: nn.Module, given: Any, **options: Any) -> ImportPlan:
    state = given if isinstance(given, dict) else given.state_dict()
    source = GivenSource(
        {"model": ("module", model.state_dict()), "optimizer": ("tree", copy.deepcopy(state))}
    )
    return plan_import(source, **options)


def trained(model: nn.Module, parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_that_cannot_be_named_for_sure_stays_as_it_was_and_a_note_says_why() -> None:
    """Two groups of the same shapes; fewer parameters than the model; shapes in another order."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    alike = [{"params": [*model[1].parameters()]}, {"params": [*model[0].parameters()]}]
    few = [*model[0].parameters()]
    turned = [model[0].bias, model[0].weight, *model[1].parameters()]
    for parameters, why in (
        (alike, "share shapes"),
        (few, "2 parameters and the model 4"),
        (turned, "the shape of its parameter 0 is not that of 0.weight"),
    ):
        plan = plan_of(model, trained(model, parameters))
        assert plan.taken["optimizer"].kind == "tree"
        [note] = plan.notes
        assert note.startswith("optimizer: stored unchanged, so no optimizer can resume")
        assert why in note


def test_parameters_of_equal_shapes_get_moments_in_the_models_order_and_a_note_says_so() -> None:
    """The optimizer has another order; with the names in its order each gets its own moments."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = trained(model, [model[1].weight, model[0].weight])
    [note] = plan_of(model, optimizer).notes
    assert "equal shapes" in note
    assert "--parameters" in note
    plan = plan_of(model, optimizer, parameters=["1.weight", "0.weight"])
    assert plan.notes == []
    assert plan.taken["optimizer"].keys["1.weight.exp_avg"] == "state.0.exp_avg"


def test_parameters_of_unequal_shapes_are_found_by_them_in_any_order() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    plan = plan_of(model, trained(model, [model[1].weight, model[0].weight]))
    assert plan.notes == []
    assert plan.taken["optimizer"].keys["1.weight.exp_avg"] == "state.0.exp_avg"


@pytest.mark.parametrize(
    ("first", "why"), [("bias", "names 'bias', and no slot"), ("weight", "a parameter twice")]
)
def test_recorded_names_that_cannot_be_right_are_not_believed(first: str, why: str) -> None:
    model = nn.Linear(3, 4)
    state = trained(model, model.parameters()).state_dict()
    state["param_groups"][0]["param_names"] = [first, "weight"]
    plan = plan_of(model, state)
    assert plan.taken["optimizer"].kind == "tree"
    assert why in plan.notes[0]


@pytest.mark.parametrize("names", [False, True])
def test_adafactor_is_named_though_its_slots_have_shapes_of_their_own(names: bool) -> None:
    training = Training(torch.optim.Adafactor)
    training.train(0, 2)
    state = training.optimizer.state_dict()
    if names:
        order = [name for name, _ in training.model.named_parameters()]
        state["param_groups"][0]["param_names"] = order
    tree = named_tree(training.model, state)
    assert tree["type"] == "Adafactor"
    assert tree["slots"].keys() == {name for name, _ in training.model.named_parameters()}


class Sorted(GivenSource):
    """A source that has sorted the names of its model, as safetensors does."""

    format = "safetensors"


def test_in_a_file_without_the_models_order_only_shapes_that_occur_once_have_names() -> None:
    """Invariant 7: layers of one shape are not mixed up; with their order given they are named."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = trained(model, model.parameters()).state_dict()
    weights = dict(sorted(model.state_dict().items()))
    source = Sorted({"model": ("module", weights), "optimizer": ("tree", state)})
    plan = plan_import(source)
    assert plan.taken["optimizer"].kind == "tree"
    assert "--parameters FILE" in plan.notes[0]
    order = [name for name, _ in model.named_parameters()]
    tree = plan_import(source, parameters=order).taken["optimizer"].tree
    assert tree["groups"] == [order]
    assert "no 'x'" in plan_import(source, parameters=["x"]).notes[0]
    single = nn.Linear(3, 4)
    state = trained(single, single.parameters()).state_dict()
    weights = dict(sorted(single.state_dict().items()))
    source = Sorted({"model": ("module", weights), "optimizer": ("tree", state)})
    assert plan_import(source).taken["optimizer"].tree["groups"] == [["weight", "bias"]]


def test_adam_of_an_old_torch_is_named_when_the_user_says_which_one() -> None:
    model = nn.Linear(3, 3)
    state = trained(model, model.parameters()).state_dict()
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    assert "say --optimizer" in plan_of(model, state).notes[0]
    tree = plan_of(model, state, optimizer="AdamW").taken["optimizer"].tree
    assert (tree["type"], tree["groups"]) == ("AdamW", [["weight", "bias"]])


def test_names_follow_the_rules_in_the_model_and_in_its_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    plan = plan_of(model, trained(model, model.parameters()), rename=RenameRules([("0", "fc")]))
    assert [*plan.taken["model"].tree] == ["fc.weight", "fc.bias"]
    assert plan.taken["optimizer"].tree["groups"] == [["fc.weight", "fc.bias"]]


def test_an_optimizer_with_names_in_place_of_numbers_keeps_them() -> None:
    """Invariant 7: as Composer and the state dicts of torch.distributed have them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = trained(model, [*model[1].parameters()]).state_dict()
    names = ["1.weight", "1.bias"]
    state["state"] = dict(zip(names, state["state"].values(), strict=True))
    state["param_groups"][0]["params"] = names
    assert plan_of(model, state).taken["optimizer"].tree["groups"] == [names]
    plan = plan_of(model, state, rename=RenameRules([("1", "fc")]))
    assert plan.taken["optimizer"].tree["groups"] == [["fc.weight", "fc.bias"]]
    state["param_groups"][0]["params"] = ["1.weight", "2.bias"]
    state["state"] = {}
    assert "names '2.bias', which the model does not have" in plan_of(model, state).notes[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save_file(
        {
            "module.weight": torch.randn(3, 5),
            "module.half": torch.randn(7).bfloat16(),
            "module.count": torch.tensor(7),
            "module.mask": torch.tensor([True, False]),
            "module.empty": torch.empty(0, 4),
        },
        path,
    )
    return path


def test_every_dtype_and_shape_comes_back(file: Path, tmp_path: Path) -> None:
    made = import_checkpoint(
        file, tmp_path / "run", step=7, label="old", rename={"module.**": "**"}
    )
    assert made.step == 7
    assert made.folder.startswith("old.")
    with open_source(str(file)) as before, open_source(str(tmp_path / "run")) as after:
        old, new = before.get_component("model"), after.get_component("model")
        assert [*new.tree] == [name.removeprefix("module.") for name in old.tree]
        for name, spec in old.specs.items():
            short = name.removeprefix("module.")
            assert (new.specs[short].dtype, new.specs[short].shape) == (spec.dtype, spec.shape)
            data = [bytearray(spec.nbytes) for _ in range(2)]
            before.read_into("model", name, 0, memoryview(data[0]))
            after.read_into("model", short, 0, memoryview(data[1]))
            assert data[0] == data[1]


def test_the_same_source_gives_the_same_files(file: Path, tmp_path: Path) -> None:
    for run in ("a", "b"):
        import_checkpoint(file, tmp_path / run, step=7)
    files = [
        {name: entry.digest for name, entry in found.manifest.files.items()}
        for run in ("a", "b")
        if (found := Catalog(LocalStore(tmp_path / run)).find_checkpoint("latest"))
    ]  # fmt: skip
    assert files[0] == files[1]


def test_a_run_goes_on_behind_an_import(file: Path, tmp_path: Path) -> None:
    first = import_checkpoint(file, tmp_path / "run", step=7)
    second = import_checkpoint(file, tmp_path / "run", step=8)
    entry = Catalog(LocalStore(tmp_path / "run")).find_checkpoint("latest")
    assert entry.folder == second.folder
    assert entry.manifest.parent is not None
    assert entry.manifest.parent.folder == first.folder
    assert entry.manifest.reason == "import"


def test_tied_tensors_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    source = GivenSource({"model": ("module", {"a.weight": weight, "b.weight": weight})}, step=1)
    commit_import(plan_import(source), tmp_path / "run")
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    load_weights(tmp_path / "run", model)
    assert torch.equal(model["a"].weight, weight)
    [component] = (
        Catalog(LocalStore(tmp_path / "run")).find_checkpoint("latest").manifest.components.values()
    )
    assert component.num_tensors == 1


def test_what_is_left_out_is_in_the_notes_and_in_the_manifest(tmp_path: Path) -> None:
    source = GivenSource(
        {"model": ("module", {"w": torch.ones(2)}), "state": ("tree", {"seed": 3})},
        step=1,
        left_out=[LeftOut(path="training_args.bin", why="a pickle of a class")],
    )
    made = commit_import(plan_import(source, components=["model"]), tmp_path / "run")
    lines = ["training_args.bin: a pickle of a class", "state: not among the components asked for"]
    assert [*made.notes] == [f"left out: {line}" for line in lines]
    entry = Catalog(LocalStore(tmp_path / "run")).find_checkpoint("latest")
    assert entry.manifest.environment["imported"] == {
        "from": "given",
        "format": "torch",
        "left_out": lines,
        "notes": [],
    }


def test_wrong_calls_are_refused_and_touch_nothing(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UsageError, match=r"w\.safetensors: has no step"):
        import_checkpoint(file, run)
    with pytest.raises(UsageError, match="no component 'optimizer'; it has 'model'"):
        import_checkpoint(file, run, step=1, components=["optimizer"])
    with pytest.raises(UsageError, match="rules that match no name"):
        import_checkpoint(file, run, step=1, rename={"net.**": "**"})
    with pytest.raises(UsageError, match="no torch optimizer is imported"):
        import_checkpoint(file, run, step=1, optimizer="AdamW")
    with pytest.raises(UsageError, match="must be at least 0"):
        import_checkpoint(file, run, step=-1)
    with pytest.raises(UsageError, match=f"at most {2**63 - 1}"):
        import_checkpoint(file, run, step=2**63)
    with pytest.raises(UnsupportedState, match="thing"):
        commit_import(
            plan_import(GivenSource({"state": ("tree", {"thing": object()})}, step=1)), run
        )
    assert not run.exists()


class Failing(GivenSource):
    """A source whose last tensor is damaged."""

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        if key == "z":
            raise CorruptData("given: z is damaged")
        super().read_into(component, key, start, memory)


def test_a_damaged_source_leaves_no_checkpoint_and_the_root_free(
    file: Path, tmp_path: Path
) -> None:
    """Invariant 2: what failed anywhere never commits."""
    tensors = {"a": torch.zeros(5 << 20), "z": torch.zeros(5 << 20)}
    source = Failing({"model": ("module", tensors)}, step=1)
    with pytest.raises(CorruptData, match="z is damaged"):
        commit_import(plan_import(source), tmp_path / "run")
    assert Catalog(LocalStore(tmp_path / "run")).checkpoints() == ()
    made = import_checkpoint(file, tmp_path / "run", step=2)
    assert made.step == 2


def test_a_checkpoint_of_another_run_is_brought_in_whole(tmp_path: Path) -> None:
    """Invariant 7: with its optimizer, scheduler and generators."""
    whole, begun, fresh = Training(), Training(), Training()
    whole.train(0, 6)
    with CheckpointManager(tmp_path / "old", begun.state) as manager:
        begun.train(0, 3)
        manager.save(3).wait()
    import_checkpoint(tmp_path / "old", tmp_path / "new")
    with CheckpointManager(tmp_path / "new", fresh.state) as manager:
        resumed = manager.resume()
        assert resumed is not None
        assert resumed.step == 3
        fresh.train(3, 6)
    assert bits(fresh.model) == bits(whole.model)
