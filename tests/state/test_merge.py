"""Stored values into live containers: what stays the same object, and what is said where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import CheckpointManager
from holdfast.errors import FormatError, MismatchError
from holdfast.format.nodes import TensorRef
from holdfast.format.objects import decode_tree, document
from holdfast.format.tensors import TensorSpec
from holdfast.state.apply import prepare
from holdfast.state.capture.capture import capture
from holdfast.state.components import StoredComponent
from holdfast.state.leaves import DTYPE_NAMES
from holdfast.state.planning import merge
from holdfast.state.planning.copying import copy_tensors
from holdfast.state.planning.merge import Claims, Merge, Placement
from holdfast.state.selection import StateLoadOptions
from holdfast.state.trees import decode_skeleton
from holdfast.store.memory import MemoryStore
from state.roundtrip import image, packed


def merged(live: Any, saved: Any, claims: Claims | None = None) -> tuple[str, ...]:
    """Put what was saved into what is live; the notes about it."""
    claims = claims or Claims()
    component = capture({"data": saved}).components["data"]
    specs = {spec.key: spec for spec in component.specs}
    skeleton = decode_skeleton(component.tree, specs, what="the tree")
    tensors = {key: packed(tensor) for key, tensor in component.tensors.items()}
    plan = Merge(tensors, specs, claims, "data")
    plan.refill(live, skeleton.value)
    plan.commit()
    return claims.notes


def loaded(saved: Any) -> Any:
    live: Any = {}
    image({"data": {"x": saved}}).load({"data": live})
    return live["x"]


@pytest.mark.parametrize("odd", ["conjugate", "negative"])
def test_a_view_that_conjugates_or_negates_is_copied_into_like_any_other(odd: str) -> None:
    """Invariant 6: the copy of all leaves does not stop half-way."""
    whole = torch.zeros(3, dtype=torch.complex64)
    view = whole.conj() if odd == "conjugate" else whole.conj().imag
    before, after = torch.zeros(3), torch.zeros(3)
    values = torch.ones(3, dtype=view.dtype) * (1 + 2j if odd == "conjugate" else 2)
    copy_tensors([(before, torch.ones(3)), (view, values), (after, torch.ones(3))])
    assert torch.equal(view, values)
    assert torch.equal(before, torch.ones(3))
    assert torch.equal(after, torch.ones(3))


def test_a_module_with_a_conjugate_buffer_is_loaded() -> None:
    """Invariant 6."""

    class Module(nn.Module):
        def __init__(self, value: complex) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.full((2,), value.real))
            self.register_buffer("odd", torch.full((2,), value).conj())

    live = Module(0j)
    image({"model": Module(1 + 2j)}).load({"model": live})
    assert live.odd.tolist() == [1 - 2j, 1 - 2j]
    assert live.first.tolist() == [1.0, 1.0]


def test_disjoint_views_of_one_buffer_stay_views_of_it() -> None:
    flat = torch.zeros(6)
    live = {"b": flat[4:], "a": flat[:4].view(2, 2), "none": flat[:0]}
    notes = merged(live, {"a": torch.ones(2, 2), "b": torch.full((2,), 2.0), "none": flat[:0]})
    assert flat.tolist() == [1, 1, 1, 1, 2, 2]
    assert notes == ()


def test_slots_of_an_optimizer_that_view_one_buffer_stay_views_of_it() -> None:
    def build(fill: float) -> tuple[Any, Tensor]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        flat = torch.full((6,), fill)
        optimizer.state[model.weight] = {"momentum_buffer": flat[:4].view(2, 2)}
        optimizer.state[model.bias] = {"momentum_buffer": flat[4:]}
        return {"model": model, "optimizer": optimizer}, flat

    live, flat = build(0.0)
    image(build(3.0)[0]).load(live)
    assert flat.tolist() == [3.0] * 6


def columns(whole: Tensor) -> dict[str, Tensor]:
    return {"a": whole[:, 0], "b": whole[:, 1]}


@pytest.mark.parametrize(
    "views",
    [
        lambda whole: {"a": whole, "b": whole[:2]},
        lambda whole: {"a": whole[:2], "b": whole[1:3]},
        lambda whole: {"a": whole[1:2], "b": whole},
        columns,
    ],
)
def test_views_that_may_overlap_are_parted_and_named(
    views: Callable[[Tensor], dict[str, Tensor]],
) -> None:
    live = views(torch.zeros(4, 2))
    saved = views(torch.arange(8.0).view(4, 2))
    notes = merged(live, saved)
    assert torch.equal(live["a"], saved["a"])
    assert torch.equal(live["b"], saved["b"])
    assert len(notes) == 1
    assert notes[0].startswith("data.b: overlapped another live value")
    assert notes[0].endswith("no longer shared with data.a")


def test_a_resume_warns_once_of_views_that_are_parted(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    for _ in range(2):
        whole = torch.arange(6.0)
        state = {"window": {"all": whole, "last": whole[2:], "again": whole}, "data": {}}
        with caplog.at_level("WARNING"), CheckpointManager(store, state) as manager:
            manager.resume()
            manager.save(1)
    (text,) = caplog.messages
    assert "window.last" in text
    assert "window.all" in text


def test_the_memory_of_a_module_is_not_copied_into_and_that_is_said() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    live = dict(model.state_dict())
    saved = {name: torch.ones_like(value) for name, value in live.items()}
    notes = merged(live, saved, Claims(model.parameters()))
    assert torch.equal(model.weight, before)
    assert torch.equal(live["weight"], torch.ones(2, 2))
    assert len(notes) == 1
    assert notes[0].startswith("data.weight, data.bias: is the memory of a module")


def test_many_lost_names_make_one_short_note() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(9)])
    notes = merged({"p": list(model)}, {"p": [torch.ones(1) for _ in range(9)]}, Claims(model))
    assert len(notes) == 1
    assert notes[0].startswith("data.p.0, data.p.1, data.p.2 and 6 more: ")


def test_a_container_shared_by_two_components_is_named_where_it_is_parted() -> None:
    claims, shared = Claims(), [1]
    one, other = {"l": shared}, {"deep": [0, {"l": shared}, (shared,)]}
    assert merged(one, {"l": [2]}, claims) == ()
    notes = merged(other, {"deep": [0, {"l": [3]}, ([4],)]}, claims)
    assert one == {"l": [2]}
    assert other == {"deep": [0, {"l": [3]}, ([4],)]}
    assert one["l"] is shared
    assert len(notes) == 1
    assert notes[0].startswith("data.deep.1.l, data.deep.2.0: shared with another name here")


def test_one_generator_under_two_names_stays_one() -> None:
    generator, saved = torch.Generator(), torch.Generator().manual_seed(5)
    live = {"x": generator, "y": [generator]}
    assert merged(live, {"x": saved, "y": [saved]}) == ()
    assert live["x"] is generator
    assert live["y"][0] is generator
    assert torch.equal(generator.get_state(), saved.get_state())


@pytest.mark.parametrize("kind", [torch.Generator, np.random.default_rng])
def test_one_generator_that_was_two_is_parted_and_named(kind: Callable[[], Any]) -> None:
    generator = kind()
    live = {"x": generator, "y": {"z": generator}}
    saved = {"x": np.random.default_rng(1), "y": {"z": np.random.default_rng(2)}}
    if kind is torch.Generator:
        saved = {
            "x": torch.Generator().manual_seed(1),
            "y": {"z": torch.Generator().manual_seed(2)},
        }
    notes = merged(live, saved)
    assert live["x"] is generator
    assert live["y"]["z"] is not generator
    assert len(notes) == 1
    assert notes[0].startswith("data.y.z: shared with another name here")


def test_one_array_under_two_names_stays_one() -> None:
    array, saved = np.zeros(2), np.ones(2)
    live = {"a": array, "b": array}
    assert merged(live, {"a": saved, "b": saved}) == ()
    assert live["a"] is array
    assert live["b"] is array


def test_arrays_that_share_memory_are_parted_and_named() -> None:
    array = np.zeros(4)
    live = {"a": array, "b": array[:2]}
    notes = merged(live, {"a": np.arange(4.0), "b": np.ones(2)})
    assert live["a"] is array
    assert live["b"].tolist() == [1, 1]
    assert [note.split(":")[0] for note in notes] == ["data.b"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("parameter", [False, True])
def test_a_new_tensor_is_a_parameter_and_requires_grad_as_it_was(
    grad: bool, parameter: bool
) -> None:
    saved = torch.ones(2).requires_grad_(grad)
    saved = nn.Parameter(saved.detach(), requires_grad=grad) if parameter else saved
    found = loaded(saved)
    assert isinstance(found, nn.Parameter) == parameter
    assert found.requires_grad == grad
    assert found.is_leaf
    assert found.tolist() == [1, 1]


def test_a_result_with_a_graph_comes_back_as_values() -> None:
    found = loaded(torch.ones(2, requires_grad=True) * 2)
    assert not found.requires_grad
    assert found.tolist() == [2, 2]


def test_an_object_gets_its_parameters_back_as_parameters() -> None:
    class Holder:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    saved, live = Holder(), Holder()
    weight = nn.Parameter(torch.ones(2))
    saved.state = {"a": weight, "b": weight, "plain": weight.detach()}
    image({"holder": saved}).load({"holder": live})
    assert type(live.state["a"]) is nn.Parameter
    assert live.state["a"] is live.state["b"]
    assert type(live.state["plain"]) is Tensor
    assert live.state["plain"].data_ptr() == live.state["a"].data_ptr()


def test_a_parameter_and_its_detached_view_stay_one_memory() -> None:
    weight = nn.Parameter(torch.ones(2))
    found = loaded([weight, weight.detach(), weight])
    assert found[0] is found[2]
    assert [tensor.requires_grad for tensor in found] == [True, False, True]
    assert found[1].data_ptr() == found[0].data_ptr()
    own = nn.Parameter(torch.zeros(2))
    live = {"x": own, "y": own.detach()}
    view = live["y"]
    merged(live, {"x": weight, "y": weight.detach()})
    assert live["x"] is own
    assert live["y"] is view
    assert view.tolist() == [1, 1]


def test_a_live_tensor_starts_to_require_grad_where_the_stored_one_did() -> None:
    tensor = torch.zeros(2)
    live = {"a": tensor}
    merged(live, {"a": torch.ones(2, requires_grad=True)})
    assert live["a"] is tensor
    assert tensor.requires_grad


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_live_tensor_that_requires_grad_is_never_replaced_by_another_shape(other: Tensor) -> None:
    """An optimizer would go on with the old one. Invariant 6: nothing is changed."""
    first, trained = torch.zeros(1), other.requires_grad_()
    live = {"first": first, "a": trained}
    with pytest.raises(MismatchError, match=r"data\.a: stored F32 \[2\], live .* requires grad"):
        merged(live, {"first": torch.ones(1), "a": torch.ones(2)})
    assert live["a"] is trained
    assert first.tolist() == [0]


@pytest.mark.parametrize(
    "saved",
    [
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(120.0).view(5, 4, 3, 2).permute(3, 1, 0, 2),
        torch.arange(6.0).view(2, 3).t(),
        nn.Parameter(torch.arange(6.0).view(2, 3).t()),
    ],
)
def test_a_new_tensor_lies_in_memory_as_it_did(saved: Tensor) -> None:
    found = loaded(saved)
    assert found.stride() == saved.stride()
    assert torch.equal(found, saved)


@pytest.mark.parametrize("saved", [torch.ones(2).expand(3, 2), torch.ones(4, 4).t()[:2]])
def test_a_tensor_with_gaps_or_repeats_comes_back_row_major(saved: Tensor) -> None:
    found = loaded(saved)
    assert found.is_contiguous()
    assert torch.equal(found, saved)


def test_the_tree_of_a_plain_tensor_has_no_more_than_its_key() -> None:
    tree = capture({"data": {"a": torch.ones(2, 3), "b": torch.ones(1, 2, 1, 1)}})
    assert tree.components["data"].tree == (
        b'{"holdfast":1,"tree":{"a":{"$tensor":"a"},"b":{"$tensor":"b"}}}'
    )


def test_what_the_bytes_do_not_tell_is_in_the_tree() -> None:
    tree = capture({"data": [nn.Parameter(torch.ones(2, 3).t())]}).components["data"].tree
    assert b'{"$tensor":"0","grad":true,"parameter":true,"order":[1,0]}' in tree


@pytest.mark.parametrize(
    ("node", "dtype", "why"),
    [
        (TensorRef("a", grad=True), torch.int64, "cannot require grad"),
        (TensorRef("a", order=(2, 1, 0)), torch.float32, "order of 3 dimensions"),
    ],
)
@pytest.mark.parametrize("has_live", [False, True])
def test_a_node_that_does_not_fit_its_tensor_is_refused(
    node: TensorRef, dtype: torch.dtype, why: str, has_live: bool
) -> None:
    values = torch.ones(2, 2, dtype=dtype)
    stored = StoredComponent(
        name="data",
        kind="tree",
        tree=document({"a": node}).data,
        tensors={"a": TensorSpec("a", DTYPE_NAMES[dtype], (2, 2))},
    )
    tensor = torch.zeros(2, 2, dtype=dtype)
    live = {"data": {"a": tensor} if has_live else {}}
    load = prepare(live, {"data": stored}, where="x", options=StateLoadOptions(components=["data"]))
    with pytest.raises(FormatError, match=why):
        load.apply_values({"data": {"a": values}})
    assert not tensor.any()


def test_a_live_tensor_on_another_device_is_copied_into_and_that_is_said() -> None:
    class Elsewhere(Placement):
        def choose_device(self, ref: TensorRef) -> torch.device:
            return torch.device("meta")

    claims, live = Claims(), torch.zeros(2)
    spec = TensorSpec("a", "F32", (2,))
    merge = Merge({"a": torch.ones(2)}, {"a": spec}, claims, "data")
    assert merge.merge(live, TensorRef("a"), Elsewhere()) is live
    merge.commit()
    assert live.tolist() == [1, 1]
    assert [note.split(":")[0] for note in claims.notes] == ["data.a"]


@pytest.mark.parametrize(
    "members",
    [
        *('"grad": false', '"grad": 1', '"parameter": null', '"order": [0, 1]', '"order": [0, 2]'),
        *('"order": []', '"order": [1, 1]', '"order": [true, 0]', '"order": "10"', '"other": true'),
    ],
)
def test_members_of_a_tensor_node_that_the_format_does_not_have_are_refused(members: str) -> None:
    data = b'{"holdfast": 1, "tree": {"$tensor": "a", %s}}' % members.encode()
    with pytest.raises(FormatError, match="tensor node"):
        decode_tree(data, what="x")


@pytest.mark.parametrize(
    "ref",
    [
        TensorRef("a", "cuda:0", True, True, (1, 0)),
        TensorRef("a", grad=True),
        TensorRef("a", order=(0, 2, 3, 1)),
    ],
)
def test_the_members_of_a_tensor_node_go_round(ref: TensorRef) -> None:
    assert decode_tree(document([ref]).data, what="x") == [ref]


def odd_one(kind: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Twenty live tensors, of which one or two are as `kind` says."""
    live = dict(tensors)
    first, second = list(live)[3:5]
    match kind:
        case "view":
            whole = torch.zeros(8)
            live[first], live[second] = whole[:4], whole[4:]
        case "overlap":
            whole = torch.zeros(6)
            live[first], live[second] = whole[:4], whole[2:]
        case "twice":
            live[second] = live[first]
        case "dtype":
            live[first] = torch.zeros(4, dtype=torch.int64)
        case "shape":
            live[first] = torch.zeros(2, 2)
        case "strided":
            live[first] = torch.zeros(8)[::2]
        case "expanded":
            live[first] = torch.zeros(1).expand(4)
        case "negative":
            live[first] = torch.zeros(4, dtype=torch.complex64).conj().imag
        case "inference":
            with torch.inference_mode():
                live[first] = torch.zeros(4)
        case "meta":
            live[first] = torch.zeros(4, device="meta")
        case "freed":
            live[first].untyped_storage().resize_(0)
        case "zeros":
            live[first] = torch._efficientzerotensor(4)
        case "parameter":
            live[first] = nn.Parameter(torch.zeros(4))
        case "subclass":
            live[first] = torch.zeros(4).as_subclass(type("Odd", (Tensor,), {}))
        case "number":
            live[first] = 7
        case "missing":
            del live[first]
        case "more":
            live["more"] = torch.zeros(4)
        case _:
            assert kind == "plain"
    return live


