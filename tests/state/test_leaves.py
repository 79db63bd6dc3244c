"""Which tensors can be saved, under which key, and why the others cannot."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from holdfast.errors import UnsupportedState
from holdfast.state.capture.capture import capture
from holdfast.state.leaves import DTYPE_NAMES, TORCH_DTYPES, refusal
from state.roundtrip import image, raw_bytes


def captured_tensors(tree: Any) -> dict[str, Tensor]:
    return dict(capture({"data": tree}).components["data"].tensors)


def loaded(tree: Any) -> Any:
    live: Any = {} if isinstance(tree, dict) else []
    image({"data": tree}).load({"data": live})
    return live


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_named_dtype_goes_round_to_the_bit(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).repeat(16)
    values = (bits % 2 == 1) if dtype == torch.bool else bits.view(dtype)
    found = loaded({"a": values, "b": values.reshape(2, -1).t(), "zero": values[:0]})
    assert found["a"].dtype == dtype
    assert raw_bytes(found["a"]) == raw_bytes(values)
    assert raw_bytes(found["b"]) == raw_bytes(values.reshape(2, -1).t())
    assert found["zero"].shape == (0,)


def test_every_name_of_the_format_is_a_torch_dtype() -> None:
    assert {TORCH_DTYPES[name] for name in TORCH_DTYPES} == set(DTYPE_NAMES)
    assert len(TORCH_DTYPES) == 22


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.ones(0, 3),
        torch.arange(3).expand(4, 3),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(10)[1:9:3],
        torch.ones(2, 3, requires_grad=True) * 2,
        nn.Parameter(torch.ones(3)),
        nn.Buffer(torch.ones(3)),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(4).as_strided((3, 2), (1, 1)),
    ],
    ids=["0-d", "empty", "expanded", "permuted", "strided", "graph", "parameter", "buffer",
         "conjugate", "negative", "overlapping"],
)  # fmt: skip
def test_layouts_of_every_kind_go_round(tensor: Tensor) -> None:
    found = loaded({"t": tensor})["t"]
    assert type(found) is (nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor)
    assert torch.equal(found.detach(), tensor.detach())
    assert found.requires_grad == (tensor.requires_grad and tensor.is_leaf)
    assert found.is_leaf
    assert not found.is_conj()
    assert not found.is_neg()


def test_captured_tensors_are_the_live_memory_and_carry_no_graph() -> None:
    parameter = nn.Parameter(torch.ones(3))
    found = captured_tensors({"p": parameter})["p"]
    assert found.data_ptr() == parameter.data_ptr()
    assert not found.requires_grad


def test_one_memory_has_one_key() -> None:
    base = torch.arange(6.0)
    tree = {"a": base, "b": [base, base.view(6), base.detach()], "half": base[:3]}
    assert list(captured_tensors(tree)) == ["a", "half"]
    found = loaded(tree)
    assert found["b"][0] is found["a"]


def test_one_memory_seen_in_other_ways_has_other_keys() -> None:
    base = torch.ones(4)
    tree = [base, base.view(torch.int32), base.view(2, 2), base[1:], base[:3], base[1:]]
    assert list(captured_tensors(tree)) == ["0", "1", "2", "3", "4"]
    complex_base = torch.tensor([1 + 2j])
    assert len(captured_tensors([complex_base, complex_base.conj(), complex_base.conj()])) == 2


def test_keys_are_paths_and_made_unique() -> None:
    one, two, three = torch.ones(1), torch.ones(1), torch.ones(1)
    tree = {"a": {"b": one}, "a.b": two, 0: three, "0": torch.ones(1), "": torch.ones(1)}
    assert list(captured_tensors(tree)) == ["a.b", "a.b#2", "0", "0#2", "value"]


def test_the_key_that_safetensors_keeps_for_itself_is_not_used() -> None:
    """A tensor of that name would make the file unreadable."""
    assert list(captured_tensors({"__metadata__": torch.ones(1)})) == ["__metadata__#2"]
    assert list(loaded({"__metadata__": torch.ones(1)})) == ["__metadata__"]


class Sub(Tensor):
    """Some subclass."""


def refused() -> dict[str, tuple[Any, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        csr = torch.eye(2).to_sparse_csr()
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with FakeTensorMode():
        fake = torch.ones(2)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    return {
        "meta": (torch.ones(2, device="meta"), "meta tensor"),
        "coo": (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        "csr": (csr, "layout torch.sparse_csr"),
        "mkldnn": (torch.ones(2).to_mkldnn(), "layout torch._mkldnn"),
        "quantized": (quantized, "quantized"),
        "nested": (nested, "nested"),
        "jagged": (jagged, "nested"),
        "lazy": (nn.UninitializedParameter(), "not initialized"),
        "lazy_buffer": (nn.UninitializedBuffer(), "not initialized"),
        "sub": (torch.ones(2).as_subclass(Sub), "subclass"),
        "sub_parameter": (nn.Parameter(torch.ones(2).as_subclass(Sub)), "subclass"),
        "fake": (fake, "fake tensor"),
        "bits": (torch.ones(2, dtype=torch.uint8).view(torch.bits8), "no name"),
        "freed": (freed, "storage was freed"),
        "zeros": (torch._efficientzerotensor(2), "ZeroTensor has no memory"),
    }  # fmt: skip


def test_everything_that_cannot_be_saved_is_listed_at_once_with_its_path() -> None:
    """One run of the program is enough to find them all, over all components."""
    bad = refused()
    model = nn.Linear(2, 2)
    model.register_buffer("meta", torch.ones(2, device="meta"))
    state = {
        "model": model,
        "fine": {"x": 1},
        "first": {name: value for name, (value, _) in bad.items()},
        "second": [1, {"deep": [object()]}, lambda: None],
    }
    with pytest.raises(UnsupportedState) as caught:
        capture(state)
    assert caught.value.paths == [
        "model.meta",
        *(f"first.{name}" for name in bad),
        "second.1.deep.0",
        "second.2",
    ]
    reasons = dict(caught.value.offenders)
    for name, (_, reason) in bad.items():
        assert reason in reasons[f"first.{name}"], name


def test_another_class_of_the_name_dtensor_is_refused() -> None:
    class DTensor(Tensor):
        pass

    assert "subclass" in str(refusal(torch.ones(2).as_subclass(DTensor)))


def test_a_capture_changes_nothing() -> None:
    """D22: what the caller holds is only read."""
    tensor = torch.ones(3, requires_grad=True)
    tree = {"a": [tensor, {"b": (1, 2)}]}
    version = tensor._version
    capture({"data": tree})
    assert tree == {"a": [tensor, {"b": (1, 2)}]}
    assert tensor._version == version
    assert tensor.requires_grad
