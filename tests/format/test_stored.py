"""What manifest and index say of stored blocks, and every contradiction that is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from tests.each import each
from tests.format.samples import make_manifest, model_files, reseal

from holdfast.errors import FormatError, UnsupportedVersion
from holdfast.format import blocks, index, manifest, strictjson
from holdfast.format.blocks import max_file_nbytes, max_stored_nbytes
from holdfast.format.index import StoredBlocks, decode_index
from holdfast.format.manifest import FileEntry, Manifest, StoredEntry

PLAIN, NAME = "model-00000.safetensors", "model-00000.safetensors.zst"
TREE = "model-00000.json"
LENGTH = 100
STORED = StoredBlocks((LENGTH,), b"\x07" * 32)


def renamed(value: Any) -> Any:
    return json.loads(json.dumps(value).replace(f'"{PLAIN}"', f'"{NAME}"'))


def stored_index() -> dict[str, Any]:
    """The sample's index, with its tensor file as a codec made it."""
    document = renamed(json.loads(model_files()["index.json"]))
    document["stored"] = {NAME: {"nbytes": [LENGTH], "digests": STORED.digests.hex()}}
    return dict(document)


def stored_manifest() -> Manifest:
    found = make_manifest()
    part = found.components["model"]
    files = {NAME if name == PLAIN else name: entry for name, entry in found.files.items()}
    files[NAME] = msgspec.structs.replace(files[NAME], stored=STORED.entry("zstd"))
    part = msgspec.structs.replace(part, files=(TREE, NAME))
    return msgspec.structs.replace(found, files=files, components={"model": part})


def members() -> dict[str, Any]:
    document = json.loads(manifest.encode_manifest(stored_manifest()))
    del document["digest"]
    return dict(document)


def read_manifest(document: Any) -> Any:
    return manifest.decode_register(reseal(json.dumps(document)), what="the-document")


def read_index(document: Any, files: dict[str, FileEntry] | None = None) -> index.Index:
    data = json.dumps(document).encode()
    return decode_index(data, files=files or stored_manifest().files, what="the-document")


def test_a_manifest_with_a_stored_file_comes_back_and_says_what_it_needs() -> None:
    """Older readers refuse it for that, and not for something that looks like damage."""
    found = read_manifest(members())
    assert found == stored_manifest()
    assert members()["requires"] == ["codec"]
    plain = make_manifest()
    assert json.loads(manifest.encode_manifest(plain))["requires"] == []
    assert found.plain_nbytes == plain.nbytes == plain.plain_nbytes
    assert found.nbytes == plain.nbytes - plain.files[PLAIN].nbytes + LENGTH


def test_a_manifest_in_shards_comes_back_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharded = msgspec.structs.replace(stored_manifest(), sharded=True)
    data = manifest.encode_manifest(sharded)
    assert json.loads(data)["requires"] == ["codec", "shards"]
    assert manifest.decode_register(data, what="") == sharded
    assert "sharded" not in json.loads(manifest.encode_manifest(stored_manifest()))
    monkeypatch.setattr(strictjson, "KNOWN_REQUIREMENTS", frozenset({"codec", "sealed"}))
    with pytest.raises(UnsupportedVersion, match="shards"):
        manifest.decode_register(data, what="")


def test_a_reader_that_does_not_know_codecs_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """D60."""
    monkeypatch.setattr(strictjson, "KNOWN_REQUIREMENTS", frozenset())
    with pytest.raises(UnsupportedVersion, match="codec"):
        read_manifest(members())


def test_an_index_with_stored_blocks_comes_back() -> None:
    found = read_index(stored_index())
    assert found.stored == {NAME: STORED}
    assert found.stored[NAME].spans() == [(0, LENGTH)]
    assert found.components["model"]["a"].shards[0].file == NAME


WRONG_ENTRIES: list[tuple[str, Any]] = [
    ("codec", "gzip"),
    ("codec", "lz4"),
    ("codec", ""),
    ("codec", None),
    ("codec", ["zstd"]),
    ("nbytes", -1),
    ("nbytes", 1.5),
    ("nbytes", True),
    ("nbytes", 2**63),
    ("nbytes", None),
    ("digest", "blake3:" + "0" * 63),
    ("digest", "sha256:" + "0" * 64),
    ("digest", None),
]


@each(("name", "value"), WRONG_ENTRIES)
def test_a_wrong_member_of_stored_is_refused(name: str, value: Any) -> None:
    """R29."""
    document = members()
    document["files"][NAME]["stored"][name] = value
    with pytest.raises(FormatError, match="the-document"):
        read_manifest(document)
    del document["files"][NAME]["stored"][name]
    with pytest.raises(FormatError, match="the-document"):
        read_manifest(document)


def check_names_fit_the_codec() -> None:
    for listed, entry in ((PLAIN, True), (NAME, False), (f"{PLAIN}.lz4", True)):
        document = json.loads(json.dumps(members()).replace(NAME, listed))
        if not entry:
            del document["files"][listed]["stored"]
        with pytest.raises(FormatError, match="is not the name of a file stored in this form"):
            read_manifest(document)


