"""Every optimizer of torch, schedulefree and pytorch_optimizer resumes exactly, or is refused.

Intervals of updates are set below the number of steps, so that each kind of update comes on both
sides of the save.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
import marks
from holdfast import Attributes, CheckpointManager, MemoryStore
from holdfast.errors import UnsupportedState
from holdfast.interop.exporting.export import export_checkpoint
from holdfast.state.probing import digest_sample

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")

NUM_BEFORE, NUM_AFTER = 7, 8
LOW_RANK = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std"}
"""Options of a parameter group that turn projection on."""
SETTINGS: dict[str, dict[str, Any]] = {
    "adagc": {"warmup_steps": 3},
    "alice": {"update_interval": 3, "rank": 2, "leading_basis": 1},
    "conda": {"update_proj_gap": 3},
    "dash": {"precondition_frequency": 3},
    "kron": {"pre_conditioner_update_probability": 0.5},
    "ranger": {"k": 3},
    "ranger21": {"num_iterations": 20, "lookahead_merge_time": 3},
    "bsam": {"num_data": 64},
    "sara": {"lr": 0.01},
    "scalableshampoo": {"start_preconditioning_step": 2, "preconditioning_compute_steps": 3},
    "shampoo": {"preconditioning_compute_steps": 3},
    "schedulefreeadamw": {"warmup_steps": 3},
    "soap": {"precondition_frequency": 3},
    "sophiah": {"update_period": 3},
    "adahessian": {"update_period": 3},
    "spam": {"warmup_epoch": 3, "update_proj_gap": 4},
    "splus": {"inverse_steps": 3},
    "stablespam": {"update_proj_gap": 4},
    "prodigy": {"lr": 1.0},
}
UNUSABLE = {
    "adalomo": "steps inside backward, and has no step()",
    "lomo": "steps inside backward, and has no step()",
    "demo": "needs einops",
    "distributedmuon": "needs several ranks",
}
REFUSED = {
    **dict.fromkeys(("apollo", "conda", "fira", "galore"), "projector"),
    "scalableshampoo": "pre_conditioner",
}
"""Optimizers with objects in their state, and the name of one."""
SECOND_ORDER = {"adahessian", "sophiah"}
WITH_CLOSURE = {"alig", "bsam", "lbfgs", "LBFGS"}
WITH_MODEL = {"adammini"}
MATRICES_ONLY = {"spectralsphere", "Muon"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.first(batch)))
        result: Tensor = self.last(torch.tanh(hidden))
        return result


pytestmark = pytest.mark.filterwarnings(
    "ignore:Using backward.. with create_graph",
    "ignore:To copy construct from a tensor",
)
Make = Callable[[Net], Any]


def torch_optimizers() -> Iterator[tuple[str, Make]]:
    for name in torch.optim.__all__ if hasattr(torch.optim, "__all__") else dir(torch.optim):
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and kind is not torch.optim.Optimizer and name != "SparseAdam":
            yield name, partial(make_plain, name, kind)


def make_plain(name: str, kind: Any, net: Net) -> Any:
    settings = SETTINGS.get(name, {})
    parameters = [*net.parameters()]
    matrices = [one for one in parameters if one.ndim == 2]
    others = [one for one in parameters if one.ndim != 2]
    if name in WITH_MODEL:
        return kind(net, lr=0.01)
    if name in MATRICES_ONLY:
        return kind(matrices, lr=0.01)
    if name in ("galore", "fira", "apollo"):
        return kind([{"params": matrices, **LOW_RANK}, {"params": others}], lr=0.01)
    if "muon" in name or name == "adago":
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        return kind(groups)
    return kind(parameters, **settings)


def list_optimizers() -> Iterator[tuple[str, Make]]:
    yield from torch_optimizers()
    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        yield name, partial(make_plain, name, getattr(schedulefree, name))
    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        if name not in UNUSABLE:
            yield name, partial(make_plain, name, pytorch_optimizer.load_optimizer(name))


def wrap(kind: str, net: Net) -> Any:
    adam = partial(torch.optim.Adam, lr=0.01)
    if kind == "GSAM":
        base = adam(net.parameters())
        rates = torch.optim.lr_scheduler.StepLR(base, 3)
        rho = pytorch_optimizer.lr_scheduler.ProportionScheduler(rates, 0.01, 0.0, 0.1)
        return pytorch_optimizer.GSAM(net.parameters(), base, net, rho)
    if kind in ("SAM", "WSAM", "LookSAM", "FriendlySAM"):
        wrapper = getattr(pytorch_optimizer, kind)
        more = {"k": 3} if kind == "LookSAM" else {}
        if kind == "WSAM":
            return wrapper(net, net.parameters(), torch.optim.Adam, lr=0.01)
        return wrapper(net.parameters(), torch.optim.Adam, lr=0.01, **more)
    if kind == "schedulefree.Wrapper":
        return schedulefree.ScheduleFreeWrapper(torch.optim.SGD(net.parameters(), 0.1, 0.9))
    return getattr(pytorch_optimizer, kind)(adam(net.parameters()))


WRAPPERS = [
    *("Lookahead", "ScheduleFreeWrapper", "SAM", "schedulefree.Wrapper"),
    *marks.full("TRAC", "OrthoGrad", "PCGrad", "Magma", "WSAM", "LookSAM", "FriendlySAM", "GSAM"),
]


def train_step(name: str, net: Net, optimizer: Any, number: int) -> None:
    source = torch.Generator().manual_seed(number)
    dtype = next(net.parameters()).dtype
    batch, wanted = (torch.randn(8, width, generator=source).to(dtype) for width in (6, 2))

    @torch.enable_grad()
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (net(batch) - wanted).square().mean()
        loss.backward(create_graph=name in SECOND_ORDER)
        return loss

    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    if name == "GSAM":
        optimizer.set_closure(nn.functional.mse_loss, batch, wanted)
        optimizer.step()
    elif name in WITH_CLOSURE or "SAM" in name:
        closure()
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    optimizer.zero_grad()
    if name in SECOND_ORDER:  # drops the graph
        for parameter in net.parameters():
            parameter.grad = None


def digest_state(net: Net, optimizer: Any) -> tuple[str, str]:
    weights = [parameter.detach() for parameter in net.parameters()]
    return digest_sample(weights), digest_sample(optimizer.state_dict())


def make_run(make: Make, dtype: torch.dtype) -> tuple[Net, Any, dict[str, Any]]:
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = make(net)
    state = {"model": net, "optimizer": optimizer, "data": {}}
    if isinstance(optimizer, schedulefree.ScheduleFreeWrapper):
        state["mode"] = Attributes(optimizer, "train_mode")
    return net, optimizer, state


def expect_exact_resume(name: str, make: Make, dtype: torch.dtype = torch.float32) -> None:
    store = MemoryStore()
    net, optimizer, state = make_run(make, dtype)
    with CheckpointManager(store, state) as manager:
        for number in range(NUM_BEFORE):
            train_step(name, net, optimizer, number)
        manager.save(NUM_BEFORE, wait=True)
        for number in range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER):
            before = digest_state(net, optimizer)
            train_step(name, net, optimizer, number)
    whole = digest_state(net, optimizer)
    assert whole != before
    net, optimizer, state = make_run(make, dtype)
    torch.manual_seed(5)
    with CheckpointManager(store, state) as manager:
        manager.resume()
        for number in range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER):
            train_step(name, net, optimizer, number)
    assert digest_state(net, optimizer) == whole


def marked_cases() -> Iterator[Any]:
    """Yield all cases; `make test` has every tenth optimizer in one dtype, others in the other."""
    for at, (name, make) in enumerate(list_optimizers()):
        for dtype, quick in ((torch.float32, 0), (torch.bfloat16, 5)):
            tier = [] if at % 10 == quick else pytest.mark.full
            yield pytest.param(name, make, dtype, id=f"{name}-{str(dtype)[6:]}", marks=tier)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize(("name", "make", "dtype"), [*marked_cases()])
def test_an_optimizer_resumes_exactly_or_is_refused(
    name: str, make: Make, dtype: torch.dtype, warned: Callable[[], list[str]]
) -> None:
    if name in REFUSED:
        with pytest.raises(UnsupportedState, match=REFUSED[name]):
            expect_exact_resume(name, make)
    else:  # torch decomposes no bf16 on the CPU
        expect_exact_resume(name, make, torch.float32 if name == "lorarite" else dtype)
    assert warned() == []


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_optimizer_resumes_exactly(kind: str, warned: Callable[[], list[str]]) -> None:
    expect_exact_resume(kind, partial(wrap, kind))
    assert warned() == []


def test_a_mode_that_a_wrapper_does_not_save_is_named(warned: Callable[[], list[str]]) -> None:
    net, optimizer, state = make_run(partial(wrap, "schedulefree.Wrapper"), torch.float32)
    del state["mode"]
    with CheckpointManager(MemoryStore(), state) as manager:
        train_step("", net, optimizer, 0)
        manager.save(1, wait=True)
    (text,) = warned()
    assert "optimizer.train_mode" in text


def test_objects_in_state_are_refused_when_they_appear() -> None:
    make = dict(list_optimizers())["galore"]
    net, optimizer, state = make_run(make, torch.float32)
    with CheckpointManager(MemoryStore(), state, every="100step") as manager:
        manager.maybe_save(1)
        train_step("", net, optimizer, 0)
        with pytest.raises(UnsupportedState, match="projector"):
            manager.maybe_save(2)


class Scaled:
    """A wrapper of the user's, which is no optimizer itself."""

    def __init__(self, base: Any) -> None:
        self.base, self.scale, self.num_steps = base, 1.0, 0

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.num_steps += 1
        self.scale *= 1.5
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.base.state_dict()], "scale": self.scale, "n": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["inner"][0])
        self.scale, self.num_steps = state["scale"], state["n"]


