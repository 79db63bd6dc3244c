"""The checks are alive: with one line of ours taken out, a test above fails.

Each mutant replaces one function of the format by one that lets everything pass, and runs a
check of another test module, which must then fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.format import (
    test_blocks,
    test_checked,
    test_codec,
    test_index,
    test_manifest,
    test_objects,
    test_records,
    test_stored,
    test_strictjson,
    test_tensors,
)
from tests.format.samples import documents

from holdfast.format import (
    blocks,
    frames,
    index,
    layout,
    manifest,
    objects,
    records,
    strictjson,
    tensors,
)
from holdfast.format.boxes import Boxes


class Anything(str):
    """A text that every text is equal to."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def passes(*arguments: Any, **options: Any) -> None:
    """A check that finds nothing wrong."""


def counts(shapes: Any, boxes: Boxes) -> Any:
    """The elements of boxes, without a check."""
    return np.array([math.prod(boxes.sizes.row(number)) for number in range(len(boxes.tensor))])


def check_checked() -> None:
    notes = next(document for document in documents() if document.name == "notes")
    test_checked.check_no_changed_byte_is_accepted(notes)


def check_headers() -> None:
    entries = {"a": test_tensors.tensor(), "b": test_tensors.tensor()}
    test_tensors.test_a_header_that_does_not_fit_its_file_is_refused(entries, 8)


def check_shapes() -> None:
    path = ("components", "model", "shapes", 0)
    test_index.test_a_wrong_member_is_refused(path, [2**40, 2**40])


def check_duplicates() -> None:
    test_strictjson.test_only_strict_json_is_accepted(b'{"a": 1, "a": 1}')


def check_keys() -> None:
    test_objects.test_keys_cannot_be_made_to_collide_without_end()


def check_keys_of_one_hash() -> None:
    test_objects.check_keys_of_one_hash()


MUTANTS: list[tuple[str, Any, str, Any, Callable[[], None]]] = [
    ("R30, D14: the digest", strictjson, "_check_digest", passes, check_checked),
    (
        "D60: the version",
        strictjson,
        "check_version",
        passes,
        test_checked.check_other_versions_are_refused,
    ),
    (
        "D14: a block's digest",
        blocks,
        "check_block",
        passes,
        test_blocks.check_one_flipped_bit_is_found,
    ),
    (
        "D14, D15: the index under the manifest",
        blocks,
        "file_digest",
        lambda nbytes, digests: Anything(),
        test_index.check_block_digests_must_be_the_manifests,
    ),
    ("R29: tilings", index, "check_boxes", counts, test_index.check_shards_must_tile),
    (
        "R29: overlaps",
        index,
        "_check_places",
        passes,
        test_index.check_shards_cannot_share_bytes,
    ),
    ("R29: headers", tensors, "_check_filled", passes, check_headers),
    ("R29: shapes", index, "check_shape", lambda *a, **o: 0, check_shapes),
    ("R29: limits", strictjson, "_check_limits", passes, test_strictjson.check_limits_hold),
    ("R30: duplicates", strictjson, "_object", dict, check_duplicates),
    (
        "R28: references",
        records,
        "check_reference",
        passes,
        test_records.check_a_reference_cannot_leave_the_root,
    ),
    (
        "R28: file names",
        manifest,
        "_check_manifest",
        passes,
        test_manifest.check_file_names_cannot_leave_the_folder,
    ),
    (
        "R29: sharing",
        objects,
        "MAX_TREE_VALUES",
        10**400,
        test_objects.check_shared_containers_cannot_blow_up,
    ),
    ("R29: keys", objects, "MAX_OTHER_KEYS", 10**9, check_keys),
    ("R29: comparisons", objects, "MAX_COMPARISONS", 10**18, check_keys_of_one_hash),
    (
        "R29: frames of another length",
        frames,
        "_expect_size",
        passes,
        test_codec.check_no_frame_has_another_length,
    ),
    (
        "R29: chunks of another kind",
        frames,
        "_check_header",
        passes,
        test_codec.check_no_plugin_is_asked_for,
    ),
    (
        "R29: stored blocks that are too long",
        index,
        "max_stored_nbytes",
        lambda nbytes: 2**62,
        test_stored.check_no_block_is_too_long,
    ),
    (
        "R28: names of stored files",
        layout,
        "stored_file",
        lambda name, codec: Anything(),
        test_stored.check_names_fit_the_codec,
    ),
]


@pytest.mark.parametrize(
    ("module", "name", "mutant", "check"),
    [mutant[1:] for mutant in MUTANTS],
    ids=[mutant[0] for mutant in MUTANTS],
)
def test_a_check_fails_when_its_code_is_taken_out(
    module: Any,
    name: str,
    mutant: Any,
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check()
    assert hasattr(module, name)
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
