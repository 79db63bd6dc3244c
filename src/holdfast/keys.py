"""Encryption keys: where they come from, and how they wrap the data key of a checkpoint.

Each checkpoint has a data key of its own, wrapped for each user's key: these bytes are on disk
(docs/format.md, section 10; tests/golden/test_sealed.py). No `repr` or error shows a secret.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from holdfast.errors import KeyUnavailable, SealError, Tampered, UsageError, WrongKey
from holdfast.format.envelope import MAX_RECIPIENTS, Argon2, KeyBox, Recipient
from holdfast.format.suites import (
    SECRET_NBYTES,
    Suite,
    SuiteName,
    cryptography_part,
    fresh_secret,
    hkdf,
)

COMMAND_TIMEOUT_S = 60.0
"""Longest time that a command may take to print keys, in seconds."""
MIN_PASSPHRASE_LENGTH = 8
_TEXT = re.compile(r"holdfast-(secret|private|public)-1-([0-9a-f]{64})", re.ASCII)
_PASSPHRASE = "passphrase:"
# RFC 9106, section 4, the second recommended option.
_MEMORY_KIB, _PASSES, _LANES = 64 * 1024, 3, 4

Wrap = Callable[[bytes, Mapping[str, str]], bytes]


class Key(Protocol):
    """A user's key: wraps data keys of checkpoints, and unwraps them again."""

    @property
    def name(self) -> str:
        """Kind and id of the key, for messages; reveals no secret."""
        ...

    def wrap(self, data_key: bytes, suite: Suite) -> Recipient:
        """Encrypt the data key so that only this key can decrypt it.

        Raises:
            KeyUnavailable: the service that should do it refused.
        """
        ...

    def unwrap(self, recipient: Recipient, commitment: bytes, suite: Suite) -> bytes | None:
        """Decrypt a wrapped data key; None when it was wrapped for another key.

        Raises:
            Tampered: it was wrapped for this key, and was changed since.
            KeyUnavailable: the service that should do it refused.
        """
        ...


