"""Sinks that give experiment trackers references to checkpoints, and tell them of deletions.

A reference has root, folder, step, digest, size and metrics, and no bytes of the checkpoint. The
Trainer's loggers of these trackers have such sinks. No call to a tracker may draw from the global
generators, as resumes would not be exact (tests/sinks/test_trackers.py).
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.arguments import check_arguments, expect_methods, import_extra
from holdfast.control.reporter import Reporter
from holdfast.errors import UsageError
from holdfast.events import Event, Kind, url_without_secrets, without_secrets
from holdfast.format.manifest import manifest_digest

logger = logging.getLogger("holdfast")

_REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. :/]")
"""Characters that the name of a metric may not have."""
_HAS_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """Place and identity of a committed checkpoint."""

    root: str
    """URL or absolute path of the root, without secrets."""
    folder: str
    step: int
    digest: str
    """Digest of the manifest, "blake3:…", which is in the manifest's last line."""
    nbytes: int
    metrics: Mapping[str, float]
    """Metrics of the checkpoint that are finite numbers."""

    @property
    def uri(self) -> str:
        """URI of the checkpoint's folder."""
        return uri_of(self.root, self.folder)

    @property
    def facts(self) -> dict[str, str | int]:
        """All but the metrics, by name."""
        names = ("root", "folder", "step", "digest", "nbytes")
        return {name: getattr(self, name) for name in names}


def uri_of(root: str, folder: str) -> str:
    """Return the URI of a checkpoint's folder; of a path, one that begins with file://."""
    if _HAS_SCHEME.match(root):
        return f"{root.rstrip('/')}/{folder}"
    return (Path(root) / folder).as_uri()


def _format_root(root: str) -> str:
    return url_without_secrets(root) if _HAS_SCHEME.match(root) else str(Path(root).absolute())


class References(Reporter):
    """Base class of these sinks: calls `committed` and `deleted` in the background, in order."""

    kinds: tuple[Kind, ...] | None = ("committed", "uploaded", "retracted")

    @override
    def report(self, event: Event, at_s: float) -> None:
        fields = event.fields
        if event.kind == "committed":
            if fields["is_new"]:
                self.committed(_describe_commit(event))
        elif event.kind == "uploaded":
            self.uploaded(fields["folder"], event.step or 0, _format_root(fields["root"]))
        else:
            why = without_secrets(fields["reason"])
            self.deleted(fields["folder"], event.step or 0, _format_root(fields["root"]), why)

    def committed(self, reference: CommittedCheckpoint) -> None:
        """Record a new checkpoint."""
        raise NotImplementedError

    def uploaded(self, folder: str, step: int, root: str) -> None:
        """Record that a checkpoint is in the remote tier, too."""
        raise NotImplementedError

    def deleted(self, folder: str, step: int, root: str, why: str) -> None:
        """Record that a checkpoint was deleted from one root."""
        raise NotImplementedError


def _describe_commit(event: Event) -> CommittedCheckpoint:
    checkpoint = event.fields["checkpoint"]
    finite = {n: float(value) for n, value in checkpoint.metrics.items() if math.isfinite(value)}
    return CommittedCheckpoint(
        root=_format_root(checkpoint.root),
        folder=checkpoint.folder,
        step=checkpoint.step,
        digest=manifest_digest(event.fields["manifest"]),
        nbytes=checkpoint.nbytes,
        metrics=finite,
    )


