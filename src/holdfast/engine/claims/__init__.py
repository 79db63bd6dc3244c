"""Claims and leases of a run, and whether the processes that hold them still live."""
