"""A tokenizer that cannot decode: exit code 2, an error record in a batch, HTTP 400. Other rows get their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from launch import generate
from runtime import DiffusionConfig, Engine, UndecodableError
from tests.launch.mistakes import refusal
from tests.launch.served import served
from tests.launch.small_batches import launch, results, write
from tests.launch.tiny import write_tiny_checkpoint

CODE = "undecodable_tokens"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that generates "a" or "b", each with probability 1/2. Decoding an "a" panics."""
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    stored = json.loads((path / "tokenizer.json").read_text())
    stored["decoder"] = {"type": "Sequence", "decoders": [{"type": "Strip", "content": "a", "start": 0, "stop": 2}]}
    (path / "tokenizer.json").write_text(json.dumps(stored))
    tensors = {name: data.copy() for name, data in load_file(path / "model.safetensors").items()}
    for name, data in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            data[:] = 0
    tensors["model.embed_tokens.weight"][:] = 1
    tensors["lm_head.weight"][[stored["model"]["vocab"][text] for text in "ab"]] = 1
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, "data=1")


def new_tokens(engine: Engine, seed: int) -> list[str]:
    """The tokens that a row with this seed generates after "x", as the vocabulary has them."""
    (a,), (b,) = engine.tokenizer.encode("a"), engine.tokenizer.encode("b")
    config = DiffusionConfig(2, steps=2, temperature=1.0, seed=seed)
    prompt = engine.tokenizer.encode("x")
    found = engine.generate_tokens([prompt], config=config).sequences[0, len(prompt) :].tolist()
    return [{a: "a", b: "b"}[token] for token in found]


def test_generate_exits_with_2(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--mesh=data=1", f"--checkpoint={folder}", "--max_new_tokens=2", "--temperature=1", "--prompt=x"]
    for more in ([], ["--stop=c"]):
        run = ["generate", *own, "--num_return_sequences=8", *more]
        assert "the tokenizer cannot decode" in refusal(capsys, lambda run=run: generate.run(run))  # type: ignore[misc]
    config = DiffusionConfig(2, steps=2, temperature=1.0)
    texts = {"".join(new_tokens(engine, seed)): seed for seed in range(20)}
    assert texts.keys() == {"aa", "ab", "ba", "bb"}
    for text, seed in texts.items():
        if text == "bb":
            assert engine.generate("x", config.replace(seed=seed), stop=["c"])[0].text == text
            continue
        for stop in ([], ["c"]):
            with pytest.raises(UndecodableError, match="index out of bounds"):
                engine.generate("x", config.replace(seed=seed), stop=stop)


def test_a_batch_has_an_error_record(
    folder: Path, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any] | str] = [
        {"id": "plain", "prompt": [5, 6], "n": 16, "max_new_tokens": 1},
        {"id": "stop", "prompt": "x", "n": 16, "max_new_tokens": 2, "stop": ["c"]},
        {"custom_id": "body", "url": "/v1/completions", "body": {"prompt": "x", "n": 16, "max_tokens": 2}},
        {"id": "prompt", "prompt": [5, 70]},
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out"
    more = ["--mesh=data=1", f"--checkpoint={folder}", "--skip_bad"]
    for _ in range(2):  # the second run finds the results, and meets the same errors again
        said = refusal(capsys, lambda: launch(source, output, compiled, *more))
        found = results(output)
        errors = [json.loads(line) for line in (output / "errors.jsonl").read_text().splitlines()]
        (refused,) = [one for one in errors if one["id"] == "prompt"]
        errors.remove(refused)
        assert f"{len(errors)} of 33 results could not be computed: the tokenizer cannot decode" in said
        assert refused["error"]["code"] == "invalid_request"
        assert {one["error"]["code"] for one in errors} == {CODE}
        assert {"id": "body", "line": 3, "error": errors[0]["error"]} in errors
        assert {one["text"].strip("b") for one in found} == {""}
        made, missing = ([(one["id"], one.get("index")) for one in some] for some in (found, errors))
        assert {one[0] for one in made} == {"plain", "stop"}
        own = [(name, index) for name in ("plain", "stop") for index in range(16)]
        assert sorted(made + missing, key=str) == sorted([*own, ("body", None)], key=str)
        ordered = [json.loads(line) for line in (output / "sorted.jsonl").read_text().splitlines()]
        assert [(one["id"], one["index"]) for one in ordered] == sorted(made)


def test_the_server_answers_400_and_goes_on(engine: Engine) -> None:
    config = DiffusionConfig(2, steps=2, temperature=1.0)
    seen: list[str] = []
    with served(engine, config, slots=4) as there:
        for seed in range(8):
            text = "".join(new_tokens(engine, seed))
            seen.append(text)
            common = {"model": "demo", "max_tokens": 2, "prompt": "x", "seed": seed}
            for more in ({}, {"stop": ["c"]}, {"logprobs": 0}):
                answer = there.post("/v1/completions", common | more)
                streamed = there.post("/v1/completions", common | more | {"stream": True})
                assert streamed.status_code == 200
                pieces = [one.removeprefix("data: ") for one in streamed.text.strip().split("\n\n")]
                if "a" not in text:
                    assert answer.json()["choices"][0]["text"] == text
                    assert pieces[-1] == "[DONE]"
                    assert "".join(json.loads(one)["choices"][0]["text"] for one in pieces[:-1]) == text
                    continue
                body = answer.json()["error"]
                assert (answer.status_code, body["code"], body["type"]) == (400, CODE, "invalid_request_error")
                assert "out of bounds" not in body["message"], "the message of a library"
                assert json.loads(pieces[-1])["error"] == body
        assert there.get("/health").status_code == 200
    assert {"b" * 2} < set(seen), "both kinds were tried"


def test_output_is_utf8_in_every_locale() -> None:
    program = "from launch.process.streams import prepare_streams; prepare_streams(); print('é 你')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, env=environment)
    assert done.stdout.decode("utf-8") == "é 你\n"
