"""What a review of capture and apply found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.state.roundtrip import Image, assert_same_tensors, image
from torch import Tensor, nn, optim
from torch.ao.quantization import FakeQuantize, PerChannelMinMaxObserver

from holdfast.errors import FormatError
from holdfast.format.nodes import GeneratorState
from holdfast.format.objects import document
from holdfast.state import generators
from holdfast.state.capture.capture import capture
from holdfast.state.capture.lacking import describe_parameters
from holdfast.state.collecting import Leaves
from holdfast.state.components import StoredComponent, kind_of
from holdfast.state.leaves import identity


def without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 is: it raises when it is asked which accelerator, and there is none."""

    def raising(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raising)


def test_a_torch_that_raises_without_an_accelerator_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_accelerator(monkeypatch)
    state = {"data": {"t": torch.ones(2)}}
    image(state).load(state)
    assert generators.device_generators(initialise=True) == {}


class WithGenerator(nn.Module):
    """Keeps a generator in its extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def get_extra_state(self) -> Any:
        return {"generator": self.generator}

    def set_extra_state(self, state: Any) -> None:
        self.generator = state["generator"]


def test_a_generator_in_an_extra_state_comes_back() -> None:
    saved, live = WithGenerator(1), WithGenerator(2)
    image({"model": saved}).load({"model": live})
    assert torch.equal(live.generator.get_state(), saved.generator.get_state())


def test_a_generator_among_the_options_of_a_group_comes_back() -> None:
    def made(seed: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        group = {
            "params": list(model.parameters()),
            "generator": torch.Generator().manual_seed(seed),
        }
        return {"model": model, "optimizer": optim.SGD([group], lr=0.1)}

    saved, live = made(1), made(2)
    image(saved).load(live)
    one, other = (s["optimizer"].param_groups[0]["generator"].get_state() for s in (saved, live))
    assert torch.equal(one, other)


class Migrating(nn.Module):
    """Version 2 of a layer, whose weight was transposed in version 1."""

    _version = 2

    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0).view(2, 2) + first)
        self.seen: list[Any] = []

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        self.seen.append(metadata.get("version"))
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Previous(nn.Module):
    """Version 1 of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0).view(2, 2))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, compiled])
def test_a_module_of_the_version_that_was_saved_is_not_migrated(
    wrap: Callable[[nn.Module], Any],
) -> None:
    saved, live = Migrating(), Migrating(5.0)
    image({"model": wrap(saved)}).load({"model": wrap(live)})
    assert_same_tensors(saved.state_dict(), live.state_dict())
    assert live.seen == [2]


def test_a_module_of_an_older_version_is_migrated() -> None:
    saved, live = Previous(), Migrating(5.0)
    image({"model": nn.Sequential(saved)}).load({"model": nn.Sequential(live)})
    assert torch.equal(live.weight, saved.weight.t())
    assert live.seen == [1]


def test_a_version_goes_along_when_leaves_are_renamed() -> None:
    saved = nn.ModuleDict({"old": Migrating()})
    live = nn.ModuleDict({"new": Migrating(5.0), "plain": nn.Identity()})
    image({"model": saved}).load({"model": live}, rename={"old.weight": "new.weight"})
    assert live["new"].seen == [2]
    assert torch.equal(live["new"].weight, saved["old"].weight)


def with_document(saved: Image, document: bytes) -> Image:
    part = saved.stored["model"]
    saved.stored["model"] = StoredComponent(
        name="model", kind=part.kind, tree=document, tensors=part.tensors
    )
    return saved


class SeesVersions(nn.BatchNorm1d):
    """A norm with loading code of its own, and torch's version."""

    seen: Any = None

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_only_versions_that_say_something_are_stored() -> None:
    def tree(*modules: nn.Module) -> bytes:
        return image({"model": nn.Sequential(*modules)}).stored["model"].tree

    assert b"versions" not in tree(nn.BatchNorm1d(2), nn.Linear(2, 2), Previous())
    assert tree(nn.Identity(), Migrating()).endswith(b',"versions":{"1":2}}')
    assert tree(SeesVersions(2), nn.BatchNorm1d(2)).endswith(b',"versions":{"0":2}}')


