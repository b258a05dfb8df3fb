"""Ends of completions, and the pieces in which text is streamed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models

from runtime.text.completions import CompletionBuilder, StopSearch, TextStream, cut_completion, stop_tests, stream_texts
from runtime.text.tokenizer import TextTokenizer, UndecodableError

END, TURN = 256, 257


class Bytes:
    """A tokenizer whose tokens are bytes and one special token, and which counts calls and decoded tokens."""

    def __init__(self) -> None:
        self.decoded = self.tokens = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += 1
        self.tokens += len(tokens)
        return bytes(token for token in tokens if token != TURN).decode("utf-8", errors="replace")

    def special_ids(self, texts: Sequence[str]) -> set[int]:
        return {TURN for text in texts if text == "<turn>"}


def byte_fallback() -> tuple[TextTokenizer, dict[str, int]]:
    """A tokenizer that spells characters with tokens of one byte, which decode to nothing else until they are whole."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"ab": 256, "<end>": 257}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return TextTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer), "bytes"), vocabulary


@pytest.mark.parametrize("seed", range(5))
def test_characters_of_bytes_that_are_decoded_together(seed: int) -> None:
    """Half a character spoils the whole characters before it, back to the last token that is no byte."""
    chance, (tokenizer, vocabulary) = random.Random(seed), byte_fallback()
    for _ in range(40):
        words = chance.choices(["龘", "靐", "é", "😀", "x", "ab"], k=chance.randint(1, 12))
        tokens = [
            token
            for word in words
            for token in (
                [vocabulary["ab"]] if word == "ab" else [vocabulary[f"<0x{byte:02X}>"] for byte in word.encode()]
            )
        ]
        stop = ["".join(chance.choices(words, k=chance.randint(1, 3)))] if chance.random() < 0.5 else []
        text = "".join(words)
        cut = min((text.find(one) for one in stop), default=-1)
        expected = text[:cut] if cut >= 0 else text
        found, kept, _ = cut_completion(tokenizer, tokens, [257], stop)
        assert found == expected
        assert tokenizer.decode(kept) == expected
        looks = sorted(chance.randint(0, len(tokens)) for _ in range(chance.randint(0, 20)))
        pieces = stream_texts(tokenizer, [[tokens[:count]] for count in (*looks, len(tokens))], [257], stop)
        assert "".join(piece for (piece,) in pieces) == expected, (text, stop, looks)
        if stop and cut >= 0:
            search = StopSearch(tokenizer, [257], stop)
            answers = [search(tokens[:count], count == len(tokens)) for count in range(len(tokens) + 1)]
            assert answers[-1] == len(kept)


def popped(text: str, stop: Sequence[str]) -> tuple[str, int]:
    """The kept text and its number of tokens, found by removing tokens one by one."""
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
    assert [stream.push(tokens[:count]) for count in (2, 7)] == ["xx", "x"]
    assert stream.ended
    before = tokenizer.decoded
    assert not any(stream.push(tokens[:count]) for count in range(8, 4000))
    assert stream.push(tokens, whole=True) == ""
    assert tokenizer.decoded == before, "text after the end is not searched"


def test_tokens_are_decoded_when_they_come_and_not_again() -> None:
    tokenizer, tokens = Bytes(), list("né😀xy".encode() * 400)
    anything: Any = tokenizer
    stream, search = TextStream(anything, [END], ["stop"]), StopSearch(anything, [END], ["stop"])
    pieces = [stream.push(tokens[:count]) for count in range(len(tokens) + 1)]
    assert "".join(pieces) + stream.push(tokens, whole=True) == bytes(tokens).decode()
    for count in range(len(tokens) + 1):
        assert search(tokens[:count], False) is None
    assert search(tokens, True) is None
    assert tokenizer.tokens < 2 * 15 * len(tokens), "some tokens before the new ones, and not all of them"


def test_a_search_ends_where_the_tokenizer_fails() -> None:
    """The row continues, and the error shows when its completion is built."""

    class Fails(Bytes):
        def decode(self, tokens: Sequence[int]) -> str:
            if 0 in tokens:
                raise UndecodableError("panicked")
            return super().decode(tokens)

    anything: Any = (tokenizer := Fails())
    search = StopSearch(anything, [END], ["stop"])
    assert [search([97], False), search([97, 0], False)] == [None, None]
    before = tokenizer.decoded
    assert search([97, 0, *b"stop"], True) is None
    assert tokenizer.decoded == before
    with pytest.raises(UndecodableError, match="panicked"):
        cut_completion(anything, [97, 0, *b"stop"], [END], ["stop"])


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    anything: Any = Bytes()
    stream, text = TextStream(anything, [END], ["\n\nclass", "#"]), b"a\nb\n\nclaim # c"
    pieces = [stream.push(text[:count]) for count in range(1, len(text) + 1)]
    assert pieces == ["a", "", "\nb", "", "", "", "", "", "\n\nclai", "m", " ", "", "", ""]
    assert (stream.stopped, stream.length) == (True, len(b"a\nb\n\nclaim "))


