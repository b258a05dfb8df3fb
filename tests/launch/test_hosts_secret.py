"""Authentication of hosts: clients without the run's secret are refused and cost few resources."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from launch import generate
from launch.hosts.faults import EXIT_USER_ERROR, Fault
from launch.hosts.local_processes import environment, free_port
from launch.hosts.messages import MAX_GREETING, decode, encode, printable
from launch.hosts.place import Place
from launch.hosts.secret import SECRET, SECRET_FILE, is_proof, new_secret, nonce, proof, read_secret
from launch.hosts.supervisor import greet
from sharding.errors import InputError
from tests.launch.test_hub import SECRET as OWN
from tests.launch.test_hub import Peer, run_hosts

ROOT = Path(__file__).parents[2]
STRANGERS = (b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "hello"}\n', b"\xff\n", b"[" * 4000 + b"\n", b"{}\n", b"\n")


def port_of(peers: list[Peer]) -> int:
    return int(peers[0].writer.get_extra_info("peername")[1])


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_with_strangers(scene: Callable[[list[Peer]], Awaitable[None]]) -> tuple[Fault | None, list[str]]:
    """Run two hosts beside clients without the secret, then let all finish. Return the fault and the messages."""
    failed: list[BaseException] = []

    async def acted(peers: list[Peer]) -> None:
        try:
            await scene(peers)
        except BaseException as error:
            failed.append(error)
        for peer in peers:
            peer.send("done")

    fault, _, said = run_hosts(acted)
    assert not failed, failed
    return fault, said


def test_another_secret_is_refused_and_stops_nobody() -> None:
    async def scene(peers: list[Peer]) -> None:
        for secret in (b"", OWN[:-1], new_secret().encode()):
            stray = await Peer(1, secret=secret).connect(port_of(peers))
            assert stray.refusal is not None
            assert stray.refusal.code == EXIT_USER_ERROR
            assert "does not know the secret of this run" in stray.refusal.text
            await stray.listening
            assert not stray.heard

    fault, said = run_with_strangers(scene)
    assert fault is None
    assert sum("does not know the secret" in line for line in said) == 3


@pytest.mark.parametrize("given", ["\ud800", "é", "", None, 5])
def test_what_is_no_proof_is_refused(given: object) -> None:
    """A lone surrogate, which JSON can contain, raised an error in host 0."""
    assert not is_proof(given, OWN, "host", "x")


def test_a_proof_is_of_one_connection() -> None:
    async def scene(peers: list[Peer]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peers))
        challenge = decode(await reader.readline())["nonce"]
        own = nonce()
        overheard = encode(
            "hello", host=1, hosts=2, name="x", nonce=own, proof=proof(OWN, "host", challenge, own, 1, 2, "x")
        )
        again, repeat = await asyncio.open_connection("127.0.0.1", port_of(peers))
        await again.readline()
        repeat.write(overheard)
        verdict = decode(await again.readline())
        assert verdict["kind"] == "verdict"
        # It is not valid for another host either.
        writer.write(encode(**(json.loads(overheard) | {"host": 0})))
        assert decode(await reader.readline())["kind"] == "verdict"

    assert run_with_strangers(scene)[0] is None


def test_somebody_else_in_the_place_of_host_0_is_found_out() -> None:
    async def play(answer: dict[str, object]) -> Fault | None:
        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(encode("challenge", nonce=nonce()))
            await reader.readline()
            writer.write(encode(**answer))  # type: ignore[arg-type]

        port = free_port()
        async with await asyncio.start_server(pretend, "127.0.0.1", port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            return await greet(reader, writer, OWN, Place(1, 2), "x")

    for answer in (
        {"kind": "welcome"},
        {"kind": "welcome", "proof": proof(b"x" * 20, "hub", "y")},
        {"kind": "gathered"},
    ):
        fault = asyncio.run(play(answer))
        assert fault is not None
        assert (fault.kind, fault.code) == ("input", EXIT_USER_ERROR)


def test_strangers_cost_little() -> None:
    """A client that sends endless lines and topics must not fill host 0's memory."""
    before = resident()

    async def scene(peers: list[Peer]) -> None:
        for said in STRANGERS:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peers))
            await reader.readline()
            writer.write(said)
            writer.write_eof()
            rest = await reader.read()
            assert rest.count(b"\n") <= 1
        sent = 0
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(peers))
            with contextlib.suppress(OSError):
                for _ in range(64):
                    writer.write(b"x" * (1 << 20))
                    await writer.drain()
                    sent += 1
            writer.close()
        assert sent < 20 * 64, "it is cut off"
        idle = [await asyncio.open_connection("127.0.0.1", port_of(peers)) for _ in range(60)]
        for reader, _ in idle:
            assert decode(await reader.readline())["kind"] == "challenge"
        # Only so many are listened to at a time, and the oldest are closed before the time for an answer is over.
        assert await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in idle[:20])), 5) == [b""] * 20
        for _, writer in idle:
            writer.close()

    assert run_with_strangers(scene)[0] is None
    assert resident() - before < 100 << 20


async def start_host(place: Place) -> asyncio.subprocess.Process:
    """Start the supervisor of a host whose worker ends at once."""
    program = (
        "from launch.hosts.faults import Timeouts\n"
        "from launch.hosts.place import Place\n"
        "from launch.hosts.supervisor import supervise\n"
        f"supervise({place!r}, Timeouts(30, 30, 30, 30))\n"
    )
    own = environment(place.host, place.hosts, 1, 1, OWN.decode())
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=own | {"PYTHONPATH": str(ROOT)}, stderr=asyncio.subprocess.PIPE
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Wait for a host's end. Return its exit code and its messages."""
    _, said = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode()


