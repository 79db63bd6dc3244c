import pytest

# Before the first import: so that a failure in the shipped suite shows its values.
pytest.register_assert_rewrite("holdfast.testing.store_contract")
