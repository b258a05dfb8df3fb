"""DreamOn: rows that grow and shrink, infilling, and differences from the original."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import open_folder
from launch.flags.decoding import decoding_config
from runtime import DiffusionConfig, Engine, InputError, RowRequest, encode_prompts
from runtime.execution.left_padding import left_padded
from runtime.execution.rows import check_kind
from runtime.models.config import ConfigError
from runtime.models.dream import DREAM
from runtime.models.dreamon import DREAMON
from runtime.models.families import parse_config
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.checkpoints.small import to_canonical, to_huggingface
from tests.golden_cases import Golden
from tests.golden_cases import engine as golden_engine
from tests.launch.family_folders import write_family
from tests.launch.served import served
from tests.launch.test_parameters import flag_values
from tests.runtime.decoding.growing_rows import generate as generate_row

GOLDEN = Golden(Path(__file__).parents[2] / "golden" / "dreamon_tiny")
MASK, DELETE, EXPAND = 300, 301, 303
LIMIT = 9
PLAIN = DiffusionConfig(LIMIT, algorithm="entropy")
GENERATOR = np.random.default_rng(4)
PROMPTS = [GENERATOR.integers(0, 290, length).tolist() for length in (3, 11, 20, 6)]
SUFFIXES = [GENERATOR.integers(0, 290, length).tolist() for length in (9, 0, 4, 2)]


@functools.cache
def lively_folder(folder: Path) -> Path:
    """The golden model with an output head that predicts the expand and the delete token often."""
    shutil.copy(GOLDEN.folder / "config.json", folder)
    weights = load_file(GOLDEN.folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[EXPAND], head[DELETE] = 1.15 * head[108], 1.1 * head[195]
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_folder(tmp_path_factory.mktemp("lively"))


def generate(folder: Path, config: DiffusionConfig, mesh: str = "data=1", **options: Any) -> Any:
    ids, mask = left_padded(PROMPTS, 0)
    return golden_engine(mesh, folder).generate_tokens(ids, mask, config, suffixes=SUFFIXES, **options)


def canvases(masks: int) -> list[list[int]]:
    return [[*prompt, *[MASK] * masks, *suffix] for prompt, suffix in zip(PROMPTS, SUFFIXES, strict=True)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": "maskgit_plus", "number_transfer_tokens": 3, "initial_masks": 5},
        {"algorithm": "topk_margin", "number_transfer_tokens": 4, "initial_masks": LIMIT, "pad_delete_to_right": True},
        {"number_transfer_tokens": 3, "expand_budget": 2, "initial_masks": 6},
    ],
    ids=["entropy", "three-a-step", "delete-to-the-right", "budget"],
)
def test_rows_of_a_batch_equal_a_plain_loop(lively: Path, changes: dict[str, Any]) -> None:
    """Rows of different lengths in one batch: tokens, every entry of the history, and the number of passes."""
    config = PLAIN.replace(**changes)
    found = generate(lively, config, history=True)
    single = golden_engine("data=1", lively)
    ends, forwards, counted = [], 0, set()
    for row, canvas in enumerate(canvases(min(config.initial_masks, LIMIT))):
        expected = generate_row(single, canvas, config)
        prompt, middle = len(PROMPTS[row]), expected.canvas[: len(expected.canvas) - len(SUFFIXES[row])]
        assert middle[:prompt] == PROMPTS[row]
        assert expected.canvas[len(middle) :] == SUFFIXES[row]
        got = found.sequences[row, -prompt - LIMIT :].tolist()
        assert got == middle + [DELETE] * (prompt + LIMIT - len(middle))
        history = np.full(found.history[:, row].shape, -1)
        for place, entry in enumerate(expected.entries):
            history[place, : len(entry)] = entry
        np.testing.assert_array_equal(found.history[:, row], history)
        ends.append(len(middle) - prompt)
        forwards = max(forwards, expected.forwards)
        counted |= {len(entry) for entry in expected.entries}
    assert found.stats.forwards == forwards
    assert len(counted) > 4, "the rows grow and shrink"
    assert len(set(ends)) > 1
    assert max(ends) <= LIMIT


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "sequence=2,tensor=2"])
def test_rows_alone_in_a_batch_and_on_meshes(lively: Path, mesh: str) -> None:
    """Sampled, with positions sampled too. Alone, every row uses a slot that another row has had before."""
    seeds = [5, 6, 7, 8]
    config = PLAIN.replace(temperature=0.8, top_p=0.9, alg_temp=0.4, number_transfer_tokens=2, log_probabilities=True)
    together = generate(lively, config.replace(seed=seeds))
    there = generate(lively, config.replace(seed=seeds), mesh)
    np.testing.assert_array_equal(there.sequences, together.sequences)
    np.testing.assert_array_equal(there.commit_steps, together.commit_steps)
    np.testing.assert_allclose(there.log_probabilities, together.log_probabilities, atol=1e-4)
    rows = zip(PROMPTS, seeds, SUFFIXES, strict=True)
    requests = [RowRequest(prompt, config, seed, suffix) for prompt, seed, suffix in rows]
    scheduler = golden_engine("data=1", lively).scheduler(requests, slots=1)
    results = sorted((one for some in scheduler.run() for one in some), key=lambda one: one.number)
    for row, result in enumerate(results):
        np.testing.assert_array_equal(result.sequence, together.sequences[row, -len(result.sequence) :])
        np.testing.assert_array_equal(result.commit_steps, together.commit_steps[row, -len(result.sequence) :])
    assert sum(one.positions for one in results) == together.stats.positions
    # Tokens that were not committed have no log-probability.
    assert together.log_probabilities is not None
    np.testing.assert_array_equal(together.log_probabilities != 0, together.commit_steps >= 0)


def test_a_suffix_equals_masks_in_the_prompt(lively: Path) -> None:
    found = generate(lively, PLAIN, history=True)
    ids, mask = left_padded(canvases(4), 0)
    inside = golden_engine("data=1", lively).generate_tokens(ids, mask, PLAIN, history=True)
    width = min(found.history.shape[2], inside.history.shape[2])
    np.testing.assert_array_equal(found.history[..., :width], inside.history[..., :width])
    for row, (prompt, suffix) in enumerate(zip(PROMPTS, SUFFIXES, strict=True)):
        length = int((inside.history[:, row] >= 0).sum(axis=1).max())
        whole = inside.sequences[row, -len(prompt) - 4 - len(suffix) - LIMIT :].tolist()
        final = [token for token in inside.history[:, row][(inside.history[:, row] >= 0).any(axis=1)][-1] if token >= 0]
        assert whole == final + [DELETE] * (len(whole) - len(final))
        assert length <= len(prompt) + LIMIT + len(suffix)
        middle = final[len(prompt) : len(final) - len(suffix)]
        assert found.sequences[row, -LIMIT:].tolist() == middle + [DELETE] * (LIMIT - len(middle))


def test_streams_and_stop_tokens(lively: Path) -> None:
    """Text before the first mask never changes, and a stop token ends the row as soon as nothing is open before it."""
    engine, (ids, mask) = golden_engine("data=1", lively), left_padded(PROMPTS, 0)
    plain = generate(lively, PLAIN)
    before: list[list[int]] = [[] for _ in PROMPTS]
    for _, canvas in engine.stream_tokens(ids, mask, PLAIN, suffixes=SUFFIXES):
        for row, tokens in enumerate(canvas[:, -LIMIT:].tolist()):
            certain = tokens[: tokens.index(MASK)] if MASK in tokens else tokens
            assert certain[: len(before[row])] == before[row]
            before[row] = certain
    np.testing.assert_array_equal(canvas, plain.sequences)
    new = plain.sequences[:, -LIMIT:]
    stop = int(new[0][1])
    ended = generate(lively, PLAIN.replace(stop_token_ids=(stop,)))
    for row in range(len(PROMPTS)):
        whole = new[row].tolist()
        end = whole.index(stop) + 1 if stop in whole else LIMIT
        assert ended.sequences[row, -LIMIT:].tolist()[:end] == whole[:end]
    assert ended.stats.masks_left == 0
    assert ended.stats.tokens < plain.stats.tokens


@pytest.mark.parametrize("masks", [1, 5])
def test_a_row_of_masks_only(masks: int, lively: Path) -> None:
    """Nothing but masks, which a delete to the right may all remove, gives tokens and no NaN, beside another row."""
    config = PLAIN.replace(pad_delete_to_right=True, number_transfer_tokens=5)
    rows = [[MASK] * masks, [7, MASK, DELETE, 4]]
    for folder in (GOLDEN.folder, lively):
        engine = golden_engine("data=1", folder)
        found = engine.generate_tokens(*left_padded(rows, 0), config)
        alone = engine.generate_tokens([rows[0]], None, config)
        np.testing.assert_array_equal(found.sequences[0, -masks - LIMIT :], alone.sequences[0])
        assert found.stats.masks_left == 0


def test_a_canvas_without_a_position_left(tmp_path: Path) -> None:
    """If a row's whole canvas is deleted, the row is done without NaN, and the other rows go on."""
    shutil.copy(GOLDEN.folder / "config.json", tmp_path)
    weights = load_file(GOLDEN.folder / "model.safetensors")
    head, canvas = weights["lm_head.weight"], [MASK] * 3
    # First read what the head gets at the first position, then predict the delete token for it.
    size = head.shape[1]
    seen = np.zeros_like(head)
    seen[:size] = np.eye(size)
    save_file(weights | {"lm_head.weight": seen}, tmp_path / "model.safetensors")
    hidden = Engine.load(tmp_path, "data=1", dtype="float32").logits([canvas])[0, 0, :size]
    head[DELETE] = hidden * 100
    save_file(weights, tmp_path / "model.safetensors")
    engine = Engine.load(tmp_path, "data=1", dtype="float32")
    ids, mask = left_padded([canvas, [5, 6, 7, MASK, 8]], 0)
    found = engine.generate_tokens(ids, mask, PLAIN.replace(pad_delete_to_right=True), history=True)
    assert (found.sequences[0] == [0, 0, *[DELETE] * (3 + LIMIT)]).all()
    assert found.history is not None
    assert found.history[0, 0, 3] == found.history[1, 0, 0] == -1
    expected = generate_row(engine, [5, 6, 7, MASK, 8], PLAIN.replace(pad_delete_to_right=True)).canvas
    assert found.sequences[1, : len(expected)].tolist() == expected


