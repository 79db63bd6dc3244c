"""Files and roots that were copied, moved, edited or deleted by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.mistakes.table import Theme
from tests.mistakes.user import User

import holdfast

THEME = Theme("Copied, moved and edited files")
case = THEME.case


def resume_after(did: str, names: str, prepare, state=2, **options):
    @case(did, names=names, state=state)
    def _(user: User):
        prepare(user)
        yield
        user.manager(**options).resume()


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new, 1))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


resume_after(
    "deleted `manifest.json` of the newest checkpoint",
    "manifest",
    lambda u: (u.folder_of(3) / "manifest.json").unlink(),
)
resume_after(
    "deleted a tensor file of the newest checkpoint",
    "model-00000.safetensors",
    lambda u: (u.folder_of(3) / "model-00000.safetensors").unlink(),
)
resume_after(
    "deleted the folder of the newest checkpoint",
    "step-00000003",
    lambda u: shutil.rmtree(u.folder_of(3)),
)
resume_after(
    "deleted the folders of all checkpoints",
    "step-0000000",
    lambda u: [shutil.rmtree(u.folder_of(n)) for n in (1, 2, 3)],
    state="as it was",
)
resume_after(
    "emptied a tensor file",
    "model-00000.safetensors",
    lambda u: (u.folder_of(3) / "model-00000.safetensors").write_bytes(b""),
)
resume_after(
    "cut a tensor file (a full disk while copying)",
    "optimizer-00000.safetensors",
    lambda u: cut(u.folder_of(3) / "optimizer-00000.safetensors"),
)
resume_after(
    "one flipped bit",
    "model-00000.safetensors",
    lambda u: flip(u.folder_of(3) / "model-00000.safetensors"),
)
resume_after(
    "edited the step in `manifest.json`",
    "manifest.json",
    lambda u: edited(u.folder_of(3) / "manifest.json", '"step": 3', '"step": 9'),
)
resume_after(
    "edited the metric in `manifest.json`",
    "manifest.json",
    lambda u: edited(u.folder_of(3) / "manifest.json", '"loss": 0.33', '"loss": 0.13'),
)
resume_after(
    "edited `progress-00000.json`",
    "progress-00000.json",
    lambda u: edited(u.folder_of(3) / "progress-00000.json", "3", "9"),
)
resume_after(
    "formatted `index.json` with an editor",
    "index.json",
    lambda u: (u.folder_of(3) / "index.json").write_text(
        json.dumps(json.loads((u.folder_of(3) / "index.json").read_text()), indent=2)
    ),
)
resume_after(
    "line ends changed to CRLF (git, an FTP client)",
    "index.json",
    lambda u: (u.folder_of(3) / "index.json").write_bytes(
        (u.folder_of(3) / "index.json").read_bytes().replace(b"}", b"}\r\n")
    ),
)
resume_after(
    "copied the weights of step 1 over the weights of step 3",
    "model-00000.safetensors",
    lambda u: shutil.copy(u.folder_of(1) / "model-00000.safetensors", u.folder_of(3)),
)
resume_after(
    "copied the manifest of step 2 into step 3",
    "manifest",
    lambda u: shutil.copy(u.folder_of(2) / "manifest.json", u.folder_of(3)),
)
resume_after(
    "packed a tensor file with gzip",
    "model-00000.safetensors",
    lambda u: (u.folder_of(3) / "model-00000.safetensors").rename(
        u.folder_of(3) / "model-00000.safetensors.gz"
    ),
)
resume_after(
    "renamed the newest checkpoint to `best`",
    "step-00000003",
    lambda u: u.folder_of(3).rename(u.root / "best"),
)
resume_after(
    "renamed the newest checkpoint to `….bak`",
    "step-00000003",
    lambda u: u.folder_of(3).rename(str(u.folder_of(3)) + ".bak"),
)
resume_after(
    "moved the newest checkpoint out of the root",
    "step-00000003",
    lambda u: u.folder_of(3).rename(u.folder / "saved"),
)
resume_after(
    "copied the newest checkpoint within the root",
    "copied here",
    lambda u: shutil.copytree(u.folder_of(3), u.root / ("copy-" + u.folder_of(3).name)),
    state=3,
)
resume_after(
    "a folder in the place of the next claim",
    "00000002.json",
    lambda u: (u.root / "writers" / "00000002.json").mkdir(),
    state="as it was",
)
resume_after(
    "deleted the newest claim",
    "00000001",
    lambda u: (u.root / "writers" / "00000001.json").unlink(),
    state=3,
)
resume_after(
    "edited a claim",
    "00000001.json",
    lambda u: edited(u.root / "writers" / "00000001.json", "{", "{ "),
    state=3,
)


@case(
    "trained in the root and in a copy of it, then moved a checkpoint back from the copy",
    names="same place in the order",
    state=4,
)
def _(user: User):
    shutil.copytree("runs/first", "runs/copy", symlinks=True)
    for root in ("runs/copy", "runs/first"):
        with user.doing:
            user.goes_on(root)
        user.begin_again()
    (folder,) = Path("runs/copy").glob("step-00000004*")
    shutil.copytree(folder, user.root / folder.name)
    yield
    user.manager().resume()


@case("restored an older backup over the root, with `seen` of a newer one", names="0001-000003")
def _(user: User):
    seen = user.manager().list()[0].seen
    shutil.rmtree(user.folder_of(3))
    (user.root / "latest").unlink()
    yield
    user.manager().resume(seen=seen)


@case("put a checkpoint of a longer run into the root, and resumed it", names="another run")
def _(user: User):
    shutil.copytree("runs/first", "runs/longer", symlinks=True)
    for _ in range(3):
        with user.doing:
            user.goes_on("runs/longer")
        user.begin_again()
    (folder,) = Path("runs/longer").glob("step-00000006*")
    shutil.copytree(folder, user.root / folder.name)
    yield
    user.manager().resume(folder.name)


@case(
    "put a checkpoint of another run of the same script into the root",
    names="another run",
    state=3,
)
def _(user: User):
    with user.doing:
        user.goes_on("runs/other", num_steps=5)
    user.begin_again()
    (folder,) = Path("runs/other").glob("step-00000005*")
    shutil.copytree(folder, user.root / folder.name)
    yield
    user.manager().resume()


@case("`load_weights` of a root whose newest manifest was edited", names="manifest.json")
def _(user: User):
    edited(user.folder_of(3) / "manifest.json", '"step": 3', '"step": 9')
    yield
    holdfast.load_weights("runs/first", user.state["model"])


@case("`load()` of a root whose newest weights were cut", names="model-00000.safetensors")
def _(user: User):
    cut(user.folder_of(3) / "model-00000.safetensors")
    yield
    user.manager().load()


@case("`load_weights` of a copy that lacks a file", names="model-00000.safetensors")
def _(user: User):
    shutil.copytree(
        user.folder_of(3), "copy", ignore=shutil.ignore_patterns("model-00000.safetensors")
    )
    yield
    holdfast.load_weights("copy", user.state["model"])
