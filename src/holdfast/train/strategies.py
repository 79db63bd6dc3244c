"""How several ranks train one model: DDP, FSDP2, or a model that the caller has sharded.

A strategy prepares the model, and says for each batch whether its backward pass exchanges
gradients. Everything is done by torch's own calls. A resume gives the same last digits of sums only
if DDP's buckets never change (tests/train/parallel/test_exact.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from holdfast.arguments import check_arguments, shown
from holdfast.errors import UsageError, listing
from holdfast.state.components import refuse_other_sharding
from holdfast.train.group import Group

logger = logging.getLogger("holdfast")

_NUM_INEXACT = 3
"""Ranks from which on a sum depends on its order; of two numbers it does not."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


Dtype = Literal["fp32", "bf16", "fp16"]


@check_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class DDP:
    """Strategy: each rank holds the whole model, and gradients are averaged.

    By torch's `DistributedDataParallel`. All but `rebuild_buckets` are its arguments.
    """

    find_unused_parameters: bool = False
    """Whether some parameters get no gradient in some steps."""
    bucket_cap_mb: float | None = None
    """Size of the buckets of gradients, in MiB; None: torch's default."""
    rebuild_buckets: bool = False
    """Whether torch may reorder the buckets after the first step, as gradients arrived in it. On
    three ranks or more a resume is then not exact in the last digits, and logs a warning. False:
    the order is that of the parameters from the first step on. Of no effect on two ranks, where a
    sum has one order only, and with `find_unused_parameters`, where torch never reorders."""


@check_arguments(but=("mesh",))
@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2:
    """Strategy: parameters, gradients and optimizer slots are sharded over the ranks.

    By torch's `fully_shard`. With it the optimizer is a function, which gets the sharded model.
    """

    mesh: tuple[int, int] | DeviceMesh | None = None
    """(replicas, shards) for hybrid sharding, or a mesh of torch; None: over all ranks."""
    blocks: Collection[type[nn.Module]] | None = None
    """Classes of the modules that are gathered one at a time, such as a transformer's layer. None:
    each item of each `nn.ModuleList`."""
    reshard_after_forward: bool = True
    """Whether the parameters of a block are freed between forward and backward pass."""
    param_dtype: Dtype | None = None
    """Type of the parameters in computation and in all-gathers; None: their own."""
    reduce_dtype: Dtype | None = None
    """Type in which gradients are reduced; None: that of the parameters in computation."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer slots stay in host memory between uses."""


Strategy: TypeAlias = DDP | FSDP2
Name = Literal["ddp", "fsdp2", "single"]


class Parallel:
    """Strategy in use by this rank; this base class is for a model that a single rank trains."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def prepare(self, model: nn.Module) -> None:
        """Prepare a module in place, before its optimizer is made."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return what the loss function calls in place of the module."""
        return model

    def prepare_step(self, model: nn.Module) -> None:
        """Prepare for the batches of one step."""

    def enter_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a batch's context, in which gradients are exchanged in the step's last only."""
        return nullcontext()

    def check_gradients(self) -> None:
        """Check after a backward pass that no gradient that it should exchange is missing."""

    def reshard(self, model: nn.Module) -> None:
        """Free parameters that were gathered by forward passes without a backward pass."""

    def warn_of_inexact_resume(self) -> None:
        """Say what a run that goes on cannot do exactly as an undisturbed one."""

    def share_buffers(self, model: nn.Module) -> None:
        """Give the buffers of all ranks the values of the leader's, which a checkpoint has."""
        self.group.copy_from_leader(_stored_buffers(model))


