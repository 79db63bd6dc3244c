"""`holdfast resume-plan`: what a resume would take, what it would pass over, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from holdfast.cli import options
from holdfast.cli.documents import Document, Owner, owner_of
from holdfast.cli.options import command, flag
from holdfast.cli.output import Answer, Code, TextTable, format_time, progress_bar
from holdfast.cli.target import open_root
from holdfast.errors import NoCheckpoint
from holdfast.maintenance.resume_plan import Step, resume_steps
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store


class ResumeStep(Document, frozen=True):
    """Candidate of a resume, and what becomes of it."""

    folder: str
    """Its folder."""
    step: int | None
    """Its step; null where its manifest cannot be read, as the next one."""
    created: str | None
    """UTC time of the save, ISO 8601."""
    outcome: Literal["taken", "passed over", "in reserve", "left behind"]
    """`in reserve`: an older one, taken if the newer ones prove damaged. `left behind`: no resume
    looks at it, as the run went back before it, it is not committed, or of another run."""
    obstacle: (
        Literal[
            "damaged",
            "not opened",
            "not committed",
            "being deleted",
            "part",
            "thinned",
            "unhealthy",
        ]
        | None
    )
    """Why it is passed over; `part`: saved without a component; `not opened`: encrypted for other
    keys, not encrypted where that is refused, or of a newer version; null: it is not."""
    why: str | None
    """The same in words."""
    ends: bool
    """Whether a resume raises the error of this one, and looks no further."""
    verified: bool
    """Whether every byte was read and is right."""
    rejected: Sequence[str]
    """Why earlier resumes could not use it; it is tried again all the same."""


class ResumePlan(Document, frozen=True):
    """Answer of `resume-plan`."""

    root: str
    """Path or URL of the root."""
    head: str | None
    """Folder from which a resume would go on; null: none can be used."""
    owner: Owner | None
    """Newest claim, as for `ls`; a resume is refused while it is `alive`."""
    verified: bool
    """Whether candidates were read in full."""
    candidates: Sequence[ResumeStep]
    """In the order in which a resume walks them; those that it does not look at come last."""


@command(
    "resume-plan",
    options.root,
    flag("--verify", "Read candidates in full until one is intact."),
    answer=ResumePlan,
)
def plan_of(root: str, *, verify: bool) -> Answer:
    """Show which checkpoint a resume would use, and why.

    Checkpoints are listed in the order in which resume() tries them. Only manifests and file sizes
    are read, and nothing is claimed. The exit code is 1 if no checkpoint can be used.
    """
    store = open_root(root)
    steps = _verified(store) if verify else resume_steps(store)
    if not steps:
        raise NoCheckpoint(
            f"{store.url}: no checkpoints yet; a resume would start at the beginning"
        )
    head = next((step for step in steps if step.outcome == "taken"), None)
    document = ResumePlan(
        root=store.url,
        head=None if head is None else head.folder,
        owner=owner_of(store, Catalog(store)),
        verified=verify,
        candidates=[_describe_step(step) for step in steps],
    )
    return Answer(
        document=document,
        parts=_format_plan(document),
        code=Code.OK if head is not None else Code.FOUND,
    )


def _verified(store: Store) -> list[Step]:
    from holdfast.maintenance.verify import verify_kept

    with progress_bar() as progress:

        def check(folder: str) -> str:
            report = verify_kept(store, folder, progress=progress)
            return "" if report.ok else "; ".join(map(str, report.problems[:3]))

        return resume_steps(store, check)


def _describe_step(step: Step) -> ResumeStep:
    entry = step.entry
    return ResumeStep(
        folder=step.folder,
        step=None if entry is None else entry.step,
        created=None if entry is None else entry.manifest.created,
        outcome=step.outcome,
        obstacle=step.obstacle,
        why=step.why or None,
        ends=step.ends_resume,
        verified=step.is_verified,
        rejected=() if entry is None else entry.marks.rejected,
    )


def _format_plan(document: ResumePlan) -> list[str | TextTable]:
    table = TextTable(
        columns=("step", "folder", "saved (UTC)", "resume", "why"),
        rows=[_row(one) for one in document.candidates],
        right=frozenset({0}),
        whole=frozenset({0, 1, 2, 3}),
    )
    lines = []
    owner = document.owner
    if owner is not None and owner.state in ("alive", "unknown"):
        lines.append(
            f"writer {owner.epoch} owns the run: process {owner.pid} on {owner.host} "
            f"({owner.state}); a resume waits for its end, or needs takeover=True"
        )
    ends = [one.folder for one in document.candidates if one.ends]
    if document.head is None and ends:
        lines.append(f"a resume ends with the error of {ends[0]}")
    elif document.head is None:
        lines.append("no checkpoint can be used: a resume raises NoUsableCheckpoint")
    elif not document.verified:
        lines.append("only sizes were compared: --verify reads all bytes")
    return [table, *lines]


def _row(one: ResumeStep) -> tuple[str, ...]:
    obstacle = f"{one.obstacle}: " if one.obstacle else ""
    rejected = [f"could not be used before: {why}" for why in one.rejected]
    return (
        "?" if one.step is None else str(one.step),
        one.folder,
        format_time(one.created, nchars=16),
        f"{one.outcome}{', verified' if one.verified else ''}",
        "; ".join([*([obstacle + one.why] if one.why else []), *rejected]),
    )
