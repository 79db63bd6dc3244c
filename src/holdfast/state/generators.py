"""Random generators: reading their state, checking a stored one, and setting it.

A stored state is set on a scratch generator before a live one, because numpy does not check the
positions inside a state, and reads out of bounds later.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import FormatError
from holdfast.format.nodes import ArrayRef, GeneratorState, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import DTYPE_NAMES

_PYTHON_VERSION = 3
_PYTHON_WORDS = 625
_MAX_POSITIONS: Mapping[str, Mapping[str, int]] = {
    "MT19937": {"pos": 624},
    "Philox": {"buffer_pos": 4},
}
_MAX_SEED_WORDS = 1024
_MAX_SEED_BITS = 4096
_MIN_POOL_SIZE, _MAX_POOL_SIZE = 4, 256
# NumPy 1 pickles a bit generator without its seed sequence, and has no other way to set it.
_TAKES_SEEDS = isinstance(np.random.PCG64(0).__reduce__()[2], tuple)
_BIT_GENERATORS: Mapping[str, Callable[[], Any]] = {
    "MT19937": np.random.MT19937,
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGenerator:
    """Default generator of one accelerator, with the interface of `torch.Generator`."""

    type: str
    """Device type: `cuda`, `xpu`, `mps`, …"""
    index: int
    """Index of the device among those of its type."""

    @property
    def device(self) -> torch.device:
        """Device of the generator."""
        return torch.device(self.type, self.index)

    def get_state(self) -> Tensor:
        """Return the state as bytes on the CPU."""
        state: Tensor = self._module.get_rng_state(*self._index_arguments)
        return state

    def set_state(self, state: Tensor) -> None:
        """Set the state, given as bytes on the CPU."""
        self._module.set_rng_state(state, *self._index_arguments)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    @property
    def _index_arguments(self) -> tuple[int, ...]:
        # There is one such device, and its functions take no index.
        return () if self.type == "mps" else (self.index,)


def device_generators(*, initialise: bool = False) -> dict[str, list[DeviceGenerator]]:
    """Return accelerators' default generators by device type; `initialise`: also of unused ones."""
    # In this order: without one, torch 2.6 raises in `current_accelerator`.
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        return {}
    module: Any = torch.get_device_module(accelerator.type)
    is_in_use = getattr(module, "is_initialized", lambda: True)()
    if not (is_in_use or initialise) or not hasattr(module, "get_rng_state"):
        return {}
    kind, count = accelerator.type, torch.accelerator.device_count()
    return {kind: [DeviceGenerator(type=kind, index=i) for i in range(count)]}


def global_generators(*, initialise: bool = False) -> dict[str, Any]:
    """Return all global generators of this process, and the versions their streams depend on."""
    return {
        "python": random,
        "numpy": np.random,
        "torch": torch.default_generator,
        "devices": dict(device_generators(initialise=initialise)),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": str(torch.__version__),
        },
    }


def kind_of(value: object) -> str | None:
    """Return the kind of a generator, or module with a global one; None if `value` is none."""
    if isinstance(value, torch.Generator | DeviceGenerator):
        return "torch"
    if isinstance(value, random.Random) or value is random:
        return "python"
    if isinstance(value, np.random.Generator):
        return "numpy"
    if isinstance(value, np.random.RandomState) or value is np.random:
        return "numpy-legacy"
    return None


def is_global(generator: Any) -> bool:
    """Whether the generator is a global one of the CPU, which checkpoints save in `rng`."""
    # The functions of the modules `random` and `numpy.random` are methods of hidden objects.
    functions: Any = (random.random, np.random.random)
    hidden = (function.__self__ for function in functions)
    known = (random, np.random, torch.default_generator, *torch.cuda.default_generators, *hidden)
    return any(generator is one for one in known)


def read_generator_state(generator: Any) -> tuple[str, dict[str, Any]]:
    """Return a generator's kind and the members of its state, or raise `ValueError`."""
    kind = kind_of(generator)
    if kind == "torch":
        return kind, {"device": str(generator.device), "state": generator.get_state()}
    if kind == "python":
        return kind, _read_python(generator)
    if kind == "numpy":
        return kind, _read_numpy(generator.bit_generator)
    if kind == "numpy-legacy":
        return kind, {"state": generator.get_state(legacy=False)}
    raise ValueError(f"{type(generator).__qualname__} is not a generator")


