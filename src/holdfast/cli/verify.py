"""`holdfast verify` and `holdfast scrub`: read checkpoints and compare bytes with digests."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import msgspec

from holdfast.cli import options
from holdfast.cli.documents import (
    Document,
    Unopened,
    expect_something_opened,
    split_unread,
    unread_line,
)
from holdfast.cli.options import PATH, command, flag, option
from holdfast.cli.output import Answer, Code, format_nbytes, progress_bar
from holdfast.cli.target import names_one, open_root, open_target
from holdfast.encryption.store import bare
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.maintenance.encrypted import NOTE
from holdfast.maintenance.verify import verify_kept, verify_root
from holdfast.maintenance.verify_reads import NOT_HERE, RootReport, VerifyReport
from holdfast.ownership.process import utc_text
from holdfast.policy.rules import number_of_bytes
from holdfast.results import parse_seen
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore

_MAX_PLACE_NBYTES = 64 * 2**20
_MOST_CAUGHT_UP_S = 1.0
"""After a pause of the storage, reads are faster than the rate for no longer than this."""
Progress = Callable[[str, int, int], None]


class ProblemFound(Document, frozen=True):
    """Damage, or what could not be read."""

    file: str
    """File, by its key in the root."""
    message: str
    """What is wrong."""
    block: int | None
    """Number of the damaged block."""
    start: int | None
    """First damaged byte."""
    nbytes: int | None
    """Bytes of the damaged part."""
    tensors: Sequence[str]
    """Keys of the tensors in it."""
    expected: str
    """What should be there; empty where that cannot be said."""
    found: str
    """What is there; empty likewise."""


class Verified(Document, frozen=True):
    """Checkpoint of `verify`."""

    folder: str
    """Its folder."""
    step: int | None
    """Its step; null where the manifest cannot be read."""
    ok: bool
    """Whether every byte is as it was written."""
    nbytes: int
    """Bytes that were read and compared."""
    num_files: int
    """Files that were read."""
    num_tensors: int
    """Tensors in them."""
    problems: Sequence[ProblemFound]
    """What is wrong."""
    notes: Sequence[str]
    """What is worth knowing and no damage."""


class Verify(Document, frozen=True):
    """Answer of `verify`."""

    root: str
    """Path or URL of the root."""
    ok: bool
    """Whether all is whole."""
    checkpoints: Sequence[Verified]
    """Checkpoints that were read, newest first."""
    unopened: Sequence[Unopened]
    """As for `ls`."""
    problems: Sequence[ProblemFound]
    """Problems of claims."""
    notes: Sequence[str]
    """Notes on the root."""


@command(
    "verify",
    options.target,
    option(
        "--seen",
        "TEXT",
        "Fail if the latest checkpoint is older than this commit (Checkpoint.seen).",
    ),
    flag("--stored-only", "Do not decompress; check the stored bytes only, which is faster."),
    answer=Verify,
)
def verify_target(target: str, *, seen: str | None = None, stored_only: bool = False) -> Answer:
    """Read every byte and compare it with its digest.

    Without @WHICH, all checkpoints. Local files are read from the disk, not from the page cache.
    All damage is listed with file, block and tensors; nothing is changed. A training may continue
    in the meantime. For an encrypted checkpoint without a key, the encrypted bytes are compared.
    """
    decode = not stored_only
    known = parse_seen(seen)
    if not names_one(target):
        store = open_root(target)
        with progress_bar() as progress:
            root_report = verify_root(store, progress=progress, keeps=True, decode=decode)
        if known is not None:
            known.expect_no_rollback(Catalog(store).latest(), where=store.url)
        return answer_of(store, root_report)
    if known is not None:
        raise UsageError("--seen: takes a whole root, not one checkpoint")
    store, folder = open_target(target)
    with progress_bar() as progress:
        report = verify_kept(store, folder, progress=progress, decode=decode)
    return answer_of(store, RootReport(checkpoints=(report,), problems=(), notes=()))


def answer_of(store: Store, root_report: RootReport) -> Answer:
    """Build the answer of a command that verified checkpoints."""
    expect_something_opened(root_report.checkpoints, root_report.unopened)
    if not root_report.checkpoints and not root_report.problems:
        aside = f" ({len(root_report.notes)} not committed)" if root_report.notes else ""
        raise NoCheckpoint(f"{store.url}: no checkpoints{aside}")
    lines = [line for report in root_report.checkpoints for line in _format_verdict(report)]
    lines += [unread_line(folder, error) for folder, error in root_report.unopened]
    lines += [f"UNREADABLE  {problem}" for problem in root_report.problems]
    lines += [f"note: {note}" for note in root_report.notes]
    failed = [report.problems for report in root_report.checkpoints if not report.ok]
    num_bad = sum(any(p.is_damage for p in problems) for problems in failed) + len(
        root_report.problems
    )
    num_unread = len(failed) + len(root_report.problems) - num_bad
    notes = (note for report in root_report.checkpoints for note in report.notes)
    is_part = any(note.startswith(NOT_HERE) for note in notes)
    where = "here is intact; files of other hosts were not read" if is_part else "is intact"
    verdict = f"{num_bad} bad" if num_bad else f"every byte {where}"
    if num_unread:
        verdict = f"{num_bad} bad, {num_unread} could not be read"
    nbytes = format_nbytes(sum(report.nbytes for report in root_report.checkpoints))
    lines.append(
        f"{len(root_report.checkpoints)} verified, {nbytes}: "
        + verdict
        + (f"; {len(root_report.unopened)} not opened" if root_report.unopened else "")
    )
    document = Verify(
        root=store.url,
        ok=root_report.ok,
        checkpoints=msgspec.convert(root_report.checkpoints, list[Verified], from_attributes=True),
        unopened=split_unread(root_report.unopened)[1],
        problems=msgspec.convert(root_report.problems, list[ProblemFound], from_attributes=True),
        notes=root_report.notes,
    )
    code = Code.OK if root_report.ok else Code.FOUND
    return Answer(document=document, parts=lines, code=code)


def _format_verdict(report: VerifyReport) -> list[str]:
    verdict = "ok" if report.ok else "DAMAGED"
    if report.step is None and NOTE in report.notes:
        lines = [f"{verdict:<10}  sealed  {report.folder}  {format_nbytes(report.nbytes)}"]
    elif report.step is None:
        lines = [f"UNREADABLE  {report.folder}"]
    else:
        step, nbytes = f"step {report.step}", format_nbytes(report.nbytes)
        lines = [f"{verdict:<10}  {step}  {report.folder}  {nbytes}"]
    lines += [f"  {problem}" for problem in report.problems]
    return lines + [f"  note: {note}" for note in report.notes]


# A whole root at a limited rate


class PassProgress(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Progress of a pass over a root, as stored in the file of `--resume`."""

    holdfast_scrub: int = 1
    """Version of this file."""
    root: str
    """Path or URL of the root."""
    began: str
    """When the pass began, in UTC."""
    ended: str | None = None
    """When it ended; null: it goes on. The next scrub after its end begins a new pass."""
    reports: list[VerifyReport] = []
    """Results of the checkpoints that were verified in this pass."""


