"""Encrypted manifests and sidecars, and boxes of wrapped keys (docs/format.md, section 10).

Identifiers and the format say "sealed" for encrypted and authenticated. The plain members of an
encrypted manifest are authenticated with it. Keys are bytes; other modules wrap them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.errors import FormatError, HoldfastError, LimitExceeded, Tampered, UsageError
from holdfast.format import layout, strictjson
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    FileEntry,
    Hex128,
    Manifest,
    Natural,
    Positive,
    decode_register,
)
from holdfast.format.strictjson import SEALED
from holdfast.format.suites import SECRET_NBYTES, Suite, fresh_secret, stored_nbytes, suite_named
from holdfast.store.base import Buffer

MARK = "sealed-mark"
BOX = "keys"
MAX_RECIPIENTS = 64
MAX_MARK_NBYTES = 2 * strictjson.MAX_CHECKED_NBYTES
MAX_STRETCHING_KIB = 16 * 1024 * 1024
"""Memory times passes that all passphrases of a checkpoint may take: some 20 seconds."""

Hex256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Hex = Annotated[str, Meta(pattern=r"\A([0-9a-f]{2})*\Z", max_length=8192)]
_OPENING = b'\n  "sealed": "'


class Visible(msgspec.Struct, frozen=True, kw_only=True):
    """Plain part of an encrypted manifest; `files` has lengths and digests as stored."""

    save_id: Hex128
    label: str
    epoch: Positive
    sequence: Positive
    created: str
    files: Mapping[str, FileEntry]
    suite: str
    commitment: Hex256
    """Commitment to the data key, which no other key matches."""
    salt: Hex256


class FileSeal(msgspec.Struct, frozen=True, kw_only=True):
    """Encryption of one file: its stored name, its plain length and its secret."""

    name: str
    nbytes: Natural
    secret: Hex256

    def __repr__(self) -> str:
        return f"FileSeal({self.name!r})"


class Argon2(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that derive a key from a passphrase (RFC 9106), within a reader's limits."""

    salt: Annotated[str, Meta(pattern=r"\A([0-9a-f]{2}){16,64}\Z")]
    memory_kib: Annotated[int, Meta(ge=8192, le=1024 * 1024)]
    passes: Annotated[int, Meta(ge=1, le=32)]
    lanes: Annotated[int, Meta(ge=1, le=16)]


