"""Forecast of retention: deletions at the coming saves, decided as the manager decides them.

Reads only. Adds assumed saves to the checkpoints of a root, one after the other, and asks
`holdfast.policy.retention.judge` after each, which also decides the deletions of the run itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction

from holdfast.errors import FormatError, NoCheckpoint, UsageError
from holdfast.format.manifest import RunPolicy, Timestamp
from holdfast.maintenance.resume_plan import standing
from holdfast.maintenance.retention import candidate, share_files
from holdfast.ownership.claim import is_closed
from holdfast.ownership.process import liveness, utc_text
from holdfast.policy.retention import Decision, judge, may_rest_on, unmet
from holdfast.policy.rule import MAIN, Candidate, Rule
from holdfast.policy.rules import Nothing, best_rules, recorded_time
from holdfast.policy.savers import Due, SideSaver
from holdfast.policy.schedule import SaveSchedule, policies_from_texts, rule_of
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store

_Order = tuple[int, int]
_MAX_LOOKS = 20_000
"""How often the schedule is asked for the next saves, if its intervals are not in steps."""
_MAX_S = 1e11
"""Longest time to look ahead; later than this, dates cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedSave:
    """Assumed save, and the decisions after it, by the order of each checkpoint."""

    save: Candidate
    deletions: Mapping[_Order, Decision]
    """Those that delete a checkpoint or drop components of it, oldest checkpoint first."""
    left: Mapping[_Order, Decision]
    """Those that keep a checkpoint, with the checkpoint as it is after the deletions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionForecast:
    """Deletions that follow from the coming saves of a run."""

    rule: Rule
    recorded_by: str | None
    """Folder of the checkpoint that records the rule; None if the caller gave it."""
    saves: tuple[AssumedSave, ...]
    assumptions: tuple[str, ...]


def forecast_retention(
    store: Store, entries: Sequence[Entry], *, keep: Rule | None = None, number: int = 10
) -> RetentionForecast:
    """Decide what retention deletes at the next `number` saves, by default by the recorded rule."""
    catalog = Catalog(store)
    after, is_running = _newest_order(store, catalog)
    point = standing(store).point
    resumed_from = None if point is None else point.order
    orders = {name.order for name in catalog.lineage()}
    if not is_running:  # the next save follows a resume
        orders = {order for order in orders if resumed_from and order <= resumed_from}
    history = [entry for entry in entries if entry.order in orders]
    if not history:
        raise NoCheckpoint(f"{store.url}: the run has no checkpoint to resume from")
    first = catalog.fresh_epoch()
    by_order = {entry.order: entry for entry in entries if first <= entry.order[0] <= after[0]}
    found = {order: candidate(store, entry) for order, entry in by_order.items()}
    recorded = next((entry for entry in history if entry.manifest.policy is not None), None)
    policy = None if recorded is None else recorded.manifest.policy
    rule = keep if keep is not None else _recorded_rule(store, policy)
    awaited = [best.metric for best in best_rules(rule) if best.wait]
    coming = _Coming(
        [found[entry.order] for entry in history], is_running=is_running, unmeasured=awaited
    )
    dues = coming.scheduled(policy, number)
    assumed = "saves are made at the recorded intervals only"
    if len(dues) < number:
        dues = coming.repeated(number)
        assumed = "saves are like the newest one, and as far apart as the last two"
    simulation = _Simulation(
        rule=rule,
        left=found,
        lineage=orders,
        resumed_from=resumed_from,
        replaces=policy is not None and policy.replaces,
        share_files=lambda a, b: (
            a in by_order and b in by_order and share_files(store, by_order[a], by_order[b])
        ),
        sizes={order: _component_sizes(entry) for order, entry in by_order.items()},
    )
    lacks = unmet([*found.values()], rule)
    return RetentionForecast(
        rule=rule,
        recorded_by=None if keep is not None or recorded is None else recorded.folder,
        saves=tuple(simulation.saves(coming.candidates(dues, after, _expected_sizes(history)))),
        assumptions=(
            assumed,
            *([] if is_running else [f"the run resumes from {history[0].folder}"]),
            *(f"{p!r} keeps everything, as no checkpoint has {lack}" for p, lack in lacks.items()),
            "each save has the metrics of the newest checkpoint, and shares no file with another",
            *(f"no value of {metric!r} is added" for metric in awaited),
            "saves and uploads succeed, and no checkpoint is damaged or being read",
        ),
    )


def _newest_order(store: Store, catalog: Catalog) -> tuple[_Order, bool]:
    """Return the order before the one of the next save, and whether the run's owner may live."""
    attempts = catalog.attempts()
    epoch = catalog.highest_epoch() or max((name.epoch for name in attempts), default=0)
    try:
        claim = catalog.writer(epoch) if epoch else None
    except FormatError:
        claim = None
    is_running = claim is not None and not (claim.purpose or is_closed(store, epoch, claim.nonce))
    if claim is None or not is_running or liveness(claim.process) == "dead":
        return (epoch + 1, 0), False
    return (epoch, max((n.sequence for n in attempts if n.epoch == epoch), default=0)), True


