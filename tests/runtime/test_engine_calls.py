"""The engine's calls: compile counts, hooks, streaming, logits, scores, and what is said about bad requests.

Dimension letters: B batch, S sequence, V vocab.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import CheckpointError
from runtime import DiffusionConfig, Engine
from sharding.errors import InputError
from tests import golden_cases
from tests.divergence import ROUNDING

# Between meshes, and between buckets, logits differ by the rounding of float32 sums: relative to the largest of them.
LOGITS_ROUNDING = 1e-5 * 12

MASK = 300
VOCAB = 320
NEW_TOKENS = 12
LENGTHS = (20, 9, 1)
WIDTH = max(LENGTHS)
SEEDS = (3, 4, 5)

GREEDY = DiffusionConfig(max_new_tokens=NEW_TOKENS, steps=7, algorithm="entropy", seed=SEEDS)
SAMPLED = GREEDY.replace(algorithm="maskgit_plus", temperature=0.8, top_p=0.9, top_k=30, alg_temp=0.3)
ORIGIN = GREEDY.replace(algorithm="origin", temperature=0.8)
CONFIGS = {"greedy": GREEDY, "sampled": SAMPLED, "origin": ORIGIN}


@functools.cache
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Three left-padded rows with a mask in the first."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, MASK, (len(LENGTHS), WIDTH))
    ids[0, 4] = MASK
    return ids, (np.arange(WIDTH) >= WIDTH - np.array(LENGTHS)[:, None]).astype(int)


@functools.cache
def plain(name: str) -> Any:
    return golden_cases.engine().generate_tokens(*rows(), CONFIGS[name], history=True)


def shifted(logits: np.ndarray) -> np.ndarray:
    return np.concatenate([logits[:, :1], logits[:, :-1]], axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), dim=-1).numpy()


def gather(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]


# ---- compile counts ---------------------------------------------------------------------------------------------


def test_two_runs_of_the_same_bucket_compile_nothing_new() -> None:
    """Other numbers, other steps and other lengths within the bucket: the same program."""
    golden = golden_cases.engine()
    engine = Engine(golden.layout, golden.weights)
    ids, mask = rows()
    first = engine.generate_tokens(ids, mask, SAMPLED)
    assert first.stats.compiled_programs == engine.compiled_programs == 1
    assert first.stats.compile_seconds > 0
    again = [
        (ids, mask, SAMPLED),
        (ids[:, 5:], mask[:, 5:], SAMPLED.replace(max_new_tokens=30, steps=30)),
        (ids, None, SAMPLED.replace(temperature=0.1, top_p=0.5, top_k=2, alg_temp=2.0, eps=0.1, seed=8, steps=1)),
        (np.tile(ids, (1, 2)), None, SAMPLED.replace(max_new_tokens=24, top_p=None, steps=16)),
    ]
    for tokens, attention, config in again:
        stats = engine.generate_tokens(tokens, attention, config).stats
        assert stats.compiled_programs == 0, config
        assert stats.compile_seconds == 0
    list(engine.stream_tokens(ids, mask, SAMPLED, every=3))
    engine.generate_tokens(ids, mask, SAMPLED, tokens_hook=lambda *_: None)
    assert engine.compiled_programs == 1, "streaming and hooks between tokens run the same program"
    # What must be another program is one: the count means something.
    longer = np.tile(ids, (1, 4))
    assert engine.generate_tokens(longer, None, SAMPLED).stats.compiled_programs == 1
    assert engine.generate_tokens(longer, None, SAMPLED).stats.compiled_programs == 0


def test_logits_and_scores_compile_once_for_a_bucket() -> None:
    engine = golden_cases.engine()
    ids, mask = rows()
    for call in (engine.logits, lambda *arguments: engine.score(arguments[0], ids[:, -arguments[0].shape[1] :])):
        call(ids, mask)
        count = engine.compiled_programs
        call(ids[:, 3:], mask[:, 3:])
        call(ids, None)
        assert engine.compiled_programs == count
    engine.score(ids, ids, temperature=0.5)
    assert engine.compiled_programs == count


# ---- hooks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_hooks_that_do_nothing_change_nothing(name: str) -> None:
    calls: list[Any] = []
    canvases: list[np.ndarray] = []

    def watch(step: int | None, canvas: np.ndarray, logits: np.ndarray | None) -> None:
        calls.append(step)
        canvases.append(canvas.copy())
        assert logits is None, "nobody asked for logits"
        assert canvas.dtype == np.int32

    config = CONFIGS[name]
    result = golden_cases.engine().generate_tokens(*rows(), config, history=True, tokens_hook=watch)
    assert calls == [None, *range(config.steps)]
    np.testing.assert_array_equal(result.sequences, plain(name).sequences)
    np.testing.assert_array_equal(result.history, plain(name).history)
    np.testing.assert_array_equal(result.commit_steps, plain(name).commit_steps)
    assert result.stats.forwards == plain(name).stats.forwards
    assert result.stats.tokens == plain(name).stats.tokens
    ids, _ = rows()
    np.testing.assert_array_equal(canvases[0], np.pad(ids, ((0, 0), (0, NEW_TOKENS)), constant_values=MASK))
    np.testing.assert_array_equal(canvases[1:], result.history)


def seen_logits(engine: Engine, canvas: np.ndarray) -> np.ndarray:
    """What a hook ought to see for a canvas: shifted within each row, zero at padding."""
    mask = np.pad(rows()[1], ((0, 0), (0, NEW_TOKENS)), constant_values=1)
    raw = engine.logits(canvas, mask)
    out = np.zeros_like(raw)
    for row, length in enumerate(LENGTHS):
        start = WIDTH - length
        out[row : row + 1, start:] = shifted(raw[row : row + 1, start:])
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_hook_sees_shifted_logits(name: str) -> None:
    engine, config = golden_cases.engine(), CONFIGS[name]
    calls: list[tuple[str, int | None]] = []
    seen: list[np.ndarray] = []

    def logits_hook(step: int, canvas: np.ndarray, logits: np.ndarray) -> None:
        calls.append(("logits", step))
        assert logits.dtype == np.float32
        assert logits.shape == (len(LENGTHS), WIDTH + NEW_TOKENS, VOCAB)
        np.testing.assert_allclose(logits, seen_logits(engine, canvas), rtol=0, atol=ROUNDING)
        seen.append(logits)

    def tokens_hook(step: int | None, canvas: np.ndarray, logits: np.ndarray | None) -> None:
        calls.append(("tokens", step))
        assert (logits is None) == (step is None)
        if logits is not None:
            np.testing.assert_array_equal(logits, seen[-1])

    result = engine.generate_tokens(*rows(), config, history=True, tokens_hook=tokens_hook, logits_hook=logits_hook)
    each = [[("logits", step), ("tokens", step)] for step in range(config.steps)]
    assert calls == [("tokens", None), *itertools.chain(*each)]
    np.testing.assert_array_equal(result.sequences, plain(name).sequences)
    np.testing.assert_array_equal(result.history, plain(name).history)


def test_a_tokens_hook_may_change_the_canvas() -> None:
    """A token that it forces at the start stands, is read by the model, and is not counted as a mask."""
    engine = golden_cases.engine()
    place, token = WIDTH + 3, 17

    def force(step: int | None, canvas: np.ndarray, _: Any) -> np.ndarray | None:
        if step is None:
            canvas = canvas.copy()
            canvas[:, place] = token
            return canvas
        return None

    result = engine.generate_tokens(*rows(), GREEDY, history=True, tokens_hook=force)
    assert (result.history[:, :, place] == token).all()
    assert (result.sequences[:, place] == token).all()
    assert (result.commit_steps[:, place] == -1).all()
    # The same as a prompt that has the token already.
    ids, mask = rows()
    prompt = np.concatenate([ids, np.full((3, 3), MASK), np.full((3, 1), token), np.full((3, 8), MASK)], axis=1)
    same = engine.generate_tokens(
        prompt,
        np.pad(mask, ((0, 0), (0, NEW_TOKENS)), constant_values=1),
        GREEDY.replace(max_new_tokens=0),
        history=True,
    )
    np.testing.assert_array_equal(result.history, same.history)
    assert (result.sequences != plain("greedy").sequences).any()


def test_a_tokens_hook_may_mask_again() -> None:
    """What it masks anew is a mask like any other: it is filled by a later step, the last one at the latest."""
    place = WIDTH

    def mask_again(step: int | None, canvas: np.ndarray, _: Any) -> np.ndarray | None:
        if step == GREEDY.steps - 2:
            canvas = canvas.copy()
            canvas[:, place] = MASK
            return canvas
        return None

    result = golden_cases.engine().generate_tokens(*rows(), GREEDY, history=True, tokens_hook=mask_again)
    assert (result.history[-2, :, place] == MASK).all()
    assert (result.sequences[:, place] != MASK).all()
    assert (result.commit_steps[:, place] == GREEDY.steps - 1).all()


def test_masks_that_the_last_hook_leaves_are_counted() -> None:
    def mask_again(step: int | None, canvas: np.ndarray, _: Any) -> np.ndarray | None:
        if step != GREEDY.steps - 1:
            return None
        canvas = canvas.copy()
        canvas[:, WIDTH : WIDTH + 2] = MASK
        return canvas

    result = golden_cases.engine().generate_tokens(*rows(), GREEDY, history=True, tokens_hook=mask_again)
    assert (result.sequences[:, WIDTH : WIDTH + 2] == MASK).all()
    np.testing.assert_array_equal(result.history[-1], result.sequences)
    assert result.stats.masks_left == 6


def test_a_logits_hook_may_change_the_logits() -> None:
    """A token made impossible is never chosen, one made certain always is; padding and prompt stay."""
    ids, _ = rows()
    favourite = int(np.bincount(plain("greedy").sequences[:, WIDTH:].ravel()).argmax())

    def forbid(step: int, canvas: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits = logits.copy()
        logits[..., favourite] = -np.inf
        return logits

    result = golden_cases.engine().generate_tokens(*rows(), GREEDY, logits_hook=forbid)
    assert favourite in plain("greedy").sequences[:, WIDTH:]
    assert favourite not in result.sequences[:, WIDTH:]

    def insist(step: int, canvas: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits = np.zeros_like(logits)
        logits[..., 17] = 30
        return logits

    result = golden_cases.engine().generate_tokens(*rows(), SAMPLED, logits_hook=insist)
    assert (result.sequences[:, WIDTH:] == 17).all()
    assert result.sequences[0, 4] == 17
    kept = ids != MASK
    np.testing.assert_array_equal(result.sequences[:, :WIDTH][kept], ids[kept])


def test_hooks_on_a_mesh_with_filler_rows() -> None:
    """Three rows on a data axis of two: hooks see the three, and nothing else changes."""
    engine = golden_cases.engine("data=2,tensor=2")
    shapes = set()

    def watch(step: int | None, canvas: np.ndarray, logits: np.ndarray | None) -> None:
        shapes.add((canvas.shape, None if logits is None else logits.shape))

    result = engine.generate_tokens(*rows(), GREEDY, history=True, tokens_hook=watch, logits_hook=lambda *_: None)
    canvas = (3, WIDTH + NEW_TOKENS)
    assert shapes == {(canvas, None), (canvas, (*canvas, VOCAB))}
    np.testing.assert_array_equal(result.history, plain("greedy").history)


def test_hooks_that_return_nonsense() -> None:
    engine = golden_cases.engine()
    with pytest.raises(InputError, match=r"tokens_hook returned \[1, 2\]; expected \[3, 32\]"):
        engine.generate_tokens(*rows(), GREEDY, tokens_hook=lambda *_: np.zeros((1, 2), int))
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.generate_tokens(*rows(), GREEDY, tokens_hook=lambda _, canvas, __: np.full_like(canvas, VOCAB))
    with pytest.raises(InputError, match="logits_hook"):
        engine.generate_tokens(*rows(), GREEDY, logits_hook=lambda *_: np.zeros((1, 2)))


def test_a_hook_keeps_padding_that_is_no_token() -> None:
    """Padding may be any number; a hook that hands the canvas back unchanged has done nothing wrong."""
    ids, mask = rows()
    ids = np.where(mask == 1, ids, -100)
    result = golden_cases.engine().generate_tokens(ids, mask, GREEDY, tokens_hook=lambda _, canvas, __: canvas.copy())
    kept = np.pad(mask, ((0, 0), (0, NEW_TOKENS)), constant_values=1) == 1
    np.testing.assert_array_equal(result.sequences[kept], plain("greedy").sequences[kept])


# ---- streaming --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("every", [1, 3, 7, 100])
def test_streaming_ends_with_the_result(name: str, every: int) -> None:
    config, expected = CONFIGS[name], plain(name)
    found = list(golden_cases.engine().stream_tokens(*rows(), config, every=every))
    assert [step for step, _ in found] == [0, *range(every, config.steps, every), config.steps]
    np.testing.assert_array_equal(found[0][1], np.pad(rows()[0], ((0, 0), (0, NEW_TOKENS)), constant_values=MASK))
    for step, canvas in found[1:]:
        np.testing.assert_array_equal(canvas, expected.history[step - 1])
    np.testing.assert_array_equal(found[-1][1], expected.sequences)


def test_streaming_refuses_what_it_cannot_do() -> None:
    engine = golden_cases.engine()
    with pytest.raises(InputError, match="every"):
        list(engine.stream_tokens(*rows(), GREEDY, every=0))
    small = Engine(engine.layout, engine.weights, max_batch=2)
    with pytest.raises(InputError, match="3 rows"):
        list(small.stream_tokens(*rows(), GREEDY))
    with pytest.raises(InputError, match="3 rows"):
        small.generate_tokens(*rows(), GREEDY, tokens_hook=lambda *_: None)


# ---- logits and scores ------------------------------------------------------------------------------------------

MESHES = ("data=1", "tensor=8", "data=2,tensor=2", "sequence=4")


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_of_padded_rows_equal_the_rows_alone(mesh: str) -> None:
    ids, mask = rows()
    found = golden_cases.engine(mesh).logits(ids, mask)
    assert found.dtype == np.float32
    assert found.shape == (*ids.shape, VOCAB)
    for row, length in enumerate(LENGTHS):
        own = golden_cases.engine().logits(ids[row : row + 1, WIDTH - length :])
        np.testing.assert_allclose(found[row, WIDTH - length :], own[0], rtol=0, atol=LOGITS_ROUNDING)
        assert not found[row, : WIDTH - length].any()
    assert np.abs(golden_cases.engine().logits(ids) - found)[1, -1].max() > 1e-3, "padding would be seen if attended"


@pytest.mark.parametrize("mesh", MESHES)
def test_scores_are_the_log_probabilities_of_the_shifted_logits(mesh: str) -> None:
    ids, mask = rows()
    targets = np.random.default_rng(1).integers(0, VOCAB, ids.shape)
    engine = golden_cases.engine(mesh)
    for temperature in (1.0, 0.6):
        logits = golden_cases.engine().logits(ids) / temperature
        expected = gather(log_softmax(shifted(logits)), targets)
        found = engine.score(ids, targets, temperature=temperature)
        assert found.dtype == np.float32
        assert found.shape == ids.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS_ROUNDING)
    # With a mask each row is scored as if it were alone, and padding is zero.
    found = engine.score(ids, targets, mask)
    for row, length in enumerate(LENGTHS):
        start = WIDTH - length
        own = log_softmax(shifted(golden_cases.engine().logits(ids[row : row + 1, start:])))
        np.testing.assert_allclose(
            found[row, start:], gather(own, targets[row : row + 1, start:])[0], atol=LOGITS_ROUNDING
        )
        assert not found[row, :start].any()


def test_without_a_mask_pads_are_attended() -> None:
    """As the original's scoring pass does: padding is read, counted from position 0, and scored."""
    ids, mask = rows()
    engine = golden_cases.engine()
    attended, masked = engine.score(ids, ids), engine.score(ids, ids, mask)
    np.testing.assert_allclose(attended[0], masked[0], rtol=0, atol=ROUNDING)
    assert np.abs(attended - masked)[1, -5:].max() > 1e-3
    assert (attended != 0).all()
    other = ids.copy()
    other[1, 0] = (other[1, 0] + 1) % MASK
    assert np.abs(engine.score(other, ids) - attended)[1, -5:].max() > 1e-4


