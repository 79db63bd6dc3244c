"""Claims about `holdfast serve` as a command, and about its size and its cost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import holdfast as holdfast
from tests.cli.roots import Result
from tests.serve.many import multiply

from holdfast.cli.web.site import Static

Command = Callable[..., Result]
LEAST = "import sys\nfrom holdfast.cli import main\nsys.argv = ['holdfast', *sys.argv[1:]]\nmain()"
HUNG = "import threading\nfrom holdfast.cli.web import site\nsite.list_root = lambda root: "
HUNG += f"threading.Event().wait()\n{LEAST}"
"""The command, with roots that are never listed."""


@contextmanager
def command(
    *arguments: object, script: str = LEAST, before: Sequence[str] = (), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run `holdfast serve` in a process of its own; yield it and the line that it prints.

    Options `before` the word `serve` are those that all commands have.
    """
    words = (*before, "serve", "--json", "--port", "0", *map(str, arguments))
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, json.loads(line) if line else {}
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()


def browser() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))


def test_the_printed_url_opens_the_page_and_ctrl_c_ends_it(run_root: Path) -> None:
    with command(run_root, "--path-prefix", "/h", "--no-open") as (process, said):
        assert said["runs"] == [{"name": "run", "root": str(run_root), "error": None}]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/h/\?token=[\w-]{43}", said["url"])
        opened = browser()
        with opened.open(said["url"], timeout=30) as reply:
            assert reply.url == f"http://127.0.0.1:{said['port']}/h/"
            assert b"Holdfast" in reply.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_ctrl_c_ends_it_also_while_a_root_does_not_answer(run_root: Path) -> None:
    with command(run_root, script=HUNG) as (process, said):
        with browser().open(said["url"], timeout=30) as reply:
            assert b"Reading the root" in reply.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 130


def test_a_folder_stands_for_the_roots_in_it(run_root: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):
        shutil.copytree(run_root, tmp_path / name, symlinks=True)
    (tmp_path / "notes").mkdir()
    with command(tmp_path) as (_, said):
        assert [run["name"] for run in said["runs"]] == ["a", "b"]


BRIEFLY = ("--timeout", "0.3s")
DEAD = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
}
"""Environment with an object store that does not answer."""


def test_a_root_that_cannot_be_reached_is_shown_as_such_beside_the_others(run_root: Path) -> None:
    with command(run_root, "s3://bucket/other", before=BRIEFLY, **DEAD) as (process, said):
        errors = {run["name"]: run["error"] for run in said["runs"]}
        assert errors["run"] is None
        assert "Check the address" in errors["other"]
        opened, text = browser(), ""
        while not ("It is tried again" in text and ">300</td>" in text):
            assert process.poll() is None
            with opened.open(said["url"], timeout=30) as reply:
                text = reply.read().decode()
        assert text.count("Check the address") == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr is not None
        assert (
            "s3://bucket/other cannot be reached now, and will be tried again"
            in process.stderr.read()
        )


