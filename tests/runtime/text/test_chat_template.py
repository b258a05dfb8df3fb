"""Untrusted chat templates: their output, and time and memory limits of rendering."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from checkpoints import DEMO, CheckpointError, open_folder
from runtime.text.chat_template import RendererStartError, TemplateRenderer, TemplateTimeoutError
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


@pytest.fixture(scope="module")
def patient() -> TemplateRenderer:
    """For templates that end on their own, however busy the machine is."""
    return TemplateRenderer(seconds=50.0)


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
def test_templates_that_fail(renderer: TemplateRenderer, patient: TemplateRenderer, template: str, said: str) -> None:
    if "within" not in said:
        renderer = patient
    began = time.monotonic()
    with pytest.raises(InputError, match="messages: the chat template cannot render them") as error:
        renderer.render(template, [MESSAGES], {}, True)
    assert said in str(error.value)
    assert time.monotonic() - began < 60, "the deadline of a child"
    assert renderer.render("{{ messages[0].role }}", [MESSAGES] * 2, {}, True) == ["user"] * 2, "as before"


def test_a_child_killed_while_idle_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request is not at fault, and must not be told that it took too long."""
    started, popen = [], subprocess.Popen

    def start(*arguments: Any, **more: Any) -> Any:
        started.append(popen(*arguments, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    renderer = TemplateRenderer()
    for count in (1, 2):
        assert renderer.render("{{ messages[0].role }}", [MESSAGES] * count, {}, True) == ["user"] * count
        assert len(started) == count
        os.kill(started[-1].pid, signal.SIGKILL)
        os.waitid(os.P_PID, started[-1].pid, os.WEXITED | os.WNOWAIT)  # ended, and still to be noticed


def test_a_child_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that breaks out of its sandbox must not find the tokens of this process."""
    for name in ("HF_TOKEN", "DIFFUMESH_HOSTS_SECRET", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("TZ", "Pacific/Auckland")  # a template's date depends on it
    started: list[dict[str, str]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, env: dict[str, str], **options: Any) -> Any:
        started.append(env)
        return popen(*arguments, env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert TemplateRenderer(seconds=50.0).render("{{ messages[0].role }}", [MESSAGES], {}, True) == ["user"]
    (environment,) = started
    assert "hunter2" not in environment.values()
    assert (environment["PATH"], environment["TZ"]) == (os.environ["PATH"], "Pacific/Auckland")


class Impatient(TemplateRenderer):
    """Renders the first message's content, but times out for "boom". Counts the conversations of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def render(self, template: str, conversations: Sequence[Any], *more: Any) -> list[str]:
        self.calls.append(len(conversations))
        texts = [messages[0]["content"] for messages in conversations]
        if "boom" in texts:
            raise TemplateTimeoutError("messages: late")
        return texts


def test_a_child_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(RendererStartError, match="cannot start the process that renders chat templates"):
        TemplateRenderer().start()


def test_timeouts_of_some_conversations_do_not_end_the_others() -> None:
    """A server goes on after any number of them. A file has a limit, whatever happened before."""
    library = PreTrainedTokenizerFast.from_pretrained(str(DEMO))
    library.chat_template = "x"
    tokenizer = TextTokenizer(library, "impatient", renderer := Impatient())
    boom, good = [{"role": "user", "content": "boom"}], [{"role": "user", "content": "good"}]
    for _ in range(5):
        (error,) = tokenizer.render_batch([boom])
        assert isinstance(error, TemplateTimeoutError)
    assert renderer.calls == [1] * 5, "each is rendered once"
    assert tokenizer.render_batch([good]) == ["good"]
    assert tokenizer.render_batch([]) == []
    renderer.calls.clear()
    timeouts: list[InputError] = []
    for number in range(1, 4):
        assert tokenizer.render_batch([good, boom], timeouts)[0] == "good"
        assert len(timeouts) == number
    with pytest.raises(CheckpointError, match="did not finish in time for 4 conversations"):
        tokenizer.render_batch([good] + [boom] * 1000, timeouts)
    assert renderer.calls == [2, 1, 1] * 3 + [1001, 1, 1]


def test_a_panic_of_the_tokenizer_is_an_error(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Rust panic is not an Exception, so ordinary error handling would miss it."""

    class PanicException(BaseException):
        pass

    class Panics:
        truncation = padding = None

        @property
        def backend_tokenizer(self) -> Panics:
            return self

        def encode_batch_fast(self, *arguments: Any, **more: Any) -> None:
            raise PanicException("called `Option::unwrap()` on a `None` value")

        decode = encode_batch_fast

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
