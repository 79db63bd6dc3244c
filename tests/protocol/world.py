"""What is in the root, and what people have been told: one immutable value.

Everything above the line "ghosts" is real content of the store. Ghosts record what happened or
what was said; no actor reads them, only the invariants do.
"""

from __future__ import annotations

from typing import NamedTuple

ABSENT, COMMITTED, ABORTED, DELETED = "absent", "committed", "aborted", "deleted"
"""The four values of a register."""
NO_FILES, THIN_FILES, ALL_FILES = "no files", "thin files", "all files"
"""What a folder holds; thin is without the component that thinning drops."""
NOTHING, OK, CONFLICT, UNKNOWN, SUPERSEDED = "-", "ok", "conflict", "unknown", "superseded"
"""What a saver was told about its attempt."""
FLAT, FOLDER, NOWHERE = "flat", "folder", "nowhere"
"""Where files of followers go: an object store takes all; a folder may be there or gone."""

ATTEMPTS = ("c0", "c1", "a1", "b1", "a2", "a3")
"""c0 and c1 are committed in epoch 1 at the start; a1 and b1 are saves of s1, a2 of s2, a3 of s3.

Inside an epoch this is also their order.
"""
INDEX = {name: number for number, name in enumerate(ATTEMPTS)}


class Folder(NamedTuple):
    """One attempt's folder. `epoch` is 0 until the attempt has begun."""

    epoch: int = 0
    register: str = ABSENT
    files: str = NO_FILES
    retired: frozenset[int] = frozenset()  # epochs whose deleters have marked it
    thinned: bool = False
    pinned: bool = False
    unsynced: frozenset[str] = frozenset()  # of "files", "manifest"; a power cut may take them
    listed: bool = False  # the record of ended attempts names it
    leases: frozenset[str] = frozenset()  # processes that said in `readers/` that they read it
    in_flight: bool = False  # a copy of the manifest's put may land at any later time
    place: str = NOWHERE
    ranks: frozenset[str] = frozenset()  # followers whose files its manifest lists
    shares: frozenset[str] = frozenset()  # followers whose files are there, whole
    hanging: frozenset[str] = frozenset()  # followers of whom a write may land at any later time
    marker_in_flight: bool = False  # so may a follower's abort marker
    posts: frozenset[tuple[str, bool]] = frozenset()  # (follower, whether its files are durable)
    announced: str = NOTHING  # what the leader told its followers: OK or ABORTED
    # ghosts
    appeared: bool = False  # its manifest was there at some time
    finished: bool = False  # it was aborted, deleted or removed whole
    begun_late: bool = False  # a later claim stood when the save began
    put_late: bool = False  # a later claim stood when the manifest appeared
    told: str = NOTHING
    learned: frozenset[str] = frozenset()  # what any of the ranks was told: OK, ABORTED
    pin_told: bool = False
    read_by: frozenset[str] = frozenset()  # processes that were told that it stays for them

    @property
    def is_whole(self) -> bool:
        """Committed, with every file that resuming needs."""
        return self.register == COMMITTED and self.files == ALL_FILES and self.has_shares

    @property
    def has_shares(self) -> bool:
        """Whether the files of all followers are there."""
        return self.ranks <= self.shares

    @property
    def takes_files(self) -> bool:
        """Whether a put into it succeeds: no put makes a folder."""
        return self.place != NOWHERE

    @property
    def state(self) -> tuple[int, str]:
        """What one look at the name and the register tells."""
        return (self.epoch, self.register)


class Claim(NamedTuple):
    """One record in `writers/`. `is_rollback`: a person named the resume point."""

    process: str
    resumes_from: str | None
    is_rollback: bool


class Anchor(NamedTuple):
    """What people were last told about where the run stands, and by which epoch."""

    attempt: str
    epoch: int
    is_rollback: bool


class World(NamedTuple):
    """The root. `claims[0]` is the claim of epoch 1; there is no gap in them."""

    folders: tuple[Folder, ...]
    claims: tuple[Claim, ...]
    closed: frozenset[int] = frozenset()
    dead: frozenset[str] = frozenset()
    is_cut: bool = False  # the power failed; nothing runs any more
    # ghosts
    anchor: Anchor = Anchor("c1", 1, is_rollback=False)
    owners: tuple[tuple[int, str], ...] = ((1, "s1"),)
    alarms: frozenset[str] = frozenset()

    def folder(self, attempt: str) -> Folder:
        """The folder of an attempt."""
        return self.folders[INDEX[attempt]]

    def having(self, attempt: str, **changes: object) -> World:
        """This world with one folder changed."""
        number = INDEX[attempt]
        changed = self.folders[number]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(folders=(*self.folders[:number], changed, *self.folders[number + 1 :]))

    def owner_since(self, epoch: int) -> bool:
        """Whether a later epoch than this one has been claimed."""
        return len(self.claims) > epoch

    def has_ended(self, epoch: int) -> bool:
        """Whether nobody of this epoch can act any more: closed, or its process known dead."""
        return epoch in self.closed or self.claims[epoch - 1].process in self.dead

    def is_being_deleted(self, attempt: str) -> bool:
        """Whether a deleter that may still act has marked it."""
        return any(not self.has_ended(epoch) for epoch in self.folder(attempt).retired)

    def is_read(self, attempt: str) -> bool:
        """Whether a process that is not known to be dead has a lease on it."""
        return not self.folder(attempt).leases <= self.dead

    def order(self, attempt: str) -> tuple[int, int]:
        """(epoch, sequence), the order of commits."""
        return (self.folder(attempt).epoch, INDEX[attempt])


def first_world() -> World:
    """c0 and c1 stand, committed by s1 in epoch 1, which s1 still owns."""
    standing = Folder(epoch=1, register=COMMITTED, files=ALL_FILES, appeared=True, told=OK)
    others = (Folder(),) * (len(ATTEMPTS) - 2)
    first = Claim("s1", None, is_rollback=False)
    return World(folders=(standing, standing, *others), claims=(first,))
