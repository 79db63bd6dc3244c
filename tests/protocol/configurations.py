"""Who meets whom: actors chosen so that every pair, and the triples that matter, meet."""

from __future__ import annotations

from collections.abc import Callable

from .actors import (
    Stage,
    Writer,
    claim,
    collect,
    cut_power,
    first_owner,
    follow,
    look,
    pin,
    read_leased,
    stage,
)
from .explorer import Configuration
from .rules import Rules


def _s1(rules: Rules, **plan: object) -> tuple[str, Stage]:
    return "s1", first_owner(rules, Writer(process="s1", **plan))  # type: ignore[arg-type]


def _later(rules: Rules, process: str, **plan: object) -> tuple[str, Stage]:
    return process, stage(claim, rules, Writer(process=process, **plan))  # type: ignore[arg-type]


def _gc(
    rules: Rules, *attempts: str, believe_deaths: bool = True, is_put_once: bool = False
) -> tuple[str, Stage]:
    return "gc", stage(collect, rules, attempts, believe_deaths, is_put_once)


def _reader(rules: Rules) -> tuple[str, Stage]:
    return "reader", stage(look, rules, ())


def _takeover(rules: Rules) -> Configuration:
    """A paused writer, its successor that takes the latest, both with retention, and gc."""
    actors = (
        _s1(rules, saves=("a1",), lossy=("a1",), deletes=("c0", "c1")),
        _later(rules, "s2", saves=("a2",), lossy=("a2",), deletes=("c0", "c1", "a1")),
        _gc(rules, "a1", "a2", "a1"),
    )
    return Configuration(name="takeover", actors=actors)


def _local_takeover(rules: Rules) -> Configuration:
    """The same on a local disk, where what is deleted goes whole, whoever saved it."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c0", "c1"), is_put_once=True),
        _later(rules, "s2", saves=("a2",), deletes=("c0", "c1", "a1"), is_put_once=True),
        _gc(rules, "a1", "c1", "a2", is_put_once=True),
    )
    return Configuration(name="local takeover", actors=actors)


def _rollback(rules: Rules) -> Configuration:
    """The successor goes back to an older checkpoint and cleans up before its first save."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c0", "c1")),
        _later(
            rules,
            "s2",
            resumes="c0",
            saves=("a2",),
            deletes_early=("c0", "c1"),
            deletes=("c0", "c1", "a1"),
        ),
        _gc(rules, "a1", "a2"),
        ("pinner", stage(pin, rules, "c1")),
    )
    return Configuration(name="rollback", actors=actors)


def _two_takeovers(rules: Rules) -> Configuration:
    """Two successors, one after the other or at once, over a bad network."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c1",)),
        _later(rules, "s2", saves=("a2",), deletes=("c1", "a1"), is_claim_lossy=True),
        _later(rules, "s3", saves=("a3",), deletes=("c1", "a2"), is_claim_lossy=True),
    )
    return Configuration(name="two takeovers", actors=actors)


def _takeover_of_rollback(rules: Rules) -> Configuration:
    """A second successor takes over from one that had rolled the run back."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c1",)),
        _later(rules, "s2", resumes="c1", saves=("a2",), deletes=("a1", "c1")),
        _later(rules, "s3", saves=("a3",), deletes=("a2", "c1")),
    )
    return Configuration(name="takeover of rollback", actors=actors)


def _readers(rules: Rules) -> Configuration:
    """A reader beside two writers whose retention keeps one."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c0", "c1")),
        _later(rules, "s2", saves=("a2",), deletes=("c0", "c1", "a1")),
        _reader(rules),
    )
    return Configuration(name="readers", actors=actors)


def _pins(rules: Rules) -> Configuration:
    """A person pins what two writers want to delete."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c0", "c1")),
        _later(rules, "s2", resumes="c0", saves=("a2",), deletes=("c0", "c1", "a1")),
        ("pinner", stage(pin, rules, "c1")),
    )
    return Configuration(name="pins", actors=actors)


