"""Saves that overlap with training hold the state of the save, to the bit, or never commit."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import warm
from holdfast.errors import DeadlineExceeded, SaveFailed, UsageError
from holdfast.manager import CheckpointManager
from holdfast.results import PendingSave
from holdfast.saving import saver as saver_module
from holdfast.session import Session
from holdfast.staging import arena, guard, in_memory
from holdfast.staging.in_memory import ImageTransfer
from holdfast.staging.overlap import Mode
from marks import full
from runs import Recorder

State = dict[str, Any]


class Gate:
    """Holds back the copies that are made beside training."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.was_asked = threading.Event()
        """Whether somebody was held back by the fence, or went on without it."""

    def open(self) -> None:
        """Let them be made, those of later saves too."""
        self._opened.set()

    def close(self) -> None:
        """Hold them back again."""
        self._opened.clear()

    def go_through(self) -> None:
        """Wait for it to open."""
        assert self._opened.wait(60), "the gate was never opened"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A closed gate; every tensor of some bytes counts as large."""
    made, run_later, wait = (
        Gate(),
        in_memory.ImageTransfer.run_later,
        guard.StepGuard.wait_before_change,
    )

    def held(self: in_memory.ImageTransfer) -> None:
        made.go_through()
        run_later(self)

    def noted(self: guard.StepGuard, who: str = "fence()") -> None:
        if self._overlapped is not None:
            made.was_asked.set()
        wait(self, who)

    monkeypatch.setattr(in_memory.ImageTransfer, "run_later", held)
    monkeypatch.setattr(guard.StepGuard, "wait_before_change", noted)
    monkeypatch.setattr(arena, "LARGE_NBYTES", 64)
    monkeypatch.setattr("holdfast.staging.overlap.LARGE_NBYTES", 64)
    yield made
    made.open()


def bits(state: State) -> dict[str, bytes]:
    """Every tensor of modules and optimizers, and the plain rest, as bytes."""
    found: dict[str, bytes] = {}
    for name, value in state.items():
        content = value.state_dict() if hasattr(value, "state_dict") else value
        for path, leaf in leaves(content, name):
            found[path] = (
                leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                if isinstance(leaf, Tensor)
                else repr(leaf).encode()
            )
    return found


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested state."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}.{i}")
    else:
        yield path, value


def new_model(seed: int = 0) -> nn.Module:
    """Weights, and statistics that every forward pass changes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8))


def backward(model: nn.Module) -> None:
    """A forward and a backward pass, which change statistics and gradients."""
    model(torch.randn(16, 8)).square().mean().backward()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """One step of each optimizer."""
    backward(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def stored(root: Path, like: State, which: str | int = "latest") -> dict[str, bytes]:
    """The bits of a checkpoint, loaded into a copy of the state."""
    fresh = copy.deepcopy(like)
    with CheckpointManager(root, fresh) as manager:
        manager.load(which)
    return bits(fresh)


SAVES_BEFORE = pytest.mark.parametrize("saves_before", [0, 1], ids=["first", "later"])
"""From the second save on it is known where the tensors lie, and small ones overlap too."""


def check(
    root: Path,
    gate: Gate,
    state: State,
    change: Callable[[], None],
    *,
    overlap: Mode = True,
    saves_before: int = 0,
) -> None:
    """Save, change the state as soon as it lets itself be changed, and compare what was stored."""
    with CheckpointManager(root, state, overlap=overlap) as manager:
        gate.open()
        for step in range(-saves_before, 0):
            manager.save(1 + step).wait()
        gate.close()
        before = bits(state)
        pending = manager.save(1)
        assert not pending.staged.done(), "nothing overlaps"
        changing = Changing(gate, change)
        changing.begin()
        gate.open()
        changing.end()
        pending.wait()
        after = bits(state)
    assert before != after
    assert stored(root, state) == before


class Changing:
    """A change in a thread of its own, that is made before the copy unless it is held back."""

    def __init__(self, gate: Gate, change: Callable[[], None]) -> None:
        self._gate = gate
        self._change = change
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        """Return when the change is held back, or was made."""
        self._gate.was_asked.clear()
        self._thread.start()
        assert self._gate.was_asked.wait(60)

    def end(self) -> None:
        """Return when it was made."""
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._change()
        except BaseException as error:
            self._error = error
        finally:
            self._gate.was_asked.set()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}],
    ids=str,
)
@SAVES_BEFORE
def test_a_step_waits_until_its_tensors_are_copied(
    tmp_path: Path, gate: Gate, options: dict[str, Any], saves_before: int
) -> None:
    """R14, with overlap: also of kernels whose changes torch does not count."""
    model = new_model()
    optimizer = adam(model, **options)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    change = partial(train, model, optimizer)
    if saves_before:
        change()
    check(tmp_path, gate, state, change, saves_before=saves_before)


