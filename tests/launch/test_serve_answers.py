"""Responses to OpenAI's client: the same tokens as offline, whatever the load; and requests that are refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from launch.display.pages import page_template
from launch.openai.answers import token_text
from launch.serving.app import Application
from runtime import DiffusionConfig, Engine
from runtime.decoding.parameters import MAX_SEED
from tests.compilation import optimized
from tests.launch.served import PATIENCE, Served, demo, offline, served, wait_for

TEMPLATE = (
    "{% for message in messages %}{{ message.name or message.role }}: {{ message.content }}\n{% endfor %}def answer("
)
CONFIG = DiffusionConfig.published(12, 0.8)
DUAL = CONFIG.replace(cache="dual", block_length=8, parallel="threshold")
COMPILED = {"cache": "dual", "block_length": 8, "parallel": "threshold"}
PROMPT = "def is_even(number):\n"


@pytest.fixture(scope="module")
def engine() -> Engine:
    with optimized():
        return demo()


@pytest.fixture(scope="module")
def there(engine: Engine) -> Iterator[Served]:
    with served(engine, CONFIG, [DUAL], template=TEMPLATE) as found:
        yield found


def test_completions_are_those_of_the_engine(there: Served) -> None:
    client = there.client()
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    prompts = [PROMPT, "import os"]
    found = client.completions.create(
        model="demo", prompt=prompts, n=2, seed=7, max_tokens=10, logprobs=0, temperature=0.9, stop=["\n\n"]
    )
    same = {"n": 2, "seed": 7, "max_new_tokens": 10, "temperature": 0.9, "stop": ["\n\n"], "log_probabilities": True}
    expected = offline(there, prompts, **same)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for choice, other in zip(found.choices, expected, strict=True):
        assert choice.text == other.text
        assert choice.finish_reason == other.finish_reason
        assert choice.model_dump()["seed"] == other.seed
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(other.log_probabilities, abs=1e-4)
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(other.tokens) for other in expected)
    # A request without a seed gets a random one, which the response contains.
    one, two = (client.completions.create(model="demo", prompt=PROMPT).choices[0].model_dump() for _ in range(2))
    assert one["seed"] != two["seed"]
    again = offline(there, [PROMPT], seed=[one["seed"]])[0]
    assert again.text == one["text"]
    # The seeds of rows are a list, in requests too.
    rows = there.post("/v1/completions", {"prompt": PROMPT, "n": 2, "seed": [two["seed"], one["seed"]]}).json()
    assert [(row["text"], row["seed"]) for row in rows["choices"]] == [(row["text"], row["seed"]) for row in (two, one)]


def test_token_ids_infilling_and_masks_left(there: Served) -> None:
    tokenizer = there.engine.tokenizer
    ids = tokenizer.encode(PROMPT)
    client = there.client()
    by_ids = client.completions.create(model="demo", prompt=ids, seed=1).choices[0]
    assert by_ids.text == client.completions.create(model="demo", prompt=PROMPT, seed=1).choices[0].text
    masked = there.engine.config.mask_token_id
    body = {"prompt": [ids[0], masked, *ids[2:]], "max_tokens": 0, "steps": 2, "seed": 2}
    filled = there.post("/v1/completions", body).json()["choices"][0]
    assert filled["text"] == ""
    assert filled["masks_left"] == 0
    assert len(tokenizer.encode(filled["filled_prompt"])) > 0


def test_chats(there: Served) -> None:
    client = there.client()
    messages: Any = [{"role": "user", "content": "add two"}]
    found = client.chat.completions.create(
        model="demo", messages=messages, max_completion_tokens=9, seed=5, logprobs=True
    )
    expected = offline(there, ["user: add two\ndef answer("], max_new_tokens=9, seed=5, log_probabilities=True)[0]
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].logprobs is not None
    assert [one.logprob for one in found.choices[0].logprobs.content or []] == pytest.approx(
        expected.log_probabilities, abs=1e-4
    )
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=messages,
            max_completion_tokens=9,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)
    # The name of a message is passed to the chat template.
    named = there.post("/v1/chat/completions", {"messages": [messages[0] | {"name": "ann"}], "seed": 5}).json()
    expected = offline(there, ["ann: add two\ndef answer("], seed=5)[0]
    assert named["choices"][0]["message"]["content"] == expected.text


@pytest.mark.parametrize(
    "changes",
    [
        {"block_length": 4},
        {"cache": "dual", "block_length": 8, "parallel": "threshold", "early_stop": True},
        {"temperature": 0, "stop": ["e", "return"]},
    ],
    ids=str,
)
def test_pieces_of_a_stream_are_the_text(there: Served, changes: dict[str, Any]) -> None:
    named = {name: changes.pop(name) for name in ("stop", "temperature") if name in changes}
    common: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "n": 2, "seed": 11, **named}
    client = there.client()
    whole = client.completions.create(**common, extra_body=changes)
    texts, shown = ["", ""], [[], []]
    for chunk in client.completions.create(**common, stream=True, extra_body=changes | {"canvas": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if (canvas := choice.model_dump().get("canvas")) is not None:
                shown[choice.index].append(canvas)
    assert texts == [choice.text for choice in whole.choices]
    for canvases in shown:
        assert all(len(canvas) == 40 for canvas in canvases)
        masks = [canvas.count(None) for canvas in canvases]
        assert masks == sorted(masks, reverse=True), "committed tokens stay"


def test_answers_do_not_depend_on_who_else_is_served(there: Served) -> None:
    common = {"model": "demo", "prompt": PROMPT}
    asked: list[dict[str, Any]] = [
        {"seed": number, "max_tokens": 4 + 3 * (number % 8), "temperature": (number % 3) / 2}
        | ({"top_p": 1.0} if number % 5 == 0 else {})
        | ({"stream": True} if number % 2 else {})
        | ({"extra_body": {"steps": 1 + number, "alg_temp": number / 10}} if number % 4 == 0 else {})
        | ({"extra_body": {"cache": "dual", "block_length": 8, "parallel": "threshold"}} if number % 4 == 1 else {})
        for number in range(12)
    ]
    client = there.client()

    def text(answer: Any) -> str:
        return answer.choices[0].text if hasattr(answer, "usage") else "".join(c.choices[0].text for c in answer)

    alone = [text(client.completions.create(**common, **one)) for one in asked]
    compiled = there.engine.compiled_programs

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="none", max_retries=0) as many:

            async def one(arguments: dict[str, Any]) -> str:
                answer = await many.completions.create(**common, **arguments)
                if not arguments.get("stream"):
                    return text(answer)
                return "".join([chunk.choices[0].text async for chunk in answer])

            return await asyncio.gather(*map(one, asked))

    assert asyncio.run(all_at_once()) == alone
    assert there.engine.compiled_programs == compiled, "nothing is compiled once the server is ready"
    assert there.metric("programs_compiled") == compiled
    assert offline(there, [PROMPT], seed=2, max_new_tokens=10, temperature=1.0)[0].text == alone[2]


def test_infilling(there: Served) -> None:
    prompt = "def square(<|mask|>):\n    return number * number\n"
    found = there.post("/v1/completions", {"prompt": prompt, "max_tokens": 0, "steps": 1, "seed": 4}).json()
    [choice] = found["choices"]
    assert (choice["text"], choice["masks_left"], choice["completion_tokens"]) == ("", 0, 0)
    assert choice["filled_prompt"].startswith("def square(")
    assert "<|mask|>" not in choice["filled_prompt"]
    [expected] = offline(there, [prompt], seed=4, max_new_tokens=0, steps=1)
    assert choice["filled_prompt"] == expected.filled_prompt
    # By default there is a step for each of the prompt's masks, also where others follow the prompt.
    several = {"prompt": "def add(<|mask|><|mask|>, b):\n    return<|mask|>", "seed": 4}
    for new in (4, 0):
        own = there.post("/v1/completions", several | {"max_tokens": new}).json()
        same = there.post("/v1/completions", several | {"max_tokens": new, "steps": 3 + new}).json()
        assert own["choices"] == same["choices"]
    assert own["choices"] != there.post("/v1/completions", several | {"max_tokens": 0, "steps": 1}).json()["choices"]


def test_a_suffix(there: Served) -> None:
    """The answer is the text between prompt and suffix, whole or as a stream."""
    prompt, suffix = "def f(x):\n", "    return y\n"
    body: dict[str, Any] = {"prompt": prompt, "suffix": suffix, "max_tokens": 8, "seed": 4, "early_stop": False}
    found = there.post("/v1/completions", body | {"n": 2}).json()
    expected = offline(there, [prompt], suffixes=[suffix], n=2, seed=4, max_new_tokens=8, early_stop=False)
    assert [choice["text"] for choice in found["choices"]] == [one.text for one in expected]
    without = offline(there, [prompt], n=2, seed=4, max_new_tokens=8, early_stop=False)
    assert [one.text for one in without] != [one.text for one in expected]
    tokenizer = there.engine.tokenizer
    assert found["usage"]["prompt_tokens"] == len(tokenizer.encode(prompt)) + len(tokenizer.encode(suffix))
    own = {"canvas": True, "early_stop": False}
    stream = there.client().completions.create(
        model="demo", prompt=prompt, suffix=suffix, max_tokens=8, seed=4, stream=True, extra_body=own
    )
    chunks = [chunk.choices[0].model_dump() for chunk in stream]
    assert "".join(chunk["text"] for chunk in chunks) == expected[0].text
    assert {len(chunk["canvas"]) for chunk in chunks if "canvas" in chunk} == {8}
    # An empty suffix is the same as no suffix.
    empty = there.post("/v1/completions", body | {"suffix": ""}).json()["choices"][0]["text"]
    assert empty == without[0].text


def test_scores_are_those_of_the_engine(there: Served) -> None:
    tokenizer, masked = there.engine.tokenizer, there.engine.config.mask_token_id
    rows = [tokenizer.encode(PROMPT), tokenizer.encode("import os\n"), [5, 6, 7, 8]]
    noised = [[masked if place % 2 else token for place, token in enumerate(row)] for row in rows]
    body = {"model": "demo", "input": noised, "targets": rows, "temperature": 0.7}
    compiled = there.engine.compiled_programs
    found = there.post("/v1/score", body).json()
    assert there.engine.compiled_programs == compiled
    for one, row, target in zip(found["data"], noised, rows, strict=True):
        expected = there.engine.score([row], [target], temperature=0.7, width=128, batch=2)[0]
        assert one["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
    texts = there.post("/v1/score", {"input": "import os\n"}).json()
    assert len(texts["data"][0]["token_logprobs"]) == len(rows[1])


# More characters than any text of 128 tokens.
LONG_TEXT = "word " * 20000
WRONG: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model_not_found"),
    ("/v1/completions", {"model": "demo"}, 400, "prompt: Field required"),
    ("/v1/completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [9**9]}, 400, "is not a token id"),
    ("/v1/completions", {"prompt": "x", "wait": 1}, 400, "wait: Extra inputs are not permitted"),
    ("/v1/completions", {"prompt": "x", "suffix": 3}, 400, "suffix"),
    ("/v1/completions", {"prompt": "x", "suffix": "<|mask|>"}, 400, "the suffix contains the mask token"),
    ("/v1/completions", {"prompt": "x", "suffix": "word " * 20000}, 400, "the suffix is too long"),
    ("/v1/completions", {"prompt": "x", "suffix": "word " * 200}, 400, "has room for 128"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "suffix": "y"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "echo": 0.0}, 400, "echo"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "store": 0}, 400, "store"),
    ("/v1/completions", {"prompt": "x", "logprobs": 3}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": 0.1}, 400, "presence_penalty"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("/v1/completions", {"prompt": "x", "n": 33}, 400, "n: 33 completions; at most 32 per request"),
    ("/v1/completions", {"prompt": ["x"] * 33}, 400, "prompt: 33 completions; at most 32 per request"),
    ("/v1/completions", {"prompt": ["x"] * 33, "n": 1}, 400, "prompt: 33 completions; at most 32 per request"),
    ("/v1/completions", {"prompt": ["x"] * 17, "n": 2}, 400, "n: 34 completions; at most 32 per request"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0 and no prompt contains the mask"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1, "max_new_tokens": 2}, 400, "max_tokens is set twice, as max_"),
    ("/v1/completions", {"prompt": "x", "n": "2"}, 400, "n: "),
    ("/v1/completions", {"prompt": "x", "max_tokens": 500}, 400, "has room for 128"),
    ("/v1/completions", {"prompt": "word " * 20000}, 400, "too long"),
    ("/v1/completions", {"prompt": "word " * 200}, 400, "has room for 128"),
    ("/v1/completions", {"prompt": "x", "seed": MAX_SEED + 1}, 400, "seed"),
    ("/v1/completions", {"prompt": "x", "seed": [MAX_SEED + 1]}, 400, "seed"),
    ("/v1/completions", {"prompt": "x", "n": 2, "seed": [1, 2, 3]}, 400, "3 seeds for 1 rows"),
    ("/v1/completions", {"prompt": "x", "temperature": 1e-9}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "algorithm": "origin"}, 400, "This server does not offer algorithm=origin"),
    (
        "/v1/completions",
        {"prompt": "x", "cache": "dual"},
        400,
        "This server does not offer block_length=32, cache=dual, parallel=none. Available: cache=none, parallel=none; ",
    ),
    (
        "/v1/completions",
        {"prompt": "x", **COMPILED, "refresh_blocks": 4},
        400,
        "refresh_blocks=4, parallel=threshold. Available: cache=none, parallel=none; ",
    ),
    (
        "/v1/completions",
        {"prompt": "x", **COMPILED, "refresh_blocks": 0},
        400,
        "refresh_blocks=0, parallel=threshold. Available: cache=none, parallel=none; ",
    ),
    ("/v1/completions", {"prompt": "x", "steps": 65}, 400, "at most 64"),
    ("/v1/completions", {"prompt": "x", **COMPILED, "steps": 4}, 400, "steps requires parallel=none"),
    ("/v1/completions", {"prompt": "x", **COMPILED, "eps": 0.1}, 400, "eps requires parallel=none"),
    (
        "/v1/completions",
        {"prompt": "x", "algorithm": "origin", "alg_temp": 0.5},
        400,
        "alg_temp requires algorithm=maskgit_plus",
    ),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n: Input should be greater than or equal to 1"),
    ("/v1/completions", {"prompt": "x", "temperature": "1"}, 400, "temperature: Input should be a valid number"),
    (
        "/v1/completions",
        {"prompt": "x", "cache": "both"},
        400,
        "cache: Input should be 'none', 'prefix', 'dual' or 'exact'",
    ),
    ("/v1/completions", {"prompt": "x", "user": "u" * 513}, 400, "user: String should have at most 512 characters"),
    ("/v1/completions", {"prompt": "x", "threshold": 0.5}, 400, "threshold requires parallel=threshold"),
    ("/v1/completions", {"prompt": "x", **COMPILED, "factor": 2.0}, 400, "factor requires parallel=factor"),
    (
        "/v1/completions",
        {"prompt": "x", "refresh_interval": 3},
        400,
        "refresh_interval requires cache=dual or cache=prefix",
    ),
    ("/v1/completions", {"prompt": "x", "canvas": True}, 400, "canvas requires stream: true"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools"),
    ("/v1/score", {"input": [[1, 2]], "targets": [[1]]}, 400, "targets"),
    ("/v1/score", {"input": [[1] * 200]}, 400, "fit into 128 positions"),
    ("/v1/nothing", {}, 404, "not_found"),
    ("/health", {}, 405, "method_not_allowed"),
]


def test_what_is_refused_says_why(there: Served) -> None:
    for path, body, status, said in WRONG:
        answer = there.post(path, body)
        assert answer.status_code == status, (path, body, answer.text)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert said in f"{error['message']} {error['code']}", (body, error)
        if "does not offer" in error["message"]:
            assert error["param"] in body, error
    raw: list[tuple[bytes, str, int]] = [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"prompt": "x", "prompt": "y"}', "application/json", 400),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": ' + b"[" * 100_000, "application/json", 400),
        (b'{"prompt": "x", "n": 1' + b"0" * 5000 + b"}", "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "' + b"x" * (2 << 20) + b'"}', "application/json", 413),
    ]
    for content, kind, status in raw:
        answer = httpx.post(
            f"{there.url}/v1/completions", content=content, headers={"content-type": kind}, timeout=PATIENCE
        )
        assert answer.status_code == status, (content[:50], answer.text)
        assert "Exceeds the limit" not in answer.text
        assert "codec" not in answer.text
    # The server still answers.
    assert there.post("/v1/completions", {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "identity, BR", "Identity", "utf-8"])
def test_compressed_bodies_are_refused_by_the_name_of_their_header(there: Served, encoding: str) -> None:
    raw = b'{"prompt": "x", "max_tokens": 1}'
    plain = encoding in ("Identity", "utf-8")
    headers = {"content-type": "application/json", "content-encoding": encoding}
    url = f"{there.url}/v1/completions"
    answer = httpx.post(url, content=raw if plain else gzip.compress(raw), headers=headers, timeout=PATIENCE)
    assert answer.status_code == (200 if plain else 415), answer.text
    if not plain:
        assert answer.json()["error"]["message"].startswith("Content-Encoding must be identity")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": LONG_TEXT}, "prompt"),
        ("/v1/completions", {"prompt": ["x", LONG_TEXT]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT[:20000]}] * 5}, "messages"),
        ("/v1/score", {"input": LONG_TEXT}, "input"),
        ("/v1/score", {"input": "word " * 200}, "input"),
        ("/v1/score", {"input": ["x", LONG_TEXT]}, "input"),
        ("/v1/score", {"input": [[1] * 200]}, "input"),
        ("/v1/score", {"input": [[1]], "targets": [[1] * 200]}, "targets"),
    ],
)
def test_a_text_that_is_too_long_is_named_as_the_client_sent_it(
    there: Served, path: str, body: dict[str, Any], field: str
) -> None:
    answer = there.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "128 positions" in answer.json()["error"]["message"]


def test_about_the_server(there: Served) -> None:
    assert there.get("/health").json()["status"] == "ready"
    assert there.get("/version").json() == {"version": "1.2.3"}
    assert there.get("/openapi.json").json() == Application("1.2.3").openapi()
    # Pages of another origin cannot use the server: there is no CORS.
    asked = httpx.options(f"{there.url}/v1/completions", headers={"origin": "http://localhost:1"}, timeout=PATIENCE)
    assert asked.status_code == 405
    assert not [name for name in asked.headers if name.startswith("access-control")]
    before = there.metric("request_success_total")
    assert there.post("/v1/completions", {"prompt": "def f(x):", "max_tokens": 4}).status_code == 200
    wait_for(lambda: there.metric("request_success_total") == before + 1)


def test_the_example_of_the_page_is_what_the_demo_generates(engine: Engine) -> None:
    """Text and order of commits of the page's prompt and number of new tokens, one token per step, greedily."""
    page = page_template("launch.serving", "page.html")
    [example] = re.findall(r"^const EXAMPLE = (.*);$", page, re.MULTILINE)
    [prompt] = re.findall(r'<textarea id="prompt"[^>]*>(.*?)</textarea>', page, re.DOTALL)
    [new_tokens] = re.findall(r'<input name="max_tokens"[^>]* value="(\d+)"', page)
    number = int(new_tokens)
    config = engine.with_end_tokens(engine.published(max_new_tokens=number, steps=number, temperature=0.0))
    ids, mask = engine.encode(prompt)
    result = engine.generate_tokens(ids, mask, config)
    [completion] = engine.completions(prompt, ids, mask, result)
    # Steps that only commit positions after the end are not shown.
    steps = result.commit_steps[0, ids.shape[1] :][: len(completion.tokens)]
    texts = [token_text(engine.tokenizer, token) for token in completion.tokens]
    order = np.argsort(np.argsort(steps)).tolist()
    assert json.loads(example) == [list(pair) for pair in zip(texts, order, strict=True)]
