"""The search for live objects of a class harms no other thread."""

from __future__ import annotations

import threading

from holdfast.state.capture.lacking import instances_of


class Kind:
    """A class of these tests."""


class Narrower(Kind):
    """A subclass of it."""


def test_objects_of_a_class_and_of_its_subclasses_are_found() -> None:
    one, other = Kind(), Narrower()
    assert {id(item) for item in instances_of(Kind)} == {id(one), id(other)}
    assert instances_of(Narrower) == [other]


def test_a_thread_that_builds_tuples_is_not_harmed() -> None:
    """A tuple that is being built has one reference; with another, building it fails."""
    failures: list[Exception] = []
    has_ended = threading.Event()

    def build() -> None:
        try:
            while not has_ended.is_set():
                tuple(object() for _ in range(1000))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(30):
            instances_of(Kind)
    finally:
        has_ended.set()
        thread.join()
    assert failures == []
