#!/bin/bash
# Two ranks on this machine; on several, the same command on each, with --nnodes and --rdzv-endpoint.
#
# When a rank dies, torchrun ends the others and starts all of them again, up to three times; they go on from the newest
# checkpoint. SIGTERM to torchrun reaches all ranks: they agree on a step, save it, and torchrun ends with a failure
# status; it kills what has not ended after 30 s. To go on, run this again, as `holdfast run` around it does by itself.

root=${ROOT:-runs/gpt}
# With gloo, ranks cannot connect again after a restart unless this is set.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py "$root"
