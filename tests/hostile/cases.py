"""The hostile roots: checkpoint folders with one malicious change each, made from `payloads`."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Literal

import blosc2
import lz4.frame
import zstandard
from blake3 import blake3
from tests.hostile import payloads
from tests.hostile.payloads import crossed
from tests.hostile.roots import (
    BLOCK_NBYTES,
    Draft,
    digest_of,
    file_digest,
    image,
    seal,
    seal_text,
)

from holdfast.format.codec import Compression, Encoding

MODEL = "model-00000.safetensors"
TREE = "model-00000.json"
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**40, 2**63, 2**70, 1.5, "", "x", [], {}, [[]], {"$float": "nan"}),
    *(["x"], {"x": 1}, [None], "0" * 64, "9" * 32, [2**62, 2**62], [-1]),
)
Change = Callable[[Draft], None]
Size = Literal["sample", "some", "all"]
"""How many combinations are made: just enough to have each value, some more, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A hostile root: its name, the change that makes it, and what readers must do with it."""

    name: str
    change: Change
    is_refused: bool = False
    """Whether its newest checkpoint must never come back as loaded."""
    skips_verify: bool = False
    """Whether `verify` is left out, because reading every byte would take too long."""


def cases(size: Size = "all") -> list[Case]:
    """Make all hostile roots; the names are unique."""
    few = size == "sample"
    found = [
        *path_cases(size),
        *thinned(pickle_cases(few), few),
        *field_cases(size),
        *tree_cases(size),
        *thinned(offset_cases(few), few),
        *kind_of_file_cases(few),
        *thinned(version_cases(few), few),
        *swap_cases(few),
        *claim_cases(few),
        *(() if few else huge_cases(few)),
        *thinned(codec_cases(few), few),
    ]
    assert len({case.name for case in found}) == len(found)
    return found


def thinned(found: Iterable[Case], few: bool) -> Iterator[Case]:
    """Keep every third of these cases for a sample, else all."""
    return islice(found, 0, None, 3 if few else 1)


# Path escapes


def path_cases(size: Size) -> Iterator[Case]:
    """Roots with a hostile text where a name or a path may be expected."""
    texts = [*enumerate(payloads.PATHS)]
    pairs = crossed(texts[::6] if size == "sample" else texts, enumerate(PLACES), size == "sample")
    for (number, text), (at, place) in pairs:
        if size == "some" and (number + at) % 4:
            continue
        put, is_refused = PLACES[place]
        yield Case(
            name=f"path {number} {text[:24]!a} as {place}",
            change=partial(put, text=text),
            is_refused=is_refused,
        )


def _rename(members: dict[str, Any], old: str, new: str) -> None:
    """Rename a member, which keeps its position."""
    pairs = [(new if name == old else name, value) for name, value in members.items()]
    members.clear()
    members.update(pairs)


def _as_file(draft: Draft, text: str) -> None:
    _rename(draft.manifest["files"], MODEL, text)
    draft.manifest["components"]["model"]["files"][1] = text
    draft.index["components"]["model"]["files"][0] = text
    _rename(draft.index["blocks"], MODEL, text)
    digest, blocks = file_digest(draft.files[MODEL])
    draft.manifest["files"][text] = {"nbytes": len(draft.files[MODEL]), "digest": digest}
    draft.index["blocks"][text] = blocks


def _as_tree_file(draft: Draft, text: str) -> None:
    _rename(draft.manifest["files"], TREE, text)
    draft.manifest["components"]["model"]["files"][0] = text


def _as_extra_file(draft: Draft, text: str) -> None:
    draft.manifest["files"][text] = {"nbytes": 1, "digest": "blake3:" + "0" * 64}


def _as_component(draft: Draft, text: str) -> None:
    _rename(draft.manifest["components"], "model", text)
    _rename(draft.index["components"], "model", text)


def _as_listed_file(draft: Draft, text: str) -> None:
    draft.manifest["components"]["model"]["files"].append(text)


def _as_index_file(draft: Draft, text: str) -> None:
    draft.index["components"]["model"]["files"] = [text]


def _as_blocks(draft: Draft, text: str) -> None:
    draft.index["blocks"][text] = "0" * 64


def _as_key(draft: Draft, text: str) -> None:
    """Make the text a tensor's key, which may be any text."""
    columns = draft.index["components"]["extra"]
    columns["names"][columns["names"].index("table")] = text
    tree = draft.tree("extra")
    tree["table"] = {"$tensor": text}
    draft.set_tree("extra", tree)


def _as_label(draft: Draft, text: str) -> None:
    draft.manifest["label"] = text


def _as_parent(draft: Draft, text: str) -> None:
    draft.manifest["parent"] = {"epoch": 1, "sequence": 1, "save_id": "0" * 32, "folder": text}


def _as_resume_point(draft: Draft, text: str) -> None:
    claim = draft.document("writers/00000001.json")
    point = {"epoch": 1, "sequence": 1, "save_id": "0" * 32, "folder": text}
    draft.others["writers/00000001.json"] = seal({**claim, "resumed_from": point})


def _as_tag(draft: Draft, text: str) -> None:
    draft.manifest["tags"] = [text]
    notes = {"holdfast": 1, "kind": "notes", "tags": [text], "pinned": False}
    draft.others[f"{draft.folder}/notes-0002.json"] = seal(notes)
    mark = {"holdfast": 1, "kind": "rejected", "by": text, "reasons": [text]}
    draft.others[f"{draft.folder}/rejected.json"] = seal(mark)


