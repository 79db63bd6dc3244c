"""R38: several ranks save into a bucket together, and any number of them loads from it."""

from __future__ import annotations

from typing import Any

import pytest

from allranks import Member, all_of, on_ranks
from holdfast import Encryption, Tiered
from holdfast.encryption.store import sealing
from holdfast.keys import SecretKey
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.memory import MemoryStore
from marks import full
from servers.fixtures import on, use
from servers.program import Service
from stores.test_costs import Bill

SEALS = Encryption(keys=SecretKey(bytes(range(32))))


@on("moto")
@pytest.mark.parametrize(
    "options",
    [*full({}, {"compress": "zstd"}), {"compress": "zstd", "encrypt": SEALS}],
    ids=["plain", "zstd", "zstd-encrypted"],
)
def test_ranks_share_a_bucket(
    options: dict[str, Any], service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is put once, by one rank; the leader alone looks around."""
    with Bill(service) as proxy:
        use(proxy.service, monkeypatch)

        def save(member: Member) -> dict[str, bytes]:
            with member.manager(root, **options) as manager:
                for step in (1, 2):
                    member.train()
                    manager.save(step).wait()
                    if member.rank == 0:
                        bills.append(proxy.since())
            return member.bits()

        bills: list[Any] = []
        saved = all_of(on_ranks(4, save))
        _, second = bills
        print(f"a save by four ranks, {[*options]}: {dict(second)}")
        catalog = Catalog(sealing(open_store(root), options.get("encrypt")))
        newest = catalog.latest()
        assert newest is not None
        assert newest.manifest.world_size == 4
        assert second["writes"] <= len(newest.manifest.files) + 20  # beside them, records

        def load(member: Member) -> dict[str, bytes]:
            with member.manager(root, **options) as manager:
                found = manager.resume()
                assert found is not None
                assert found.step == 2
            return member.bits()

        for num_ranks in (2, 3):
            assert all_of(on_ranks(num_ranks, load)) == [saved[0]] * num_ranks


@pytest.mark.full
@on("moto")
@pytest.mark.parametrize("encrypt", [None, SEALS], ids=["plain", "encrypted"])
def test_ranks_share_a_local_tier_and_the_leader_sends(
    encrypt: Encryption | None, service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file crosses the network once; a new host reads it from the bucket."""
    local = MemoryStore("local")
    options: dict[str, Any] = {"encrypt": encrypt, "compress": "zstd"}
    with Bill(service) as proxy:
        use(proxy.service, monkeypatch)
        bills: list[Any] = []

        def save(member: Member) -> dict[str, bytes]:
            with member.manager(Tiered(local, root), **options) as manager:
                for step in (1, 2):
                    member.train()
                    manager.save(step).wait()
                    manager.wait()
                    if member.rank == 0:
                        bills.append(proxy.since())
            return member.bits()

        saved = all_of(on_ranks(4, save))
        remote = sealing(open_store(root), encrypt)
        newest = Catalog(remote).latest()
        assert newest is not None
        assert newest.step == 2
        files = [info.key for info in open_store(root).list(f"{newest.folder}/")]
        print(f"a save by four ranks in two tiers, encrypt={encrypt is not None}: {dict(bills[1])}")
        assert bills[1]["writes"] <= len(files) + 20  # beside them, records
        for key in files:
            assert open_store(root).get(key) == local.get(key)

        def load(member: Member) -> dict[str, bytes]:
            with member.manager(Tiered(MemoryStore("new"), root), **options) as manager:
                found = manager.resume()
                assert found is not None
                assert found.step == 2
            return member.bits()

        assert all_of(on_ranks(3, load)) == [saved[0]] * 3
        print(f"a resume of three ranks from the bucket: {dict(proxy.since())}")
