"""Plain trees and foreign objects: what goes in comes out, in place where it can."""

from __future__ import annotations

import datetime
import enum
import pathlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from holdfast.errors import FormatError, MismatchError, UnsupportedState
from holdfast.format.nodes import ArrayRef, DeviceName, DtypeName, EnumValue, TensorRef
from holdfast.format.objects import document
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.state.capture.capture import capture
from holdfast.state.components import StoredComponent
from state.roundtrip import Image, digest, image, raw_bytes


def loaded(tree: Any, live: Any = None) -> Any:
    live = type(tree)() if live is None else live
    image({"data": tree}).load({"data": live})
    return live


def test_torch_values_come_back_as_they_were() -> None:
    tree = {
        "dtype": [torch.bfloat16, torch.float8_e5m2, torch.bool, torch.int4],
        "device": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
        "size": torch.Size([2, 0, 3]),
        "plain": (1, None, "x", b"y", 1.5, float("inf"), {1, 2}, pathlib.Path("a/b")),
        "time": datetime.timedelta(days=1),
        "counter": Counter({5: 2, 7: 1}),
        "ordered": OrderedDict(b=1, a=2),
    }
    found = loaded(tree)
    assert found == tree
    assert type(found["size"]) is torch.Size
    assert type(found["counter"]) is Counter
    assert list(found["ordered"]) == ["b", "a"]


ARRAYS = {
    "bool": np.array([True, False]),
    "int8": np.arange(4, dtype=np.int8),
    "uint16": np.arange(4, dtype=np.uint16),
    "uint32": np.array([2**32 - 1], dtype=np.uint32),
    "uint64": np.array([2**64 - 1], dtype=np.uint64),
    "float16": np.array([1.5, np.nan], dtype=np.float16),
    "complex64": np.array([1 + 2j], dtype=np.complex64),
    "complex128": np.array([[1 + 2j]]),
    "scalar shape": np.array(3.5),
    "empty": np.zeros((0, 3)),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": np.arange(6)[::-1],
    "strided": np.arange(10)[::3],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "big-endian": np.arange(4, dtype=">f4"),
    "unaligned": np.frombuffer(b"x" + np.arange(3.0).tobytes(), dtype="u1")[1:].view("f8"),
    "field": np.array([(1, 2.0)], dtype=[("a", "i1"), ("b", "f8")])["b"],
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_kind_come_back(name: str) -> None:
    array = ARRAYS[name]
    found = loaded({"x": array})["x"]
    assert type(found) is np.ndarray
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.shape == array.shape
    assert found.tobytes() == array.astype(found.dtype).tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
        np.array([1], dtype="datetime64[s]"),
        np.array([1.0], dtype=np.longdouble),
        np.ma.masked_array([1, 2], mask=[0, 1]),
        np.array([1, 2]).view(np.recarray),
    ],
    ids=["object", "str", "bytes", "struct", "time", "longdouble", "masked", "record"],
)
def test_arrays_that_have_no_name_are_refused(array: Any) -> None:
    with pytest.raises(UnsupportedState) as caught:
        capture({"data": {"x": [array]}})
    assert caught.value.paths == ["data.x.0"]


def test_an_array_that_stands_in_two_places_is_stored_once() -> None:
    array = np.arange(3.0)
    tree = {"a": array, "b": array, "t": torch.from_numpy(array)}
    saved = image({"data": tree})
    assert list(saved.tensors["data"]) == ["a", "t"]
    live: dict[str, Any] = {}
    saved.load({"data": live})
    assert live["a"] is live["b"]
    assert torch.equal(live["t"], tree["t"])


def test_a_plain_component_becomes_what_was_stored_in_place() -> None:
    live_list, live_dict = [1, 2, 3], {"old": 1}
    live = {"gone": 1, "list": live_list, "dict": live_dict, "scalar": 0}
    found = loaded({"scalar": 5, "list": [9], "dict": {"new": (1,)}, "more": None}, live)
    assert found is live
    assert live == {"scalar": 5, "list": [9], "dict": {"new": (1,)}, "more": None}
    assert list(live) == ["scalar", "list", "dict", "more"]
    assert live["list"] is live_list
    assert live["dict"] is live_dict


def test_a_list_component_is_refilled_in_place() -> None:
    live = [1, {"a": torch.zeros(2)}, 3, 4]
    inner, tensor = live[1], live[1]["a"]
    loaded([7, {"a": torch.ones(2)}], live)
    assert live == [7, inner]
    assert inner["a"] is tensor
    assert tensor.tolist() == [1.0, 1.0]


