"""Mistakes on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User

THEME = Theme("Command line")


def command(words: str, names: str, did: str = "") -> None:
    """A command that fails."""

    @THEME.case(did or f"`holdfast {words}`", names=names)
    def _(user: User) -> None:
        user.holdfast(*words.replace("…", "").split())


command("ls runs/frist", "runs/frist")
command("ls runs", "runs", did="`holdfast ls runs`, the folder above the root")
command("list runs/first", "list")
command("show runs/first@step=99", "99")
command("show runs/first@stpe=3", "stpe=3")
command("verify runs/first@step=abc", "abc")
command("verify runs/first/step=3", "runs/first/step=3")
command("prune runs/first", "--keep")
command("prune runs/first --keep last:0", "n=0")
command("prune runs/first --keep last3", "last3")
command("prune runs/first --keep best:los:min", "'los'")
command("prune runs/first --keep every:1ep", "epoch")
command("prune runs/first --keep every:1000", "1000")
command("prune runs/first --keep budget:500", "500 bytes")
command("prune runs/first --keep within:36", "36")
command("prune runs/first --keep wieghts=last:1", "wieghts")
command("prune runs/first@step=3 --keep last:1", "step=3")
command("prune runs/frist --keep last:1", "runs/frist")
command("prune runs/first --keep last:1 --dryrun", "--dryrun")
command("gc runs/first --dead-epoch 7", "7")
command("gc runs", "runs", did="`holdfast gc runs`, the folder above the root")
command("gc runs/first@step=3", "step=3")
command("pin runs/first@step=99", "99")
command("tag runs/first@step=3", "TAG", did="`holdfast tag runs/first@step=3`, without a tag")
command("tag runs/first@step=3 latest", "latest")
command("untag runs/first@step=3 paper", "paper")
command(
    "rm runs/first", "runs/first@step=1000", did="`holdfast rm runs/first`, without a checkpoint"
)
command("rm runs/first@step=99 --yes --reason old", "99")
command("rm runs/first@step=1..3 --yes --reason old", "step=1..3")
command("rm runs/first@latest --yes --reason old", "latest")
command(
    "rm runs/first@step=3 --yes --reason old", "--even-latest", did="`holdfast rm` of the latest"
)
command("rm runs/first@step=2 --reason old", "--yes", did="`holdfast rm` in a script without --yes")
command("thin runs/first@step=2 --drop optimzer --yes", "optimzer")
command("cp runs/first copy", "runs/first@latest")
command("cp runs/first@latest runs/first", "runs/first", did="`holdfast cp` to the same root")
command("cp runs/first@latest .", "runs", did="`holdfast cp` to a folder with other things")
command("scrub runs/first --rate fast", "fast")
command("completion tcsh", "tcsh")
command("save runs/first", "runs/first", did="`holdfast save runs/first` while nobody trains")
command("save runs/first --timeout 5", "5")
command("uploads runs/first", "runs/first", did="`holdfast uploads` of a root with one tier")
command("advise runs/first --mtbf 6", "6")
command("run", "COMMAND", did="`holdfast run` without a command")
command("run --max-failures 0 true", "0")
command("run no-such-program", "no-such-program")
command("--key-file no.key ls runs/first", "no.key")
command("keys rotate runs/first", "key", did="`holdfast keys rotate` without the new keys")
command("keys list runs/frist", "runs/frist")


@THEME.case("`holdfast tag runs/first@step=3 'a b'`", names="a b")
def _(user: User) -> None:
    user.holdfast("tag", "runs/first@step=3", "a b")


@THEME.case("`holdfast keys generate` over a file that is there", names="run.key")
def _(user: User):
    Path("run.key").write_text("precious")
    yield
    user.holdfast("keys", "generate", "run.key")


def saved(state: dict[str, Any]) -> str:
    torch.save(state, "saved.pt")
    return "saved.pt"


@THEME.case("`holdfast import` of a file with a whole model, not its state_dict", names="model")
def _(user: User):
    path = saved({"model": torch.nn.Linear(2, 2), "step": 3})
    yield
    user.holdfast("import", path, "runs/new", "--trust")


@THEME.case("`holdfast import` of a file with a name that is not Unicode", names="--allow-loss")
def _(user: User):
    path = saved({"model": {"a\ud800": torch.ones(2), "b": torch.ones(2)}, "step": 3})
    yield
    user.holdfast("import", path, "runs/new", "--trust")


@THEME.case("`holdfast import` of a file of which a byte has changed", names="saved/data/0")
def _(user: User):
    path = Path(saved({"model": {"w": torch.full((9,), 0.3)}, "step": 3}))
    data = path.read_bytes()
    path.write_bytes(data.replace(np.float32(0.3).tobytes(), np.float32(0.4).tobytes(), 1))
    yield
    user.holdfast("import", path, "runs/new", "--trust")


@THEME.case("`holdfast --key-file run.key import` into a root without keys", names="--accept-plain")
def _(user: User):
    user.holdfast("keys", "generate", "run.key")
    path = saved({"model": {"w": torch.ones(2)}, "step": 3})
    yield
    user.holdfast("--key-file", "run.key", "import", path, "runs/first", "--trust")


@THEME.case("`holdfast --file-key` with a file that is missing", names="mind.key")
def _(user: User):
    path = saved({"model": {"w": torch.ones(2)}})
    yield
    user.holdfast("--file-key", "mind.key", "tree", path, "--trust")


@THEME.case("`holdfast prune` while a training runs", names="owns this run")
def _(user: User):
    with user.elsewhere():
        yield
        user.holdfast("prune", "runs/first", "--keep", "last:1")


@THEME.case("`holdfast gc --dead-epoch` of the training that runs", names="alive")
def _(user: User):
    with user.elsewhere():
        yield
        user.holdfast("gc", "runs/first", "--dead-epoch", 2)
