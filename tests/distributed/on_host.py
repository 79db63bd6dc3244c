"""A rank in a network namespace: saves step 1, and step 2 when it reads a line; prints the outcome.

Its process looks as if it were on another host.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

from allranks import Member
from holdfast import errors
from holdfast.ownership.process import this_process
from holdfast.ranks.c10d import C10d, open_group
from holdfast.ranks.coordinator import Processes

HOUR_S = 3600.0

rank, world_size, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
store = dist.TCPStore(
    "10.77.0.1", 29500, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60)
)
open_group("gloo", timeout_s=60, store=store, rank=rank, world_size=world_size)
name = f"node{rank}"
own = msgspec.structs.replace(this_process(), host=name, boot_id=name)
processes = Processes(own=own, has_ended=lambda process: False)
member = Member(C10d.of_default_group(processes=processes))
manager = member.manager(root, save_timeout_s=HOUR_S)
member.train()
manager.save(1).wait(60)
print("saved", flush=True)
sys.stdin.readline()
begin = time.monotonic()
try:
    manager.save(2).wait(100)
except errors.HoldfastError as error:
    outcome = f"{error} {error.__cause__}"
else:
    outcome = "committed"
print(f"after {time.monotonic() - begin:.1f} s: {outcome}".replace("\n", " "), flush=True)
sys.stdin.readline()  # rank 0 hosts the store of the others
os._exit(0)  # the group cannot be destroyed without the lost host
