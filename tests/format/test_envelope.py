"""Sealed manifests, marks and boxes: what a hostile one costs, and what it may not say."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from tests.format.samples import make_manifest

from holdfast import errors
from holdfast.format import envelope
from holdfast.format.envelope import (
    Contents,
    check_mark,
    decode_box,
    decode_mark,
    decode_visible,
    encode_box,
    encode_mark,
    encode_sealed,
    new_file_seal,
    open_sealed,
)
from holdfast.format.manifest import FileEntry, decode_register, encode_manifest
from holdfast.format.strictjson import encode_checked
from holdfast.format.suites import SEGMENT_NBYTES, Suite, fresh_secret, num_segments, stored_nbytes
from holdfast.keys import SecretKey, wrapped

SUITE = Suite(name="aes-256-gcm")
DATA_KEY = bytes(range(32))


def sealed(**changes: Any) -> Contents:
    """A sealed manifest; `changes` are made to what is visible of it or to its table."""
    manifest = make_manifest()
    files = {name: new_file_seal(n, e.nbytes) for n, (name, e) in enumerate(manifest.files.items())}
    files = changes.get("files", files)
    stored = {
        seal.name: FileEntry(nbytes=stored_nbytes(seal.nbytes), digest="blake3:" + "0" * 64)
        for seal in files.values()
    }
    return encode_sealed(
        changes.get("manifest", manifest),
        encode_manifest(manifest),
        files,
        changes.get("stored", stored),
        suite=SUITE,
        data_key=DATA_KEY,
    )


def opened(contents: Contents) -> Contents:
    visible = decode_visible(contents.document, what="m")
    return open_sealed(contents.document, visible, DATA_KEY, what="m")


def test_what_is_sealed_is_opened_and_older_readers_refuse_it() -> None:
    made = sealed()
    found = opened(made)
    assert found.manifest == encode_manifest(make_manifest())
    assert dict(found.files) == dict(made.files)
    assert b'"requires": [\n    "sealed"\n  ]' in made.document
    with pytest.raises(errors.MissingKey):
        decode_register(made.document, what="m")
    secret = next(iter(made.files.values())).secret
    assert secret not in repr(made) + repr(made.files)
    assert secret.encode() not in made.document


def test_what_is_visible_must_be_what_is_inside() -> None:
    """R32: also where the holder of a key made it so."""
    other = msgspec.structs.replace(make_manifest(), sequence=make_manifest().sequence + 1)
    with pytest.raises(errors.Tampered, match="sequence"):
        opened(sealed(manifest=other))
    made = sealed()
    visible = decode_visible(made.document, what="m")
    with pytest.raises(errors.Tampered):
        open_sealed(made.document, visible, bytes(32), what="m")


def test_a_table_of_files_that_cannot_be_is_refused() -> None:
    """R28, R29: from whoever holds a key."""
    good = dict(sealed().files)
    first = next(iter(good))
    seal = good[first]
    tables = {
        "a name that leads out": {**good, "../x": new_file_seal(99, 1)},
        "too long": {**good, first: msgspec.structs.replace(seal, nbytes=2**33 * SEGMENT_NBYTES)},
        "another length": {**good, first: msgspec.structs.replace(seal, nbytes=seal.nbytes + 1)},
        "two names of one file": {**good, "other-00000.json": seal},
    }
    stored = sealed().visible.files
    for what, table in tables.items():
        kept = {s.name: stored.get(s.name, stored[seal.name]) for s in table.values()}
        with pytest.raises(errors.FormatError):
            opened(sealed(files=table, stored=kept)), what
    with pytest.raises(errors.FormatError):
        opened(sealed(stored={**stored, "file-00077.sealed": stored[seal.name]}))
    with pytest.raises(errors.FormatError):
        opened(sealed(stored={**stored, "model-00000.json": stored[seal.name]}))


def test_a_mark_is_that_of_its_checkpoint_and_its_name() -> None:
    """R32."""
    contents = sealed()
    mark = encode_mark(contents, "notes-0001.json", b"inside")
    assert decode_mark(contents, "notes-0001.json", mark, what="n") == b"inside"
    with pytest.raises(errors.Tampered, match="another name"):
        decode_mark(contents, "notes-0002.json", mark, what="n")
    moved = resealed(mark.replace(b"notes-0001", b"notes-0002"))
    with pytest.raises(errors.Tampered, match="not the bytes"):
        decode_mark(contents, "notes-0002.json", moved, what="n")
    object.__setattr__(contents, "data_key", fresh_secret())
    with pytest.raises(errors.Tampered):
        decode_mark(contents, "notes-0001.json", mark, what="n")


def resealed(data: bytes) -> bytes:
    body = data[: data.rindex(b'"digest": ')]
    return body + b'"digest": "blake3:%s"}\n' % blake3(body).hexdigest().encode()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, removed, doubled or swapped, with the digest made right again."""
    body = bytearray(data[: data.rindex(b'"digest": ')])
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(body))
        stop = min(len(body), start + rng.choice((1, 1, 8, 64)))
        match rng.randrange(4):
            case 0:
                body[start] = rng.randrange(256)
            case 1:
                del body[start:stop]
            case 2:
                body[start:start] = body[start:stop]
            case _:
                body[start:stop] = rng.choice((b"null", b"-1", b"[]", b'""', b"9" * 40, b"{}"))
    if rng.random() < 0.7 and not body.endswith(b",\n"):
        body += b",\n"
    return resealed(bytes(body) + b'"digest": ')


def test_hostile_documents_raise_nothing_but_format_errors() -> None:
    """R30: manifests, marks and boxes, with digests that fit."""
    contents = sealed()
    mark = encode_mark(contents, "notes-0001.json", b"inside")
    box = encode_box(wrapped([SecretKey(fresh_secret())], DATA_KEY, SUITE))
    rng = random.Random(3)
    for _ in range(3000):
        for data in (contents.document, mark, box):
            bad = mutated(data, rng)
            try:
                if data is box:
                    decode_box(bad, what="b")
                elif data is mark:
                    check_mark(bad, "notes-0001.json", what="n")
                    decode_mark(contents, "notes-0001.json", bad, what="n")
                else:
                    visible = decode_visible(bad, what="m")
                    open_sealed(bad, visible, DATA_KEY, what="m")
            except errors.FormatError:
                continue
            # What was changed is not looked at, such as the recipient of somebody else.
            assert data is box or bad == data, bad


def test_a_box_names_few_recipients() -> None:
    """R29."""
    keys = [SecretKey(fresh_secret()) for _ in range(envelope.MAX_RECIPIENTS + 1)]
    box = msgspec.to_builtins(wrapped(keys, DATA_KEY, SUITE))
    with pytest.raises(errors.FormatError):
        decode_box(encode_checked("keys", {"requires": ["sealed"], **box}), what="b")


@pytest.mark.parametrize("nbytes", [0, 1, SEGMENT_NBYTES - 1, SEGMENT_NBYTES, SEGMENT_NBYTES + 1])
def test_a_sealed_file_has_a_tag_for_each_segment_and_one_more(nbytes: int) -> None:
    assert stored_nbytes(nbytes) == nbytes + 16 * (num_segments(nbytes) + 1)
