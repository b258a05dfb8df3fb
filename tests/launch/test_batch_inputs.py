"""Unusual, hostile and large inputs of batches, and result files that were changed."""

from __future__ import annotations

import codecs
import dataclasses
import gc
import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from checkpoints import DEMO, CheckpointError, open_folder
from launch.batches import lines as batch_lines
from launch.batches.collector import paused_collector
from launch.batches.lines import MAX_LINE_BYTES, Batch, read_batch
from launch.openai.bodies import Defaults, read_asked
from launch.serving.bodies import ChatBody, CompletionBody
from runtime import DiffusionConfig, encode_prompts, parse_config
from runtime.text.chat_template import TemplateRenderer, TemplateTimeoutError
from runtime.text.tokenizer import TextTokenizer
from sharding.errors import InputError
from tests.runtime.text.test_chat_template import ENDLESS, Impatient


@pytest.fixture
def defaults() -> Defaults:
    folder = open_folder(DEMO)
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer is not None
    config = DiffusionConfig(max_new_tokens=4, steps=4)
    return Defaults("demo", parse_config(folder.config), tokenizer, config, True, (), 0, False, 1, ())


def read(tmp_path: Path, raw: bytes, defaults: Defaults) -> Batch:
    path = tmp_path / "in.jsonl"
    path.write_bytes(raw)
    return read_batch(path, defaults)


def line(identity: str, **fields: Any) -> bytes:
    return json.dumps({"id": identity, "prompt": "def f(x):\n", **fields}).encode()


def test_long_lines_and_prompts_are_bad_lines(
    tmp_path: Path, defaults: Defaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is too long must not stop the other lines."""
    encoded: list[str] = []
    encode = TextTokenizer.encode_batch

    def counted(self: TextTokenizer, texts: Any) -> Any:
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode_batch", counted)
    long_prompt = " " * (12 << 20)
    raw = b"\n".join(
        [
            line("a"),
            b'{"id": "b", "prompt": "' + b"x" * (MAX_LINE_BYTES + 5_000_000) + b'"}',
            line("c", prompt=long_prompt),
            b"",
            line("d", messages=[{"role": "user", "content": long_prompt}], prompt=None),
            line("e", prompt=[5] * 1_000_000),
            line("suffix", suffix=long_prompt),
            line("f"),
        ]
    )
    defaults.tokenizer.chat_template = "{{ messages[0].content }}"
    found = read(tmp_path, raw, defaults)
    assert [one.id for one in found.lines] == ["a", "f"]
    assert [(bad.number, bad.id) for bad in found.bad] == [(2, None), (3, "c"), (5, "d"), (6, "e"), (7, "suffix")]
    assert f"longer than {MAX_LINE_BYTES} bytes" in found.bad[0].message
    assert all("the prompt is too long" in bad.message for bad in found.bad[1:4])
    assert "the suffix is too long" in found.bad[4].message
    assert encoded == ["def f(x):\n"] * 2, "bounds come before the tokenizer"
    again = read(tmp_path, raw, defaults)
    assert again.digest == found.digest
    assert read(tmp_path, raw.replace(b"xxxx", b"xxxy", 1), defaults).digest != found.digest


def test_a_long_last_line_without_its_end(tmp_path: Path, defaults: Defaults) -> None:
    found = read(tmp_path, line("a") + b"\n" + b"x" * (MAX_LINE_BYTES + 1), defaults)
    assert [one.id for one in found.lines] == ["a"]
    assert [bad.number for bad in found.bad] == [2]


def test_files_of_windows(tmp_path: Path, defaults: Defaults) -> None:
    lines = [line("a"), line("b", prompt="é"), b"", line("c")]
    plain = read(tmp_path, b"\n".join(lines) + b"\n", defaults)
    assert len(plain.lines) == 3
    windows = read(tmp_path, codecs.BOM_UTF8 + b"\r\n".join(lines) + b"\r\n", defaults)
    assert windows.lines == plain.lines
    assert not windows.bad
    assert [bad.number for bad in read(tmp_path, line("a") + b"\n" + codecs.BOM_UTF8 + line("b"), defaults).bad] == [2]
    assert read(tmp_path, codecs.BOM_UTF8 + b"\r\n" + line("a"), defaults).lines[0].number == 2


def test_requests_of_another_kind_are_bad_lines(tmp_path: Path, defaults: Defaults) -> None:
    """Nothing but a completion of the body's own kind is computed here."""
    calls: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"method": "POST", "url": "/v1/completions"}, ""),
        ({"method": None, "url": None}, ""),
        ({"url": "/v1/embeddings"}, "url: '/v1/embeddings'; for this body expected /v1/completions"),
        ({"url": "/v1/chat/completions"}, "url: '/v1/chat/completions'; for this body expected /v1/completions"),
        ({"method": "GET"}, "method: 'GET'; for this body expected POST"),
    ]
    lines = [
        json.dumps({"custom_id": str(number), "body": {"prompt": "x"}} | call).encode()
        for number, (call, _) in enumerate(calls)
    ]
    found = read(tmp_path, b"\n".join(lines), defaults)
    assert len(found.lines) == sum(not says for _, says in calls)
    assert [(bad.number, bad.message) for bad in found.bad] == [
        (number, says) for number, (_, says) in enumerate(calls, 1) if says
    ]


