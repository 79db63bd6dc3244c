"""Quantized modules and optimizers of torchao for tests; and a tensor subclass without torchao.

torchao is imported by the first call: that takes seconds, and warns.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.state.leaves import inner_tensors, plain_parts
from state.roundtrip import raw_bytes


def import_torchao() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.optim
        import torchao.quantization
        from torchao.quantization.quantize_.workflows import nf4
    torchao.nf4 = nf4
    return torchao  # type: ignore[no-any-return]


def quantized_model(seed: int) -> nn.Module:
    """A layer of each kind of quantized weight, and one that trains."""
    ao = import_torchao()
    torch.manual_seed(seed)
    kinds = [
        ao.quantization.Int8WeightOnlyConfig(),
        ao.quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=ao.quantization.PerGroup(32)
        ),
        ao.quantization.Float8WeightOnlyConfig(),
    ]
    layers = [nn.Linear(64, 64, dtype=torch.bfloat16) for _ in kinds]
    for layer, kind in zip(layers, kinds, strict=True):
        ao.quantization.quantize_(layer, kind)
    packed = nn.Linear(256, 256)
    weight = ao.nf4.nf4_tensor.to_nf4(packed.weight.detach())
    packed.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(*layers, packed, nn.Linear(64, 2))


def bits_of(tensor: Tensor) -> list[bytes]:
    """The bytes of all plain tensors in a tensor."""
    return [raw_bytes(part) for part in plain_parts(tensor)]


def bits_in(module: nn.Module) -> dict[str, list[bytes]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: bits_of(tensor) for name, tensor in named}


class Mode(Enum):
    NEAR = "near"
    DOWN = "down"


class Sizes(NamedTuple):
    rows: int
    width: float


@dataclass(frozen=True)
class Settings:
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    sizes: Sizes = Sizes(2, 0.5)  # noqa: RUF009
    layout: torch.layout = torch.strided


class Scaled(Tensor):
    """Codes times a scale, with a context of every kind of value."""

    codes: Tensor
    scale: Tensor
    context: dict[str, Any]

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, context: dict[str, Any]) -> Scaled:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale, made.context = codes, scale, context
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.view.default and args[1] == [*args[0].shape]:
            func = torch.ops.aten.detach.default
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            one = args[0]
            inner = {name: func(part) for name, part in inner_tensors(one).items()}
            return cls.__tensor_unflatten__(inner, one.context, one.shape, one.stride())
        if func is torch.ops.aten.copy_.default:
            for live, stored in zip(plain_parts(args[0]), plain_parts(args[1]), strict=True):
                live.copy_(stored)
            return args[0]
        raise NotImplementedError(func)


def new_context(**changes: Any) -> dict[str, Any]:
    return {
        "mode": Mode.NEAR,
        "block": (2, 2),
        "shape": torch.Size([2, 2]),
        "settings": Settings(),
        "nothing": None,
        "names": ["a", "b"],
        "scale": 0.5,
        **changes,
    }


def scaled(seed: int = 0, shape: tuple[int, ...] = (4, 3), **changes: Any) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-9, 9, shape, dtype=torch.int8, generator=generator)
    scale = torch.rand(shape[0], generator=generator)
    return Scaled(codes, scale, new_context(**changes))


def scaled_model(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(scaled(seed, **changes), requires_grad=False)
    return model


class ScaledMomentum(torch.optim.Optimizer):
    """An optimizer with a moment in `Scaled`, which draws from the global generator."""

    def __init__(self, parameters: Any, lr: Any = 0.1, *, fails: bool = False) -> None:
        super().__init__(parameters, {"lr": lr})
        self.fails, self.context = fails, new_context()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise RuntimeError("this step has no gradients")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Any) -> None:
        state = self.state[parameter]
        if not state:
            codes = torch.zeros(parameter.shape, dtype=torch.int8)
            state["moment"] = Scaled(codes, torch.ones(len(codes)), self.context)
            state["count"] = 0
        state["count"] += 1
        moment = state["moment"]
        moment.codes.add_((parameter.grad.sign() + torch.rand(parameter.shape)).to(torch.int8))
        moment.scale.mul_(0.75)
        scale = moment.scale.reshape(-1, *[1] * (parameter.dim() - 1))
        parameter.sub_(group["lr"] * moment.codes * scale)
