"""Checkpoints and files of weights are loaded and looked at where a web server has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast.interop.sources.web
from holdfast import (
    CachedStore,
    CheckpointManager,
    Checkpoints,
    Encryption,
    Tiered,
    load_file,
    load_weights,
)
from holdfast.cli import main
from holdfast.data import Loader
from holdfast.errors import (
    CorruptData,
    FormatError,
    NoCheckpoint,
    StoreError,
    UnsupportedStore,
    UsageError,
)
from holdfast.keys import generate
from holdfast.ownership.access import reading
from holdfast.root.catalog import Catalog, standalone
from holdfast.root.single import alone
from holdfast.store import open_store
from holdfast.train import Trainer
from webserver import Web, serving


class Served:
    """A run with steps 1 and 2 and files of its weights, on a web server."""

    def __init__(self, folder: Path, web: Web) -> None:
        self.web = web
        self.root = folder / "run"
        torch.manual_seed(0)
        self.model = nn.Linear(40, 30)
        with CheckpointManager(self.root, {"model": self.model}) as manager:
            manager.save(1).wait()
            manager.save(2, tags=["paper"]).wait()
            manager.pin(1)
            manager.tag(1, "first")
        self.weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        save_file(self.weights, folder / "weights.safetensors")
        torch.save(self.weights, folder / "weights.pt")
        torch.save(self.weights, folder / "old.bin", _use_new_zipfile_serialization=False)
        (folder / "page.html").write_text("<html>not found</html>")

    def folder(self, step: int) -> str:
        return next(path.name for path in self.root.glob(f"step-*{step}.*"))

    def url(self, step: int) -> str:
        return f"{self.web.url}/run/{self.folder(step)}"

    def same(self, found: Any) -> bool:
        return all(torch.equal(found[name], tensor) for name, tensor in self.weights.items())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as web:
        yield Served(tmp_path, web)


@pytest.mark.parametrize("end", ["", "/", "/manifest.json", "?token=abc"])
def test_a_checkpoint_is_loaded_from_its_address(served: Served, end: str) -> None:
    model = nn.Linear(40, 30)
    checkpoint = load_weights(served.url(2) + end, model)
    assert served.same(model.state_dict())
    assert checkpoint.step == 2
    assert any("can only be read" in note for note in checkpoint.notes)
    assert served.same(load_weights(served.url(2) + end))
    with load_file(served.url(2) + end) as found:
        assert torch.equal(found["model:weight"].torch(), served.model.weight)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "old.bin"])
@pytest.mark.parametrize("block_nbytes", [4 << 20, 512])
def test_a_file_of_weights_is_loaded_by_ranges(
    served: Served, name: str, block_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast.interop.sources.web, "_BLOCK_NBYTES", block_nbytes)
    assert served.same(load_weights(f"{served.web.url}/{name}?token=abc"))
    assert {(one.method, one.path) for one in served.web.asked} == {("GET", f"/{name}?token=abc")}
    assert (len(served.web.asked) == 1) == (block_nbytes > 512)


def test_a_file_that_changes_meanwhile_is_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast.interop.sources.web, "_BLOCK_NBYTES", 512)
    path = served.web.folder / "weights.safetensors"
    with load_file(f"{served.web.url}/{path.name}") as found:
        save_file({name: tensor + 1 for name, tensor in served.weights.items()}, path)
        with pytest.raises(StoreError, match="was changed while it was read"):
            found["weight"].torch()


def test_damage_is_found_by_its_digest(served: Served) -> None:
    path = next(served.root.glob(f"{served.folder(2)}/model-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=path.name):
        load_weights(served.url(2), nn.Linear(40, 30))


@pytest.mark.parametrize("missing_status", [404, 403])
def test_an_address_of_neither_says_what_to_name(served: Served, missing_status: int) -> None:
    served.web.missing_status = missing_status
    assert served.same(load_weights(served.url(2)))
    with pytest.raises((NoCheckpoint, StoreError), match="run"):
        load_weights(f"{served.web.url}/run")
    with pytest.raises(FormatError, match="no checkpoint, no safetensors"):
        load_weights(f"{served.web.url}/page.html")


def test_a_root_is_refused_and_says_what_to_name(served: Served) -> None:
    with pytest.raises(NoCheckpoint, match="not the root"):
        load_weights(f"{served.web.url}/run")
    with pytest.raises(NoCheckpoint, match="not the root"):
        load_weights(f"{served.web.url}/run", nn.Linear(40, 30))
    with pytest.raises(UsageError, match="'step=2' cannot be looked up"):
        load_weights(f"{served.web.url}/run@step=2", nn.Linear(40, 30))


def test_a_login_with_an_at_is_no_name_of_a_checkpoint(served: Served) -> None:
    address = served.url(2).replace("://", "://bob:secret@")
    assert served.same(load_weights(address))
    assert "authorization" in served.web.asked[-1].headers


def test_a_checkpoint_alone_has_the_names_and_marks_of_its_folder(served: Served) -> None:
    folder = served.folder(1)
    there = alone(open_store(f"{served.web.url}/run"), folder)
    here = open_store(served.root)
    assert there.children(folder) == here.children(folder)
    assert [*there.list(f"{folder}/")] == [*here.list(f"{folder}/")]
    assert standalone(there, folder) == standalone(here, folder)
    assert Catalog(there).claims() == Catalog(here).claims()
    assert Catalog(there).marks(folder).tags == ("first",)
    with pytest.raises(UnsupportedStore):
        there.put(f"{folder}/x", b"")


def test_a_server_with_a_page_for_any_name_is_refused_and_not_asked_for_ever(
    served: Served,
) -> None:
    served.web.missing_status = 200
    with pytest.raises(UnsupportedStore, match="a page for a file that does not exist"):
        load_weights(served.url(2))
    assert len(served.web.asked) < 10


def test_a_renamed_folder_is_a_checkpoint_all_the_same(served: Served) -> None:
    (served.root / served.folder(2)).rename(served.web.folder / "best-of-all")
    with reading(f"{served.web.url}/best-of-all") as checkpoint:
        assert checkpoint.step == 2


def test_an_encrypted_checkpoint_is_loaded_with_its_key(served: Served) -> None:
    keys = Encryption(keys=generate())
    root = served.web.folder / "sealed"
    with CheckpointManager(root, {"model": served.model}, encrypt=keys) as manager:
        folder = manager.save(1).wait().folder
    assert served.same(load_weights(f"{served.web.url}/sealed/{folder}", encrypt=keys))


def test_a_server_without_ranges_is_named(served: Served) -> None:
    served.web.has_ranges = False
    for url in (served.url(2), f"{served.web.url}/weights.pt"):
        with pytest.raises(UnsupportedStore, match="Range requests"):
            load_weights(url)


REFUSED: list[Callable[[str, Path], Any]] = [
    lambda url, here: CheckpointManager(url, {"model": nn.Linear(1, 1)}),
    lambda url, here: CheckpointManager(Tiered(here, url), {"model": nn.Linear(1, 1)}),
    lambda url, here: training(url).fit("1step"),
]


@pytest.mark.parametrize("open_root", REFUSED)
def test_a_root_to_save_into_is_refused_by_name(
    open_root: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"'https://\*\*\*@host/run': a web address can only"):
        open_root("https://bob:secret@host/run", tmp_path / "local")


def test_a_cache_around_it_saves_nothing(served: Served, tmp_path: Path) -> None:
    cached = CachedStore(f"{served.web.url}/run", tmp_path / "cache", max_nbytes=1 << 24)
    with pytest.raises(UnsupportedStore, match="lists no files"):
        load_weights(cached, nn.Linear(40, 30))


def training(root: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=Loader(torch.ones(8, 4), batch_size=2),
        loss=lambda model, batch: model(batch).square().mean(),
        checkpoints=Checkpoints(root, every="1step"),
        progress=False,
        log=False,
    )


def test_a_training_starts_from_it(served: Served) -> None:
    folder = served.web.folder
    training(folder / "first").fit("3step")
    of_three = next(path.name for path in (folder / "first").glob("step-*3.*"))
    second = training(folder / "second")
    second.fit("4step", start_from=f"{served.web.url}/first/{of_three}")
    whole = training(folder / "whole")
    whole.fit("4step")
    assert torch.equal(second.state["model"].weight, whole.state["model"].weight)


def test_a_start_that_is_refused_shows_no_signature(served: Served) -> None:
    (served.root / served.folder(2)).rename(served.root / "best-of-all")
    url, trainer = f"{served.web.url}/run/best-of-all?token=abcxyz", training(served.root / "new")
    with pytest.raises(UsageError, match="was renamed") as error:
        trainer.fit("4step", start_from=url)
    assert "abcxyz" not in str(error.value)


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["holdfast", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("words", ["show", "verify", "tree", "stats", "diff HERE"])
def test_a_command_answers_as_for_the_folder(
    served: Served, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = str(served.root / served.folder(1))
    name, *more = words.replace("HERE", str(served.web.folder / "weights.pt")).split()
    answers = []
    for source in (here, served.url(1)):
        capfd.readouterr()
        code = command(monkeypatch, name, *more, source)
        text = capfd.readouterr().out
        text = re.sub(r"(/\S*|http://\S*)/run", "ROOT", text)
        answers.append((code, re.sub(r"^  note: read without a lease.*\n", "", text, flags=re.M)))
    assert answers[0] == answers[1]
    assert answers[0][1]


@pytest.mark.parametrize("words", ["show", "import HERE --step 1"])
def test_a_command_shows_no_signature(
    served: Served,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, *more = words.replace("HERE", str(tmp_path / "copy")).split()
    for as_json in ([], ["--json"]):
        command(monkeypatch, name, *as_json, f"{served.url(1)}?token=abcxyz", *more)
        found = capfd.readouterr()
        assert found.out or found.err
        assert "abcxyz" not in found.out + found.err


@pytest.mark.parametrize("words", ["cp HERE", "run --root"])
def test_a_command_that_would_save_there_refuses_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["true"] if words.startswith("run") else []
    words = words.replace("HERE", str(tmp_path))
    assert command(monkeypatch, *words.split(), "https://host/run", *more) == 2
    assert "can only be read" in capfd.readouterr().err


def test_a_copy_of_it_is_a_run_that_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert command(monkeypatch, "cp", served.url(2), tmp_path / "copy") == 0
    model = nn.Linear(40, 30)
    with CheckpointManager(tmp_path / "copy", {"model": model}) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        assert served.same(model.state_dict())


def test_a_truncated_file_is_damaged(served: Served) -> None:
    path = served.web.folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises((CorruptData, FormatError)):
        load_weights(f"{served.web.url}/{path.name}")
