"""Undo an interrupted fetch or validation, or a failed step, from a snapshot of the state.

Work that is interrupted leaves traces: data and generators have advanced, callbacks have counted,
buffers were updated. Restoring the `Boundary` makes the state that of the last step again, so that
it can be saved. Parameters and optimizers are not kept: `StateFingerprint` detects their changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from holdfast.control.stop import Interrupted, Stop
from holdfast.data import Loader, Stream, randomness
from holdfast.state.apply import prepare
from holdfast.state.capture.capture import capture
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.step.epoch_metrics import Scores

logger = logging.getLogger("holdfast")

_NO_INTERRUPTION: AbstractContextManager[None] = nullcontext()


class StepUndo:
    """Keeps the snapshot of the last step boundary, while the state can be restored from it."""

    def __init__(
        self,
        *,
        stop: Stop | None,
        is_exact: bool,
        data: Any,
        state: Mapping[str, Any],
        callbacks: Callbacks,
    ) -> None:
        """Start without a snapshot; `is_exact`: take ones that allow a save after an error."""
        self._is_exact = is_exact
        self.allows_save = is_exact
        """Whether the state can be saved after an error, once `undo_step` was called."""
        self._stop = stop
        self.use_data(data)
        self._has_hooks = callbacks.overrides("epoch_start", "before_data")
        self._has_validation_hooks = stop is not None and callbacks.overrides("validation_start")
        self._small = small(state, "data")
        self._state = state
        self._modules = modules_of(state)
        self._is_validating = False
        """Whether a validation is under way that a stop may interrupt."""
        self._before_validation: StateFingerprint | None = None
        # One context for all waits, as it has no state of its own.
        self._interruptible: AbstractContextManager[None] = (
            _NO_INTERRUPTION if stop is None else stop.interruptible()
        )

    def use_data(self, data: Any) -> None:
        """Undo steps on this data from now on, without a snapshot."""
        self._data = data
        self._can_interrupt = self._stop is not None and isinstance(data, Loader | Stream)
        self._boundary: Boundary | None = None
        self._weights: StateFingerprint | None = None

    def take_snapshot(self) -> None:
        """Take the snapshot, as the step that begins will change the state."""
        self.allows_save = self._is_exact
        if self._is_exact:
            self._boundary = Boundary(
                data=self._data, components=self._small, modules=self._modules
            )
            self._weights = StateFingerprint(self._state)
        elif self._can_interrupt:
            components = self._small if self._has_hooks else None
            self._boundary = Boundary(data=self._data, components=components)

    def begin_update(self) -> None:
        """Drop the snapshot, as the update that begins cannot be undone."""
        self._boundary = self._weights = None

    def find_changed(self) -> list[str]:
        """List components whose weights, which no snapshot has, changed; after `undo_step`."""
        return [] if self._weights is None else self._weights.find_changed()

    def undo_step(self) -> bool:
        """Restore the snapshot; False if none is kept."""
        boundary, self._boundary = self._boundary, None
        if boundary is not None:
            boundary.restore_snapshot()
            for module in self._modules:
                module.zero_grad()  # those of the window that is undone
        return boundary is not None

    def fetching(self) -> AbstractContextManager[None]:
        """Return a context for a fetch, which a stop interrupts if the data can be restored."""
        return self._interruptible if self._can_interrupt else _NO_INTERRUPTION

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a part of a validation, which a stop interrupts in `validating`."""
        return self._interruptible if self._is_validating else _NO_INTERRUPTION

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Restore the state after the block if a stop interrupts it, by `Interrupted`."""
        if self._stop is None and not self._is_exact:
            yield
            return
        kept = Boundary(components=self._small, modules=self._modules)
        is_marked = self._is_exact or self._has_validation_hooks
        weights = self._before_validation = StateFingerprint(self._state if is_marked else {})
        self._is_validating = self._stop is not None
        try:
            with self.waiting():
                pass  # a stop that was requested before
            yield
        except Interrupted:
            kept.restore_snapshot()
            raise
        except Exception:
            self._after_error(kept, weights)
            raise
        finally:
            self._is_validating, self._before_validation = False, None

    def validation_started(self) -> None:
        """Let a stop wait for the validation if hooks have just changed the weights for it."""
        if self._before_validation is not None:
            self._is_validating = (
                self._stop is not None and not self._before_validation.find_changed()
            )

    def _after_error(self, kept: Boundary, weights: StateFingerprint) -> None:
        """Restore the state after an error, if it will be saved; the error is raised anyway."""
        if not self._is_exact:
            return
        try:
            kept.restore_snapshot()
            changed = weights.find_changed()
        except Exception:
            self.allows_save = False
            logger.exception("the state before the validation can be neither restored nor saved")
            return
        if changed:
            self.allows_save = False
            logger.error(
                "a validation failed when it had changed %s, whose state from before it is not "
                "kept, so nothing is saved",
                ", ".join(changed),
            )


class Boundary:
    """Snapshot of the state between two steps, without parameters and optimizers."""

    def __init__(
        self,
        *,
        data: Any = None,
        components: Mapping[str, Any] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        """Copy `components` with the global generators, the position of `data`, and buffers."""
        self._depth, self._num_threads = randomness.count_open_blocks(), torch.get_num_threads()
        self._data = data
        self._position = None if data is None else data.state_dict()
        self._live: dict[str, Any] | None = None
        self._buffers = [
            (buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()
        ]
        self._undo_scores: list[Callable[[], None]] = []
        if components is not None:
            self._copy_components(components)

    def _copy_components(self, components: Mapping[str, Any]) -> None:
        scores = [item for item in components.values() if isinstance(item, Scores)]
        self._undo_scores = [item.capture_undo() for item in scores]
        others = {name: item for name, item in components.items() if not isinstance(item, Scores)}
        # A capture of any component includes the generators.
        self._live = others or {"nothing": {}}
        captured = capture(self._live).components
        self._stored = {name: part.stored for name, part in captured.items()}
        self._tensors = {
            name: {key: tensor.to("cpu", copy=True) for key, tensor in part.tensors.items()}
            for name, part in captured.items()
        }

    @torch.no_grad()
    def restore_snapshot(self) -> None:
        """Restore the snapshot."""
        randomness.end_inner_blocks(self._depth)
        if torch.get_num_threads() != self._num_threads:  # a fetch runs with one
            torch.set_num_threads(self._num_threads)
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        if self._data is not None:
            self._data.load_state_dict(self._position)
        if self._live is not None:
            ready = prepare(self._live, self._stored, where="the state before the step")
            ready.apply_values(self._tensors)
        for undo in self._undo_scores:
            undo()


def modules_of(state: Mapping[str, Any]) -> list[nn.Module]:
    """Select the components that are modules."""
    return [value for value in state.values() if isinstance(value, nn.Module)]


def small(state: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Select the components that are neither modules nor optimizers, such as callbacks."""
    large = (nn.Module, torch.optim.Optimizer)
    return {
        name: value
        for name, value in state.items()
        if name not in without and not isinstance(value, large)
    }


