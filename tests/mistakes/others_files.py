"""Files and folders of the user's own in the places of Holdfast."""

from __future__ import annotations

from pathlib import Path

from tests.mistakes.table import Theme
from tests.mistakes.user import User

import holdfast

THEME = Theme("Other files in a root")
case = THEME.case


def own(path: Path) -> Path:
    """A file of the user, whose folder may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"mine")
    return path


@case("a folder of results in the root, named like a save", names="exp.20261128-204530", state=3)
def _(user: User):
    own(user.root / "exp.20261128-204530-0a1b2c3d" / "model.safetensors")
    yield
    user.manager().resume()


@case("the root of a new run inside of a root", names="is inside")
def _(user: User) -> None:
    user.manager(user.root / "finetune").save(1).wait()


@case("the root of a new run inside of a checkpoint", names="is inside")
def _(user: User) -> None:
    user.manager(user.folder_of(3) / "finetune").save(1).wait()


@case("the folder of all runs as a root", names="runs/first")
def _(user: User) -> None:
    user.manager(user.root.parent).save(1).wait()


@case("the folder of DeepSpeed's checkpoints as a root", names="latest")
def _(user: User):
    own(user.new / "latest").write_text("global_step1000")
    own(user.new / "global_step1000" / "mp_rank_00_model_states.pt")
    yield
    user.goes_on(user.new)
    assert (user.new / "latest").read_text() == "global_step1000"


@case("notes in the folder of a checkpoint that the rule deletes", names="notes.txt", deletes=True)
def _(user: User):
    notes = own(user.folder_of(1) / "notes.txt")
    yield
    user.goes_on(keep="last:1")
    assert notes.read_bytes() == b"mine"


@case("another run inside a checkpoint folder that `rm` deletes", names="finetune", deletes=True)
def _(user: User):
    notes = own(user.folder_of(1) / "finetune" / "model.pt")
    yield
    user.holdfast("rm", f"{user.root}@step=1", "--yes", "--reason", "too old")
    assert notes.read_bytes() == b"mine"


@case("a file of another program in `requests/`", names="left alone")
def _(user: User):
    mine = own(user.root / "requests" / f"{'a' * 32}.json")
    yield
    manager = user.resumed(every="1000step")
    user.train()
    manager.maybe_save(4)
    assert mine.read_bytes() == b"mine"


@case("a file called `tiers.json` in `uploads/`, and two tiers", names="uploads/tiers.json")
def _(user: User):
    mine = own(user.new / "uploads" / "tiers.json")
    yield
    user.goes_on(holdfast.Tiered(user.new, user.folder / "remote"))
    assert mine.read_bytes() == b"mine"
