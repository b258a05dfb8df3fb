"""Requests of mixed length: prompts and answers whose numbers of tokens are log-normal, within bounds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import Ask
from runtime import TextTokenizer
from sharding.errors import InputError


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of numbers of tokens; what falls outside the bounds is drawn again.

    Attributes:
      least, most: its bounds.
      median: of the distribution without bounds.
      sigma: standard deviation of the logarithm.
    """

    least: int
    most: int
    median: float
    sigma: float

    def draw(self, generator: np.random.Generator) -> int:
        """One number."""
        while True:
            number = round(generator.lognormal(math.log(self.median), self.sigma))
            if self.least <= number <= self.most:
                return number


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
      prompts, answers: their tokens.
      requests: of each load of this server, and of the loop.
      old_requests: of the arrivals that the older server and this one share.
      turns: parts of those arrivals, which the two servers take in turns.
      users: of the closed loop that saturates a server; more than it has slots.
      saturated, old_saturated: answers that count there, after as many as there are users.
      shares: of its capacity, at which this server is loaded.
      lone: new tokens of lone requests.
      old_lone: those that are sent to the older server too, once each.
      repeats: of each lone request.
      starts: servers that are started with a warm cache for the lone requests from ready on.
      batch: prompts of the batch.
      rate_rows, rate_canvases: shapes whose rates are measured.
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
        """For a record."""
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
        starts=1,
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
    """Prompts of a file and what follows each, one JSON object a line.

    Raises:
      InputError: no such file, or a line without a prompt.
    """
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        found = [(line["prompt"], line.get("completion", "")) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--prompts={path}: cannot be read ({error!r})") from error
    if not found:
        raise InputError(f"--prompts={path}: no line in it")
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

    A prompt is the beginning of a function after as much of other functions as fills its length.

    Args:
      functions: beginnings of functions and what follows each.
      tokenizer: counts tokens.
      sizes: the lengths.
      count: how many.
      seed: of lengths and prompts, and of the requests' own seeds.
      fields: of each body.
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
    """A prompt of about so many tokens: cutting a text between two tokens may join or split one when it is read."""
    text, _ = functions[int(generator.integers(len(functions)))]
    while len(ids := tokenizer.encode(text)) < tokens:
        text = "".join(functions[int(generator.integers(len(functions)))]) + "\n\n" + text
    return tokenizer.decode(ids[-tokens:])
