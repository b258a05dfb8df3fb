"""The files that a tokenizer is read from: those of the folder that are checked, and no others."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from checkpoints import CheckpointError, open_folder
from checkpoints.folder import MAX_SIDE_FILE_BYTES
from runtime.text.tokenizer import TextTokenizer

CONFIG = "tokenizer_config.json"


def save_words(path: Path, *words: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(("<|endoftext|>", *words))}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>")).save(str(path))


def encode(folder: Path, text: str) -> list[int]:
    tokenizer = TextTokenizer.from_folder(open_folder(folder))
    assert tokenizer is not None
    return tokenizer.encode(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_words(folder / "tokenizer.json", "a")
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A folder with the files of Qwen2's tokenizer alone."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


def test_the_family_decides_how_text_is_split(pairs: Path) -> None:
    """GPT-2 joins digits to tokens, and Qwen2 does not."""
    (pairs / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "1": 1, "2": 2, "12": 3}))
    (pairs / "merges.txt").write_text("#version: 0.2\n1 2\n")
    assert encode(pairs, "12") == [1, 2]
    (pairs / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert encode(pairs, "12") == [3]


@pytest.mark.parametrize(
    "name", ["../outside/tokenizer.1.json", "sub/tokenizer.1.json", "tokenizer.1.json.md", "./tokenizer.1.json"]
)
@pytest.mark.parametrize("kind", ["folder", "pairs"])
def test_a_configuration_that_names_other_files(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    """They may be outside of the folder, behind links, of any size, and not in the manifest."""
    folder: Path = request.getfixturevalue(kind)
    save_words(folder / name, "b", "a")
    (folder / CONFIG).write_text(json.dumps({"fast_tokenizer_files": ["tokenizer.json", name]}))
    if kind == "pairs":
        (folder / CONFIG).write_text(json.dumps({"fast_tokenizer_files": [name]}))
    with pytest.raises(CheckpointError) as caught:
        encode(folder, "a")
    assert f"{folder / CONFIG}: fast_tokenizer_files has {name!r}; expected" in str(caught.value)


@contextlib.contextmanager
def seen_options() -> Iterator[list[dict[str, Any]]]:
    """Record the options of each call with which transformers loads a tokenizer."""
    calls: list[dict[str, Any]] = []
    loader = transformers.PreTrainedTokenizerFast.from_pretrained.__func__

    def load(cls: type, *arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return loader(cls, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", classmethod(load))
        yield calls


def test_a_file_elsewhere_is_not_read(folder: Path) -> None:
    """Some versions of transformers prefer it; see the arguments that they get."""
    outside = folder.parent / "outside.json"
    save_words(outside, "b", "a")
    settings = {"tokenizer_file": str(outside), "vocab_file": str(outside)}
    (folder / CONFIG).write_text(json.dumps(settings))
    with seen_options() as calls:
        assert encode(folder, "a") == [1]
    assert [call["tokenizer_file"] for call in calls] == [str(folder / "tokenizer.json")]
    (folder / CONFIG).write_text(json.dumps({"fast_tokenizer_files": ["tokenizer.json"]} | settings))
    with pytest.raises(CheckpointError, match="fast_tokenizer_files and tokenizer_file"):
        encode(folder, "a")


@pytest.mark.parametrize("listed", ["tokenizer.9.json", {"tokenizer.9.json": 1}, 3, [None], [["tokenizer.json"]]])
def test_a_list_that_is_none(folder: Path, listed: Any) -> None:
    (folder / CONFIG).write_text(json.dumps({"fast_tokenizer_files": listed}))
    with pytest.raises(CheckpointError, match="fast_tokenizer_files has "):
        encode(folder, "a")


def test_files_for_newer_versions_of_the_library(folder: Path) -> None:
    newer = folder / "tokenizer.4.0.0.json"
    save_words(newer, "b", "a")
    for listed, expected in (([], [1]), (["tokenizer.json"], [1]), (["tokenizer.json", newer.name], [2])):
        (folder / CONFIG).write_text(json.dumps({"fast_tokenizer_files": listed}))
        assert encode(folder, "a") == expected
    newer.rename(folder.parent / newer.name)
    newer.symlink_to(folder.parent / newer.name)
    with pytest.raises(CheckpointError, match="outside of the folder"):
        encode(folder, "a")
    newer.unlink()
    with newer.open("wb") as file:
        file.truncate(MAX_SIDE_FILE_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.4\.0\.0\.json has [0-9]+ bytes; the limit is"):
        encode(folder, "a")
    newer.unlink()
    os.mkfifo(newer)
    with pytest.raises(CheckpointError, match="fast_tokenizer_files has"):
        encode(folder, "a")


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "tekken.json", "tokenizer.model."])
def test_vocabularies_in_other_formats_are_not_read(pairs: Path, name: str) -> None:
    """transformers would read them instead of vocab.json, and some of these names are not checked."""
    assert encode(pairs, "ab") == [3]
    (pairs / name).write_text(json.dumps({"<|endoftext|>": 0, "a": 7, "b": 8, "ab": 9}))
    assert encode(pairs, "ab") == [3]


@pytest.mark.parametrize("key", ["vocab", "vocab_file", "merges", "merges_file", "tokenizer_file", "gguf_file"])
def test_paths_in_the_configuration_are_not_read(pairs: Path, key: str) -> None:
    outside = pairs.parent / "outside"
    if "merges" in key:
        outside.write_text("#version: 0.2\n")
    elif key == "tokenizer_file":
        save_words(outside, "b", "ab")
    else:
        outside.write_text(json.dumps({"<|endoftext|>": 0, "a": 7, "b": 8, "ab": 9}))
    (pairs / CONFIG).write_text(json.dumps({key: str(outside)}))
    with seen_options() as calls:
        assert encode(pairs, "ab") == [3]
    # Which of these arguments a configuration may replace depends on the version of transformers.
    assert calls
    assert all(key in call and call[key] != str(outside) for call in calls)
