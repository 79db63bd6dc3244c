"""One checkpoint that the keys do not open is named, stays, and stops nothing for the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import holdfast  # noqa: F401
from tests.cli.roots import Result, flip
from tests.encryption.test_store import KEY, SEALS, resumed, saved

from holdfast import CheckpointManager, errors
from holdfast.encryption.store import SealedStore
from holdfast.format import layout
from holdfast.keys import Encryption, SecretKey
from holdfast.maintenance.verify import verify_root
from holdfast.policy.rules import Last
from holdfast.policy.savers import SideSaver
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from runs import Recorder
from ways import Tiny

Command = Callable[..., Result]

OTHER = SecretKey(bytes(range(32, 64)))
ACCEPTS = Encryption(keys=KEY, accept_plain=True)


def with_other_key(root: Path) -> str:
    """Steps 1 to 4, of which the second is encrypted for others; gives its folder."""
    saved(root, 1)
    saved(root, 2, encrypt=Encryption(keys=OTHER, also_read=KEY))
    saved(root, 3, 4, encrypt=Encryption(keys=KEY, also_read=OTHER))
    return folder_of(root, 2)


def not_sealed(root: Path) -> str:
    """The same; the first is not sealed."""
    saved(root, 1, encrypt=None)
    saved(root, 2, 3, 4, encrypt=ACCEPTS)
    return folder_of(root, 1)


ROOTS: dict[str, tuple[Callable[[Path], str], type[errors.SealError]]] = {
    "sealed for another key": (with_other_key, errors.WrongKey),
    "not sealed": (not_sealed, errors.NotSealed),
}
each = pytest.mark.parametrize("kind", ROOTS)


def folder_of(root: Path, step: int) -> str:
    (found,) = root.glob(f"step-{step:08d}.*")
    return found.name


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in root.glob("step-*"))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.key"
    path.write_text(KEY.text)
    return path


@each
def test_the_others_are_verified_and_listed(kind: str, tmp_path: Path) -> None:
    """R31: it is named as what it is, which is not damage."""
    make, expected = ROOTS[kind]
    root = tmp_path / "root"
    folder = make(root)
    store = SealedStore(LocalStore(root), SEALS)
    found = verify_root(store)
    assert len(found.checkpoints) == 3
    assert all(report.ok for report in found.checkpoints)
    ((name, error),) = found.unopened
    assert (name, type(error)) == (folder, expected)
    assert not found.ok
    entries, unread = Catalog(store).survey()
    assert len(entries) == 3
    assert [(name, type(error)) for name, error in unread] == [(folder, expected)]


@each
def test_the_commands_name_it_and_do_the_rest(
    kind: str,
    tmp_path: Path,
    holdfast: Command,  # noqa: F811
    key_file: Path,
) -> None:
    """R31"""
    make, expected = ROOTS[kind]
    root = tmp_path / "root"
    folder = make(root)
    for command, of_others in (("ls", "damaged"), ("verify", "problems")):
        done = holdfast("--key-file", key_file, command, root, "--json")
        assert done.code == 1
        assert len(done.document["checkpoints"]) == 3
        assert done.document[of_others] == []
        (unopened,) = done.document["unopened"]
        assert (unopened["folder"], unopened["kind"]) == (folder, expected.__name__)
        shown = holdfast("--key-file", key_file, command, root).out
        assert f"not opened ({expected.__name__}): {folder}" in shown
        assert "DAMAGED" not in shown
    before = bytes_of(root / folder)
    done = holdfast("--key-file", key_file, "prune", root, "--keep", "last:1", "--json")
    assert done.code == 0
    assert done.document["unopened"][0]["folder"] == folder
    assert steps(root) == sorted({int(folder[5:13]), 4})
    assert bytes_of(root / folder) == before


def test_keys_that_open_nothing_at_all_are_the_error(
    tmp_path: Path,
    holdfast: Command,  # noqa: F811
) -> None:
    root = tmp_path / "root"
    saved(root, 1, 2)
    other = tmp_path / "other.key"
    other.write_text(OTHER.text)
    for command in (["ls"], ["verify"], ["prune", "--keep", "last:1"]):
        done = holdfast("--key-file", other, command[0], root, *command[1:], "--json")
        assert done.code == 1
        assert done.document["error"]["kind"] == "WrongKey"
    assert holdfast("ls", root, "--json").document["error"]["kind"] == "MissingKey"
    assert steps(root) == [1, 2]


@each
def test_retention_goes_on_and_never_takes_it(kind: str, tmp_path: Path) -> None:
    """R20: it stays, fills no quota, and is told of once."""
    make, _ = ROOTS[kind]
    folder = make(tmp_path)
    before = bytes_of(tmp_path / folder)
    recorder = Recorder()
    saved(tmp_path, 5, 6, keep=Last(2), sinks=[recorder])
    assert steps(tmp_path) == sorted({int(folder[5:13]), 5, 6})
    assert bytes_of(tmp_path / folder) == before
    told = [event for event in recorder.events if event.fields.get("folder") == folder]
    assert [event.kind for event in told] == ["warning"]
    assert "is kept" in told[0].message
    assert recorder.of("housekeeping_failed") == []


def test_a_resume_stops_at_it_where_it_is_the_newest_and_passes_over_nothing(
    tmp_path: Path,
) -> None:
    """R31: nothing older is gone on from because of a key; named lookups do find the others."""
    saved(tmp_path, 1)
    saved(tmp_path, 2, encrypt=Encryption(keys=OTHER, also_read=KEY))
    with pytest.raises(errors.WrongKey):
        resumed(tmp_path)
    catalog = Catalog(SealedStore(LocalStore(tmp_path), SEALS))
    with pytest.raises(errors.WrongKey):
        catalog.find_checkpoint("latest")
    assert catalog.find_checkpoint("step=1").step == 1
    with pytest.raises(errors.WrongKey):  # it may be just the one that is encrypted for others
        catalog.find_checkpoint("step=2")
    assert resumed(tmp_path, which="step=1") == 1


def test_savers_of_their_own_pace_look_past_it(tmp_path: Path) -> None:
    with_other_key(tmp_path)
    tiny = Tiny()
    side = SideSaver("side", components=["tiny"], every="3step", keep=Last(1))
    with CheckpointManager(
        tmp_path,
        {"tiny": tiny.tree},
        every="2step",
        savers=[side],
        encrypt=SEALS,
        sinks=(),
    ) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 4


@pytest.mark.parametrize("name", [layout.MANIFEST, layout.keys_name(1)])
def test_a_damaged_header_stops_nothing_either(
    name: str,
    tmp_path: Path,
    holdfast: Command,  # noqa: F811
    key_file: Path,
) -> None:
    """R15"""
    root = tmp_path / "root"
    saved(root, 1, 2, 3)
    folder = folder_of(root, 2)
    path = root / folder / name
    flip(path, len(path.read_bytes()) // 2)
    store = SealedStore(LocalStore(root), SEALS)
    found = verify_root(store)
    assert [report.folder for report in found.checkpoints if not report.ok] == [folder]
    assert found.unopened == ()
    done = holdfast("--key-file", key_file, "ls", root, "--json")
    assert [item["folder"] for item in done.document["damaged"]] == [folder]
    assert len(done.document["checkpoints"]) == 2
    saved(root, 4, 5, keep=Last(2))
    assert steps(root) == [2, 4, 5]


def test_without_a_key_what_is_not_sealed_is_listed(
    tmp_path: Path,
    holdfast: Command,  # noqa: F811
) -> None:
    root = tmp_path / "root"
    not_sealed(root)
    done = holdfast("ls", root, "--json")
    assert [item["step"] for item in done.document["checkpoints"]] == [1]
    assert {item["kind"] for item in done.document["unopened"]} == {"MissingKey"}
    assert len(done.document["unopened"]) == 3
