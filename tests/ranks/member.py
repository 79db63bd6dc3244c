"""A rank of a group of two, over the store at a port; it does what it reads, a word in each line.

Its process looks as if it were on another host.
"""

import ctypes
import os
import sys

import torch.distributed as dist

from holdfast.format.records import Process
from holdfast.ranks.c10d import C10d
from holdfast.ranks.coordinator import Processes

port, rank = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
own = Process(host="far", pid=os.getpid(), start="", boot_id="far", pid_namespace="")
processes = Processes(own=own, has_ended=lambda process: False)
member = C10d(store, rank, 2, timeout_s=60.0, processes=processes)
print("met", flush=True)
for line in sys.stdin:
    if line == "fork\n" and os.fork() == 0:
        sys.stdin.readline()  # which comes when the test is over
        os._exit(0)
    elif line == "close\n":
        member.close()
    elif line == "hold\n":
        print("holds", flush=True)
        ctypes.PyDLL(None).usleep(12_000_000)  # a call of PyDLL keeps Python's lock
    elif line == "raise\n":
        raise SystemExit(1)
    print(os.getpid(), flush=True)
