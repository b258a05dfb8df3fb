"""Logits that are NaN or infinite end their row with an error that names it, and change no other row."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime import DiffusionConfig, Engine, NonFiniteError, RowRequest, RowResult, SamplingConfig
from runtime.decoding import choices, next_tokens
from runtime.decoding.sampling import mark_non_finite
from runtime.execution import programs
from tests import golden_cases
from tests.runtime.decoding.token_choices import MASK, MESHES, PADDED, VOCAB, choose, padded, rule
from tests.runtime.engine_rows import SEEDS, rows

NEW = 6
# The embedding of this token is NaN in checkpoints changed by ``POISON``; rows 0 and 2 have it in their prompts.
TOKEN = 17
PROMPTS = ([5, TOKEN, 9, 40, 41, 42, 43, 44, 45], [8, 7], [TOKEN], [30, 31, 32, 33], [9])
BAD = [0, 2]

BASE = DiffusionConfig(NEW, steps=NEW, algorithm="entropy", log_probabilities=True)
DREAM: dict[str, DiffusionConfig] = {
    "exact": BASE,
    "sampled": BASE.replace(algorithm="maskgit_plus", temperature=0.8, top_p=0.9, top_k=30, alg_temp=0.3),
    "origin": BASE.replace(algorithm="origin", temperature=0.8),
    "threshold": BASE.replace(block_length=3, parallel="threshold", algorithm="topk_margin", threshold=0.9),
    "dual": BASE.replace(cache="dual", block_length=3),
    "prefix": BASE.replace(cache="prefix", block_length=3),
    "drafts": BASE.replace(draft_steps=2),
    "drafts with a cache": BASE.replace(cache="dual", block_length=3, draft_steps=2),
}
TOKENS = SamplingConfig(NEW, log_probabilities=True)
KINDS: dict[str, tuple[str, DiffusionConfig | SamplingConfig]] = {
    **{name: ("dream_tiny", config) for name, config in DREAM.items()},
    "guided": ("llada_tiny", BASE.replace(algorithm="low_confidence", cfg_scale=1.5)),
    "block": ("sdar_tiny", BASE.replace(cache="exact", algorithm="maskgit_plus", block_length=4)),
    "growing": ("dreamon_tiny", BASE),
    "decode": ("qwen3_tiny", TOKENS),
    "uncached": ("qwen3_tiny", TOKENS.replace(use_cache=False, temperature=0.7)),
}

# Operations of which the check for finite logits must not add any: passes over the logits or the weights, collectives.
COUNTED = {
    "dot",
    "reduce",
    "sort",
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "while",
    "conditional",
}

Change = Callable[[np.ndarray], None]


def _set(place: Any, value: float) -> Change:
    def change(tensor: np.ndarray) -> None:
        tensor[place] = value

    return change


# Changes of tensors, by a part of the tensors' names.
POISON: dict[str, Change] = {"embed_tokens": _set(TOKEN, np.nan), "wte": _set(TOKEN, np.nan)}
EVERYWHERE: dict[str, dict[str, Change]] = {
    # One element of the head: only one token's logits are wrong, on one device of the mesh.
    "NaN in the head": {"lm_head": _set((200, 3), np.nan)},
    "infinity in the head": {"lm_head": _set((200, 3), np.inf)},
    "infinity in a matrix": {"layers.1.mlp.down_proj": _set((0, 0), -np.inf)},
    "NaN in a norm": {"layers.0.input_layernorm": _set(0, np.nan)},
}


def write(source: str, folder: Path, changes: Mapping[str, Change]) -> Path:
    """Write a copy of a golden folder with changed tensors."""
    origin = golden_cases.FOLDER.parent / source
    folder.mkdir(parents=True)
    shutil.copy(origin / "config.json", folder)
    tensors = {name: data.copy() for name, data in load_file(origin / "model.safetensors").items()}
    for part, change in changes.items():
        for name in [name for name in tensors if part in name]:
            change(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    return folder


def engine(source: str, mesh: str = "data=1") -> Engine:
    return golden_cases.engine(mesh, golden_cases.FOLDER.parent / source)


@contextmanager
def damaged(own: Engine, folder: Path) -> Iterator[None]:
    """Give a shared engine other weights for a while. It keeps its compiled programs, unlike a new engine."""
    before = own.runner.weights
    own.replace_weights(folder)
    try:
        yield
    finally:
        own.runner.weights = before


def requests(config: DiffusionConfig | SamplingConfig) -> list[RowRequest]:
    return [RowRequest(prompt, config, seed) for seed, prompt in enumerate(PROMPTS)]


def gather(own: Engine, asked: Sequence[RowRequest], slots: int) -> dict[int, RowResult]:
    return {one.number: one for results in own.scheduler(asked, slots).run() for one in results}


GRID = [
    *((kind, "data=1") for kind in ("sampled", "drafts", "guided", "block", "growing", "uncached")),
    *((kind, "data=2,tensor=2") for kind in ("dual", "decode")),
    *(pytest.param(kind, "sequence=2,tensor=2", marks=pytest.mark.slow) for kind in KINDS if kind != "block"),
]


@pytest.mark.parametrize(("kind", "mesh"), GRID)
def test_one_row_fails_alone(kind: str, mesh: str, tmp_path: Path) -> None:
    """The other rows share forward passes with the rows that fail, and take over their slots and caches."""
    source, config = KINDS[kind]
    own, asked = engine(source, mesh), requests(config)
    slots = 2 * own.layout.spec.data
    expected = gather(own, asked, slots)
    with damaged(own, write(source, tmp_path / "poisoned", POISON)):
        found = gather(own, asked, slots)
        assert [number for number in sorted(found) if found[number].non_finite] == BAD
        for number, result in found.items():
            assert result.sequence.max() < own.config.vocab_size
            if number in BAD:
                with pytest.raises(NonFiniteError, match=f"NaN or infinite in row {number}"):
                    result.check()
            else:
                np.testing.assert_array_equal(result.sequence, expected[number].sequence)
                np.testing.assert_array_equal(result.log_probabilities, expected[number].log_probabilities)  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", ["data=1", "tensor=4"])
@pytest.mark.parametrize("damage", EVERYWHERE)
def test_weights_that_are_not_numbers(damage: str, mesh: str, tmp_path: Path) -> None:
    ids, mask = rows()
    for source, kinds in (("dream_tiny", ("exact", "dual")), ("qwen3_tiny", ("decode",))):
        own = engine(source, mesh)
        with damaged(own, write(source, tmp_path / source, EVERYWHERE[damage])):
            for kind in kinds:
                config = KINDS[kind][1].replace(seed=SEEDS)
                with pytest.raises(NonFiniteError) as failed:
                    own.generate_tokens(ids, mask, config)
                assert failed.value.rows == [0, 1, 2]
            with pytest.raises(NonFiniteError) as failed:
                own.score(ids, ids, mask)
            assert failed.value.rows == [0, 1, 2]


def test_observers_and_scores_name_the_row(tmp_path: Path) -> None:
    own, config = engine("dream_tiny"), DREAM["exact"]
    ids = np.array([[8, 7], [TOKEN, 7]])
    calls: list[Callable[[], Any]] = [
        lambda: own.generate_tokens(ids, None, config, watch=lambda step, canvas: None),
        lambda: list(own.stream_tokens(ids, None, config)),
        lambda: list(own.stream_tokens(ids, None, DREAM["dual"])),
        lambda: own.generate_tokens(ids, None, config, tokens_hook=lambda step, canvas, logits: None),
        lambda: own.generate_tokens(ids, None, config, logits_hook=lambda step, canvas, logits: None),
        lambda: own.score(ids, ids),
    ]
    with damaged(own, write("dream_tiny", tmp_path / "poisoned", POISON)):
        for call in calls:
            with pytest.raises(NonFiniteError) as failed:
                call()
            assert failed.value.rows == [1]
        with pytest.raises(NonFiniteError) as failed:
            own.estimate_log_likelihoods([([8], [7, 6]), ([TOKEN], [6, 7])], samples=2)
        assert failed.value.rows == [1]
    other = engine("qwen3_tiny")
    with damaged(other, write("qwen3_tiny", tmp_path / "causal", POISON)):
        # The last pair fails as it is scored, because greedy decoding of its context does not read the damaged token.
        for pair in (([TOKEN], [6, 7]), ([8], [TOKEN, 6])):
            with pytest.raises(NonFiniteError) as failed:
                other.log_likelihoods([([8, 9, 5], [7, 6]), pair])
            assert failed.value.rows == [1]


def test_a_hook_may_forbid_tokens_but_not_all() -> None:
    def only(step: int, canvas: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits[:, :, :50] = -np.inf
        return logits

    own, config = engine("dream_tiny"), DREAM["exact"]
    found = own.generate_tokens([[8, 7]], None, config, logits_hook=only)
    assert (found.sequences[0, 2:] >= 50).all()
    for value in (-np.inf, np.nan, np.inf):
        with pytest.raises(NonFiniteError):
            own.generate_tokens(
                [[8, 7]],
                None,
                config,
                logits_hook=lambda step, canvas, logits, value=value: np.full_like(logits, value),  # type: ignore[misc]
            )


@pytest.mark.parametrize("kind", ["dual", pytest.param("decode", marks=pytest.mark.slow)])
def test_numbers_that_overflow(kind: str, tmp_path: Path) -> None:
    """The weights are finite in every dtype, but activations are too large for float16."""
    source, config = KINDS[kind]
    folder = write(source, tmp_path / "large", {"model.norm": lambda tensor: np.multiply(tensor, 3e4, out=tensor)})
    ids, mask = rows()
    config = config.replace(seed=SEEDS)
    with pytest.raises(NonFiniteError, match="overflow in this dtype"):
        Engine.load(folder, "data=1", "float16").generate_tokens(ids, mask, config)
    own = engine(source)
    with damaged(own, folder):
        assert own.generate_tokens(ids, mask, config).sequences.max() < own.config.vocab_size


def test_numbers_that_overflow_in_bfloat16(tmp_path: Path) -> None:
    """The weights are finite in bfloat16, but their products with activations are not."""
    folder = write("dream_tiny", tmp_path / "large", {"model.norm": _set(slice(None), 3e38)})
    ids, mask = rows()
    with pytest.raises(NonFiniteError, match="overflow in this dtype"):
        Engine.load(folder, "data=1", "bfloat16").generate_tokens(ids, mask, DREAM["exact"].replace(seed=SEEDS))


def test_scales(tmp_path: Path) -> None:
    """A scale keeps an infinity of a matrix or of cached values, which integers alone would hide."""
    ids, mask = rows()
    folder = write("dream_tiny", tmp_path / "matrix", EVERYWHERE["infinity in a matrix"])
    for quantize in ("int8", "int4"):
        engine = Engine.load(folder, "data=1", quantize=quantize)
        with pytest.raises(NonFiniteError):
            engine.generate_tokens(ids, mask, DREAM["exact"].replace(seed=SEEDS))
    folder = write("dream_tiny", tmp_path / "values", {"layers.1.self_attn.v_proj.bias": _set(0, np.inf)})
    with pytest.raises(NonFiniteError):
        Engine.load(folder, "data=1", kv_cache="int8").generate_tokens(ids, mask, DREAM["dual"].replace(seed=SEEDS))


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_below_the_vocabulary(mesh: str) -> None:
    """Padding of the vocabulary is never chosen, and a position with a NaN or infinite logit gets no token."""
    logits = padded(np.random.default_rng(0).normal(size=(2, 8, VOCAB)) * 1e30)
    assert logits.shape[-1] == PADDED
    wrong = {(0, 1, 5): np.nan, (0, 2, VOCAB - 1): np.inf, (1, 3, 0): -np.inf, (1, 4, MASK): np.nan}
    for place, value in wrong.items():
        logits[place] = value
    logits = np.asarray(mark_non_finite(logits, VOCAB))  # type: ignore[arg-type]
    places = {place[:2] for place in wrong}
    for confidence in ("maskgit_plus", "entropy", "topk_margin", "low_confidence"):
        for sampled in (False, True):
            own = rule(confidence, sampled=sampled, filtered=sampled, suppress_mask=True)
            tokens, _ = choose(mesh, own, logits, temperature=2.0, top_p=0.99, top_k=VOCAB)
            assert {(int(row), int(place)) for row, place in zip(*np.nonzero(tokens < 0), strict=True)} == places
            assert tokens.max() < VOCAB


@pytest.mark.parametrize("kind", ["exact", "decode"])
def test_the_check_adds_no_pass_and_no_collective(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with and without the check, a program has as many matrix products, reductions and collectives."""
    source, config = KINDS[kind]

    def operations() -> Counter[str]:
        jax.clear_caches()
        engine = Engine.load(golden_cases.FOLDER.parent / source, mesh="tensor=2")
        engine.generate_tokens(*rows(), config)
        return Counter(re.findall(r"[])}] ([\w-]+)\(", "\n".join(engine.program_texts().values())))

    checked = operations()
    for module in (choices, next_tokens, programs):
        monkeypatch.setattr(module, "mark_non_finite", lambda logits, vocab_size: logits)
    without = operations()
    assert checked["is-finite"] > without["is-finite"]
    for name in COUNTED:
        assert checked[name] == without[name], name
    assert checked["dot"]
    assert checked["all-reduce"]
