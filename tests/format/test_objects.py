"""Typed trees: exact there and back, offenders by path, nothing hostile accepted."""

from __future__ import annotations

import datetime
import enum
import itertools
import json
import math
import pathlib
import random
import struct
import sys
import time
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import cpu_budget_s, is_refused, mutate

from holdfast.errors import FormatError, LimitExceeded, UnsupportedState, UnsupportedVersion
from holdfast.format import objects
from holdfast.format.nodes import (
    ArrayRef,
    DeviceName,
    DtypeName,
    EnumValue,
    GeneratorState,
    SizeTuple,
    TensorRef,
    are_tensors,
)
from holdfast.format.objects import DequeItems, Refused, decode_tree, document


class Color(enum.Enum):
    RED = 1
    ROSE = (255, 0, 127)


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


class Word(str, enum.Enum):
    YES = "yes"


def encode_tree(tree: Any, **options: Any) -> bytes:
    return document(tree, **options).data


def float_of(bits: int) -> float:
    value: float = struct.unpack(">d", struct.pack(">Q", bits))[0]
    return value


def bits_of(value: float) -> bytes:
    return struct.pack(">d", value)


def identical(one: Any, two: Any) -> bool:
    """Equal in type, bits and order, all the way down; an enum member matches its `EnumValue`."""
    if isinstance(one, enum.Enum):
        kind = f"{type(one).__module__}:{type(one).__qualname__}"
        return (two.type, two.name) == (kind, one.name) and identical(one.value, two.value)
    if type(one) is not type(two):
        return False
    if isinstance(one, np.generic):
        return one.tobytes() == two.tobytes()
    if isinstance(one, float):
        return bits_of(one) == bits_of(two)
    if isinstance(one, dict):
        pairs = zip(one.items(), two.items(), strict=True)
        return len(one) == len(two) and all(identical(list(a), list(b)) for a, b in pairs)
    if isinstance(one, (set, frozenset)):
        return encode_tree(one) == encode_tree(two) and len(one) == len(two)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(identical, one, two))
    if isinstance(one, GeneratorState):
        return one.kind == two.kind and identical(one.members, two.members)
    return bool(one == two)


