"""The worked example in docs/format.md is true: recomputed from its own words, and loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from tests.golden import reader

from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.store.local import LocalStore

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
TENSORS = "state-00000.safetensors"


def section() -> str:
    return PAGE.read_text("utf-8").split("## 9. A worked example\n")[1].split("\n## ")[0]


def blocks() -> dict[str, str]:
    """Title → text of every code block of the section."""
    found = re.findall(r'```\w+ title="([^"]+)"\n(.*?)\n```', section(), re.DOTALL)
    assert section().count("```") == 2 * len(found)
    return dict(found)


def dumped(title: str) -> bytes:
    """The bytes of a hex dump, whose addresses and characters are checked too."""
    data = b""
    first, last = map(int, re.findall(r"bytes (\d+) to (\d+)", title)[0])
    for line in blocks()[title].splitlines():
        address, text, shown = line[:8], line[10:57], line[59:]
        part = bytes.fromhex(text)
        assert int(address, 16) == first + len(data)
        assert shown.rstrip() == re.sub(rb"[^ -~]", b".", part).decode().rstrip()
        data += part
    assert len(data) == last + 1 - first
    return data


def files() -> dict[str, bytes]:
    """Every file of the example, from the page alone."""
    page = blocks()
    head, tail = (dumped(title) for title in page if title.startswith(f"{TENSORS}, "))
    return {
        "state-00000.json": page["state-00000.json"].encode(),
        TENSORS: head.ljust(4096) + tail,
        "index.json": page["index.json"].encode(),
        "manifest.json": page["manifest.json"].encode() + b"\n",
    }


def test_the_listing_gives_the_lengths() -> None:
    shown = [line.split() for line in blocks()["listing"].splitlines()]
    assert {name: int(nbytes) for nbytes, name in shown} == {n: len(d) for n, d in files().items()}


def test_the_header_is_as_long_as_it_says() -> None:
    image = files()[TENSORS]
    assert int.from_bytes(image[:8], "little") == 4088
    assert image[8:4096].rstrip().endswith(b"}}")
    assert torch.frombuffer(bytearray(image[4096:]), dtype=torch.float32).tolist() == [1, 2, 3, 4]


def test_the_digests_of_files_are_right() -> None:
    """R21: every line of the block, computed as the text says."""
    entries = blocks()["digests of files"].split("\n\n")
    names = [entry.splitlines()[0] for entry in entries]
    assert names == ["state-00000.json", TENSORS, "index.json"]
    for name, entry in zip(names, entries, strict=True):
        data = files()[name]
        length, block, digest = [line.split()[-1] for line in entry.splitlines()[1:]]
        assert bytes.fromhex(length) == len(data).to_bytes(8, "little")
        assert block == blake3(data).hexdigest()
        hasher = blake3(derive_key_context="holdfast 1 file")
        hasher.update(bytes.fromhex(length + block))
        assert digest == f"blake3:{hasher.hexdigest()}"


def test_the_seal_of_the_manifest_is_right() -> None:
    """R21."""
    body, _, last = files()["manifest.json"].removesuffix(b"\n").rpartition(b"\n")
    body += b"\n"
    nbytes, digest = (line.split()[-1] for line in blocks()["digest of the manifest"].splitlines())
    assert (int(nbytes), digest) == (len(body), blake3(body).hexdigest())
    assert last.decode() == f'"digest": "blake3:{digest}"}}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The example as a root."""
    folder = tmp_path / re.findall(r"^`([^`]+)/` has these files", section(), re.MULTILINE)[0]
    folder.mkdir()
    for name, data in files().items():
        (folder / name).write_bytes(data)
    (tmp_path / "writers").mkdir()
    return tmp_path


def test_both_readers_read_the_example(root: Path) -> None:
    """R21."""
    _, (found,) = reader.read_root(root)
    assert found.trees["state"]["n"] == 7
    assert found.trees["state"]["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert verify(LocalStore(root), found.folder.name).ok
    live: dict[str, Any] = {}
    with CheckpointManager(root, {"state": live}, sinks=()) as manager:
        checkpoint = manager.load(components=["state"])
    assert (checkpoint.step, checkpoint.metrics) == (3, {"loss": 0.5})
    assert live["n"] == 7
    assert torch.equal(live["w"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