def _as_value(draft: Draft, text: str) -> None:
    draft.set_tree("extra", {"step": 2, f"k{text}": {"$path": text}, "table": text})


def _as_texts(draft: Draft, text: str) -> None:
    draft.manifest.update(reason=text, created=text, environment={text: text}, metrics={text: 1.0})
    draft.manifest.update(numerics={text: text}, timings={text: 1.0})


PLACES: dict[str, tuple[Callable[..., None], bool]] = {
    "tensor file": (_as_file, True),
    "tree file": (_as_tree_file, True),
    "one file more": (_as_extra_file, True),
    "component": (_as_component, True),
    "file of a component": (_as_listed_file, True),
    "file in the index": (_as_index_file, True),
    "file in blocks": (_as_blocks, True),
    "parent": (_as_parent, True),
    "tensor key": (_as_key, False),
    "label": (_as_label, False),
    "resume point": (_as_resume_point, False),
    "tag": (_as_tag, False),
    "value": (_as_value, False),
    "texts": (_as_texts, False),
}


# Pickles and polyglots


def pickle_cases(few: bool) -> Iterator[Case]:
    """Roots with pickles, bare or in archives, in place of files, beside them or at their end."""
    contents = {"pickle": payloads.PICKLE, "archive": payloads.archive()}
    mine = (TREE, MODEL, "index.json", "manifest.json", "optimizer-00000.json")
    mine += ("optimizer-00000.safetensors", "rng-00000.json", "extra-00000.json")
    for kind, name in crossed(contents, mine, few):
        yield Case(
            name=f"{kind} in place of {name}",
            change=partial(_put_file, name=name, data=contents[kind]),
            is_refused=True,
        )
    others = ("pytorch_model.bin", "model.pt", "optimizer.pt", "rng_state.pth", "training_args.bin")
    others += ("__init__.py", "conftest.py", "sitecustomize.py", "holdfast.py", ".metadata")
    folders = ("", "FOLDER/", "writers/", "readers/")
    for kind, (folder, name) in crossed(contents, crossed(folders, others, few), few):
        yield Case(
            name=f"{kind} beside, {folder}{name}",
            change=partial(_put_other, key=f"{folder}{name}", data=contents[kind]),
        )
    marks = ("notes-0001.json", "notes-9999.json", "rejected.json", "retired-00000001.json")
    keys = ("writers/00000001.json", "writers/00000001.closed.json", "latest")
    for kind, key in crossed(contents, (*keys, *(f"FOLDER/{name}" for name in marks)), few):
        yield Case(
            name=f"{kind} as {key}", change=partial(_put_other, key=key, data=contents[kind])
        )
    for kind, name in crossed(contents, (TREE, MODEL), few):
        yield Case(
            name=f"{kind} behind {name}",
            change=partial(_append, data=contents[kind], name=name),
            is_refused=name == TREE,
        )
    for kind, content in contents.items():
        yield Case(name=f"{kind} as the data of tensors", change=partial(_data, data=content))
    yield Case(name="pickle in __metadata__", change=_metadata)


def _put_file(draft: Draft, name: str, data: bytes) -> None:
    if name in draft.files:
        draft.files[name] = data
    else:
        draft.raw[name] = data


def _put_other(draft: Draft, key: str, data: bytes) -> None:
    draft.others[key.replace("FOLDER", draft.folder)] = data


def _append(draft: Draft, data: bytes, name: str) -> None:
    draft.files[name] += data


def _data(draft: Draft, data: bytes) -> None:
    whole = draft.files[MODEL]
    draft.files[MODEL] = whole[:4096] + data.ljust(len(whole))[: len(whole) - 4096]


def _metadata(draft: Draft) -> None:
    header = _header(draft)
    header["__metadata__"]["pickle"] = payloads.PICKLE.hex()
    draft.files[MODEL] = image(header, draft.files[MODEL][4096:])


def _header(draft: Draft) -> Any:
    data = draft.files[MODEL]
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# Wrong types in every field


def field_cases(size: Size) -> Iterator[Case]:
    """Roots in which one field of a document has a wrong value, or is missing."""
    for document, places in FIELDS.items():
        for number, place in [*enumerate(places)][:: 3 if size == "sample" else 1]:
            field, values = "/".join(map(str, place)), {}
            for k in range(4 if size == "all" else 1):
                wrong = WRONG[(5 * number + k * 6) % len(WRONG)]
                values[f"{document} {field} = {str(wrong)[:30]} ({k})"] = wrong
            values[f"{document} without {field}"] = ...
            for name in [*values][number % 2 :: 2] if size == "sample" else values:
                change = partial(_set_field, document=document, place=place, value=values[name])
                yield Case(name=name, change=change)


