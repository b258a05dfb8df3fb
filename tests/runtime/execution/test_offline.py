"""The offline scheduler: each row yields the same tokens as in a batch of one, in any order and company."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from runtime import DiffusionConfig, Engine, InputError, OfflineScheduler, RowRequest, RowResult, SamplingConfig
from runtime.execution import generation, offline, row_feed
from runtime.execution.runner import Runner
from runtime.execution.specialization import program_key
from tests import golden_cases
from tests.runtime.decoding.test_autoregressive import torch_model

BASE = DiffusionConfig(max_new_tokens=12, steps=12, algorithm="entropy", temperature=0.7, log_probabilities=True)
MODES: dict[str, DiffusionConfig] = {
    "exact": BASE,
    "origin": BASE.replace(algorithm="origin", top_p=0.9),
    "dual": BASE.replace(cache="dual", block_length=4, parallel="threshold", threshold=0.2, algorithm="maskgit_plus"),
    "prefix": BASE.replace(cache="prefix", block_length=4, refresh_interval=3, stop_token_ids=tuple(range(8))),
}
LENGTHS = (9, 1, 5, 14, 3, 7, 11)
NEW = (12, 5, 9, 12, 3, 12, 7)


def prompts(vocab: int, masked: int | None) -> list[list[int]]:
    generator = np.random.default_rng(3)
    rows = [[int(token) for token in generator.integers(1, vocab, length)] for length in LENGTHS]
    rows = [[1 if token == masked else token for token in row] for row in rows]
    if masked is not None:
        rows[2][1] = masked  # to be filled too
    return rows


def requests(engine: Engine, config: DiffusionConfig | SamplingConfig, **changes: Any) -> list[RowRequest]:
    masked = None if engine.config.objective == "autoregressive" else engine.config.mask_token_id
    return [
        RowRequest(row, config.replace(**(changes | {"max_new_tokens": new})), seed=number * 7919)
        for number, (row, new) in enumerate(zip(prompts(engine.config.vocab_size, masked), NEW, strict=True))
    ]


def alone(engine: Engine, request: RowRequest) -> RowResult:
    found = engine.generate_tokens([request.tokens], None, request.config.replace(seed=[request.seed]))
    assert found.log_probabilities is not None
    return RowResult(0, found.sequences[0], found.commit_steps[0], found.log_probabilities[0])


def gather(scheduler: OfflineScheduler, **arguments: Any) -> dict[int, RowResult]:
    found = [result for results in scheduler.run(**arguments) for result in results]
    assert len({result.number for result in found}) == len(found)
    return {result.number: result for result in found}


def same(found: RowResult, expected: RowResult) -> None:
    np.testing.assert_array_equal(found.sequence, expected.sequence)
    np.testing.assert_array_equal(found.commit_steps, expected.commit_steps)
    assert found.log_probabilities is not None
    assert expected.log_probabilities is not None
    np.testing.assert_allclose(found.log_probabilities, expected.log_probabilities, atol=1e-4)


def check(engine: Engine, asked: list[RowRequest], slots: int) -> None:
    expected = [alone(engine, request) for request in asked]
    scheduler = engine.scheduler(asked, slots)
    found = gather(scheduler)
    assert sorted(found) == list(range(len(asked)))
    for number, result in found.items():
        same(result, expected[number])
    assert scheduler.stats.rows == len(asked)
    assert scheduler.stats.tokens == sum(int((result.commit_steps >= 0).sum()) for result in expected)
    # In another order, and with some rows left out, without compiling another program.
    compiled = engine.compiled_programs
    backwards = gather(engine.scheduler(asked[::-1], slots), skip={1, 4})
    assert sorted(backwards) == [0, 2, 3, 5, 6]
    for number, result in backwards.items():
        same(result, expected[len(asked) - 1 - number])
    assert engine.compiled_programs == compiled


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in ("exact", "dual") else pytest.mark.slow) for mode in MODES]
)
def test_diffusion_rows_are_as_alone(mode: str) -> None:
    engine = golden_cases.engine("tensor=1")
    check(engine, requests(engine, MODES[mode]), slots=3)


@pytest.mark.parametrize("mode", ["dual", pytest.param("exact", marks=pytest.mark.slow)])
def test_slots_on_a_mesh(mode: str) -> None:
    mesh = "data=2,sequence=2,tensor=2"
    engine, single = golden_cases.engine(mesh), golden_cases.engine("tensor=1")
    asked = requests(engine, MODES[mode])
    for number, result in gather(engine.scheduler(asked, 5)).items():
        same(result, alone(single, asked[number]))


@functools.cache
def autoregressive(folder: str, mesh: str) -> Engine:
    return Engine.load(folder, mesh)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen2")
    model: transformers.PreTrainedModel = torch_model("qwen2")
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("tensor=1", {}),
        pytest.param("tensor=1", {"use_cache": False}, marks=pytest.mark.slow),
        pytest.param("data=2,sequence=2,tensor=2", {"stop_token_ids": tuple(range(60))}, marks=pytest.mark.slow),
    ],
)
def test_autoregressive_rows_are_as_alone(qwen2: str, mesh: str, changes: dict[str, Any]) -> None:
    engine = autoregressive(qwen2, mesh)
    config = SamplingConfig(temperature=0.8, top_p=0.95, log_probabilities=True, **changes)
    check(engine, requests(engine, config), slots=3 if mesh == "tensor=1" else 4)


@pytest.mark.parametrize("together", [1, 3])
def test_rows_that_are_queued_in_parts(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are generated, each with its own number, however many are queued at a time."""
    engine = golden_cases.engine("tensor=1")
    asked = requests(engine, BASE)
    expected = gather(engine.scheduler(asked, 4))
    monkeypatch.setattr(row_feed, "QUEUED_ROWS", together)
    found = gather(engine.scheduler(asked, 4))
    assert len(asked) > 2 * together
    assert found.keys() == expected.keys() == set(range(len(asked)))
    for number, result in found.items():
        same(result, expected[number])


