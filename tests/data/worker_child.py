"""A training that waits for its second batch: `worker_child.py CONTEXT`.

Prints the pids of the worker that fetches it and of the process that made the worker.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings

from holdfast.data import Loader


class Samples:
    """The first one says who fetches it; the others never come."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index:
            threading.Event().wait()
        return os.getpid(), os.getppid()


def main() -> None:
    warnings.simplefilter("ignore")
    loader = Loader(
        Samples(), batch_size=1, shuffle=False, num_workers=1, multiprocessing_context=sys.argv[1]
    )
    batches = iter(loader)
    worker, maker = next(batches)
    print(int(worker), int(maker), flush=True)
    next(batches)


if __name__ == "__main__":
    main()
