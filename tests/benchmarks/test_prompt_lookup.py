"""The benchmark of prompt lookup: passes of a known text, and the margin of a difference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from benchmarks.prompt_lookup import edits, margin, measure_random, passes_to_write, scores_of, with_draft_model
from runtime import Engine, SamplingConfig
from runtime.decoding.prompt_lookup import look_up
from tests.golden_cases import FOLDER


@pytest.mark.parametrize(
    ("prompt", "new", "passes"),
    [
        ([1, 2, 3, 4, 9, 1], [2, 3, 4], 2),  # the first token is the prefill's; 3 and 4 are guessed in one pass
        ([1, 2, 3, 4, 9, 1], [2, 3, 5, 6], 3),  # 3 is right, 5 is drawn in the same pass, and nothing matches 5
        ([1, 2, 3], [7, 5, 6], 3),
    ],
)
def test_passes_to_write_a_text(prompt: list[int], new: list[int], passes: int) -> None:
    assert passes_to_write(prompt, new, partial(look_up, 2)) == passes


def test_passes_to_write_a_text_are_those_of_an_engine_that_writes_it() -> None:
    engine, prompt = Engine.load(FOLDER.parent / "qwen3_tiny", "tensor=1"), [5, 6, 7]
    found = engine.generate_tokens([prompt], None, SamplingConfig(40, prompt_lookup=3))
    assert (
        passes_to_write(prompt, found.sequences[0, len(prompt) :].tolist(), partial(look_up, 3)) == found.stats.forwards
    )
    assert found.stats.forwards < 40


def test_a_draft_model_of_the_same_weights_saves_passes() -> None:
    config = Engine.load(FOLDER.parent / "qwen3_tiny", "tensor=1").config
    engine = with_draft_model(Engine.random(config, "data=1", "float32"))
    (row,) = measure_random(engine, [[5, 6, 7]], SamplingConfig(24), [3], "draft_tokens")
    assert (row["workload"], row["equal"]) == ("draft model, greedy", 1)
    assert row["forwards_per_token"] < 0.6


def test_edits_rename_a_parameter() -> None:
    for prompt, edited in edits(5):
        assert "renamed" in edited
        assert "renamed" not in prompt
        assert len(edited.splitlines()) == len(prompt.splitlines()) - 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_margin_of_a_difference(temperature: float) -> None:
    """A token that was drawn has the largest score, so the gap to any other token is its margin."""
    engine = Engine.load(FOLDER.parent / "qwen3_tiny", "tensor=1")
    prompt, config = [5, 6, 7], SamplingConfig(6, temperature=temperature, seed=4)
    (plain,) = engine.generate_tokens([prompt], None, config).sequences
    assert margin(engine, plain, plain, len(prompt), config) is None
    for place in range(len(prompt), len(plain)):
        scores = scores_of(engine, plain[:place], len(prompt), config)
        assert int(np.argmax(scores)) == plain[place]
        changed = np.array(plain)
        changed[place:] = second = int(np.argsort(scores)[-2])
        gap = margin(engine, changed, plain, len(prompt), config)
        assert gap == pytest.approx(scores[plain[place]] - scores[second])
