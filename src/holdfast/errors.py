"""The exception tree: errors that a caller would handle alike share a class.

HoldfastError
├── UsageError                 the call is wrong: correct it (also a ValueError)
│   ├── InvalidKey             a key that no store accepts
│   ├── UnsupportedState       something in the state cannot be saved; lists every path
│   └── MismatchError          stored and live state differ; lists every leaf
├── StoreError                 the storage refused or failed
│   ├── NotFound               there is no such object
│   ├── AlreadyExists          a put "if absent" found the key taken
│   ├── StoreFull              no space, no inodes or no quota
│   ├── AccessDenied           permissions, or a read-only file system
│   ├── UnsupportedStore       the storage lacks what the protocol needs
│   ├── TransientStoreError    a retry may succeed
│   └── OutcomeUnknown         the operation may or may not have taken effect
├── FormatError                bytes that are not a valid document or file
│   ├── CorruptData            a digest or a size is wrong
│   │   └── Tampered           encrypted bytes are not those that the key's holder wrote
│   ├── UnsupportedVersion     written by a newer Holdfast
│   └── LimitExceeded          larger or deeper than the format allows
├── SealError                  intact, but cannot be read with the keys that were given
│   ├── MissingKey             encrypted, and no key was given
│   ├── WrongKey               encrypted for other keys than those that were given
│   ├── NotSealed              not encrypted, and only encrypted ones are accepted
│   └── KeyUnavailable         a key could not be obtained from its source
├── RolledBack                 the root is older than what the caller has seen of it
├── NoCheckpoint               no checkpoint in the root matches the request
├── NoUsableCheckpoint         candidates exist and none can be used
├── OwnershipError
│   ├── OwnedElsewhere         a live process owns the run
│   ├── NotOwned               no live process owns the run, so nobody can save it
│   ├── Superseded             a later writer has taken the run over
│   └── Diverged               the run was continued in both tiers independently
├── CommitConflict             another save has the manifest's key
├── OutOfMemory                not enough host memory for a copy of the state
├── SaveFailed                 a save did not commit; the cause is chained
├── UploadFailed               a local checkpoint could not be sent to the remote tier
├── SaveSkipped                a hook refused to save this state
├── RequestFailed              a save that was asked for from outside was not made
├── PreflightFailed            the first save would fail; lists every problem
├── ManagerUnusable            the manager is closed, forked, or half-loaded
├── DeadlineExceeded           a wait took longer than it may (also a TimeoutError)
└── RanksError                 the ranks of a run did not come to an agreement
    ├── RanksFailed            some ranks failed; says which, in which phase and why
    ├── RanksSilent            some ranks did not answer in time (also a DeadlineExceeded)
    └── Disconnected           the ranks can no longer reach each other
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any


class HoldfastError(Exception):
    """Base of every error that Holdfast raises on purpose. Can be pickled, also for other ranks."""

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self)
        if not any(
            "__init__" in vars(one) for one in kind.__mro__ if issubclass(one, HoldfastError)
        ):
            return super().__reduce__()  # type: ignore[return-value]
        # That would call the class with the message alone.
        return _remade, (kind, self.args, self.__dict__)


def _remade(
    kind: type[HoldfastError], args: tuple[Any, ...], members: Mapping[str, Any]
) -> HoldfastError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(members)
    return error


class UsageError(HoldfastError, ValueError):
    """The call is wrong; the message says which argument and what it should be."""


class InvalidKey(UsageError):
    """An object key that no store accepts: absolute, with `..`, or with odd characters."""


class UnsupportedState(UsageError):
    """Something in the state cannot be saved. `offenders` lists every (path, reason)."""

    def __init__(self, offenders: Sequence[tuple[str, str]], *, hint: str = "") -> None:
        self.offenders = list(offenders)
        self.paths = [path for path, _ in offenders]
        lines = [f"{path}: {reason}" for path, reason in offenders]
        end = f"\n{hint}" if hint else ""
        super().__init__("this state cannot be saved:\n" + listing(lines) + end)


class MismatchError(UsageError):
    """The stored state does not fit the live one; nothing was changed.

    Attributes `missing`, `unexpected`, `wrong_shape` and `wrong_dtype` hold every leaf.
    """

    def __init__(
        self,
        where: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        wrong_shape: Sequence[str] = (),
        wrong_dtype: Sequence[str] = (),
        hint: str = "",
        changed: str = "",
    ) -> None:
        self._where = where
        self._hint = hint
        self._changed = changed
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.wrong_shape = list(wrong_shape)
        self.wrong_dtype = list(wrong_dtype)
        parts = [f"{where} does not fit the live state; nothing was changed{changed}."]
        for title, items in (
            ("missing in the checkpoint", self.missing),
            ("not in the live state", self.unexpected),
            ("other shape", self.wrong_shape),
            ("other dtype", self.wrong_dtype),
        ):
            if items:
                parts.append(f"{title} ({len(items)}):\n" + listing(items))
        if hint:
            parts.append(hint)
        super().__init__("\n".join(parts))

    def beside(self, mixed_by: str) -> MismatchError:
        """Return this error with `mixed_by`: the earlier load that left the state half-loaded."""
        return self._with(
            self._hint, f"{self._changed}, but the state was mixed before: {mixed_by}"
        )

    def with_trials(self, unrestored: Sequence[str]) -> MismatchError:
        """Return this error with `unrestored`: components whose trial load was not undone."""
        changed = f", except perhaps {some_of(unrestored)}" if unrestored else ""
        return self._with(self._hint, self._changed + changed)

    def hinting(self, hint: str) -> MismatchError:
        """Return this error with `hint` appended to its hints."""
        return self._with("\n".join(filter(None, (self._hint, hint))), self._changed)

    def _with(self, hint: str, changed: str) -> MismatchError:
        return MismatchError(
            self._where,
            missing=self.missing,
            unexpected=self.unexpected,
            wrong_shape=self.wrong_shape,
            wrong_dtype=self.wrong_dtype,
            hint=hint,
            changed=changed,
        )


class StoreError(HoldfastError):
    """The storage refused or failed; the message names the key and the system's reason."""


