"""Hostile checkpoint roots: a small valid one, changed anywhere, with its digests made right.

With right digests the parser and the reader have to refuse the root, not the check of the bytes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from holdfast.manager import CheckpointManager

BLOCK_NBYTES = 8 * 1024 * 1024


class Live:
    """Live objects of every kind of component."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        self.extra: dict[str, Any] = {
            "step": 0,
            "status": HTTPStatus.OK,
            "where": Path("a"),
            "table": torch.arange(6),
            "array": np.arange(3),
            "words": np.arange(624, dtype=np.uint32),
            "inner": {"list": [1, (2, 3)]},
        }
        self.shuffle = torch.Generator()
        self.draws = np.random.Generator(np.random.MT19937(1))

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "extra", "shuffle", "draws")
        return {name: getattr(self, name) for name in names}

    def train(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.extra["step"] += 1

    def manager(self, root: Path) -> CheckpointManager:
        return CheckpointManager(root, self.state, sinks=(), preflight=False)

    def bits(self) -> str:
        """Everything that a load may change, as text."""
        optimizer = self.optimizer
        state = [list(optimizer.state.get(p, {}).items()) for p in self.model.parameters()]
        return repr(
            (
                [(k, v.tolist()) for k, v in self.model.state_dict().items()],
                [[(k, getattr(v, "tolist", lambda v=v: v)()) for k, v in s] for s in state],
                [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
                {k: v for k, v in vars(self.scheduler).items() if k != "optimizer"},
                _plain(self.extra),
                blake3(self.shuffle.get_state().numpy().tobytes()).hexdigest(),
                _plain(self.draws.bit_generator.state),
            )
        )

    def use(self) -> None:
        """Draw from every generator, so that a state that reads out of bounds ends the process."""
        found = [self.shuffle, self.draws, *self.extra.values()]
        for generator in found:
            if isinstance(generator, torch.Generator):
                torch.rand(2000, generator=generator)
            elif isinstance(generator, np.random.Generator):
                generator.integers(0, 2**32, 2000)
            elif isinstance(generator, np.random.RandomState):
                generator.random_sample(2000)


def _plain(value: Any) -> Any:
    """The value with arrays as bytes."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    return (str(value.dtype), value.tobytes()) if isinstance(value, np.ndarray) else value


def file_digest(data: bytes) -> tuple[str, str]:
    """Return the digest of a file, and the digests of its blocks in hex."""
    parts = [data[i : i + BLOCK_NBYTES] for i in range(0, len(data), BLOCK_NBYTES)]
    return digest_of(len(data), b"".join(blake3(part).digest() for part in parts))


def digest_of(nbytes: int, digests: bytes) -> tuple[str, str]:
    """Return a file's digest and its block digests in hex, from its length and block digests."""
    hasher = blake3(derive_key_context="holdfast 1 file")
    hasher.update(nbytes.to_bytes(8, "little") + digests)
    return f"blake3:{hasher.hexdigest()}", digests.hex()


def seal(members: Any) -> bytes:
    """Make a document of any members, in any order, with its digest at the end."""
    return seal_text(json.dumps(members, indent=1).removesuffix("}").rstrip())


def seal_text(text: str) -> bytes:
    """Make a document with its digest, from the JSON before that, without the closing brace."""
    body = text.encode() + b",\n"
    return body + b'"digest": "blake3:%s"}\n' % blake3(body).hexdigest().encode()


def image(entries: Any, data: bytes) -> bytes:
    """Make a tensor file of a header and data."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    return len(text).to_bytes(8, "little") + text + data


@dataclass(slots=True, kw_only=True)
class Draft:
    """A root under change: its newest checkpoint in parts, everything else as it is."""

    folder: str
    manifest: dict[str, Any]
    index: dict[str, Any]
    files: dict[str, bytes]
    """Trees and tensor files of the newest checkpoint."""
    others: dict[str, bytes]
    """Key → content of everything else in the root."""
    raw: dict[str, bytes] = field(default_factory=dict)
    """Files of the newest checkpoint that are written as they are, after everything was sealed."""
    after: list[Callable[[Path], None]] = field(default_factory=list)
    """Called with the root when all files are written."""
    keeps_digests: bool = False
    """Whether manifest and index stay as they are."""

    def document(self, key: str) -> dict[str, Any]:
        """Read a document of the root, without its digest."""
        members: dict[str, Any] = json.loads(self.others[key])
        del members["digest"]
        return members

    def tree(self, component: str) -> Any:
        """Read the tree of a component."""
        return json.loads(self.files[f"{component}-00000.json"])["tree"]

    def set_tree(self, component: str, tree: Any) -> None:
        text = json.dumps({"holdfast": 1, "tree": tree}, separators=(",", ":"))
        self.files[f"{component}-00000.json"] = text.encode()

    def reseal(self) -> None:
        """Recompute every digest that can be."""
        listed = self.manifest.get("files")
        if self.keeps_digests or not isinstance(listed, dict):
            return
        for name, data in self.files.items():
            digest, digests = file_digest(data)
            self._list(listed, name, len(data), digest)
            blocks = self.index.get("blocks")
            if isinstance(blocks, dict) and name in blocks:
                blocks[name] = digests
        data = self.raw.get("index.json") or json.dumps(self.index).encode()
        self._list(listed, "index.json", len(data), file_digest(data)[0])

    @staticmethod
    def _list(listed: dict[str, Any], name: str, nbytes: int, digest: str) -> None:
        if isinstance(listed.get(name), dict):
            listed[name].update(nbytes=nbytes, digest=digest)

    def write(self, root: Path) -> None:
        """Write the root to the disk."""
        here = {**self.files, "index.json": json.dumps(self.index).encode()}
        here["manifest.json"] = seal(self.manifest)
        here |= self.raw
        found = {**{f"{self.folder}/{name}": data for name, data in here.items()}, **self.others}
        for key, data in found.items():
            path = root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for action in self.after:
            action(root)


def honest(root: Path) -> Draft:
    """Save two checkpoints into `root`, tag the newer, close, and take them apart."""
    live = Live()
    with live.manager(root) as manager:
        for step in (1, 2):
            live.train()
            manager.save(step, metrics={"loss": 0.5}).wait()
        manager.tag("latest", "mine")
        folder = manager.list()[0].folder
    (root / "latest").unlink()
    everything = {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
    mine = {key.split("/")[1]: everything.pop(key) for key in [*everything] if folder in key}
    notes = mine.pop("notes-0001.json")
    manifest = json.loads(mine.pop("manifest.json"))
    del manifest["digest"]
    return Draft(
        folder=folder,
        manifest=manifest,
        index=json.loads(mine.pop("index.json")),
        files=mine,
        others={**everything, f"{folder}/notes-0001.json": notes},
    )


def changed(draft: Draft, change: Callable[[Draft], None]) -> Draft:
    """Make a copy with the change, and with right digests."""
    mine = copy.deepcopy(draft)
    change(mine)
    mine.reseal()
    return mine
