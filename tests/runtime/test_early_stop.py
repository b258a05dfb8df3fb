"""Rows that stop early at an end token: where they stop, and that the tokens before the end are unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import DEMO
from runtime import DiffusionConfig, Engine, GenerationResult, SamplingConfig
from tests import golden_cases
from tests.runtime.decoding.block_rows import BASE, BLOCK, ragged_rows

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = ["def is_even(number):\n", "def add(a, b):\n"]
IN_BLOCKS = {"block_length": BLOCK}
DIFFUSION: dict[str, dict[str, Any]] = {
    "exact": {},
    "origin": {"algorithm": "origin"},
    "blocks": IN_BLOCKS,
    "threshold": {"parallel": "threshold", "threshold": 0.2},
    "factor": {"parallel": "factor", "factor": 1.5, **IN_BLOCKS},
    "prefix": {"cache": "prefix", **IN_BLOCKS},
    "dual": {"cache": "dual", "refresh_blocks": 0, **IN_BLOCKS},
    "dual, threshold": {"cache": "dual", "parallel": "threshold", "threshold": 0.2, **IN_BLOCKS},
}
SLOW = ("origin", "blocks", "factor", "prefix")


def ending_with(engine: Engine, *tokens: int) -> Engine:
    """The same model with other end tokens."""
    own = Engine(engine.layout, engine.weights)
    own.config = replace(engine.config, end_token_ids=tokens)
    return own


def check(engine: Engine, ids: np.ndarray, mask: np.ndarray, config: DiffusionConfig | SamplingConfig) -> None:
    """Check that early stop changes no token before the end, costs less, and leaves uncounted padding after it."""
    width = ids.shape[1]
    whole = engine.generate_tokens(ids, mask, config)
    new = whole.sequences[:, width:]
    stop = int(new[1, new.shape[1] // 2])
    own = ending_with(engine, stop)

    def run(early_stop: bool | None) -> GenerationResult:
        return own.generate_tokens(ids, mask, config.replace(early_stop=early_stop))

    for full in (run(None), run(False)):
        np.testing.assert_array_equal(full.sequences, whole.sequences)
        assert full.stats.positions == whole.stats.positions
    found = run(True)
    assert found.stats.positions < whole.stats.positions
    assert found.stats.masks_left == 0
    counted = 0
    for row, tokens in enumerate(new):
        ends = np.flatnonzero(tokens == stop)
        end = width + (int(ends[0]) + 1 if ends.size else len(tokens))
        np.testing.assert_array_equal(found.sequences[row, :end], whole.sequences[row, :end])
        counted += int((found.commit_steps[row, :end] >= 0).sum())
        never = found.commit_steps[row, end:] < 0
        assert (found.sequences[row, end:][never] == engine.config.pad_token_id).all()
    assert found.stats.tokens == counted


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if mode in SLOW else ()) for mode in DIFFUSION]
)
def test_diffusion_rows_are_the_same_up_to_their_end(mode: str) -> None:
    algorithm = "maskgit_plus" if "parallel" in DIFFUSION[mode] else BASE.algorithm
    check(golden_cases.engine(), *ragged_rows(), BASE.replace(**{"algorithm": algorithm} | DIFFUSION[mode]))


@pytest.mark.parametrize("folder", ["qwen3_tiny", pytest.param("qwen3_tied_tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_autoregressive_rows_are_the_same_up_to_their_end(folder: str, use_cache: bool) -> None:
    golden = golden_cases.engine(folder=GOLDEN / folder)
    check(golden, *ragged_rows(), SamplingConfig(max_new_tokens=12, temperature=0.9, use_cache=use_cache, seed=3))


def test_a_stop_token_that_fills_a_mask_of_the_prompt_ends_nothing() -> None:
    engine = golden_cases.engine()
    ids, mask = ragged_rows()
    row = ids[:1]
    masked = np.flatnonzero(row[0] == engine.config.mask_token_id)
    whole = engine.generate_tokens(row, mask[:1], BASE)
    filled = int(whole.sequences[0, masked[0]])
    assert filled not in whole.sequences[0, row.shape[1] :]
    found = engine.generate_tokens(row, mask[:1], BASE.replace(stop_token_ids=[filled]), history=True)
    np.testing.assert_array_equal(found.sequences, whole.sequences)
    assert found.history is not None
    np.testing.assert_array_equal(found.history[-1], whole.sequences)


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine.load(DEMO, "tensor=1")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache": "dual", "block_length": 8, "parallel": "threshold"},
        pytest.param({"cache": "prefix", "block_length": 8}, marks=pytest.mark.slow),
        pytest.param({"block_length": 8, "parallel": "factor"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_texts_are_those_of_the_full_canvas(
    demo: Engine, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[GenerationResult] = []
    generate_tokens = demo.generate_tokens

    def keep(*arguments: Any, **more: Any) -> GenerationResult:
        made.append(generate_tokens(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(demo, "generate_tokens", keep)
    config = DiffusionConfig.published(32, seed=[1, 2], **changes)
    early = demo.generate(PROMPTS, config)
    assert early == demo.generate(PROMPTS, config.replace(early_stop=True))
    full = demo.generate(PROMPTS, config.replace(early_stop=False))
    assert [replace(one, masks_left=0) for one in full] == early
    assert {one.finish_reason for one in early} == {"stop"}
    ended, _, whole = made
    assert ended.stats.forwards < whole.stats.forwards / 2
    # Including its end token.
    assert ended.stats.tokens == sum(len(one.tokens) + 1 for one in early)
    assert whole.stats.tokens == 2 * 32
    # A stream ends with its text in any case, so its text does not tell whether the row ended on the device too.
    stops: list[Any] = []
    stream_tokens = demo.stream_tokens

    def watch(ids: Any, mask: Any, config: DiffusionConfig, **more: Any) -> Iterator[Any]:
        stops.append(config.stop_token_ids)
        return stream_tokens(ids, mask, config, **more)

    monkeypatch.setattr(demo, "stream_tokens", watch)
    for early_stop in (None, False):
        streamed = demo.stream(PROMPTS[0], config.replace(seed=[1], early_stop=early_stop))
        assert "".join(streamed) == early[0].text
    assert stops == [demo.end_token_ids, ()]


def test_a_configuration_that_does_not_say_leaves_it_to_the_call(demo: Engine) -> None:
    ends = demo.end_token_ids
    assert DiffusionConfig().early_stop is SamplingConfig().early_stop is DiffusionConfig.published().early_stop is None
    for config in (DiffusionConfig(), SamplingConfig()):
        decided = config.with_end_tokens(ends, default=True)
        assert (decided.early_stop, decided.stop_token_ids) == (True, ends)
        assert decided.with_end_tokens(ends, default=False) == decided
        assert config.with_end_tokens(ends, default=False) == config.replace(early_stop=False)
        own = config.replace(early_stop=False, stop_token_ids=(6,))
        assert own.with_end_tokens(ends, default=True) == own, (
            "an explicit early_stop and the configuration's own stop tokens are kept"
        )
        both = config.replace(early_stop=True, stop_token_ids=(6, ends[0]))
        assert both.with_end_tokens(ends, default=False).stop_token_ids == (6, *ends)


def test_steps_of_a_watched_row_are_denoise_steps(demo: Engine) -> None:
    """Also if the row may stop early; the last canvas equals the result."""
    ids, mask = demo.encode(PROMPTS[:1])
    config = DiffusionConfig.published(16, steps=32, early_stop=True)
    found = demo.generate_tokens(ids, mask, config, history=True)
    assert found.history is not None
    seen = list(demo.stream_tokens(ids, mask, config, every=1))
    assert len(seen) < 32
    for step, canvas in seen[1:-1]:
        np.testing.assert_array_equal(canvas, found.history[step - 1])
    assert seen[-1][0] == 32
    np.testing.assert_array_equal(seen[-1][1], found.sequences)