@pytest.mark.parametrize("seed", range(3))
def test_a_search_finds_where_a_completion_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    anything: Any = Bytes()
    for _ in range(200):
        text = "".join(chance.choices("abcé", k=chance.randint(0, 12)))
        stop = ["".join(chance.choices("abcé", k=chance.randint(1, 4))) for _ in range(chance.randint(1, 3))]
        tokens = [*text.encode(), *([END, 97] if chance.random() < 0.3 else [])]
        own, kept, _ = cut_completion(anything, tokens, [END], stop)
        expected = len(kept) if own != text else None
        (search,) = stop_tests(anything, [END], [stop])
        assert search is not None
        looks = sorted(chance.randint(0, len(tokens)) for _ in range(6))
        for count in looks:
            found = search(tokens[:count], False)
            over = END in tokens[:count]
            seen = bytes(tokens[: tokens.index(END) if over else count]).decode(errors="ignore")
            there = expected is not None and any(seen.startswith(one, len(own)) for one in stop)
            longer = any(one.startswith(seen[place:]) for one in stop for place in range(min(len(own), len(seen))))
            assert found == (expected if there and (over or not longer) else None), (text, stop, count)
        assert search(tokens, True) == search(tokens, True) == expected
    assert stop_tests(anything, [END], [[], ["x"]])[0] is None


@pytest.mark.parametrize(("text", "stop"), [("ab", ["<turn>"]), ("ab", ["c", "<turn>"]), ("a", ["b<", "b", "<turn>"])])
def test_a_stop_string_is_a_special_token(text: str, stop: list[str]) -> None:
    """Texts have no special tokens, so the string cannot be searched for in them."""
    anything: Any = Bytes()
    tokens = [*b"ab", TURN, *b"cd", END]
    assert cut_completion(anything, tokens, [END], stop) == (text, list(text.encode()), "stop")
    (search,) = stop_tests(anything, [END], [stop])
    assert search is not None
    assert [search(tokens[:count], False) for count in (1, 3, 6)] == [None, len(text), len(text)]
    pieces = stream_texts(anything, [[tokens[:count]] for count in (1, 3, 6)], [END], stop)
    assert "".join(piece for (piece,) in pieces) == text
    assert cut_completion(anything, tokens, [END], ["<turn"])[0] == "abcd"


def test_a_search_is_used_for_another_generation() -> None:
    """As by a loop of rollouts that makes its stop tests once, and by one that breaks a generation off."""
    anything: Any = Bytes()
    search = StopSearch(anything, [END], ["stop"])
    for _ in range(2):
        assert [search(b"a stop"[:count], False) for count in (1, 6, 6)] == [None, 2, 2]
    assert search(b"a stx", False) is None
    assert search(b"op", False) is None, "not after what another text ended with"
    assert search(b"op stop", True) == 3


def test_rows_that_were_interrupted_end_before_their_first_open_position() -> None:
    """Padding that is no end token is not text; a row that has its end token is complete."""
    anything: Any = Bytes()
    ids = np.array([[0, 120], [121, 122]], np.int32)
    new = [list(b"ab\0d\0"), [*b"ab", END, 0, 0]]
    steps = [[-1, -1, 0, 1, -1, 2, -1], [-1, -1, 3, 0, 1, -1, -1]]
    result: Any = SimpleNamespace(
        sequences=np.concatenate([ids, new], 1),
        commit_steps=np.array(steps, np.int32),
        log_probabilities=None,
        drafts=(),
        seeds=(5, 6),
    )
    builder, given = CompletionBuilder(anything, 258, [END]), (["x", "yz"], ids, np.array([[0, 1], [1, 1]]))
    found = builder.build_batch(*given, result, interrupted=True)
    assert [(one.text, one.tokens, one.finish_reason) for one in found] == [
        ("ab", [97, 98], "length"),
        ("ab", [97, 98], "stop"),
    ]
    assert [len(one.tokens) for one in builder.build_batch(*given, result)] == [5, 2]
