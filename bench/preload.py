"""Imports what the cases use, so that no import falls into a measured time of a forked child.

For the server that children are forked from: what only starts them need not wait for it.
"""

import contextlib
import importlib

from bench.states import StateSpec, build

_LIBRARIES = (
    "torch.distributed.checkpoint.staging",
    "torch.distributed.checkpoint.state_dict_saver",
    "safetensors.torch",
    "torch_checkpointing",
    "holdfast.manager",
    "holdfast.store.local",
    "holdfast.weights",
)

for _name in _LIBRARIES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
# The first optimizer imports half of torch.
build(StateSpec(kind="gpt", gpt_nbytes=1, num_small=0))