class WandbReferences(References):
    """Sink that logs a reference artifact to Weights & Biases for each checkpoint.

    Each is a version of `checkpoint-<id of the run>`, type "checkpoint", with the alias
    `step-<step>`. W&B cannot change a version of an offline run. So those that were deleted are
    versions of `checkpoint-<id>-deleted`, and copies in a remote tier of `…-uploaded`. The metadata
    has the facts; the content is the reference, or a small file that names the place.
    """

    def __init__(self, run: Any = None, *, timeout_s: float = 10.0) -> None:
        """Log to `run`, which `wandb.init` returned; None: to the present one."""
        super().__init__(timeout_s=timeout_s)
        self._library = import_extra("wandb", "wandb")
        self._run = run if run is not None else self._library.run
        if self._run is None:
            raise UsageError("WandbReferences: no run has begun: call wandb.init first")
        expect_methods("run", self._run, ("log_artifact",), "what wandb.init returns")

    @override
    def committed(self, reference: CommittedCheckpoint) -> None:
        facts = {**reference.facts, "metrics": dict(reference.metrics)}
        self._log("", reference.uri, facts)

    @override
    def uploaded(self, folder: str, step: int, root: str) -> None:
        facts = {"root": root, "folder": folder, "step": step}
        self._log("-uploaded", uri_of(root, folder), facts)

    @override
    def deleted(self, folder: str, step: int, root: str, why: str) -> None:
        self._log("-deleted", None, {"root": root, "folder": folder, "step": step, "reason": why})

    def _log(self, kind: str, uri: str | None, facts: dict[str, Any]) -> None:
        artifact = self._library.Artifact(
            f"checkpoint-{self._run.id}{kind}", type=f"checkpoint{kind}", metadata=facts
        )
        if uri is None or not _add_reference(artifact, uri, facts["folder"]):
            with artifact.new_file("checkpoint.json") as file:
                json.dump(facts, file)
        self._run.log_artifact(artifact, aliases=[f"step-{facts['step']}"])


def _add_reference(artifact: Any, uri: str, name: str) -> bool:
    """Add a reference to an artifact; False if W&B refuses it.

    Without checksums it looks at names and sizes in a local folder, which may be gone by now, and
    sends an object store no request. For some stores it needs a library that may not be installed.
    """
    try:
        artifact.add_reference(uri, name=name, checksum=False)
    except Exception as error:  # noqa: BLE001 - then the version has a file that names the place
        logger.debug("%s is named in a file, as W&B cannot refer to it: %r", uri, error)
        return False
    return True


def expect_models(library: Any) -> None:
    """Raise `UsageError` unless this version of MLflow has models that need no files."""
    if not hasattr(library.MlflowClient, "create_logged_model"):
        raise UsageError(
            f"MLflow {library.__version__} has no models without files: references to checkpoints "
            "need MLflow 3: pip install 'holdfast-torch[mlflow]'"
        )


class MLflowReferences(References):
    """Sink that makes a model of MLflow for each checkpoint, with tags and metrics but no files.

    Metrics are named `checkpoint/<name>`, with _ for what MLflow allows in no name. Of a deleted
    checkpoint the model stays, with the tag `holdfast.deleted`.
    """

    @check_arguments()
    def __init__(
        self, run_id: str | None = None, *, tracking_uri: str | None = None, timeout_s: float = 10.0
    ) -> None:
        """Add to the run `run_id`; None: the active one. `tracking_uri`: None: as configured."""
        super().__init__(timeout_s=timeout_s)
        self._library = import_extra("mlflow", "mlflow")
        expect_models(self._library)
        active = self._library.active_run() if run_id is None else None
        if run_id is None and active is None:
            raise UsageError("MLflowReferences: no run is active: call mlflow.start_run first")
        self._run_id = run_id if active is None else active.info.run_id
        self._client: Any = self._library.MlflowClient(tracking_uri=tracking_uri)

    @override
    def committed(self, reference: CommittedCheckpoint) -> None:
        name = re.sub(r"[^A-Za-z0-9_-]", "-", reference.folder)
        tags = {f"holdfast.{fact}": str(value) for fact, value in reference.facts.items()}
        model = self._client.create_logged_model(
            self._experiment_id, name, self._run_id, tags, model_type="checkpoint"
        )
        now_ms, entities = int(time.time() * 1000), self._library.entities
        metrics = [
            entities.Metric(
                f"checkpoint/{_REFUSED_BY_MLFLOW.sub('_', metric)}",
                value,
                now_ms,
                reference.step,
                model_id=model.model_id,
            )
            for metric, value in reference.metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)
        self._client.finalize_logged_model(model.model_id, "READY")

    @override
    def uploaded(self, folder: str, step: int, root: str) -> None:
        for model in self._models(folder):
            self._client.set_logged_model_tags(model.model_id, {"holdfast.uploaded": root})

    @override
    def deleted(self, folder: str, step: int, root: str, why: str) -> None:
        for model in self._models(folder):
            is_of_upload = model.tags.get("holdfast.uploaded") == root
            name = "holdfast.deleted-upload" if is_of_upload else "holdfast.deleted"
            self._client.set_logged_model_tags(model.model_id, {name: why})

    def _models(self, folder: str) -> list[Any]:
        found = self._client.search_logged_models(
            [self._experiment_id], filter_string=f"tags.`holdfast.folder` = '{folder}'"
        )
        return list(found)

    @property
    def _experiment_id(self) -> str:
        experiment_id: str = self._client.get_run(self._run_id).info.experiment_id
        return experiment_id


