"""`holdfast verify`: read every byte again."""

from __future__ import annotations

from holdfast.care.findings import RootReport, VerifyReport
from holdfast.care.scrub import NOTE
from holdfast.care.verify import verify_kept, verify_root
from holdfast.cli.documents import (
    expect_something_opened,
    problem_document,
    report_document,
    unread_documents,
    unread_line,
)
from holdfast.cli.output import Answer, Code, progress_bar, size
from holdfast.cli.target import open_root, open_target
from holdfast.engine.roots.catalog import Catalog
from holdfast.engine.roots.seen import parse_seen
from holdfast.engine.roots.sources import split_folder, split_source
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.store.base import Store


def check(target: str, *, seen: str | None = None, decode: bool = True) -> Answer:
    """Verify one checkpoint, or with a root every committed one.

    Without `decode`, files that codecs made are compared as they lie there, and no more.

    Raises:
        NoCheckpoint: there is none.
        SealError: the keys open none.
        RolledBack: the newest is older than the one that was `seen`.
    """
    known = parse_seen(seen)
    root, which = split_source(target)
    if which is None and not split_folder(root)[1]:
        store = open_root(root)
        with progress_bar() as progress:
            found = verify_root(store, progress=progress, keeps=True, decode=decode)
        if known is not None:
            known.expect(Catalog(store).latest(), where=store.url)
        return _answer(store, found)
    if known is not None:
        raise UsageError("--seen: takes a whole root, not one checkpoint")
    store, folder = open_target(target)
    with progress_bar() as progress:
        report = verify_kept(store, folder, progress=progress, decode=decode)
    return _answer(store, RootReport(checkpoints=(report,), problems=(), notes=()))


def _answer(store: Store, found: RootReport) -> Answer:
    expect_something_opened(found.checkpoints, found.unopened)
    if not found.checkpoints and not found.problems:
        aside = f" ({len(found.notes)} not committed)" if found.notes else ""
        raise NoCheckpoint(f"{store.url}: no checkpoints{aside}")
    lines = [line for report in found.checkpoints for line in _lines(report)]
    lines += [unread_line(folder, error) for folder, error in found.unopened]
    lines += [f"UNREADABLE  {problem}" for problem in found.problems]
    lines += [f"note: {note}" for note in found.notes]
    failed = [report.problems for report in found.checkpoints if not report.ok]
    num_bad = sum(any(p.is_damage for p in problems) for problems in failed) + len(found.problems)
    num_unread = len(failed) + len(found.problems) - num_bad
    verdict = f"{num_bad} bad" if num_bad else "every byte is as it was written"
    if num_unread:
        verdict = f"{num_bad} bad, {num_unread} could not be read"
    nbytes = size(sum(report.nbytes for report in found.checkpoints))
    lines.append(
        f"{len(found.checkpoints)} verified, {nbytes}: "
        + verdict
        + (f"; {len(found.unopened)} not opened" if found.unopened else "")
    )
    document = {
        "root": store.url,
        "ok": found.ok,
        "checkpoints": [report_document(report) for report in found.checkpoints],
        "unopened": unread_documents(found.unopened)["unopened"],
        "problems": [problem_document(problem) for problem in found.problems],
        "notes": list(found.notes),
    }
    return Answer(document=document, parts=lines, code=Code.OK if found.ok else Code.FOUND)


def _lines(report: VerifyReport) -> list[str]:
    verdict = "ok" if report.ok else "DAMAGED"
    if report.step is None and NOTE in report.notes:
        lines = [f"{verdict:<10}  sealed  {report.folder}  {size(report.nbytes)}"]
    elif report.step is None:
        lines = [f"UNREADABLE  {report.folder}"]
    else:
        step, nbytes = f"step {report.step}", size(report.nbytes)
        lines = [f"{verdict:<10}  {step}  {report.folder}  {nbytes}"]
    lines += [f"  {problem}" for problem in report.problems]
    return lines + [f"  note: {note}" for note in report.notes]
