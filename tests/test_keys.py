"""Keys: where they come from, what they tell, and how they wrap."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import errors, keys
from holdfast.format import strictjson
from holdfast.format.envelope import KeyBox, decode_box, encode_box
from holdfast.format.suites import Suite, fresh_secret
from holdfast.keys import (
    Key,
    Passphrase,
    PrivateKey,
    PublicKey,
    SecretKey,
    ServiceKey,
    unwrapped,
    wrapped,
)

SUITE = Suite(name="aes-256-gcm")
SECRET = SecretKey(bytes(range(32)))
PRIVATE = PrivateKey(bytes(range(1, 33)))
MAKERS: dict[str, Callable[[], Any]] = {
    "secret": lambda: SecretKey(fresh_secret()),
    "private": lambda: PrivateKey(fresh_secret()),
    "passphrase": lambda: Passphrase(fresh_secret().hex()),
}


def test_keys_come_from_files_variables_commands_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"# of the run\n\n{SECRET.text}\n  {PRIVATE.public.text}\r\npassphrase: long enough\n"
    path = tmp_path / "key"
    path.write_text(text)
    monkeypatch.setenv("RUN_KEY", text)
    program = [sys.executable, "-c", f"print({text!r})"]
    for found in (
        keys.from_text(text),
        keys.from_file(path),
        keys.from_environment("RUN_KEY"),
        keys.from_command(program),
        keys.from_command(f"cat '{path}'"),
    ):
        assert [type(key) for key in found] == [SecretKey, PublicKey, Passphrase]
        assert found[0].name == SECRET.name


def test_a_key_that_cannot_be_had_says_from_where_and_tells_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SECRET.text[:-1] + "X"
    path = tmp_path / "key"
    path.write_text(broken)
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(keys, "COMMAND_TIMEOUT_S", 0.2)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: keys.from_file(path), "key file .*key: a line of 82 characters is not a key"),
        (lambda: keys.from_file(empty), "it contains no key"),
        (lambda: keys.from_file(tmp_path / "none"), "No such file"),
        (lambda: keys.from_file(tmp_path / "binary"), "not text"),
        (lambda: keys.from_environment("NO_SUCH"), "NO_SUCH: it is not set"),
        (lambda: keys.from_command("false"), "key command false: it ended with status 1"),
        (lambda: keys.from_command("no-such-program x"), "No such file"),
        (lambda: keys.from_command("sleep 60"), "not done after"),
    ]
    for attempt, message in cases:
        with pytest.raises(errors.KeyUnavailable, match=message) as caught:
            attempt()
        assert broken[20:] not in str(caught.value)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_key_opens_what_was_wrapped_for_it_and_nothing_else(kind: str) -> None:
    """R31: also beside others in one box, and through its own text."""
    key, other = MAKERS[kind](), MAKERS[kind]()
    data_key = fresh_secret()
    box = decode_box(encode_box(wrapped([other, key], data_key, SUITE)), what="box")
    assert unwrapped([key], [box], SUITE, what="x") == data_key
    alone = wrapped([key], data_key, SUITE)
    with pytest.raises(errors.WrongKey, match="encrypted for") as caught:
        unwrapped([other], [alone], SUITE, what="x")
    for made in (key, other):
        secret = getattr(made, "text", getattr(made, "_text", ""))
        assert secret[20:] not in str(caught.value) + repr(made)
    if kind != "passphrase":
        (again,) = keys.from_text(key.text)
        assert unwrapped([again], [box], SUITE, what="x") == data_key


@pytest.mark.parametrize("kind", MAKERS)
def test_a_changed_recipient_is_tampering_or_a_wrong_key(kind: str) -> None:
    """R32: never another data key."""
    key, data_key = MAKERS[kind](), fresh_secret()
    box = wrapped([key], data_key, SUITE)
    (recipient,) = box.recipients
    changed = {
        "wrapped": f"{int(recipient.wrapped[:2], 16) ^ 1:02x}{recipient.wrapped[2:]}",
        "commitment": "0" * 64,
    }
    if kind != "private":
        changed["salt"] = "0" * 64
    for name, value in changed.items():
        if name == "commitment":
            bad = KeyBox(commitment=value, recipients=box.recipients)
        else:
            part = msgspec.structs.replace(recipient, **{name: value})
            bad = KeyBox(commitment=box.commitment, recipients=(part,))
        with pytest.raises(errors.Tampered):
            unwrapped([key], [bad], SUITE, what="x")
    moved = msgspec.structs.replace(recipient, id="0" * 32)
    with pytest.raises(errors.WrongKey):
        unwrapped([key], [KeyBox(commitment=box.commitment, recipients=(moved,))], SUITE, what="x")


def test_a_public_key_seals_and_does_not_open() -> None:
    data_key = fresh_secret()
    box = wrapped([PRIVATE.public], data_key, SUITE)
    with pytest.raises(errors.WrongKey, match="public key"):
        unwrapped([PRIVATE.public], [box], SUITE, what="x")
    assert unwrapped([PRIVATE], [box], SUITE, what="x") == data_key


def test_a_service_that_gives_something_else_is_found_out() -> None:
    data_key = fresh_secret()
    answers: list[Any] = [b"1" * 32]
    service = ServiceKey("vault", lambda d, c: d, lambda d, c: answers[0])
    box = wrapped([service], data_key, SUITE)
    with pytest.raises(errors.Tampered, match="vault"):
        unwrapped([service], [box], SUITE, what="x")
    answers[0] = None
    with pytest.raises(errors.KeyUnavailable, match="NoneType"):
        unwrapped([service], [box], SUITE, what="x")


@pytest.mark.parametrize(
    "change",
    [
        {"memory_kib": 2**21},
        {"memory_kib": 64},
        {"passes": 1000},
        {"lanes": 10**6},
        {"salt": "00"},
        {"salt": "x" * 32},
    ],
)
def test_a_passphrase_costs_bounded_memory_and_time(change: dict[str, Any]) -> None:
    """R29: what a file asks for is looked at before anything is done."""
    box = wrapped([Passphrase("long enough")], fresh_secret(), SUITE)
    (recipient,) = box.recipients
    assert recipient.argon2 is not None
    how = msgspec.structs.replace(recipient.argon2, **change)
    bad = msgspec.structs.replace(recipient, argon2=how)
    hostile = KeyBox(commitment=box.commitment, recipients=(bad,))
    data = strictjson.encode_checked(
        "keys", {"requires": ["sealed"], **msgspec.to_builtins(hostile)}
    )
    with pytest.raises(errors.FormatError):
        decode_box(data, what="box")


def test_passphrases_of_one_box_cost_bounded_memory_and_time_together() -> None:
    """R29: 64 recipients, each within what one may ask for, would take most of an hour."""
    box = wrapped([Passphrase("long enough")], fresh_secret(), SUITE)
    (recipient,) = box.recipients
    assert recipient.argon2 is not None
    most = [
        msgspec.structs.replace(recipient.argon2, salt=f"{n:032x}", memory_kib=2**20, passes=4)
        for n in range(8)
    ]
    bad = tuple(msgspec.structs.replace(recipient, argon2=how) for how in most)
    with pytest.raises(errors.UsageError, match="more memory and time"):
        encode_box(KeyBox(commitment=box.commitment, recipients=bad))
    assert encode_box(KeyBox(commitment=box.commitment, recipients=bad[:4]))


def test_a_box_that_no_reader_would_take_is_not_made() -> None:
    """What is sealed for it would be lost."""
    long = ServiceKey("vault", lambda d, c: bytes(5000), lambda d, c: d)
    for made in ([long], [SECRET] * 65):
        with pytest.raises(errors.UsageError, match="these keys cannot be used"):
            encode_box(wrapped(made, fresh_secret(), SUITE))
    with pytest.raises(errors.UsageError, match="at most 64"):
        keys.Encryption(keys=[SECRET] * 65)


def test_a_service_that_is_away_is_not_taken_for_damage() -> None:
    """R31: whatever else somebody put beside it, so that a resume stops and rejects nothing."""

    def away(data: bytes, context: Any) -> bytes:
        raise ConnectionError("no route")

    service = ServiceKey("vault", lambda d, c: d, away)
    box = wrapped([SECRET, service], fresh_secret(), SUITE)
    changed = msgspec.structs.replace(box.recipients[0], wrapped="00" * 48)
    bad = KeyBox(commitment=box.commitment, recipients=(changed, box.recipients[1]))
    with pytest.raises(errors.KeyUnavailable, match="no route"):
        unwrapped([SECRET, service], [bad], SUITE, what="x")


def test_a_service_that_only_wraps_here_says_so_where_it_cannot_open() -> None:
    """R31: or the error would name one service as both the right one and the wrong one."""
    service = ServiceKey("vault", lambda d, c: d, None)
    box = wrapped([service], fresh_secret(), SUITE)
    with pytest.raises(
        errors.WrongKey, match=r"for service vault; .* service vault \(to wrap only"
    ):
        unwrapped([service], [box], SUITE, what="x")


def test_keys_that_cannot_be_are_refused() -> None:
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: SecretKey(b"short"),
        lambda: Passphrase("short"),
        lambda: Passphrase("not Unicode \udcff"),
        lambda: ServiceKey("", lambda d, c: d, lambda d, c: d),
        lambda: keys.generate("rsa"),  # type: ignore[arg-type]
        lambda: keys.from_command(""),
        lambda: keys.from_command("echo 'no end"),
    )
    for attempt in attempts:
        with pytest.raises(errors.UsageError):
            attempt()


def test_generated_keys_differ() -> None:
    made: list[Key] = [keys.generate(), keys.generate(), keys.generate("private")]
    assert len({key.name for key in made}) == 3
