"""Modules: every leaf under its own name, and nothing half-written."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from holdfast.errors import FormatError, MismatchError, UnsupportedState
from holdfast.format.objects import document
from holdfast.state.capture.capture import capture
from holdfast.state.components import StoredComponent
from state.roundtrip import assert_same_tensors, digest, image, small_model


def stored_names(module: nn.Module) -> list[str]:
    return list(capture({"model": module}).components["model"].tensors)


def test_parameters_and_persistent_buffers_are_saved_under_their_names() -> None:
    assert stored_names(small_model()) == list(small_model().state_dict())


def test_a_round_trip_is_exact_to_the_bit() -> None:
    original, resumed = small_model(1), small_model(2)
    original.train()(torch.randn(4, 6))
    original[4].weight.data[0, 0] = float("nan")
    original[4].weight.data[0, 1] = -0.0
    image({"model": original}).load({"model": resumed})
    assert_same_tensors(original.state_dict(), resumed.state_dict())
    assert resumed[1].num_batches_tracked.item() == 1


def test_parameters_keep_their_identity() -> None:
    live = small_model(2)
    before = dict(live.named_parameters())
    addresses = {name: p.data_ptr() for name, p in before.items()}
    image({"model": small_model(1)}).load({"model": live})
    for name, parameter in live.named_parameters():
        assert parameter is before[name]
        assert parameter.data_ptr() == addresses[name]
        assert parameter.requires_grad


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: torch.compile(m, backend="eager"),
        nn.DataParallel,
        lambda m: nn.DataParallel(torch.compile(m, backend="eager")),
        lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
    ],
    ids=["compiled", "parallel", "parallel over compiled", "compiled over parallel"],
)
def test_wrappers_leave_no_trace_in_the_names(wrap: Any) -> None:
    wrapped = wrap(small_model(1))
    assert stored_names(wrapped) == stored_names(small_model())
    plain = small_model(2)
    image({"model": wrapped}).load({"model": plain})
    again = wrap(small_model(3))
    image({"model": plain}).load({"model": again})
    assert digest({"model": again}) == digest({"model": wrapped})


def test_wrappers_inside_a_module_leave_no_trace_either() -> None:
    inner = small_model(1)
    model = nn.ModuleDict({"a": torch.compile(inner, backend="eager"), "b": nn.DataParallel(inner)})
    model["module"] = nn.Linear(2, 2)
    names = list(decoded(model))
    assert "a.0.weight" in names
    assert "b.0.weight" in names
    assert "module.weight" in names
    assert not any("_orig_mod" in name for name in names)


def test_checkpointed_wrappers_leave_no_trace() -> None:
    wrapper = pytest.importorskip(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    ).checkpoint_wrapper
    model = nn.Sequential(wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert stored_names(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    image({"model": model}).load({"model": other})
    image({"model": other}).load({"model": model})
    assert digest({"model": model}) == digest({"model": other})


def decoded(model: nn.Module) -> dict[str, Any]:
    from holdfast.format.objects import decode_tree

    return decode_tree(capture({"model": model}).components["model"].tree, what="test")


class Tied(nn.Module):
    def __init__(self, seed: int = 0, *, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def test_tied_tensors_are_stored_once_and_named_twice() -> None:
    tree = decoded(Tied())
    assert tree["head.weight"] == tree["embed.weight"]
    assert stored_names(Tied()) == ["embed.weight"]


def test_what_was_tied_loads_into_what_is_not() -> None:
    untied = Tied(2, is_tied=False)
    image({"model": Tied(1)}).load({"model": untied})
    assert torch.equal(untied.embed.weight, untied.head.weight)
    assert untied.embed.weight is not untied.head.weight


def test_two_stored_values_are_never_put_into_one_tensor() -> None:
    """The last one would win without a word."""
    state = {"model": Tied(2)}
    saved = image({"model": Tied(1, is_tied=False)})
    before = digest(state)
    with pytest.raises(MismatchError, match="are one tensor here"):
        saved.load(state)
    assert digest(state) == before


def test_two_stored_tensors_with_the_same_bits_load_into_one() -> None:
    """As they come from a format that does not say which tensors are tied."""
    saved, live = Tied(1, is_tied=False), Tied(2)
    saved.head.load_state_dict(saved.embed.state_dict())
    image({"model": saved}).load({"model": live})
    assert torch.equal(live.head.weight, saved.head.weight)
    assert live.head.weight is live.embed.weight


class Overlapping(nn.Module):
    """A buffer that lies over the parameter, or is apart from it."""

    def __init__(self, view: Callable[[Tensor], Tensor], seed: int, *, is_apart: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Parameter(torch.randn(4, 3))
        head = view(self.table.data)
        self.register_buffer("head", head.clone() if is_apart else head)


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight.t(),
        lambda weight: weight[1:3],
        lambda weight: weight.view(torch.int32),
        lambda weight: weight[:, 1],
    ],
    ids=["transposed", "rows", "bits", "column"],
)
def test_live_views_take_stored_values_that_agree_and_no_others(
    view: Callable[[Tensor], Tensor],
) -> None:
    saved, live = Overlapping(view, 1, is_apart=True), Overlapping(view, 2, is_apart=False)
    image({"model": saved}).load({"model": live})
    assert_same_tensors(saved.state_dict(), live.state_dict())
    saved.head.zero_()
    before = digest({"model": live})
    with pytest.raises(MismatchError, match=r"model\.head.*share memory"):
        image({"model": saved}).load({"model": live})
    assert digest({"model": live}) == before


def test_live_views_that_are_interleaved_take_different_values() -> None:
    class Columns(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            both = torch.full((4, 2), value)
            self.one = nn.Parameter(both[:, 0])
            self.register_buffer("other", both[:, 1])

    saved, live = Columns(1.0), Columns(2.0)
    saved.other.fill_(7)
    image({"model": saved}).load({"model": live})
    assert_same_tensors(saved.state_dict(), live.state_dict())


def test_non_persistent_buffers_are_named_as_not_saved() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(2), persistent=False)
            self.register_buffer("absent", None, persistent=False)
            self.register_buffer("scale", torch.ones(2))

    model = nn.Sequential(torch.compile(Attention(), backend="eager"))
    captured = capture({"model": model})
    assert captured.not_saved == ("model.0.mask: non-persistent buffer",)
    assert list(captured.components["model"].tensors) == ["0.scale"]


class Counting(nn.Module):
    """A module with extra state, and a tensor in it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(count)))
        self.count = count
        self.scales: Any = {"amax": torch.full((3,), count), "history": (1, count)}

    def get_extra_state(self) -> Any:
        return {"count": self.count, "scales": self.scales}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.scales = state["count"], state["scales"]


