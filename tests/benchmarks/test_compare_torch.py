"""The comparison with PyTorch on tiny models: both sides do the same work."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare_torch
from benchmarks.torch_models import torch_device
from launch.process.startup import run_launcher
from sharding.errors import InputError

torch = pytest.importorskip("torch")

TINY = [
    "--layers=2", "--hidden_size=64", "--intermediate_size=128", "--heads=4", "--kv_heads=2", "--head_dim=16",
    "--vocab_size=512", "--batch=2", "--canvas=32", "--steps=4", "--new_tokens=4", "--prompt=8", "--repeats=2",
]  # fmt: skip


def run(*arguments: str) -> None:
    run_launcher(compare_torch.main, compare_torch.define_flags, "", ["compare_torch", *arguments])


def test_both_sides_do_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    both_sides = compare_torch.both_sides

    def watched(*arguments: Any) -> compare_torch.Sides:
        assert not [model for model in alive if model() is not None], (
            "a part's model is still in memory during the next part"
        )
        sides = both_sides(*arguments)
        alive.extend(map(weakref.ref, (sides.model, sides.engine)))
        return sides

    monkeypatch.setattr(compare_torch, "both_sides", watched)
    run(*TINY, "--parts=forward,generate", f"--output_dir={tmp_path}")
    record = json.loads((tmp_path / "compare_torch.json").read_text())
    (forward,) = record["results"]["forward"]
    assert forward["agrees"], forward["relative_difference_of_logits"]
    (row,) = record["results"]["generate"]
    assert row["share_of_equal_new_tokens"] == 1.0
    assert row["compiled_in_the_last_run"] == 0
    fast = row["times_as_fast"]
    assert fast["minimum"] <= fast["median"] <= fast["maximum"]
    assert len(row["jax_ms"]["each"]) == 2
    text = compare_torch.comparison_table(record)
    assert "| forward transformer | batch 2, canvas 32 |" in text
    assert "| generate  | batch 2, canvas 32, new tokens 16, steps 4 |" in text


@pytest.mark.slow
@pytest.mark.parametrize("part", ["autoregressive", "gpt2"])
def test_cached_decoding_has_the_same_tokens(part: str, tmp_path: Path) -> None:
    run(*TINY, f"--parts={part}", f"--output_dir={tmp_path}")
    (row,) = json.loads((tmp_path / "compare_torch.json").read_text())["results"][part]
    assert row["share_of_equal_new_tokens"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--parts=backward"], "expected some of forward"),
        (["--batch=x"], "positive integers"),
        (["--dtype=int8"], "dtype"),
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
