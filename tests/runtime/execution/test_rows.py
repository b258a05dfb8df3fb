"""A row's tokens are its own: they depend on its prompt, its seed and the request, and on nothing else.

Ragged, padded, bucketed, split and sharded rows are compared with the rows alone, step by step. Where two runs part,
the margin between the choices is worked out in float64 and printed; more than rounding in the logits is a failure.

The decoding loop is also written out here once more, row by row in numpy, from the description of the algorithm alone;
of the implementation it uses the logits and the random bits.

Dimension letters: S canvas, V vocab.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from runtime import DiffusionConfig, Engine, GenerationResult
from runtime.decoding import sampling
from runtime.decoding.sampling import ALGORITHMS
from runtime.decoding.schedule import transfer_ratios
from runtime.execution.rows import MAX_SAMPLES, bucket_length, row_seed, seed_words
from tests import golden_cases
from tests.divergence import ROUNDING

MASK = 300
NEW_TOKENS = 16
SEEDS = (11, 2**63 - 1, 13, 0)
# With the new tokens the third fills a bucket to the last place: alone it has no filler.
LENGTHS = (1, 7, 48, 100)
RANKED = ("maskgit_plus", "topk_margin", "entropy")

MODES: dict[str, dict[str, Any]] = {
    **{f"{algorithm}-greedy": {"algorithm": algorithm} for algorithm in ALGORITHMS},
    **{
        f"{algorithm}-sampled": {"algorithm": algorithm, "temperature": 0.7, "top_p": 0.9, "top_k": 40}
        for algorithm in ALGORITHMS
    },
    "entropy-positions": {"algorithm": "entropy", "temperature": 0.7, "alg_temp": 0.5},
}


def request(mode: str, **changes: Any) -> DiffusionConfig:
    return DiffusionConfig(**({"max_new_tokens": NEW_TOKENS, "steps": 11, "seed": SEEDS} | MODES[mode] | changes))


@functools.cache
def ragged_rows() -> tuple[np.ndarray, np.ndarray]:
    """Four left-padded rows: one that is a mask alone, one that begins with one, one without, and a long one.

    The first is nothing but masks when it starts: all its positions are equal then, and tie but for rounding.
    The padding is anything, masks and ids outside the vocabulary included.
    """
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, MASK, length) for length in LENGTHS]
    rows[0][0] = MASK
    rows[1][[0, 3]] = MASK
    rows[3][[20, 21, 50, 98, 99]] = MASK
    width = max(LENGTHS)
    ids = np.where(generator.random((len(rows), width)) < 0.3, MASK, generator.integers(-5, 999, (len(rows), width)))
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return ids, mask


@functools.cache
def run(mesh: str, mode: str) -> GenerationResult:
    """All four rows at once, by mesh and mode."""
    return golden_cases.engine(mesh).generate_tokens(*ragged_rows(), request(mode), history=True)


def alone(row: int) -> np.ndarray:
    """One row without its padding: ``[1, length]``."""
    return ragged_rows()[0][row : row + 1, max(LENGTHS) - LENGTHS[row] :]


def real(values: np.ndarray, row: int) -> np.ndarray:
    """The part of a row that is not padding: ``[..., 4, S + N]`` -> ``[..., length + N]``."""
    return values[..., row, max(LENGTHS) - LENGTHS[row] :]


# ---- the algorithm once more ------------------------------------------------------------------------------------


@functools.cache
def bits_program(draw: Any, stream: int, shape: tuple[int, ...]) -> Any:
    def bits(words: jax.Array, step: jax.Array) -> jax.Array:
        positions = np.arange(max(LENGTHS) + NEW_TOKENS, dtype=np.int32)[None]
        return jax.vmap(lambda key: draw(key, shape, np.float32))(
            sampling.position_keys(words, step, stream, positions)[0]
        )

    return jax.jit(bits)


def random_bits(draw: Any, seed: int, step: int, stream: int, positions: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers of one row and step, float32 ``[positions, *shape]``."""
    return np.asarray(bits_program(draw, stream, shape)(seed_words([seed]), np.int32(step)))[:positions]