def test_extra_state_comes_back() -> None:
    original, resumed = nn.Sequential(Counting(3)), nn.Sequential(Counting(7))
    saved = image({"model": original})
    assert list(saved.tensors["model"]) == ["0.weight", "0._extra_state.scales.amax"]
    saved.load({"model": resumed})
    assert resumed[0].count == 3
    assert resumed[0].scales["history"] == (1, 3)
    assert digest({"model": original}) == digest({"model": resumed})


def test_extra_state_that_is_a_tensor_comes_back() -> None:
    class Packed(Counting):
        def get_extra_state(self) -> Any:
            return torch.tensor([self.count])

        def set_extra_state(self, state: Any) -> None:
            self.count = int(state[0])

    original, resumed = Packed(3), Packed(7)
    image({"model": original}).load({"model": resumed})
    assert resumed.count == 3


def test_extra_state_that_is_refused_changes_nothing() -> None:
    class Failing(Counting):
        def set_extra_state(self, state: Any) -> None:
            super().set_extra_state(state)
            raise ValueError("no")

    state = {"model": Failing(7)}
    before = digest(state)
    with pytest.raises(MismatchError, match=r"model: .*Failing.* no"):
        image({"model": Counting(3)}).load(state)
    assert digest(state) == before


def test_extra_state_that_is_not_there_yet_is_named() -> None:
    class Calibrated(Counting):
        def get_extra_state(self) -> Any:
            if self.count == 0:
                raise RuntimeError("no batch was seen")
            return super().get_extra_state()

    model = nn.Sequential(nn.Linear(1, 1), Calibrated(0))
    with pytest.raises(UnsupportedState, match="no batch was seen") as caught:
        capture({"model": model})
    assert caught.value.paths == ["model.1._extra_state"]
    with pytest.raises(UnsupportedState, match="forward pass"):
        image({"model": nn.Sequential(nn.Linear(1, 1), Calibrated(1))}).load({"model": model})


