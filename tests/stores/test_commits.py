"""Commits through a flaky network: none lost, torn, falsely refused or falsely acknowledged."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from holdfast.errors import CommitConflict, OutcomeUnknown, StoreError, TransientStoreError
from holdfast.maintenance.gc import collect_garbage
from holdfast.root import commit as commit_module
from holdfast.store import open_store
from holdfast.store.base import Buffer, Store
from holdfast.store.remote import RemoteOptions, RemoteStore
from servers.client import broken_uploads
from servers.faults import TRANSIENT, FaultProxy, Kind, Rule
from servers.fixtures import on, use
from servers.program import Service
from stores.oracle import Oracle, commit_many

OTHERS = ("localstack", "gcs", "azurite")
SMALL = 1 << 14
"""Elements of a state of one put a file: 64 KiB."""
LARGE = 5 << 20
"""Elements of a state whose file is a multipart upload: 20 MiB."""


@contextmanager
def flaky_run(
    service: Service,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    options: RemoteOptions | None = None,
    **faults: object,
) -> Iterator[tuple[FaultProxy, Oracle, Store]]:
    """A proxy that lets all pass for now, an oracle that looks past it, and a store behind it."""
    with FaultProxy(service, **faults) as proxy:  # type: ignore[arg-type]
        use(service, monkeypatch)
        direct = open_store(root)
        direct.children()  # from now on it has its clients
        use(proxy.service, monkeypatch)
        flaky = RemoteStore(root, options=options)
        flaky.children()
        yield proxy, Oracle(direct=direct), flaky


def check_commits(
    service: Service,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rate: float,
    num: int,
    num_runs: int = 1,
    num_elements: int = SMALL,
    kinds: tuple[Kind, ...] = TRANSIENT,
    options: RemoteOptions | None = None,
) -> None:
    """Every save is acknowledged, since nothing stays broken, and every one is what it says.

    `num` saves in each of `num_runs` runs beside each other: most of their time is waiting.
    """

    def run(number: int, proxy: FaultProxy, oracle: Oracle, flaky: Store) -> None:
        commit_many(
            flaky, oracle, num=num, num_elements=num_elements, begun=lambda: proxy.set_rate(rate)
        )
        oracle.check_end(num_elements)

    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                flaky_run(
                    service,
                    f"{root}/{number}",
                    monkeypatch,
                    options,
                    kinds=kinds,
                    seed=num + number,
                )
            )
            for number in range(num_runs)
        ]
        with ThreadPoolExecutor(num_runs) as pool:
            list(pool.map(run, range(num_runs), *zip(*runs, strict=True)))
        counts = sum((proxy.counts for proxy, _, _ in runs), Counter[str]())
    print(f"{service.name}: {num_runs * num} commits, {rate:.0%} faults: {dict(counts)}")
    for _, oracle, _ in runs:
        assert oracle.broken == []
        assert (oracle.refused, oracle.unknown) == ([], [])
        assert len(oracle.acknowledged) == num
        collect_garbage(oracle.direct)
    assert counts.total() - counts["requests"] >= 0.5 * rate * counts["requests"]
    assert broken_uploads(service, root) == []


@pytest.mark.parametrize(
    ("service", "rate", "num", "num_runs"),
    [
        ("moto", 0.2, 6, 1),
        *(
            pytest.param(*run, marks=pytest.mark.full)
            for run in (
                *(("moto", 0.05, 20, 3), ("moto", 0.2, 20, 3)),
                *((name, 0.2, 12, 1) for name in OTHERS),
            )
        ),
    ],
    indirect=["service"],
)
def test_commits_through_faults_are_what_they_say(
    service: Service,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    num: int,
    num_runs: int,
) -> None:
    """R24, R26, invariant 1."""
    check_commits(service, root, monkeypatch, rate=rate, num=num, num_runs=num_runs)


@on("localstack", "gcs")
def test_multipart_uploads_through_faults_are_what_they_say(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R24, R26: parts and their completion are struck, too."""
    check_commits(service, root, monkeypatch, rate=0.2, num=6, num_elements=LARGE)