def _read_python(generator: Any) -> dict[str, Any]:
    try:
        version, words, gauss_next = generator.getstate()
    except NotImplementedError:
        raise ValueError(f"{type(generator).__qualname__} has no state to save") from None
    if version != _PYTHON_VERSION or len(words) != _PYTHON_WORDS:
        raise ValueError(f"{type(generator).__qualname__}: unknown form of state")
    state = torch.from_numpy(np.array(words, dtype=np.uint32))
    return {"version": version, "state": state, "gauss_next": gauss_next}


def _read_numpy(bits: Any) -> dict[str, Any]:
    """Read a numpy bit generator's state and, if it has one, the seed sequence for `spawn`."""
    members: dict[str, Any] = {"state": bits.state}
    seeds = bits.seed_seq
    if type(seeds) is np.random.SeedSequence:
        sequence = {
            "entropy": _seeds_as_plain(seeds.entropy),
            "spawn_key": [int(word) for word in seeds.spawn_key],
            "pool_size": int(seeds.pool_size),
            "n_children_spawned": int(seeds.n_children_spawned),
        }
        if _seeds_wrong(sequence) is None:
            members["seed_seq"] = sequence
    return members


def _seeds_as_plain(entropy: Any) -> Any:
    if isinstance(entropy, int | np.integer):
        return int(entropy)
    flat = np.asarray(entropy, dtype=object).reshape(-1)
    return [int(word) if isinstance(word, int | np.integer) else word for word in flat]


def _seeds_wrong(stored: Any) -> str | None:
    """Return why `stored` is not a valid seed sequence, such as too long to mix, or None."""
    names = {"entropy", "spawn_key", "pool_size", "n_children_spawned"}
    if not isinstance(stored, dict) or stored.keys() != names:
        return "seed_seq: other members"
    entropy, key = stored["entropy"], stored["spawn_key"]
    words = [entropy] if isinstance(entropy, int) else entropy
    if not isinstance(words, list) or not isinstance(key, list):
        return "seed_seq: its words are not lists"
    if len(words) + len(key) > _MAX_SEED_WORDS:
        return f"seed_seq: more than {_MAX_SEED_WORDS} words"
    if not all(_is_int(word, 0, 1 << _MAX_SEED_BITS) for word in (*words, *key)):
        return "seed_seq: a word is not an integer or too large"
    if not _is_int(stored["pool_size"], _MIN_POOL_SIZE, _MAX_POOL_SIZE):
        return f"seed_seq: pool_size is not in {_MIN_POOL_SIZE}..{_MAX_POOL_SIZE}"
    if not _is_int(stored["n_children_spawned"], 0, 2**32 - 1):
        return "seed_seq: n_children_spawned is not in 0..4294967295"
    return None


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def write_generator_state(generator: Any, members: Mapping[str, Any]) -> None:
    """Set the state of a live generator of the same kind, from `read_generator_state`."""
    kind = kind_of(generator)
    if kind == "torch":
        # A copy: torch 2.13 reads from the storage's first byte, whatever the view's offset.
        generator.set_state(members["state"].clone())
    elif kind == "python":
        words = tuple(members["state"].tolist())
        generator.setstate((members["version"], words, members["gauss_next"]))
    elif kind == "numpy":
        _write_numpy(generator.bit_generator, members)
    else:
        generator.set_state(members["state"])


def _write_numpy(bits: Any, members: Mapping[str, Any]) -> None:
    if "seed_seq" in members and _TAKES_SEEDS:
        seeds = np.random.SeedSequence(**members["seed_seq"])
        # Only numpy's pickle interface sets the seed sequence of a live bit generator.
        bits.__setstate__((members["state"], seeds))
    bits.state = members["state"]


def scratch(generator: Any) -> Any:
    """Make a throwaway generator of the same kind, to try a stored state on."""
    kind = kind_of(generator)
    if kind == "torch":
        return torch.Generator(device=generator.device)
    if kind == "python":
        return random.Random()
    if kind == "numpy":
        return np.random.Generator(type(generator.bit_generator)())
    name = generator.get_state(legacy=False)["bit_generator"]
    return np.random.RandomState(_BIT_GENERATORS[name]())


