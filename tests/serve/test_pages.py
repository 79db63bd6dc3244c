"""Claims about what the pages show, read from a real server."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.roots import flip, folder_of
from tests.serve.client import WAIT_S, Page, Reply, links, serving
from tests.serve.conftest import EVIL

import holdfast
from holdfast.cli import watch
from holdfast.cli.options import NAMED, KeySources
from holdfast.cli.watch import Watcher
from holdfast.cli.web import checkpoints, jobs, site
from holdfast.cli.web.curves import MetricCurve
from holdfast.cli.web.figures import make_csv
from holdfast.cli.web.site import (
    MAX_TEXT,
    NUM_WORKERS,
    OLD_S,
    LastAnswer,
    _escape_text,
    make_runs,
    names_of,
)
from holdfast.errors import StoreError
from holdfast.keys import Encryption, from_file
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from runs import new_run

TABS = ("", "/checkpoints", "/lineage", "/retention", "/resume", "/costs", "/compare")


def text_of(page: str) -> str:
    """Return the words of a page."""
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


def folders(root: Path) -> list[str]:
    """Return the folders of all checkpoints, newest first."""
    return [entry.folder for entry in Catalog(LocalStore(root)).checkpoints()]


def test_the_first_page_tells_health_head_and_what_is_deleted_next(page: Page) -> None:
    text = text_of(page.whole("/r/run"))
    assert "Healthy" in text
    assert "not running; the last process ended cleanly" in text
    assert re.search(r"A resume takes step 300 ", text)
    assert "What is deleted next" in text
    assert "training" not in text_of(page.whole("/r/run/live"))
    assert re.search(r"step 300, saved .* ago · 5 checkpoints", text_of(page.whole("/r/run/live")))
    roots = text_of(page.whole("/"))
    assert re.search(r" run ended 300 0.05 .* ago .* 5 ", roots)


def test_lineage_shows_what_was_left_behind_and_why(page: Page) -> None:
    whole = page.whole("/r/run/lineage")
    assert whole.count('class="left-behind"') == 2
    assert "rollback" in text_of(whole)
    rows = re.findall(r'<tr class="left">(.*?)</tr>', whole, re.DOTALL)
    assert [text_of(row).split()[1] for row in rows] == ["400", "300"]
    only = page.whole("/r/run/lineage?state=left+behind")
    assert len(re.findall(r"/r/run/c/", only)) == 2


def test_retention_resume_and_costs_show_the_answers_of_their_commands(
    page: Page, run_root: Path
) -> None:
    from holdfast.cli.log import log_root
    from holdfast.cli.prune import forecast_deletions
    from holdfast.cli.resume_plan import plan_of

    forecast: Any = forecast_deletions(str(run_root)).document
    text = text_of(page.whole("/r/run/retention"))
    assert any(save.gone for save in forecast.saves)
    for save in forecast.saves:
        for gone in save.gone:
            assert gone.why in text
    for one in forecast.kept:
        assert one.folder in text
    other = text_of(page.whole("/r/run/retention?keep=last:1"))
    assert "rule last 1 " in other
    assert "UsageError" in page.whole("/r/run/retention?keep=../..")
    plan: Any = plan_of(str(run_root), verify=False).document
    text = text_of(page.whole("/r/run/resume"))
    for candidate in plan.candidates:
        assert candidate.outcome in text
        assert (candidate.why or "") in text
    log: Any = log_root(str(run_root), saves=True).document
    data = json.loads(page.whole("/r/run/costs.json"))
    stalls = {s.step: s.cost.stall_s for session in log.sessions for s in session.saves if s.cost}
    assert data["panels"][0]["curves"][0]["name"] == "stall"
    assert {*data["x"]} == {*stalls}
    assert "durable after" in page.whole("/r/run/costs")


def test_curves_have_saves_starts_and_a_table_behind_them(page: Page) -> None:
    data = json.loads(page.whole("/r/run/curves.json"))
    (panel,) = data["panels"]
    assert [(one["name"], one["branch"]) for one in panel["curves"]] == [("loss", 0), ("loss", 1)]
    assert [mark["step"] for mark in data["marks"]] == [100, 200, 300, 400, 300]
    states = ["kept", "kept", "left-behind", "left-behind", "kept"]
    assert [mark["state"] for mark in data["marks"]] == states
    assert all(page.get(mark["href"]).status == 200 for mark in data["marks"])
    assert [(one["step"], one["failed"]) for one in data["starts"]] == [(200, False)]
    zoomed = json.loads(page.whole("/r/run/curves.json?from=150&to=350&x=step"))
    assert zoomed["x"] == [200, 300]
    assert json.loads(page.whole("/r/run/curves.json?q=nothing"))["panels"] == []
    assert "300 0.05" in text_of(page.whole("/r/run/numbers"))


def test_values_and_reasons_outlive_deleted_checkpoints(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"model": {"w": torch.zeros(2)}}
    with holdfast.CheckpointManager(root, state, every="10step", keep="last:1") as manager:
        for step in range(1, 41):
            state["model"]["w"] += 1
            manager.maybe_save(step, metrics={"loss": 1 / step})
    holdfast.add_metrics(f"{root}@latest", {"eval/acc": 0.5})
    with serving([root]) as page:
        data = json.loads(page.whole("/r/run/curves.json"))
        assert data["x"] == [*range(1, 41)]
        assert [panel["title"] for panel in data["panels"]] == ["loss", "acc"]
        marks = {mark["step"]: mark for mark in data["marks"]}
        states = {step: mark["state"] for step, mark in marks.items()}
        assert states == {10: "deleted", 20: "deleted", 30: "deleted", 40: "kept"}
        assert re.search(r", deleted 20\d\d-.*: not kept by: last 1", marks[20]["text"])
        lineage = text_of(page.whole("/r/run/lineage?state=deleted"))
        assert (
            len(re.findall(r"deleted 20\d\d-\S+ \S+: not kept by", lineage)) == 2 * 3
        )  # picture, table
        rows = [*csv.reader(io.StringIO(page.get("/r/run/metrics.csv").text))][1:]
        assert [(row[1], row[4]) for row in rows][-2:] == [("39", ""), ("40", "0.5")]
        assert len(rows) == 40
        every_link_works(page)


def test_metrics_are_downloaded_as_csv(page: Page) -> None:
    for path in ("/r/run/metrics.csv", "/metrics.csv?metric=loss&runs=run"):
        reply = page.get(path)
        assert reply.headers["content-type"].startswith("text/csv")
        head, *rows = csv.reader(io.StringIO(reply.text))
        assert head == ["run", "step", "time", "loss"]
        expected = [["run", "100", "0.3"], ["run", "200", "0.15"], ["run", "300", "0.05"]]
        assert [[row[0], row[1], row[3]] for row in rows] == expected
        assert all(datetime.fromisoformat(row[2]).tzinfo for row in rows)
    assert page.get("/metrics.csv?metric=none").status == 404
    assert page.get("/curves.json?runs=none").status == 404


def test_names_in_csv_are_no_formulas() -> None:
    curve = MetricCurve("=1+1", *(np.array([1.0]) for _ in range(3)))
    head, row = csv.reader(io.StringIO(make_csv({"@run": {"=1+1": curve}}, ["=1+1"])))
    assert (head[3], row[0]) == ("'=1+1", "'@run")


def test_the_list_is_filtered_by_all_words(page: Page) -> None:
    assert "5 of 5 checkpoints" in text_of(page.whole("/r/run/checkpoints"))
    assert "1 of 5 checkpoints" in text_of(page.whole("/r/run/checkpoints?q=MANUAL+%23paper"))
    assert "2 of 5 checkpoints" in text_of(page.whole("/r/run/checkpoints?q=left+behind"))
    assert "0 of 5 checkpoints" in text_of(page.whole("/r/run/checkpoints?q=manual+interval"))
    part = page.get("/r/run/checkpoints?q=paper", HX_Request="true").text
    assert "<html" not in part
    assert part.count("<tr>") == 2


def test_a_checkpoint_shows_its_manifest_and_finds_its_tensors(page: Page, run_root: Path) -> None:
    newest = folders(run_root)[0]
    text = text_of(page.whole(f"/r/run/c/{newest}"))
    assert "a resume takes this one" in text
    assert "tags paper" in text
    assert "session 2, save 1" in text
    older = folder_of(run_root, 200).name
    assert f"before it {older} its session resumed from {older} took" in text
    first, second = (folder_of(run_root, step).name for step in (100, 200))
    whole = page.whole(f"/r/run/c/{second}")
    assert f"before it {first} its session resumed from the beginning took" in text_of(whole)
    assert f"/r/run/compare?a={first}&amp;b={second}" in whole
    whole = text_of(page.whole(f"/r/run/c/{newest}/tensors"))
    assert "model:0.weight F32 16×8 512" in whole
    found = text_of(page.whole(f"/r/run/c/{newest}/tensors?q=weight+model"))
    number = re.search(r"(\d+) of (\d+) tensors", found)
    assert number is not None
    assert 0 < int(number[1]) < int(number[2])


def test_long_work_runs_in_the_background_and_shows_its_answer(page: Page, run_root: Path) -> None:
    newest, *_, oldest = folders(run_root)
    one = f"/r/run/c/{newest}"
    verified = page.done(page.post(f"{one}/verify"))
    assert "Every byte is as it was written. 1 verified" in text_of(verified)
    assert "5 verified" in text_of(page.done(page.post("/r/run/verify")))
    stats = text_of(page.done(page.post(f"{one}/stats", tensor="model:0.weight")))
    assert "norm" in stats
    assert "Numbers by power of two" in stats
    assert "0.weight" in text_of(page.done(page.post(f"{one}/stats", component="model")))
    compared = text_of(page.done(page.post("/r/run/compare", a=oldest, b=newest)))
    assert "They differ." in compared
    assert "diff" in text_of(page.whole("/jobs"))


def test_every_link_of_every_page_leads_to_a_page(page: Page) -> None:
    assert {f"/r/run{tab}" for tab in TABS} <= every_link_works(page)


def every_link_works(page: Page) -> set[str]:
    """Follow all links from the first page; return where they lead."""
    seen: set[str] = set()
    wanted = ["/"]
    while wanted:
        path = wanted.pop().replace("&amp;", "&")
        if path in seen or path.endswith(("/verify", "/stats", "/stop")):
            continue
        seen.add(path)
        reply = page.get(path)
        assert reply.status == 200, path
        if reply.headers["content-type"].startswith("text/html"):
            wanted += [link for link in links(reply.text) if "/evil" not in link]
    return seen


def pages_of(page: Page, name: str, root: Path) -> list[str]:
    """Return the addresses of all pages of a run."""
    parts = [*TABS, "/numbers", "/newest", "/live", "/curves.json", "/costs.json"]
    found = [f"/r/{name}{tab}" for tab in parts]
    for folder in folders(root):
        found += [f"/r/{name}/c/{folder}", f"/r/{name}/c/{folder}/tensors"]
    return [*found, "/", "/jobs"]


def test_markup_in_names_is_shown_as_text(page: Page, evil_root: Path) -> None:
    name = "evil-b-run"
    newest, older = folders(evil_root)
    done = [
        page.post(f"/r/{name}/c/{newest}/stats", tensor=f"model:{EVIL}"),
        page.post(f"/r/{name}/c/{newest}/stats", component="model"),
        page.post(f"/r/{name}/compare", a=older, b=newest),
        page.post(f"/r/{name}/verify"),
    ]
    texts = [page.whole(path) for path in pages_of(page, name, evil_root)]
    texts += [page.done(reply) for reply in done]
    texts.append(page.whole(f"/r/{name}/checkpoints?q=%22%3E%3Cscript%3Ealert(1)"))
    for text in texts:
        if not text.startswith("{"):
            assert "<script>alert" not in text
            assert "<img" not in text
            assert not re.search(r"<[^>]*\sonerror=[^>]*>", re.sub(r'"[^"]*"', '""', text))
    assert sum(EVIL in html.unescape(text) for text in texts) > 8
    data = page.get(f"/r/{name}/curves.json")
    assert data.headers["content-type"].startswith("application/json")
    assert data.headers["x-content-type-options"] == "nosniff"


def test_no_page_has_script_or_style_in_it(page: Page, run_root: Path) -> None:
    for path in pages_of(page, "run", run_root):
        text = page.whole(path)
        if text.startswith("{"):
            continue
        assert not re.search(r"<script(?![^>]*\ssrc=)", text)
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|hx-on", text), path
        assert not re.search(r'(?:src|href|action)="(?:https?:)?//', text), path


UP = (
    "..",
    "%2e%2e",
    "..%2f..%2fetc%2fpasswd",
    "%2fetc%2fpasswd",
    "..%5c..",
    "run%00",
    "%252e%252e",
)


@pytest.mark.parametrize("up", UP)
def test_names_that_lead_elsewhere_are_not_found(page: Page, run_root: Path, up: str) -> None:
    """No text of a request is made part of a path."""
    newest = folders(run_root)[0]
    for path in (
        *(f"/r/{up}", f"/r/{up}/checkpoints", f"/r/run/c/{up}", f"/r/run/c/{up}/tensors"),
        *(
            f"/static/{up}",
            f"/r/run/{up}/page.css",
            f"/jobs/{up}",
            f"/{up}",
            f"/r/run/c/{newest}/{up}",
        ),
        f"/curves.json?runs={up}",
    ):
        assert page.get(path).status == 404, path
    text = up.replace("%2f", "/").replace("%2e", ".")
    one = f"/r/run/c/{newest}"
    assert page.post(f"/r/run/c/{up}/verify").status == 404
    for field in ("tensor", "component"):
        assert page.post(f"{one}/stats", **{field: text}).status == 404
    assert page.post("/r/run/compare", a=text, b=newest).status == 404
    assert page.post("/r/run/compare", a=newest, b=text).status == 404
    assert text_of(page.whole(f"/r/run/compare?a={up}&b={up}")).count(text) == 0


def test_the_page_has_no_route_that_changes_a_run(page: Page, run_root: Path) -> None:
    one = f"/r/run/c/{folders(run_root)[0]}"
    assert page.post(f"{one}/pin", pinned="yes").status == 404
    assert page.post(f"{one}/delete", name="x").status == 404
    assert page.get(f"{one}/delete").status == 404
    assert not re.search(r"/pin|/delete|Delete|Unpin", page.whole(one))


def test_looking_at_every_page_changes_nothing(page: Page, run_root: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in run_root.rglob("*"))
    for path in pages_of(page, "run", run_root):
        page.whole(path)
    assert sorted((path, path.stat().st_mtime_ns) for path in run_root.rglob("*")) == before


def test_work_that_is_stopped_ends(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(target: str) -> Any:
        from holdfast.cli.output import progress_bar

        with progress_bar() as progress:
            assert progress is not None
            while True:
                progress("one", 1, 2)

    monkeypatch.setattr(checkpoints, "verify_target", endless)
    with serving([run_root]) as page:
        begun = page.post("/r/run/verify").headers["location"]
        assert page.post("/r/run/verify").headers["location"] == begun  # the same work, once
        while "one" not in page.get(begun).text:
            pass
        text = page.get(begun).text
        assert "<progress" in text
        assert "Stop" in text
        assert page.post(f"{begun}/stop").status == 303
        assert "Stopped." in page.whole(begun)
        page.post("/r/run/verify")  # and the end of the server ends it


@pytest.fixture
def hung(
    run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Page, threading.Event]]:
    """A server of a run, and of a copy of it whose verification hangs until the event is set."""
    dead, answers, check = tmp_path / "dead", threading.Event(), checkpoints.verify_target
    shutil.copytree(run_root, dead, symlinks=True)

    def hanging(target: str) -> Any:
        assert not target.startswith(str(dead)) or answers.wait(WAIT_S)
        return check(target)

    monkeypatch.setattr(checkpoints, "verify_target", hanging)
    monkeypatch.setattr(jobs, "_END_S", 0.0)
    with serving([dead, run_root]) as page:
        yield page, answers
        answers.set()


def begin_all(page: Page, root: Path) -> list[Reply]:
    """Begin to verify each checkpoint of the run that hangs, and then all together."""
    begun = [page.post(f"/r/dead/c/{folder}/verify") for folder in folders(root)]
    return [*begun, page.post("/r/dead/verify")]


def test_work_of_a_root_that_does_not_answer_holds_up_no_other(
    hung: tuple[Page, threading.Event], run_root: Path
) -> None:
    page, answers = hung
    begun = begin_all(page, run_root)
    assert "5 verified" in text_of(page.done(page.post("/r/run/verify")))
    states = [
        re.findall("waiting|running", page.get(one.headers["location"]).text) for one in begun
    ]
    assert states.count(["running"]) == NUM_WORKERS
    assert "Work 6" in text_of(page.get("/r/run").text)
    answers.set()
    assert "Every byte is as it was written." in text_of(page.done(begun[-1]))


def test_work_that_hangs_is_stopped_for_the_page_and_its_threads_are_counted(
    hung: tuple[Page, threading.Event], run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, _ = hung
    monkeypatch.setattr(jobs, "STOPPING_S", 0.0)
    monkeypatch.setattr(jobs, "_MAX_UNFINISHED", 2)
    for folder in folders(run_root)[:2]:
        begun = page.post(f"/r/dead/c/{folder}/verify").headers["location"]
        while "running" not in page.get(begun).text:
            pass
        assert page.post(f"{begun}/stop").status == 303
        text = text_of(page.whole(begun))
        assert "Stopped. The root has not answered its last request" in text
    refused = page.post("/r/dead/verify")
    assert (refused.status, "too many jobs of dead" in refused.text) == (409, True)


def test_work_without_progress_is_given_up(
    hung: tuple[Page, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, answers = hung
    begun = page.post("/r/dead/verify")
    while "running" not in page.get(begun.headers["location"]).text:
        pass
    monkeypatch.setattr(jobs, "SILENT_S", 0.0)
    text = text_of(page.done(begun))
    assert "DeadlineExceeded no progress for 0 minutes" in text
    answers.set()  # whatever it does then, the page said that it failed


def test_damage_is_shown_on_the_first_page_and_by_verification(
    run_root: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(run_root, tmp_path / "run", symlinks=True))
    flip(next(folder_of(root, 200).glob("model*.safetensors")), 700)
    (folder_of(root, 100) / "model-00000.safetensors").unlink()
    with serving([root]) as page:
        text = text_of(page.whole("/r/run"))
        assert "Needs a look" in text
        assert "1 file missing or cut" in text
        found = text_of(page.done(page.post("/r/run/verify")))
        assert "Not whole." in found
        assert "DAMAGED" in found


def test_a_root_without_checkpoints_says_so(tmp_path: Path) -> None:
    with new_run().manager(tmp_path / "run") as manager:
        manager.resume()
        with serving([tmp_path / "run"]) as page:
            for tab in TABS[:6]:
                assert page.get(f"/r/run{tab}").status == 200
            assert "no checkpoints yet" in text_of(page.whole("/r/run"))
            assert page.get("/r/run/c/x").status in (404, 503)
            manager.save(5).wait()
            page.whole("/r/run/live")
            while "step 5" not in text_of(page.get("/r/run/live").text):
                pass
            assert "training now" in text_of(page.whole("/r/run"))
            assert "A resume takes step 5" in text_of(page.whole("/r/run"))


def test_an_encrypted_run_is_shown_with_its_key_and_only_with_it(tmp_path: Path) -> None:
    from holdfast.cli.keys import generate

    generate(tmp_path / "key", pair=False)
    encrypt = Encryption(keys=from_file(tmp_path / "key"))
    with new_run().manager(tmp_path / "run", encrypt=encrypt) as manager:
        manager.save(7, metrics={"loss": 1.0}).wait()
    with serving([tmp_path / "run"]) as page:
        assert "KeyUnavailable" in page.whole("/r/run") or "MissingKey" in page.whole("/r/run")
        assert "Every byte" in text_of(page.done(page.post("/r/run/verify")))
    token = NAMED.set(KeySources(files=[str(tmp_path / "key")]))
    try:
        with serving([tmp_path / "run"]) as page:
            assert "A resume takes step 7" in text_of(page.whole("/r/run"))
            one = f"/r/run/c/{folder_of(tmp_path / 'run', 7).name}"
            assert "model:0.weight" in text_of(page.whole(f"{one}/tensors"))
            assert "Every byte" in text_of(page.done(page.post(f"{one}/verify")))
            assert "norm" in page.done(page.post(f"{one}/stats", tensor="model:0.weight"))
    finally:
        NAMED.reset(token)


def test_a_look_lists_the_root_once_and_nobody_looks_unasked(
    run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is left open costs the store one list a refresh, however many pages are open."""
    listed: list[str] = []
    children = LocalStore.children

    def noted(self: LocalStore, prefix: str = "") -> tuple[str, ...]:
        listed.append(prefix)
        return children(self, prefix)

    with serving([run_root]) as page:
        page.whole("/r/run")
        page.whole("/r/run/live")
        monkeypatch.setattr(LocalStore, "children", noted)
        monkeypatch.setattr(site, "LOCAL_LOOK_S", 0.0)
        page.whole("/r/run/live")
        assert listed.count("") == 1
        monkeypatch.setattr(site, "LOCAL_LOOK_S", 1e6)
        listed.clear()
        for _ in range(5):
            page.get("/r/run/live")
            page.get("/r/run")
        assert listed == []


