"""What a killed process leaves behind, and what racing processes agree on."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import NotFound
from holdfast.store.local import LocalStore

SCRIPT = Path(__file__).with_name("crashes.py")
NBYTES = 100_000


def noise(seed):
    return random.Random(seed).randbytes(NBYTES)


def run(*arguments):
    """Lines that the script printed."""
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def value(store, key):
    """The object's bytes, or None."""
    try:
        return store.get(key)
    except NotFound:
        return None


def check_put_new(store, is_done):
    expected = [noise("new")] if is_done else [None, noise("new")]
    assert value(store, "f/new") in expected
    assert value(store, "f/old") == noise("old")


def check_put_over(store, is_done):
    assert value(store, "f/old") in ([noise("new")] if is_done else [noise("old"), noise("new")])


def check_create(store, is_done):
    assert value(store, "f/old") == noise("old")
    assert not is_done or value(store, "f/new") == noise("new")


def check_delete(store, is_done):
    assert value(store, "f/old") in ([None] if is_done else [None, noise("old")])


def check_delete_folder(store, is_done):
    assert store.children() in ([("f/",)] if is_done else [("f/",), ("empty/", "f/")])


def check_make_folder(store, is_done):
    assert not is_done or store.children("g") == ("h/",)
    assert value(store, "f/old") == noise("old")


def check_point(store, is_done):
    found = os.path.join(store.url, "latest")
    target = os.readlink(found) if os.path.lexists(found) else None
    assert target in (["f"] if is_done else [None, "f"])
    assert value(store, "f/old") == noise("old")


CHECKS = {
    "put_new": check_put_new,
    "put_over": check_put_over,
    "create": check_create,
    "delete": check_delete,
    "delete_folder": check_delete_folder,
    "make_folder": check_make_folder,
    "point": check_point,
}
# Between the two steps of a replacement the new value has a temporary name, but never before
# all of it is on the disk; a new object never has one.
MAY_LEAVE_TEMPORARIES = {"put_over", "point"}


@pytest.mark.parametrize("operation", CHECKS)
def test_a_kill_before_any_call_leaves_old_or_new(tmp_path, operation):
    """R1, R2, R9: and what is left behind is swept, after which the operation works."""
    lines = run("kill_everywhere", tmp_path, operation)
    assert len(lines) >= 4
    assert lines[-1].endswith("done")
    for line in lines:
        number, outcome = line.split()
        store = LocalStore(tmp_path / number)
        CHECKS[operation](store, outcome == "done")
        num_left = store.sweep("") + store.sweep("f")
        assert num_left <= (operation in MAY_LEAVE_TEMPORARIES and outcome == "killed")


def test_processes_that_are_killed_while_putting_leave_no_temporary(tmp_path):
    """R1, R9: and every object that was acknowledged is whole."""
    for round_number in range(8):
        root = tmp_path / str(round_number)
        root.mkdir()
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "put_forever", str(root)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            for _ in range(random.Random(round_number).randrange(1, 20)):
                acknowledged = int(process.stdout.readline())
            process.kill()
            rest = process.stdout.read().splitlines()
        acknowledged = int(rest[-1]) if rest else acknowledged
        store = LocalStore(root)
        keys = [info.key for info in store.list()]
        assert len(keys) - 1 in (acknowledged, acknowledged + 1)
        assert [store.get(key) for key in keys] == [noise(int(key)) for key in keys]
        assert sorted(os.listdir(root)) == keys


def test_of_64_processes_exactly_one_wins(tmp_path):
    """R10, invariant 1."""
    for round_number in range(5):
        root = tmp_path / str(round_number)
        root.mkdir()
        winners = run("race", root, 64)
        assert len(winners) == 1
        assert LocalStore(root).get("race") == noise(int(winners[0]))
        assert os.listdir(root) == ["race"]
