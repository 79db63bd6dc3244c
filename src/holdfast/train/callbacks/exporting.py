"""Ready-made callbacks for the model: parameters that are frozen for a part of the run, and export.

The export at the end of a training is for programs that run the model without its code.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.arguments import check_arguments, import_extra
from holdfast.data.randomness import preserved
from holdfast.errors import UsageError, listing
from holdfast.format.manifest import Timestamp
from holdfast.launched import present_ranks
from holdfast.policy.clock import Time, Unit, argument_name, parse
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.train.averages import AverageInModelDtypes
from holdfast.train.callbacks.hooks import Callback, Logger
from holdfast.train.training import Metrics, Training, evaluating

logger = logging.getLogger("holdfast")

Format = Literal["pt2", "onnx"]
_Call = tuple[tuple[Any, ...], dict[str, Any]]


# A Logger, as it is called on the leader alone, after other callbacks, and not in a trial.
class ExportModel(Logger):
    """Exports the model when `fit` ends at its goal, by a request or by `max_time`.

        ExportModel("s3://bucket/exported", formats=["pt2", "onnx"], weights="ema")

    Writes `model-step<step>.pt2` (`torch.export`) or `model-step<step>.onnx` with the model in eval
    mode, which is undone afterwards; a file of that name is replaced. A run that is started again
    after its end writes only files that are missing. Sharded weights (`FSDP2`) are refused: load a
    checkpoint with `load_weights` and export that.
    """

    @check_arguments(but=("inputs", "dynamic_shapes"))
    def __init__(
        self,
        to: str | os.PathLike[str] | Store,
        *,
        formats: Sequence[Format] = ("pt2",),
        weights: Literal["model", "ema", "swa"] = "model",
        inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
        dynamic_shapes: Any = None,
    ) -> None:
        """Set where to write, and which formats.

        Args:
            to: a folder, a URL or a store; missing folders are made.
            formats: "pt2", "onnx", or both.
            weights: the trained model, or its average by `ema=` or `swa=` of the Trainer.
            inputs: example arguments of the model: a tensor, a tuple, or keywords in a dict. None:
                those of the first call of the model in `fit`.
            dynamic_shapes: as for `torch.export.export`. None: the exported model takes inputs of
                the same shapes as `inputs`.
        """
        unknown = [name for name in formats if name not in get_args(Format)]
        if isinstance(formats, str) or unknown or not formats:
            raise UsageError(f"ExportModel: formats={formats!r}: give some of {get_args(Format)}")
        if "onnx" in formats:
            import_extra("onnx", "onnx")
            import_extra("onnxscript", "onnx")
        self._store = open_store(to)
        self._formats = [*formats]
        self._weights = weights
        positional = inputs if isinstance(inputs, tuple) else (inputs,)
        self._call: _Call | None = None
        if inputs is not None:
            self._call = ((), {**inputs}) if isinstance(inputs, Mapping) else (positional, {})
        self._dynamic_shapes = dynamic_shapes
        self._listening: torch.utils.hooks.RemovableHandle | None = None

    def setup(self, training: Training) -> None:
        """Refuse weights that the training does not have, or that are sharded."""
        if self._weights not in training.state:
            raise UsageError(
                f"ExportModel: weights={self._weights!r}: the Trainer has no such average; give it "
                f"{self._weights}="
            )
        if any(hasattr(weight, "full_tensor") for weight in training.model.parameters()):
            raise UsageError(
                "ExportModel: the weights are sharded, and one rank cannot export them: export "
                "after training, from a model that load_weights has filled"
            )

    def fit_start(self, training: Training) -> None:
        """Begin to look for the first call of the model, if no inputs were given."""
        if self._call is None:
            self._listening = training.model.register_forward_pre_hook(
                self._keep_call, with_kwargs=True
            )

    def already_done(self, training: Training) -> None:
        """Export what is missing: an earlier process may have been killed before its export."""
        there = self._store.children()
        missing = [kind for kind in self._formats if _make_name(training, kind) not in there]
        if missing and self._call is None:
            logger.warning(
                "ExportModel: %s/%s does not exist, and no batch was trained on to export with: "
                "give inputs=",
                self._store.url,
                _make_name(training, missing[0]),
            )
        elif missing:
            self._export(training, missing)

    def fit_end(self, training: Training) -> None:
        """Export the model, unless a signal has ended `fit`, which leaves little time."""
        if training.end_reason != "signal":
            self._export(training, self._formats)

    def close(self, training: Training) -> None:
        """Stop looking for the first call."""
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.remove()
            self._listening = None

    def _keep_call(self, _model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._call = tree_map_only(Tensor, lambda one: one.detach().clone(), (args, named))
        self._stop_listening()

    def _export(self, training: Training, kinds: Sequence[str]) -> None:
        if self._call is None:
            raise UsageError("ExportModel: `fit` did not call the model: give inputs=")
        model = self._model(training)
        args, named = self._call
        with (
            evaluating(model),
            torch.no_grad(),
            preserved(),
            tempfile.TemporaryDirectory() as folder,
        ):
            for kind in kinds:
                path = Path(folder) / _make_name(training, kind)
                _write_program(model, args, named, self._dynamic_shapes, path)
            self._store.make_folder("")
            for path in sorted(Path(folder).iterdir()):
                self._store.put(path.name, path.read_bytes())
        logger.info(
            "exported %s of step %d to %s", self._weights, training.counters.step, self._store.url
        )

    def _model(self, training: Training) -> nn.Module:
        if self._weights == "model":
            return training.model
        if self._weights == "swa" and not training.state["swa-count"].num_averaged:
            raise UsageError("ExportModel: weights='swa': no weights were averaged yet")
        return AverageInModelDtypes(training.state[self._weights], training.model).update()


def _make_name(training: Training, kind: str) -> str:
    return f"model-step{training.counters.step}.{kind}"


def _write_program(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], shapes: Any, path: Path
) -> None:
    program = torch.export.export(model, args, named, dynamic_shapes=shapes)
    if path.suffix == ".pt2":
        torch.export.save(program, path)
        return
    converted = torch.onnx.export(program, dynamo=True, verbose=False)
    assert converted is not None
    converted.save(path)


_TRAINABLE: MutableMapping[nn.Parameter, bool] = WeakIdKeyDictionary()
"""Parameters that a Freeze has frozen, of a Trainer that is perhaps gone: they can be trained."""


class Freeze(Callback):
    """Freezes parameters by name, from one moment of the run to another.

        Freeze("encoder.*", until="1ep")

    A frozen parameter gets no gradient, so that no optimizer changes it, by weight decay neither;
    what the optimizer has for it stays. What is frozen follows from the counters alone, so a resume
    is exact. Modules keep their mode: batch norm of a frozen module goes on with its statistics.

    A parameter that several of them name is frozen while one of them freezes it. When `fit` ends,
    gradients are required again. A parameter that required none when the Trainer was made is left
    alone.
    """

    priority = 100
    """High priority: others see the state of the next step."""

    @check_arguments(but=("since", "until"))
    def __init__(
        self, *patterns: str, until: str | Time | None = None, since: str | Time | None = None
    ) -> None:
        """Freeze parameters whose names match one of `patterns`, such as "encoder.*".

        Args:
            patterns: of names in `model.named_parameters()`, as in `fnmatch`.
            until: when they are trained again, such as "1ep"; None: never.
            since: when they are frozen; None: from the beginning.
        """
        if not patterns:
            raise UsageError(
                'Freeze: name what to freeze, such as Freeze("encoder.*", until="1ep")'
            )
        self._patterns = patterns
        self._since = _parse_counted_time("since", since)
        self._until = _parse_counted_time("until", until)
        self._frozen: dict[str, nn.Parameter] = {}
        self._is_frozen = False
        self._drops_gradients = False

    def setup(self, training: Training) -> None:
        """Find the parameters, and freeze them if it is time."""
        named = dict(training.model.named_parameters())
        wrong = [
            pattern
            for pattern in self._patterns
            if not any(fnmatchcase(name, pattern) for name in named)
        ]
        if wrong:
            raise UsageError(
                f"Freeze: {wrong} match no parameter of the model; there are:\n{listing([*named])}"
            )
        self._frozen = {
            name: item
            for name, item in named.items()
            if (item.requires_grad or item in _TRAINABLE)
            and any(fnmatchcase(name, one) for one in self._patterns)
        }
        # What DDP and FSDP exchange is settled when they are made: there gradients are dropped.
        self._drops_gradients = present_ranks().world_size > 1
        self._update_frozen(training)

    def fit_start(self, training: Training) -> None:
        """Freeze what is frozen at the step from which training goes on."""
        now = training.counters.timestamp
        for what, time in (("since", self._since), ("until", self._until)):
            if time is not None and time.unit.read_progress(now) is None:
                raise UsageError(
                    f"Freeze: {what}='{time}': {argument_name(time.unit)} are not counted; give "
                    "the Trainer counts=Counts(…)"
                )
        self._update_frozen(training)

    def after_backward(self, training: Training) -> None:
        """Drop the gradients of frozen parameters, where several ranks train."""
        if self._is_frozen and self._drops_gradients:
            for item in self._frozen.values():
                item.grad = None

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Freeze or unfreeze, if it is time."""
        self._update_frozen(training)

    def epoch_end(self, training: Training) -> None:
        """Freeze or unfreeze, if it is time."""
        self._update_frozen(training)

    def close(self, training: Training) -> None:
        """Require gradients again, for whoever trains the model next."""
        self._is_frozen = False
        self._require_gradients(training)

    @property
    def is_frozen(self) -> bool:
        """Whether the parameters are frozen now."""
        return self._is_frozen

    def _update_frozen(self, training: Training) -> None:
        now = training.counters.timestamp
        has_begun = self._since is None or _is_reached(self._since, now)
        is_over = self._until is not None and _is_reached(self._until, now)
        self._is_frozen = has_begun and not is_over
        self._require_gradients(training)

    def _require_gradients(self, training: Training) -> None:
        """Let each parameter require a gradient unless one of the training's Freezes holds it."""
        if self._drops_gradients:
            return
        holding = [
            item for item in training.callbacks if isinstance(item, Freeze) and item.is_frozen
        ]
        held = {id(one) for item in holding for one in item._frozen.values()}
        for item in self._frozen.values():
            item.requires_grad_(id(item) not in held)
            if id(item) in held:
                _TRAINABLE[item] = True
            else:
                _TRAINABLE.pop(item, None)


def _is_reached(time: Time, now: Timestamp) -> bool:
    return (time.unit.read_progress(now) or 0) >= time.value


def _parse_counted_time(what: str, given: str | Time | None) -> Time | None:
    if given is None:
        return None
    time = parse(given, what=f"Freeze: {what}")
    if time.unit in (Unit.SECOND, Unit.DURATION):
        raise UsageError(
            f"Freeze: {what}={str(given)!r}: must be counted, such as '1ep' or '1_000step', so "
            "that it is the same after a resume"
        )
    return time
