"""A `torch_dist` folder of Megatron Core; two calls of CUDA are stubbed."""

from __future__ import annotations

import os
import warnings

import torch
from sample import STEPS, folder_argument, write_record


def main() -> None:
    warnings.simplefilter("ignore")
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29618"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    folder = folder_argument() / "iter_0000003"
    folder.mkdir()
    dist_checkpointing.save(_state(), str(folder))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    found = dist_checkpointing.load(_state(), str(folder))
    write_record(folder.parent, {folder.name: found}, "torch", "megatron-core")
    torch.distributed.destroy_process_group()


def _state() -> dict[str, object]:
    """Return a state as that of a model, its optimizer and the rest of a training."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    torch.manual_seed(1)

    def sharded(key: str, *shape: int) -> object:
        tensor = torch.randn(shape)
        return ShardedTensor.from_rank_offsets(key, tensor)

    weight = "decoder.layers.mlp.linear_fc1.weight"
    return {
        "model": {
            weight: sharded(weight, 3, 4),
            "embedding.weight": sharded("embedding.weight", 5, 2),
            "decoder._extra_state": ShardedObject("decoder._extra_state", b"\0extra", (1,), (0,)),
        },
        "optimizer": {
            "exp_avg": sharded(f"optimizer.state.exp_avg.{weight}", 3, 4),
            "param_groups": [{"lr": 0.01, "betas": (0.9, 0.95), "step": STEPS}],
        },
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 4 * STEPS},
        "rng_state": ShardedObject("rng_state", [{"random_rng_state": (3, None)}], (1, 1), (0, 0)),
        "iteration": STEPS,
        "checkpoint_version": 3.0,
    }


if __name__ == "__main__":
    main()
