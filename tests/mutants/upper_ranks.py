"""Mutants of `ranks/`: rounds, lives of a group, deadlines and pieces."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="all-lives-of-a-group-share-their-keys",
        promise="R38: nothing of an earlier life of a group is read",
        file="ranks/c10d.py",
        before="nonce = secrets.token_hex(16)\n        store.set(",
        after='nonce = "life"\n        store.set(',
        near=("tests/ranks/test_c10d.py",),
    ),
    Mutant(
        name="a-follower-takes-the-nonce-that-it-finds",
        promise="R38: a follower joins the life of the leader that answers it",
        file="ranks/c10d.py",
        before='return store.check([f"welcome/{token}"])',
        after='store.set(f"welcome/{token}", leader)\n            return True',
        near=(
            "tests/ranks/test_c10d.py::test_a_follower_whom_no_leader_answers_joins_no_former_life",
        ),
    ),
    Mutant(
        name="a-failure-waits-for-the-other-ranks",
        promise="R38: a rank that failed is named at once",
        file="ranks/c10d.py",
        before="if isinstance(said, Failure) or num_posts == self.world_size:",
        after="if num_posts == self.world_size:",
        near=("tests/ranks/test_contract.py",),
    ),
    Mutant(
        name="a-silent-rank-is-not-named",
        promise="R38: who is silent is named at the deadline",
        file="ranks/coordinator.py",
        before="        if self.silent:\n            raise RanksSilent(what, self.silent)\n",
        after="",
        near=("tests/ranks/test_contract.py",),
    ),
    Mutant(
        name="an-ended-rank-of-another-host-is-waited-for",
        promise="R38: the leader learns from a neighbor that a rank has ended",
        file="ranks/c10d.py",
        before="        if self.is_leader and self._store.check([_NUM_ENDED]):\n",
        after="        if not self.is_leader and self._store.check([_NUM_ENDED]):\n",
        near=("tests/ranks/test_waiting.py",),
    ),
    Mutant(
        name="a-late-rank-is-not-named",
        promise="R38: who has not made a call is named while the others wait",
        file="ranks/waiting.py",
        before="        elif late:\n",
        after="        elif len(late) > 99:\n",
        near=("tests/ranks/test_waiting.py",),
    ),
    Mutant(
        name="deadline-left-to-the-store",
        promise="I9: no wait without a deadline",
        file="ranks/c10d.py",
        before="if not wait([future], timeout_s).done:",
        after="if not wait([future]).done:",
        near=("tests/ranks/test_c10d.py",),
    ),
    Mutant(
        name="message-without-a-reply",
        promise="R38: a message that the store does not have is an error",
        file="ranks/messages.py",
        before="    store.check([_key(name)])\n\n\ndef has",
        after="    _key(name)\n\n\ndef has",
        near=("tests/ranks/test_c10d.py",),
    ),
    Mutant(
        name="number-of-pieces-is-believed",
        promise="R29: a claimed number of pieces is bounded before anything is read",
        file="ranks/messages.py",
        before="num_more: Annotated[int, Meta(ge=0, lt=MAX_NUM_PIECES)]",
        after="num_more: int",
        near=("tests/ranks/test_c10d.py",),
    ),
    Mutant(
        name="value-longer-than-a-connection-takes",
        promise="R38: a long message arrives",
        file="ranks/messages.py",
        before="PIECE_NBYTES = 256 * 1024",
        after="PIECE_NBYTES = 256 * 1024 * 1024",
        near=("tests/ranks/test_c10d.py",),
    ),
    Mutant(
        name="what-late-ranks-post-stays",
        promise="R38: the store does not grow",
        file="ranks/c10d.py",
        before="        if are_left:\n            _take_posts(store, tag, world_size)\n",
        after="",
        near=("tests/ranks/test_c10d.py",),
    ),
    Mutant(
        name="threads-use-the-store-while-the-interpreter-ends",
        promise="I8: a process that ends with rounds under way is not aborted",
        file="ranks/c10d.py",
        before="        weakref.finalize(self, _stop_calls, self._turn, self._threads)\n",
        after="        weakref.finalize(self, int)\n",
        near=("tests/ranks/test_c10d.py",),
    ),
    Mutant(
        name="no-thread-is-ready-at-exit",
        promise="I8: a save of several ranks is finished at exit, though no thread starts then",
        file="ranks/callthreads.py",
        before="            if not self._idle and self._is_open:\n",
        after="            if not self._is_open:\n",
        near=(
            "tests/ranks/test_c10d.py::test_a_save_that_is_finished_at_exit_still_has_its_coordinator",
        ),
    ),
    Mutant(
        name="an-announcement-lives-for-sixteen-rounds-only",
        promise="R38: a rank that looks rarely hears what was announced between short rounds",
        file="ranks/c10d.py",
        before="if now - self._rounds[old_tag].used_s < KEPT_S:\n",
        after="if now < self._rounds[old_tag].used_s:\n",
        near=(
            "tests/ranks/test_c10d.py::test_what_was_announced_a_moment_ago_is_heard_whatever_was_said_since",
        ),
    ),
)
