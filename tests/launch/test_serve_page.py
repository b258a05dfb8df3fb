"""The web page in a real browser: it shows the canvas during unmasking, and ends with the engine's own tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from launch.display.pages import page_template
from launch.openai.answers import token_text
from launch.serving.keys import Keys
from runtime import DiffusionConfig, Engine
from runtime.execution.rows import row_seed
from tests.compilation import optimized
from tests.launch.browser import chromium
from tests.launch.served import PATIENCE, Served, served, wait_for
from tests.launch.tiny import write_tiny_checkpoint

CONFIG = DiffusionConfig.published(24, 0.8)
PROMPT = "def is_even(number):\n"
HOSTILE = "</textarea><img src=x onerror=\"document.documentElement.dataset.executed='yes'\"><script>alert(1)</script>"
KEY = "key-of-somebody-1"

# A long completion at a high temperature without filters, which ends early for some seeds.
UNFILTERED = '{"top_p": 1, "top_k": 0}'
HOT = CONFIG.replace(max_new_tokens=96, steps=12, temperature=5.0, top_p=None, top_k=None)

# Counts committed and masked positions whenever the page changes.
WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const row = document.querySelector("#rows pre");
    if (row) window.seen.push([row.querySelectorAll(".set").length, row.querySelectorAll(".masked").length]);
  }).observe(document.querySelector("#rows"), {childList: true, subtree: true, attributes: true});
}"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    with optimized():
        return Engine.load(folder, "tensor=1", devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def ending(engine: Engine) -> int:
    """A seed for which the completion at high temperature ends between a tenth and half of its positions."""
    seeds = range(64)
    rows = engine.generate([PROMPT] * len(seeds), HOT.replace(seed=[row_seed(seed, 0) for seed in seeds]))
    return next(seed for seed, row in zip(seeds, rows, strict=True) if 9 < len(row.tokens) < 48)


@pytest.fixture(scope="module")
def there(engine: Engine) -> Iterator[Served]:
    with served(engine, CONFIG, canvas=(128,)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, there: Served) -> Iterator[Any]:
    """The page. It must send requests to this server only, and must log no errors."""
    found = browser.new_page()
    found.set_default_timeout(1000 * PATIENCE)
    complaints: list[str] = []
    asked: list[str] = []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda request: asked.append(request.url))
    found.goto(there.url)
    yield found
    assert not [one for one in complaints if "status of 400" not in one]
    assert not [url for url in asked if not url.startswith(there.url)]
    found.close()


def fill(page: Any, **fields: str) -> None:
    for name, value in fields.items():
        page.fill(f"[name={name}]", value)


def generate(page: Any, ends: str = "done") -> None:
    page.click("#run")
    page.wait_for_selector(f"html[data-state={ends}]")


def visible(found: Served, completion: Any) -> str:
    """The tokens of a completion as the page shows them, with control characters as visible symbols."""
    text = "".join(token_text(found.engine.tokenizer, token) for token in completion.tokens)
    text = re.sub(r"[\0-\x08\x0b-\x1f]", lambda sign: chr(0x2400 + ord(sign[0])), text)
    return re.sub(r"[\x7f-\x9f]", lambda sign: f"\u27e8U+{ord(sign[0]):04X}\u27e9", text)


def tokens(page: Any, row: int = 0) -> str:
    """The generated text on the page."""
    shown = page.locator("#rows pre").nth(row).locator(".set:not(.after)").all_text_contents()
    return "".join(shown)


def test_nothing_in_it_is_from_elsewhere() -> None:
    source = page_template("launch.serving", "page.html")
    assert "{{" not in source
    assert not re.search(r"https?:|@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", source)
    assert not re.search(r"<[^>]* (src|href|style|on\w+)=", source)


def test_the_canvas_unmasks_and_is_the_answer(page: Any, there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = there.server.serving.executor
    assert executor is not None
    execute = executor.execute
    # Slow down the engine, so that the page is seen while it changes.
    monkeypatch.setattr(executor, "execute", lambda plan: (time.sleep(0.05), execute(plan))[1])
    page.evaluate(WATCH)
    page.fill("#prompt", PROMPT)
    page.uncheck("[name=early_stop]")
    fill(page, max_tokens="96", steps="64", temperature="0.6", seed="9223372036854775807", n="2")
    fill(page, more='{"alg_temp": 0.1}')
    generate(page)
    config = CONFIG.replace(max_new_tokens=96, steps=64, temperature=0.6, alg_temp=0.1, seed=2**63 - 1)
    expected = there.engine.generate([PROMPT], config, num_return_sequences=2)
    for number, one in enumerate(expected):
        assert tokens(page, number) == visible(there, one)
        assert f"seed [{one.seed}]" in page.locator(".count").nth(number).inner_text()
    seen = [counts for counts in page.evaluate("window.seen") if sum(counts)]
    assert len({masked for _, masked in seen if masked}) > 1, "it is seen on its way"
    assert {standing + masked for standing, masked in seen} == {96}
    assert seen[-1] == [96, 0]
    masks = [masked for _, masked in seen]
    assert masks == sorted(masks, reverse=True), "committed tokens stay"
    assert "192 tokens committed" in page.inner_text("#status")
    assert there.defaults.model_name in page.inner_text("header")


def test_a_suffix_stands_after_the_completion(page: Any, there: Served) -> None:
    page.fill("#prompt", "def f(x):\n")
    page.fill("#suffix", "    return y\n")
    fill(page, max_tokens="8", steps="4", temperature="0.6", seed="3")
    generate(page)
    config = CONFIG.replace(max_new_tokens=8, steps=4, temperature=0.6, seed=3)
    [expected] = there.engine.generate(["def f(x):\n"], config, suffixes=["    return y\n"])
    assert tokens(page) == visible(there, expected)
    assert page.locator("#rows pre > .token").last.text_content() == "    return y\n"
    # The seed that stands beside a completion reproduces it.
    fill(page, seed=f"[{expected.seed}]")
    generate(page)
    assert tokens(page) == visible(there, expected)
    fill(page, seed="[1, x]")
    page.click("#run")
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error").startswith("seed: expected an integer")


def test_an_example_until_the_first_answer(page: Any) -> None:
    assert page.inner_text("#rows h2") == "example: the demo model's completion of this prompt"
    assert page.locator("#rows .masked").count() == 0
    assert "".join(page.locator("#rows .set").all_text_contents()) == "    return number % 2 == 0"
    assert page.input_value("#prompt") == PROMPT, "the example's prompt"
    fill(page, max_tokens="4")
    generate(page)
    assert page.inner_text("#rows h2") == "completion 1"


def test_what_follows_the_end_is_folded_and_rates_agree(page: Any, there: Served, ending: int) -> None:
    fill(page, max_tokens="96", steps="12", temperature="5", more=UNFILTERED, seed=str(ending))
    page.uncheck("[name=early_stop]")
    generate(page)
    status = page.inner_text("#status")
    form = r"96 tokens committed, (\d+) of them text, in ([\d.]+) s: ([\d.]+) tokens of text per second"
    found = re.fullmatch(form, status)
    assert found is not None, status
    assert 0 < int(found[1]) < 96
    assert float(found[3]) == pytest.approx(int(found[1]) / float(found[2]), abs=0.051)
    behind = page.locator("#rows .after").count()
    assert behind == 96 - int(found[1])
    assert page.inner_text("#rows .end") == f"end \u00d7 {behind}"
    assert page.locator("#rows .after").first.is_hidden()
    page.click("#rows .end")
    assert page.locator("#rows .after").first.is_visible()


def test_a_completion_is_copied(browser: Any, there: Served) -> None:
    with browser.new_context(permissions=["clipboard-read", "clipboard-write"]) as context:
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(there.url)
        page.click("#rows .copy")
        # A function to wait for would be evaluated from a string, which the page's policy refuses.
        page.locator("#rows .copy", has_text="copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == f"{PROMPT}    return number % 2 == 0"


def test_menus_are_the_servers_modes(page: Any, there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.locator("[name=cache] option").all_text_contents() == ["none"]
    assert page.is_disabled("[name=cache]")
    exact, asked = there.server.reader.modes[0], {"cache": "dual", "parallel": "threshold", "block_length": 16}
    modes = [exact, exact | asked, exact | asked | {"parallel": "factor"}]
    monkeypatch.setattr(type(there.server.reader), "modes", modes)
    page.reload()
    page.wait_for_selector("[name=cache]:enabled")
    assert page.locator("[name=parallel] option").all_text_contents() == ["none"]
    page.select_option("[name=cache]", "dual")
    assert page.locator("[name=parallel] option").all_text_contents() == ["threshold", "factor"]
    with page.expect_request("**/v1/completions") as sent:
        page.click("#run")
    assert asked.items() <= sent.value.post_data_json.items()
    page.wait_for_selector("html[data-state=failed]")  # this server does not offer cache=dual
    page.select_option("[name=cache]", "none")
    with page.expect_request("**/v1/completions") as sent:
        page.click("#run")
    assert not asked.keys() & sent.value.post_data_json.keys()
    page.wait_for_selector("html[data-state=done]")


def test_positions_after_an_early_end_are_not_shown(page: Any, there: Served, ending: int) -> None:
    page.fill("#prompt", PROMPT)
    fill(page, max_tokens="96", steps="12", temperature="5", more=UNFILTERED, seed=str(ending))
    generate(page)
    (expected,) = there.engine.generate([PROMPT], HOT.replace(seed=ending))
    assert expected.finish_reason == "stop"
    assert tokens(page) == visible(there, expected)
    assert page.locator("#rows .masked").count() == 0
    assert ", stop" in page.locator(".count").inner_text()


def test_a_chat(page: Any, there: Served) -> None:
    page.fill("#prompt", "add two")
    fill(page, max_tokens="9", seed="3")
    page.check("[name=chat]")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("html[data-state=done]")
    expected = there.engine.generate(["user: add two\ndef answer("], CONFIG.replace(max_new_tokens=9, steps=9, seed=3))
    assert tokens(page) == visible(there, expected[0])


def test_no_chat_without_a_template(
    browser: Any, engine: Engine, there: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(there.url)
    page.wait_for_selector("header dd")
    assert page.is_enabled("[name=chat]")
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    page.reload()
    page.wait_for_selector("[name=chat]:disabled")
    assert "this model has no chat template" in page.inner_text("label:has([name=chat])")
    page.close()


def test_what_is_refused_is_said_and_hostile_text_stays_text(page: Any, there: Served) -> None:
    fill(page, max_tokens="5000")
    generate(page, "failed")
    assert "7 prompt tokens and 5000 new tokens" in page.inner_text("#error")
    fill(page, max_tokens="4", more="[1]")
    generate(page, "failed")
    assert "expected a JSON object" in page.inner_text("#error")
    page.fill("#prompt", HOSTILE)
    fill(page, more="")
    generate(page)
    assert page.locator("#error").is_hidden()
    assert page.locator("#rows .token").first.text_content() == HOSTILE
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.dataset.executed") is None


def test_stopping_frees_the_slot(page: Any, there: Served) -> None:
    page.fill("#prompt", PROMPT)
    fill(page, max_tokens="64", steps="64", n="32")
    page.click("#run")
    page.wait_for_selector("#rows .masked")
    page.click("#stop")
    page.wait_for_selector("html[data-state=stopped]")
    wait_for(lambda: there.metric("num_requests_running") + there.metric("num_requests_waiting") == 0)
    fill(page, max_tokens="4", steps="4", n="1")
    generate(page)


def test_with_a_key(browser: Any, engine: Engine) -> None:
    with served(engine, CONFIG, keys=Keys([KEY]), names=("127.0.0.1",)) as found:
        refused = found.get("/")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic"), "so that a browser asks"
        with browser.new_context(http_credentials={"username": "me", "password": KEY}) as context:
            page = context.new_page()
            page.set_default_timeout(1000 * PATIENCE)
            page.goto(found.url)
            page.fill("#prompt", PROMPT)
            fill(page, max_tokens="6", seed="1")
            generate(page)
            expected = engine.generate([PROMPT], CONFIG.replace(max_new_tokens=6, steps=6, seed=1))[0]
            assert tokens(page) == visible(found, expected)
            # The URL may contain the password.
            page.goto(found.url.replace("//", f"//me:{KEY}@"))
            generate(page)


@pytest.mark.slow
def test_a_picture_of_it(page: Any, tmp_path: Path) -> None:
    """No element overflows on a narrow or a wide screen."""
    page.fill("#prompt", PROMPT)
    generate(page)
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.screenshot(path=tmp_path / "page.png")
