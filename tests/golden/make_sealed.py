"""Makes the sealed golden roots in `sealed/`: `python -m tests.golden.make_sealed`.

As with `make`: they were made once. The keys are in this file, because they protect nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import get_args

from tests.golden import make

from holdfast.format.suites import SuiteName
from holdfast.keys import Encryption, Passphrase, PrivateKey, SecretKey, ServiceKey
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import All, Last

SEALED = Path(__file__).parent / "sealed"
SECRET = bytes(range(32))
PRIVATE = bytes(range(100, 132))
PASSPHRASE = "correct horse battery staple"
SUITES: tuple[SuiteName, ...] = get_args(SuiteName)


def turned(data: bytes, context: Mapping[str, str] | str) -> bytes:
    """A service that hides nothing; it is there for the form."""
    return data[::-1]


def keys() -> tuple[SecretKey, Passphrase, PrivateKey, ServiceKey]:
    """One key of each kind."""
    service = ServiceKey("golden", turned, turned)
    return SecretKey(SECRET), Passphrase(PASSPHRASE), PrivateKey(PRIVATE), service


def write(root: Path, suite: SuiteName) -> None:
    """Two checkpoints: one that has tags and lost a component, and a whole one."""
    run = make.Run()
    rule = Last(1) | All().then_drop("shuffle")
    encrypt = Encryption(keys=keys(), suite=suite)
    with CheckpointManager(
        root, run.state, keep=rule, encrypt=encrypt, sinks=(), preflight=False
    ) as manager:
        for step in (3, 4):
            run.at(step)
            tags = ["golden"] if step == 4 else []
            manager.save(step, metrics={"loss": 1 / step}, tags=tags).wait()
            manager.wait()
        manager.tag(4, "later")


def main() -> None:
    shutil.rmtree(SEALED, ignore_errors=True)
    make.make_all({suite: partial(write, suite=suite) for suite in SUITES}, SEALED)


if __name__ == "__main__":
    main()