@SAVES_BEFORE
def test_small_tensors_that_are_changed_behind_the_fence_fail_the_save(
    tmp_path: Path, gate: Gate, saves_before: int
) -> None:
    """Where they overlap; else they were copied, and the save is sound."""
    model = new_model()
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    bias: Tensor = model[3].bias  # type: ignore[index,assignment]
    assert bias.nbytes < arena.LARGE_NBYTES
    with CheckpointManager(tmp_path, state, overlap=True) as manager:
        gate.open()
        for step in range(saves_before):
            manager.save(step).wait()
        gate.close()
        before = bits(state)
        pending = manager.save(1)
        with torch.no_grad():
            bias.add_(1)
        gate.open()
        if saves_before:
            with pytest.raises(SaveFailed, match=r"model\.3\.bias was changed"):
                pending.wait()
        else:
            pending.wait()
            assert stored(tmp_path, state) == before


@SAVES_BEFORE
def test_several_optimizers_and_one_that_is_made_later(
    tmp_path: Path, gate: Gate, saves_before: int
) -> None:
    model = new_model()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
    second = adam(model[3])  # type: ignore[index]
    train(model, first, second)
    state = {"model": model, "first": first, "second": second}

    def change() -> None:
        late = torch.optim.Adagrad(model.parameters(), lr=0.1)
        train(model, late, second, first)

    check(tmp_path, gate, state, change, saves_before=saves_before)


@SAVES_BEFORE
def test_an_optimizer_in_the_backward_pass(tmp_path: Path, gate: Gate, saves_before: int) -> None:
    """Each weight has an optimizer of its own, whose step is a hook of the backward pass."""
    model = new_model()
    optimizers = {name: adam(nn.ParameterList([p])) for name, p in model.named_parameters()}
    by_id = {id(p): optimizers[name] for name, p in model.named_parameters()}

    def step(parameter: Tensor) -> None:
        by_id[id(parameter)].step()
        by_id[id(parameter)].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    backward(model)
    state = {"model": model}
    state |= {f"o-{name.replace('.', '-')}": one for name, one in optimizers.items()}
    if saves_before:
        backward(model)
    check(tmp_path, gate, state, lambda: backward(model), saves_before=saves_before)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where inductor puts what it compiles, which torch keeps loaded in this process."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", *full("aot_eager", "inductor")])
@pytest.mark.parametrize("is_compiled_before", [True, False], ids=["before", "after"])
def test_a_compiled_step(
    tmp_path: Path,
    compiled: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    is_compiled_before: bool,
    backend: str,
) -> None:
    """Compiled, and run, before the manager is made, or after; also by what writes all that a step
    changes at its end, and to machine code where there is a compiler for it."""
    options: dict[str, Any] = {}
    if backend == "inductor":
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            pytest.skip("there is no C++ compiler, which inductor needs")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        options["options"] = {"compile_threads": 1}  # in this process
    torch.compiler.reset()
    model = new_model()
    optimizer = adam(model)
    step = torch.compile(optimizer.step, backend=backend, **options)

    def change() -> None:
        backward(model)
        step()

    if is_compiled_before:
        change()
    else:
        train(model, optimizer)
    check(tmp_path, gate, {"model": model, "optimizer": optimizer}, change)
    assert backend != "inductor" or any(compiled.rglob("*.so")), "it was not compiled"
    torch.compiler.reset()


