"""Choices that choose nothing, and files of other libraries in the place of checkpoints."""

from __future__ import annotations

import numpy as np
import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User

import holdfast
from holdfast.train import Clip

THEME = Theme("Choices and other libraries' files")
case = THEME.case


@case("`load(components=[])`", names="nothing would be loaded")
def _(user: User) -> None:
    user.manager().load(components=[])


@case('`load(skip=["**"])`', names="nothing would be loaded")
def _(user: User) -> None:
    user.manager().load(skip=["**"])


@case('`load(skip=["model", "optimizer", "progress"])`', names="nothing would be loaded")
def _(user: User) -> None:
    user.manager().load(skip=[*user.state])


@case('`load_weights(root, model, skip=["model.**"])`', names="nothing would be loaded")
def _(user: User) -> None:
    holdfast.load_weights(user.root, user.state["model"], skip=["model.**"])


@case('`load_weights(root, model, include=["optimizer"])`', names="nothing would be loaded")
def _(user: User) -> None:
    holdfast.load_weights(user.root, user.state["model"], include=["optimizer"])


@case('`load_weights(root, skip=["model.**"])` without a model', names="no tensor of 'model'")
def _(user: User) -> None:
    holdfast.load_weights(user.root, skip=["model.**"])


@case("`clip=Clip()`", names="clips nothing")
def _(user: User) -> None:
    user.trainer(clip=Clip())


@case('`load_weights("weights.pt", model)`', names="load_state_dict")
def _(user: User) -> None:
    torch.save(user.state["model"].state_dict(), "weights.pt")
    holdfast.load_weights("weights.pt", user.state["model"])


@case("`load_file` of a file with a sparse tensor", names="model.table")
def _(user: User) -> None:
    torch.save({"model": {"table": torch.eye(3).to_sparse(), "bias": torch.ones(3)}}, "w.pt")
    holdfast.load_file("w.pt")


@case("`load_weights` of a file with an array of big-endian numbers", names="big-endian")
def _(user: User) -> None:
    torch.save({"model": {"a": np.arange(3).astype(">f4"), "b": torch.ones(3)}}, "w.pt")
    holdfast.load_weights("w.pt")


@case("`holdfast import` of a file with a sparse weight", names="model.table")
def _(user: User) -> None:
    torch.save({"model": {"table": torch.eye(3).to_sparse(), "bias": torch.ones(3)}}, "w.pt")
    user.holdfast("import", "--trust", "w.pt", user.new, "--step", 1)


@case("`holdfast export --to hf` of a model of PEFT", names="--to peft")
def _(user: User) -> None:
    names = ("base_model.model.w", "base_model.model.w.lora_A.default.weight")
    torch.save({"model": {name: torch.ones(2) for name in names}}, "w.pt")
    user.holdfast("export", "--trust", "w.pt", "out", "--to", "hf")


@case('`load_weights("s3://KEY:SECRET@bucket/run")`', names="no credentials")
def _(user: User) -> None:
    holdfast.load_weights("s3://KEY:SECRET@bucket/run")


@case("`holdfast ls s3://KEY:SECRET@bucket/run`", names="no credentials")
def _(user: User) -> None:
    user.holdfast("ls", "s3://KEY:SECRET@bucket/run")