class Packed(nn.Module):
    """Format 2 keeps the weight transposed; its hook reads older formats, and no later one."""

    def __init__(self, layout: int, shape: tuple[int, int] = (2, 3)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(*shape))
        self.register_buffer("layout", torch.tensor(layout))
        self.is_loaded = False
        self.seen: list[int] = []
        self.register_load_state_dict_pre_hook(self.convert)

    @staticmethod
    def convert(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.is_loaded = True
        module.seen.append(1)
        found = int(state[prefix + "layout"])
        if found > module.layout:
            module.weight.data = torch.zeros(1)
            raise RuntimeError(f"format {found} is not known")
        if found != module.layout:
            state[prefix + "weight"] = state[prefix + "weight"].t().contiguous()
            state[prefix + "layout"] = module.layout.clone()


def test_hooks_before_a_load_run_as_in_load_state_dict() -> None:
    saved = nn.Sequential(Packed(1, (3, 2)), nn.Linear(2, 2))
    live, plain = (nn.Sequential(Packed(2), nn.Linear(2, 2)) for _ in range(2))
    plain.load_state_dict(saved.state_dict())
    weight = live[0].weight
    image({"model": saved}).load({"model": live})
    assert_same_tensors(plain.state_dict(), live.state_dict())
    assert live[0].weight is weight
    assert live[0].is_loaded
    assert live[0].seen == [1]


def test_a_load_that_a_hook_refuses_changes_nothing() -> None:
    live = nn.Sequential(nn.Linear(2, 2), Packed(2))
    saved, state = nn.Sequential(nn.Linear(2, 2), Packed(3)), {"model": live}
    before, address = digest(state), live[1].weight.data_ptr()
    with pytest.raises(MismatchError, match="format 3"):
        image({"model": saved}).load(state)
    assert digest(state) == before
    assert live[1].weight.data_ptr() == address
    assert not live[1].is_loaded
    assert live[1].seen == []


def test_older_names_are_read_by_the_hooks_that_torch_has_for_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = nn.utils.weight_norm(nn.Linear(2, 2))
    live = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    image({"model": saved}).load({"model": live})
    assert torch.equal(live(torch.ones(2)), saved(torch.ones(2)))


def test_norms_without_a_counter_of_batches_are_read_as_torch_does() -> None:
    saved, live = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    saved.running_mean.fill_(3)
    del saved.num_batches_tracked
    live.num_batches_tracked.fill_(5)
    plain = copy.deepcopy(live)
    older = saved.state_dict()
    older._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    plain.load_state_dict(older)
    image({"model": saved}).load({"model": live})
    assert_same_tensors(plain.state_dict(), live.state_dict())


def test_hooks_hear_of_names_that_only_one_side_has() -> None:
    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if prefix + "kernel" in state:
                state[prefix + "weight"] = state.pop(prefix + "kernel")
            super()._load_from_state_dict(state, prefix, *rest)

    saved = nn.ModuleDict({"fc": nn.Linear(2, 2, bias=False)})
    saved["fc"].kernel = saved["fc"].weight
    del saved["fc"].weight
    live = nn.ModuleDict({"fc": Renamed(2, 2, bias=False)})
    image({"model": saved}).load({"model": live})
    assert torch.equal(live["fc"].weight, saved["fc"].kernel)
    with pytest.raises(MismatchError) as caught:
        image({"model": nn.ModuleDict({"fc": nn.ParameterDict()})}).load({"model": live})
    assert caught.value.missing == ["model.fc.weight"]
    notes = image({"model": nn.ModuleDict()}).load({"model": nn.ModuleDict()}, strict=False).notes
    assert notes == ()


def test_what_the_own_loading_code_refuses_is_refused_when_it_is_saved() -> None:
    class Quantized(nn.Linear):
        """Saves its scale beside the weight, and does not load it."""

        def _save_to_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            super()._save_to_state_dict(state, prefix, *rest)
            state[prefix + "weight.scale"] = torch.ones(1)

    model = nn.Sequential(Quantized(2, 2))
    versions = [parameter._version for parameter in model.parameters()]
    with pytest.raises(UnsupportedState, match=r"model\.0\.weight\.scale: .*load_state_dict"):
        capture({"model": model})
    assert [parameter._version for parameter in model.parameters()] == versions


class Doubled(nn.Module):
    """Saves something that is not its memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3))
        self.plain = torch.randn(2)
        self._register_state_dict_hook(self._on_save)

    @staticmethod
    def _on_save(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        state[prefix + "plain"] = module.plain

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.weight.data.copy_(state[prefix + "weight"] / 2)
        self.plain = state[prefix + "plain"]


def test_a_module_with_its_own_idea_of_saving_loads_itself() -> None:
    original, resumed = nn.Sequential(Doubled(1)), nn.Sequential(Doubled(2))
    image({"model": original}).load({"model": resumed})
    assert torch.equal(original[0].weight, resumed[0].weight)
    assert torch.equal(original[0].plain, resumed[0].plain)


def test_a_module_with_its_own_idea_of_saving_is_checked_first() -> None:
    state = {"model": nn.Sequential(Doubled(2), nn.Linear(3, 4))}
    saved = image({"model": nn.Sequential(Doubled(1), nn.Linear(3, 5))})
    before = digest(state)
    with pytest.raises(MismatchError) as caught:
        saved.prepare(state)
    assert len(caught.value.wrong_shape) == 2
    assert digest(state) == before


def test_a_buffer_that_grows_is_left_to_the_module_that_resizes_it() -> None:
    class Growing(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("bank", torch.arange(float(size)))

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            self.bank = torch.empty_like(state[prefix + "bank"])
            super()._load_from_state_dict(state, prefix, *rest)

    resumed = nn.Sequential(Growing(0))
    image({"model": nn.Sequential(Growing(5))}).load({"model": resumed})
    assert resumed[0].bank.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_code_that_runs_after_a_load_is_run() -> None:
    resumed = small_model(2)
    seen: list[Any] = []
    resumed.register_load_state_dict_post_hook(lambda module, keys: seen.append(module))
    image({"model": small_model(1)}).load({"model": resumed})
    assert {*seen} == {resumed}
    assert_same_tensors(small_model(1).state_dict(), resumed.state_dict())


def test_a_leaf_that_a_hook_renames_is_still_written_directly() -> None:
    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")

    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        model._register_state_dict_hook(renamed)
        models.append(model)
    image({"model": models[0]}).load({"model": models[1]})
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3)),
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(3, 4)),
        lambda: nn.ParameterList([torch.randn(2), torch.randn(())]),
        lambda: torch.jit.script(nn.Linear(3, 4)),
    ],
    ids=[
        "lstm",
        "weight_norm",
        "orthogonal",
        "spectral_norm",
        "attention",
        "transformer",
        "norms",
        "averaged",
        "parameters",
        "script",
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_of_torch_go_round(build: Any) -> None:
    torch.manual_seed(1)
    original = build()
    torch.manual_seed(2)
    resumed = build()
    image({"model": original}).load({"model": resumed})
    assert_same_tensors(original.state_dict(), resumed.state_dict())


def test_bf16_fp8_and_mixed_dtypes_go_round_without_a_cast() -> None:
    def build(value: float) -> nn.Module:
        module = nn.Linear(3, 3).to(torch.bfloat16)
        module.register_buffer("scale", torch.full((2,), value).to(torch.float8_e4m3fn))
        module.register_buffer("wide", torch.full((2,), value, dtype=torch.float64))
        return module

    original, resumed = build(1.5), build(3.0)
    image({"model": original}).load({"model": resumed})
    assert_same_tensors(original.state_dict(), resumed.state_dict())


def test_an_expanded_buffer_gets_memory_of_its_own() -> None:
    def build(value: int) -> nn.Module:
        module = nn.Linear(1, 1)
        module.register_buffer("wide", torch.tensor([value, value + 1]).expand(3, 2))
        return module

    resumed = build(7)
    image({"model": build(1)}).load({"model": resumed})
    assert resumed.wide.tolist() == [[1, 2]] * 3


def test_channels_last_weights_keep_their_strides() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    original, resumed = build(1), build(2)
    image({"model": original}).load({"model": resumed})
    assert torch.equal(original.weight, resumed.weight)
    assert resumed.weight.is_contiguous(memory_format=torch.channels_last)


def test_every_mismatch_is_listed_at_once_and_nothing_is_changed() -> None:
    """D18, D32, invariant 6: torch's own load writes the first layer before it finds the last."""

    class Odd(nn.Module):
        def __init__(self, seed: int, *, is_other: bool = False) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 4 if is_other else 3)
            self.add_module("new" if is_other else "old", nn.Linear(1, 1, bias=False))
            self.last = nn.Linear(2, 2, bias=False)
            if is_other:
                self.last.to(torch.float16)

    state = {"model": Odd(1, is_other=True), "other": Odd(2, is_other=True)}
    saved = image({"model": Odd(3), "other": Odd(4)})
    before = digest(state)
    with pytest.raises(MismatchError) as caught:
        saved.prepare(state)
    assert caught.value.missing == ["model.new.weight", "other.new.weight"]
    assert caught.value.unexpected == ["model.old.weight", "other.old.weight"]
    assert caught.value.wrong_dtype == [
        "model.last.weight: stored F32, live F16",
        "other.last.weight: stored F32, live F16",
    ]
    assert caught.value.wrong_shape[0] == "model.second.weight: stored [3, 2], live [4, 2]"
    assert len(caught.value.wrong_shape) == 4
    with pytest.raises(MismatchError) as caught:
        saved.prepare(state, strict=False)
    assert not caught.value.missing
    assert len(caught.value.wrong_shape) == 4
    assert digest(state) == before


