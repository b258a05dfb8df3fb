"""Attacks on the hosts of a run: unauthenticated clients of host 0, a host that misbehaves, and frozen processes."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.hosts.control import ControlServer
from launch.hosts.faults import EXIT_RESTART, EXIT_USER_ERROR, Timeouts
from launch.hosts.local_processes import free_port
from launch.hosts.messages import encode, receive
from launch.hosts.place import Place
from launch.hosts.secret import new_secret
from launch.hosts.supervisor import greet

_MIB = 1 << 20
_PATIENCE = Timeouts(600, 600, 600, 600)
_LIMIT = 300.0
# Connections that say nothing and stay open while hosts join: more than host 0 keeps.
_IDLE = 60
# Program of both processes: process 1 freezes itself; what is appended to the text then runs in process 0.
_FREEZES = "import os, signal\nif os.environ['JAX_PROCESS_ID'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"


def resident(process: int | str = "self") -> int:
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


async def send_endless_lines(port: int, connections: int) -> tuple[int, int]:
    """Send 64 MiB without a line feed on each connection. Return the bytes sent, and how many were closed."""
    sent = cut = 0
    for _ in range(connections):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for _ in range(64):
                writer.write(b"x" * _MIB)
                await writer.drain()
                sent += _MIB
        except OSError:
            cut += 1
        writer.close()
    return sent, cut


async def try_secrets(port: int, secrets: Sequence[bytes]) -> int:
    """Join as host 1 with wrong secrets; return how many are refused."""
    refused = 0
    for secret in secrets:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fault = await greet(reader, writer, secret, Place(1, 2), "stranger")
        refused += fault is not None and fault.code == EXIT_USER_ERROR
        writer.close()
    return refused


async def open_topics(server: ControlServer, port: int, secret: bytes, count: int) -> bool:
    """Begin many exchanges at a time as host 1; return whether host 0 ends the run and names host 1."""
    watching = asyncio.ensure_future(server.watch())
    hosts = []
    for number in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if await greet(reader, writer, secret, Place(number, 2), f"host-{number}") is not None:
            raise RuntimeError(f"host {number} was refused")
        hosts.append((reader, writer))
    for number in range(count):
        hosts[1][1].write(encode("gather", topic="x", number=number, value="y" * 1000))
        await hosts[1][1].drain()
    for reader, writer in hosts:
        while (message := await receive(reader)) is not None and message["kind"] != "verdict":
            pass
        writer.close()
    fault = await watching
    return fault is not None and fault.host == 1 and "too many unfinished gather calls" in fault.text


def attack_hosts(connections: int, secrets: int, topics: int) -> dict[str, Any]:
    """Attack host 0 with endless lines, wrong secrets, and a host that begins many exchanges; measure its memory.

    Wrong secrets are tried, and the hosts join, while other clients keep connections open.
    """

    async def attack() -> dict[str, Any]:
        port, secret = free_port(), new_secret().encode()
        server = ControlServer(2, _PATIENCE, lambda text: None, secret)
        await server.listen("127.0.0.1", port)
        sent, cut = await send_endless_lines(port, connections)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_IDLE)]
        wrong = [b"", secret[:-1], secret + b"0", *(new_secret().encode() for _ in range(secrets - 3))]
        refused = await try_secrets(port, wrong)
        named = await open_topics(server, port, secret, topics)
        for _, writer in idle:
            writer.close()
        return {
            "connections": connections,
            "cut_off": cut,
            "bytes_sent": sent,
            "secrets": {"tried": len(wrong), "refused": refused},
            "topics": {"tried": topics, "named": named},
        }

    before = resident()
    found = asyncio.run(attack())
    return found | {"bytes_grown": max(0, resident() - before)}


def attack_local(codes: Sequence[int] = (EXIT_RESTART, EXIT_USER_ERROR, 137)) -> dict[str, int]:
    """Freeze one of two processes of ``diffumesh local``; count how often it returns the other process's exit code."""
    command = [sys.executable, "-m", "launch.local", "--num_processes=2", "--grace=0.3", "--"]
    ended = 0
    for code in codes:
        program = [sys.executable, "-c", f"{_FREEZES}os._exit({code})"]
        done = subprocess.run(
            [*command, *program], capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False
        )
        ended += done.returncode == code and "killing process 1" in done.stderr
    return {"tried": len(codes), "ended": ended}
