"""Prompt lookup changes no token and no log-probability of any row, and saves passes of rows that repeat themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from runtime import (
    DraftStats,
    Engine,
    Executor,
    PoolShape,
    RequestHandle,
    RowFinished,
    RowRequest,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
)
from runtime.decoding.kinds import ParameterError
from runtime.decoding.prompt_lookup import LONGEST_MATCH, accept, look_up
from runtime.execution.autoregressive_slots import AutoregressiveSlots
from runtime.models.families import parse_config
from tests.runtime import test_non_finite
from tests.runtime.decoding.drafted_tokens import (
    CONFIGS,
    GREEDY,
    MESHES,
    QWEN3,
    SAMPLED,
    check,
    gather,
    ragged,
    requests,
    same,
    same_caches,
    same_rows,
)


@functools.cache
def engine(mesh: str = "tensor=1", kv_cache: str = "model", folder: Path = QWEN3) -> Engine:
    return Engine.load(folder, mesh, kv_cache=kv_cache)


def plain_look_up(count: int, row: Sequence[int]) -> list[int]:
    """Return the drafts of one row, written without arrays."""
    made = list(row)
    for size in range(min(LONGEST_MATCH, len(row) - 1), 0, -1):
        for end in range(len(row) - 2, size - 2, -1):
            if row[end - size + 1 : end + 1] == row[len(row) - size :]:
                for place in range(count):
                    made.append(made[end + 1 + place])
                return made[len(row) :]
    return [row[-1]] * count


@pytest.mark.parametrize("count", [1, 4, 9])
def test_drafts_follow_the_last_longest_match(count: int) -> None:
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 25, 200)
    rows = [generator.integers(0, 2 + number % 5, length).tolist() for number, length in enumerate(lengths)]
    # What follows a row's end must not matter.
    tokens = generator.integers(0, 3, (len(rows), 25))
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    found = look_up(count, jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
    assert np.asarray(found).tolist() == [plain_look_up(count, row) for row in rows]


def test_a_draft_counts_if_all_before_it_are_right() -> None:
    drafts = jnp.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    drawn = jnp.array([[1, 2, 3, 4]] * 4)
    goes_on = jnp.array([[True] * 3] * 3 + [[True, False, True]])
    assert np.asarray(accept(drafts, drawn, goes_on)).sum(axis=1).tolist() == [4, 2, 1, 2]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("drafts", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_the_same_tokens(name: str, drafts: int) -> None:
    check(engine(), CONFIGS[name], drafts)


def test_the_same_tokens_with_an_int8_cache() -> None:
    check(engine(kv_cache="int8"), GREEDY, 4)


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("tensor=2", marks=pytest.mark.slow)])
def test_an_int8_cache_is_that_of_a_run_without_drafts(mesh: str) -> None:
    """After each pass, up to values that are rounded to the other integer. Only these may change a sampled token."""
    own = engine(mesh, "int8")
    same_caches(own, SAMPLED, SAMPLED.replace(prompt_lookup=4))


def test_no_drafts_without_a_cache() -> None:
    config = GREEDY.replace(max_new_tokens=5, use_cache=False)
    found = engine().generate_tokens(*ragged(), config.replace(prompt_lookup=3))
    same(found, engine().generate_tokens(*ragged(), config))
    assert found.drafts == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh: str, name: str) -> None:
    check(engine(mesh), CONFIGS[name], 4, engine().generate_tokens(*ragged(), CONFIGS[name]))


def test_a_row_that_repeats_itself_needs_fewer_passes() -> None:
    """Greedy text of a random model ends in a cycle, which lookup then continues."""
    own, config = engine(), GREEDY.replace(max_new_tokens=200)
    ids, mask = ragged()
    expected = own.generate_tokens(ids[2:3], mask[2:3], config)
    found = own.generate_tokens(ids[2:3], mask[2:3], config.replace(prompt_lookup=7))
    same(found, expected)
    assert expected.stats.forwards == 200
    assert found.stats.forwards < 100
    assert found.drafts == [DraftStats(found.stats.forwards, 200 - found.stats.forwards)]


@pytest.mark.parametrize("new", [1, 2, 17])
def test_the_last_position_of_the_model(new: int) -> None:
    """A pass may reach beyond a row's end. GPT-2 has no embedding there, and the bucket of the row is wider."""
    sizes = {"vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 30}
    own = Engine.random(parse_config({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}), "data=1")
    ids = np.resize([3, 1, 4], (2, 30 - new)).astype(np.int32)
    config = SamplingConfig(max_new_tokens=new, log_probabilities=True)
    same(own.generate_tokens(ids, None, config.replace(prompt_lookup=9)), own.generate_tokens(ids, None, config))


def test_samples_of_one_prompt() -> None:
    ids, mask = ragged()
    config = SAMPLED.replace(temperature=0.9)
    expected = engine().generate_tokens(ids, mask, config, num_return_sequences=3)
    found = engine().generate_tokens(ids, mask, config.replace(prompt_lookup=3), num_return_sequences=3)
    same(found, expected)


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2,sequence=2,tensor=2", marks=pytest.mark.slow)])
def test_rows_that_come_and_go(mesh: str) -> None:
    """Rows are inserted, read in chunks, moved and evicted between passes."""
    expected = gather(engine(), requests(SAMPLED))
    found = gather(engine(mesh), requests(SAMPLED.replace(prompt_lookup=4)))
    assert sorted(found) == sorted(expected)
    for number, result in found.items():
        same_rows(result, expected[number])
        assert result.drafts is not None
    assert sum(one.drafts.accepted for one in found.values() if one.drafts) > 0


def test_rows_grow_into_wider_buckets_in_time() -> None:
    """A pass adds up to nine tokens, so a row moves before it could outgrow its bucket."""
    config = GREEDY.replace(max_new_tokens=170, prompt_lookup=8)
    executor = Executor(engine().runner, [PoolShape(config, 192, 2, widths=(48, 96, 144), max_programs=4)])
    scheduler = Scheduler([pool.limits for pool in executor.pools], SchedulerPolicy(2, step_seconds=None))
    ids, mask = ragged()
    asked = [RowRequest(row[own > 0].tolist(), config, 5) for row, own in zip(ids[1:], mask[1:], strict=True)]
    handle = RequestHandle(rows=asked)
    scheduler.add(handle)
    widths, found = set(), {}
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(0.0)
        widths |= {bucket.width for pool in plan.pools for bucket in pool.buckets}
        events = scheduler.update(executor.execute(plan), 0.0)
        found |= {event.index: event.result for event in events if isinstance(event, RowFinished)}
    assert len(widths) > 1
    assert scheduler.stats.moves > 0
    plain = [RowRequest(one.tokens, config.replace(prompt_lookup=0), one.seed) for one in asked]
    expected = gather(engine(), plain)
    for number, result in found.items():
        same_rows(result, expected[number])
    assert scheduler.stats.accepted_steps == sum(one.drafts.accepted for one in found.values())
    assert scheduler.stats.accepted_steps > scheduler.stats.busy_iterations


def test_a_row_may_ask_for_fewer_drafts_than_its_slots_have() -> None:
    """The value of a row is an upper bound, so one program serves all rows, as in a server."""
    own, config = engine(), GREEDY.replace(max_new_tokens=40, prompt_lookup=6)
    slots = AutoregressiveSlots(own.runner, config, own.runner.bucket(41), 4, 1)
    asked = [RowRequest([ragged()[0][2, -1]], config.replace(prompt_lookup=count), 0) for count in (0, 1, 6, 60)]
    slots.insert(dict(enumerate(asked)))
    assert slots.run().all()
    found = slots.collect(dict(enumerate(enumerate(asked))))
    assert len({tuple(one.sequence) for one in found}) == 1
    none, one, all_, more = [own.drafts for own in found]
    assert none == DraftStats(40, 0)
    assert one is not None
    assert all_ is not None
    assert 0 < one.accepted <= one.passes
    assert all_.passes < one.passes
    assert more == all_


def test_logits_that_are_not_finite_end_a_row_where_they_do_without_drafts(tmp_path: Path) -> None:
    """Rows 0 and 1 generate a token whose embedding is NaN, amid the tokens of a pass or not."""
    own, config = engine(), GREEDY.replace(max_new_tokens=60)
    prompts = [[9], [4, 4, 9], [8, 7]]
    whole = gather(own, [RowRequest(prompt, config, 0) for prompt in prompts])
    poison = [int(whole[row].sequence[len(prompts[row]) + place]) for row, place in ((0, 8), (1, 20))]
    before, results = own.runner.weights, []
    for token in poison:
        changes = {"embed_tokens": test_non_finite.POISON["embed_tokens"]}
        changes["embed_tokens"] = lambda tensor, token=token: tensor.__setitem__(token, np.nan)
        own.replace_weights(test_non_finite.write("qwen3_tiny", tmp_path / str(token), changes))
        try:
            for drafts in (0, 5):
                asked = [RowRequest(prompt, config.replace(prompt_lookup=drafts), 0) for prompt in prompts]
                results.append(gather(own, asked))
        finally:
            own.runner.weights = before
    for plain, drafted in (results[:2], results[2:]):
        assert any(one.non_finite for one in plain.values())
        for number, result in plain.items():
            assert drafted[number].non_finite == result.non_finite
            same_rows(drafted[number], result)


def test_watched_and_streamed_runs_have_no_drafts() -> None:
    ids, mask = ragged()
    config = GREEDY.replace(max_new_tokens=6)
    steps: list[int] = []
    expected = engine().generate_tokens(ids, mask, config)
    watched = engine().generate_tokens(
        ids, mask, config.replace(prompt_lookup=4), watch=lambda step, canvas: steps.append(step)
    )
    same(watched, expected)
    assert steps == list(range(7))
    assert watched.drafts == []
    streamed = dict(engine().stream_tokens(ids, mask, config.replace(prompt_lookup=4)))
    assert sorted(streamed) == steps
    np.testing.assert_array_equal(streamed[6], expected.sequences)


def test_what_is_refused() -> None:
    with pytest.raises(ParameterError, match="prompt_lookup is 64; expected an integer from 0 to 63"):
        SamplingConfig(prompt_lookup=64)


def test_memory_counts_the_logits_of_all_positions() -> None:
    runner = engine().runner
    peaks = [sum(one.bytes for one in runner.memory(64, 64, cached=True, window=window).peak) for window in (1, 2, 64)]
    assert peaks[0] == peaks[1] < peaks[2]
    assert runner.max_rows(64, True, window=64) <= runner.max_rows(64, True)
