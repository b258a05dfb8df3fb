"""The fault hub on host 0 tells the cause of a fault from its consequences on other hosts.

The tests connect to it in place of the supervisors, the processes that report to it from each host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from launch.hosts import control
from launch.hosts import hub as hub_module
from launch.hosts.control import ControlServer
from launch.hosts.faults import EXIT_RESTART, EXIT_USER_ERROR, Fault, Timeouts, fault_of_status
from launch.hosts.local_processes import free_port
from launch.hosts.messages import MAX_TEXT, Message, encode, receive, shorten
from launch.hosts.place import Place
from launch.hosts.secret import new_secret
from launch.hosts.supervisor import greet
from sharding.errors import InputError

SECRET = new_secret().encode()
PATIENCE = Timeouts(initialization=30, heartbeat=30, shutdown=30, stall=30)
DEVICE = Fault("device", "Traceback\nJaxRuntimeError: connection reset")


class Peer:
    """A supervisor's end of a connection."""

    def __init__(self, host: int, hosts: int = 2, secret: bytes = SECRET) -> None:
        self.host, self.hosts, self.secret = host, hosts, secret
        self.heard: list[Message] = []

    async def connect(self, port: int) -> Peer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        place = Place(self.host, self.hosts)
        self.refusal = await greet(self.reader, self.writer, self.secret, place, f"worker-{self.host}")
        self.listening = asyncio.ensure_future(self.listen())
        return self

    async def listen(self) -> None:
        while (message := await receive(self.reader)) is not None:
            self.heard.append(message)
            if message["kind"] in ("verdict", "bye"):
                self.writer.close()

    def send(self, kind: str, **fields: object) -> None:
        self.writer.write(encode(kind, **fields))

    def kinds(self) -> set[str]:
        return {message["kind"] for message in self.heard}


Scene = Callable[[list[Peer]], Awaitable[None]]


def run_hosts(
    scene: Scene, hosts: int = 2, timeouts: Timeouts = PATIENCE
) -> tuple[Fault | None, list[Peer], list[str]]:
    """Run a control server whose peers behave as in ``scene``. Return its fault, the peers, and its messages."""

    async def play() -> tuple[Fault | None, list[Peer], list[str]]:
        messages: list[str] = []
        port = free_port()
        server = ControlServer(hosts, timeouts, messages.append, SECRET)
        await server.listen("127.0.0.1", port)
        watching = asyncio.ensure_future(server.watch())
        peers = [await Peer(number, hosts).connect(port) for number in range(hosts)]
        acting = asyncio.ensure_future(scene(peers))
        fault = await asyncio.wait_for(watching, 20)
        acting.cancel()
        for peer in peers:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(peer.listening, 2)
        return fault, peers, messages

    return asyncio.run(play())


def test_all_done() -> None:
    async def scene(peers: list[Peer]) -> None:
        peers[1].send("gather", topic="a", number=1, value="one")
        await asyncio.sleep(0.3)
        assert "gathered" not in peers[1].kinds()
        peers[0].send("gather", topic="a", number=1, value="zero")
        for peer in peers:
            peer.send("done")

    fault, peers, _ = run_hosts(scene)
    assert fault is None
    for peer in peers:
        assert next(message["values"] for message in peer.heard if message["kind"] == "gathered") == ["zero", "one"]
        assert "bye" in peer.kinds()


def test_the_cause_wins_over_its_consequences() -> None:
    async def scene(peers: list[Peer]) -> None:
        peers[0].send("fault", **DEVICE.fields())
        await asyncio.sleep(0.5)
        peers[1].send("fault", **fault_of_status(9).fields())

    fault, peers, _ = run_hosts(scene)
    assert fault is not None
    assert (fault.kind, fault.host, fault.code) == ("killed", 1, EXIT_RESTART)
    assert "SIGKILL" in fault.describe()
    assert "host 1 (worker-1)" in fault.describe()
    assert {"verdict"} <= peers[0].kinds() & peers[1].kinds()


def test_a_connection_that_closes_is_a_host_that_is_gone() -> None:
    async def scene(peers: list[Peer]) -> None:
        peers[0].send("fault", **DEVICE.fields())
        peers[1].writer.close()

    fault, _, _ = run_hosts(scene)
    assert fault is not None
    assert (fault.kind, fault.host) == ("gone", 1)


