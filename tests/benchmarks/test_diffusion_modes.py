"""The baseline of the diffusion benchmark follows the published rule, and wrong flags are reported before a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from benchmarks import diffusion_modes
from benchmarks.decoding_modes import MODES, PUBLISHED
from benchmarks.demo_quality import share
from benchmarks.diffusion_modes import speeds
from benchmarks.fast_dllm_baseline import FastDLLMBaseline
from benchmarks.loop_times import beside_baseline, median_interval
from benchmarks.mode_comparison import (
    half_the_positions,
    modes_that_matter,
    paired_difference,
    pareto_front,
    recommended,
)
from benchmarks.mode_plots import draw_modes
from benchmarks.mode_quality import likelihood, passes
from benchmarks.mode_tables import goal_lines, modes_table
from benchmarks.records import Timing
from checkpoints import DEMO, open_folder
from launch.flags.decoding import decoding_config, define_decoding_flags
from runtime import DiffusionConfig, Engine
from runtime.models.cached import fill_rows, run_window
from runtime.models.families import parse_config
from runtime.models.kv_cache import abstract_cache
from runtime.models.transformer import project_logits
from sharding.errors import InputError
from tests.figures import assert_texts_are_apart, captured

NEW, BLOCK = 16, 8


def by_hand(engine: Engine, ids: np.ndarray, threshold: float, ends: tuple[int, ...]) -> tuple[list[int], int, int]:
    """Fast-dLLM's dual cache, pass by pass. Return new tokens, passes over the canvas, and passes over a block."""
    length, mask, weights = ids.shape[1] + NEW, engine.config.mask_token_id, engine.weights
    width = engine.runner.bucket(length)
    forward, lengths = engine.runner.forward(width), jnp.array([length], jnp.int32)
    shapes = abstract_cache(engine.layout, 1, width, engine.dtype)
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)
    canvas = np.full((1, width), engine.config.pad_token_id, np.int32)
    canvas[0, :length] = [*ids[0], *[mask] * NEW]
    full = windows = 0

    def choose(hidden: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        logits = np.asarray(project_logits(forward, weights, hidden), np.float64)[0]
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        shares[..., mask] = 0.0
        return shares.argmax(axis=-1), shares.max(axis=-1)

    for start in range(length - NEW, length, BLOCK):
        hidden, cache = fill_rows(forward, weights, cache, jnp.array(canvas), lengths, jnp.zeros(1, jnp.int32))
        canvas[0, start] = choose(hidden[:, start - 1 : start])[0][0]
        full += 1
        while (masked := canvas[0, start : start + BLOCK] == mask).any():
            tokens = jnp.array(canvas[:, start : start + BLOCK])
            hidden, cache = run_window(forward, weights, cache, tokens, jnp.array([start]), lengths)
            # The first position keeps its own output, and has a token since the refresh.
            chosen, certainty = choose(hidden[:, np.maximum(np.arange(BLOCK) - 1, 0)])
            certainty = np.where(masked, certainty, -1.0)
            for place in np.flatnonzero(masked):
                if certainty[place] >= threshold or place == certainty.argmax():
                    canvas[0, start + place] = chosen[place]
            windows += 1
        if np.isin(canvas[0, length - NEW : start + BLOCK], ends).any():
            break
    return canvas[0, length - NEW : length].tolist(), full, windows


@pytest.mark.parametrize(
    ("threshold", "stops"), [(0.2, False), pytest.param(0.9, False, marks=pytest.mark.slow), (0.9, True)]
)
def test_the_baseline_is_the_published_rule(threshold: float, stops: bool) -> None:
    # A trained model, because the confidences of a random one tie within rounding.
    engine = Engine.load(DEMO, "tensor=1", "float32")
    ids = np.array([engine.tokenizer.encode("def is_even(number):\n")], np.int32)
    baseline = FastDLLMBaseline(engine, NEW, BLOCK, threshold=threshold)
    ends: tuple[int, ...] = ()
    if stops:  # a token of the first block, so that the second block does not run
        ends = (int(baseline(ids)[0][BLOCK // 2]),)
        baseline = FastDLLMBaseline(engine, NEW, BLOCK, ends, threshold)
    found, passes, positions = baseline(ids)
    expected, full, windows = by_hand(engine, ids, threshold, ends)
    assert full == (1 if stops else NEW // BLOCK)
    assert found.tolist() == expected
    assert passes == full + windows
    assert positions == full * (ids.shape[1] + NEW) + windows * BLOCK
    if threshold < 0.9:
        assert windows < full * (BLOCK - 1), "a window commits several tokens if their probabilities are high enough"


@pytest.mark.parametrize("threshold", [0.4, pytest.param(0.9, marks=pytest.mark.slow)])
def test_the_baseline_is_the_preset(threshold: float) -> None:
    engine = Engine.load(DEMO, "tensor=1", "float32")
    config = DiffusionConfig.fast_dllm(NEW, block_length=BLOCK, threshold=threshold)
    baseline = FastDLLMBaseline(engine, NEW, BLOCK, threshold=threshold)
    for prompt in ("def is_even(number):\n", "import math\n\n\ndef area(radius):\n"):
        ids = np.array([engine.tokenizer.encode(prompt)], np.int32)
        tokens, forwards, positions = baseline(ids)
        found = engine.generate_tokens(ids, None, config)
        np.testing.assert_array_equal(found.sequences[0, ids.shape[1] :], tokens)
        assert (found.stats.forwards, found.stats.positions) == (forwards, positions)


def test_speeds_of_rounds() -> None:
    ours, exact = Timing.of([0.5, 0.25, 0.5], [0.1] * 3), Timing.of([1.0, 1.0, 2.0], [0.1] * 3)
    found = speeds(ours, exact, tokens=10, exact_tokens=20)
    assert found["tokens_per_second"] == pytest.approx(80 / 3)
    assert (found["tokens_per_second_minimum"], found["tokens_per_second_maximum"]) == (20.0, 40.0)
    assert (found["of_exact_minimum"], found["of_exact"], found["of_exact_maximum"]) == (1.0, 2.0, 2.0)
    assert "of_exact" not in speeds(ours, None, 10, 0)


def test_a_small_run(tmp_path: Path) -> None:
    values = flags.FlagValues()
    diffusion_modes.define_flags(values)
    names = ["exact", PUBLISHED, "dual_8"]
    arguments = ["--prompts=2", "--trials=2", "--timed_prompts=1", f"--modes={','.join(names)}"]
    values(["diffusion_modes", *arguments, "--new_tokens=32", f"--output_dir={tmp_path}"])
    diffusion_modes.main(values)
    record = json.loads((tmp_path / "diffusion_modes.json").read_text())
    results = record["results"]
    assert list(results) == names
    assert results["exact"]["of_exact"] == 1.0
    assert results["exact"]["to_exact"]["difference"] == 0.0
    assert all(len(row["passes"]) == 2 and row["passed"] == sum(row["passes"]) for row in results.values())
    # With wrong texts, none would pass.
    assert all(row["passed"] for row in results.values())
    assert all(row["forwards_per_token"] > 0 and row["tokens_per_second"] > 0 for row in results.values())
    assert record["recommended"]["exact"]["mode"] == "exact"
    assert record["recommended"]["fastest"]["mode"] in names
    for found in results[PUBLISHED]["beside_baseline"].values():
        assert found["tokens_equal"] == 1.0
        assert found["pairs"] == 2
    # Without early stop, both loops make the same passes.
    same = results[PUBLISHED]["beside_baseline"]["full canvas"]
    assert same["ours"]["forwards_per_token"] == same["baseline"]["forwards_per_token"]
    assert (tmp_path / "diffusion_modes.png").stat().st_size > 10_000
    table = modes_table(record)
    assert table.count("\n| `") + table.count("\n| **`") == 5, "a row per mode, and two of the loops"


def test_a_written_function_is_executed() -> None:
    code = "def double(number):\n    return 2 * number\n"
    assert passes(code, ("assert double(3) == 6",))
    assert not passes(code, ("assert double(3) == 7",))
    assert not passes("def double(number):\n    return open\n", ("assert double(3) == 6",))


def test_every_mode_is_a_valid_configuration() -> None:
    base = DiffusionConfig(max_new_tokens=64, steps=64, algorithm="entropy", early_stop=True)
    model = parse_config(open_folder(DEMO).config)
    for mode in MODES.values():
        config = base.replace(**mode.changes)
        assert config.early_stop, "all modes end rows alike"
        values = flags.FlagValues()
        define_decoding_flags(values)
        values(["generate", *mode.flags(64).split()], known_only=True)
        selected = decoding_config(values, open_folder(DEMO), model)
        # A parallel rule needs no number of steps.
        assert (selected if config.parallel == "none" else selected.replace(steps=64)) == config
    published = DiffusionConfig.fast_dllm(64, early_stop=True)
    assert base.replace(**MODES[PUBLISHED].changes) == published


def test_a_likelihood_is_of_hidden_tokens_alone() -> None:
    """Hidden tokens cost 2 nats each, whatever share of them is hidden; visible ones must not count."""
    mask, seen = 9, []

    def score(ids: np.ndarray, targets: np.ndarray, real: np.ndarray) -> np.ndarray:
        hidden = ids == mask
        assert (targets[~hidden] == ids[~hidden]).all()
        assert not hidden[:, :3].any()
        seen.append(hidden.sum() / real.sum())
        return np.where(hidden, -2.0, -1e6)

    engine = cast(Engine, SimpleNamespace(config=SimpleNamespace(mask_token_id=mask), score=score))
    prompts, completions = [np.array([5, 6, 7])] * 40, [np.arange(96) % 7] * 40
    assert likelihood(engine, prompts, completions, 96) == pytest.approx(2.0, rel=0.02)
    assert len(seen) == 2
    assert 0.4 < seen[0] < 0.6


def test_modes_are_compared_on_the_same_tasks() -> None:
    theirs = [1] * 480 + [0] * 120
    same = paired_difference(theirs, theirs)
    assert (same["difference"], same["equal"]) == (0.0, True)
    assert same["interval"] == [-0.0033, 0.0033]
    # 6 lost, 4 won: the interval is that of McNemar's discordant pairs, not that of two independent shares.
    ours = [0] * 6 + [1] * 478 + [0] * 116
    found = paired_difference(ours, theirs)
    assert found["difference"] == pytest.approx(-2 / 600, abs=1e-4)
    assert found["interval"] == pytest.approx([-0.0141, 0.0075], abs=1e-4)
    assert found["equal"]
    assert not paired_difference([0] * 20 + [1] * 480 + [0] * 100, [1] * 500 + [0] * 100)["equal"]


def row_of(positions: float, passed: int, speed: float, equal: bool) -> dict[str, Any]:
    return {
        **share("passed", passed, 600), **share("parse", 590, 600), "positions_per_token": positions,
        "tokens_per_second": speed, "tokens_per_second_deviation": 2.0, "forwards_per_token": 2.0,
        "to_exact": {"difference": -0.015, "interval": [-0.0301, 0.001], "equal": equal},
        "to_published": {"difference": 0.02, "interval": [0.01, 0.03], "equal": passed >= 490},
        "nats_per_token": 1.5, "weight_bytes": 24_000_000, "cache_bytes": 0,
    }  # fmt: skip


RESULTS = {
    "exact": row_of(90.0, 500, 100.0, True),
    "a": row_of(40.0, 495, 200.0, True),
    "dominated": row_of(50.0, 490, 210.0, False),
    "b": row_of(10.0, 400, 900.0, False),
    "like b": row_of(10.0, 400, 950.0, False),
}


def test_modes_that_no_other_mode_beats() -> None:
    assert pareto_front(RESULTS) == ["b", "a", "exact"]
    goals = {"exact": "exact", "fast at no measured loss": "a", "fastest": "like b"}
    assert recommended(RESULTS) == goals
    assert recommended({"b": RESULTS["b"]}) == {"fastest": "b"}


def test_the_goal_of_half_the_positions_counts_only_modes_of_equal_quality() -> None:
    assert half_the_positions(RESULTS, "dominated") == {
        "mode": "a", "published": "dominated", "share": 0.8, "met": False,
    }  # fmt: skip
    found = half_the_positions(RESULTS, "exact")
    assert found is not None
    assert found["met"]
    assert half_the_positions(RESULTS, "missing") is None
    assert half_the_positions({"exact": RESULTS["exact"]}, "exact") is None
    others = {name: RESULTS[name] for name in ("b", "exact")}
    unknown = {"mode": None, "published": "exact", "share": None, "met": False}
    assert half_the_positions(others, "exact") == unknown, "no mode is known to be equal to it"
    assert "not met" in "\n".join(goal_lines({"results": others, "recommended": {}, "half_the_positions": unknown}))


def test_six_modes_matter() -> None:
    goals = recommended(RESULTS)
    assert modes_that_matter(RESULTS, goals, "dominated") == ["exact", "a", "like b", "dominated", "b"]
    many = {f"front {number}": row_of(number, 100 + number, 1.0, False) for number in range(1, 9)} | RESULTS
    found = modes_that_matter(many, goals, "dominated")
    assert found == ["exact", "a", "like b", "dominated", "b", "front 8"]
    cheaper = row_of(39.0, 490, 1.0, False)
    assert modes_that_matter(RESULTS | {"cheaper": cheaper}, goals, "dominated")[4] == "cheaper", "half the positions"


def drawn_labels(axis: Any) -> list[Any]:
    """Return the labels of the ticks in view; matplotlib also places some beyond it, and does not draw them."""
    low, high = axis.get_view_interval()
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


@pytest.mark.parametrize("is_committed", [False, True])
def test_names_stand_beside_their_points(is_committed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results, published, six = RESULTS, "dominated", ["exact", "a", "like b", "dominated", "b"]
    if is_committed:
        results = json.loads(Path("benchmarks/results/diffusion_modes.json").read_text())["results"]
        published = PUBLISHED
        six = [
            "exact", "dual_8_once_at_0.8", "fast_dllm", "dual_4_once_at_0.7", "dual_8_schedule",
            "dual_8_once_entropy_bound",
        ]  # fmt: skip
    figures = captured(monkeypatch)
    draw_modes(results, recommended(results), published, tmp_path / "modes.png")
    (figure,) = figures
    (axes,) = figure.axes
    assert_texts_are_apart(figure, [*axes.get_xticklabels(), *drawn_labels(axes.yaxis)])
    assert not figure.legends
    assert axes.get_legend() is None
    points, bars = (
        {
            name: axes.transData.transform([(row["positions_per_token"], rate) for rate in rates(row)])
            for name, row in results.items()
        }
        for rates in (lambda row: [row["passed_rate"]] * 2, lambda row: row["passed_rate_95"])
    )
    names = {text.get_text().split("\n")[0]: text.get_window_extent() for text in axes.texts}
    assert sorted(names) == sorted(six)
    for name, box in names.items():
        assert min(distance(box, points[other]) for other in results) > 0, "no point is covered"
        others = [distance(box, bars[other]) for other in six if (bars[other] != bars[name]).any()]
        assert 0 < distance(box, bars[name]) < min(others), f"{name} does not stand beside its own point"


def distance(box: Any, bar: np.ndarray) -> float:
    """Return the distance between a box and a vertical line."""
    (x, low), (_, high) = bar
    return float(np.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - high, 0, low - box.y1)))


def test_the_interval_of_a_median() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # Of 100 values, the order statistics 40 and 61, which contain the median with 96.5 %
    assert median_interval([float(value) for value in range(100)]) == (39.0, 60.0)


def test_both_loops_take_turns_on_the_same_prompts() -> None:
    engine = Engine.load(DEMO, "tensor=1", "float32")
    base = DiffusionConfig(max_new_tokens=32, steps=32, algorithm="entropy", early_stop=True)
    texts = ("def is_even(number):\n", "def double(number):\n")
    prompts = [np.array(engine.tokenizer.encode(text), np.int32) for text in texts]
    found = beside_baseline(engine, MODES["fast_dllm_8"], base, prompts, rounds=2)
    assert (found["pairs"], found["prompts"], found["tokens_equal"]) == (4, 2, 1.0)
    assert found["ours"]["forwards_per_token"] <= found["baseline"]["forwards_per_token"]
    low, middle, high = (found["times_as_fast"][name] for name in ("low", "median", "high"))
    assert low <= middle <= high


def test_cells_of_the_table() -> None:
    record = {
        "results": {"exact": RESULTS["exact"], "dual": RESULTS["a"] | {"exact_agreement": 0.52}},
        "settings": {"prompts": 3, "new_tokens": 64, "cores": 2, "trials": 5, "timed_prompts": 2},
        "recommended": {"exact": {"mode": "exact", "flags": MODES["exact"].flags(64)}},
        "half_the_positions": {"mode": "dual", "published": "exact", "share": 0.444, "met": True},
        "notes": ["the machine was busy"],
        "machine": {"processor": "Some CPU"},
        "versions": {"jax": "0.0"},
    }
    lines = modes_table(record).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == lines[3].count("|")
    assert lines[-1] == "Note: the machine was busy."
    assert lines[3].startswith(
        "| **`dual`** | 82.5% (79.3% to 85.3%) | -1.5 (-3.0 to +0.1) = | +2.0 (+1.0 to +3.0) = | 40.0 | 2.00 | 200 "
    )
    assert "speed vs exact" not in lines[0], "no mode has that figure"
    assert (
        "| exact | `exact` | `--preset=class --max_new_tokens=64 --steps=64 --algorithm=entropy --quantize=none "
        "--kv_cache=model --dtype=float32` |" in lines
    )
    assert any(
        line
        == "Goal, half the computed positions of `exact` at equal quality: met. `dual` has 0.44 times its positions, "
        "and +2.0 (+1.0 to +3.0) points more tasks pass."
        for line in lines
    )


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--checkpoint=/nowhere", "held_out_tasks.jsonl"),
        ("--modes=exact,warp", "warp"),
        ("--new_tokens=40", "a multiple of its blocks of 32"),
        ("--plot=/dev/null/speed.png", "not a folder"),
    ],
)
def test_mistakes(argument: str, said: str, tmp_path: Path) -> None:
    values = flags.FlagValues()
    diffusion_modes.define_flags(values)
    values(["diffusion_modes", argument, f"--output_dir={tmp_path}"])
    with pytest.raises(InputError, match=said):
        diffusion_modes.main(values)