_FILE, _PART = ("files", MODEL), ("components", "model")
_CLAIM = ("holdfast", "kind", "epoch", "nonce")
FIELDS: dict[str, list[tuple[Any, ...]]] = {
    "manifest": [
        *((name,) for name in ("holdfast", "kind", "requires", "save_id", "label", "epoch")),
        *((name,) for name in ("sequence", "parent", "timestamp", "created", "class", "reason")),
        *((name,) for name in ("tags", "metrics", "world_size", "components", "block_nbytes")),
        *((name,) for name in ("files", "numerics", "environment", "timings")),
        *(("timestamp", name) for name in ("step", "epoch", "samples", "tokens", "wall_s")),
        *((("metrics", "loss"), ("timings", "capture_s"), _FILE, _PART, ("numerics", "torch"))),
        *((*_FILE, name) for name in ("nbytes", "digest")),
        *((*_PART, name) for name in ("kind", "files", "nbytes", "num_tensors")),
        *(((*_PART, "files", 0), (*_PART, "files", 1))),
    ],
    "index": [
        *((name,) for name in ("holdfast", "block_nbytes", "blocks", "components")),
        *((("blocks", MODEL), _PART)),
        *((*_PART, name) for name in ("files", "names", "dtypes", "shapes", "shards")),
        *((*_PART, name, 0) for name in ("files", "names", "dtypes", "shapes")),
        *(((*_PART, "shapes", 0, 0),)),
        *((*_PART, "shards", n) for n in ("tensor", "file", "start", "offsets", "sizes")),
        *((*_PART, "shards", n, 0) for n in ("tensor", "file", "start")),
    ],
    "writers/00000001.json": [
        *((name,) for name in (*_CLAIM, "resumed_from", "takeover", "created", "process")),
        *(("process", n) for n in ("host", "pid", "start", "boot_id", "pid_namespace")),
    ],
    "writers/00000001.closed.json": [(name,) for name in _CLAIM],
    "notes": [(name,) for name in ("holdfast", "kind", "tags", "pinned")],
}


def _set_field(draft: Draft, document: str, place: tuple[Any, ...], value: Any) -> None:
    key = f"{draft.folder}/notes-0001.json" if document == "notes" else document
    own: dict[str, Any] = {"manifest": draft.manifest, "index": draft.index}
    members = own[document] if document in own else draft.document(key)
    target = members
    for name in place[:-1]:
        target = target[name]
    if value is ...:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    if document not in own:
        draft.others[key] = seal(members)


# Trees


def tree_cases(size: Size) -> Iterator[Case]:
    """Roots with a hostile tree node, each in one place, or in every place for size `all`."""
    nodes = {**payloads.nodes(size == "sample"), **{f"plain {v!s:.12}": v for v in WRONG}}
    if size == "sample":
        nodes = dict([*nodes.items()][::2])
    places = list(TREES)
    for number, (name, node) in enumerate(nodes.items()):
        chosen = {places[number % len(places)]} if size != "all" else {*places}
        if size != "sample" and " generator, " in name:
            chosen.add("a value")  # where a new generator is made for it
        for place in sorted(chosen):
            yield Case(name=f"tree: {name}, as {place}", change=partial(TREES[place], node=node))


def _in_tree(draft: Draft, node: Any, component: str, place: tuple[Any, ...]) -> None:
    tree = draft.tree(component)
    if not place:
        draft.set_tree(component, node)
        return
    target = tree
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = node
    draft.set_tree(component, tree)


def _place(component: str, *place: Any) -> Change:
    return partial(_in_tree, component=component, place=place)


TREES: dict[str, Callable[..., None]] = {
    "the model": _place("model"),
    "a weight": _place("model", "weight"),
    "the optimizer": _place("optimizer"),
    "parameter groups": _place("optimizer", "param_groups"),
    "a parameter group": _place("optimizer", "param_groups", 0),
    "a learning rate": _place("optimizer", "param_groups", 0, "lr"),
    "names of a group": _place("optimizer", "groups", 0),
    "slots": _place("optimizer", "slots"),
    "slots of a parameter": _place("optimizer", "slots", "weight"),
    "a slot": _place("optimizer", "slots", "weight", "exp_avg"),
    "shapes": _place("optimizer", "shapes"),
    "devices": _place("optimizer", "devices"),
    "modules": _place("optimizer", "modules"),
    "extra state": _place("optimizer", "extra"),
    "the scheduler": _place("scheduler"),
    "a scheduler's member": _place("scheduler", "last_epoch"),
    "the extra tree": _place("extra"),
    "an enumeration": _place("extra", "status"),
    "a value": _place("extra", "step"),
    "a generator": _place("shuffle"),
    "a numpy generator": _place("draws"),
    "a generator's state": _place("draws", "$generator", "state"),
    "a generator's position": _place("draws", "$generator", "state", "state", "pos"),
    "the global generators": _place("rng"),
    "the generator of python": _place("rng", "python"),
    "the generator of numpy": _place("rng", "numpy"),
    "the generator of torch": _place("rng", "torch"),
    "devices of rng": _place("rng", "devices"),
    "versions of rng": _place("rng", "versions"),
}


# Places of tensors