@pytest.mark.parametrize("first", [b"", b"\r", b"{}", b"1", b" \n"])
def test_short_first_lines_are_lines(tmp_path: Path, defaults: Defaults, first: bytes) -> None:
    """A line that ended within the length of a byte order mark was joined with the next one."""
    found = read(tmp_path, first + b"\n" + line("a") + b"\n" + line("a"), defaults)
    number = 2 + first.count(b"\n")
    assert [one.number for one in found.lines] == [number]
    assert [bad.number for bad in found.bad] == [*([1] if first.strip() else []), number + 1]


def test_what_the_tokenizer_cannot_take_is_a_bad_line(tmp_path: Path, defaults: Defaults) -> None:
    class PanicException(BaseException):
        pass

    class Panics:
        """A tokenizer that raises transformers' Rust panic for some texts."""

        truncation = padding = None

        @property
        def backend_tokenizer(self) -> Panics:
            return self

        def encode_batch_fast(self, texts: list[str], **more: Any) -> list[Any]:
            return [SimpleNamespace(ids=self.encode(text)) for text in texts]

        def encode(self, text: str, **more: Any) -> list[int]:
            if "boom" in text:
                raise PanicException("index out of bounds")
            return [5, 6]

    defaults = dataclasses.replace(defaults, tokenizer=TextTokenizer(Panics(), "panics"))
    found = read(tmp_path, b"\n".join([line("a"), line("b", prompt="boom"), line("c")]), defaults)
    assert [one.id for one in found.lines] == ["a", "c"]
    assert [(bad.number, bad.id) for bad in found.bad] == [(2, "b")]
    assert "the tokenizer cannot process this text" in found.bad[0].message


@pytest.mark.parametrize("outside", [1536, 2**32 - 1])
def test_tokens_that_only_the_tokenizer_has_are_refused(tmp_path: Path, outside: int) -> None:
    """A tokenizer may have tokens for which the model has no row in its embedding."""
    shutil.copy(DEMO / "config.json", tmp_path)
    stored = json.loads((DEMO / "tokenizer.json").read_text())
    stored["model"]["vocab"]["~"] = outside
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    folder = open_folder(tmp_path)
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer is not None
    model = parse_config(folder.config)
    own = Defaults("demo", model, tokenizer, DiffusionConfig(4, steps=4), True, (), 0, False, 1, ())
    tokenizer.chat_template = "{{ messages[0].content }}"
    found = read(tmp_path, b"\n".join([line("a"), line("b", prompt="x~"), line("c", suffix="~")]), own)
    said = f"token id {outside} is outside the vocabulary of 1536"
    assert ([one.id for one in found.lines], [one.id for one in found.bad]) == (["a"], ["b", "c"])
    assert all(said in one.message for one in found.bad)
    for name, value in {"prompt": "~", "messages": [{"role": "user", "content": "~"}]}.items():
        with pytest.raises(InputError, match=said) as refused:
            read_asked({name: value}, own)
        assert refused.value.field == name
    for prompts, suffixes in ((["x", "~"], []), (["x", "x"], ["", "~"])):
        with pytest.raises(InputError, match=f"prompt 1: {said}"):
            encode_prompts(tokenizer, prompts, model, suffixes=suffixes)


