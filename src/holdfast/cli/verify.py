"""`holdfast verify`: read checkpoints and compare every byte with its digest."""

from __future__ import annotations

from holdfast.cli import options
from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.health import Verify
from holdfast.cli.documents import (
    expect_something_opened,
    problem_document,
    report_document,
    unread_documents,
    unread_line,
)
from holdfast.cli.options import command, flag, option
from holdfast.cli.output import Answer, Code, format_nbytes, progress_bar
from holdfast.cli.target import open_root, open_target
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.maintenance.verify import verify_kept, verify_root
from holdfast.maintenance.verify_encrypted import NOTE
from holdfast.maintenance.verify_reads import RootReport, VerifyReport
from holdfast.results import parse_seen
from holdfast.root.address import split_folder, split_source
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store


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
    root, which = split_source(target)
    if which is None and not split_folder(root)[1]:
        store = open_root(root)
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
    verdict = f"{num_bad} bad" if num_bad else "every byte is intact"
    if num_unread:
        verdict = f"{num_bad} bad, {num_unread} could not be read"
    nbytes = format_nbytes(sum(report.nbytes for report in root_report.checkpoints))
    lines.append(
        f"{len(root_report.checkpoints)} verified, {nbytes}: "
        + verdict
        + (f"; {len(root_report.unopened)} not opened" if root_report.unopened else "")
    )
    document = {
        "root": store.url,
        "ok": root_report.ok,
        "checkpoints": [report_document(report) for report in root_report.checkpoints],
        "unopened": unread_documents(root_report.unopened)["unopened"],
        "problems": [problem_document(problem) for problem in root_report.problems],
        "notes": list(root_report.notes),
    }
    return Answer(
        document=make_answer(Verify, document),
        parts=lines,
        code=Code.OK if root_report.ok else Code.FOUND,
    )


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
