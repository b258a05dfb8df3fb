"""The comparison with PyTorch on tiny models: both sides do the same work."""

from __future__ import annotations

import json
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absl import flags

from benchmarks import compare_torch, torch_rows
from benchmarks.models import SIZES, model_config
from benchmarks.torch_cases import Case, case_config, cases, published
from benchmarks.torch_models import BACKENDS, torch_device, torch_model, with_backend
from benchmarks.torch_tables import add_goals, agreement, comparison_table
from checkpoints import DEMO, parse_json_object
from launch.process.startup import run_launcher
from runtime.models.families import parse_config
from sharding.errors import InputError

torch = pytest.importorskip("torch")

TINY = [
    "--layers=2", "--hidden_size=64", "--intermediate_size=128", "--heads=4", "--kv_heads=2", "--head_dim=16",
    "--vocab_size=512", "--batch=2", "--canvas=32", "--steps=4", "--new_tokens=4", "--prompt=8", "--repeats=2",
    "--random=mid-size",
]  # fmt: skip


def run(*arguments: str) -> None:
    run_launcher(compare_torch.main, compare_torch.define_flags, "", ["compare_torch", *arguments])


def run_here(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the comparison in this process, on all cores, and return its record."""
    run(*TINY, "--one_process", f"--output_dir={folder}", *arguments)
    return parse_json_object((folder / "compare_torch.json").read_bytes())


def test_both_sides_do_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    make = torch_rows.Sides.make

    def watched(*arguments: Any) -> torch_rows.Sides:
        assert not [model for model in alive if model() is not None], (
            "a model is still in memory while the next one is measured"
        )
        sides = make(*arguments)
        alive.extend(map(weakref.ref, (*sides.models.values(), sides.engine)))
        return sides

    monkeypatch.setattr(torch_rows.Sides, "make", watched)
    record = run_here(tmp_path, "--parts=forward,generate", "--random=demo,mid-size")
    assert len(alive) == 2 * (len(BACKENDS) + 1)
    for forward, row in zip(record["results"]["forward"], record["results"]["generate"], strict=True):
        assert forward["agrees"], forward["relative_difference_of_logits"]
        assert set(forward["torch_backends_ms"]) == set(BACKENDS)
        assert forward["torch_backend"] == min(BACKENDS, key=forward["torch_backends_ms"].__getitem__)
        assert set(forward["logits"]["products_gflops_per_second"]) == {"jax", "torch"}
        assert row["share_of_equal_new_tokens"] == 1.0
        assert row["share_of_the_most_frequent_token"] < 0.5
        assert row["samples"]["agree"], row["samples"]
        assert row["compiled_when_timed"] == 0
        fast = row["times_as_fast"]
        assert fast["minimum"] <= fast["median"] <= fast["maximum"]
        assert len(row["jax_ms"]["each"]) == 2
    settings = record["settings"]
    assert (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.2, 0.95, 50), "as published"
    text = comparison_table(record)
    assert "| forward transformer | mid-size |" in text
    assert "| batch 2, canvas 32, new tokens 16, steps 4 |" in text


def test_a_process_per_number_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []
    timing = {"median": 2.0, "minimum": 1.0, "maximum": 3.0}
    times = {"jax_ms": timing, "torch_ms": timing, "times_as_fast": timing, "torch_backend": "onednn"}

    def process(module: str, arguments: list[str]) -> str:
        started.append((module, arguments))
        [folder] = [one.partition("=")[2] for one in arguments if one.startswith("--output_dir=")]
        [cores] = [int(one.partition("=")[2]) for one in arguments if one.startswith("--cores=")]
        row = {"model": "mid-size", "cores": cores, "batch": 2, "prompt": 8, "new_tokens": 4, **times}
        row |= {"share_of_equal_new_tokens": 1.0, "compared_steps": None}
        Path(folder, "rows.json").write_text(json.dumps({"results": {"autoregressive": [row]}}))
        return ""

    monkeypatch.setattr(compare_torch, "run_process", process)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4), raising=False)
    run(*TINY, "--parts=autoregressive", f"--output_dir={tmp_path}")
    assert [module for module, _ in started] == ["compare_torch"] * 2
    assert "--hidden_size=64" in started[0][1]
    assert "--one_process" in started[0][1]
    record = parse_json_object((tmp_path / "compare_torch.json").read_bytes())
    assert record["settings"]["cores"] == [1, 4]
    assert [row["cores"] for row in record["results"]["autoregressive"]] == [1, 4]
    text = comparison_table(record)
    assert "| autoregressive | mid-size | 4 | batch 2, prompt 8, new tokens 4 | 2.0 | 2.0 (onednn) |" in text


@pytest.mark.parametrize(("dtype", "wider", "rounding"), [("bfloat16", "float32", 0.05), ("float32", "float64", 1e-5)])
def test_logits_that_are_apart_are_judged_by_a_wider_dtype(
    dtype: str, wider: str, rounding: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_rows.TOLERANCE, dtype, 0.0)
    (row,) = run_here(tmp_path, "--parts=forward", f"--dtype={dtype}")["results"]["forward"]
    distance = row[f"distance_from_{wider}"]
    assert 0 < distance["torch"] < rounding
    assert 0 < distance["jax"] < rounding
    assert row["agrees"] == (distance["jax"] <= 1.1 * distance["torch"])
    assert agreement(row).count("e-0") == 3
    assert f"from {wider}" in agreement(row)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["autoregressive", "gpt2"])
def test_cached_decoding_has_the_same_tokens(part: str, tmp_path: Path) -> None:
    (row,) = run_here(tmp_path, f"--parts={part}", "--new_tokens=32")["results"][part]
    assert row["share_of_equal_new_tokens"] == 1.0
    assert row["share_of_the_most_frequent_token"] < 0.5


@pytest.mark.slow
def test_processes_of_their_own(tmp_path: Path) -> None:
    run(*TINY, "--parts=generate", "--cores=1", "--dtype=bfloat16", f"--output_dir={tmp_path}")
    record = parse_json_object((tmp_path / "compare_torch.json").read_bytes())
    (row,) = record["results"]["generate"]
    assert (row["cores"], row["torch_backend"]) == (1, "default")


def test_the_faster_library_is_chosen() -> None:
    times = {"default": 0.02, "onednn": 0.0}
    sides = torch_rows.Sides("a", None, torch, {name: name for name in times}, "cpu")  # type: ignore[arg-type]
    assert sides.faster_backend(("pass", 1), lambda model: time.sleep(times[model])) == "onednn"
    assert sides.probed["pass", 1]["default"] > sides.probed["pass", 1]["onednn"]
    # It is measured once.
    assert sides.faster_backend(("pass", 1), lambda model: pytest.fail("measured again")) == "onednn"


def test_onednn_computes_the_same_and_leaves_the_model_alone() -> None:
    sizes = {
        "layers": 1, "hidden_size": 64, "intermediate_size": 128, "heads": 4, "kv_heads": 2, "head_dim": 16,
        "vocab_size": 128,
    }  # fmt: skip
    model = torch_model(case_config("forward", sizes, "float32"), "float32")
    twin = with_backend(torch, model, "onednn")
    kinds = {type(module).__name__ for module in twin.modules()}
    assert "MkldnnLinear" in kinds
    assert not any(isinstance(module, torch.nn.Linear) for module in twin.modules())
    assert any(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert twin.model.embed_tokens.weight is model.model.embed_tokens.weight
    ids = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_samples_of_another_distribution_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    values = flags_of("--temperature=1", "--top_k=4")
    case = Case("generate", 1, 512, 256, published(values, 256))
    # Half of PyTorch's probability is on token 0; tokens from 4 on are dropped.
    distribution = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])).expand(1, 256, 5)
    theirs = torch.multinomial(distribution[0].exp(), 1, generator=torch.Generator().manual_seed(0)).T
    monkeypatch.setattr(torch_rows, "torch_generation", lambda *_, **__: torch.cat([theirs, theirs], dim=1))
    monkeypatch.setattr(torch_rows, "first_log_probabilities", lambda *_: distribution)
    config = SimpleNamespace(family=SimpleNamespace(prediction_offset=1), mask_token_id=9)
    sides: Any = SimpleNamespace(config=config, engine=None, torch=torch, tokens=torch.from_numpy)

    def agree(ours: np.ndarray) -> bool:
        both = np.concatenate([ours, ours], axis=1)
        monkeypatch.setattr(torch_rows, "jax_generation", lambda *_, **__: SimpleNamespace(sequences=both))
        checked: bool = torch_rows.check_samples(sides, case, None, np.zeros((1, 256), np.int64))["samples"]["agree"]
        return checked

    generator = np.random.default_rng(0)
    assert agree(generator.choice(5, (1, 256), p=[0.5, 0.3, 0.15, 0.05, 0.0]))
    assert not agree(np.zeros((1, 256), np.int64)), "greedy tokens are no samples"
    assert not agree(generator.choice(5, (1, 256), p=[0.45, 0.3, 0.1, 0.05, 0.1])), "dropped tokens"


def flags_of(*arguments: str) -> Any:
    values = flags.FlagValues()
    compare_torch.define_flags(values)
    values(["compare_torch", *arguments])
    return values


@pytest.mark.parametrize(
    ("part", "sizes", "shares", "goal"),
    [
        ("forward", {}, (0.1, 0.1), 0.95),
        ("forward", {}, (0.3, 0.0), 1.0),
        ("forward", {}, (0.0, 0.21), 1.0),
        ("generate", {"canvas": 512}, None, 1.4),
        ("generate", {"canvas": 1024}, None, 1.2),
        ("autoregressive", {}, None, 1.0),
        ("gpt2", {}, None, 1.0),
    ],
)
def test_goals(part: str, sizes: dict[str, int], shares: tuple[float, float] | None, goal: float) -> None:
    for ratio in (goal, goal - 0.01):
        found: dict[str, Any] = {"times_as_fast": {"median": ratio}}
        row: dict[str, Any] = {**sizes, **found}
        if shares is not None:
            found |= {"attention_share": shares[0], "head_share": shares[1]}
            row = {"transformer": found, "logits": dict(found)}
        add_goals(part, row)
        judged = row["logits"] if part == "forward" else row
        assert judged["goal"] == goal
        missed = "rates shown" if goal == 0.95 else "missed"
        assert judged["verdict"] == ("met" if ratio == goal else missed)


def test_long_canvases_are_generated_in_the_smallest_batch() -> None:
    def shapes(part: str, platform: str) -> list[tuple[int, int]]:
        return [(case.canvas, case.batch) for case in cases(part, flags_of(), platform)]

    every = [(canvas, batch) for batch in (1, 4) for canvas in (128, 512, 1024, 2048)]
    assert shapes("forward", "cpu") == shapes("generate", "gpu") == every
    assert shapes("generate", "cpu") == [*every[:4], (128, 4), (512, 4)]


def test_the_demo_sizes_are_those_of_the_demo() -> None:
    demo = parse_config(parse_json_object((DEMO / "config.json").read_bytes()))
    ours = model_config(SIZES["demo"], "float32")
    for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(demo, name) == getattr(ours, name)
    assert demo.vocab_size == ours.vocab_size


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--parts=backward"], "expected some of forward"),
        (["--batch=x"], "positive integers"),
        (["--canvas=1"], "2 positions"),
        (["--dtype=int8"], "dtype"),
        (["--random=demo,none"], "some of demo"),
        (["--cores=0"], "expected numbers from 1"),
        (["--one_process", "--cores=1,all"], "one number of cores"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*TINY, *arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_both_must_run_on_the_same_kind_of_device() -> None:
    assert torch_device(torch, "cpu") == "cpu"
    with pytest.raises(InputError, match="JAX_PLATFORMS=cpu"):
        torch_device(torch, "tpu")