def model_logits(engine: Engine, canvas: np.ndarray) -> np.ndarray:
    """Shifted logits float64 ``[S, V]`` of one row, run in the shape of the others so that nothing is compiled."""
    width = max(LENGTHS)
    rows, mask = np.zeros((4, max(width, len(canvas))), np.int64), np.zeros((4, max(width, len(canvas))), np.int64)
    rows[0, rows.shape[1] - len(canvas) :] = canvas
    mask[0, rows.shape[1] - len(canvas) :] = 1
    mask[1:, -1] = 1
    logits = engine.logits(rows, mask)[0, rows.shape[1] - len(canvas) :].astype(np.float64)
    return np.concatenate([logits[:1], logits[:-1]])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def filtered(logits: np.ndarray, config: DiffusionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Tempered and filtered logits ``[S, V]``, and how far each position is from keeping other tokens ``[S]``."""
    if config.temperature:
        logits = logits / config.temperature
    gap = np.full(len(logits), np.inf)
    out = logits.copy()
    if config.top_p is not None and config.top_p < 1:
        for place, row in enumerate(logits):
            order = np.argsort(-row, kind="stable")
            before = np.concatenate([[0.0], np.cumsum(softmax(row)[order])[:-1]])  # mass of the tokens above
            out[place, order[before > config.top_p]] = -np.inf
            gap[place] = np.abs(before - config.top_p).min()
    if config.top_k is not None and config.top_k < logits.shape[1]:
        ranked = -np.sort(-out, axis=-1)
        last, next_one = ranked[:, config.top_k - 1], ranked[:, config.top_k]
        out = np.where(out >= last[:, None], out, -np.inf)
        gap = np.where(np.isfinite(next_one), np.minimum(gap, last - np.where(np.isfinite(next_one), next_one, 0)), gap)
    return out, gap


def confidences(probabilities: np.ndarray, tokens: np.ndarray, algorithm: str) -> np.ndarray:
    ranked = -np.sort(-probabilities, axis=-1)
    return {
        "origin": np.zeros(len(tokens)),
        "maskgit_plus": probabilities[np.arange(len(tokens)), tokens],
        "topk_margin": ranked[:, 0] - ranked[:, 1],
        "entropy": (probabilities * np.log(probabilities + 1e-10)).sum(axis=-1),
    }[algorithm]


class Step:
    """What one denoise step makes of one row, and what each of its choices hangs on."""

    def __init__(self, engine: Engine, before: np.ndarray, config: DiffusionConfig, seed: int, step: int) -> None:
        masked = np.flatnonzero(before == MASK)
        times = torch.linspace(1, config.eps, config.steps + 1)
        ratio = 1 - times[step + 1] / times[step]
        last = step == config.steps - 1
        self.before, self.config = before, config
        self.count = len(masked) if last else int(torch.tensor(float(len(masked))) * ratio)
        logits = model_logits(engine, before)
        if config.suppress_mask:
            logits[:, MASK] = -np.inf
        self.scores, self.filter_gap = filtered(logits, config)
        probabilities = softmax(self.scores)
        if config.temperature:
            self.scores = self.scores + random_bits(jax.random.gumbel, seed, step, 0, len(before), (logits.shape[1],))
        self.tokens = self.scores.argmax(axis=-1)
        self.confidence = confidences(probabilities, self.tokens, config.algorithm)
        if config.algorithm == "origin":
            uniform = random_bits(jax.random.uniform, seed, step, 1, len(before), ())
            chosen = masked if last else masked[uniform[masked] < ratio.item()]
        else:
            if config.alg_temp:
                self.confidence = self.confidence / config.alg_temp
                self.confidence = self.confidence + random_bits(jax.random.gumbel, seed, step, 1, len(before), ())
            # Ties go to the lowest position.
            chosen = masked[np.argsort(-self.confidence[masked].astype(np.float32), kind="stable")[: self.count]]
        self.chosen = chosen
        self.after = before.copy()
        self.after[chosen] = self.tokens[chosen]

    def margin(self, one: np.ndarray, other: np.ndarray) -> float:
        """The least change of the logits, probabilities or confidences that makes two outcomes of the step one."""
        scale = self.config.temperature or 1.0
        places = np.flatnonzero(one != other)
        margins = [self.filter_gap[place] for place in places]
        confidence_scale = self.config.alg_temp or 1.0
        for place in places:
            pair = self.scores[place, [one[place], other[place]]]
            if np.isfinite(pair).all():
                margins.append(abs(pair[0] - pair[1]) * scale)
        added = [place for place in places if one[place] != MASK and other[place] == MASK]
        removed = [place for place in places if one[place] == MASK and other[place] != MASK]
        if len(added) == len(removed) > 0 and self.config.algorithm != "origin":
            return max(np.ptp(self.confidence[[*added, *removed]]) * confidence_scale, 0.0)
        return float(min(margins))


def assert_same_tokens(
    found: np.ndarray, expected: np.ndarray, start: np.ndarray, engine: Engine, config: DiffusionConfig, seed: int
) -> None:
    """Assert that two histories ``[steps, S]`` of one row from one canvas agree, but for ties within rounding."""
    assert found.shape == expected.shape
    if np.array_equal(found, expected):
        return
    step = next(step for step in range(len(expected)) if not np.array_equal(found[step], expected[step]))
    before = expected[step - 1] if step else start
    places = np.flatnonzero(found[step] != expected[step]).tolist()
    margin = Step(engine, before, config, seed, step).margin(found[step], expected[step])
    message = f"step {step}, positions {places}: margin {margin:.3g}"
    print(message)
    assert margin < ROUNDING, message


def start_canvas(row: int, new_tokens: int = NEW_TOKENS) -> np.ndarray:
    return np.concatenate([alone(row)[0], np.full(new_tokens, MASK)])


# ---- rows alone and together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_ragged_rows_equal_the_rows_alone(mode: str) -> None:
    """Left-padded rows beside a long one, so that they run in a longer bucket, against each row by itself."""
    engine = golden_cases.engine()
    together = run("data=1", mode)
    assert bucket_length(max(LENGTHS) + NEW_TOKENS) > bucket_length(LENGTHS[2] + NEW_TOKENS) == LENGTHS[2] + NEW_TOKENS
    # The long row is alone in the same bucket: that costs a program, so only some modes show it.
    rows = range(4) if mode in ("entropy-greedy", "origin-sampled") else range(3)
    for row in rows:
        config = request(mode, seed=[SEEDS[row]])
        own = engine.generate_tokens(alone(row), None, config, history=True)
        assert_same_tokens(
            real(together.history, row), own.history[:, 0], start_canvas(row), engine, config, SEEDS[row]
        )
        np.testing.assert_array_equal(real(together.history, row)[-1], real(together.sequences, row))
        np.testing.assert_array_equal(own.history[-1], own.sequences)


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_prompts_stay_as_they_were(mode: str) -> None:
    ids, mask = ragged_rows()
    result = run("data=1", mode)
    kept = (mask == 0) | (ids != MASK)
    width = ids.shape[1]
    np.testing.assert_array_equal(result.sequences[:, :width][kept], ids[kept])
    for canvas in result.history:
        np.testing.assert_array_equal(canvas[:, :width][kept], ids[kept])
    filled = np.concatenate([~kept, np.ones((4, NEW_TOKENS), bool)], axis=1)
    assert (result.commit_steps[~filled] == -1).all()
    left = (result.sequences == MASK) & filled
    assert (result.commit_steps[left] == -1).all()
    assert (result.commit_steps[filled & ~left] >= 0).all()
    assert result.stats.masks_left == left.sum()
    assert result.stats.tokens == (filled & ~left).sum()


@pytest.mark.parametrize("mode", MODES)
def test_each_row_transfers_its_own_count(mode: str) -> None:
    """The counts of the schedule for each row's own masks; the batch mean would give others."""
    config, result = request(mode), run("data=1", mode)
    if config.algorithm == "origin":
        counts = [(real(result.history, row) == MASK).sum(axis=1) for row in range(4)]
        assert len({tuple(count) for count in counts}) == 4, "rows with different seeds transfer different counts"
        return
    times = torch.linspace(1, config.eps, config.steps + 1)
    different = set()
    for row in range(4):
        canvases = [start_canvas(row), *real(result.history, row)]
        for step, (before, after) in enumerate(itertools.pairwise(canvases)):
            masked = int((before == MASK).sum())
            count = int(torch.tensor(float(masked)) * (1 - times[step + 1] / times[step]))
            count = masked if step == config.steps - 1 else count
            committed = int((before != after).sum())
            # A model that predicts MASK leaves the position: only that makes it fewer.
            assert committed <= count
            if committed < count:
                assert MASK in Step(golden_cases.engine(), before, config, SEEDS[row], step).tokens
            different.add((step, committed))
    assert len(different) > config.steps, "the rows never differ in their counts, so this shows nothing"


@pytest.mark.parametrize("mode", ["entropy-greedy", "maskgit_plus-sampled"])
def test_the_order_of_the_rows_is_nothing(mode: str) -> None:
    ids, mask = ragged_rows()
    order = [2, 0, 3, 1]
    config = request(mode, seed=[SEEDS[row] for row in order])
    mixed = golden_cases.engine().generate_tokens(ids[order], mask[order], config)
    np.testing.assert_array_equal(mixed.sequences, run("data=1", mode).sequences[order])


@pytest.mark.parametrize("mode", ["entropy-greedy", "origin-sampled"])
def test_rows_that_do_not_divide_the_data_axis(mode: str) -> None:
    ids, mask = (array[:3] for array in ragged_rows())
    config = request(mode, seed=SEEDS[:3])
    engine = golden_cases.engine("data=2")
    found = engine.generate_tokens(ids, mask, config, history=True)
    assert found.sequences.shape == (3, ids.shape[1] + NEW_TOKENS)
    assert found.history.shape == (config.steps, *found.sequences.shape)
    assert len(found.seeds) == 3
    for row in range(3):
        assert_same_tokens(
            real(found.history, row),
            real(run("data=1", mode).history, row),
            start_canvas(row),
            golden_cases.engine(),
            config,
            SEEDS[row],
        )
    if mode == "entropy-greedy":
        logits = engine.logits(ids, mask)
        assert len(logits) == 3
        np.testing.assert_allclose(logits, golden_cases.engine().logits(ids, mask), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("mesh", ["data=1", "data=2"])
def test_batches_split_for_memory(mesh: str) -> None:
    """Five rows, at most two (or three, which a data axis of two makes two) at a time, equal one batch of five."""
    golden = golden_cases.engine(mesh)
    ids, mask = ragged_rows()
    order = [2, 1, 0, 2, 1]
    config = request("entropy-sampled", seed=[5, 6, 7, 8, 9])
    most = 2 * golden.layout.spec.data - (mesh == "data=2")
    split = Engine(golden.layout, golden.weights, max_batch=most)
    found = split.generate_tokens(ids[order], mask[order], config, history=True)
    assert found.stats.batches == 3
    assert found.stats.compiled_programs == 1, "the last batch is padded to the shape of the others"
    assert found.seeds == [5, 6, 7, 8, 9]
    whole = golden.generate_tokens(ids[order], mask[order], config, history=True)
    assert whole.stats.batches == 1
    assert found.stats.forwards > whole.stats.forwards
    assert found.stats.tokens == whole.stats.tokens
    for row, source in enumerate(order):
        cut = slice(max(LENGTHS) - LENGTHS[source], None)
        assert_same_tokens(
            found.history[:, row, cut],
            whole.history[:, row, cut],
            start_canvas(source),
            golden_cases.engine(),
            config,
            config.seed[row],
        )
    np.testing.assert_array_equal(found.sequences[0], found.history[-1][0])


# ---- seeds ------------------------------------------------------------------------------------------------------


def test_one_seed_gives_each_row_its_own() -> None:
    """One seed for the batch; each row's own seed repeats it, in the batch and alone."""
    engine, prompt = golden_cases.engine(), np.repeat(alone(2), 4, axis=0)
    config = request("entropy-sampled", seed=3)
    result = engine.generate_tokens(prompt, None, config)
    assert result.seeds == [row_seed(3, row) for row in range(4)]
    assert len({row.tobytes() for row in result.sequences}) == 4, "four rows with four seeds, four samples"
    np.testing.assert_array_equal(engine.generate_tokens(prompt, None, config).sequences, result.sequences)
    again = engine.generate_tokens(prompt, None, config.replace(seed=result.seeds))
    np.testing.assert_array_equal(again.sequences, result.sequences)
    for row, seed in enumerate(result.seeds):
        own = engine.generate_tokens(prompt[row : row + 1], None, config.replace(seed=[seed]))
        np.testing.assert_array_equal(own.sequences[0], result.sequences[row])
        assert own.seeds == [seed]
    other = engine.generate_tokens(prompt, None, config.replace(seed=4))
    assert (other.sequences != result.sequences).any(axis=1).all()


def test_equal_seeds_give_equal_rows() -> None:
    result = golden_cases.engine().generate_tokens(
        np.repeat(alone(2), 4, axis=0), None, request("entropy-sampled", seed=[7, 8, 7, 7])
    )
    np.testing.assert_array_equal(result.sequences[[2, 3]], result.sequences[[0, 0]])
    assert (result.sequences[1] != result.sequences[0]).any()


def test_seeds_that_agree_in_their_low_or_high_half_differ() -> None:
    seeds = [1, 1 + (1 << 32), 1 << 32, (1 << 62) + 1]
    result = golden_cases.engine().generate_tokens(
        np.repeat(alone(2), 4, axis=0), None, request("entropy-sampled", seed=seeds)
    )
    assert len({row.tobytes() for row in result.sequences}) == 4


def test_several_samples_of_each_row() -> None:
    """Samples stand next to one another; each repeats with its own seed; the first has the row's very seed."""
    engine = golden_cases.engine()
    ids, mask = (array[1:3] for array in ragged_rows())
    config = request("entropy-sampled", seed=[21, 22])
    result = engine.generate_tokens(ids, mask, config, num_return_sequences=2)
    assert result.seeds == [21, row_seed(21, 0, 1), 22, row_seed(22, 0, 1)]
    kept = (mask == 1) & (ids != MASK)
    for row in range(4):
        np.testing.assert_array_equal(
            result.sequences[row, : ids.shape[1]][kept[row // 2]], ids[row // 2][kept[row // 2]]
        )
        source = 1 + row // 2
        own = engine.generate_tokens(alone(source), None, config.replace(seed=[result.seeds[row]]))
        np.testing.assert_array_equal(own.sequences[0], result.sequences[row, max(LENGTHS) - LENGTHS[source] :])
    assert (result.sequences[0] != result.sequences[1]).any()
    single = engine.generate_tokens(ids, mask, config.replace(seed=9), num_return_sequences=2)
    assert single.seeds == [row_seed(9, row, sample) for row in range(2) for sample in range(2)]
    explicit = engine.generate_tokens(ids, mask, config.replace(seed=[1, 2, 3, 4]), num_return_sequences=2)
    assert explicit.seeds == [1, 2, 3, 4]


def test_row_seeds_never_collide() -> None:
    seeds = {row_seed(seed, row, sample) for seed in range(10) for row in range(50) for sample in range(20)}
    assert len(seeds) == 10 * 50 * 20
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    # The digests of "1:11:1" and "11:1:1" are not the same text.
    assert row_seed(1, 11, 1) != row_seed(11, 1, 1)
    assert MAX_SAMPLES >= 1 << 16


# ---- infilling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["entropy-greedy", "origin-sampled"])
def test_infilling_without_new_tokens(mode: str) -> None:
    """Rows with masks anywhere, at position 0 too, one row without any, left padding, and nothing appended."""
    engine = golden_cases.engine()
    ids, mask = ragged_rows()
    config = request(mode, max_new_tokens=0, steps=4)
    result = engine.generate_tokens(ids, mask, config, history=True)
    assert result.sequences.shape == ids.shape
    np.testing.assert_array_equal(result.history[-1], result.sequences)
    np.testing.assert_array_equal(result.sequences[2], ids[2])
    for row in (0, 1):
        own = engine.generate_tokens(alone(row), None, config.replace(seed=[SEEDS[row]]), history=True)
        start = max(LENGTHS) - LENGTHS[row]
        assert_same_tokens(result.history[:, row, start:], own.history[:, 0], alone(row)[0], engine, config, SEEDS[row])
    if mode == "entropy-greedy":
        # A mask alone at position 0 takes the prediction of its own output.
        assert result.sequences[0, -1] == engine.logits([[MASK]])[0, 0].argmax()


def test_the_prediction_for_a_position_is_the_output_before_it() -> None:
    engine = golden_cases.engine()
    prompt = alone(2).copy()
    prompt[0, [0, 10]] = MASK
    result = engine.generate_tokens(prompt, None, request("entropy-greedy", max_new_tokens=0, steps=1, seed=1))
    logits = engine.logits(prompt)[0]
    assert result.sequences[0, 0] == logits[0].argmax()
    assert result.sequences[0, 10] == logits[9].argmax() != logits[10].argmax()


# ---- meshes -----------------------------------------------------------------------------------------------------


MESHES = ("tensor=8", "data=2,tensor=2", "sequence=4")
IN_CI = {
    *itertools.product(["tensor=8"], [f"{algorithm}-sampled" for algorithm in ALGORITHMS]),
    *itertools.product(["data=2,tensor=2"], ["origin-sampled", "entropy-sampled", "entropy-positions"]),
    *itertools.product(["sequence=4"], ["maskgit_plus-sampled", "topk_margin-sampled", "entropy-positions"]),
}


@pytest.mark.parametrize(
    ("mesh", "mode"),
    [
        pytest.param(*pair, marks=[] if pair in IN_CI else pytest.mark.slow)
        for pair in itertools.product([*MESHES, "tensor=16", "data=2,sequence=2,tensor=4"], MODES)
    ],
)
def test_seeded_runs_are_the_same_on_every_mesh(mesh: str, mode: str) -> None:
    found, expected = run(mesh, mode), run("data=1", mode)
    assert found.seeds == expected.seeds
    for row in range(4):
        assert_same_tokens(
            real(found.history, row),
            real(expected.history, row),
            start_canvas(row),
            golden_cases.engine(),
            request(mode),
            SEEDS[row],
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*MESHES, "sequence=2,tensor=4"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.endswith("greedy")])
def test_many_seeds_are_the_same_on_every_mesh(mesh: str, mode: str) -> None:
    for trial in range(20):
        config = request(mode, seed=[4 * trial + row for row in range(4)])
        found = golden_cases.engine(mesh).generate_tokens(*ragged_rows(), config, history=True)
        expected = golden_cases.engine().generate_tokens(*ragged_rows(), config, history=True)
        for row in range(4):
            assert_same_tokens(
                real(found.history, row),
                real(expected.history, row),
                start_canvas(row),
                golden_cases.engine(),
                config,
                4 * trial + row,
            )


@pytest.mark.parametrize("mesh", ["data=1", *MESHES])
@pytest.mark.parametrize("algorithm", RANKED)
def test_one_hot_ties_go_to_the_lowest_position(mesh: str, algorithm: str) -> None:
    """One token kept makes every position equally confident: exactly 1, or an entropy of exactly 0."""
    if mesh in ("data=2,tensor=2", "sequence=4") and algorithm != "entropy":
        pytest.skip("one algorithm is enough for this mesh")
    # The program is that of the sampled runs; one token kept leaves nothing to draw.
    result = golden_cases.engine(mesh).generate_tokens(
        *ragged_rows(), request(f"{algorithm}-sampled", top_k=1), history=True
    )
    for row in range(4):
        for before, after in itertools.pairwise([start_canvas(row), *real(result.history, row)]):
            masked = np.flatnonzero(before == MASK)
            committed = np.flatnonzero(before != after)
            np.testing.assert_array_equal(committed, masked[: len(committed)])


# ---- the schedule -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch without vector instructions rounds once more in linspace",
)
@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-2, 0.1, 0.3333333, 0.5, 0.9, 0.999])
def test_ratios_are_those_of_torch(eps: float) -> None:
    """Bit for bit, and with them every count ``int(masks * ratio)``."""
    generator = np.random.default_rng(int(eps * 1e6))
    for steps in [*range(1, 600), 979, 983, 1009, 1024, 4096, 65536, *generator.integers(300, 5000, 40).tolist()]:
        times = torch.linspace(1, eps, steps + 1)
        expected = (1 - times[1:] / times[:-1]).numpy()
        expected[-1] = 1.0
        found = transfer_ratios(steps, eps)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32), err_msg=f"{steps} steps, {eps}")
    assert any(
        not np.array_equal(1 - other[1:] / other[:-1], transfer_ratios(steps, eps)[: len(other) - 1])
        for steps in range(2, 40)
        for other in [np.linspace(1, eps, steps + 1, dtype=np.float32)]
    ), "numpy's own linspace would have done"


