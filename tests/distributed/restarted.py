"""A rank under torchrun: in its first life it leaves messages and ends, in its second it looks."""

import os

import torch.distributed as dist

from holdfast.errors import RanksSilent
from holdfast.ranks.c10d import C10d

PATIENCE_S = 60.0
BRIEF_S = 0.3

store, rank, world_size = next(dist.rendezvous("env://"))
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
coordinator = C10d(store, rank, world_size, timeout_s=PATIENCE_S)


def say(text: object) -> None:
    print(f"life {life}, rank {rank}: {text}", flush=True)


if life == 0:
    coordinator.post("save", b"former", timeout_s=PATIENCE_S)
    if coordinator.is_leader:
        coordinator.announce("save", b"former", timeout_s=PATIENCE_S)
    say("posted")
    coordinator.post("end", b"", timeout_s=PATIENCE_S)
    if coordinator.is_leader:
        coordinator.collect("end", timeout_s=PATIENCE_S).expect_all("end")
        raise SystemExit(1)
    coordinator.hear("never", timeout_s=PATIENCE_S)
if coordinator.is_leader:
    before = coordinator.collect("save", timeout_s=BRIEF_S).came or "nothing"
else:
    try:
        before = coordinator.hear("save", timeout_s=BRIEF_S)
    except RanksSilent:
        before = "nothing"
coordinator.post("then", b"%d" % rank, timeout_s=PATIENCE_S)
if coordinator.is_leader:
    then: object = coordinator.collect("then", timeout_s=PATIENCE_S).expect_all("then")
    coordinator.announce("then", b"done", timeout_s=PATIENCE_S)
    coordinator.post("end", b"", timeout_s=PATIENCE_S)
    coordinator.collect("end", timeout_s=PATIENCE_S)
else:
    then = coordinator.hear("then", timeout_s=PATIENCE_S)
    coordinator.post("end", b"", timeout_s=PATIENCE_S)
say(f"{before}, then {then}")