def test_a_scaler_that_skips_a_step(tmp_path: Path, gate: Gate) -> None:
    """Its own state changes without any step, and is staged first."""
    model = new_model()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def change(factor: float) -> None:
        scaler.scale(model(torch.randn(16, 8)).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    change(1.0)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    with CheckpointManager(tmp_path, state, overlap=True) as manager:
        before = bits(state)
        pending = manager.save(1)
        change(float("inf"))  # skipped, so nobody waits
        assert not pending.staged.done()
        assert bits(state)["scaler.scale"] != before["scaler.scale"]
        changing = Changing(gate, lambda: change(1.0))
        changing.begin()
        gate.open()
        changing.end()
        pending.wait()
    assert stored(tmp_path, state) == before


def test_statistics_and_a_tensor_rate_are_staged_before_save_returns(
    tmp_path: Path, gate: Gate
) -> None:
    model = new_model()
    rate, rates = torch.tensor(0.1), torch.full((64,), 0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer.param_groups[0]["rates"] = rates  # as large as what overlaps
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "tree": {"x": torch.zeros(64)}}
    with CheckpointManager(tmp_path, state, overlap=True) as manager:
        before = bits(state)
        pending = manager.save(1)
        backward(model)
        rate.mul_(0.5)
        rates.mul_(0.5)
        state["tree"]["x"].add_(1)
        torch.randn(3)
        assert not pending.staged.done()
        gate.open()
        pending.wait()
    assert stored(tmp_path, state) == before


def swap_in(model: nn.Module, average: nn.Module) -> None:
    """What evaluations with averaged weights do; torch does not count it."""
    for weight, mean in zip(model.parameters(), average.parameters(), strict=True):
        weight.data.copy_(mean.data)


@pytest.mark.parametrize("overlap", [True, "check"])
def test_averages_that_are_swapped_in_behind_the_fence(
    tmp_path: Path, gate: Gate, overlap: Mode
) -> None:
    model, average = new_model(), new_model(1)
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "ema": average}
    with CheckpointManager(tmp_path, state, overlap=overlap) as manager:
        before = bits(state)
        pending = manager.save(1)

        def change() -> None:
            manager.fence()
            swap_in(model, average)

        changing = Changing(gate, change)
        changing.begin()
        gate.open()
        changing.end()
        pending.wait()
        assert bits(state) != before
    assert stored(tmp_path, state) == before


def test_averages_swapped_in_without_the_fence_are_found_by_the_check(
    tmp_path: Path, gate: Gate
) -> None:
    """Such a save never commits, and says what to do."""
    model, average = new_model(), new_model(1)
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "ema": average}
    with CheckpointManager(tmp_path, state, overlap="check", on_failure="warn") as manager:
        pending = manager.save(1)
        swap_in(model, average)
        gate.open()
        with pytest.raises(SaveFailed, match=r"call fence\(\)(.|\n)*model\.0\.weight was changed"):
            pending.wait()
        assert manager.list() == ()
        manager.save(2).wait()
    assert stored(tmp_path, state) == bits(state)


def test_a_counted_change_without_the_fence_fails_the_save(tmp_path: Path, gate: Gate) -> None:
    model = new_model()
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, state, overlap=True, on_failure="warn") as manager:
        pending = manager.save(1)
        with torch.no_grad():
            optimizer.state[model[0].weight]["exp_avg"].zero_()  # type: ignore[index]
        gate.open()
        with pytest.raises(SaveFailed, match=r"optimizer\.0\.weight\.exp_avg was changed"):
            pending.wait()
        assert isinstance(pending.staged.exception(), UsageError)
        assert manager.list() == ()


def test_a_weight_that_is_given_other_memory_is_saved_as_it_was(tmp_path: Path, gate: Gate) -> None:
    """The copy holds the memory of the save."""
    model = new_model()
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, state, overlap="check") as manager:
        before = bits(state)
        pending = manager.save(1)
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
        optimizer.state.clear()
        gate.open()
        pending.wait()
    fresh = new_model(3)
    again = {"model": fresh, "optimizer": adam(fresh)}
    with CheckpointManager(tmp_path, again) as manager:
        manager.load()
    assert bits(again) == before


