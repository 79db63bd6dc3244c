"""The order of writing, read off the system calls of real runs (docs/design.md, rule 5).

`tests/crash/traced.py` records; the lint below replays a trace and knows at every moment which
bytes and which names are on stable storage for sure. Calls of several threads overlap: what has
to be done before counts from its end, and what may come only afterwards from its beginning.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import basename, dirname, join
from typing import Any

import pytest

from children import environment
from holdfast.format import layout
from ways import possible_ways

TRACED = Path(__file__).with_name("traced.py")
_WHOLE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)(.*)")
_BEGUN = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_ARGUMENT = re.compile(
    r'"((?:[^"\\]|\\.)*)"(?:\.\.\.)?|(AT_FDCWD|\d+)<((?:[^<>]|<[^<>]*>)*)>|[A-Z_0-9|]+'
)
_OPENED = re.compile(r"<((?:[^<>]|<[^<>]*>)*)>")
_OWN_FD = re.compile(r"/proc/self/fd/(\d+)")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One system call. `paths` are the names that it was given, absolute; `file` is what its
    first descriptor was open on; `opened` is what its result is open on."""

    name: str
    arguments: str
    paths: tuple[str, ...]
    texts: tuple[str, ...]
    file: str
    result: int
    opened: str
    begin: int
    end: int


def parse(lines: Iterable[str]) -> list[Call]:
    """The calls of a trace, in the order in which they ended."""
    calls = []
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        begin = number
        if found := _BEGUN.match(line):
            begun[found[1]] = (number, f"{found[1]} {found[2]}({found[3]}")
            continue
        if found := _ENDED.match(line):
            begin, first = begun.pop(found[1])
            line = first + found[2]
        if found := _WHOLE.match(line):
            calls.append(_call(found, begin, number))
    return calls


def _call(found: re.Match[str], begin: int, end: int) -> Call:
    folder = file = ""
    paths, texts = [], []
    for argument in _ARGUMENT.finditer(found[3]):
        if argument[2] is not None:
            folder = argument[3].removesuffix(" (deleted)")
            file = file or folder
        elif argument[1] is not None:
            texts.append(argument[1])
            paths.append(join(folder, argument[1]))
    opened = _OPENED.search(found[5])
    return Call(
        name=found[2],
        arguments=found[3],
        paths=tuple(paths),
        texts=tuple(texts),
        file=file,
        result=int(found[4]),
        opened=opened[1].removesuffix(" (deleted)") if opened else "",
        begin=begin,
        end=end,
    )