def test_numbers_and_nesting_that_no_float_or_printer_takes_are_bad_lines(tmp_path: Path, defaults: Defaults) -> None:
    wrong = [b"1" + b"0" * 400, b"-1" + b"0" * 4000, b"1" + b"0" * 9000]
    wrong += [b"[" * depth + b"]" * depth for depth in (*range(50, 1050, 5), 100_000)]
    fields = [b'"id": "%d", "prompt": "y", "temperature": %s' % (number, one) for number, one in enumerate(wrong)]
    found = read(tmp_path, b"\n".join(b"{%s}" % one for one in fields) + b"\n" + line("right"), defaults)
    assert [one.id for one in found.lines] == ["right"]
    assert [bad.number for bad in found.bad] == list(range(1, len(wrong) + 1))
    assert "temperature is 1000000" in found.bad[0].message
    assert "nested too deeply" in found.bad[-1].message
    assert max(len(bad.message) for bad in found.bad) < 300


def test_timeouts_of_chat_templates_end_a_file_but_no_later_request(tmp_path: Path, defaults: Defaults) -> None:
    tokenizer = TextTokenizer(PreTrainedTokenizerFast.from_pretrained(str(DEMO)), "impatient", Impatient())
    tokenizer.chat_template = "x"
    defaults = dataclasses.replace(defaults, tokenizer=tokenizer)
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("boom", "good")]
    for _ in range(5):
        with pytest.raises(TemplateTimeoutError):
            read_asked(chats[0], defaults)
    for _ in range(2):
        assert read_asked(chats[1], defaults).tokens == read_asked({"prompt": "good"}, defaults).tokens
        lines = [json.dumps({"id": f"{number}", **chats[number % 2]}).encode() for number in range(8)]
        assert len(read(tmp_path, b"\n".join(lines[:6]), defaults).bad) == 3
        with pytest.raises(CheckpointError, match="did not finish in time for 4 conversations"):
            read(tmp_path, b"\n".join(lines), defaults)


def test_chat_templates_that_refuse_a_line_and_that_do_not_end(tmp_path: Path, defaults: Defaults) -> None:
    def chat(identity: str, text: str) -> bytes:
        return json.dumps({"id": identity, "messages": [{"role": "user", "content": text}]}).encode()

    raw = b"\n".join(chat(f"{number}", "bad" if number == 3 else "good") for number in range(6))
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    defaults.tokenizer.chat_template = template
    found = read(tmp_path, raw, defaults)
    assert [one.id for one in found.lines] == ["0", "1", "2", "4", "5"]
    assert [one.tokens for one in found.lines] == [defaults.tokenizer.encode("good")] * 5
    assert "the chat template cannot render them (TemplateError: no)" in found.bad[0].message
    library = PreTrainedTokenizerFast.from_pretrained(str(DEMO))
    library.chat_template = ENDLESS
    defaults = dataclasses.replace(defaults, tokenizer=TextTokenizer(library, "x", TemplateRenderer(seconds=0.3)))
    with pytest.raises(CheckpointError, match="did not finish in time for 4 conversations"):
        read(tmp_path, raw, defaults)


