"""Shipped for users and for us: store contract, faulty store, resume equivalence."""
