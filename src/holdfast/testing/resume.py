"""Test that a run that was killed and resumed equals an undisturbed run, bit for bit.

Handles processes, kills and the comparison of states, but no checkpoints: the run under test saves
and resumes by itself, by any means.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import date, timedelta
from enum import Enum
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

import numpy as np
import torch
from blake3 import blake3

from holdfast.data.randomness import seed_generators
from holdfast.errors import DeadlineExceeded, UsageError, listing
from holdfast.state.attributes import content_of
from holdfast.train import Callback, Metrics, Training

StartMethod = Literal["spawn", "forkserver"]

_PLAIN = (
    *(bool, int, str, bytes, complex, Enum, PurePath, date, timedelta),
    *(torch.dtype, torch.device),
)


class Report(Protocol):
    """Callback of the run under test, called after each step once its save was requested."""

    def __call__(self, step: int, state: Mapping[str, Any]) -> None:
        """Report that `step` steps are done, with the whole `state` of the run after them."""


class Run(Protocol):
    """The run under test: a function at the top level of a module, so that it can be pickled."""

    def __call__(self, root: str, steps: int, report: Report) -> None:
        """Resume from a checkpoint in the folder `root`, if any, and train up to `steps` steps."""


def assert_resume_equivalent(
    run: Run,
    steps: int,
    kill_at: int | Sequence[int],
    *,
    timeout_s: float = 300.0,
    start_method: StartMethod = "spawn",
) -> None:
    """Check that a run killed (`kill -9`) and resumed at each `kill_at` equals one in one go.

    Every run is a process of its own, whose global random generators start from the same seeds.
    After each step every leaf of the state and these generators are compared with those of the
    run in one go. The run must really resume: one that starts from step 1 after a kill fails, too.

        def run(root, steps, report):
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            data = holdfast.data.Loader(dataset, batch_size=32)
            state = {"model": model, "optimizer": optimizer, "data": data}
            with holdfast.CheckpointManager(root, state, every="1step") as manager:
                found = manager.resume()
                step = found.step if found else 0
                for batch in data.until(steps, start=step):
                    train_one(model, optimizer, batch)
                    step += 1
                    manager.maybe_save(step)
                    report(step, state)

        assert_resume_equivalent(run, steps=10, kill_at=[4, 7])

    With a Trainer, pass `callbacks=[StepReporter(report)]` and call `fit(steps)`.

    Args:
        run: the run under test; must be importable in a new process.
        steps: steps of the whole run.
        kill_at: the process ends right after it reports this step; a checkpoint must be
            committed by then. Several, ascending, kill the resumed runs in turn.
        timeout_s: seconds for each process.
        start_method: of the processes. `forkserver` is quicker for many calls, when
            `multiprocessing.set_forkserver_preload(["holdfast.testing.resume", "torch._dynamo"])`
            came first; the first optimizer would import the second, which takes seconds.

    Raises:
        AssertionError: names the first step and the first leaf that differ, or what else went
            wrong, with the traceback of a run that raised.
        DeadlineExceeded: a process took longer than `timeout_s`.
    """
    kills = [kill_at] if isinstance(kill_at, int) else list(kill_at)
    if not kills or sorted({*kills, 0, steps}) != [0, *kills, steps]:
        raise UsageError(f"kill_at={kill_at!r}: must be ascending, above 0 and below {steps}")
    with tempfile.TemporaryDirectory(prefix="resume-equivalence-") as name:
        folder = Path(name)
        straight = _Leg(run=run, folder=folder, root="straight", steps=steps)
        legs = [
            replace(straight, root="killed", killed_at=last, kill_at=this)
            for last, this in zip([None, *kills], [*kills, None], strict=True)
        ]
        _run_all(straight, legs, multiprocessing.get_context(start_method), timeout_s)
        _compare_legs(straight, legs)


class StepReporter(Callback):
    """Reports each step of a Trainer to `assert_resume_equivalent`."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Report the step that has just been done."""
        self._report(training.counters.step, training.state)


