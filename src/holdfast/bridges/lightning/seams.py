"""Lightning's private names that the bridge uses, their check, and lookups in its Trainer.

A private name that any module here uses must be listed below (tests/bridges/test_seams.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import lightning
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.connectors import checkpoint_connector
from torch import Tensor
from typing_extensions import override

from holdfast.bridges.parts import name_components, rewind
from holdfast.data.ranks import DataRanks
from holdfast.errors import UsageError, listing
from holdfast.events import Emitter
from holdfast.format.manifest import Mode

SUPPORTED = "2.4 to 2.6"
FRAMEWORK = "lightning"

_NEEDED = (
    "_checkpoint_connector._ckpt_path",
    "_checkpoint_connector._loaded_checkpoint",
    "_checkpoint_connector._parse_ckpt_path",
    "_checkpoint_connector._user_managed",
    "_checkpoint_connector.dump_checkpoint",
    "_checkpoint_connector.restore_callbacks",
    "_checkpoint_connector.restore_datamodule",
    "_checkpoint_connector.restore_loops",
    "_checkpoint_connector.restore_precision_plugin_state",
    "_checkpoint_connector.resume_start",
    "_logger_connector._callback_metrics",
    "fit_loop._combined_loader",
    "fit_loop._combined_loader_states_to_load",
    "fit_loop._data_fetcher",
    "fit_loop._restarting",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._restarting",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total",
    "fit_loop.epoch_loop.batch_progress.current",
    "fit_loop.epoch_loop.load_state_dict",
    "fit_loop.epoch_loop.manual_optimization.optim_step_progress.total",
    "fit_loop.epoch_loop.on_advance_end",
    "fit_loop.epoch_loop.on_run_start",
    "fit_loop.epoch_loop.val_loop._combined_loader",
    "fit_loop.epoch_loop.val_loop._restarting",
    "fit_loop.epoch_progress.current",
    "fit_loop.on_advance_end",
    "fit_loop.on_run_end",
    "fit_loop.on_run_start",
    "fit_loop.setup_data",
)
"""Parts of Lightning's Trainer that are no public interface, or not as they are used here."""
_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
_UNSUPPORTED = frozenset({"DeepSpeedStrategy", "SingleDeviceXLAStrategy", "XLAStrategy"})
"""Names of subclasses of these that are refused: they shard in other ways, or are untested."""
_IMPORT_DEEPSPEED = "; `holdfast import` converts checkpoints of DeepSpeed"
RESTARTING = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")
"""Members of a loop by which it repeats parts of an epoch; not each version has each."""


def check_trainer(trainer: Any) -> None:
    """Check that the Trainer is one that this bridge knows."""
    version, wrong = getattr(lightning, "__version__", "unknown"), []
    if not isinstance(trainer, lightning.Trainer):
        wrong.append(f"{type(trainer).__module__}: import the Trainer from `lightning`")
    for name in _NEEDED:
        try:
            attrgetter(name)(trainer)
        except AttributeError:
            wrong.append(
                f"trainer.{name}: Lightning {version} has no such attribute; supported: {SUPPORTED}"
            )
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if not isinstance(trainer.strategy, _STRATEGIES) or _UNSUPPORTED.intersection(kinds):
        wrong.append(
            f"{kinds[0]} is not supported: use ModelParallelStrategy (with fully_shard in "
            "configure_model), DDPStrategy or a single device"
            + _IMPORT_DEEPSPEED
            * ("DeepSpeedStrategy" in kinds)
        )
    if trainer.reload_dataloaders_every_n_epochs:
        wrong.append("reload_dataloaders_every_n_epochs: a new loader has no position; use 0")
    if wrong:
        raise UsageError("HoldfastCheckpoint:\n" + listing(wrong))


_NO_BEST = (
    "none, as no rule keeps the best by a metric: pass HoldfastCheckpoint(…, "
    'keep="last:1,best:val_loss")'
)


