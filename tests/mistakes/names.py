"""Mistakes in names and values that a manager or a save is given."""

from __future__ import annotations

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.policy.rule import BySaver

THEME = Theme("Names and values")
case = THEME.case


@case("`keep=holdfast.Last(0)`", names="n=0")
def _(user: User) -> None:
    user.manager(keep=holdfast.Last(0))


@case("`keep=3`", names="keep=3")
def _(user: User) -> None:
    user.manager(keep=3)


@case("`keep=holdfast.Last`, without a number", names="keep=")
def _(user: User) -> None:
    user.manager(keep=holdfast.Last)


@case('`keep="last3"`', names="last3")
def _(user: User) -> None:
    user.manager(keep="last3")


@case('`keep=holdfast.Best("los", mode="min")` if the metric is called `loss`', names="'los'")
def _(user: User) -> None:
    user.goes_on(keep=holdfast.Best("los", mode="min"))


@case('`holdfast.Best("loss", mode="lowest")`', names="lowest")
def _(user: User) -> None:
    user.manager(keep=holdfast.Best("loss", mode="lowest"))


@case('`holdfast.Best("acc:max")`, as on the command line', names="acc:max")
def _(user: User) -> None:
    user.goes_on(keep=holdfast.Best("acc:max"))


@case('`.then_drop("optimiser")`', names="optimiser")
def _(user: User) -> None:
    user.manager(keep=holdfast.Last(3).then_drop("optimiser"))


@case('`BySaver({"wieghts": …})`', names="wieghts")
def _(user: User) -> None:
    user.manager(keep=BySaver({"wieghts": holdfast.Last(3)}))


@case("`keep=holdfast.Budget(500)`, meant as gigabytes", names="500")
def _(user: User) -> None:
    user.goes_on(keep=holdfast.Budget(500))


@case('`holdfast.Budget("500 gb")`', names="500 gb")
def _(user: User) -> None:
    user.manager(keep=holdfast.Budget("500 gb"))


@case('`on_existing="overwrite"`', names="overwrite")
def _(user: User) -> None:
    user.manager(on_existing="overwrite")


@case('`on_failure="ignore"`', names="ignore")
def _(user: User) -> None:
    user.manager(on_failure="ignore")


@case('`overlap="yes"`', names="overlap='yes'")
def _(user: User) -> None:
    user.manager(overlap="yes")


@case("`memory_budget=256`, meant as MiB", names="memory_budget=256")
def _(user: User) -> None:
    user.manager(memory_budget=256)


@case('`memory_budget="256mb"`', names="256mb")
def _(user: User) -> None:
    user.manager(memory_budget="256mb")


@case('`compress="gzip"`', names="gzip")
def _(user: User) -> None:
    user.manager(compress="gzip")


@case('`compress={"modle": "zstd"}`', names="modle")
def _(user: User) -> None:
    user.manager(compress={"modle": "zstd"})


@case('`label="step {step}"`', names="step 0")
def _(user: User) -> None:
    user.manager(label="step {step}")


@case('`label="{stpe}"`', names="stpe")
def _(user: User) -> None:
    user.manager(label="{stpe}")


@case('`label="ep{epoch}"` where no epochs are counted', names="epoch")
def _(user: User) -> None:
    user.goes_on(label="ep{epoch}")


@case('`label="{run_name}-{step}"` without `run_name`', names="run_name")
def _(user: User) -> None:
    user.manager(label="{run_name}-{step}")


@case("the model as the state: `CheckpointManager(root, model)`", names="Mapping")
def _(user: User) -> None:
    user.manager(state=user.state["model"])


@case("`CheckpointManager(root, {})`", names="at least one")
def _(user: User) -> None:
    user.manager(state={})


@case('`state={"Model": model}`', names="Model")
def _(user: User) -> None:
    user.manager(state={"Model": user.state["model"]})


@case('`state={"model": model.state_dict()}`', names="state_dict")
def _(user: User) -> None:
    user.manager(state={**user.state, "model": user.state["model"].state_dict()})


@case('`state={"optimizer": optimizer.state_dict()}`', names="state_dict")
def _(user: User) -> None:
    user.manager(state={**user.state, "optimizer": user.state["optimizer"].state_dict()})


@case('`state={"model": model.parameters()}`', names="model")
def _(user: User) -> None:
    user.manager(state={**user.state, "model": user.state["model"].parameters()})


