"""Logits that are NaN: exit code 2, an error record in a batch, HTTP 500 with a code. Other rows get their results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch import generate
from runtime import DiffusionConfig, Engine, NonFiniteError
from tests.launch.mistakes import refusal
from tests.launch.served import served
from tests.launch.small_batches import arguments, launch, results, write
from tests.launch.tiny import write_tiny_checkpoint

# Prompts with this token have NaN logits.
TOKEN = 17
GOOD, BAD = [5, 6, 7], [5, TOKEN, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which the embedding of one token is NaN."""
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    tensors = {name: data.copy() for name, data in load_file(path / "model.safetensors").items()}
    tensors["model.embed_tokens.weight"][TOKEN] = np.nan
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, "data=1")


def test_generate_exits_with_2(
    folder: Path, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = engine.tokenizer.decode(BAD)
    assert TOKEN in engine.tokenizer.encode(prompt)
    arguments = ["--mesh=data=1", "--max_new_tokens=4", f"--checkpoint={folder}"]
    for more in ([], ["--json"]):
        said = refusal(
            capsys,
            lambda more=more: generate.run(["generate", *arguments, f"--prompt={prompt}", *more]),  # type: ignore[misc]
        )
        assert "NaN or infinite in row 0" in said
        assert "diffumesh verify" in said
    with pytest.raises(NonFiniteError):
        engine.generate(prompt, DiffusionConfig(4, steps=4))


def test_a_batch_has_an_error_record(
    folder: Path, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any] | str] = [
        {"id": "good", "prompt": GOOD, "n": 2},
        {"id": "bad", "prompt": BAD, "n": 2},
        {"custom_id": "body", "url": "/v1/completions", "body": {"prompt": BAD, "n": 2}},
        {"id": "last", "prompt": GOOD},
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out"
    expected = [
        {"id": "bad", "line": 2, "index": 0},
        {"id": "bad", "line": 2, "index": 1},
        {"id": "body", "line": 3},
    ]
    for _ in range(2):  # the second run finds the results, and meets the same errors again
        said = refusal(capsys, lambda: launch(source, output, compiled, "--mesh=data=1", f"--checkpoint={folder}"))
        assert "3 of 6 results could not be computed" in said
        errors = [json.loads(line) for line in (output / "errors.jsonl").read_text().splitlines()]
        assert {one["error"].pop("code") for one in errors} == {"non_finite_logits"}
        assert all("NaN or infinite" in one.pop("error")["message"] for one in errors)
        assert sorted(errors, key=str) == sorted(expected, key=str)
        assert sorted((one["id"], one["index"]) for one in results(output)) == [("good", 0), ("good", 1), ("last", 0)]
        ordered = [json.loads(line)["id"] for line in (output / "sorted.jsonl").read_text().splitlines()]
        assert ordered == ["good", "good", "last"]


def test_the_server_answers_500(engine: Engine) -> None:
    config = DiffusionConfig(4, steps=4, temperature=0.5)
    with served(engine, config, slots=4) as there:
        common = {"model": "demo", "max_tokens": 4, "seed": 1}
        good = there.post("/v1/completions", {"prompt": GOOD} | common).json()["choices"]
        for _ in range(2):
            for prompt in (BAD, [GOOD, BAD]):
                answer = there.post("/v1/completions", {"prompt": prompt} | common)
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, "non_finite_logits")
                assert answer.headers["x-should-retry"] == "false"
            streamed = there.post("/v1/completions", {"prompt": BAD, "stream": True} | common)
            last = streamed.text.strip().split("\n\n")[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "non_finite_logits"
            answer = there.post("/v1/score", {"input": [GOOD, BAD]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "non_finite_logits")
            assert there.post("/v1/score", {"input": [GOOD]}).status_code == 200
            assert there.post("/v1/completions", {"prompt": GOOD} | common).json()["choices"] == good
        assert there.get("/health").status_code == 200
        assert there.metric("request_given_up_total") == 8
        # Times are those of answers: three completions and two scores.
        assert there.metric("e2e_request_latency_seconds_count") == 5
        assert there.metric("time_to_first_token_seconds_count") == 3


def on_two_hosts(*command: str) -> str:
    """Run a command that must end with exit code 2 on both of two processes. Return its standard error."""
    hosts = [sys.executable, "-m", "launch.local", "--num_processes=2", "--devices_per_process=1", "--"]
    done = subprocess.run(
        [*hosts, sys.executable, "-m", *command], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2", "sequence=2"])
def test_one_hosts_shard_is_not_finite(mesh: str, tmp_path: Path) -> None:
    """Only the last row of the head is NaN, which is in the second host's shard if the mesh is over ``tensor``."""
    path = write_tiny_checkpoint(tmp_path)
    tensors = {name: data.copy() for name, data in load_file(path / "model.safetensors").items()}
    tensors["lm_head.weight"][-1] = np.nan
    save_file(tensors, path / "model.safetensors")
    own = [f"--checkpoint={path}", "--max_new_tokens=4", "--compile_cache=", "--prompt=x"]
    said = on_two_hosts("launch.generate", *own, f"--mesh={mesh}")
    assert "NaN or infinite in row 0" in said


@pytest.mark.slow
def test_one_hosts_row_is_not_finite(folder: Path, engine: Engine, tmp_path: Path, compiled: str) -> None:
    """Of two rows on two hosts, only the second host's row has NaN logits."""
    own = [f"--checkpoint={folder}", "--mesh=data=2"]
    prompts = [f"--prompt={engine.tokenizer.decode(tokens)}" for tokens in (GOOD, BAD)]
    said = on_two_hosts("launch.generate", *own, "--max_new_tokens=4", "--compile_cache=", *prompts)
    assert "NaN or infinite in row 1" in said
    lines: Sequence[dict[str, Any]] = [{"id": "good", "prompt": GOOD}, {"id": "bad", "prompt": BAD}]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out"
    said = on_two_hosts("launch.batch", *arguments(source, output, compiled, *own))
    assert "1 of 2 results could not be computed" in said
    assert [one["id"] for one in results(output)] == ["good"]
    (error,) = map(json.loads, (output / "errors.jsonl").read_text().splitlines())
    assert (error["id"], error["error"]["code"]) == ("bad", "non_finite_logits")
