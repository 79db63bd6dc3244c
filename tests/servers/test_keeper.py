"""A server is shared by those who use it and ends with the last of them, however that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from servers.keeper import shared
from servers.program import answers, ends

USER = """
import json, sys
from pathlib import Path
from servers.keeper import shared
with shared("gcs", Path(sys.argv[1])) as service:
    print(json.dumps(service.to_dict()), flush=True)
    sys.stdin.read()
"""


def user(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that uses the server; it and the server's address."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["endpoint"]


def kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def server_of(folder: Path) -> int:
    """A file descriptor that becomes readable when the server's process is gone."""
    script = str(Path(__file__).with_name("gcs.py"))
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            here = os.readlink(entry / "cwd")
        except OSError:
            continue
        if script.encode() in words and here == str(folder / "gcs" / "run"):
            return os.pidfd_open(int(entry.name))
    raise AssertionError("the server does not run")


def test_two_processes_share_a_server_which_ends_when_the_last_is_killed(tmp_path: Path) -> None:
    first, endpoint = user(tmp_path)
    second, same = user(tmp_path)
    assert endpoint == same
    server = server_of(tmp_path)
    kill(first)
    assert answers(endpoint)
    kill(second)
    assert ends(server)
    assert not answers(endpoint)


def test_a_server_is_started_again_for_the_next_user(tmp_path: Path) -> None:
    first, _ = user(tmp_path)
    kill(first)
    with shared("gcs", tmp_path) as service:
        assert answers(service.endpoint)
