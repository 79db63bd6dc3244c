"""Self-checking documents: the digest, the version, and that no changed byte is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import Document, documents, is_refused, members_of, reseal

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UnsupportedVersion, UsageError
from holdfast.format import strictjson

SEALED = [document for document in documents() if document.is_sealed]


def unseal(data: bytes, **options: Any) -> dict[str, Any]:
    return strictjson.decode_checked(data, what="the-document", kinds=("notes",), **options)


def test_a_sealed_document_looks_as_the_format_page_says() -> None:
    data = strictjson.encode_checked("notes", {"tags": ["ü"], "pinned": False})
    body, last_line = data[: data.rindex(b'"digest"')], data[data.rindex(b'"digest"') :]
    assert body.decode() == (
        '{\n  "holdfast": 1,\n  "kind": "notes",\n  "tags": [\n    "ü"\n  ],\n  "pinned": false,\n'
    )
    assert last_line == f'"digest": "blake3:{blake3(body).hexdigest()}"}}\n'.encode()
    assert list(json.loads(data)) == ["holdfast", "kind", "tags", "pinned", "digest"]
    assert unseal(data) == {"kind": "notes", "tags": ["ü"], "pinned": False}


@each("document", SEALED, ids=str)
def test_every_kind_comes_back_equal(document: Document) -> None:
    assert document.decode(document.data, what="w") == document.value


def check_no_changed_byte_is_accepted(document: Document) -> None:
    for at in range(len(document.data)):
        for bit in (0x01, 0x20, 0x80):
            wounded = bytearray(document.data)
            wounded[at] ^= bit
            assert is_refused(document.decode, bytes(wounded)), f"byte {at} ^ {bit}"
    for length in range(len(document.data)):
        assert is_refused(document.decode, document.data[:length]), f"cut at {length}"
    assert is_refused(document.decode, document.data + b"\n")


@each("document", SEALED, ids=str)
def test_no_changed_byte_is_accepted(document: Document) -> None:
    """D14, D15: each byte flipped, each length cut, and something behind the end."""
    check_no_changed_byte_is_accepted(document)


@pytest.mark.parametrize("document", SEALED, ids=str)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(document: Document, data: bytes) -> None:
    """R30: any bytes."""
    assert is_refused(document.decode, data)


def check_other_versions_are_refused() -> None:
    for start in (
        '"holdfast": 2, "kind": "notes"',
        '"holdfast": 1, "kind": "notes", "requires":["x"]',
    ):
        data = reseal("{" + start + ', "tags": [], "pinned": false}')
        with pytest.raises(UnsupportedVersion, match="the-document"):
            unseal(data)


def test_other_versions_and_unknown_requirements_are_refused_as_such() -> None:
    """D60: a newer document is told from a damaged one."""
    check_other_versions_are_refused()


def test_damage_is_told_from_a_newer_version() -> None:
    data = reseal('{"holdfast": 2, "kind": "notes"}').replace(b"notes", b"motes")
    with pytest.raises(CorruptData):
        unseal(data)


def test_known_members_only_are_needed_and_unknown_ones_ignored() -> None:
    for document in SEALED:
        members = {**members_of(document), "of_the_future": {"a": [1]}}
        assert document.decode(reseal(json.dumps(members)), what="w") == document.value


@each(
    "text",
    [
        "{}",
        "[1]",
        '{"kind": "notes", "holdfast": 1}',
        '{"holdfast": 1}',
        '{"holdfast": 1, "tags": [], "kind": "notes"}',
        '{"holdfast": true, "kind": "notes"}',
        '{"holdfast": 1.0, "kind": "notes"}',
        '{"holdfast": "1", "kind": "notes"}',
        '{"holdfast": null, "kind": "notes"}',
        '{"holdfast": 1, "kind": "writer"}',
        '{"holdfast": 1, "kind": ["notes"]}',
        '{"holdfast": 1, "kind": {"notes": 1}}',
        '{"holdfast": 1, "kind": null}',
        '{"holdfast": 1, "kind": "notes", "requires": "x"}',
        '{"holdfast": 1, "kind": "notes", "requires": [1]}',
        '{"holdfast": 1, "kind": "notes", "digest": "blake3:0"}',
        '{"holdfast": 1, "kind": "notes", "x": NaN}',
    ],
)
def test_a_sealed_text_of_another_form_is_refused(text: str) -> None:
    """R30: the digest fits, the document does not."""
    with pytest.raises(FormatError, match="the-document"):
        unseal(reseal(text))


def test_huge_versions_are_refused_with_a_short_message() -> None:
    data = reseal('{"holdfast": ' + "9" * 4000 + ', "kind": "notes"}')
    with pytest.raises(UnsupportedVersion) as caught:
        unseal(data)
    assert len(str(caught.value)) < 200


def test_the_size_is_checked_by_reader_and_writer() -> None:
    """R29: neither writes nor reads more than the format allows."""
    with pytest.raises(LimitExceeded):
        unseal(bytes(65537))
    with pytest.raises(UsageError, match="at most"):
        strictjson.encode_checked("notes", {"tags": ["x" * 70_000]})


@pytest.mark.parametrize("value", [float("nan"), "\ud800", object()])
def test_seal_refuses_what_json_lacks(value: Any) -> None:
    with pytest.raises(UsageError):
        strictjson.encode_checked("notes", {"tags": [value]})
