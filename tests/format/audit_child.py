"""Run by test_hostile.py in a process of its own: reads hostile documents and lists what happened.

Prints the audit events of code that runs, files that are opened, processes and sockets.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

from tests.format.samples import documents, header_bytes, reseal

from holdfast.errors import FormatError
from holdfast.format import index, manifest, objects, records, tensors

WATCHED = (
    *("import", "exec", "compile", "open", "marshal.", "pickle.", "ctypes.", "code.__new__"),
    *("os.", "pty.", "shutil.", "socket.", "subprocess.", "urllib.", "webbrowser.", "glob."),
)


class _Trap:
    def __reduce__(self) -> Any:
        return (exec, ("import os; os.mkdir('trapped')",))


PICKLE = pickle.dumps(_Trap())
NAMES = ["os:system", "builtins:eval", "__main__:x", "antigravity:A", "torch:load", "a" * 300]


def hostile_trees() -> list[Any]:
    """Trees that name code, files and pickles in every place that holds a text."""
    trees: list[Any] = [{"$enum": {"type": name, "name": name, "value": name}} for name in NAMES]
    for name in [*NAMES, "/etc/passwd", "../x", "file:///etc/passwd", "http://localhost/x"]:
        trees += [{node: name} for node in ("$path", "$tensor", "$array", "$dtype", "$device")]
        trees += [{name: name}, {"$dict": [[name, name]]}, {"$datetime": name}, {"$float": name}]
        trees += [{"$scalar": [name, "00"]}, {"$generator": {"kind": name, "state": name}}]
        trees += [{f"${name}": name}, {"$reduce": [name, ["true"]]}, {"py/object": name}]
    trees += [{"$bytes": base64.b64encode(PICKLE).decode()}, {"__reduce__": ["os.system", "x"]}]
    return trees


def hostile_documents() -> list[tuple[Callable[..., Any], bytes]]:
    """A few hundred documents: trees, headers, registers and sidecars, raw pickles."""
    found: list[tuple[Callable[..., Any], bytes]] = []
    for tree in hostile_trees():
        text = json.dumps({"holdfast": 1, "tree": tree})
        found.append((objects.decode_tree, text.encode()))
        found.append((manifest.decode_register, reseal(json.dumps({"holdfast": 1, "kind": tree}))))
        notes = {"holdfast": 1, "kind": "notes", "tags": [json.dumps(tree)], "pinned": True}
        found.append((records.Notes.decode, reseal(json.dumps(notes))))
        found.append((_header, header_bytes(json.dumps({"a": tree, "__metadata__": {"x": "y"}}))))
        found.append((_index, text.encode()))
    for document in documents():
        found += [(document.decode, PICKLE), (document.decode, b"PK\x03\x04" + PICKLE)]
        found += [(document.decode, document.data), (document.decode, document.data + PICKLE)]
    return found


def _header(data: bytes, *, what: str) -> Any:
    return tensors.parse_header(data, file_nbytes=len(data), what=what)


def _index(data: bytes, *, what: str) -> Any:
    return index.decode_index(data, files={}, what=what)


def main() -> None:
    """Read everything under an audit hook."""
    prepared = hostile_documents()
    for document in documents():  # what the modules set up late is not a hostile document's doing
        _read(document.decode, document.data)
    events: list[str] = []
    is_watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and event.startswith(WATCHED):
            events.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hook)
    for decode, data in prepared:
        _read(decode, data)
    if "--break" in sys.argv:
        pickle.load(io.BytesIO(pickle.dumps(print)))
    is_watching = False
    print(json.dumps({"num_documents": len(prepared), "events": events}))


def _read(decode: Callable[..., Any], data: bytes) -> None:
    try:
        decode(data, what="w")
    except FormatError:
        return


if __name__ == "__main__":
    main()