def test_prompt_tokens_as_in_the_original(lively: Path) -> None:
    """An expand token of a prompt becomes two masks; an end token of prompt or suffix is not removed."""
    engine = golden_engine("data=1", lively)
    canvas = [11, EXPAND, 12, MASK, DELETE, 14, DELETE]
    for config in (PLAIN, PLAIN.replace(max_new_tokens=1), PLAIN.replace(pad_delete_to_right=True)):
        expected = generate_row(engine, canvas, config)
        found = engine.generate_tokens([canvas], None, config, history=True)
        assert found.sequences[0, : len(expected.canvas)].tolist() == expected.canvas
        assert len(found.history) == len(expected.entries)
        assert expected.canvas[-3:] == [DELETE, 14, DELETE]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cache": ({"cache": "dual"}, "cache=dual is not available for dreamon models; use none"),
    "exact": ({"cache": "exact"}, "cache=exact is not available for dreamon models; use none"),
    "parallel": ({"parallel": "threshold"}, "parallel=threshold is not available for dreamon models"),
    "frechet": ({"parallel": "frechet"}, "parallel=frechet is not available for dreamon models"),
    "entropy_bound": ({"parallel": "entropy_bound"}, "parallel=entropy_bound is not available for dreamon models"),
    "threshold_decay": (
        {"parallel": "threshold", "threshold_decay": 0.5},
        "threshold_decay is not available for dreamon models",
    ),
    "suffix_window": ({"cache": "dual", "suffix_window": 8}, "cache=dual is not available for dreamon models"),
    "block_rule": (
        {"cache": "dual", "block_rule": "fast_dllm"},
        "block_rule=fast_dllm is not available for dreamon models",
    ),
    "algorithm": ({"algorithm": "origin"}, "algorithm=origin is not available for dreamon models"),
    "steps": ({"steps": 7}, "steps is not available for dreamon models"),
    "eps": ({"eps": 0.5}, "eps is not available for dreamon models"),
    "block_length": ({"block_length": 4}, "block_length is not available for dreamon models"),
    "sub_block_length": ({"sub_block_length": 4}, "sub_block_length is not available for dreamon models"),
    "cfg_scale": ({"cfg_scale": 1.0}, "cfg_scale is not available for dreamon models"),
    "draft_steps": ({"draft_steps": 1}, "draft_steps is not available for dreamon models"),
    "draft_axis": ({"draft_axis": "data"}, "draft_axis=data is not available for dreamon models; use none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_settings(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(InputError, match=message) as found:
        golden_engine("data=1", GOLDEN.folder).generate_tokens([[1, 2]], None, PLAIN.replace(**changes))
    assert found.value.field == re.split("[= ]", message)[0]


@pytest.mark.parametrize(
    "changes",
    [{"initial_masks": 3}, {"number_transfer_tokens": 2}, {"expand_budget": 0}, {"pad_delete_to_right": True}],
)
def test_its_own_settings_are_for_it_alone(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InputError, match=f"{name} is not available for dream models"):
        golden_engine().generate_tokens([[1, 2]], None, DiffusionConfig(4, **changes))


ROWS: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "more masks than the limit": (
        lambda engine: engine.generate_tokens([[1, MASK, MASK, MASK]], None, PLAIN.replace(max_new_tokens=2)),
        "row 0: the prompt has 3 masks; the limit of what fills them, the new tokens, is 2",
    ),
    "nothing to fill": (
        lambda engine: engine.generate_tokens([[1, 2]], None, PLAIN.replace(max_new_tokens=0)),
        "there is nothing to fill",
    ),
    "an expand token without masks": (
        lambda engine: engine.generate_tokens([[1, EXPAND]], None, PLAIN),
        r"row 0: its prompt has the expand token \(303\), but no mask",
    ),
    "an expand token in the suffix": (
        lambda engine: engine.generate_tokens([[1]], None, PLAIN, suffixes=[[2, EXPAND]]),
        "the suffix contains the expand token",
    ),
    "hooks": (
        lambda engine: engine.generate_tokens([[1]], None, PLAIN, tokens_hook=lambda *_: None),
        "hooks are not available for models whose canvas changes its length",
    ),
    "a scheduler's row": (
        lambda engine: engine.scheduler([RowRequest([1], PLAIN, 0), RowRequest([MASK] * 10, PLAIN, 0)]),
        "request 1: row 0: the prompt has 10 masks",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_refused_rows(name: str) -> None:
    call, message = ROWS[name]
    with pytest.raises(InputError, match=message):
        call(golden_engine("data=1", GOLDEN.folder))


def test_config_json() -> None:
    raw = json.loads((GOLDEN.folder / "config.json").read_text())
    config = parse_config(raw)
    assert (config.family, config.mask_token_id, config.expand_token_id, config.delete_token_id) == (
        DREAMON,
        MASK,
        EXPAND,
        DELETE,
    )
    assert parse_config(raw | {"pad_token_id": 0}).pad_token_id == DELETE
    assert parse_config({key: value for key, value in raw.items() if key != "expand_token_id"}).family is DREAM
    assert parse_config(raw | {"expand_token_id": None}).family is DREAM
    for changes, message in [
        ({"expand_token_id": 320}, '"expand_token_id" is 320; expected an integer from 0 to 319'),
        ({"expand_token_id": "303"}, "\"expand_token_id\" is '303'"),
        ({"expand_token_id": MASK}, "three different tokens"),
        ({"eos_token_id": EXPAND}, "three different tokens"),
        ({"eos_token_id": None}, '"eos_token_id" is missing'),
        ({"delete_token_id": 5}, r'"delete_token_id" is 5; only the end token \(301\) is supported'),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_config(raw | changes)


def test_preset_and_plan() -> None:
    config = preset("dreamon-7b")
    assert (config.expand_token_id, config.delete_token_id, config.family) == (151667, 151643, DREAMON)
    dream = preset("dream-7b")
    assert config.differences(dream)[0].startswith("architecture: dreamon and dream")
    assert PRESETS["dreamon-7b"].keys() - PRESETS["dream-7b"].keys() == {"expand_token_id", "eos_token_id"}
    workload, spec = Workload(config, prompt=200, new_tokens=40), MeshSpec.parse("tensor=8")
    # 36 expansions and 40 tokens, one forward pass each.
    (phase,) = workload.phases(workload.layout(spec), "tpu")
    assert phase.forwards == 76
    assert estimate_workload(workload, parse_topology("v5e:2x4"), spec).fits
    with pytest.raises(InputError, match="cache=dual is not available for dreamon models"):
        Workload(config, cache="dual")
    with pytest.raises(InputError, match="steps is not available for dreamon models"):
        Workload(config, new_tokens=40, steps=8)
    with pytest.raises(InputError, match="draft_steps is not available for dreamon models"):
        Workload(config, draft_steps=3)


def test_flags(tmp_path: Path) -> None:
    """Steps in a checkpoint's settings are ignored, because they are Dream's; a flag for them is refused."""
    shutil.copy(GOLDEN.folder / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"steps": 7, "eps": 0.5, "temperature": 0.4}))
    folder = open_folder(tmp_path, weights=False)
    model = parse_config(folder.config)
    config = decoding_config(flag_values("--max_new_tokens=20", "--expand_budget=3", "--draft_steps=0"), folder, model)
    assert isinstance(config, DiffusionConfig)
    assert (config.algorithm, config.temperature, config.expand_budget, config.variable_length) == (
        "entropy",
        0.4,
        3,
        True,
    )
    check_kind(model, config)
    for name, value in (("steps", "20"), ("eps", "0.001"), ("block_length", "8"), ("draft_steps", "2")):
        with pytest.raises(InputError, match=f"--{name} is not available for models whose canvas changes its length"):
            decoding_config(flag_values("--max_new_tokens=20", f"--{name}={value}"), folder, model)
    with pytest.raises(InputError, match="--preset=fast-dllm is for Dream and DiffuCoder; for dreamon models leave it"):
        decoding_config(flag_values("--preset=fast-dllm"), folder, model)
    with pytest.raises(InputError, match="block_rule=fast_dllm is not available for dreamon models"):
        check_kind(model, DiffusionConfig.fast_dllm(20))


def test_convert_and_export(tmp_path: Path) -> None:
    """The tensors are Dream's, and come back with the same bytes; int8 weights run."""
    canonical = to_canonical(GOLDEN.folder, tmp_path / "canonical")
    back = to_huggingface(canonical, tmp_path / "back")
    expected, found = (load_file(folder / "model.safetensors") for folder in (GOLDEN.folder, back))
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    assert json.loads((back / "config.json").read_text())["expand_token_id"] == EXPAND
    config = GOLDEN.config("delete_and_expand")
    ids, _ = GOLDEN.inputs("delete_and_expand")
    restored = Engine.load(canonical, "tensor=2", dtype="float32").generate_tokens(ids, None, config)
    length = GOLDEN.arrays["delete_and_expand.sequences"].shape[1]
    np.testing.assert_array_equal(restored.sequences[:, :length], GOLDEN.arrays["delete_and_expand.sequences"])
    rounded = Engine.load(GOLDEN.folder, "data=1", dtype="float32", quantize="int8").generate_tokens(ids, None, config)
    assert rounded.stats.masks_left == 0


def canvases_of(there: Any, body: dict[str, Any]) -> list[list[str | None]]:
    """Stream a completion, and return the canvases that its chunks show."""
    with there.client().completions.create(model="dreamon", **body, stream=True, extra_body={"canvas": True}) as chunks:
        found = [choice.model_dump().get("canvas") for chunk in chunks for choice in chunk.choices]
    return [canvas for canvas in found if canvas is not None]


def test_infilling_of_text(tmp_path: Path) -> None:
    """Only the middle is returned, from the engine, its stream and the server."""
    own = Engine.load(write_family(tmp_path, "dreamon"), "data=1")
    published = own.published(max_new_tokens=12)
    assert isinstance(published, DiffusionConfig)
    assert (published.algorithm, published.temperature, published.top_p, published.top_k) == ("entropy", 0.2, 0.9, 50)
    check_kind(own.config, published.replace(max_new_tokens=8))
    config = published.replace(temperature=0.0, top_p=None)
    texts, suffixes = ["def f(x):\n", "x = [1, 2"], ["    return y\n", ""]
    found = own.generate(texts, config, suffixes=suffixes)
    for text, suffix, one in zip(texts, suffixes, found, strict=True):
        assert one.whole_text == text + one.text + suffix
        assert one.masks_left == 0
        assert len(one.tokens) <= 12
        assert one.finish_reason == ("length" if len(one.tokens) == 12 else "stop")
        [alone] = own.generate(text, config, suffixes=suffix)
        assert alone.text == one.text
    pieces = list(own.stream(texts, config, suffixes=suffixes))
    assert ["".join(parts) for parts in zip(*pieces, strict=True)] == [one.text for one in found]
    # The tokens around infilled text in DreamOn's training are written out. They stay, and end nothing.
    end = own.tokenizer.decode([own.config.delete_token_id], skip_special_tokens=False)
    ids, _, after = encode_prompts(own.tokenizer, f"{end}{texts[0]}", own.config, suffixes=f"{suffixes[0]}{end}")
    assert (ids[0, 0], after[0][-1]) == (own.config.delete_token_id,) * 2
    [framed] = own.generate(f"{end}{texts[0]}", config, suffixes=f"{suffixes[0]}{end}")
    expected = generate_row(own, [*ids[0].tolist(), *[own.config.mask_token_id] * 4, *after[0]], config)
    middle = expected.canvas[ids.shape[1] : -len(after[0])]
    assert framed.tokens == middle[: len(framed.tokens)]
    assert len(framed.tokens) == len(middle) or framed.finish_reason == "stop"
    # A prompt with masks may become longer than it was; what is beyond its own length is in the text.
    [filled] = own.generate("def f(<|mask|><|mask|>):\n    return y\n", config)
    assert filled.whole_text.startswith("def f(")
    assert filled.whole_text.endswith("):\n    return y\n")
    # What is beyond the prompt's length is no completion in which stop strings could be searched for.
    for call in (own.generate, own.stream):
        with pytest.raises(InputError, match="stop: the masks of the prompt may become more or fewer tokens"):
            call("def f(<|mask|><|mask|>):\n    return y\n", config, stop="\n")
    assert own.generate(texts[0], config, suffixes=suffixes[0], stop="\n")
    with served(own, config, name="dreamon") as there:
        shown = canvases_of(there, {"prompt": texts[0], "suffix": suffixes[0], "max_tokens": 12, "temperature": 0.0})
        stopped = there.post("/v1/completions", {"prompt": "def f(<|mask|>):", "max_tokens": 3, "stop": "\n"})
        body: dict[str, Any] = {"model": "dreamon", "prompt": texts[0], "max_tokens": 12, "temperature": 0.0}
        answer = there.client().completions.create(**body, suffix=suffixes[0])
        with there.client().completions.create(**body, suffix=suffixes[0], stream=True) as chunks:
            streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        refused = there.post("/v1/completions", {"prompt": texts[0], "cache": "dual"})
        masks = there.post("/v1/completions", {"prompt": "<|mask|>" * 4, "max_tokens": 3})
        stepped = there.post("/v1/completions", {"prompt": texts[0], "max_tokens": 12, "steps": 12})
    assert answer.choices[0].text == streamed == found[0].text
    assert answer.choices[0].finish_reason == found[0].finish_reason
    assert refused.status_code == masks.status_code == stepped.status_code == 400
    assert "the prompt has 4 masks" in masks.json()["error"]["message"]
    assert "steps is not available" in stepped.json()["error"]["message"]
    assert stopped.status_code == 400
    assert stopped.json()["error"]["param"] == "stop"
    # Positions that a row may still grow into are open, as masks are. What has a text keeps it, or moves to the right.
    assert all(canvas.count(None) >= 8 for canvas in shown[:1])
    pad = own.tokenizer.decode([own.config.pad_token_id], skip_special_tokens=False)
    assert len(shown) > 1
    assert not any(pad in canvas for canvas in shown[:-1])
    assert None not in shown[-1]
