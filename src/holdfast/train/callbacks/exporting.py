"""Export of the model at the end of a training, for programs that run it without its code."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from holdfast.arguments import check_arguments
from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.sinks.extras import import_extra
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.train.averages import AverageInModelDtypes
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.training import Training, evaluating

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
