"""Hostile payloads: texts that may be taken for paths, values that may be taken for code."""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from collections.abc import Iterable
from itertools import product
from typing import Any


def crossed(ones: Iterable[Any], others: Iterable[Any], few: bool) -> list[tuple[Any, Any]]:
    """Make all pairs, or with `few` just enough that each member of both is in one."""
    ones, others = [*ones], [*others]
    if not few:
        return [*product(ones, others)]
    longer = max(len(ones), len(others))
    return [(ones[n % len(ones)], others[n % len(others)]) for n in range(longer)]


class _Trap:
    def __reduce__(self) -> Any:
        return (exec, ("trapped = True",))


PICKLE = pickle.dumps(_Trap())


def archive() -> bytes:
    """Make a zip archive with a pickle, as torch.save writes it."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("archive/data.pkl", PICKLE)
        archive.writestr("archive/version", "3\n")
    return memory.getvalue()


PATHS = (
    *("", ".", "..", "/", "//", "../x", "../../x", "../outside/canary", "/etc/passwd", "/dev/zero"),
    *(
        "a/b",
        "./model-00000.json",
        "model-00000.json/",
        "model-00000.json/..",
        "model-00000.json/.",
    ),
    *("a\0b", "model-00000.json\0", "\0", "a\nb", "\n", "\r", "\t", "\x1b[2J", "\x7f", "\u202e"),
    *("C:\\x", "c:x", "..\\x", "\\\\server\\share", "file:///etc/passwd", "http://localhost/x"),
    *("~", "~root", "$HOME", "`id`", "$(id)", "%2e%2e%2f", "*", "?", "-rf", "a;b", "a|b", "|id"),
    *("CON", "NUL.json", "aux.safetensors", " ", " model", "model ", ".hidden", ".", "...", "-"),
    *("x" * 300, "x" * 5000, "../" * 400 + "etc/passwd", "é" * 200, "\u0301", "\ufeffmodel"),
    *("MODEL-00000.JSON", "Model-00000.json", "m\u043edel-00000.json", "model-00000.jso\u0146"),
    *(
        "model-\u0660\u0660\u0660\u0660\u0660.json",
        "model-\u2011\u2011.json",
        "\uff0e\uff0e\uff0fx",
    ),
    *(
        "manifest.json",
        "index.json.bak",
        "latest",
        "writers",
        "writers/00000001.json",
        "retired.json",
    ),
    *("notes-0001.json", "rejected.json", "model-00001.safetensors", "model-99999.safetensors"),
    *("model-0.safetensors", "model-00000.pt", "model-00000.pkl", "model-00000.safetensors.bin"),
    *("optimizer-00001.json", "model-00000.safetensors\n", "model-0000000000000000.json", "😀"),
)
CODE = (
    *("os:system", "builtins:eval", "builtins.exec", "__main__:x", "antigravity:A", "torch:load"),
    *("subprocess:Popen", "holdfast.manager:CheckpointManager", "os:", ":", "a" * 300, "__class__"),
)


def nodes(few: bool = False) -> dict[str, Any]:
    """Make tree nodes of wrong kinds or with strange arguments, by the name of their case."""
    found: dict[str, Any] = {}
    kinds_of_code = {
        "enum {0:.20}": lambda text: {"$enum": {"type": text, "name": "A", "value": "id"}},
        "generator kind {0:.20}": lambda text: {"$generator": {"kind": text, "state": text}},
        "node ${0:.20}": lambda text: {f"${text}": ["id"]},
        "dtype {0:.20}": lambda text: {"$dtype": text},
    }
    for text, name in crossed(CODE[::2] if few else CODE, kinds_of_code, few):
        found[name.format(text)] = kinds_of_code[name](text)
    texts = ("../x", "/etc/passwd", "a\0b", "x" * 5000, "")
    nodes = ("$path", "$tensor", "$array", "$device", "$dtype", "$datetime", "$bytes")
    for text, node in crossed(texts, nodes, few):
        found[f"{node} {text[:12]!r}"] = {node: text}
    devices = ("meta", "cuda", "cuda:9999", "mps", "xla", "privateuseone", "vulkan", "hpu:1")
    kinds_of_device = {
        "tensor on {0}": lambda device: {"$tensor": "extra", "device": device},
        "device {0}": lambda device: {"$device": device},
        "generator on {0}": lambda device: {
            "$generator": {"kind": "torch", "device": device, "state": {"$tensor": "table"}}
        },
    }
    for device, name in crossed(devices, kinds_of_device, few):
        found[name.format(device)] = kinds_of_device[name](device)
    kinds = ("torch", "python", "numpy", "numpy-legacy")
    for kind, name in crossed(kinds, GENERATOR_MEMBERS, few):
        members = GENERATOR_MEMBERS[name]
        found[f"{kind} generator, {name}"] = {"$generator": {"kind": kind, **members}}
    found["enum of our own class"] = _enum("http:HTTPStatus", "NO_SUCH", 1)
    found["enum with a method's name"] = _enum("http:HTTPStatus", "__class__", 1)
    found["enum without a name"] = _enum("http:HTTPStatus", None, 200)
    found["pickle in bytes"] = {"$bytes": base64.b64encode(b"\x80\x04" + PICKLE).decode()}
    found["reduce"] = {"__reduce__": ["os.system", ["id"]], "py/object": "os.system"}
    found["size of 2**62"] = {"$size": [2**62] * 100}
    found["size of 2**200"] = {"$size": [2**200]}
    found["negative size"] = {"$size": [-1, -(2**62)]}
    found["integer of 4,000 digits"] = 10**4000 - 1
    found["60 levels"] = _deep(50)
    found["same of nothing"] = {"$same": 10**9}
    found["negative same"] = {"$same": -1}
    found["counter of tensors"] = {"$counter": [["a", {"$tensor": "table"}]]}
    found["tensor as a key"] = {"$dict": [[{"$tensor": "table"}, 1]]}
    found["list as a key"] = {"$dict": [[[1], 1]]}
    found["nan as a key, twice"] = {"$dict": [[{"$float": "nan"}, 1], [{"$float": "nan"}, 2]]}
    found["equal keys"] = {"$dict": [[1, 1], [True, 2]]}
    found["far date"] = {"$datetime": "99999-01-01T00:00:00"}
    found["far timedelta"] = {"$timedelta": [10**12, 0, 0]}
    found["scalar bool of 2"] = {"$scalar": ["BOOL", "02"]}
    return found


def _enum(type_: str, name: str | None, value: Any) -> Any:
    return {"$enum": {"type": type_, "name": name, "value": value}}


def _deep(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = [tree]
    return tree


_KEY = {"$array": "table"}
_WORDS = {"$array": "words"}
_MT = {"bit_generator": "MT19937", "has_gauss": 0, "gauss": 0.0}
GENERATOR_MEMBERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "state is a number": {"state": 5, "device": "cpu", "version": 3, "gauss_next": None},
    "state is null": {"state": None},
    "state is text": {"state": "x" * 100},
    "state is a list": {"state": [1] * 625, "version": 3, "gauss_next": "x"},
    "state is another tensor": {
        "state": {"$tensor": "table"},
        "device": "cpu",
        "version": 3,
        "gauss_next": None,
    },
    "device is a list": {"device": ["cpu"], "state": {"$tensor": "table"}},
    "state is an empty dict": {"state": {}},
    "unknown bits": {"state": {"bit_generator": "os.system", "state": {}}},
    "bits without state": {"state": {"bit_generator": "PCG64"}},
    "bits of a wrong name": {"state": {"bit_generator": ["MT19937"], "state": 1}},
    "PCG64 with text": {
        "state": {
            "bit_generator": "PCG64",
            "state": {"state": "x", "inc": None},
            "has_uint32": 2**70,
            "uinteger": -1,
        }
    },
    "PCG64 of 2**4000": {
        "state": {
            "bit_generator": "PCG64",
            "state": {"state": 2**4000, "inc": -(2**4000)},
            "has_uint32": 0,
            "uinteger": 0,
        }
    },
    "MT19937 with another key": {
        "state": {"bit_generator": "MT19937", "state": {"key": _KEY, "pos": 10**8}}
    },
    "MT19937 at a far position": {"state": {**_MT, "state": {"key": _WORDS, "pos": 10**9}}},
    "MT19937 before its start": {"state": {**_MT, "state": {"key": _WORDS, "pos": -(10**9)}}},
    "MT19937 with text": {"state": {**_MT, "state": {"key": "x", "pos": "y"}}},
    "Philox without counters": {
        "state": {
            "bit_generator": "Philox",
            "state": {"counter": _KEY, "key": _KEY},
            "buffer": _KEY,
            "buffer_pos": 10**8,
            "has_uint32": 0,
            "uinteger": 0,
        }
    },
}