def test_torchs_own_modules_see_their_own_version_beside_others() -> None:
    saved = nn.Sequential(nn.BatchNorm1d(2), SeesVersions(2))
    live = nn.Sequential(nn.BatchNorm1d(2), SeesVersions(2))
    image({"model": saved}).load({"model": live})
    assert live[1].seen == 2
    assert_same_tensors(saved.state_dict(), live.state_dict())


@pytest.mark.parametrize("versions", [b"[1]", b'{"":"2"}', b'{"":true}', b"7"])
def test_versions_that_are_none_are_a_format_error(versions: bytes) -> None:
    saved = image({"model": Migrating()})
    tree = saved.stored["model"].tree.replace(b'{"":2}}', versions + b"}")
    with pytest.raises(FormatError, match="versions"):
        with_document(saved, tree).prepare({"model": Migrating()})


BITS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
takes_seeds = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 cannot set a seed sequence"
)


@takes_seeds
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("entropy", [7, None, [1, 2, 3], np.arange(3)])
@pytest.mark.parametrize("in_tree", [False, True])
def test_children_of_a_numpy_generator_go_on_where_they_were(
    bits: Any, entropy: Any, in_tree: bool
) -> None:
    saved, live = np.random.Generator(bits(entropy)), np.random.Generator(bits(1))
    saved.spawn(2)
    if in_tree:
        tree: dict[str, Any] = {"made": None}
        image({"data": {"made": saved}}).load({"data": tree})
        live = tree["made"]
    else:
        image({"generator": saved}).load({"generator": live})
    assert live.random() == saved.random()
    assert [g.random() for g in live.spawn(2)] == [g.random() for g in saved.spawn(2)]


@takes_seeds
def test_a_spawned_numpy_generator_keeps_its_place_in_the_family() -> None:
    parent = np.random.default_rng(3)
    child, live = parent.spawn(3)[2], np.random.default_rng(4)
    image({"generator": child}).load({"generator": live})
    assert live.spawn(1)[0].random() == child.spawn(1)[0].random()


def test_a_numpy_that_cannot_take_a_seed_sequence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_TAKES_SEEDS", False)
    saved, live = np.random.default_rng(1), np.random.default_rng(2)
    prepared = image({"generator": saved}).load({"generator": live})
    assert live.random() == saved.random()
    assert len(prepared.notes) == 1
    assert "`spawn` gives other children" in prepared.notes[0]
    assert image({"generator": saved}).prepare({"generator": saved}).notes == ()


@pytest.mark.parametrize(
    "change",
    [
        {"pool_size": 10**9},
        {"pool_size": 4.0},
        {"entropy": -1},
        {"entropy": 2**5000},
        {"entropy": ["1"]},
        {"entropy": [1] * 2000},
        {"entropy": None},
        {"spawn_key": [True]},
        {"spawn_key": 1},
        {"n_children_spawned": -1},
        {"more": 1},
    ],
)
def test_a_seed_sequence_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    live = np.random.default_rng(1)
    kind, members = generators.read_generator_state(live)
    node = GeneratorState(kind, {**members, "seed_seq": {**members["seed_seq"], **change}})
    document(node)
    assert "seed_seq" in str(generators.misfit(live, node, {}))


def test_a_seed_sequence_that_is_too_large_to_mix_at_each_load_is_left_out() -> None:
    large = np.random.default_rng(np.random.SeedSequence(1, pool_size=1000))
    assert generators.read_generator_state(large)[1].keys() == {"state"}


def test_many_views_of_one_storage_cost_one_look_up_each() -> None:
    """Counted, not timed: no tensor is compared with another."""
    flat = torch.zeros(600)
    views = [flat[i : i + 1] for i in range(600)]
    leaves = Leaves(component="data")
    refs = [leaves.add_tensor(view, str(i)) for i, view in enumerate(views)]
    assert [leaves.add_tensor(view, "again") for view in views] == refs
    assert list(leaves._refs) == [identity(view) for view in views]