class ScrubAnswer(Verify, frozen=True):
    """Answer of `scrub`."""

    began: str
    """When this pass over the root began, in UTC; earlier than this command if it was resumed."""
    carried_over: int
    """Number of checkpoints that earlier commands of this pass have verified."""
    read_nbytes: int
    """Bytes that this command read and compared."""


@command(
    "scrub",
    options.root,
    option(
        "--rate", "SIZE", "Read at most this much per second, such as 50MB. [default: no limit]"
    ),
    click.Option(
        ["--resume", "place"],
        metavar="FILE",
        help="Keep the progress in this file, and continue from there.",
        type=PATH,
    ),
    answer=ScrubAnswer,
)
def scrub(root: str, *, rate: str | None, place: Path | None) -> Answer:
    """Verify a whole root at a limited rate, in parts.

    For a nightly timer: timeout 6h holdfast scrub ROOT --rate 50MB --resume progress.json
    """
    limit = None if rate is None else _rate(rate)
    store = open_root(root)
    if place is not None:
        _expect_outside(place, bare(store).url, is_local=isinstance(bare(store), LocalStore))
    now = _begun(place, store.url)
    known = {report.folder: report for report in now.reports}

    def keep(report: VerifyReport) -> None:
        now.reports.append(report)
        if place is not None:
            _write_resume_file(place, now)

    with _paced_progress(limit) as progress:
        found = verify_root(store, progress=progress, keeps=True, known=known, told=keep)
    if place is not None:
        now.ended = utc_text()
        _write_resume_file(place, now)
    answer = answer_of(store, found)
    new = [report for report in found.checkpoints if report.folder not in known]
    carried = len(found.checkpoints) - len(new)
    document = ScrubAnswer(
        **msgspec.structs.asdict(answer.document),
        began=now.began,
        carried_over=carried,
        read_nbytes=sum(report.nbytes for report in new),
    )
    lines = [f"{carried} of them were verified before, since {now.began}"] if carried else []
    return Answer(document=document, parts=[*answer.parts, *lines], code=answer.code)