def test_an_optimizer_in_a_wrapper_of_the_user_keeps_its_dtypes(
    warned: Callable[[], list[str]],
) -> None:
    qhadam = pytorch_optimizer.QHAdam
    expect_exact_resume("", lambda net: Scaled(qhadam(net.parameters())), torch.bfloat16)
    assert warned() == []


class Casting(pytorch_optimizer.QHAdam):  # type: ignore[misc,name-defined]
    """An optimizer whose `state_dict` has copies of its state."""

    def state_dict(self) -> dict[str, Any]:
        copied: dict[str, Any] = copy.deepcopy(super().state_dict())
        return copied


def test_state_that_its_loading_casts_for_good_is_named(warned: Callable[[], list[str]]) -> None:
    store = MemoryStore()
    net, optimizer, state = make_run(lambda net: Casting(net.parameters()), torch.bfloat16)
    with CheckpointManager(store, state) as manager:
        train_step("", net, optimizer, 0)
        manager.save(1, wait=True)
    net, optimizer, state = make_run(lambda net: Casting(net.parameters()), torch.bfloat16)
    with CheckpointManager(store, state) as manager:
        manager.resume()
    (text,) = warned()
    assert "beta1_weight" in text
    assert "dtype" in text


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "ScheduleFreeWrapper"])
def test_weights_of_the_train_mode_are_named_when_they_are_read_alone(
    kind: str, is_training: bool, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    make = dict(list_optimizers()).get(kind, partial(wrap, kind))
    net, optimizer, state = make_run(make, torch.float32)
    with CheckpointManager(tmp_path / "run", state) as manager:
        train_step("", net, optimizer, 0)
        train_step("", net, optimizer, 1)
        if not is_training:
            optimizer.eval()
        average = digest_sample([*net.parameters()])
        manager.save(1, wait=True)
    again = Net()
    holdfast.load_weights(tmp_path / "run", again)
    weights = holdfast.load_weights(tmp_path / "run")
    assert torch.equal(weights["first.weight"], again.first.weight)
    assert digest_sample([*again.parameters()]) == average
    assert [text for text in warned() if "train mode" in text] == warned()
    assert len(warned()) == (2 if is_training else 0)
    exported = export_checkpoint(f"{tmp_path}/run", tmp_path / "weights", to="safetensors")
    assert any("train mode" in note for note in exported.notes) is is_training


def test_a_save_between_the_two_steps_of_sam_is_named(warned: Callable[[], list[str]]) -> None:
    net, optimizer, state = make_run(partial(wrap, "SAM"), torch.float32)
    with CheckpointManager(MemoryStore(), state) as manager:
        for number in range(4):
            net(torch.ones(1, 6)).sum().backward()
            optimizer.first_step(zero_grad=True)
            if number == 2:
                manager.save(number, wait=True)
            net(torch.ones(1, 6)).sum().backward()
            optimizer.second_step(zero_grad=True)
    (text,) = warned()
    assert "step 2" in text
    assert "did not continue with" in text
