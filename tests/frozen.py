"""Keep the garbage collector of forks away from what their server has imported; imported last.

A collection writes to each object, so a fork would copy all their memory. That takes longer than
most of what tests do in a fork.
"""

from __future__ import annotations

import gc

gc.set_threshold(10_000, 20)  # as in conftest.py
gc.collect()
gc.freeze()
