"""Load for servers: clients send requests at a fixed rate or after each answer, and measure their latency.

This works with any server that has OpenAI's completions route. The latency of a request starts at the time at which it
was due, so a client that falls behind does not hide delays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from checkpoints import parse_json_object


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
      prompt: the prompt.
      max_tokens: maximum number of new tokens.
      seed: seed of the request.
      fields: other fields of the body.
      stream: whether to stream the answer.
    """

    prompt: str
    max_tokens: int
    seed: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False


@dataclass(frozen=True)
class Answer:
    """The response to a request. Times are in seconds since the request was due.

    Attributes:
      status: HTTP status; 0 if the connection broke.
      first: time of the first text, or of the end of the answer if there was no text before.
      end: time of the end of the answer.
      tokens: completion tokens as counted by the server.
      text: the completion.
      pieces: number of events with text; 0 for an answer that is not streamed.
      committed_at_first: tokens on the canvas at the first text, if the request asked for canvases.
    """

    status: int
    first: float
    end: float
    tokens: int
    text: str
    pieces: int = 0
    committed_at_first: int | None = None


class Client:
    """A client of one server."""

    def __init__(self, address: str, key: str | None, seconds: float) -> None:
        """Create a client for ``address``. An answer may take at most ``seconds``."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=address, headers=headers, timeout=seconds, limits=limits)
        self._model = ""

    async def __aenter__(self) -> Client:
        models = (await self._http.get("/v1/models")).raise_for_status().json()
        self._model = models["data"][0]["id"]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def send(self, ask: Ask, due: float) -> Answer:
        """Send a request and read its answer. ``due`` is a time of ``time.perf_counter``."""
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            **({"stream": True, "stream_options": {"include_usage": True}} if ask.stream else {}),
            **ask.fields,
        }
        read = _Streamed(due) if ask.stream else _Whole()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if response.status_code == 200:
                        read.line(line)
                status = response.status_code if response.status_code != 200 or read.whole else 0
        except httpx.HTTPError:
            status = 0
        end = time.perf_counter() - due
        first = end if read.first is None else read.first
        return Answer(status, first, end, read.tokens, read.text, read.pieces, read.committed_at_first)


class _Whole:
    """Reads an answer that is one JSON object."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.committed_at_first: int | None = None
        self.tokens = self.pieces = 0
        self.text, self.whole = "", False

    def line(self, line: str) -> None:
        """Read the answer, which is one line."""
        answer = parse_json_object(line.encode())
        self.text, self.tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
        self.whole = True


class _Streamed(_Whole):
    """Reads a streamed answer."""

    def __init__(self, due: float) -> None:
        super().__init__()
        self._due = due

    def line(self, line: str) -> None:
        """Read a line of a stream of server-sent events: collect its text, and note when the first text arrives."""
        if line == "data: [DONE]":
            self.whole = True
        elif line.startswith("data: "):
            event = parse_json_object(line.removeprefix("data: ").encode())
            choices = event.get("choices", ())
            new = "".join(choice["text"] for choice in choices)
            self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
            self.pieces += bool(new)
            if new and self.first is None:
                self.first = time.perf_counter() - self._due
                if canvas := choices[0].get("canvas"):
                    self.committed_at_first = sum(token is not None for token in canvas)
            self.text += new


async def open_loop(
    client: Client, asks: Sequence[Ask], rate: float, seed: int, longest_idle: float | None = None
) -> list[Answer]:
    """Send requests as a Poisson process, without waiting for answers.

    Args:
      client: client of the server.
      asks: the requests in order of arrival.
      rate: arrivals per second.
      seed: seed of the arrival times.
      longest_idle: maximum wait in seconds while no request is open. An idle server does not become faster by waiting,
        so shorter waits save time without changing latencies.
    """
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(asks))).tolist()
    start = time.perf_counter()
    tasks: list[asyncio.Task[Answer]] = []
    in_flight: set[asyncio.Task[Answer]] = set()
    for ask, arrival in zip(asks, arrivals, strict=True):
        while (wait := start + arrival - time.perf_counter()) > 0:
            if in_flight:
                _, in_flight = await asyncio.wait(in_flight, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            elif longest_idle is not None and wait > longest_idle:
                start -= wait - longest_idle
            else:
                await asyncio.sleep(wait)
        task = asyncio.create_task(client.send(ask, start + arrival))
        tasks.append(task)
        in_flight.add(task)
    return await asyncio.gather(*tasks)


async def closed_loop(client: Client, asks: Sequence[Ask], users: int) -> list[Answer]:
    """Simulate users, each of whom sends a request when the last one is answered. Return answers in order of requests.

    Args:
      client: client of the server.
      asks: the requests in order.
      users: number of users.
    """
    answers: list[Answer | None] = [None] * len(asks)
    left = iter(enumerate(asks))

    async def user() -> None:
        for number, ask in left:
            answers[number] = await client.send(ask, time.perf_counter())

    await asyncio.gather(*[user() for _ in range(users)])
    return [answer for answer in answers if answer is not None]


@dataclass(frozen=True)
class Saturated:
    """Throughput of a server while more requests waited than it had slots.

    Attributes:
      seconds: time from the last answer that does not count to the last answer.
      asks: the requests whose answers count, in the order of the answers.
      answers: the answers that count.
    """

    seconds: float
    asks: list[Ask]
    answers: list[Answer]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second. Tokens after an end token count too, because the server computes them as well."""
        return sum(ask.max_tokens for ask in self.asks) / self.seconds


async def saturate(client: Client, asks: Sequence[Ask], users: int, warmup: int) -> Saturated:
    """Keep ``users`` requests open at any time, and measure the throughput.

    When no request is left to send, open requests are cancelled, so that the end, where slots become empty, does not
    count.

    Args:
      client: client of the server.
      asks: the requests in order.
      users: number of open requests, more than the server has slots.
      warmup: number of answers at the start that do not count. The first rows start together, and short ones end first.
    """
    done: list[tuple[float, Ask, Answer]] = []
    left = iter(asks)

    async def user() -> None:
        for ask in left:
            answer = await client.send(ask, time.perf_counter())
            done.append((time.perf_counter(), ask, answer))

    tasks = [asyncio.create_task(user()) for _ in range(users)]
    ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    counted = done[warmup : len(asks) - users + 1]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.gather(*ended)
    seconds = counted[-1][0] - done[warmup - 1][0]
    return Saturated(seconds, [ask for _, ask, _ in counted], [answer for _, _, answer in counted])


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Summarise the answers to all requests of a load.

    Returns:
      The numbers of answered, refused and failed requests. For answered requests, percentiles in milliseconds of the
      time to the first text (``ttft``, None if answers are not streamed) and to the end (``e2e``).
    """
    done = [answer for answer in answers if answer.status == 200]
    return {
        "requests": len(answers),
        "completed": len(done),
        "refused": sum(answer.status == 429 for answer in answers),
        "failed": sum(answer.status not in (200, 429) for answer in answers),
        "ttft_ms": percentiles([answer.first for answer in done if answer.pieces]),
        "e2e_ms": percentiles([answer.end for answer in done]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the 50th, 90th and 99th percentile in milliseconds; None without values."""
    if not seconds:
        return None
    return {f"p{rank}": round(1e3 * float(np.percentile(seconds, rank)), 2) for rank in (50, 90, 99)}
