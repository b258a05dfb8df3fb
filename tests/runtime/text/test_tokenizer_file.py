"""``tokenizer.json`` read without transformers: the same tokens and texts as with it, to the last character."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from checkpoints import DEMO, open_folder
from runtime.text.tokenizer import TextTokenizer
from runtime.text.tokenizer_file import read_tokenizer_file

CONFIG = "tokenizer_config.json"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
LETTERS = pre_tokenizers.ByteLevel.alphabet()


def byte_pairs() -> Tokenizer:
    """Like Qwen2.5's: bytes, NFC, a regular expression, special tokens, and added tokens that are not special."""
    merges = [("d", "e"), ("de", "f"), ("\u0120", "def"), ("e", "r"), ("\u010a", "\u0120")]
    vocabulary = {text: number for number, text in enumerate([*sorted(LETTERS), *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken(" def ", lstrip=True, rstrip=True)])
    return made


def pieces() -> Tokenizer:
    """Like SentencePiece's: spaces are written, and a post-processor adds a token in front."""
    words = ["<unk>", "<s>", "\u2581", "a", "b", "\u2581a", "\u2581ab", "ab", ".", "!", "\u00e9"]
    made = Tokenizer(models.Unigram([(word, -float(number)) for number, word in enumerate(words)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["<unk>", "<s>", *SPECIAL])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(5)
    made.enable_padding(length=9)
    return made


def words() -> Tokenizer:
    """Like BERT's: lower case, and spaces before punctuation that a clean-up would remove."""
    vocabulary = ["[UNK]", "a", "ab", "##b", "##c", ".", "!", "'", "n", "t", "do", *SPECIAL]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(SPECIAL)
    return made


MADE: dict[str, Callable[[], Tokenizer]] = {"byte pairs": byte_pairs, "pieces": pieces, "words": words}


def write(folder: Path, made: Tokenizer, config: dict[str, Any] | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config))
    return folder


def read(folder: Path) -> TextTokenizer:
    found = TextTokenizer.from_folder(open_folder(folder))
    assert found is not None
    return found


def is_direct(folder: Path) -> bool:
    return read_tokenizer_file(open_folder(folder)) is not None


def original(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def check_same(own: TextTokenizer, theirs: Any, text: str, ids: list[int]) -> None:
    expected = theirs.encode(text, add_special_tokens=False)
    assert own.encode(text) == expected
    assert own.encode_batch([text, "", text]) == [expected, [], expected]
    for tokens in (expected, ids):
        for skip in (True, False):
            spoken = theirs.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert own.decode(tokens, skip) == spoken


TEXTS = some.lists(
    some.one_of(
        some.text(some.characters(exclude_categories=["Cs"]), max_size=12),
        some.sampled_from(
            [*SPECIAL, "<tool>", " def ", "def", "e\u0301", "\n    ", "don't ab. a!", "<s>", "   ", "12"]
        ),
    ),
    max_size=8,
).map("".join)
IDS = some.lists(some.integers(0, 1600), max_size=12)


@pytest.fixture(scope="module", params=["demo", *MADE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return DEMO
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": SPECIAL[0],
        "pad_token": {"__type": "AddedToken", "content": SPECIAL[0], "special": True},
        "bos_token": None,
        "additional_special_tokens": SPECIAL[1:],
        "extra_special_tokens": {},
        "add_prefix_space": False,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": True,
        "split_special_tokens": False,
        "model_max_length": 7,
    }
    made = MADE[request.param]()
    config["added_tokens_decoder"] = {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in made.get_added_tokens_decoder().items()
    }
    return write(tmp_path_factory.mktemp("model"), made, config)


def test_random_texts_are_those_of_transformers(folder: Path) -> None:
    own, theirs = read(folder), original(folder)
    assert is_direct(folder)

    @settings(max_examples=150, deadline=None)
    @given(TEXTS, IDS)
    def check(text: str, ids: list[int]) -> None:
        check_same(own, theirs, text, ids)

    check()
    vocabulary = theirs.get_vocab()
    names = [*SPECIAL, "<tool>", "def", "ab", "not a token"]
    assert own.known_ids(names) == tuple(vocabulary[name] for name in names if name in vocabulary)
    assert len(own.known_ids(names)) >= len(SPECIAL)


def test_special_tokens_of_chat_templates(folder: Path) -> None:
    found = read_tokenizer_file(open_folder(folder))
    assert found is not None
    assert found.special_tokens_map == original(folder).special_tokens_map
    assert found.special_tokens_map["eos_token"] == SPECIAL[0]


def test_a_file_alone_is_enough(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_pairs(), None)
    assert is_direct(folder)
    check_same(read(folder), original(folder), "<|mask|>def é\n 1", [0, 260])


@pytest.mark.parametrize("config", [{"chat_template": "own"}, {"chat_template": None}, {}])
@pytest.mark.parametrize("file", [None, "of a file\r\n\u00e9"])
def test_chat_templates(tmp_path: Path, config: dict[str, Any], file: str | None) -> None:
    folder = write(tmp_path, byte_pairs(), config)
    if file is not None:
        (folder / "chat_template.jinja").write_bytes(file.encode())
    found = read_tokenizer_file(open_folder(folder))
    assert found is not None
    assert found.chat_template == original(folder).chat_template


@pytest.mark.parametrize(
    "config",
    [
        {"split_special_tokens": True},
        {"eos_token": "<new>"},
        {"eos_token": "<tool>"},
        {"image_token": "<tool>"},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"additional_special_tokens": ["<new>"]},
        {"added_tokens_decoder": {"999": {"content": "<new>", "special": False, "normalized": False}}},
        {"added_tokens_decoder": {"261": {"content": SPECIAL[0], "lstrip": True, "special": True}}},
        {"chat_template": [{"name": "default", "template": "first"}]},
        {"add_prefix_space": True},
        {"unknown": 1},
        {"fast_tokenizer_files": ["tokenizer.json"]},
    ],
    ids=str,
)
def test_settings_that_may_change_tokens_are_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write(tmp_path, byte_pairs(), config)
    assert not is_direct(folder)
    own, theirs = read(folder), original(folder)
    for text in ("<|endoftext|>def", "a <new><tool>  <|endoftext|> <image>", " def  def x"):
        check_same(own, theirs, text, [261, 262, 265, 266, 999])


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("special_tokens_map.json", {"eos_token": "<new>", "additional_special_tokens": ["<other>"]}),
        ("added_tokens.json", {"<new>": 300}),
    ],
)
def test_older_files(tmp_path: Path, name: str, contents: dict[str, Any]) -> None:
    """They count unless ``tokenizer_config.json`` lists the added tokens itself."""
    folder = write(tmp_path, byte_pairs(), {})
    (folder / name).write_text(json.dumps(contents))
    assert not is_direct(folder)
    check_same(read(folder), original(folder), "a<new><other>b", [300])
    (folder / CONFIG).write_text(json.dumps({"added_tokens_decoder": {}}))
    assert is_direct(folder)
    check_same(read(folder), original(folder), "a<new><other>b", [300])


def test_named_templates_are_left_to_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_pairs(), {})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text("default")
    assert not is_direct(folder)
    assert read(folder).chat_template == "default"