def leaf_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Compute the digest of every leaf of a state, by path.

    Objects with a `state_dict` stand for what it returns. Floats and tensors count by their
    bits, so that -0.0 is not 0.0 and a NaN is equal to itself. Tensors also count by their
    strides, by whether they require grad and by the leaf whose memory they share; dicts also by
    the types and the order of their keys, in a leaf of its own called `path (keys)`.

    Raises:
        UsageError: a value without a known way to compare it.
    """
    leaves: dict[str, str] = {}
    for path, digest in _Walk().walk("", state):
        unique, number = path, 1
        while unique in leaves:
            number += 1
            unique = f"{path}#{number}"
        leaves[unique] = digest
    return leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leg:
    """Process of a run: from the newest checkpoint to a planned kill, or to the end."""

    run: Run
    folder: Path
    root: str
    steps: int
    killed_at: int | None = None
    """Step at which the previous process was killed."""
    kill_at: int | None = None

    @property
    def record_path(self) -> Path:
        return self.folder / f"{self.root}-{self.killed_at or 0}.jsonl"

    @property
    def title(self) -> str:
        if self.killed_at is not None:
            return f"the run resumed after the kill at step {self.killed_at}"
        if self.kill_at is not None:
            return f"the run before the kill at step {self.kill_at}"
        return "the run in one go"

    def start_process(self, context: BaseContext) -> BaseProcess:
        root = self.folder / self.root
        root.mkdir(exist_ok=True)
        # Not a daemon: the run may have data workers of its own.
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run_leg, args=(self.run, str(root), self.steps, self.kill_at, self.record_path)
        )
        process.start()
        return process

    def wait_for_exit(self, process: BaseProcess, timeout_s: float) -> None:
        process.join(timeout_s)
        if process.exitcode is None:
            _kill_process(process)
            raise DeadlineExceeded(f"{self.title} did not end within {timeout_s:.0f} s")
        expected = 0 if self.kill_at is None else -signal.SIGKILL
        if process.exitcode != expected:
            raise AssertionError(f"{self.title} {self._describe_end(process.exitcode)}")

    def _describe_end(self, exitcode: int) -> str:
        error = _error_file(self.record_path)
        if error.exists():
            return f"raised\n{error.read_text('utf-8')}"
        if exitcode == 0:
            return f"ended without reporting step {self.kill_at}"
        return f"ended with exit code {exitcode}"

    def reports(self) -> list[tuple[int, dict[str, str]]]:
        """List the steps and their reported leaves, in order; a gap or a wrong end raises."""
        lines = (
            self.record_path.read_text("utf-8").splitlines() if self.record_path.exists() else []
        )
        reports = [(entry["step"], entry["leaves"]) for entry in map(json.loads, lines)]
        found = [step for step, _ in reports]
        end = self.kill_at or self.steps
        if not found or found != list(range(found[0], end + 1)):
            raise AssertionError(f"{self.title} reported the steps {found}, not each up to {end}")
        _check_begin(self, found[0])
        return reports


def _run_all(straight: _Leg, legs: Sequence[_Leg], context: BaseContext, timeout_s: float) -> None:
    process = straight.start_process(context)
    try:
        for leg in legs:
            leg.wait_for_exit(leg.start_process(context), timeout_s)
        straight.wait_for_exit(process, timeout_s)
    finally:
        _kill_process(process)


def _kill_process(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _run_leg(run: Run, root: str, steps: int, kill_at: int | None, record: Path) -> None:
    with record.open("ab") as file:

        def report(step: int, state: Mapping[str, Any]) -> None:
            leaves = leaf_digests({**state, "global_rng": _global_generators()})
            file.write(json.dumps({"step": step, "leaves": leaves}).encode() + b"\n")
            file.flush()
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            seed_generators(0)
            run(root, steps, report)
        except BaseException:
            _error_file(record).write_text(traceback.format_exc(), "utf-8")
            raise


def _error_file(record: Path) -> Path:
    return record.with_suffix(".error")


def _compare_legs(straight: _Leg, legs: Sequence[_Leg]) -> None:
    expected = dict(straight.reports())
    for leg in legs:
        for step, leaves in leg.reports():
            _check_leaves(leg, step, leaves, expected[step])


def _check_begin(leg: _Leg, first: int) -> None:
    if leg.killed_at is None:
        if first != 1:
            raise AssertionError(f"{leg.title} began at step {first}, not at 1")
    elif first == 1:
        raise AssertionError(
            f"{leg.title} did not resume, it began at step 1: is resume() called, and was a "
            f"checkpoint committed when step {leg.killed_at} was reported?"
        )
    elif first > leg.killed_at + 1:
        raise AssertionError(f"{leg.title} began at step {first}: it skipped steps")


def _check_leaves(
    leg: _Leg, step: int, found: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    paths = [*expected, *(path for path in found if path not in expected)]
    differing = [path for path in paths if found.get(path) != expected.get(path)]
    if not differing:
        return
    first = differing[0]
    hint = "" if leg.killed_at else "\nNothing was resumed yet: the run itself is not repeatable."
    raise AssertionError(
        f"the first difference is at step {step}, leaf {first}\n"
        f"  in the run in one go: {expected.get(first, 'not there')}\n"
        f"  in {leg.title}: {found.get(first, 'not there')}\n"
        f"{len(differing)} of {len(paths)} leaves differ at this step:\n{listing(differing)}{hint}"
    )


def _global_generators() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": _hash_bytes(repr(random.getstate()).encode()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


class _Walk:
    """Walk over the leaves of a state, which also detects leaves that share memory."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[str, torch.Tensor]] = {}

    def walk(self, path: str, value: Any) -> Iterator[tuple[str, str]]:
        value = content_of(path, value)
        if isinstance(value, torch.Tensor):
            yield path, _tensor_digest(value) + self._shared(path, value)
        elif isinstance(value, np.ndarray | np.generic):
            yield path, _array_digest(path, value)
        elif isinstance(value, np.random.RandomState):
            yield from self.walk(path, value.get_state(legacy=False))
        elif hasattr(value, "state_dict"):
            yield from self.walk(path, value.state_dict())
        elif isinstance(value, Mapping | list | tuple | deque) and not value:
            yield path, f"empty {type(value).__name__}"
        elif isinstance(value, Mapping):
            yield from self._mapping(path, value)
        elif isinstance(value, list | tuple | deque):
            for number, item in enumerate(value):
                yield from self.walk(f"{path}.{number}", item)
        else:
            yield path, _plain_digest(path, value)

    def _mapping(self, path: str, value: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
        for key, item in value.items():
            yield from self.walk(f"{path}.{key}" if path else str(key), item)
        # An optimizer lists the slots of parameter 3 before those of 0 if it has stepped 3 first,
        # as when 0 was frozen. That order changes nothing, and a load does not keep it.
        ordered = sorted(value) if all(type(key) is int for key in value) else value
        keys = [f"{type(key).__name__} {key!r}" for key in ordered]
        if path:
            yield f"{path} (keys)", f"{type(value).__name__} of {_hash_bytes(repr(keys).encode())}"

    def _shared(self, path: str, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return ""
        storage = tensor.untyped_storage()._cdata
        # The tensor is kept, as the address of a freed storage would be reused.
        owner, first = self._owners.setdefault(storage, (path, tensor))
        if first is tensor and owner == path:
            return ""
        return f" in the memory of {owner} at {tensor.storage_offset() - first.storage_offset():+d}"


def _array_digest(path: str, value: np.ndarray[Any, Any] | np.generic) -> str:
    if value.dtype.hasobject:
        raise UsageError(f"{path}: cannot tell whether two arrays of objects are equal")
    strides = "" if value.flags.c_contiguous else f" strides {list(value.strides)}"
    return f"{value.dtype.str} {list(value.shape)}{strides} {_hash_bytes(value.tobytes())}"


def _plain_digest(path: str, value: Any) -> str:
    if isinstance(value, float):
        return f"float {value.hex()}"
    if isinstance(value, torch.Generator):
        return _tensor_digest(value.get_state())
    if isinstance(value, random.Random):
        return _hash_bytes(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, Set):
        return f"{type(value).__name__} {sorted(map(repr, value))}"
    if value is None or isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    raise UsageError(f"{path}: cannot tell whether two of {type(value).__name__} are equal")


def _tensor_digest(tensor: torch.Tensor) -> str:
    # A tensor of one element is contiguous with any stride, so `contiguous` would keep the stride.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format)
    parts = torch.view_as_real(plain) if plain.is_complex() else plain
    data = parts.reshape(-1).view(torch.uint8).numpy()
    shape = list(tensor.shape)
    strides = "" if tensor.is_contiguous() else f" strides {_strides(tensor)}"
    grad = " requires grad" if tensor.requires_grad else ""
    return f"{tensor.dtype} {shape}{strides}{grad} {_hash_bytes(data.tobytes())}"


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's strides, without those of dimensions of size 1, which mean nothing."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size != 1]


def _hash_bytes(data: bytes) -> str:
    return blake3(data).hexdigest()[:32]
