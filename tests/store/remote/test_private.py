"""Datasets that read with obstore in forked workers do not notice that Holdfast uses it too."""

from __future__ import annotations

import subprocess
import sys

import obstore
import pytest

FORK = """
import os, signal, sys
import obstore
from obstore.exceptions import BaseError
from obstore.store import HTTPStore
from holdfast.errors import HoldfastError
from holdfast.store.remote import HttpStore, RemoteOptions

address = "http://127.0.0.1:9/run"  # nothing listens on the port, and none is needed
options = RemoteOptions(max_retries=0, retry_s=1, connect_timeout_s=1)
try:
    HttpStore(address, options=options).get("a")
except HoldfastError:
    print("parent answered", flush=True)
if os.fork() == 0:
    signal.alarm(20)  # ends a child that hangs
    store = HTTPStore.from_url(
        address, client_options={"allow_http": True}, retry_config={"max_retries": 0}
    )
    try:
        obstore.get(store, "a")
    except (BaseError, OSError):
        os._exit(0)
    os._exit(1)
print("child", os.wait()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files in memory")
def test_obstore_works_in_a_fork_after_a_remote_store_was_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["parent answered", "child 0"], done.stderr


def test_the_obstore_of_other_code_stays_importable() -> None:
    """Loading a private copy leaves the modules of the process alone."""
    from holdfast.store.remote.opening import import_obstore

    before = {name: sys.modules[name] for name in sys.modules if name.startswith("obstore")}
    private = import_obstore("obstore")
    assert before["obstore"] is obstore
    assert {name: sys.modules[name] for name in before} == before
    assert (private is obstore) == (sys.platform != "linux")


THREADS = """
import threading
from holdfast.store.remote.opening import import_obstore

start, found = threading.Barrier(8), []

def load():
    start.wait()
    found.append((import_obstore("obstore.store"), import_obstore("obstore.exceptions")))

threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found), len({*found}))
"""


def test_threads_that_load_obstore_at_once_get_the_same_copy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "8 1\n", done.stderr
