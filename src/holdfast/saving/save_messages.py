"""Messages between the ranks of one save (decision 0035).

The leader announces notes to all ranks; a rank posts to the leader. All run the same release.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeAlias

import msgspec
from blake3 import blake3

from holdfast.encryption.store import WrittenSeal
from holdfast.errors import FormatError
from holdfast.format import blocks, layout
from holdfast.format.codec import CodecName
from holdfast.format.index import StoredBlocks
from holdfast.format.layout import MAX_TREE_NBYTES
from holdfast.format.manifest import FileEntry, Manifest, decode_committed
from holdfast.ownership.claim import Claim
from holdfast.ranks.coordinator import RankFailure
from holdfast.saving.links import LinkSource
from holdfast.saving.participants import OwnFile
from holdfast.saving.probe import ProbeNote
from holdfast.saving.shares import Part
from holdfast.staging.interfaces import Staged
from holdfast.store.base import Buffer

NAMES_NBYTES = 4
"""Length of the digest of the names of metrics and settings, and of each value."""
MAX_BASE_NBYTES = 1 << 15
"""Most bytes of a tree that zlib refers to."""
WARNING_NBYTES = 8
"""Length of the digest of one warning."""


class PartNote(msgspec.Struct, frozen=True, tag="part"):
    """Message for one rank: its part of a new plan."""

    plan_id: str
    part: Part
    is_compared: bool
    """Whether all ranks post digests of their classes of boxes."""


class DigestsPost(msgspec.Struct, frozen=True, array_like=True):
    """Post of one rank: the digests of its classes, empty if it has not sampled them."""

    digests: bytes


class PlanNote(msgspec.Struct, frozen=True, tag="plan"):
    """Announcement of the plan by which a save is written."""

    plan_id: str
    """Id of the plan whose parts were sent in this save or in an earlier save of its components."""
    claim: Claim
    compares: bool
    """Whether all ranks know the same checkpoint of this step, with which the save is compared."""


class WaitNote(msgspec.Struct, frozen=True, tag="wait"):
    """Announcement: the leader waits for uploads, at most as long as for a save."""


class HostsNote(msgspec.Struct, frozen=True, tag="hosts"):
    """Announcement: all ranks find out which of them share a disk, and what each host has."""


class RankQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Parts of an answer that the leader asks one rank for."""

    form: bool = False
    recorded: bool = False
    warnings: bool = False
    classes: tuple[int, ...] = ()
    """Numbers of its classes of boxes: the digests of these boxes."""
    rows: tuple[int, ...] = ()
    """Numbers of its boxes: their values."""


class QuestionNote(msgspec.Struct, frozen=True, tag="question"):
    """Announcement: some ranks are asked, and all answer, the others with nothing."""

    asked: dict[int, RankQuestion]


class RankAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Post of one rank: the answer to its `RankQuestion`."""

    form: bytes = b""
    recorded: dict[str, str] = {}
    """Metrics and settings, as text."""
    warnings: tuple[str, ...] = ()
    digests: dict[int, bytes] = {}
    samples: tuple[bytes, ...] = ()
    synchronized: tuple[bool, ...] = ()
    """Whether each is a buffer that DDP copies from rank 0 in the next forward pass."""


class FolderNote(msgspec.Struct, frozen=True):
    """Announcement of the folder of a save."""

    folder: str
    save_id: str
    trees: dict[str, bytes]
    """Digest of the leader's tree of each component."""
    bases: dict[str, bytes]
    """The leader's trees of components that differ by rank, unless they are long."""
    claim: bytes
    """The leader's claim, for other hosts' disks; empty: all ranks share one."""
    links: LinkSource


class OutcomeNote(msgspec.Struct, frozen=True):
    """Announcement that the manifest was put, or that this is in doubt."""

    doubt: RankFailure | None
    """Why the leader does not know. The register tells."""
    documents: dict[str, bytes] = {}
    """Trees, index and manifest, for other hosts' disks."""
    digest: str = ""
    """Digest of the manifest; empty if it is in doubt."""
    stored_nbytes: int = 0
    """Stored bytes of all files."""

    def decode_manifest(self, data: Buffer, *, what: str) -> Manifest | None:
        """Decode the manifest that was put; None if `data` is another one."""
        return decode_committed(data, what=what, digest=self.digest, nbytes=self.stored_nbytes)


