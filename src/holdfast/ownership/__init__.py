"""Claims and leases: who may write to and delete from a root."""