@case(
    'the class in place of the object: `state={"optimizer": torch.optim.AdamW}`', names="optimizer"
)
def _(user: User) -> None:
    user.manager(state={**user.state, "optimizer": torch.optim.AdamW})


@case('`state={"step": 3}`', names="step")
def _(user: User) -> None:
    user.manager(state={**user.state, "step": 3})


@case('`state={"progress": (1, 2)}`', names="progress")
def _(user: User) -> None:
    user.manager(state={**user.state, "progress": (1, 2)})


@case("a lambda in the state", names="progress.schedule")
def _(user: User) -> None:
    user.manager(user.new, state={**user.state, "progress": {"schedule": lambda step: step}}).save(
        1
    ).wait()


@case('`state={"data": torch.utils.data.DataLoader(…)}`', names="holdfast.data.Loader")
def _(user: User) -> None:
    user.manager(state={**user.state, "data": DataLoader(TensorDataset(torch.zeros(8, 4)))})


@case('`state={"data": iter(loader)}`', names="data")
def _(user: User) -> None:
    user.manager(state={**user.state, "data": iter(user.state["data"])})


@case('`state={"lr": scheduler.get_last_lr}`', names="lr")
def _(user: User) -> None:
    user.manager(state={**user.state, "lr": user.state["scheduler"].get_last_lr})


@case('`save(step="5")`', names="'5'", state=3)
def _(user: User) -> None:
    user.resumed().save("5")


@case("`save(4.0)`", names="4.0", state=3)
def _(user: User) -> None:
    user.resumed().save(4.0)


@case("`save(torch.tensor(4))`", names="tensor", state=3)
def _(user: User) -> None:
    user.resumed().save(torch.tensor(4))


@case("`save(-1)`", names="-1", state=3)
def _(user: User) -> None:
    user.resumed().save(-1)


@case("`save(2**63)`, which no manifest could hold", names="9223372036854775808", state=3)
def _(user: User) -> None:
    user.resumed().save(2**63)


@case("a vector as a metric", names="loss", state=3)
def _(user: User) -> None:
    user.resumed().save(4, metrics={"loss": torch.ones(3)})


@case("a text as a metric", names="loss", state=3)
def _(user: User) -> None:
    user.resumed().save(4, metrics={"loss": "low"})


@case("`metrics=0.5`", names="0.5", state=3)
def _(user: User) -> None:
    user.resumed().save(4, metrics=0.5)


@case('`tags="final"`, a text in place of a list', names="final", state=3)
def _(user: User) -> None:
    user.resumed().save(4, tags="final")


@case('`tags=["my best"]`', names="my best", state=3)
def _(user: User) -> None:
    user.resumed().save(4, tags=["my best"])


@case('`tags=["latest"]`', names="latest", state=3)
def _(user: User) -> None:
    user.resumed().save(4, tags=["latest"])


@case('`tags=["step=3"]`', names="step=3", state=3)
def _(user: User) -> None:
    user.resumed().save(4, tags=["step=3"])


@case('`save(4, components=["modle"])`', names="modle", state=3)
def _(user: User) -> None:
    user.resumed().save(4, components=["modle"])


@case("`save(4, components=[])`", names="components=[]", state=3)
def _(user: User) -> None:
    user.resumed().save(4, components=[])


@case('`save(4, save_class="perm")`', names="perm", state=3)
def _(user: User) -> None:
    user.resumed().save(4, save_class="perm")


@case("`save(4, reason=…)` that is no text", names="reason", state=3)
def _(user: User) -> None:
    user.resumed().save(4, reason=3)


@case('`save(4, wait="yes")`', names="wait", state=3)
def _(user: User) -> None:
    user.resumed().save(4, wait="yes")


@case('`resume("lastest")`', names="lastest")
def _(user: User) -> None:
    user.manager().resume("lastest")


@case('`resume("step=abc")`', names="abc")
def _(user: User) -> None:
    user.manager().resume("step=abc")


@case('`resume("step 3")`', names="step 3")
def _(user: User) -> None:
    user.manager().resume("step 3")


@case("`resume(99)`, a step that was never saved", names="99")
def _(user: User) -> None:
    user.manager().resume(99)


@case('`load("best")` where nothing has that tag', names="best")
def _(user: User) -> None:
    user.manager().load("best")