def test_a_device_fault_alone_is_its_own_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "GRACE_PERIOD_SECONDS", 0.5)

    async def scene(peers: list[Peer]) -> None:
        peers[1].send("fault", **DEVICE.fields())

    fault, _, _ = run_hosts(scene)
    assert fault is not None
    assert (fault.kind, fault.host) == ("device", 1)


@pytest.mark.parametrize("how", ["still", "behind"])
def test_when_collectives_fail_the_one_who_did_not_come_is_named(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(hub_module, "GRACE_PERIOD_SECONDS", 0.5)

    async def scene(peers: list[Peer]) -> None:
        peers[0].send("heartbeat", marks=8, still=0.0)
        peers[1].send("heartbeat", marks=8 if how == "still" else 7, still=9.0 if how == "still" else 0.0)
        peers[0].send("fault", **DEVICE.fields())

    fault, _, _ = run_hosts(scene)
    assert fault is not None
    assert (fault.kind, fault.host) == ("frozen" if how == "still" else "device", 1)


def test_a_host_that_aborts_alone_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "GRACE_PERIOD_SECONDS", 0.5)

    async def scene(peers: list[Peer]) -> None:
        peers[0].send("fault", **DEVICE.fields())
        peers[1].send("fault", **fault_of_status(6).fields())

    fault, _, _ = run_hosts(scene)
    assert fault is not None
    assert (fault.kind, fault.host) == ("aborted", 1)


def test_silence() -> None:
    async def scene(peers: list[Peer]) -> None:
        while True:
            peers[0].send("heartbeat", marks=0, still=0.0)
            await asyncio.sleep(0.1)

    fault, _, _ = run_hosts(scene, timeouts=Timeouts(30, 2, 30, 30))
    assert fault is not None
    assert (fault.kind, fault.host) == ("gone", 1)
    assert "no heartbeat" in fault.text


def test_a_stall_names_who_is_behind_and_prints_all_stacks() -> None:
    async def scene(peers: list[Peer]) -> None:
        while not all("dump" in peer.kinds() for peer in peers):
            for peer in peers:
                peer.send("heartbeat", marks=5 - peer.host, still=0.0)
            await asyncio.sleep(0.1)
        for peer in peers:
            peer.send("stacks", text=f"stack of {peer.host}")

    fault, _, said = run_hosts(scene, timeouts=Timeouts(30, 30, 30, 1))
    assert fault is not None
    assert (fault.kind, fault.host) == ("stalled", 1)
    assert "stack of 0" in "".join(said)
    assert "stack of 1" in "".join(said)


def test_progress_is_no_stall() -> None:
    async def scene(peers: list[Peer]) -> None:
        for marks in range(30):
            peers[1].send("heartbeat", marks=marks, still=0.0)
            await asyncio.sleep(0.1)
        for peer in peers:
            peer.send("done")

    assert run_hosts(scene, timeouts=Timeouts(30, 30, 30, 2))[0] is None


def test_missing_hosts_are_named_while_waiting_and_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "WAITING_REPORT_SECONDS", 0.4)

    async def play() -> tuple[Fault | None, list[str]]:
        said: list[str] = []
        port = free_port()
        server = ControlServer(4, Timeouts(1, 30, 30, 30), said.append, SECRET)
        await server.listen("127.0.0.1", port)
        # Keep a reference: a connection without one may be garbage-collected, and thereby closed, at any time.
        peers = [await Peer(number, 4).connect(port) for number in (0, 2)]
        fault = await server.watch()
        for peer in peers:
            await asyncio.wait_for(peer.listening, 5)
            assert "verdict" in peer.kinds()
        return fault, said

    fault, said = asyncio.run(play())
    assert fault is not None
    assert (fault.kind, fault.code) == ("missing", EXIT_RESTART)
    assert fault.who == "host 1, host 3"
    assert any("waiting for host 1, host 3 of 4" in line for line in said)


