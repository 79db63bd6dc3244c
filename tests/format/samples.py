"""Valid documents of every kind, how to read each, and ways to break them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from holdfast.errors import FormatError
from holdfast.format import blocks, index, index_parts, manifest, objects, records, tensors
from holdfast.format.manifest import ComponentEntry, FileEntry, Manifest, Reference, Timestamp

SAVE_ID = "0123456789abcdef0123456789abcdef"
NONCE = "f" * 32
FOLDER = "step-00000010.0003-000002-01234567"
REFERENCE = Reference(epoch=3, sequence=2, save_id=SAVE_ID, folder=FOLDER)
PROCESS = records.Process(host="h", pid=77, start="12", boot_id="b", pid_namespace="4026531836")
SPECS = (
    tensors.TensorSpec("a", "F32", (3, 4)),
    tensors.TensorSpec("b.c", "I64", ()),
    tensors.TensorSpec("d", "BF16", (2, 0)),
    tensors.TensorSpec("e", "C128", (5,)),
    tensors.TensorSpec("f", "BOOL", (7,)),
)
TREE = {"a": objects.TensorRef("a"), "x": [1, 2.5, "t", None, (True,)], "n": {1: float("nan")}}


def entry(data: bytes) -> FileEntry:
    """The manifest's entry of a file with these bytes."""
    digest = blocks.file_digest(len(data), blocks.digest_blocks(data))
    return FileEntry(nbytes=len(data), digest=digest)


def image(file: tensors.TensorFile, fill: int = 0) -> bytes:
    """The bytes of a tensor file whose data bytes are all `fill`."""
    return file.header + bytes([fill]) * (file.nbytes - len(file.header))


def model_files() -> dict[str, bytes]:
    """Every file of a small checkpoint with the one component `model`, without manifest."""
    plan = tensors.lay_out("model", SPECS)
    found = {"model-00000.json": objects.document(TREE).data, plan[0].name: image(plan[0])}
    digests = {name: blocks.digest_blocks(data) for name, data in found.items()}
    found["index.json"] = index.encode_index({"model": plan}, digests)
    return found


def make_manifest(**changes: Any) -> Manifest:
    """The manifest of `model_files`."""
    found = model_files()
    members: dict[str, Any] = {
        "save_id": SAVE_ID,
        "label": "step-00000020",
        "epoch": 3,
        "sequence": 7,
        "parent": REFERENCE,
        "timestamp": Timestamp(step=20, epoch=1, samples=640, wall_s=12.5),
        "created": "2026-01-02T03:04:05Z",
        "save_class": "permanent",
        "reason": "interval",
        "tags": ("best", "münchen"),
        "metrics": {"loss": 0.25, "worst": float("inf"), "low": float("-inf")},
        "world_size": 1,
        "components": {
            "model": ComponentEntry(
                kind="module",
                files=("model-00000.json", "model-00000.safetensors"),
                nbytes=sum(spec.nbytes for spec in SPECS),
                num_tensors=len(SPECS),
            )
        },
        "block_nbytes": 8388608,
        "files": {name: entry(data) for name, data in found.items()},
        "numerics": {"torch": "2.13.0", "threads": 2, "deterministic": True},
        "environment": {"python": "3.11"},
        "timings": {"capture_s": 0.1, "stage_s": 0.2, "write_s": 0.3},
    }
    return Manifest(**{**members, **changes})


def _read_index(data: bytes, *, what: str) -> Any:
    return index.decode_index(data, files=make_manifest().files, what=what)


@functools.cache
def parted_files() -> Mapping[str, bytes]:
    """Every file of a checkpoint in parts, without manifest: four writers, two in each part.

    Of the tensors of `model`, `a` and `b` are cut alike, `c` in a grid; a file of `other` is in an
    order of its own. Only the second and the fourth writer have files of `other`.
    """
    tables, contents = parted_tables()
    digests = {name: blocks.digest_blocks(data) for name, data in contents.items()}
    lengths = {name: len(data) for name, data in contents.items()}
    writers = {"model": [1] * 4, "other": [0, 1, 0, 1]}
    before = index_parts.PART_WRITERS
    index_parts.PART_WRITERS = 2
    try:
        made = index_parts.encode_in_parts(tables, digests, lengths, writers, stored={})
    finally:
        index_parts.PART_WRITERS = before
    return {**contents, **made}