def test_a_load_waits_for_the_copy_of_the_save_before(tmp_path: Path, gate: Gate) -> None:
    model = new_model()
    optimizer = adam(model)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, state, overlap=True) as manager:
        gate.open()
        manager.save(1).wait()
        first = bits(state)
        train(model, optimizer)
        before = bits(state)
        second = manager.save(2)
        manager.load(1)
        assert bits(state) == first
    assert stored(tmp_path, state, second.wait().folder) == before


def test_a_step_that_waits_too_long_says_for_what(tmp_path: Path, gate: Gate) -> None:
    """I9."""
    model = new_model()
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    manager = CheckpointManager(tmp_path, state, overlap=True, save_timeout_s=0.5)
    manager.save(1)
    backward(model)
    with pytest.raises(DeadlineExceeded, match=r"step\(\) of AdamW .* save of step 1"):
        optimizer.step()
    gate.open()
    with suppress(SaveFailed):  # its own wait may be over too
        manager.close()


def test_a_save_that_failed_leaves_no_copy_under_way(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: the next save takes the same memory."""
    model = new_model()
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, state, overlap=True, on_failure="warn") as manager:
        with monkeypatch.context() as broken:
            broken.setattr("holdfast.saving.saver.write", refuse)
            pending = manager.save(1)
            assert not pending.done()
            gate.open()
            with pytest.raises(SaveFailed, match="no space"):
                pending.wait()
            assert pending.staged.done()
        train(model, optimizer)
        before = bits(state)
        manager.save(2).wait()
    assert stored(tmp_path, state) == before


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("broken", ["background", "copy"])
def test_whoever_waits_for_a_save_that_cannot_begin_hears_why(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, overlap: bool, broken: str
) -> None:
    """I2, I9: the machine gives no thread for what writes, or the copy fails."""
    gate.open()
    model = new_model()
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    pendings: list[PendingSave] = []
    monkeypatch.setattr("holdfast.saving.saver.PendingSave", noting(pendings))
    with CheckpointManager(tmp_path, state, overlap=overlap, on_failure="warn") as manager:
        with monkeypatch.context() as breaking:
            if broken == "copy":
                breaking.setattr(ImageTransfer, "run_copies", refuse)
            else:
                breaking.setattr(threading.Thread, "start", all_but("holdfast-save-0"))
            with pytest.raises((OSError, RuntimeError), match=r"no space|no thread"):
                manager.save(1)
        (pending,) = pendings
        assert pending.staged.exception(timeout=120) or (overlap and broken == "background")
        assert isinstance(pending.committed.exception(timeout=120), SaveFailed)
        manager.fence()
        train(model, optimizer)
        before = bits(state)
        manager.save(2).wait()
        assert [entry.step for entry in manager.list()] == [2]
    assert stored(tmp_path, state) == before


def noting(seen: list[PendingSave]) -> Callable[..., PendingSave]:
    """A constructor that keeps what it makes."""

    def make(*args: Any, **options: Any) -> PendingSave:
        seen.append(PendingSave(*args, **options))
        return seen[-1]

    return make


def all_but(name: str) -> Callable[[threading.Thread], None]:
    """A `Thread.start` that cannot start the thread of this name."""
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("no thread to be had")
        begin(thread)

    return start


def refuse(*_: Any, **__: Any) -> None:
    """A store that takes nothing."""
    raise OSError("no space")


class Foreign:
    """An optimizer that is not torch's, and changes weights without hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.param_groups = [{"params": list(model.parameters())}]

    def step(self) -> None:
        """Change all weights."""
        for parameter in self._model.parameters():
            parameter.data.add_(1)

    def state_dict(self) -> dict[str, Any]:
        """It has none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It has none."""


def test_beside_a_foreign_optimizer_nothing_overlaps_and_an_event_says_why_once(
    tmp_path: Path, gate: Gate
) -> None:
    model, recorder = new_model(), Recorder()
    foreign, optimizer = Foreign(model), adam(model)
    state = {"model": model, "foreign": foreign, "optimizer": optimizer}
    with CheckpointManager(tmp_path, state, overlap=True, sinks=[recorder]) as manager:
        for step in (1, 2):
            pending = manager.save(step)
            assert pending.staged.done()
            before = bits({"model": model})
            foreign.step()
            pending.wait()
    assert [event.message for event in recorder.of("warning")] == [
        "saves do not overlap with training: foreign is an optimizer that is not torch's, so no "
        "hook sees its steps"
    ]
    fresh = new_model(4)
    with CheckpointManager(tmp_path, {"model": fresh}) as manager:
        manager.load(components=["model"])
    assert bits({"model": fresh}) == before


def test_without_overlap_everything_is_staged_when_save_returns(tmp_path: Path, gate: Gate) -> None:
    model = new_model()
    optimizer = adam(model)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        assert manager.save(1).staged.done()
        manager.fence()


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="overlap='always': must be one of"):
        CheckpointManager(tmp_path, {"model": new_model()}, overlap="always")  # type: ignore[arg-type]


