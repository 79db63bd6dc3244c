"""Search for parameters that optimizers of a state have and no component saves.

Such a parameter is trained, and starts again from its first value after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from holdfast.state import optimizers
from holdfast.state.names import ParameterNames, parameter_names


def homeless(state: Mapping[str, Any], names: ParameterNames) -> dict[str, dict[str, Tensor]]:
    """Find optimizers' parameters that no module in `names` has: optimizer → name → parameter."""
    by_optimizer = {}
    for component, value in state.items():
        if isinstance(value, Optimizer):
            live = optimizers.inspect(value, names).parameters
            lost = {name: p for name, p in live.items() if names.home(p) is None}
            if lost:
                by_optimizer[component] = lost
    return by_optimizer


def unheld(
    homeless: Mapping[str, Mapping[str, Tensor]], captured: Iterable[Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Select the `homeless` parameters whose memory is in none of the captured tensors.

    Memory is in one if a dict or an object in the state holds the parameter itself.
    """
    if not homeless:
        return {}
    spans = [_span(tensor) for tensor in captured]
    left = {
        component: {
            name: parameter for name, parameter in lost.items() if not _is_within(parameter, spans)
        }
        for component, lost in homeless.items()
    }
    return {component: lost for component, lost in left.items() if lost}


def describe(
    parameters: Mapping[str, Mapping[str, Tensor]], known: Mapping[str, nn.Module] | None = None
) -> str:
    """Format parameters for a message: by name in the `known` modules, else in the optimizer."""
    names = parameter_names((known or {}).items())
    shown = [
        f"{_called(component, name, names.home(parameter))} {_shape(parameter)}"
        for component, lost in parameters.items()
        for name, parameter in lost.items()
    ]
    more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
    return ", ".join(shown[:10]) + more


def _called(component: str, name: str, home: tuple[str, str] | None) -> str:
    return f"{component}: {name}" if home is None else f"{component}: {home[0]}.{home[1]}"


def _shape(parameter: Tensor) -> str:
    return "(not made yet)" if is_lazy(parameter) else str(list(parameter.shape))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and after its last one."""
    if not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    num_items = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + num_items * tensor.element_size()


def _is_within(parameter: Tensor, spans: Iterable[tuple[int, int]]) -> bool:
    if is_lazy(parameter):
        return False
    start, stop = _span(parameter)
    return start == stop or any(first <= start and stop <= last for first, last in spans)
