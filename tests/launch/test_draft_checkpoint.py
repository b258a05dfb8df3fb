"""``--draft_checkpoint`` in generate, batch and the server: the same answers, counts, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags
from safetensors.numpy import load_file, save_file

from checkpoints import DEMO
from launch import batch, generate, serve
from launch.flags.model import open_checkpoint, open_draft_checkpoint
from runtime import Engine, SamplingConfig
from tests.golden_cases import FOLDER
from tests.launch.served import offline, served
from tests.launch.small_batches import launch, write
from tests.launch.test_generate import fails
from tests.launch.test_hosts import GENERATE, local, tokens

PROMPT = "def is_even(number):\n    return"


def test_generate_says_how_many_tokens_were_accepted(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that drafts for itself is always right, so each pass after the prefill adds 1 + 4 tokens, by default."""
    arguments = ["generate", f"--checkpoint={gpt2}", f"--prompt={PROMPT}", "--max_new_tokens=31", "--noearly_stop"]
    found = []
    for more in ([], [f"--draft_checkpoint={gpt2}"]):
        generate.run([*arguments, "--json", "--temperature=0.5", "--seed=3", *more])
        captured = capsys.readouterr()
        found.append((json.loads(captured.out), captured.err))
    (plain, _), (drafted, err) = found
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["drafts"] == {"passes": 7, "accepted": 24}
    assert drafted["stats"]["forwards"] == 7
    assert "24 steps accepted from drafts, 3.43 per pass" in err


def test_what_is_refused(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before devices start, with exit code 2."""
    common = (f"--checkpoint={gpt2}", f"--prompt={PROMPT}")
    assert "it is a diffusion model" in fails(capsys, *common, f"--draft_checkpoint={DEMO}")
    error = fails(capsys, f"--prompt={PROMPT}", f"--draft_checkpoint={gpt2}")
    assert "only autoregressive models have one" in error
    error = fails(capsys, *common, f"--draft_checkpoint={FOLDER.parent / 'qwen3_tiny'}")
    assert re.search(r"it has 320 tokens, and the model \d+; both need the same vocabulary", error)
    other = tmp_path / "other"
    shutil.copytree(gpt2, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    ids = tokenizer["model"]["vocab"]
    first, second = sorted(ids, key=ids.get)[50:52]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    assert "it has another vocabulary" in fails(capsys, *common, f"--draft_checkpoint={other}")
    assert "--draft_checkpoint is empty" in fails(capsys, *common, "--draft_checkpoint=")
    assert "--draft_tokens requires --draft_checkpoint" in fails(capsys, *common, "--draft_tokens=2")
    assert "--draft_revision requires --draft_checkpoint" in fails(capsys, *common, "--draft_revision=main")


def test_each_model_has_its_own_revision(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all commands that generate, and in Python."""
    fetched: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **options: object) -> str:
        fetched.append((name, revision))
        return str(gpt2)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for command in (generate, batch, serve):
        values = flags.FlagValues()
        command.define_flags(values)
        for own, revision in (([], None), (["--draft_revision=v2"], "v2")):
            values(["command", "--checkpoint=a/model", "--revision=v1", "--draft_checkpoint=a/draft", *own])
            folder, _ = open_checkpoint(values)
            open_draft_checkpoint(values, folder)
            assert fetched[-2:] == [("a/model", "v1"), ("a/draft", revision)]
    Engine.load("a/model", "tensor=1", draft="a/draft", revision="v3", draft_revision="v4")
    assert fetched[-2:] == [("a/model", "v3"), ("a/draft", "v4")]


def test_a_batch_is_the_same_run_with_a_draft_model(
    gpt2: Path, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"id": name, "prompt": PROMPT, "seed": seed, "max_tokens": 20} for seed, name in enumerate("abc")]
    lines.append({"id": "d", "prompt": PROMPT, "temperature": 0, "max_tokens": 30, "draft_tokens": 2})
    more = (f"--checkpoint={gpt2}", "--mesh=data=1", "--temperature=0.2")
    source, plain, drafted = write(tmp_path / "in.jsonl", lines), tmp_path / "plain", tmp_path / "drafted"
    launch(source, plain, compiled, *more)
    capsys.readouterr()
    launch(source, drafted, compiled, *more, f"--draft_checkpoint={gpt2}")
    assert re.search(r"\d+ steps accepted from drafts", capsys.readouterr().err)
    assert (drafted / "sorted.jsonl").read_bytes() == (plain / "sorted.jsonl").read_bytes()
    launch(source, drafted, compiled, *more)  # continues the run, which is complete


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "tensor=4", "sequence=2,tensor=2"])
@pytest.mark.parametrize("temperature", [0, 0.5])
def test_two_hosts(
    gpt2: Path, tmp_path: Path, mesh: str, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes whose draft model is right now and then give the tokens of one process without drafts."""
    noisy = Path(shutil.copytree(gpt2, tmp_path / "noisy"))
    weights, noise = load_file(noisy / "model.safetensors"), np.random.default_rng(0)
    changed = {
        name: one + 0.05 * one.std() * noise.standard_normal(one.shape, np.float32) for name, one in weights.items()
    }
    save_file(changed, noisy / "model.safetensors")
    arguments = [*GENERATE, f"--checkpoint={gpt2}", f"--mesh={mesh}", f"--temperature={temperature}", "--seed=3"]
    generate.run(["generate", *arguments])
    plain = tokens(capsys.readouterr().out)
    done = local("launch.generate", *arguments, f"--draft_checkpoint={noisy}", processes=2, devices=2)
    assert done.returncode == 0, done.stderr
    assert tokens(done.stdout) == plain
    assert re.search(r"\d+ steps accepted from drafts", done.stderr)


def test_a_server_compiles_its_own_number(gpt2: Path) -> None:
    engine = Engine.load(gpt2, "tensor=1", devices=jax.devices()[:1], draft=gpt2)
    config = engine.with_end_tokens(SamplingConfig(max_new_tokens=20, temperature=0.2, draft_tokens=3))
    with served(engine, config, canvas=(64,)) as found:
        (expected,) = offline(found, [PROMPT], seed=3, draft_tokens=0)
        compiled = engine.compiled_programs
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 3}
        # The number of a request is an upper bound, and none is refused.
        for more in ({}, {"draft_tokens": 0}, {"draft_tokens": 1}, {"draft_tokens": 60}, {"prompt_lookup": 2}):
            answer = found.post("/v1/completions", body | more)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["text"] == expected.text
            bound = min(3, more.get("draft_tokens", 3))
            assert 0 <= choice["accepted_steps"] <= bound * choice["passes"]
            # All drafts are right, so only a row's last pass adds fewer tokens.
            assert choice["accepted_steps"] >= bound * (choice["passes"] - 2)
        assert engine.compiled_programs == compiled
        assert found.metric("accepted_steps_total") > 0
        assert found.post("/v1/completions", body | {"draft_tokens": 64}).status_code == 400


def test_a_server_without_a_draft_model_ignores_the_number(gpt2: Path) -> None:
    engine = Engine.load(gpt2, "tensor=1", devices=jax.devices()[:1])
    with served(engine, engine.with_end_tokens(SamplingConfig(max_new_tokens=6)), canvas=(64,)) as found:
        answer = found.post("/v1/completions", {"prompt": PROMPT, "draft_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert "accepted_steps" not in answer.json()["choices"][0]
