"""Private names of the frameworks stand in one place of each bridge, and are checked there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

BRIDGES = Path(__file__).resolve().parents[2] / "src" / "holdfast" / "bridges"
LISTS = {
    "accelerate": ("accelerate.py", ["_PREPARED"]),
    "ignite": ("ignite/run.py", ["_NEEDED"]),
    "lightning": ("lightning/seams.py", ["_NEEDED", "RESTARTING"]),
    "torchtitan": ("torchtitan.py", ["_CALLED"]),
    "transformers": ("transformers/seams.py", ["_METHODS", "_SET_BY_THE_LOOP"]),
}
NOT_CHECKED = {
    # Only of a loader that was asked for its state; a part of what is made after the check.
    "lightning": {"_load_state_dicts"},
    # Only newer versions have them; and the method of named tuples.
    "transformers": {"_initial_num_input_tokens_seen", "_load_scaler", "_tr_loss", "_replace"},
}


@pytest.mark.parametrize("name", LISTS)
def test_each_private_name_that_is_used_is_one_that_is_checked(name: str) -> None:
    file, lists = LISTS[name]
    folder = BRIDGES / name
    text = "\n".join(
        path.read_text("utf-8")
        for path in (sorted(folder.glob("*.py")) if folder.is_dir() else [BRIDGES / file])
    )
    listed = [re.findall(rf"^{one} = \((.*?)\)$", text, re.MULTILINE | re.DOTALL) for one in lists]
    assert all(listed)
    checked = set(re.findall(r"_\w+", str(listed)))
    replaced = set(re.findall(r"super\(\)\.(_\w+)", text))
    own = set(re.findall(r"(?:self\.|def )(_\w+)", text)) - replaced
    used = set(re.findall(r"(?<![\w\"])[\w.]*(?<!self)\.(_[a-z]\w+)", text))
    assert used - own - NOT_CHECKED.get(name, set()) <= checked
