"""LocalStore meets the contract of stores; the rest of its tests are beside this file."""

import pytest

from holdfast.store.base import Folders, Points, ReadsInto, TellsSpace, WritesBlocks
from holdfast.store.local import LocalStore
from holdfast.testing.store_contract import StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "root")