def offset_cases(few: bool) -> Iterator[Case]:
    """Roots in which a tensor or a shard claims a wrong size, type or place."""
    starts = (0, 8, 4095, 4097, 4098, 4100, 4096 + 11, 2**31, 2**62, 2**63 - 1)
    for start in starts[:: 3 if few else 1]:
        yield Case(name=f"first shard at {start}", change=partial(_start, start=start))
    shapes: tuple[Any, ...] = (
        *([2**62, 2], [2**62, 2**62], [0, 2**62], [2**62, 0], [0] * 128, [1] * 65, [1] * 128),
        *([1] * 129, [3, 5], [13], [12, 1], [], [2**63], [2**40], [-3, -4], [1.0], [True], ["3"]),
    )
    dtypes = ("F64", "BOOL", "F8_E8M0", "C128", "C32", "U64", "F4", "F4_X2", "O", "")
    tensors = (("model", "weight"), ("extra", "table"), ("shuffle", "state"))
    for (component, key), shape in crossed(tensors, shapes[:: 2 if few else 1], few):
        name = f"{component}.{key} of shape {str(shape)[:24]} × {len(shape)}"
        yield Case(name=name, change=partial(_shape, component=component, key=key, shape=shape))
    for (component, key), dtype in crossed(tensors, dtypes[:: 2 if few else 1], few):
        yield Case(
            name=f"{component}.{key} of dtype {dtype}",
            change=partial(_dtype, component=component, key=key, dtype=dtype),
        )
    boxes: dict[str, tuple[Any, Any]] = {
        "whole": ([[0, 0], [0]], [[3, 4], [3]]),
        "short": ([[0, 0], [0]], [[3, 3], [3]]),
        "outside": ([[1, 0], [0]], [[3, 4], [3]]),
        "negative": ([[-1, 0], [0]], [[4, 4], [3]]),
        "huge": ([[0, 0], [0]], [[2**62, 2**62], [3]]),
        "flat": ([[0], [0]], [[12], [3]]),
        "half null": (None, [[3, 4], [3]]),
    }
    for name, (offsets, sizes) in boxes.items():
        yield Case(
            name=f"boxes: {name}",
            change=partial(_boxes, offsets=offsets, sizes=sizes),
            is_refused=name != "whole",
        )
    for name, (entries, refused) in HEADERS.items():
        yield Case(
            name=f"header: {name}", change=partial(_set_header, entries=entries), is_refused=refused
        )


HEADERS: dict[str, tuple[bytes, bool]] = {
    "empty": (b"{}", False),
    "no JSON": (b"\x80\x04pickle", False),
    "NaN": (b'{"a":NaN}', False),
    "84 levels": (b"[" * 84, False),
    "negative offsets": (b'{"weight":{"dtype":"F32","shape":[3,4],"data_offsets":[-48,0]}}', False),
    "a key twice": (b'{"a":1,"a":2}', False),
    "1,000,000 brackets": (b"[" * 10**6, False),
}


def _columns(draft: Draft, component: str = "model") -> Any:
    return draft.index["components"][component]


def _start(draft: Draft, start: int) -> None:
    _columns(draft)["shards"]["start"][0] = start


def _shape(draft: Draft, component: str, key: str, shape: Any) -> None:
    columns = _columns(draft, component)
    columns["shapes"][columns["names"].index(key)] = shape


def _dtype(draft: Draft, component: str, key: str, dtype: str) -> None:
    columns = _columns(draft, component)
    columns["dtypes"][columns["names"].index(key)] = dtype


def _boxes(draft: Draft, offsets: Any, sizes: Any) -> None:
    _columns(draft)["shards"].update(offsets=offsets, sizes=sizes)


def _set_header(draft: Draft, entries: bytes) -> None:
    draft.files[MODEL] = image(entries, draft.files[MODEL][4096:])


# Other things than files


def kind_of_file_cases(few: bool) -> Iterator[Case]:
    """Roots with links, devices or other things in place of files and folders."""
    inside = (TREE, MODEL, "index.json", "manifest.json", "extra-00000.json")
    keys = [f"FOLDER/{name}" for name in inside]
    keys += ["FOLDER/notes-0001.json", "writers/00000001.json", "writers/00000001.closed.json"]
    others = ("FOLDER", "writers", "readers", "latest", "FOLDER/retired-00000001.json")
    for kind, key in crossed(KINDS, (*keys, *others), few):
        yield Case(
            name=f"{kind} in place of {key}",
            change=partial(_replaced, key=key, put=KINDS[kind]),
            is_refused=key in keys[:5] and kind != "hard link",
        )


def _replaced(draft: Draft, key: str, put: Callable[[Path, Path], None]) -> None:
    def replace(root: Path) -> None:
        path = root / key.replace("FOLDER", draft.folder)
        # The target of a link is valid, so that a reader that follows the link loads it.
        twin = root.parents[1] / "outside" / f"{root.name}-twin"
        if path.exists():
            path.rename(twin)
        put(path, twin)

    draft.after.append(replace)


def _fifo(path: Path, twin: Path) -> None:
    os.mkfifo(path)


def _device(path: Path, twin: Path, minor: int = 5) -> None:
    try:
        os.mknod(path, 0o20644, os.makedev(1, minor))
    except PermissionError:
        _fifo(path, twin)


def _socket(path: Path, twin: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)
    server.bind(path.name)
    os.chdir(here)
    server.close()


def _hard_link(path: Path, twin: Path) -> None:
    if twin.is_file():
        os.link(twin, path)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "symlink to a twin": lambda path, twin: path.symlink_to(twin),
    "relative symlink to a twin": lambda path, twin: path.symlink_to(
        os.path.relpath(twin, path.parent)
    ),
    "symlink to itself": lambda path, twin: path.symlink_to(path.name),
    "dangling symlink": lambda path, twin: path.symlink_to("/nowhere/at/all"),
    "symlink to /dev/zero": lambda path, twin: path.symlink_to("/dev/zero"),
    "symlink to /": lambda path, twin: path.symlink_to("/"),
    "fifo": _fifo,
    "folder": lambda path, twin: path.mkdir(),
    "device": _device,
    "socket": _socket,
    "hard link": _hard_link,
    "empty file": lambda path, twin: path.touch(),
}


# Versions, kinds of documents and components


