"""Claims about verification: all planted damage is found and named, and nothing else."""

from __future__ import annotations

import itertools
import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from tests.encryption.test_store import SEALS, folders

from holdfast.encryption.store import sealing
from holdfast.errors import DeadlineExceeded, NoCheckpoint, StoreError
from holdfast.format import layout
from holdfast.format.blocks import digest_blocks, file_digest
from holdfast.format.manifest import (
    Deleted,
    FileEntry,
    Manifest,
    decode_register,
    encode_manifest,
)
from holdfast.format.records import Notes
from holdfast.keys import Encryption
from holdfast.maintenance import verify_reads
from holdfast.maintenance.verify import verify, verify_root
from holdfast.maintenance.verify_reads import Problem, VerifyReport
from holdfast.manager import CheckpointManager
from holdfast.root.catalog import Catalog
from holdfast.root.commit import mark_aborted
from holdfast.store.base import Store, ignore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from marks import full
from runs import new_run

BLOCK = layout.BLOCK_NBYTES
MODEL = "model-00000.safetensors"
TREE = "model-00000.json"
INDEX = layout.INDEX


def save_run(num_saves: int) -> MemoryStore:
    store = MemoryStore()
    run = new_run()
    with run.manager(store) as manager:
        for _ in range(num_saves):
            run.train()
            manager.save(run.counters["step"]).wait()
    return store


def save_large() -> MemoryStore:
    """A model of three blocks and a bit: `first` and `second` share the second block."""
    store = MemoryStore()
    generator = torch.Generator().manual_seed(5)
    state = {
        "model": {
            "first": torch.randn(3_000_000, generator=generator),
            "second": torch.randn(3_000_000, generator=generator),
            "third": torch.randn(1000, generator=generator),
        }
    }
    with CheckpointManager(store, state) as manager:
        manager.save(1).wait()
    return store


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for info in store.list():
        copy.put(info.key, store.get(info.key))
    return copy


@pytest.fixture(scope="module")
def small() -> MemoryStore:
    """Three checkpoints of the usual small run. Not to be changed."""
    return save_run(3)


@pytest.fixture(scope="module")
def large() -> MemoryStore:
    """One checkpoint of several blocks. Not to be changed."""
    return save_large()


def newest(store: Store) -> str:
    return Catalog(store).checkpoints()[0].folder


def files_of(store: Store, folder: str) -> list[str]:
    return [info.key.removeprefix(f"{folder}/") for info in store.list(f"{folder}/")]


