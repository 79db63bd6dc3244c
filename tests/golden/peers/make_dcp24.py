"""A folder of PyTorch Distributed Checkpoint by torch 2.4."""

from __future__ import annotations

import warnings

import torch
import torch.distributed.checkpoint as dcp
from sample import STEPS, folder_argument, make_batches, write_record
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def main() -> None:
    warnings.simplefilter("ignore")
    folder = folder_argument()
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for batch in make_batches():
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    dcp.save(state, checkpoint_id=folder / "one")
    dcp_to_torch_save(folder / "one", folder / "one.pt")
    read_back = {"one": torch.load(folder / "one.pt")}
    (folder / "one.pt").unlink()
    write_record(folder, read_back, "torch")


main()