def _recorded_rule(store: Store, policy: RunPolicy | None) -> Rule:
    tiers = Ledger(store).tiers()
    text = "" if policy is None else policy.keep
    if policy is not None and policy.keep_remote is not None and tiers is None:
        text = policy.keep_remote
    if not text:
        raise UsageError(
            f"{store.url}: no checkpoint records the rule of the run as text, as the rule is your "
            "own class, or the checkpoints are imported: give a rule, as --keep last:3"
        )
    rule = rule_of(text)
    if isinstance(rule, Nothing):
        remote = "the remote root" if tiers is None else tiers.remote
        raise UsageError(
            f"{store.url}: with keep_local=0 each checkpoint is deleted here once it is uploaded: "
            f"preview {remote} instead"
        )
    return rule


def _component_sizes(entry: Entry) -> dict[str, int]:
    """Map the components of a checkpoint, as it was saved, to their stored bytes."""
    files, components = entry.manifest.files, entry.manifest.components.items()
    return {name: sum(files[f].stored_nbytes for f in part.files) for name, part in components}


def _expected_sizes(history: Sequence[Entry]) -> dict[str, int]:
    """Map all components of the state to the stored bytes that each last had."""
    newest = history[0].manifest
    sizes = dict.fromkeys((*newest.components, *newest.left_out), 0)
    for entry in reversed(history):
        found = _component_sizes(entry)
        sizes.update((name, nbytes) for name, nbytes in found.items() if name in sizes)
    return sizes


@dataclass(kw_only=True)
class _Simulation:
    """Checkpoints of a run, to which saves are added, and the facts that decisions rest on."""

    rule: Rule
    left: dict[_Order, Candidate]
    lineage: set[_Order]
    resumed_from: _Order | None
    replaces: bool
    share_files: Callable[[_Order, _Order], bool]
    sizes: dict[_Order, dict[str, int]]

    def saves(self, coming: Sequence[tuple[Candidate, dict[str, int]]]) -> Iterator[AssumedSave]:
        """Add one save after the other, and carry out the decisions after each."""
        for save, sizes in coming:
            self.left[save.order], self.sizes[save.order] = save, sizes
            self.lineage.add(save.order)
            if save.healthy and not save.lacks:
                self.resumed_from = None
            decisions = judge(
                [*self.left.values()],
                self.rule,
                resumed_from=self.resumed_from,
                lineage=self.lineage,
                replaces=self.replaces,
                share_files=self.share_files,
            )
            left = {made.entry.order: made for made in decisions}
            work = [
                made
                for made in reversed(decisions)
                if (made.drop or not made.keep) and any(may_rest_on(b, made) for b in decisions)
            ]
            for made in work:
                order = made.entry.order
                if made.keep:
                    self.left[order] = _thinned(made, self.sizes[order])
                    left[order] = replace(made, entry=self.left[order])
                else:
                    del self.left[order], left[order]
                    self.lineage.discard(order)
            yield AssumedSave(save=save, deletions={m.entry.order: m for m in work}, left=left)


