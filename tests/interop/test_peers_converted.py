"""Samples of other libraries, brought in and taken out: every tensor and value comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.interop.exporting.export import Export, ExportOptions
from holdfast.interop.importing import commit_import, plan_import
from holdfast.interop.opening import open_source
from holdfast.interop.optimizers import is_torch_form, number_parameters
from holdfast.interop.renaming import RenameRules
from holdfast.interop.source import Source
from holdfast.maintenance.verify import verify_root
from holdfast.store.local import LocalStore
from marks import full

PEERS = Path(__file__).resolve().parents[1] / "golden" / "peers"


def folders(pattern: str) -> list[Path]:
    """The folders that a pattern finds: with a slash behind it, Python 3.10 finds files, too."""
    return [path for path in PEERS.glob(pattern) if path.is_dir()]


SAMPLES = [
    *PEERS.glob("lightning/*.ckpt"),
    *PEERS.glob("accelerate/state"),
    *folders("transformers/*"),
    *PEERS.glob("ignite/*.pt"),
    *PEERS.glob("composer/*.pt.zst"),
    *PEERS.glob("dcp/one"),
    *folders("olmo/*"),
    *PEERS.glob("megatron/iter_*"),
    *PEERS.glob("deepspeed/stage3"),
    *PEERS.glob("mindspore/plain.ckpt"),
    *PEERS.glob("cerebras/state.mdl"),
    *full(
        *(path for path in PEERS.glob("composer/*.pt.*") if path.suffix != ".zst"),
        *(path for path in folders("dcp/*") if path.name != "one"),
        *(path for path in PEERS.glob("cerebras/*.mdl") if path.name != "state.mdl"),
    ),
]


def values(source: Source, component: str) -> Any:
    """A component's tree with the bytes of its tensors; an optimizer's as torch saves it."""
    part = source.get_component(component)

    def lifted(node: Any) -> Any:
        if isinstance(node, TensorRef | ArrayRef):
            spec = part.specs[node.key]
            data = memoryview(bytearray(spec.nbytes))
            source.read_into(component, node.key, 0, data)
            return type(node).__name__, spec.dtype, spec.shape, bytes(data)
        if isinstance(node, Mapping):
            return {key: lifted(inner) for key, inner in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(map(lifted, node))
        if isinstance(node, msgspec.Struct):
            return type(node).__name__, lifted(msgspec.structs.asdict(node))
        return node

    if part.kind == "optimizer" and "slots" in part.tree:
        return in_order(lifted(number_parameters(part.tree)))
    return in_order(lifted(part.tree)) if is_torch_form(part.tree) else lifted(part.tree)


def in_order(tree: Any) -> Any:
    """An optimizer's state by order: some libraries have names in place of torch's numbers."""
    groups = [{**group, "params": len(group["params"])} for group in tree["param_groups"]]
    for group in groups:
        group.pop("param_names", None)  # which a run has in the names of the slots
    return [*tree["state"].values()], groups


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: str(path.relative_to(PEERS)))
def test_what_a_peer_wrote_is_the_same_in_a_run_and_in_a_file_of_torch(
    tmp_path: Path, sample: Path
) -> None:
    with open_source(str(sample)) as source:
        plan = plan_import(source)
        commit_import(plan, tmp_path / "run", step=source.step or 0)
        expected = {name: repr(values(source, name)) for name in source.parts}
    assert verify_root(LocalStore(tmp_path / "run")).ok
    with open_source(str(tmp_path / "run")) as run:
        assert {name: repr(values(run, name)) for name in run.parts} == expected
        done = Export(run, ExportOptions(to="pt", rename=RenameRules())).write_files(
            tmp_path / "all.pt"
        )
        models = {name for name, part in run.parts.items() if part.kind == "module"}
    written = torch.load(tmp_path / "all.pt", weights_only=True)
    with open_source(str(tmp_path / "all.pt")) as again:
        for name in models & again.parts.keys():
            assert repr(values(again, name)) == expected[name]
    assert isinstance(written, dict)
    assert not done.left_out
