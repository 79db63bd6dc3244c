"""Run as a script by the tests: processes that die, or race, in the middle of store operations.

Every mode prints lines for the test to read. Children are forked from this process, which has no
threads, so that each costs milliseconds.
"""

import os
import random
import signal
import sys

from holdfast.errors import AlreadyExists
from holdfast.store.local import LocalStore

CALLS = (
    "open",
    "pwrite",
    "fsync",
    "link",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
    "symlink",
    "close",
)
NBYTES = 100_000


def noise(seed):
    return random.Random(seed).randbytes(NBYTES)


def operations(root):
    """Name → what is done before, and what the process dies in."""
    store = LocalStore(root)

    def create():
        writer = store.create("f/new", NBYTES)
        writer.write(0, memoryview(noise("new")))
        writer.finish()

    return {
        "put_new": lambda: store.put("f/new", noise("new"), if_absent=True),
        "put_over": lambda: store.put("f/old", noise("new")),
        "create": create,
        "delete": lambda: store.delete("f/old"),
        "delete_folder": lambda: store.delete("empty/"),
        "make_folder": lambda: store.make_folder("g/h"),
        "point": lambda: store.point("latest", "f"),
    }


def die_at(call_number):
    """From now on the process kills itself just before the given call."""
    count = 0

    def counted(really):
        def call(*args, **kwargs):
            nonlocal count
            if count == call_number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return really(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def in_child(action):
    """Whether the child came to its end; otherwise it was killed."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert status == 0
    return True


def kill_everywhere(base, operation):
    """Die before the first call, before the second, … until the operation gets through."""
    for call_number in range(1000):
        root = os.path.join(base, str(call_number))
        store = LocalStore(root)
        store.make_folder("f")
        store.put("f/old", noise("old"))

        def action(root=root, call_number=call_number):
            chosen = operations(root)[operation]
            die_at(call_number)
            chosen()

        is_done = in_child(action)
        print(call_number, "done" if is_done else "killed", flush=True)
        if is_done:
            return


def put_forever(root):
    """Print each number that was acknowledged, until killed."""
    store = LocalStore(root)
    number = 0
    while True:
        store.put(f"{number:06d}", noise(number), if_absent=True)
        print(number, flush=True)
        number += 1


def race(root, num_racers):
    """Print the number of every process that won."""
    store = LocalStore(root)
    ready, start = os.pipe()
    pids = []
    for racer in range(num_racers):
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(ready, 1)
            try:
                store.put("race", noise(racer), if_absent=True)
            except AlreadyExists:
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    os.close(start)
    for racer, pid in enumerate(pids):
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 1), status
        if status == 0:
            print(racer, flush=True)


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "kill_everywhere":
        kill_everywhere(*arguments)
    elif mode == "put_forever":
        put_forever(*arguments)
    else:
        race(arguments[0], int(arguments[1]))
