"""The engine's calls: compile counts, hooks and streaming."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from checkpoints import DEMO
from runtime import DiffusionConfig, Engine, RowRequest, parse_config, place_suffix
from runtime.planner.presets import PRESETS
from sharding.errors import InputError, MeshError
from tests import golden_cases
from tests.divergence import ROUNDING
from tests.runtime.engine_rows import (
    CONFIGS,
    GREEDY,
    LENGTHS,
    MASK,
    NEW_TOKENS,
    SAMPLED,
    VOCAB,
    WIDTH,
    plain,
    rows,
    shifted,
)

# ---- arguments of a wrong type ------------------------------------------------------------------------------------


def test_arguments_of_a_wrong_type_are_named() -> None:
    golden = golden_cases.engine()
    engine = Engine(golden.layout, golden.weights)
    wrong: Any = {"max_new_tokens": 3}
    ids, mask = rows()
    for call in (engine.generate_tokens, lambda *arguments: list(engine.stream_tokens(*arguments))):
        with pytest.raises(InputError, match=r"config: expected a DiffusionConfig or a SamplingConfig, not \{'max_new"):
            call(ids, mask, wrong)
    wrong = {"tensor": 1}
    with pytest.raises(MeshError, match=r"mesh: expected a string such as .* or a MeshSpec, not \{'tensor': 1\}"):
        Engine.load(DEMO, mesh=wrong)


# ---- compile counts ---------------------------------------------------------------------------------------------


def test_two_runs_of_the_same_bucket_compile_nothing_new() -> None:
    """Other numbers, steps and lengths within the bucket use the same program."""
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
    # A request that needs another program compiles one, so the count is meaningful.
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
        assert logits is None, "logits were not requested"
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
    """The logits that a hook must get for a canvas: shifted within each row, zero at padding."""
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
    """A token forced at the start is kept, is read by the model, and does not count as a mask."""
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
    # The result equals that of a prompt that already has the token.
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
    """A position that a hook masks again is filled by a later step, at the latest by the last one."""
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
    """A token made impossible is never chosen, one made certain always is; padding and prompt do not change."""
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
    """With three rows on a data axis of two, hooks see only these three."""
    engine = golden_cases.engine("data=2,tensor=2")
    shapes = set()

    def watch(step: int | None, canvas: np.ndarray, logits: np.ndarray | None) -> None:
        shapes.add((canvas.shape, None if logits is None else logits.shape))

    result = engine.generate_tokens(*rows(), GREEDY, history=True, tokens_hook=watch, logits_hook=lambda *_: None)
    canvas = (3, WIDTH + NEW_TOKENS)
    assert shapes == {(canvas, None), (canvas, (*canvas, VOCAB))}
    np.testing.assert_array_equal(result.history, plain("greedy").history)


def test_hooks_leave_progress_and_watch_as_they_are() -> None:
    seen: dict[str, list[Any]] = {"plain": [], "hooked": []}
    for name, hooks in (("plain", {}), ("hooked", {"tokens_hook": lambda *_: None})):
        steps = seen[name]
        golden_cases.engine().generate_tokens(
            *rows(),
            GREEDY,
            watch=lambda done, canvas, steps=steps: steps.append((done, canvas.tolist())),
            progress=lambda done, total, steps=steps: steps.append((done, total)),
            **hooks,
        )
    assert seen["hooked"] == seen["plain"]
    tests = [lambda tokens, whole: None] * len(rows()[0])
    with pytest.raises(InputError, match="stop strings"):
        golden_cases.engine().generate_tokens(*rows(), GREEDY, tokens_hook=lambda *_: None, stop_tests=tests)


def test_numbers_of_samples_and_of_stop_tests() -> None:
    engine = Engine.load(DEMO, "tensor=1")
    for samples in (0, 1.5, "2", True, 10**10):
        with pytest.raises(InputError, match="num_return_sequences is"):
            engine.generate("def f():", num_return_sequences=samples, stop=["x"])  # type: ignore[arg-type]
    request = RowRequest([5, 6], GREEDY, 0)
    for count in (1, 4):
        tests = [lambda tokens, whole: None] * count
        with pytest.raises(InputError, match=f"there are {count} stop_tests; expected one for each of the 3 sequences"):
            golden_cases.engine().generate_tokens(*rows(), GREEDY, stop_tests=tests)
        with pytest.raises(InputError, match=f"there are {count} stop_tests; expected one for each of the 2 sequences"):
            golden_cases.engine().scheduler([request] * 2, stop_tests=tests)


def test_a_canvas_of_whole_blocks_fits_the_model() -> None:
    engine = golden_cases.engine(folder=golden_cases.FOLDER.parent / "sdar_tiny")
    most = engine.config.max_positions
    config = DiffusionConfig(max_new_tokens=4, algorithm="maskgit_plus", block_length=2 * most)
    with pytest.raises(InputError, match=f"are {2 * most} positions in whole blocks; the model allows {most}"):
        engine.generate_tokens([[5, 6]], None, config)
    with pytest.raises(InputError, match="in whole blocks"):
        engine.scheduler([RowRequest([5, 6], config, 0)])


def test_hooks_that_return_nonsense() -> None:
    engine = golden_cases.engine()
    for kind in ("float32", "bool"):
        with pytest.raises(InputError, match=f"tokens_hook returned values of type {kind}; expected integers"):
            engine.generate_tokens(*rows(), GREEDY, tokens_hook=lambda _, canvas, __, as_=kind: canvas.astype(as_))
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.generate_tokens(*rows(), GREEDY, tokens_hook=lambda _, canvas, __: canvas.astype(np.int64) + 2**32)
    with pytest.raises(InputError, match=r"tokens_hook returned \[1, 2\]; expected \[3, 32\]"):
        engine.generate_tokens(*rows(), GREEDY, tokens_hook=lambda *_: np.zeros((1, 2), int))
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.generate_tokens(*rows(), GREEDY, tokens_hook=lambda _, canvas, __: np.full_like(canvas, VOCAB))
    with pytest.raises(InputError, match="logits_hook"):
        engine.generate_tokens(*rows(), GREEDY, logits_hook=lambda *_: np.zeros((1, 2)))


def test_a_hook_keeps_padding_that_is_no_token() -> None:
    """Padding may have any value, so a hook may return the canvas unchanged."""
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
    for every in (0, 1.5, "a"):
        with pytest.raises(InputError, match="every is"):
            list(engine.stream_tokens(*rows(), GREEDY, every=every))  # type: ignore[arg-type]
    small = Engine(engine.layout, engine.weights, max_batch=2)
    with pytest.raises(InputError, match="3 rows"):
        list(small.stream_tokens(*rows(), GREEDY))
    with pytest.raises(InputError, match="3 rows"):
        small.generate_tokens(*rows(), GREEDY, tokens_hook=lambda *_: None)


# ---- texts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine.load(DEMO, "data=1")


def test_a_text_is_a_list_of_one(demo: Engine) -> None:
    config = DiffusionConfig.published(max_new_tokens=8, block_length=4)
    texts = ["def add(a, b):\n", "x = [1, 2"]
    alone, together = demo.generate(texts[0], config), demo.generate(texts, config)
    assert [one.text for one in demo.generate(texts[:1], config)] == [alone[0].text] == [together[0].text]
    for count in (1, 2):
        pieces = list(demo.stream(texts[:count], config))
        assert all(len(piece) == count for piece in pieces)
        assert ["".join(row) for row in zip(*pieces, strict=True)] == [one.text for one in together[:count]]
    assert "".join(demo.stream(texts[0], config)) == alone[0].text
    not_text: Any = 7
    for wrong, why in [
        ([], "prompts: expected a string, or a non-empty list of strings"),
        ([7], "prompts: expected"),
        (not_text, "prompts: expected"),
        (np.array(texts), "prompts: expected"),
        ("", "prompt 0 is empty"),
        (["x", "\ud800"], "prompt 1 is not valid UTF-8"),
    ]:
        with pytest.raises(InputError, match=why):
            demo.generate(wrong, config)
    several: Any = np.array(texts)
    with pytest.raises(InputError, match="suffixes: expected a string for each of the 2 prompts"):
        demo.generate(texts, config, suffixes=several)


def test_stop_strings_of_any_kind(demo: Engine) -> None:
    config = DiffusionConfig.published(max_new_tokens=8, block_length=4)
    found = demo.generate("def add(a, b):\n", config)
    assert demo.generate("def add(a, b):\n", config, stop=None) == found  # type: ignore[arg-type]
    assert demo.generate("def add(a, b):\n", config, stop=(), num_return_sequences=np.int64(1)) == found
    for wrong in (5, [5], {"x"}):
        for call in (demo.generate, demo.stream):
            with pytest.raises(InputError, match="stop: expected a string or several, not") as caught:
                call("def add(a, b):\n", config, stop=wrong)  # type: ignore[operator]
            assert caught.value.field == "stop"
    many = config.replace(stop_token_ids=tuple(range(100, 164)))
    with pytest.raises(
        InputError, match=r"stop_token_ids has 6\d entries with the model's own end tokens; .* 64 in all"
    ):
        demo.generate("def add(a, b):\n", many)
    assert demo.generate("def add(a, b):\n", many.replace(early_stop=False))


def test_suffixes_as_arrays(demo: Engine) -> None:
    config = DiffusionConfig(max_new_tokens=4)
    ids = [[50, 60, 70], [80, 90, 100]]
    listed = demo.generate_tokens(ids, config=config, suffixes=[[0], [7]]).sequences
    for suffixes in ([np.array([0]), (7,)], np.array([[0], [7]]), [[np.int64(0)], np.array([7], np.uint8)]):
        found = demo.generate_tokens(ids, config=config, suffixes=suffixes)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.sequences, listed)
    without = demo.generate_tokens(ids, config=config).sequences
    for none in (None, [[], []], [np.array([]), ()]):
        found = demo.generate_tokens(ids, config=config, suffixes=none)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.sequences, without)
    wrong: Any
    for wrong in ([[9.7], []], ["ab", ""], [[[1]], []]):
        with pytest.raises(InputError, match="row 0: the suffix must be a list of token ids"):
            demo.generate_tokens(ids, config=config, suffixes=wrong)


def test_texts_between_a_prompt_and_a_suffix(demo: Engine) -> None:
    config = DiffusionConfig.published(max_new_tokens=8, block_length=4, seed=[1, 2])
    texts, suffixes = ["def f(x):\n", "x = [1, 2"], ["    return y\n", ""]
    found = demo.generate(texts, config, suffixes=suffixes)
    pieces = list(demo.stream(texts, config, suffixes=suffixes))
    assert ["".join(row) for row in zip(*pieces, strict=True)] == [one.text for one in found]
    assert [one.whole_text for one in found] == [
        f"def f(x):\n{found[0].text}    return y\n",
        "x = [1, 2" + found[1].text,
    ]
    [alone] = demo.generate(texts[0], config.replace(seed=[1]), suffixes=suffixes[0])
    assert alone == found[0]
    assert found[1] == demo.generate(texts, config)[1]
    tokens = demo.tokenizer.encode(suffixes[0])
    with pytest.raises(
        InputError, match=re.escape("its tokenizer has no <|fim_prefix|>, <|fim_suffix|>, <|fim_middle|>")
    ):
        place_suffix(demo.tokenizer, parse_config(PRESETS["qwen3-8b"]), [1], tokens, chat=False)
    for wrong in (["x"], "x", [1, 2]):
        with pytest.raises(InputError, match="expected a string for each of the 2 prompts"):
            demo.generate(texts, config, suffixes=wrong)  # type: ignore[arg-type]


def test_scores_of_texts_are_those_of_their_tokens(demo: Engine) -> None:
    texts = ["def add(a, b):\n    return a + b\n", "x = 1\n"]
    found = demo.score(texts)
    for text, scores in zip(texts, found, strict=True):
        ids, _ = demo.encode(text)
        np.testing.assert_allclose(scores, demo.score(ids, ids)[0], atol=1e-5)
        np.testing.assert_allclose(scores, demo.score(text), atol=1e-5)
    with pytest.raises(InputError, match="attention_mask is for token ids"):
        demo.score(texts, attention_mask=np.ones((2, 3)))
    halved = demo.score(texts[0], temperature=2.0)
    assert np.abs(halved - found[0]).max() > 1e-2