def test_what_a_hook_replaces_in_the_checkpoint_does_not_overlap(
    tmp_path: Path, gate: Gate
) -> None:
    """What an edit assigns may be anything, and is staged at once."""
    from holdfast.checkpoints import StateHooks

    model = new_model()
    optimizer = adam(model)
    train(model, optimizer)
    stand_in = torch.zeros(32, 8)

    def edit(view: Any) -> None:
        view["model"]["0.weight"] = stand_in

    state = {"model": model, "optimizer": optimizer}
    hooks = StateHooks(edit_save=edit)
    with CheckpointManager(tmp_path, state, overlap="check", hooks=hooks) as manager:
        before = bits(state)
        pending = manager.save(1)
        stand_in.add_(1)
        gate.open()
        pending.wait()
    before["model.0.weight"] = bytes(32 * 8 * 4)
    assert stored(tmp_path, state) == before


def test_saves_one_after_the_other_hold_each_its_own_state(tmp_path: Path, gate: Gate) -> None:
    """Arenas are used again as soon as, and not before, the save before is done."""
    gate.open()
    model = new_model()
    optimizer = adam(model)
    state = {"model": model, "optimizer": optimizer}
    expected = []
    with CheckpointManager(tmp_path, state, overlap="check") as manager:
        for step in range(1, 7):
            train(model, optimizer)
            expected.append(bits(state))
            manager.save(step)
        manager.wait()
    for step, wanted in enumerate(expected, start=1):
        assert stored(tmp_path, state, step) == wanted


class Sizes:
    """A component with code of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"large": torch.arange(64.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("overlap", [False, True])
def test_tied_strided_frozen_and_moved_tensors_are_saved_again_and_again(
    tmp_path: Path, gate: Gate, overlap: bool
) -> None:
    """Whether a tensor is a run of bytes, and where, is that of the save and not of one before."""
    gate.open()
    model = new_model()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(8, 32))
    model[4].weight = model[0].weight
    optimizer = adam(model)
    state = {"model": model, "optimizer": optimizer, "table": {"t": torch.rand(32, 4)}}
    state["sizes"] = Sizes()
    expected = []

    def strided(_: int) -> None:
        state["table"]["t"] = torch.rand(4, 32).t()

    def moved(step: int) -> None:
        weight = model[3].weight
        weight.data = torch.full_like(weight, float(step))

    def transposed(_: int) -> None:
        state["table"]["t"].t_()
        state["table"]["t"].t_()
        slots = optimizer.state[model[3].weight]
        slots["exp_avg"].data = slots["exp_avg"].data.t().contiguous().t()

    changes = [lambda _: None, lambda _: None, strided, moved, moved, transposed, lambda _: None]
    with CheckpointManager(tmp_path, state, overlap=overlap) as manager:
        for step, change in enumerate(changes, start=1):
            manager.wait()
            train(model, optimizer)
            change(step)
            expected.append(bits(state))
            manager.save(step)
    for step, wanted in enumerate(expected, start=1):
        assert stored(tmp_path, state, step) == wanted, step


def test_a_weight_of_inference_mode_is_staged_before_save_returns(
    tmp_path: Path, gate: Gate
) -> None:
    """Torch counts none of its changes."""
    gate.open()
    model, table = new_model(), nn.Linear(8, 32)
    with torch.inference_mode():
        table.weight.data = torch.rand(32, 8)
        unversioned = nn.Parameter(torch.rand(32, 8), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), unversioned], lr=0.1)
    model.register_parameter("unversioned", unversioned)
    state = {"model": model, "table": table, "optimizer": optimizer}
    with CheckpointManager(tmp_path, state, overlap=True) as manager:
        for step in range(1, 4):
            train(model, optimizer)
            wanted = bits(state)
            manager.save(step).wait()
            assert stored(tmp_path, state, step) == wanted


def test_a_slot_that_is_given_other_memory_while_it_is_copied_fails_the_save_alone(
    tmp_path: Path,
) -> None:
    """Its old memory stays until then: who reads there by address would end the process."""
    code = f"""
