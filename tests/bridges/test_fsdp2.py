"""FSDP2 of Accelerate and of transformers' Trainer, on ranks of gloo.

Accelerate enables FSDP for kinds of accelerators only. So these ranks say that they are of such a
kind; their device is the CPU.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
from bridges import forks
from bridges.frameworks import needed, say_accelerator
from holdfast.errors import UsageError

transformers = needed("transformers")
accelerate = needed("accelerate")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks
import torch.distributed.fsdp  # noqa: E402 - so does the first sharded model
from transformers import trainer_callback as callbacks  # noqa: E402

from bridges.test_transformers import Saying, Tokens, arguments  # noqa: E402
from holdfast.bridges import accelerate as accelerate_bridge  # noqa: E402
from holdfast.bridges import transformers as bridge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
GLOBAL_BATCH = 12
FSDP2 = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["GPT2Block"],
}


def whole(value: Any) -> Any:
    """Copies of nested values, whose sharded tensors are gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


class Seen(callbacks.TrainerCallback):  # type: ignore[misc]
    """Notes weights and moments as the first step of this process finds them."""

    def __init__(self) -> None:
        self.first: Any = None

    def on_step_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        if self.first is None:
            self.first = state_of(model, optimizer)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    moments = whole(optimizer.state_dict()["state"])
    return {"weights": whole(model.state_dict()), "moments": moments}


