"""A reader of copies for tests: `python pieces_child.py FOLDER MAX_NBYTES LOG HOW [NUMBER...]`.

It says "ready", waits for a line, and reads the pieces of those numbers, several at a time. Each
fetch adds the number to LOG. HOW is `reads`, or `hangs`: then it says "fetching" in the middle of
the first fetch and waits for a line; with `forks` it has a child by then, which lives as long as
its input is open.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from holdfast.store.base import ignore
from holdfast.store.local.pieces import LocalPieces, Piece

NBYTES = 300_000

OBJECT = "0123456789abcdef/checkpoint/object"


def piece(number: int) -> Piece:
    """A piece of an object."""
    return Piece(place=f"{OBJECT}/{number:08d}", start=number * NBYTES, nbytes=NBYTES)


def content(number: int) -> bytes:
    """What is in it."""
    return bytes([number % 251]) * NBYTES


def main(folder: str, max_nbytes: str, log: str, how: str, *numbers: str) -> None:
    """Read, and say "done"."""
    pieces = LocalPieces(folder, max_nbytes=int(max_nbytes), wait_s=60)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def read(number: int) -> None:
        def fetch(start: int, memory: memoryview, seen: object) -> None:
            memory[:] = content(start // NBYTES)
            os.write(fd, b"%d\n" % (start // NBYTES))
            if how == "forks" and not os.fork():
                os.read(0, 1)
                os._exit(0)
            if how != "reads":
                print("fetching", flush=True)
                sys.stdin.readline()

        memory = bytearray(NBYTES)
        at = piece(number).start
        pieces.read_piece(piece(number), at, memoryview(memory), fetch, seen=ignore)
        assert memory == content(number), number

    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, map(int, numbers)))
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
