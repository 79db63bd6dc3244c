"""Prometheus and OpenTelemetry: the same numbers of the same saves, from the same events."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Checkpoint, CheckpointManager, MemoryStore, StateHooks, Tiered
from holdfast.errors import SaveFailed, SaveSkipped, UsageError
from holdfast.events import Sink
from holdfast.sinks import (
    MLflowReferences,
    OpenTelemetry,
    Prometheus,
    TensorBoardReferences,
    TrackioReferences,
    WandbReferences,
)
from holdfast.sinks.metrics import INSTRUMENTS
from holdfast.testing import Fault, FaultyStore

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trackers.md").read_text("utf-8")


def train(root: Any, sink: Sink, **options: Any) -> list[Checkpoint]:
    """Three saves, the last of them twice, of which the newest is kept; gives all, oldest first."""
    state = {"a": {"b": 0}}
    saved: list[Checkpoint] = []
    options["keep"] = None if isinstance(root, Tiered) else "last:1"
    with CheckpointManager(root, state, sinks=[sink], on_commit=saved.append, **options) as manager:
        for step in (1, 2, 3, 3):
            state["a"]["b"] = step
            manager.save(step, wait=True)
            manager.wait()
    return saved


def prometheus(registry: Any) -> dict[str, float]:
    """Value of each sample, by its name and labels, without buckets and times of creation."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def counted(found: dict[str, float], name: str, **labels: str) -> float | None:
    return found.get(f"holdfast_{name}{sorted({'run': 'gpt', **labels}.items())}")


def test_prometheus_counts_saves_bytes_and_deletions(tmp_path: Path) -> None:
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()
    root = Tiered(
        tmp_path / "local", tmp_path / "remote", keep_local="last:1", keep_remote="last:1"
    )
    saved = train(root, Prometheus("gpt", registry=registry))
    found = prometheus(registry)
    assert counted(found, "saves_total", outcome="committed") == 3
    assert counted(found, "saves_total", outcome="unchanged") == 1
    assert counted(found, "save_stall_seconds_count") == 4
    assert counted(found, "save_write_seconds_count") == 3
    assert counted(found, "committed_bytes_total") == sum(each.nbytes for each in saved)
    assert counted(found, "last_committed_step") == 3
    assert (counted(found, "last_committed_timestamp_seconds") or 0) > 1.7e9
    uploads = counted(found, "uploads_total", outcome="done")
    assert uploads
    assert counted(found, "upload_lag_seconds_count") == uploads
    assert counted(found, "uploaded_bytes_total")
    assert counted(found, "deletions_total", tier="local") == 2
    assert counted(found, "deletions_total", tier="remote") == uploads - 1


def test_prometheus_counts_failures_by_kind() -> None:
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()
    store = FaultyStore(MemoryStore(), [Fault(kind="fail", op="put", key="step-*", times=None)])
    with pytest.raises(SaveFailed):
        train(store, Prometheus("gpt", registry=registry), preflight=False)
    found = prometheus(registry)
    assert counted(found, "saves_total", outcome="failed") == 1
    assert counted(found, "failures_total", kind="save_failed") == 1
    assert counted(found, "saves_total", outcome="committed") is None


def test_prometheus_counts_what_a_hook_skips() -> None:
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()

    def skips(now: Any, metrics: Any) -> None:
        raise SaveSkipped("not now")

    sink = Prometheus("gpt", registry=registry)
    train(MemoryStore(), sink, hooks=StateHooks(before_save=skips))
    assert counted(prometheus(registry), "saves_total", outcome="skipped") == 4


def test_runs_share_a_registry_by_their_label() -> None:
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()
    for run in ("gpt", "other", "other"):
        train(MemoryStore(), Prometheus(run, registry=registry))
    found = prometheus(registry)
    assert counted(found, "saves_total", outcome="committed") == 3
    assert counted(found, "saves_total", outcome="committed", run="other") == 6


def test_the_textfile_is_whole_at_any_time(tmp_path: Path) -> None:
    """And has no metrics but ours, where no registry was given."""
    parser = pytest.importorskip("prometheus_client.parser")
    file = tmp_path / "holdfast.prom"
    train(MemoryStore(), Prometheus("gpt", textfile=file))
    families = parser.text_string_to_metric_families(file.read_text())
    names = {family.name.removesuffix("_created") for family in families}
    assert "holdfast_saves" in names
    assert all(name.startswith("holdfast_") for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["holdfast.prom"]


def test_a_textfile_that_no_collector_reads_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(UsageError, match=r"node_exporter reads \*\.prom only"):
        Prometheus(textfile=tmp_path / "holdfast.txt")


@pytest.mark.parametrize(
    ("library", "make", "message"),
    [
        (
            "prometheus_client",
            lambda: Prometheus(registry="x"),
            "registry='x': must be a Collector",
        ),
        ("prometheus_client", lambda: Prometheus(3), "run=3: must be str"),
        ("prometheus_client", lambda: Prometheus(textfile=3), "textfile=3: must be"),
        ("prometheus_client", lambda: Prometheus(timeout_s="1"), "timeout_s='1': must be float"),
        ("opentelemetry", lambda: OpenTelemetry(meter_provider="x"), "meter_provider='x': must be"),
        ("opentelemetry", lambda: OpenTelemetry(("x",)), r"run=\('x',\): must be str"),
        ("torch", lambda: TensorBoardReferences("logs"), "writer='logs': must be a SummaryWriter"),
        ("mlflow", lambda: MLflowReferences(3), "run_id=3: must be str or None"),
        ("wandb", lambda: WandbReferences("gpt"), "run='gpt': must be what wandb.init returns"),
        ("trackio", lambda: TrackioReferences("gpt"), "run='gpt': must be what trackio.init"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(
    library: str, make: Callable[[], Sink], message: str
) -> None:
    pytest.importorskip(library)
    with pytest.raises(UsageError, match=message):
        make()


def test_a_textfile_that_cannot_be_written_harms_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("prometheus_client")
    saved = train(MemoryStore(), Prometheus(textfile=tmp_path / "nowhere" / "holdfast.prom"))
    assert [checkpoint.step for checkpoint in saved] == [1, 2, 3]
    assert "Prometheus: failed for" in caplog.text


def test_opentelemetry_gets_the_same() -> None:
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meters = metrics.MeterProvider([reader], shutdown_on_exit=False)
    train(MemoryStore(), OpenTelemetry("gpt", meter_provider=meters))
    (resource,) = reader.get_metrics_data().resource_metrics
    found = {m.name: list(m.data.data_points) for m in resource.scope_metrics[0].metrics}
    outcomes = {p.attributes["outcome"]: p.value for p in found["holdfast.saves"]}
    assert outcomes == {"committed": 3, "unchanged": 1}
    assert found["holdfast.save_stall"][0].count == 4
    assert found["holdfast.last_committed_step"][0].value == 3
    assert found["holdfast.deletions"][0].attributes == {"run": "gpt", "tier": "local"}
    meters.shutdown()


def test_the_page_lists_every_metric() -> None:
    rows = re.findall(r"^\| `holdfast_(\w+?)`", PAGE, re.MULTILINE)
    ours = {
        name + (f"_{one.unit}" if one.unit else "") + ("_total" if one.kind == "counter" else "")
        for name, one in INSTRUMENTS.items()
    }
    assert {*rows} == ours
