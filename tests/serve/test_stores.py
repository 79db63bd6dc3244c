"""Claims about runs on the page that are elsewhere: in a bucket, in two tiers, out of reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.serve.client import serving
from tests.serve.test_pages import text_of

from holdfast.cli.web import site
from holdfast.errors import StoreError, TransientStoreError
from holdfast.ownership.tiered_options import Tiered
from holdfast.store.local import LocalStore
from holdfast.store.remote.store import RemoteStore
from runs import new_run
from servers.fixtures import on
from servers.program import Service
from tiers import Noted, opened, saved
from ways import Tiny


@pytest.mark.full
@on("moto")
def test_a_run_in_a_bucket_is_shown_verified_and_looked_at_with_one_list(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_run().manager(root) as manager:
        for step in (100, 200):
            manager.save(step, metrics={"loss": 1 / step}).wait()
    with serving([root]) as page:
        name = root.rpartition("/")[2]
        run = f"/r/{name}"
        assert "A resume takes step 200" in text_of(page.whole(run))
        for tab in ("/checkpoints", "/lineage", "/resume", "/costs", "/numbers"):
            assert "step-00000100" in page.whole(run + tab) or tab == "/numbers"
        verified = page.done(page.post(f"{run}/verify"))
        assert "Every byte is as it was written. 2 verified" in text_of(verified)
        listed: list[str] = []
        children = RemoteStore.children

        def noted(self: RemoteStore, prefix: str = "") -> Any:
            listed.append(prefix)
            return children(self, prefix)

        monkeypatch.setattr(RemoteStore, "children", noted)
        monkeypatch.setattr(site, "REMOTE_LOOK_S", 0.0)
        page.whole(f"{run}/live")
        assert listed.count("") == 1


def test_uploads_and_what_they_took_are_among_the_costs(tmp_path: Path) -> None:
    tiny, noted = Tiny(), Noted()
    tiered = Tiered(tmp_path / "local", LocalStore(tmp_path / "remote"))
    with opened(tiered, tiny, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
        noted.wait_for("uploaded", 2)
        with serving([tmp_path / "local", tmp_path / "remote"]) as page:
            text = text_of(page.whole("/r/local/costs"))
            assert f"Uploads to {tmp_path / 'remote'}" in text
            assert "0 waiting" in text
            assert "uploaded" in text
            assert "A resume takes step 2" in text_of(page.whole("/r/remote"))


def test_a_root_that_could_not_be_reached_at_the_start_is_shown_when_it_can_be(
    run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "LOCAL_LOOK_S", 0.0)

    def fail(root: str) -> Any:
        raise TransientStoreError("the network is away")

    with monkeypatch.context() as broken:
        for name in ("open_root", "list_root"):
            broken.setattr(site, name, fail)
        with serving([run_root]) as page:
            while "the network is away" not in text_of(page.get("/").text):
                pass
            broken.undo()
            while "A resume takes step 300" not in text_of(page.get("/r/run").text):
                pass
            assert "the network is away" not in page.whole("/")


def test_a_root_that_cannot_be_read_for_a_while_says_so_and_comes_back(
    run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "LOCAL_LOOK_S", 0.0)
    with serving([run_root]) as page:
        page.whole("/r/run")
        before = page.get("/r/run/live").text
        with monkeypatch.context() as broken:

            def fail(self: LocalStore, prefix: str = "") -> Any:
                raise StoreError("the disk is away")

            broken.setattr(LocalStore, "children", fail)
            while "the disk is away" not in page.get("/r/run/live").text:
                pass
            assert "A resume takes step 300" in text_of(page.get("/r/run").text)
        while 'data-version="1"' not in page.get("/r/run/live").text:  # parts are read again
            pass
        assert 'data-version="0"' in before