class Noting(bridge.CheckpointedTrainer):
    """Notes the samples of each step on this rank."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        samples = self.__dict__.setdefault("samples", {})
        found = inputs["input_ids"][:, 0].tolist()
        samples.setdefault(self.state.global_step, []).extend(found)
        return super().training_step(model, inputs, *args, **options)


def trainer(root: Path, num_ranks: int, *, more: Any = (), sinks: Any = (), **options: Any) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.set_seed(1)
    window, keep = options.get("gradient_accumulation_steps", 1), options.pop("keep", None)
    given = {
        "per_device_train_batch_size": GLOBAL_BATCH // num_ranks // window,
        "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "constant",
        "learning_rate": 0.01,
        "fsdp": True,
        "fsdp_config": dict(FSDP2),
        **options,
    }
    args = arguments(root, **given)
    if given["fsdp"]:
        say_accelerator()
    size = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=40, **size)
    return Noting(
        transformers.GPT2LMHeadModel(config),
        args,
        train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(8)),
        callbacks=[*more],
        checkpoints=holdfast.Checkpoints(root, every="3step", keep=keep, sinks=sinks),
    )


def outcome(one: Any) -> dict[str, Any]:
    of_time = ("runtime", "per_second")
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(of_time)}
        for entry in one.state.log_history
    ]
    found = {"logs": logs, "step": one.state.global_step, "generator": torch.get_rng_state()}
    return {**found, **state_of(one.model, one.optimizer)}


def killed(root: Path, say: forks.Say, **options: Any) -> dict[str, Any]:
    one = trainer(root, 2, more=[Saying(say)], sinks=[say], **options)
    assert one.accelerator.is_fsdp2
    one.train()
    assert any(isinstance(each, DTensor) for each in one.model.parameters())
    return outcome(one)


@pytest.mark.full
def test_two_ranks_of_which_one_is_killed_end_with_the_same_bits(tmp_path: Path) -> None:
    """Invariant 7, R1: sharded weights and moments, logs and generators of both ranks."""
    job = partial(killed, max_steps=4, eval_strategy="steps", eval_steps=3)
    kill = forks.Kill(rank=1, moment=20, is_of_all=True)
    codes = forks.finish_ranks(job, tmp_path / "run", 2, kill=kill)
    assert codes == [-signal.SIGKILL] * 2
    for root in ("run", "whole"):
        assert forks.finish_ranks(job, tmp_path / root, 2) == [0, 0]
    for rank in range(2):
        found, expected = (forks.result(tmp_path / root, rank) for root in ("run", "whole"))
        assert found["moments"] < expected["moments"]
        forks.assert_equal(found["found"], expected["found"], f"rank {rank}")


class Loop:
    """A loop that Accelerate has sharded on all ranks, with as many samples in each step."""

    def __init__(self, version: int = 2, **options: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        say_accelerator()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="size_based_wrap", min_num_params=20
        )
        accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, **options)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), nn.Linear(9, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        if version == 2:  # the other one needs an accelerator
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        size = GLOBAL_BATCH // accelerator.num_processes
        self.data = holdfast.data.Loader(torch.arange(96.0).view(24, 4), batch_size=size, seed=3)
        self.state = accelerate_bridge.state(accelerator, data=self.data)
        self.accelerator, self.model = accelerator, model
        self.optimizer, self.scheduler = optimizer, scheduler


def looped(_: int, goal: int, root: Path, say: forks.Say) -> dict[str, Any]:
    loop, samples, first = Loop(), dict[int, list[float]](), None
    with holdfast.CheckpointManager(root, loop.state, every="2step") as manager:
        found = manager.resume()
        step = found.step if found else 0
        for batch in loop.data.until(goal, start=step):
            first = first or state_of(loop.model, loop.optimizer)
            samples[step] = batch[:, 0].tolist()
            loop.accelerator.backward(loop.model(batch / 96).square().mean())
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()
            step += 1
            manager.maybe_save(step)
        manager.save(step, wait=True)
    end = state_of(loop.model, loop.optimizer)
    return {"first": first, "end": end, "samples": samples}


def resized(num_ranks: int, goal: int, root: Path, say: forks.Say) -> dict[str, Any]:
    seen = Seen()
    one = trainer(root, num_ranks, more=[seen], max_steps=goal)
    one.train()
    end = state_of(one.model, one.optimizer)
    return {"first": seen.first, "end": end, "samples": one.samples}


@pytest.mark.full
@pytest.mark.parametrize("training", [resized, looped])
def test_on_other_numbers_of_ranks_the_run_has_the_same_bits_and_order(
    training: Callable[[int, int, Path, forks.Say], dict[str, Any]], tmp_path: Path
) -> None:
    """At an unchanged number of samples in a step; moments and weights are sharded anew."""
    steps, last, numbers = dict[int, list[int]](), None, (2, 1, 3)
    for life, num_ranks in enumerate(numbers, 1):
        job = partial(training, num_ranks, 2 * life)
        assert forks.finish_ranks(job, tmp_path / "run", num_ranks) == [0] * num_ranks
        found = [forks.result(tmp_path / "run", rank)["found"] for rank in range(num_ranks)]
        for one in found:
            forks.assert_equal(one["first"], last or one["first"])
        last = found[0]["end"]
        for step in found[0]["samples"]:
            steps[step] = [sample for one in found for sample in one["samples"][step]]
    goal = 2 * len(numbers)
    assert forks.finish_ranks(partial(training, 2, goal), tmp_path / "whole", 2) == [0, 0]
    order = [forks.result(tmp_path / "whole", rank)["found"]["samples"] for rank in range(2)]
    assert steps == {step: [*order[0][step], *order[1][step]] for step in range(goal)}


KILLED = {
    "plain": (10, partial(killed, max_steps=10, eval_strategy="steps", eval_steps=3)),
    "accumulation": (5, partial(killed, max_steps=6, gradient_accumulation_steps=2)),
    "loop": (5, partial(looped, 2, 10)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", KILLED)
def test_kills_of_one_or_all_ranks_at_random_moments_change_nothing(
    name: str, tmp_path: Path
) -> None:
    kills, job = KILLED[name]
    forks.assert_kills_of_ranks_change_nothing(job, tmp_path, 2, kills=kills, seed=kills)


def best_of_two(root: Path, say: forks.Say) -> dict[str, Any]:
    """Train with growing losses after step 2, so that this is the best evaluation."""
    names = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
    options = {"max_steps": 6, "eval_steps": 2, "save_steps": 2, "save_total_limit": 2, **names}
    one = trainer(root, 2, learning_rate=3.0, **options)
    one.train()
    logs = [entry for entry in one.state.log_history if "eval_loss" in entry]
    best = min(logs, key=lambda entry: entry["eval_loss"])
    found = {"best": best["eval_loss"], "now": one.evaluate()["eval_loss"]}
    one.save_model(str(root / "final"))
    return {**found, "step": best["step"], **state_of(one.model, one.optimizer)}


@pytest.mark.full
def test_the_best_model_is_loaded_into_shards_and_kept(tmp_path: Path) -> None:
    """Also where the last evaluation has left parameters gathered; `save_model` writes it."""
    assert forks.finish_ranks(best_of_two, tmp_path / "run", 2) == [0, 0]
    found = forks.result(tmp_path / "run", 0)["found"]
    assert found["step"] < 6
    assert found["now"] == found["best"]
    written = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "final").state_dict()
    for name, value in holdfast.load_weights(f"{tmp_path / 'run'}@best").items():
        assert torch.equal(found["weights"][name], value), name
        assert torch.equal(written[name], value), name
    with holdfast.CheckpointManager(tmp_path / "run", {"none": {}}) as manager:
        assert {one.step for one in manager.list()} == {found["step"], 6}


def damaged(root: Path, say: forks.Say) -> dict[str, Any]:
    """Resume where the newest checkpoint is damaged: the loop begins at an earlier step."""
    if accelerate.PartialState(cpu=True).is_main_process:
        with holdfast.CheckpointManager(root, {"none": {}}, ranks=None) as manager:
            newest = Path(manager.list()[0].path)
        file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.chmod(0o644)
        file.write_bytes(content)
    torch.distributed.barrier()
    return killed(root, say, max_steps=7)


@pytest.mark.full
def test_a_damaged_newest_checkpoint_is_passed_over_by_all_ranks(tmp_path: Path) -> None:
    for root, goal in (("run", 6), ("whole", 7)):
        job = partial(killed, max_steps=goal)
        assert forks.finish_ranks(job, tmp_path / root, 2) == [0, 0]
    assert forks.finish_ranks(damaged, tmp_path / "run", 2) == [0, 0]
    for rank in range(2):
        found, expected = (forks.result(tmp_path / root, rank) for root in ("run", "whole"))
        forks.assert_equal(found["found"], expected["found"], f"rank {rank}")


def refused(root: Path, say: forks.Say) -> dict[str, Any]:
    first = {**FSDP2, "version": 1, "sync_module_states": False}
    split = accelerate.parallelism_config.ParallelismConfig(cp_size=2)
    tries = {
        "FSDP1 of Accelerate": partial(Loop, 1),
        "context parallelism": partial(Loop, parallelism_config=split),
        "FSDP1 of a Trainer": partial(trainer, root, 2, fsdp_config=first),
    }
    found = {}
    for name, attempt in tries.items():
        with pytest.raises(UsageError) as error:
            attempt()
        found[name] = str(error.value)
    return found


def test_what_cannot_be_saved_on_several_ranks_is_refused_by_name(tmp_path: Path) -> None:
    assert forks.finish_ranks(refused, tmp_path / "run", 2) == [0, 0]
    for rank in range(2):
        found = forks.result(tmp_path / "run", rank)["found"]
        assert "distributed_type=FSDP" in found["FSDP1 of Accelerate"]
        assert "fsdp_version=2" in found["FSDP1 of Accelerate"]
        assert "fsdp_version=2" in found["FSDP1 of a Trainer"]
        assert "ranks=DataRanks(" in found["context parallelism"]
