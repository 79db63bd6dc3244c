"""What becomes of a checkpoint after its commit, as a manager sees it: with one root, nothing."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine.roots.catalog import Entry
from holdfast.format.manifest import Timestamp


class Uploads:
    """Nothing is sent anywhere; `care.mirror.Mirror` sends to a second root."""

    def __init__(self) -> None:
        self.uploaded: Callable[[Entry, bool], None] = lambda entry, was_read: None
        """Called when a checkpoint is safe in the remote tier, and whether every byte of the local
        copy was read and found right for it."""
        self.caught_up: Callable[[], None] = lambda: None
        """Called once after each claim, when nothing waits. What a forerunner kept for its upload
        may be there already, and then nothing is sent that would tell so."""

    def committed(self) -> None:
        """The local root has a new checkpoint: queue it, before anything there is deleted."""

    def holds(self, entry: Entry) -> str:
        """Why the local copy must not be deleted yet; nothing where it may be."""
        return ""

    def mend_now(self) -> None:
        """What was found damaged here and whole there may be mended from now on."""

    def expect_room(self, now: Timestamp) -> None:
        """Return when the remote tier is no further behind than it may be.

        Raises:
            DeadlineExceeded: it does not catch up.
        """

    def raise_failure(self) -> None:
        """Raise what must not be missed: that the run went on elsewhere, each time; and a failed
        upload once, if it is to be raised."""

    def settle(self, timeout_s: float) -> None:
        """Return when nothing waits to be sent any more, or nothing of it can be.

        Raises:
            DeadlineExceeded: says what still waits.
        """

    def close(self, timeout_s: float) -> None:
        """Send what is left, up to a deadline, and end.

        Raises:
            UploadFailed: something is left, and that is to be raised.
            OwnershipError: the run went on elsewhere, and nobody was told yet.
        """
