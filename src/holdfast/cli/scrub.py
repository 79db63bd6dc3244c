"""`holdfast scrub`: verify a whole root slowly, in as many runs as it takes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import msgspec

from holdfast.cli import options
from holdfast.cli.answers.base import Unopened
from holdfast.cli.answers.health import ProblemFound, Verified, Verify
from holdfast.cli.options import PATH, command, option
from holdfast.cli.output import Answer, progress_bar
from holdfast.cli.target import open_root
from holdfast.cli.verify import answer_of
from holdfast.encryption.store import bare
from holdfast.errors import UsageError
from holdfast.maintenance.verify import verify_root
from holdfast.maintenance.verify_reads import VerifyReport
from holdfast.ownership.process import utc_now
from holdfast.policy.rules import number_of_bytes
from holdfast.store.local import LocalStore

_MAX_PLACE_NBYTES = 64 * 2**20
_MOST_CAUGHT_UP_S = 1.0
"""After a pause of the storage, reads are faster than the rate for no longer than this."""
Progress = Callable[[str, int, int], None]


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


class ScrubAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast scrub`."""

    root: str
    """Path or URL of the run."""
    ok: bool
    """Whether every byte is as it was written."""
    began: str
    """When this pass over the root began, in UTC; earlier than this command where it went on."""
    carried_over: int
    """Number of checkpoints that earlier commands of this pass have verified."""
    read_nbytes: int
    """Bytes that this command read and compared."""
    checkpoints: list[Verified]
    """Results, as of `verify`, also of those that were carried over."""
    unopened: list[Unopened]
    """Checkpoints that the keys do not decrypt, as of `ls`."""
    problems: list[ProblemFound]
    """Problems of claims, as of `verify`."""
    notes: list[str]
    """Notes, as of `verify`."""


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
        now.ended = utc_now()
        _write_resume_file(place, now)
    answer = answer_of(store, found)
    verified = answer.document
    assert isinstance(verified, Verify)
    new = [report for report in found.checkpoints if report.folder not in known]
    carried = len(found.checkpoints) - len(new)
    document = ScrubAnswer(
        root=verified.root,
        ok=verified.ok,
        began=now.began,
        carried_over=carried,
        read_nbytes=sum(report.nbytes for report in new),
        checkpoints=verified.checkpoints,
        unopened=verified.unopened,
        problems=verified.problems,
        notes=verified.notes,
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
    """Yield a progress callback that also waits, so that reads keep to a rate.

    Reads are at most 16 blocks ahead of it.
    """
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
    fresh = PassProgress(root=root, began=utc_now())
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
            f"--resume {place}: this is the place in {found.root}, not in {root}. Nothing was "
            "read; use one file for each root"
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
