"""Models, optimizers and data that changed between two runs of the script."""

from __future__ import annotations

import itertools
import random

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User, new_state
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset

import holdfast
from holdfast.data import DataRanks, Loader, Stream


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


MODEL = Theme("Changed model or optimizer")
case = MODEL.case


def changed(did: str, names: str, change, state="as it was", theme=MODEL, **options):
    @theme.case(did, names=names, state=state)
    def _(user: User):
        user.watch(change(new_state()) or {})
        yield
        user.manager(**options).resume()


def with_model(model, optimizer=torch.optim.AdamW, **arguments):
    def change(state):
        made = model()
        opt = optimizer(made.parameters(), **{"lr": 0.01, **arguments})
        return {
            **state,
            "model": made,
            "optimizer": opt,
            "scheduler": torch.optim.lr_scheduler.StepLR(opt, step_size=2),
        }

    return change


def usual():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)


changed(
    "a wider layer", "0.weight", with_model(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)))
)
changed(
    "another layer at the end",
    "2.weight",
    with_model(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(1, 1))),
)
changed("a layer less", "1.weight", with_model(lambda: nn.Sequential(nn.Linear(4, 3))))
changed("layers with other names", "first.weight", with_model(Named))
changed("a model in half precision", "0.weight", with_model(lambda: usual().half()))
changed("a buffer more", "mean", with_model(lambda: with_buffer(usual())))
changed(
    "a wrapped model (`module.`)",
    "module.0.weight",
    with_model(lambda: nn.ModuleDict({"module": usual()})),
)
changed(
    "SGD in place of AdamW",
    "optimizer",
    with_model(usual, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)),
)
changed("`amsgrad=True`", "amsgrad", with_model(usual, amsgrad=True), state=3)
changed("another learning rate in the script", "lr", with_model(usual, lr=0.5), state=3)
changed(
    "another weight decay in the script",
    "weight_decay",
    with_model(usual, weight_decay=0.5),
    state=3,
)
changed("two parameter groups in place of one", "grouped differently", lambda s: groups(s))
changed(
    "another `step_size` of the scheduler",
    "step_size",
    lambda s: {**s, "scheduler": torch.optim.lr_scheduler.StepLR(s["optimizer"], step_size=7)},
    state=3,
)
changed(
    "another scheduler",
    "scheduler",
    lambda s: {
        **s,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(s["optimizer"], T_max=7),
    },
)
changed(
    "no scheduler any more", "scheduler", lambda s: {k: v for k, v in s.items() if k != "scheduler"}
)
changed(
    "an average of the weights that the checkpoint lacks",
    "ema",
    lambda s: {**s, "ema": nn.Linear(2, 2)},
)
changed(
    "a component renamed from `model` to `net`",
    "net",
    lambda s: {("net" if k == "model" else k): v for k, v in s.items()},
)
changed(
    "an additional counter in `progress`",
    "progress",
    lambda s: {**s, "progress": {"step": 0, "best": 1.0}},
    state=3,
)
changed(
    "model and optimizer exchanged",
    "optimizer",
    lambda s: {**s, "model": s["optimizer"], "optimizer": s["model"]},
)
changed("tied weights that were not tied", "weight", lambda s: tied(s))


def with_buffer(model):
    model.register_buffer("mean", torch.zeros(2))
    return model


def groups(s):
    opt = torch.optim.AdamW(
        [{"params": s["model"][0].parameters()}, {"params": s["model"][1].parameters()}], lr=0.01
    )
    return {**s, "optimizer": opt, "scheduler": torch.optim.lr_scheduler.StepLR(opt, step_size=2)}


def tied(s):
    m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    m[1].weight = m[0].weight
    opt = torch.optim.AdamW(m.parameters(), lr=0.01)
    return {
        **s,
        "model": m,
        "optimizer": opt,
        "scheduler": torch.optim.lr_scheduler.StepLR(opt, step_size=2),
    }


@case("the optimizer was made of another model", names="no component holds")
def _(user: User) -> None:
    state = new_state()
    state["model"] = new_state()["model"]
    user.manager(user.new, state=user.watch(state)).save(1).wait()


@case("a head outside of the model, in no component", names="no component holds")
def _(user: User) -> None:
    state = new_state()
    head = nn.Linear(3, 3)
    state["optimizer"].add_param_group({"params": head.parameters()})
    user.manager(user.new, state=user.watch(state)).save(1).wait()


DATA = Theme("Changed data")


