"""The benchmarks run and print every row. They assert no time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from time import thread_time

import pytest
from bench.__main__ import FULL, QUICK
from bench.clients import CLIENTS
from bench.limits import LIMITS
from bench.parts import PARTS
from bench.peers import PEERS
from bench.remotesavers import SAVERS
from bench.results import Outcome, Results, read_json, write_json
from bench.slowdown import Loop, Training
from bench.states import StateSpec
from tests.serve.browser.conftest import program

from servers.cache import Unavailable
from servers.fixtures import skip_or_fail

pytestmark = pytest.mark.timeout(1600)  # a busy machine takes minutes for some of them

ROOT = Path(__file__).parents[2]
SAVES = (
    "holdfast",
    "holdfast-awaited",
    "holdfast-frozen",
    "holdfast-overlap",
    "holdfast-budget",
    "torch",
    "safetensors",
    "dcp",
    "dcp-2",
    "dcp-async",
    "dcp-async-kept",
    "dcp-async-shared",
    "torch_checkpointing",
)
LOADS = (
    "holdfast",
    "holdfast-resume",
    "holdfast-unverified",
    "holdfast-in-place",
    "holdfast-in-place-unverified",
    "holdfast-bounded",
    "torch-bare",
    "torch",
    "torch-mmap",
    "safetensors-bare",
    "safetensors",
    "dcp",
    "torch_checkpointing",
)
TRAININGS = (
    "none",
    "plain",
    "holdfast",
    "holdfast-overlap",
    "dcp-async",
    "dcp-async-shared",
    "torch_checkpointing",
    "torch",
)


_PART_FIGURES = [f"{part}_s" for part in PARTS]


def _run(tmp_path: Path, module: str, *arguments: str) -> tuple[Results, str]:
    """The results and the text of a run at a tiny size; nothing else may be left behind."""
    figures = tmp_path / "figures.json"
    where = ["--folder", str(tmp_path), "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments, *where],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more of them spin on a busy machine
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "failed" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    return read_json(figures), done.stdout


def _left_out(results: Results, place: str) -> set[str]:
    return {name.split("/")[-1] for name in results.notes if name.startswith(place)}


def _measured(results: Results, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in results.names(prefix)}


@pytest.mark.full
def test_every_row_of_both_states_is_measured_or_said_to_be_left_out(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    results, printed = _run(
        tmp_path,
        "bench.local",
        *("--no-settle", "--rounds", "1", "--warmup", "0"),
        *("--size-gb", "0.008", "--small-tensors", "200"),
    )
    for kind in ("gpt", "small"):
        gone = _left_out(results, f"local/{kind}/")
        assert gone <= {"dcp-async-shared", "torch_checkpointing"}
        assert _measured(results, f"local/{kind}/save/") == set(SAVES) - gone
        assert _measured(results, f"local/{kind}/load/") == set(LOADS) - gone
        assert set(LIMITS) - {"aes_gcm_1_s", "aes_gcm_all_s", "populate_all_s"} <= set(
            results.cases[f"local/{kind}/limits"][0].figures
        )
    assert printed.count("| dcp.save, thread_count=2 |") == 2
    assert printed.count("| holdfast, every byte verified |") == 2


@pytest.mark.full
def test_of_a_frozen_state_a_tenth_changes(tmp_path: Path) -> None:
    results, _ = _run(
        tmp_path,
        "bench.local",
        *("--no-settle", "--rounds", "1", "--warmup", "0", "--states", "gpt"),
        *("--size-gb", "0.02", "--only", "holdfast-frozen"),
    )
    share = results.median("local/gpt/save/holdfast-frozen", "changing_share")
    assert share is not None
    assert 0.08 < share <= 0.1


@pytest.mark.full
def test_a_first_resume_is_measured_in_each_condition(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    results, printed = _run(
        tmp_path, "bench.resumes", *("--size-gb", "0.01", "--rounds", "1", "--memories", "ready")
    )
    assert len(results.names("resumes/")) == 4 * 6
    assert not results.has_failed
    assert printed.count("| holdfast, `resume()` |") == 4


@pytest.mark.full
def test_limits_run_alone(tmp_path: Path) -> None:
    results, printed = _run(
        tmp_path, "bench.limits", "--size-gb", "0.01", "--rounds", "1", "--no-settle"
    )
    figures = results.cases["limits"][0].figures
    assert all(value > 0 for values in figures.values() for value in values if values != [0.0])
    assert "| O_DIRECT write + fsync, all threads |" in printed
    assert "A hard link, synced with 999 others:" in printed


@pytest.mark.full
def test_every_training_is_slowed_down(tmp_path: Path) -> None:
    results, printed = _run(
        tmp_path,
        "bench.slowdown",
        *("--no-settle", "--rounds", "1", "--size-gb", "0.008", "--steps", "3"),
        *("--tokens", "4", "--threads", "1"),
    )
    gone = _left_out(results, "slowdown/")
    assert _measured(results, "slowdown/") == set(TRAININGS) - gone
    figures = results.cases["slowdown/holdfast"][0].figures
    assert len(figures["added_s"]) == 2
    assert all(value > 0 for value in figures["core_s"])
    assert "core_s" not in results.cases["slowdown/none"][0].figures
    assert "| no save |" in printed


@pytest.mark.full
def test_every_small_thing_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    results, printed = _run(
        tmp_path,
        "bench.metadata",
        *("--no-settle", "--rounds", "1", "--size-gb", "0.008", "--shards", "500"),
        *("--checkpoints", "4", "--small-tensors", "100"),
    )
    manifests = results.median("metadata/run/resume", "manifests_count")
    assert manifests is not None
    assert 1 <= manifests <= 4
    assert "| an index of 500 shards: read |" in printed
    assert "| a root of 4 checkpoints: `holdfast ls` |" in printed
    assert "–" not in printed.split("`holdfast --help` |")[1].split("|")[0]


@pytest.mark.full
def test_codecs_and_ciphers_are_compared_with_a_plain_save(tmp_path: Path) -> None:
    results, printed = _run(
        tmp_path,
        "bench.codecs",
        *("--no-settle", "--rounds", "1", "--steps", "2", "--pairs", "1"),
        *("--size-gb", "0.01", "--slow-size-gb", "0.01"),
        *("--only", "none again", "auto", "aes-256-gcm"),
    )
    assert _measured(results, "codecs/save/disk/") == {"none again", "auto", "aes-256-gcm"}
    assert _measured(results, "codecs/save/slow/") == {"none again", "auto"}
    assert "| durable save sealed by AES-256-GCM: vs. a plain one | at most 1.25× |" in printed
    assert "not measured" not in printed
    assert printed.count("| zstd alone, level 3, whole |") == 2


@pytest.mark.full
def test_transfers_and_trainings_are_measured_on_a_server_of_the_tests(tmp_path: Path) -> None:
    results, printed = _run(
        tmp_path,
        "bench.remote",
        *("--no-settle", "--rounds", "1", "--server", "moto", "--size-gb", "0.05"),
        *("--training-gb", "0.01", "--steps", "2", "--saves", "1"),
    )
    gone = {name.partition("/")[2] for name in results.notes}
    assert gone <= {"s3torchconnector", "dcp-fsspec", "dcp-async-fsspec"}
    assert _measured(results, "remote/") == set(CLIENTS) - gone
    assert _measured(results, "remoteslowdown/") == {"none", *SAVERS} - gone
    figures = results.cases["remote/holdfast"][0].figures
    assert figures["upload_client_cpu_s"][0] > 0
    assert figures["upload_server_cpu_s"][0] > 0
    assert "| verified download: share of the fastest bare client | at least 0.95× |" in printed
    assert printed.count("| holdfast, straight to the store |") == 2


@pytest.mark.full
def test_tables_of_an_earlier_run_are_printed_again(tmp_path: Path) -> None:
    figures = tmp_path / "old.json"
    results = Results(titles={"remote": "1 GB"})
    results.add("remote/obstore", Outcome(figures={"nbytes": [2e6], "upload_s": [0.5]}))
    write_json(figures, results, {})
    words = [sys.executable, "-m", "bench.remote", "--tables-of", str(figures)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert "| obstore | 500 ms | 4 MB/s |" in done.stdout


@pytest.mark.full
def test_the_gpu_benchmark_runs_on_cpu_tensors(tmp_path: Path) -> None:
    results, printed = _run(
        tmp_path,
        "bench.gpu",
        *("--no-settle", "--rounds", "1", "--device", "cpu", "--size-gb", "0.008"),
        *("--steps", "3", "--tokens", "4", "--threads", "1"),
    )
    assert {"holdfast", "none", "dcp-async"} <= _measured(results, "gpu/0.008 GB/save/")
    assert _measured(results, "gpu/0.008 GB/load/") == {"holdfast", "holdfast-resume", "dcp"}
    assert "| pinned memory to device |" in printed


@pytest.mark.full
def test_the_gpu_benchmark_says_when_there_is_no_gpu(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    results, printed = _run(tmp_path, "bench.gpu", "--rounds", "1")
    assert not results.cases
    assert "there is no CUDA here" in printed


@pytest.mark.full
def test_every_loop_around_a_step_is_measured_and_printed(tmp_path: Path) -> None:
    results, printed = _run(tmp_path, "bench.trainer", "--rounds", "2", "--steps", "20")
    assert [len(found) for found in results.cases.values()] == [2] * 6
    assert all(results.median(case, "step_s") for case in results.cases)
    assert all(f"| {case.removeprefix('trainer/')} |" in printed for case in results.cases)


@pytest.mark.full
def test_a_profile_names_the_functions_in_which_a_load_and_a_save_spend_their_time(
    tmp_path: Path,
) -> None:
    sizes = ("--size-gb", "0.05", "--seconds", "1", "--only", "save", "training-overlap")
    results, printed = _run(tmp_path, "bench.where", *sizes)
    assert set(results.cases) == {"where/save", "where/training-overlap"}
    assert all(results.median(case, "call_s") for case in results.cases)
    named = {name.split("`")[1] for name in results.cases["where/save"][0].figures if "`" in name}
    assert named & {"Image.update", "Image.overwrite_small", "block_digest"}
    assert "### save(), all of it changed: " in printed


@pytest.mark.full
def test_a_call_with_overlap_is_timed_by_its_parts(tmp_path: Path) -> None:
    results, printed = _run(tmp_path, "bench.parts", "--size-gb", "0.02", "--rounds", "1")
    for case in ("parts/cold", "parts/hot"):
        (outcome,) = results.cases[case]
        *parts, calls = (outcome.figures[name] for name in [*_PART_FIGURES, "call_s"])
        assert all(value > 0 for values in parts for value in values)
        for call_s, *parts_s in zip(calls, *parts, strict=True):
            assert call_s / 2 < sum(parts_s) <= call_s  # the parts are all of it, and none twice
    assert "| **the call** |" in printed


@pytest.mark.full
def test_what_the_training_itself_computes_is_not_the_savers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Servers of other tests are children of this process, and compute when they like.
    monkeypatch.setattr("bench.slowdown.own_children", frozenset)
    spec = StateSpec(kind="gpt", gpt_nbytes=8_000_000, num_small=0)
    loop = Loop(Training(peer="none", spec=spec, folder=tmp_path, num_threads=1))
    loop.step()
    loop.know_threads()
    before_s = loop.savers_s()
    compute(0.3)
    assert loop.savers_s() - before_s < 0.1
    thread = Thread(target=compute, args=(0.3,))
    thread.start()
    thread.join()
    assert 0.2 < loop.savers_s() - before_s < 0.6


def compute(seconds: float) -> None:
    """Take so much of a processor."""
    until = thread_time() + seconds
    while thread_time() < until:
        pass


@pytest.mark.full
def test_ranks_save_and_load_beside_bare_writers_and_dcp(tmp_path: Path) -> None:
    results, printed = _run(
        tmp_path, "bench.ranks", *("--no-settle", "--rounds", "1", "--size", "2MB")
    )
    saves = {"bare", "direct", "holdfast", "holdfast-overlap"}
    saves |= {"dcp", "dcp-async", "dcp-async-kept"}
    assert _measured(results, "ranks/save/") == saves
    assert _measured(results, "ranks/load/") == {"holdfast", "dcp"}
    assert _measured(results, "ranks/copies") == {""}
    assert _measured(results, "ranks/tiny/") == {"ranks", "alone"}
    assert (
        "| … agreement: durable save of a tiny state, plan unchanged | at most 50 ms |" in printed
    )
    assert "not measured" not in printed


@pytest.mark.full
def test_saves_to_disks_of_hosts_and_resumes_from_each_source_are_measured(tmp_path: Path) -> None:
    options = ("--no-settle", "--rounds", "1", "--size", "2MB")
    results, printed = _run(tmp_path, "bench.hosts", *options)
    assert _measured(results, "hosts/save/") == {"shared", "apart", "partner"}
    sources = {"shared", "own", "partner", "remote", "memory"}
    assert _measured(results, "hosts/resume/") == sources
    assert "not measured" not in printed


@pytest.mark.full
def test_pages_are_painted_and_filtered_and_a_training_goes_on_beside_one(
    tmp_path: Path,
) -> None:
    try:
        program()
    except Unavailable as error:
        skip_or_fail(str(error))
    small = ("--checkpoints", "5", "--tensors", "20", "--pairs", "1", "--segment-s", "0.2")
    results, printed = _run(tmp_path, "bench.serve", *small)
    assert "first paint" in printed
    assert not results.has_failed
    assert results.median("serve/tensors", "filter_s") is not None
    assert results.median("serve/beside", "added") is not None


@pytest.mark.full
def test_an_index_of_boxes_is_written_and_read() -> None:
    command = [sys.executable, "-m", "bench.boxes", "--boxes", "3000"]
    command += ["--ranks", "300", "--of-rank", "10"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    one, in_parts = printed.stdout.splitlines()
    assert "one document, 3,000 boxes" in one
    assert "in parts, 300 ranks of 10 boxes" in in_parts
    assert "documents 3.00, rank_documents 2.00" in in_parts
    assert "peak" in one
    assert "peak" in in_parts


@pytest.mark.full
def test_saves_of_many_ranks_are_measured_beside_dcp() -> None:
    command = [sys.executable, "-m", "bench.scale", "--ranks", "8", "16", "--replicas", "1", "2"]
    command += ["--boxes", "20"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    ours, dcp = printed.stdout.split("The planner of DCP:")
    for tables in (ours, dcp):
        rows = [line for line in tables.splitlines() if line.startswith(("| 8 ", "| 16 "))]
        assert len(rows) == 4
        assert all(cell.strip() for row in rows for cell in row.split("|")[1:-1])


@pytest.mark.full
def test_the_one_command_prints_goals_before_tables(tmp_path: Path) -> None:
    results, printed = _run(tmp_path, "bench", "--quick", "--only", "trainer")
    assert list(results.part("trainer").cases) == list(results.cases)
    assert "| measure | goal | found | met |" in printed
    assert printed.index("## Goals") < printed.index("## bench.trainer")


def test_the_one_command_knows_the_arguments_of_every_benchmark() -> None:
    from bench.__main__ import _BENCHES

    for name, arguments in [*FULL.items(), *QUICK.items()]:
        assert _BENCHES[name].parse(arguments).rounds >= 1
    assert set(QUICK) <= set(FULL)
    assert {"holdfast", "holdfast-overlap", "torch_checkpointing"} <= set(PEERS)