def test_tensors_that_fit_are_copied_into_and_others_are_replaced() -> None:
    live = {name: torch.zeros(2) for name in ("same", "shape", "dtype", "frozen", "kind")}
    live["frozen"] = torch.zeros(()).expand(2)
    live["kind"] = 3
    before = dict(live)
    wide = torch.ones(2, dtype=torch.float64)
    loaded(
        {
            "same": torch.ones(2),
            "shape": torch.ones(3),
            "dtype": wide,
            "frozen": torch.ones(2),
            "kind": torch.ones(2),
        },
        live,
    )
    assert live["same"] is before["same"]
    assert live["shape"].shape == (3,)
    assert live["dtype"].dtype == torch.float64
    assert live["frozen"].tolist() == [1.0, 1.0]
    assert before["shape"].tolist() == [0.0, 0.0]
    assert isinstance(live["kind"], Tensor)


def test_a_tensor_that_needs_a_gradient_takes_its_values() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    live = {"x": leaf}
    loaded({"x": torch.ones(2)}, live)
    assert live["x"] is leaf
    assert leaf.tolist() == [1.0, 1.0]
    assert leaf.requires_grad


def test_two_stored_values_never_end_in_one_live_object() -> None:
    """Copying both into one memory would leave the last one in both places."""
    shared, base = {"n": 0}, torch.zeros(4)
    array = np.zeros(4)
    live = {
        "a": shared, "b": shared, "x": base, "y": base, "v": base[:2],
        "m": array, "n": array[:2], "g": torch.Generator(),
    }  # fmt: skip
    stored = {
        "a": {"n": 1}, "b": {"n": 2}, "x": torch.ones(4), "y": torch.full((4,), 2.0),
        "v": torch.full((2,), 3.0), "m": np.ones(4), "n": np.full(2, 2.0), "g": torch.Generator(),
    }  # fmt: skip
    loaded(stored, live)
    assert live["a"] == {"n": 1}
    assert live["b"] == {"n": 2}
    assert live["x"].tolist() == [1.0] * 4
    assert live["y"].tolist() == [2.0] * 4
    assert live["v"].tolist() == [3.0] * 2
    assert live["m"].tolist() == [1.0] * 4
    assert live["n"].tolist() == [2.0] * 2
    assert live["a"] is shared
    assert live["x"] is base


def test_what_was_shared_is_shared_again() -> None:
    part = [1, torch.ones(2)]
    found = loaded({"a": part, "b": [part], "c": (part, part)})
    assert found["b"][0] is found["a"]
    assert found["c"][0] is found["a"]
    live = {"a": [1, torch.zeros(2)], "b": [[5]]}
    first = live["a"]
    loaded({"a": part, "b": [part]}, live)
    assert live["b"][0] is first
    assert live["a"] is first


def test_arrays_that_fit_are_copied_into() -> None:
    live = {"same": np.zeros(2), "locked": np.zeros(2), "other": np.zeros(3)}
    live["locked"].flags.writeable = False
    before = dict(live)
    loaded({name: np.ones(2) for name in live}, live)
    assert live["same"] is before["same"]
    assert live["locked"] is not before["locked"]
    assert all(value.tolist() == [1.0, 1.0] for value in live.values())


def test_the_kind_of_the_whole_must_fit() -> None:
    live: list[int] = [1]
    saved = image({"data": {"a": 1}})
    with pytest.raises(MismatchError, match="stored a dict, live a list"):
        saved.prepare({"data": live})
    assert live == [1]


