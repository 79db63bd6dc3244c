"""The register: what a manifest says, and every contradiction that is refused."""

from __future__ import annotations

import copy
import gc
import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import (
    FOLDER,
    SAVE_ID,
    documents,
    is_refused,
    make_manifest,
    members_of,
    reseal,
)

from holdfast.errors import CorruptData, FormatError, UsageError
from holdfast.format import layout, manifest

MANIFEST = next(document for document in documents() if document.name == "manifest")
BAD_NAMES = [
    "..",
    ".",
    "",
    "/",
    "/etc/passwd",
    "../model-00000.safetensors",
    "model-00000.safetensors/..",
    "a/model-00000.safetensors",
    "model-00000.safetensors/",
    "model-00000.safetensors\n",
    "model-00000.safetensors\0",
    "\\\\host\\share",
    "C:model-00000.safetensors",
    "model-00000.SAFETENSORS",
    "Model-00000.safetensors",
    "modèl-00000.safetensors",
    "model-００００0.safetensors",
    "~/model-00000.json",
    "model-00000.pkl",
    "manifest.json",
    "retired.json",
    "latest",
    "model-0.json",
    "con",
    "x" * 300,
    "\u202emodel-00000.json",
    "model-00000.json%00",
    "file:///etc/passwd",
    "model-00000.json ",
]


def read(members: Any) -> Any:
    return manifest.decode_register(reseal(json.dumps(members)), what="the-document")


def changed(*path: str, to: Any) -> dict[str, Any]:
    """The sample's members with one of them replaced, or left out (`...`)."""
    members = copy.deepcopy(members_of(MANIFEST))
    inner = members
    for name in path[:-1]:
        inner = inner[name]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return members


GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "v1").rglob("manifest.json"))
COUNTED = manifest.Timestamp(
    step=20,
    step_in_epoch=5,
    samples_in_epoch=160,
    tokens_in_epoch=0,
    epoch_wall_s=3.5,
    step_wall_s=0.25,
    cycle=1,
    step_in_cycle=10,
)


def test_counters_within_epoch_and_cycle_come_back_and_are_left_out_where_nobody_counts() -> None:
    full = manifest.encode_manifest(make_manifest(timestamp=COUNTED))
    found = manifest.decode_register(full, what="w")
    assert isinstance(found, manifest.Manifest)
    assert found.timestamp == COUNTED
    plain = members_of(MANIFEST)["timestamp"]
    assert list(plain) == ["step", "epoch", "samples", "tokens", "wall_s"]


@each(
    ("name", "value"),
    [
        ("step_in_epoch", -1),
        ("cycle", 1.5),
        ("samples_in_epoch", True),
        ("epoch_wall_s", -0.5),
        ("step_wall_s", "1"),
        ("step_in_cycle", 2**63),
    ],
)
def test_a_counter_within_something_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(FormatError, match=name):
        read(changed("timestamp", name, to=value))
    assert read(changed("timestamp", name, to=None)) == MANIFEST.value


def test_metrics_settings_and_changes_come_back_and_are_left_out_where_there_are_none() -> None:
    later = {
        "best": (manifest.WatchedMetric(metric="val/loss", mode="min"),),
        "config": {"lr": "0.1"},
        "changes": (manifest.Change(epoch=2, step=5, what=("lr: 0.1 → 0.2",)),),
        "policy": manifest.RunPolicy(
            keep="last:3",
            keep_remote="",
            replaces=True,
            every={"main": {"permanent": "10step"}},
            parts={"weights": ("model",)},
        ),
    }
    found = manifest.decode_register(manifest.encode_manifest(make_manifest(**later)), what="w")
    assert isinstance(found, manifest.Manifest)
    assert {name: getattr(found, name) for name in later} == later
    assert not set(later) & set(members_of(MANIFEST))