def patch_path_lookup(callback: type[Any]) -> None:
    """Let Lightning's `ckpt_path="last"` and "best" find the checkpoints of `callback`, our class.

    Lightning asks only its own callbacks, and chooses the path before any hook of a callback is
    called. A version without this method is refused by `check_trainer`, when a fit begins.
    """
    connector_class = getattr(checkpoint_connector, "_CheckpointConnector", None)
    original = getattr(connector_class, "_parse_ckpt_path", None)
    if connector_class is None or original is None:
        return

    def parse(connector: Any, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
        others = [*connector.trainer.checkpoint_callbacks]
        ours = next((one for one in others if isinstance(one, callback)), None)
        path = _NOT_OURS
        if ours is not None and ckpt_path in ("last", "best"):
            path = _find_named(ours, others, ckpt_path, state_fn.value == "fit")
        if path is _NOT_OURS:
            path = original(connector, state_fn, ckpt_path, *args, **options)
        if ours is not None:
            ours.chosen_path = path
        return path

    connector_class._parse_ckpt_path = parse


_NOT_OURS: Any = object()
"""Returned for a path that Lightning's own callbacks resolve."""


def _find_named(ours: Any, others: list[Any], name: str, is_fit: bool) -> Any:
    path = ours.best_model_path if name == "best" else ours.last_model_path
    if path or (name == "last" and is_fit):
        return path or None  # a fit begins the run
    theirs = [found for one in others if (found := getattr(one, f"{name}_model_path", ""))]
    if theirs and name == "best":
        return theirs[0]  # Lightning asks the first callback alone, which may be ours
    if theirs:
        return _NOT_OURS
    lack = "no checkpoint" if name == "last" else _NO_BEST
    raise UsageError(f"ckpt_path={name!r}: {ours.checkpoints.root} has {lack}")


def model_of(module: Any, part: str | None) -> Any:
    """Return the LightningModule, or the part of it that is the component `model`."""
    if part is None:
        return module
    found = attrgetter(part)(module) if part in dict(module.named_modules()) else None
    if found is None:
        raise UsageError(f"model={part!r}: the LightningModule has no module of this name")
    others = [name for name in module.state_dict() if not name.startswith(f"{part}.")]
    if others:
        raise UsageError(
            f"model={part!r}: these parameters and buffers would not be saved. Omit model= to save "
            "the whole LightningModule:\n" + listing(others)
        )
    return found


def components_of(trainer: Any, emit: Emitter) -> dict[str, Any]:
    """Name the parts of the Trainer as all bridges do."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    loaders = list(trainer.fit_loop._combined_loader.flattened)
    kept = [
        one for one in loaders if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
    ]
    if len(kept) < len(loaders):
        kinds = sorted({type(one).__name__ for one in loaders if one not in kept})
        emit(
            "no_position",
            f"the position in the data is not saved, as {', '.join(kinds)} has none: a resume "
            "within an epoch trains on other samples. Give a holdfast.data.Loader",
        )
    _check_lengths(trainer, kept)
    _check_ranks(trainer, kept)
    return {
        **name_components("optimizer", trainer.optimizers),
        **name_components("scheduler", schedulers),
        **name_components("data", kept),
    }


def _check_lengths(trainer: Any, loaders: list[Any]) -> None:
    """Check that an epoch of Lightning is one of the loader."""
    for loader in loaders:
        if not hasattr(loader, "at_epoch_end"):
            continue
        length = len(loader) if hasattr(loader, "__len__") else None
        if length is None:
            raise UsageError(
                f"{type(loader).__name__}: Lightning reads one batch ahead of a loader without a "
                "length, so no position would be exact; give a Loader"
            )
        if trainer.num_training_batches != length:
            raise UsageError(
                f"Lightning ends an epoch after {trainer.num_training_batches} batches, and the "
                f"Loader after {length}: instead of limit_train_batches, overfit_batches or "
                "several loaders, give Loader(…, batches_per_epoch=…)"
            )


def _check_ranks(trainer: Any, loaders: list[Any]) -> None:
    """Check that ranks which hold parts of one model, and only those, get the same data."""
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return
    shares = trainer.strategy.distributed_sampler_kwargs
    expected = DataRanks(shares["rank"], shares["num_replicas"])
    for loader in loaders:
        found = getattr(loader, "ranks", expected)
        if found != expected:
            raise UsageError(
                f"{type(loader).__name__}: it yields the batches of rank {found.rank} of "
                f"{found.world_size}, but in the strategy's mesh data_parallel this process is "
                f"rank {expected.rank} of {expected.world_size}. For FSDP2, pass "
                "data_parallel_size=NUMBER_OF_RANKS and tensor_parallel_size=1 to "
                "ModelParallelStrategy; for tensor parallelism, make the Loader in "
                "train_dataloader, with ranks=DataRanks(mesh.get_local_rank(), mesh.size())"
            )


def find_own_loader(trainer: Any) -> Any:
    """Return the first loader of ours; None: there is none."""
    loaders = trainer.fit_loop._combined_loader.flattened
    return next((one for one in loaders if hasattr(one, "at_epoch_end")), None)


def rewind_validation_loaders(trainer: Any) -> None:
    """Set the loaders of validations to their first batch."""
    training = trainer.fit_loop._combined_loader.flattened
    loaders = trainer.fit_loop.epoch_loop.val_loop._combined_loader.flattened
    if any(hasattr(one, "at_epoch_end") and one is other for one in loaders for other in training):
        raise UsageError(
            "the validation has the Loader of the training, whose position it would move: give it "
            "a Loader of its own"
        )
    _check_ranks(trainer, loaders)
    rewind(loaders)


def evaluated_loaders(trainer: Any) -> list[Any]:
    """Return the loaders of a validation, test or prediction outside of a fit."""
    loop = getattr(trainer, f"{trainer.state.fn.value}_loop")
    return list(loop._combined_loader.flattened)


def given_path(trainer: Any, chosen: Any) -> str:
    """Return the `ckpt_path` of a fit, "" for none; `chosen` is what was found for its argument."""
    is_set_before = trainer._checkpoint_connector._user_managed
    return str((trainer.ckpt_path if is_set_before else chosen) or "")


def rewind_training_loaders(trainer: Any, emit: Emitter) -> None:
    """Set the loaders of the training to their first batch, as the run is new."""
    if rewind(trainer.fit_loop._combined_loader.flattened, emit):
        iter(trainer.fit_loop._data_fetcher)  # the iterator was made before


def shown_metrics(trainer: Any) -> dict[str, Any]:
    """Return what Lightning shows as metrics, with the last value of each, however old."""
    shown: dict[str, Any] = trainer._logger_connector._callback_metrics
    return shown


def monitors_of(trainer: Any) -> Iterator[tuple[str, str, Mode]]:
    """Yield who watches which metric in which direction: callbacks and plateau schedulers."""
    plateaus = (one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau)
    for metric, one in (
        *((getattr(one, "monitor", None), one) for one in trainer.callbacks),
        *((one.monitor, one.scheduler) for one in plateaus),
    ):
        mode = getattr(one, "mode", None)
        if isinstance(metric, str) and mode in ("min", "max"):
            yield f"{type(one).__name__} with mode={mode!r}", metric, mode


NO_STEP = -1
"""Step of metrics that belong to no state that can be saved."""


class NewMetrics:
    """Tells a step's metrics from older ones: values in new memory, compared name by name."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._values: dict[str, Any] = {}
        self._steps: dict[str, int] = {}

    def collect_new_metrics(self, step: int) -> dict[str, Any]:
        """Note what is new since the last look as measured at `step`, and return it."""
        new = {
            name: value
            for name, value in shown_metrics(self._trainer).items()
            if not _is_same_value(value, self._values.get(name))
        }
        self._values.update(new)
        self._steps.update(dict.fromkeys(new, step))
        return new

    def get_metrics(self, step: int) -> Mapping[str, float]:
        """Return the metrics of a step."""
        return LazyNumbers({n: self._values[n] for n, at in self._steps.items() if at == step})


class LazyNumbers(Mapping[str, float]):
    """Values as numbers, which are read from their device only where a save needs them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @property
    def unread(self) -> Mapping[str, Any]:
        """The values as they are, which waits for no device."""
        return self._values

    @override
    def __getitem__(self, name: str) -> float:
        return float(self._values[name])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)


def _is_same_value(value: Any, known: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(known, Tensor):
        return value.data_ptr() == known.data_ptr()
    return value is known
