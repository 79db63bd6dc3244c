"""JSON answers of the commands, as structs: their fields are the members that docs/cli.md lists.

`of` makes one from the members that a command gathered; one too many or of another type raises,
so that neither the page nor the JSON Schema can differ from what is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

Ending = Literal["closed", "failed", "running", "continued", "unknown"]
DocumentType = TypeVar("DocumentType", bound="Document")


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the answers and of their parts."""


def of(kind: type[DocumentType], members: Mapping[str, Any]) -> DocumentType:
    """Make an answer from its members; sequences of any kind become lists."""
    return msgspec.convert(members, kind)


class Owner(Document, frozen=True):
    """Newest claim of a run."""

    epoch: int
    """Number of the claim."""
    host: str
    """Host of its process."""
    pid: int
    """Number of its process on that host."""
    since: str
    """UTC time of the claim, ISO 8601."""
    state: Literal["alive", "dead", "closed", "unknown"]
    """Whether the process lives, as far as this host can tell; `closed`: it ended its claim."""


class Reader(Document, frozen=True):
    """Process that keeps a checkpoint from deletion. What its lease does not say is null."""

    folder: str
    """Checkpoint that is read."""
    host: str | None
    """Host of the process."""
    pid: int | None
    """Number of the process on that host."""
    since: str | None
    """UTC time of the lease, ISO 8601."""
    state: str
    """`alive` or `unknown`."""


class Unread(Document, frozen=True):
    """Checkpoint whose manifest is damaged or lost."""

    folder: str
    """Its folder."""
    reason: str
    """What is wrong, as text."""


class Unopened(Document, frozen=True):
    """Checkpoint that is encrypted for other keys, or not encrypted where that is refused."""

    folder: str
    """Its folder."""
    kind: str
    """Class of the error in `holdfast.errors`."""
    reason: str
    """The error, as text."""


class Described(Document, frozen=True, rename={"save_class": "class"}):
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
    """Folder of the checkpoint before it."""


class Listed(Described, frozen=True):
    """Checkpoint of `ls`."""

    components: list[str]
    """Names of its components."""
    in_lineage: bool
    """Whether the run stands on it; false where the run went back before it."""
    missing: list[str]
    """Files that are missing or have the wrong length."""


class Shown(Described, frozen=True):
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
    owner: Owner | None
    """Newest claim; null if there is none, or it cannot be read."""
    readers: list[Reader]
    """Processes that read checkpoints."""
    checkpoints: list[Listed]
    """Checkpoints, newest first."""
    damaged: list[Unread]
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


class SaveCost(Document, frozen=True):
    """Durations and bytes of a save; null: not recorded."""

    stall_s: float | None
    """Seconds that training stood still, to capture and copy the state."""
    write_s: float | None
    """Seconds from then until every file was on stable storage; beside training."""
    durable_s: float | None
    """Both together: until the state could not be lost any more, but for the commit."""
    upload_s: float | None
    """Seconds from the commit to the end of its upload, of a root with a remote tier."""
    upload: str | None
    """State of its upload, as for `uploads`; null: nothing is noted here."""
    nbytes: int
    """Bytes of its files as stored."""
    plain_nbytes: int
    """Bytes of all files before they were compressed."""
    linked_nbytes: int | None
    """Bytes of files that it shares with an earlier checkpoint that is left; null without
    `--saves`."""
    new_nbytes: int | None
    """Bytes of all others, which were written; null likewise."""


class LoggedSave(Document, frozen=True):
    """A save of a run, and what became of it."""

    folder: str
    """Its folder."""
    step: int | None
    """Completed optimizer windows; null where neither the manifest nor the label says it."""
    save_class: str | None = msgspec.field(name="class")
    """`permanent` or `ephemeral`; null where its manifest is gone, like the next two."""
    reason: str | None
    """Why it was saved: `interval`, `manual` and so on."""
    created: str | None
    """When it was saved, in UTC."""
    state: Literal["kept", "left behind", "deleted", "aborted", "not committed"]
    """`left behind`: a rollback went on from an earlier one. `aborted`: gc has given it up."""
    why: str | None
    """Why it was deleted or aborted, and by whom; null where no record of that is left."""
    cost: SaveCost | None
    """What it took; null where its manifest is gone."""


