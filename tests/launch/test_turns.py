"""Messages between the hosts of a server, with threads for hosts and a barrier for the collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from launch.hosts.host import Host
from launch.serving import turns as turns_module
from launch.serving.turns import BUFFER_BYTES, Turns
from tests.launch.served import OneHost

HOSTS = 3


class FakeCollectives:
    """Both collectives among the threads of ``HOSTS`` hosts; ``shapes`` are those of all buffers."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(HOSTS, timeout=30)
        self.sent: dict[int, np.ndarray] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.host = threading.local()

    def process_allgather(self, buffer: np.ndarray) -> np.ndarray:
        self.shapes.append(buffer.shape)
        return self._gather(buffer)

    def _gather(self, buffer: np.ndarray) -> np.ndarray:
        self.sent[self.host.index] = buffer
        self.barrier.wait()
        arrived = np.stack([self.sent[host] for host in range(HOSTS)])
        self.barrier.wait()
        return arrived

    def broadcast_one_to_all(self, buffer: np.ndarray, is_source: bool) -> np.ndarray:
        sources = self._gather(np.array([is_source]))[:, 0]
        assert sources.sum() == 1
        return self.process_allgather(buffer)[int(sources.argmax())].astype(np.uint32)


def on_all_hosts(collectives: FakeCollectives, run: Callable[[OneHost, Turns], Any]) -> list[Any]:
    def of_host(index: int) -> Any:
        collectives.host.index = HOSTS - 1 - index  # JAX has another order
        host = OneHost()
        host.process_index, host.count = index, HOSTS
        return run(host, Turns(host))

    with ThreadPoolExecutor(HOSTS) as pool:
        return list(pool.map(of_host, range(HOSTS)))


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> FakeCollectives:
    fake = FakeCollectives()
    monkeypatch.setattr(turns_module, "multihost_utils", fake)
    return fake


# The length takes 4 bytes and a JSON string its quotation marks.
@pytest.mark.parametrize("size", [0, BUFFER_BYTES - 6, BUFFER_BYTES - 5, 3 * BUFFER_BYTES])
def test_messages_of_any_length_in_buffers_of_one_size(collectives: FakeCollectives, size: int) -> None:
    text = "x" * size

    def exchange(host: OneHost, turns: Turns) -> Any:
        index = host.process_index
        sent = turns.broadcast({"text": text} if index == 0 else None)
        return sent, turns.gather(text if index == 1 else [index, "é"]), turns.broadcast(index)

    for sent, gathered, last in on_all_hosts(collectives, exchange):
        assert sent == {"text": text}
        assert gathered == [[0, "é"], text, [2, "é"]]
        assert last == 0
    assert set(collectives.shapes) == {(BUFFER_BYTES,)}


@pytest.mark.parametrize("size", [BUFFER_BYTES - 6, BUFFER_BYTES - 5])
def test_a_message_that_fits_takes_one_round(collectives: FakeCollectives, size: int) -> None:
    on_all_hosts(collectives, lambda host, turns: turns.broadcast("x" * size))
    assert len(collectives.shapes) == HOSTS * (1 if size == BUFFER_BYTES - 6 else 2)


def test_all_hosts_drain_if_one_received_sigterm(collectives: FakeCollectives) -> None:
    def ask(host: OneHost, turns: Turns) -> list[bool]:
        before = turns.draining()
        if host.process_index == 1:
            host.end()
        return [before, turns.draining()]

    assert on_all_hosts(collectives, ask) == [[False, True]] * HOSTS


def test_one_host_needs_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "multihost_utils", None)
    turns = Turns(Host())
    turns.warm_up()
    assert turns.broadcast([1]) == [1]
    assert turns.gather([2]) == [[2]]
    assert not turns.draining()
