"""Requests as clients of a server send them, at their own pace or at that of the answers, and how long each waits.

Any server with OpenAI's completions will do. Times count from the moment at which a request was due, so that a client
that falls behind hides nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
      prompt: its text.
      max_tokens: new tokens at most.
      seed: its own.
    """

    prompt: str
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """What came of a request; seconds count from when it was due.

    Attributes:
      status: of HTTP, 0 where the answer broke off.
      first: until the first text, or the end where there was none.
      end: until the end.
      tokens: that the server counted.
      text: the completion.
    """

    status: int
    first: float
    end: float
    tokens: int
    text: str


class Client:
    """A server as the load sees it."""

    def __init__(self, address: str, key: str | None, seconds: float) -> None:
        """Prepare to send to ``address``; ``seconds`` is how long an answer may take."""
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
        """Send a request, read its stream; ``due`` is on the clock of ``time.perf_counter``."""
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first, tokens, text, status = None, 0, "", 0
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                whole = response.status_code != 200
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        whole = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        text += "".join(choice["text"] for choice in event.get("choices", ()))
                        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                        if text and first is None:
                            first = time.perf_counter() - due
                status = response.status_code if whole else 0
        except httpx.HTTPError:
            pass
        end = time.perf_counter() - due
        return Answer(status, end if first is None else first, end, tokens, text)


async def open_loop(client: Client, asks: Sequence[Ask], rate: float, seed: int) -> list[Answer]:
    """Requests that arrive as a Poisson process of ``rate`` a second, whatever becomes of those before."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(asks))
    start = time.perf_counter()

    async def one(ask: Ask, due: float) -> Answer:
        await asyncio.sleep(due - time.perf_counter())
        return await client.send(ask, due)

    return await asyncio.gather(*map(one, asks, (start + np.cumsum(gaps)).tolist()))


async def closed_loop(client: Client, asks: Sequence[Ask], users: int, *, due_at_once: bool = False) -> list[Answer]:
    """So many users, each of whom sends the next request when the last one is answered.

    Args:
      client: the server.
      asks: the requests, in this order.
      users: at a time.
      due_at_once: all were due at the start.
    """
    start = time.perf_counter()
    answers: list[Answer | None] = [None] * len(asks)
    left = iter(enumerate(asks))

    async def user() -> None:
        for number, ask in left:
            answers[number] = await client.send(ask, start if due_at_once else time.perf_counter())

    await asyncio.gather(*[user() for _ in range(users)])
    return [answer for answer in answers if answer is not None]


async def fixed_batches(client: Client, asks: Sequence[Ask], size: int) -> list[Answer]:
    """All due at once; ``size`` are sent together, answered together, and only then the next ones are sent."""
    start = time.perf_counter()
    answers: list[Answer] = []
    for place in range(0, len(asks), size):
        batch = await asyncio.gather(*[client.send(ask, start) for ask in asks[place : place + size]])
        end = time.perf_counter() - start
        answers += [replace(answer, first=end, end=end) for answer in batch]
    return answers


def summary(answers: Sequence[Answer], seconds: float, ttft: float, tpot: float) -> dict[str, Any]:
    """What a load got.

    Args:
      answers: to all requests.
      seconds: that it took altogether.
      ttft: milliseconds until the first text, for a request that counts as good.
      tpot: milliseconds a token after that, likewise.

    Returns:
      Rates a second; and in milliseconds, over requests that were answered, percentiles of the time to the first text
      (``ttft``), of the time a token from there to the end (``tpot``), and of the whole (``e2e``).
    """
    done = [answer for answer in answers if answer.status == 200]
    first = np.array([1e3 * answer.first for answer in done])
    whole = np.array([1e3 * answer.end for answer in done])
    pace = np.array([1e3 * (answer.end - answer.first) / max(1, answer.tokens - 1) for answer in done])
    return {
        "requests": len(answers),
        "completed": len(done),
        "refused": sum(answer.status == 429 for answer in answers),
        "failed": sum(answer.status not in (200, 429) for answer in answers),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(done) / seconds, 3),
        "output_tokens_per_second": round(sum(answer.tokens for answer in done) / seconds, 2),
        "goodput_requests_per_second": round(int(((first <= ttft) & (pace <= tpot)).sum()) / seconds, 3),
        "ttft_ms": percentiles(first),
        "tpot_ms": percentiles(pace),
        "e2e_ms": percentiles(whole),
    }


def percentiles(values: np.ndarray) -> dict[str, float] | None:
    """The 50th, 90th and 99th; None of nothing."""
    if not len(values):
        return None
    return {f"p{rank}": round(float(np.percentile(values, rank)), 2) for rank in (50, 90, 99)}
