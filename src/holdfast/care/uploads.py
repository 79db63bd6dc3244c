"""The manager's interface to uploads; this default, for one root, is a no-op."""

from __future__ import annotations

from holdfast.format.manifest import Timestamp


class Uploads:
    """No-op: nothing is uploaded. `care.mirror.Mirror` uploads to a second root."""

    def committed(self) -> None:
        """Queue a new checkpoint of the local root, before anything there is deleted."""

    def mend_now(self) -> None:
        """Request repairs of damaged local checkpoints from the remote tier, in the background."""

    def expect_room(self, now: Timestamp) -> None:
        """Block until the remote tier is no further behind a run at `now` than the options allow.

        Raises:
            DeadlineExceeded: the remote tier does not catch up.
        """

    def raise_failure(self) -> None:
        """Raise the error of a failed upload, once, if the options say so.
        That another process has claimed the run is raised at every call."""

    def settle(self, timeout_s: float) -> None:
        """Block until the queue of uploads is empty, or has only uploads that cannot succeed.

        Raises:
            DeadlineExceeded: lists the uploads that still wait.
        """

    def close(self, timeout_s: float) -> None:
        """Upload what is queued, up to a deadline, and stop for good.

        Raises:
            UploadFailed: something was not uploaded, and the options ask for the error.
            OwnershipError: another process claimed the run, and that was not raised yet.
        """