class Life(Document, frozen=True):
    """Time in which one process owned a run."""

    epoch: int
    """Number of its claim."""
    began: str | None
    """UTC time of the claim; null where the claim is lost, as the next two."""
    host: str | None
    """Host of the process."""
    pid: int | None
    """Number of the process there."""
    resumed_from: str | None
    """Folder that it went on from."""
    rollback: bool
    """Whether a person chose that by name."""
    takeover: bool
    """Whether it took the run from a process that was not known to be dead."""
    purpose: str | None
    """What a person claimed it for, such as a deletion and its reason; null for a training."""
    from_step: int | None
    """First step; null where not known."""
    to_step: int | None
    """Last step known of it."""
    num_checkpoints: int
    """How many of its checkpoints exist."""
    reason: str | None
    """Why its newest checkpoint was saved."""
    ending: Ending
    """How it ended; `continued`: by the same process."""
    changes: list[str]
    """What had changed since the life before."""
    saves: list[LoggedSave]
    """Its saves, oldest first."""


class Log(Document, frozen=True):
    """Answer of `log`."""

    root: str
    """Path or URL of the root."""
    lives: list[Life]
    """Lives of the run, oldest first."""
    damaged: list[Unread]
    """As for `ls`."""
    unopened: list[Unopened]
    """As for `ls`."""


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
    tensors: list[str]
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
    problems: list[ProblemFound]
    """What is wrong."""
    notes: list[str]
    """What is worth knowing and no damage."""


class Verify(Document, frozen=True):
    """Answer of `verify`."""

    root: str
    """Path or URL of the root."""
    ok: bool
    """Whether all is whole."""
    checkpoints: list[Verified]
    """Checkpoints that were read, newest first."""
    unopened: list[Unopened]
    """As for `ls`."""
    problems: list[ProblemFound]
    """Problems of claims."""
    notes: list[str]
    """Notes on the root."""


class Why(Document, frozen=True):
    """Folder and a reason."""

    folder: str
    """Folder of a checkpoint or an attempt."""
    why: str
    """The reason."""


class Judged(Document, frozen=True):
    """Checkpoint of `prune`, and what the rule does with it."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    action: Literal["keep", "delete", "thin", "kept"]
    """What becomes of it; `kept`: its deletion was decided and did not happen."""
    drop: list[str]
    """Components that are dropped."""
    why: str
    """Which rule keeps it, or why none does."""
    nbytes: int
    """Bytes that this gives back; of one of another run its size."""
    savers: list[str]
    """Savers that asked for it."""
    left_out: list[str]
    """Components that were not saved."""
    unhealthy: list[str]
    """What was wrong with the state."""


class Prune(Document, frozen=True):
    """Answer of `prune`."""

    root: str
    """Path or URL of the root."""
    dry_run: bool
    """Whether nothing was touched."""
    keep: str
    """The rule, in words."""
    checkpoints: list[Judged]
    """All checkpoints."""
    deleted: list[str]
    """Folders that were deleted."""
    thinned: list[str]
    """Folders of which components were dropped."""
    failed: list[Why]
    """What could not be done."""
    postponed: list[Why]
    """What somebody reads, or waits for its upload."""
    damaged: list[Unread]
    """As for `ls`."""
    unopened: list[Unopened]
    """As for `ls`."""
    nbytes: int
    """Bytes given back, or to give back."""


class Gone(Document, frozen=True):
    """Checkpoint, or parts of one, that a coming save deletes."""

    folder: str | None
    """Folder of the checkpoint; null: a coming save."""
    save: int | None
    """Number of that coming save; null: a checkpoint that exists."""
    step: int
    """Its step."""
    drop: list[str]
    """Components that are dropped while the rest stays; empty: all is deleted."""
    why: str
    """Why: what no longer keeps it."""
    nbytes: int
    """Bytes that this gives back."""


class ComingSave(Document, frozen=True, rename={"save_class": "class"}):
    """Save that is assumed, and what retention does after it."""

    save: int
    """Its number, from 1: the next save."""
    step: int
    """Step at which it is assumed."""
    save_class: str
    """`permanent` or `ephemeral`."""
    savers: list[str]
    """Savers that ask for it; empty where there is only one."""
    metrics: dict[str, Any]
    """Metrics that it is assumed to have."""
    gone: list[Gone]
    """What is deleted or dropped after it, oldest first."""
    nbytes: int
    """Bytes that this gives back."""
    left: int
    """Checkpoints that are left then."""
    left_nbytes: int
    """Their bytes."""


class Foretold(Document, frozen=True):
    """Checkpoint that exists, and what becomes of it."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    action: Literal["keep", "delete", "thin", "wait"]
    """`keep`: it stays whole through all saves. `thin`: components are dropped, and the rest stays.
    `wait`: it is to be deleted or thinned, and something holds it for now."""
    save: int | None
    """Number of the save after which it is deleted, first thinned, or would be; null: stays."""
    drop: list[str]
    """Components that are dropped by the end, if it is thinned."""
    keeps: str | None
    """What keeps it last: the clause of the rule, pin or tag; null: it goes at the next save."""
    why: str | None
    """Why it is deleted or thinned; null: it stays."""
    waits_for: str | None
    """What holds it for now, such as a reader."""
    nbytes: int
    """Its bytes now."""