def there_and_back(tree: Any) -> Any:
    return decode_tree(encode_tree(tree), what="the-document")


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
SCALARS = st.one_of(
    st.booleans().map(np.bool_),
    *(
        st.integers(int(np.iinfo(t).min), int(np.iinfo(t).max)).map(t)
        for t in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
    ),
    *(
        st.binary(min_size=n, max_size=n).map(lambda raw, code=code: np.frombuffer(raw, code)[0])
        for n, code in ((2, "<f2"), (4, "<f4"), (8, "<f8"), (8, "<c8"), (16, "<c16"))
    ),
)
ZONES = st.none() | st.integers(-86_399, 86_399).map(
    lambda s: datetime.timezone(datetime.timedelta(seconds=s))
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**300), 10**300),
    TEXT,
    st.binary(max_size=12),
    TEXT.filter(lambda text: "\0" not in text).map(pathlib.Path),
    st.timedeltas(),
    st.datetimes(timezones=ZONES).map(lambda time: time.replace(fold=0)),
    st.sampled_from([Color.RED, Color.ROSE, Level.LOW, Word.YES, Bits.A, Bits(0)]),
    st.builds(DtypeName, st.sampled_from(["float32", "bfloat16"])),
    st.builds(DeviceName, st.sampled_from(["cpu", "cuda:0"])),
    st.builds(SizeTuple, st.lists(st.integers(0, 2**40), max_size=3).map(tuple)),
)
FLOATS = st.floats() | st.integers(0, 2**64 - 1).map(float_of)
LEAVES = st.one_of(
    PLAIN,
    FLOATS,
    SCALARS,
    st.builds(TensorRef, TEXT, st.sampled_from(["cpu", "cuda", "mps:1"])),
    st.builds(ArrayRef, TEXT),
)
KEYS = st.recursive(
    PLAIN | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(KEYS, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(TEXT.map(lambda text: "$" + text), inner, max_size=3),
        pairs.map(dict),
        pairs.map(OrderedDict),
        pairs.map(lambda items: Counter(dict(items))),
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
        st.builds(
            GeneratorState,
            TEXT,
            st.dictionaries(st.sampled_from(["state", "seed", "pos"]), inner, max_size=2),
        ),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=25)


@given(TREES)
def test_any_tree_comes_back_identical(tree: Any) -> None:
    """Types, float bits, order of keys: everything the grammar has, in any combination."""
    assert identical(tree, there_and_back(tree))


@given(TREES)
def test_writing_again_gives_the_same_bytes(tree: Any) -> None:
    """The written form is canonical: also sets, whatever the order of hashes."""
    data = encode_tree(tree)
    assert encode_tree(decode_tree(data, what="w")) == data


@each(
    ("tree", "text"),
    [
        (None, "null"),
        (1e16, "1e16"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (math.inf, '{"$float":"inf"}'),
        (math.nan, '{"$float":"nan"}'),
        (float_of(0xFFF8000000000000), '{"$float":"fff8000000000000"}'),
        (float_of(0x7FF0000000000001), '{"$float":"7ff0000000000001"}'),
        (2**100, "1267650600228229401496703205376"),
        (b"ab", '{"$bytes":"YWI="}'),
        ((1, []), '{"$tuple":[1,[]]}'),
        ({10, 9, "a"}, '{"$set":[9,10,"a"]}'),
        (frozenset({(1,)}), '{"$frozenset":[{"$tuple":[1]}]}'),
        ({"a": 1}, '{"a":1}'),
        ({1: 2}, '{"$dict":[[1,2]]}'),
        ({"$a": 1}, '{"$dict":[["$a",1]]}'),
        (OrderedDict(a=1), '{"$ordered":[["a",1]]}'),
        (Counter("aab"), '{"$counter":[["a",2],["b",1]]}'),
        (pathlib.Path("a/b"), '{"$path":"a/b"}'),
        (datetime.timedelta(-1, 2, 3), '{"$timedelta":[-1,2,3]}'),
        (
            datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
            '{"$datetime":"2026-01-02T00:00:00+00:00"}',
        ),
        (np.float32(1), '{"$scalar":["F32","0000803f"]}'),
        (np.True_, '{"$scalar":["BOOL","01"]}'),
        (np.complex64(1j), '{"$scalar":["C64","000000000000803f"]}'),
        (TensorRef("w"), '{"$tensor":"w"}'),
        (TensorRef("w", "cuda"), '{"$tensor":"w","device":"cuda"}'),
        (ArrayRef("w"), '{"$array":"w"}'),
        (DtypeName("bfloat16"), '{"$dtype":"bfloat16"}'),
        (DeviceName("cuda:0"), '{"$device":"cuda:0"}'),
        (SizeTuple((2, 3)), '{"$size":[2,3]}'),
        (
            GeneratorState("torch", {"state": TensorRef("rng")}),
            '{"$generator":{"kind":"torch","state":{"$tensor":"rng"}}}',
        ),
        (EnumValue("m:E", "A", 1), '{"$enum":{"type":"m:E","name":"A","value":1}}'),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "tree",
)
def test_each_node_is_written_as_the_format_page_says(tree: Any, text: str) -> None:
    data = encode_tree(tree)
    assert data == b'{"holdfast":1,"tree":' + text.encode() + b"}"
    assert identical(tree, decode_tree(data, what="w"))


def test_a_deque_is_written_as_the_format_page_says_and_comes_back_as_its_items() -> None:
    inner: list[int] = []
    data = encode_tree([deque([1, inner], 4), deque([inner])])
    expected = b'[{"$deque":[4,[1,[]]]},{"$deque":[null,[{"$same":2}]]}]'
    assert data == b'{"holdfast":1,"tree":' + expected + b"}"
    first, second = decode_tree(data, what="w")
    assert (first, first.maxlen, second, second.maxlen) == ([1, []], 4, [[]], None)
    assert second[0] is first[1]
    assert type(first) is type(second) is DequeItems


def test_an_enum_comes_back_as_its_name_and_is_never_imported() -> None:
    """R27: the type is text."""
    found = there_and_back([Color.ROSE, Level.LOW, Word.YES])
    where = f"{__name__}:"
    assert found == [
        EnumValue(where + "Color", "ROSE", (255, 0, 127)),
        EnumValue(where + "Level", "LOW", 1),
        EnumValue(where + "Word", "YES", "yes"),
    ]


def test_shared_containers_are_shared_again() -> None:
    inner = [1]
    tree = {"a": inner, "b": {"c": inner}, "d": (inner, {"e": 1})}
    data = encode_tree(tree)
    assert data.count(b'"$same":1') == 2
    found = decode_tree(data, what="w")
    assert found["a"] is found["b"]["c"] is found["d"][0]
    assert found == tree


def test_a_container_made_by_lower_keeps_its_own_identity() -> None:
    """Objects that live only while writing never share an id with another."""

    class Thing:
        pass

    things = [Thing() for _ in range(100)]
    count = iter(range(1000))
    data = encode_tree(things, lower=lambda thing, path: [next(count)])
    assert decode_tree(data, what="w") == [[i] for i in range(100)]


def test_keys_that_are_shared_tuples_are_written_in_full() -> None:
    key = (1, 2)
    tree = [key, {key: "a"}, {key}, key]
    assert b"$same" in encode_tree(tree)
    assert there_and_back(tree) == tree


def test_lower_and_lift_exchange_objects_and_nodes() -> None:
    class Tensor:
        pass

    tensor, paths = Tensor(), []

    def lower(value: Any, path: str) -> Any:
        paths.append(path)
        return TensorRef("w") if isinstance(value, Tensor) else NotImplemented

    data = encode_tree({"a": [1, tensor], 5: tensor}, lower=lower)
    assert paths == ["a.1", "5"]
    found = decode_tree(data, lift=lambda node: (node, "lifted"), what="w")
    assert found == {"a": [1, (TensorRef("w"), "lifted")], 5: (TensorRef("w"), "lifted")}


def test_errors_of_lift_pass_through() -> None:
    class Odd(Exception):
        pass

    def lift(node: Any) -> Any:
        raise Odd

    with pytest.raises(Odd):
        decode_tree(encode_tree([TensorRef("a")]), lift=lift, what="w")


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyInt(int):
    pass


Point = namedtuple("Point", "x y")
DEEP: list[Any] = []
for _ in range(70):
    DEEP = [DEEP]
CYCLE: dict[str, Any] = {}
CYCLE["self"] = [CYCLE]


@each(
    ("value", "reason"),
    [
        (object(), "builtins:object"),
        (lambda: None, "function"),
        (1j, "complex"),
        (range(3), "range"),
        (bytearray(b"x"), "bytearray"),
        (memoryview(b"x"), "memoryview"),
        (MyDict(), "subclass of dict"),
        (defaultdict(int), "subclass of dict"),
        (MyInt(3), "subclass of int"),
        (Point(1, 2), "subclass of tuple"),
        (np.str_("x"), "subclass of str"),
        (np.bytes_(b"x"), "subclass of bytes"),
        (np.longdouble(1), "longdouble"),
        (np.datetime64("2026-01-01"), "datetime64"),
        (np.array([1]), "ndarray"),
        (pathlib.PurePosixPath("a"), "PurePosixPath"),
        (datetime.date(2026, 1, 1), "date"),
        (datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "ZoneInfo"),
        (
            datetime.datetime(
                2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")
            ),
            "name of its own",
        ),
        (datetime.datetime(2026, 1, 1, fold=1), "fold"),
        ("\ud800", "Unicode"),
        (pathlib.Path("\udcff"), "Unicode"),
        ({"\ud800": 1}, "Unicode"),
        ({1: 1, "\ud800": 1}, "Unicode"),
        (10**4096, "digits"),
        (-(10**9000), "digits"),
        ({10**9000: 1}, "digits"),
        (DEEP, "deep"),
        (CYCLE, "contains itself"),
        ({TensorRef("a"): 1}, "cannot be a key"),
        ({ArrayRef("a")}, "cannot be a key"),
        (GeneratorState("x", {"kind": 1}), "kind"),
        ({(i, i) for i in range(100_001)}, "100,000"),
        (dict.fromkeys(range(1, 100002)), "100,000"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_would_not_come_back_is_refused_by_path(value: Any, reason: str) -> None:
    """What a reader would give back as something else, or not at all, is never written."""
    with pytest.raises(UnsupportedState, match=reason) as caught:
        encode_tree({"a": [0, value]})
    assert caught.value.paths[0].startswith("a.1")


def test_all_offenders_are_listed_at_once() -> None:
    def lower(value: Any, path: str) -> Any:
        return Refused("because") if isinstance(value, range) else NotImplemented

    tree = {"a": object(), "b": [range(2), {3: object()}], "c": {("k",): range(1)}}
    with pytest.raises(UnsupportedState, match="because") as caught:
        encode_tree(tree, lower=lower)
    assert caught.value.paths == ["a", "b.0", "b.1.3", "c.<tuple>"]


def test_a_lower_that_never_ends_is_refused() -> None:
    with pytest.raises(UnsupportedState, match="deep"):
        encode_tree(object(), lower=lambda value, path: [object()])
    with pytest.raises(UnsupportedState):
        encode_tree(object(), lower=lambda value, path: value)


@pytest.mark.full
def test_a_tree_beyond_the_readers_limits_is_refused_when_written() -> None:
    """R29: nothing is written that could not be read back."""
    with pytest.raises(UnsupportedState, match="tensors or arrays"):
        encode_tree(["x" * (1 << 20)] * 65)
    with pytest.raises(UnsupportedState, match="tensors or arrays"):
        encode_tree([0] * 4_000_000)


@pytest.mark.full
def test_large_honest_containers_pass() -> None:
    tree = dict.fromkeys(range(150000))
    assert there_and_back(tree) == tree
    names = {f"n{i}" for i in range(150_000)}
    assert there_and_back(names) == names


def bomb(levels: int) -> list[Any]:
    """Lists of which each names the one before it twice."""
    tree: list[Any] = [[0]]
    for number in range(levels):
        tree.append([{"$same": 1 + number}, {"$same": 1 + number}])
    return tree


def check_shared_containers_cannot_blow_up() -> None:
    data = json.dumps({"holdfast": 1, "tree": bomb(1000)}).encode()
    with pytest.raises(LimitExceeded, match="shared ones counted"):
        decode_tree(data, what="the-document")


def test_shared_containers_cannot_blow_up() -> None:
    """R29: a kilobyte that stands for 2**1000 values is refused, and never written either."""
    check_shared_containers_cannot_blow_up()
    inner: list[Any] = [0]
    for _ in range(25):
        inner = [inner, inner]
    with pytest.raises(UnsupportedState, match="shared ones counted"):
        encode_tree(inner)


def test_keys_cannot_be_made_to_collide_without_end() -> None:
    """R29: numbers have known hashes; the number of such keys is bounded."""
    keys = [[i * 7 + 1, 0] for i in range(100_001)]
    data = json.dumps({"holdfast": 1, "tree": {"$dict": keys}}).encode()
    with pytest.raises(LimitExceeded, match="100,000"):
        decode_tree(data, what="the-document")


PRIME = 2**61 - 1
"""Integers whose difference is a multiple of it have one hash, in every process."""


def colliding_tuples(num_numbers: int) -> list[Any]:
    """Nodes of tuples that have one hash, since -1 and -2 have."""
    return [{"$tuple": list(pick)} for pick in itertools.product((-1, -2), repeat=num_numbers)]


def colliding_sets(num_sets: int, num_members: int) -> list[Any]:
    """Nodes of sets that have one hash, and whose members have one hash, too."""
    shared = [i * PRIME for i in range(num_members - 1)]
    return [{"$frozenset": [*shared, (num_members + i) * PRIME]} for i in range(num_sets)]


COLLIDING: dict[str, Callable[[], dict[str, list[Any]]]] = {
    "integers": lambda: {"$set": [i * PRIME for i in range(40_000)]},
    "integers of a counter": lambda: {"$counter": [[i * PRIME, 1] for i in range(40_000)]},
    "integers and floats": lambda: {
        "$dict": [[i * PRIME + 1, 0] for i in range(40_000)] + [[2.0**61, 0]]
    },
    "tuples": lambda: {"$frozenset": colliding_tuples(14)},
    "sizes": lambda: {
        "$set": [
            {"$size": [0] * 20 + [i * PRIME for i in pick]}
            for pick in itertools.product(range(4), repeat=7)
        ]
    },
    "sets": lambda: {"$dict": [[node, 0] for node in colliding_sets(180, 180)]},
    "tuples around sets": lambda: {
        "$set": [{"$tuple": [0, node]} for node in colliding_sets(180, 180)]
    },
    "a set for each of many": lambda: {
        "$tuple": [{"$set": [i * PRIME for i in range(2_000)]} for _ in range(45)]
    },
}


@each("name", COLLIDING)
def test_keys_of_one_hash_cost_no_quadratic_time(name: str) -> None:
    """R29: a table compares each key with those of the same hash; a file that asks for more such
    comparisons than any honest one is refused before they are made."""
    data = json.dumps({"holdfast": 1, "tree": COLLIDING[name]()}).encode()
    began = time.process_time()
    with pytest.raises((LimitExceeded, FormatError)) as caught:
        decode_tree(data, what="the-document")
    assert time.process_time() - began < cpu_budget_s(len(data))
    assert "the-document" in str(caught.value)


def check_keys_of_one_hash() -> None:
    data = json.dumps({"holdfast": 1, "tree": {"$set": [i * PRIME for i in range(12_000)]}})
    with pytest.raises(LimitExceeded, match="same hash"):
        decode_tree(data.encode(), what="the-document")


HONEST = {
    "powers of two": {1 << bits for bits in range(3_000)},
    "large powers of two": {1 << bits for bits in range(0, 13_606, 61)},
    "masks": {(1 << bits) - 1: bits for bits in range(2_000)},
    "floats": {sign * 2.0**power for power in range(-1074, 1024) for sign in (1, -1)},
    "offsets in a grid": dict.fromkeys(itertools.product(range(-2, 3), repeat=6), 0),
    "offsets as numpy has them": {
        tuple(map(np.int64, pick)) for pick in itertools.product((-2, -1, 0), repeat=6)
    },
    "all parts of a set": {
        frozenset(pick) for num in range(13) for pick in itertools.combinations(range(12), num)
    },
    "residues of a prime": {i * PRIME for i in range(3_000)},
    "not a number, many times": {float("nan") for _ in range(3_000)},
}


@each("name", HONEST)
def test_keys_that_collide_as_they_do_in_honest_programs_are_taken(name: str) -> None:
    """R29: whatever a program could build itself in a moment is written and read."""
    again = there_and_back(HONEST[name])
    assert len(again) == len(HONEST[name])
    if not name.startswith("not"):
        assert again == HONEST[name]


def test_what_would_be_refused_for_its_collisions_is_not_written() -> None:
    """R29: nothing is written that could not be read back; the path and the way out are named."""
    check_keys_of_one_hash()
    members = {i * PRIME for i in range(12_000)}
    with pytest.raises(UnsupportedState, match=r"same hash.*tensor") as caught:
        encode_tree({"a": [members]})
    assert caught.value.paths == ["a.0"]


@each("key", [[1, {"$scalar": ["F16", "003c"]}], [{"$scalar": ["F16", "003c"]}, 1]])
def test_keys_that_cannot_be_compared_are_refused(key: list[Any]) -> None:
    """R30: numpy cannot compare a half float with an integer that no float can hold."""
    members = [part if part != 1 else PRIME**40 * (PRIME - 1) + 1 for part in key]
    data = json.dumps({"holdfast": 1, "tree": {"$set": members}}).encode()
    with pytest.raises(FormatError, match="the-document"):
        decode_tree(data, what="the-document")


HOSTILE = [
    "[",
    '{"$unknown": 1}',
    '{"$": 1}',
    '{"$tuple": 1}',
    '{"$tuple": {"0": 1}}',
    '{"$tuple": [], "x": 1}',
    '{"a": 1, "$tuple": []}',
    '{"$set": [[1]]}',
    '{"$set": [{"a": 1}]}',
    '{"$set": [1, 1]}',
    '{"$set": [1, true]}',
    '{"$set": [1, 1.0]}',
    '{"$frozenset": [{"$set": [1]}]}',
    '{"$set": [{"$tensor": "a"}]}',
    '{"$set": [{"$generator": {"kind": "x"}}]}',
    '{"$dict": {"a": 1}}',
    '{"$dict": [[1]]}',
    '{"$dict": [[1, 2, 3]]}',
    '{"$dict": [1]}',
    '{"$dict": ["ab"]}',
    '{"$dict": [[[1], 2]]}',
    '{"$dict": [[1, 2], [1, 3]]}',
    '{"$dict": [[{"$tuple": [[1]]}, 2]]}',
    '{"$counter": [["a", 1], ["a", 2]]}',
    '{"$ordered": [[{"$dict": []}, 2]]}',
    '{"$deque": [1]}',
    '{"$deque": [true, []]}',
    '{"$deque": [-1, []]}',
    '{"$deque": [1, [1, 2]]}',
    '{"$deque": [9223372036854775808, []]}',
    '{"$deque": [1, {}]}',
    '{"$set": [{"$deque": [null, []]}]}',
    '[[1], {"$dict": [[{"$same": 1}, 2]]}]',
    '[{"$tuple": [1]}, {"$set": [{"$same": 1}]}]',
    '[{"$same": 0}]',
    '[[], {"$same": 2}]',
    '[[], {"$same": -1}]',
    '[[], {"$same": true}]',
    '[[], {"$same": 1.0}]',
    '[[], {"$same": "1"}]',
    '[[], {"$same": null}]',
    '{"$same": 0}',
    '{"$set": [{"$tuple": [1]}], "$same": 1}',
    '[{"$set": [{"$tuple": [1]}]}, {"$same": 2}]',
    '{"$float": "NaN"}',
    '{"$float": "Infinity"}',
    '{"$float": "1.0"}',
    '{"$float": 1}',
    '{"$float": ["nan"]}',
    '{"$float": "3ff0000000000000"}',
    '{"$float": "7ff8000000000000"}',
    '{"$float": "7ff0000000000000"}',
    '{"$float": "7FF0000000000001"}',
    '{"$float": "7ff000000000001"}',
    '{"$float": "7ff0 00000000001"}',
    '{"$bytes": "YWI"}',
    '{"$bytes": "YWJ="}',
    '{"$bytes": "YW I="}',
    '{"$bytes": "YWI=\\n"}',
    '{"$bytes": "ü"}',
    '{"$bytes": [1]}',
    '{"$path": 1}',
    '{"$path": null}',
    '{"$timedelta": [1, 2]}',
    '{"$timedelta": [1, 2, 3, 4]}',
    '{"$timedelta": [1, 2, 3.0]}',
    '{"$timedelta": [true, 2, 3]}',
    '{"$timedelta": [0, 86400, 0]}',
    '{"$timedelta": [1000000000, 0, 0]}',
    '{"$timedelta": [' + "9" * 4000 + ", 0, 0]}",
    '{"$timedelta": "1 day"}',
    '{"$datetime": "yesterday"}',
    '{"$datetime": "2026-01-02"}',
    '{"$datetime": "2026-13-02T00:00:00"}',
    '{"$datetime": "2026-01-02T00:00:00+25:00"}',
    '{"$datetime": "2026-01-02 00:00:00"}',
    '{"$datetime": 0}',
    '{"$scalar": ["F32"]}',
    '{"$scalar": ["F33", "00000000"]}',
    '{"$scalar": ["F32", "000000"]}',
    '{"$scalar": ["F32", "0000803F"]}',
    '{"$scalar": ["BOOL", "02"]}',
    '{"$scalar": [["F32"], "00000000"]}',
    '{"$scalar": ["O", "0000000000000000"]}',
    '{"$scalar": {"F32": "00000000"}}',
    '{"$tensor": 1}',
    '{"$tensor": ["a"]}',
    '{"$tensor": "a", "x": 1}',
    '{"$tensor": "a", "device": 1}',
    '{"$tensor": "a", "device": "cuda:0; rm"}',
    '{"$tensor": "a", "device": "cpu\\n"}',
    '{"$tensor": "a", "device": "cpu", "x": 1}',
    '{"device": "cpu", "$tensor": "a"}',
    '{"$array": 1}',
    '{"$dtype": "__class__.x"}',
    '{"$dtype": ""}',
    '{"$dtype": "float32\\n"}',
    '{"$dtype": 1}',
    '{"$device": "cuda:"}',
    '{"$device": "../x"}',
    '{"$device": []}',
    '{"$size": [1.0]}',
    '{"$size": [true]}',
    '{"$size": "12"}',
    '{"$size": [' + "9" * 40 + "]}",
    '{"$enum": {"type": "a:B", "name": "C"}}',
    '{"$enum": {"type": 1, "name": "C", "value": 1}}',
    '{"$enum": {"type": "a:B", "name": 1, "value": 1}}',
    '{"$enum": {"type": "a:B", "name": "C", "value": 1, "x": 1}}',
    '{"$enum": ["a:B", "C", 1]}',
    '{"$generator": {"state": 1}}',
    '{"$generator": {"kind": 1}}',
    '{"$generator": {"kind": "x", "$tensor": "a"}}',
    '{"$generator": []}',
    '{"$reduce": ["os:system", "true"]}',
    '{"__reduce__": 1, "$tuple": []}',
    '{"py/object": "os.system", "$same": 0}',
    "[" * 64 + "]" * 64,
    '{"a":' * 64 + "1" + "}" * 64,
    '{"$tuple":[' * 40 + "]}" * 40,
]


@each("text", HOSTILE, ids=lambda text: text[:50])
def test_a_malformed_tree_is_refused(text: str) -> None:
    """R27, R29, R30: unknown nodes, wrong types, other spellings of the same value."""
    with pytest.raises(FormatError, match="the-document"):
        decode_tree(f'{{"holdfast": 1, "tree": {text}}}'.encode(), what="the-document")


@each("text", ["[]", "{}", '{"holdfast": 1}', '{"tree": 1}', "1", '{"holdfast": true, "tree": 1}'])
def test_a_document_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="the-document"):
        decode_tree(text.encode(), what="the-document")


def test_other_versions_are_refused_as_such() -> None:
    for text in ('{"holdfast": 2, "tree": 1}', '{"holdfast": 1, "requires": ["x"], "tree": 1}'):
        with pytest.raises(UnsupportedVersion, match="the-document"):
            decode_tree(text.encode(), what="the-document")


@given(tree=TREES, seed=st.integers(0, 2**32))
def test_a_wounded_tree_raises_nothing_but_our_errors(tree: Any, seed: int) -> None:
    """R30: flips, cuts, insertions and splices."""
    is_refused(decode_tree, mutate(encode_tree(tree), random.Random(seed)))


KINDS = [
    *("$float", "$bytes", "$tuple", "$set", "$frozenset", "$dict", "$ordered", "$counter"),
    *("$enum", "$path", "$timedelta", "$datetime", "$scalar", "$tensor", "$array", "$dtype"),
    *("$device", "$size", "$generator", "$same", "$deque"),
]
NODES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["nan", "F32", "00000000", "a", "", "cpu", "2026-01-02T00:00:00"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3)
        | st.builds(
            lambda name, value: {name: value},
            st.sampled_from([*KINDS, "$x", "a"]),
            inner,
        )
        | st.fixed_dictionaries({"type": inner, "name": inner, "value": inner})
        | st.fixed_dictionaries({"kind": inner, "state": inner})
    ),
    max_leaves=15,
)


@given(NODES)
def test_any_arrangement_of_nodes_raises_nothing_but_our_errors(node: Any) -> None:
    """R30: structure-aware; what is accepted can be written again."""
    data = json.dumps({"holdfast": 1, "tree": node}).encode()
    if not is_refused(decode_tree, data):
        encode_tree(decode_tree(data, what="w"))


TENSORS = st.dictionaries(
    st.sampled_from(["a", "b", "$c", "$tensor", 'd","e', '"$f']),
    st.fixed_dictionaries(
        {"$tensor": st.sampled_from(["a", "$b", 'c","d', '"$e', ""]) | st.just(1)},
        optional={
            "device": st.sampled_from(["cpu", "cuda", "cuda:0", "Nowhere", "meta:12345", 1]),
            "grad": st.sampled_from([True, False, 1]),
            "parameter": st.sampled_from([True, False, None]),
            "order": st.sampled_from([[1, 0], [], [0, 1], [0, 0], [2, 0, 1], ["a"], [True, False]]),
            "other": st.just(1),
        },
    )
    | st.sampled_from([{}, {"$array": "a"}, {"b": {"$tensor": "b"}}, 1, None]),
    max_size=3,
)


@given(TENSORS, st.sampled_from([{}, {"versions": {"a": 2}}, {"requires": ["more"]}]))
def test_however_a_dict_of_tensors_is_written_it_is_read_alike(tree: Any, beside: Any) -> None:
    """R30: as a writer writes it, which is read in another way; with spaces; tensor by tensor."""
    document = {"holdfast": 1, "tree": tree, **beside}
    written = [msgspec.json.encode(document), json.dumps(document).encode()]
    outcomes: list[Any] = []
    for data in written:
        try:
            outcomes.append(decode_tree(data, what="it"))
        except (FormatError, UnsupportedVersion) as err:
            outcomes.append(str(err))
    assert outcomes[0] == outcomes[1]
    if isinstance(outcomes[0], dict):
        assert [*outcomes[0]] == [*outcomes[1]]


def test_a_dict_of_tensors_is_lifted_at_once() -> None:
    tree = {"a": TensorRef("x"), "b": TensorRef("y", "cuda:0", True, True, (1, 0))}
    seen: list[Any] = []

    def lift(refs: Any) -> Any:
        seen.append([*refs])
        return ["one", "two"]

    found = decode_tree(encode_tree(tree), lift_tensors=lift, what="it")
    assert found == {"a": "one", "b": "two"}
    assert seen == [[*tree.values()]]


class _Unhashable(int):
    __hash__ = None  # type: ignore[assignment]


def test_orders_of_tensors_are_not_hashed() -> None:
    """R29: numbers have known hashes, and these may be of any size and many."""
    assert are_tensors([TensorRef("a", order=(_Unhashable(1), _Unhashable(0)))])
    assert not are_tensors([TensorRef("a", order=(_Unhashable(0), _Unhashable(1)))])


def test_running_out_of_stack_is_one_of_our_errors() -> None:
    """R29, R30: whatever is left of the stack when a tree is read."""
    tree: Any = 1
    for _ in range(50):
        tree = [tree]
    data = encode_tree(tree)

    def dig(levels: int) -> Any:
        return dig(levels - 1) if levels else decode_tree(data, what="w")

    frame, used = sys._getframe(), 0
    while frame.f_back is not None:
        frame, used = frame.f_back, used + 1
    outcomes = set()
    for spare in range(20, 260, 8):
        try:
            dig(sys.getrecursionlimit() - used - spare)
        except LimitExceeded:
            outcomes.add("ours")
        except RecursionError:
            outcomes.add("before the call")
        else:
            outcomes.add("read")
    assert {"ours", "read"} <= outcomes


def test_reading_needs_neither_torch_nor_the_types_named() -> None:
    """R27: an enum of a module that would fail to import, a path that does not exist."""
    data = (
        b'{"holdfast":1,"tree":[{"$enum":{"type":"antigravity:X","name":"A","value":1}},'
        b'{"$path":"/dev/null/x"}]}'
    )
    decode_tree(data, what="w")
    assert "antigravity" not in sys.modules
    assert "torch" not in vars(objects)