def flip(store: Store, key: str, bit: int) -> None:
    data = bytearray(store.get(key))
    data[bit // 8] ^= 1 << (bit % 8)
    store.put(key, data)


def only_problem(report: VerifyReport) -> Problem:
    assert len(report.problems) == 1, report.problems
    return report.problems[0]


def test_sound_checkpoints_are_found_sound(small: MemoryStore) -> None:
    """R18: no false alarm, every byte counted."""
    root = verify_root(small)
    assert root.ok
    assert root.notes == ()
    assert [report.step for report in root.checkpoints] == [3, 2, 1]
    for report, entry in zip(root.checkpoints, Catalog(small).checkpoints(), strict=True):
        assert (report.notes, report.nbytes) == ((), entry.manifest.nbytes)
        counted = sum(part.num_tensors for part in entry.manifest.components.values())
        assert (report.num_tensors, report.num_files) == (counted, len(entry.manifest.files))


@pytest.mark.full
@pytest.mark.parametrize("num_checkpoints", [28, *full(100)])
def test_many_sound_checkpoints_give_no_alarm(num_checkpoints: int) -> None:
    """R18: clean checkpoints with all kinds of tensors, and with all shapes of two dimensions."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that complex halves are young.
        half = torch.ones(3, dtype=torch.complex32)
    for seed in range(num_checkpoints):
        generator = torch.Generator().manual_seed(seed)
        shape = [seed % 4, seed % 7]
        plain = torch.randn(shape, generator=generator)
        tensors = {str(dtype): plain.to(dtype) for dtype in dtypes}
        tensors |= {"c128": plain.to(torch.complex128), "c32": half}
        store = MemoryStore()
        with CheckpointManager(store, {"t": {"tensors": tensors, "seed": seed}}) as manager:
            manager.save(seed).wait()
        assert verify_root(store).ok


@pytest.mark.parametrize("num_flips", [12, *full(40)])
def test_every_flipped_bit_is_found_and_its_file_named(small: MemoryStore, num_flips: int) -> None:
    """R15, R18, D14: in every file of the checkpoint, random bits and the last one each."""
    folder = newest(small)
    rng = random.Random(15)
    for file in files_of(small, folder):
        key = f"{folder}/{file}"
        num_bits = 8 * small.head(key).nbytes
        for bit in [*(rng.randrange(num_bits) for _ in range(num_flips)), num_bits - 1]:
            store = copy_of(small)
            flip(store, key, bit)
            report = verify(store, folder)
            assert file in {problem.file for problem in report.problems}, (file, bit)
            assert {p.file for p in report.problems} == {file}, (file, bit)


@pytest.mark.parametrize(
    ("offset", "block", "tensors"),
    [
        (3, 0, ["first"]),
        (4096, 0, ["first"]),
        (BLOCK, 1, ["first", "second"]),
        (2 * BLOCK, 2, ["second", "third"]),
        (-1, 2, ["second", "third"]),
    ],
)
def test_a_damaged_block_is_named_with_its_tensors(
    large: MemoryStore, offset: int, block: int, tensors: list[str]
) -> None:
    """R15: the report names file, block, place and tensors."""
    folder = newest(large)
    store = copy_of(large)
    key = f"{folder}/{MODEL}"
    nbytes = store.head(key).nbytes
    flip(store, key, 8 * (offset % nbytes))
    problem = only_problem(verify(store, folder))
    assert (problem.file, problem.block, problem.start) == (MODEL, block, block * BLOCK)
    assert problem.nbytes == min(BLOCK, nbytes - block * BLOCK)
    assert list(problem.tensors) == tensors
    assert len(problem.expected) == len(problem.found) == 64
    assert problem.expected != problem.found
    assert f"{MODEL} block {block} (byte {block * BLOCK})" in str(problem)


def test_every_damage_is_listed_not_only_the_first(large: MemoryStore) -> None:
    """R18."""
    folder = newest(large)
    store = copy_of(large)
    for start in (0, BLOCK, 2 * BLOCK):
        flip(store, f"{folder}/{MODEL}", 8 * start)
    flip(store, f"{folder}/{TREE}", 5)
    flip(store, f"{folder}/rng-00000.safetensors", 8 * 5000)
    store.delete(f"{folder}/rng-00000.json")
    found = {(problem.file, problem.block) for problem in verify(store, folder).problems}
    assert found == {
        (MODEL, 0),
        (MODEL, 1),
        (MODEL, 2),
        (TREE, 0),
        ("rng-00000.safetensors", 0),
        ("rng-00000.json", None),
    }


def swap_blocks(data: bytes) -> bytes:
    return data[BLOCK : 2 * BLOCK] + data[:BLOCK] + data[2 * BLOCK :]


@pytest.mark.parametrize(
    ("damage", "message", "tensors"),
    [
        (lambda data: data[:-1], "wrong length", ["second", "third"]),
        (lambda data: data[:BLOCK], "wrong length", ["first", "second", "third"]),
        (lambda data: b"", "wrong length", ["first", "second", "third"]),
        (lambda data: data + b"\0", "wrong length", []),
        (lambda data: data + data, "wrong length", []),
        (
            lambda data: data[: BLOCK + 4096] + bytes(4096) + data[BLOCK + 8192 :],
            "other bytes than written",
            ["first", "second"],
        ),
        (swap_blocks, "other bytes than written", ["first", "second"]),
        (lambda data: bytes(len(data)), "other bytes than written", ["first", "second", "third"]),
    ],
)
def test_cut_grown_zeroed_and_swapped_files_are_found(
    large: MemoryStore, damage: Callable[[bytes], bytes], message: str, tensors: list[str]
) -> None:
    """R16."""
    folder = newest(large)
    store = copy_of(large)
    store.put(f"{folder}/{MODEL}", damage(store.get(f"{folder}/{MODEL}")))
    problems = verify(store, folder).problems
    assert {(problem.file, problem.message) for problem in problems} == {(MODEL, message)}
    assert sorted({key for problem in problems for key in problem.tensors}) == tensors


def test_a_cut_file_is_still_compared_as_far_as_it_goes(large: MemoryStore) -> None:
    """R16, R18: a second damage in what is left is listed too."""
    folder = newest(large)
    store = copy_of(large)
    store.put(f"{folder}/{MODEL}", store.get(f"{folder}/{MODEL}")[:-5])
    flip(store, f"{folder}/{MODEL}", 8 * 5000)
    problems = verify(store, folder).problems
    assert [(problem.message, problem.block) for problem in problems] == [
        ("wrong length", None),
        ("other bytes than written", 0),
    ]


@pytest.mark.parametrize("file", [MODEL, TREE, "index.json", "optimizer-00000.safetensors"])
def test_a_missing_file_is_found(small: MemoryStore, file: str) -> None:
    """R16."""
    folder = newest(small)
    store = copy_of(small)
    store.delete(f"{folder}/{file}")
    problem = only_problem(verify(store, folder))
    assert (problem.file, problem.message) == (file, "is missing")


@pytest.mark.parametrize("file", [MODEL, "optimizer-00000.safetensors", "index.json"])
def test_a_file_of_another_step_is_found(small: MemoryStore, file: str) -> None:
    """R16: each file is sound by itself, and of the same length."""
    folder = newest(small)
    other = Catalog(small).checkpoints()[1].folder
    store = copy_of(small)
    store.put(f"{folder}/{file}", store.get(f"{other}/{file}"))
    assert {problem.file for problem in verify(store, folder).problems} == {file}


def test_a_manifest_of_another_step_is_found(small: MemoryStore) -> None:
    """R16: what it lists is not here, and it says where it belongs."""
    folder = newest(small)
    other = Catalog(small).checkpoints()[1].folder
    store = copy_of(small)
    store.put(f"{folder}/manifest.json", store.get(f"{other}/manifest.json"))
    problems = verify(store, folder).problems
    place = next(problem for problem in problems if problem.file == "manifest.json")
    assert (place.message, place.expected, place.found) == (
        "belongs to another folder",
        folder,
        other,
    )
    assert {"index.json", MODEL} <= {problem.file for problem in problems}


def test_a_whole_folder_under_another_folders_name_is_found(small: MemoryStore) -> None:
    """R16: every file agrees with its manifest; only the place is wrong."""
    folder = newest(small)
    other = Catalog(small).checkpoints()[1].folder
    store = copy_of(small)
    for file in files_of(small, other):
        store.put(f"{folder}/{file}", small.get(f"{other}/{file}"))
    assert only_problem(verify(store, folder)).message == "belongs to another folder"


@pytest.mark.parametrize("num_wounds", [90, *full(300)])
def test_random_damage_is_always_found(small: MemoryStore, num_wounds: int) -> None:
    """R16, R18: random overwrites, cuts and splices over all files of a checkpoint."""
    folder = newest(small)
    files = files_of(small, folder)
    rng = random.Random(16)
    for _ in range(num_wounds):
        file = rng.choice(files)
        data = small.get(f"{folder}/{file}")
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.choice([1, 8, 100, 4096]))
        patch = rng.choice([b"", bytes(stop - start), rng.randbytes(stop - start)])
        damaged = data[:start] + patch + data[stop:]
        if damaged == data:
            continue
        store = copy_of(small)
        store.put(f"{folder}/{file}", damaged)
        assert not verify(store, folder).ok, (file, start, stop, patch)


def test_without_the_index_files_are_still_compared_with_the_manifest(large: MemoryStore) -> None:
    """R18: a damaged index hides no other damage and blames no sound file."""
    folder = newest(large)
    store = copy_of(large)
    flip(store, f"{folder}/index.json", 100)
    assert {problem.file for problem in verify(store, folder).problems} == {"index.json"}
    flip(store, f"{folder}/{MODEL}", 8 * (2 * BLOCK + 7))
    report = verify(store, folder)
    assert {problem.file for problem in report.problems} == {"index.json", MODEL}
    assert report.nbytes == Catalog(store).checkpoints()[0].manifest.nbytes


def test_any_read_that_was_wrong_once_is_no_damage(small: MemoryStore) -> None:
    """R18: read again before it is called damage; a bad cable is worth a note, though."""
    folder = newest(small)
    for file, num_reads in ((MODEL, 3), (TREE, 2), (INDEX, 1), (layout.MANIFEST, 1)):
        for at, kind in itertools.product(range(num_reads), ("flip", "fail")):
            fault = Fault(kind=kind, op="read_into", key=f"{folder}/{file}", at=at)  # type: ignore[arg-type]
            report = verify(FaultyStore(small, [fault]), folder)
            assert report.ok
            assert len(report.notes) == 1
            assert file in report.notes[0]
            assert "read incorrectly once" in report.notes[0]
        fault = Fault(kind="fail", op="head", key=f"{folder}/{file}")
        assert verify(FaultyStore(small, [fault]), folder).ok


class Remembering(LocalStore):
    """Has a wrong bit in what the machine remembers of its files, or in what is on the disk."""

    def __init__(self, root: Path, *, spoils: str = "memory", only: str = "") -> None:
        super().__init__(root)
        self.spoils = spoils
        self.only = only
        self.reads: list[tuple[str, int]] = []

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        data = bytearray(super().get(key, start, nbytes))
        self._spoil(key, memoryview(data), afresh=False)
        return bytes(data)

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        seen: Callable[[memoryview], object] = ignore,
        afresh: bool = False,
    ) -> None:
        super().read_into(key, start, buffer, seen=seen, afresh=afresh)
        self.reads.append((key, start))
        self._spoil(key, buffer, afresh=afresh)

    def _spoil(self, key: str, data: memoryview, *, afresh: bool) -> None:
        folder, _, name = key.partition("/")
        if layout.parse_attempt(folder) and self.only in (name, ""):
            data[-1] ^= self.spoils == ("disk" if afresh else "memory")


@pytest.mark.parametrize(
    ("sealed_for", "opened_with"), [(None, None), (SEALS, SEALS), (SEALS, None)]
)
def test_the_disk_is_verified_and_not_what_the_machine_remembers(
    tmp_path: Path, sealed_for: Encryption | None, opened_with: Encryption | None
) -> None:
    """R18: neither is damage that is not on the disk reported, nor is that overlooked which is."""
    state = {"model": {"w": torch.arange(5_000_000.0)}}
    with CheckpointManager(tmp_path, state, encrypt=sealed_for, sinks=()) as manager:
        manager.save(1).wait()
    (folder,) = folders(LocalStore(tmp_path))
    for name in LocalStore(tmp_path).children(folder):
        store = Remembering(tmp_path, only=name)
        # The box of keys is opened as all readers open it.
        if opened_with is None or layout.parse_keys(name) is None:
            report = verify(sealing(store, opened_with), folder)
            assert report.ok, report.problems
            assert not any("wrongly" in note for note in report.notes)
        store = Remembering(tmp_path, spoils="disk", only=name)
        report = verify(sealing(store, opened_with), folder)
        assert report.problems
        assert all(problem.is_damage for problem in report.problems)


def test_the_tags_of_a_sealed_file_are_not_read_for_each_block(tmp_path: Path) -> None:
    """There are so many of them that to verify a large file would take its square."""
    num_blocks = 16
    state = {"model": {"w": torch.zeros(num_blocks * BLOCK // 4 - 1000)}}
    with CheckpointManager(tmp_path, state, encrypt=SEALS, sinks=()) as manager:
        manager.save(1).wait()
    store = Remembering(tmp_path, spoils="nothing")
    assert verify_root(sealing(store, SEALS)).ok
    largest = max(store.list(), key=lambda info: info.nbytes).key
    # Eight threads that begin at once may all read them first.
    inside = [start for key, start in store.reads if key == largest and start % BLOCK]
    assert 0 < len(inside) < num_blocks


def test_reads_that_are_wrong_each_time_are_damage(small: MemoryStore) -> None:
    folder = newest(small)
    always = Fault(kind="flip", key=f"{folder}/{MODEL}", times=None)
    assert only_problem(verify(FaultyStore(small, [always]), folder)).file == MODEL


def test_a_file_that_cannot_be_read_is_reported_with_the_reason(small: MemoryStore) -> None:
    """R18: an unreadable sector is damage, and does not hide what else there is."""
    folder = newest(small)
    error = StoreError("Input/output error (EIO)")
    for op in ("head", None):
        for file in (MODEL, TREE, "index.json", "manifest.json"):
            fault = Fault(kind="fail", op=op, key=f"{folder}/{file}", times=None, error=error)
            problems = verify(FaultyStore(small, [fault]), folder).problems
            assert {problem.file for problem in problems} == {file}
            assert "EIO" in problems[0].message
            assert all(problem.is_damage for problem in problems)
    store = copy_of(small)
    flip(store, f"{folder}/optimizer-00000.safetensors", 8 * 5000)
    fault = Fault(kind="fail", op="read_into", key=f"{folder}/{MODEL}", times=None, error=error)
    found = {problem.file for problem in verify(FaultyStore(store, [fault]), folder).problems}
    assert found == {MODEL, "optimizer-00000.safetensors"}


def test_a_read_that_fails_once_is_tried_again(small: MemoryStore) -> None:
    folder = newest(small)
    fault = Fault(kind="fail", op="read_into", key=f"{folder}/{MODEL}")
    assert verify(FaultyStore(small, [fault]), folder).ok


def test_a_read_that_hangs_ends_in_an_error_that_names_it(
    small: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9."""
    monkeypatch.setattr(verify_reads, "READ_TIMEOUT_S", 0.05)
    folder = newest(small)
    hang = Fault(kind="hang", op="read_into", key=f"{folder}/{MODEL}", deadline_s=20)
    with pytest.raises(DeadlineExceeded, match=rf"{MODEL}: reading block 0"):
        verify(FaultyStore(small, [hang]), folder)
    hang.release.set()


def resealed(store: MemoryStore, folder: str, file: str, data: bytes) -> None:
    """Replace a file by one whose digests all fit: what a faulty or hostile writer leaves."""
    register = decode_register(store.get(f"{folder}/manifest.json"), what="manifest")
    assert isinstance(register, Manifest)
    digests = digest_blocks(data)
    index = json.loads(store.get(f"{folder}/index.json"))
    index["blocks"][file] = digests.hex()
    index_data = json.dumps(index).encode()
    index_digest = file_digest(len(index_data), digest_blocks(index_data))
    entries = {
        **register.files,
        file: FileEntry(nbytes=len(data), digest=file_digest(len(data), digests)),
        "index.json": FileEntry(nbytes=len(index_data), digest=index_digest),
    }
    store.put(f"{folder}/{file}", data)
    store.put(f"{folder}/index.json", index_data)
    manifest = msgspec.structs.replace(register, files=entries)
    store.put(f"{folder}/manifest.json", encode_manifest(manifest))


@pytest.mark.parametrize(
    ("old", "new", "tensors"),
    [
        (b'"0.weight"', b'"0.wEight"', ["0.wEight", "0.weight"]),
        (b'"shape":[16,8]', b'"shape":[8,16]', ["0.weight"]),
        (b'"dtype":"I64"', b'"dtype":"U64"', ["1.num_batches_tracked"]),
    ],
)
def test_a_header_that_disagrees_with_the_index_is_found(
    small: MemoryStore, old: bytes, new: bytes, tensors: list[str]
) -> None:
    """R18: digests that fit do not hide a file that says other things than the index."""
    folder = newest(small)
    store = copy_of(small)
    data = store.get(f"{folder}/{MODEL}")
    assert old in data
    resealed(store, folder, MODEL, data.replace(old, new, 1))
    problems = verify(store, folder).problems
    assert {(problem.file, problem.message) for problem in problems} == {
        (MODEL, "header and index disagree")
    }
    assert [key for problem in problems for key in problem.tensors] == tensors


def test_a_header_that_is_none_is_found(small: MemoryStore) -> None:
    folder = newest(small)
    store = copy_of(small)
    data = store.get(f"{folder}/{MODEL}")
    resealed(store, folder, MODEL, b"\xff" * 8 + data[8:])
    assert "header of" in only_problem(verify(store, folder)).message


def test_a_tree_that_is_none_is_found(small: MemoryStore) -> None:
    folder = newest(small)
    store = copy_of(small)
    resealed(store, folder, TREE, b'{"holdfast": 1, "tree": {"$pickle": "x"}}')
    assert only_problem(verify(store, folder)).file == TREE


def test_a_tree_with_a_tensor_that_is_nowhere_is_found(small: MemoryStore) -> None:
    folder = newest(small)
    store = copy_of(small)
    resealed(store, folder, TREE, b'{"holdfast": 1, "tree": {"$tensor": "ghost"}}')
    problem = only_problem(verify(store, folder))
    assert (problem.message, problem.tensors) == ("names tensors that the index lacks", ("ghost",))


def test_a_wrong_count_of_tensors_is_found(small: MemoryStore) -> None:
    folder = newest(small)
    store = copy_of(small)
    register = decode_register(store.get(f"{folder}/manifest.json"), what="manifest")
    assert isinstance(register, Manifest)
    model = msgspec.structs.replace(register.components["model"], num_tensors=1)
    changed = msgspec.structs.replace(register, components={**register.components, "model": model})
    store.put(f"{folder}/manifest.json", encode_manifest(changed))
    assert "differs from the manifest" in only_problem(verify(store, folder)).message


def test_files_that_nobody_listed_are_noted(small: MemoryStore) -> None:
    """R18: they are not damage."""
    folder = newest(small)
    store = copy_of(small)
    store.put(f"{folder}/readme.txt", b"mine")
    store.put(f"{folder}/plots/loss.png", b"mine too")
    store.put(f"{folder}/notes-0001.json", Notes(tags=("good",), pinned=True).encode())
    report = verify(store, folder)
    assert report.ok
    assert report.notes == (
        "plots/ is not listed in the manifest",
        "readme.txt is not listed in the manifest",
    )


@pytest.mark.parametrize("name", ["notes-0007.json", "rejected.json", "retired-00000002.json"])
def test_a_damaged_sidecar_is_found(small: MemoryStore, name: str) -> None:
    """R15."""
    folder = newest(small)
    store = copy_of(small)
    store.put(f"{folder}/{name}", b'{"holdfast": 1, "kind": "notes"}\n')
    assert only_problem(verify(store, folder)).file == name


def test_what_is_no_checkpoint_is_said_to_be_none(small: MemoryStore) -> None:
    store = copy_of(small)
    folders = [entry.folder for entry in Catalog(store).checkpoints()]
    for key in (f"{folders[0]}/manifest.json", f"{folders[0]}/index.json", "latest"):
        store.delete(key)
    tombstone = Deleted(save_id="0" * 32, by="writer 1", reason="last 1")
    store.put(f"{folders[1]}/manifest.json", tombstone.encode())
    with pytest.raises(NoCheckpoint, match="not committed"):
        verify(store, folders[0])
    with pytest.raises(NoCheckpoint, match=r"deleted \(last 1\)"):
        verify(store, folders[1])
    assert mark_aborted(store, folders[0], by="gc", reason="too late")
    with pytest.raises(NoCheckpoint, match=r"given up \(too late\)"):
        verify(store, folders[0])
    root = verify_root(store)
    assert root.ok
    assert [report.folder for report in root.checkpoints] == folders[2:]
    assert len(root.notes) == 2


def test_a_checkpoint_deleted_meanwhile_is_no_damage(small: MemoryStore) -> None:
    """R18: retention of a live run may take what is being verified."""
    store = copy_of(small)
    folder = newest(store)

    def retire(_: str, done_nbytes: int, total_nbytes: int) -> None:
        tombstone = Deleted(save_id="0" * 32, by="writer 1", reason="last 1")
        store.put(f"{folder}/manifest.json", tombstone.encode())
        for file in files_of(store, folder):
            if file != "manifest.json":
                store.delete(f"{folder}/{file}")

    with pytest.raises(NoCheckpoint, match="deleted"):
        verify(store, folder, progress=retire)


def test_a_copy_under_another_name_is_verified(small: MemoryStore) -> None:
    """Invariant 10."""
    folder = newest(small)
    store = MemoryStore()
    for file in files_of(small, folder):
        store.put(f"mine/{file}", small.get(f"{folder}/{file}"))
    report = verify(store, "mine")
    assert report.ok
    assert report.notes == (f"a copy of {folder} under another name",)


def test_damage_in_one_checkpoint_does_not_stop_the_others(small: MemoryStore) -> None:
    """R18."""
    store = copy_of(small)
    folders = [entry.folder for entry in Catalog(store).checkpoints()]
    store.put(f"{folders[0]}/manifest.json", b"garbage")
    flip(store, f"{folders[1]}/{MODEL}", 8 * 5000)
    root = verify_root(store)
    assert [(report.folder, report.ok) for report in root.checkpoints] == [
        (folders[0], False),
        (folders[1], False),
        (folders[2], True),
    ]
    assert root.checkpoints[0].step is None


def of_version_2(sealed: bytes) -> bytes:
    body = sealed[: sealed.rindex(b'"digest"')]
    newer = re.sub(rb'"holdfast":\s*1', b'"holdfast": 2', body, count=1)
    assert newer != body
    return newer + f'"digest": "blake3:{blake3(newer).hexdigest()}"}}\n'.encode()


def test_a_manifest_of_a_newer_version_is_reported_as_such(small: MemoryStore) -> None:
    """R21."""
    folder = newest(small)
    store = copy_of(small)
    store.put(f"{folder}/manifest.json", of_version_2(store.get(f"{folder}/manifest.json")))
    problem = only_problem(verify(store, folder))
    assert problem.message == "has version 2, but this Holdfast reads 1; upgrade Holdfast"


def test_damaged_claims_are_found(small: MemoryStore) -> None:
    """R15."""
    for key in ("writers/00000001.json", "writers/00000001.closed.json"):
        store = copy_of(small)
        flip(store, key, 99)
        root = verify_root(store)
        assert not root.ok
        assert [(problem.file, problem.is_damage) for problem in root.problems] == [(key, True)]
        assert all(report.ok for report in root.checkpoints)
        failing = FaultyStore(small, [Fault(kind="fail", op="read_into", key=key, times=None)])
        root = verify_root(failing)
        assert [(problem.file, problem.is_damage) for problem in root.problems] == [(key, False)]


def test_progress_ends_at_all_bytes_and_never_goes_back(large: MemoryStore) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = newest(large)
    verify(large, folder, progress=lambda *news: seen.append(news))
    total = Catalog(large).checkpoints()[0].manifest.nbytes
    assert {(where, of) for where, _, of in seen} == {(folder, total)}
    done = [nbytes for _, nbytes, _ in seen]
    assert done == sorted(done)
    assert done[-1] == total


def test_verification_only_reads(small: MemoryStore) -> None:
    """Invariant 11."""
    store = FaultyStore(small)
    verify_root(store)
    assert {op for op, _ in store.ops} <= {"get", "read_into", "head", "children"}


def test_a_long_list_of_tensors_is_cut_in_the_line_but_not_in_the_record() -> None:
    problem = Problem(file="f", message="gone", tensors=("a", "b", "c", "d", "e"))
    assert str(problem) == "f: gone; tensors: a, b, c and 2 more"
