"""Imported last by the server of forks: no collection in a fork visits what was imported before.

It would copy the memory of all these objects, and take longer than most that is done in the fork.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
