"""Frozen parameters by digest: what a checkpoint leaves out is there again, or an error says so."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.errors import MismatchError, UsageError
from holdfast.events import Event
from holdfast.format.manifest import Manifest, decode_register
from holdfast.interop.comparing.differences import compare_sources
from holdfast.interop.dcp import export_folder
from holdfast.interop.exporting.export import export_checkpoint
from holdfast.interop.opening import open_source
from holdfast.saving import script_warnings
from holdfast.state.frozen import compute_checksums
from holdfast.state.leaves import plain_parts
from quantized import Mode, bits_in, import_torchao, scaled_model
from state.test_bnb_layers import new_model, quantized_tensors
from state.test_subclasses import Loads

Step = Callable[[], None]


class Adapted(nn.Module):
    """A linear layer that is frozen, with an adapter that is trained."""

    def __init__(self, num_in: int = 64, num_out: int = 64) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out).requires_grad_(False)
        self.low = nn.Parameter(torch.randn(2, num_in))
        self.up = nn.Parameter(torch.zeros(num_out, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.low.T @ self.up.T


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(), nn.BatchNorm1d(64), Adapted(64, 2))


def make_state(model: nn.Module | None = None, *others: nn.Module) -> tuple[dict[str, Any], Step]:
    model = make_model() if model is None else model
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)

    def step() -> None:
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    state = {"model": model, "optimizer": optimizer, "data": {"batches": 0}}
    return state | {f"other{number}": one for number, one in enumerate(others)}, step


def manager_of(root: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    options = {"frozen": "by digest", "preflight": False} | options
    return holdfast.CheckpointManager(root, state, **options)


def recorded(checkpoint: str, component: str = "model") -> dict[str, str]:
    document = json.loads(Path(checkpoint, f"{component}-00000.json").read_bytes())
    found: dict[str, str] = document.get("frozen", {})
    assert not found.keys() & document["tree"].keys()
    return found


def manifest_of(checkpoint: str) -> Manifest:
    found = decode_register(Path(checkpoint, "manifest.json").read_bytes(), what="manifest")
    assert isinstance(found, Manifest)
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


BASE = {"0.base.weight", "0.base.bias", "2.base.weight", "2.base.bias"}


def save(manager: holdfast.CheckpointManager, step: int) -> str:
    return manager.save(step).wait().path


def test_a_run_of_an_adapter_resumes_exactly_and_its_base_is_in_no_checkpoint(
    tmp_path: Path,
) -> None:
    def train(root: Path, sessions: list[range]) -> tuple[dict[str, Tensor], str]:
        for steps in sessions:
            state, step = make_state()
            with manager_of(root, state) as manager:
                manager.resume()
                for number in steps:
                    step()
                    path = save(manager, number)
        return values(state["model"]), path

    whole, _ = train(tmp_path / "whole", [range(1, 7)])
    parts, path = train(tmp_path / "parts", [range(1, 3), range(3, 6), range(6, 7)])
    assert are_equal(whole, parts)
    assert recorded(path).keys() == BASE
    entry = manifest_of(path).components["model"]
    assert entry.frozen is not None
    assert (entry.frozen.num_tensors, entry.frozen.nbytes) == (4, 4 * (64 * 64 + 64 + 64 * 2 + 2))
    assert entry.num_tensors == len(parts) - 4
    assert b'"frozen"' in Path(path, "manifest.json").read_bytes().split(b"save_id")[0]


@pytest.mark.parametrize("load", ["resume", "load", "load_weights"])
def test_another_base_is_refused_and_strict_false_takes_it(tmp_path: Path, load: str) -> None:
    state, step = make_state()
    with manager_of(tmp_path, state) as manager:
        step()
        save(manager, 1)
    other, _ = make_state(make_model(seed=1))
    other["model"][2].base.load_state_dict(state["model"][2].base.state_dict())
    before = values(other["model"])
    with manager_of(tmp_path, other, frozen=None) as manager:

        def loaded(**options: Any) -> Any:
            if load == "load_weights":
                return holdfast.load_weights(tmp_path, other["model"], **options)
            return getattr(manager, load)(**options)

        with pytest.raises(MismatchError, match=r"model: 2 of 4 frozen .*0\.base\.weight"):
            loaded()
        assert are_equal(values(other["model"]), before)
        assert any("2 of 4 frozen" in note for note in loaded(strict=False).notes)
    assert torch.equal(other["model"][0].low, state["model"][0].low)
    assert not torch.equal(other["model"][0].base.weight, state["model"][0].base.weight)


def test_a_parameter_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    state, _ = make_state()
    with manager_of(tmp_path, state) as manager:
        save(manager, 1)
    model = nn.Sequential(*make_model()[:2], nn.Linear(64, 2))
    with pytest.raises(MismatchError, match=r"model\.2\.base\.weight"):
        holdfast.load_weights(tmp_path, model)


def change_in_place(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def change_uncounted(parameter: Tensor) -> None:
    parameter.data[0] += 1  # does not increase the version


def change_by_swapped_rows(parameter: Tensor) -> None:
    parameter.data.copy_(parameter.data.flip(0))


@pytest.mark.parametrize("change", [change_in_place, change_uncounted, change_by_swapped_rows])
def test_a_frozen_parameter_that_changes_is_saved_and_warned_of(
    tmp_path: Path, change: Callable[[Tensor], None], caplog: pytest.LogCaptureFixture
) -> None:
    state, step = make_state()
    with manager_of(tmp_path, state) as manager:
        manager.resume()
        assert recorded(save(manager, 1)).keys() == BASE
        change(state["model"][0].base.weight)
        step()
        assert recorded(save(manager, 2)).keys() == BASE - {"0.base.weight"}
    assert "model.0.base.weight (its value has changed)" in caplog.text
    again, _ = make_state()
    with manager_of(tmp_path, again) as manager:
        manager.resume()
        assert are_equal(values(again["model"]), values(state["model"]))
        # The script makes another value than the one that was loaded.
        assert recorded(save(manager, 3)).keys() == BASE - {"0.base.weight"}


def test_a_resized_name_that_is_recorded_by_digest_is_compared(tmp_path: Path) -> None:
    state, _ = make_state(nn.Sequential(Adapted(num_out=2)))
    with manager_of(tmp_path, state) as manager:
        save(manager, 1)
    again, _ = make_state(nn.Sequential(Adapted(num_out=3)))
    resize = {"model.0.base.weight": "rows", "model.0.up": "rows"}
    with (
        manager_of(tmp_path, again) as manager,
        pytest.raises(MismatchError, match=r"base\.weight"),
    ):
        manager.resume(resize=resize)


def test_layers_are_unfrozen_and_frozen_again(tmp_path: Path) -> None:
    def session(steps: range, is_frozen: bool) -> tuple[dict[str, Tensor], set[str]]:
        state, step = make_state()
        layer = state["model"][2].base.requires_grad_(not is_frozen)
        state["optimizer"].add_param_group({"params": [*layer.parameters()]})
        with manager_of(tmp_path, state) as manager:
            manager.resume()
            for number in steps:
                step()
                path = save(manager, number)
            # Frozen within the session: it has been trained, and has moments.
            layer.requires_grad_(False)
            layer.zero_grad()
            last = {*recorded(save(manager, number + 1))}
        assert is_frozen or {*recorded(path)} == last
        return values(state["model"]), last

    first, in_first = session(range(1, 3), is_frozen=True)
    second, in_second = session(range(4, 6), is_frozen=False)
    third, in_third = session(range(7, 9), is_frozen=True)
    assert in_first == BASE
    assert in_second == in_third == {"0.base.weight", "0.base.bias"}
    assert not torch.equal(first["2.base.weight"], second["2.base.weight"])
    assert torch.equal(second["2.base.weight"], third["2.base.weight"])


def test_a_run_switches_to_digests_and_back(tmp_path: Path) -> None:
    state, step = make_state()
    with manager_of(tmp_path, state, frozen=None) as manager:
        step()
        assert recorded(save(manager, 1)) == {}
    sizes = []
    for number, frozen in enumerate(["by digest", None, "by digest"], start=2):
        state, step = make_state()
        with manager_of(tmp_path, state, frozen=frozen) as manager:
            found = manager.resume()
            assert found is not None
            assert found.step == number - 1
            step()
            path = save(manager, number)
        assert {*recorded(path)} == (BASE if frozen else set())
        sizes.append(manifest_of(path).components["model"].nbytes)
    assert sizes[0] == sizes[2]
    assert sizes[1] - sizes[0] > 16_000
    with open_source(f"{tmp_path}@step=2") as a, open_source(f"{tmp_path}@step=3") as b:
        found = {one.tensor for one in compare_sources(a, b, ["model"]).tensors}
    assert "model:0.low" in found
    assert not any("base" in name for name in found)


def test_digests_are_computed_once_in_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    from holdfast.state import frozen

    compute = frozen._compute_digests

    def counted(tensors: Any) -> list[str]:
        hashed.append(len(tensors))
        return compute(tensors)

    monkeypatch.setattr(frozen, "_compute_digests", counted)
    for first in (1, 4):
        hashed.clear()
        state, step = make_state()
        with manager_of(tmp_path, state) as manager:
            manager.resume()
            for number in range(first, first + 3):
                step()
                save(manager, number)
        assert hashed == [4]


def test_an_average_of_the_model_is_saved_as_it_changes(tmp_path: Path) -> None:
    def average(model: nn.Module, into: nn.Module) -> None:
        for one, other in zip(into.parameters(), model.parameters(), strict=True):
            one.data.mul_(0.5).add_(other.data, alpha=0.5)

    def session(steps: range) -> tuple[dict[str, Tensor], str]:
        model = make_model()
        state, step = make_state(model, copy.deepcopy(model).requires_grad_(False))
        with manager_of(tmp_path, state) as manager:
            manager.resume()
            for number in steps:
                step()
                average(model, state["other0"])
                path = save(manager, number)
        return values(state["other0"]), path

    before, path = session(range(1, 3))
    assert {*recorded(path, "other0")} >= BASE
    assert not {"0.up", "2.up", "0.low"} & {*recorded(path, "other0")}
    state, _ = make_state(make_model(), copy.deepcopy(make_model()).requires_grad_(False))
    with manager_of(tmp_path, state) as manager:
        manager.resume()
        assert are_equal(values(state["other0"]), before)


def test_a_quantized_base_is_recorded_by_its_inner_tensors(tmp_path: Path) -> None:
    """QLoRA: a checkpoint is the adapter and its 8-bit moments, within 2% and the documents."""
    ao = import_torchao()

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        layer = Adapted(256, 256)
        packed = ao.nf4.nf4_tensor.to_nf4(layer.base.weight.detach())
        layer.base.weight = nn.Parameter(packed, requires_grad=False)
        layer.low, layer.up = (nn.Parameter(torch.randn(256, 256)) for _ in range(2))
        trained = [one for one in layer.parameters() if one.requires_grad]
        return {"model": layer, "optimizer": ao.optim.AdamW8bit(trained)}

    def train(state: dict[str, Any]) -> int:
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
            state["model"](torch.randn(4, 256)).square().sum().backward()
            state["optimizer"].step()
        slots = state["optimizer"].state.values()
        tensors = [*slots, {"low": state["model"].low, "up": state["model"].up}]
        return sum(part.nbytes for one in tensors for t in one.values() for part in plain_parts(t))

    state, again = make(0), make(0)
    with manager_of(tmp_path, state) as manager:
        nbytes = train(state)
        checkpoint = manager.save(1).wait()
    assert nbytes < checkpoint.nbytes < 1.02 * nbytes + 48_000
    text = recorded(checkpoint.path)["base.weight"]
    assert text.startswith("NF4Tensor [256,256] ")
    with manager_of(tmp_path, again) as manager:
        manager.resume()
        assert bits_in(again["model"]) == bits_in(state["model"])
        assert {*recorded(save(manager, 2))} == {"base.weight", "base.bias"}
    again = make(1)
    with manager_of(tmp_path, again) as manager, pytest.raises(MismatchError, match="2 of 2"):
        manager.resume()
    again["model"].base = nn.Linear(256, 256)
    with pytest.raises(MismatchError, match=r"base\.weight \(F32 \[256,256\] here, NF4Tensor"):
        holdfast.load_weights(tmp_path, again["model"])


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_layers_of_bitsandbytes_are_recorded_with_scales_and_settings(
    tmp_path: Path, kind: str, has_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def make(seed: int = 0, quantizer: str = kind, **changes: Any) -> tuple[dict[str, Any], Step]:
        model = new_model(quantizer, seed, **changes)
        if has_own:  # its loading code loads the whole model
            model[1].register_module("own", Loads(3, 4))
        return make_state(model)

    def train(root: Path, sessions: list[str | None]) -> tuple[nn.Module, list[str]]:
        paths = []
        for number, frozen in enumerate(sessions, start=1):
            state, step = make()
            with manager_of(root, state, frozen=frozen) as manager:
                manager.resume()
                step()
                paths.append(save(manager, number))
                step()
                manager.load()  # an int8 layer has moved its scales
        return state["model"], paths

    whole, _ = train(tmp_path / "whole", [None] * 4)
    parts, paths = train(tmp_path / "parts", ["by digest", None, "by digest", "by digest"])
    assert quantized_tensors(parts) == quantized_tensors(whole)
    assert are_equal(values(parts), values(whole))
    names = {name for name in parts.state_dict() if name.startswith("0.")} - {"0.bias"}
    assert len(names) == {"nf4": 6, "fp4": 4, "int8": 3}[kind]
    assert [{*recorded(path)} for path in paths] == [names, set(), names, names]
    assert "saved in full" not in caplog.text
    changes: list[dict[str, Any]] = [{"seed": 1}]
    if kind != "int8":
        changes += [{"quant_type": "fp4" if kind == "nf4" else "nf4"}]
        changes += [{"compress_statistics": kind != "nf4"}]
    for change in changes:
        state, _ = make(**change)
        before = bits_in(state["model"])
        with (
            manager_of(tmp_path / "parts", state) as manager,
            pytest.raises(MismatchError, match=r"(?s)frozen parameters.*0\.weight"),
        ):
            manager.resume()
        assert bits_in(state["model"]) == before


def test_settings_of_a_quantized_base_are_compared(tmp_path: Path) -> None:
    def make(**changes: Any) -> dict[str, Any]:
        return {"model": scaled_model(**changes)}

    with manager_of(tmp_path, make()) as manager:
        save(manager, 1)
    with manager_of(tmp_path, make()) as manager:
        manager.resume()
    for changes in ({"scale": 0.25}, {"mode": Mode.DOWN}, {"names": ("a", "b")}):
        with (
            manager_of(tmp_path, make(**changes)) as manager,
            pytest.raises(MismatchError, match=r"0\.weight"),
        ):
            manager.resume()


@pytest.mark.parametrize(("frozen", "trained"), [(None, False), (None, True), ("by digest", False)])
def test_digests_are_suggested_once_if_most_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: str | None, trained: bool
) -> None:
    monkeypatch.setattr(script_warnings, "SUGGESTED_NBYTES", 1000)
    state, _ = make_state()
    state["model"].requires_grad_(trained)
    events: list[Event] = []
    with manager_of(tmp_path, state, frozen=frozen, sinks=[events.append]) as manager:
        save(manager, 1)
        save(manager, 2)
    found = [event.message for event in events if event.kind == "frozen"]
    assert len(found) == (frozen is None and not trained)


def test_tied_and_shared_parameters_are_recorded_under_each_name(tmp_path: Path) -> None:
    def tied() -> dict[str, Any]:
        state, _ = make_state()
        shared = state["model"][0].base
        head = nn.Sequential(shared, shared, nn.Linear(64, 2))
        return state | {"head": head}

    state = tied()
    with manager_of(tmp_path, state) as manager:
        path = save(manager, 1)
    assert {"0.weight", "1.weight", "0.bias", "1.bias"} == {*recorded(path, "head")}
    assert recorded(path, "head")["1.weight"] == recorded(path)["0.base.weight"]
    again = tied()
    with manager_of(tmp_path, again) as manager:
        manager.resume()
    assert are_equal(values(again["head"]), values(state["head"]))


def test_buffers_are_saved_and_a_frozen_component_has_no_tensors(tmp_path: Path) -> None:
    teacher = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    state, _ = make_state(make_model(), teacher)
    with manager_of(tmp_path, state) as manager:
        path = save(manager, 1)
    assert {*recorded(path, "other0")} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert manifest_of(path).components["other0"].num_tensors == 3
    assert {"1.running_mean", "1.weight"}.isdisjoint(recorded(path))


def test_tools_name_what_they_lack(tmp_path: Path) -> None:
    state, _ = make_state()
    with manager_of(tmp_path, state) as manager:
        save(manager, 1)
    with pytest.raises(UsageError, match=r"4 frozen parameters.*digest"):
        holdfast.load_weights(tmp_path)
    assert {*holdfast.load_weights(tmp_path, skip=["model.*.base"])} == {
        name for name in state["model"].state_dict() if ".base." not in name
    }
    with pytest.raises(UsageError, match=r"4 frozen parameters.*digest"):
        export_checkpoint(tmp_path, tmp_path / "out", to="safetensors", components=["model"])
    with pytest.raises(UsageError, match="digest"):
        export_folder(tmp_path, tmp_path / "dcp")
    exported = export_checkpoint(
        tmp_path, tmp_path / "out", to="safetensors", components=["model"], allow_loss=True
    )
    assert {one.path for one in exported.left_out} >= {f"model.{name}" for name in BASE}


def test_a_hook_edits_a_checkpoint_with_digests(tmp_path: Path) -> None:
    def edit(view: Any) -> None:
        view["model"]["0.up"] = torch.ones(64, 2)

    state, _ = make_state()
    hooks = holdfast.StateHooks(edit_save=edit, edit_load=edit)
    with manager_of(tmp_path, state, hooks=hooks) as manager:
        assert recorded(save(manager, 1)).keys() == BASE
    other, _ = make_state(make_model(seed=1))
    with (
        manager_of(tmp_path, other, hooks=hooks) as manager,
        pytest.raises(MismatchError, match="4 of 4 frozen"),
    ):
        manager.resume()


def test_a_module_with_loading_code_of_its_own_gets_all_its_entries(tmp_path: Path) -> None:
    class Own(Adapted):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            assert state[prefix + "base.weight"].shape == (64, 64)
            super()._load_from_state_dict(state, prefix, *rest)

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        return {"model": Own()}

    state = make()
    with manager_of(tmp_path, state) as manager:
        change_in_place(state["model"].low)
        assert {*recorded(save(manager, 1))} == {"base.weight", "base.bias"}
    again = make()
    with manager_of(tmp_path, again) as manager:
        manager.resume()
    assert are_equal(values(again["model"]), values(state["model"]))


def test_sign_changes_of_doubles_change_the_checksum() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    wide, even = (torch.randn(rows, 8191, dtype=torch.float64) for rows in (3, 4))
    for one in (weight, wide, even):
        assert compute_checksums([one]) == compute_checksums([one.clone()])
        assert compute_checksums([one]) != compute_checksums([-one])
