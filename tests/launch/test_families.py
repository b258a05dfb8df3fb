"""Every family through the commands: ``generate`` with its pages, ``batch``, the server, ``doctor`` and lm-eval."""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch import doctor, generate, serve, verify
from launch.display import canvas_view
from launch.display.watch import MASK, CanvasWatcher
from runtime import Completion, DiffusionConfig, Engine, InputError
from tests.launch.family_folders import FAMILIES, SUFFIX, takes_suffix, write_family
from tests.launch.mistakes import refusal
from tests.launch.served import served
from tests.launch.small_batches import launch, results, write

NEW = 6
PROMPTS = ["def f(x):\n", "import os\n"]


class Checkpoint:
    """A family's checkpoint, and what the engine generates from it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.path = family, write_family(folder, family)

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine.load(self.path, "data=1")

    @property
    def config(self) -> DiffusionConfig:
        found = self.engine.published(max_new_tokens=NEW, temperature=0.0)
        assert isinstance(found, DiffusionConfig)
        return found

    @property
    def suffixes(self) -> list[str]:
        return [SUFFIX, ""] if takes_suffix(self.family) else []

    @functools.cached_property
    def completions(self) -> list[Completion]:
        """The completions of the prompts, with their suffixes if the family takes any."""
        return self.engine.generate(PROMPTS, self.config, suffixes=self.suffixes)

    @functools.cached_property
    def without_suffix(self) -> list[Completion]:
        return self.engine.generate(PROMPTS, self.config)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def test_generate_shows_the_canvas(
    checkpoint: Checkpoint, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """``--watch`` in a terminal and ``--history_html`` show prompt, middle and suffix."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, color_system=None)
    monkeypatch.setattr(canvas_view, "CanvasWatcher", functools.partial(CanvasWatcher, console=terminal))
    page = tmp_path / "history.html"
    flags = [f"--prompt={text}" for text in PROMPTS] + [f"--suffix={text}" for text in checkpoint.suffixes]
    flags += [f"--checkpoint={checkpoint.path}", "--mesh=data=1", f"--max_new_tokens={NEW}", "--temperature=0"]
    generate.run(["generate", *flags, f"--compile_cache={compiled}", "--watch", f"--history_html={page}", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [one.text for one in checkpoint.completions]
    frames = terminal.file.getvalue().split("step ")  # type: ignore[attr-defined]
    first, last = frames[1], frames[-1]
    assert first.count(MASK) > last.count(MASK)
    assert "def f(x):" in last
    assert ("return y" in last) == takes_suffix(checkpoint.family)
    assert page.read_text("utf-8").count('"return",-1') == takes_suffix(checkpoint.family)


def test_a_batch(checkpoint: Checkpoint, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = [{"id": str(number), "prompt": text} for number, text in enumerate(PROMPTS)]
    if takes_suffix(checkpoint.family):
        lines[0]["suffix"] = SUFFIX
    flags = [f"--checkpoint={checkpoint.path}", "--mesh=data=1", f"--max_new_tokens={NEW}", "--temperature=0"]
    launch(write(tmp_path / "in.jsonl", lines), tmp_path / "out", compiled, *flags, "--slots=1")
    found = {record["id"]: record for record in results(tmp_path / "out")}
    for number, expected in enumerate(checkpoint.completions):
        assert found[str(number)]["text"] == expected.text
        assert found[str(number)]["tokens"] == expected.tokens
        assert found[str(number)]["finish_reason"] == expected.finish_reason


def test_a_batch_names_lines_that_the_family_cannot_run(
    checkpoint: Checkpoint, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything runs: the output folder is not made. A flag is refused once, not for each line."""
    fields = REFUSED[checkpoint.family]
    source = write(
        tmp_path / "in.jsonl", [{"id": str(number), "prompt": "x"} | one for number, one in enumerate(fields)]
    )
    said = refusal(capsys, lambda: launch(source, tmp_path / "out", compiled, f"--checkpoint={checkpoint.path}"))
    for number, one in enumerate(fields, 1):
        (name,) = one
        assert re.search(rf"{source}:{number}: {name}.* is not available for {checkpoint.family} models", said)
    (name, value), *_ = fields[0].items()
    flags = [f"--checkpoint={checkpoint.path}", f"--{name}={value}"]
    said = refusal(capsys, lambda: launch(source, tmp_path / "out", compiled, *flags))
    assert f"{name}={value} is not available for {checkpoint.family} models" in said
    assert str(source) not in said
    assert not (tmp_path / "out").exists()


# Fields of a request that a family refuses by name
REFUSED: dict[str, list[dict[str, Any]]] = {
    "llada": [{"algorithm": "entropy"}, {"sub_block_length": 4}],
    "fast_dllm_v2": [{"cache": "dual"}, {"suffix": "x"}],
    "sdar": [{"cache": "prefix"}, {"suffix": "x"}],
    "dreamon": [{"cache": "dual"}, {"cfg_scale": 1.0}],
}


BLOCK_CAUSAL = ("sdar", "fast_dllm_v2")


def test_a_server(checkpoint: Checkpoint) -> None:
    with served(checkpoint.engine, checkpoint.config, name="own", canvas=(64,)) as there:
        bodies = [{"model": "own", "prompt": text, "max_tokens": NEW, "temperature": 0.0} for text in PROMPTS]
        if takes_suffix(checkpoint.family):
            bodies[0]["suffix"] = SUFFIX
        answers = [there.post("/v1/completions", body) for body in bodies]
        wrong = there.post("/v1/completions", bodies[1] | REFUSED[checkpoint.family][0])
        if checkpoint.family in BLOCK_CAUSAL:  # the attention mask is compiled for the model's own blocks
            other = there.post("/v1/completions", bodies[1] | {"block_length": 16})
            assert (other.status_code, other.json()["error"]["param"]) == (400, "block_length")
    for answer, expected in zip(answers, checkpoint.completions, strict=True):
        [choice] = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    assert wrong.status_code == 400
    assert "not available for" in wrong.json()["error"]["message"]


def test_a_server_names_what_the_family_cannot_run(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is loaded, by flag and by mode."""
    (name, value), *_ = REFUSED[checkpoint.family][0].items()
    for flag in (f"--{name}={value}", f"--mode={name}={value}"):
        said = refusal(capsys, lambda flag=flag: serve.run(["serve", f"--checkpoint={checkpoint.path}", flag]))  # type: ignore[misc]
        assert f"{name}={value} is not available for {checkpoint.family} models" in said
        assert "mesh" not in said
    if checkpoint.family in BLOCK_CAUSAL:
        wide = ["serve", f"--checkpoint={checkpoint.path}", "--block_length=1024", "--canvas=512"]
        assert "--canvas=512 is narrower than a block of 1024" in refusal(capsys, lambda: serve.run(wide))


def test_doctor(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    verify.run(["verify", f"--checkpoint={checkpoint.path}", "--write_manifest"])
    capsys.readouterr()
    flags = ["--megabytes=0.001", "--mesh=data=1", "--compile_cache="]
    doctor.run(["doctor", f"--checkpoint={checkpoint.path}", *flags])
    report = capsys.readouterr().out
    assert "for a batch of 16: --mesh=" in report
    assert "bytes intact" in report
    assert "GB of float32 weights on each device" in report


def test_lm_eval(checkpoint: Checkpoint) -> None:
    """The harness's generations are those of the engine. Families without a likelihood estimate refuse by name."""
    pytest.importorskip("lm_eval.api.model")
    from launch.harness.model import HarnessModel

    model = HarnessModel(str(checkpoint.path), mesh="data=1", slots=2, mc_samples=4)
    asked = {"until": [], "max_gen_toks": NEW}
    texts = model.generate_until([SimpleNamespace(args=(text, asked)) for text in PROMPTS])
    assert texts == [one.text for one in checkpoint.without_suffix]
    pair = [SimpleNamespace(args=("def f(", "x):"))]
    if checkpoint.family == "llada":
        [(value, greedy)] = model.loglikelihood(pair)
        assert value < 0
        assert greedy is False
        return
    why = "block-causal models" if checkpoint.family != "dreamon" else "models whose canvas changes its length"
    with pytest.raises(InputError, match=f"estimate_log_likelihoods does not support {why}"):
        model.loglikelihood(pair)