def test_skipped_paths_of_a_tree_keep_their_live_values() -> None:
    """D58: exact paths; brackets, question marks and slashes in keys mean nothing."""
    live = {"a": {"b": 1, "b.c": 2}, "w": [1, 2, 3], "w[0]": 4, "w?": 5, "x/y": 6, "mine": 7}
    stored = {"a": {"b": -1, "b.c": -2}, "w": [-1, -2], "w[0]": -4, "w?": -5, "x/y": -6, "its": 8}
    image({"data": stored}).load(
        {"data": live}, skip=["data.a.b", "data.w.1", "data.w?", "data.mine", "data.its"]
    )
    assert live == {
        "a": {"b": 1, "b.c": 2}, "w": [-1, 2], "w[0]": -4, "w?": 5, "x/y": -6, "mine": 7,
    }  # fmt: skip


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Holder:
    """An object with a state_dict, as schedulers and samplers are."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_an_enumeration_comes_back_through_the_live_one() -> None:
    """Invariant 5: nothing is imported by a name in the file."""
    live: dict[str, Any] = {"c": Color.RED, "list": [Color.RED]}
    loaded({"c": Color.BLUE, "list": [Color.BLUE], "new": Color.RED}, live)
    assert live["c"] is Color.BLUE
    assert live["list"] == [Color.BLUE]
    assert live["new"] is Color.RED
    holder = Holder(c=Color.RED, list=[Color.RED])
    prepared = image({"h": Holder(c=Color.BLUE, list=[Color.BLUE])}).load({"h": holder})
    assert holder.values == {"c": Color.BLUE, "list": [Color.BLUE]}
    assert prepared.notes == ()


def test_an_enumeration_without_a_live_one_is_noted() -> None:
    prepared = image({"h": Holder(c=Color.BLUE)}).prepare({"h": Holder()})
    shown = f"h.c: an enumeration ({__name__}:Color) comes back as EnumValue"
    assert prepared.notes == (shown,)


def test_a_member_that_is_gone_stays_as_it_was_stored() -> None:
    gone = EnumValue(f"{__name__}:Color", "GREEN", 1)
    live: dict[str, Any] = {"c": Color.RED}
    prepared = with_tree(image({"data": {}}), {"c": gone}).load({"data": live})
    assert live == {"c": gone}
    assert len(prepared.notes) == 1
    assert prepared.notes[0].startswith("data.c: an enumeration")


def test_a_member_that_was_renamed_is_found_by_its_value() -> None:
    renamed = EnumValue(f"{__name__}:Color", "AZURE", "blue")
    live: dict[str, Any] = {"c": Color.RED}
    with_tree(image({"data": {}}), {"c": renamed}).load({"data": live})
    assert live == {"c": Color.BLUE}


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@pytest.mark.parametrize("value", [Access.READ | Access.WRITE, Access(0), Access.WRITE])
@pytest.mark.parametrize("is_nameless", [True, False])
def test_combined_flags_come_back(value: Access, is_nameless: bool) -> None:
    """Python 3.10 has no names for combinations, later ones have."""
    state = {"f": value}
    saved = image({"data": state})
    if is_nameless and value is not Access.WRITE:
        saved = with_tree(saved, {"f": EnumValue(f"{__name__}:Access", None, value.value)})
    live: dict[str, Any] = {"f": Access.READ}
    assert saved.load({"data": live}).notes == ()
    assert live == state


@pytest.mark.parametrize("bits", [4, -1, 2**70, "1", 1.0])
def test_flags_that_the_class_does_not_have_stay_as_they_were_stored(bits: Any) -> None:
    stored = EnumValue(f"{__name__}:Access", None, bits)
    live: dict[str, Any] = {"f": Access.READ}
    prepared = with_tree(image({"data": {}}), {"f": stored}).load({"data": live})
    assert live == {"f": stored}
    assert len(prepared.notes) == 1


def test_enumerations_come_back_as_keys_in_sets_and_where_live_there_is_none() -> None:
    def mixed(color: Color) -> dict[str, Any]:
        return {
            "keys": {color: 1, (color, 2): 2, frozenset({color}): 3},
            "set": {color, "x"},
            "tuple": (color, [color]),
            "list": [color],
        }

    live: dict[str, Any] = {"keys": {Color.RED: 0}, "list": None}
    assert loaded(mixed(Color.BLUE), live) == mixed(Color.BLUE)
    holder = Holder(keys={Color.RED: 0}, set=None)
    prepared = image({"h": Holder(**mixed(Color.BLUE))}).load({"h": holder})
    assert holder.values == mixed(Color.BLUE)
    assert prepared.notes == ()


def test_enumerations_without_a_live_class_are_noted_with_their_paths() -> None:
    state = {"keys": {Color.RED: 1}, "set": {Color.RED}, "here": [0, Color.RED]}
    live: dict[str, Any] = {}
    notes = image({"data": state}).load({"data": live}).notes
    paths = [note.partition(":")[0] for note in notes]
    assert paths == ["data.keys", "data.set", "data.here.1"]
    assert list(live["keys"]) == [EnumValue(f"{__name__}:Color", "RED", "red")]


def test_what_is_shared_stays_shared_when_enumerations_are_made() -> None:
    pair, inner = (Color.RED, 1), [Color.RED]
    live: dict[str, Any] = {"c": Color.BLUE}
    loaded({"c": Color.RED, "one": inner, "two": inner, "p": [pair], "q": [pair]}, live)
    assert live["one"] is live["two"]
    assert live["p"] == [(Color.RED, 1)] == live["q"]


def test_two_live_classes_of_one_name_make_no_member() -> None:
    def made() -> type[enum.Enum]:
        return enum.Enum("Twin", {"A": 1}, module=__name__)

    first, second = made(), made()
    live: dict[str, Any] = {"a": first["A"], "b": second["A"], "c": None}
    loaded({"a": first["A"], "b": None, "c": first["A"]}, live)
    assert type(live["c"]) is EnumValue


def test_an_object_gets_exactly_what_it_gave() -> None:
    state = {"a": [1, (2, {"t": torch.ones(2)})], "n": np.arange(3), "g": torch.Generator()}
    holder = Holder()
    image({"h": Holder(**state)}).load({"h": holder})
    assert digest({"h": holder}) == digest({"h": Holder(**state)})
    assert holder.values["a"][1][1]["t"] is not state["a"][1][1]["t"]


def test_an_object_does_not_get_views_into_the_read_buffer() -> None:
    holder = Holder()
    image({"h": Holder(t=torch.arange(5))}).load({"h": holder})
    tensor = holder.values["t"]
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_skipped_paths_of_an_object_keep_their_live_values() -> None:
    holder = Holder(a={"x": 1, "y": 2}, b=3)
    image({"h": Holder(a={"x": 7, "y": 8}, b=9)}).load({"h": holder}, skip=["h.a.x"])
    assert holder.values == {"a": {"x": 1, "y": 8}, "b": 9}


def test_an_object_whose_state_is_no_dict_comes_back() -> None:
    class Odd(Holder):
        def state_dict(self) -> Any:
            return self.values.get("t")

    odd = Odd()
    saved = image({"h": Odd(t=torch.ones(3))})
    assert list(saved.tensors["h"]) == ["value"]
    saved.load({"h": odd})
    assert torch.equal(odd.values, torch.ones(3))
    image({"h": Odd(t=5)}).load({"h": odd})
    assert odd.values == 5


def test_an_object_that_fails_names_its_component_and_the_rest_is_loaded() -> None:
    """Invariant 6: the order is leaves, objects, generators."""

    class Failing(Holder):
        def check_state_dict(self, state: dict[str, Any]) -> None:
            pass

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("gone")

    tree = {"x": torch.zeros(2)}
    state = {"first": Failing(), "tree": tree}
    saved = image({"first": Holder(a=1), "tree": {"x": torch.ones(2)}})
    with pytest.raises(OpaqueLoadFailed, match="'first'") as caught:
        saved.load(state)
    assert isinstance(caught.value.__cause__, KeyError)
    assert tree["x"].tolist() == [1.0, 1.0]


def with_tree(saved: Image, tree: Any) -> Image:
    """The image with the tree of its component `data` replaced, by any value or node."""
    old = saved.stored["data"]
    saved.stored["data"] = StoredComponent(
        name="data", kind="tree", tree=document(tree).data, tensors=old.tensors
    )
    return saved


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (TensorRef("nobody"), "no tensor 'nobody'"),
        (ArrayRef("nobody"), "no tensor 'nobody'"),
        (ArrayRef("half"), "numpy has no BF16"),
        (TensorRef("half", "meta"), "meta"),
        (TensorRef("half", "nonsense"), "not a device"),
        (DeviceName("nonsense"), "not a device"),
        (DtypeName("float99"), "no dtype"),
        (DtypeName("torch"), "no dtype"),
    ],
)
def test_nodes_that_cannot_be_are_found_before_anything_changes(node: Any, message: str) -> None:
    """Invariants 5 and 6."""
    live = {"half": torch.zeros(2, dtype=torch.bfloat16)}
    saved = with_tree(
        image({"data": {"half": torch.ones(2, dtype=torch.bfloat16)}}),
        {"half": TensorRef("half"), "more": [node]},
    )
    with pytest.raises(FormatError, match=message):
        saved.prepare({"data": live})
    assert live["half"].tolist() == [0.0, 0.0]


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1, 2])])
    | st.builds(
        lambda values, kind: torch.tensor(values, dtype=kind),
        st.lists(st.integers(0, 1), max_size=3),
        st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.float64]),
    )
    | st.builds(np.array, st.lists(st.floats(), max_size=3))
)
keys = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    """The value in a form that compares exactly: types, bits and order."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, tuple(value.shape), raw_bytes(value))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, dict):
        return (type(value).__name__, [(key, shape(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [shape(item) for item in value])
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@given(stored=st.lists(trees, max_size=3), live=st.lists(trees, max_size=3))
def test_any_tree_becomes_any_other_to_the_bit(stored: list[Any], live: list[Any]) -> None:
    """Invariant 7, for whatever stands in the live tree before."""
    expected = shape(stored)
    saved = image({"data": stored})
    saved.load({"data": live})
    assert shape(live) == expected
    assert shape(stored) == expected
    saved.load({"data": live})
    assert shape(live) == expected
