"""Answers of `ls`, `show` and `resume-plan`, and of `pin`, `unpin`, `tag` and `untag`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from holdfast.cli.answers.base import Document, LeaseHolder, Owner, Unopened, UnreadableCheckpoint


class DescribedCheckpoint(Document, frozen=True, rename={"save_class": "class"}):
    """Members that `ls` and `show` have for each checkpoint."""

    folder: str
    """Its folder in the root."""
    step: int
    """Step at which it was saved."""
    label: str
    """Label in its folder's name."""
    epoch: int
    """Number of the claim that saved it."""
    sequence: int
    """Number of the save inside that epoch."""
    save_id: str
    """Random number of the save, in hex."""
    timestamp: dict[str, Any]
    """Counters of the training at the save: step, epoch, samples, tokens, wall_s."""
    created: str
    """UTC time of the save, ISO 8601."""
    save_class: str
    """`permanent` or `ephemeral`."""
    reason: str
    """Why it was saved."""
    nbytes: int
    """Bytes of the files that are left."""
    plain_nbytes: int
    """Bytes of all files before they were compressed."""
    codecs: list[str]
    """Names of the codecs of compressed files."""
    metrics: dict[str, Any]
    """Metrics given to the save."""
    tags: list[str]
    """Tags, also those given later."""
    pinned: bool
    """Whether a person protects it from retention."""
    rejected: list[str]
    """Why resumes could not use it."""
    retired: bool
    """Whether its deletion was begun."""
    thinned: list[str]
    """Components whose dropping was begun."""
    savers: list[str]
    """Savers that asked for it; empty where there is only one."""
    left_out: list[str]
    """Components that were not saved."""
    unhealthy: list[str]
    """What was wrong with the state; empty if nothing."""
    parent: str | None
    """Folder of the checkpoint that its process went on from; null: from the beginning."""


class Listed(DescribedCheckpoint, frozen=True):
    """Checkpoint of `ls`."""

    components: list[str]
    """Names of its components."""
    in_lineage: bool
    """Whether the run stands on it; false where the run went back before it."""
    missing: list[str]
    """Files that are missing or have the wrong length."""


class Shown(DescribedCheckpoint, frozen=True):
    """Checkpoint of `show`: all of its manifest (docs/format.md, section 3)."""

    components: dict[str, Any]
    """Name → kind, number of tensors and files of each component."""
    files: dict[str, Any]
    """Name → length and digest of each file."""
    block_nbytes: int
    """Bytes of a block, the unit of digests."""
    world_size: int
    """Number of ranks that saved it."""
    numerics: dict[str, Any]
    """Settings that the bits of results depend on."""
    environment: dict[str, Any]
    """Versions, host, program and git commit."""
    timings: dict[str, float]
    """Phase → seconds that it took."""
    best: list[dict[str, Any]]
    """Metrics by which rules choose the best."""
    config: dict[str, Any]
    """`config` of the manager."""
    changes: list[Any]
    """Changes at the resumes up to it."""
    policy: dict[str, Any] | None
    """Rules and intervals of the process that saved it; null: not recorded."""


class Ls(Document, frozen=True):
    """Answer of `ls`."""

    root: str
    """Path or URL of the root."""
    head: str | None
    """Folder from which the run would resume."""
    best: str | None
    """Folder that `@best` names; null: none, as no metric or tag says which."""
    owner: Owner | None
    """Newest claim; null if there is none, or it cannot be read."""
    readers: list[LeaseHolder]
    """Processes that read checkpoints."""
    checkpoints: list[Listed]
    """Checkpoints, newest first."""
    damaged: list[UnreadableCheckpoint]
    """Manifests that cannot be read."""
    unopened: list[Unopened]
    """Checkpoints that the keys do not open."""
    unfinished: list[str]
    """Folders of saves that are not committed."""


class Shard(Document, frozen=True):
    """Box of a tensor in a file."""

    file: str
    """File that holds it."""
    start: int
    """First byte in the file."""
    nbytes: int
    """Bytes of the box."""
    offsets: list[int] | None
    """First element in each dimension; null where all tensors of the component are whole."""
    sizes: list[int] | None
    """Elements in each dimension; null likewise."""


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
    rejected: list[str]
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
    candidates: list[ResumeStep]
    """In the order in which a resume walks them; those that it does not look at come last."""


class StoredTensor(Document, frozen=True):
    """Tensor of a checkpoint."""

    component: str
    """Component that it belongs to."""
    key: str
    """Its name there."""
    dtype: str
    """Type of its elements, such as `BF16`."""
    shape: list[int]
    """Its shape."""
    shards: list[Shard]
    """Boxes that it is stored in."""


class Show(Document, frozen=True):
    """Answer of `show`."""

    root: str
    """Path or URL of the root."""
    checkpoint: Shown
    """The checkpoint."""
    tensors: list[StoredTensor] | UnsetType = UNSET
    """Its tensors, with `--tensors`."""


class Marked(Document, frozen=True):
    """Answer of `pin`, `unpin` and `tag`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the checkpoint."""
    step: int
    """Its step."""
    pinned: bool
    """Whether it is pinned now."""
    tags: list[str]
    """Its tags now."""
