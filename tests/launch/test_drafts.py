"""``--draft_steps`` in generate, batch and the server: the same answers, and counts of accepted steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import pytest

from launch import generate
from runtime import DiffusionConfig, Engine
from tests.launch.served import offline, served
from tests.launch.small_batches import launch, write
from tests.launch.tiny import write_tiny_checkpoint

PROMPT = "def is_even(number):\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_generate_says_how_many_steps_were_accepted(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--mesh=data=1", f"--checkpoint={tiny}", "--algorithm=entropy", "--temperature=0"]
    arguments = ["generate", f"--prompt={PROMPT}", "--max_new_tokens=16", "--noearly_stop", "--json", *small]
    found = []
    for more in ([], ["--draft_steps=3"]):
        generate.run([*arguments, *more])
        captured = capsys.readouterr()
        found.append((json.loads(captured.out), captured.err))
    (plain, _), (drafted, err) = found
    assert drafted["tokens"] == plain["tokens"]
    assert plain["drafts"] is None
    own = drafted["drafts"]
    assert own["accepted"] > 0
    assert own["passes"] == drafted["stats"]["row_passes"] == drafted["stats"]["forwards"]
    assert own["passes"] + own["accepted"] == plain["stats"]["forwards"]
    per_pass = own["accepted"] / own["passes"]
    assert f"{own['accepted']} steps accepted from drafts, {per_pass:.2f} per pass of a row" in err


def test_a_batch_is_the_same_run_with_other_drafts(
    tiny: Path, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--mesh=data=1", f"--checkpoint={tiny}", "--max_new_tokens=8")
    lines = [{"id": name, "prompt": PROMPT, "seed": seed} for seed, name in enumerate("abc")]
    lines.append({"id": "d", "prompt": PROMPT, "cache": "dual", "block_length": 2})
    source, plain, drafted = write(tmp_path / "in.jsonl", lines), tmp_path / "plain", tmp_path / "drafted"
    launch(source, plain, compiled, *small)
    capsys.readouterr()
    launch(source, drafted, compiled, *small, "--draft_steps=2")
    assert re.search(r"\d+ steps accepted from drafts", capsys.readouterr().err)
    records = (drafted / "sorted.jsonl").read_bytes()
    assert records == (plain / "sorted.jsonl").read_bytes()
    launch(source, drafted, compiled, *small, "--draft_steps=1")  # continues the run, which is complete
    assert (drafted / "sorted.jsonl").read_bytes() == records


def test_a_server_compiles_its_own_number(tiny: Path) -> None:
    engine = Engine.load(tiny, "tensor=1", devices=jax.devices()[:1])
    config = DiffusionConfig(max_new_tokens=12, steps=12, algorithm="entropy", temperature=0.8, draft_steps=2)
    # With one bucket, nothing is compiled in the background.
    with served(engine, config, programs=1) as found:
        (expected,) = offline(found, [PROMPT], seed=3, draft_steps=0)
        compiled = engine.compiled_programs
        # The number of a request is an upper bound, and none is refused.
        for more in ({}, {"draft_steps": 0}, {"draft_steps": 1}, {"draft_steps": 60}):
            answer = found.post("/v1/completions", {"prompt": PROMPT, "seed": 3, "steps": 12, **more})
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["text"] == expected.text
            assert 0 <= choice["accepted_steps"] <= more.get("draft_steps", 2) * choice["passes"]
        assert engine.compiled_programs == compiled
        steps = found.metric("denoise_steps_total")
        assert 0 <= found.metric("accepted_steps_total") < steps
        assert found.metric("forwards_total") + found.metric("accepted_steps_total") >= steps


@pytest.mark.slow
def test_a_server_whose_drafts_are_divided_over_data(tiny: Path) -> None:
    """One slot is enough for both replicas."""
    engine = Engine.load(tiny, "data=2", devices=jax.devices()[:2])
    config = DiffusionConfig(12, steps=12, algorithm="entropy", temperature=0.8, draft_steps=3, draft_axis="data")
    with served(engine, config, slots=1) as found:
        assert found.server.serving.executor is not None
        assert found.server.serving.executor.pools[0].count == 1
        (expected,) = offline(found, [PROMPT], seed=3, draft_steps=0, draft_axis="none")
        answer = found.post("/v1/completions", {"prompt": PROMPT, "seed": 3, "steps": 12})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected.text
