"""Rules that rename tensors, with patterns whose stars stand for what they match."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.interop.renaming import RenameRules, read_rules


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        (("a.b", "c"), "a.b", "c"),
        (("a", "c"), "a.b.d", "c.b.d"),
        (("a", "c"), "ab.d", "ab.d"),
        (("module.**", "**"), "module.0.weight", "0.weight"),
        (("**.gamma", "**.weight"), "layer.0.norm.gamma", "layer.0.norm.weight"),
        (("**.gamma", "**.weight"), "gamma", "weight"),
        (("h.*.attn", "layers.*.attention"), "h.3.attn.bias", "layers.3.attention.bias"),
        (("h.*.attn", "layers.*.attention"), "h.3.4.attn", "h.3.4.attn"),
        (("a.**.b.*", "**.x.*"), "a.1.2.b.3", "1.2.x.3"),
        (("a+b", "c"), "a+b", "c"),
    ],
)
def test_a_rule_renames(rule: tuple[str, str], name: str, expected: str) -> None:
    assert RenameRules([rule])(name) == expected


def test_the_first_rule_that_matches_is_taken() -> None:
    rules = RenameRules([("a.x", "y"), ("a", "b")])
    assert [rules(name) for name in ("a.x", "a.z")] == ["y", "b.z"]


def test_rules_that_match_nothing_are_named_together() -> None:
    rules = RenameRules([("a", "b"), ("c", "d"), ("e.**", "**")])
    rules("a")
    with pytest.raises(UsageError, match=r"(?s)c: nothing.*e\.\*\*: nothing"):
        rules.expect_used()


def test_two_names_that_become_one_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.a and model\.b both become 'c'"):
        RenameRules([("a", "c"), ("b", "c")]).map_names(["a", "b"], "model")


@pytest.mark.parametrize("rule", [("a.*", "b"), ("a", "b.**"), ("*.**", "**.*"), ("", "b")])
def test_stars_must_be_the_same_on_both_sides(rule: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="same stars"):
        RenameRules([rule])


def test_rules_are_read_from_texts_and_files(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("# of the old model\n\n module.** = **\n")
    rules = read_rules(["x=y", str(path)])
    assert [rules(name) for name in ("x", "module.a")] == ["y", "a"]
    path.write_text("module.**\n")
    with pytest.raises(UsageError, match=r"rules, line 1: 'module.\*\*' is not old=new"):
        read_rules([str(path)])
    with pytest.raises(UsageError, match="neither old=new nor a file"):
        read_rules(["missing"])