class Replicated(Parallel):
    """DDP as this rank uses it: each rank has the whole model."""

    def __init__(self, group: Group, strategy: DDP, device: torch.device | None) -> None:
        super().__init__(group)
        self._strategy = strategy
        self._device = device
        self._wrapped: DistributedDataParallel | None = None
        self._exchanged: list[tuple[str, nn.Parameter]] = []
        self._before: list[tuple[Tensor | None, int]] = []
        """Their gradients before the last batch of a step."""
        self._is_last = True

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Wrap the module; the parameters of the leader are copied to all ranks."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError('strategy="ddp": no parameter of the model requires a gradient')
        on_host = self._device is None or self._device.type == "cpu"
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=None if on_host else [self._device],
            find_unused_parameters=self._strategy.find_unused_parameters,
            bucket_cap_mb=self._strategy.bucket_cap_mb,
        )
        if self._is_inexact and not self._strategy.rebuild_buckets:
            settle_buckets(self._wrapped)
        ignored = self._wrapped.parameters_to_ignore
        self._exchanged = [
            (name, weight)
            for name, weight in model.named_parameters()
            if weight.requires_grad and name not in ignored
        ]
        self._calls = self._wrapped.register_forward_pre_hook(self._called)
        self._is_called = False
        return self._wrapped

    @property
    def _is_inexact(self) -> bool:
        """Whether sums change in the last digits when torch rebuilds its buckets."""
        rebuilds = not self._strategy.find_unused_parameters
        return rebuilds and self.group.world_size >= _NUM_INEXACT

    def warn_of_inexact_resume(self) -> None:
        if self._is_inexact and self._strategy.rebuild_buckets and self.group.is_leader:
            logger.warning(
                "DDP(rebuild_buckets=True): the resume is not exact. In the first step after a "
                "start torch sums gradients in another order, so on %d ranks the last digits may "
                "differ from those of an uninterrupted run. For exact resumes, use "
                "rebuild_buckets=False from the start of a run",
                self.group.world_size,
            )

    def enter_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        assert self._wrapped is not None, "the model is wrapped before it is trained"
        self._is_last = is_last
        self._before = [_gradient(weight) for _, weight in self._exchanged] if is_last else []
        if self._is_called:
            return nullcontext() if is_last else self._wrapped.no_sync()
        return self._first_batch(is_last=is_last)

    def check_gradients(self) -> None:
        """Refuse a step without gradients that DDP waits for, which torch sees a step late."""
        if self._strategy.find_unused_parameters or not (self._is_last and self._is_called):
            return
        without = [
            name
            for (name, weight), (gradient, version) in zip(
                self._exchanged, self._before, strict=True
            )
            if weight.grad is None or (weight.grad is gradient and weight.grad._version == version)
        ]
        self._before = []
        if without:
            raise UsageError(
                f"DDP on rank {self.group.rank}: the loss does not depend on these parameters of "
                "the model, so the gradients of this step cannot be averaged over the ranks:\n"
                f"{listing(without)}\nIf only some batches use them, give "
                "strategy=DDP(find_unused_parameters=True). If none does, freeze them "
                "(`requires_grad_(False)`) before the Trainer is made"
            )

    @contextlib.contextmanager
    def _first_batch(self, *, is_last: bool) -> Iterator[None]:
        """Check that the loss calls the wrapped model, which alone exchanges gradients."""
        assert self._wrapped is not None, "the model is wrapped before it is trained"
        with nullcontext() if is_last else self._wrapped.no_sync():
            yield
        if not self._is_called:
            raise UsageError(
                "the loss has not called the model that it was given, so the gradients of this "
                "rank would stay its own: call `model(…)`, not a method or another reference to it"
            )
        self._calls.remove()

    def _called(self, module: nn.Module, arguments: Any) -> None:
        self._is_called = True


def _gradient(weight: Tensor) -> tuple[Tensor | None, int]:
    """Return the gradient of a parameter, and how often it was changed in place."""
    return weight.grad, 0 if weight.grad is None else weight.grad._version