class TensorBoardReferences(References):
    """Sink that writes a text and scalars to TensorBoard for each checkpoint.

    The texts are `checkpoint/reference`, `checkpoint/uploaded` and `checkpoint/deleted`, the
    scalars `checkpoint/nbytes` and `checkpoint/<metric>`, each at the step of the checkpoint.
    """

    def __init__(self, writer: Any, *, timeout_s: float = 10.0) -> None:
        """Write with `writer`, a `SummaryWriter`, which the caller closes after the manager."""
        super().__init__(timeout_s=timeout_s)
        methods = ("add_text", "add_scalar", "flush")
        expect_methods("writer", writer, methods, "a SummaryWriter")
        self._writer = writer

    @override
    def committed(self, reference: CommittedCheckpoint) -> None:
        rows = [f"| {name} | {value} |" for name, value in reference.facts.items()]
        self._write_text(
            "reference", "\n".join(["| checkpoint | |", "| --- | --- |", *rows]), reference.step
        )
        for name, value in {"nbytes": reference.nbytes, **reference.metrics}.items():
            self._writer.add_scalar(f"checkpoint/{name}", value, reference.step)
        self._writer.flush()

    @override
    def uploaded(self, folder: str, step: int, root: str) -> None:
        self._write_text("uploaded", f"{folder} is in {root}, too", step)

    @override
    def deleted(self, folder: str, step: int, root: str, why: str) -> None:
        self._write_text("deleted", f"{folder} was deleted from {root}: {why}", step)

    def _write_text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(f"checkpoint/{name}", text, step)


class TrackioReferences(References):
    """Sink that logs to a run of trackio, for each checkpoint, what it is and where.

    Of a checkpoint: `checkpoint/folder`, `root`, `digest`, `nbytes` and metrics; of a deleted one:
    `checkpoint/deleted` with its folder, and `checkpoint/reason`. The step is the checkpoint's, so
    give the steps of your own logs, too.
    """

    def __init__(self, run: Any = None, *, timeout_s: float = 10.0) -> None:
        """Log to `run`, which `trackio.init` returned; None: to the present one."""
        super().__init__(timeout_s=timeout_s)
        import_extra("trackio", "trackio")
        present = import_extra("trackio.context_vars", "trackio").current_run
        self._run = run if run is not None else present.get()
        if self._run is None:
            raise UsageError("TrackioReferences: no run has begun: call trackio.init first")
        expect_methods("run", self._run, ("log",), "what trackio.init returns")

    @override
    def committed(self, reference: CommittedCheckpoint) -> None:
        self._log({**reference.facts, **reference.metrics}, reference.step)

    @override
    def uploaded(self, folder: str, step: int, root: str) -> None:
        self._log({"uploaded": folder, "uploaded_to": root}, step)

    @override
    def deleted(self, folder: str, step: int, root: str, why: str) -> None:
        self._log({"deleted": folder, "deleted_from": root, "reason": why}, step)

    def _log(self, facts: Mapping[str, Any], step: int) -> None:
        self._run.log({f"checkpoint/{name}": value for name, value in facts.items()}, step=step)