def data_of(**arguments):
    return lambda s: {
        **s,
        "data": Loader(
            arguments.pop("dataset", torch.arange(40.0).reshape(10, 4)),
            **{"batch_size": 2, **arguments},
        ),
    }


changed(
    "another `batch_size` in the middle of an epoch",
    "batch_size",
    data_of(batch_size=3),
    theme=DATA,
)
changed("another `seed`", "seed", data_of(seed=5), state=3, theme=DATA)
changed("`shuffle=False`", "shuffle", data_of(shuffle=False), theme=DATA)
changed("`drop_last=True`", "drop_last", data_of(drop_last=True), theme=DATA)
changed("a larger dataset", "samples", data_of(dataset=torch.zeros(20, 4)), theme=DATA)
changed("a smaller dataset", "samples", data_of(dataset=torch.zeros(4, 4)), theme=DATA)
changed("`batches_per_epoch` added", "batches_per_epoch", data_of(batches_per_epoch=2), theme=DATA)
changed(
    "the component `data` renamed",
    "loader",
    lambda s: {("loader" if k == "data" else k): v for k, v in s.items()},
    theme=DATA,
)
changed("`Loader` in place of a dict", "data", lambda s: {**s, "data": {"batches": 0}}, theme=DATA)


def named(fingerprint):
    """A run whose data has a fingerprint."""

    def with_it(state, name):
        data = Loader(torch.zeros(8, 4), batch_size=2, fingerprint=name)
        return {**state, "data": data}

    @DATA.case("another `fingerprint` of the `Loader`", names="fingerprint", state=None)
    def _(user: User):
        before = with_it(new_state(), "photos 1")
        next(iter(before["data"]))
        with user.manager(user.new, state=before) as manager:
            manager.save(1).wait()
        yield
        user.manager(user.new, state=with_it(new_state(), fingerprint)).resume()


named("photos 2")


@DATA.case("`Loader(dataset, batch_size=0)`", names="batch_size=0")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4), batch_size=0)


@DATA.case("`Loader` of an empty dataset", names="empty")
def _(user: User) -> None:
    Loader(torch.zeros(0, 4), batch_size=2)


@DATA.case("`Loader` of an iterable without a length", names="__len__")
def _(user: User) -> None:
    Loader(iter([1, 2]), batch_size=2)


@DATA.case("`Loader` of an `IterableDataset`", names="Stream")
def _(user: User) -> None:
    Loader(Endless(), batch_size=2)


@DATA.case("`Loader(…, sampler=DistributedSampler(…))`", names="ranks")
def _(user: User) -> None:
    samples = torch.zeros(4, 4)
    Loader(samples, batch_size=2, sampler=DistributedSampler(samples, 2, 0))


@DATA.case("a `sampler` with a generator of its own", names="generator")
def _(user: User) -> None:
    draws = random.Random(1)
    Loader(torch.zeros(40, 4), batch_size=2, sampler=lambda seed, lap: draws.sample(range(40), 40))


@DATA.case("`Loader` without a `batch_size`", names="batch_size")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4))


@DATA.case("`Stream` of a source without a state", names="replay")
def _(user: User) -> None:
    Stream(Endless(), batch_size=2)


@DATA.case("`Loader(…, num_workers=-1)`", names="num_workers")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4), batch_size=2, num_workers=-1)


@DATA.case("`Loader(…, drop_last=True)` of less than a batch", names="batch")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4), batch_size=8, drop_last=True)


@DATA.case("`Loader(…, batches_per_epoch=0)`", names="batches_per_epoch")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4), batch_size=2, batches_per_epoch=0)


@DATA.case("`Loader(…, ranks=DataRanks(2, 2))`", names="ranks")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4), batch_size=2, ranks=DataRanks(2, 2))


@DATA.case("two loops over one `Loader` at once", names="iter")
def _(user: User) -> None:
    data = Loader(torch.zeros(8, 4), batch_size=2)
    one, two = iter(data), iter(data)
    next(one)
    next(two)
    next(one)


@DATA.case('`data.until("500step")`', names="500step")
def _(user: User) -> None:
    list(user.state["data"].until(step="500step", start=0))


@DATA.case("`data.until(step=2, start=5)`", names="start")
def _(user: User) -> None:
    list(user.state["data"].until(step=2, start=5))


@DATA.case("`holdfast.data.skip(data, 100)` of fewer items", names="100")
def _(user: User) -> None:
    list(holdfast.data.skip(iter(range(3)), 100))