@pytest.mark.parametrize(("tokens", "steps"), [(16, 11), (16, 16), (5, 16), (1, 16), (16, 1), (3, 2)])
def test_steps_that_transfer_nothing(tokens: int, steps: int) -> None:
    """They run no forward pass, and stand in the history all the same."""
    engine = golden_cases.engine()
    config = request("entropy-greedy", max_new_tokens=tokens, steps=steps, seed=1, suppress_mask=True)
    result = engine.generate_tokens(alone(2), None, config, history=True)
    times = torch.linspace(1, 1e-3, steps + 1)
    left, counts = tokens, []
    for step in range(steps):
        count = left if step == steps - 1 else int(torch.tensor(float(left)) * (1 - times[step + 1] / times[step]))
        counts.append(count)
        left -= count
    assert result.history.shape == (steps, 1, LENGTHS[2] + tokens)
    canvases = [start_canvas(2, tokens), *result.history[:, 0]]
    assert [int((before != after).sum()) for before, after in itertools.pairwise(canvases)] == counts
    assert result.stats.forwards == sum(count > 0 for count in counts)
    assert result.stats.steps == steps
    assert (0 in counts) == (steps >= 16)
    np.testing.assert_array_equal(result.history[-1], result.sequences)
    committed = np.concatenate([np.full(count, step) for step, count in enumerate(counts)])
    np.testing.assert_array_equal(np.sort(result.commit_steps[0, LENGTHS[2] :]), committed)