class NotFound(StoreError):
    """The store has no object under the key."""


class AlreadyExists(StoreError):
    """A put with `if_absent` found the key taken; nothing was written."""


class StoreFull(StoreError):
    """No space, no inodes or no quota left; the message says what was needed and is free."""


class AccessDenied(StoreError):
    """The storage refuses for lack of permission, or is read-only."""


class UnsupportedStore(StoreError):
    """The storage lacks an operation that the commit protocol needs."""


class TransientStoreError(StoreError):
    """A temporary failure: a retry of the operation may succeed."""


class OutcomeUnknown(StoreError):
    """The operation may or may not have taken effect; reading back did not show which."""


class FormatError(HoldfastError):
    """The bytes are not a valid document or file of the format."""


class CorruptData(FormatError):
    """A digest or a size is wrong: these are not the bytes that were written."""


class Tampered(CorruptData):
    """Encrypted bytes were changed, moved, cut or replaced by somebody without the key."""


class UnsupportedVersion(FormatError):
    """The data was written by a newer Holdfast, or with a feature unknown to this one."""


class LimitExceeded(FormatError):
    """A document or file is larger, deeper or has more items than the format allows."""


class SealError(HoldfastError):
    """An intact checkpoint cannot be read with the keys that were given."""


class MissingKey(SealError):
    """The checkpoint is encrypted, and no key was given."""


class WrongKey(SealError):
    """The checkpoint is encrypted for other keys than those given; the message names both."""


class NotSealed(SealError):
    """The checkpoint is not encrypted, and the caller accepts only encrypted ones."""


class KeyUnavailable(SealError):
    """A key could not be obtained: no such file, a failed command, a service that refused."""


class RolledBack(HoldfastError):
    """The newest checkpoint is older than one the caller has seen: newer ones were removed."""


class NoCheckpoint(HoldfastError):
    """No checkpoint in the root matches the request."""


class NoUsableCheckpoint(HoldfastError):
    """Checkpoints exist, but none can be used; `rejected` says why, newest first."""

    def __init__(self, message: str, rejected: Sequence[tuple[str, str]] = ()) -> None:
        self.rejected = list(rejected)
        lines = [f"{name}: {reason}" for name, reason in self.rejected]
        super().__init__(message + ("\n" + listing(lines) if lines else ""))


class OwnershipError(HoldfastError):
    """The operation needs an ownership of the run that this process does not have."""


class OwnedElsewhere(OwnershipError):
    """A live process owns the run; stop it, wait for it, or pass `takeover=True`."""


class NotOwned(OwnershipError):
    """No live process owns the run, so nobody can be asked to save it."""


class Superseded(OwnershipError):
    """A later writer took the run over. `committed`: this save is known to be committed."""

    def __init__(self, message: str, *, committed: bool = False) -> None:
        self.committed = committed
        super().__init__(message)


class Diverged(OwnershipError):
    """The run was continued in both tiers, and neither tier has the other's claim."""


class CommitConflict(HoldfastError):
    """Another writer was first to put an object under the same key, such as the manifest's."""


class SaveFailed(HoldfastError):
    """A save did not commit; the reason is its cause. `step` is the step that was to be saved."""

    def __init__(self, message: str, *, step: int) -> None:
        self.step = step
        super().__init__(message)