@case("`load(-1)`, meant as the last", names="-1")
def _(user: User) -> None:
    user.manager().load(-1)


@case('`resume(unhealthy="skip")`', names="skip")
def _(user: User) -> None:
    user.manager().resume(unhealthy="skip")


@case('`resume(seen="step=3")`', names="step=3")
def _(user: User) -> None:
    user.manager().resume(seen="step=3")


@case('`resume(new=["ema"])` where the state has none', names="ema")
def _(user: User) -> None:
    user.manager().resume(new=["ema"])


@case('`resume(without=["optimizer"])`, to begin it anew', names="optimizer")
def _(user: User) -> None:
    user.manager().resume(without=["optimizer"])


@case('`load(components=["modle"])`', names="modle")
def _(user: User) -> None:
    user.manager().load(components=["modle"])


@case('`load(include=["modle"])`', names="modle")
def _(user: User) -> None:
    user.manager().load(include=["modle"])


@case('`load(skip=["optimiser"])`', names="optimiser")
def _(user: User) -> None:
    user.manager().load(skip=["optimiser"])


@case('`load(rename={"0.wieght": "first.weight"})`', names="0.wieght")
def _(user: User) -> None:
    user.manager().load(components=["model"], rename={"0.wieght": "first.weight"})


@case('`load_weights("runs/first", model, component="modle")`', names="modle")
def _(user: User) -> None:
    holdfast.load_weights("runs/first", user.state["model"], component="modle")


@case(
    "`load_weights(…, strict=False)` into a model of which no name fits", names="none of its names"
)
def _(user: User) -> None:
    model = nn.ModuleDict({"wrapped": user.state["model"]})
    holdfast.load_weights("runs/first", model, strict=False)


@case('`load_weights("runs/first", model.state_dict())`', names="must be Module")
def _(user: User) -> None:
    holdfast.load_weights("runs/first", user.state["model"].state_dict())


@case('`SideSaver("main", …)`', names="main")
def _(user: User) -> None:
    user.manager(savers=[holdfast.SideSaver("main", every="1step", components=["model"])])


@case('`SideSaver(…, components=["modle"])`', names="modle")
def _(user: User) -> None:
    user.manager(savers=[holdfast.SideSaver("weights", every="1step", components=["modle"])])


@case("two `SideSaver` of one name", names="weights")
def _(user: User) -> None:
    one = holdfast.SideSaver("weights", every="1step", components=["model"])
    user.manager(savers=[one, one])


@case("`stop=True`", names="stop=True")
def _(user: User) -> None:
    user.manager(stop=True)


@case("`hooks={…}` in place of `StateHooks(…)`", names="hooks")
def _(user: User) -> None:
    user.manager(hooks={"edit_save": print})


@case('`takeover="yes"`', names="takeover")
def _(user: User) -> None:
    user.manager(takeover="yes")


@case('`counters=lambda: {"epochs": 1}`', names="epochs", state=3)
def _(user: User) -> None:
    user.resumed(counters=lambda: {"epochs": 1}).save(4).wait()


@case('`On("epohc")`', names="epohc")
def _(user: User) -> None:
    user.manager(every=holdfast.On("epohc"))


@case('`maybe_save(4, event="epoch_end")`', names="epoch_end", state=3)
def _(user: User) -> None:
    user.resumed(every="1step").maybe_save(4, event="epoch_end")


@case("`When` of a function that returns nothing", names="None", state=3)
def _(user: User) -> None:
    user.resumed(every=holdfast.When(lambda now, metrics, event: None)).maybe_save(4)


@case('`pin("step=99")`', names="99")
def _(user: User) -> None:
    user.manager().pin("step=99")


@case('`tag("step=3", "a b")`', names="a b")
def _(user: User) -> None:
    user.manager().tag("step=3", "a b")


@case('`tag("step=3")` without a tag', names="tag")
def _(user: User) -> None:
    user.manager().tag("step=3")


@case("the optimizer is not in the state", names="no optimizer")
def _(user: User) -> None:
    del user.state["optimizer"]
    user.manager(user.new, state=user.state).save(1).wait()


@case("the data is not in the state", names="holdfast.data.Loader")
def _(user: User) -> None:
    del user.state["data"]
    user.manager(user.new, state=user.state).save(1).wait()