# ---- a model that predicts MASK ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fond_of_masks(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The golden model with its favourite token's row of the head, a little longer, in the place of the mask's."""
    folder = tmp_path_factory.mktemp("models") / "fond_of_masks"
    folder.mkdir()
    shutil.copy(golden_cases.FOLDER / "config.json", folder)
    weights = load_file(golden_cases.FOLDER / "model.safetensors")
    head = weights["lm_head.weight"].copy()
    generated = run("data=1", "entropy-greedy").sequences[:, max(LENGTHS) :]
    head[MASK] = 1.1 * head[np.bincount(generated.ravel()).argmax()]
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors")
    return Engine.load(folder, mesh="data=1", dtype="float32")


def test_predicted_masks_stay_masked_and_are_counted(fond_of_masks: Engine) -> None:
    config = request("entropy-greedy")
    result = fond_of_masks.generate_tokens(*ragged_rows(), config, history=True)
    left = sum(int((real(result.sequences, row) == MASK).sum()) for row in range(4))
    assert 0 < left < 4 * NEW_TOKENS
    assert result.stats.masks_left == left
    for row in range(4):
        still = real(result.sequences, row) == MASK
        assert (real(result.commit_steps, row)[still] == -1).all(), "what is masked was set by no step"
    assert result.stats.tokens == (result.commit_steps >= 0).sum()
    for row in range(4):
        check_against_the_algorithm(fond_of_masks, real(result.history, row), start_canvas(row), config, SEEDS[row])
    np.testing.assert_array_equal(result.history[-1], result.sequences)


