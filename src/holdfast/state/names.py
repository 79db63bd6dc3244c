"""Names of leaves and parameters, without the parts that wrappers of modules add.

torch.compile, activation checkpointing and data parallelism put a part into every name; a
checkpoint must fit the same model with and without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_PARALLEL = (DataParallel, DistributedDataParallel)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch.compile and data parallelism."""
    while True:
        # Compared by name: importing the class would import all of dynamo.
        if type(module).__name__ == "OptimizedModule":
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, _PARALLEL):
            module = module.module
        else:
            return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaner:
    """Converts a module's raw names to names without the parts that wrappers add."""

    parallel: frozenset[str]
    """Raw paths of the parallel wrappers inside the module; their child is called `module`."""

    def clean(self, raw: str) -> str:
        """Return the name of the same leaf in the model without wrappers."""
        if not self.parallel and "_orig_mod" not in raw and "_checkpoint_w" not in raw:
            return raw
        parts = raw.split(".")
        kept = [part for i, part in enumerate(parts) if not self._is_wrapper(parts, i)]
        return ".".join(kept)

    def _is_wrapper(self, parts: list[str], i: int) -> bool:
        if parts[i] in _WRAPPER_PARTS:
            return True
        return parts[i] == "module" and ".".join(parts[:i]) in self.parallel


def cleaner_of(module: nn.Module) -> Cleaner:
    """Make the cleaner for the names inside `module`, which was unwrapped before."""
    submodules = module.named_modules(remove_duplicate=False)
    wrappers = (name for name, inner in submodules if isinstance(inner, _PARALLEL))
    return Cleaner(parallel=frozenset(wrappers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """Component and name of each parameter of the state's modules."""

    homes: Mapping[int, tuple[str, str]]
    """id of the parameter -> (component, name inside it); of several names the first."""

    def home(self, parameter: Tensor) -> tuple[str, str] | None:
        """Return (component, name) of a parameter; None if no module of the state has it."""
        return self.homes.get(id(parameter))


def parameter_names(modules: Iterable[tuple[str, nn.Module]]) -> ParameterNames:
    """Name the parameters of the given components; the modules must stay alive meanwhile."""
    homes: dict[int, tuple[str, str]] = {}
    for component, wrapped in modules:
        module = unwrap(wrapped)
        cleaner = cleaner_of(module)
        for raw, parameter in module.named_parameters():
            homes.setdefault(id(parameter), (component, cleaner.clean(raw)))
    return ParameterNames(homes=homes)


def structure(wrapped: nn.Module) -> list[Any]:
    """List submodules with types and parameters, which decide the names of parameters.

    Equal for two calls only when all of it is the same. Holds no tensors.
    """
    module = unwrap(wrapped)
    if type(module).named_parameters is not nn.Module.named_parameters:
        return [object()]  # the module overrides the names
    outline: list[Any] = []
    for raw, inner in module.named_modules(remove_duplicate=False):
        parameters = inner._parameters
        if not isinstance(parameters, dict):
            return [object()]  # a scripted module's are made anew each time
        outline += (raw, type(inner), *parameters, *map(id, parameters.values()))
    return outline
