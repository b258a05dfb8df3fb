"""The demo's canvases hide all but the prompts, and an interrupted training continues with the same results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from absl import flags

from checkpoints.demo import corpus
from checkpoints.demo.canvases import Corpus, checking_batches, make_batch, mask_body, training_batch
from checkpoints.demo.programs import excluded, training_programs
from checkpoints.demo.recipe import Recipe
from checkpoints.demo.train import Trainer, check_state, define_flags, first_record, kept_pairs, learning_rate

RECIPE = replace(
    Recipe(), vocabulary=400, hidden=32, intermediate=32, layers=1, kv_heads=1, group=2, rows=8, warmup_steps=2
)


@pytest.fixture(scope="module")
def data() -> Corpus:
    pairs = [(program.prompt, program.body) for program in training_programs(200, 0, excluded())]
    tokenizer = corpus.train_tokenizer((prompt + body for prompt, body in pairs), RECIPE.vocabulary)
    return Corpus(pairs[:150], pairs[150:], tokenizer, RECIPE)


def test_functions_end_with_the_end_token_and_nothing_else(data: Corpus) -> None:
    for row, prompt in zip(data.rows, data.prompts, strict=True):
        assert list(row).index(data.end) == len(row) - 1
        assert 0 < prompt < len(row) - 1


def test_packed_canvases_show_every_prompt(data: Corpus) -> None:
    rows = np.arange(16)[None, :]
    batch = make_batch(data, rows, ["packed"], RECIPE, np.random.default_rng(0))
    masked = (batch.noised[0] == data.mask).numpy()
    place = 0
    for row in range(16):
        end = place + len(data.rows[row])
        if end > RECIPE.canvas:
            break
        assert not masked[place : place + data.prompts[row]].any()
        assert masked[place + data.prompts[row] : end].any()
        place = end
    assert place > 0
    # The output one position to the left predicts a masked position.
    weighted = batch.weights > 0
    assert (np.sort(batch.sources[weighted].numpy() + 1) == np.nonzero(masked)[0]).all()


def test_open_canvases_count_the_first_function(data: Corpus) -> None:
    rows = np.arange(16)[None, :]
    batch = make_batch(data, rows, ["open"], RECIPE, np.random.default_rng(1))
    first = len(data.rows[0])
    inside = (batch.sources + 1 < first) & (batch.weights > 0)
    outside = (batch.sources + 1 >= first) & (batch.weights > 0)
    assert inside.any()
    assert outside.any()
    assert batch.weights[inside].min() >= 1
    assert batch.weights[outside].max() <= RECIPE.tail_weight * RECIPE.heaviest
    alone = checking_batches(data, RECIPE, 0)[0]
    assert alone.weights.sum() > 0
    ends = np.array([len(row) for row in data.rows])
    row, column = np.divmod(alone.sources[alone.weights > 0].numpy() + 1, RECIPE.canvas)
    assert (column < ends[row]).all()


def test_masks_reach_from_one_token_to_all() -> None:
    generator = np.random.default_rng(0)
    counts = [int(mask_body(12, generator, RECIPE).sum()) for _ in range(2000)]
    assert set(counts) == set(range(1, 13))
    ordered = replace(RECIPE, ordered_share=1.0)
    for _ in range(200):
        masked = mask_body(12, generator, ordered)
        assert masked[masked.argmax() :].mean() > 0.3
        assert not masked[: masked.argmax()].any()


def test_batches_follow_from_seed_and_step(data: Corpus) -> None:
    made = [training_batch(data, RECIPE, seed, step, 9) for seed, step in ((2, 5), (2, 5), (2, 6), (3, 5))]
    one, same, *others = made
    assert torch.equal(one.noised, same.noised)
    assert torch.equal(one.weights, same.weights)
    for other in others:
        assert not torch.equal(one.noised, other.noised)


def test_a_resumed_run_is_the_uninterrupted_one(data: Corpus, tmp_path: Path) -> None:
    def trained(trainer: Trainer, steps: int) -> Trainer:
        while trainer.step < steps:
            trainer.train(training_batch(data, RECIPE, 0, trainer.step, 6))
        return trainer

    def fresh(seed: int) -> Trainer:
        torch.manual_seed(seed)
        return Trainer(RECIPE, torch.device("cpu"), 6)

    whole = trained(fresh(0), 6)
    values = SimpleNamespace(steps=6, seed=0, threads=1)
    record = first_record(cast(flags.FlagValues, values), RECIPE, data, 1, "cpu")
    trained(fresh(0), 3).save(tmp_path / "state.pt", record)
    resumed = fresh(1)
    assert resumed.load(tmp_path / "state.pt") == record
    assert resumed.step == 3
    trained(resumed, 6)
    for (name, one), other in zip(whole.weights().items(), resumed.weights().values(), strict=True):
        assert torch.equal(one, other), name
    assert not torch.equal(whole.average[0], trained(fresh(1), 6).average[0])


def test_pairs_are_made_once(tmp_path: Path) -> None:
    made = [("def f():", "\n    return 1"), ("def g():", '\n    return "ä"')]
    assert kept_pairs(tmp_path / "pairs.jsonl", lambda: made) == made
    assert kept_pairs(tmp_path / "pairs.jsonl", lambda: []) == made


def test_open_canvases_come_with_the_decay() -> None:
    shares = [RECIPE.open_share(step, 2000) for step in (0, 399, 400, 1299, 1300, 1999)]
    assert shares == [0.4, 0.4, 0.15, 0.15, 0.5, 0.5]


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [learning_rate(RECIPE, step, 100) for step in range(100)]
    assert rates[0] < rates[2] == rates[60] == RECIPE.learning_rate
    assert rates[70] > rates[80] > rates[99]
    assert rates[99] == pytest.approx(RECIPE.final_learning_rate)


def test_a_state_belongs_to_its_settings(tmp_path: Path) -> None:
    def check(*more: str, recipe: Recipe = RECIPE) -> None:
        values = flags.FlagValues()
        define_flags(values)
        values(["train", "--output=unused", f"--state={tmp_path}", *more])
        check_state(values, recipe)

    check("--seed=3")
    check("--seed=3", "--steps=10")
    (tmp_path / "library.jsonl").write_text("")
    check("--seed=3")
    other = replace(RECIPE, programs=500)
    changes = rf"seed: was 3, now 4; programs: was {RECIPE.programs}, now 500"
    with pytest.raises(flags.Error, match=rf"of another run \({changes}\)"):
        check("--seed=4", recipe=other)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(flags.Error, match=r"contains library\.jsonl, but not settings\.json"):
        check("--seed=3")