def test_suppressed_masks_are_never_chosen(fond_of_masks: Engine) -> None:
    config = request("entropy-greedy", suppress_mask=True)
    result = fond_of_masks.generate_tokens(*ragged_rows(), config, history=True)
    assert result.stats.masks_left == 0
    assert not any((real(result.sequences, row) == MASK).any() for row in range(4))
    # Without that row of the head the two models are one.
    golden = golden_cases.engine().generate_tokens(*ragged_rows(), config, history=True)
    for row in range(4):
        assert_same_tokens(
            real(result.history, row),
            real(golden.history, row),
            start_canvas(row),
            golden_cases.engine(),
            config,
            SEEDS[row],
        )


# ---- against the algorithm, written out above -------------------------------------------------------------------


def check_against_the_algorithm(
    engine: Engine, history: np.ndarray, start: np.ndarray, config: DiffusionConfig, seed: int
) -> int:
    """Check every step of one row, each from the canvas that the run itself had before; count the ties met."""
    ties = 0
    for step, (before, after) in enumerate(itertools.pairwise([start, *history])):
        expected = Step(engine, before, config, seed, step)
        if not np.array_equal(after, expected.after):
            places = np.flatnonzero(after != expected.after).tolist()
            margin = expected.margin(after, expected.after)
            message = f"step {step}, positions {places}: margin {margin:.3g}, {config}"
            print(message)
            assert margin < ROUNDING, message
            ties += 1
    return ties