def test_a_load_that_is_not_strict_says_what_it_left_out() -> None:
    resumed = small_model(2)
    resumed.append(nn.Linear(3, 3, bias=False))
    original = small_model(1)
    original.add_module("gone", nn.Linear(1, 1, bias=False))
    kept = resumed[5].weight.clone()
    prepared = image({"model": original}).load({"model": resumed}, strict=False)
    assert prepared.notes == (
        "model.5.weight: not in the checkpoint, unchanged",
        "model.gone.weight: in the checkpoint only, not loaded",
    )
    assert "gone.weight" not in prepared.needed["model"]
    assert torch.equal(resumed[5].weight, kept)
    assert torch.equal(resumed[0].weight, original[0].weight)


def test_a_live_module_without_data_is_refused() -> None:
    saved = image({"model": nn.Linear(2, 2)})
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(UnsupportedState) as caught:
        saved.prepare({"model": empty})
    assert caught.value.paths == ["model.weight", "model.bias"]


def test_lazy_parameters_are_made_by_their_own_hook_or_stay_lazy() -> None:
    saved, live = nn.Linear(3, 2), nn.LazyLinear(2)
    image({"model": saved}).load({"model": live})
    assert_same_tensors(saved.state_dict(), live.state_dict())
    both = nn.Sequential(nn.LazyLinear(2), Packed(2))
    with pytest.raises(MismatchError, match="format 3"):
        image({"model": nn.Sequential(saved, Packed(3))}).load({"model": both})
    assert is_lazy(both[0].weight)
    assert both[0](torch.ones(1, 7)).shape == (1, 2)