def version_cases(few: bool) -> Iterator[Case]:
    """Roots with a document of an unknown version or kind, or with an unknown member."""
    documents = ("manifest", "index", "tree")
    requirements = ("sharding", "pickle", "../x", "", "a" * 10_000, "\n")
    for requirement, document in crossed(requirements, documents, few):
        yield Case(
            name=f"{document} requires {requirement[:12]!a}",
            change=partial(_require, document=document, requirement=requirement),
            is_refused=True,
        )
    for version, document in crossed((0, 2, -1, 2**40, 10**400), documents, few):
        yield Case(
            name=f"{document} of version {version:.3g}" if version < 2**50 else f"{document} far",
            change=partial(_version, document=document, version=version),
            is_refused=True,
        )
    kinds = ("codec", "plugin", "pickle", "module:evil", "os:system", "shard", "remote", "")
    places = {"component": (*_PART, "kind"), "register": ("kind",)}
    for kind, what in crossed(kinds, places, few):
        yield Case(
            name=f"{what} of kind {kind!r}",
            change=partial(_set_field, document="manifest", place=places[what], value=kind),
            is_refused=True,
        )
    members = ("codec", "plugin", "compression", "encryption", "url", "loader", "base")
    for member, document in crossed(members, ("manifest", "index"), few):
        yield Case(
            name=f"{document} with {member}",
            change=partial(
                _set_field, document=document, place=(member,), value="http://localhost/x"
            ),
        )
    changes = {"manifest": _manifest_text, "tree": _tree_text, "index": _index_text}
    for name, document in crossed(TEXTS, changes, few):
        yield Case(
            name=f"{document}: {name}",
            change=partial(changes[document], text=TEXTS[name]),
            is_refused=True,
        )


TEXTS: dict[str, str] = {
    "a name twice": '"x": 1, "x": 2',
    "version twice": '"holdfast": 2',
    "NaN": '"x": NaN',
    "half a surrogate": '"x": "\\ud800"',
    "70 levels": '"x": ' + "[" * 70 + "]" * 70,
    "a number of 5,000 digits": '"x": ' + "9" * 5000,
    "1e999": '"x": 1e999',
    "a comment": '"x": 1 // no',
    "single quotes": "'x': 1",
}


def _require(draft: Draft, document: str, requirement: str) -> None:
    _in_document(draft, document, "requires", [requirement])


def _version(draft: Draft, document: str, version: int) -> None:
    _in_document(draft, document, "holdfast", version)


def _in_document(draft: Draft, document: str, name: str, value: Any) -> None:
    if document == "tree":
        whole = {"holdfast": 1, "tree": draft.tree("model")}
        draft.files[TREE] = json.dumps({**whole, name: value}).encode()
    else:
        _set_field(draft, document, (name,), value)


def _manifest_text(draft: Draft, text: str) -> None:
    draft.reseal()
    whole = json.dumps(draft.manifest, indent=1).removesuffix("}").rstrip()
    draft.raw["manifest.json"] = seal_text(f"{whole},\n{text}")


def _tree_text(draft: Draft, text: str) -> None:
    whole = draft.files[TREE].decode().removesuffix("}")
    draft.files[TREE] = f"{whole}, {text}}}".encode()


def _index_text(draft: Draft, text: str) -> None:
    draft.reseal()
    draft.raw["index.json"] = (json.dumps(draft.index).removesuffix("}") + f", {text}}}").encode()


# Things in each other's place


def swap_cases(few: bool) -> Iterator[Case]:
    """Roots with trees, components or manifests in each other's place."""
    names = ("model", "optimizer", "scheduler", "extra", "shuffle", "draws", "rng")
    pairs = [*combinations(sorted(names), 2)]
    swaps = {"trees": _swap_trees, "all": _swap}
    for (one, other), what in crossed(pairs[::2] if few else pairs, swaps, few):
        yield Case(name=f"{what} of {one} and {other}", change=partial(swaps[what], a=one, b=other))
    yield Case(
        name="manifest lists itself",
        change=partial(_as_extra_file, text="manifest.json"),
        is_refused=True,
    )
    yield Case(name="two components, one file", change=partial(_share_file), is_refused=True)
    yield Case(name="older manifest", change=_older_manifest, is_refused=True)
    yield Case(name="a tombstone", change=partial(_register, kind="deleted"), is_refused=True)
    yield Case(name="an abort", change=partial(_register, kind="aborted"), is_refused=True)


def _swap_trees(draft: Draft, a: str, b: str) -> None:
    one, other = draft.tree(a), draft.tree(b)
    draft.set_tree(a, other)
    draft.set_tree(b, one)


def _swap(draft: Draft, a: str, b: str) -> None:
    """Swap trees, tensors and columns of two components, all of it consistently."""
    _swap_trees(draft, a, b)
    one, other = (f"{name}-00000.safetensors" for name in (a, b))
    if one in draft.files and other in draft.files:
        draft.files[one], draft.files[other] = draft.files[other], draft.files[one]
        parts = draft.index["components"]
        parts[a], parts[b] = {**parts[b], "files": [one]}, {**parts[a], "files": [other]}


def _share_file(draft: Draft) -> None:
    draft.manifest["components"]["optimizer"]["files"][1] = MODEL
    draft.index["components"]["optimizer"]["files"] = [MODEL]


def _older_manifest(draft: Draft) -> None:
    key = next(key for key in draft.others if key.endswith("/manifest.json"))
    draft.raw["manifest.json"] = draft.others[key]


