"""Reads a root as on Windows: `python windows_child.py ROOT FILE`, and says what came, in JSON."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from typing import Any

import torch

from platforms import disguised


def main(root: str, file: str) -> None:
    """Import everything, read the root and a file of weights, and try to save."""
    disguised.as_windows()
    for module in disguised.modules():
        importlib.import_module(module)
    import holdfast
    from holdfast.interop.opening import open_source

    said: dict[str, Any] = {}
    for command in (["ls", root], ["show", root], ["verify", root], ["log", root]):
        said[command[0]] = _answer(*command, "--json")
    model = torch.nn.Linear(4, 4)
    holdfast.load_weights(root, model)
    said["weights"] = model.weight.tolist()
    with open_source(file) as source:
        data = bytearray(source.parts["model"].specs["weight"].nbytes)
        source.read_into("model", "weight", 0, memoryview(data))
        said["file"] = data.hex()
    with open_source(root) as source:
        said["step"] = source.step
        data = bytearray(source.parts["model"].specs["weight"].nbytes)
        source.read_into("model", "weight", 0, memoryview(data))
        said["checkpoint"] = data.hex()
    said["refused"] = _refusals(root)
    print(json.dumps(said))


def _answer(*words: str) -> Any:
    from holdfast.cli.app import app

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        app.main(list(words), prog_name="holdfast", standalone_mode=False)
    return json.loads(out.getvalue())


def _refusals(root: str) -> list[str]:
    """What comes of a save, of a deletion and of a put, each in the root and in a new one."""
    import holdfast
    from holdfast.errors import UnsupportedStore
    from holdfast.store import open_store

    said = []
    for where in (root, root + "-new"):
        manager = holdfast.CheckpointManager(where, {"model": torch.nn.Linear(4, 4)})
        store = open_store(where)
        for call in (
            lambda manager=manager: manager.resume() or manager.save(step=9).wait(),
            lambda store=store: store.put("a", b"b"),
            lambda store=store: store.delete("a/"),
            lambda store=store: store.make_folder("a"),
        ):
            try:
                call()
            except UnsupportedStore as error:
                said.append(str(error))
    return said


if __name__ == "__main__":
    main(*sys.argv[1:])
