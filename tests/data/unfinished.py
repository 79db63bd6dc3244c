"""A training that ends with iterators of which it has taken one batch: `unfinished.py CONTEXT`."""

from __future__ import annotations

import sys
import warnings

from holdfast.data import Loader


def main() -> None:
    warnings.simplefilter("ignore")
    for persistent in (False, True):
        loader = Loader(
            range(40),
            batch_size=2,
            num_workers=2,
            multiprocessing_context=sys.argv[1],
            persistent_workers=persistent,
        )
        for _ in loader:
            pass
        batches = iter(loader)
        next(batches)
    print("done")


if __name__ == "__main__":
    main()