class CopiedPost(msgspec.Struct, frozen=True):
    """Post of one rank: its host has these documents, or why not."""

    problem: str = ""


class RankComparison(msgspec.Struct, frozen=True):
    """Post of one rank: how its state compares with the checkpoint of the same step."""

    is_same: bool
    """Whether the tensor files that the rank would write are in it."""
    files: int
    digests: dict[str, str]
    """Digest of the tree of each component that is the same on all ranks."""
    trees: dict[str, bytes]
    """Trees of components that differ by rank, and trees that the checkpoint lacks: it may have
    the joined ones."""

    @classmethod
    def of(
        cls, staged: Staged, roots: Mapping[str, str], recorded: Mapping[str, str]
    ) -> RankComparison:
        """Compare the digests of the staged files, by name, with those of the checkpoint."""
        own = [known.file.name for known in staged.all_files]
        return cls(
            is_same=all(recorded.get(name) == roots[name] for name in own),
            files=len(own),
            digests={
                name: roots[layout.tree_file(name)]
                for name in staged.kinds
                if name not in staged.by_rank
            },
            trees={
                name: tree
                for name, tree in staged.trees.items()
                if name in staged.by_rank
                or recorded.get(layout.tree_file(name)) != roots[layout.tree_file(name)]
            },
        )


class Verdict(msgspec.Struct, frozen=True):
    """Announcement: whether the state of all ranks is in the checkpoint of this step."""

    is_unchanged: bool


class FileNote(msgspec.Struct, frozen=True, array_like=True):
    """Record of a file in a `FilesPost`, without what follows from the plan."""

    nbytes: int
    digests: bytes
    codec: CodecName | None
    stored: StoredBlocks | None
    sealed: WrittenSeal | None

    @classmethod
    def of(cls, file: OwnFile) -> FileNote:
        """Shorten the record of a file."""
        stored = file.entry.stored
        codec = None if stored is None else stored.codec
        return cls(file.entry.nbytes, file.digests, codec, file.stored, file.sealed)

    def expand(self, plain: str) -> OwnFile:
        """Make the record of the file, from its plain name."""
        name, stored = plain, None
        if self.codec is not None and self.stored is not None:
            name, stored = layout.stored_file(plain, self.codec), self.stored.entry(self.codec)
        digest = blocks.file_digest(self.nbytes, self.digests)
        return OwnFile(
            plain=plain,
            name=name,
            entry=FileEntry(nbytes=self.nbytes, digest=digest, stored=stored),
            digests=self.digests,
            stored=self.stored,
            sealed=self.sealed,
        )


class FilesPost(msgspec.Struct, frozen=True, array_like=True):
    """Post of one rank: the files that it has written, in the order of the plan."""

    files: tuple[FileNote, ...]
    layout: bytes
    """Digest of the places of its boxes."""
    trees: dict[str, bytes]
    """Trees that differ from the leader's, shortened by `shorten_tree`."""


LeaderNote: TypeAlias = PlanNote | PartNote | QuestionNote | HostsNote | ProbeNote | WaitNote


def shorten_tree(tree: bytes, base: bytes) -> bytes:
    """Compress a tree of one rank, of which most is in the leader's tree `base`."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS, zdict=base)
    return packer.compress(tree) + packer.flush()


def expand_tree(data: bytes, base: bytes) -> bytes:
    """Restore a tree from `shorten_tree`; raises `FormatError`."""
    packed = zlib.decompressobj(wbits=-zlib.MAX_WBITS, zdict=base)
    with suppress(zlib.error):
        tree = packed.decompress(data, MAX_TREE_NBYTES)
        if packed.eof:
            return tree
    raise FormatError("a rank's tree is damaged")


def digest_records(recorded: Mapping[str, str]) -> bytes:
    """Digest the sorted names, then each value; empty if there are none."""
    if not recorded:
        return b""
    names = sorted(recorded)
    texts = ["\0".join(names), *map(recorded.__getitem__, names)]
    return b"".join(blake3(_encode(text)).digest(NAMES_NBYTES) for text in texts)


def digest_warning(text: str) -> bytes:
    """Return the digest by which ranks compare a warning."""
    return blake3(_encode(text)).digest(WARNING_NBYTES)


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