class Forecast(Document, frozen=True):
    """Answer of `forecast`."""

    root: str
    """Path or URL of the root."""
    keep: str
    """The rule, in words."""
    recorded_by: str | None
    """Folder of the checkpoint that records the rule; null: `--keep` gave it."""
    running: bool
    """Whether the owner of the run lives, as far as this host can tell. Else the next save comes
    after a resume."""
    assumptions: list[str]
    """What the forecast rests on, one text each."""
    checkpoints: list[Foretold]
    """Checkpoints that exist, newest first."""
    saves: list[ComingSave]
    """Coming saves, the next one first."""
    damaged: list[Unread]
    """As for `ls`; they stay."""
    unopened: list[Unopened]
    """As for `ls`; they stay."""


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


class Save(Document, frozen=True):
    """Answer of `save`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the new checkpoint."""
    step: int | None
    """Its step; null where retention has deleted it already."""
    tags: list[str]
    """Tags that were asked for."""
    waited_s: float
    """Seconds from the request to the answer."""


class LastUpload(Document, frozen=True):
    """Upload that ended last."""

    folder: str
    """Folder of the checkpoint."""
    nbytes: int | None
    """Bytes that were sent."""
    upload_s: float | None
    """Seconds that it took."""
    requests: int | None
    """Requests that it took."""


class Uploaded(Document, frozen=True):
    """Checkpoint of `uploads`. What its note does not say is null."""

    folder: str
    """Its folder."""
    step: int | None
    """Its step; null where it is encrypted."""
    nbytes: int
    """Bytes of its files."""
    state: str
    """`uploaded`, `waiting`, `sending`, `failed`, `refused`, `deleted` (there), `unwanted` or
    `unknown`."""
    sent_nbytes: int | None
    """Bytes that are there already."""
    tries: int | None
    """Tries so far."""
    error: str | None
    """Error of the last try."""
    changed: str | None
    """UTC time of the note."""


class Uploads(Document, frozen=True):
    """Answer of `uploads`."""

    root: str
    """Path of the local root."""
    remote: str
    """URL of the remote root."""
    unreachable: str | None
    """Why the remote root was not looked at."""
    error: str | None
    """Last error of the uploads."""
    changed: str | None
    """UTC time of the record."""
    last: LastUpload | None
    """Upload that ended last."""
    checkpoints: list[Uploaded]
    """Checkpoints, newest first."""
    waiting: int
    """How many are not uploaded yet."""
    waiting_nbytes: int
    """Their bytes."""


