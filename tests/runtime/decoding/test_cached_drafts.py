"""With a KV cache, drafts change no token, no step and no log-probability, and leave the same cache after a pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from runtime import DiffusionConfig, Engine, GenerationResult, RowRequest
from runtime.execution.slot_kinds import DiffusionSlots
from tests import golden_cases
from tests.divergence import assert_same_cache, assert_same_tokens
from tests.runtime.decoding import block_rows
from tests.runtime.decoding.block_rows import BASE, BLOCK, STOPS, ragged_rows
from tests.runtime.decoding.drafted_rows import PROMPTS, marked, trained

THRESHOLD = {"parallel": "threshold", "threshold": 0.2, "algorithm": "maskgit_plus"}
# Blocks whose entry is a refresh for all, for some and for the first block only; rows have masks to fill in a prompt.
MODES: dict[str, DiffusionConfig] = {
    **{
        f"mode {number}": block_rows.mode(number)
        for number, one in enumerate(block_rows.MODES)
        if one["cache"] != "none"
    },
    **{
        f"{cache}, {name}": BASE.replace(cache=cache, block_length=BLOCK, **changes)
        for cache in ("dual", "prefix")
        for name, changes in {
            "schedule": {"refresh_blocks": 0},
            "every third step": {"refresh_blocks": 0, "refresh_interval": 3, "temperature": 0.0},
            "every second block": {"refresh_blocks": 2, **THRESHOLD},
            "suffix window": {"suffix_window": 4, "temperature": 0.0},
            "early stop": {"stop_token_ids": STOPS, "refresh_blocks": 2},
            "origin": {"algorithm": "origin", "refresh_blocks": 0, "top_k": 20},
        }.items()
    },
}
QUICK = ("mode 2", "prefix, schedule")  # dual with a threshold, sampled; prefix with the schedule
INT8 = {
    "dual": {"cache": "dual", "refresh_blocks": 0},
    "dual, greedy": {"cache": "dual", "refresh_blocks": 2, "temperature": 0.0},
    "prefix": {"cache": "prefix", "refresh_blocks": 2},
    "prefix, greedy": {"cache": "prefix", "refresh_blocks": 0, "temperature": 0.0, **THRESHOLD},
}
CODE = DiffusionConfig(40, steps=40, algorithm="entropy", block_length=8)
TRAINED: dict[str, DiffusionConfig] = {
    "dual": CODE.replace(cache="dual"),
    "dual, threshold": CODE.replace(cache="dual", algorithm="maskgit_plus", parallel="threshold", threshold=0.6),
    "dual, entered": CODE.replace(cache="dual", refresh_blocks=0, temperature=0.2, top_p=0.95, seed=1),
    "prefix": CODE.replace(cache="prefix", refresh_blocks=0, refresh_interval=9),
    "fast_dllm": DiffusionConfig.fast_dllm(40, block_length=16),
    "suffix window": CODE.replace(cache="dual", suffix_window=8),
}
MESHES = ("data=2", "sequence=4", "tensor=4", "data=2,sequence=2,tensor=2")


@functools.cache
def engine(kv_cache: str = "model") -> Engine:
    if kv_cache == "model":
        return golden_cases.engine()
    return Engine.load(golden_cases.FOLDER, "data=1", dtype="float32", kv_cache=kv_cache)


def check(
    own: Engine, ids: Any, mask: Any, config: DiffusionConfig, drafts: int, atol: float = 1e-4
) -> GenerationResult:
    """Check a run with drafts against the same run without, and its counts; return it."""
    config = config.replace(log_probabilities=True)
    plain = own.generate_tokens(ids, mask, config, history=True)
    found = own.generate_tokens(ids, mask, config.replace(draft_steps=drafts), history=True)
    np.testing.assert_array_equal(found.sequences, plain.sequences)
    np.testing.assert_array_equal(found.history, plain.history)
    np.testing.assert_array_equal(found.commit_steps, plain.commit_steps)
    np.testing.assert_allclose(found.log_probabilities, plain.log_probabilities, atol=atol)
    assert found.stats.tokens == plain.stats.tokens
    # All rows start together, so the slowest one decides how many passes there are.
    assert plain.stats.forwards == max(own.passes + own.accepted for own in found.drafts)
    assert found.stats.forwards == max(own.passes for own in found.drafts)
    assert found.stats.row_passes == sum(own.passes for own in found.drafts)
    assert found.stats.accepted_steps == sum(own.accepted for own in found.drafts)
    assert all(0 <= own.accepted <= drafts * own.passes for own in found.drafts)
    return found


@pytest.mark.parametrize("name", marked(MODES, QUICK))
@pytest.mark.parametrize("drafts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_modes(name: str, drafts: int) -> None:
    check(engine(), *ragged_rows(), MODES[name], drafts)


@pytest.mark.parametrize("name", marked(INT8, ("dual",)))
@pytest.mark.parametrize("drafts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_int8_cache(name: str, drafts: int) -> None:
    """Log-probabilities may differ by a part of an int8 step, see :func:`assert_same_cache`."""
    config = BASE.replace(block_length=BLOCK, **INT8[name])
    check(engine("int8"), *ragged_rows(), config, drafts, atol=1e-2)


def caches(own: Engine, config: DiffusionConfig, tokens: list[int]) -> dict[int, Any]:
    """Run a row, and return its cache after each pass, by the number of steps made so far."""
    slots = DiffusionSlots(own.runner, config, own.runner.bucket(len(tokens) + config.max_new_tokens), 1)
    slots.insert({0: RowRequest(tokens, config, 0)})
    found: dict[int, Any] = {}
    done = False
    while not done:
        done = bool(slots.run(1).all())
        steps = int(slots.state.made_steps[0]) if config.drafts else len(found) + 1
        found[steps] = jax.tree.map(lambda leaf: np.array(leaf), slots.state.cache)
    return found


@pytest.mark.parametrize(
    ("kv_cache", "changes", "drafts"),
    [
        ("model", {"cache": "prefix", "refresh_blocks": 0}, 1),
        *[
            pytest.param(kv_cache, changes, 3, marks=pytest.mark.slow)
            for kv_cache in ("model", "bfloat16", "int8")
            for changes in (
                {"cache": "dual", "refresh_blocks": 0},
                {"cache": "dual", "refresh_blocks": 2, "refresh_interval": 5},
                {"cache": "prefix", "refresh_blocks": 2},
                {"cache": "prefix", "suffix_window": 3},
            )
        ],
    ],
)
def test_the_cache_after_every_pass(kv_cache: str, changes: dict[str, Any], drafts: int) -> None:
    """After a pass, the cache is that of the run without drafts after as many steps."""
    own, config = engine(kv_cache), BASE.replace(block_length=BLOCK, temperature=0.0, **changes)
    tokens = ragged_rows()[0][0].tolist()
    plain, drafted = (caches(own, config.replace(draft_steps=count), tokens) for count in (0, drafts))
    assert len(drafted) < len(plain) == max(drafted)  # some pass made several steps
    for steps, cache in drafted.items():
        assert_same_cache(cache, plain[steps], [len(tokens) + config.max_new_tokens])


@pytest.mark.parametrize("name", marked(TRAINED, ("dual",)))
def test_a_trained_model_needs_fewer_passes(name: str) -> None:
    own = trained("data=1")
    found = check(own, *own.encode(PROMPTS), TRAINED[name], 3)
    assert all(own.accepted > 0 for own in found.drafts)


def test_positions_of_all_canvases_are_counted() -> None:
    """A refresh computes the canvas, and any other pass the block's window of each of the four canvases."""
    own = trained("data=1")
    prompt, config = own.tokenizer.encode(PROMPTS[0]), TRAINED["dual"].replace(max_new_tokens=16, steps=16)
    plain, found = (own.generate_tokens([prompt], None, config.replace(draft_steps=drafts)).stats for drafts in (0, 3))
    refreshes, window = 2, 1 + 8
    whole = refreshes * (len(prompt) + 16)
    assert plain.positions == whole + (plain.forwards - refreshes) * window
    assert found.positions == whole + (found.forwards - refreshes) * 4 * window
    assert found.forwards + found.accepted_steps == plain.forwards
    assert found.accepted_steps > 0


