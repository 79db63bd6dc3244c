"""The rules of the protocol as switches. All on is the protocol; one off is a mutant.

Each rule is one sentence of docs/design.md, section 3, and the name of the field is how the
tests and the README speak of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which rules the actors follow."""

    # Rule 1, registers.
    abort_marker_first: bool = True
    """gc puts the aborted marker, if absent, before it removes a file."""
    marker_stays: bool = True
    """gc leaves the marker where it is, unless nothing can be in flight."""
    tombstone: bool = True
    """Deleting replaces the manifest by a tombstone before files go."""
    tombstone_stays: bool = True
    """A tombstone goes only when nothing can be in flight."""
    listed_when_final: bool = True
    """The record of ended attempts names those whose register was read as aborted or deleted."""
    unclear_put_is_not_ended: bool = True
    """A put that was confirmed by reading back, not by its own reply, may have a copy in flight."""
    put_again_is_not_ended: bool = True
    """... nor does the reply to a second put say that the first one ended."""
    close_only_when_ended: bool = True
    """A clean close is recorded only when every put was seen to end."""
    death_ends_only_local_puts: bool = True
    """A dead process proves that nothing is in flight only where a put is its system call."""

    # Invariant 1, outcomes.
    read_back_after_conflict: bool = True
    """"Already there" is read back and compared before it is called a conflict."""
    read_back_after_lost_reply: bool = True
    """A put without a reply is read back before it is called a success."""

    # Rule 2, claims.
    claim_if_absent: bool = True
    """A claim is put if absent."""
    claim_names_resume_point: bool = True
    """A claim records the checkpoint that it goes on from."""
    void_claims_skipped: bool = True
    """A claim whose resume point is gone leaves the answer to the epoch below."""
    reread_after_claim: bool = True
    """After its put a claimer reads the resume point again."""
    reread_retired_first: bool = True
    """... first `retired`, then the manifest (a folder may be removed whole in between)."""
    resolve_again_after_claim: bool = True
    """... and, where it asked for the latest, resolves again and claims anew when that changed."""
    latest_claim_is_transparent: bool = True
    """An uncommitted claim of the latest hides no newer commit of the epochs below."""

    # Rule 3, the fence.
    fence_before_put: bool = True
    """The next claim is looked for before the manifest is put."""
    fence_after_put: bool = True
    """... and again after it; there then is no success."""

    # Rule 4, retention, pins, thinning.
    retired_before_deleting: bool = True
    """A deleter puts `retired` first."""
    fence_after_retired: bool = True
    """... then reads the fence."""
    mark_for_each_epoch: bool = True
    """Each epoch's deleter has a mark of its own, since a dead deleter's mark is void."""
    pins_after_retired: bool = True
    """... then the pins."""
    pin_reads_retired: bool = True
    """A pinner puts its pin, then reads `retired`."""
    pin_reads_manifest: bool = True
    """... and then the manifest (a folder may have been removed whole)."""
    later_epochs_untouched: bool = True
    """A deleter leaves attempts of later epochs than its own alone."""
    resume_point_kept: bool = True
    """The resume point of the current epoch stays until that epoch has committed."""
    thinned_mark_first: bool = True
    """A thinner puts its sidecar before it removes a component."""
    thin_reads_fence: bool = True
    """... and reads the fence in between."""

    # Rule 8, leases.
    leases_after_retired: bool = True
    """A deleter looks for leases after its mark."""
    leases_after_thinned: bool = True
    """... and so does a thinner."""
    lease_reads_retired: bool = True
    """A reader puts its lease, then reads `retired`."""
    lease_reads_thinned: bool = True
    """... and the marks of thinners."""
    lease_reads_manifest: bool = True
    """... and then the manifest (a folder may have been removed whole)."""

    # Rule 5, local order.
    files_synced_first: bool = True
    """Files are on stable storage before the manifest is put."""
    synced_before_told: bool = True
    """The manifest's name is synced before the save is acknowledged."""
    synced_before_relied_on: bool = True
    """Who resumes from a checkpoint first syncs its folder."""

    # Rule 6, replacing. Rule 7, readers.
    commit_before_replacing: bool = True
    """A replacement is committed before the old checkpoint is retracted."""
    reader_lists_again: bool = True
    """A reader whose candidates are exhausted goes through all of them again."""
    reader_compares_registers: bool = True

    # Rule 11, followers.
    posted_when_durable: bool = True
    """A follower posts its files once they are durable."""
    all_have_posted: bool = True
    """The leader commits only what every follower has posted."""
    leader_marks_silence: bool = True
    """A leader that gives up on a silent follower puts the abort marker, if absent."""
    follower_removes_nothing: bool = True
    """A follower leaves its files, whatever became of its post."""
    follower_marks_silence: bool = True
    """A follower that hears nothing puts the abort marker, if absent, before it reads."""
    follower_reads_fence: bool = True
    """Where it finds no commit it reads the fence, and knows nothing if there is a later claim."""
    one_save_at_a_time: bool = True
    """A follower posts nothing of a save before it is done with the one before."""
    """... until registers, not only names, are what they were the last time."""
