"""Saves to an object store and loads from it, beside bare clients: `python -m bench.remote`.

Without `--url` it installs and starts a server of the tests, a new one in each round, and measures
against that; a place in a bucket of your own is `--url s3://bucket/prefix`, with the settings that
the clouds' tools read. Then a model is trained and saved to the store meanwhile: what does that
cost the training in all?

A server on the same machine takes its part of the same cores. Its processor time and the client's
are measured too, for a byte costs the client the same on any network.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from bench.child import in_child, settle
from bench.clients import CLIENTS, Bare
from bench.command import Bench, progress
from bench.goals import REMOTE_GOALS
from bench.machine import PeakMemory, processor_s
from bench.remotesavers import SAVERS, RemoteTraining
from bench.report import megabytes, number, results_table, seconds, times
from bench.results import Figures, Results
from bench.slowdown import NONE, train
from bench.states import StateSpec, build

SERVERS = ("ceph", "localstack", "moto", "gcs")
TRAININGS = (NONE, *SAVERS)
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a client finds its store."""

    url: str
    environment: Mapping[str, str]
    """Variables that say where the service is, and prove who asks."""
    pids: Sequence[int]
    """Of the server; none where it is on another machine."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="GPT-like state, in 1e9 bytes")
    parser.add_argument(
        "--url", help="a place in a bucket of your own; what was written is deleted"
    )
    parser.add_argument("--server", choices=SERVERS, default="ceph", help="without --url")
    parser.add_argument("--only", nargs="*", choices=CLIENTS, default=[*CLIENTS], help="clients")
    parser.add_argument(
        "--trainings", nargs="*", choices=TRAININGS, default=[*TRAININGS], help="slowed down"
    )
    parser.add_argument("--training-gb", type=float, default=0.5, help="the state of a training")
    parser.add_argument("--steps", type=int, default=30, help="at least, from save to save")
    parser.add_argument("--saves", type=int, default=2, help="counted, of a training in a round")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    turn = max((len(found) for found in results.cases.values()), default=0)
    results.titles["remote"] = f"{options.size_gb:g} GB"
    results.titles["remoteslowdown"] = f"{options.training_gb:g} GB"
    results.titles["remote server"] = options.url or options.server
    # Another one is first in each round.
    with server(options, folder) as place:
        if not options.url:  # its first bytes cost a new server more than later ones
            with _folder_in(place) as here:
                in_child(_measure, "obstore", here, options.size_gb, options.settle)
        for name in _rotated(options.only, turn):
            case, client = f"remote/{name}", CLIENTS[name]
            if _can_measure(case, client.needs, place, results, is_s3_only=client.is_s3_only):
                with _folder_in(place) as here:
                    outcome = in_child(_measure, name, here, options.size_gb, options.settle)
                results.add(case, outcome)
        for name in _rotated(options.trainings, turn):
            case, saver = f"remoteslowdown/{name}", SAVERS.get(name)
            needs, is_s3_only = (saver.needs, saver.is_s3_only) if saver else ((), False)
            if _can_measure(case, needs, place, results, is_s3_only=is_s3_only):
                own = Path(tempfile.mkdtemp(dir=folder))
                with _folder_in(place) as here:
                    results.add(case, in_child(train, _training(options, name, here, own)))
                shutil.rmtree(own)


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    first = turn % max(len(names), 1)
    return [*names[first:], *names[:first]]


@contextmanager
def server(options: argparse.Namespace, folder: Path) -> Iterator[Place]:
    """The place of this round."""
    if options.url:
        yield Place(url=options.url.rstrip("/"), environment={}, pids=())
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # they bring the servers
    from servers.keeper import PROGRAMS

    own = Path(tempfile.mkdtemp(dir=folder))
    program = PROGRAMS[options.server](own)
    with program as service:
        yield Place(
            url=service.root("bench"), environment=service.environment, pids=[*program.pids]
        )
    shutil.rmtree(own, ignore_errors=True)


@contextmanager
def _folder_in(place: Place) -> Iterator[Place]:
    """A prefix that nobody has used, and whose objects are deleted afterwards, so that the next
    finds as much room and memory in the server."""
    url = f"{place.url}/{os.urandom(6).hex()}"
    yield Place(url=url, environment=place.environment, pids=place.pids)
    outcome = in_child(_delete_all, url, place.environment)
    if outcome.error:
        progress(f"  {url} was not deleted: {outcome.error}")


def _delete_all(url: str, environment: Mapping[str, str]) -> Figures:
    import obstore
    from obstore.store import from_url

    os.environ.update(environment)
    store = from_url(url, client_options={"allow_http": True})
    for page in obstore.list(store):
        obstore.delete(store, [item["path"] for item in page])
    return {}


def _can_measure(
    case: str, needs: Sequence[str], place: Place, results: Results, *, is_s3_only: bool
) -> bool:
    """Whether a case can be measured here; a note says why not."""
    missing = [module for module in needs if importlib.util.find_spec(module) is None]
    if missing:
        results.notes[case] = f"{missing[0]} is not installed"
    elif is_s3_only and not place.url.startswith("s3:"):
        results.notes[case] = "speaks S3 only"
    else:
        progress(f"  {case}")
    return case not in results.notes


def _measure(name: str, place: Place, size_gb: float, settles: bool) -> Figures:
    os.environ.update(place.environment)
    state = build(StateSpec(kind="gpt", gpt_nbytes=round(size_gb * 1e9), num_small=0))
    state.fill(_SEED)
    nbytes = state.nbytes
    for module in CLIENTS[name].needs:
        importlib.import_module(module)  # what is imported is not of the transfer
    peak = {"upload": PeakMemory(), "download": PeakMemory()}
    client = CLIENTS[name](place.url, state)
    if isinstance(client, Bare):  # its own copy is not extra: a program has its bytes once
        peak = {"upload": PeakMemory(), "download": PeakMemory()}
    client.warm_up()
    figures: dict[str, list[float]] = {"nbytes": [float(nbytes)]}
    for figure, call in (("upload", client.upload), ("download", client.download)):
        if settles:
            settle(nbytes)
        server_s, client_s = processor_s(place.pids), process_time()
        with peak[figure].watch():
            began = perf_counter()
            call()
            took_s = perf_counter() - began
        figures[f"{figure}_s"] = [took_s]
        figures[f"{figure}_client_cpu_s"] = [process_time() - client_s]
        figures[f"{figure}_server_cpu_s"] = [processor_s(place.pids) - server_s]
        figures[f"{figure}_extra_nbytes"] = [float(peak[figure].extra_nbytes)]
    client.close()
    if not isinstance(client, Bare) and state.count_wrong(
        _SEED, negated=name.startswith("holdfast")
    ):
        raise RuntimeError("the tensors are not what was saved")
    return figures


def _training(options: argparse.Namespace, name: str, place: Place, folder: Path) -> RemoteTraining:
    return RemoteTraining(
        peer=name,
        spec=StateSpec(kind="gpt", gpt_nbytes=round(options.training_gb * 1e9), num_small=0),
        folder=folder,
        device="cpu",
        num_threads=2,
        tokens=32,
        steps=options.steps,
        num_saves=options.saves,
        settles=options.settle,
        until_done=True,
        num_quiet=20,
        url=place.url,
        environment=place.environment,
    )


def _tables(results: Results) -> list[str]:
    named = results.titles.get
    return [
        f"**Transfers**, {named('remote')}, {named('remote server')}; processor time for each GB",
        "",
        *_transfers(results, "upload"),
        "",
        *_transfers(results, "download"),
        "",
        f"**A training**, a state of {named('remoteslowdown')}, saved to {named('remote server')}",
        "",
        *_trainings(results),
    ]


def _transfers(results: Results, way: str) -> list[str]:
    titles = {f"remote/{name}": client.title for name, client in CLIENTS.items()}

    def row(case: str) -> list[str]:
        took = results.median(case, f"{way}_s")
        rate = results.ratio((case, "nbytes"), (case, f"{way}_s"))
        mine = ("remote/holdfast", f"{way}_s")
        shares = [results.ratio((case, f"{way}_{who}_cpu_s"), (case, "nbytes")) for who in _WHO]
        return [
            seconds(took),
            number(rate and rate / 1e6, "{:.0f} MB/s"),
            times(results.ratio((case, f"{way}_s"), mine)),
            *(seconds(share and share * 1e9) for share in shares),
            megabytes(results.median(case, f"{way}_extra_nbytes")),
        ]

    head = [way, "time", "rate", "vs. holdfast", "client's processor", "server's processor"]
    return results_table(results, "remote/", [*head, "extra memory"], titles, row)


_WHO = ("client", "server")


def _trainings(results: Results) -> list[str]:
    def row(case: str) -> list[str]:
        return [
            number(results.median(case, "added_s"), "{:+.2f} s"),
            seconds(results.median(case, "stall_s")),
            seconds(results.median(case, "done_s")),
            seconds(results.median(case, "quiet_step_s")),
            times(results.ratio((case, "busy_step_s"), (case, "quiet_step_s"))),
        ]

    titles = {"remoteslowdown/none": "no save"}
    titles |= {f"remoteslowdown/{name}": saver.title for name, saver in SAVERS.items()}
    head = ["training", "added by a save", "stall", "done after", "a step"]
    head.append("a step while a save runs")
    return results_table(results, "remoteslowdown/", head, titles, row)


BENCH = Bench(
    name="remote",
    about="Saves to an object store and loads from it, beside bare clients.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    goals=REMOTE_GOALS,
    rounds=2,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
