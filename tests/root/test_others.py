"""Whatever a user keeps in a root survives everything that Holdfast does there, byte for byte."""

from __future__ import annotations

import os
import random
import socket
import stat
from pathlib import Path

import pytest

import warm
from holdfast.events import Emitter
from holdfast.maintenance.delete import delete_as_planned, examine, prune_checkpoints
from holdfast.maintenance.gc import collect_garbage
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import EveryNth, Last
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.base import Store, is_key
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from runs import Recorder, new_run
from servers.fixtures import on

HEX = "0123456789abcdef"


def digits(draw: random.Random, number: int, letters: str = HEX) -> str:
    return "".join(draw.choice(letters) for _ in range(number))


def a_name(draw: random.Random) -> str:
    """A name of the root's level, of a form that Holdfast uses or nearly so."""
    eight = digits(draw, 8)
    return draw.choice(
        [
            f"exp.20261128-204530-{eight}",
            f"step-00000009.0001-00000{draw.randint(1, 9)}-{eight}",
            f"step-00000009.0002-00000{draw.randint(1, 9)}-{eight}",
            f"preflight-{digits(draw, 16)}",
            f"sending-{digits(draw, 16)}-{eight}",
            f".tmp-{digits(draw, 16)}",
            f".tmp-{digits(draw, 16)}-{eight}",
            f"ended-{digits(draw, 8, '0123456789')}.json",
            f"results-{eight}",
            f"my {eight}",
        ]
    )


def a_file(draw: random.Random) -> str:
    """A name inside a folder, of a form that Holdfast uses or nearly so."""
    return draw.choice(
        [
            "manifest.json",
            "index.json",
            f"model-{digits(draw, 5, '0123456789')}.safetensors",
            "model-00001-of-00002.safetensors",
            f"scores-{digits(draw, 5, '0123456789')}.json",
            f"notes-{digits(draw, 4, '0123456789')}.json",
            f"keys-{digits(draw, 4, '0123456789')}.json",
            f"retired-{digits(draw, 8, '0123456789')}.json",
            f"{digits(draw, 32)}.json",
            f"{digits(draw, 32)}.json.answer",
            f".tmp-{digits(draw, 16)}",
            "README",
            "two words",
        ]
    )


def fill(draw: random.Random, place: Path) -> None:
    """Put something of a user at `place`, which may be taken."""
    if os.path.lexists(place):
        return
    kind = draw.choice(["folder"] * 6 + ["empty", "file", "link", "dangling", "fifo", "socket"])
    if kind == "folder":
        place.mkdir()
        for _ in range(draw.randint(1, 4)):
            (place / a_file(draw)).write_bytes(draw.choice([b"", b"{}", draw.randbytes(99)]))
        (place / "deep" / "er").mkdir(parents=True)
        (place / "deep" / a_file(draw)).write_bytes(draw.randbytes(9))
    elif kind == "empty":
        place.mkdir()
    elif kind == "file":
        place.write_bytes(draw.choice([b"", b'{"mine": 1}', draw.randbytes(99)]))
    elif kind == "link":
        place.symlink_to(place.parent)
    elif kind == "dangling":
        place.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.open(place.parent, os.O_RDONLY)
            bound.bind(f"/proc/self/fd/{here}/{place.name}")
            os.close(here)


def all_in(path: Path, root: Path) -> dict[str, object]:
    """Everything at and below a path: name below the root → type, and bytes or target."""
    found: dict[str, object] = {}
    mode = os.lstat(path).st_mode
    name = str(path.relative_to(root))
    if stat.S_ISLNK(mode):
        found[name] = ("link", os.readlink(path))
    elif stat.S_ISREG(mode):
        found[name] = ("file", path.read_bytes())
    else:
        found[name] = stat.S_IFMT(mode)
    if stat.S_ISDIR(mode):
        for inner in path.iterdir():
            found |= all_in(inner, root)
    return found


def left_of(users: dict[str, object], root: Path) -> dict[str, object]:
    now = all_in(root, root)
    return {name: now.get(name) for name in users}


def a_crowd(root: Path, draw: random.Random, number: int) -> None:
    """Put things of a user into a root and into the folders in it that Holdfast uses."""
    root.mkdir(exist_ok=True)
    for folder in ("requests", "readers", "uploads"):
        (root / folder).mkdir(exist_ok=True)
        for _ in range(6):
            fill(draw, root / folder / a_file(draw))
    for _ in range(number):
        fill(draw, root / a_name(draw))


KILLED = """
import os, sys
from holdfast.saving import save
from runs import new_run
run = new_run()
save.write_index = lambda *_: os.kill(os.getpid(), 9)
manager = run.manager(sys.argv[1])
manager.resume()
manager.save(50).wait()
"""