def test_an_observer_of_torch_loads_by_its_own_code() -> None:
    """Its `min_val` has no shape until it has seen data."""
    saved, live = (nn.Sequential(PerChannelMinMaxObserver()) for _ in range(2))
    saved(torch.randn(3, 4))
    image({"model": saved}).load({"model": live})
    assert_same_tensors(saved.state_dict(), live.state_dict())


def test_a_fake_quantizer_of_torch_loads_by_its_own_code() -> None:
    def made() -> nn.Module:
        return FakeQuantize(
            observer=PerChannelMinMaxObserver,
            quant_min=0,
            quant_max=255,
            dtype=torch.quint8,
            qscheme=torch.per_channel_affine,
        )

    saved, live = made(), made()
    saved(torch.randn(3, 4))
    image({"model": saved}).load({"model": live})
    assert_same_tensors(saved.state_dict(), live.state_dict())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d, nn.SyncBatchNorm])
def test_the_norms_of_torch_are_written_in_place(kind: Any) -> None:
    saved, live = (kind(3, affine=True, track_running_stats=True) for _ in range(2))
    saved.running_mean.fill_(4.0)
    image({"model": saved}).load({"model": live})
    assert_same_tensors(saved.state_dict(), live.state_dict())


class Attributes(nn.Module):
    """Holds what no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.average = torch.zeros(3)
        self.noise = torch.Generator()
        self.rng = np.random.default_rng(1)
        self.computed = self.weight * 2
        self.calls = 7
        self.nothing: Tensor | None = None
        self.everywhere = [random, torch.default_generator]
        self.of_python, self.of_torch = random, torch.default_generator
        hidden: Any = (random.random, np.random.random)
        self.behind_random, self.behind_numpy = (function.__self__ for function in hidden)


def test_tensors_and_generators_that_are_plain_attributes_are_named_as_not_saved() -> None:
    model = nn.Sequential(Attributes())
    lost = capture({"model": model}).not_saved
    assert [line.partition(":")[0] for line in lost] == [
        "model.0.average",
        "model.0.noise",
        "model.0.rng",
    ]
    inner: Any = model[0]
    state = {"model": model, "noise": inner.noise, "rng": inner.rng}
    assert [line.partition(":")[0] for line in capture(state).not_saved] == ["model.0.average"]
    assert capture({"model": WithGenerator(1)}).not_saved == ()


def test_parameters_of_no_component_are_named() -> None:
    model = nn.Linear(2, 2)
    free = [torch.zeros(1, requires_grad=True) for _ in range(11)]
    optimizer = optim.SGD([*model.parameters(), *free], lr=0.1)
    unsaved = capture({"model": model, "optimizer": optimizer}).find_unsaved_parameters()
    assert [*unsaved["optimizer"].values()] == free
    shown = describe_parameters(unsaved)
    assert shown.startswith("optimizer: group0.param2 [1], optimizer: group0.param3 [1], ")
    assert shown.endswith(" and 1 more")
    known = optim.SGD(model.parameters(), lr=0.1)
    assert capture({"model": model, "optimizer": known}).find_unsaved_parameters() == {}


def test_an_optimizer_with_hooks_of_its_state_is_saved_by_its_own_methods() -> None:
    def made(extra: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
        optimizer.extra = extra
        optimizer.register_state_dict_post_hook(lambda o, s: s.__setitem__("extra", o.extra))
        optimizer.register_load_state_dict_pre_hook(lambda o, s: setattr(o, "extra", s["extra"]))
        return {"model": model, "optimizer": optimizer}

    saved, live = made(5), made(0)
    assert kind_of(saved["optimizer"]) == "object"
    image(saved).load(live)
    assert live["optimizer"].extra == 5


@pytest.mark.parametrize(
    "register",
    [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_each_hook_of_a_state_counts(register: str) -> None:
    optimizer = optim.SGD([torch.zeros(1)], lr=0.1)
    handle = getattr(optimizer, register)(lambda *_: None)
    assert kind_of(optimizer) == "object"
    handle.remove()
    assert kind_of(optimizer) == "optimizer"
