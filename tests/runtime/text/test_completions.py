"""Where completions end, and the pieces in which they are handed out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.text.completions import TextStream, cut_completion, stream_texts

END = 256


class Bytes:
    """A tokenizer whose tokens are bytes, and which counts how often it is asked."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += 1
        return bytes(tokens).decode("utf-8", errors="replace")


def popped(text: str, stop: Sequence[str]) -> tuple[str, int]:
    """What is kept, and of how many tokens, taking them away one by one."""
    places = [place for place in map(text.find, stop) if place >= 0]
    own, kept = text[: min(places, default=len(text))], text.encode()
    while len(kept.decode("utf-8", errors="replace")) > len(own):
        kept = kept[:-1]
    return own, len(kept)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_the_text_whatever_stops_it(seed: int) -> None:
    chance, tokenizer = random.Random(seed), Bytes()
    anything: Any = tokenizer
    for _ in range(200):
        text = "".join(chance.choices("abcé😀", k=chance.randint(0, 12)))
        stop = ["".join(chance.choices("abcé😀", k=chance.randint(1, 15))) for _ in range(chance.randint(0, 3))]
        tokens = [*text.encode(), *([END, 97] if chance.random() < 0.3 else [])]
        found, kept, reason = cut_completion(anything, tokens, [END], stop)
        assert (found, len(kept)) == popped(text, stop)
        assert reason == ("stop" if found != text or END in tokens else "length")
        looks = sorted(chance.randint(0, len(tokens)) for _ in range(chance.randint(0, 8)))
        pieces = stream_texts(anything, [[tokens[:count]] for count in (*looks, len(tokens))], [END], stop)
        assert "".join(piece for (piece,) in pieces) == found, (text, stop, looks)


def test_a_long_text_is_not_decoded_once_for_every_token() -> None:
    tokenizer, tokens = Bytes(), list(b"xxxstop" + b"y" * 4000)
    anything: Any = tokenizer
    assert cut_completion(anything, tokens, [END], ["stop"]) == ("xxx", tokens[:3], "stop")
    assert tokenizer.decoded < 20
    stream = TextStream(anything, [END], ["stop"])
    assert [stream.push(tokens[:count]) for count in (2, 7)] == ["", "xxx"]
    assert stream.ended
    before = tokenizer.decoded
    assert not any(stream.push(tokens[:count]) for count in range(8, 4000))
    assert stream.push(tokens, whole=True) == ""
    assert tokenizer.decoded == before, "what comes after the end is not looked at"
