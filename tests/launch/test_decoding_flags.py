"""Decoding flags of the command line: autoregressive models, blocks, caches and streamed text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags

from checkpoints import DEMO, open_folder
from checkpoints.folder import QUANTIZATION_KEY
from launch import generate
from launch.flags.decoding import decoding_config, notices, steps_follow_tokens
from runtime import DiffusionConfig, Engine, InputError, SamplingConfig, check_kind, parse_config
from runtime.models.dream import DREAM
from runtime.models.gpt2 import GPT2
from tests.launch.family_folders import GOLDEN
from tests.launch.mistakes import refusal
from tests.launch.test_history_html import embedded
from tests.launch.test_parameters import flag_values

PROMPT = "def add(a, b):\n"
QUICK = ["--mesh=data=1", "--max_new_tokens=12"]


def launch(*arguments: str) -> None:
    generate.run(["generate", *QUICK, *arguments])


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refusal(capsys, lambda: launch(*arguments))


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_autoregressive_checkpoint(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--checkpoint={gpt2}", "--json", f"--prompt={PROMPT}", "--prompt=x", "--log_probabilities"]
    launch(*arguments)
    cached = lines_of(capsys)
    launch(*arguments, "--cache=none")
    for one, other in zip(cached, lines_of(capsys), strict=True):
        assert one["tokens"] == other["tokens"]
    assert len(cached[0]["log_probabilities"]) == len(cached[0]["tokens"])  # type: ignore[arg-type]
    engine = Engine.load(gpt2, "data=1")
    made = engine.generate([PROMPT, "x"], SamplingConfig(max_new_tokens=12))
    assert [line["text"] for line in cached] == [completion.text for completion in made]


def test_what_the_authors_sample_with_counts(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(gpt2, tmp_path / "model")
    said = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(said))
    launch(f"--checkpoint={tmp_path / 'model'}", f"--prompt={PROMPT}", "--top_k=5", "--verbose")
    said_by_it = capsys.readouterr().err
    assert "temperature=0.7, top_p=0.8, top_k=5" in said_by_it
    assert "ignored" not in said_by_it
    penalised = said | {"repetition_penalty": 1.1, "num_beams": 1, "min_p": None}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(penalised))
    launch(f"--checkpoint={tmp_path / 'model'}", f"--prompt={PROMPT}")
    assert (
        "ignored: repetition_penalty=1.1 of generation_config.json, which is not supported" in capsys.readouterr().err
    )
    launch(f"--checkpoint={tmp_path / 'model'}", f"--prompt={PROMPT}", "--preset=class", "--verbose")
    assert "temperature=0.0, top_p=None, top_k=None" in capsys.readouterr().err


def test_a_token_that_transformers_would_add_is_named(gpt2: Path, tmp_path: Path) -> None:
    values = flag_values()
    assert notices(values, open_folder(gpt2), GPT2, []) == []
    shutil.copytree(gpt2, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    raw = json.loads(file.read_text()) if file.exists() else {}
    for token in ("<start>", {"__type": "AddedToken", "content": "<start>"}):
        file.write_text(json.dumps(raw | {"bos_token": token, "add_bos_token": True}))
        (said,) = notices(values, open_folder(tmp_path / "model"), GPT2, [])
        assert said.endswith("without --chat, begin prompts with '<start>'")
    file.write_text(json.dumps(raw | {"bos_token": "<start>", "add_bos_token": False}))
    assert notices(values, open_folder(tmp_path / "model"), GPT2, []) == []


def test_a_wrong_value_of_the_checkpoint_is_not_a_flag_of_the_user(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(gpt2, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": "hot"}))
    command = (f"--checkpoint={tmp_path / 'model'}", f"--prompt={PROMPT}")
    assert f"{file}: temperature is 'hot'; expected" in fails(capsys, *command)
    assert "generation_config" not in fails(capsys, *command, "--temperature=0.5", "--top_p=2")


def test_flags_of_the_other_kind(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--steps=4", "--cache=dual", "--block_length=8", "--algorithm=origin"):
        error = fails(capsys, f"--checkpoint={gpt2}", f"--prompt={PROMPT}", flag)
        assert flag.split("=")[0] in error
        assert "autoregressive" in error
    for flag in (f"--history_html={gpt2 / 'page.html'}", "--preset=fast-dllm"):
        assert "autoregressive" in fails(capsys, f"--checkpoint={gpt2}", f"--prompt={PROMPT}", flag)


def test_blocks_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cache=dual", "--block_length=4", "--parallel=threshold", "--threshold=0.5", "--early_stop", "--json"]
    launch(f"--prompt={PROMPT}", *flags)
    found = lines_of(capsys)[0]
    engine = Engine.load(DEMO, "data=1")
    config = DiffusionConfig.published(
        12,
        0.2,
        cache="dual",
        block_length=4,
        parallel="threshold",
        threshold=0.5,
        stop_token_ids=engine.end_token_ids,
    )
    assert found["text"] == engine.generate([PROMPT], config)[0].text
    assert found["stats"]["positions"] > 0  # type: ignore[index]
    error = fails(capsys, f"--prompt={PROMPT}", "--refresh_interval=4")
    assert "cache" in error


def test_an_early_end_from_the_command_line(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def made(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
        launch("--json", *arguments)
        (found,) = lines_of(capsys)
        stats: Any = found.pop("stats")
        return found, stats

    def history() -> tuple[int, list[list[Any]]]:
        (row,) = embedded(page.read_text("utf-8"))["rows"]
        return row["steps"], row["tokens"]

    page, prompt = tmp_path / "page.html", ["--prompt=def is_even(number):\n", "--max_new_tokens=32"]
    shown = f"--history_html={page}"
    early, short = made(*prompt, shown)
    count = len(early["tokens"])
    steps, tokens = history()
    assert (steps, [end for _, _, end in tokens].count(1), tokens[-1][2]) == (
        max(step for _, step, _ in tokens) + 1,
        1,
        1,
    )
    full, long = made(*prompt, shown, "--noearly_stop")
    assert early == full
    assert early["finish_reason"] == "stop"
    assert (short["tokens"], long["tokens"]) == (count + 1, 32)
    assert short["forwards"] < long["forwards"] / 2
    steps, tokens = history()
    assert (steps, [end for _, _, end in tokens].count(1)) == (32, 32 - count)
    cut, shorter = made(*prompt, shown, "--stop= %", "--noearly_stop")
    assert cut["text"] == full["text"].partition(" %")[0]
    assert shorter["tokens"] == len(cut["tokens"])
    assert shorter["forwards"] < long["forwards"]
    steps, tokens = history()
    assert steps < 32
    assert "%" not in "".join(text for text, _, end in tokens if not end)
    # Autoregressive models have the flag too.
    whole, _ = made(f"--checkpoint={gpt2}", f"--prompt={PROMPT}", "--noearly_stop")
    stopped, few = made(f"--checkpoint={gpt2}", f"--prompt={PROMPT}", f"--stop={whole['text'][4:6]}")
    assert stopped["text"] == whole["text"].partition(whole["text"][4:6])[0]
    assert few["tokens"] == len(stopped["tokens"])


def test_quantized_from_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Engine] = []
    load = Engine.load

    def noted(*arguments: Any, **options: Any) -> Engine:
        loaded.append(load(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(Engine, "load", noted)
    launch(f"--prompt={PROMPT}", "--quantize=int8", "--kv_cache=int8", "--cache=dual", "--block_length=4", "--json")
    assert len(lines_of(capsys)) == 1
    assert [(one.layout.quantization, one.runner.cache_dtype) for one in loaded] == [("int8", np.int8)]
    assert "--quantize" in fails(capsys, f"--prompt={PROMPT}", "--quantize=int3")


def test_streamed_pieces_are_the_text(gpt2: Path) -> None:
    autoregressive, diffusion = Engine.load(gpt2, "data=1"), Engine.load(DEMO, "data=1")
    sampled = SamplingConfig(max_new_tokens=24, temperature=1.2, seed=4)
    blocks = DiffusionConfig(max_new_tokens=24, steps=24, block_length=4, algorithm="entropy")
    # The body of this function needs several blocks.
    loop = "def factorial(n):\n"
    for engine, config, prompt in ((autoregressive, sampled, PROMPT), (diffusion, blocks, loop)):
        seeded = config.replace(seed=[11])
        whole = engine.generate([prompt], seeded)[0]
        pieces = list(engine.stream(prompt, seeded, every=2))
        assert "".join(pieces) == whole.text
        assert len(pieces) > 2
        stop = whole.text[len(whole.text) // 2 :][:3]
        cut = engine.generate([prompt], seeded, stop=[stop])[0]
        assert "".join(engine.stream(prompt, seeded, stop=[stop])) == cut.text
        assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "stored", "said"),
    [
        ("int8", "int4", ["ignored: --quantize=int8; the weights are stored as int4 and stay so"]),
        ("int4", "int4", []),
        ("none", "int4", []),
        ("int8", "none", []),
    ],
)
def test_weights_that_are_stored_quantized_stay_so(asked: str, stored: str, said: list[str], tmp_path: Path) -> None:
    values = flags.FlagValues()
    generate.define_flags(values)
    values(["generate", f"--quantize={asked}"])
    raw = json.loads((DEMO / "config.json").read_text()) | {QUANTIZATION_KEY: stored}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert notices(values, open_folder(tmp_path), DREAM, []) == said
    of_draft = [one.replace("; the", "; the draft model's") for one in said]
    assert notices(values, open_folder(DEMO), DREAM, [], draft=open_folder(tmp_path)) == of_draft


def test_a_dtype_of_the_cache_without_a_cache_is_named() -> None:
    """Unless a mode of the server, or a line of a batch, has a cache."""
    folder, plain, cached = open_folder(DEMO), DiffusionConfig(), DiffusionConfig(cache="dual")
    for dtype in ("int8", "model"):
        values = flags.FlagValues()
        generate.define_flags(values)
        values(["generate", f"--kv_cache={dtype}"])
        said = [f"--kv_cache={dtype} has no effect with --cache=none, which keeps no keys and values"]
        said = [] if dtype == "model" else said
        assert notices(values, folder, DREAM, [plain]) == said
        assert notices(values, folder, GPT2, [SamplingConfig(use_cache=False)]) == said
        assert notices(values, folder, GPT2, [SamplingConfig()]) == []
        assert notices(values, folder, DREAM, [plain, cached]) == []
        assert notices(values, folder, DREAM, [plain], requests=[plain]) == said
        assert notices(values, folder, DREAM, [plain], requests=[plain, cached]) == []


@pytest.mark.parametrize("family", ["llada", "fast_dllm_v2", "sdar"])
def test_settings_that_the_original_code_does_not_read(family: str, tmp_path: Path) -> None:
    """A parent's ``generation_config.json``, copied to such a checkpoint, does not change its authors' settings."""
    shutil.copy(GOLDEN / f"{family}_tiny" / "config.json", tmp_path)
    model = parse_config(json.loads((tmp_path / "config.json").read_text()))
    values = flag_values("--top_p=0.5")
    alone = decoding_config(values, open_folder(tmp_path, weights=False), model)
    raw = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "steps": 3, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    folder = open_folder(tmp_path, weights=False)
    assert decoding_config(values, folder, model) == alone
    assert steps_follow_tokens(values, folder, model.family)
    (said,) = notices(values, folder, model.family, [])
    assert said.startswith("ignored: temperature=0.7, top_p=0.8, top_k=20, steps=3 of generation_config.json, because")
    assert notices(flag_values("--preset=class"), folder, model.family, []) == []


@pytest.mark.parametrize(
    ("family", "advice"),
    [
        ("llada", "use --cache=dual --parallel=threshold"),
        ("fast_dllm_v2", "leave it out: the defaults are the authors'"),
        ("sdar", "leave it out: the defaults are the authors'"),
    ],
)
def test_the_preset_of_another_family(family: str, advice: str, tmp_path: Path) -> None:
    """The error names the flag that was given, and flags that work."""
    shutil.copy(GOLDEN / f"{family}_tiny" / "config.json", tmp_path)
    folder = open_folder(tmp_path, weights=False)
    model = parse_config(folder.config)
    with pytest.raises(InputError) as found:
        decoding_config(flag_values("--preset=fast-dllm", "--max_new_tokens=8"), folder, model)
    assert str(found.value) == f"--preset=fast-dllm is for Dream and DiffuCoder; for {family} models {advice}"
    assert found.value.field == "preset"
    advised = [word for word in advice.split() if word.startswith("--")]
    check_kind(model, decoding_config(flag_values(*advised), folder, model))


def test_class_defaults_in_a_checkpoint_decide_nothing(tmp_path: Path) -> None:
    """The file of Dream-v0-Instruct-7B, and one that decides the same fields."""
    shutil.copy(GOLDEN / "dream_tiny" / "config.json", tmp_path)
    folder = open_folder(tmp_path, weights=False)
    model, values = parse_config(folder.config), flag_values("--max_new_tokens=24")
    alone = decoding_config(values, folder, model)
    assert isinstance(alone, DiffusionConfig)
    assert (alone.algorithm, alone.steps) == ("entropy", 24)
    stored = {"_from_model_config": True, "alg": "origin", "alg_temp": None, "bos_token_id": 151643, "eps": 0.001}
    stored |= {"mask_token_id": None, "output_history": False, "steps": 512, "top_k": None, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    folder = open_folder(tmp_path, weights=False)
    assert decoding_config(values, folder, model) == alone
    assert steps_follow_tokens(values, folder, model.family)
    assert notices(values, folder, model.family, [alone]) == []
    changed = {"alg": "maskgit_plus", "alg_temp": 0.1, "eps": 0.01, "steps": 12, "top_k": 7, "top_p": 0.8}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored | changed))
    folder = open_folder(tmp_path, weights=False)
    own = {"algorithm": "maskgit_plus", "alg_temp": 0.1, "eps": 0.01, "steps": 12, "top_k": 7, "top_p": 0.8}
    assert decoding_config(values, folder, model) == alone.replace(**own)
    assert not steps_follow_tokens(values, folder, model.family)
