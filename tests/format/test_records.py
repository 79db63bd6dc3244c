"""Claims, closes, heartbeats and sidecars."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import Document, documents, is_refused, members_of, reseal

from holdfast.errors import FormatError
from holdfast.format import records

BY_NAME = {document.name: document for document in documents()}
RECORDS = [
    BY_NAME[name] for name in ("writer", "closed", "alive", "lease", "notes", "retired", "rejected")
]
WRONG: list[tuple[str, tuple[str, ...], Any]] = [
    ("writer", ("epoch",), 0),
    ("writer", ("epoch",), True),
    ("writer", ("nonce",), "f" * 31),
    ("writer", ("nonce",), "F" * 32),
    ("writer", ("takeover",), 0),
    ("writer", ("takeover",), None),
    ("writer", ("resumed_from",), []),
    ("writer", ("resumed_from", "save_id"), "x"),
    ("writer", ("resumed_from", "epoch"), 4),
    ("writer", ("process",), None),
    ("writer", ("process", "pid"), -1),
    ("writer", ("process", "pid"), "77"),
    ("writer", ("process", "host"), 1),
    ("closed", ("nonce",), None),
    ("alive", ("beat",), -1),
    ("alive", ("beat",), 2**63),
    ("alive", ("beat",), 1.0),
    ("lease", ("nonce",), ""),
    ("lease", ("beat",), -1),
    ("lease", ("created",), None),
    ("lease", ("process", "host"), None),
    ("notes", ("tags",), "a"),
    ("notes", ("tags",), [None]),
    ("notes", ("pinned",), 1),
    ("notes", ("pinned",), "true"),
    ("retired", ("by",), None),
    ("rejected", ("reasons",), "bits"),
    ("request", ("id",), "../x"),
    ("request", ("process",), None),
    ("request", ("reason",), None),
    ("request", ("tags",), "a"),
    ("request", ("tags",), [1]),
    ("upload", ("remote",), None),
    ("upload", ("state",), "lost"),
    ("upload", ("sent_nbytes",), -1),
    ("upload", ("tries",), 1.5),
    ("upload", ("error",), 3),
    ("tiers", ("epoch",), -1),
    ("tiers", ("upload_s",), "1"),
    ("tiers", ("folder",), 3),
    ("answer", ("folder",), None),
    ("answer", ("folder",), "../x"),
    ("answer", ("folder",), "writers"),
    ("answer", ("error",), "both"),
    ("answer", ("asker",), 1),
]


@each("document", RECORDS, ids=str)
def test_every_member_is_needed(document: Document) -> None:
    members = members_of(document)
    for name in list(members)[2:]:
        fewer = {key: value for key, value in members.items() if key != name}
        with pytest.raises(FormatError, match="the-document"):
            document.decode(reseal(json.dumps(fewer)), what="the-document")


@each(("kind", "path", "value"), WRONG)
def test_a_wrong_member_is_refused(kind: str, path: tuple[str, ...], value: Any) -> None:
    """R30: types are exact and numbers bounded."""
    members = copy.deepcopy(members_of(BY_NAME[kind]))
    inner = members
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(FormatError, match="the-document"):
        BY_NAME[kind].decode(reseal(json.dumps(members)), what="the-document")


def test_no_record_is_taken_for_another() -> None:
    for document in RECORDS:
        for other in RECORDS:
            assert is_refused(other.decode, document.data) == (other is not document)


@pytest.mark.parametrize(
    ("kind", "name", "left_out"),
    [("request", "reason", ""), ("request", "tags", ()), ("answer", "asker", None)],
)
def test_some_members_may_be_left_out(kind: str, name: str, left_out: Any) -> None:
    fewer = {key: value for key, value in members_of(BY_NAME[kind]).items() if key != name}
    found = BY_NAME[kind].decode(reseal(json.dumps(fewer)), what="w")
    assert getattr(found, name) == left_out


def check_a_reference_cannot_leave_the_root() -> None:
    writer = BY_NAME["writer"]
    for folder in ("..", "../x", "/etc", "", "writers", "a/b", "\0", "x.0003-000002-01234567/.."):
        members = copy.deepcopy(members_of(writer))
        members["resumed_from"]["folder"] = folder
        with pytest.raises(FormatError, match="the-document"):
            writer.decode(reseal(json.dumps(members)), what="the-document")


def test_a_reference_cannot_leave_the_root() -> None:
    """R28: the folder that a claim goes on from is an attempt's name, and the right one."""
    check_a_reference_cannot_leave_the_root()


@given(
    tags=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=9), max_size=9),
    pinned=st.booleans(),
    metrics=st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), st.floats()),
)
def test_notes_come_back_equal(tags: list[str], pinned: bool, metrics: dict[str, float]) -> None:
    notes = records.Notes(tags=tuple(tags), pinned=pinned, metrics=metrics)
    # As text, in which nan equals nan.
    assert str(records.Notes.decode(notes.encode(), what="w")) == str(notes)