class Recipient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A data key, wrapped for the one key that `id` names."""

    kind: Literal["secret", "passphrase", "x25519", "service"]
    id: Annotated[str, Meta(min_length=1, max_length=200)]
    wrapped: Annotated[_Hex, Meta(min_length=2)]
    salt: _Hex = ""
    argon2: Argon2 | None = None


class KeyBox(msgspec.Struct, frozen=True, kw_only=True):
    """The data key of one checkpoint, wrapped for each of its recipients."""

    commitment: Hex256
    recipients: Annotated[tuple[Recipient, ...], Meta(min_length=1, max_length=MAX_RECIPIENTS)]

    @property
    def stretching_kib(self) -> int:
        """Cost of trying a passphrase on all recipients: memory times passes, in KiB."""
        each = {r.argon2 for r in self.recipients if r.argon2 is not None}
        return sum(how.memory_kib * how.passes for how in each)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Contents:
    """Decrypted manifest of an encrypted checkpoint, with its data key."""

    document: bytes
    """The encrypted manifest as stored."""
    visible: Visible
    suite: Suite
    data_key: bytes
    manifest: bytes
    files: Mapping[str, FileSeal]
    """Encryption of each file, by its plain name."""
    components: Sequence[str]
    """Names of the components; names of marks hold positions in this list."""


def encode_sealed(
    manifest: Manifest,
    document: bytes,
    files: Mapping[str, FileSeal],
    stored: Mapping[str, FileEntry],
    *,
    suite: Suite,
    data_key: bytes,
) -> Contents:
    """Encrypt a manifest, given as object and encoded; `stored`: file entries by stored name."""
    visible = Visible(
        save_id=manifest.save_id,
        label=manifest.label,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
        created=manifest.created,
        files=stored,
        suite=suite.name,
        commitment=suite.commitment(data_key).hex(),
        salt=fresh_secret().hex(),
    )
    table = msgspec.json.encode(files)
    data = _seal_document(
        SEALED,
        {"requires": [SEALED], **msgspec.to_builtins(visible)},
        table + b"\n" + document,
        suite=suite,
        data_key=data_key,
        max_nbytes=MAX_MANIFEST_NBYTES,
    )
    return Contents(
        document=data,
        visible=visible,
        suite=suite,
        data_key=data_key,
        manifest=document,
        files=files,
        components=(*manifest.components,),
    )


def decode_visible(data: Buffer, *, what: str) -> Visible:
    """Decode the plain part of the encrypted manifest in `data`."""
    members = strictjson.decode_checked(
        data, what=what, kinds=(SEALED,), max_nbytes=MAX_MANIFEST_NBYTES
    )
    visible = strictjson.convert(members, Visible, what=what)
    for name in visible.files:
        if not layout.is_stored_name(name):
            raise FormatError(f"{what}: an encrypted checkpoint has no file named {name[:80]!r}")
    try:
        layout.check_label(visible.label)
    except HoldfastError as error:
        raise FormatError(f"{what}: {str(error)[:300]}") from error
    return visible


def open_sealed(data: bytes, visible: Visible, data_key: bytes, *, what: str) -> Contents:
    """Decrypt and decode the encrypted manifest in `data`."""
    suite = suite_named(visible.suite, what=what)
    plain = _open_document(SEALED, data, visible.salt, suite=suite, data_key=data_key, what=what)
    table, newline, document = plain.partition(b"\n")
    if not newline:
        raise FormatError(f"{what}: it holds no encrypted manifest")
    files = _decode_files(table, visible, what=what)
    manifest = decode_register(document, what=what)
    if not isinstance(manifest, Manifest):
        raise FormatError(f"{what}: its decrypted content is not a manifest")
    for name in ("save_id", "label", "epoch", "sequence", "created"):
        if getattr(manifest, name) != getattr(visible, name):
            raise Tampered(f"{what}: `{name}` differs from the encrypted value")
    return Contents(
        document=data,
        visible=visible,
        suite=suite,
        data_key=data_key,
        manifest=document,
        files=files,
        components=(*manifest.components,),
    )


def encode_mark(contents: Contents, name: str, document: bytes) -> bytes:
    """Encrypt a sidecar of an encrypted checkpoint; `name` is its stored name."""
    return _seal_document(
        MARK,
        {"requires": [SEALED], "name": name, "salt": fresh_secret().hex()},
        document,
        suite=contents.suite,
        data_key=contents.data_key,
        max_nbytes=MAX_MARK_NBYTES,
    )


def decode_mark(contents: Contents, name: str, data: Buffer, *, what: str) -> bytes:
    """Decrypt the sidecar that is stored as `name`."""
    salt = check_mark(data, name, what=what)
    return _open_document(
        MARK, bytes(data), salt, suite=contents.suite, data_key=contents.data_key, what=what
    )


def check_mark(data: Buffer, name: str, *, what: str) -> str:
    """Check an encrypted sidecar as far as possible without a key; return its salt."""
    members = strictjson.decode_checked(data, what=what, kinds=(MARK,), max_nbytes=MAX_MARK_NBYTES)
    if members.get("name") != name:
        raise Tampered(f"{what}: it was encrypted under another name")
    return strictjson.convert(members.get("salt"), Hex256, what=what)


def is_mark(data: bytes) -> bool:
    """Whether a sidecar is encrypted, judged by its kind."""
    return f'"kind": "{MARK}"'.encode() in data[:200]


def encode_box(box: KeyBox) -> bytes:
    """Encode a box of keys."""
    members = {"requires": [SEALED], **msgspec.to_builtins(box)}
    data = strictjson.encode_checked(BOX, members)
    try:
        decode_box(data, what="keys")
    except FormatError as error:
        raise UsageError(f"these keys cannot be used for encryption: {error}") from error
    return data


def decode_box(data: Buffer, *, what: str) -> KeyBox:
    """Decode the box of keys in `data`; raises `FormatError` if there is none."""
    box = strictjson.convert(
        strictjson.decode_checked(data, what=what, kinds=(BOX,)), KeyBox, what=what
    )
    if box.stretching_kib > MAX_STRETCHING_KIB:
        raise LimitExceeded(
            f"{what}: its passphrases need more memory and time than Holdfast allows"
        )
    return box


def _seal_document(
    kind: str,
    members: Mapping[str, Any],
    plain: bytes,
    *,
    suite: Suite,
    data_key: bytes,
    max_nbytes: int,
) -> bytes:
    """Encode a document whose last member is `plain`, encrypted; it authenticates the others."""
    cipher = suite.cipher(data_key, kind, salt=bytes.fromhex(members["salt"]))
    before = strictjson.encode_checked(kind, {**members, "sealed": ""}, max_nbytes=max_nbytes)
    aad = before[: before.index(_OPENING) + len(_OPENING)]
    text = base64.b64encode(cipher.encrypt(plain, aad)).decode()
    return strictjson.encode_checked(kind, {**members, "sealed": text}, max_nbytes=max_nbytes)


def _open_document(
    kind: str, data: bytes, salt: str, *, suite: Suite, data_key: bytes, what: str
) -> bytes:
    start = data.find(_OPENING) + len(_OPENING)
    stop = data.rfind(b'",\n"digest": ')
    if start < len(_OPENING) or stop < start:
        raise FormatError(f"{what}: `sealed` is not its last member")
    try:
        ciphertext = base64.b64decode(data[start:stop], validate=True)
    except binascii.Error as error:
        raise FormatError(f"{what}: `sealed` is not base64") from error
    cipher = suite.cipher(data_key, kind, salt=bytes.fromhex(salt))
    return cipher.decrypt(ciphertext, data[:start], what=what)


def _decode_files(table: bytes, visible: Visible, *, what: str) -> dict[str, FileSeal]:
    value = strictjson.loads(table, what=what, max_nbytes=MAX_MANIFEST_NBYTES)
    files = strictjson.convert(value, dict[str, FileSeal], what=what)
    stored = [seal.name for seal in files.values()]
    if len({*stored}) != len(stored) or {*stored} != {*visible.files}:
        raise FormatError(f"{what}: the encrypted list and the stored files differ")
    for name, seal in files.items():
        layout.check_file_name(name)
        try:
            expected = stored_nbytes(seal.nbytes)
        except LimitExceeded as error:
            raise FormatError(f"{what}: {error}") from error
        if visible.files[seal.name].nbytes != expected:
            raise FormatError(
                f"{what}: {seal.name} has a stored length that differs from its encrypted entry"
            )
    return files


def new_file_seal(number: int, nbytes: int) -> FileSeal:
    """Make the stored name and a new secret for an attempt's file `number`, counted from 0."""
    secret = fresh_secret(SECRET_NBYTES).hex()
    return FileSeal(name=layout.stored_name(number), nbytes=nbytes, secret=secret)
