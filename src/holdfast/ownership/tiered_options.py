"""Options of a run with two tiers, checked at construction."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import PLAIN_UNITS, Time, parse
from holdfast.policy.rule import Rule
from holdfast.policy.rules import Nothing, as_rule, number_of_bytes
from holdfast.policy.savers import SideSaver, combined_rule
from holdfast.store import REMOTE_SCHEMES
from holdfast.store.base import Store

Root = str | os.PathLike[str] | Store
OnUploadFailure = Literal["warn", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Limit on how far the remote tier may be behind: training time, or bytes not uploaded."""

    time: Time | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Lag:
        """Parse a lag such as `2000step`, `30min` or `40GB`."""
        if isinstance(text, str) and text.strip().endswith("B"):
            return cls(nbytes=number_of_bytes(text.strip()))
        return cls(time=parse(text, what="max_lag", units=PLAIN_UNITS))

    def is_exceeded(self, now: Timestamp, then: Timestamp, waiting_nbytes: int) -> bool:
        """Whether a run at `now` is too far ahead of `then`, the state that the remote tier has."""
        if self.nbytes is not None:
            return waiting_nbytes > self.nbytes
        assert self.time is not None
        at, before = self.time.unit.read_progress(now), self.time.unit.read_progress(then)
        if at is None:
            raise UsageError(f"max_lag='{self.time}': this run does not count this unit")
        return at - (before or 0) > self.time.value


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredOptions:
    """Checked options of a run with two tiers; see the arguments of `Tiered`."""

    keep_local: Rule | Literal[0] | None
    keep_remote: Rule | None
    max_lag: Lag | None
    on_upload_failure: OnUploadFailure
    tries: int
    threads: int
    reads_back: bool
    close_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """Retention rules of the two tiers of a run; with one tier, only `local` applies."""

    local: Rule
    remote: Rule

    @classmethod
    def combine_rules(
        cls,
        root: object,
        keep: Rule | str | None,
        savers: Sequence[SideSaver],
        parts: Collection[str] | None = None,
    ) -> TierRules:
        """Combine the retention of `root`, `keep` and `savers`; may name only `parts`, if known."""
        if not isinstance(root, Tiered):
            rule = combined_rule(keep, savers, parts)
            return cls(local=rule, remote=rule)
        options = root.options
        if keep is not None and options.keep_local is not None:
            raise UsageError("keep= and Tiered(keep_local=…) set the same rule: pass either")
        remote = combined_rule(options.keep_remote, savers, parts)
        if options.keep_local == 0:
            return cls(local=Nothing(), remote=remote)
        local = keep if options.keep_local is None else options.keep_local
        return cls(local=combined_rule(local, savers, parts), remote=remote)


@dataclass(frozen=True, slots=True, init=False)
class Tiered:
    """A root in two tiers: saves commit in `local`, and are uploaded to `remote` in the background.

        CheckpointManager(Tiered("/nvme/gpt", "s3://bucket/gpt", keep_local=Last(2)), state)

    Args:
        local: a fast path or store, where each save commits.
        remote: a durable path, URL or store. It is a root like any other: other programs list it,
            load from it, and a machine with an empty `local` resumes from it.
        keep_local: what retention keeps in `local` of what `remote` has, beside the newest; 0:
            nothing, so that a resume reads `remote`. None: the manager's `keep` applies.
        keep_remote: what it keeps in `remote`; what this would delete at once is not uploaded.
            None: everything.
        max_lag: how far `remote` may be behind: "2000step", "30min" of training, or "40GB" not
            yet uploaded. Beyond that the next save waits. None: no limit.
        on_upload_failure: whether the save after `tries` failures in a row raises `UploadFailed`
            ("raise"), or events are emitted only ("warn"). The upload is retried in either case.
        tries: how many failures in a row are reported as one.
        threads: how many blocks of 8 MiB are uploaded at once.
        read_back: download and compare each file before it counts as uploaded. For storage that
            does not check by itself what arrives; it costs a download of everything.
        close_timeout_s: how many seconds `close` waits for uploads. What is left then stays in
            `local`, and the next process of this root uploads it.

    Raises:
        UsageError: an argument is wrong.
    """

    local: Root
    remote: Root
    options: TieredOptions

    @check_arguments(but=("keep_local", "keep_remote", "max_lag"))
    def __init__(
        self,
        local: Root,
        remote: Root,
        *,
        keep_local: Rule | str | Literal[0] | None = None,
        keep_remote: Rule | str | None = None,
        max_lag: str | None = None,
        on_upload_failure: OnUploadFailure = "warn",
        tries: int = 5,
        threads: int = 4,
        read_back: bool = False,
        close_timeout_s: float = 600.0,
    ) -> None:
        if _is_remote(local) and not _is_remote(remote):
            raise UsageError(
                f"Tiered: local={local!r} is an object store or a server and remote={remote!r} is "
                "not; swap them: saves commit to the first, which is then uploaded to the second"
            )
        if isinstance(keep_local, int) and (keep_local or isinstance(keep_local, bool)):
            raise UsageError(f"Tiered: keep_local={keep_local!r} must be 0 or a rule: Last(3)")
        local_rule: Rule | Literal[0] | None = 0
        if not isinstance(keep_local, int):
            local_rule = as_rule(keep_local, what="Tiered: keep_local")
        for name, count in (("tries", tries), ("threads", threads)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"Tiered: {name}={count!r} must be a whole number, at least 1")
        if not close_timeout_s >= 0:
            raise UsageError(f"Tiered: close_timeout_s={close_timeout_s!r} must not be negative")
        options = TieredOptions(
            keep_local=local_rule,
            keep_remote=as_rule(keep_remote, what="Tiered: keep_remote"),
            max_lag=None if max_lag is None else Lag.parse(max_lag),
            on_upload_failure=on_upload_failure,
            tries=tries,
            threads=threads,
            reads_back=read_back,
            close_timeout_s=close_timeout_s,
        )
        object.__setattr__(self, "local", local)
        object.__setattr__(self, "remote", remote)
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, slots=True, init=False)
class HostTiers(Tiered):
    """A root in two tiers whose local one is a disk of each host, for runs of several ranks.

        CheckpointManager(HostTiers("/nvme/gpt", "s3://bucket/gpt", partner=True), state)

    Each rank writes its files to `local` on its own host. A resume reads what its host has, then
    what other hosts have, then `remote` (docs/tiers.md).

    Args:
        local: a path on the disk of each host. Ranks that see the same files there share a host.
        remote: as for `Tiered`.
        partner: write a second copy of each file to the next host's `local`, before a save
            commits. One lost host then loses nothing, and saves take about twice as long.
        **options: the other options of `Tiered`.

    Raises:
        UsageError: an argument is wrong.
    """

    partner: bool

    @check_arguments(but=("options",))
    def __init__(self, local: Root, remote: Root, *, partner: bool = False, **options: Any) -> None:
        if _is_remote(local):
            raise UsageError(
                f"HostTiers: local={local!r} is not a path on a host's disk; all hosts see it: use "
                "Tiered"
            )
        Tiered.__init__(self, local, remote, **options)
        object.__setattr__(self, "partner", partner)


def _is_remote(root: Root) -> bool:
    return isinstance(root, str) and root.partition("://")[0] in (*REMOTE_SCHEMES, "sftp")