@pytest.mark.parametrize(
    ("config", "together"),
    [
        (BASE, True),
        (BASE.replace(cache="dual", block_length=4), True),
        (BASE.replace(cache="dual", block_length=4, parallel="threshold"), False),
        (BASE.replace(stop_token_ids=(7,)), False),
    ],
)
def test_rows_that_end_together_need_one_bucket(config: DiffusionConfig, together: bool) -> None:
    """Smaller buckets that other calls have compiled are used only if rows may end at different times."""
    engine = golden_cases.engine("tensor=1")
    for rows in (1, 2):
        gather(engine.scheduler([RowRequest([5] * 3, config, number) for number in range(rows)]))
    asked = [RowRequest([5] * 3, config, number) for number in range(4)]
    assert engine.scheduler(asked).fits_one_bucket == together
    assert not engine.scheduler(asked, stop_tests=[lambda tokens, whole: None] * 4).fits_one_bucket


def test_a_call_with_one_long_prompt_has_narrow_buckets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """``generate_tokens`` on ragged rows does not compute every row at the width of the longest."""
    engine = golden_cases.engine("tensor=1")
    made: list[OfflineScheduler] = []

    def kept(*arguments: Any) -> OfflineScheduler:
        made.append(OfflineScheduler(*arguments))
        return made[-1]

    monkeypatch.setattr(generation, "OfflineScheduler", kept)
    # Compiling takes far longer than passes of so small a model.
    monkeypatch.setattr(Runner, "compile_positions", lambda runner: 0.0)
    rows = [[5] * 200, *([5 + number] * 3 for number in range(7))]
    seeds = list(range(len(rows)))
    ids = np.array([[0] * (200 - len(row)) + row for row in rows], np.int32)
    found = engine.generate_tokens(ids, ids > 0, BASE.replace(seed=seeds))
    (scheduler,) = made
    stats = scheduler.stats
    assert stats.computed_positions < 0.5 * len(rows) * engine.runner.bucket(212) * BASE.steps
    for seed, row in enumerate(rows):
        expected = alone(engine, RowRequest(row, BASE, seed=seed))
        np.testing.assert_array_equal(found.sequences[seed, 200 - len(row) :], expected.sequence)


def test_a_slot_is_free_in_the_iteration_in_which_its_row_ends() -> None:
    golden = golden_cases.engine("tensor=1")
    engine = Engine(golden.layout, golden.weights)  # without the buckets that other tests have compiled
    asked = [RowRequest([5 + number] * 3, BASE, number) for number in range(5)]
    whole = alone(golden, asked[0])
    ending = BASE.replace(stop_token_ids=(int(whole.sequence[6]),))
    asked[0] = RowRequest(asked[0].tokens, ending, 0)
    short = alone(golden, asked[0])
    ended, others = (len(set(row.commit_steps[row.commit_steps >= 0])) for row in (short, whole))
    assert 1 < ended < others
    scheduler = engine.scheduler(asked, 4)
    same(gather(scheduler, iterations=16)[0], short)
    # The last row starts when the first one ends, not with the end of the others.
    assert scheduler.stats.forwards == ended + others


def test_utilisation_and_an_early_end() -> None:
    golden = golden_cases.engine("tensor=1")
    engine = Engine(golden.layout, golden.weights)  # without the buckets that other tests have compiled
    asked = requests(engine, BASE)
    scheduler = engine.scheduler(asked, 4)
    asked_for_more = iter([True] * 3 + [False] * 1000)
    found = gather(scheduler, more=lambda: next(asked_for_more))
    # After `more` returns False, the rows in slots are finished, and no others.
    assert 0 < len(found) < len(asked)
    stats = scheduler.stats
    assert stats.slot_iterations == 4 * stats.forwards
    assert 0.5 < stats.utilisation <= 1.0
    assert stats.busy_iterations == sum(len(set(row.commit_steps[row.commit_steps >= 0])) for row in found.values())