def random_request(number: int) -> DiffusionConfig:
    """A greedy request, its settings drawn from all that matter."""
    generator = np.random.default_rng([number, 7])
    return DiffusionConfig(
        algorithm=ALGORITHMS[number % 4],
        max_new_tokens=int(generator.integers(1, NEW_TOKENS + 1)),
        steps=int(generator.integers(1, 17)),
        top_p=None if number % 8 < 2 else float(generator.choice([0.05, 0.3, 0.7, 0.95, 0.999])),
        top_k=None if generator.random() < 0.4 else int(generator.choice([1, 2, 5, 50, 319, 320])),
        eps=float(generator.choice([1e-3, 0.01, 0.2])),
        seed=[int(seed) for seed in generator.integers(0, 1 << 63, 4)],
    )


@pytest.mark.parametrize("number", [*range(12), *(pytest.param(one, marks=pytest.mark.slow) for one in range(12, 80))])
def test_greedy_runs_follow_the_algorithm(number: int) -> None:
    engine, config = golden_cases.engine(), random_request(number)
    result = engine.generate_tokens(*ragged_rows(), config, history=True)
    ties = 0
    for row in range(4):
        start = start_canvas(row, config.max_new_tokens)
        ties += check_against_the_algorithm(engine, real(result.history, row), start, config, config.seed[row])
    assert ties <= 1, "rounding decides a choice in a blue moon"


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.endswith("greedy")])
def test_sampled_runs_follow_the_algorithm(mode: str) -> None:
    """The same with the random bits of each row, step and position."""
    config, result = request(mode), run("data=1", mode)
    ties = 0
    for row in range(4):
        ties += check_against_the_algorithm(
            golden_cases.engine(), real(result.history, row), start_canvas(row), config, SEEDS[row]
        )
    assert ties <= 1, "rounding decides a choice in a blue moon"


def test_the_golden_rows_have_the_masks_this_needs() -> None:
    config = json.loads((Path(golden_cases.FOLDER) / "config.json").read_text())
    assert config["mask_token_id"] == MASK
    assert golden_cases.engine().config.vocab_size == 320