class Markers(Document, frozen=True):
    """Markers that stay until somebody names their writer dead."""

    epoch: int
    """Number of the writer's claim."""
    number: int
    """How many markers."""


class Gc(Document, frozen=True):
    """Answer of `gc`."""

    root: str
    """Path or URL of the root."""
    dry_run: bool
    """Whether nothing was touched."""
    removed: list[Why]
    """What was removed."""
    marked: list[Why]
    """What got a marker, so that it cannot be committed any more."""
    kept: list[Why]
    """What stays, and why."""
    failed: list[Why]
    """What could not be removed."""
    markers: list[Markers]
    """Markers that stay."""
    nbytes: int
    """Bytes given back."""


class FileSize(Document, frozen=True):
    """File of a checkpoint."""

    name: str
    """Its name."""
    nbytes: int
    """Its length."""


class GcDamaged(Document, frozen=True):
    """Answer of `gc --damaged`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the damaged checkpoint."""
    why: str
    """What is wrong with its manifest."""
    files: list[FileSize]
    """Its files."""
    nbytes: int
    """Their bytes."""
    pinned: bool
    """Whether it is pinned."""
    tags: list[str]
    """Tags that it was given after the save."""
    is_latest: bool
    """Whether `latest` names it."""
    goes_on_from: str | None
    """Folder from which the run goes on without it."""
    warnings: list[str]
    """What to look at first."""
    deleted: bool
    """Whether it was deleted."""
    kept_because: str | None
    """Why it was kept although its deletion was asked for."""
    marker: bool
    """Whether a tombstone stays."""


