"""The benchmark of model families: a run with tiny sizes, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from absl import flags

from benchmarks import families
from benchmarks.report import fill_tables
from runtime import SamplingConfig
from sharding.errors import InputError

TINY = ["--layers=1", "--hidden_size=32", "--intermediate_size=64", "--heads=4", "--kv_heads=2", "--head_dim=8"]


def values(folder: Path, *more: str) -> flags.FlagValues:
    found = flags.FlagValues()
    families.define_flags(found)
    found(["families", *TINY, "--vocab_size=128", f"--output_dir={folder}", *more])
    return found


def test_a_small_run(tmp_path: Path) -> None:
    chosen = ["dream_dual_32", "sdar_4", "qwen3"]
    arguments = [f"--variants={','.join(chosen)}", "--batch=1,2", "--prompt=12", "--new_tokens=9", "--trials=2"]
    families.main(values(tmp_path, *arguments))
    record = json.loads((tmp_path / "families.json").read_text())
    assert record["kind"] == "measured"
    rows = {(row["variant"], row["batch"]): row for row in record["results"]}
    assert list(rows) == [(name, batch) for batch in (1, 2) for name in chosen]
    for (name, _), row in rows.items():
        assert len(row["tokens_per_second"]) == 2
        assert min(row["tokens_per_second"]) > 0
        assert row["cache_bytes"] > 0
        assert row["of_autoregressive"]["median"] == 1.0 or name != "qwen3"
        # Each step commits one token; a refresh of the dual cache also commits the first mask of its block.
        assert row["forwards_per_token"] >= (8 / 9 if name == "dream_dual_32" else 1)
    # What is computed for a token: about a block of 4, one position, and about a block of 32.
    cost = {name: rows[name, 2]["positions_per_token"] for name in chosen}
    assert cost["qwen3"] < cost["sdar_4"] < cost["dream_dual_32"]
    text = "<!-- table: families.json -->\n<!-- end of table -->\n"
    table = fill_tables(text, tmp_path)
    assert table.count("\n| `") == 6
    assert "| `qwen3` | causal | KV | 2 |" in table
    assert "Measured: 0 million random float32 parameters, prompts of 12, 9 new tokens, 2 rounds" in table


@pytest.mark.parametrize("name", families.VARIANTS)
def test_requests_commit_one_token_per_step(name: str) -> None:
    variant = families.VARIANTS[name]
    found = families.request(variant, 9)
    assert found.max_new_tokens == 9
    if not isinstance(found, SamplingConfig):
        assert (found.parallel, found.cache) == ("none", variant.cache)
        assert found.steps >= 9


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--variants: mamba is not one of dream, dream_dual_32, sdar_32"):
        families.main(values(tmp_path, "--variants=mamba"))
    with pytest.raises(InputError, match="--batch=0"):
        families.main(values(tmp_path, "--batch=0"))