def _rate(text: str) -> float:
    nbytes = number_of_bytes(text, what="--rate ")
    if nbytes <= 0:
        raise UsageError(f"--rate {text!r}: must be more than 0, such as 50MB")
    return float(nbytes)


@contextmanager
def _paced_progress(nbytes_per_s: float | None) -> Iterator[Progress | None]:
    """Yield a progress callback that also waits, so that reads, mostly, keep to a rate."""
    with progress_bar() as shown:
        if nbytes_per_s is None:
            yield shown
            return
        before: dict[str, int] = {}
        due_s = time.monotonic()

        def report(folder: str, done_nbytes: int, total_nbytes: int) -> None:
            nonlocal due_s
            if shown is not None:
                shown(folder, done_nbytes, total_nbytes)
            new = done_nbytes - before.get(folder, 0)
            before.clear()
            before[folder] = done_nbytes
            now_s = time.monotonic()
            due_s = max(due_s, now_s - _MOST_CAUGHT_UP_S) + new / nbytes_per_s
            time.sleep(max(due_s - now_s, 0.0))

        yield report


# The place


def _begun(place: Path | None, root: str) -> PassProgress:
    """Return the pass that the file records, or a new one."""
    fresh = PassProgress(root=root, began=utc_text())
    if place is None:
        return fresh
    try:
        if place.stat().st_size > _MAX_PLACE_NBYTES:
            raise UsageError(f"--resume {place}: not a file of `holdfast scrub`: too large")
        found = msgspec.json.decode(place.read_bytes(), type=PassProgress)
    except FileNotFoundError:
        _write_resume_file(place, fresh)  # it cannot be written: say so before hours of reading
        return fresh
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"--resume {place}: not a file of `holdfast scrub` ({error}). Nothing was read; name a "
            "file that does not exist"
        ) from error
    except OSError as error:
        raise UsageError(f"--resume {place}: cannot be read: {error.strerror}") from error
    if found.root != root:
        raise UsageError(
            f"--resume {place}: this file holds the progress in {found.root}, not in {root}. "
            "Nothing was read; use one file for each root"
        )
    return fresh if found.ended is not None else found


def _expect_outside(place: Path, root: str, *, is_local: bool) -> None:
    if is_local and place.resolve().is_relative_to(Path(root).resolve()):
        raise UsageError(f"--resume {place}: must not lie in the root, where only a run writes")


def _write_resume_file(place: Path, now: PassProgress) -> None:
    """Replace the file of `--resume` atomically."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(now))
            os.replace(temporary, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(f"--resume {place}: cannot be written: {error.strerror}") from error