class DriftedCheckpoint(Document, frozen=True):
    """Checkpoint of `drift`."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    created: str
    """UTC time of the save, ISO 8601."""


class DriftedLayer(Document, frozen=True):
    """Tensors whose paths begin alike, and how much they change."""

    component: str
    """Component that they are in."""
    layer: str
    """Beginning of their paths."""
    num_tensors: int
    """How many tensors these are."""
    changes: list[float | None]
    """For each checkpoint but the first the norm of the difference from the one before, over the
    norm before; null: there is nothing to compare with, it was zero, or is not finite."""


class Drift(Document, frozen=True):
    """Answer of `drift`."""

    root: str
    """Path or URL of the root."""
    depth: int
    """Parts of a path that make the name of a layer."""
    checkpoints: list[DriftedCheckpoint]
    """Checkpoints that were compared, oldest first."""
    layers: list[DriftedLayer]
    """Layers in the order of the model."""
    total: list[float | None]
    """The same of all layers together that changed at all."""
    num_read: int
    """Comparisons of two tensors for which both were read."""
    num_unread: int
    """Comparisons that needed no read, because digests are equal."""
    not_finite: list[str]
    """Tensors with NaN or infinite numbers, which are left out of the norms."""
    skipped: list[Why]
    """Checkpoints that were passed over, such as those without the component."""
    plot: str | None
    """The file that was drawn."""


class Input(Document, frozen=True):
    """Cost or rate that an advice rests on."""

    name: str
    """What it is."""
    value: float
    """Seconds, or a share."""
    source: Literal["measured", "given", "assumed"]
    """Where it comes from."""
    basis: str
    """What it was measured from, or the option."""


class Auto(Document, frozen=True):
    """Interval that `every="auto"` would choose."""

    interval_s: float
    """Seconds between two saves."""
    limit: str
    """What limits it."""
    text: str
    """Both, in words."""


class Advise(Document, frozen=True):
    """Answer of `advise`."""

    root: str
    """Path or URL of the root."""
    every: str
    """Interval to paste."""
    inputs: list[Input]
    """Costs and rates."""
    advice: dict[str, Any]
    """Fields of `holdfast.policy.advisor.Advice`."""
    today: dict[str, Any] | None
    """The present interval: `interval_s`, `steps`, `num_pairs`, `is_by_interval`, `goodput`,
    `saving`, `lost`, `down`."""
    starts: list[dict[str, Any]]
    """Lives: `epoch`, `created`, `host`, `ending`, `resumed_from`, and of a failure
    `resume_gap_s`, `steps_left_behind` or null."""
    num_saves: int
    """Saves that were recorded."""
    nbytes: int | None
    """Bytes of a save."""
    trained_s: float
    """Seconds of training that were recorded."""
    unreadable: list[str]
    """Checkpoints that could not be read."""
    auto: Auto | None
    """What `every="auto"` would choose."""
    notes: list[str]
    """What to know about it."""


class Series(Document, frozen=True):
    """Curve of a metric."""

    panel: str
    """Title of its panel."""
    name: str
    """The metric."""
    points: list[list[float]]
    """Pairs of step and value."""


class PlotStart(Document, frozen=True):
    """Start of a life, but the first."""

    step: int | None
    """Step from which it went on; null where not known."""
    created: str
    """UTC time of the claim."""
    host: str
    """Host of its process."""
    before: Ending
    """How the life before ended."""


class Plot(Document, frozen=True):
    """Answer of `plot`."""

    root: str
    """Path or URL of the root."""
    output: str | None
    """File that was written."""
    series: list[Series]
    """Curves."""
    saves: list[int]
    """Steps of the saves."""
    starts: list[PlotStart]
    """Starts of all lives but the first."""
    notes: list[str]
    """What to know about it."""


class KeysGenerate(Document, frozen=True):
    """Answer of `keys generate`."""

    path: str
    """File of the key."""
    key: str
    """What it is, and its id."""
    public_path: str | UnsetType = UNSET
    """File of the public key, with `--pair`."""


class Encrypted(Document, frozen=True):
    """Encrypted checkpoint."""

    folder: str
    """Its folder."""
    suite: str
    """Name of the cipher suite."""
    recipients: list[str]
    """Keys that open it."""
    boxes: list[int]
    """Numbers of its boxes of keys."""


class Rotated(Document, frozen=True):
    """Checkpoint of `keys rotate`."""

    folder: str
    """Its folder."""
    outcome: Literal["done", "was so", "failed"]
    """What became of it."""
    reason: str
    """Why it failed; else empty."""


class KeysList(Document, frozen=True):
    """Answer of `keys list`."""

    root: str
    """Path or URL of the root."""
    checkpoints: list[Encrypted]
    """Encrypted checkpoints, newest first."""
    failed: list[Rotated]
    """Those that cannot be read."""


class KeysRotate(Document, frozen=True):
    """Answer of `keys rotate`."""

    root: str
    """Path or URL of the root."""
    checkpoints: list[Rotated]
    """Encrypted checkpoints, newest first."""


class ChildLived(Document, frozen=True):
    """Line of `run` and `train` after each life of the command."""

    life: int
    """Its number, from 1."""
    exit_status: int | None
    """Exit status; null if a signal ended it."""
    signal: str | None
    """Signal that ended it."""
    asked: str | None
    """Signal that asked it to stop."""
    error: str | None
    """Why it could not be started."""
    duration_s: float
    """Seconds that it lived."""
    from_step: int | None
    """Step of the run before."""
    to_step: int | None
    """Step of the run after."""
    has_progressed: bool
    """Whether it made progress."""
    failures: int
    """Lives in a row without progress."""
    restart_in_s: float | None
    """Pause before the next life; null after the last."""


class Summary(Document, frozen=True):
    """All lives of `run` and `train`."""

    outcome: Literal["finished", "requeue", "stopped", "gave-up", "wrong"]
    """How it ended; `wrong`: arguments of `train` are."""
    code: int
    """Exit code of the command."""
    from_step: int | None
    """Step of the run before the first life."""
    to_step: int | None
    """Step of the run after the last."""
    lives: list[ChildLived]
    """The lives."""


class RunEnd(Document, frozen=True):
    """Last line of `run` and `train`."""

    summary: Summary
    """All lives."""


class SchemaShown(Document, frozen=True):
    """Answer of `schema`."""

    schema: dict[str, Any]
    """The JSON Schema, draft 2020-12."""
