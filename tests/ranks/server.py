"""Hosts a TCPStore, and ends when it reads a line."""

import sys

import torch.distributed as dist

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
sys.stdin.readline()