@pytest.mark.parametrize(
    ("host", "hosts", "says"),
    [(1, 3, "started for 3 hosts"), (7, 2, "index 7 is out of range"), (1, 2, "has already joined")],
)
def test_strays_are_refused_and_stop_nobody(host: int, hosts: int, says: str) -> None:
    refused: list[Message] = []

    async def scene(peers: list[Peer]) -> None:
        port = peers[0].writer.get_extra_info("peername")[1]
        stray = await Peer(host, hosts).connect(port)
        await asyncio.wait_for(stray.listening, 5)
        refused.extend(stray.heard)
        noise = await asyncio.open_connection("127.0.0.1", port)
        noise[1].write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await noise[0].read()).count(b"\n") == 1, "the challenge, and the end"
        for peer in peers:
            peer.send("done")

    fault, _, said = run_hosts(scene)
    assert fault is None
    verdict = next(message for message in refused if message["kind"] == "verdict")
    assert verdict["code"] == EXIT_USER_ERROR
    assert says in verdict["text"]
    assert any(says in line for line in said)


def test_all_interfaces_are_those_of_both_protocols() -> None:
    async def play() -> None:
        port = free_port()
        await ControlServer(2, PATIENCE, print, SECRET).listen("[::]", port)
        addresses = ["127.0.0.1", "::1"] if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else ["127.0.0.1"]
        for address in addresses:
            _, writer = await asyncio.open_connection(address, port)
            writer.close()

    asyncio.run(play())


def test_a_port_that_is_taken() -> None:
    async def play() -> None:
        port = free_port()
        await ControlServer(2, PATIENCE, print, SECRET).listen("127.0.0.1", port)
        await ControlServer(2, PATIENCE, print, SECRET).listen("127.0.0.1", port)

    with pytest.raises(InputError, match="--control_port"):
        asyncio.run(play())


def test_a_line_without_end_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_BYTES", 1 << 20)

    async def scene(peers: list[Peer]) -> None:
        peers[1].writer.write(b"x" * (control.MAX_BYTES + 2))
        await asyncio.sleep(5)

    start = time.monotonic()
    fault, _, _ = run_hosts(scene)
    assert fault is not None
    assert fault.host == 1
    assert time.monotonic() - start < 15


def test_texts_are_cut_to_their_end() -> None:
    assert shorten("short") == "short"
    cut = shorten("a" * MAX_TEXT + "the end")
    assert len(cut) < MAX_TEXT + 10
    assert cut.endswith("the end")


def test_exit_codes_of_workers() -> None:
    for status, kind, code in [(9, "killed", 42), (6, "aborted", 42), (1 << 8, "ended", 42), (2 << 8, "ended", 2)]:
        fault = fault_of_status(status)
        assert (fault.kind, fault.code) == (kind, code)


@pytest.mark.parametrize(
    ("asked", "named", "host"),
    [
        (["preflight", "standard input"], "host 1 (worker-1) reached 'standard input', the others 'preflight'", 1),
        (["standard input", "preflight", "preflight"], "host 0 (worker-0) reached 'standard input'", 0),
    ],
)
def test_hosts_that_ask_different_questions_do_not_wait_for_one_another(
    asked: list[str], named: str, host: int
) -> None:
    async def scene(peers: list[Peer]) -> None:
        for peer, name in zip(peers, asked, strict=True):
            peer.send("gather", topic=name, number=2, value=None)

    fault, _, _ = run_hosts(scene, hosts=len(asked))
    assert fault is not None
    assert (fault.kind, fault.code) == ("differ", EXIT_USER_ERROR)
    assert named in fault.describe()
    assert fault.hosts == (host,)


@pytest.mark.parametrize("first", ["done", "gather"])
def test_nobody_waits_for_a_host_that_has_ended(first: str) -> None:
    """A command that ends early, for example because nobody reads its output, exits with 0."""

    async def scene(peers: list[Peer]) -> None:
        for kind in ("done", "gather") if first == "done" else ("gather", "done"):
            peers[kind == "gather"].send(kind, topic="devices", number=1, value=None)
            await asyncio.sleep(0.3)

    fault, peers, _ = run_hosts(scene)
    assert fault is not None
    assert (fault.kind, fault.host, fault.code) == ("ended", 0, EXIT_RESTART)
    assert "other hosts reached 'devices' and wait for it" in fault.describe()
    assert {"verdict"} <= peers[0].kinds() & peers[1].kinds()
