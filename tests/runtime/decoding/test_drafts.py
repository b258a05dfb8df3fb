"""Drafts change no token, no step and no log-probability of any row, and save forward passes of a trained model."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints import DEMO
from runtime import DiffusionConfig, Engine, GenerationResult, InputError, PoolShape, RowRequest, SamplingConfig
from runtime.decoding import draft_chain
from runtime.decoding.draft_chain import guessed_request
from runtime.decoding.schema import ParameterError
from runtime.execution.generation import Observers
from runtime.execution.offline import OfflineScheduler
from runtime.execution.pool import Pool
from runtime.execution.requests import may_end_early
from runtime.execution.row_arrays import diffusion_row
from runtime.execution.slot_kinds import DiffusionSlots
from runtime.execution.specialization import with_own_drafts
from tests import golden_cases
from tests.divergence import assert_same_tokens
from tests.runtime.decoding.block_rows import BASE, STOPS, ragged_rows
from tests.runtime.decoding.drafted_rows import PROMPTS, marked, trained
from tests.runtime.engine_rows import GREEDY, ORIGIN, SAMPLED, rows

GOLDEN = Path(__file__).parents[2] / "golden"
THRESHOLD = {"parallel": "threshold", "threshold": 0.2, "algorithm": "maskgit_plus"}
FACTOR = {"parallel": "factor", "factor": 1.5, "algorithm": "topk_margin"}
# Steps that commit several tokens, that commit none, and blocks; all rows have masks to fill in a prompt.
DREAM: dict[str, DiffusionConfig] = {
    "sampled": SAMPLED,
    "greedy": GREEDY,
    "origin": ORIGIN,
    "more steps than tokens": BASE.replace(steps=40, alg_temp=0.4, top_p=0.9),
    "blocks": BASE.replace(block_length=6),
    "threshold": BASE.replace(temperature=0.0, **THRESHOLD),
    "factor in blocks": BASE.replace(block_length=6, **FACTOR),
    "frechet in blocks": BASE.replace(block_length=6, parallel="frechet", factor=1.5, algorithm="maskgit_plus"),
    "entropy_bound": BASE.replace(parallel="entropy_bound", entropy_bound=8.0, algorithm="entropy"),
    "decaying threshold": BASE.replace(block_length=6, threshold_decay=0.5, **THRESHOLD),
    "early stop": BASE.replace(stop_token_ids=STOPS),
    "threshold, early stop": BASE.replace(stop_token_ids=STOPS, block_length=6, **THRESHOLD),
}
QUICK = ("sampled", "early stop")
LLADA = DiffusionConfig(max_new_tokens=12, steps=8, algorithm="low_confidence", block_length=6, seed=4)
OTHERS: dict[str, tuple[str, DiffusionConfig]] = {
    "llada, low_confidence": ("llada_tiny", LLADA),
    "llada, random": ("llada_tiny", LLADA.replace(algorithm="random", temperature=0.5)),
    "llada, guided": ("llada_tiny", LLADA.replace(cfg_scale=1.5)),
    "llada, threshold": ("llada_tiny", LLADA.replace(parallel="threshold", threshold=0.1)),
    "sdar, threshold": ("sdar_tiny", DiffusionConfig(12, steps=12, **THRESHOLD)),
    "sdar, sequential": ("sdar_tiny", DiffusionConfig(12, steps=12, algorithm="maskgit_plus", parallel="sequential")),
    "fast_dllm_v2": ("fast_dllm_v2_tiny", DiffusionConfig(12, steps=12, **THRESHOLD)),
}
TRAINED = {
    "greedy": DiffusionConfig(max_new_tokens=40, steps=40, algorithm="entropy"),
    "sampled": DiffusionConfig.published(40, temperature=0.2, seed=1),
    "origin": DiffusionConfig(max_new_tokens=40, steps=20, algorithm="origin", temperature=1.0, top_p=0.9, seed=2),
    "alg_temp": DiffusionConfig(40, steps=20, algorithm="topk_margin", temperature=0.5, alg_temp=0.5, seed=3),
    "threshold": DiffusionConfig(40, algorithm="maskgit_plus", parallel="threshold", threshold=0.6, block_length=16),
    "entropy_bound": DiffusionConfig(40, algorithm="entropy", parallel="entropy_bound", entropy_bound=0.3),
}
# In these modes no guess for the random models is right. TRAINED has such modes of a trained model.
UNGUESSED = {"threshold", "threshold, early stop", "entropy_bound", "llada, threshold", "fast_dllm_v2"}
MESHES = ("data=2", "sequence=4", "tensor=4", "data=2,sequence=2,tensor=2")


def check(engine: Engine, ids: np.ndarray, mask: np.ndarray, config: DiffusionConfig, drafts: int) -> GenerationResult:
    """Check a run with drafts against the same run without, and its counts; return it."""
    config = config.replace(log_probabilities=True)
    plain = engine.generate_tokens(ids, mask, config, history=True)
    found = engine.generate_tokens(ids, mask, config.replace(draft_steps=drafts), history=True)
    np.testing.assert_array_equal(found.sequences, plain.sequences)
    np.testing.assert_array_equal(found.history, plain.history)
    np.testing.assert_array_equal(found.commit_steps, plain.commit_steps)
    np.testing.assert_allclose(found.log_probabilities, plain.log_probabilities, atol=1e-4)
    assert found.stats.tokens == plain.stats.tokens
    assert plain.drafts == []
    # Positions count all canvases of a pass, so they tell the passes of each row, and those without drafts its steps.
    block = config.block_length or engine.config.attention_block_length if engine.config.family.block_causal else 1
    lengths = -(-(mask.sum(axis=1) + config.max_new_tokens) // block) * block
    passes = 1 + (config.cfg_scale > 0)
    made = [own.passes for own in found.drafts]
    steps = [own.passes + own.accepted for own in found.drafts]
    assert found.stats.positions == (1 + drafts) * passes * np.dot(made, lengths)
    assert plain.stats.positions == passes * np.dot(steps, lengths)
    assert found.stats.row_passes == sum(made)
    assert found.stats.accepted_steps == sum(steps) - sum(made)
    assert all(0 <= own.accepted <= drafts * own.passes for own in found.drafts)
    return found


@pytest.mark.parametrize("name", marked(DREAM, QUICK))
@pytest.mark.parametrize("drafts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_dream(name: str, drafts: int) -> None:
    ids, mask = rows() if DREAM[name].max_new_tokens == GREEDY.max_new_tokens else ragged_rows()
    found = check(golden_cases.engine(), ids, mask, DREAM[name], drafts)
    assert found.stats.accepted_steps > 0 or name in UNGUESSED


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    folder, config = OTHERS[name]
    engine = golden_cases.engine(folder=GOLDEN / folder)
    found = check(engine, *ragged_rows(), config, 3)
    assert found.stats.accepted_steps > 0 or name in UNGUESSED


@pytest.mark.slow
def test_infilling_before_a_suffix() -> None:
    ids, mask = ragged_rows()
    suffixes, engine = [[7, 8, 9], [5], [], [6, 6]], golden_cases.engine()
    plain = engine.generate_tokens(ids, mask, BASE, suffixes=suffixes, history=True)
    found = engine.generate_tokens(ids, mask, BASE.replace(draft_steps=2), suffixes=suffixes, history=True)
    np.testing.assert_array_equal(found.history, plain.history)
    np.testing.assert_array_equal(found.commit_steps, plain.commit_steps)


@pytest.mark.parametrize("name", marked(TRAINED, ("greedy",)))
def test_a_trained_model_needs_fewer_passes(name: str) -> None:
    engine = trained("data=1")
    found = check(engine, *engine.encode(PROMPTS), TRAINED[name], 3)
    assert all(own.accepted > 0 for own in found.drafts)
    if name == "greedy":  # more than every third pass saves a step
        assert found.stats.accepted_steps > found.stats.row_passes / 3


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
@pytest.mark.parametrize("name", ["greedy", "sampled", "origin"])
@pytest.mark.parametrize(("mesh", "rows", "drafts"), [("data=4", 1, 3), ("data=4", 2, 1), ("data=2,sequence=2", 3, 3)])
def test_drafts_of_few_rows_use_the_whole_data_axis(mesh: str, rows: int, drafts: int, name: str) -> None:
    config, engine = TRAINED[name], trained(mesh)
    ids, mask = engine.encode(PROMPTS[:rows])
    expected = trained("data=1").generate_tokens(ids, mask, config, history=True)
    found = engine.generate_tokens(ids, mask, config.replace(draft_steps=drafts, draft_axis="data"), history=True)
    real = np.pad(mask, ((0, 0), (0, config.max_new_tokens)), constant_values=1)
    assert found.history is not None
    assert expected.history is not None
    assert_same_tokens(found.history, expected.history, real, trained("data=1"), config)
    assert found.stats.accepted_steps > 0
    assert found.stats.forwards < expected.stats.forwards


def test_rows_on_every_shard_come_in_any_number() -> None:
    runner = golden_cases.engine("data=4,tensor=2").runner
    assert runner.row_unit == runner.row_shards == 4
    for canvases, unit in ((4, 1), (8, 1), (2, 2), (6, 2), (3, 4)):
        spread = runner.over_data(canvases)
        assert (spread.row_unit, spread.row_shards) == (unit, 1)
        assert spread.batch_size(1, 64, canvases=canvases) == unit
    # A device has one canvas of the row, as without drafts, and the peak of one more.
    peaks = [
        sum(one.bytes for one in own.memory(1, 512, cached=False, canvases=count).peak)
        for own, count in ((runner, 1), (runner.over_data(4), 4), (runner, 4))
    ]
    assert peaks[0] == peaks[1] < peaks[2]


def test_rows_on_every_shard_have_the_replaced_weights() -> None:
    engine = Engine.load(golden_cases.FOLDER, "data=2")
    spread = engine.runner.over_data(2)
    assert spread.weights is engine.weights
    engine.replace_weights(jax.tree.map(lambda leaf: 2 * leaf, engine.weights))
    assert spread.weights is engine.weights


def test_rows_on_every_shard_are_copied_by_their_own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of equal shapes may be divided over ``data`` or not; each of several processes copies whole arrays."""
    runner, config = golden_cases.engine("data=2").runner, GREEDY.replace(draft_steps=1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for own, axis in ((runner, "none"), (runner.over_data(2), "data")):
        slots = DiffusionSlots(own, config.replace(draft_axis=axis), 64, 2)
        slots.insert({0: RowRequest([5, 6], config, 0)})
        (row,) = slots.take([0]).values()
        assert row.state.canvas[0, :2].tolist() == [5, 6]


def test_rows_with_drafts_may_end_at_different_times() -> None:
    assert may_end_early(GREEDY.replace(draft_steps=1))
    assert not may_end_early(GREEDY)


def test_a_row_may_ask_for_fewer_drafts_than_its_slots_have() -> None:
    """The value of a row is an upper bound, so one program serves all rows, as in a server."""
    engine = trained("data=1")
    config = TRAINED["greedy"].replace(draft_steps=3, max_new_tokens=12, steps=12)
    prompt = engine.tokenizer.encode(PROMPTS[0])
    slots = DiffusionSlots(engine.runner, config, engine.runner.bucket(len(prompt) + 12), 4)
    requests = [RowRequest(prompt, config.replace(draft_steps=count), 0) for count in (0, 1, 3, 60)]
    slots.insert(dict(enumerate(requests)))
    assert slots.run().all()
    found = slots.collect(dict(enumerate(enumerate(requests))))
    assert len({tuple(one.sequence) for one in found}) == 1
    none, one, all_, more = [own.drafts for own in found]
    assert none is not None
    assert one is not None
    assert all_ is not None
    assert none.accepted == 0
    assert none.passes == one.passes + one.accepted == all_.passes + all_.accepted
    assert one.accepted <= one.passes
    assert all_.passes <= one.passes <= none.passes
    assert more == all_


@pytest.mark.slow
def test_rows_that_come_and_go() -> None:
    """Rows are inserted, moved and evicted between passes, with their drafts."""
    engine, config = golden_cases.engine(), BASE.replace(stop_token_ids=STOPS, draft_steps=3)
    ids, mask = ragged_rows()
    prompts = [row[own > 0].tolist() for row, own in zip(ids, mask, strict=True)] * 3
    requests = [RowRequest(prompt, config, seed) for seed, prompt in enumerate(prompts)]
    drafted = {one.number: one for some in engine.scheduler(requests, slots=3).run() for one in some}
    for number, request in enumerate(requests):
        own = np.array([request.tokens])
        alone = engine.generate_tokens(own, None, config.replace(draft_steps=0, seed=[request.seed]))
        np.testing.assert_array_equal(drafted[number].sequence, alone.sequences[0])


@pytest.mark.parametrize("hook", ["tokens_hook", "logits_hook"])
def test_hooks_are_refused(hook: str) -> None:
    with pytest.raises(InputError, match=rf"draft_steps is 2; {hook} requires draft_steps=0") as error:
        golden_cases.engine().generate_tokens(
            *rows(), GREEDY.replace(draft_steps=2), **{hook: lambda step, canvas, logits: None}
        )
    assert error.value.field == "draft_steps"


def test_configurations_without_drafts() -> None:
    """An upper bound is never refused, but the steps of these configurations cannot share a pass."""
    assert DiffusionConfig(cache="dual", draft_steps=2).drafts == 2
    assert DiffusionConfig(cache="dual", draft_steps=2, refresh_interval=2).drafts == 2
    assert DiffusionConfig(cache="dual", draft_steps=2, refresh_interval=1).drafts == 0
    assert DiffusionConfig(cache="exact", draft_steps=2).drafts == 0
    with pytest.raises(ParameterError, match="draft_axis requires cache=none"):
        DiffusionConfig(cache="dual", draft_steps=1, draft_axis="data")
    with pytest.raises(ParameterError, match="draft_steps is 64; expected an integer from 0 to 63"):
        DiffusionConfig(draft_steps=64)


def test_a_watched_run_shows_every_step() -> None:
    engine, seen = golden_cases.engine(), []

    def watch(step: int, canvas: np.ndarray) -> None:
        seen.append(canvas)

    found = engine.generate_tokens(*rows(), GREEDY.replace(draft_steps=3), watch=watch, history=True)
    np.testing.assert_array_equal(np.stack(seen[1:]), found.history)
    assert found.stats.row_passes == 0
    streamed = dict(engine.stream_tokens(*rows(), GREEDY.replace(draft_steps=3)))
    np.testing.assert_array_equal(streamed[GREEDY.steps], found.sequences)


def test_memory_counts_all_canvases() -> None:
    runner = golden_cases.engine().runner

    def parts(canvases: int) -> tuple[int, int]:
        memory = runner.memory(8, 512, cached=False, canvases=canvases)
        return sum(one.bytes for one in memory.resident), sum(one.bytes for one in memory.peak)

    (kept, peak), (more_kept, more_peak) = parts(1), parts(4)
    assert more_kept - kept == 2 * 3 * 8 * 512 * 4  # the drafts before and after a pass
    assert more_peak > 2 * peak


def test_thresholds_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses of the rules with a threshold or a factor are laxer by a constant; those of other rules are unchanged."""
    engine = golden_cases.engine()

    def guessed(config: DiffusionConfig) -> tuple[float, float]:
        config = config.replace(draft_steps=1)
        slots = DiffusionSlots(engine.runner, config, 64, 1)
        slots.insert({0: RowRequest([5, 6], config, 0)})
        found = guessed_request(slots.program, slots.request)
        return float(found.threshold[0]), float(found.factor[0])

    threshold, factor = BASE.replace(**THRESHOLD), BASE.replace(**FACTOR)
    default = DiffusionConfig.threshold, DiffusionConfig.factor
    assert guessed(threshold)[0] == np.float32(0.2)
    assert guessed(factor)[1] == 1.5
    monkeypatch.setattr(draft_chain, "GUESSED_THRESHOLD_SCALE", 0.5)
    assert guessed(threshold)[0] == np.float32(0.1)
    assert guessed(factor)[1] == 3.0
    assert guessed(BASE) == (np.float32(default[0]), default[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threshold", "factor"])
def test_laxer_guesses_change_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TRAINED["threshold"]
    if name == "factor":
        config = DiffusionConfig(40, algorithm="maskgit_plus", parallel="factor", block_length=16)
    accepted = []
    try:
        for scale in (1.0, 0.3):
            monkeypatch.setattr(draft_chain, "GUESSED_THRESHOLD_SCALE", scale)
            jax.clear_caches()  # traces contain the constant
            engine = Engine.load(DEMO, mesh="data=1")
            found = check(engine, *engine.encode(PROMPTS), config, 3)
            accepted.append(found.stats.accepted_steps)
    finally:
        jax.clear_caches()
    assert accepted[0] != accepted[1]


@pytest.mark.parametrize(
    ("data", "rows", "drafts"),
    [
        *[(8, 1, 7), (8, 2, 3), (8, 4, 1), (8, 5, 0), (8, 8, 0), (8, 9, 0), (1, 1, 0), (256, 1, 63), (8, 0, 7)],
        # Rows that do not divide the axis: 3 rows have 2 canvases each, padded to 4 rows, which is one per device.
        *[(8, 3, 1), (6, 4, 0), (7, 2, 0), (12, 2, 5), (12, 5, 1)],
    ],
)
def test_drafts_that_fill_an_idle_axis(data: int, rows: int, drafts: int) -> None:
    config = DiffusionConfig(draft_steps="auto")
    found = with_own_drafts(config, data, rows)
    assert found == config.replace(draft_steps=drafts, draft_axis="data" if drafts else "none")
    unit = data // math.gcd(data, 1 + drafts)
    if drafts:
        assert math.ceil(rows / unit) * unit * (1 + drafts) <= data, "no device computes more than one canvas"


def test_where_auto_means_no_drafts() -> None:
    for changes in ({"cache": "dual"}, {"parallel": "threshold"}, {"variable_length": True}, {"cache": "exact"}):
        config = DiffusionConfig(draft_steps="auto", **changes)
        assert config.drafts == 0
        assert with_own_drafts(config, 8, 1) == config.replace(draft_steps=0)
    named = DiffusionConfig(draft_steps=2)
    assert with_own_drafts(named, 8, 1) is named
    assert with_own_drafts(SamplingConfig(), 8, 1) == SamplingConfig()
    for wrong in ("Auto", "", -1, 64, None, True):
        with pytest.raises(ParameterError, match=r"draft_steps is .*; expected an integer from 0 to 63, or auto"):
            DiffusionConfig(draft_steps=wrong)
    # A hook may change the canvas, so there are no drafts either.
    Observers(tokens_hook=lambda step, canvas, logits: canvas).check(DiffusionConfig(draft_steps="auto"))


def test_auto_uses_idle_devices() -> None:
    engine, config = golden_cases.engine("data=4"), GREEDY.replace(seed=0, draft_steps="auto")
    ids, mask = (part[:1] for part in rows())
    plain = golden_cases.engine().generate_tokens(ids, mask, GREEDY.replace(seed=0))
    found = engine.generate_tokens(ids, mask, config)
    np.testing.assert_array_equal(found.sequences, plain.sequences)
    (own,) = found.drafts
    assert own.passes + own.accepted == plain.stats.forwards
    # Each pass computes four canvases of the row, one per device.
    length = int(mask.sum()) + config.max_new_tokens
    assert found.stats.positions == 4 * own.passes * length
    watched = engine.generate_tokens(ids, mask, config, watch=lambda step, canvas: None)
    assert watched.drafts == []


def test_auto_in_slots() -> None:
    engine, config = golden_cases.engine("data=4"), GREEDY.replace(draft_steps="auto")
    for slots, drafts, axis in ((1, 3, "data"), (2, 1, "data"), (4, 0, "none")):
        pool = Pool.open(engine.runner, PoolShape(config, 64, slots))
        assert isinstance(pool.config, DiffusionConfig)
        assert (pool.config.drafts, pool.config.draft_axis, pool.count) == (drafts, axis, slots)
    # A request of "auto" has the number of its slots.
    slots_of_three = GREEDY.replace(draft_steps=3)
    for asked, bound in (("auto", 3), (1, 1), (60, 60)):
        request = RowRequest([5, 6], GREEDY.replace(draft_steps=asked), 0)
        row, _ = diffusion_row(request, slots_of_three, engine.config, 64, 64)
        assert row.draft_steps.tolist() == [bound]
    # Rows that are all known: the number of those that run at a time.
    requests = [RowRequest([5, 6], config, seed) for seed in range(5)]
    for given, drafts in ((requests[:1], 3), (requests, 0)):
        for one in (one for some in OfflineScheduler(engine.runner, given).run() for one in some):
            assert (one.drafts is None) == (drafts == 0)
            if one.drafts is not None:
                assert one.positions == (1 + drafts) * one.drafts.passes * given[one.number].length
