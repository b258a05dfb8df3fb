"""A queue that is fair among owners."""

from __future__ import annotations

from runtime.execution.fair_queue import FairQueue


def test_owners_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for owner, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        queue.push(owner, item)
    assert queue.remove(lambda item: item == "a2") == ["a2"]
    assert len(queue) == 5
    assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a3", "b2", None]


def test_an_owner_without_items_has_no_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "a1")
    queue.push("b", "b1")
    assert queue.remove(lambda item: item == "a1") == ["a1"]
    queue.push("a", "a2")
    assert [queue.pop() for _ in range(3)] == ["b1", "a2", None]