def test_the_name_of_a_file_and_its_codec_fit() -> None:
    """R28: a tool goes by the name, and Holdfast by the codec."""
    check_names_fit_the_codec()


@pytest.mark.parametrize("name", [f"{PLAIN}.gz", f"{PLAIN}.zst.zst", f"{PLAIN}.ZST", "x.zst"])
def test_no_other_suffix_is_a_file_of_a_component(name: str) -> None:
    """R28."""
    document = json.loads(json.dumps(members()).replace(NAME, name))
    with pytest.raises(FormatError):
        read_manifest(document)


def test_the_index_is_never_stored_otherwise() -> None:
    document = members()
    document["files"]["index.json"]["stored"] = document["files"][NAME]["stored"]
    with pytest.raises(FormatError, match=r"index\.json is not the name"):
        read_manifest(document)


def test_blocks_that_are_decoded_are_of_limited_length() -> None:
    """R29, invariant 5: a few bytes that stand for a block of 1 GiB."""
    document = members() | {"block_nbytes": 2**26}
    assert read_manifest(document).block_nbytes == 2**26
    with pytest.raises(FormatError, match="too long to be decoded"):
        read_manifest(document | {"block_nbytes": 2**27})


def check_lengths_fit() -> None:
    for lengths in ([0], [LENGTH - 1], [LENGTH + 1], [-1], [1.5], [True], [2**63], [], [50, 50]):
        document = stored_index()
        document["stored"][NAME]["nbytes"] = lengths
        with pytest.raises(FormatError):
            read_index(document)


def test_the_lengths_of_stored_blocks_fit_number_and_sum() -> None:
    """R29: none is empty, and together they are what the manifest says."""
    check_lengths_fit()


def check_no_block_is_too_long() -> None:
    files = stored_manifest().files
    most = max_stored_nbytes(files[NAME].nbytes)
    for length, is_allowed in ((most, True), (most + 1, False), (2**40, False)):
        found = StoredBlocks((length,), STORED.digests)
        entry = msgspec.structs.replace(files[NAME], stored=found.entry("zstd"))
        document = stored_index()
        document["stored"][NAME]["nbytes"] = [length]
        if is_allowed:
            assert read_index(document, {**files, NAME: entry}).stored == {NAME: found}
        else:
            with pytest.raises(FormatError, match="too long"):
                read_index(document, {**files, NAME: entry})


def test_no_stored_block_is_longer_than_a_codec_makes_it() -> None:
    """R29, D14: so reading one never takes more memory than its plain block says."""
    check_no_block_is_too_long()


def test_digests_of_stored_blocks_are_the_manifests() -> None:
    """D14, D15."""
    for digests in ("", "0" * 63, "0" * 64, "0" * 128, "G" * 64, 7, None):
        document = stored_index()
        document["stored"][NAME]["digests"] = digests
        with pytest.raises(FormatError):
            read_index(document)


@pytest.mark.parametrize(
    "stored", [{}, None, [], {NAME: None}, {PLAIN: {"nbytes": [LENGTH], "digests": "07" * 32}}]
)
def test_stored_lists_the_files_that_codecs_made_and_no_others(stored: Any) -> None:
    document = stored_index()
    document["stored"] = stored
    with pytest.raises(FormatError):
        read_index(document)
    more = stored_index()
    more["stored"][TREE] = copy.deepcopy(more["stored"][NAME])
    with pytest.raises(FormatError, match="list different files"):
        read_index(more)


def test_the_names_in_the_index_are_those_of_the_manifest() -> None:
    """R28: the plain name does not stand for the stored one."""
    document = stored_index()
    document["components"]["model"]["files"] = [PLAIN]
    with pytest.raises(FormatError, match="lists files that are not its own"):
        read_index(document)


def test_a_file_of_many_blocks_has_a_place_for_each() -> None:
    nbytes, block_nbytes = 3 * 4096 + 1, 4096
    lengths = (10, 5000 - 904, 4096 + 32 + 4096, 1)
    digests = b"".join(bytes([n]) * 32 for n in range(4))
    found = StoredBlocks(lengths, digests)
    assert found.spans() == [(0, 10), (10, 4106), (4106, 12330), (12330, 12331)]
    plain = bytes(32 * 4)
    entry = FileEntry(
        nbytes=nbytes, digest=blocks.file_digest(nbytes, plain), stored=found.entry("lz4")
    )
    tree = FileEntry(nbytes=0, digest=blocks.file_digest(0, b""))
    name = f"{PLAIN}.lz4"
    document = {
        "holdfast": 1,
        "block_nbytes": block_nbytes,
        "blocks": {name: plain.hex(), TREE: ""},
        "components": {
            "model": {
                "files": [name],
                "names": [],
                "dtypes": [],
                "shapes": [],
                "shards": {"tensor": [], "file": [], "start": [], "offsets": None, "sizes": None},
            }
        },
        "stored": {name: {"nbytes": list(lengths), "digests": digests.hex()}},
    }
    assert read_index(document, {name: entry, TREE: tree}).stored == {name: found}
    assert max_file_nbytes(nbytes, block_nbytes) == nbytes + 4 * 4096 + 3 * 32
    assert isinstance(entry.stored, StoredEntry)