def _register(draft: Draft, kind: str) -> None:
    members = {"save_id": "0" * 32, "by": "x", "reason": "y"}
    draft.raw["manifest.json"] = seal({"holdfast": 1, "kind": kind, **members})


# Claims


def claim_cases(few: bool) -> Iterator[Case]:
    """Roots with claims and attempts of distant epochs, in cycles, or in large numbers."""
    forms: dict[str, Callable[..., None]] = {
        ", empty": partial(_put_claim, data=b""),
        ", pickle": partial(_put_claim, data=payloads.PICKLE),
        ", whole": lambda draft, epoch: _claim(draft, number=epoch, epoch=epoch),
        " says 1": lambda draft, epoch: _claim(draft, number=epoch, epoch=1),
    }
    for epoch, form in crossed((2, 99_999_999, 999_999_999_999), forms, few):
        yield Case(name=f"claim {epoch}{form}", change=partial(forms[form], epoch=epoch))
    for epoch in (2, 9_999, 9_999_999_999):
        key = f"far.{epoch:04d}-000001-01234567/index.json"
        yield Case(
            name=f"attempt of epoch {epoch}", change=partial(_put_other, key=key, data=b"{}")
        )
    yield Case(name="claims in a circle", change=_circle)
    yield Case(name="claim on itself", change=partial(_claim, number=1, epoch=1, point=(1, 2)))
    yield Case(name="claim on a later one", change=partial(_claim, number=1, epoch=1, point=(5, 1)))
    yield Case(name="claim that lies about its epoch", change=_lying_circle)
    yield Case(name="300 claims", change=_many_claims)
    if not few:
        yield Case(name="300 attempts", change=_many_attempts)
    yield Case(name="notes number 9999", change=_last_notes)


def _put_claim(draft: Draft, epoch: int, data: bytes) -> None:
    draft.others[f"writers/{epoch:08d}.json"] = data


def _claim(draft: Draft, number: int, epoch: int, point: tuple[int, int] | None = None) -> None:
    claim = draft.document("writers/00000001.json")
    claim["epoch"] = epoch
    if point is not None:
        folder = f"step-00000009.{point[0]:04d}-{point[1]:06d}-00000000"
        claim["resumed_from"] = {
            "epoch": point[0],
            "sequence": point[1],
            "save_id": "0" * 32,
            "folder": folder,
        }
    draft.others[f"writers/{number:08d}.json"] = seal(claim)
    closed = draft.document("writers/00000001.closed.json")
    draft.others[f"writers/{number:08d}.closed.json"] = seal({**closed, "epoch": epoch})


def _circle(draft: Draft) -> None:
    _claim(draft, 1, 1, (2, 1))
    _claim(draft, 2, 2, (1, 9))


def _lying_circle(draft: Draft) -> None:
    _claim(draft, 1, 9, (2, 1))
    _claim(draft, 2, 9, (1, 9))


def _many_claims(draft: Draft) -> None:
    for number in range(2, 302):
        draft.others[f"writers/{number:08d}.json"] = b"{}"


def _many_attempts(draft: Draft) -> None:
    for number in range(1, 301):
        draft.others[f"x.0003-{number:06d}-01234567/manifest.json"] = b"{}"


def _last_notes(draft: Draft) -> None:
    notes = draft.others[f"{draft.folder}/notes-0001.json"]
    draft.others[f"{draft.folder}/notes-9999.json"] = notes


# Sizes


def huge_cases(few: bool) -> Iterator[Case]:
    """Roots with files, headers, trees or tables that are huge, or claim to be."""
    for nbytes, has_index in crossed((2**40, 2**62, 2**63 - 1), (True, False), few):
        yield Case(
            name=f"a file of {nbytes} bytes, claimed" + ("" if has_index else ", no index"),
            change=partial(_claimed, nbytes=nbytes, has_index=has_index),
            is_refused=True,
        )
    for name in (MODEL, TREE, "index.json", "manifest.json", "notes-0001.json"):
        yield Case(
            name=f"{name} grown to 1 TiB",
            change=partial(_grown, key=f"FOLDER/{name}", nbytes=2**40),
            is_refused=name != "notes-0001.json",
        )
    for name in ("00000001.json", "00000001.closed.json", "00000002.json"):
        change = partial(_grown, key=f"writers/{name}", nbytes=2**40)
        yield Case(name=f"claim {name} grown to 1 TiB", change=change)
    yield Case(name="1 TiB, sparse and listed", change=_sparse, is_refused=True, skips_verify=True)
    yield Case(
        name="1 TiB, sparse and listed, without index",
        change=partial(_sparse, has_index=False),
        is_refused=True,
        skips_verify=True,
    )
    for length in (2**24, 84 * 10**6, 2**40, 2**60, 2**63, 2**64 - 1)[:: 2 if few else 1]:
        yield Case(
            name=f"header of {length} bytes, claimed", change=partial(_length, length=length)
        )
    yield Case(name="header of 84 MB", change=_long_header)
    yield Case(
        name="2**40 tensors, claimed",
        change=partial(_set_field, document="manifest", place=(*_PART, "num_tensors"), value=2**40),
    )
    if not few:
        yield Case(name="10,000 components", change=_many_components, is_refused=True)
        yield Case(name="a tree of 262,144 values", change=_wide_tree)
    yield Case(name="16 MiB of index", change=_wide_index, is_refused=True)
    yield Case(name="a tree that doubles", change=_doubling, is_refused=True)
    yield Case(name="a tree that doubles a little", change=partial(_doubling, levels=15))


