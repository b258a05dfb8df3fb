"""Untrusted chat templates: their output, and time and memory limits of rendering."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from checkpoints import DEMO, open_folder
from runtime.text.chat_template import TemplateRenderer
from runtime.text.tokenizer import TextTokenizer
from sharding.errors import InputError

MESSAGES = [{"role": "user", "content": "Wie geht's? 你好 \u2028 <x>"}]
RANGE = "{% for a in range(99999) %}"
ENDLESS = RANGE * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    found = TextTokenizer.from_folder(open_folder(DEMO))
    assert found is not None
    return found


def test_what_transformers_renders(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    original = PreTrainedTokenizerFast.from_pretrained(str(DEMO))
    for template in (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ add_generation_prompt }}",
        "{{ eos_token }}{{ pad_token }}{{ messages | tojson }}{{ undefined_name }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 2 %}{% break %}{% endfor %}{{ ns.n }}",
    ):
        tokenizer.chat_template = template
        for answer in (True, False):
            expected = original.apply_chat_template(
                MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=answer
            )
            assert tokenizer.render_messages(MESSAGES, answer) == expected
    tokenizer.chat_template = None


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(seconds=1.0)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS, "did not finish within 1 s"),
        ("{{ 10**9999999999 }}", "did not finish within 1 s"),
        ("{{ 'x' * 10**11 }}", "MemoryError"),
        ("{{ ('x' * 1000000) * 30 }}", "more than 16777216 characters"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ messages[7].role }}", "UndefinedError"),
        ("{{ raise_exception('only of assistants') }}", "only of assistants"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ],
)
def test_templates_that_fail(renderer: TemplateRenderer, template: str, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match="messages: the chat template cannot render them") as error:
        renderer.render(template, [MESSAGES], {}, True)
    assert said in str(error.value)
    assert time.monotonic() - began < 60, "the deadline of a child"
    assert renderer.render("{{ messages[0].role }}", [MESSAGES] * 2, {}, True) == ["user"] * 2, "as before"


def test_a_panic_of_the_tokenizer_is_an_error(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Rust panic is not an Exception, so ordinary error handling would miss it."""

    class PanicException(BaseException):
        pass

    class Panics:
        def encode(self, *arguments: Any, **more: Any) -> None:
            raise PanicException("called `Option::unwrap()` on a `None` value")

        decode = encode

    with pytest.raises(InputError, match=r"tokenizer cannot process this text .*unwrap"):
        TextTokenizer(Panics(), "panics").encode("x")
    with pytest.raises(InputError, match="unwrap"):
        TextTokenizer(Panics(), "panics").decode([1])


def test_a_folder_of_several_templates(tokenizer: TextTokenizer) -> None:
    tokenizer.chat_template = {"tool_use": "tools", "default": "{{ messages[0].role }}"}  # type: ignore[assignment]
    assert tokenizer.render_messages(MESSAGES) == "user"
    tokenizer.chat_template = None


def test_a_batch_is_encoded_as_its_texts(tokenizer: TextTokenizer) -> None:
    """Also where ``tokenizer.json`` asks for texts to be truncated or padded."""
    texts = ["def f(x):\n", "<|endoftext|>é 你", "    return x\n" * 9, ""]
    expected = [tokenizer.encode(text) for text in texts]
    library = PreTrainedTokenizerFast.from_pretrained(str(DEMO))
    library.backend_tokenizer.enable_truncation(2)
    library.backend_tokenizer.enable_padding(length=64)
    assert TextTokenizer(library, "padded").encode_batch(texts) == expected