def test_hosts_join_beside_idle_strangers() -> None:
    """Strangers that keep many connections open, and open new ones for those that are closed, lock out nobody."""

    async def play() -> None:
        port = free_port()
        places = [Place(host, 2, f"127.0.0.1:{free_port()}", port, "127.0.0.1") for host in range(2)]
        challenged = asyncio.Semaphore(0)

        async def stay() -> None:
            while True:
                with contextlib.suppress(OSError):
                    reader, _ = await asyncio.open_connection("127.0.0.1", port)
                    if await reader.readline():
                        challenged.release()
                    await reader.read()
                await asyncio.sleep(0.1)

        first = await start_host(places[0])
        strangers = [asyncio.ensure_future(stay()) for _ in range(60)]
        for _ in range(30):
            await asyncio.wait_for(challenged.acquire(), 20)
        second = await start_host(places[1])
        outcomes = await asyncio.gather(ended(first), ended(second))
        for stranger in strangers:
            stranger.cancel()
        assert [code for code, _ in outcomes] == [0, 0], outcomes
        # Connections that are still open at the end are closed silently.
        assert not any("Exception" in said for _, said in outcomes), outcomes

    asyncio.run(play())


def test_a_host_whose_connection_is_closed_connects_again() -> None:
    """Before the challenge, and after the host has answered it."""
    before: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if before:
            writer.write(encode("challenge", nonce=nonce()))
            hello = decode(await reader.readline())
            if len(before) > 1:
                writer.write(encode("welcome", proof=proof(OWN, "hub", hello["nonce"])) + encode("bye"))
                await reader.read()
        before.append("closed")
        writer.close()

    async def play() -> tuple[int | None, str]:
        port = free_port()
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            return await ended(await start_host(Place(1, 2, "127.0.0.1:1", port, "127.0.0.1")))

    assert asyncio.run(play()) == (0, "")
    assert len(before) == 3


def test_a_host_asks_one_question_at_a_time() -> None:
    async def scene(peers: list[Peer]) -> None:
        for number in range(1000):
            peers[1].send("gather", topic="x", number=number, value="y" * 1000)

    fault, _, _ = run_hosts(scene)
    assert fault is not None
    assert (fault.kind, fault.host) == ("exception", 1)
    assert "too many unfinished gather calls" in fault.text


def test_terminals_see_no_control_characters_of_others() -> None:
    async def scene(peers: list[Peer]) -> None:
        stray = Peer(1, secret=b"another secret, of another run")
        stray.host = "\x1b[2J\x9b31m"  # type: ignore[assignment]
        await stray.connect(port_of(peers))

    _, said = run_with_strangers(scene)
    assert any("does not know the secret" in line for line in said)
    assert all(one.isprintable() or one in "\n\t" for line in said for one in line)
    assert printable("a\tb\nc é 你 \x1b]0;x\x07 \x9b \u202e \ud800") == (
        "a\tb\nc é 你 \\x1b]0;x\\x07 \\x9b \\u202e \\ud800"
    )


def test_where_the_secret_is_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("  0123456789abcdef\n")
    path.chmod(0o600)
    assert read_secret({}) == b""
    assert read_secret({SECRET: "0123456789abcdef"}) == b"0123456789abcdef"
    assert read_secret({SECRET_FILE: str(path), SECRET: "another of sixteen"}) == b"0123456789abcdef"
    for mode, text, said in (
        (0o640, "x" * 20, "chmod 600"),
        (0o600, "short", "16 to 4096"),
        (0o600, "x" * 5000, "16 to"),
    ):
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(InputError, match=said) as error:
            read_secret({SECRET_FILE: str(path)})
        assert text not in str(error.value)
    with pytest.raises(InputError, match="cannot be read"):
        read_secret({SECRET_FILE: str(tmp_path / "none")})
    with pytest.raises(InputError, match=SECRET):
        read_secret({SECRET: ""})
    assert is_proof(proof(b"a", 1, "x"), b"a", 1, "x")
    assert not is_proof(proof(b"a", 1, "x"), b"a", "1", "x")
    assert not is_proof(None, b"a")


def test_processes_of_one_run_have_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, "/nowhere")
    one, other = (environment(index, 2, 9, 1, "the secret of this run") for index in range(2))
    assert read_secret(one) == read_secret(other) == b"the secret of this run"


def test_hosts_of_several_machines_must_have_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.delenv(SECRET_FILE, raising=False)
    flags = ["--coordinator_address=10.0.0.1:8476", "--num_processes=2", "--process_id=1"]
    with pytest.raises(SystemExit) as stop:
        generate.run(["generate", "--prompt=x", *flags])
    assert stop.value.code == 2
    assert "openssl rand -hex 32 makes one" in capsys.readouterr().err
    assert Place(0, 2, "localhost:1", 2, "127.0.0.1").is_on_one_machine
    assert not Place(0, 2, "localhost:1", 2, "[::]").is_on_one_machine
    assert not Place(0, 2, "10.0.0.1:1", 2, "127.0.0.1").is_on_one_machine


def test_a_greeting_is_short_enough() -> None:
    said = encode("hello", host=1 << 14, hosts=1 << 14, name="x" * 253, nonce=nonce(), proof=proof(b"x"))
    assert len(said) < MAX_GREETING