@each(
    ("name", "value"),
    [
        ("best", [{"metric": "loss", "mode": "low"}]),
        ("best", [{"metric": 3, "mode": "min"}]),
        ("best", "loss"),
        ("config", {"lr": 0.1}),
        ("config", ["lr"]),
        ("changes", [{"epoch": 0, "step": 1, "what": []}]),
        ("changes", [{"epoch": 1, "step": -1, "what": []}]),
        ("changes", [{"epoch": 1, "step": 1, "what": [1]}]),
        ("policy", "last:3"),
        ("policy", {"keep_remote": "last:3"}),
        ("policy", {"keep": "last:3", "every": {"main": "10step"}}),
        ("policy", {"keep": "last:3", "parts": {"weights": "model"}}),
    ],
)
def test_metrics_settings_and_changes_of_another_form_are_refused(name: str, value: Any) -> None:
    with pytest.raises(FormatError, match=name):
        read(changed(name, to=value))


@each("path", GOLDEN)
def test_old_manifests_are_written_again_byte_for_byte(path: Path) -> None:
    """R21: members that came later are left out where nobody counted them."""
    found = manifest.decode_register(path.read_bytes(), what=path.name)
    if isinstance(found, manifest.Manifest):
        assert manifest.encode_manifest(found) == path.read_bytes()


def test_a_manifest_comes_back_equal() -> None:
    found = manifest.decode_register(MANIFEST.data, what="w")
    assert found == MANIFEST.value
    assert found.order == (3, 7)
    assert found.parent is not None
    assert found.parent.order == (3, 2)
    assert found.nbytes == sum(entry.nbytes for entry in found.files.values())
    reference = found.make_reference(FOLDER)
    assert (reference.order, reference.save_id, reference.folder) == ((3, 7), SAVE_ID, FOLDER)


def test_metrics_may_be_anything_that_a_float_is() -> None:
    given_metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0, "e": 1e-320, "f": 3}
    data = manifest.encode_manifest(make_manifest(metrics=given_metrics))
    found = manifest.decode_register(data, what="w").metrics
    assert math.isnan(found.pop("a"))
    assert found == {name: value for name, value in given_metrics.items() if name != "a"}
    assert math.copysign(1, found["d"]) == -1
    assert b"NaN" not in data
    assert b"Infinity" not in data


@pytest.mark.parametrize("value", ["x", None, 10**400, [1.0]])
def test_a_metric_that_is_no_number_is_the_callers_error(value: Any) -> None:
    with pytest.raises(UsageError, match="loss"):
        manifest.encode_manifest(make_manifest(metrics={"loss": value}))


@given(
    tags=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), max_size=5),
    metrics=st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
        st.floats(allow_nan=False),
        max_size=5,
    ),
    step=st.integers(0, 2**63 - 1),
    sequence=st.integers(3, 10**12 - 1),
)
def test_any_honest_manifest_comes_back_equal(
    tags: list[str], metrics: dict[str, float], step: int, sequence: int
) -> None:
    given_manifest = make_manifest(
        tags=tuple(tags),
        metrics=metrics,
        timestamp=manifest.Timestamp(step=step),
        sequence=sequence,
    )
    data = manifest.encode_manifest(given_manifest)
    assert manifest.decode_register(data, what="w") == given_manifest