@on("gcs")
def test_commits_through_requests_without_replies_are_what_they_say(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R24: time-outs."""
    impatient = RemoteOptions(timeout_s=0.5)
    silent: tuple[Kind, ...] = ("blackhole",)
    check_commits(service, root, monkeypatch, rate=0.04, num=6, kinds=silent, options=impatient)


@pytest.mark.stores
@pytest.mark.timeout(3600)
@on("moto", "ceph")
@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_a_thousand_commits_through_faults_are_what_they_say(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """R24, R26, invariant 1."""
    check_commits(service, root, monkeypatch, rate=rate, num=250, num_runs=4)


LOST_REPLIES = {
    "the manifest": Rule(kind="lose_reply", method="PUT", path="*manifest.json*"),
    "a file": Rule(kind="lose_reply", method="PUT", path="*.safetensors*", times=2),
    "the fence": Rule(kind="lose_reply", method="HEAD", path="*writers/*"),
    "the beginning of an upload": Rule(kind="lose_reply", method="POST", path="*[?]uploads*"),
    "a part": Rule(kind="lose_reply", method="PUT", path="*partNumber=*"),
    "the completion of an upload": Rule(kind="lose_reply", method="POST", path="*uploadId=*"),
}


@on("localstack", "gcs")
@pytest.mark.parametrize("what", LOST_REPLIES)
def test_no_save_fails_for_a_lost_reply_of(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """R24, R26: the effect is there, and the save finds that out. An upload of which nobody knows
    the name is begun again, and the first one is collected."""
    oracle = lose(LOST_REPLIES[what], service, root, monkeypatch)
    assert oracle.acknowledged == [1, 2, 3], (oracle.refused, oracle.unknown)


def lose(rule: Rule, service: Service, root: str, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Save three times with this fault in the second, judge them, and collect what is left."""
    is_upload = rule.method == "POST" or "partNumber" in rule.path
    num_elements = LARGE if is_upload else SMALL
    with flaky_run(service, root, monkeypatch) as (proxy, oracle, flaky):
        fresh = replace(rule, reached=threading.Event())
        commit_many(flaky, oracle, num=3, num_elements=num_elements, begun=lambda: proxy.add(fresh))
        oracle.check_end(num_elements)
        assert fresh.reached.is_set()
    assert oracle.broken == []
    collect_garbage(oracle.direct)
    assert broken_uploads(service, root) == []
    return oracle


class Blind(RemoteStore):
    """Mutant: repeats a put if absent whose outcome is unclear, and believes what it then hears."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        try:
            super().put(key, data, if_absent=if_absent)
        except (OutcomeUnknown, TransientStoreError):
            super().put(key, data, if_absent=if_absent)


class Trusting(RemoteStore):
    """Mutant: takes a put whose reply is missing for done."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        try:
            super().put(key, data, if_absent=if_absent)
        except (OutcomeUnknown, TransientStoreError):
            if not if_absent:
                raise


def believe_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the commit takes a taken key for another's, without reading it back."""

    def conflict(store: Store, key: str, data: bytes, error: StoreError) -> None:
        raise CommitConflict(f"{key}: {error}")

    monkeypatch.setattr(commit_module, "_expect_ours", conflict)


MUTANTS: dict[str, tuple[type[RemoteStore], bool, Rule]] = {
    "repeats blindly": (Blind, True, Rule(kind="lose_reply", method="PUT", path="*manifest.json*")),
    "trusts": (Trusting, False, Rule(kind="reset", method="PUT", path="*manifest.json*", times=20)),
}


@pytest.mark.full
@on("moto")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_catches_a_store_that(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    """R24: a false refusal and a false acknowledgement are seen, so the tests above can fail."""
    kind, believes, rule = MUTANTS[mutant]
    if believes:
        believe_the_first_answer(monkeypatch)
    with flaky_run(service, root, monkeypatch) as (proxy, oracle, _):
        flaky = kind(root)
        flaky.children()
        fresh = replace(rule, reached=threading.Event())
        commit_many(flaky, oracle, num=2, num_elements=SMALL, begun=lambda: proxy.add(fresh))
    (broken,) = oracle.broken
    assert "falsely" in broken
