"""The fence alone: who is held back, for how long, and what is found when somebody went past it."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from holdfast.engine import fence as fence_module
from holdfast.engine.fence import Copying, Fence, guard
from holdfast.engine.overlap import why_not
from holdfast.errors import DeadlineExceeded, UsageError

HOOKS: dict[int, Any] = torch_optimizer._global_optimizer_pre_hooks


@pytest.fixture
def fence() -> Iterator[Fence]:
    """A fence that watches, and gives up soon."""
    made = Fence(timeout_s=0.01)
    made.watch()
    yield made
    made.close()


def weights(number: int = 3) -> list[nn.Parameter]:
    """Parameters with gradients."""
    made = [nn.Parameter(torch.full((4,), float(i))) for i in range(number)]
    for parameter in made:
        parameter.grad = torch.ones(4)
    return made


def copying(
    parameters: list[nn.Parameter], *jobs: Future[None], takes_samples: bool = False
) -> Copying:
    """The copy of parameters by jobs that the test ends."""
    named = [("model", str(i), parameter.detach()) for i, parameter in enumerate(parameters)]
    return Copying(guard(named, takes_samples=takes_samples), jobs, step=7)


def test_a_step_waits_for_the_copy_and_says_so_when_it_takes_too_long(fence: Fence) -> None:
    """I9: the error says who waited for what."""
    parameters, job = weights(), Future[None]()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    fence.put_up(copying(parameters, job))
    with pytest.raises(DeadlineExceeded, match=r"step\(\) of SGD waits .* 3 tensors .* step 7"):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))
    job.set_result(None)
    optimizer.step()
    assert not any(map(torch.equal, parameters, before))


def test_a_call_of_fence_waits_too(fence: Fence) -> None:
    job = Future[None]()
    fence.put_up(copying(weights(), job))
    with pytest.raises(DeadlineExceeded, match=r"fence\(\) waits"):
        fence.wait()
    job.set_result(None)
    fence.wait()


def test_every_job_of_the_copy_has_to_end(fence: Fence) -> None:
    done, open_job = Future[None](), Future[None]()
    done.set_exception(OSError("no"))
    fence.put_up(copying(weights(), done, open_job))
    with pytest.raises(DeadlineExceeded):
        fence.wait()
    open_job.set_result(None)
    fence.wait()


def test_a_step_past_the_fence_is_no_change(fence: Fence) -> None:
    """The tensors are compared before the first one may change them, not when somebody asks."""
    parameters, job = weights(), Future[None]()
    copy = copying(parameters, job)
    fence.put_up(copy)
    job.set_result(None)
    torch.optim.SGD(parameters, lr=1.0).step()
    copy.finish(1.0)


def test_a_change_before_the_copy_ended_is_found_and_named() -> None:
    parameters, job = weights(), Future[None]()
    copy = copying(parameters, job)
    with torch.no_grad():
        parameters[1].add_(1)
    job.set_result(None)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"model\.1 was changed") as caught:
            copy.finish(1.0)
        assert "model.0" not in str(caught.value)


def test_other_memory_is_found() -> None:
    parameters, job = weights(), Future[None]()
    named = [("model", "a", parameters[0].detach())]
    copy = Copying(guard(named), [job], step=7)
    named[0][2].untyped_storage().resize_(0)
    job.set_result(None)
    with pytest.raises(UsageError, match=r"model\.a was given other memory"):
        copy.finish(1.0)


def test_samples_find_what_torch_does_not_count() -> None:
    parameters, job = weights(), Future[None]()
    copy = copying(parameters, job, takes_samples=True)
    parameters[2].data.mul_(3)
    job.set_result(None)
    with pytest.raises(UsageError, match=r"model\.2 was changed, in a way that torch does not"):
        copy.finish(1.0)


def test_samples_find_what_was_changed_and_changed_back() -> None:
    parameters, job = weights(1), Future[None]()
    named = [("model", "a", parameters[0].detach())]
    copied = torch.empty(4)
    copy = Copying(guard(named, takes_samples=True), [job], step=7, copies={("model", "a"): copied})
    parameters[0].data.add_(1)
    copied.copy_(parameters[0].detach())
    parameters[0].data.sub_(1)
    job.set_result(None)
    with pytest.raises(UsageError, match=r"model\.a was changed, and changed back"):
        copy.finish(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float64])
def test_samples_are_of_any_type_shape_and_stride(dtype: torch.dtype) -> None:
    for tensor in (torch.zeros(()), torch.zeros(0), torch.zeros(90, 100).t()):
        before = tensor.to(dtype)
        after = before.clone()
        assert fence_module.sampled(before) == fence_module.sampled(after)
        if after.numel():
            after[(0,) * after.dim()] = 1
            assert fence_module.sampled(before) != fence_module.sampled(after)


def test_the_error_of_a_copy_is_raised() -> None:
    job = Future[None]()
    copy = copying(weights(), job)
    job.set_exception(MemoryError("no memory"))
    with pytest.raises(MemoryError):
        copy.finish(1.0)


def test_tensors_live_until_the_copy_is_done_and_no_longer(fence: Fence) -> None:
    parameters, job = weights(1), Future[None]()
    copy = copying(parameters, job)
    fence.put_up(copy)
    seen = weakref.ref(copy._guarded[0].tensor)
    parameters[0].data = torch.zeros(4)
    gc.collect()
    assert seen() is not None
    job.set_result(None)
    copy.finish(1.0)
    assert seen() is None


def test_several_threads_pass_once_the_copy_is_done() -> None:
    """Optimizers step in autograd's threads too."""
    fence = Fence(timeout_s=60.0)
    parameters, job = weights(8), Future[None]()
    copy = copying(parameters, job)
    fence.watch()
    fence.put_up(copy)
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
    job.set_result(None)
    for thread in threads:
        thread.join()
    fence.close()
    copy.finish(1.0)
    assert [parameter[0].item() for parameter in parameters] == [float(i - 1) for i in range(8)]


def test_a_closed_or_forgotten_fence_leaves_no_hook() -> None:
    before = set(HOOKS)
    closed, forgotten = Fence(timeout_s=1.0), Fence(timeout_s=1.0)
    for fence in (closed, forgotten):
        fence.watch()
        fence.watch()
    assert len(HOOKS) == len(before) + 2
    closed.close()
    del fence, forgotten
    gc.collect()
    assert set(HOOKS) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_not_held_back(fence: Fence) -> None:
    """It has none of the threads that copy, and memory of its own."""
    parameters = weights()
    fence.put_up(copying(parameters, Future[None]()))
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    child = multiprocessing.get_context("fork").Process(target=optimizer.step)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_captured_step_is_let_through_and_remembered(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may wait while a graph is captured, and its replays call no hook."""
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    assert why_not({"optimizer": optimizer}, fence) is None
    fence.put_up(copying(parameters, Future[None]()))
    monkeypatch.setattr(fence_module, "is_capturing", lambda: True)
    optimizer.step()
    monkeypatch.undo()
    assert "CUDA graph" in (why_not({"optimizer": optimizer}, fence) or "")


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
    fence = Fence(timeout_s=1.0)
    assert "not torch's" in (why_not({"mine": Foreign()}, fence) or "")
    unhooked = Unhooked(weights(), lr=1.0)
    assert why_not({"optimizer": unhooked}, fence) is None
    Unhooked.step = lambda self, closure=None: None  # type: ignore[assignment]
    assert "calls no hooks" in (why_not({"optimizer": unhooked}, fence) or "")
    capturable = torch.optim.Adam(weights(), capturable=True)
    assert "replayed" in (why_not({"optimizer": capturable}, fence) or "")