WRONG: list[tuple[tuple[str, ...], Any]] = [
    (("save_id",), "0" * 31),
    (("save_id",), "0" * 32 + "\n"),
    (("save_id",), "G" * 32),
    (("save_id",), ...),
    (("label",), "../x"),
    (("label",), ".x"),
    (("label",), "a/../../x"),
    (("label",), ""),
    (("label",), "x" * 201),
    (("label",), 7),
    (("epoch",), 0),
    (("epoch",), -1),
    (("epoch",), True),
    (("epoch",), 3.0),
    (("epoch",), "3"),
    (("epoch",), 2**63),
    (("epoch",), 10**4000),
    (("sequence",), 0),
    (("parent",), {}),
    (("parent",), "x"),
    (("parent", "folder"), "../../etc"),
    (("parent", "folder"), "/step-00000010.0003-000002-01234567"),
    (("parent", "folder"), "a/step-00000010.0003-000002-01234567"),
    (("parent", "folder"), "step-00000010.0003-000003-01234567"),
    (("parent", "folder"), "step-00000010.0003-000002-76543210"),
    (("parent", "sequence"), 7),
    (
        ("parent",),
        {
            "epoch": 3,
            "sequence": 8,
            "save_id": "0123456789abcdef" * 2,
            "folder": "step-00000010.0003-000008-01234567",
        },
    ),
    (("timestamp", "step"), -1),
    (("timestamp", "step"), None),
    (("timestamp", "step"), True),
    (("timestamp", "tokens"), 1.5),
    (("timestamp", "wall_s"), "1"),
    (("timestamp",), []),
    (("class",), "eternal"),
    (("class",), ...),
    (("tags",), "best"),
    (("tags",), [1]),
    (("tags",), None),
    (("metrics",), []),
    (("metrics", "loss"), "1"),
    (("metrics", "loss"), True),
    (("metrics", "loss"), None),
    (("metrics", "loss"), {"$float": "NaN"}),
    (("metrics", "loss"), {"$float": "nan", "x": 1}),
    (("metrics", "loss"), {"$float": 1}),
    (("metrics", "loss"), 10**400),
    (("world_size",), 0),
    (("components",), []),
    (("components", "model", "files"), []),
    (("components", "model", "files"), ["model-00000.safetensors", "model-00000.json"]),
    (("components", "model", "files"), ["model-00000.json"]),
    (("components", "model", "files"), ["model-00000.json", "model-00001.safetensors"]),
    (("components", "model", "files"), ["model-00000.json"] * 2),
    (("components", "model", "nbytes"), -1),
    (("components", "model", "num_tensors"), 1.0),
    (("components", "model", "kind"), 1),
    (("components", "other"), {"kind": "m", "files": [], "nbytes": 0, "num_tensors": 0}),
    (("block_nbytes",), 0),
    (("block_nbytes",), 4095),
    (("block_nbytes",), 8388609),
    (("block_nbytes",), 2**31),
    (("block_nbytes",), -8388608),
    (("block_nbytes",), True),
    (("files",), {}),
    (("files",), None),
    (("files", "index.json"), ...),
    (("files", "model-00000.json"), ...),
    (("files", "other-00000.json"), {"nbytes": 0, "digest": "blake3:" + "0" * 64}),
    (("files", "index.json", "nbytes"), -1),
    (("files", "index.json", "nbytes"), 2**63),
    (("files", "index.json", "nbytes"), 128 * 2**20 + 1),
    (("files", "model-00000.json", "nbytes"), 64 * 2**20 + 1),
    (("files", "index.json", "nbytes"), True),
    (("files", "index.json", "digest"), "0" * 64),
    (("files", "index.json", "digest"), "blake3:" + "0" * 63),
    (("files", "index.json", "digest"), "blake3:" + "0" * 64 + "\n"),
    (("files", "index.json", "digest"), "sha256:" + "0" * 64),
    (("numerics",), []),
    (("timings", "write_s"), "fast"),
]


@each(("path", "value"), WRONG, ids=lambda value: repr(value)[:40])
def test_a_wrong_member_is_refused(path: tuple[str, ...], value: Any) -> None:
    """R28, R30: types are exact, numbers bounded, and everything agrees with everything."""
    with pytest.raises(FormatError, match="the-document"):
        read(changed(*path, to=value))


def check_file_names_cannot_leave_the_folder() -> None:
    for name in BAD_NAMES:
        members = copy.deepcopy(members_of(MANIFEST))
        members["files"][name] = members["files"]["model-00000.safetensors"]
        members["components"]["model"]["files"].append(name)
        with pytest.raises(FormatError):
            read(members)
        with pytest.raises(FormatError):
            read(changed("components", name, to=members["components"]["model"]))


