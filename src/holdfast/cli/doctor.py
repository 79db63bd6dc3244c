"""`holdfast doctor`: check what on this machine or in a root would make saves fail."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from holdfast.cli.options import argument, command
from holdfast.cli.output import Answer, Code, TextTable, format_nbytes
from holdfast.cli.target import open_root_store, unlocked
from holdfast.encryption.store import bare
from holdfast.errors import HoldfastError, PreflightFailed, SealError, StoreError, UsageError
from holdfast.format import layout
from holdfast.maintenance.preflight import preflight
from holdfast.policy.rules import recorded_time
from holdfast.root.address import split_source
from holdfast.root.catalog import Catalog, Entry, is_root
from holdfast.root.commit import remove_scratch
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.remote.opening import SCHEMES
from holdfast.system import IS_LINUX, PROC, most_open_files

T = TypeVar("T")
Status = Literal["ok", "warn", "fail"]

LEAST_VERSIONS: Mapping[str, Mapping[str, str]] = {
    "s3": {"obstore": "0.11", "boto3": "1.36"},
    "gcs": {"obstore": "0.11", "google-auth": "2.35"},
    "azure": {"obstore": "0.11", "azure-identity": "1.19"},
    "http": {"obstore": "0.11"},
    "sftp": {"paramiko": "3.4"},
    "compress": {"lz4": "4.3", "blosc2": "3.0"},
    "encrypt": {"cryptography": "47"},
    "tensorboard": {"tensorboard": "2.18"},
    "wandb": {"wandb": "0.19"},
    "mlflow": {"mlflow-skinny": "3.0"},
    "trackio": {"trackio": "0.43"},
    "prometheus": {"prometheus-client": "0.20"},
    "otel": {"opentelemetry-api": "1.30"},
    "lightning": {"lightning": "2.4"},
    "ignite": {"pytorch-ignite": "0.5.1"},
    "transformers": {"transformers": "4.48", "accelerate": "1.2"},
    "accelerate": {"accelerate": "1.2"},
    "web": {"starlette": "0.46", "uvicorn": "0.34", "jinja2": "3.1.5"},
    "plot": {"matplotlib": "3.8"},
}
"""Extra → its packages, and the least version of each that works (pyproject.toml)."""
_EXTRA_OF_SCHEME = {
    "s3": "s3",
    "gs": "gcs",
    "az": "azure",
    "oci": "s3",
    "sftp": "sftp",
    "http": "http",
    "https": "http",
}
_SKEW_S = 60.0
"""Difference of clocks up to which nothing is said, in seconds."""
_LEAST_OPEN_FILES = 256
_SHOWN_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")
"""File systems that do not outlive the machine or the container."""
_SCRATCH_NBYTES = 8


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check."""

    check: str
    """What was checked: `torch`, `room`, `clock` and so on."""
    status: Status
    """`ok`, `warn` (saves work, but something is to be known) or `fail` (saves would fail)."""
    found: str
    """What was found."""
    do: str
    """What to do; empty where nothing is to be done."""


class DoctorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast doctor`."""

    root: str | None
    """Path or URL of the root that was checked, or null."""
    ok: bool
    """Whether no check failed."""
    findings: tuple[CheckResult, ...]
    """What was checked, in order."""


@command(
    "doctor",
    argument("root", "[ROOT]", "Folder or URL of a run, which need not exist.", required=False),
    answer=DoctorAnswer,
)
def examine(root: str | None) -> Answer:
    """Check this machine, and whether a run could save into a root.

    Each finding is ok, warn or fail, with a remedy; the exit code is 1 after a fail. Test files are
    removed again.
    """
    findings = [*_machine(), *_packages(root)]
    if root is not None:
        name, which = split_source(root)
        if which is not None:
            raise UsageError(f"{root!r} names a checkpoint; doctor takes a whole root")
        findings += _check_root(name)
    table = TextTable(
        columns=("", "check", "found"),
        rows=[(found.status, found.check, found.found) for found in findings],
        whole=frozenset({0, 1}),
    )
    todo = [f"{found.check}: {found.do}" for found in findings if found.do]
    is_ok = all(found.status != "fail" for found in findings)
    document = DoctorAnswer(root=root, ok=is_ok, findings=tuple(findings))
    return Answer(document=document, parts=[table, *todo], code=Code.OK if is_ok else Code.FOUND)


def _ok(check: str, found: str) -> CheckResult:
    return CheckResult(check=check, status="ok", found=found, do="")


def _make_warning(check: str, found: str, do: str) -> CheckResult:
    return CheckResult(check=check, status="warn", found=found, do=do)


def _make_failure(check: str, found: str, do: str) -> CheckResult:
    return CheckResult(check=check, status="fail", found=found, do=do)


# The machine


def _machine() -> Iterator[CheckResult]:
    yield _ok("python", f"{platform.python_version()} on {platform.system()}")
    if (open_files := most_open_files()) < _LEAST_OPEN_FILES:
        text = f"a process may open {open_files} files"
        yield _make_warning("open files", text, f"ulimit -n {_LEAST_OPEN_FILES * 4}")
    with suppress(ImportError, OSError, ValueError):
        import resource

        file_nbytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if file_nbytes not in (resource.RLIM_INFINITY, -1):
            text = f"a file may have {format_nbytes(file_nbytes)} (ulimit -f)"
            yield _make_warning(
                "file size", text, "ulimit -f unlimited, or saves of larger files fail"
            )
    for name in filter(None, os.environ.get("HOLDFAST_KEY_FILE", "").split()):
        yield from _key_file(Path(name))


def _key_file(path: Path) -> Iterator[CheckResult]:
    check = "HOLDFAST_KEY_FILE"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        yield _make_failure(
            check, f"{path}: {error.strerror}", "name a file with keys, or unset it"
        )
        return
    if mode & 0o077:
        yield _make_warning(check, f"{path}: others may read it", f"chmod 600 {path}")
    else:
        yield _ok(check, str(path))


def _packages(root: str | None) -> Iterator[CheckResult]:
    torch = _version("torch")
    if torch is None:
        text = "not installed: saves and loads need it"
        yield _make_warning("torch", text, "pip install torch")
    else:
        yield _ok("torch", torch)
    scheme = "" if root is None else root.partition("://")[0]
    needed = _EXTRA_OF_SCHEME.get(scheme) if root is not None and "://" in root else None
    for extra, packages in LEAST_VERSIONS.items():
        yield _extra(extra, packages, is_needed=extra == needed)


def _extra(extra: str, packages: Mapping[str, str], *, is_needed: bool) -> CheckResult:
    check, install = f"[{extra}]", f"pip install 'holdfast-torch[{extra}]'"
    found = {name: _version(name) for name in packages}
    missing = [name for name, version in found.items() if version is None]
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    if missing:
        return _make_failure(check, text, install) if is_needed else _ok(check, text)
    old = [
        n
        for n, v in found.items()
        if v is not None and _parse_version(v) < _parse_version(packages[n])
    ]
    if old:
        wanted = ", ".join(f"{name} {packages[name]} or newer" for name in old)
        return (_make_failure if is_needed else _make_warning)(
            check, text, f"{wanted}: {install} --upgrade"
        )
    return _ok(check, text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, by which it is compared."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


# The root


@dataclass(frozen=True, slots=True)
class _Seen:
    """Facts known about the run in a root."""

    newest: Entry | None
    is_run: bool


def _check_root(root: str) -> Iterator[CheckResult]:
    try:
        store = unlocked(open_root_store(root))
        names = store.children()
    except HoldfastError as error:
        yield _make_failure("root", str(error), _reaching(root))
        return
    is_local = isinstance(bare(store), LocalStore)
    if is_local and not os.path.isdir(bare(store).url):
        yield from _absent(bare(store))
        return
    seen = _Seen(newest=None, is_run=bool(names) and is_root(store))
    if names and not seen.is_run:
        text = f"{store.url} holds other files, such as {names[0]!r}, and no run"
        yield _make_warning("root", text, "give a run a folder of its own")
    elif not names:
        yield _ok("root", f"{store.url}: empty; nothing was saved here yet")
    else:
        seen = _Seen(newest=_find_newest(store), is_run=True)
        yield from _check_run(store, seen)
    yield from _saving(store, seen)
    yield from _room(store, seen)
    yield from _clock(store)
    if is_local:
        yield from _links(store)
        yield from _file_system(Path(bare(store).url))
    yield from _other_tier(store)


def _reaching(root: str) -> str:
    if root.partition("://")[0] in SCHEMES:
        return "check the name of the bucket, credentials, endpoint and network"
    return "check the path and its permissions"


def _absent(store: Store) -> Iterator[CheckResult]:
    path = Path(store.url)
    ancestor = next(folder for folder in path.absolute().parents if folder.is_dir())
    if os.access(ancestor, os.W_OK | os.X_OK):
        text = f"{path} does not exist yet; a first save makes it in {ancestor}"
        yield _ok("root", text)
    else:
        text = f"{path} does not exist, and {ancestor} may not be written to"
        yield _make_failure("root", text, "check the path, or make the folder")
    yield _ok("room", f"{format_nbytes(store.free_space().nbytes or 0)} free")
    yield from _file_system(ancestor)


def _find_newest(store: Store) -> Entry | None:
    return next(iter(Catalog(store).checkpoints()), None)


def _check_run(store: Store, seen: _Seen) -> Iterator[CheckResult]:
    entries, unread = Catalog(store).survey()
    sealed = [folder for folder, error in unread if isinstance(error, SealError)]
    damaged = [folder for folder, error in unread if not isinstance(error, SealError)]
    yield _ok("root", f"{store.url}: a run with {len(entries)} checkpoints that can be read")
    if sealed:
        text = f"{len(sealed)} checkpoints are encrypted for other keys, such as {sealed[0]}"
        yield _make_warning("keys", text, "name the keys before the command (--key-file)")
    if damaged:
        text = f"{len(damaged)} manifests cannot be read, such as in {damaged[0]}"
        yield _make_failure("manifests", text, f"holdfast verify {store.url}")
    moment = recorded_time(seen.newest.manifest.created) if seen.newest is not None else None
    ahead_s = 0.0 if moment is None else (moment - datetime.now(timezone.utc)).total_seconds()
    if ahead_s > _SKEW_S:
        text = f"the newest checkpoint was saved {ahead_s:.0f} s after now, by its host's clock"
        yield _make_warning(
            "clock of the saves", text, "set the clocks by NTP; Hourly and Daily use them"
        )


def _saving(store: Store, seen: _Seen) -> Iterator[CheckResult]:
    """Try the operations of a save, as a first save does."""
    num_files = 1 if seen.newest is None else len(seen.newest.manifest.files)
    try:
        chosen = preflight(store, nbytes_per_save=0, saves_kept=None, num_files=num_files)
    except PreflightFailed as error:
        for problem in error.problems:
            yield _make_failure("saving", problem, "see docs/stores.md; a save here would fail")
        return
    except HoldfastError as error:
        yield _make_failure("saving", str(error), _reaching(store.url))
        return
    text = "put if absent, replace, write, read a part and delete work"
    yield _ok("saving", text)
    if chosen:
        yield _ok("large files", f"are written {chosen}")


def _room(store: Store, seen: _Seen) -> Iterator[CheckResult]:
    try:
        free = store.free_space()
    except StoreError as error:
        yield _make_warning("room", f"cannot be seen: {error}", "look at the file system's quota")
        return
    if free.nbytes is None:
        return
    one = 0 if seen.newest is None else seen.newest.manifest.nbytes
    text = f"{format_nbytes(free.nbytes)} free"
    if not one:
        yield _ok("room", text)
        return
    text += f"; the newest checkpoint has {format_nbytes(one)}"
    if free.nbytes < one:
        yield _make_failure("room", text, "make room, or keep fewer (holdfast prune)")
    elif free.nbytes < 3 * one:
        yield _make_warning("room", text, "make room, or keep fewer (holdfast prune)")
    else:
        yield _ok("room", text)


def _clock(store: Store) -> Iterator[CheckResult]:
    """Compare the clock of this host with that of the storage, by a new scratch file."""
    try:
        skew_s = _with_scratch(store, lambda key: _skew_s(store, key))
    except HoldfastError:
        return  # `saving` says why
    if skew_s is None:
        return
    text = f"this host and the storage differ by {abs(skew_s):.0f} s"
    if abs(skew_s) > _SKEW_S:
        do = "set the clock by NTP; requests to object stores are refused from about 15 min on"
        yield _make_warning("clock", text, do)
    else:
        yield _ok("clock", text)


def _skew_s(store: Store, key: str) -> float | None:
    from holdfast.store.remote import RemoteStore

    inner = bare(store)
    if isinstance(inner, RemoteStore):
        return time.time() - inner.modified(key).timestamp()
    if isinstance(inner, LocalStore):
        with suppress(OSError):
            return time.time() - os.stat(os.path.join(inner.url, key)).st_mtime
    return None


def _links(store: Store) -> Iterator[CheckResult]:
    """Try a hard link, by which unchanged files of two checkpoints are one."""

    def link(key: str) -> bool:
        return bare(store).link(key, f"{key}-link")

    with suppress(HoldfastError):
        if _with_scratch(store, link):
            yield _ok("hard links", "work; unchanged files are linked, not written again")
        else:
            text = "this file system has none: every save writes all files"
            yield _make_warning("hard links", text, "nothing, unless room or time is short")


def _with_scratch(store: Store, use: Callable[[str], T]) -> T:
    """Put a small file into a scratch folder of the root, use it, and remove the folder."""
    inner = bare(store)
    folder = layout.scratch_folder(os.urandom(_SCRATCH_NBYTES))
    inner.make_folder(folder, exclusive=True)
    try:
        inner.put(f"{folder}/file", b"doctor")
        return use(f"{folder}/file")
    finally:
        remove_scratch(inner, folder)


def _file_system(path: Path) -> Iterator[CheckResult]:
    kind = _kind_of(path)
    if kind is None:
        return
    if kind in _SHOWN_FILE_SYSTEMS:
        text = f"{kind}: what is saved there is lost with the machine or the container"
        yield _make_warning(
            "file system", text, "save to a disk, or use Tiered to send it elsewhere"
        )
    else:
        yield _ok("file system", kind)


def _kind_of(path: Path) -> str | None:
    """Return the type of the file system that holds a path; None where that cannot be seen."""
    if not IS_LINUX:
        return None
    best: tuple[int, str] | None = None
    with suppress(OSError):
        real = path.resolve()
        for line in Path(PROC, "self", "mounts").read_text(errors="replace").splitlines():
            fields = line.split(" ")
            if len(fields) < 3:
                continue
            point = Path(fields[1].replace("\\040", " "))
            if real.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
                best = (len(point.parts), fields[2])
    return None if best is None else best[1]


def _other_tier(store: Store) -> Iterator[CheckResult]:
    tiers = Ledger(bare(store)).tiers()
    if tiers is None:
        return
    try:
        open_root_store(tiers.remote).children()
    except HoldfastError as error:
        yield _make_failure("remote tier", str(error), _reaching(tiers.remote))
        return
    yield _ok("remote tier", f"{tiers.remote} can be reached")
    if tiers.error:
        text = f"the last upload failed: {tiers.error}"
        yield _make_warning("uploads", text, f"holdfast uploads {store.url}")