def test_every_step_is_a_refresh() -> None:
    """Then there is nothing to guess from, and the program is the one without drafts."""
    config = BASE.replace(cache="dual", block_length=BLOCK, refresh_interval=1, max_new_tokens=8, steps=8)
    own = engine()
    plain = own.generate_tokens([[5, 6, 7]], None, config)
    compiled = own.compiled_programs
    found = own.generate_tokens([[5, 6, 7]], None, config.replace(draft_steps=2))
    assert own.compiled_programs == compiled
    np.testing.assert_array_equal(found.sequences, plain.sequences)
    assert found.drafts == []


@pytest.mark.slow
@pytest.mark.parametrize("interval", [2, 3])
def test_intervals_count_denoise_steps(interval: int) -> None:
    """Refreshes are at the same steps with drafts and without, so they are as many."""
    config = CODE.replace(cache="dual", refresh_blocks=0, refresh_interval=interval)
    own = trained("data=1")
    prompt = own.tokenizer.encode(PROMPTS[0])
    slots = [
        DiffusionSlots(own.runner, config.replace(draft_steps=drafts), own.runner.bucket(len(prompt) + 40), 1)
        for drafts in (0, 3)
    ]
    for one, drafts in zip(slots, (0, 3), strict=True):
        one.insert({0: RowRequest(prompt, config.replace(draft_steps=drafts), 0)})
        assert one.run().all()
    plain, drafted = (int(one.state.refreshes[0]) for one in slots)
    steps = int(slots[1].state.made_steps[0])
    assert steps > 30
    assert drafted == plain == -(-steps // interval)
    assert slots[0].iterations == steps
    # With an interval of 2, every other step is a refresh, and so no step can follow in a pass.
    assert (slots[1].iterations < steps) == (interval > 2)
    assert slots[1].iterations <= steps


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh: str, name: str) -> None:
    config, alone = TRAINED[name], trained("data=1")
    ids, mask = alone.encode(PROMPTS)
    expected = alone.generate_tokens(ids, mask, config, history=True)
    found = trained(mesh).generate_tokens(ids, mask, config.replace(draft_steps=3), history=True)
    real = np.pad(mask, ((0, 0), (0, config.max_new_tokens)), constant_values=1)
    assert found.history is not None
    assert expected.history is not None
    assert_same_tokens(found.history, expected.history, real, alone, config)
    assert found.stats.accepted_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_infilling_before_a_suffix(cache: str) -> None:
    ids, mask = ragged_rows()
    config = BASE.replace(cache=cache, block_length=BLOCK, refresh_blocks=2)
    suffixes, own = [[7, 8, 9], [5], [], [6, 6]], engine()
    plain = own.generate_tokens(ids, mask, config, suffixes=suffixes, history=True)
    found = own.generate_tokens(ids, mask, config.replace(draft_steps=2), suffixes=suffixes, history=True)
    np.testing.assert_array_equal(found.history, plain.history)
    np.testing.assert_array_equal(found.commit_steps, plain.commit_steps)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_a_row_may_ask_for_fewer_drafts_than_its_slots_have(cache: str) -> None:
    own = trained("data=1")
    config = CODE.replace(cache=cache, draft_steps=3, max_new_tokens=24, steps=24)
    prompt = own.tokenizer.encode(PROMPTS[0])
    slots = DiffusionSlots(own.runner, config, own.runner.bucket(len(prompt) + 24), 4)
    requests = [RowRequest(prompt, config.replace(draft_steps=count), 0) for count in (0, 1, 3, 60)]
    slots.insert(dict(enumerate(requests)))
    assert slots.run().all()
    found = slots.collect(dict(enumerate(enumerate(requests))))
    assert len({tuple(one.sequence) for one in found}) == 1
    stats = [one.drafts for one in found if one.drafts is not None]
    assert len({one.passes + one.accepted for one in stats}) == 1
    assert stats[0].accepted == 0
    assert stats[1].accepted <= stats[1].passes
    assert stats[3] == stats[2]
    assert stats[2].passes < stats[0].passes


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_rows_that_come_and_go(cache: str) -> None:
    """Rows are inserted, moved and evicted between passes, with their drafts and their cache."""
    config = BASE.replace(cache=cache, block_length=BLOCK, refresh_blocks=0, stop_token_ids=STOPS, draft_steps=3)
    own, (ids, mask) = engine(), ragged_rows()
    prompts = [row[real > 0].tolist() for row, real in zip(ids, mask, strict=True)] * 3
    requests = [RowRequest(prompt, config, seed) for seed, prompt in enumerate(prompts)]
    drafted = {one.number: one for some in own.scheduler(requests, slots=3).run() for one in some}
    for number, request in enumerate(requests):
        tokens = np.array([request.tokens])
        alone = own.generate_tokens(tokens, None, config.replace(draft_steps=0, seed=[request.seed]))
        np.testing.assert_array_equal(drafted[number].sequence, alone.sequences[0])


def test_memory_counts_all_windows() -> None:
    runner = engine().runner

    def parts(canvases: int, window: int) -> dict[str, int]:
        memory = runner.memory(8, 512, True, canvases, window)
        return {one.name: one.bytes for one in (*memory.resident, *memory.peak)}

    plain, few, many = parts(1, 0), parts(4, 9), parts(64, 33)
    layer = runner.layout.config
    kept = 2 * layer.num_layers * layer.num_kv_heads * layer.head_dim * 4  # bytes of a position
    assert plain["cache of keys and values"] == few["cache of keys and values"] == 8 * 512 * kept
    assert "keys and values of drafts" not in plain
    assert few["keys and values of drafts"] == 8 * 4 * 9 * kept
    assert few["residual and norms"] == plain["residual and norms"]  # those of refreshes
    assert many["residual and norms"] > 2 * plain["residual and norms"]