@pytest.mark.parametrize("container", ["dict", "list"])
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "view",
        "overlap",
        "twice",
        "dtype",
        "shape",
        "strided",
        "expanded",
        "negative",
        "inference",
        "meta",
        "freed",
        "zeros",
        "parameter",
        "subclass",
        "number",
        "missing",
        "more",
    ],
)
def test_many_tensors_are_merged_as_each_alone_is(
    kind: str, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes over many give what a look at each gives: objects, values, memory, notes."""
    saved = {f"t{i}": torch.full((4,), float(i)) for i in range(20)}
    results = []
    for many in (16, 1000):
        monkeypatch.setattr(merge, "_MANY", many)
        live = odd_one(kind, {name: torch.zeros(4) for name in saved})
        before = list(live.values())
        shared: Any = live if container == "dict" else before[:]
        stored: Any = saved if container == "dict" else list(saved.values())
        notes = merged(shared, stored)
        values = shared if container == "dict" else dict(enumerate(shared))
        results.append(
            [
                notes,
                {name: value.tolist() for name, value in values.items()},
                [any(value is b for b in before) for value in values.values()],
                [isinstance(value, nn.Parameter) for value in values.values()],
            ]
        )
    assert results[0] == results[1]
    assert list(results[0][1].values()) == [value.tolist() for value in saved.values()]


def test_many_tensors_of_a_module_keep_its_memory_to_itself() -> None:
    """`best = model.state_dict()` before the first improvement: the model is not overwritten."""
    model = {f"t{i}": torch.zeros(4) for i in range(20)}
    best = dict(model)
    claims = Claims(model.values())
    notes = merged(best, {name: torch.ones(4) for name in best}, claims)
    assert all(not value.any() for value in model.values())
    assert all(value.all() for value in best.values())
    assert "is the memory of a module here" in notes[0]


def test_two_dicts_of_the_same_many_tensors_get_memory_of_their_own() -> None:
    first = {f"t{i}": torch.zeros(4) for i in range(20)}
    live = {"one": first, "two": dict(first)}
    saved = {
        "one": {name: torch.ones(4) for name in first},
        "two": {name: torch.full((4,), 2.0) for name in first},
    }
    merged(live, saved)
    assert all(torch.equal(value, torch.ones(4)) for value in first.values())
    assert live["one"] is first
    assert all(value.tolist() == [2.0] * 4 for value in live["two"].values())
