"""A draft model changes no token and no log-probability of any row, and saves passes where it guesses right."""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.prompt_lookup import margin
from runtime import (
    DraftStats,
    Engine,
    Executor,
    GenerationResult,
    InputError,
    PoolShape,
    RequestHandle,
    RowFinished,
    RowRequest,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
)
from runtime.decoding.kinds import ParameterError
from runtime.execution.autoregressive_slots import AutoregressiveSlots
from runtime.execution.buckets import Bucket
from runtime.execution.draft_models import check_draft_model, layout_beside
from runtime.execution.pool_shape import pass_cost
from runtime.execution.rows import row_seeds
from runtime.execution.runner import Runner, weight_bytes
from runtime.models.families import parse_config
from runtime.models.random_weights import random_weights
from tests.runtime import test_non_finite
from tests.runtime.decoding.drafted_rows import marked
from tests.runtime.decoding.drafted_tokens import (
    CONFIGS,
    GREEDY,
    LENGTHS,
    MESHES,
    NEW,
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

# Another split of the tensor axis than that of the model, which has 8 heads, 2 of them for keys and values.
OTHER_HEADS: dict[str, Any] = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 320, "hidden_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64},
    **{"max_position_embeddings": 40, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False},
    **{"hidden_act": "silu", "torch_dtype": "float32"},
}


@functools.cache
def noisy() -> Path:
    """A copy of the model with noise on its weights, which guesses some of its tokens right."""

    def change(tensor: np.ndarray) -> None:
        tensor += 0.1 * tensor.std() * np.random.default_rng(0).standard_normal(tensor.shape, np.float32)

    return test_non_finite.write("qwen3_tiny", Path(tempfile.mkdtemp()) / "noisy", {"": change})


@functools.cache
def engine(mesh: str = "tensor=1", draft: str = "noisy", kv_cache: str = "model") -> Engine:
    """The model with a draft model: a noisy copy, the model itself, or one of another shape."""
    if draft != "other heads":
        return Engine.load(QWEN3, mesh, draft=noisy() if draft == "noisy" else QWEN3, kv_cache=kv_cache)
    plain = Engine.load(QWEN3, mesh)
    layout = layout_beside(plain.layout, plain.dtype, parse_config(OTHER_HEADS))
    other = Runner(layout, random_weights(layout, 0, "float32"), "auto", None)
    return Engine(plain.layout, plain.weights, draft=other)


@functools.cache
def without_drafts(name: str) -> GenerationResult:
    return engine().generate_tokens(*ragged(), CONFIGS[name])


def fewest_passes(new: int, drafts: int) -> int:
    """Passes of a row whose drafts are all right: the prefill adds a token, and each other pass 1 + ``drafts``."""
    return 1 + math.ceil((new - 1) / (1 + drafts))


@pytest.mark.parametrize("name", marked(CONFIGS, ("greedy", "sampled")))
@pytest.mark.parametrize("drafts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_same_tokens(name: str, drafts: int) -> None:
    found = check(engine(), CONFIGS[name], drafts, without_drafts(name), "draft_tokens")
    assert 0 < found.stats.accepted_steps < drafts * (found.stats.row_passes - len(LENGTHS))


@pytest.mark.parametrize("name", marked(CONFIGS, ("greedy", "sampled, stop tokens")))
def test_a_model_that_drafts_for_itself_is_always_right(name: str) -> None:
    """It draws with the same bits, and its cache has the token that was drawn last and those that were accepted."""
    found = check(engine(draft="itself"), CONFIGS[name], 3, without_drafts(name), "draft_tokens")
    new = (found.commit_steps >= 0).sum(axis=1).tolist()
    assert [one.passes for one in found.drafts] == [fewest_passes(count, 3) for count in new]


@pytest.mark.parametrize("mesh", marked(("tensor=1", *MESHES, "tensor=4"), ("tensor=4",)))
def test_a_draft_model_of_another_shape(mesh: str) -> None:
    """Its heads are divided in another way, and it has fewer positions than a row."""
    check(engine(mesh, "other heads"), SAMPLED, 2, without_drafts("sampled"), "draft_tokens")


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_bfloat16(name: str) -> None:
    """Rounding may decide otherwise in a pass over several tokens; any other difference fails."""
    config, own, (ids, mask) = CONFIGS[name], Engine.load(QWEN3, "tensor=1", "bfloat16", draft=noisy()), ragged()
    plain = own.generate_tokens(ids, mask, config)
    found = own.generate_tokens(ids, mask, config.replace(draft_tokens=3))
    assert found.stats.accepted_steps > 0
    for row, seed in enumerate(row_seeds(config.seed, len(LENGTHS))):
        length = LENGTHS[row]
        expected, tokens = (one.sequences[row, -length - NEW :] for one in (plain, found))
        if (gap := margin(own, tokens, expected, length, config.replace(seed=[seed]))) is not None:
            largest = np.abs(own.logits(expected[None])).max() / (config.temperature or 1.0)
            assert gap <= largest * 2.0**-7, "the unit of bfloat16 at the largest logit"
    assert (found.sequences == plain.sequences).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["noisy", "itself"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh: str, name: str, draft: str) -> None:
    found = check(engine(mesh, draft), CONFIGS[name], 4, without_drafts(name), "draft_tokens")
    if draft == "itself":
        new = (found.commit_steps >= 0).sum(axis=1).tolist()
        assert [one.passes for one in found.drafts] == [fewest_passes(count, 4) for count in new]


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("tensor=2", marks=pytest.mark.slow)])
def test_an_int8_cache_is_that_of_a_run_without_drafts(mesh: str) -> None:
    same_caches(engine(mesh, "noisy", "int8"), SAMPLED, SAMPLED.replace(draft_tokens=3))


