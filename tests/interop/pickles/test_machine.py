"""The interpreter of pickles: what it makes of every operation, and of what it does not know."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptData, FormatError, HoldfastError
from holdfast.interop.pickles.machine import _OPERATIONS, _REFUSED, Machine
from holdfast.interop.pickles.names import CONSTANTS, CONSTRUCTORS, SETTERS
from holdfast.interop.pickles.values import PickleBudget, Unknown

keys = st.one_of(st.integers(), st.text(max_size=5), st.booleans(), st.tuples(st.integers()))
plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    machine = Machine(
        io.BufferedReader(io.BytesIO(data)),  # type: ignore[arg-type]
        what="x.pkl",
        budget=PickleBudget(),
        constructors=CONSTRUCTORS,
        constants=CONSTANTS,
        setters=SETTERS,
    )
    return machine.read_pickle()


@given(plain, st.integers(0, 5), st.booleans())
def test_plain_values_are_what_the_pickler_was_given(
    value: Any, protocol: int, is_optimized: bool
) -> None:
    data = pickle.dumps(value, protocol)
    data = pickletools.optimize(data) if is_optimized else data
    found = read(data)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, list | dict | set | tuple | frozenset)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_by_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(HoldfastError):
        read(data)


@given(plain, st.integers(0, 5), st.data())
def test_a_pickle_cut_anywhere_is_refused(value: Any, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps(value, protocol)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FormatError):
        read(whole[:length])


def test_every_operation_of_pickles_is_known_or_refused_by_name() -> None:
    codes = {op.code.encode("latin-1") for op in pickletools.opcodes}
    assert codes - _OPERATIONS.keys() - _REFUSED.keys() == {b"."}
    assert _OPERATIONS.keys() | _REFUSED.keys() <= codes


def test_nothing_of_the_standard_library_that_calls_or_imports_is_inherited() -> None:
    """Invariant 5: these functions of `pickle._Unpickler` run or trust what a pickle names."""
    own = {*vars(Machine)}
    runs = {"reduce", "newobj", "newobj_ex", "build", "bytearray8", "frame"}
    assert {f"_load_{name}" for name in runs} <= own
    assert {"find_class", "persistent_load", "_instantiate", "_decode_string"} <= own
    assert {"read", "readline", "pop_mark"} <= own


def test_shared_values_are_shared_again() -> None:
    inner = [1]
    found = read(pickle.dumps({"a": inner, "b": inner}))
    assert found["a"] is found["b"]


def test_an_unknown_object_keeps_its_name_arguments_and_state() -> None:
    found = read(pickle.dumps(pytest.param(1, id="x"), 4))
    assert type(found) is Unknown
    assert found.name.endswith(".ParameterSet")
    assert found.args[0] == (1,)


def test_a_windows_path_is_a_path_here_and_a_pure_one_is_no_path_of_this_machine() -> None:
    pure = pickle.dumps(PureWindowsPath("C:\\data\\x"), 0)
    concrete = pure.replace(b"PureWindowsPath", b"WindowsPath")
    assert read(concrete) == Path("C:/data/x")
    found = read(pure)
    assert type(found) is Unknown
    assert found.name.endswith(".PureWindowsPath")


def test_the_message_names_the_place() -> None:
    with pytest.raises(CorruptData, match=r"x\.pkl: the pickle ends before its last operation"):
        read(b"\x80\x02}")
    with pytest.raises(FormatError, match="extension registry"):
        read(b"\x80\x02\x82\x01.")