def test_coupled_grpo_log_probabilities() -> None:
    """Three noised copies of each completion, from scores and from logits, combined as the estimator does."""
    engine = golden_cases.engine()
    generator = np.random.default_rng(2)
    prompts, completions = rows()[0], generator.integers(0, MASK, (3, NEW_TOKENS))
    sequences = np.concatenate([prompts, completions], axis=1)
    share = generator.uniform(0.2, 0.8)
    chosen = generator.random(completions.shape) < share
    assert 0 < chosen.sum() < chosen.size
    noised = []
    for where in (np.ones_like(chosen), chosen, ~chosen):
        copy = sequences.copy()
        copy[:, WIDTH:] = np.where(where, MASK, completions)
        noised.append(copy)

    scores = [engine.score(copy, sequences)[:, WIDTH:].astype(np.float64) for copy in noised]
    from_scores = (scores[0] + np.where(chosen, scores[1] / share, scores[2] / (1 - share))) / 2

    from_logits = np.zeros(completions.shape)
    whole = [log_softmax(engine.logits(copy)) for copy in noised]
    for row, place in np.ndindex(completions.shape):
        values = [copy[row, WIDTH + place - 1, completions[row, place]] for copy in whole]
        weighted = values[1] / share if chosen[row, place] else values[2] / (1 - share)
        from_logits[row, place] = (values[0] + weighted) / 2
    np.testing.assert_allclose(from_scores, from_logits, rtol=0, atol=LOGITS_ROUNDING / min(share, 1 - share))
    assert np.abs(from_scores - scores[0]).max() > 0.1


