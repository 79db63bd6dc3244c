"""Uploads of committed checkpoints, as a manager sees them: with one root there are none."""

from __future__ import annotations

from holdfast.format.manifest import Timestamp


class Uploads:
    """No-op: nothing is sent anywhere. `care.mirror.Mirror` sends to a second root."""

    def committed(self) -> None:
        """Queue a new checkpoint of the local root, before anything there is deleted."""

    def mend_now(self) -> None:
        """Let what is damaged locally and whole remotely be mended from now on."""

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