def test_a_pace_follows_the_time_of_a_step() -> None:
    pace, chosen = offline.Pace(0.15), []
    for iterations, seconds in [(1, 30.0), (1, 0.01), (4, 0.04), (15, 0.15), (0, 9.9), (3, 0.029), (15, 3.0), (1, 0.0)]:
        pace.ran(iterations, seconds)
        chosen.append(pace.iterations)
    assert chosen == [1, 4, 15, 15, 15, 15, 1, 4], "compiled, fast, faster, as wanted, none, ended, slow, fast"


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, [1] * 11), (0.0, [1, 4, 6])])
def test_steps_of_slow_and_of_fast_programs(seconds: float, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens come in steps of one iteration, or in a few steps that get longer."""
    engine = golden_cases.engine("tensor=1")
    asked = [RowRequest([5] * 3, BASE, seed) for seed in range(2)]
    calls = itertools.count()
    monkeypatch.setattr(offline, "time", SimpleNamespace(perf_counter=lambda: seconds * next(calls)))
    scheduler = engine.scheduler(asked)
    assert scheduler.fits_one_bucket
    made, found, before = [], [], 0
    for results in scheduler.run(iterations=offline.Pace(0.15)):
        found += results
        made.append(scheduler.stats.forwards - before)
        before = scheduler.stats.forwards
    assert made == steps
    for row in found:
        same(row, alone(engine, asked[row.number]))
    # Where rows wait, the slots of rows that ended must not stay empty for long.
    more = engine.scheduler(requests(engine, BASE), 2)
    assert not more.fits_one_bucket
    for number, row in gather(more, iterations=offline.Pace(0.15)).items():
        same(row, alone(engine, requests(engine, BASE)[number]))
    assert more.stats.forwards == gathered_forwards(engine)


@pytest.mark.parametrize(
    ("tokens", "seed", "says"),
    [([], 0, "no token"), ([5, 10**6], 0, "outside the vocabulary"), ([-1], 0, "outside"), ([5], -1, "seed is -1")],
)
def test_rows_that_a_caller_made_are_checked(tokens: list[int], seed: int, says: str) -> None:
    with pytest.raises(InputError, match=f"request 1: .*{says}"):
        golden_cases.engine("tensor=1").scheduler([RowRequest([5], BASE, 0), RowRequest(tokens, BASE, seed)])


def gathered_forwards(engine: Engine) -> int:
    scheduler = engine.scheduler(requests(engine, BASE), 2)
    gather(scheduler)
    return scheduler.stats.forwards


def test_reports_are_after_every_step_of_a_slow_program(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reports = golden_cases.engine("tensor=1"), []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(generation, "SECONDS_PER_REPORT", seconds)
        seen: list[tuple[int, int]] = []
        engine.generate_tokens([[5] * 3], config=BASE, progress=lambda *pair, seen=seen: seen.append(pair))
        reports.append(seen)
    assert reports[0] == [*((step, 12) for step in range(11)), (12, 12)], "the first of 12 steps commits nothing"
    assert [done for done, _ in reports[1]] == [0, 1, 5, 12]


def test_a_request_that_cannot_be_generated_is_named() -> None:
    engine = golden_cases.engine("tensor=1")
    asked = [RowRequest([1], BASE, 0), RowRequest([1] * engine.config.max_positions, BASE, 0)]
    with pytest.raises(InputError, match=r"request 1: .* the\s+model allows") as found:
        engine.scheduler(asked)
    assert found.value.field == "max_new_tokens"


def test_rows_of_different_block_lengths_share_slots_only_without_a_cache() -> None:
    """Halving a canvas of 192 gives the windows of both lengths, but a refresh computes outputs for one block alone."""
    runner = golden_cases.engine("tensor=1").runner
    base = BASE.replace(max_new_tokens=60, steps=60)
    for cache, keys in (("none", 1), ("prefix", 2), ("dual", 2)):
        configs = [base.replace(cache=cache, block_length=length) for length in (24, 45)]
        assert len({program_key(runner, config, 192) for config in configs}) == keys, cache


def test_what_rows_have_in_common_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may have millions of rows."""
    calls = dict.fromkeys(("program_key", "longest_span"), 0)

    def counted(name: str) -> Any:
        original = getattr(offline, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return original(*arguments)

        return call

    for name in calls:
        monkeypatch.setattr(offline, name, counted(name))
    engine = golden_cases.engine("tensor=1")
    scheduler = engine.scheduler([RowRequest([5] * (1 + number % 9), BASE, number) for number in range(200)], 3)
    assert next(scheduler.run()) == []
    assert calls == {"program_key": 2, "longest_span": 1}