def test_lines_are_tokenized_together_as_alone(
    tmp_path: Path, defaults: Defaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        f"def f_{number}(x):\n    return x + {number}\n<|endoftext|>é 你" * (1 + number % 3) for number in range(50)
    ]
    raw = b"\n".join(line(str(number), prompt=text) for number, text in enumerate(texts))
    together = read(tmp_path, raw, defaults)
    assert [one.tokens for one in together.lines] == [defaults.tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(batch_lines, "LINES_TOGETHER", 1)
    assert read(tmp_path, raw, defaults) == together


def test_lines_are_parsed_together_as_alone(
    tmp_path: Path, defaults: Defaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing line by line took most of the time until the first result of a long file."""
    alone: list[bytes] = []
    parse = batch_lines.parse_object

    def counted(raw: bytes) -> dict[str, Any]:
        alone.append(raw)
        return parse(raw)

    monkeypatch.setattr(batch_lines, "parse_object", counted)
    good = [line(str(number), prompt=f"def f_{number}(x):\n") for number in range(2000)]
    together = read(tmp_path, b"\n".join(good), defaults)
    assert len(together.lines) == 2000
    assert not alone, "valid lines are parsed together"
    # A line that only looks valid beside its neighbour is bad, and the others are as before.
    wrong = [b'{"id": "x", "a": [{}', b"{}]}, {}", b"", line("0"), b'{"id": "y", "prompt": "\\ud800"}']
    mixed = read(tmp_path, b"\n".join([*good[:1000], *wrong, *good[1000:]]), defaults)
    assert [bad.number for bad in mixed.bad] == [1001, 1002, 1004, 1005]
    assert "first used on line 1" in mixed.bad[2].message
    assert [(one.id, one.tokens) for one in mixed.lines] == [(one.id, one.tokens) for one in together.lines]
    assert [one.number for one in mixed.lines] == [*range(1, 1001), *range(1006, 2006)]
    monkeypatch.setattr(batch_lines, "PART_BYTES", 7)  # lines reach over many parts of the file
    assert read(tmp_path, b"\n".join(good[:100]), defaults).lines == together.lines[:100]


def test_suffixes_of_lines(tmp_path: Path, defaults: Defaults) -> None:
    body = {"prompt": "def f(x):\n", "suffix": "    return y\n"}
    lines = [
        line("plain", suffix=body["suffix"]),
        json.dumps({"custom_id": "openai", "body": body}).encode(),
        line("none", suffix=""),
        line("number", suffix=3),
        line("mask", suffix="<|mask|>"),
        json.dumps(
            {"custom_id": "chat", "body": {"messages": [{"role": "user", "content": "x"}], "suffix": "y"}}
        ).encode(),
    ]
    raw = b"\n".join(lines)
    defaults.tokenizer.chat_template = "{{ messages[0].content }}"
    found = read(tmp_path, raw, defaults)
    suffix = defaults.tokenizer.encode(body["suffix"])
    assert [one.suffix for one in found.lines] == [suffix, suffix, []]
    assert [one.sample(0).suffix for one in found.lines] == [suffix, suffix, []]
    assert [(one.id, one.message.split(":")[0]) for one in found.bad] == [
        ("number", "suffix"),
        ("mask", "the suffix contains the mask token; only a prompt may contain masks"),
        ("chat", "suffix is not available for a chat, which has nothing after the answer"),
    ]
    # With --chat, a plain prompt is a message too.
    chats = read(tmp_path, lines[0], dataclasses.replace(defaults, chat=True))
    assert ["for a chat" in one.message for one in chats.bad] == [True]


def test_lines_are_exempt_from_later_collections(tmp_path: Path, defaults: Defaults) -> None:
    """Millions of lines live until the end: visiting them again and again would take longer than reading them."""
    before = gc.get_freeze_count()
    found = read(tmp_path, b"\n".join(line(f"{number}") for number in range(2000)), defaults)
    assert len(found.lines) == 2000
    assert gc.get_freeze_count() - before >= 2000
    assert gc.isenabled()


def test_cycles_made_while_the_collector_is_paused_are_freed() -> None:
    class Item:
        own: Any = None

    with paused_collector() as set_aside:
        item = Item()
        item.own = item
        cycle = weakref.ref(item)
        del item
        assert cycle() is not None
        set_aside()
        assert cycle() is None


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"prompt": "x", "best_of": 1}, ""),
        ({"prompt": "x", "n": 2, "best_of": 2}, ""),
        ({"prompt": "x", "n": 2, "best_of": 3}, "best_of must equal n"),
        ({"prompt": "x", "best_of": True}, "best_of must equal n"),
        ({"prompt": ["x"]}, ""),
        ({"prompt": [[5, 6]]}, ""),
        ({"prompt": [""]}, "the prompt is empty"),
        ({"prompt": "x", "tool_choice": "none"}, "tool_choice: not supported"),
        (CHAT | {"best_of": 1}, "best_of: not supported"),
        (CHAT | {"response_format": {"type": "text"}}, ""),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format: not supported"),
        (CHAT | {"response_format": {"type": "text", "schema": {}}}, "response_format: not supported"),
        (CHAT | {"tool_choice": "none", "modalities": ["text"], "tools": []}, ""),
        (CHAT | {"tool_choice": "required"}, "tool_choice: not supported"),
        (CHAT | {"modalities": ["text", "audio"]}, "modalities: not supported"),
        (CHAT | {"stream_options": {"include_usage": True}}, "stream_options: not supported"),
    ],
)
def test_fields_without_effect_are_accepted_as_by_the_server(
    body: dict[str, Any], refused: str, tmp_path: Path, defaults: Defaults
) -> None:
    defaults.tokenizer.chat_template = "{{ messages[0].content }}"
    raw = json.dumps({"custom_id": "a", "body": body}).encode()
    found = read(tmp_path, raw, defaults)
    assert [one.id for one in found.lines] == ([] if refused else ["a"])
    assert all(refused in one.message for one in found.bad)
    kind = ChatBody if "messages" in body else CompletionBody
    if refused and refused != "the prompt is empty":  # the server's reader finds that
        with pytest.raises(ValidationError):
            kind.model_validate(body)
    else:
        kind.model_validate(body)
