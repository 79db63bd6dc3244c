"""R38: several ranks save into a bucket together, and any number of them loads from it."""

from __future__ import annotations

from typing import Any

import pytest

from allranks import Member, all_of, on_ranks
from holdfast.engine.roots.catalog import Catalog
from holdfast.store import open_store
from servers.fixtures import on, use
from servers.program import Service
from stores.test_costs import Bill


@on("moto")
@pytest.mark.parametrize("compress", [None, "zstd"])
def test_ranks_share_a_bucket(
    compress: str | None, service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is put once, by one rank; the leader alone looks around."""
    with Bill(service) as proxy:
        use(proxy.service, monkeypatch)

        def save(member: Member) -> dict[str, bytes]:
            with member.manager(root, compress=compress) as manager:
                for step in (1, 2):
                    member.train()
                    manager.save(step).wait()
                    if member.rank == 0:
                        bills.append(proxy.since())
            return member.bits()

        bills: list[Any] = []
        saved = all_of(on_ranks(4, save))
        _, second = bills
        print(f"a save by four ranks, compress={compress}: {dict(second)}")
        catalog = Catalog(open_store(root))
        newest = catalog.latest()
        assert newest is not None
        assert newest.manifest.world_size == 4
        assert second["writes"] <= len(newest.manifest.files) + 20  # beside them, records

        def load(member: Member) -> dict[str, bytes]:
            with member.manager(root) as manager:
                found = manager.resume()
                assert found is not None
                assert found.step == 2
            return member.bits()

        for num_ranks in (2, 3):
            assert all_of(on_ranks(num_ranks, load)) == [saved[0]] * num_ranks