def parted_tables() -> tuple[dict[str, index.TensorTable], dict[str, bytes]]:
    """Tensors by component, and the files with them: each byte is the number of its box."""
    cut = [([2 * row, 0], [2, 3]) for row in range(4)]
    grid = [([3 * row, column], [3, 2 - column // 2]) for row in (0, 1) for column in (0, 2)]
    of_model = {
        "a": ("F32", (8, 3), cut, (0, 1, 2, 3)),
        "b": ("I64", (8, 3), cut, (0, 1, 2, 3)),
        "c": ("U8", (6, 3), grid, (3, 1, 0, 2)),
        "d": ("F32", (), [([], [])], (2,)),
    }
    of_other = {
        "e": ("U8", (4,), [([0], [4])], (0,)),
        "f": ("U8", (2, 3), [([0, 0], [2, 3])], (0,)),
    }
    of_other |= {
        "g": ("F32", (1, 0), [([0, 0], [1, 0])], (1,)),
        "h": ("U8", (5,), [([0], [5])], (1,)),
    }
    contents: dict[str, bytes] = {}
    tables = {}
    for name, tensors_of, order in (("model", of_model, 1), ("other", of_other, -1)):
        specs = {key: tensors.TensorSpec(key, *of[:2]) for key, of in tensors_of.items()}
        boxes = [
            (number, file, offsets, sizes)
            for number, (_, _, cells, files) in enumerate(tensors_of.values())
            for (offsets, sizes), file in zip(cells, files, strict=True)
        ]
        keys = [*specs]
        parts = [
            tensors.TensorSpec(f"{number}", specs[keys[tensor]].dtype, tuple(sizes))
            for number, (tensor, _, _, sizes) in enumerate(boxes)
        ]
        contents[f"{name}-00000.json"] = objects.document({}).data
        at = {}
        num_files = 1 + max(file for _, file, *_ in boxes)
        for file in range(num_files):
            of_file = [one for one, box in zip(parts, boxes, strict=True) if box[1] == file][
                ::order
            ]
            (plan,) = tensors.lay_out(name, of_file, first_number=file)
            data = bytearray(plan.header) + bytearray(plan.nbytes - len(plan.header))
            for spec, start in zip(plan.specs, plan.starts, strict=True):
                data[start : start + spec.nbytes] = bytes([int(spec.key)]) * spec.nbytes
                at[int(spec.key)] = start
            contents[plan.name] = bytes(data)
        tables[name] = index.TensorTable.of_boxes(
            specs,
            index.Places(
                [f"{name}-{file:05d}.safetensors" for file in range(num_files)],
                np.array([file for _, file, *_ in boxes]),
                np.array([at[number] for number in range(len(boxes))]),
                np.array([spec.nbytes for spec in parts]),
            ),
            np.array([tensor for tensor, *_ in boxes]),
            [offsets for *_, offsets, _ in boxes],
            [sizes for *_, sizes in boxes],
        )
    return tables, contents


def read_parts(documents: Mapping[str, bytes], *, what: str) -> index.Index:
    """Open the index of `parted_files` with some documents replaced."""
    files = {name: entry(data) for name, data in parted_files().items()}
    known = {**parted_files(), **documents}
    return index_parts.open_index(known["index.json"], known.__getitem__, files=files, what=what)


def _read_root(data: bytes, *, what: str) -> Any:
    return _read_all({"index.json": data}, what=what)


def _read_part(data: bytes, *, what: str) -> Any:
    return _read_all({"index-0001.json": data}, what=what)


def _read_all(documents: Mapping[str, bytes], *, what: str) -> Any:
    found = read_parts(documents, what=what)
    tables = {name: dict(table) for name, table in found.components.items()}
    return found.block_nbytes, dict(found.blocks), dict(found.stored), tables


def _read_header(data: bytes, *, what: str) -> Any:
    return tensors.parse_header(data, file_nbytes=len(model_files()[_MODEL]), what=what)


_MODEL = "model-00000.safetensors"


@dataclass(frozen=True)
class Document:
    """One kind of document: a value, its bytes and how they are read."""

    name: str
    value: Any
    data: bytes
    decode: Callable[..., Any]
    is_sealed: bool = True

    def __str__(self) -> str:
        return self.name


def documents() -> list[Document]:
    """One document of every kind of the format."""
    m, r = manifest, records
    sealed_values: list[tuple[str, Any, Callable[[Any], bytes], Callable[..., Any]]] = [
        ("manifest", make_manifest(), m.encode_manifest, m.decode_register),
        ("aborted", m.Aborted(by="gc", reason="no"), m.Aborted.encode, m.decode_register),
        (
            "deleted",
            m.Deleted(save_id=SAVE_ID, by="retention", reason="old"),
            m.Deleted.encode,
            m.decode_register,
        ),
        (
            "writer",
            r.WriterRecord(
                epoch=4,
                nonce=NONCE,
                resumed_from=REFERENCE,
                rollback=False,
                takeover=False,
                created="2026-01-02T03:04:05Z",
                process=PROCESS,
            ),
            r.WriterRecord.encode,
            r.WriterRecord.decode,
        ),
        ("closed", r.Closed(epoch=4, nonce=NONCE), r.Closed.encode, r.Closed.decode),
        (
            "ended",
            r.Ended(
                epoch=4,
                aborted=("step-00000003.0001-000003-01234567",),
                deleted=("step-00000002.0001-000002-01234567",),
            ),
            r.Ended.encode,
            r.Ended.decode,
        ),
        ("alive", r.Alive(epoch=4, nonce=NONCE, beat=9), r.Alive.encode, r.Alive.decode),
        (
            "lease",
            r.Lease(nonce=NONCE, beat=3, created="2026-01-02T03:04:05Z", process=PROCESS),
            r.Lease.encode,
            r.Lease.decode,
        ),
        ("notes", r.Notes(tags=("a", "ü"), pinned=True), r.Notes.encode, r.Notes.decode),
        (
            "notes-measured",
            r.Notes(
                tags=(),
                pinned=False,
                metrics={"eval/ü": 0.5, "worst": float("-inf")},
                evaluating={"acc": NONCE[:16]},
            ),
            r.Notes.encode,
            r.Notes.decode,
        ),
        (
            "request",
            r.RequestRecord(
                id=NONCE,
                who="jo",
                process=PROCESS,
                created="2026-01-02T03:04:05Z",
                reason="before the change",
                tags=("ü",),
            ),
            r.RequestRecord.encode,
            r.RequestRecord.decode,
        ),
        (
            "answer",
            r.AnswerRecord(
                folder=FOLDER, error=None, created="2026-01-02T03:04:05Z", asker=PROCESS
            ),
            r.AnswerRecord.encode,
            r.AnswerRecord.decode,
        ),
        (
            "upload",
            r.UploadRecord(
                remote="s3://bucket/run",
                state="failed",
                nbytes=9,
                changed="2026-01-02T03:04:05Z",
                sent_nbytes=3,
                tries=2,
                error="403",
            ),
            r.UploadRecord.encode,
            r.UploadRecord.decode,
        ),
        (
            "tiers",
            r.TiersRecord(
                remote="s3://bucket/run",
                changed="2026-01-02T03:04:05Z",
                epoch=4,
                folder=FOLDER,
                nbytes=9,
                upload_s=0.5,
                requests=7,
            ),
            r.TiersRecord.encode,
            r.TiersRecord.decode,
        ),
        ("retired", r.Retired(by="keep", reason="old"), r.Retired.encode, r.Retired.decode),
        (
            "thinned",
            r.Thinned(by="keep", component="optimizer", reason="old"),
            r.Thinned.encode,
            r.Thinned.decode,
        ),
        (
            "rejected",
            r.Rejected(by="resume", reasons=("bits", "size")),
            r.Rejected.encode,
            r.Rejected.decode,
        ),
    ]
    found = [
        Document(name, value, encode(value), decode)
        for name, value, encode, decode in sealed_values
    ]
    files = model_files()
    data = files["index.json"]
    found.append(Document("index", _read_index(data, what="i"), data, _read_index, False))
    parted = parted_files()
    for name, file, decode in (
        ("index-root", "index.json", _read_root),
        ("index-part", "index-0001.json", _read_part),
    ):
        found.append(Document(name, decode(parted[file], what="i"), parted[file], decode, False))
    tree = files["model-00000.json"]
    found.append(Document("tree", TREE, tree, objects.decode_tree, False))
    header = files[_MODEL][:4096]
    value = _read_header(header, what="h")
    found.append(Document("header", value, header, _read_header, False))
    return found


def members_of(document: Document) -> dict[str, Any]:
    """The JSON object of a document, without its digest."""
    if document.name == "header":
        return dict(json.loads(document.data[8:]))
    members = dict(json.loads(document.data))
    members.pop("digest", None)
    return members


def wrapped(document: Document, text: bytes) -> bytes:
    """A document of the same kind around any text, digest and all: what an attacker does."""
    if document.name == "header":
        return header_bytes(text)
    return reseal(text) if document.is_sealed else text


def header_bytes(text: str | bytes, length: int = 4088) -> bytes:
    """A safetensors header around any text."""
    raw = text.encode() if isinstance(text, str) else text
    return length.to_bytes(8, "little") + raw.ljust(length)


def reseal(text: str | bytes) -> bytes:
    """Any JSON object, sealed."""
    raw = text.encode() if isinstance(text, str) else text
    body = raw.strip()[:-1] + b",\n"
    return body + b'"digest": "blake3:%s"}\n' % blake3(body).hexdigest().encode()


def mutate(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to three wounds: a flipped bit, a cut, an insertion, a splice."""
    wounded = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(wounded) + 1)
        match rng.choice(("flip", "cut", "remove", "insert", "splice")):
            case "flip" if at < len(wounded):
                wounded[at] ^= 1 << rng.randrange(8)
            case "cut":
                del wounded[at:]
            case "remove":
                del wounded[at : at + rng.randint(1, 8)]
            case "insert":
                wounded[at:at] = rng.choice([rng.randbytes(3), b"[", b"{", b'"', b",", b"9" * 9])
            case _:
                other = rng.randrange(len(wounded) + 1)
                wounded[at:at] = wounded[other : other + rng.randint(1, 64)]
    return bytes(wounded)


def cpu_budget_s(nbytes: int) -> float:
    """Processor time that reading a document may take, whatever it says: linear in its length."""
    return 3 + nbytes * 1e-6


def is_refused(decode: Callable[..., Any], data: bytes) -> bool:
    """Whether decoding raises one of our errors, with `what` in it; other errors pass through."""
    message = ""
    try:
        decode(data, what="the-document")
    except FormatError as err:
        message = str(err)
    else:
        return False
    assert "the-document" in message
    return True