def test_a_root_that_takes_long_to_read_is_not_read_at_each_change(
    run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is left open must not slow the training."""
    from holdfast.cli.web import routes

    made: list[Any] = []
    monkeypatch.setattr(routes, "make_runs", lambda roots: made.append(make_runs(roots)) or made[0])
    monkeypatch.setattr(site, "SHARE", 1e-6)
    with serving([run_root]) as page:
        page.whole("/r/run/checkpoints")
        made[0]["run"].version += 1
        again = page.get("/r/run/checkpoints").text
        assert "5 of 5 checkpoints" in text_of(again)
        delay = re.search(r"load delay:(\d+)ms", again)
        assert delay is not None
        assert int(delay[1]) > 100_000
        assert "This may be old: it takes long to read, and is read again in" in text_of(again)


def test_what_a_resume_takes_is_not_the_newest_one_if_that_lost_a_file(
    run_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_root, root, symlinks=True)
    newest, older = folders(root)[0], folder_of(root, 200).name
    next((root / newest).glob("model-*.safetensors")).unlink()
    with serving([root]) as page:
        text = text_of(page.whole("/r/run"))
        assert "A resume takes step 200" in text
        assert "1 file missing or cut" in text
        assert "a resume takes this one" not in page.whole(f"/r/run/c/{newest}")
        assert "a resume takes this one" in page.whole(f"/r/run/c/{older}")


def test_an_error_is_not_held_back_as_long_as_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is away for a minute is asked again after a minute, not after two hours."""
    monkeypatch.setattr(site, "SHARE", 0.01)
    assert LastAnswer(took_s=60).rest_s == 6000
    assert LastAnswer(took_s=60, error=StoreError("x")).rest_s == OLD_S


def test_a_run_that_does_not_answer_holds_up_no_other(
    run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, answers = tmp_path / "dead", threading.Event()
    shutil.copytree(run_root, dead, symlinks=True)
    children = LocalStore.children

    def waiting(self: LocalStore, prefix: str = "") -> tuple[str, ...]:
        assert str(dead) not in self.url or answers.wait(WAIT_S)
        return children(self, prefix)

    monkeypatch.setattr(LocalStore, "children", waiting)
    with serving([dead, run_root]) as page:
        for tab in ("", "/lineage", "/retention", "/resume", "/costs"):
            assert page.get(f"/r/dead{tab}").status == 200
        assert "A resume takes step 300" in text_of(page.whole("/r/run"))
        answers.set()


def test_an_error_that_is_none_of_ours_is_shown_on_its_run(
    run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(root: str) -> Any:
        raise RecursionError("too deep")

    monkeypatch.setattr(site, "list_root", fail)
    with serving([run_root]) as page:
        assert "RecursionError too deep" in text_of(page.get("/r/run").text)
        assert "RecursionError too deep" in text_of(page.get("/").text)
        assert page.get("/r/run/resume").status == 200


def test_a_root_that_vanishes_is_not_shown_as_empty(
    run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_root, root, symlinks=True)
    monkeypatch.setattr(site, "LOCAL_LOOK_S", 0.0)
    with serving([root]) as page:
        page.whole("/r/run/live")
        shutil.rmtree(root)
        text = text_of(page.whole("/r/run/live"))
        while "cannot be read now" not in text:
            text = text_of(page.whole("/r/run/live"))
        assert "there is no longer a run here" in text


def test_work_is_looked_up_by_its_number_however_long_that_is(page: Page) -> None:
    for number in ("9" * 5000, "-1", "1e9", "%D9%A1"):
        assert page.get(f"/jobs/{number}").status == 404
        assert page.post(f"/jobs/{number}/stop").status == 404


def test_a_look_of_watch_lists_the_root_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with new_run().manager(store, preflight=False) as manager:
        manager.save(1).wait()
    watcher = Watcher(store)
    watcher.observe_root()
    listed: list[str] = []
    children = store.children
    monkeypatch.setattr(
        store, "children", lambda prefix="": (listed.append(prefix), children(prefix))[1]
    )
    assert watcher.observe_root().last_step == 1
    assert listed.count("") == 1


def test_text_without_end_is_cut(page: Page) -> None:
    assert _escape_text("x" * 20_000) == "x" * MAX_TEXT + "… (10,000 more)"
    assert _escape_text("x" * MAX_TEXT) == "x" * MAX_TEXT


def test_many_runs_have_few_threads_each() -> None:
    found = make_runs([f"/{number}" for number in range(1000)])
    assert {run._readers._num_threads for run in found.values()} == {1}


def test_names_of_roots_are_short_and_differ() -> None:
    found = names_of(["/a/gpt", "/b/gpt/", "s3://bucket/my run", "/", "/a/gpt"])
    assert [*found] == ["gpt", "gpt-2", "my-run", "run"]
    assert watch.age(7200) == "2.0 h"