class UploadFailed(HoldfastError):
    """A checkpoint that is durable in the local tier could not be sent to the remote one."""


class OutOfMemory(HoldfastError, MemoryError):
    """The host lacks the memory for a copy of the state; the message says how much it needs."""


class SaveSkipped(HoldfastError):
    """A hook refuses to save this state: raise it in the hook, with the reason."""


class RequestFailed(HoldfastError):
    """A save requested from outside the run was not made; the message holds the run's answer."""


class PreflightFailed(HoldfastError):
    """The first save would fail; `problems` lists everything that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("saving here would fail:\n" + listing(self.problems))


class ManagerUnusable(HoldfastError):
    """The manager is closed, of a process before a fork, half-loaded, or used by another thread."""


class DeadlineExceeded(HoldfastError, TimeoutError):
    """A wait reached its time limit; the message says what was waited for."""


class RanksError(HoldfastError):
    """The ranks of a run did not come to an agreement."""


class RanksFailed(RanksError):
    """Some ranks failed. `failed` has the phase and the reason of each, by rank.

    `reasons` has a line for each phase and reason, with the ranks that share them.
    """

    def __init__(self, what: str, failed: Mapping[int, tuple[str, str]]) -> None:
        self.failed = dict(failed)
        sharing: dict[tuple[str, str], list[int]] = {}
        for rank, failure in failed.items():
            sharing.setdefault(failure, []).append(rank)
        self.reasons = [
            f"{name_ranks(ranks)}, in {phase}: {why}" for (phase, why), ranks in sharing.items()
        ]
        super().__init__(f"{what} failed in:\n" + listing(self.reasons))


class RanksSilent(RanksError, DeadlineExceeded):
    """Some ranks did not answer by the deadline, or have ended; `ranks` lists them."""

    def __init__(
        self, what: str, ranks: Sequence[int], *, lost: tuple[str, str] | None = None
    ) -> None:
        self.ranks = list(ranks)
        if lost is not None:
            phase, why = lost
            super().__init__(f"{what}: nothing came from {name_ranks(ranks)}, in {phase}: {why}")
            return
        super().__init__(
            f"{what}: nothing came by the deadline from {name_ranks(ranks)}. Every rank must call "
            "save, maybe_save, resume and load at the same points of the program. If they have "
            "called it, check in their logs whether they have ended, hang or are late"
        )


class Disconnected(RanksError):
    """The ranks can no longer reach each other; the message has the system's reason."""


def is_damage(error: BaseException) -> bool:
    """Whether an error means that a checkpoint is damaged or lost, so that an older one may do.

    A newer format, a state that does not fit, missing rights and temporary failures are not damage.
    """
    if isinstance(error, UnsupportedVersion | AccessDenied | TransientStoreError | OutcomeUnknown):
        return False
    return isinstance(error, FormatError | StoreError)


def time_limit(timeout_s: float) -> str:
    """Name a limit in words; one of nearly zero is what was left of a longer one.

    >>> time_limit(90), time_limit(0.5), time_limit(0.0)
    ('90 s', '0.5 s', 'the time that was left')
    """
    if timeout_s < 0.05:
        return "the time that was left"
    return f"{timeout_s:.0f} s" if timeout_s >= 1 else f"{timeout_s:.1f} s"


def name_ranks(ranks: Iterable[int], limit: int = 10) -> str:
    """Name ranks in words: the first `limit` of them or runs of them, and how many more.

    >>> name_ranks([3, 5, 6, 7, 8, 9, *range(20, 60)], limit=2)
    'ranks 3, 5 to 9 and 40 more'
    """
    everything = sorted(ranks)
    # Numbers of a run have the same distance from their places in the list.
    grouped = groupby(enumerate(everything), lambda placed: placed[1] - placed[0])
    runs = [[rank for _, rank in run] for _, run in grouped]
    names = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:limit]]
    if num_more := sum(map(len, runs[limit:])):
        names.append(f"{num_more} more")
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{'rank' if len(everything) == 1 else 'ranks'} {listed}"


def listing(items: Iterable[str], limit: int = 10) -> str:
    """Format the first `limit` items as indented lines, with the number of further ones."""
    everything = list(items)
    lines = [f"  {item}" for item in everything[:limit]]
    if len(everything) > limit:
        lines.append(f"  … and {len(everything) - limit} more")
    return "\n".join(lines)


def some_of(names: Sequence[str], limit: int = 10) -> str:
    """Format the first `limit` names on one line, with the number of further ones."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class NotShared(RanksError):
    """A rank does not see what another has written: all must share the storage of the root."""

    ADVICE = (
        "All ranks must have the same storage under this root. If each host has a disk of its own, "
        "use HostTiers(local, remote)"
    )