def test_file_names_cannot_leave_the_folder() -> None:
    """R28: no listed name is a path, and none is the name of another document."""
    check_file_names_cannot_leave_the_folder()


@pytest.mark.parametrize(
    ("name", "most"), [("index.json", 128 * 2**20), ("model-00000.json", 64 * 2**20)]
)
def test_an_index_and_a_tree_are_listed_up_to_the_length_that_is_read(name: str, most: int) -> None:
    assert read(changed("files", name, "nbytes", to=most)).files[name].nbytes == most


@given(name=st.text(max_size=40))
def test_an_accepted_file_name_is_one_plain_segment(name: str) -> None:
    """R28: whatever passes consists of harmless characters."""
    try:
        layout.check_file_name(name)
    except FormatError:
        return
    assert name.isascii()
    assert all(c.isalnum() or c in "_-." for c in name)
    assert not name.startswith(".")
    assert ".." not in name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(seed=st.integers(0, 2**32), value=JSON)
def test_any_member_replaced_by_anything_raises_only_our_errors(seed: int, value: Any) -> None:
    """R30: the attacker can seal what he likes."""
    rng = random.Random(seed)
    members = copy.deepcopy(members_of(MANIFEST))
    inner: Any = members
    while isinstance(inner, dict) and inner:
        name = rng.choice(list(inner))
        if rng.random() < 0.4 or not isinstance(inner[name], dict):
            inner[name] = value
            break
        inner = inner[name]
    is_refused(manifest.decode_register, reseal(json.dumps(members)))


def test_a_manifest_of_50_000_files_is_read() -> None:
    """The size limit leaves room for large jobs."""
    entry = manifest.FileEntry(nbytes=1, digest="blake3:" + "0" * 64)
    name = "model"
    files = [layout.tree_file(name), *(layout.tensor_file(name, i) for i in range(50_000))]
    component = manifest.ComponentEntry(kind="module", files=tuple(files), nbytes=1, num_tensors=1)
    large = make_manifest(
        components={name: component}, files=dict.fromkeys([*files, layout.INDEX], entry)
    )
    data = manifest.encode_manifest(large)
    assert len(data) < manifest.MAX_MANIFEST_NBYTES
    assert manifest.decode_register(data, what="w") == large


def test_names_that_are_refused_are_not_remembered() -> None:
    """Invariant 5: a root may hold thousands of manifests with other long names in each."""
    tracemalloc.start()
    try:
        for number in range(20):
            name = f"{number}{'x' * 1_000_000}"
            file = members_of(MANIFEST)["files"]["model-00000.safetensors"]
            with pytest.raises(FormatError):
                read(changed("files", name, to=file))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 4_000_000
    finally:
        tracemalloc.stop()


def test_records_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        make_manifest().epoch = 4  # type: ignore[misc]


def test_a_manifest_whose_digest_is_known_is_decoded_without_its_tables() -> None:
    metrics = {"loss": math.nan}
    whole = msgspec.structs.replace(manifest.decode_register(MANIFEST.data, what="it"))
    whole = msgspec.structs.replace(whole, metrics=metrics, hosts={"a": (*whole.files,)})
    data = manifest.encode_manifest(whole)
    known: dict[str, Any] = {"digest": manifest.manifest_digest(whole), "nbytes": whole.nbytes}
    found = manifest.decode_committed(data, what="it", **known)
    assert found is not None
    assert isinstance(found.files, manifest.LazyTable)
    assert found.nbytes == whole.nbytes
    assert repr(found.metrics) == repr(metrics)
    assert (found.files, found.components, found.hosts) == (
        whole.files,
        whole.components,
        whole.hosts,
    )
    assert manifest.encode_manifest(found) == data
    assert manifest.decode_committed(MANIFEST.data, what="it", **known) is None
    with pytest.raises(CorruptData, match="digest"):
        manifest.decode_committed(data.replace(b"step", b"stop"), what="it", **known)
