"""Hostile files of other libraries: pickles, zip files, tars and folders; each is a `Case`.

A pickle is put together operation by operation. `CANARY` is the command of
which the audit hook of the child process tells if it is run.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

CANARY = "true"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A hostile file, or a folder of files; `is_refused` if it must not open at all, `is_named` if
    the error must name it."""

    name: str
    files: dict[str, bytes]
    is_refused: bool = True
    is_named: bool = False


class A:
    """A class of which pickles are made."""


# Operations.


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def tup(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(module: str, name: str, *args: bytes) -> bytes:
    return glob(module, name) + tup(*args) + b"R"


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def long(value: int) -> bytes:
    data = value.to_bytes((value.bit_length() // 8) + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(data)) + data


def put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def under(key: str, value: bytes) -> bytes:
    """A dict with one harmless item, and the value under `key`."""
    return b"}" + text("a") + number(1) + b"s" + text(key) + value + b"s"


def program(body: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


# Pickles.

CODE: dict[str, bytes] = {
    "os.system": call("os", "system", text(CANARY)),
    "posix.system": call("posix", "system", text(CANARY)),
    "subprocess.Popen": call("subprocess", "Popen", text(CANARY)),
    "subprocess.check_output": call("subprocess", "check_output", text(CANARY)),
    "builtins.eval": call("builtins", "eval", text("__import__('os').system('id')")),
    "builtins.exec": call("builtins", "exec", text("import antigravity")),
    "builtins.open": call("builtins", "open", text("/etc/passwd")),
    "builtins.__import__": call("builtins", "__import__", text("antigravity")),
    "python 2 eval": call("__builtin__", "eval", text("1")),
    "importlib": call("importlib", "import_module", text("antigravity")),
    "runpy": call("runpy", "run_path", text("/tmp/x.py")),
    "ctypes": call("ctypes", "CDLL", text("libc.so.6")),
    "webbrowser": call("webbrowser", "open", text("http://127.0.0.1")),
    "socket": call("socket", "create_connection", tup(text("127.0.0.1"), number(9))),
    "shutil.rmtree": call("shutil", "rmtree", text("/tmp/none")),
    "pty.spawn": call("pty", "spawn", text("/bin/sh")),
    "pickle.loads": call("pickle", "loads", text("cos\nsystem\n")),
    "marshal": call("marshal", "loads", text("x")),
    "code object": call("types", "CodeType", number(0)),
    "function": call("types", "FunctionType", number(0)),
    "torch.load": call("torch", "load", text("/etc/passwd")),
    "torch.jit": call("torch.jit", "load", text("/etc/passwd")),
    "numpy.load": call("numpy", "load", text("/etc/passwd")),
    "numpy memmap": call("numpy", "memmap", text("/etc/passwd")),
    "numpy testing": call("numpy.testing._private.utils", "runstring", text("1"), b"}"),
    "numpy f2py": call("numpy.f2py.crackfortran", "getlincoef", text("1"), b"}"),
    "antigravity": glob("antigravity", "geohash"),
    "a module that is not there": glob("no.such.module", "Thing"),
    "lightning class path": call("jsonargparse", "instantiate", text("os.system")),
    "getattr of a module": call("builtins", "getattr", glob("os", "path"), text("os")),
    "getattr chain": call(
        "builtins",
        "getattr",
        call("builtins", "getattr", glob("collections", "OrderedDict"), text("__init__")),
        text("__globals__"),
    )
    + tup(text(CANARY))
    + b"R",
    "getattr called": call("builtins", "getattr", glob("os", "x"), text("system"))
    + tup(text(CANARY))
    + b"R",
    "dotted name": glob("collections", "OrderedDict.fromkeys.__globals__"),
    "operator.attrgetter": call("operator", "attrgetter", text("system"))
    + tup(glob("os", "path"))
    + b"R",
    "functools.partial": call("functools", "partial", glob("os", "system"), text(CANARY)) + b")R",
    "map": call("builtins", "map", glob("os", "system"), tup(text(CANARY))),
    "INST": b"(" + text(CANARY) + b"ios\nsystem\n",
    "OBJ": b"(" + glob("os", "system") + text(CANARY) + b"o",
    "NEWOBJ": glob("subprocess", "Popen") + tup(text(CANARY)) + b"\x81",
    "NEWOBJ_EX": glob("subprocess", "Popen") + tup(text(CANARY)) + b"}\x92",
    "NEWOBJ_EX with names": glob("subprocess", "Popen")
    + tup()
    + under("args", text(CANARY))
    + b"\x92",
    "STACK_GLOBAL": text("os") + text("system") + b"\x93" + tup(text(CANARY)) + b"R",
    "copyreg reconstructor": call(
        "copyreg", "_reconstructor", glob("os", "system"), glob("builtins", "object"), b"N"
    ),
    "copyreg extension": call("copyreg", "add_extension", text("os"), text("system"), number(1)),
    "BUILD with setstate": call("os", "system", text(CANARY)) + under("__setstate__", b"N") + b"b",
    "BUILD of a class": glob("collections", "OrderedDict")
    + tup()
    + b"R"
    + under("__class__", glob("os", "system"))
    + b"b",
    "items of an unknown object": call("os", "environ") + text("PATH") + text("x") + b"s",
    "append to an unknown object": call("sys", "path") + text("x") + b"a",
    "as an argument of a tensor": call(
        "torch._utils", "_rebuild_parameter", call("os", "system", text(CANARY)), b"\x88", b"N"
    ),
    "inside of a tensor's type": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        glob("os", "system"),
        glob("torch.nn.parameter", "Parameter"),
        tup(text(CANARY)),
        b"N",
    ),
    "as the factory of a defaultdict": call("collections", "defaultdict", glob("os", "system")),
    "as a key": b"}" + call("os", "system", text(CANARY)) + number(1) + b"s",
    "as a member of a set": b"\x8f(" + call("os", "system", text(CANARY)) + b"\x90",
    "a storage from bytes of a pickle": call(
        "torch.storage",
        "_load_from_bytes",
        call("_codecs", "encode", text("cos\nsystem\n(S'id'\ntR."), text("latin1")),
    ),
    "encode with a codec of its own": call("_codecs", "encode", text("x"), text("idna")),
    "lookup of a codec": call("_codecs", "lookup", text("x")),
}
"""Values that would run something; at the least they must be left out."""

_REFUSED_CODE = ("a storage from bytes", "encode with", "BUILD of a class of")

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "no stop": b"\x80\x02}",
    "protocol 6": b"\x80\x06}.",
    "stop without a value": b"\x80\x02.",
    "unknown operation": b"\x80\x02\xff.",
    "extension 1": program(b"\x82\x01"),
    "extension 2": program(b"\x83\x01\x00"),
    "extension 4": program(b"\x84\x01\x00\x00\x00"),
    "buffer outside": program(b"\x97", 5),
    "read-only buffer": program(b"\x97\x98", 5),
    "mark missing": program(b"t"),
    "mark as a value": program(b"(."),
    "items without a key": program(b"}(" + text("a") + b"u"),
    "append to a number": program(number(1) + b"Na"),
    "item of a list": program(b"]NNs"),
    "member of a list": program(b"](N\x90"),
    "list as a key": program(b"}]Ns"),
    "dict in a tuple as a key": program(b"}" + b"}\x85" + b"Ns"),
    "list as a member": program(b"\x8f(]\x90"),
    "call without a tuple": program(glob("os", "system") + text("x") + b"R"),
    "call of a number": program(number(1) + b")R"),
    "get of nothing": program(b"h\x05"),
    "get of a negative": program(b"g-1\n"),
    "put far away": program(b"N" + put(2**31 - 1)),
    "put before a value": program(b"q\x00"),
    "build of a number": program(number(1) + b"Nb"),
    "persistent id as text": program(b"Pstorage\n"),
    "persistent id": program(number(7) + b"Q"),
    "persistent id as a tuple": program(tup(text("storage"), b"N") + b"Q"),
    "global without a name": program(b"cos\n"),
    "global by numbers": program(number(1) + number(2) + b"\x93"),
    "global with a newline": program(text("os\nx") + text("y") + b"\x93"),
    "global of a long name": program(text("x" * 300) + text("y") + b"\x93"),
    "int that is none": program(b"Ix\n"),
    "float that is none": program(b"Fx\n"),
    "string without quotes": program(b"Sx\n"),
    "string with a wrong escape": program(b"S'\\x'\n"),
    "text that is not UTF-8": program(b"X\x01\x00\x00\x00\xff"),
    "negative size of a string": program(b"T\xff\xff\xff\xff"),
    "line without an end": b"\x80\x02S'" + b"a" * 2 * MIB,
    "huge LONG4": program(b"\x8b\xff\xff\xff\x7f"),
    "decimal of a million digits": program(b"L" + b"9" * 1_000_000 + b"L\n"),
    "huge BINUNICODE": program(b"X\xff\xff\xff\x7f"),
    "huge BINUNICODE8": program(b"\x8d" + b"\xff" * 8, 4),
    "huge BINBYTES8": program(b"\x8e" + b"\xff" * 7 + b"\x00", 4),
    "huge BYTEARRAY8": program(b"\x96" + b"\xff" * 7 + b"\x00", 5),
    "huge frame": program(b"\x95" + b"\xff" * 8, 4),
    "list in itself": program(b"]q\x00h\x00a"),
    "dict in itself": program(b"}q\x00" + text("a") + b"h\x00s")[:-1] + b"a.",
}


def _bomb(width: int, depth: int, opening: bytes, closing: bytes) -> bytes:
    """Containers of which each holds the one before many times."""
    body = b"N" + put(0)
    for level in range(depth):
        body += b"0" + opening + get(level) * width + closing + put(level + 1)
    return program(body)


BOMBS: dict[str, Callable[[], bytes]] = {
    "deep unknown objects": lambda: program(
        glob("a", "B") + b"q\x000" + under("a", b"(h\x00" * 200_000 + b"N" + b"o" * 200_000)
    ),
    "billion laughs of lists": lambda: _bomb(10, 40, b"](", b"e"),
    "billion laughs of tuples": lambda: _bomb(10, 40, b"(", b"t"),
    "billion laughs of dicts": lambda: program(
        b"N"
        + put(0)
        + b"".join(
            b"0}(" + b"".join(text(str(n)) + get(level) for n in range(10)) + b"u" + put(level + 1)
            for level in range(40)
        )
    ),
    "tuple of tuples as a key": lambda: program(
        b"}("
        + b"N"
        + put(0)
        + b"".join(get(level) * 2 + b"\x86" + put(level + 1) + b"0" * 0 for level in range(60))
        + b"Nu"
    ),
    "pairs of a dict made again and again": lambda: (
        b"\x80\x02]("
        + b"K\x01K\x02\x86" * 50_000
        + b"e\x85"
        + put(0)
        + b"0"
        + glob("collections", "OrderedDict")
        + put(1)
        + (get(1) + get(0) + b"R0") * 20_000
        + b"."
    ),
    "list made again and again": lambda: (
        b"\x80\x02]("
        + b"N" * 500_000
        + b"e\x85"
        + put(0)
        + b"0"
        + glob("builtins", "tuple")
        + put(1)
        + (get(1) + get(0) + b"R0") * 20_000
        + b"."
    ),
    "sizes checked again and again": lambda: (
        b"\x80\x02("
        + b"K\x01" * 128
        + b"t\x85"
        + put(0)
        + b"0"
        + glob("torch", "Size")
        + put(1)
        + (get(1) + get(0) + b"R0") * 400_000
        + b"."
    ),
    "encoded again and again": lambda: (
        b"\x80\x02"
        + text("a" * (8 * MIB))
        + text("latin1")
        + b"\x86"
        + put(0)
        + b"0"
        + glob("_codecs", "encode")
        + put(1)
        + (get(1) + get(0) + b"R0") * 50_000
        + b"."
    ),
    "integers of one hash": lambda: (
        b"\x80\x02}(" + b"".join(long(n * (2**61 - 1)) + b"N" for n in range(1, 60_000)) + b"u."
    ),
    "floats of one hash in a set": lambda: (
        b"\x80\x04\x8f("
        + b"".join(
            b"G" + struct.pack(">d", 2.0 ** (61 * (n % 15)) * (n + 1)) for n in range(60_000)
        )
        + b"\x90."
    ),
    "long keys in long keys": lambda: program(
        b"".join(b"}" + text("k" * 4000) for _ in range(45))
        + b"]("
        + b"N" * 1000
        + b"e"
        + b"s" * 45
    ),
    "arguments by the million": lambda: (
        b"\x80\x02"
        + glob("pathlib", "PosixPath")
        + b"("
        + (text("a") + put(1))
        + get(1) * 2_000_000
        + b"tR."
    ),
    "deep lists": lambda: b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "deep tuples": lambda: b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
    "deep marks": lambda: b"\x80\x02" + b"(" * 3_000_000 + b".",
    "deep dicts": lambda: b"\x80\x02" + b"}N" * 400_000 + b"N" + b"s" * 400_000 + b".",
    "huge LONG1s in a row": lambda: b"\x80\x02" + (b"\x8a\xff" + b"\x7f" * 255) * 120_000 + b".",
    "many decimals": lambda: b"\x80\x02" + (b"L" + b"9" * 4_000 + b"L\n0") * 8_000 + b".",
    "wide text": lambda: b"\x80\x02" + (text("a" * (4 * MIB) + "𝄞") + b"0") * 12 + b".",
    "many nones": lambda: b"\x80\x02" + b"N" * 8_000_000 + b".",
    "many dicts": lambda: b"\x80\x02]" + b"(" + b"}" * 3_000_000 + b"e.",
    "many sets": lambda: b"\x80\x04]" + b"(" + b"\x8f" * 2_000_000 + b"e.",
    "many memos": lambda: b"\x80\x04N" + b"\x94" * 8_000_000 + b".",
    "many unknown objects": lambda: (
        b"\x80\x02" + glob("a", "B") + b"q\x00" + b"h\x00)R" * 1_800_000 + b"."
    ),
    "many counted dicts": lambda: (
        b"\x80\x02"
        + glob("collections", "Counter")
        + b"q\x00)q\x010"
        + b"h\x00h\x01R0" * 1_200_000
        + b"."
    ),
}
"""Pickles that are small for what they claim, or long; made when they are asked for."""

QUICK_BOMBS = (
    "deep unknown objects",
    "billion laughs of lists",
    "billion laughs of dicts",
    "tuple of tuples as a key",
    "pairs of a dict made again and again",
    "integers of one hash",
)
"""Those that are small themselves."""


def pickles() -> Iterator[Case]:
    for name, body in CODE.items():
        is_refused = name.startswith(_REFUSED_CODE)
        yield Case(f"pickle: {name}, alone", {"x.pkl": program(body)}, is_refused=is_refused)
        data = program(under("evil", body))
        yield Case(f"pickle: {name}, in a dict", {"x.pkl": data}, is_refused=is_refused)
    for name in QUICK_BOMBS:
        yield Case(f"bomb: {name}", {"x.pkl": BOMBS[name]()}, is_refused=False)
    for name, data in MALFORMED.items():
        yield Case(f"pickle: {name}", {"x.pkl": data}, is_refused=False)
    honest = pickle.dumps({"a": [1, 2.5, "x", (None, True)], "b": {3, 4}, "c": b"123"}, 4)
    for protocol in range(6):
        data = pickle.dumps({"n": np.arange(3), "t": (1, -1, 2**70), "s": {"x"}}, protocol)
        for length in range(2, len(data), max(1, len(data) // 8)):
            name = f"pickle: protocol {protocol}, cut at {length}"
            yield Case(name, {"x.pkl": data[:length]}, is_refused=protocol > 1)
    for place in range(0, len(honest), 3):
        broken = honest[:place] + bytes([honest[place] ^ 0x5A]) + honest[place + 1 :]
        yield Case(f"pickle: byte {place} changed", {"x.pkl": broken}, is_refused=False)


# Tensors.


def storage(
    key: str = "0", numel: int = 4, kind: str = "FloatStorage", place: str = "cpu"
) -> bytes:
    parts = (text("storage"), glob("torch", kind), text(key), text(place), long(numel))
    return tup(*parts) + b"Q"


def tensor(made: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    return call(
        "torch._utils",
        "_rebuild_tensor_v2",
        made,
        long(offset),
        tup(*map(long, shape)),
        tup(*map(long, strides)),
        b"\x89",
        call("collections", "OrderedDict"),
    )


def zipped(body: bytes, data: dict[str, bytes] | None = None, **changes: Any) -> bytes:
    """A file of torch.save, in which each member is stored."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", changes.get("method", zipfile.ZIP_STORED)) as file:
        file.writestr("archive/data.pkl", program(body))
        file.writestr("archive/byteorder", changes.get("order", b"little"))
        for key, raw in (data if data is not None else {"0": bytes(16)}).items():
            file.writestr(f"archive/data/{key}", raw)
        file.writestr("archive/version", b"3\n")
    return out.getvalue()


def _w(body: bytes) -> bytes:
    return b"}" + text("w") + body + b"s"


TENSORS: dict[str, bytes] = {
    "beyond its storage": zipped(_w(tensor(storage(), 0, (5,), (1,)))),
    "beyond by its offset": zipped(_w(tensor(storage(), 4, (1,), (1,)))),
    "beyond by its strides": zipped(_w(tensor(storage(), 0, (2, 2), (3, 1)))),
    "negative offset": zipped(_w(tensor(storage(), -1, (1,), (1,)))),
    "negative stride": zipped(_w(tensor(storage(), 3, (4,), (-1,)))),
    "negative size": zipped(_w(tensor(storage(), 0, (-1,), (1,)))),
    "sizes beyond 64 bits": zipped(_w(tensor(storage(), 0, (2**62, 2**62), (0, 0)))),
    "a huge expanded tensor": zipped(_w(tensor(storage(), 0, (2**40,), (0,)))),
    "storage missing": zipped(_w(tensor(storage("7"), 0, (4,), (1,)))),
    "storage too short": zipped(_w(tensor(storage(numel=400), 0, (4,), (1,)))),
    "storage by a path": zipped(_w(tensor(storage("../data.pkl"), 0, (4,), (1,)))),
    "storage of 2**62 elements": zipped(_w(tensor(storage(numel=2**62), 0, (4,), (1,)))),
    "storage of two dtypes": zipped(
        b"}"
        + text("a")
        + tensor(storage(), 0, (4,), (1,))
        + b"s"
        + text("b")
        + tensor(storage(numel=2, kind="LongStorage"), 0, (2,), (1,))
        + b"s"
    ),
    "device that is none": zipped(_w(tensor(storage(place="cpu; rm"), 0, (4,), (1,)))),
    "129 dimensions": zipped(_w(tensor(storage(), 0, (1,) * 129, (1,) * 129))),
    "big-endian": zipped(_w(tensor(storage(), 0, (4,), (1,))), order=b"big"),
    "no byte order at all": zipped(_w(tensor(storage(), 0, (4,), (1,))), order=b"x" * 100),
    "a thousand views of all": zipped(
        b"}"
        + b"".join(
            text(str(n)) + tensor(storage(numel=250_000), n, (249_000,), (1,)) + b"s"
            for n in range(999)
        ),
        {"0": bytes(1_000_000)},
    ),
    "types inside of types": zipped(
        _w(
            b"".join(
                glob("torch._tensor", "_rebuild_from_type_v2")
                + b"("
                + glob("torch._tensor", "_rebuild_from_type_v2")
                + glob("torch", "Tensor")
                for _ in range(50_000)
            )
            + b")"
            + b"NtR" * 50_000
        )
    ),
}


def _legacy(system: bytes, body: bytes, keys: bytes, storages: bytes) -> bytes:
    magic = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    return (
        magic + program(number(1001)) + program(system) + program(body) + program(keys) + storages
    )


_LITTLE = b"}" + text("little_endian") + b"\x88s"
_KEYS = b"]" + text("0") + b"a"
_RAW = struct.pack("<q", 4) + bytes(16)
_ONE = _w(tensor(storage().replace(b"tQ", b"NtQ"), 0, (4,), (1,)))

LEGACY: dict[str, bytes] = {
    "big-endian": _legacy(b"}" + text("little_endian") + b"\x89s", _ONE, _KEYS, _RAW),
    "another protocol": _legacy(_LITTLE, _ONE, _KEYS, _RAW).replace(number(1001), number(9)),
    "storages cut": _legacy(_LITTLE, _ONE, _KEYS, _RAW[:-1]),
    "another number of elements": _legacy(_LITTLE, _ONE, _KEYS, struct.pack("<q", 5) + bytes(20)),
    "a negative number of elements": _legacy(_LITTLE, _ONE, _KEYS, struct.pack("<q", -1)),
    "a key that no tensor has": _legacy(_LITTLE, _ONE, b"]" + text("1") + b"a", _RAW),
    "a key twice": _legacy(_LITTLE, _ONE, b"]" + text("0") + b"a" + text("0") + b"a", _RAW * 2),
    "keys that are no list": _legacy(_LITTLE, _ONE, text("0"), _RAW),
    "keys that are numbers": _legacy(_LITTLE, _ONE, b"]K\x00a", _RAW),
    "only the magic number": _legacy(_LITTLE, _ONE, _KEYS, _RAW)[:16],
}


# Zip files.


def _honest() -> bytes:
    return zipped(_w(tensor(storage(), 0, (4,), (1,))))


def _patched(change: Callable[[bytearray, list[int]], None]) -> bytes:
    """A zip file of which the entries of the directory, at the positions given, are changed."""
    data = bytearray(_honest())
    entries = []
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        entries.append(at)
        at = data.find(b"PK\x01\x02", at + 1)
    change(data, entries)
    return bytes(data)


def _set(data: bytearray, at: int, form: str, value: int) -> None:
    struct.pack_into(form, data, at, value)


def _twice() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name in ("archive/data.pkl", "archive/data.pkx"):
            file.writestr(name, program(b"}"))
    return out.getvalue().replace(b"data.pkx", b"data.pkl")


def _link() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        info = zipfile.ZipInfo("archive/data.pkl")
        info.external_attr = 0o120777 << 16
        info.create_system = 3
        file.writestr(info, program(under("b", number(1))))
    return out.getvalue()


def _many() -> bytes:
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *[0] * 6, 0, 0, 0, 8, *[0] * 4, 0, 0)
    body = b"".join(entry + f"{n:08}".encode() for n in range(450_000))
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 450_000, 450_000, len(body), 4)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 4 + len(body), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return b"PK\x03\x04" + body + end + locator + last


ZIPS: dict[str, bytes] = {
    "compressed": zipped(b"}" + b"N" * 1000 + b"0" * 1000, method=zipfile.ZIP_DEFLATED),
    "a bomb": zipped(b"}" + b"N0" * 5_000_000, method=zipfile.ZIP_DEFLATED),
    "a longer member": _patched(
        lambda d, e: [_set(d, e[2] + n, "<L", 17) for n in (20, 24)] and None
    ),
    "a member longer than the file": _patched(
        lambda d, e: [_set(d, e[0] + n, "<L", 2**31) for n in (20, 24)] and None
    ),
    "two sizes": _patched(lambda d, e: _set(d, e[2] + 24, "<L", 99)),
    "overlapping": _patched(lambda d, e: _set(d, e[2] + 42, "<L", 10)),
    "on the same place": _patched(lambda d, e: _set(d, e[2] + 42, "<L", 0)),
    "encrypted": _patched(lambda d, e: _set(d, e[0] + 8, "<H", 1)),
    "strongly encrypted": _patched(lambda d, e: _set(d, e[0] + 8, "<H", 0x41)),
    "header of another": _patched(lambda d, e: _set(d, 30 + 8, "<B", 88)),
    "header with a longer extra": _patched(lambda d, e: _set(d, 28, "<H", 60_000)),
    "wrong CRC": _patched(lambda d, e: _set(d, e[0] + 16, "<L", 1)),
    "entry without a sign": _patched(lambda d, e: _set(d, e[1], "<L", 0)),
    "name beyond the directory": _patched(lambda d, e: _set(d, e[-1] + 28, "<H", 60_000)),
    "64 bits without a field": _patched(
        lambda d, e: [_set(d, e[0] + n, "<L", 2**32 - 1) for n in (20, 24)] and None
    ),
    "directory elsewhere": _patched(lambda d, e: _set(d, len(d) - 6, "<L", 2**31)),
    "more members than there are": _patched(lambda d, e: _set(d, len(d) - 12, "<H", 99)),
    "on another disk": _patched(lambda d, e: _set(d, len(d) - 18, "<H", 3)),
    "cut": _honest()[:-30],
    "cut in the data": _honest()[:200],
    "two of one name": _twice(),
    "a link": _link(),
    "no pickle": zipped(b"}").replace(b"data.pkl", b"data.txt"),
}


# Tars.


def tarred(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _info(name: str, **changes: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(info, key, value)
    return info


def _header(size: int, kind: bytes = b"0", name: bytes = b"composer_states.pt") -> bytes:
    head = bytearray(512)
    head[: len(name)] = name
    head[124:136] = b"\x80" + size.to_bytes(11, "big")
    head[156:157] = kind
    head[257:263] = b"ustar\0"
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return bytes(head)


STATES = "composer_states.pt"
TARS: dict[str, tuple[str, bytes]] = {
    "another name": ("x.tar", tarred((_info("states.pt"), _honest()))),
    "a symbolic link": (
        "x.tar",
        tarred((_info(STATES, type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")),
    ),
    "a hard link": (
        "x.tar",
        tarred((_info(STATES, type=tarfile.LNKTYPE, linkname="/etc/passwd"), b"")),
    ),
    "a device": ("x.tar", tarred((_info(STATES, type=tarfile.CHRTYPE), b""))),
    "a folder": ("x.tar", tarred((_info(STATES, type=tarfile.DIRTYPE), b""))),
    "a sparse file": ("x.tar", _header(512, b"S") + bytes(1024)),
    "cut": ("x.tar", tarred((_info(STATES), _honest()))[:700]),
    "only its header": ("x.tar", _header(100)),
    "a member of 2**80 bytes": ("x.tar", _header(2**80)),
    "a wrong checksum": ("x.tar", b"\1" + tarred((_info(STATES), _honest()))[1:]),
    "a long pax header": ("x.tar", _header(2**33, b"x") + bytes(10_000)),
    "a long GNU name": ("x.tar", _header(2**33, b"L") + bytes(10_000)),
    "a pax header of size -1": (
        "x.tar",
        _header(11, b"x") + b"11 size=-1\n".ljust(512, b"\0") + _header(0),
    ),
    "a pax header of zeros": ("x.tar", _header(8, b"x") + b"0 size=1".ljust(512, b"\0")),
    "pax headers without an end": ("x.tar", (_header(0, b"x")) * 20_000),
    "many members": ("x.tar", _header(0, b"0", b"a") * 20_000),
    "xz with a huge dictionary": (
        "x.tar.xz",
        lzma.compress(
            b"a" * 1000, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30, "preset": 0}]
        ),
    ),
    "gzip cut": ("x.tar.gz", gzip.compress(tarred((_info(STATES), _honest())))[:-40]),
    "gzip damaged": ("x.tar.gz", gzip.compress(_honest())[:60] + bytes(60)),
    "bzip2 that is none": ("x.tar.bz2", b"BZh9" + bytes(100)),
    "zstd that is none": ("x.tar.zst", b"\x28\xb5\x2f\xfd" + bytes(100)),
    "lz4 that is none": ("x.tar.lz4", b"\x04\x22\x4d\x18" + bytes(100)),
    "not of torch": ("x.tar.gz", gzip.compress(bytes(2000))),
    "another archive inside": ("x.tar.gz", gzip.compress(gzip.compress(_honest()))),
}
ARCHIVE_BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a bomb of gzip": ("x.tar.gz", lambda: gzip.compress(bytes(300 * MIB), 1)),
    "a bomb of xz": ("x.tar.xz", lambda: lzma.compress(bytes(300 * MIB), preset=0)),
    "a bomb in a tar": (
        "x.tar.gz",
        lambda: gzip.compress(
            _header(200 * MIB) + program(under("b", number(1))) + bytes(200 * MIB), 1
        ),
    ),
    "four hundred thousand members of a zip": ("x.pt", _many),
}
PATHS = ("/tmp/elsewhere/", "../../", "..\\..\\", "./a/../../")


def others() -> Iterator[Case]:
    for name, data in TENSORS.items():
        yield Case(f"tensor: {name}", {"x.pt": data}, is_refused=not name.startswith("types"))
    for name, data in LEGACY.items():
        yield Case(f"legacy: {name}", {"x.pt": data})
    for name, data in ZIPS.items():
        yield Case(f"zip: {name}", {"x.pt": data})
    for name, (file, data) in TARS.items():
        yield Case(f"tar: {name}", {file: data})
    for path in PATHS:
        data = tarred((_info(path + STATES), _honest()))
        yield Case(f"tar: path {path}", {"x.tar": data}, is_refused=False)
    yield from folders()


def folders() -> Iterator[Case]:
    honest = zipped(b"}" + text("a") + number(1) + b"s", {})
    state = {"trainer_state.json": json.dumps({"global_step": 3}).encode()}
    yield Case(
        "folder: evil arguments", {**state, "training_args.bin": program(CODE["os.system"])}, False
    )
    yield Case(
        "folder: evil optimizer", {**state, "optimizer.pt": program(CODE["os.system"])}, False
    )
    yield Case("folder: damaged optimizer", {**state, "optimizer.pt": honest[:-9]})
    yield Case("folder: state is no JSON", {"trainer_state.json": b"{", "optimizer.pt": honest})
    deep = b"[" * 100_000 + b"]" * 100_000
    yield Case("folder: deep state", {"trainer_state.json": deep, "optimizer.pt": honest})
    many = b"[" + b"[]," * 2_000_000 + b"1]"
    yield Case("folder: many values", {"trainer_state.json": many, "optimizer.pt": honest})
    large = b'{"a": "' + b"a" * (33 * MIB) + b'"}'
    yield Case("folder: large state", {"trainer_state.json": large, "optimizer.pt": honest})


def cases() -> list[Case]:
    """The hostile files that are small; the same at each call."""
    return [*pickles(), *others()]


def bombs(wanted: Collection[str] | None = None) -> Iterator[Case]:
    """Those that are long, or claim to be; made one at a time. All of them, or some by name."""
    for name, make in BOMBS.items():
        label = f"bomb: {name}"
        if name not in QUICK_BOMBS and (wanted is None or label in wanted):
            yield Case(label, {"x.pkl": make()}, is_refused=False)
    for name, (file, make) in ARCHIVE_BOMBS.items():
        label = f"bomb: {name}"
        if wanted is None or label in wanted:
            yield Case(label, {file: make()})