def _thinned(made: Decision, sizes: Mapping[str, int]) -> Candidate:
    """Return a checkpoint without the components that a decision drops."""
    entry = made.entry
    return replace(
        entry,
        nbytes=entry.nbytes - sum(sizes.get(name, 0) for name in made.drop),
        components=tuple(name for name in entry.components if name not in made.drop),
        begun=tuple(name for name in entry.begun if name not in made.drop),
        dropped=tuple(dict.fromkeys((*entry.dropped, *made.drop))),
    )


class _Coming:
    """Times and contents of the next saves; counters grow as between the newest two steps saved."""

    def __init__(
        self, history: Sequence[Candidate], *, is_running: bool, unmeasured: Collection[str]
    ) -> None:
        self._history, self._newest, self._now = history, history[0], history[0].timestamp
        known = self._newest.metrics
        self._metrics = {name: known[name] for name in known if name not in unmeasured}
        steps = (entry.timestamp for entry in history)
        self._before = next((at for at in steps if at.step < self._now.step), Timestamp(step=0))
        self._distance = max(self._now.step - self._before.step, 1)
        self._since = recorded_time(self._newest.created if is_running else utc_text())

    def scheduled(self, policy: RunPolicy | None, number: int) -> list[tuple[Due, Timestamp]]:
        """Run the recorded schedule; fewer than `number` saves if it cannot be followed."""
        if policy is None or MAIN not in policy.every:
            return []
        found: list[tuple[Due, Timestamp]] = []
        with suppress(UsageError):  # the run does not count an interval's unit, or a text is wrong
            every, parts = policies_from_texts(policy.every), policy.parts
            names = [name for name in parts if name in every]
            sides = [SideSaver(n, every=every[n], components=parts[n]) for n in names]
            schedule, now = SaveSchedule(every[MAIN], sides), self._now
            schedule.resume_schedule(now, self._history)
            for _ in range(_MAX_LOOKS):
                now = self._predict_counters(schedule.quiet_until(now))
                due = schedule.merge_due_saves(now)
                if due is not None:
                    schedule.began(due, now)
                    found.append((due, now))
                if len(found) == number:
                    break
        return found

    def repeated(self, number: int) -> list[tuple[Due, Timestamp]]:
        """Repeat the newest save, at the distance of the last two."""
        newest = self._newest
        saved = (*newest.components, *newest.begun, *newest.dropped)
        components = saved if newest.left_out else None
        due = Due(newest.save_class, "", savers=newest.savers, components=components)
        steps = (self._now.step + self._distance * place for place in range(1, number + 1))
        return [(due, self._predict_counters(step)) for step in steps]

    def candidates(
        self, dues: Sequence[tuple[Due, Timestamp]], after: _Order, sizes: Mapping[str, int]
    ) -> list[tuple[Candidate, dict[str, int]]]:
        """Make the checkpoints of saves, and the sizes of their components."""
        found = []
        for place, (due, now) in enumerate(dues, start=1):
            parts = {n: size for n, size in sizes.items() if n in (due.components or sizes)}
            later = timedelta(seconds=min(now.wall_s - self._now.wall_s, _MAX_S))
            save = Candidate(
                order=(after[0], after[1] + place),
                timestamp=now,
                created="" if self._since is None else (self._since + later).isoformat(),
                save_class=due.save_class,
                nbytes=sum(parts.values()),
                metrics=self._metrics,
                components=tuple(parts),
                savers=due.savers,
                left_out=tuple(name for name in sizes if name not in parts),
            )
            found.append((save, parts))
        return found

    def _predict_counters(self, step: int) -> Timestamp:
        """Return the counters at a coming step."""
        grown: dict[str, Fraction] = {}
        for name in ("epoch", "samples", "tokens", "cycle", "wall_s"):
            here = getattr(self._now, name)
            if here is not None:
                growth = max(
                    Fraction(here) - Fraction(getattr(self._before, name) or 0), Fraction(0)
                )
                grown[name] = here + growth * (step - self._now.step) / self._distance
        wall_s = float(grown.pop("wall_s"))
        return Timestamp(step=step, wall_s=wall_s, **{name: int(n) for name, n in grown.items()})
