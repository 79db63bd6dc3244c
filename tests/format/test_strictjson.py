"""Strict JSON: what is refused, and that limits come before work."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import is_refused

from holdfast.errors import FormatError, LimitExceeded, UsageError
from holdfast.format import strictjson

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=30,
)

NOT_STRICT = [
    b"",
    b" ",
    b'{"a": 1, "a": 1}',
    b'[{"b": {"a": 1, "\\u0061": 2}}]',
    b"NaN",
    b"[Infinity]",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"\xef\xbb\xbf{}",
    b"{} {}",
    b"[1] x",
    b"[1,]",
    b'{"a": 1,}',
    b"{a: 1}",
    b"['a']",
    b"// c\n1",
    b"01",
    b"+1",
    b".5",
    b"1.",
    b"0x10",
    b'"\n"',
    b'"\x00"',
    b'"\\x41"',
    b'"\\ud800"',
    b'"\\udc00"',
    b'"\\ud800\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\ud800\\\\udc00"',
    b'{"\\uDFFF": 1}',
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b'"\xc0\xaf"',
    b"\xff\xfe[\x00]\x00",
    b"1" * 4097,
    b"-" + b"1" * 4097,
    b"1" * 5000,
    b"1" * 5000 + b".5",
    b"0." + b"1" * 5000,
    b'"abc',
    b"[1",
    b"nul",
    b"tru",
    b"\x00",
    b'{"a"}',
    b"{1: 2}",
    b"\\",
    b'\\"',
]


def load(data: bytes, **limits: int) -> Any:
    return strictjson.loads(data, what="the-document", **{"max_nbytes": 1 << 20, **limits})


@given(JSON)
def test_what_dumps_writes_loads_reads(value: Any) -> None:
    assert load(strictjson.dumps(value)) == value


@each("data", NOT_STRICT, ids=lambda data: repr(data[:16]))
def test_only_strict_json_is_accepted(data: bytes) -> None:
    """R30, D65: one of our errors, which names the document; nothing else escapes."""
    with pytest.raises(FormatError, match="the-document"):
        load(data)


@each(
    ("data", "value"),
    [
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'"\\\\ud800"', "\\ud800"),
        (b'"\\\\\\""', '\\"'),
        (b'"[[[[{{{{,,,,"', "[[[[{{{{,,,,"),
        (b'"\\"[[[["', '"[[[['),
        (b"-0.0", -0.0),
        (b"1" * 4096, int("1" * 4096)),
        (b" \n[1]\t", [1]),
    ],
    ids=lambda value: repr(value)[:16],
)
def test_odd_but_strict_json_is_accepted(
    monkeypatch: pytest.MonkeyPatch, data: bytes, value: Any
) -> None:
    monkeypatch.setattr(strictjson, "MAX_DEPTH", 1)
    assert load(data, max_values=3) == value


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_our_errors(data: bytes) -> None:
    """R30: any bytes."""
    is_refused(lambda data, what: load(data), data)


def check_limits_hold() -> None:
    with pytest.raises(LimitExceeded, match="the-document"):
        load(b"[" * 65 + b"]" * 65)
    with pytest.raises(LimitExceeded, match="values"):
        load(b"[" + b"1," * 100 + b"1]", max_values=100)
    with pytest.raises(LimitExceeded, match="values"):
        load(b"[" + b"[]," * 100 + b"[]]", max_values=200)
    with pytest.raises(LimitExceeded, match="bytes"):
        load(b"[]" + b" " * 100, max_nbytes=101)


def test_limits_hold() -> None:
    """R29: bytes, values and depth are bounded."""
    check_limits_hold()


def test_the_limits_are_exact() -> None:
    assert load(b"[" * 64 + b"]" * 64)
    assert load(b"[1,1,1]", max_values=4) == [1, 1, 1]
    assert load(b"[]" + b" " * 99, max_nbytes=101) == []


def test_limits_hold_across_pieces_of_the_scan() -> None:
    """R29: a text or a nesting that runs over the scan's pieces is counted as one."""
    long_text = b'["' + b"[" * (3 << 20) + b'"]'
    assert len(load(long_text, max_nbytes=1 << 23)[0]) == 3 << 20
    spaced = (b"[" + b" " * (1 << 16)) * 65 + b"]" * 65
    with pytest.raises(LimitExceeded, match="64 levels"):
        load(spaced, max_nbytes=1 << 23)


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the C scanner no longer counts as Python's recursion"
)
def test_depth_is_refused_whatever_the_recursion_limit() -> None:
    """R29, R30: with hardly any stack left the error is still ours."""

    def dig(levels: int) -> Any:
        return dig(levels - 1) if levels else load(b"[" * 60 + b"]" * 60)

    frame, used = sys._getframe(), 0
    while frame.f_back is not None:
        frame, used = frame.f_back, used + 1
    for spare in range(12, 80, 4):
        try:
            dig(sys.getrecursionlimit() - used - spare)
        except LimitExceeded:
            return
        except RecursionError:
            continue  # before our function was even called
    pytest.fail("no depth at which only the parser ran out of stack")


@each("value", [float("nan"), float("inf"), "\ud800", {1, 2}, b"x", object()])
def test_dumps_refuses_what_json_lacks(value: Any) -> None:
    with pytest.raises(UsageError):
        strictjson.dumps([value])


