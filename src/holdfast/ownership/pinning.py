"""Pins and tags of the checkpoints of a run, as methods of its manager."""

from __future__ import annotations

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.ownership.annotations import annotate_copies
from holdfast.root.catalog import Catalog


class Marking:
    """What keeps single checkpoints whatever the rule of retention says."""

    _catalog: Catalog

    @check_arguments()
    def pin(self, which: str | int) -> None:
        """Pin a checkpoint, so that retention keeps it whatever the rule says.

        Raises:
            NoCheckpoint: `which` names no checkpoint, or its deletion has begun.
        """
        annotate_copies(self._catalog, which, pinned=True)

    @check_arguments()
    def unpin(self, which: str | int) -> None:
        """Remove the pin of a checkpoint, so that the retention rule decides again."""
        annotate_copies(self._catalog, which, pinned=False)

    @check_arguments()
    def tag(self, which: str | int, *tags: str) -> None:
        """Add tags to a checkpoint; retention keeps it, and `which` may be its tag.

        Raises:
            UsageError: no tag is given, or one cannot be a tag.
            NoCheckpoint: `which` names no checkpoint, or its deletion has begun.
        """
        if not tags:
            raise UsageError(f"tag({which!r}): name at least one tag")
        annotate_copies(self._catalog, which, add_tags=tags)

    @check_arguments()
    def untag(self, which: str | int, *tags: str) -> None:
        """Remove tags from a checkpoint, so that the retention rule decides again.

        Raises:
            UsageError: no tag is given, the checkpoint lacks one, or it was given by the save.
            NoCheckpoint: `which` names no checkpoint, or its deletion has begun.
        """
        if not tags:
            raise UsageError(f"untag({which!r}): name at least one tag")
        annotate_copies(self._catalog, which, remove_tags=tags)