# ---- bad requests -----------------------------------------------------------------------------------------------

GOOD = [[1, 2, 3]]

BAD_ROWS: dict[str, tuple[Any, Any, str]] = {
    "right padding": ([[1, 2, 3]], [[1, 1, 0]], r"row 0.*right padding.*left"),
    "a hole in the mask": ([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [1, 0, 1]], r"row 1.*between"),
    "a row without tokens": ([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [0, 0, 0]], r"row 1.*no token"),
    "an id too large": ([[1, 2, VOCAB]], None, r"row 0.*320.*outside the vocabulary of 320"),
    "a negative id": ([[1, -1, 2]], None, r"row 0.*-1.*outside the vocabulary"),
    "an id beyond 32 bits": ([[1, 2**40, 2]], None, "outside the vocabulary"),
    "an id beyond 64 bits": ([[1, 2**70, 2]], None, "integers"),
    "floats": ([[1.0, 2.0]], None, r"integers.*float64"),
    "booleans": ([[True, False]], None, r"integers.*bool"),
    "texts": ([["1", "2"]], None, "integers"),
    "nothing": (None, None, "integers"),
    "ragged lists": ([[1, 2], [3]], None, r"unequal length.*left.*attention_mask"),
    "one row without a batch": ([1, 2, 3], None, r"\[batch, sequence\].*\[3\]"),
    "three dimensions": ([[[1, 2, 3]]], None, r"\[1, 1, 3\]"),
    "no rows": (np.zeros((0, 3), int), None, r"\[0, 3\]"),
    "no columns": (np.zeros((2, 0), int), None, r"\[2, 0\]"),
    "a mask of another shape": ([[1, 2, 3]], [[1, 1]], r"attention_mask.*\[1, 2\].*\[1, 3\]"),
    "a mask of other numbers": ([[1, 2, 3]], [[0, 2, 1]], "attention_mask"),
    "a mask with NaN": ([[1, 2, 3]], [[np.nan, 1, 1]], "attention_mask"),
    "a ragged mask": ([[1, 2], [3, 4]], [[1, 1], [1]], "attention_mask"),
    "a mask of texts": ([[1, 2]], [["a", "b"]], "attention_mask"),
    "a prompt too long": (np.ones((1, 510), int), None, r"510 prompt tokens.*512"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(name: str) -> None:
    ids, mask, message = BAD_ROWS[name]
    engine = golden_cases.engine()
    config = DiffusionConfig(max_new_tokens=4, steps=2)
    with pytest.raises(InputError, match=f"(?s){message}"):
        engine.generate_tokens(ids, mask, config)
    with pytest.raises(InputError, match=f"(?s){message}"):
        next(engine.stream_tokens(ids, mask, config))
    if name != "a prompt too long":
        with pytest.raises(InputError):
            engine.logits(ids, mask)
        with pytest.raises(InputError):
            engine.score(ids, ids, mask)


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"steps": 0}, "steps is 0"),
    "negative steps": ({"steps": -3}, "steps is -3"),
    "half a step": ({"steps": 2.5}, r"steps is 2\.5"),
    "steps as a bool": ({"steps": True}, "steps is True"),
    "too many steps": ({"steps": 1 << 40}, "steps"),
    "steps as text": ({"steps": "8"}, "steps is '8'"),
    "no number of steps": ({"steps": None}, "steps is None"),
    "negative tokens": ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    "tokens as a bool": ({"max_new_tokens": False}, "max_new_tokens is False"),
    "tokens as a float": ({"max_new_tokens": 8.0}, r"max_new_tokens is 8\.0"),
    "a negative temperature": ({"temperature": -0.1}, r"temperature is -0\.1"),
    "no temperature": ({"temperature": None}, "temperature is None"),
    "a temperature that is not a number": ({"temperature": float("nan")}, "temperature is nan"),
    "an infinite temperature": ({"temperature": float("inf")}, "temperature is inf"),
    "a temperature as a bool": ({"temperature": True}, "temperature is True"),
    "a temperature as text": ({"temperature": "0.5"}, "temperature is '0.5'"),
    "an unknown algorithm": ({"algorithm": "best"}, r"'best'.*origin, maskgit_plus, topk_margin, entropy"),
    "no algorithm": ({"algorithm": None}, "algorithm None"),
    "a list for an algorithm": ({"algorithm": ["entropy"]}, "algorithm"),
    "top_p above 1": ({"top_p": 1.5}, r"top_p is 1\.5"),
    "top_p below 0": ({"top_p": -0.5}, r"top_p is -0\.5"),
    "top_p not a number": ({"top_p": float("nan")}, "top_p is nan"),
    "top_k of 0": ({"top_k": 0}, "top_k is 0"),
    "top_k as a float": ({"top_k": 5.0}, r"top_k is 5\.0"),
    "top_k as a bool": ({"top_k": True}, "top_k is True"),
    "a negative alg_temp": ({"alg_temp": -1.0}, r"alg_temp is -1\.0"),
    "alg_temp not a number": ({"alg_temp": float("nan")}, "alg_temp is nan"),
    "eps of 0": ({"eps": 0.0}, r"eps is 0\.0"),
    "eps of 1": ({"eps": 1.0}, r"eps is 1\.0"),
    "eps not a number": ({"eps": float("nan")}, "eps is nan"),
    "a negative seed": ({"seed": -1}, "seed is -1"),
    "a seed too large": ({"seed": 1 << 63}, "seed is 9223372036854775808"),
    "a seed as a float": ({"seed": 1.5}, r"seed is 1\.5"),
    "a seed as a bool": ({"seed": True}, "seed is True"),
    "a seed as text": ({"seed": "7"}, "seed is '7'"),
    "no seed": ({"seed": None}, "seed is None"),
    "a bad seed among good ones": ({"seed": [1, -2]}, "seed is -2"),
    "a seed not a number": ({"seed": [float("nan")]}, "seed is nan"),
    "an array of no dimension as a seed": ({"seed": np.array(1.5)}, "seed"),
    "an unknown confidence dtype": ({"confidence_dtype": "float16"}, "confidence_dtype 'float16'.*float32, model"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(name: str) -> None:
    changes, message = BAD_CONFIGS[name]
    with pytest.raises(InputError, match=f"(?s){message}"):
        DiffusionConfig(**changes)
    with pytest.raises(InputError, match=f"(?s){message}"):
        DiffusionConfig().replace(**changes)


def test_numbers_of_numpy_are_numbers() -> None:
    config = DiffusionConfig(
        steps=np.int64(4), max_new_tokens=np.int32(3), temperature=np.float32(0.5), seed=np.array([1, 2, 3])
    )
    result = golden_cases.engine().generate_tokens(*rows(), config)
    assert result.seeds == [1, 2, 3]


@pytest.mark.parametrize("changes", [{"temperature": 1e-40}, {"temperature": 1e-300}, {"alg_temp": 1e-300}])
def test_numbers_that_float32_cannot_hold(changes: dict[str, Any]) -> None:
    """A number above 0 that is 0 on the devices: refused, or a result of real tokens."""
    try:
        config = SAMPLED.replace(top_p=None, top_k=None, **changes)
    except InputError:
        return
    result = golden_cases.engine().generate_tokens(*rows(), config)
    assert 0 <= result.sequences.min() <= result.sequences.max() < VOCAB
    assert (result.commit_steps[:, WIDTH:] >= 0).mean() > 0.9, "positions are left masked"


def test_seeds_and_samples_that_do_not_fit() -> None:
    engine = golden_cases.engine()
    for seeds, samples in [([1, 2], 1), ([1, 2, 3, 4], 1), ([], 1), ([1] * 5, 2)]:
        with pytest.raises(InputError, match=f"{len(seeds)} seeds for 3 rows"):
            engine.generate_tokens(*rows(), GREEDY.replace(seed=seeds), num_return_sequences=samples)
    for samples in (0, -1, True, 1.0, None, 1 << 20):
        with pytest.raises(InputError, match="num_return_sequences"):
            engine.generate_tokens(*rows(), GREEDY, num_return_sequences=samples)


def test_nothing_to_fill() -> None:
    engine = golden_cases.engine()
    with pytest.raises(InputError, match=r"max_new_tokens is 0.*mask"):
        engine.generate_tokens(GOOD, None, DiffusionConfig(max_new_tokens=0, steps=2))
    # Masks in the padding are none.
    with pytest.raises(InputError, match=r"max_new_tokens is 0.*mask"):
        engine.generate_tokens([[MASK, 1, 2]], [[0, 1, 1]], DiffusionConfig(max_new_tokens=0, steps=2))


def test_prompts_longer_than_the_model_allows() -> None:
    engine = golden_cases.engine()
    with pytest.raises(InputError, match=r"row 1: 500 prompt tokens and 13 new ones make 513.*512"):
        engine.generate_tokens(
            np.ones((2, 500), int),
            np.stack([np.arange(500) >= 100, np.ones(500, bool)]).astype(int),
            DiffusionConfig(max_new_tokens=13, steps=2),
        )
    for call in (engine.logits, lambda ids: engine.score(ids, ids)):
        with pytest.raises(InputError, match=r"513.*512"):
            call(np.ones((1, 513), int))
    # Padding is not counted: this row has 3 tokens.
    wide = np.ones((1, 600), int)
    result = engine.generate_tokens(
        wide, (np.arange(600) >= 597).astype(int)[None], DiffusionConfig(max_new_tokens=4, steps=2)
    )
    assert result.sequences.shape == (1, 604)


def test_logits_of_a_row_in_wide_padding() -> None:
    """Padding is not counted against the model's positions by logits either."""
    engine = golden_cases.engine()
    wide, mask = np.ones((1, 600), int), (np.arange(600) >= 597).astype(int)[None]
    found = engine.logits(wide, mask)
    np.testing.assert_allclose(found[0, -3:], engine.logits(wide[:, -3:])[0], rtol=0, atol=ROUNDING)


def test_bad_scores() -> None:
    engine = golden_cases.engine()
    ids, mask = rows()
    with pytest.raises(InputError, match="targets"):
        engine.score(ids, ids[:, 1:])
    with pytest.raises(InputError, match="targets"):
        engine.score(ids, ids[:2])
    with pytest.raises(InputError):
        engine.score(ids, ids.astype(float))
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.score(ids, np.full_like(ids, VOCAB))
    for temperature in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="temperature"):
            engine.score(ids, ids, temperature=temperature)
    # Targets at padding are not looked at.
    engine.score(ids, np.where(mask == 1, ids, -100), mask)


def test_text_calls_without_a_tokenizer() -> None:
    engine = golden_cases.engine()
    for call in (
        lambda: engine.generate(["def"], GREEDY),
        lambda: engine.encode(["def"]),
        lambda: engine.tokenizer,
        lambda: engine.end_token_ids,
    ):
        with pytest.raises(CheckpointError, match=r"no tokenizer.*tokenizer\.json"):
            call()
    bare = Engine(engine.layout, engine.weights)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        bare.generate(["def"], GREEDY)


def test_a_bad_request_compiles_nothing() -> None:
    golden = golden_cases.engine()
    engine = Engine(golden.layout, golden.weights)
    for ids, mask, _ in BAD_ROWS.values():
        with pytest.raises(ValueError):  # noqa: PT011  (which one is shown above)
            engine.generate_tokens(ids, mask, DiffusionConfig(max_new_tokens=4, steps=2))
    assert engine.compiled_programs == 0
