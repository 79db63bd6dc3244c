"""Folders of DCP's own: imported, exported, and refused where they are not what they say."""

from __future__ import annotations

import contextlib
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.cli.conftest import holdfast as holdfast
from tests.interop.test_dcp import UNSAVED, Rewriting, flat, load, network, save, state_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)

from allranks import Member, all_of, on_ranks
from holdfast import CheckpointManager, PerRank
from holdfast.errors import CorruptData, FormatError, UnsupportedState, UsageError
from holdfast.interop.dcp import HoldfastReader, HoldfastWriter, export_folder, import_folder
from holdfast.maintenance.verify import verify
from holdfast.ownership.access import locate
from holdfast.root.catalog import Catalog
from holdfast.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What DCP's own writer makes of a state."""
    dcp.save(state_of(3), checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def change(folder: Path, edit: Callable[[Metadata], object]) -> None:
    """Edit the metadata of a folder."""
    metadata = FileSystemReader(folder).read_metadata()
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_imported_folder_is_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Bit by bit, with digests; R17."""
    root = tmp_path / "run"
    found = import_folder(folder, root, step=12, label="from-dcp")
    store, entry = locate(root)
    assert (found.folder, found.step) == (entry.folder, 12)
    assert entry.manifest.label == "from-dcp"
    assert verify(store, entry.folder).ok
    assert flat(load(root, state_of(5))) == flat(state_of(3))


def test_imports_go_on_after_what_the_run_has(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        import_folder(folder, root, step=step)
    assert [one.step for one in Catalog(open_store(root)).lineage_entries()] == [2, 1]


def test_dcp_loads_an_exported_folder(tmp_path: Path) -> None:
    save(tmp_path / "run", state_of(3))
    found = export_folder(tmp_path / "run", tmp_path / "out")
    assert found.step == 1
    state = state_of(5)
    dcp.load(state, checkpoint_id=tmp_path / "out")
    assert flat(state) == flat(state_of(3))


def test_what_a_manager_has_saved_is_exported_too(tmp_path: Path) -> None:
    model, progress = network(3), {"seen": 5, "t": torch.ones(2)}
    with CheckpointManager(tmp_path / "run", {"model": model, "progress": progress}) as manager:
        manager.save(1, wait=True)
    export_folder(tmp_path / "run", tmp_path / "out")
    state = {"model": network(1).state_dict(), "progress": {"seen": 0, "t": torch.zeros(2)}}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    assert flat(dict(state["model"])) == flat(dict(model.state_dict()))
    assert flat(state["progress"]) == flat(progress)


def test_what_differs_by_rank_is_left_out_and_told(tmp_path: Path) -> None:
    """R38: the state of one rank would be loaded on all of them."""
    run, out = tmp_path / "run", tmp_path / "out"

    def work(member: Member) -> None:
        own = PerRank({"n": member.rank, "t": torch.full((3,), float(member.rank))})
        with member.manager(run, state={**member.state, "queue": own}) as manager:
            manager.save(1).wait()

    all_of(on_ranks(2, work))
    with pytest.warns(UserWarning, match="not exported, as each rank has its own: queue"):
        export_folder(run, out)
    reader = HoldfastReader(run)
    names = [*reader.open().metadata.state_dict_metadata]
    reader.close()
    assert sorted(names) == sorted(FileSystemReader(out).read_metadata().state_dict_metadata)
    assert {name.partition(".")[0] for name in names} >= {"model"}
    assert not [name for name in names if name.startswith(("queue", "rng"))]
    for given in ({"storage_reader": HoldfastReader(run)}, {"checkpoint_id": out}):
        with pytest.raises(CheckpointException, match="Missing key"):
            dcp.load({"queue": {"n": -1}}, **given)


def test_an_export_never_mixes_with_what_is_there(tmp_path: Path) -> None:
    save(tmp_path / "run", state_of(3))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(UsageError, match="not empty"):
        export_folder(tmp_path / "run", tmp_path / "out")


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    """Invariant 3: what DCP would not notice later is noticed now."""
    save(tmp_path / "run", state_of(3))
    [path] = (tmp_path / "run").glob("step-*/model-00000.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match="model-00000"):
        export_folder(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / ".metadata").exists()


class Hostile:
    """Pickled as a call."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    "value",
    [
        Hostile(os.system, "touch ran"),
        Hostile(eval, "open('ran', 'w')"),
        Hostile(getattr, Path, "home"),
        Hostile(torch.load, "ran"),
        Hostile(torch.nn.Linear, 2, 2),
        Hostile(Path, "ran"),
    ],
    ids=lambda value: value.call.__name__,
)
def test_nothing_in_the_metadata_runs(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    """Invariant 5: anything but the paths of the items is refused, and not made."""
    monkeypatch.chdir(tmp_path)
    change(folder, lambda metadata: setattr(metadata, "planner_data", value))
    with pytest.raises(UsageError, match="the path of each item"):
        import_folder(folder, tmp_path / "run", step=1)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
SETS_CLASS = b"cpathlib\nPurePosixPath\nN}X\x0e\x00\x00\x00is_relative_to" + INDEX + b"s\x86b"
"""Opcodes that set a method of a class: its state is a pair, of which the second is attributes."""


@pytest.mark.parametrize(
    "opcodes",
    [
        SETS_CLASS,
        INDEX + b"}X\x03\x00\x00\x00fqnK\x01sb",
        INDEX + b")\x81N}X\x03\x00\x00\x00fqnK\x01s\x86b",
        b"ctorch.serialization\n_get_layout\n}X\x01\x00\x00\x00aK\x01sb",
        b"ctorch\nfloat32\nN}X\x01\x00\x00\x00aK\x01s\x86b",
    ],
    ids=["path", "record", "second state", "function", "dtype"],
)
def test_metadata_changes_no_class(folder: Path, tmp_path: Path, opcodes: bytes) -> None:
    """Invariant 5: else it would change for the whole process."""
    before = [dict(vars(one)) for one in (*type(folder).__mro__, MetadataIndex)]
    metadata = (folder / ".metadata").read_bytes()
    metadata = pickle.dumps(pickle.loads(metadata), 2)  # without frames
    (folder / ".metadata").write_bytes(metadata[:2] + opcodes + b"0" + metadata[2:])
    try:
        with contextlib.suppress(FormatError):
            import_folder(folder, tmp_path / "run", step=1)
        assert [dict(vars(one)) for one in (*type(folder).__mro__, MetadataIndex)] == before
    finally:
        for one, members in zip((*type(folder).__mro__, MetadataIndex), before, strict=True):
            for name in vars(one).keys() - members.keys():
                delattr(one, name)
            for name, value in members.items():
                if vars(one).get(name) is not value:
                    setattr(one, name, value)


def test_metadata_that_changes_classes_leads_to_no_file_outside(
    folder: Path, tmp_path: Path
) -> None:
    torch.save(torch.tensor([42.0, 43.0]), tmp_path / "secret.pt")
    nbytes = (tmp_path / "secret.pt").stat().st_size
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path, place.offset, place.length = "../secret.pt", 0, nbytes
    data = pickle.dumps(metadata, 2)
    path = Path.is_relative_to
    for opcodes, message in (
        (SETS_CLASS + b"0", "sets the state"),
        (b"", "out of the folder"),
    ):
        (folder / ".metadata").write_bytes(data[:2] + opcodes + data[2:])
        try:
            with pytest.raises(FormatError, match=message):
                import_folder(folder, tmp_path / "run", step=1)
        finally:
            if "is_relative_to" in vars(PurePosixPath):
                del PurePosixPath.is_relative_to
        assert Path.is_relative_to is path


def test_no_pickle_of_a_value_is_opened(tmp_path: Path) -> None:
    """Invariant 5: values are read as weights are, or kept closed where that is asked for."""
    dcp.save({"x": torch.ones(1), "odd": 1}, checkpoint_id=tmp_path / "dcp", planner=Rewriting())
    with pytest.raises(UnsupportedState, match="odd: its pickle cannot be read as weights"):
        import_folder(tmp_path / "dcp", tmp_path / "run", step=1)
    assert Catalog(open_store(tmp_path / "run")).attempts() == ()
    import_folder(tmp_path / "dcp", tmp_path / "run", step=1, unsafe_pickle=True)
    export_folder(tmp_path / "run", tmp_path / "again", unsafe_pickle=True)
    found = FileSystemReader(tmp_path / "again").read_metadata()
    place = found.storage_data[MetadataIndex("odd")]
    data = (tmp_path / "again" / place.relative_path).read_bytes()[place.offset :]
    assert pickle.loads(data) is print


def test_a_typeless_value_survives_import_and_export(tmp_path: Path) -> None:
    dcp.save(UNSAVED, checkpoint_id=tmp_path / "dcp")
    import_folder(tmp_path / "dcp", tmp_path / "run", step=1, unsafe_pickle=True)
    export_folder(tmp_path / "run", tmp_path / "again", unsafe_pickle=True)
    state = {"model": {"w": torch.zeros(2)}, "progress": {"share": None}}
    dcp.load(state, checkpoint_id=tmp_path / "again")
    assert flat(state) == flat(UNSAVED)


def test_a_pickle_is_exported_only_where_that_is_asked_for(tmp_path: Path, holdfast: Any) -> None:
    """Invariant 5: `dcp.load` of the folder would run it."""
    run, out = tmp_path / "run", tmp_path / "out"
    state = {"w": torch.ones(2), "x": Hostile(os.system, "touch ran")}
    dcp.save(state, storage_writer=HoldfastWriter(run, step=1, unsafe_pickle=True))
    with pytest.raises(UsageError, match="'x': saved as a pickle, and loading it runs"):
        export_folder(run, out)
    refused = holdfast("export", run, out, "--to", "dcp")
    assert (refused.code, "'x': saved as a pickle" in refused.err) == (2, True)
    assert not out.exists()
    assert holdfast("export", run, out, "--to", "dcp", "--unsafe-pickle").code == 0
    assert MetadataIndex("x") in FileSystemReader(out).read_metadata().storage_data


def first_place(metadata: Metadata) -> Any:
    return metadata.storage_data[MetadataIndex("half", [0, 0])]


def entry_of(metadata: Metadata, name: str) -> Any:
    return metadata.state_dict_metadata[name]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: setattr(first_place(m), "relative_path", "../../secret"),
            "out of the folder",
        ),
        (
            lambda m: setattr(first_place(m), "relative_path", "/etc/passwd"),
            "out of the folder",
        ),
        (lambda m: setattr(first_place(m), "relative_path", "gone"), "gone: is missing"),
        (lambda m: setattr(first_place(m), "offset", -1), "which no file has"),
        (lambda m: setattr(first_place(m), "length", 1 << 40), "'half' ends at byte"),
        (lambda m: setattr(first_place(m), "length", 20), "'half': no tensor"),
        (lambda m: setattr(entry_of(m, "half"), "size", torch.Size([9, 2])), "do not tile"),
        (lambda m: setattr(entry_of(m, "half"), "size", "big"), "without sizes"),
        (lambda m: setattr(entry_of(m, "half"), "chunks", [1]), "expected a ChunkStorageMetadata"),
        (lambda m: m.storage_data.clear(), "does not say where"),
        (lambda m: setattr(m, "storage_data", None), "does not say where"),
        (lambda m: setattr(m, "state_dict_metadata", []), "does not say what was saved"),
        (lambda m: m.state_dict_metadata.update({"half": 5}), "neither a tensor nor bytes"),
        (lambda m: m.planner_data.update({"half": ("other",)}), "the planner says"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, edit: Callable[[Metadata], object], message: str
) -> None:
    """Invariant 5, R28: no path leads out of the folder, and no checkpoint is made."""
    change(folder, edit)
    with pytest.raises((FormatError, UsageError), match=message):
        import_folder(folder, tmp_path / "run", step=1)
    assert Catalog(open_store(tmp_path / "run")).attempts() == ()