@given(JSON)
def test_every_way_to_write_a_value_is_read_alike(value: Any) -> None:
    """As we write it, as `json` does with and without indents, and with odd spaces."""
    texts = [
        strictjson.dumps(value),
        json.dumps(value).encode(),
        json.dumps(value, indent=2).encode(),
        json.dumps(value, indent=2, ensure_ascii=False).encode(),
        b" " + json.dumps(value, indent="\t").encode() + b"\n",
    ]
    for text in texts:
        found = strictjson.loads(text, what="t", max_nbytes=1 << 20)
        assert json.dumps(found) == json.dumps(value)  # tells -0.0 from 0.0, and 1 from True


@each("layout", ["[%s]", '{"a":%s}', '{\n  "a": %s\n}', "%s"])
@each("num_digits", [4095, 4096, 4097, 4300, 5000])
def test_integers_have_at_most_4096_digits(layout: str, num_digits: int) -> None:
    """R29: however the text is written."""
    text = (layout % ("7" * num_digits)).encode()
    if num_digits <= strictjson.MAX_DIGITS:
        strictjson.loads(text, what="t", max_nbytes=1 << 20)
        return
    with pytest.raises(FormatError):
        strictjson.loads(text, what="t", max_nbytes=1 << 20)


def test_digits_in_texts_are_no_number() -> None:
    text = b'["%s"]' % (b"1" * 10_000)
    assert strictjson.loads(text, what="t", max_nbytes=1 << 20) == ["1" * 10_000]


@pytest.mark.parametrize("text", [b'{"a":1,"a":1}', b'{\n  "a": 1,\n  "a": 1\n}', b'[{"":0,"":0}]'])
def test_names_that_are_there_twice_are_refused_also_in_our_own_way_to_write(text: bytes) -> None:
    """R29."""
    with pytest.raises(FormatError, match="appears twice"):
        strictjson.loads(text, what="t", max_nbytes=1 << 20)


class Inner(msgspec.Struct, omit_defaults=True):
    names: list[str]
    sizes: tuple[int, ...] = ()


class Record(msgspec.Struct, omit_defaults=True):
    first: int
    inner: dict[str, Inner] = {}


def loads_as(text: bytes, **limits: int) -> Record | None:
    return strictjson.loads_as(text, Record, **({"max_nbytes": 1000} | limits))


def test_a_text_that_is_written_as_the_record_is_becomes_one() -> None:
    text = '{"first":1,"inner":{"ä\\"\\n":{"names":["[","{,"],"sizes":[3]}}}'.encode()
    assert loads_as(text) == Record(1, {'ä"\n': Inner(["[", "{,"], (3,))})
    assert loads_as(b'{"first":-2}') == Record(-2)


@each(
    "text",
    [
        b'{"first": 1}',
        b'{"first":1} ',
        b'\xef\xbb\xbf{"first":1}',
        b'{"first":1,"first":1}',
        b'{"first":1,"inner":{}}',
        b'{"first":1,"inner":{"a":{"names":[]},"a":{"names":[]}}}',
        b'{"first":1,"inner":{"a":{"names":[],"names":[]}}}',
        b'{"first":1,"other":2}',
        b'{"inner":{"a":{"names":[]}},"first":1}',
        b'{"fir\\u0073t":1}',
        b'{"first":1,"inner":{"\\ud800":{"names":[]}}}',
        b'{"first":1,"inner":{"a":{"names":["\xff"]}}}',
        b'{"first":1.0}',
        b'{"first":1e0}',
        b'{"first":01}',
        b'{"first":true}',
        b'{"first":"1"}',
        b'{"first":-0}',
        b'{"first":' + b"1" * 900 + b".0}",
        b"[" * 400,
        b"1",
        b"",
    ],
)
def test_a_text_that_is_written_in_another_way_is_left_to_the_other_reader(text: bytes) -> None:
    assert loads_as(text) is None


def test_a_record_has_the_limits_of_a_text() -> None:
    text = b'{"first":1,"inner":{"a":{"names":["b","c"]}}}'
    assert loads_as(text, max_nbytes=len(text), max_values=8) is not None
    assert loads_as(text, max_nbytes=len(text) - 1) is None
    assert loads_as(text, max_values=6) is None


def test_a_number_without_end_is_not_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: not even where the interpreter was told to convert numbers of any length."""
    text = b'{"first":' + b"9" * 1_000_000 + b"}"
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert loads_as(text, max_nbytes=len(text)) is None
    finally:
        sys.set_int_max_str_digits(before)


RACE = """
import gc, sys, threading, time
import msgspec
from holdfast.format import strictjson
from holdfast.ranks.coordinator import decode_message

sys.setswitchinterval(1e-6)
gc.set_threshold(1)
gc.callbacks.append(lambda phase, info: time.sleep(0.0002))
names = [f"a{number}" for number in range(40)]
for _ in range(12):
    inner = msgspec.defstruct("Inner", [(name, list[int]) for name in names])
    outer = msgspec.defstruct("Outer", [(name, dict[str, inner]) for name in names])
    value = {name: {"x": {other: [1] for other in names}} for name in names}
    text, message = msgspec.json.encode(value), msgspec.msgpack.encode(value)
    start = threading.Barrier(2)

    def work():
        start.wait(10)
        WORK

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "work",
    [
        'strictjson.convert(value, outer, what="x")',
        "strictjson.loads_as(text, outer, max_nbytes=len(text))",
        'decode_message(message, outer, "x")',
    ],
)
def test_two_threads_may_read_the_first_record_of_a_type_at_once(work: str) -> None:
    """msgspec describes a type at its first use; used half-made, it would crash the process."""
    race = RACE.replace("WORK", work)
    done = subprocess.run([sys.executable, "-c", race], timeout=120, check=False)
    assert done.returncode == 0