class Sharded(Parallel):
    """FSDP2 as this rank uses it, or a model that the caller has sharded (`strategy` is None)."""

    def __init__(self, group: Group, strategy: FSDP2 | None, device: torch.device | None) -> None:
        super().__init__(group)
        self._strategy = strategy
        self._device = device
        self._mesh = None if strategy is None else _mesh(strategy, group, device)
        self._roots: list[Any] = []
        self._is_syncing = True

    def prepare(self, model: nn.Module) -> None:
        """Shard the module in place, with the values of the leader."""
        if self._strategy is None:
            self._roots += [item for item in model.modules() if _is_fsdp(item)]
            return
        from torch.distributed.fsdp import fully_shard

        if is_sharded(model):
            raise UsageError(
                "strategy: the model is sharded already; omit strategy, or pass the unsharded "
                "module"
            )
        self.group.copy_from_leader([*model.parameters(), *model.buffers()])
        options: dict[str, Any] = {
            **self._policies(),
            "mesh": self._mesh,
            "reshard_after_forward": self._strategy.reshard_after_forward,
        }
        for block in blocks_of(model, self._strategy.blocks, "FSDP2: blocks"):
            fully_shard(block, **options)
        fully_shard(model, **options)
        if not self._roots:  # the average of the weights needs no gradients
            self._roots.append(model)

    def prepare_step(self, model: nn.Module) -> None:
        """Copy the leader's buffers, as DDP does, so that no rank has a state of its own."""
        self.share_buffers(model)

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the leader's buffers; those of a model that the caller has sharded stay."""
        if self._strategy is not None:
            self.group.copy_from_leader(_stored_buffers(model))

    def enter_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        if is_last != self._is_syncing:
            self._is_syncing = is_last
            for root in self._roots:
                root.set_requires_gradient_sync(is_last)
        return nullcontext()

    def reshard(self, model: nn.Module) -> None:
        for module in filter(_is_fsdp, model.modules()):
            module.reshard()  # type: ignore[operator]

    def _policies(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        assert self._strategy is not None
        found: dict[str, Any] = {}
        types = [self._strategy.param_dtype, self._strategy.reduce_dtype]
        if any(types):
            param, reduce = (None if name is None else _DTYPES[name] for name in types)
            found["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        if self._strategy.cpu_offload:
            # Pinned memory needs an accelerator.
            found["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return found


def chosen_strategy(
    given: Name | Strategy | None, model: nn.Module, group: Group
) -> Strategy | None:
    """Return the strategy of an argument, DDP for several ranks by default; None for none."""
    refuse_other_sharding({"model": model})
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "model: pass the module itself, not a DistributedDataParallel: the Trainer wraps it"
        )
    if isinstance(given, DDP | FSDP2):
        return given
    if given == "fsdp2":
        return FSDP2()
    if given == "ddp" or (given is None and not group.is_alone and not is_sharded(model)):
        return DDP()
    if given in (None, "single"):
        return None
    raise UsageError(
        f'strategy={shown(given)}: must be "ddp", "fsdp2", "single", a DDP or an FSDP2'
    )


def parallel_of(strategy: Strategy | None, group: Group, device: torch.device | None) -> Parallel:
    """Make the strategy of this rank, for a model on a device (None: where it was)."""
    if isinstance(strategy, FSDP2):
        return Sharded(group, strategy, device)
    if group.is_alone:
        return Parallel(group)
    if isinstance(strategy, DDP):
        return Replicated(group, strategy, device)
    return Sharded(group, None, device)


def is_sharded(model: nn.Module) -> bool:
    """Whether a module has DTensors as parameters."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds; any other tensor as it is."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def gather_dtensor(tensor: Tensor) -> Tensor:
    """Return the value of a DTensor, which all ranks compute together; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def blocks_of(
    model: nn.Module, classes: Collection[type[nn.Module]] | None, what: str
) -> list[nn.Module]:
    """Return the modules of these classes, innermost first; None: all items of `nn.ModuleList`s."""
    if classes is None:
        lists = [item for item in model.modules() if isinstance(item, nn.ModuleList)]
        items = {id(item) for several in lists for item in several}
        return [item for item in reversed([*model.modules()]) if id(item) in items]
    wanted = tuple(classes)
    if not all(isinstance(item, type) and issubclass(item, nn.Module) for item in wanted):
        raise UsageError(f"{what}={shown(classes)}: must be classes of modules")
    unused = [
        item.__name__
        for item in wanted
        if not any(isinstance(module, item) for module in model.modules())
    ]
    if unused:
        raise UsageError(f"{what}: the model has no module of these classes:\n" + listing(unused))
    return [item for item in reversed([*model.modules()]) if isinstance(item, wanted)]


def recompute(model: nn.Module, given: bool | Collection[type[nn.Module]]) -> None:
    """Have blocks of a model compute their activations again in the backward pass, in place."""
    if given is False:
        return
    what = "activation_checkpointing"
    found = blocks_of(model, None if given is True else given, what)
    if not found:
        raise UsageError(
            f"{what}=True: the model has no nn.ModuleList of blocks to recompute; pass the "
            "classes of its blocks"
        )
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _mesh(strategy: FSDP2, group: Group, device: torch.device | None) -> Any:
    shape = strategy.mesh
    if shape is not None and not isinstance(shape, tuple):
        return shape
    kind = "cpu" if device is None else device.type
    if shape is None:
        return init_device_mesh(kind, (group.world_size,))
    if len(shape) != 2 or shape[0] * shape[1] != group.world_size:
        raise UsageError(
            f"FSDP2: mesh={shape!r}: (replicas, shards) must multiply to the {group.world_size} "
            "ranks of the group"
        )
    return init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards"))


def _is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def _stored_buffers(model: nn.Module) -> list[Tensor]:
    return [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Order DDP's buckets now, from last parameter to first, by a backward pass of zeros."""
    model = wrapped.module
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    wrapped.module = _Zero(model)
    try:
        with _without_hooks(weights), torch.enable_grad():
            # With an input, because DDP on a GPU moves its inputs and fails if there are none.
            wrapped(torch.zeros((), device=weights[0].device)).backward()
    finally:
        wrapped.module = model
    for weight in weights:
        weight.grad = None


@contextmanager
def _without_hooks(weights: Iterable[Tensor]) -> Iterator[None]:
    """Call no hooks of parameters in the `with`: their dicts, which torch has, are emptied."""
    registered: list[Any] = []
    for weight in weights:
        registered += [weight._backward_hooks, weight._post_accumulate_grad_hooks]
    kept = [(hooks, dict(hooks)) for hooks in registered if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, members in kept:
            hooks.update(members)


class _Zero(nn.Module):
    """Stand-in for a model whose output is zero, and depends on each parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the model's: DDP looks up in each call which buffers it copies from rank 0."""
        return self._model.named_buffers(*args, **options)

    def forward(self, total: Tensor) -> Tensor:
        """Add a zero made of each parameter; a backward pass reaches the last parameter first."""
        sparse = {id(weight) for weight in _sparse_weights(self._model)}
        for weight in self._model.parameters():
            if weight.requires_grad:
                zero = _sparse_zero(weight) if id(weight) in sparse else weight.sum() * 0
                total = total + zero.real.to(total.device)
        return total


def _sparse_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters whose gradients DDP expects to be sparse."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module.weight


def _sparse_zero(weight: Tensor) -> Tensor:
    row = torch.zeros(1, dtype=torch.int64, device=weight.device)
    return embedding(row, weight, sparse=True).sum() * 0