def _claimed(draft: Draft, nbytes: int, has_index: bool) -> None:
    draft.reseal()
    draft.keeps_digests = True
    draft.manifest["files"][MODEL]["nbytes"] = nbytes
    if not has_index:
        draft.raw["index.json"] = b"{}"


def _grown(draft: Draft, key: str, nbytes: int) -> None:
    def grow(root: Path) -> None:
        path = root / key.replace("FOLDER", draft.folder)
        path.touch()
        os.truncate(path, nbytes)

    draft.after.append(grow)


def _sparse(draft: Draft, has_index: bool = True) -> None:
    """Add a tensor of 1 TiB whose sparse file exists; only its digests are wrong."""
    name, num_blocks = "extra-00000.safetensors", 2**17
    nbytes = num_blocks * 8 * 2**20
    digest, digests = digest_of(nbytes, bytes(32) * num_blocks)
    draft.reseal()
    draft.keeps_digests = True
    columns = _columns(draft, "extra")
    columns["names"], columns["dtypes"] = ["table"], ["U8"]
    columns["shapes"] = [[nbytes - 4096]]
    columns["shards"].update(tensor=[0], file=[0], start=[4096])
    draft.index["blocks"][name] = digests
    draft.set_tree("extra", {"table": {"$tensor": "table"}})
    tree = draft.files["extra-00000.json"]
    tree_digest, draft.index["blocks"]["extra-00000.json"] = file_digest(tree)
    listed = draft.manifest["files"]
    listed["extra-00000.json"] = {"nbytes": len(tree), "digest": tree_digest}
    listed[name] = {"nbytes": nbytes, "digest": digest}
    data = json.dumps(draft.index).encode()
    listed["index.json"] = {"nbytes": len(data), "digest": file_digest(data)[0]}
    if not has_index:
        draft.raw["index.json"] = b"{}"
    _grown(draft, f"FOLDER/{name}", nbytes)


def _length(draft: Draft, length: int) -> None:
    draft.files[MODEL] = length.to_bytes(8, "little") + draft.files[MODEL][8:]


def _long_header(draft: Draft) -> None:
    draft.files[MODEL] = image(b"{}".ljust(84 * 10**6), draft.files[MODEL][4096:])


def _many_components(draft: Draft) -> None:
    part = draft.manifest["components"]["model"]
    draft.manifest["components"] |= {f"c{number}": part for number in range(10_000)}


def _wide_index(draft: Draft) -> None:
    _columns(draft)["names"] = ["" for _ in range(4 * 2**20)]


def _wide_tree(draft: Draft) -> None:
    draft.set_tree("extra", {"step": 2, "wide": [0] * 2**18})


def _doubling(draft: Draft, levels: int = 40) -> None:
    tree: list[Any] = [[0]]
    tree += [[{"$same": 1 + number}, {"$same": 1 + number}] for number in range(levels)]
    draft.set_tree("extra", {"step": 2, "tree": tree})


# Files that codecs made


def codec_cases(few: bool) -> Iterator[Case]:
    """Roots with compressed blocks that lie about their length, content or codec."""
    for codec in SUFFIXES:
        yield Case(name=f"{codec}: honest", change=partial(_stored, codec=codec))
        yield Case(
            name=f"{codec}: a bomb",
            change=partial(_stored, codec=codec, block=BOMBS[codec]),
            is_refused=True,
        )
    trees = {
        "a tree that is a bomb": lambda codec: {"block": BOMBS[codec], "nbytes": 2**26},
        "a tree longer than a tree may be": lambda codec: {"nbytes": 2**26 + 1},
    }
    for codec, (name, how) in crossed(SUFFIXES, trees.items(), few):
        yield Case(
            name=f"{codec}: {name}",
            change=partial(_stored, codec=codec, file=TREE, **how(codec)),
            is_refused=True,
        )
    for codec, name in crossed(SUFFIXES, LIES, few):
        change, is_refused = LIES[name]
        yield Case(
            name=f"{codec}: {name}",
            change=partial(_lie, codec=codec, change=change),
            is_refused=is_refused,
        )
    for codec in SUFFIXES:
        yield Case(
            name=f"{codec}: noise",
            change=partial(_stored, codec=codec, block=lambda: random.Random(1).randbytes(3000)),
            is_refused=True,
        )
    for at, value in CHUNK_BYTES[:: 3 if few else 1]:
        yield Case(
            name=f"blosc2: byte {at} is {value}",
            change=partial(_stored, codec="blosc2", patch=(at, value)),
            is_refused=True,
        )
    members = ("codec", "nbytes", "digest")
    for value, member in crossed(WRONG[:: 3 if few else 1], members, few):
        yield Case(
            name=f"stored {member} {str(value)[:20]!a}",
            change=partial(
                _lie, codec="zstd", change=lambda d, e, i, v=value, m=member: e.update({m: v})
            ),
            is_refused=True,
        )


def _encoded(codec: str, data: bytes) -> bytes:
    encoding = Encoding(Compression(codec=codec), [1] * 16)  # type: ignore[arg-type]
    return bytes(encoding.encode(0, memoryview(data)))


