"""Ready-made callbacks that measure: speed, memory, norms of gradients, learning rates.

Each logs its metrics where the Trainer logs, and reads no tensor before.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.system import peak_nbytes, resident_nbytes
from holdfast.train.argument_checks import check_range
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.strategies import gather_dtensor
from holdfast.train.training import Counters, Metrics, Training

Clock = Callable[[], float]

_COUNTERS = (("steps", "step"), ("samples", "samples"), ("tokens", "tokens"))


class Pace:
    """Steps, samples and tokens per second between the oldest and the newest of some marks."""

    def __init__(self, clock: Clock, num_marks: int) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, dict[str, int | None]]] = deque(maxlen=num_marks)

    def clear(self) -> None:
        """Forget all marks."""
        self._marks.clear()

    def mark(self, counters: Counters) -> None:
        """Note the counters at this moment."""
        counts = {name: getattr(counters, attribute) for name, attribute in _COUNTERS}
        self._marks.append((self._clock(), counts))

    @property
    def rates(self) -> dict[str, float]:
        """Counts per second of what is counted; empty before time has passed between two marks."""
        if len(self._marks) < 2:
            return {}
        (began_s, before), (now_s, now) = self._marks[0], self._marks[-1]
        if now_s <= began_s:
            return {}
        return {
            name: (count - old) / (now_s - began_s)
            for name, count in now.items()
            if count is not None and (old := before[name]) is not None
        }


class _Measuring(Callback):
    """Callback that adds metrics of its own where the Trainer logs those of a step."""

    records_log = False

    def log(self, training: Training, metrics: Metrics) -> None:
        """Log what was measured, beside the metrics of a step."""
        if "loss" not in metrics:
            return  # logged by a callback, perhaps by this one
        if found := self._measured(training):
            training.log(found)

    def _measured(self, training: Training) -> dict[str, float]:
        raise NotImplementedError


class SpeedMonitor(_Measuring):
    """Logs the speed over the last steps, including validations and saves between them.

    `speed/steps_per_s`, and where they are counted `speed/samples_per_s` and `speed/tokens_per_s`,
    of all ranks together; `speed/mfu`, if the costs are given.
    """

    @check_arguments()
    def __init__(
        self,
        window: int = 50,
        *,
        flops_per_sample: float | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Set the window, and for the utilization what a sample costs and what a device can do.

        Args:
            window: the number of steps to look back on.
            flops_per_sample: floating point operations of the forward and backward pass.
            flops_per_token: the same for each token, instead; for a transformer about six for
                each parameter.
            peak_flops: operations per second that one device can do in the precision in use.
            clock: function that gives seconds.
        """
        check_range("SpeedMonitor: window", window, 1, 2**31)
        costs = {"samples": flops_per_sample, "tokens": flops_per_token}
        self._costs = {name: cost for name, cost in costs.items() if cost is not None}
        given = {
            "flops_per_sample": flops_per_sample,
            "flops_per_token": flops_per_token,
            "peak_flops": peak_flops,
        }
        for name, value in given.items():
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"SpeedMonitor: {name}={value!r}: must be above zero and finite")
        if len(self._costs) > 1 or bool(self._costs) != (peak_flops is not None):
            raise UsageError(
                "SpeedMonitor: for speed/mfu give peak_flops, and either flops_per_sample or "
                "flops_per_token"
            )
        self._peak_flops = peak_flops
        self._pace = Pace(clock, window + 1)

    def fit_start(self, training: Training) -> None:
        """Begin to measure."""
        for name in self._costs:
            if getattr(training.counters, name) is None:
                raise UsageError(
                    f"SpeedMonitor: {name} are not counted; give the Trainer "
                    f"counts=Counts({name}=…)"
                )
        self._pace.clear()
        self._pace.mark(training.counters)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Note the time and the counters."""
        self._pace.mark(training.counters)

    def _measured(self, training: Training) -> dict[str, float]:
        rates = self._pace.rates
        found = {f"speed/{name}_per_s": rate for name, rate in rates.items()}
        for name, cost in self._costs.items():
            if name in rates and self._peak_flops is not None:
                peak = self._peak_flops * training.world_size
                found["speed/mfu"] = rates[name] * cost / peak
        return found


class MemoryMonitor(_Measuring):
    """Logs the memory of the device that trains, on rank 0, in bytes.

    `memory/allocated_nbytes`, `memory/reserved_nbytes` and `memory/peak_nbytes` (of what was
    allocated, since the last log) on an accelerator, else `memory/resident_nbytes` of the process.
    """

    def _measured(self, training: Training) -> dict[str, float]:
        device = device_of(training.model)
        if device.type != "cuda":
            resident = resident_nbytes()
            return {} if resident is None else {"memory/resident_nbytes": float(resident)}
        found = {
            "memory/allocated_nbytes": float(torch.cuda.memory_allocated(device)),
            "memory/reserved_nbytes": float(torch.cuda.memory_reserved(device)),
            "memory/peak_nbytes": float(torch.cuda.max_memory_allocated(device)),
        }
        torch.cuda.reset_peak_memory_stats(device)
        return found


class LearningRates(_Measuring):
    """Logs the learning rate with which the step was done, of each group of parameters.

    `lr/<group>`: its key `name`, if it has one, or else its number. `JsonLines` and `Csv` have the
    rates of a step in its line by themselves, and leave these out.
    """

    def before_optimizer_step(self, training: Training) -> None:
        """Note the rates, which schedulers change after the step."""
        self.step_numbers = rates_of(training.optimizer)

    def _measured(self, training: Training) -> dict[str, float]:
        return {f"lr/{name}": float(rate) for name, rate in self.step_numbers.items()}


class GradientNorm(_Measuring):
    """Logs norms of the gradients that the optimizer gets: unscaled and, with `clip`, clipped.

    `grad_norm/total`, and `grad_norm/<module>` of each part of the model. They are computed on
    the device at every step, and read only where they are logged.
    """

    @torch.no_grad()
    def before_optimizer_step(self, training: Training) -> None:
        """Compute the norms, without waiting for the device."""
        found: dict[str, Tensor] = {}
        for name, weights in parts_of(training.model).items():
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            if gradients:
                found[name] = nn.utils.get_total_norm(gradients)
        self.step_numbers = found

    def _measured(self, training: Training) -> dict[str, float]:
        norms = read_numbers(self.step_numbers)
        if not norms:
            return {}
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        return {"grad_norm/total": total} | {f"grad_norm/{name}": v for name, v in norms.items()}


def read_numbers(numbers: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return numbers as floats, which waits for the device, and for DTensors for all ranks."""
    return {
        name: float(gather_dtensor(value) if isinstance(value, Tensor) else value)
        for name, value in numbers.items()
    }


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of a model by the name of its child; each once, its own under ""."""
    seen: set[int] = set()
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            child, dot, _ = name.partition(".")
            found.setdefault(child if dot else "(own)", []).append(parameter)
    return found


def rates_of(optimizer: Any) -> dict[str, Any]:
    """Return the learning rate of each group of an optimizer, or of several by name."""
    if isinstance(optimizer, Mapping):
        return {
            f"{name}/{group}": rate
            for name, item in optimizer.items()
            for group, rate in rates_of(item).items()
        }
    return {
        str(group.get("name", number)): rate.clone() if isinstance(rate, Tensor) else rate
        for number, group in enumerate(optimizer.param_groups)
        if (rate := group.get("lr")) is not None
    }


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU, if it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def memory_nbytes(model: nn.Module) -> int | None:
    """Return the most memory allocated on the device, or by the process; None if unknown."""
    device = device_of(model)
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_nbytes()
