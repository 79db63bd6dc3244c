"""Commands on the disk of one host of several say what is elsewhere, and delete no part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from socket import gethostname

import pytest
import torch
from tests.cli.roots import Result

from allranks import Member, all_of, on_ranks
from holdfast import HostTiers, add_metrics, errors
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

Command = Callable[..., Result]
NUM_STEPS = 2


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Roots of the hosts `a` and `b` with the same checkpoints, and the remote tier."""
    run(tmp_path, "ab", range(1, NUM_STEPS + 1))
    return tmp_path


def run(path: Path, hosts: str, steps: Iterable[int]) -> None:
    """Resume on these hosts, of which the first leads, and save steps."""

    def work(member: Member) -> None:
        root = HostTiers(path / hosts[member.rank], path / "remote")
        state = {**member.state, "noise": torch.Generator().manual_seed(member.rank)}
        with member.manager(root, state=state) as manager:
            manager.resume()
            for step in steps:
                manager.save(step).wait()
            manager.wait()

    all_of(on_ranks(len(hosts), work))


@pytest.mark.parametrize(("host", "other"), [("a", "b"), ("b", "a")])
def test_files_of_other_hosts_are_no_damage(
    holdfast: Command, hosts: Path, host: str, other: str
) -> None:
    listed = holdfast("ls", hosts / host, "--json")
    assert listed.code == 0
    for one in listed.document["checkpoints"]:
        assert one["missing"] == []
        ((name, number),) = one["elsewhere"].items()
        assert name.endswith(other)
        assert number > 0
    assert "files on other hosts" in holdfast("ls", hosts / host).out
    verified = holdfast("verify", hosts / host)
    assert verified.code == 0
    assert f"not read, as they are only on the disk of {name}" in verified.out
    assert "every byte here is intact; files of other hosts were not read" in verified.out
    assert "every byte is intact" in holdfast("verify", hosts / "remote").out
    uploads = holdfast("uploads", hosts / host, "--json").document
    assert uploads["host"].endswith(host)
    assert [one["state"] for one in uploads["checkpoints"]] == ["uploaded"] * NUM_STEPS
    folder = uploads["checkpoints"][0]["folder"]
    paths = [p for p in (hosts / host / folder).iterdir() if not p.name.startswith("manifest")]
    assert uploads["checkpoints"][0]["nbytes"] == sum(path.stat().st_size for path in paths)
    assert holdfast("ls", hosts / "remote", "--json").document["checkpoints"][0]["elsewhere"] == {}


def test_a_file_that_the_host_itself_has_lost_is_damage(holdfast: Command, hosts: Path) -> None:
    lost = max((hosts / "b").glob("step*/noise-00001.safetensors"))
    lost.unlink()
    listed = holdfast("ls", hosts / "b", "--json")
    assert listed.code == 1
    assert listed.document["checkpoints"][0]["missing"] == ["noise-00001.safetensors"]
    verified = holdfast("verify", hosts / "b")
    assert verified.code == 1
    assert "noise-00001.safetensors" in verified.out


def test_a_session_is_not_called_killed_on_a_disk_that_lacks_its_close(
    holdfast: Command, hosts: Path
) -> None:
    endings = {}
    for host in "ab":
        (session,) = holdfast("log", hosts / host, "--json").document["sessions"]
        endings[host] = session["ending"]
    assert endings == {"a": "closed", "b": "unknown"}


@pytest.mark.parametrize(
    "words", [("pin",), ("unpin",), ("tag", "x"), ("untag", "x"), ("metric", "loss=1")]
)
def test_marks_are_refused_where_no_run_reads_them(
    holdfast: Command, hosts: Path, words: tuple[str, ...]
) -> None:
    verb, *values = words
    result = holdfast(verb, f"{hosts / 'b'}@step=1", *values)
    assert result.code == 2
    assert f"the disk of {gethostname()}:{hosts / 'a'} and from {hosts / 'remote'}" in result.err
    assert not [*hosts.glob("b/step-*/notes-*")]
    if verb in ("pin", "tag", "metric"):
        assert holdfast(verb, f"{hosts / 'a'}@step=1", *values).code == 0


def test_marks_follow_the_host_that_has_led_the_last_save(holdfast: Command, hosts: Path) -> None:
    run(hosts, "ba", [NUM_STEPS + 1])
    assert holdfast("pin", f"{hosts / 'a'}@step=1").code == 2
    assert holdfast("pin", f"{hosts / 'b'}@step=1").code == 0


def test_the_library_adds_no_metrics_where_no_run_reads_them(hosts: Path) -> None:
    with pytest.raises(errors.UsageError, match="The run reads pins, tags and metrics from"):
        add_metrics(f"{hosts / 'b'}@step=1", {"loss": 1.0})


@pytest.mark.parametrize("host", ["a", "b"])
def test_no_command_deletes_a_part_of_a_checkpoint(
    holdfast: Command, hosts: Path, host: str
) -> None:
    root = hosts / host
    before = sorted(path.name for path in root.rglob("*"))
    for words in (
        ("prune", root, "--keep", "last:1"),
        ("prune", root, "--keep", "last:1", "--dry-run"),
        ("rm", f"{root}@step=1", "--yes"),
        ("thin", f"{root}@step=1", "--drop", "optimizer", "--yes"),
    ):
        result = holdfast(*words)
        assert result.code not in (0, 1), result
        assert "other hosts have the rest" in result.err
    assert sorted(path.name for path in root.rglob("*")) == before
    assert holdfast("prune", hosts / "remote", "--keep", "last:1").code == 0
    assert len(Catalog(LocalStore(hosts / "remote")).checkpoints()) == 1


def test_gc_on_one_host_keeps_what_another_host_may_have_committed(
    holdfast: Command, hosts: Path
) -> None:
    newest = max((hosts / "b").glob("step*/manifest.json"))
    newest.unlink()
    (hosts / "b" / "uploads" / f"{newest.parent.name}.json").unlink()
    result = holdfast("gc", hosts / "b")
    assert "another host may have its manifest" in result.out
    assert [*newest.parent.glob("*.safetensors")]
    assert not newest.exists()