@pytest.mark.parametrize(
    ("seed", "number"), [(0, 100), pytest.param(1, 400, marks=pytest.mark.full)]
)
def test_what_a_user_keeps_in_a_root_survives_all_that_is_done_there(
    ram_path: Path, seed: int, number: int
) -> None:
    """About half of the things are folders."""
    draw, root = random.Random(seed), ram_path / "run"
    a_crowd(root, draw, number)
    (root / "latest").write_text("global_step1000")
    users = all_in(root, root)
    run, recorder = new_run(), Recorder()
    with run.manager(root, keep="last:1", sinks=(recorder,)) as manager:
        manager.resume()
        for step in (1, 2):
            run.train()
            inside = root / manager.save(step).wait().folder
            for name in {a_file(draw) for _ in range(4)}:
                # Notes that cannot be read are a pin.
                if not (inside / name).exists() and not name.startswith("notes-"):
                    fill(draw, inside / name)
                    users |= all_in(inside / name, root)
        run.train()
        manager.save(3).wait()
        manager.wait()
    assert left_of(users, root) == users
    assert sum("latest" in event.message for event in recorder.of("warning")) == 1
    killed = warm.run(["-c", KILLED, str(root)])
    assert killed.returncode == -9, killed.stderr
    with run.manager(root, keep="last:1", sinks=()) as manager:
        manager.resume()
        run.train()
        manager.save(60).wait()
    collect_garbage(LocalStore(root))
    assert left_of(users, root) == users
    assert [entry.step for entry in Catalog(LocalStore(root)).checkpoints()] == [60]
    assert not [name for name in os.listdir(root) if name.startswith("step-00000050")]


def a_bucket(store: Store, draw: random.Random, number: int) -> dict[str, bytes]:
    """Put objects of a user into a root, also in the places that Holdfast uses."""
    folders = [a_name(draw) for _ in range(number)] + ["requests", "readers", "uploads"] * 6
    keys = [f"{folder}/{a_file(draw)}" for folder in folders]
    keys += [f"{folder}/deep/{a_file(draw)}" for folder in folders[::7]]
    keys += [a_name(draw) for _ in range(number)]
    users = {key: draw.choice([b"", b"{}", draw.randbytes(99)]) for key in keys if is_key(key)}
    for key, data in users.items():
        store.put(key, data)
    return users


def among_files(store: Store, folder: str, draw: random.Random) -> dict[str, bytes]:
    """Put files of a user into a checkpoint's folder."""
    taken = {*store.children(folder)}
    users = {}
    for name in {a_file(draw) for _ in range(4)} - taken:
        # Notes that cannot be read are a pin.
        if is_key(name) and not name.startswith("notes-"):
            users[f"{folder}/{name}"] = draw.randbytes(9)
            store.put(f"{folder}/{name}", users[f"{folder}/{name}"])
    return users


def do_all_that_deletes(store: Store) -> None:
    """Thin, delete by name, prune and collect; of several checkpoints the newest is left."""
    emit = Emitter(())

    def take(number: int, *components: str) -> None:
        asked = examine(store, Catalog(store).checkpoints()[number], components)
        assert delete_as_planned(store, asked, reason="test", emit=emit) == ""

    assert len(Catalog(store).checkpoints()) >= 3
    take(1, "scheduler")
    take(-1)
    prune_checkpoints(store, Last(1), emit=emit)
    collect_garbage(store)
    assert len(Catalog(store).checkpoints()) == 1


def live(
    root: Tiered | Store, stores: tuple[Store, ...], draw: random.Random
) -> list[dict[str, bytes]]:
    """Train with retention and thinning, while a user puts files into the checkpoints' folders.

    Returns these for each store.
    """
    run = new_run()
    users: list[dict[str, bytes]] = [{} for _ in stores]
    keep = Last(2) | EveryNth("2step").then_drop("optimizer")
    with run.manager(root, keep=keep, sinks=()) as manager:
        manager.resume()
        for step in range(1, 7):
            run.train()
            folder = manager.save(step).wait().folder
            manager.wait()
            for store, inside in zip(stores, users, strict=True):
                if store.children(folder):
                    inside |= among_files(store, folder, draw)
    for store in stores:
        do_all_that_deletes(store)
    return users


def left_of_keys(users: dict[str, bytes], store: Store) -> dict[str, bytes | None]:
    there = {info.key for info in store.list()}
    return {key: store.get(key) if key in there else None for key in users}


def expect_all_left_in_a_bucket(store: Store, seed: int, number: int = 50) -> None:
    draw = random.Random(seed)
    users = a_bucket(store, draw, number)
    (inside,) = live(store, (store,), draw)
    users |= inside
    assert left_of_keys(users, store) == users


def test_what_a_user_keeps_in_an_object_store_survives_all_that_is_done_there() -> None:
    expect_all_left_in_a_bucket(MemoryStore(), 2)


@pytest.mark.full
def test_what_a_user_keeps_in_200_folders_of_an_object_store_survives() -> None:
    expect_all_left_in_a_bucket(MemoryStore(), 5, 200)


@pytest.mark.full
@on("moto")
def test_what_a_user_keeps_in_a_bucket_survives_all_that_is_done_there(root: str) -> None:
    expect_all_left_in_a_bucket(open_store(root), 3)


def test_what_a_user_keeps_in_two_tiers_survives_all_that_is_done_there(ram_path: Path) -> None:
    draw, place = random.Random(4), ram_path / "run"
    a_crowd(place, draw, 50)
    (place / "uploads" / "tiers.json").write_bytes(b"mine")
    things = all_in(place, place)
    local, remote = LocalStore(place), MemoryStore("others")
    users = a_bucket(remote, draw, 50)
    here, there = live(Tiered(local, remote), (local, remote), draw)
    assert left_of(things, place) == things
    assert left_of_keys(here, local) == here
    assert left_of_keys(users | there, remote) == users | there