def test_samples_of_one_prompt() -> None:
    """They share a prefill, in both models."""
    ids, mask = ragged()
    config, own = SAMPLED.replace(temperature=0.9), engine(draft="itself")
    expected = own.generate_tokens(ids, mask, config, num_return_sequences=3)
    found = own.generate_tokens(ids, mask, config.replace(draft_tokens=4), num_return_sequences=3)
    same(found, expected)
    assert {one.passes for one in found.drafts} == {fewest_passes(NEW, 4)}


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2,sequence=2,tensor=2", marks=pytest.mark.slow)])
def test_rows_that_come_and_go(mesh: str) -> None:
    """Rows are inserted, read in chunks, moved and evicted between passes, in both models."""
    expected = gather(engine(), requests(SAMPLED))
    found = gather(engine(mesh, "itself"), requests(SAMPLED.replace(draft_tokens=4)))
    assert sorted(found) == sorted(expected)
    for number, result in found.items():
        same_rows(result, expected[number])
        new = 10 + 7 * number
        assert result.drafts == DraftStats(fewest_passes(new, 4), new - fewest_passes(new, 4))


def test_rows_take_both_caches_to_wider_buckets() -> None:
    config = GREEDY.replace(max_new_tokens=150, draft_tokens=4)
    executor = Executor(
        engine(draft="itself").runner, [PoolShape(config, 192, 2, widths=(48, 96, 144), max_programs=4)]
    )
    scheduler = Scheduler([pool.limits for pool in executor.pools], SchedulerPolicy(2, step_seconds=None))
    ids, mask = ragged()
    asked = [RowRequest(row[own > 0].tolist(), config, 5) for row, own in zip(ids[1:], mask[1:], strict=True)]
    scheduler.add(RequestHandle(rows=asked))
    widths, found = set(), {}
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(0.0)
        widths |= {bucket.width for pool in plan.pools for bucket in pool.buckets}
        events = scheduler.update(executor.execute(plan), 0.0)
        found |= {event.index: event.result for event in events if isinstance(event, RowFinished)}
    assert len(widths) > 1
    assert scheduler.stats.moves > 0
    expected = gather(engine(), [RowRequest(one.tokens, GREEDY.replace(max_new_tokens=150), 5) for one in asked])
    for number, result in found.items():
        same_rows(result, expected[number])
        assert result.drafts == DraftStats(fewest_passes(150, 4), 150 - fewest_passes(150, 4))


def test_the_number_of_a_row_is_an_upper_bound() -> None:
    """One program serves all rows, as in a server. Lookup has its own bound, which does not matter here."""
    own, config = engine(draft="itself"), GREEDY.replace(max_new_tokens=20, draft_tokens=4)
    slots = AutoregressiveSlots(own.runner, config, own.runner.bucket(21), 4, 1)
    bounds = [{"draft_tokens": 0}, {"draft_tokens": 1}, {"draft_tokens": 60}, {"prompt_lookup": 0}]
    asked = [RowRequest([9], config.replace(**bound), 0) for bound in bounds]
    slots.insert(dict(enumerate(asked)))
    assert slots.run().all()
    found = slots.collect(dict(enumerate(enumerate(asked))))
    assert len({tuple(one.sequence) for one in found}) == 1
    passes = [one.drafts.passes for one in found if one.drafts]
    assert passes == [20, fewest_passes(20, 1), fewest_passes(20, 4), fewest_passes(20, 4)]


