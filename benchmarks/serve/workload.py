"""Requests whose prompts and answers have log-normal lengths within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import Ask
from checkpoints.local_files import read_json_lines
from runtime import TextTokenizer
from sharding.errors import InputError


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of numbers of tokens. Numbers outside the bounds are drawn again.

    Attributes:
      least, most: the bounds.
      median: median of the distribution without bounds.
      sigma: standard deviation of the logarithm.
    """

    least: int
    most: int
    median: float
    sigma: float

    def draw(self, generator: np.random.Generator) -> int:
        """Draw one number."""
        while True:
            number = round(generator.lognormal(math.log(self.median), self.sigma))
            if self.least <= number <= self.most:
                return number


@dataclass(frozen=True)
class Sizes:
    """Numbers of requests, and their lengths.

    Attributes:
      prompts, answers: distributions of their numbers of tokens.
      requests: number of requests per load, and of the loop over ``engine.generate``.
      old_requests: number of requests in the arrival schedule that both servers receive.
      turns: number of parts of this schedule, and of the measurement of capacities; the servers alternate after each.
      users: number of open requests that saturate a server; more than it has slots.
      saturated, old_saturated: number of answers that count for the capacity of this server and of the older one.
      shares: loads of this server, as shares of its capacity.
      lone: numbers of new tokens of single requests.
      old_lone: those lengths in ``lone`` that are also sent, once each, to the older server.
      repeats: number of times that each single request is sent.
      starts: number of starts with a warm cache.
      batch: number of prompts in the batch.
      rate_rows, rate_canvases: rows and canvases of the batches whose positions per second are measured.
    """

    prompts: Lengths
    answers: Lengths
    requests: int
    old_requests: int
    turns: int
    users: int
    saturated: int
    old_saturated: int
    shares: tuple[float, ...]
    lone: tuple[int, ...]
    old_lone: tuple[int, ...]
    repeats: int
    starts: int
    batch: int
    rate_rows: tuple[int, ...]
    rate_canvases: tuple[int, ...]

    def settings(self) -> dict[str, Any]:
        """Return the settings for a record."""
        return asdict(self)


SIZES = {
    "full": Sizes(
        prompts=Lengths(20, 200, 60.0, 0.6),
        answers=Lengths(8, 256, 32.0, 0.8),
        requests=400,
        old_requests=60,
        turns=3,
        users=16,
        saturated=100,
        old_saturated=24,
        shares=(0.3, 0.6, 0.9),
        lone=(32, 64, 128, 256),
        old_lone=(32, 64),
        repeats=5,
        starts=3,
        batch=200,
        rate_rows=(1, 4, 8, 16),
        rate_canvases=(64, 128, 256, 512),
    ),
    "short": Sizes(
        prompts=Lengths(4, 48, 12.0, 0.6),
        answers=Lengths(2, 32, 8.0, 0.8),
        requests=12,
        old_requests=6,
        turns=2,
        users=10,
        saturated=8,
        old_saturated=6,
        shares=(0.3, 0.9),
        lone=(8, 24),
        old_lone=(8,),
        repeats=2,
        starts=1,
        batch=12,
        rate_rows=(1, 4),
        rate_canvases=(64, 128),
    ),
}


def read_functions(path: str) -> list[tuple[str, str]]:
    """Read prompts and their continuations from a JSONL file.

    Raises:
      InputError: the file does not exist, or a line has no prompt.
    """
    try:
        found = [(line["prompt"], line.get("completion", "")) for line in read_json_lines(Path(path))]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--prompts={path}: cannot be read ({error!r})") from error
    if not found:
        raise InputError(f"--prompts={path}: the file has no lines")
    return found


def make_asks(
    functions: Sequence[tuple[str, str]],
    tokenizer: TextTokenizer,
    sizes: Sizes,
    count: int,
    seed: int,
    fields: dict[str, Any],
) -> list[Ask]:
    """Draw requests.

    A prompt ends with the beginning of a function; text of other functions before it fills the prompt to its length.

    Args:
      functions: beginnings of functions and their continuations.
      tokenizer: counts tokens.
      sizes: the distributions of lengths.
      count: number of requests.
      seed: seed of lengths and prompts, and of the requests' own seeds.
      fields: other fields of each request body.
    """
    generator = np.random.default_rng(seed)
    return [
        Ask(
            prompt_of(functions, tokenizer, sizes.prompts.draw(generator), generator),
            sizes.answers.draw(generator),
            seed + number,
            fields,
        )
        for number in range(count)
    ]


def prompt_of(
    functions: Sequence[tuple[str, str]], tokenizer: TextTokenizer, tokens: int, generator: np.random.Generator
) -> str:
    """Return a prompt of about this many tokens. Cutting a text between two tokens may change how it is tokenized."""
    text, _ = functions[int(generator.integers(len(functions)))]
    while len(ids := tokenizer.encode(text)) < tokens:
        text = "".join(functions[int(generator.integers(len(functions)))]) + "\n\n" + text
    return tokenizer.decode(ids[-tokens:])
