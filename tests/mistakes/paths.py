"""Mistakes in paths and roots."""

from __future__ import annotations

from pathlib import Path

from tests.mistakes.table import Theme
from tests.mistakes.user import User

import holdfast

THEME = Theme("Paths and roots")
case = THEME.case


@case('`Path("s3://bucket/run")`', names="'s3://bucket/run'")
def _(user: User) -> None:
    user.manager(Path("s3://bucket/run"))


@case('`"s3:/bucket/run"`, with one slash', names="s3://bucket/run")
def _(user: User) -> None:
    user.manager("s3:/bucket/run")


@case('`"S3://bucket/run"`', names="S3://")
def _(user: User) -> None:
    user.manager("S3://bucket/run")


@case('`"s3://"`, without a bucket', names="s3://")
def _(user: User) -> None:
    user.manager("s3://")


@case('`"https://bucket.s3.amazonaws.com/run"`', names="https://")
def _(user: User) -> None:
    user.manager("https://bucket.s3.amazonaws.com/run")


@case('`"dbfs:/runs/first"`', names="dbfs:")
def _(user: User) -> None:
    user.manager("dbfs:/runs/first")


@case('`"file:///runs/first"`', names="file:")
def _(user: User) -> None:
    user.manager("file:///runs/first")


@case('`root=""`', names="root ''")
def _(user: User) -> None:
    user.manager("")


@case('`"~/runs/first"`', names="~")
def _(user: User) -> None:
    user.goes_on("~/runs/first")


@case('`"$SCRATCH/runs/first"`', names="$SCRATCH")
def _(user: User) -> None:
    user.goes_on("$SCRATCH/runs/first")


@case('`"runs/{run_name}"`', names="{run_name}")
def _(user: User) -> None:
    user.manager("runs/{run_name}", run_name="gpt")


@case("`root=3`", names="3")
def _(user: User) -> None:
    user.manager(3)


@case('`CheckpointManager("runs/first@step=2", …)`', names="step=2")
def _(user: User) -> None:
    user.goes_on("runs/first@step=2")


@case("the folder of one checkpoint as the root", names="step-00000003")
def _(user: User) -> None:
    user.goes_on(user.folder_of(3))


@case("the folder above the root: `runs` in place of `runs/first`", names="runs/first")
def _(user: User) -> None:
    user.goes_on("runs")


@case("a file as the root", names="notes.txt")
def _(user: User) -> None:
    Path("notes.txt").write_text("notes")
    yield
    user.goes_on("notes.txt")


@case("a root below a file", names="notes.txt")
def _(user: User) -> None:
    Path("notes.txt").write_text("notes")
    yield
    user.goes_on("notes.txt/run")


@case('`load_weights("runs/frist", …)`', names="runs/frist")
def _(user: User) -> None:
    holdfast.load_weights("runs/frist", user.state["model"])


@case('`load_weights("runs/first@step=99", …)`', names="99")
def _(user: User) -> None:
    holdfast.load_weights("runs/first@step=99", user.state["model"])


@case('`load_weights("runs", …)`, the folder above the root', names="runs")
def _(user: User) -> None:
    holdfast.load_weights("runs", user.state["model"])


@case("`load_weights` of one file of a checkpoint", names="model-00000.safetensors")
def _(user: User) -> None:
    holdfast.load_weights(user.folder_of(3) / "model-00000.safetensors", user.state["model"])


@case('`load_weights("runs/first@step=2", …, which="step=2")`', names="which='step=2'")
def _(user: User) -> None:
    holdfast.load_weights("runs/first@step=2", user.state["model"], which="step=2")


@case('`load_weights("runs/first/best", …)`, a tag as a folder', names="best")
def _(user: User) -> None:
    holdfast.load_weights("runs/first/best", user.state["model"])


@case('`holdfast.Tiered("runs/first", "runs/first")`', names="runs/first")
def _(user: User) -> None:
    user.goes_on(holdfast.Tiered("runs/first", "runs/first"))


@case("`Tiered` with local and remote in each other", names="runs/first")
def _(user: User) -> None:
    user.goes_on(holdfast.Tiered("runs/first", "runs/first/remote"))


@case("`Tiered` with the roots of two runs", names="run")
def _(user: User) -> None:
    user.watch(user.state)
    one = holdfast.CheckpointManager("runs/second", user.state)
    one.save(7).wait()
    one.close()
    yield
    user.goes_on(holdfast.Tiered("runs/first", "runs/second"))


@case('`Tiered("s3://bucket/run", …)`: local and remote exchanged', names="s3://bucket/run")
def _(user: User) -> None:
    user.goes_on(holdfast.Tiered("s3://bucket/run", "runs/first"))


@case("`Tiered(…, keep_local=2)`", names="keep_local=2")
def _(user: User) -> None:
    holdfast.Tiered("a", "b", keep_local=2)


@case("`Tiered(…, keep_local=Last(2))` and `keep=`", names="keep_local")
def _(user: User) -> None:
    user.manager(holdfast.Tiered("a", "b", keep_local=holdfast.Last(2)), keep=holdfast.Last(3))


@case('`Tiered(…, max_lag="2000")`', names="2000")
def _(user: User) -> None:
    holdfast.Tiered("a", "b", max_lag="2000")