def test_where_there_are_no_drafts() -> None:
    """Without a draft model or a cache, and where every token is shown, a pass adds one token."""
    ids, mask = ragged()
    config = GREEDY.replace(max_new_tokens=6)
    plain = Engine.load(QWEN3, "tensor=1")
    expected = plain.generate_tokens(ids, mask, config)
    cases: list[tuple[Engine, dict[str, Any]]] = [(plain, {}), (engine(), {"use_cache": False})]
    for own, changes in cases:
        found = own.generate_tokens(ids, mask, config.replace(draft_tokens=3, **changes))
        same(found, expected)
        assert found.drafts == []
    streamed = dict(engine().stream_tokens(ids, mask, config.replace(draft_tokens=3)))
    assert sorted(streamed) == list(range(7))
    np.testing.assert_array_equal(streamed[6], expected.sequences)
    with pytest.raises(ParameterError, match="draft_tokens is 64; expected an integer from 0 to 63"):
        SamplingConfig(draft_tokens=64)


def test_new_rows_in_slots_whose_row_was_not_finite(tmp_path: Path) -> None:
    """Both caches of the slot are cleared."""
    own, config = engine(draft="itself"), GREEDY.replace(max_new_tokens=8, draft_tokens=3)
    slots = AutoregressiveSlots(own.runner, config, own.runner.bucket(24), 1, 8, together=False)
    slots.insert({0: RowRequest([5, 6], config, 0)})
    poison = jax.tree.map(lambda leaf: leaf * np.nan, (slots.state.cache, slots.state.draft_cache))
    slots.state = slots.state.replace(cache=poison[0], draft_cache=poison[1], non_finite=slots.state.non_finite | True)
    asked = RowRequest([7, 8, 9], config, 1)
    slots.insert({0: asked})
    assert slots.run().all()
    (found,) = slots.collect({0: (0, asked)})
    assert found.drafts == DraftStats(fewest_passes(8, 3), 8 - fewest_passes(8, 3))


def test_which_models_fit_together() -> None:
    model = parse_config(OTHER_HEADS)
    wider = parse_config(OTHER_HEADS | {"vocab_size": 384})
    dream = Engine.load(QWEN3.parent / "dream_tiny", "tensor=1").config
    check_draft_model(model, model, "d", (None, None))
    check_draft_model(model, wider, "d", ({"a": 1}, {"a": 1}))  # only the padding differs
    for own, draft, vocabularies, problem in (
        (model, wider, (None, {"a": 1}), "it has 384 tokens, and the model 320"),
        (model, model, ({"a": 1, "b": 2}, {"b": 1, "a": 2}), "another vocabulary; 'a' has the id 2, and 1"),
        (model, model, ({"a": 1, "c": 3}, {"a": 1}), "another vocabulary; 'c' has the id None, and 3"),
        (model, dream, (None, None), "it is a diffusion model"),
        (dream, model, (None, None), "only autoregressive models have one"),
    ):
        with pytest.raises(InputError, match=problem) as error:
            check_draft_model(own, draft, "d", vocabularies)
        assert error.value.field == "draft_checkpoint"
    with pytest.raises(InputError, match="dream_tiny cannot be a draft model"):
        Engine.load(QWEN3, "tensor=1", draft=QWEN3.parent / "dream_tiny")


def test_memory_counts_both_models() -> None:
    plain, drafted = Engine.load(QWEN3, "tensor=1").runner, engine(draft="other heads").runner
    assert drafted.draft is not None
    weights = weight_bytes(drafted.draft.layout, drafted.draft.dtype)
    assert drafted.weight_bytes == plain.weight_bytes + weights
    own, both = (runner.memory(4, 64, cached=True, window=4) for runner in (plain, drafted))
    other = drafted.draft.memory(4, 64, cached=True)
    names = {one.name: one.bytes for one in both.resident}
    assert names["weights (draft model)"] == weights
    assert names["cache of keys and values (draft model)"] == other.resident[1].bytes > 0
    assert sum(names.values()) == sum(one.bytes for one in own.resident) + weights + other.resident[1].bytes
    assert drafted.max_rows(64, True, window=4) <= plain.max_rows(64, True, window=4)


def test_the_cost_of_a_pass_counts_those_of_the_draft_model() -> None:
    """Each draft is a pass over two positions of every row; one of a smaller model costs less."""
    plain, bucket, config = Engine.load(QWEN3, "tensor=1").runner, Bucket(8, 64), GREEDY.replace(draft_tokens=3)
    own = pass_cost(plain, config)
    itself, other = (engine(draft=name).runner for name in ("itself", "other heads"))
    once = replace(own, window=2)(bucket)
    assert pass_cost(itself, config)(bucket) == pytest.approx(own(bucket) + 3 * once)
    assert own(bucket) < pass_cost(other, config)(bucket) < pass_cost(itself, config)(bucket)
    assert pass_cost(itself, GREEDY)(bucket) == pass_cost(plain, GREEDY)(bucket)


def test_the_cost_of_a_prompt_counts_the_shards_that_do_not_share_it() -> None:
    runner = Engine.load(QWEN3, "data=2,sequence=2,tensor=2").runner
    assert pass_cost(runner, GREEDY).prompt_position == 4