class SecretKey:
    """A symmetric key of 32 random bytes, which both encrypts and decrypts."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_NBYTES:
            raise UsageError(f"a secret key has {SECRET_NBYTES} bytes, not {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def text(self) -> str:
        """The secret in the notation of key files."""
        return f"holdfast-secret-1-{self._secret.hex()}"

    @property
    def name(self) -> str:
        return f"secret key {_derive_key_id(self._secret)}"

    def wrap(self, data_key: bytes, suite: Suite) -> Recipient:
        salt, wrapped = _wrap_with_secret(self._secret, data_key, suite)
        return Recipient(kind="secret", id=_derive_key_id(self._secret), wrapped=wrapped, salt=salt)

    def unwrap(self, recipient: Recipient, commitment: bytes, suite: Suite) -> bytes | None:
        if (recipient.kind, recipient.id) != ("secret", _derive_key_id(self._secret)):
            return None
        return _unwrap_with_secret(self._secret, recipient, commitment, suite)


class Passphrase:
    """A key derived from a passphrase with Argon2id, which makes guessing slow."""

    def __init__(self, text: str) -> None:
        if len(text) < MIN_PASSPHRASE_LENGTH:
            raise UsageError(f"a passphrase has at least {MIN_PASSPHRASE_LENGTH} characters")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("a passphrase is text that can be written as UTF-8") from None
        self._text = text
        self._ours: Argon2 | None = None
        self._known: dict[Argon2, bytes] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        return "a passphrase"

    def wrap(self, data_key: bytes, suite: Suite) -> Recipient:
        """Encrypt the data key with the derived key; one salt serves all saves of a process."""
        with self._lock:
            if self._ours is None:
                self._ours = Argon2(
                    salt=fresh_secret(16).hex(),
                    memory_kib=_MEMORY_KIB,
                    passes=_PASSES,
                    lanes=_LANES,
                )
        secret = self._derived_key(self._ours)
        salt, wrapped = _wrap_with_secret(secret, data_key, suite)
        key_id = _derive_key_id(secret)
        return Recipient(
            kind="passphrase", id=key_id, wrapped=wrapped, salt=salt, argon2=self._ours
        )

    def unwrap(self, recipient: Recipient, commitment: bytes, suite: Suite) -> bytes | None:
        if recipient.kind != "passphrase" or recipient.argon2 is None:
            return None
        secret = self._derived_key(recipient.argon2)
        if recipient.id != _derive_key_id(secret):
            return None
        return _unwrap_with_secret(secret, recipient, commitment, suite)

    def _derived_key(self, how: Argon2) -> bytes:
        with self._lock:
            if how not in self._known:
                argon2 = cryptography_part("hazmat.primitives.kdf.argon2")
                stretch = argon2.Argon2id(
                    salt=bytes.fromhex(how.salt),
                    length=SECRET_NBYTES,
                    iterations=how.passes,
                    lanes=how.lanes,
                    memory_cost=how.memory_kib,
                )
                self._known[how] = stretch.derive(self._text.encode())
            return self._known[how]


class PublicKey:
    """An X25519 public key: encrypts for the owner of the private key, and decrypts nothing.

    Anybody who knows it can write checkpoints that the private key decrypts, so a checkpoint does
    not prove who wrote it.
    """

    def __init__(self, public: bytes) -> None:
        x25519 = cryptography_part("hazmat.primitives.asymmetric.x25519")
        self._key = x25519.X25519PublicKey.from_public_bytes(public)
        self._public = public

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def text(self) -> str:
        """The public key in the notation of key files."""
        return f"holdfast-public-1-{self._public.hex()}"

    @property
    def name(self) -> str:
        return f"public key {self.key_id}"

    @property
    def key_id(self) -> str:
        """Id of the key in checkpoints: a hash, from which the key cannot be computed."""
        return _derive_key_id(self._public)

    def wrap(self, data_key: bytes, suite: Suite) -> Recipient:
        info = _hpke_info(suite.commitment(data_key))
        wrapped: bytes = _hpke().encrypt(data_key, self._key, info=info)
        return Recipient(kind="x25519", id=self.key_id, wrapped=wrapped.hex())

    def unwrap(self, recipient: Recipient, commitment: bytes, suite: Suite) -> bytes | None:
        """Return None: only the private key can unwrap."""
        return None


class PrivateKey:
    """An X25519 private key: decrypts what was encrypted for its public key."""

    def __init__(self, private: bytes) -> None:
        x25519 = cryptography_part("hazmat.primitives.asymmetric.x25519")
        self._private = private
        self._key = x25519.X25519PrivateKey.from_private_bytes(private)
        self.public = PublicKey(self._key.public_key().public_bytes_raw())
        """The public half, for processes that only encrypt."""

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def text(self) -> str:
        """The secret in the notation of key files."""
        return f"holdfast-private-1-{self._private.hex()}"

    @property
    def name(self) -> str:
        return f"private key {self.public.key_id}"

    def wrap(self, data_key: bytes, suite: Suite) -> Recipient:
        return self.public.wrap(data_key, suite)

    def unwrap(self, recipient: Recipient, commitment: bytes, suite: Suite) -> bytes | None:
        if (recipient.kind, recipient.id) != ("x25519", self.public.key_id):
            return None
        invalid = cryptography_part("exceptions").InvalidTag
        try:
            data_key: bytes = _hpke().decrypt(
                bytes.fromhex(recipient.wrapped), self._key, info=_hpke_info(commitment)
            )
        except (invalid, ValueError) as error:
            raise Tampered(f"the data key for {self.name} is not what was written") from error
        return _check_data_key(data_key, commitment, suite, self.name)


class ServiceKey:
    """A key held by a key management service, which is called through two functions of the user.

    `wrap(data_key, context)` and `unwrap(wrapped, context)` take and give bytes and raise when the
    service refuses. `context` says what the data key is for, and is the same at both calls. They
    are called from a thread of the save, once a checkpoint, and must have their own time limit.
    With several ranks the first save or load calls one on each rank, in the caller's thread.

    With `unwrap=None` this process can only wrap, and decrypts nothing with this key; preflight
    does not test such a key. It tests every other one.
    """

    def __init__(self, name: str, wrap: Wrap, unwrap: Wrap | None) -> None:
        if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable():
            raise UsageError(f"name={name!r}: printable text, 1 to 200 characters")
        self._name = name
        self._wrap = wrap
        self._unwrap = unwrap

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        return f"service {self._name}" + (" (to wrap only)" if self._unwrap is None else "")

    def wrap(self, data_key: bytes, suite: Suite) -> Recipient:
        wrapped = self._call_service(self._wrap, data_key, suite.commitment(data_key))
        return Recipient(kind="service", id=self._name, wrapped=wrapped.hex())

    def unwrap(self, recipient: Recipient, commitment: bytes, suite: Suite) -> bytes | None:
        if self._unwrap is None or (recipient.kind, recipient.id) != ("service", self._name):
            return None
        data_key = self._call_service(self._unwrap, bytes.fromhex(recipient.wrapped), commitment)
        return _check_data_key(data_key, commitment, suite, self.name)

    def _call_service(self, function: Wrap, data: bytes, commitment: bytes) -> bytes:
        context = {"purpose": "holdfast 1 data key", "commitment": commitment.hex()}
        try:
            answer = function(data, context)
        except SealError:
            raise
        except Exception as error:
            raise KeyUnavailable(f"{self.name} refused: {error}") from error
        if not isinstance(answer, bytes) or not answer:
            raise KeyUnavailable(f"{self.name} returned {type(answer).__name__} instead of bytes")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Encryption:
    """Options of encryption: keys to write with, keys to read with, and the cipher.

    Raises:
        UsageError: a field is wrong.
    """

    keys: Key | Sequence[Key]
    """Keys that checkpoints are encrypted for: each of them can decrypt what is written. All of
    them are tried when something is read."""
    also_read: Key | Sequence[Key] = ()
    """Further keys that are tried when something is read, such as those before a rotation."""
    suite: SuiteName = "aes-256-gcm"
    """Cipher for writing; checkpoints that are read name their own."""
    accept_plain: bool = False
    """Whether unencrypted checkpoints are read, too, as after encryption was switched on in the
    middle of a run. Anybody who can write to the store can then plant one."""

    def __post_init__(self) -> None:
        if self.suite not in get_args(SuiteName):
            raise UsageError(f"suite={self.suite!r}: choose from {get_args(SuiteName)}")
        for name, given in (("keys", self.keys), ("also_read", self.also_read)):
            for key in _convert_to_tuple(given):
                if not hasattr(key, "unwrap"):
                    raise UsageError(f"{name}: {type(key).__name__} is not a key of holdfast.keys")
        if not isinstance(self.accept_plain, bool):
            raise UsageError(f"accept_plain={self.accept_plain!r} must be True or False")
        if not _convert_to_tuple(self.keys):
            raise UsageError("keys: at least one is needed")
        if len(_convert_to_tuple(self.keys)) > MAX_RECIPIENTS:
            raise UsageError(f"keys: at most {MAX_RECIPIENTS}")
        Suite(name=self.suite).cipher(bytes(SECRET_NBYTES), "check")

    @property
    def sealing(self) -> tuple[Key, ...]:
        """Keys that new checkpoints are encrypted for."""
        return _convert_to_tuple(self.keys)

    @property
    def opening(self) -> tuple[Key, ...]:
        """Keys that are tried for decryption when a checkpoint is read."""
        return (*_convert_to_tuple(self.keys), *_convert_to_tuple(self.also_read))


def wrapped(keys: Iterable[Key], data_key: bytes, suite: Suite) -> KeyBox:
    """Encrypt a data key for each of the keys; return the box to store."""
    recipients = tuple(key.wrap(data_key, suite) for key in keys)
    return KeyBox(commitment=suite.commitment(data_key).hex(), recipients=recipients)


def try_key(key: Key, suite: Suite) -> bool:
    """Wrap a random data key and unwrap it again; False if the key can only wrap.

    Raises:
        KeyUnavailable: a service refuses one of the two.
        Tampered: what comes back is not what was wrapped.
    """
    data_key = fresh_secret()
    opened = key.unwrap(key.wrap(data_key, suite), suite.commitment(data_key), suite)
    return opened is not None


def unwrapped(keys: Sequence[Key], boxes: Sequence[KeyBox], suite: Suite, *, what: str) -> bytes:
    """Unwrap the data key with the first key that fits a recipient in any of the boxes.

    Raises:
        WrongKey: the boxes are for other keys.
        Tampered: the data key wrapped for one of the keys was changed.
        KeyUnavailable: a service refused.
    """
    failures: list[Tampered | KeyUnavailable] = []
    for box in boxes:
        commitment = bytes.fromhex(box.commitment)
        for recipient in box.recipients:
            for key in keys:
                try:
                    data_key = key.unwrap(recipient, commitment, suite)
                except (Tampered, KeyUnavailable) as error:
                    failures.append(error)
                    continue
                if data_key is not None:
                    return data_key
    # A service that does not answer comes first: the data key wrapped for it may be intact.
    for failure in sorted(failures, key=lambda error: isinstance(error, Tampered)):
        raise type(failure)(f"{what}: {failure}") from failure
    recipients = dict.fromkeys(f"{r.kind} {r.id}" for box in boxes for r in box.recipients)
    raise WrongKey(
        f"{what}: encrypted for {', '.join(recipients)}; the keys given are "
        f"{', '.join(key.name for key in keys)}"
    )


def generate(kind: Literal["secret", "private"] = "secret") -> SecretKey | PrivateKey:
    """Generate a key: a secret one, or a private one whose `public` half only encrypts."""
    if kind == "private":
        return PrivateKey(fresh_secret())
    if kind == "secret":
        return SecretKey(fresh_secret())
    raise UsageError(f"kind={kind!r}: must be 'secret' or 'private'")


def from_text(text: str, *, what: str = "the text") -> tuple[Key, ...]:
    """Parse the keys in a text: one on each line; empty lines and lines with # are skipped.

    Raises:
        KeyUnavailable: the text has no key, or a line is not a key.
    """
    lines = [line.strip() for line in text.splitlines()]
    keys = [_parse_key(line, what) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise KeyUnavailable(f"{what}: it contains no key")
    return tuple(keys)


def from_file(path: str | os.PathLike[str]) -> tuple[Key, ...]:
    """Read the keys in a file, in the notation of `from_text`.

    Raises:
        KeyUnavailable: the file cannot be read, or holds no key.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise KeyUnavailable(f"key file {os.fspath(path)}: {error.strerror}") from error
    return from_text(_decode_text(data, f"key file {os.fspath(path)}"), what=f"key file {path}")