@dataclass
class File:
    """Bytes: whether all of them are on stable storage, and under which names."""

    names: set[str] = field(default_factory=set)
    text: str = ""
    writes_under_way: int = 0
    changed_at: int | None = None
    sync_failed: bool = False

    @property
    def is_synced(self) -> bool:
        return not self.writes_under_way and self.changed_at is None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document in it, or nothing."""
        raw = self.text.encode("latin-1").decode("unicode_escape").encode("latin-1")
        try:
            found = json.loads(raw)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class Lint:
    """Replays calls. `findings` are (rule, what) of what was done too early or not at all."""

    def __init__(self) -> None:
        self.findings: list[tuple[str, str]] = []
        self.committed: list[str] = []
        self.deleted: list[str] = []
        self.told: list[str] = []
        self.went: list[str] = []
        self.shared: list[str] = []
        self.aborted: list[str] = []
        self.sidecars: list[str] = []
        self._files: dict[str, File] = {}
        self._open: dict[str, str] = {}
        self._unsynced_names: defaultdict[str, dict[str, int]] = defaultdict(dict)

    @property
    def rules(self) -> set[str]:
        return {rule for rule, _ in self.findings}

    def replay(self, calls: list[Call]) -> Lint:
        """Everything in order; the beginning and the end of a call are two events."""
        events = [(call.begin, 0, call) for call in calls] + [(call.end, 1, call) for call in calls]
        for _, is_end, call in sorted(events, key=lambda event: event[:2]):
            kind = KINDS[call.name]
            if is_end and call.result >= 0:
                kind.end(self, call)
            elif is_end and kind is SYNC and (file := self._files.get(call.file)):
                file.sync_failed = True
            elif not is_end:
                kind.begin(self, call)
        return self

    # Opening and writing

    def open_begins(self, call: Call) -> None:
        if re.search(r"O_WRONLY|O_RDWR|O_TRUNC", call.arguments) and call.paths:
            self._expect_no_change(call.paths[0], "opened for writing")

    def open_ended(self, call: Call) -> None:
        self._open[str(call.result)] = call.opened
        if "O_TMPFILE" in call.arguments:
            self._files[call.opened] = File()
        elif "O_CREAT" in call.arguments and call.opened not in self._files:
            self._files[call.opened] = File(names={call.opened})
            self._name_changed(call.opened, call)

    def write_begins(self, call: Call) -> None:
        if call.texts and call.texts[0].startswith("committed "):
            self._expect_committed(call.texts[0].removeprefix("committed "))
        if call.texts and call.texts[0].startswith("went "):
            self.went.append(call.texts[0].removeprefix("went "))
        if file := self._files.get(call.file):
            file.writes_under_way += 1
            for name in file.names:
                self._expect_no_change(name, "written to")

    def write_ended(self, call: Call) -> None:
        if file := self._files.get(call.file):
            file.writes_under_way -= 1
            file.changed_at = call.end
            file.text += "".join(call.texts)

    def sync_begins(self, call: Call) -> None:
        file = self._files.get(call.file)
        if file is not None and file.sync_failed:
            self._find("synced again", call.file)

    def sync_ended(self, call: Call) -> None:
        file = self._files.get(call.file)
        if file is None:
            names = self._unsynced_names[call.file]
            for name in [name for name, changed in names.items() if changed < call.begin]:
                del names[name]
        elif not file.sync_failed and file.changed_at is not None and file.changed_at < call.begin:
            file.changed_at = None

    # Names

    def name_begins(self, call: Call) -> None:
        source, target = self._source(call), call.paths[-1]
        if source is None:
            return
        if not source.is_synced or source.sync_failed:
            self._find("unsynced file", f"{target} gets its name")
        kind = source.document.get("kind")
        if basename(target) == layout.MANIFEST and kind == "checkpoint":
            self._expect_durable(dirname(target), source.document)
        elif basename(target) == layout.MANIFEST and kind == "deleted":
            self._expect_newer(dirname(target))
        elif target in self._files and not _fails_if_taken(call):
            self._expect_no_change(target, "replaced")

    def name_ended(self, call: Call) -> None:
        source, target = self._source(call), call.paths[-1]
        self._name_changed(target, call)
        if "rename" in call.name:
            self._name_changed(call.paths[0], call)
            self._files.pop(call.paths[0], None)
        if source is None:
            return
        if replaced := self._files.get(target):
            replaced.names.discard(target)
        if "rename" in call.name:
            source.names.discard(call.paths[0])
        if any(dirname(name) in self.committed for name in source.names):
            self.shared.append(target)
        self._files[target] = source
        source.names.add(target)
        self._note(target, source.document.get("kind"))

    def removal_begins(self, call: Call) -> None:
        folder = dirname(call.paths[0])
        is_register = folder in self.committed or folder in self.aborted
        if not is_register or basename(call.paths[0]).startswith(".tmp-"):
            return
        is_dead = folder in self.deleted or folder in self.aborted
        if not is_dead or not self._is_durable(join(folder, layout.MANIFEST)):
            self._find("deleted too early", call.paths[0])

    def removal_ended(self, call: Call) -> None:
        self._name_changed(call.paths[0], call)
        if file := self._files.pop(call.paths[0], None):
            file.names.discard(call.paths[0])

    def folder_ended(self, call: Call) -> None:
        self._name_changed(call.paths[0], call)

    def nothing(self, call: Call) -> None:
        """For kinds that only have an end."""

    # What is known, and what is expected

    def _source(self, call: Call) -> File | None:
        """The file that gets a name; None for a symbolic link."""
        own = _OWN_FD.fullmatch(call.texts[0])
        return self._files.get(self._open[own[1]] if own else call.paths[0])

    def _note(self, target: str, kind: str | None) -> None:
        folder = dirname(target)
        if basename(target) != layout.MANIFEST:
            if folder in self.committed and not basename(target).startswith(".tmp-"):
                self.sidecars.append(target)
        elif kind in ("checkpoint", "deleted", "aborted"):
            lists = {"checkpoint": self.committed, "deleted": self.deleted, "aborted": self.aborted}
            lists[kind].append(folder)

    def _name_changed(self, path: str, call: Call) -> None:
        self._unsynced_names[dirname(path)][basename(path)] = call.end

    def _is_durable(self, path: str) -> bool:
        """Whether the name, and those of all folders above it, are on stable storage."""
        while path != dirname(path):
            if basename(path) in self._unsynced_names[dirname(path)]:
                return False
            path = dirname(path)
        return True

    def _find(self, rule: str, what: str) -> None:
        self.findings.append((rule, what))

    def _expect_no_change(self, path: str, how: str) -> None:
        folder = dirname(path)
        is_committed = folder in self.committed and folder not in self.deleted
        if is_committed and path in self._files and not basename(path).startswith(".tmp-"):
            self._find("changed after commit", f"{path} {how}")

    def _expect_durable(self, folder: str, manifest: dict[str, Any]) -> None:
        for name in manifest["files"]:
            path = join(folder, name)
            file = self._files.get(path)
            if file is None:
                self._find("missing", path)
            elif not file.is_synced or file.sync_failed:
                self._find("unsynced file", path)
            if not self._is_durable(path):
                self._find("unsynced name", path)

    def _expect_newer(self, folder: str) -> None:
        newer = (
            self.committed[self.committed.index(folder) + 1 :] if folder in self.committed else []
        )
        if not any(self._is_durable(join(other, layout.MANIFEST)) for other in newer):
            self._find("nothing newer", folder)

    def _expect_committed(self, name: str) -> None:
        self.told.append(name)
        folder = next((path for path in self.committed if basename(path) == name), None)
        if folder is None or not self._is_durable(join(folder, layout.MANIFEST)):
            self._find("told too early", name)


def _fails_if_taken(call: Call) -> bool:
    return "link" in call.name or "RENAME_NOREPLACE" in call.arguments


@dataclass(frozen=True)
class Kind:
    """What the lint does when such a call begins, and when it ended well."""

    begin: Callable[[Lint, Call], None]
    end: Callable[[Lint, Call], None]


OPEN = Kind(Lint.open_begins, Lint.open_ended)
WRITE = Kind(Lint.write_begins, Lint.write_ended)
SYNC = Kind(Lint.sync_begins, Lint.sync_ended)
NAME = Kind(Lint.name_begins, Lint.name_ended)
REMOVE = Kind(Lint.removal_begins, Lint.removal_ended)
FOLDER = Kind(Lint.nothing, Lint.folder_ended)
KINDS = {
    **dict.fromkeys(("open", "openat", "creat"), OPEN),
    **dict.fromkeys(("write", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate"), WRITE),
    **dict.fromkeys(("fsync", "fdatasync"), SYNC),
    **dict.fromkeys(("link", "linkat", "symlink", "symlinkat"), NAME),
    **dict.fromkeys(("rename", "renameat", "renameat2"), NAME),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), REMOVE),
    **dict.fromkeys(("mkdir", "mkdirat"), FOLDER),
    "syscall_0x1c3": Kind(Lint.nothing, Lint.nothing),  # cachestat, by its number: it only asks
}


@pytest.fixture
def strace() -> None:
    """strace on this machine: found, or installed where that is allowed."""
    if not sys.platform.startswith("linux"):
        pytest.skip("strace is a Linux tool")
    if shutil.which("strace") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "strace"]
        subprocess.run(install, capture_output=True, check=False, timeout=240)
    if shutil.which("strace") is None:
        reason = "strace is not here and cannot be installed (apt-get install strace)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def lint(folder: Path, *variants: str) -> dict[str, Lint]:
    """Record the variants and replay them."""
    done = subprocess.run(
        [sys.executable, str(TRACED), str(folder), *variants],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return {
        variant: Lint().replay(parse((folder / f"{variant}.trace").read_text().splitlines()))
        for variant in variants
    }


@pytest.mark.usefixtures("strace")
def test_a_run_writes_in_the_order_of_the_protocol(tmp_path: Path) -> None:
    """R5; invariants 2, 4: a new root, three saves of which one is kept, a tag, close, gc."""
    found = lint(tmp_path, "clean")["clean"]
    assert found.findings == []
    # The lint saw what it is about.
    steps = [basename(folder).partition(".")[0] for folder in found.committed]
    assert steps == ["step-00000001", "step-00000002", "step-00000003"]
    assert [basename(folder) for folder in found.committed] == found.told
    assert found.deleted == found.committed[:2]
    assert [basename(folder)[:5] for folder in found.aborted] == ["left."]
    assert found.committed[2] in {dirname(path) for path in found.sidecars}


@pytest.mark.full
@pytest.mark.usefixtures("strace")
def test_so_do_runs_that_save_otherwise(tmp_path: Path) -> None:
    """R5; invariants 2, 4, 10: while training goes on, a few blocks at a time, with files of the
    checkpoint before, and past the page cache."""
    ways = possible_ways(tmp_path)
    for name, found in lint(tmp_path, *ways).items():
        assert found.findings == [], name
        assert name in found.went
        assert [basename(folder) for folder in found.committed] == found.told
        assert len(found.told) == 3 + ways[name].num_before
        assert found.deleted == found.committed[: -ways[name].num_kept]
        assert bool(found.shared) is (name == "links")


BROKEN = {
    "manifest_first": {"missing"},
    "no_file_sync": {"unsynced file"},
    "no_folder_sync": {"unsynced name", "told too early", "nothing newer", "deleted too early"},
    "tombstone_last": {"deleted too early"},
    "acknowledge_early": {"told too early"},
    "delete_before_commit": {"nothing newer"},
    "write_again": {"changed after commit"},
}


@pytest.mark.full
@pytest.mark.usefixtures("strace")
def test_the_lint_reports_every_broken_order(tmp_path: Path) -> None:
    """R5: our own code, broken in one place each."""
    found = lint(tmp_path, *BROKEN)
    assert {name: found[name].rules for name in BROKEN} == BROKEN


BROKEN_OTHERWISE = {
    "overlap.acknowledge_early": {"told too early"},
    "waves.no_file_sync": {"unsynced file"},
    "links.no_folder_sync": BROKEN["no_folder_sync"],
    "direct.no_file_sync": {"unsynced file"},
}


@pytest.mark.full
@pytest.mark.usefixtures("strace")
def test_it_does_so_of_runs_that_save_otherwise(ram_path: Path) -> None:
    """R5: one of these for each way."""
    ways = possible_ways(ram_path)
    expected = {
        name: rules for name, rules in BROKEN_OTHERWISE.items() if name.partition(".")[0] in ways
    }
    found = lint(ram_path, *expected)
    assert {name: found[name].rules for name in expected} == expected


AGAIN = """\
7 openat(AT_FDCWD</>, "/r/x", O_WRONLY|O_CREAT|O_EXCL, 0666) = 3</r/x>
7 pwrite64(3</r/x>, "abc", 3, 0 <unfinished ...>
8 fsync(3</r/x>)      = 0
7 <... pwrite64 resumed>)  = 3
7 fsync(3</r/x>)      = {first}
7 fsync(3</r/x>)      = 0
7 linkat(AT_FDCWD</>, "/r/x", AT_FDCWD</>, "/r/y", 0) = 0
"""


def test_a_second_sync_after_a_failed_one_is_reported() -> None:
    """R7: it would report success although the bytes are gone."""
    good = Lint().replay(parse(AGAIN.format(first=0).splitlines()))
    assert good.findings == []
    bad = Lint().replay(parse(AGAIN.format(first="-1 EIO (I/O error)").splitlines()))
    assert bad.rules == {"synced again", "unsynced file"}


def test_a_sync_that_overlaps_a_write_does_not_cover_it() -> None:
    """R5: the lint tells what came before from what came beside."""
    lines = AGAIN.format(first=0).splitlines()
    assert Lint().replay(parse([*lines[:4], lines[6]])).rules == {"unsynced file"}
