"""Options of a run's checkpoints (`Checkpoints`) and hooks of saves and loads (`StateHooks`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from holdfast.arguments import check_arguments, format_call
from holdfast.control.reporter import CommitFunction, OnCommit, commands_of
from holdfast.errors import UsageError
from holdfast.events import Sink, log_event
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import Timestamp
from holdfast.keys import Encryption
from holdfast.ownership.tiered_options import HostTiers, Tiered, TierRules
from holdfast.policy.best import BestRule, best_rules_of
from holdfast.policy.clock import Time
from holdfast.policy.naming import DEFAULT_LABEL, LabelFunction, compile_label
from holdfast.policy.rule import Rule
from holdfast.policy.rules import number_of_bytes
from holdfast.policy.savers import SavePolicy, SideSaver
from holdfast.policy.schedule import policies_of
from holdfast.policy.triggers import SaveFunction, Trigger
from holdfast.results import PendingSave
from holdfast.saving.compression import Compress, check_choices, resolve_compress
from holdfast.staging.overlap import Mode
from holdfast.state.capture.edits import StateView
from holdfast.store.base import Store

OnExisting = Literal["keep", "replace", "error"]
MIN_BUDGET = 4 * BLOCK_NBYTES
"""Smallest memory budget in bytes: some blocks are written while others are copied."""


@check_arguments(but=("every", "keep"))
@dataclass(frozen=True, slots=True, repr=False)
class Checkpoints:
    """Options of a run's checkpoints: their root, when to save, what to keep, and how.

        Checkpoints("runs/gpt", every="500step", keep=Last(3))

    A `Trainer` takes it as `checkpoints`, a `CheckpointManager` in place of its root. The fields
    have the values that were given.

    Raises:
        UsageError: an argument is wrong.
    """

    root: str | os.PathLike[str] | Store | Tiered | None
    """The root of the run: a path, a URL, a Store, or two of them as `Tiered`. None: a Trainer
    saves nothing."""
    _: KW_ONLY
    every: str | Time | Trigger | SaveFunction | SavePolicy | None = None
    """When to save: "500step", "30min", "auto", a trigger, a function, or a `SavePolicy` of
    permanent and ephemeral saves. None: only when asked to, and a Trainer at the end of `fit`, as
    no interval suits every run."""
    keep: Rule | str | None = None
    """The rule of retention for whole states, or its text as on the command line
    ("last:3,best:loss"). None: everything is kept, so that nothing is deleted unasked."""
    savers: Sequence[SideSaver] = ()
    """Savers of some components at intervals of their own."""
    on_existing: OnExisting = "keep"
    """What a save does about older checkpoints of the same step, which exist in a run that went
    back: "keep" them, "replace" them once the newer one is committed (pinned and tagged ones
    stay), or refuse the save with an "error". The default deletes nothing and stops nothing."""
    overlap: Mode | None = None
    """Whether `save` returns before parameters and optimizer slots are copied; "check" also looks
    for changes that torch does not count (docs/saving.md). None: off in a `CheckpointManager`,
    whose loop may have to call `fence`; in a Trainer, which calls it, on where the model is on an
    accelerator."""
    memory_budget: int | str | None = None
    """Memory that a save may take for its copy of the state, in bytes or as "256MiB". None: as
    much as the state has, which is fastest."""
    compress: Compress = None
    """How files are compressed: "zstd", "lz4", "blosc2", a `Compression`, "auto", or one of these
    for each component (docs/compression.md). None: not at all, as weights shrink little."""
    frozen: Literal["by digest"] | None = None
    """How parameters that training does not change are saved: "by digest" records a digest of each
    in place of its values, so that a checkpoint of a fine-tune holds the adapter alone. The script
    must then make the same base before each resume, which compares the digests (docs/saving.md).
    None: like all others, so that a checkpoint needs nothing else."""
    encrypt: Encryption | None = None
    """The keys that checkpoints are encrypted and read with (docs/encryption.md). None: they are
    not encrypted."""
    takeover: bool = False
    """Whether to claim the run although another live process owns it. Off, because two processes
    that save into one run are nearly always a mistake."""
    label: str | LabelFunction = DEFAULT_LABEL
    """The label in the names of checkpoints' folders: a template, or a function of the Timestamp.
    The default sorts by step."""
    run_name: str | None = None
    """The value of `{run_name}` in the label."""
    sinks: Iterable[Sink] = (log_event,)
    """Functions that receive each event. The default logs to the logger `holdfast`."""
    on_commit: OnCommit | str | Sequence[str] | CommitFunction | None = None
    """A command such as "notify {folder} {step}", a function of the `Checkpoint`, or an `OnCommit`
    with a time limit: run in the background, on the leader, after each commit
    (docs/trackers.md). None: nothing."""
    save_timeout_s: float = 1800.0
    """Longest time to wait for one save, in seconds. Half an hour is far above what a save takes
    on storage that works."""
    exit_timeout_s: float = 600.0
    """Longest time, in seconds, that the interpreter's exit waits for a save under way."""
    preflight: bool = True
    """Whether the first save checks space and rights before anything is claimed."""
    broadcast: bool = False
    """Whether loads by several ranks read from the store only once what several ranks need: one
    of them reads and checks it, and sends it to the others (docs/ranks.md). Off, because ranks of
    one host read faster from its page cache than from each other."""

    def __post_init__(self) -> None:
        TierRules.combine_rules(self.root, self.keep, self.savers)
        policies_of(self.every, self.savers)
        compile_label(self.label, run_name=self.run_name)
        _ = self.memory_budget_nbytes
        check_choices(self.compress)
        commands_of(self.on_commit)
        if isinstance(self.root, HostTiers):
            self._check_host_tiers()
        for name in ("save_timeout_s", "exit_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise UsageError(f"{name}={value!r} must be a positive number of seconds")
        sinks = tuple(self.sinks)
        if not all(callable(sink) and not isinstance(sink, type) for sink in sinks):
            raise UsageError(f"sinks={self.sinks!r}: must be functions, each called with an event")
        object.__setattr__(self, "sinks", sinks)
        object.__setattr__(self, "savers", tuple(self.savers))

    @classmethod
    def of(
        cls,
        given: str | os.PathLike[str] | Store | Tiered | Checkpoints | None,
        options: Mapping[str, Any],
    ) -> Checkpoints:
        """Return `given` if it is a `Checkpoints`; else create one of that root with `options`.

        Raises:
            UsageError: an argument is wrong, or options are given beside a record.
        """
        if not isinstance(given, Checkpoints):
            return cls(given, **options)
        defaults = {field.name: field.default for field in fields(cls)}
        beside = [name for name, value in options.items() if value != defaults[name]]
        if beside:
            raise UsageError(
                f"{', '.join(beside)}: cannot be combined with a Checkpoints; use "
                f"Checkpoints(root, {', '.join(f'{name}=…' for name in beside)})"
            )
        return given

    @property
    def memory_budget_nbytes(self) -> int | None:
        """Bytes that a save may take for its copy of the state; None: no limit.

        Raises:
            UsageError: `memory_budget` is no size, or less than a save needs.
        """
        nbytes = self.memory_budget
        if isinstance(nbytes, str):
            nbytes = number_of_bytes(nbytes, what="memory_budget=")
        if nbytes is not None and self.broadcast:
            raise UsageError(
                "broadcast=True: cannot be combined with memory_budget, as loads then need fresh "
                "memory for the part of the state on this rank"
            )
        if nbytes is not None and nbytes < MIN_BUDGET:
            raise UsageError(
                f"memory_budget={self.memory_budget!r}: at least {MIN_BUDGET} bytes are needed"
            )
        return nbytes

    def _check_host_tiers(self) -> None:
        """Raise `UsageError` for options that cannot be used with a disk in each host."""
        if self.encrypt is not None:
            raise UsageError("HostTiers does not support encrypt=. Use Tiered with shared storage")
        if self.memory_budget is not None or self.broadcast:
            name = "broadcast=True" if self.broadcast else "memory_budget"
            raise UsageError(f"omit {name}: loads with HostTiers exchange blocks, in new memory")

    def check_components(self, components: Collection[str]) -> None:
        """Raise `UsageError` unless the components that the options name are among `components`.

        Raises:
            UsageError: savers, `keep` or `compress` name others.
        """
        TierRules.combine_rules(self.root, self.keep, self.savers, components)
        resolve_compress(self.compress, components)

    def __repr__(self) -> str:
        return format_call(self)


OPTIONS = frozenset(field.name for field in fields(Checkpoints)) - {"root"}
"""Names of the options, which a `CheckpointManager` takes, too."""


def best_rules(checkpoints: Checkpoints) -> tuple[BestRule, ...]:
    """List the rules `Best` of a run, of all savers and both tiers, each once; none without a root.

    >>> [str(item.rule) for item in best_rules(Checkpoints("runs/gpt", keep="last:2,best:loss"))]
    ['best loss (min)']
    """
    if checkpoints.root is None:
        return ()
    rules = TierRules.combine_rules(checkpoints.root, checkpoints.keep, checkpoints.savers)
    return best_rules_of((rules.remote, rules.local), checkpoints.savers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHooks:
    """Callbacks that a manager calls around each save and load, in the caller's thread.

    An error of a callback is raised by the manager's call, before anything is written or applied.
    """

    before_save: Callable[[Timestamp, Mapping[str, float]], Sequence[str] | None] | None = None
    """Called before the state is read, with the timestamp and the metrics of the save. It returns
    reasons not to resume from this state, which are recorded, and raises `SaveSkipped` to skip the
    save."""
    edit_save: Callable[[StateView], None] | None = None
    """Called to change what will be stored, through a view that cannot reach the live state."""
    save_begun: Callable[[PendingSave], None] | None = None
    """Called once the state was copied, with the save under way."""
    edit_load: Callable[[StateView], None] | None = None
    """Called to change what will be applied, before it is checked against the live state."""
    one_sided: Callable[[str], bool] | None = None
    """Called with the name of each component that only the state or only the checkpoint has.

    True: a load leaves a component of the state as it is, or does not load one of the checkpoint,
    and a warning is logged. A component that a checkpoint omitted, or that was dropped from it, is
    not new."""

    def __post_init__(self) -> None:
        for item in fields(self):
            hook = getattr(self, item.name)
            if hook is not None and not callable(hook):
                raise UsageError(f"hooks: {item.name}={hook!r} must be callable")
