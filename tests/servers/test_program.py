"""Server programs: what they say when they do not start, and that they die with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.google import Gcs
from servers.program import Program, Service, answers, ends

PARENT = """
import sys
from pathlib import Path
from servers.google import Gcs
program = Gcs(Path(sys.argv[1]))
with program:
    print(program.pids[0], flush=True)
    sys.stdin.read()
"""


class Dies(Program):
    """Ends before it answers."""

    name = "dies"

    def install(self) -> None:
        pass

    def start(self) -> Service:
        self.spawn("dies", ["sh", "-c", "echo the port is taken; exit 3"])
        self.wait_for(lambda: False, "no answer")
        raise AssertionError


def test_a_server_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    says = r"(?s)dies: no answer.*the port is taken"
    with pytest.raises(RuntimeError, match=says), Dies(tmp_path / "run"):
        pass


def test_a_server_can_be_killed_and_started_again(tmp_path: Path) -> None:
    program = Gcs(tmp_path / "run")
    with program as service:
        program.kill()
        assert program.pids == []
        assert not answers(service.endpoint)
        assert program.start() == service
    assert not answers(service.endpoint)


def test_a_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PARENT, str(tmp_path / "run")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert ends(server)
