"""Tokenizers that make texts far longer are refused when they are read, before a text makes the library abort."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoints import DEMO, CheckpointError, open_folder
from runtime.text.text_growth import MAX_GROWTH, text_growth
from runtime.text.tokenizer import TextTokenizer

SPACE = "\u2581"


def made(normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any = None) -> Tokenizer:
    found = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder)):
        if part is not None:
            setattr(found, name, part)
    return found


def charsmap(*texts: str) -> bytes:
    return (1024).to_bytes(4, "little") + bytes(1024) + "".join(f"{text}\0" for text in texts).encode()


def precompiled(table: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def two_spaces() -> normalizers.Normalizer:
    return normalizers.Replace(Regex(" {2,}"), SPACE)


# As in the files of these models
REAL = {
    "gpt2": made(None, pre_tokenizers.ByteLevel(), decoders.ByteLevel()),
    "qwen": made(normalizers.NFC(), pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()),
    "llama": made(
        normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
        None,
        decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "gemma": made(normalizers.Replace(" ", SPACE), None, decoders.Sequence([decoders.Replace(SPACE, " ")])),
    "clip": made(
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]),
        pre_tokenizers.ByteLevel(False),
    ),
    "bert": made(normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
    "xlnet": made(
        normalizers.Sequence(
            [
                normalizers.Replace("``", '"'),
                normalizers.Replace("''", '"'),
                normalizers.NFKD(),
                normalizers.StripAccents(),
                normalizers.Lowercase(),
                normalizers.NFKC(),  # in place of the map, which the library cannot make
                two_spaces(),
            ]
        ),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str) -> None:
    assert 1 <= text_growth(REAL[name]) <= MAX_GROWTH


def letters(count: int) -> list[normalizers.Normalizer]:
    return [normalizers.Replace("q", "q" * count)]


BOMBS = {
    "replace": made(normalizers.Sequence(letters(1000) * 4)),
    "one": made(normalizers.Replace("q", "q" * 5000)),
    "expression": made(normalizers.Sequence([normalizers.Replace(Regex("q|r"), "qq")] * 12)),
    "empty matches": made(normalizers.Sequence([normalizers.Replace(Regex("x*"), "y")] * 40)),
    "empty text": made(normalizers.Sequence([normalizers.Replace("", "y")] * 40)),
    "look-ahead": made(normalizers.Sequence([normalizers.Replace(Regex("(?=y)"), "y")] * 40)),
    # To find out that these may match an empty text must not take time that doubles with each class.
    "many classes": made(normalizers.Sequence([normalizers.Replace(Regex("[^a]" * 200 + "(b)"), "y")] * 40)),
    "nested": made(normalizers.Sequence([normalizers.Sequence([normalizers.Sequence(letters(100))])] * 2)),
    "prepend": made(normalizers.Prepend("q" * 5000)),
    "bytes": made(normalizers.Sequence([normalizers.ByteLevel()] * 40)),
    "bytes of pieces": made(None, pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(False)] * 40)),
    "both": made(normalizers.Sequence(letters(1000)), pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 2)),
    "decoder": made(decoder=decoders.Sequence([decoders.Replace("a", "a" * 100)] * 2)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_those_that_make_far_longer_texts(name: str) -> None:
    assert text_growth(BOMBS[name]) > MAX_GROWTH


@pytest.mark.parametrize(
    ("texts", "count", "refused"), [(["a", "\ufdfa", "b" * 33], 2, False), (["a", "b" * 5000], 1, True)]
)
def test_maps_of_characters(texts: list[str], count: int, refused: bool) -> None:
    """SentencePiece's, as T5 and XLM-R have them. The library makes none, so the function gets what it would write."""

    class Part:
        def __getstate__(self) -> bytes:
            parts = [precompiled(charsmap(*texts))] * count
            return json.dumps({"type": "Sequence", "normalizers": parts}).encode()

    class Library:
        normalizer, pre_tokenizer, decoder = Part(), None, None

    assert (text_growth(Library()) > MAX_GROWTH) == refused  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"split_special_tokens": True}], ids=["tokenizers", "transformers"])
def test_the_folder_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    raw = json.loads((DEMO / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    replace = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 1000}
    for count in (1, 4):
        raw["normalizer"] = {"type": "Sequence", "normalizers": [replace] * count}
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
        if count == 1:
            tokenizer = TextTokenizer.from_folder(open_folder(tmp_path))
            assert tokenizer is not None
            assert tokenizer.encode("q")
        else:
            with pytest.raises(CheckpointError, match="can make a text more than 4096 times longer"):
                TextTokenizer.from_folder(open_folder(tmp_path))


def test_parts_that_are_nested_too_deeply(tmp_path: Path) -> None:
    raw = json.loads((DEMO / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    raw["normalizer"] = {"type": "NFC"}
    for _ in range(55):
        raw["normalizer"] = {"type": "Sequence", "normalizers": [raw["normalizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        TextTokenizer.from_folder(open_folder(tmp_path))
