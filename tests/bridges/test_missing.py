"""A bridge whose library is not installed says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from holdfast.errors import UsageError

LIBRARIES = {
    "accelerate": "'holdfast-torch[accelerate]'",
    "ignite": "'holdfast-torch[ignite]'",
    "lightning": "'holdfast-torch[lightning]'",
    "torchtitan": "torchtitan",
    "transformers": "'holdfast-torch[transformers]'",
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named_with_what_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an ImportError, as whoever tries an import expects."""
    bridge = f"holdfast.bridges.{name}"
    for module in [one for one in sys.modules if one.startswith((bridge, f"{name}."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(bridge)
    assert isinstance(raised.value, UsageError)
    assert str(raised.value).endswith(f"pip install {LIBRARIES[name]}")
