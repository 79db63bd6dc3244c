"""The guard alone: who is held back, for how long, and what is found when somebody went past it."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from holdfast.errors import DeadlineExceeded, UsageError
from holdfast.staging import guard as guard_module
from holdfast.staging.guard import Overlapped, StepGuard, guard
from holdfast.staging.overlap import why_not_overlap
from holdfast.threads.workers import Workers

HOOKS: dict[int, Any] = torch_optimizer._global_optimizer_pre_hooks


@pytest.fixture
def step_guard() -> Iterator[StepGuard]:
    """A guard that watches, and gives up soon."""
    made = StepGuard(timeout_s=0.01)
    made.register_hook()
    yield made
    made.remove_hook()


def weights(number: int = 3) -> list[nn.Parameter]:
    """Parameters with gradients."""
    made = [nn.Parameter(torch.full((4,), float(i))) for i in range(number)]
    for parameter in made:
        parameter.grad = torch.ones(4)
    return made


class Held:
    """Copies that are made when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate = threading.Event()
        self._error = error

    def run_later(self) -> None:
        """See `Copies.run_later`."""
        assert self.gate.wait(60)
        if self._error is not None:
            raise self._error


def overlapped(
    parameters: list[nn.Parameter],
    *copies: Held,
    takes_samples: bool = False,
    places: dict[tuple[str, str], torch.Tensor] | None = None,
) -> Overlapped:
    """The copy of parameters, which ends when all of `copies` were made."""
    keys = {"model": tuple(map(str, range(len(parameters))))}
    guarded = guard(keys, [p.detach() for p in parameters], takes_samples=takes_samples)
    workers = Workers(len(copies), "test")
    turns = iter(copies)

    class Several:
        def run_later(self) -> None:
            next(turns).run_later()

    made = Overlapped(guarded, Several(), step=7, places=places)
    made.start_copying(workers, len(copies))
    workers.close_pool()
    return made


def ended(copy: Overlapped) -> BaseException | None:
    """What became of it."""
    return copy.copied.exception(timeout=60)


def test_a_step_waits_for_the_copy_and_says_so_when_it_takes_too_long(
    step_guard: StepGuard,
) -> None:
    """I9: the error says who waited for what."""
    parameters, held = weights(), Held()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    copy = overlapped(parameters, held)
    step_guard.hold_for(copy)
    with pytest.raises(DeadlineExceeded, match=r"step\(\) of SGD waits .* 3 tensors .* step 7"):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))
    held.gate.set()
    assert ended(copy) is None
    optimizer.step()
    assert not any(map(torch.equal, parameters, before))


def test_a_call_of_fence_waits_too(step_guard: StepGuard) -> None:
    held = Held()
    copy = overlapped(weights(), held)
    step_guard.hold_for(copy)
    with pytest.raises(DeadlineExceeded, match=r"fence\(\) waits"):
        step_guard.wait_before_change()
    held.gate.set()
    assert ended(copy) is None
    step_guard.wait_before_change()


def test_every_thread_of_the_copy_has_to_end_also_after_an_error(step_guard: StepGuard) -> None:
    failing, held = Held(MemoryError("no memory")), Held()
    copy = overlapped(weights(), failing, held)
    step_guard.hold_for(copy)
    failing.gate.set()
    with pytest.raises(DeadlineExceeded):
        step_guard.wait_before_change()
    held.gate.set()
    assert isinstance(ended(copy), MemoryError)
    step_guard.wait_before_change()


def test_a_copy_that_is_given_up_before_anybody_began_is_not_begun_later() -> None:
    """I2: the next save takes the same memory."""
    workers, release = Workers(1, "test"), threading.Event()
    workers.submit(lambda: release.wait(60))
    made: list[int] = []

    class Counted:
        def run_later(self) -> None:
            made.append(1)

    copy = Overlapped(guard({}, []), Counted(), step=7)
    (beside,) = copy.start_copying(workers, 2, (workers, lambda: "beside"))
    copy.cancel_copy(MemoryError("no memory"))
    release.set()
    assert isinstance(ended(copy), MemoryError)
    assert beside.result(60) == "beside"
    assert made == []
    workers.close_pool()


def test_a_step_after_the_copy_is_no_change(step_guard: StepGuard) -> None:
    """The tensors are compared when the copy ends, not when somebody asks."""
    parameters, held = weights(), Held()
    copy = overlapped(parameters, held)
    step_guard.hold_for(copy)
    held.gate.set()
    assert ended(copy) is None
    torch.optim.SGD(parameters, lr=1.0).step()
    assert ended(copy) is None


def test_a_change_before_the_copy_ended_is_found_and_named() -> None:
    parameters, held = weights(), Held()
    copy = overlapped(parameters, held)
    with torch.no_grad():
        parameters[1].add_(1)
    held.gate.set()
    error = ended(copy)
    assert isinstance(error, UsageError)
    assert "model.1 was changed" in str(error)
    assert "model.0" not in str(error)


def test_other_memory_is_found() -> None:
    parameters, held = weights(1), Held()
    copy = overlapped(parameters, held)
    parameters[0].untyped_storage().resize_(0)
    held.gate.set()
    assert "model.0 was given other memory" in str(ended(copy))


def test_samples_find_what_torch_does_not_count() -> None:
    parameters, held = weights(), Held()
    copy = overlapped(parameters, held, takes_samples=True)
    parameters[2].data.mul_(3)
    held.gate.set()
    assert "model.2 was changed, in a way that torch does not count" in str(ended(copy))


