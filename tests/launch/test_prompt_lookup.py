"""``--prompt_lookup`` in generate, batch and the server: the same answers, and counts of accepted tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from launch import generate
from launch.openai.bodies import read_config
from runtime import Engine, InputError, SamplingConfig
from tests.launch.served import offline, served
from tests.launch.small_batches import launch, write
from tests.launch.test_generate import fails
from tests.launch.test_parameters import defaults

PROMPT = "def is_even(number):\n    return number % 2 == 0\n\ndef is_even("


def test_generate_says_how_many_tokens_were_accepted(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", f"--checkpoint={gpt2}", f"--prompt={PROMPT}", "--max_new_tokens=48", "--noearly_stop"]
    found = []
    for more in ([], ["--prompt_lookup=5"]):
        generate.run([*arguments, "--json", "--temperature=0", *more])
        captured = capsys.readouterr()
        found.append((json.loads(captured.out), captured.err))
    (plain, _), (drafted, err) = found
    assert drafted["tokens"] == plain["tokens"]
    assert plain["drafts"] is None
    own = drafted["drafts"]
    assert own["accepted"] > 0
    assert own["passes"] == drafted["stats"]["row_passes"] == drafted["stats"]["forwards"]
    assert own["passes"] + own["accepted"] == plain["stats"]["forwards"] == 48
    assert f"{own['accepted']} steps accepted from drafts, {own['accepted'] / own['passes']:.2f} per pass" in err


def test_what_is_refused(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (f"--checkpoint={gpt2}", f"--prompt={PROMPT}")
    assert "--prompt_lookup is 64; expected an integer from 0 to 63" in fails(capsys, *common, "--prompt_lookup=64")
    error = fails(capsys, f"--prompt={PROMPT}", "--prompt_lookup=2")
    assert "is a diffusion model; only autoregressive models have --prompt_lookup" in error


def test_a_batch_is_the_same_run_with_other_drafts(
    gpt2: Path, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"id": name, "prompt": PROMPT, "seed": seed, "max_tokens": 30} for seed, name in enumerate("abc")]
    lines.append({"id": "d", "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "prompt_lookup": 0})
    more = (f"--checkpoint={gpt2}", "--mesh=data=1", "--temperature=0.2")
    source, plain, drafted = write(tmp_path / "in.jsonl", lines), tmp_path / "plain", tmp_path / "drafted"
    launch(source, plain, compiled, *more)
    capsys.readouterr()
    launch(source, drafted, compiled, *more, "--prompt_lookup=3")
    assert re.search(r"\d+ steps accepted from drafts", capsys.readouterr().err)
    records = (drafted / "sorted.jsonl").read_bytes()
    assert records == (plain / "sorted.jsonl").read_bytes()
    launch(source, drafted, compiled, *more, "--prompt_lookup=2")  # continues the run, which is complete
    assert (drafted / "sorted.jsonl").read_bytes() == records


def test_a_server_compiles_its_own_number(gpt2: Path) -> None:
    engine = Engine.load(gpt2, "tensor=1", devices=jax.devices()[:1])
    config = engine.with_end_tokens(SamplingConfig(max_new_tokens=40, temperature=0.2, prompt_lookup=3))
    with served(engine, config, canvas=(64, 128)) as found:
        (expected,) = offline(found, [PROMPT], seed=3, prompt_lookup=0)
        compiled = engine.compiled_programs
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 3}
        # The number of a request is an upper bound, and none is refused.
        for more in ({}, {"prompt_lookup": 0}, {"prompt_lookup": 1}, {"prompt_lookup": 60}):
            answer = found.post("/v1/completions", body | more)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["text"] == expected.text
            assert 0 <= choice["accepted_steps"] <= more.get("prompt_lookup", 3) * choice["passes"]
            assert choice["passes"] + choice["accepted_steps"] >= choice["completion_tokens"]
        with found.client().completions.create(model="demo", prompt=PROMPT, seed=3, stream=True) as chunks:
            assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
        assert engine.compiled_programs == compiled
        assert found.metric("accepted_steps_total") > 0
        assert found.metric("denoise_steps_total") == 0
        assert found.post("/v1/completions", body | {"prompt_lookup": 64}).status_code == 400


def test_a_request_to_a_diffusion_model_names_the_field() -> None:
    with pytest.raises(InputError, match="prompt_lookup: not supported by this checkpoint, which is a diff") as error:
        read_config({"prompt_lookup": 2}, defaults())
    assert error.value.field == "prompt_lookup"