_SMALL_NBYTES = 2**20
"""Smaller tensors are copied together and summed with one call."""


class StateFingerprint:
    """Fingerprint of a state's modules and optimizers, without the buffers of modules.

    One pass over the weights, no copy: the bytes of parameters are summed, because torch does not
    count a write through `.data`. Changes of optimizers' slots, which only steps change, are
    detected by their addresses and versions.
    """

    def __init__(self, components: Mapping[str, Any]) -> None:
        """Compute the fingerprint; other components are ignored."""
        self._components = {
            name: value
            for name, value in components.items()
            if isinstance(value, nn.Module | Optimizer)
        }
        self._fingerprints = {name: _fingerprint(value) for name, value in self._components.items()}

    def find_changed(self) -> list[str]:
        """List the components that have changed since. Waits for their devices."""
        return [
            name
            for name, value in self._components.items()
            if not _are_fingerprints_equal(self._fingerprints[name], _fingerprint(value))
        ]


def _fingerprint(value: nn.Module | Optimizer) -> list[Any]:
    """Compute the fingerprint of a component; compare two with `_are_fingerprints_equal`."""
    if isinstance(value, nn.Module):
        return _fingerprint_module(value)
    return [
        _fingerprint_optimizer(value.param_groups),
        _fingerprint_optimizer([*value.state.values()]),
    ]


def _fingerprint_module(module: nn.Module) -> list[Any]:
    """Checksum the parameters; for modules with extra state, add their captured tree."""
    trees = (
        [] if _is_plain_module(module) else [capture({"module": module}).components["module"].tree]
    )
    return [*trees, *_checksum_tensors(module.parameters())]


def _is_plain_module(module: nn.Module) -> bool:
    """Whether a module's state has only tensors, and no extra state of any submodule."""
    own = nn.Module.get_extra_state
    return all(type(inner).get_extra_state is own for inner in module.modules())


def _fingerprint_optimizer(value: Any) -> Any:
    """Return a fingerprint of an optimizer's slots or options, equal while none changes."""
    if isinstance(value, Tensor):
        version = None if value.is_inference() else value._version
        return (id(value), value.data_ptr(), version)
    if isinstance(value, Mapping):
        # The parameters of a group are covered by the modules.
        return {
            key: [*map(id, item)] if key == "params" else _fingerprint_optimizer(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_fingerprint_optimizer(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else id(value)


@torch.no_grad()
def _checksum_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Sum the bytes of tensors as 64-bit integers that wrap around: exact for any values."""
    sums: list[Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if is_lazy(tensor):
            sums.append(torch.zeros((), dtype=torch.int64))
        elif tensor.nbytes < _SMALL_NBYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor.reshape(-1))
        else:
            sums += _checksum(tensor.reshape(-1))
    for together in small.values():
        sums += _checksum(torch.cat(together))
    return sums


def _checksum(flat: Tensor) -> list[Tensor]:
    """Sum the 8-byte words of a flat tensor, and its remaining bytes."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.data_ptr() % 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = len(data) // 8 * 8
    return [data[:whole].view(torch.int64).sum(), data[whole:].sum(dtype=torch.int64)]


def _are_fingerprints_equal(before: list[Any], now: list[Any]) -> bool:
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(_is_equal(*pair) for pair in pairs)


def _is_equal(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.device == now.device and torch.equal(before, now)
    return bool(before == now)