import threading, torch
from holdfast.staging import in_memory
from holdfast.errors import SaveFailed
from holdfast.manager import CheckpointManager

model = torch.nn.Linear(2000, 4000)
optimizer = torch.optim.Adam(model.parameters())
go, run_later = threading.Event(), in_memory.ImageTransfer.run_later

def held(self):
    go.wait(60)
    run_later(self)

in_memory.ImageTransfer.run_later = held
state = {{"model": model, "optimizer": optimizer}}
manager = CheckpointManager({str(tmp_path)!r}, state, overlap=True)
for step in (1, 2):
    model(torch.rand(2, 2000)).sum().backward()
    optimizer.step()
    pending = manager.save(step)
    if step == 2:
        for slots in optimizer.state.values():
            slots["exp_avg"].data = slots["exp_avg"].data.clone()
    go.set()
    try:
        pending.wait()
    except SaveFailed as error:
        print(step, "was given other memory" in str(error))
    if step == 1:
        manager.fence()  # each thread that copies has come through
        go.clear()
manager.close()
"""
    done = warm.run(["-c", code])
    assert (done.returncode, done.stdout) == (0, "2 True\n"), done.stderr


@pytest.mark.parametrize("is_queued", [False, True])
def test_an_interrupt_while_a_save_is_handed_over_leaves_each_save_its_own_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_queued: bool
) -> None:
    """I2, I3: who catches it and saves at once must not overwrite what is still being written."""
    model = new_model()
    optimizer = adam(model)
    state = {"model": model, "optimizer": optimizer}
    hand_over, write = guard.hand_over, saver_module.write
    is_writing, may_write = threading.Event(), threading.Event()

    def interrupted(*jobs: Any) -> Any:
        if is_queued:
            hand_over(*jobs)
            assert is_writing.wait(60)
        raise KeyboardInterrupt

    def held(*args: Any, **options: Any) -> Any:
        is_writing.set()
        assert may_write.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(saver_module, "write", held)
    monkeypatch.setattr("holdfast.staging.overlap.LARGE_NBYTES", 64)
    monkeypatch.setattr(arena, "LARGE_NBYTES", 64)
    with CheckpointManager(tmp_path, state, overlap=True) as manager:
        train(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(guard, "hand_over", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.save(1)
        pending = manager._session.saver.pending
        assert pending is not None
        assert pending.done() is not is_queued
        may_write.set()
        train(model, optimizer)
        wanted = bits(state)
        assert manager.save(2).wait().step == 2
    assert stored(tmp_path, state, 2) == wanted


def test_what_was_captured_is_freed_before_any_thread_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free tensors offers the interpreter to others, and one that copies keeps it. Those that
    overlap are held by their copy."""
    captured: list[weakref.ref[Tensor]] = []
    freed: list[bool] = []
    real = Session.capture, saver_module.Saver.start_save

    def capture(session: Session, *args: Any) -> Any:
        found = real[0](session, *args)
        captured.append(weakref.ref(found.components["model"].tensors["running_mean"]))
        return found

    def start(saver: saver_module.Saver, *args: Any) -> PendingSave:
        freed.append(captured[-1]() is None)
        return real[1](saver, *args)

    monkeypatch.setattr(Session, "capture", capture)
    monkeypatch.setattr(saver_module.Saver, "start_save", start)
    model = nn.BatchNorm1d(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path / "run", state, overlap=True, sinks=()) as manager:
        for step in (1, 2):
            manager.save(step).wait()
    assert freed == [True, True]
