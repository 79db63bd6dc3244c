"""Ciphers and key derivation against published vectors, and what a failure leaves."""

from __future__ import annotations

import os

import pytest

from holdfast.errors import Tampered, UnsupportedVersion
from holdfast.format import suites
from holdfast.format.suites import Cipher, Suite, fresh_secret, hkdf, suite_named

NAMES = ("aes-256-gcm", "chacha20-poly1305", "sm4-gcm")
_LONG_KEY = "feffe9928665731c6d6a8f9467308308" * 2
_LONG_TEXT = (
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
)
_LONG_SEALED = (
    "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
    "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad"
)
_LONG_AAD = "feedfacedeadbeeffeedfacedeadbeefabaddad2"

# Key, nonce, associated data, plaintext, ciphertext, tag.
GCM = {
    # NIST CAVP, gcmEncryptExtIV256.rsp, [PTlen = 0, AADlen = 0], Count = 0.
    "nist-cavp": (
        "b52c505a37d78eda5dd34f20c22540ea1b58963cf8e5bf8ffa85f9f2492505b4",
        "516c33929df5a3284ff463d7",
        "",
        "",
        "",
        "bdc1ac884d332457a1d2664f168c76f0",
    ),
    # McGrew and Viega, the submission of GCM to NIST, appendix B, test cases 13 to 16.
    "13": ("00" * 32, "00" * 12, "", "", "", "530f8afbc74536b9a963b4f1c4cb738b"),
    "14": (
        "00" * 32,
        "00" * 12,
        "",
        "00" * 16,
        "cea7403d4d606b6e074ec5d3baf39d18",
        "d0d1c8a799996bf0265b98b5d48ab919",
    ),
    "15": (
        _LONG_KEY,
        "cafebabefacedbaddecaf888",
        "",
        _LONG_TEXT,
        _LONG_SEALED,
        "b094dac5d93471bdec1a502270e3cc6c",
    ),
    "16": (
        _LONG_KEY,
        "cafebabefacedbaddecaf888",
        _LONG_AAD,
        _LONG_TEXT[:120],
        _LONG_SEALED[:120],
        "76fc6ece0f4e1768cddf8853bb2d551b",
    ),
}
# RFC 8998, appendix A.1.
SM4 = (
    "0123456789abcdeffedcba9876543210",
    "00001234567800000000abcd",
    _LONG_AAD,
    "".join(letter * 16 for letter in "abcdefea"),
    "17f399f08c67d5ee19d0dc9969c4bb7d5fd46fd3756489069157b282bb200735"
    "d82710ca5c22f0ccfa7cbf93d496ac15a56834cbcf98c397b4024a2691233b8d",
    "83de3541e4c2b58177e065a9bf7b62ec",
)
# RFC 8439, section 2.8.2.
CHACHA = (
    bytes(range(0x80, 0xA0)).hex(),
    "070000004041424344454647",
    "50515253c0c1c2c3c4c5c6c7",
    (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    ).hex(),
    "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6"
    "3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36"
    "92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
    "3ff4def08e4b7a9de576d26586cec64b6116",
    "1ae10b594f09e26a7e902ecbd0600691",
)
VECTORS = [
    *(pytest.param("aes-256-gcm", vector, id=f"gcm-{name}") for name, vector in GCM.items()),
    pytest.param("sm4-gcm", SM4, id="rfc8998"),
    pytest.param("chacha20-poly1305", CHACHA, id="rfc8439"),
]

# RFC 5869, appendix A.1 to A.3: secret, salt, info, result.
HKDF = (
    (
        "0b" * 22,
        bytes(range(13)).hex(),
        bytes(range(0xF0, 0xFA)).hex(),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
        "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
        "cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22,
        "",
        "",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
)


@pytest.mark.parametrize(("name", "vector"), VECTORS)
def test_the_ciphers_are_those_that_were_published(name: str, vector: tuple[str, ...]) -> None:
    """R35: NIST GCM, RFC 8998 and RFC 8439, sealed and opened."""
    key, nonce, aad, plain, ciphertext, tag = map(bytes.fromhex, vector)
    cipher = Cipher(suite_named(name, what="test"), key)
    assert cipher.encrypt(plain, aad, nonce=nonce) == ciphertext + tag
    assert cipher.decrypt(ciphertext + tag, aad, nonce=nonce, what="test") == plain


@pytest.mark.parametrize("vector", HKDF)
def test_keys_are_derived_as_rfc_5869_says(vector: tuple[str, ...]) -> None:
    """R35: the vectors for SHA-256."""
    secret, salt, info, expected = map(bytes.fromhex, vector)
    assert hkdf(secret, salt=salt, info=info, nbytes=len(expected)) == expected


def test_sm3_is_the_hash_of_its_suite_only() -> None:
    """HMAC with SM3, put together by hand, gives what the suite derives."""
    import hashlib
    import hmac

    if "sm3" not in hashlib.algorithms_available:
        pytest.skip("this Python has no SM3 to compare with")
    pseudo = hmac.new(bytes(32), b"k" * 32, "sm3").digest()
    expected = hmac.new(pseudo, b"holdfast 1 file sm4-gcm\x01", "sm3").digest()
    assert Suite(name="sm4-gcm").derive(b"k" * 32, "file") == expected
    assert Suite(name="aes-256-gcm").derive(b"k" * 32, "file") != expected


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_other_purposes_suites_and_salts_differ(name: str) -> None:
    secret = os.urandom(32)
    made = {
        suite_named(other, what="test").derive(secret, purpose, salt=salt, nbytes=16)
        for other in NAMES
        for purpose in ("file", "sealed", "wrap", "commitment")
        for salt in (b"", b"1")
    }
    assert len(made) == 3 * 4 * 2


@pytest.mark.parametrize("name", NAMES)
def test_what_was_changed_is_not_opened_and_leaves_nothing_behind(name: str) -> None:
    """R32: ciphertext, tag, nonce, associated data and key; R31: zeros are in the memory."""
    suite = suite_named(name, what="test")
    cipher = suite.cipher(bytes(32), "file")
    plain, nonce = b"canary" * 100, bytes(range(12))
    sealed = cipher.encrypt(plain, b"aad", nonce=nonce)
    for position in (0, 300, len(sealed) - 17, len(sealed) - 16, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[position] ^= 1
        out = bytearray(b"\xff" * len(plain))
        with pytest.raises(Tampered, match="a file"):
            cipher.decrypt_into(changed, memoryview(out), b"aad", nonce=nonce, what="a file")
        assert not any(out)
    other = suite.cipher(b"\1" * 32, "file")
    for attempt in (
        lambda: cipher.decrypt(sealed, b"aaD", nonce=nonce, what="x"),
        lambda: cipher.decrypt(sealed, b"aad", nonce=bytes(12), what="x"),
        lambda: cipher.decrypt(sealed[:-1], b"aad", nonce=nonce, what="x"),
        lambda: cipher.decrypt(sealed[:7], b"aad", nonce=nonce, what="x"),
        lambda: other.decrypt(sealed, b"aad", nonce=nonce, what="x"),
    ):
        with pytest.raises(Tampered):
            attempt()


def test_secrets_differ_though_the_random_bytes_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R33: two copies of a virtual machine draw the same bytes."""
    monkeypatch.setattr(suites.os, "urandom", lambda n: b"\7" * n)
    assert len({fresh_secret() for _ in range(10_000)}) == 10_000


def test_a_suite_of_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersion, match="aes-512"):
        suite_named("aes-512", what="test")