def from_environment(name: str) -> tuple[Key, ...]:
    """Read the keys in an environment variable, in the notation of `from_text`.

    Raises:
        KeyUnavailable: the variable is not set, or holds no key.
    """
    text = os.environ.get(name)
    if text is None:
        raise KeyUnavailable(f"environment variable {name}: it is not set")
    return from_text(text, what=f"environment variable {name}")


def from_command(command: str | Sequence[str]) -> tuple[Key, ...]:
    """Run a command, without a shell, and parse the keys that it prints as `from_text` does.

    Raises:
        KeyUnavailable: the command fails, takes longer than a minute, or prints no key.
    """
    try:
        arguments = shlex.split(command) if isinstance(command, str) else [*command]
    except ValueError as error:
        raise UsageError(f"command: {error}") from None
    if not arguments:
        raise UsageError("command: it is empty")
    what = f"key command {arguments[0]}"
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise KeyUnavailable(f"{what}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise KeyUnavailable(f"{what}: not done after {COMMAND_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise KeyUnavailable(f"{what}: it ended with status {done.returncode}")
    return from_text(_decode_text(done.stdout, what), what=what)


def _parse_key(line: str, what: str) -> Key:
    if line.startswith(_PASSPHRASE):
        return Passphrase(line.removeprefix(_PASSPHRASE).strip())
    match = _TEXT.fullmatch(line)
    if match is None:
        # Not the line itself: it may be a secret with a typing error.
        raise KeyUnavailable(
            f"{what}: a line of {len(line)} characters is not a key; a key begins with "
            "holdfast-secret-1-, holdfast-private-1-, holdfast-public-1- or passphrase:"
        )
    made: dict[str, Any] = {"secret": SecretKey, "private": PrivateKey, "public": PublicKey}
    key: Key = made[match[1]](bytes.fromhex(match[2]))
    return key


def _decode_text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise KeyUnavailable(f"{what}: it is not text") from None


def _convert_to_tuple(given: Key | Sequence[Key]) -> tuple[Key, ...]:
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _derive_key_id(secret: bytes) -> str:
    return hkdf(secret, salt=b"", info=b"holdfast 1 key id", nbytes=16).hex()


def _wrap_with_secret(secret: bytes, data_key: bytes, suite: Suite) -> tuple[str, str]:
    """Encrypt a data key with a secret; return (salt, wrapped), both in hex."""
    salt = fresh_secret()
    cipher = suite.cipher(secret, "wrap", salt=salt)
    return salt.hex(), cipher.encrypt(data_key, suite.commitment(data_key)).hex()


def _unwrap_with_secret(
    secret: bytes, recipient: Recipient, commitment: bytes, suite: Suite
) -> bytes:
    cipher = suite.cipher(secret, "wrap", salt=bytes.fromhex(recipient.salt))
    data = bytes.fromhex(recipient.wrapped)
    data_key = cipher.decrypt(data, commitment, what="the data key")
    return _check_data_key(data_key, commitment, suite, "the key")


def _check_data_key(data_key: bytes, commitment: bytes, suite: Suite, name: str) -> bytes:
    """Return an unwrapped data key, if it matches the commitment of the checkpoint."""
    if len(data_key) != SECRET_NBYTES or suite.commitment(data_key) != commitment:
        raise Tampered(f"{name} decrypts to bytes that are not the data key of this checkpoint")
    return data_key


def _hpke() -> Any:
    """Create the HPKE suite (RFC 9180) in base mode: X25519, HKDF-SHA256, AES-256-GCM."""
    hpke = cryptography_part("hazmat.primitives.hpke")
    return hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


def _hpke_info(commitment: bytes) -> bytes:
    return b"holdfast 1 data key " + commitment