def test_samples_find_what_was_changed_and_changed_back() -> None:
    parameters, held, place = weights(1), Held(), torch.empty(4)
    places = {("model", "0"): place}
    copy = overlapped(parameters, held, takes_samples=True, places=places)
    parameters[0].data.add_(1)
    place.copy_(parameters[0].detach())
    parameters[0].data.sub_(1)
    held.gate.set()
    assert "model.0 was changed, and changed back" in str(ended(copy))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float64])
def test_samples_are_of_any_type_shape_and_stride(dtype: torch.dtype) -> None:
    for tensor in (torch.zeros(()), torch.zeros(0), torch.zeros(90, 100).t()):
        before = tensor.to(dtype)
        after = before.clone()
        assert guard_module.sampled(before) == guard_module.sampled(after)
        if after.numel():
            after[(0,) * after.dim()] = 1
            assert guard_module.sampled(before) != guard_module.sampled(after)


def test_tensors_live_until_the_copy_is_done_and_no_longer(step_guard: StepGuard) -> None:
    parameters, held = weights(1), Held()
    copy = overlapped(parameters, held)
    step_guard.hold_for(copy)
    seen = weakref.ref(copy._guarded.tensors[0])
    parameters[0].data = torch.zeros(4)
    gc.collect()
    assert seen() is not None
    held.gate.set()
    assert ended(copy) is None
    gc.collect()
    assert seen() is None


def test_several_threads_pass_once_the_copy_is_done() -> None:
    """Optimizers step in autograd's threads too."""
    step_guard = StepGuard(timeout_s=60.0)
    parameters, held = weights(8), Held()
    copy = overlapped(parameters, held)
    step_guard.register_hook()
    step_guard.hold_for(copy)
    waiting = [threading.Semaphore(0) for _ in parameters]

    def step(parameter: nn.Parameter, begun: threading.Semaphore) -> None:
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        begun.release()
        optimizer.step()

    threads = [
        threading.Thread(target=step, args=pair) for pair in zip(parameters, waiting, strict=True)
    ]
    for thread in threads:
        thread.start()
    for begun in waiting:
        begun.acquire()
    held.gate.set()
    for thread in threads:
        thread.join()
    step_guard.remove_hook()
    assert ended(copy) is None
    assert [parameter[0].item() for parameter in parameters] == [float(i - 1) for i in range(8)]


def test_a_closed_or_forgotten_guard_leaves_no_hook() -> None:
    before = set(HOOKS)
    closed, forgotten = StepGuard(timeout_s=1.0), StepGuard(timeout_s=1.0)
    for step_guard in (closed, forgotten):
        step_guard.register_hook()
        step_guard.register_hook()
    assert len(HOOKS) == len(before) + 2
    closed.remove_hook()
    del step_guard, forgotten
    gc.collect()
    assert set(HOOKS) == before


def test_a_guard_that_is_closed_during_a_copy_still_holds() -> None:
    """The save that was given up may commit yet."""
    before, step_guard = set(HOOKS), StepGuard(timeout_s=0.01)
    parameters, held = weights(), Held()
    copy = overlapped(parameters, held)
    step_guard.register_hook()
    step_guard.hold_for(copy)
    step_guard.remove_hook()
    with pytest.raises(DeadlineExceeded):
        torch.optim.SGD(parameters, lr=1.0).step()
    held.gate.set()
    assert ended(copy) is None
    step_guard.remove_hook()
    assert set(HOOKS) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_not_held_back(step_guard: StepGuard) -> None:
    """It has none of the threads that copy, and memory of its own."""
    parameters, held = weights(), Held()
    step_guard.hold_for(overlapped(parameters, held))
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    child = multiprocessing.get_context("fork").Process(target=optimizer.step)
    child.start()
    child.join(60)
    held.gate.set()
    assert child.exitcode == 0


def test_a_captured_step_is_let_through_and_remembered(
    step_guard: StepGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may wait while a graph is captured, and its replays call no hook."""
    parameters, held = weights(), Held()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    assert why_not_overlap({"optimizer": optimizer}, step_guard) is None
    step_guard.hold_for(overlapped(parameters, held))
    monkeypatch.setattr(guard_module, "is_capturing", lambda: True)
    optimizer.step()
    monkeypatch.undo()
    held.gate.set()
    assert "CUDA graph" in (why_not_overlap({"optimizer": optimizer}, step_guard) or "")


class Foreign:
    """An optimizer that is not torch's."""

    param_groups: tuple[Any, ...] = ()

    def step(self) -> None:
        """Change weights."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class Unhooked(torch.optim.SGD):
    """An optimizer whose step was put in the place of the one with hooks."""


def test_overlap_is_refused_where_steps_call_no_hooks() -> None:
    step_guard = StepGuard(timeout_s=1.0)
    assert "not torch's" in (why_not_overlap({"mine": Foreign()}, step_guard) or "")
    unhooked = Unhooked(weights(), lr=1.0)
    assert why_not_overlap({"optimizer": unhooked}, step_guard) is None
    Unhooked.step = lambda self, closure=None: None  # type: ignore[assignment]
    assert "calls no hooks" in (why_not_overlap({"optimizer": unhooked}, step_guard) or "")
    capturable = torch.optim.Adam(weights(), capturable=True)
    assert "replayed" in (why_not_overlap({"optimizer": capturable}, step_guard) or "")
