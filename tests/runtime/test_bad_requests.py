"""Error messages of the engine for bad requests, raised before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import CheckpointError
from runtime import DiffusionConfig, Engine, RowRequest
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.engine_rows import GREEDY, MASK, SAMPLED, VOCAB, WIDTH, rows

GOOD = [[1, 2, 3]]

BAD_ROWS: dict[str, tuple[Any, Any, str]] = {
    "right padding": ([[1, 2, 3]], [[1, 1, 0]], r"row 0.*right padding.*left"),
    "a hole in the mask": ([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [1, 0, 1]], r"row 1.*between"),
    "a row without tokens": ([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [0, 0, 0]], r"row 1.*has no 1"),
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
    "no algorithm": ({"algorithm": None}, "algorithm is None"),
    "a list for an algorithm": ({"algorithm": ["entropy"]}, "algorithm"),
    "top_p above 1": ({"top_p": 1.5}, r"top_p is 1\.5"),
    "top_p below 0": ({"top_p": -0.5}, r"top_p is -0\.5"),
    "top_p not a number": ({"top_p": float("nan")}, "top_p is nan"),
    "top_k of -2": ({"top_k": -2}, "top_k is -2"),
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
    "an unknown confidence dtype": ({"confidence_dtype": "float16"}, "confidence_dtype is 'float16'.*float32, model"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(name: str) -> None:
    changes, message = BAD_CONFIGS[name]
    with pytest.raises(InputError, match=f"(?s){message}"):
        DiffusionConfig(**changes)
    with pytest.raises(InputError, match=f"(?s){message}"):
        DiffusionConfig().replace(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1.7, 2.2]}, "request 0: token ids are of type float64; expected integers"),
        ({"tokens": [1, 2.5, 3]}, "request 0: token ids are of type float64; expected integers"),
        ({"tokens": [1, "2"]}, "request 0: token ids are of type .*; expected integers"),
        ({"tokens": [1, None]}, "request 0: token ids are of type object; expected integers"),
        ({"suffix": [1, 2.5]}, "request 0: token ids are of type float64; expected integers"),
        ({"seed": 1.5}, r"request 0: seed is 1\.5; expected an integer from 0"),
        ({"seed": -1}, "request 0: seed is -1"),
    ],
)
def test_bad_rows_of_a_scheduler(changes: dict[str, Any], message: str) -> None:
    row: dict[str, Any] = {"tokens": [1, 2], "config": DiffusionConfig(4, steps=4), "seed": 0} | changes
    with pytest.raises(InputError, match=message):
        golden_cases.engine().scheduler([RowRequest(**row)])


@pytest.mark.parametrize("slots", [0, -1, 2.5, True])
def test_bad_numbers_of_slots(slots: Any) -> None:
    with pytest.raises(InputError, match=r"slots is .*; expected an integer from 1"):
        golden_cases.engine().scheduler([RowRequest([1], DiffusionConfig(4, steps=4), 0)], slots)


def test_rows_of_arrays_are_rows_of_lists() -> None:
    engine, config = golden_cases.engine(), DiffusionConfig(4, steps=4, algorithm="entropy")
    given: list[Any] = [([1, 2, 3], [4]), (np.array([1, 2, 3]), np.array([4])), (jnp.array([1, 2, 3]), jnp.array([4]))]
    made = [engine.scheduler([RowRequest(prompt, config, 0, suffix)]) for prompt, suffix in given]
    found = [[result.sequence.tolist() for results in one.run() for result in results] for one in made]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("new", ["64", None, -1, 2.5])
def test_bad_lengths_of_published_settings(new: Any) -> None:
    with pytest.raises(InputError, match=f"max_new_tokens is {new!r}"):
        golden_cases.engine().published(max_new_tokens=new)


def test_numbers_of_numpy_are_numbers() -> None:
    config = DiffusionConfig(
        steps=np.int64(4), max_new_tokens=np.int32(3), temperature=np.float32(0.5), seed=np.array([1, 2, 3])
    )
    result = golden_cases.engine().generate_tokens(*rows(), config)
    assert result.seeds == [1, 2, 3]


@pytest.mark.parametrize("changes", [{"temperature": 1e-40}, {"temperature": 1e-300}, {"alg_temp": 1e-300}])
def test_numbers_that_float32_cannot_hold(changes: dict[str, Any]) -> None:
    """Numbers above 0 that underflow to 0 on the devices are rejected, or give a result with real tokens."""
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
        with pytest.raises(InputError, match=f"{len(seeds)} seeds for 3 rows") as found:
            engine.generate_tokens(*rows(), GREEDY.replace(seed=seeds), num_return_sequences=samples)
        assert found.value.field == "seed"
    for samples in (0, -1, True, 1.0, None, 1 << 20):
        with pytest.raises(InputError, match="num_return_sequences") as found:
            engine.generate_tokens(*rows(), GREEDY, num_return_sequences=samples)
        assert found.value.field == "num_return_sequences"


def test_nothing_to_fill() -> None:
    engine = golden_cases.engine()
    with pytest.raises(InputError, match=r"max_new_tokens is 0.*mask"):
        engine.generate_tokens(GOOD, None, DiffusionConfig(max_new_tokens=0, steps=2))
    # Mask tokens in the padding do not count.
    with pytest.raises(InputError, match=r"max_new_tokens is 0.*mask"):
        engine.generate_tokens([[MASK, 1, 2]], [[0, 1, 1]], DiffusionConfig(max_new_tokens=0, steps=2))


def test_prompts_longer_than_the_model_allows() -> None:
    engine = golden_cases.engine()
    with pytest.raises(InputError, match=r"row 1: 500 prompt tokens and 13 new tokens are 513.*512"):
        engine.generate_tokens(
            np.ones((2, 500), int),
            np.stack([np.arange(500) >= 100, np.ones(500, bool)]).astype(int),
            DiffusionConfig(max_new_tokens=13, steps=2),
        )
    for call in (engine.logits, lambda ids: engine.score(ids, ids)):
        with pytest.raises(InputError, match=r"513.*512"):
            call(np.ones((1, 513), int))
    # Padding does not count: this row has 3 tokens.
    wide = np.ones((1, 600), int)
    result = engine.generate_tokens(
        wide, (np.arange(600) >= 597).astype(int)[None], DiffusionConfig(max_new_tokens=4, steps=2)
    )
    assert result.sequences.shape == (1, 604)


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