def _stored(
    draft: Draft,
    *,
    codec: str,
    file: str = MODEL,
    block: Callable[[], bytes] | None = None,
    nbytes: int | None = None,
    patch: tuple[int, int] | None = None,
) -> str:
    """Replace a file of the checkpoint by a compressed one, and return its name."""
    plain, name = draft.files.pop(file), file + SUFFIXES[codec]
    stored = bytearray(_encoded(codec, plain) if block is None else block())
    if patch is not None:
        stored[patch[0]] = patch[1]
    draft.raw[name] = bytes(stored)
    draft.manifest["requires"] = ["codec"]
    _rename(draft.manifest["files"], file, name)
    _rename(draft.index["blocks"], file, name)
    part = draft.manifest["components"]["model"]
    part["files"] = [name if listed == file else listed for listed in part["files"]]
    columns = draft.index["components"]["model"]
    columns["files"] = [name if listed == file else listed for listed in columns["files"]]
    digest, blocks = file_digest(plain)
    if nbytes is not None:
        blocks = blocks[:64] * -(-nbytes // BLOCK_NBYTES)
        digest, _ = digest_of(nbytes, bytes.fromhex(blocks))
    draft.index["blocks"][name] = blocks
    lengths = [len(stored), *[1] * (len(blocks) // 64 - 1)]
    draft.raw[name] += bytes(len(lengths) - 1)
    parts = [bytes(stored), *[bytes(1)] * (len(lengths) - 1)]
    digests = b"".join(blake3(part).digest() for part in parts)
    draft.manifest["files"][name] = {
        "nbytes": len(plain) if nbytes is None else nbytes,
        "digest": digest,
        "stored": {
            "codec": codec,
            "nbytes": len(draft.raw[name]),
            "digest": digest_of(sum(lengths), digests)[0],
        },
    }
    draft.index["stored"] = {name: {"nbytes": lengths, "digests": digests.hex()}}
    return name


Lie = Callable[[Draft, dict[str, Any], dict[str, Any]], Any]


def _lie(draft: Draft, codec: str, change: Lie) -> None:
    name = _stored(draft, codec=codec)
    entry, columns = draft.manifest["files"][name]["stored"], draft.index["stored"][name]
    change(draft, entry, columns)


def _in_both(length: int) -> Lie:
    """A length of the only block that manifest and index agree on."""

    def change(draft: Draft, entry: dict[str, Any], columns: dict[str, Any]) -> None:
        columns["nbytes"] = [length]
        entry["nbytes"] = length
        if 0 <= length < 2**63:
            entry["digest"] = digest_of(length, bytes.fromhex(columns["digests"]))[0]

    return change


def _plain_nbytes(nbytes: int) -> Lie:
    """Another length of the plain file."""

    def change(draft: Draft, entry: dict[str, Any], columns: dict[str, Any]) -> None:
        listed = next(e for e in draft.manifest["files"].values() if e.get("stored") is entry)
        name = next(n for n, e in draft.manifest["files"].items() if e is listed)
        listed["nbytes"] = nbytes
        listed["digest"] = digest_of(nbytes, bytes.fromhex(draft.index["blocks"][name]))[0]

    return change


LIES: dict[str, tuple[Lie, bool]] = {
    "no stored in the index": (lambda d, e, i: d.index.pop("stored"), True),
    "stored of another file": (lambda d, e, i: d.index["stored"].update({"../x": i}), True),
    "stored of a tree": (lambda d, e, i: d.index["stored"].update({TREE: i}), True),
    "no requires": (lambda d, e, i: d.manifest.update(requires=[]), False),
    "lengths that do not add up": (lambda d, e, i: i.update(nbytes=[1]), True),
    "two blocks for one": (lambda d, e, i: i.update(nbytes=[1, 2]), True),
    "no blocks": (lambda d, e, i: i.update(nbytes=[], digests=""), True),
    "a length below nothing": (_in_both(-1), True),
    "a block of nothing": (_in_both(0), True),
    "a block of 1 TiB": (_in_both(2**40), True),
    "a block behind the end": (_in_both(4000), True),
    "a length of 2**63": (_in_both(2**63), True),
    "a plain file of 1 byte": (_plain_nbytes(1), True),
    "a plain file of a byte more": (_plain_nbytes(4096 + 61), True),
    "a plain file of a block": (_plain_nbytes(BLOCK_NBYTES), True),
    "a plain file of 1 EiB": (_plain_nbytes(2**60), True),
    "another digest of the block": (lambda d, e, i: i.update(digests="0" * 64), True),
    "the index too": (lambda d, e, i: d.manifest["files"]["index.json"].update(stored=e), True),
}


def _zstd_bomb() -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(2**27))


def _lz4_bomb() -> bytes:
    with lz4.frame.LZ4FrameCompressor() as compressor:
        zeros = bytes(2**24)
        head = compressor.begin(source_size=4096 + 60)
        return bytes(head + b"".join(compressor.compress(zeros) for _ in range(16)))[:8000]


def _blosc2_bomb() -> bytes:
    return bytes(blosc2.compress2(bytes(2**27), typesize=4, nthreads=1))


SUFFIXES = {"zstd": ".zst", "lz4": ".lz4", "blosc2": ".blosc2"}
BOMBS = {"zstd": _zstd_bomb, "lz4": _lz4_bomb, "blosc2": _blosc2_bomb}
CHUNK_BYTES = (
    *((2, 0), (2, 0b11000101), (3, 0), (4, 255), (7, 127), (8, 255), (11, 127), (12, 1), (15, 255)),
    *(
        (16, 3),
        (16, 4),
        (16, 32),
        (17, 160),
        (21, 255),
        (31, 1),
        (31, 2),
        (31, 8),
        (31, 64),
        (31, 128),
    ),
)
