"""Settings that a checkpoint records: of numerics, process and script, and their changes."""

from __future__ import annotations

import hashlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.arguments import escaped, shown
from holdfast.format.manifest import Change, Manifest
from holdfast.state.planning.overrides import OptimizerOptions
from holdfast.version import environment

_COMPARED = ("torch", "device", "cuda", "cudnn", "world_size")
_OF_ENVIRONMENT = ("python", "holdfast", "numpy", "git_commit")
MAX_LIVES = 100
"""Most lives with changes that a manifest lists: the newest."""
_MAX_CHANGES = 50
_MAX_LENGTH = 200
"""Longest text of a setting that is recorded whole; of a longer one the beginning and a digest."""
_MAX_DEPTH = 8
_MAX_LEAVES = 1000
"""Most settings in a mapping that are recorded one by one."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class SettingsHistory:
    """Settings of the present life of a run, and the changes up to it."""

    def __init__(self, config: Mapping[str, object] | None, *, world_size: int) -> None:
        """Begin with settings of the script by name, such as `vars(args)`."""
        self.given = dict(
            leaf
            for name, value in (config or {}).items()
            for leaf in _flatten_settings(str(name), value)
        )
        self._world_size = world_size
        self.origins: Mapping[str, str] | None = None
        """Options of optimizers, as `OptimizerOptions` settles them; None: not settled yet."""
        self.changes: tuple[Change, ...] = ()

    @property
    def config(self) -> dict[str, str]:
        """Settings to record with a checkpoint."""
        return {**self.given, **(self.origins or {})}

    def config_of(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return the settings to record, with options of its optimizers as they are now settled."""
        if self.origins is None:
            self.origins = OptimizerOptions(state).origins(is_start=False)
        return self.config

    def changed_settings(self, manifest: Manifest) -> tuple[str, ...]:
        """Return which settings of the script are others than those of a checkpoint."""
        before = {name: text for name, text in manifest.config.items() if name in self.given}
        return tuple(
            f"{name}: {text} → {self.given[name]}"
            for name, text in before.items()
            if text != self.given[name]
        )

    def compare_with_base(
        self, manifest: Manifest, epoch: int, *, resized: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Compare with the checkpoint from which session `epoch` resumes; return the changes.

        `resized`: changes of the shapes of its tensors.
        """
        now = _versions(numerics(self._world_size), environment())
        before = _versions(manifest.numerics, manifest.environment)
        both = {name: (text, now[name]) for name, text in before.items() if name in now}
        if manifest.config:  # older versions recorded none
            config = self.config
            for name in dict.fromkeys(chain(config, manifest.config)):
                both[name] = (manifest.config.get(name, "none"), config.get(name, "none"))
        what = [f"{name}: {was} → {is_}" for name, (was, is_) in both.items() if was != is_]
        what += resized
        if len(what) > _MAX_CHANGES:
            what[_MAX_CHANGES - 1 :] = [f"and {len(what) - _MAX_CHANGES + 1} more"]
        self.changes = manifest.changes
        if what:
            life = Change(epoch=epoch, step=manifest.timestamp.step, what=tuple(what))
            self.changes = (*manifest.changes, life)[-MAX_LIVES:]
        return tuple(what)


def as_text(value: object) -> str:
    """Format a setting, the same in all processes, as Unicode of bounded length."""
    text = escaped(value if isinstance(value, str) else _stable(value))
    if len(text) <= _MAX_LENGTH:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{text[: _MAX_LENGTH - 50]}… ({len(text)} characters, sha256 {digest})"


def _flatten_settings(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield a setting and its text; of nested settings each one, under dotted names."""
    inner = _nested_settings(value) if depth < _MAX_DEPTH else {}
    if not inner or len(inner) > _MAX_LEAVES:
        yield escaped(name), as_text(value)
    for key, item in inner.items() if len(inner) <= _MAX_LEAVES else ():
        yield from _flatten_settings(f"{name}.{key}", item, depth + 1)


def _nested_settings(value: object) -> Mapping[Any, Any]:
    """Return the settings in a setting; none of a plain value."""
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return value if isinstance(value, Mapping) else {}


def _stable(value: object) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_stable, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_stable(item)}' for name, item in value.items())}}}"
    if isinstance(value, type) or type(value).__repr__ is object.__repr__ or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return " ".join(_ADDRESS.sub("", shown(value)).split())


def _versions(numerics: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    found = {name: numerics[name] for name in _COMPARED if name in numerics}
    found |= {name: environment[name] for name in _OF_ENVIRONMENT if environment.get(name)}
    return {name: str(value) for name, value in found.items()}


def numerics(world_size: int = 1) -> dict[str, Any]:
    """Read settings that bit-exact results depend on (invariant 7). Never initializes a device."""
    found: dict[str, Any] = {
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": _setting(torch.get_float32_matmul_precision),
        "world_size": world_size,
        "device": "cpu",
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= _cuda()
    return found


def _cuda() -> dict[str, Any]:
    backends = torch.backends
    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda or "",
        "cudnn": backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
        "cudnn_benchmark": backends.cudnn.benchmark,
        "cudnn_deterministic": backends.cudnn.deterministic,
        "tf32_matmul": _setting(lambda: backends.cuda.matmul.allow_tf32),
        "tf32_cudnn": _setting(lambda: backends.cudnn.allow_tf32),
    }


def _setting(read: Callable[[], Any]) -> Any:
    """Read a setting; "set per operator" if torch refuses, as after use of its newer names."""
    try:
        return read()
    except RuntimeError:
        return "set per operator"


def differences(stored: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[str, ...]:
    """List the settings that differ from stored ones, if any are, as an imported state has none."""
    if not stored:
        return ()
    return tuple(
        f"numerics differ: {name} was {stored.get(name)!r}, is {live.get(name)!r}"
        for name in sorted(set(stored) | set(live))
        if stored.get(name) != live.get(name)
    )
