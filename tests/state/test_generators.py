"""Generators: exact streams, and states that are checked before they are set."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import FormatError, MismatchError, UnsupportedState
from holdfast.format.nodes import GeneratorState
from holdfast.format.objects import decode_tree, document
from holdfast.state.capture.capture import capture
from holdfast.state.components import StoredComponent
from state.roundtrip import Image, global_generators_kept, image


@pytest.fixture(autouse=True)
def _global_generators() -> Iterator[None]:
    with global_generators_kept():
        yield


def numpy_maker(name: str) -> Callable[[int], np.random.Generator]:
    return lambda seed: np.random.Generator(getattr(np.random, name)(seed))


MAKERS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
    "legacy": np.random.RandomState,
    **{name: numpy_maker(name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")},
}


def draws(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(20, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(5)] + [generator.random()]
    odd = [int(generator.bit_generator.random_raw())] if hasattr(generator, "spawn") else []
    return generator.standard_normal(7).tolist() + odd


@pytest.mark.parametrize("name", MAKERS)
def test_a_stream_goes_on_where_it_was(name: str) -> None:
    """Invariant 7."""
    original, resumed = MAKERS[name](1), MAKERS[name](2)
    draws(original)
    saved = image({"gen": original})
    expected = draws(original)
    saved.load({"gen": resumed})
    assert draws(resumed) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_a_generator_inside_a_tree_goes_on_too(name: str) -> None:
    """In the live generator where there is one of the kind, else in a new one."""
    original, live = MAKERS[name](1), MAKERS[name](2)
    saved = image({"tree": {"gen": [original]}})
    expected = draws(original)
    filled: dict[str, Any] = {"gen": [live]}
    empty: dict[str, Any] = {}
    saved.load({"tree": filled})
    saved.load({"tree": empty})
    assert filled["gen"][0] is live
    assert draws(live) == expected
    assert draws(empty["gen"][0]) == expected


@pytest.mark.parametrize("other", MAKERS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_another_kind_is_refused(name: str, other: str) -> None:
    if name == other:
        return
    live = MAKERS[other](2)
    expected = draws(MAKERS[other](2))
    with pytest.raises(MismatchError):
        image({"gen": MAKERS[name](1)}).prepare({"gen": live})
    assert draws(live) == expected


def test_the_system_generator_has_no_state_to_save() -> None:
    with pytest.raises(UnsupportedState, match="has no state"):
        capture({"gen": random.SystemRandom()})


def spoiled(saved: Image, change: Callable[[dict[str, Any]], None]) -> Image:
    """The image with the members of its one generator changed."""
    stored = saved.stored["gen"]
    node = decode_tree(stored.tree, what="test")
    members = dict(node.members)
    change(members)
    tree = document(GeneratorState(node.kind, members)).data
    saved.stored["gen"] = StoredComponent(
        name="gen", kind="generator", tree=tree, tensors=stored.tensors
    )
    return saved


def cut(saved: Image) -> Image:
    key = next(iter(saved.tensors["gen"]))
    saved.tensors["gen"][key] = saved.tensors["gen"][key][:-1].clone()
    tensors = {key: type(spec)(key, spec.dtype, (spec.shape[0] - 1,))
               for key, spec in saved.stored["gen"].tensors.items()}  # fmt: skip
    old = saved.stored["gen"]
    saved.stored["gen"] = StoredComponent(
        name="gen", kind="generator", tree=old.tree, tensors=tensors
    )
    return saved


@pytest.mark.parametrize("name", ["torch", "python", "legacy", "MT19937", "Philox", "SFC64"])
def test_a_state_of_another_length_is_refused_before_anything_changes(name: str) -> None:
    live = MAKERS[name](2)
    with pytest.raises(MismatchError, match="not "):
        cut(image({"gen": MAKERS[name](1)})).prepare({"gen": live})
    assert draws(live) == draws(MAKERS[name](2))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("MT19937", lambda m: m["state"]["state"].update(pos=625)),
        ("MT19937", lambda m: m["state"]["state"].update(pos=-1)),
        ("legacy", lambda m: m["state"]["state"].update(pos=10**6)),
        ("legacy", lambda m: m["state"].update(gauss="x")),
        ("Philox", lambda m: m["state"].update(buffer_pos=-7)),
        ("Philox", lambda m: m["state"].update(buffer_pos=5)),
        ("PCG64", lambda m: m["state"]["state"].update(inc=True)),
        ("PCG64", lambda m: m["state"].update(bit_generator="MT19937")),
        ("PCG64", lambda m: m["state"].pop("uinteger")),
        ("PCG64", lambda m: m.update(more=1)),
        ("PCG64", lambda m: m.update(state=3)),
        ("python", lambda m: m.update(version=2)),
        ("python", lambda m: m.update(gauss_next="x")),
        ("torch", lambda m: m.update(device="cuda:0")),
        ("torch", lambda m: m.update(state=[1, 2])),
    ],
)
def test_members_that_cannot_be_are_refused(name: str, change: Any) -> None:
    """Invariant 5: numpy takes a position outside of its buffer, and reads there later."""
    saved = spoiled(image({"gen": MAKERS[name](1)}), change)
    live = MAKERS[name](2)
    with pytest.raises(MismatchError):
        saved.prepare({"gen": live})
    assert draws(live) == draws(MAKERS[name](2))


def test_bytes_that_are_no_state_are_found_before_anything_changes() -> None:
    """Invariant 6: a state that its generator refuses is tried on another one first."""
    live, tree = torch.Generator().manual_seed(2), {"x": torch.zeros(2)}
    state = {"gen": live, "tree": tree}
    saved = image({"gen": torch.Generator().manual_seed(1), "tree": {"x": torch.ones(2)}})
    saved.tensors["gen"]["state"].fill_(255)
    with pytest.raises(FormatError, match="not valid"):
        saved.load(state)
    assert tree["x"].tolist() == [0.0, 0.0]
    assert draws(live) == draws(torch.Generator().manual_seed(2))


def test_python_words_that_are_no_state_are_found_before_anything_changes() -> None:
    live = random.Random(2)
    saved = image({"gen": random.Random(1)})
    saved.tensors["gen"]["state"] = torch.full((625,), 2**32 - 1, dtype=torch.uint32)
    with pytest.raises(FormatError, match="not valid"):
        saved.load({"gen": live})
    assert draws(live) == draws(random.Random(2))


def test_number_outside_its_range_is_found_before_anything_changes() -> None:
    live = MAKERS["PCG64"](2)
    saved = spoiled(
        image({"gen": MAKERS["PCG64"](1)}), lambda m: m["state"]["state"].update(state=2**200)
    )
    with pytest.raises(FormatError, match="not valid"):
        saved.load({"gen": live})
    assert draws(live) == draws(MAKERS["PCG64"](2))


def global_draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(3).tolist(),
        torch.randn(5).tolist(),
    ]


def test_the_global_generators_are_a_component_of_their_own() -> None:
    """Invariant 7: python, numpy and torch go on where they were."""
    random.gauss(0, 1)
    np.random.standard_normal()
    saved = image({"data": {}})
    assert saved.stored["rng"].kind == "rng"
    expected = global_draws()
    prepared = saved.load({"data": {}})
    assert global_draws() == expected
    assert prepared.notes == ()


def test_the_global_generators_are_left_alone_when_asked() -> None:
    saved = image({"data": {}})
    global_draws()
    expected_state = torch.get_rng_state()
    saved.load({"data": {}}, rng=False)
    assert torch.equal(torch.get_rng_state(), expected_state)
    saved.load({"data": {}}, skip=["rng"])
    saved.load({"data": {}}, components=["data"])
    assert torch.equal(torch.get_rng_state(), expected_state)


def test_one_of_the_global_generators_can_be_skipped() -> None:
    saved = image({"data": {}})
    global_draws()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    saved.load({"data": {}}, skip=["rng.torch"])
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() != python_state


def test_the_callers_own_rng_component_takes_the_place() -> None:
    own = torch.Generator().manual_seed(1)
    saved = image({"rng": own})
    assert saved.stored["rng"].kind == "generator"
    expected = draws(own)
    saved.load({"rng": own})
    assert draws(own) == expected
    with pytest.raises(MismatchError, match="stored as generator, live as rng"):
        saved.prepare({"data": {}}, strict=False)


def test_the_global_generators_come_after_foreign_code() -> None:
    """Loading an object may draw."""

    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            global_draws()

    state = {"object": Drawing()}
    saved = image(state)
    expected = global_draws()
    saved.load(state)
    assert global_draws() == expected


def changed_rng(saved: Image, change: Callable[[dict[str, Any]], None]) -> Image:
    old = saved.stored["rng"]
    tree = decode_tree(old.tree, what="test")
    change(tree)
    saved.stored["rng"] = StoredComponent(
        name="rng", kind="rng", tree=document(tree).data, tensors=old.tensors
    )
    return saved


def test_accelerators_that_are_not_here_and_other_versions_are_notes() -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["devices"]["npu"] = [tree["torch"], tree["torch"]]
        tree["versions"]["numpy"] = "1.0"
        del tree["numpy"]

    prepared = changed_rng(image({"data": {}}), change).prepare({"data": {}})
    assert prepared.notes[0] == "rng.devices.npu.0: no such generator here, not restored"
    assert prepared.notes[2] == "rng.numpy: not in the checkpoint, unchanged"
    assert "saved under numpy 1.0" in prepared.notes[3]


@pytest.mark.parametrize("tree", [None, 3, {"torch": 1}, {"devices": {"cpu": [1]}, "python": []}])
def test_a_tree_that_holds_no_generators_is_a_format_error(tree: Any) -> None:
    """Invariant 5."""
    saved = image({"data": {}})
    saved.stored["rng"] = StoredComponent(
        name="rng", kind="rng", tree=document(tree).data, tensors={}
    )
    with pytest.raises(FormatError):
        saved.prepare({"data": {}})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators_go_on_where_they_were() -> None:
    torch.rand(1, device="cuda")
    saved = image({"data": {}})
    expected = torch.rand(5, device="cuda").tolist()
    saved.load({"data": {}})
    assert torch.rand(5, device="cuda").tolist() == expected
