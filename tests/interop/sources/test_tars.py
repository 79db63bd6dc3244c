"""Archives of Composer: packed here in each of its ways, and read by the file inside."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest
import torch

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UsageError
from holdfast.interop.opening import open_source
from holdfast.interop.sources import tars

WEIGHT = torch.arange(5000.0)


def states() -> bytes:
    out = io.BytesIO()
    model = {"w": WEIGHT, "b": torch.zeros(3)}
    timestamp = {"Timestamp": {"epoch": 1, "batch": 8}}
    state = {"model": model, "optimizers": {"AdamW": {"state": {}}}, "timestamp": timestamp}
    torch.save({"state": state, "rng": [{"python": 1}]}, out)
    return out.getvalue()


def tarred(name: str = "composer_states.pt", *, pax: bool = True) -> bytes:
    out = io.BytesIO()
    kind = tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        archive.addfile(tarfile.TarInfo("other/" + "long" * 60))
        info = tarfile.TarInfo(name)
        data = states()
        info.size = len(data)
        info.mtime = 1.5  # so that there is a pax header
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def lz4(data: bytes) -> bytes:
    frame = pytest.importorskip("lz4.frame")
    packed: bytes = frame.compress(data)
    return packed


PACKED = {
    "tar": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, format=lzma.FORMAT_ALONE),
    "lz4": lz4,
    "zst": zst,
}


@pytest.mark.parametrize("way", PACKED)
@pytest.mark.parametrize("inner", ["tar", "plain"])
def test_each_way_of_packing_is_read(tmp_path: Path, way: str, inner: str) -> None:
    data = tarred() if inner == "tar" else states()
    path = tmp_path / f"ep1.pt.{way}"
    path.write_bytes(PACKED[way](data))
    with open_source(str(path)) as source:
        assert (source.format, source.step) == ("composer", 8)
        assert [*source.parts] == ["model", "optimizer", "rng", "trainer"]
        memory = memoryview(bytearray(WEIGHT.nbytes))
        source.read_into("model", "w", 0, memory)
    assert torch.equal(torch.frombuffer(memory, dtype=torch.float32), WEIGHT)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("way", [way for way in PACKED if way != "tar"])
def test_a_packed_file_cut_short_is_refused(tmp_path: Path, way: str) -> None:
    path = tmp_path / f"ep1.pt.{way}"
    packed = PACKED[way](tarred())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(CorruptData, match="ep1"):
        open_source(str(path))


@pytest.mark.parametrize("name", ["../../composer_states.pt", "/etc/composer_states.pt"])
def test_names_in_an_archive_are_no_names_of_files(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    (inside / "x.tar").write_bytes(tarred(name, pax=False))
    with open_source(str(inside / "x.tar")) as source:
        assert "model" in source.parts
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [inside / "x.tar"]


def test_an_archive_that_grows_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tars, "MAX_SMALL_NBYTES", 10_000)
    monkeypatch.setattr(tars, "MAX_RATIO", 1)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(tarred()))
    with pytest.raises(LimitExceeded, match="unpacks to more than"):
        open_source(str(tmp_path / "x.tar.gz"))


def test_a_full_disk_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tars, "_ROOM_LEFT_NBYTES", 1 << 60)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(tarred()))
    with pytest.raises(LimitExceeded, match="TMPDIR"):
        open_source(str(tmp_path / "x.tar.gz"))


@pytest.mark.parametrize(("way", "library"), [("lz4", "lz4.frame")])
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, library: str
) -> None:
    (tmp_path / "x").write_bytes(PACKED[way](tarred()))
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(UsageError, match=r"holdfast-torch\[convert\]"):
        open_source(str(tmp_path / "x"))


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(tarred("model.pt"))
    with pytest.raises(FormatError, match="no composer_states"):
        open_source(str(tmp_path / "x.tar"))


def test_a_link_in_an_archive_is_refused_as_one(tmp_path: Path) -> None:
    info = tarfile.TarInfo("composer_states.pt")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.addfile(info)
    with pytest.raises(FormatError, match="is not a regular file"):
        open_source(str(tmp_path / "x.tar"))