def _leases(rules: Rules) -> Configuration:
    """Two writers delete what a process reads under a lease; a writer and the reader may die."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c1", "c1")),
        _later(rules, "s2", saves=("a2",), deletes=("c1", "c1")),
        ("e1", stage(read_leased, rules, "e1", "c1")),
    )
    return Configuration(name="leases", actors=actors, mortal=("s1", "e1"))


def _leases_and_thinning(rules: Rules) -> Configuration:
    """The owner and its successor thin what a process reads under a lease."""
    actors = (
        _s1(rules, saves=("a1",), thins="c1"),
        _later(rules, "s2", saves=("a2",), thins="c1"),
        ("e1", stage(read_leased, rules, "e1", "c1")),
    )
    return Configuration(name="leases and thinning", actors=actors, mortal=("e1",))


def _own_attempts(rules: Rules) -> Configuration:
    """A writer whose puts get lost deletes its own checkpoint whole and closes; gc comes by."""
    actors = (
        _s1(
            rules,
            saves=("a1", "b1"),
            lossy=("a1",),
            deletes=("c0", "c1", "a1"),
            closes=True,
        ),
        _gc(rules, "a1", "b1"),
        _reader(rules),
    )
    return Configuration(name="own attempts", actors=actors)


def _death(rules: Rules) -> Configuration:
    """A writer on a local store dies for all to see; gc removes its attempt whole."""
    actors = (
        _s1(rules, saves=("a1", "b1"), lossy=("a1", "b1"), deletes=("c1",), closes=True),
        _later(rules, "s2", saves=("a2",), deletes=("c1",)),
        _gc(rules, "a1", "b1", "a2"),
    )
    return Configuration(name="death", actors=actors, mortal=("s1",))


def _remote_death(rules: Rules) -> Configuration:
    """The same on a remote store, where a put may outlive its sender."""
    believe = not rules.death_ends_only_local_puts
    actors = (
        _s1(rules, saves=("a1", "b1"), lossy=("a1",), deletes=("c1",), closes=True),
        _later(rules, "s2", saves=("a2",), deletes=("c1",)),
        _gc(rules, "a1", "a2", believe_deaths=believe),
    )
    return Configuration(name="remote death", actors=actors, mortal=("s1",), is_remote=True)


def _follower(rules: Rules, name: str, *attempts: str) -> tuple[str, Stage]:
    return name, stage(follow, rules, name, attempts, None)


def _followers(rules: Rules) -> Configuration:
    """A leader with two saves, of which it deletes the first whole, and its follower."""
    actors = (
        _s1(rules, saves=("a1", "b1"), followers=("f1",), deletes=("a1",), closes=True),
        _follower(rules, "f1", "a1", "b1"),
    )
    return Configuration(name="followers", actors=actors)


def _two_followers(rules: Rules) -> Configuration:
    """A leader over a bad network, two followers and gc."""
    actors = (
        _s1(rules, saves=("a1",), lossy=("a1",), followers=("f1", "f2")),
        _follower(rules, "f1", "a1"),
        _follower(rules, "f2", "a1"),
        _gc(rules, "a1"),
    )
    return Configuration(name="two followers", actors=actors, is_remote=True)


def _late_follower(rules: Rules) -> Configuration:
    """A follower of an object store; the run is taken over, the save deleted, and gc comes."""
    actors = (
        _s1(rules, saves=("a1",), followers=("f1",), closes=True),
        _follower(rules, "f1", "a1"),
        _later(rules, "s2", saves=("a2",), deletes=("a1",)),
        _gc(rules, "a1"),
    )
    return Configuration(name="late follower", actors=actors, is_remote=True)


def _orphan(rules: Rules) -> Configuration:
    """The same on a local disk, where the death of the leader alone is proof."""
    actors = (
        _s1(rules, saves=("a1",), followers=("f1",), is_put_once=True),
        _follower(rules, "f1", "a1"),
        _later(rules, "s2", saves=("a2",), deletes=("a1",), is_put_once=True),
        _gc(rules, "a1", is_put_once=True),
    )
    return Configuration(name="orphan", actors=actors, mortal=("s1",))


def _thinning(rules: Rules) -> Configuration:
    """The owner thins a checkpoint to which somebody else rolls back."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c0",), thins="c1"),
        _later(rules, "s2", resumes="c1", saves=("a2",), deletes=("c1",)),
        _later(rules, "s3", saves=("a3",), thins="c1"),
    )
    return Configuration(name="thinning", actors=actors)


def _replacing(rules: Rules) -> Configuration:
    """The owner replaces the newest checkpoint while it is taken over and read."""
    actors = (
        _s1(rules, saves=("a1",), replaces="c1"),
        _later(rules, "s2", saves=("a2",)),
        _reader(rules),
    )
    return Configuration(name="replacing", actors=actors)


def _power_cut(rules: Rules) -> Configuration:
    """The power fails while a writer commits and its successor cleans up early."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c0", "c1"), is_cached=True),
        _later(
            rules,
            "s2",
            saves=("a2",),
            deletes_early=("c0", "c1", "a1"),
            deletes=("c0", "c1", "a1"),
            is_cached=True,
        ),
        ("power", stage(cut_power)),
    )
    return Configuration(name="power cut", actors=actors)


def _crowd(rules: Rules) -> Configuration:
    """Two writers over a bad network, gc in two rounds and a reader."""
    return Configuration(name="crowd", actors=(*_takeover(rules).actors, _reader(rules)))


def _dead_deleter(rules: Rules) -> Configuration:
    """A writer dies amid a deletion; others delete, roll back to and pin what it marked."""
    actors = (
        _s1(rules, saves=("a1",), deletes=("c1",)),
        _later(rules, "s2", saves=("a2",), deletes=("c1",)),
        _later(rules, "s3", resumes="c1", saves=("a3",)),
        ("pinner", stage(pin, rules, "c1")),
    )
    return Configuration(name="dead deleter", actors=actors, mortal=("s1",))


def _two_takeovers_and_gc(rules: Rules) -> Configuration:
    """Three owners and gc."""
    actors = (*_takeover_of_rollback(rules).actors, _gc(rules, "a1", "a2", "a3"))
    return Configuration(name="two takeovers and gc", actors=actors)


def _mortals(rules: Rules) -> Configuration:
    """Two writers that both may die for all to see, gc and a pinner."""
    actors = (*_death(rules).actors, ("pinner", stage(pin, rules, "c1")))
    return Configuration(name="mortals", actors=actors, mortal=("s1", "s2"))


CONFIGURATIONS: tuple[Callable[[Rules], Configuration], ...] = (
    _takeover,
    _local_takeover,
    _rollback,
    _two_takeovers,
    _takeover_of_rollback,
    _readers,
    _pins,
    _leases,
    _leases_and_thinning,
    _own_attempts,
    _death,
    _remote_death,
    _followers,
    _two_followers,
    _late_follower,
    _orphan,
    _thinning,
    _replacing,
    _power_cut,
    _dead_deleter,
    _two_takeovers_and_gc,
)

LONG_CONFIGURATIONS: tuple[Callable[[Rules], Configuration], ...] = (_crowd, _mortals)
