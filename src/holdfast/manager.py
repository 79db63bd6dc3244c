"""`CheckpointManager`: the object with which a training loop saves and resumes.

Public methods run in the training thread; those that save or load need `count_calls`, so that all
ranks count alike (tests/saving/test_call_counter.py). `session` builds the parts.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from holdfast.arguments import check_arguments
from holdfast.checkpoints import OPTIONS, Checkpoints, OnExisting, StateHooks
from holdfast.control.reporter import CommitFunction, OnCommit
from holdfast.control.stop import Stop
from holdfast.errors import HoldfastError, SaveSkipped
from holdfast.events import Sink, log_event
from holdfast.format.manifest import Timestamp
from holdfast.keys import Encryption
from holdfast.load_controller import LoadController
from holdfast.loading.search import LoadOptions, Unhealthy
from holdfast.ownership.annotations import Marking
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Time
from holdfast.policy.naming import DEFAULT_LABEL, LabelFunction
from holdfast.policy.rule import Rule, SaveClass
from holdfast.policy.savers import Due, SavePolicy, SideSaver
from holdfast.policy.triggers import Event as TriggerEvent
from holdfast.policy.triggers import SaveFunction, Trigger
from holdfast.ranks.coordinator import Coordinator
from holdfast.results import Checkpoint, CheckpointList, PendingSave, build_checkpoint, parse_seen
from holdfast.save_controller import SaveController, check_saved_components
from holdfast.saving.compression import Compress
from holdfast.saving.progress_counters import Counters
from holdfast.session import NEVER_QUIET, Calls, Session, count_calls
from holdfast.staging.overlap import Mode
from holdfast.state.capture.edits import Edit
from holdfast.state.patterns import convert_names
from holdfast.state.resizing import NO_RESIZE, Resize
from holdfast.state.selection import RenameRule
from holdfast.store.base import Store
from holdfast.threads.buffers import collector_paused


class CheckpointManager(Marking):
    """Saves and resumes the state of one run.

    Args:
        root: where this run's checkpoints live: a path, a URL, a Store, or two of them as `Tiered`.
            Or a `Checkpoints`, which has a root and options; those are then not given here.
        state: the named components: modules, optimizers, schedulers, generators, anything with
            `state_dict` and `load_state_dict`, dicts and lists of plain values and tensors.
            Generator states of Python, NumPy and torch are added as `rng`. The first whole save
            warns of parameters that an optimizer steps and no component holds.
        every: when `maybe_save` saves: "500step", "30min", "auto", a trigger, a function, or a
            `SavePolicy` of permanent and ephemeral saves. None: never by itself.
        max_duration: how long the run is to be, for intervals such as "0.1dur".
        keep: what retention keeps of the whole states, as a rule or as on the command line
            ("last:3,best:loss"). None: everything.
        savers: further savers of some components, with intervals of their own; see `SideSaver`.
        on_existing: what a save does with older checkpoints of the same step, which exist after a
            rollback: "keep" them, "replace" them once the newer one is committed (pinned and
            tagged ones stay), or refuse the save with an "error".
        on_failure: what the saves after a failed one do: "raise" its error, or continue ("warn"),
            so that only an event and `PendingSave.wait` report it. The failure of the last save
            is raised by `wait` and `close` in either case.
        overlap: whether `save` returns before parameters and optimizer slots are copied. Call
            `fence` before they are changed other than by a torch optimizer's step
            (docs/saving.md); "check" also looks for such changes where torch does not count them.
            None: no.
        memory_budget: how much memory a save may take for its copy of the state, in bytes or as
            "256MiB". A larger state is staged in waves: `save` returns when the last wave was
            copied, with most of the state written. A load that is not in place then reads the
            checkpoint twice: to check it, and to load it. None: as much as the state has.
        compress: how files are compressed: "zstd", "lz4", "blosc2", a `Compression`, "auto" for
            what makes saves faster here, if anything does, or one of these for each component that
            is to be compressed (docs/compression.md).
        frozen: "by digest" records parameters that training does not change by their digests, and
            does not save them. The script must make the same base before each resume, which
            compares it (docs/saving.md). None: they are saved like all others.
        hooks: callbacks around saves and loads; see `StateHooks`.
        stop: the signals that end the run; `maybe_save` saves after one has arrived.
        encrypt: the keys that checkpoints are encrypted and read with (docs/encryption.md). None:
            they are not encrypted.
        counters: gives `epoch`, `cycle`, `samples` and `tokens` where a call does not.
        config: settings of the script by name, such as `vars(args)`. Checkpoints record them as
            text, and what a later life of the run has changed, which `holdfast log` shows.
        takeover: claim the run although another live process owns it.
        label: readable name of a checkpoint: a template, or a function of the Timestamp.
        run_name: what `{run_name}` in the label stands for.
        sinks: receivers of events; the default logs to the logger `holdfast`.
        on_commit: a command such as "notify {folder} {step}", a function of the `Checkpoint`, or
            an `OnCommit`: run in the background after each commit (docs/trackers.md).
        save_timeout_s: longest time to wait for one save, in seconds.
        exit_timeout_s: longest time that the interpreter's exit waits for a save under way.
        preflight: whether the first save checks space and permissions before it claims the run.
        broadcast: whether several ranks read once, in a load, what they share (docs/ranks.md).
        ranks: the ranks that save and load together (docs/ranks.md): those of torch's default
            process "group", if there is one; a `Coordinator`; or None, for this process alone.

    Use a manager in one process, from one thread at a time: otherwise saves and loads raise
    `ManagerUnusable`. Reading (`list`, `load`) claims nothing;
    `resume` and the first save claim the run.

    Raises:
        UsageError: an argument is wrong.
        UnsupportedState: something in `state` can never be saved; every path is listed.
    """

    @check_arguments(but=("every", "max_duration", "keep"))
    def __init__(
        self,
        root: str | os.PathLike[str] | Store | Tiered | Checkpoints,
        state: Mapping[str, Any],
        *,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None = None,
        max_duration: str | Time | None = None,
        keep: Rule | str | None = None,
        savers: Sequence[SideSaver] = (),
        on_existing: OnExisting = "keep",
        on_failure: Literal["raise", "warn"] = "raise",
        overlap: Mode | None = None,
        memory_budget: int | str | None = None,
        compress: Compress = None,
        frozen: Literal["by digest"] | None = None,
        hooks: StateHooks | None = None,
        stop: Stop | None = None,
        encrypt: Encryption | None = None,
        counters: Counters | None = None,
        config: Mapping[str, object] | None = None,
        takeover: bool = False,
        label: str | LabelFunction = DEFAULT_LABEL,
        run_name: str | None = None,
        sinks: Iterable[Sink] = (log_event,),
        on_commit: OnCommit | str | Sequence[str] | CommitFunction | None = None,
        save_timeout_s: float = 1800.0,
        exit_timeout_s: float = 600.0,
        preflight: bool = True,
        broadcast: bool = False,
        ranks: Coordinator | Literal["group"] | None = "group",
    ) -> None:
        self._session = session = Session(
            root,
            {name: value for name, value in locals().items() if name in OPTIONS},
            state,
            max_duration=max_duration,
            on_failure=on_failure,
            hooks=hooks,
            stop=stop,
            counters=counters,
            config=config,
            ranks=ranks,
        )
        self.state, self.store = session.state, session.store
        self._catalog = session.catalog
        self._saves, self._loads = SaveController(session), LoadController(session)
        self.one_thread = threading.RLock()
        self.calls = Calls(session) if session.ranks.world_size > 1 else None

    def __repr__(self) -> str:
        session, saver = self._session, self._session.saver
        owning = "owns the run" if self.is_owner else "owns nothing"
        owning = "closed" if session.is_closed else owning
        standing, pending = saver.standing, saver.pending
        at = "" if standing is None else f", at step {standing.step}"
        is_fine = pending is None or (pending.done() and pending.failure() is None)
        saving = "" if is_fine else f", {pending!r}"
        return f"<CheckpointManager of {self.store.url!r}: {owning}{at}{saving}>"

    # Saving

    @count_calls("save")
    @check_arguments()
    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Iterable[str] = (),
        epoch: int | None = None,
        cycle: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        components: Iterable[str] | None = None,
        reason: str = "manual",
        save_class: SaveClass = "permanent",
        wait: bool = False,
    ) -> PendingSave:
        """Save a checkpoint: copy the state now, and write it in the background.

        Returns when the state was copied (with `overlap`, all but parameters and optimizer slots).
        With `wait` returns when the checkpoint is committed, which is sooner than a `wait()`
        afterwards: writing begins beside the copy.
        `step` counts completed optimizer windows, `epoch` and `cycle` those that have ended;
        `samples` and `tokens` are totals of the run.
        `save_class` says whether later saves may replace it; retention obeys what was recorded.
        `components` names what to save (default: all); a run cannot resume from a part.
        Saving an unchanged state again at the step of the run's latest checkpoint returns that
        checkpoint and writes nothing.

        Raises:
            SaveFailed: an earlier background save failed, so this one was not begun; or, with
                `wait`, this one did not commit.
            OwnedElsewhere, Superseded: another process owns the run.
            UnsupportedState: something cannot be saved; every path is listed.
            PreflightFailed: the first save would fail; every problem is listed.
            DeadlineExceeded: the save before this one hangs.
            UsageError: a CUDA graph is being captured.
        """
        counters = {"epoch": epoch, "cycle": cycle, "samples": samples, "tokens": tokens}
        now = self._session.clock.now(step, **counters)
        only = check_saved_components(components, self.state)
        due = Due(save_class, reason, components=only)
        pending = self._saves.start_save(now, due, metrics, tags=tags, is_awaited=wait)
        if wait and not isinstance(pending.failure(), SaveSkipped):
            pending.wait()
        self._saves.raise_upload_error()
        return pending

    @count_calls("maybe_save")
    @check_arguments()
    def maybe_save(
        self,
        step: int,
        *,
        epoch: int | None = None,
        cycle: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        metrics: Mapping[str, float] | None = None,
        event: TriggerEvent | Sequence[TriggerEvent] = "step",
        vetoes: Collection[str] = (),
        wanted: Due | None = None,
    ) -> PendingSave | None:
        """Save if `every` or a saver is due, a signal has arrived, or a save was requested.

        Call it after each completed step. A step is also saved if a rule `Best` keeps the
        `metrics` that a validation has measured at it (docs/keeping.md). `event` is what has just
        happened, for triggers that look at more than steps; `vetoes` names what forbids ephemeral
        saves at present; `wanted` is saved in any case, together with what is due.

        Raises:
            SaveFailed: an earlier background save failed.
            UnsupportedState: an optimizer has made a slot that cannot be saved.
            UsageError: `every` counts something that is not given here, or a CUDA graph is being
                captured when a save is due.
        """
        counters = {"epoch": epoch, "cycle": cycle, "samples": samples, "tokens": tokens}
        return self._saves.save_if_due(step, counters, metrics, event, vetoes, wanted)

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics of a step in the history of the run, which `holdfast plot` draws.

        `save` and `maybe_save` record theirs; this is for others. Values on an accelerator are read
        later, and those that are no numbers are left out.
        """
        self._session.recorder.record_metrics(step, metrics)

    def is_quiet(self, step: int) -> bool:
        """Whether `maybe_save(step)` would certainly be a no-op; a cheap check for short steps.

        No save is due by then or under way, no signal has arrived, and the store was checked for
        requests less than a second ago. Never with several ranks, which count the calls.
        """
        session = self._session
        before_step, before_s = session.quiet
        return step < before_step and time.monotonic() < before_s and not session.events.has_signal

    def wait(self, timeout_s: float | None = None, *, uploads: bool = True) -> None:
        """Block until all saves, uploads and housekeeping have ended; raise their errors.

        `uploads=False`: uploads to a remote tier are not waited for, so a save in the local tier
        counts as done; `close` waits for uploads within a limit of its own.

        Raises:
            SaveFailed: the background save failed.
            UploadFailed: an upload failed, and `on_upload_failure` is "raise".
            DeadlineExceeded: it takes longer than `timeout_s` (default: the save deadline).
        """
        session = self._session
        session.check_process()
        limit_s = timeout_s if timeout_s is not None else session.saver.limit_s
        end = time.monotonic() + limit_s
        session.wait_for_save(limit_s)
        session.saver.raise_failure()
        if uploads:
            session.uploads.wait_for_uploads(max(end - time.monotonic(), 0))
            session.uploads.raise_failure()

    def fence(self) -> None:
        """Wait, with `overlap`, until parameters and optimizer slots may be changed.

        Steps of torch optimizers, `resume` and `load` wait by themselves. On CUDA the current
        stream waits, and the host does not: later work of the stream may change them.

        Raises:
            DeadlineExceeded: the copy of a save under way hangs.
        """
        self._session.overlap.step_guard.wait_before_change()

    # Loading

    @count_calls("load")
    @check_arguments()
    @collector_paused()
    def resume(
        self,
        which: str | int = "latest",
        *,
        unhealthy: Unhealthy = "avoid",
        seen: str | None = None,
        in_place: bool | None = None,
        new: Iterable[str] = (),
        without: Iterable[str] = (),
        override: Iterable[str] = (),
        resize: Resize = NO_RESIZE,
        required: bool = False,
        strict: bool = True,
    ) -> Checkpoint | None:
        """Claim the run and load its newest usable checkpoint; None if no whole state was saved.

        Checkpoints that are damaged or lack a component of the state are skipped, listed in
        `rejected` and kept; where only `rng` is missing there is a note. Those whose state was
        unhealthy are skipped too, unless no other is left or `unhealthy` is "accept". With another
        `which` the run is rolled back to that checkpoint, and later ones leave its lineage. `seen`
        is that of the newest `Checkpoint` that the caller knows of, kept elsewhere: the latest must
        be that one or a later one.

        `in_place` reads straight into the live tensors, each block once or while it is checked:
        sooner, and without memory for a second copy of the state. Checkpoints found damaged while
        reading are skipped too; but when no usable one is left, the state is mixed and the manager
        refuses to save it. By default it is True for the latest, as long as this manager has loaded
        and saved nothing and `maybe_save` was not called. Otherwise it is False: the state is
        replaced only after all of the checkpoint was read and checked.

        `new` names components of the state that the checkpoint lacks: they stay as they are.
        `without` names components that only the checkpoint has: they are not loaded. All others
        are loaded, and the run continues from there; `skip_notes` lists both.

        `strict=False` resumes with modules that have gained or lost parameters: new ones keep their
        initial values, and optimizers have no state for them; all others are resumed. A warning
        lists both kinds. Whole components are named in `new` or `without` instead.

        `override` names settings that take the script's value: options of optimizers, such as "lr"
        or "optimizer.param_groups.0.lr" of one group, and those of schedulers, such as
        "scheduler.total_steps". All others are the checkpoint's, and a warning names those that the
        script has changed (docs/loading.md).

        `resize` maps paths or patterns of tensors to the dimension in which they may have grown or
        shrunk: "rows" (0), "columns" (1) or its number (docs/loading.md). Old rows are loaded, new
        ones keep their live values, and the optimizer's slots follow, with zeros.

        With `required`, having nothing to resume from is an error, and no new run is started.

        Raises:
            OwnedElsewhere: a live process owns the run.
            NoCheckpoint: nothing matches `which`, or `required` and there is no checkpoint.
            RolledBack: what was seen before is gone; nothing was claimed or changed.
            SealError: the newest is encrypted for other keys, or not encrypted.
            NoUsableCheckpoint: checkpoints exist, but none is both whole and usable.
            MismatchError: the checkpoint does not fit the live state; nothing was changed.
            FormatError: a checkpoint that was named explicitly is damaged.
            OpaqueLoadFailed: the state was replaced in part when something failed.
            UsageError: a CUDA graph is being captured, nothing has what `override` names, or it
                cannot be applied (the state is loaded then, and not saved), or the checkpoint has a
                component that `new` names, or lacks one that `without` names; or
                with `on_existing="error"` there are checkpoints of later steps.
        """
        self._loads.expect_ready("resume")
        if in_place is None:
            is_first = which == "latest" and self._session.is_unused
            in_place = is_first and not self._session.applier.is_sharing
        options = LoadOptions(
            edit=self._session.hooks.edit_load,
            in_place=in_place,
            is_grown=not strict,
            resize=resize,
            sides=self._loads.sides(new, without),
        )
        known = parse_seen(seen)
        return self._loads.resume(
            which, options, override, unhealthy=unhealthy, seen=known, required=required
        )

    @count_calls("load")
    @check_arguments()
    def start_new(self) -> None:
        """Claim the run and start a new one here, beside the checkpoints of the run before.

        Takes the place of `resume`. The state stays as it is. Earlier checkpoints stay, whatever
        `keep` says; `resume` and `"latest"` no longer find them, and `load` takes one by its
        folder's name. A script that always calls this starts from the beginning at each restart.

        Raises:
            OwnedElsewhere: a live process owns the run.
            UsageError: this manager has resumed, saved or loaded a whole state before; or with
                `on_existing="error"` there are checkpoints.
        """
        self._loads.expect_ready("start_new")
        self._loads.start_new()

    @count_calls("load")
    @check_arguments()
    @collector_paused()
    def load(
        self,
        which: str | int = "latest",
        *,
        components: Iterable[str] | None = None,
        strict: bool = True,
        rename: RenameRule = None,
        include: Iterable[str] = (),
        skip: Iterable[str] = (),
        edit: Edit | None = None,
        verify: bool = True,
        in_place: bool = False,
        new: Iterable[str] = (),
        without: Iterable[str] = (),
        override: Iterable[str] = (),
        resize: Resize = NO_RESIZE,
    ) -> Checkpoint:
        """Load a checkpoint, or parts of it, into the live state. Does not claim the run.

        `components` names what to load (default: all); `include` and `skip` choose by paths and
        patterns (docs/loading.md), and what they leave out keeps its live value; `rename` maps
        stored paths to live ones; `edit` changes what is stored before it is compared with the
        live state, in the place of the hook `edit_load`. With `strict=False` missing and
        unexpected leaves are reported in `skip_notes` and a warning instead of raised. When this
        manager owns the run, the run continues from a full load. `in_place`, `new`, `without`,
        `override` and `resize` as for `resume`: damage in place leaves the state mixed until a
        whole load succeeds.

        Raises:
            UsageError: an argument names nothing, or an edit is not possible.
            NoCheckpoint: no checkpoint matches `which`.
            FormatError: the checkpoint is damaged; names file and tensors.
            MismatchError: the checkpoint does not fit the live state; nothing was changed.
            OpaqueLoadFailed: the state was replaced in part when something failed.
            UsageError: a CUDA graph is being captured.
        """
        self._loads.expect_ready("load")
        options = LoadOptions(
            components=None if components is None else convert_names(components, "components"),
            strict=strict,
            rename=rename,
            include=convert_names(include, "include"),
            skip=convert_names(skip, "skip"),
            verify=verify,
            edit=edit if edit is not None else self._session.hooks.edit_load,
            in_place=in_place,
            resize=resize,
            sides=self._loads.sides(new, without),
        )
        return self._loads.load(which, options, override)

    def count_from(self, timestamp: Timestamp) -> None:
        """Set counters and training time from `timestamp`, for a state loaded from another root.

        Call it before the first save. Intervals continue from there, and no step counts as saved.
        """
        self._session.quiet = NEVER_QUIET
        self._session.clock.count_from(timestamp)
        self._session.warnings.positions.start_counting(timestamp.step)

    @check_arguments()
    def expect_metrics(self, until: float = math.inf) -> None:
        """Say up to which step metrics that `keep` needs may be missing, as before a validation.

        Up to then no warning says that no checkpoint has them. `inf`: until the next call.
        """
        self._session.emit.first_metrics_at = until

    # Listing; pins and tags are in `Marking`

    def list(self) -> CheckpointList:
        """List all committed checkpoints, newest first."""
        catalog = self._session.catalog
        catalog.look_again()
        return CheckpointList(
            build_checkpoint(catalog.find_store(entry.folder), entry)
            for entry in catalog.checkpoints()
        )

    @property
    def is_owner(self) -> bool:
        """Whether this manager has claimed the run."""
        return self._session.is_owner

    # Ending

    def close(self) -> None:
        """Finish saves and uploads, and release the run cleanly. A second call is a no-op.

        Ends within `save_timeout_s` and a few seconds, also where the storage hangs; in a follower
        after twice that, if the leader may wait for uploads (`max_lag`). Uploads get at most
        `close_timeout_s` of `Tiered`, and end in time for the `grace` of a `Stop`.

        Raises:
            SaveFailed: a background save failed, and its error was not raised yet.
            UploadFailed: not all was uploaded in time, and `on_upload_failure` is "raise".
            DeadlineExceeded: a save hangs; it was given up.
        """
        self._session.finish(self._session.saver.limit_s)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        session = self._session
        session.untrained = (0, ())  # the loop may have failed at its first step
        if session.clock.unsaved is not None and not self._saves.knows_exceptions:
            session.warnings.of_exception(error, session.clock.unsaved)
        try:
            self.close()
        except HoldfastError as closing:
            # The caller must see the loop's own error; this one is only logged.
            session.emit("save_failed", f"while closing after {error!r}: {closing}")
