"""Golden sealed roots: what was sealed once is opened for ever, by us and by a second reader."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.golden import make, reader
from tests.golden.make_sealed import PASSPHRASE, PRIVATE, SEALED, SECRET, SUITES, keys, turned
from tests.golden.unsealer import hpke_open, unseal_root

from holdfast.encryption.store import SealedStore
from holdfast.keys import Encryption
from holdfast.maintenance.verify import verify_root
from holdfast.manager import CheckpointManager
from holdfast.store.local import LocalStore

GIVEN: dict[str, Any] = {
    "secret": SECRET,
    "passphrase": PASSPHRASE,
    "x25519": PRIVATE,
    "service": turned,
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("suite", SUITES)
def test_a_second_reader_opens_what_was_sealed(suite: str, kind: str, tmp_path: Path) -> None:
    """R35: with nothing but the page on the format, for each suite and each kind of key."""
    plain = unseal_root(SEALED / suite, tmp_path, kind, GIVEN[kind])
    _, (older, newer) = reader.read_root(plain)
    assert older.dropped == {"shuffle"}
    assert newer.marks["notes-0001.json"]["tags"] == ["later"]
    assert newer.manifest["metrics"] == {"loss": 0.25}
    run = make.Run()
    for checkpoint, step in ((older, 3), (newer, 4)):
        run.at(step)
        for name, tensor in run.model.state_dict().items():
            assert np.array_equal(checkpoint.arrays["model"][name], tensor.numpy())
        assert checkpoint.trees["counters"]["step"] == step


@pytest.mark.parametrize("key", range(4))
@pytest.mark.parametrize("suite", SUITES)
def test_what_was_sealed_once_is_opened_by_each_of_its_keys(
    suite: str, key: int, tmp_path: Path
) -> None:
    """R21: for ever."""
    root, run = shutil.copytree(SEALED / suite, tmp_path / "root"), make.Run()
    encrypt = Encryption(keys=keys()[key])
    assert verify_root(SealedStore(LocalStore(root), encrypt)).ok
    with CheckpointManager(
        root, run.state, encrypt=encrypt, takeover=True, sinks=(), preflight=False
    ) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.tags, found.metrics) == (4, ("golden", "later"), {"loss": 0.25})
    assert run.counters["step"] == 4


def test_the_second_reader_knows_hpke_as_it_was_published() -> None:
    """R35: not only as the library has it: of RFC 9180 what appendix A.1 says of the key pair."""
    from cryptography.hazmat.primitives import hpke
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = bytes.fromhex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8")
    public = X25519PrivateKey.from_private_bytes(private).public_key()
    assert public.public_bytes_raw().hex() == (
        "3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d"
    )
    suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    sealed = suite.encrypt(b"a data key", public, info=b"some info")
    assert hpke_open(private, sealed, b"some info") == b"a data key"