@pytest.mark.parametrize(
    ("roots", "code", "said"),
    [
        (("RUN", "s3://bucket/other", "NONE"), 3, "there is no such folder"),
        (("s3://bucket/other", "s3://bucket/more"), 1, "Check the address"),
    ],
)
def test_a_mistyped_root_is_an_error_and_so_is_a_start_that_can_reach_no_root(
    holdfast: Command,
    run_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    roots: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    for name, value in DEAD.items():
        monkeypatch.setenv(name, value)
    places = {"RUN": run_root, "NONE": run_root / "none"}
    result = holdfast(*BRIEFLY, "serve", *(places.get(root, root) for root in roots))
    assert (result.code, said in result.err) == (code, True), result.err


def test_a_browser_that_stays_in_the_foreground_holds_up_nothing(
    run_root: Path, tmp_path: Path
) -> None:
    """As one of the terminal does."""
    program, opened = tmp_path / "lynx", tmp_path / "opened"
    script = f'#!/bin/sh\necho $$ "$1" >{opened}.new; mv {opened}.new {opened}; exec sleep 1000\n'
    program.write_text(script)
    program.chmod(0o755)
    with command(run_root, "--open", BROWSER=str(program)) as (process, said):
        while not opened.exists():
            assert process.poll() is None
        pid, url = opened.read_text().split()
        try:
            assert url == said["url"]
            with browser().open(url, timeout=30) as reply:
                assert b"Holdfast" in reply.read()
        finally:
            os.kill(int(pid), signal.SIGKILL)


def test_without_its_packages_the_command_says_how_to_get_them(
    holdfast: Command, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("uvicorn", "starlette", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
        result = holdfast("serve", run_root)
        assert result.code == 2
        assert "pip install 'holdfast-torch[web]'" in result.err
        monkeypatch.undo()


def test_wrong_arguments_are_refused_before_anything_is_served(
    holdfast: Command, run_root: Path, tmp_path: Path
) -> None:
    assert holdfast("serve").code == 2
    assert holdfast("serve", tmp_path / "none").code == 3
    for prefix in ("/a/../b", "a b", '/a"b', "//evil.example"):
        assert holdfast("serve", run_root, "--path-prefix", prefix).code == 2
    for prefix in ("/r", "/r/x", "/jobs", "/static/"):
        assert "begin with this" in holdfast("serve", run_root, "--path-prefix", prefix).err
    for host in ("lab.example.org:443", "https://lab.example.org", "*", ""):
        assert holdfast("serve", run_root, "--allow-host", host).code == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = holdfast("serve", run_root, "--port", port)
        assert (result.code, f"--port={port}" in result.err) == (2, True)


def test_scripts_of_others_come_with_their_licences() -> None:
    names = [
        path.name
        for path in Path(sys.modules[Static.__module__].__file__ or "")
        .parent.joinpath("static")
        .iterdir()
    ]
    for library in ("htmx", "uplot"):
        assert any(name.startswith(library) and name.endswith(".min.js") for name in names)
        assert f"{library}.LICENSE" in names
    assert Static().response("htmx.LICENSE") is None


@pytest.fixture(scope="module")
def large_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 checkpoints of 10,000 tensors."""
    import holdfast as package

    root = tmp_path_factory.mktemp("large") / "run"
    state = {"model": {f"h.{n // 10}.part.{n % 10}.weight": torch.ones(2) for n in range(10_000)}}
    with package.CheckpointManager(root, state) as manager:
        manager.save(100, metrics={"loss": 3.0}).wait()
    multiply(root, 1000)
    return root


@pytest.mark.full
def test_a_thousand_checkpoints_of_ten_thousand_tensors_are_shown_at_once(large_root: Path) -> None:
    """First paint 1 s, filtering 100 ms, 300 MiB."""
    with command(large_root) as (process, said):
        opened, base = browser(), f"http://127.0.0.1:{said['port']}"

        def took(path: str) -> tuple[float, str]:
            began = time.monotonic()
            with opened.open(base + path, timeout=60) as reply:
                text = reply.read().decode()
            return time.monotonic() - began, text

        token = said["url"].partition("?")[2]
        assert took(f"/r/run/checkpoints?{token}")[0] < 1
        while "1,000 of 1,000 checkpoints" not in took("/r/run/checkpoints")[1]:
            time.sleep(0.05)
        for words in ("t100", "step-0001", "interval", "99"):
            assert min(took(f"/r/run/checkpoints?q={words}")[0] for _ in range(3)) < 0.1, words
        for path in ("", "/lineage", "/retention", "/resume", "/costs", "/curves.json", "/numbers"):
            assert took(f"/r/run{path}")[0] < 1, path
            while any(
                text in took(f"/r/run{path}")[1] for text in ("load delay", 'pending": true')
            ):
                time.sleep(0.05)
        folder = next(iter(sorted(path.name for path in large_root.glob("step-*"))))
        for _ in range(3):
            seconds, text = took(f"/r/run/c/{folder}/tensors?q=h.77.+weight")
        assert "10 of 10,0" in text
        assert seconds < 0.1
        status = Path(f"/proc/{process.pid}/status")
        if status.exists():
            peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            assert peak is not None
            assert int(peak[1]) / 1024 < 300


@pytest.mark.full
def test_fifty_runs_of_ten_thousand_steps_are_shown_at_once(tmp_path: Path) -> None:
    """First page 1 s, all curves 10 s, each page after that 1 s."""
    import holdfast as package

    first, state = tmp_path / "run-00", {"model": {"w": torch.zeros(2)}}
    with package.CheckpointManager(first, state, every="1000step", keep="last:2") as manager:
        for step in range(1, 10_001):
            state["model"]["w"] += 1
            manager.maybe_save(step, metrics={"loss": 1 / step, "lr": 1e-3})
    for number in range(1, 50):
        shutil.copytree(first, tmp_path / f"run-{number:02}", symlinks=True)
    with command(tmp_path) as (_, said):
        opened, base = browser(), f"http://127.0.0.1:{said['port']}"

        def read(path: str) -> tuple[float, str]:
            began = time.monotonic()
            with opened.open(base + path, timeout=60) as reply:
                text = reply.read().decode()
            return time.monotonic() - began, text

        took, text = read(f"/?{said['url'].partition('?')[2]}")
        assert (took < 1, text.count('scope="row"')) == (True, 50), took
        began = time.monotonic()
        while text.count('class="spark"') < 50:
            assert time.monotonic() - began < 10
            time.sleep(0.1)
            text = read("/")[1]
        took, text = read("/curves.json?metric=loss")
        data = json.loads(text)
        assert (took < 1, len(data["x"]), len(data["panels"][0]["curves"])) == (True, 600, 50), took
        took, text = read("/r/run-33/metrics.csv")
        assert len(text.splitlines()) == 10_001
