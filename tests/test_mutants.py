"""The tests of stores and of sealing are alive: with a line of ours taken out, one of them fails.

As `format/test_mutants.py`, for the promises R25 and R31 to R37; mutants for R24 are in
`stores/test_commits.py`, for R26 in `maintenance/test_gc_uploads.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import test_keys
from tests.encryption import test_store
from tests.format import test_envelope, test_segments, test_suites
from tests.maintenance import test_preflight, test_rotate_keys

from holdfast import errors, keys
from holdfast.encryption import store
from holdfast.format import envelope, layout, suites
from holdfast.format.suites import Cipher, FileCipher
from holdfast.maintenance import preflight, rotate_keys
from holdfast.results import KnownCommit

_REAL_HKDF = suites.hkdf
_REAL_PUT = rotate_keys.put_box


def nothing(*arguments: Any, **options: Any) -> tuple[()]:
    """A check that finds nothing wrong."""
    return ()


def without_moment(secret: bytes, **options: Any) -> bytes:
    """Key derivation into which neither clock nor counter go."""
    return _REAL_HKDF(secret, **{**options, "info": b""})


def without_info(secret: bytes, **options: Any) -> bytes:
    """Key derivation in which all purposes are one."""
    return _REAL_HKDF(secret, **{**options, "info": options["info"][:10]})


def always_aes(name: str, key: bytes) -> Any:
    """One cipher under every name."""
    return suites.cryptography_part("hazmat.primitives.ciphers.aead").AESGCM(key)


def leaves_what_it_found(
    self: Cipher, data: Any, out: memoryview, aad: bytes = b"", *, nonce: bytes, what: str
) -> None:
    """Decryption that leaves in memory what nobody vouches for."""
    from cryptography.exceptions import InvalidTag

    try:
        self._aead.decrypt_into(nonce, data, aad, out)
    except (InvalidTag, ValueError) as error:
        raise errors.Tampered(what) from error


def any_key(
    self: keys.SecretKey, recipient: Any, commitment: bytes, suite: suites.Suite
) -> bytes | None:
    """A key that takes what is for another for its own, and changed."""
    return keys._unwrap_with_secret(self._secret, recipient, commitment, suite)


def seals_again(self: FileCipher, start: int, plain: Any, out: memoryview) -> None:
    """A segment is sealed as often as somebody asks."""
    self._tags.clear()
    self._cipher.encrypt_into(plain, out, nonce=suites._nonce(0))


def old_ones_first(store: Any, folder: str, newest: int, box: Any) -> int:
    """The old box goes before the new one is there."""
    store.delete(f"{folder}/{layout.keys_name(newest)}")
    return _REAL_PUT(store, folder, newest, box)


def in_clear(contents: Any, name: str, document: bytes) -> bytes:
    """A mark that is stored as it is."""
    return document


def without_tags(
    self: Cipher, data: Any, out: memoryview, aad: bytes = b"", *, nonce: bytes, what: str
) -> None:
    """Decryption that looks at no tag: in this mode encrypting once more is decrypting."""
    sealed = bytes(data)[: -suites.TAG_NBYTES]
    out[:] = self._aead.encrypt(nonce, sealed, aad)[: -suites.TAG_NBYTES]


def any_name(data: Any, name: str, *, what: str) -> str:
    """A mark that counts under every name."""
    members = envelope.strictjson.decode_checked(
        data, what=what, kinds=(envelope.MARK,), max_nbytes=envelope.MAX_MARK_NBYTES
    )
    return str(members["salt"])


def changed_bytes() -> None:
    test_suites.test_what_was_changed_is_not_opened_and_leaves_nothing_behind("aes-256-gcm")


def equal_randomness() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_suites.test_secrets_differ_though_the_random_bytes_are_the_same(patch)


def nonces() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_store.test_no_key_meets_a_nonce_twice(patch)


def words() -> None:
    with tempfile.TemporaryDirectory() as folder:
        test_store.test_no_word_and_no_weight_is_stored_in_clear(Path(folder))


RACES = test_preflight.test_a_store_whose_puts_are_not_atomic_is_found_out
ONE_KEY = partial(test_keys.test_a_key_opens_what_was_wrapped_for_it_and_nothing_else, "secret")
PURPOSES = partial(test_suites.test_keys_of_other_purposes_suites_and_salts_differ, "aes-256-gcm")
CHACHA = partial(
    test_suites.test_the_ciphers_are_those_that_were_published,
    "chacha20-poly1305",
    test_suites.CHACHA,
)
OLD_KEYS = test_rotate_keys.test_old_keys_go_only_when_the_new_ones_open
STOPS = partial(test_rotate_keys.test_a_stop_at_any_operation_leaves_every_checkpoint_readable, 1)
SEEN = test_store.test_what_is_older_than_what_was_seen_is_refused

MUTANTS: list[tuple[str, Any, str, Any, Callable[[], None]]] = [
    ("R25: puts at once", preflight, "_race_refusals", nothing, RACES),
    ("R31: whose key it is", keys.SecretKey, "unwrap", any_key, ONE_KEY),
    ("R31: what is left", Cipher, "decrypt_into", leaves_what_it_found, changed_bytes),
    ("R32: tags", Cipher, "decrypt_into", without_tags, changed_bytes),
    (
        "R32: names of marks",
        envelope,
        "check_mark",
        any_name,
        test_envelope.test_a_mark_is_that_of_its_checkpoint_and_its_name,
    ),
    (
        "R33: segments",
        FileCipher,
        "seal",
        seals_again,
        test_segments.test_a_segment_is_not_sealed_twice_nor_in_parts,
    ),
    ("R33: nonces", suites, "_nonce", lambda *a, **o: bytes(12), nonces),
    ("R33: equal randomness", suites, "hkdf", without_moment, equal_randomness),
    ("R34: marks", store, "encode_mark", in_clear, words),
    ("R35: ciphers", suites, "_aead", always_aes, CHACHA),
    ("R35: derivation", suites, "hkdf", without_info, PURPOSES),
    (
        "R36: what a service gives",
        keys,
        "_fitting",
        lambda data_key, *a: data_key,
        partial(OLD_KEYS, b"1" * 32),
    ),
    (
        "R36: a refusal",
        rotate_keys,
        "_expect_opens",
        nothing,
        partial(OLD_KEYS, ConnectionError("no")),
    ),
    ("R36: the order", rotate_keys, "put_box", old_ones_first, STOPS),
    ("R37: what was seen", KnownCommit, "expect_no_rollback", nothing, SEEN),
]


SLOW = {"R36: the order"}
"""Mutants that are caught only after seconds."""


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "check"),
    [
        pytest.param(*mutant, id=what, marks=pytest.mark.full if what in SLOW else ())
        for what, *mutant in MUTANTS
    ],
)
def test_a_check_fails_when_its_code_is_taken_out(
    owner: Any,
    name: str,
    mutant: Any,
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hasattr(owner, name)
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, pytest.fail.Exception, errors.HoldfastError)):
        check()