def test_two_entries_that_become_one_name_are_refused() -> None:
    model = nn.Module()
    model.add_module("_orig_mod", nn.Linear(2, 2, bias=False))
    model.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedState, match="two entries have this name"):
        capture({"model": model})


def test_a_tree_that_no_module_wrote_is_a_format_error() -> None:
    """Invariant 5."""
    saved = image({"model": nn.Linear(2, 2)})
    for tree in ([1], {1: 2}, None):
        saved.stored["model"] = StoredComponent(
            name="model", kind="module", tree=document(tree).data, tensors={}
        )
        with pytest.raises(FormatError):
            saved.prepare({"model": nn.Linear(2, 2)})


def test_a_value_in_the_place_of_a_tensor_is_refused() -> None:
    saved = image({"model": nn.Linear(2, 2)})
    saved.stored["model"] = StoredComponent(
        name="model", kind="module", tree=document({"weight": 1, "bias": 2}).data, tensors={}
    )
    with pytest.raises(MismatchError, match="live value is a tensor, the stored one is not"):
        saved.prepare({"model": nn.Linear(2, 2)})


def test_a_skipped_layer_is_left_alone() -> None:
    """D58: a prefix ends where a name ends, and brackets or stars mean nothing."""
    resumed = nn.ModuleDict({"w": nn.Linear(2, 2), "w0": nn.Linear(2, 2)})
    original = nn.ModuleDict({"w": nn.Linear(2, 2), "w0": nn.Linear(2, 2)})
    kept = resumed["w"].weight.clone()
    image({"model": original}).load({"model": resumed}, skip=["model.w"])
    assert torch.equal(resumed["w"].weight, kept)
    assert torch.equal(resumed["w0"].weight, original["w0"].weight)


class Swapped(nn.Module):
    """Its two loads of the same data draw from the global generator."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def test_a_parameter_and_a_view_of_it_both_come_back() -> None:
    def build(values: list[float]) -> nn.Module:
        module = Swapped(torch.tensor(values))
        module.register_buffer("head", module.weight.detach()[:2])
        return module

    resumed = build([7.0, 8.0, 9.0])
    image({"model": build([1.0, 2.0, 3.0])}).load({"model": resumed})
    assert resumed.weight.tolist() == [1.0, 2.0, 3.0]
    assert resumed.head.tolist() == [1.0, 2.0]
    assert resumed.head.data_ptr() == resumed.weight.data_ptr()