def inexact(generator: Any, node: GeneratorState) -> str | None:
    """Return why a state that fits cannot be restored exactly in this process, or None."""
    if node.kind != "numpy" or _TAKES_SEEDS:
        return None
    seeds = node.members.get("seed_seq")
    if seeds is None or seeds == read_generator_state(generator)[1].get("seed_seq"):
        return None
    return "numpy below 2.0 cannot take a seed sequence, so `spawn` gives other children"


def build(node: GeneratorState) -> Any:
    """Make a new generator of the stored kind; the stored state is not set."""
    kind, members = node.kind, node.members
    if kind == "torch":
        return torch.Generator(device=_present_device(members.get("device")))
    if kind == "python":
        return random.Random()
    inner = members.get("state")
    name = str(inner.get("bit_generator")) if isinstance(inner, dict) else ""
    if kind not in ("numpy", "numpy-legacy") or name not in _BIT_GENERATORS:
        raise FormatError(f"unknown generator {kind!r} ({name!r})")
    bits = _BIT_GENERATORS[name]()
    return np.random.Generator(bits) if kind == "numpy" else np.random.RandomState(bits)


def _present_device(name: object) -> torch.device:
    try:
        device = torch.device(str(name))
        torch.Generator(device=device)
    except RuntimeError as err:
        raise FormatError(
            f"a generator of device {str(name)[:40]!r} cannot be made on this machine"
        ) from err
    return device


def misfit(generator: Any, node: GeneratorState, specs: Mapping[str, TensorSpec]) -> str | None:
    """Return why the stored state does not fit `generator`, or None if it does."""
    kind, live = read_generator_state(generator)
    if node.kind != kind:
        return f"stored kind {node.kind!r}, live {kind!r}"
    stored = dict(node.members)
    if kind == "torch":
        stored_on, live_on = (str(members.pop("device", "")) for members in (stored, live))
        if stored_on.partition(":")[0] != live_on.partition(":")[0]:
            return f"stored for device {stored_on[:40]}, live on {live_on}"
    if kind == "python":
        stored_gauss = stored.pop("gauss_next", None)
        live.pop("gauss_next")
        if not isinstance(stored_gauss, float | None):
            return "gauss_next is not a number"
    if kind == "numpy":
        live.pop("seed_seq", None)
        seeds = stored.pop("seed_seq", None)
        if seeds is not None and (wrong := _seeds_wrong(seeds)):
            return wrong
    return _differs(live, stored, specs) or _position_outside(node)


def _differs(live: Any, stored: Any, specs: Mapping[str, TensorSpec], path: str = "") -> str | None:
    if isinstance(live, dict):
        if not isinstance(stored, Mapping) or live.keys() != stored.keys():
            return f"other members in {path or 'the state'}"
        reasons = (_differs(live[k], stored[k], specs, f"{path}.{k}".strip(".")) for k in live)
        return next((reason for reason in reasons if reason), None)
    if isinstance(live, Tensor | np.ndarray):
        return _array_differs(live, stored, specs, path)
    if isinstance(live, str) or path == "version":
        return None if live == stored else f"stored {path} {stored!r:.40}, live {live!r}"
    if type(live) is not type(stored):
        return f"{path} is a {type(stored).__name__}, not a {type(live).__name__}"
    return None


def _array_differs(
    live: Tensor | np.ndarray[Any, Any], stored: Any, specs: Mapping[str, TensorSpec], path: str
) -> str | None:
    spec = specs.get(stored.key) if isinstance(stored, TensorRef | ArrayRef) else None
    if spec is None:
        return f"{path} is not a tensor"
    tensor = live if isinstance(live, Tensor) else torch.from_numpy(live.copy())
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if (spec.dtype, spec.shape) == (dtype, shape):
        return None
    return f"{path} is {spec.dtype}{list(spec.shape)}, not {dtype}{list(shape)}"


def _position_outside(node: GeneratorState) -> str | None:
    if not node.kind.startswith("numpy"):
        return None
    outer = node.members["state"]
    for name, limit in _MAX_POSITIONS.get(outer["bit_generator"], {}).items():
        position = outer[name] if name in outer else outer["state"][name]
        if not 0 <= position <= limit:
            return f"{name} {position} is not in 0..{limit}"
    return None
