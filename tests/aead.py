"""What is encrypted under which key and nonce, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.format import suites

_MADE = suites.Cipher.__init__


def noting(note: Callable[[bytes, bytes], None]) -> Callable[..., None]:
    """A `Cipher.__init__` whose ciphers call `note(key, nonce)` before they encrypt anything."""

    def init(cipher: Any, suite: Any, key: bytes) -> None:
        _MADE(cipher, suite, key)
        inner = cipher._aead

        class Noting:
            decrypt_into = staticmethod(inner.decrypt_into)

            @staticmethod
            def encrypt_into(nonce: bytes, data: Any, aad: bytes, out: Any) -> None:
                note(key, nonce)
                inner.encrypt_into(nonce, data, aad, out)

        cipher._aead = Noting

    return init