def test_positions_that_no_list_has_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    """Invariant 5: a list is as long as its items say, so a few bytes could ask for any length."""
    folder, state = tmp_path / "dcp", {"a": {"b": [torch.zeros(2), {}, {}, torch.ones(2)]}}
    dcp.save(state, checkpoint_id=folder)
    import_folder(folder, tmp_path / "run", step=1)  # the empty dicts are no items
    original = (folder / ".metadata").read_bytes()
    for position in (20_000_000, 1 << 62, -1):

        def move(metadata: Metadata, name: str = f"a.b.{position}") -> None:
            entries, places = metadata.state_dict_metadata, metadata.storage_data
            entries[name] = entries.pop("a.b.3")
            [old] = [index for index in places if index.fqn == "a.b.3"]
            places[MetadataIndex(name, old.offset, old.index)] = places.pop(old)
            metadata.planner_data[name] = ("a", "b", int(name.rpartition(".")[2]))

        (folder / ".metadata").write_bytes(original)
        change(folder, move)
        tracemalloc.start()
        try:
            with pytest.raises(FormatError, match=f"{position} is no position among so few"):
                import_folder(folder, tmp_path / "run", step=2)
            assert tracemalloc.get_traced_memory()[1] < 50_000_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"junk", pickle.dumps({"a": 1})])
def test_a_file_that_is_no_metadata_is_refused(folder: Path, tmp_path: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(FormatError, match="metadata"):
        import_folder(folder, tmp_path / "run", step=1)
    (folder / ".metadata").unlink()
    with pytest.raises(FormatError, match="not a complete checkpoint of DCP"):
        import_folder(folder, tmp_path / "run", step=1)


def test_the_commands_import_and_export(folder: Path, tmp_path: Path, holdfast: Any) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    done = holdfast("import", folder, run, "--step", 8, "--label", "old", "--trust")
    assert done.code == 0
    assert done.out.startswith("old.0001-000001-")
    done = holdfast("export", f"{run}@step=8", out, "--to", "dcp", "--json")
    assert done.code == 0
    assert (done.document["step"], done.document["path"]) == (8, str(out))
    state = state_of(5)
    dcp.load(state, checkpoint_id=out)
    assert flat(state) == flat(state_of(3))
    assert holdfast("export", run, out, "--to", "dcp").code == 2
    (folder / ".metadata").write_bytes(b"junk")
    assert holdfast("import", folder, run, "--step", 9, "--trust").code == 1
