"""A second reader of sealed checkpoints, written from docs/format.md alone (section 10).

It turns a sealed root into a plain one, which `reader` reads. Nothing of Holdfast is here; of
the library `cryptography` only ciphers, hashes and Argon2id, no key derivation and no HPKE.
"""

from __future__ import annotations

import base64
import hmac as hmac_module
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from tests.golden.reader import file_digest

SEGMENT = 1 << 20
KEY_NBYTES = {"aes-256-gcm": 32, "chacha20-poly1305": 32, "sm4-gcm": 16}
MARK = re.compile(r"(notes|rejected|retired|thinned)[-.].*json$")
Service = Callable[[bytes, str], bytes]


def document(path: Path, kind: str) -> dict[str, Any]:
    """A self-checking document (section 2) of a kind that only sealed checkpoints have."""
    data = path.read_bytes()
    start = data.rindex(b"\n", 0, -1) + 1
    found: dict[str, Any] = json.loads(data)
    assert (list(found)[:2], found["holdfast"], found["kind"]) == (["holdfast", "kind"], 1, kind)
    assert data[start:].decode() == f'"digest": "blake3:{blake3(data[:start]).hexdigest()}"}}\n'
    assert found["requires"] == ["sealed"]
    return found


def hkdf(secret: bytes, salt: bytes, info: bytes, nbytes: int, suite: str = "") -> bytes:
    """RFC 5869, with SM3 for the suite that has it."""
    hash_ = hashes.SM3() if suite == "sm4-gcm" else hashes.SHA256()

    def mac(key: bytes, data: bytes) -> bytes:
        made = hmac.HMAC(key, hash_)
        made.update(data)
        return made.finalize()

    pseudo, block, out = mac(salt or bytes(32), secret), b"", b""
    for number in range(1, nbytes // 32 + 2):
        block = mac(pseudo, block + info + bytes([number]))
        out += block
    return out[:nbytes]


def derive(secret: bytes, purpose: str, suite: str, salt: bytes = b"", nbytes: int = 0) -> bytes:
    info = f"holdfast 1 {purpose} {suite}".encode()
    return hkdf(secret, salt, info, nbytes or KEY_NBYTES[suite], suite)


def decrypt(
    suite: str, key: bytes, data: bytes, aad: bytes = b"", nonce: bytes = bytes(12)
) -> bytes:
    """Of ciphertext and tag."""
    if suite == "aes-256-gcm":
        return AESGCM(key).decrypt(nonce, data, aad)
    if suite == "chacha20-poly1305":
        return ChaCha20Poly1305(key).decrypt(nonce, data, aad)
    opening = Cipher(algorithms.SM4(key), modes.GCM(nonce, data[-16:])).decryptor()
    opening.authenticate_additional_data(aad)
    return opening.update(data[:-16]) + opening.finalize()


def hpke_open(private: bytes, sealed: bytes, info: bytes) -> bytes:
    """RFC 9180, base mode, X25519, HKDF-SHA256, AES-256-GCM, the first message, no aad."""
    enc, ciphertext = sealed[:32], sealed[32:]
    key = X25519PrivateKey.from_private_bytes(private)
    shared = key.exchange(X25519PublicKey.from_public_bytes(enc))
    kem, suite = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x02"

    def extract(of: bytes, salt: bytes, label: bytes, secret: bytes) -> bytes:
        data = b"HPKE-v1" + of + label + secret
        return hmac_module.digest(salt or bytes(32), data, "sha256")

    def expand(of: bytes, pseudo: bytes, label: bytes, info: bytes, nbytes: int) -> bytes:
        data = nbytes.to_bytes(2, "big") + b"HPKE-v1" + of + label + info
        return hmac_module.digest(pseudo, data + b"\x01", "sha256")[:nbytes]

    context = enc + key.public_key().public_bytes_raw()
    pseudo = extract(kem, b"", b"eae_prk", shared)
    secret = expand(kem, pseudo, b"shared_secret", context, 32)
    hashed = extract(suite, b"", b"psk_id_hash", b""), extract(suite, b"", b"info_hash", info)
    schedule = b"\x00" + b"".join(hashed)
    pseudo = extract(suite, secret, b"secret", b"")
    nonce = expand(suite, pseudo, b"base_nonce", schedule, 12)
    return AESGCM(expand(suite, pseudo, b"key", schedule, 32)).decrypt(nonce, ciphertext, b"")


def data_key(recipient: dict[str, Any], given: Any, commitment: bytes, suite: str) -> bytes:
    """What one recipient opens. `given`: secret, passphrase, private key or service."""
    wrapped = bytes.fromhex(recipient["wrapped"])
    if recipient["kind"] == "service":
        return bytes(given(wrapped, commitment.hex()))
    secret, public = given, given
    if recipient["kind"] == "x25519":
        public = X25519PrivateKey.from_private_bytes(given).public_key().public_bytes_raw()
    if recipient["kind"] == "passphrase":
        how = recipient["argon2"]
        secret = public = Argon2id(
            salt=bytes.fromhex(how["salt"]),
            length=32,
            iterations=how["passes"],
            lanes=how["lanes"],
            memory_cost=how["memory_kib"],
        ).derive(given.encode())
    assert recipient["id"] == hkdf(public, b"", b"holdfast 1 key id", 16).hex(), "another's key"
    if recipient["kind"] == "x25519":
        return hpke_open(given, wrapped, b"holdfast 1 data key " + commitment)
    key = derive(secret, "wrap", suite, bytes.fromhex(recipient["salt"]))
    return decrypt(suite, key, wrapped, commitment)


class Unsealer:
    """Opens one sealed checkpoint with one kind of key."""

    def __init__(self, folder: Path, kind: str, given: Any) -> None:
        self.folder = folder
        self.outer = document(folder / "manifest.json", "sealed")
        self.suite = self.outer["suite"]
        boxes = [document(path, "keys") for path in sorted(folder.glob("keys-*.json"))]
        commitment = bytes.fromhex(self.outer["commitment"])
        (recipient,) = [r for r in boxes[-1]["recipients"] if r["kind"] == kind]
        self.key = data_key(recipient, given, commitment, self.suite)
        assert derive(self.key, "commitment", self.suite, nbytes=32) == commitment
        table, _, self.manifest = self._inside("manifest.json", "sealed").partition(b"\n")
        self.files: dict[str, dict[str, Any]] = json.loads(table)
        inner = json.loads(self.manifest)
        for name in ("save_id", "label", "epoch", "sequence", "created"):
            assert inner[name] == self.outer[name]
        assert {entry["name"] for entry in self.files.values()} == self.outer["files"].keys()

    def _inside(self, name: str, kind: str) -> bytes:
        """The plaintext of `sealed`, which vouches for all before it."""
        path = self.folder / name
        outer, data = document(path, kind), path.read_bytes()
        opening = b'\n  "sealed": "'
        start = data.index(opening) + len(opening)
        stop = data.index(b'",\n"digest"', start)
        key = derive(self.key, kind, self.suite, bytes.fromhex(outer["salt"]))
        return decrypt(self.suite, key, base64.b64decode(data[start:stop]), data[:start])

    def _file(self, entry: dict[str, Any]) -> bytes:
        data, nbytes = (self.folder / entry["name"]).read_bytes(), entry["nbytes"]
        parts = [data[i : i + (8 << 20)] for i in range(0, len(data), 8 << 20)]
        digest = file_digest(len(data), b"".join(blake3(part).digest() for part in parts))
        assert self.outer["files"][entry["name"]] == {"nbytes": len(data), "digest": digest}
        tags = [data[i : i + 16] for i in range(nbytes, len(data), 16)]
        key = derive(bytes.fromhex(entry["secret"]), "file", self.suite)
        count = -(-nbytes // SEGMENT)
        assert len(tags) == count + 1
        closing = count.to_bytes(11, "big") + b"\x01"
        length = nbytes.to_bytes(8, "little")
        assert decrypt(self.suite, key, tags[count], length, closing) == b""
        pieces = (data[i * SEGMENT : min((i + 1) * SEGMENT, nbytes)] for i in range(count))
        return b"".join(
            decrypt(self.suite, key, piece + tags[i], b"", i.to_bytes(11, "big") + b"\x00")
            for i, piece in enumerate(pieces)
        )

    def write(self, folder: Path) -> None:
        """The same checkpoint, plain."""
        folder.mkdir()
        (folder / "manifest.json").write_bytes(self.manifest)
        for name, entry in self.files.items():
            if (self.folder / entry["name"]).exists():  # what was dropped is for `reader` to judge
                (folder / name).write_bytes(self._file(entry))
        components = list(json.loads(self.manifest)["components"])
        for path in self.folder.iterdir():
            if MARK.match(path.name):
                assert document(path, "sealed-mark")["name"] == path.name
                place = re.match(r"thinned-c(\d+)-", path.name)
                plain = f"thinned-{components[int(place[1])]}-" if place else ""
                name = path.name.replace(place[0], plain) if place else path.name
                (folder / name).write_bytes(self._inside(path.name, "sealed-mark"))


def unseal_root(root: Path, plain: Path, kind: str, given: Any) -> Path:
    """A plain copy of a sealed root."""
    shutil.copytree(root / "writers", plain / "writers")
    for folder in root.iterdir():
        if (folder / "manifest.json").exists():
            Unsealer(folder, kind, given).write(plain / folder.name)
    return plain
