"""Time generations in this checkout and in an older one, taking turns, and compare their tokens.

    git worktree add ../old COMMIT
    python -m benchmarks.versions --old=../old

Both run the same generations with the same checkpoints: the demo, and random weights with the sizes of ``--random``.
Autoregressive decoding runs the demo's weights too, as a causal model.
One process per checkout runs all generations, so that both are warm.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from safetensors.numpy import save_file

from benchmarks.checkouts import Checkout, check_checkout, checkouts
from benchmarks.models import CAUSAL, DIFFUSION, checkpoint_config, define_model_flags, model_sizes
from benchmarks.records import Timing, build_record, define_record_flags, load_notes, repository_commit, write_record
from checkpoints import DEMO, parse_json_object
from launch.process.startup import run_launcher
from runtime.models.families import model_layout, parse_config

_CHILD = Path(__file__).with_name("timed_generations.py")
# Larger than the usual initialisation, so that greedy tokens do not repeat.
_WEIGHT_SCALE = 0.08


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this benchmark."""
    define_record_flags(values)
    define_model_flags(values)
    flags.DEFINE_string("old", None, "Root of the other checkout.", required=True, flag_values=values)
    flags.DEFINE_integer("rounds", 5, "Timed rounds; in each, both checkouts run everything.", 1, flag_values=values)
    flags.DEFINE_integer("warmup", 2, "Rounds before the timed ones.", 1, flag_values=values)


def write_random_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write a Hugging Face folder with random float32 weights and no tokenizer."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    tensors = {
        source: np.ones(leaf.source_shape, np.float32)
        if leaf.initializer == "ones"
        else generator.normal(0.0, _WEIGHT_SCALE, leaf.source_shape).astype(np.float32)
        for leaf in model_layout(parse_config(config)).leaves
        for source in leaf.sources
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def write_causal_demo(folder: Path) -> None:
    """Write a Hugging Face folder with the demo's weights as an autoregressive model, without a tokenizer."""
    folder.mkdir()
    shutil.copy(DEMO / "model.safetensors", folder)
    config = parse_json_object((DEMO / "config.json").read_bytes())
    causal = {"model_type": CAUSAL.model_type, "architectures": [CAUSAL.architecture]}
    (folder / "config.json").write_text(json.dumps(config | causal))


def measure(both: dict[str, Checkout], warmup: int, rounds: int) -> list[dict[str, Any]]:
    """Return the results of each generation: both times, their ratio, and whether the tokens are equal."""
    rows = []
    for generation in both["new"].first["generations"]:
        seconds: dict[str, list[float]] = {name: [] for name in both}
        last: dict[str, dict[str, Any]] = {}
        for number in range(warmup + rounds):
            # The checkout that runs first alternates too.
            for name in sorted(both, reverse=bool(number % 2)):
                last[name] = both[name].ask(generation)
                if number >= warmup:
                    seconds[name].append(last[name]["seconds"])
        timings = {name: Timing.of(each, [0.0]) for name, each in seconds.items()}
        rows.append(
            {
                "generation": generation,
                **timings,
                "ratio": round(timings["new"].median / timings["old"].median, 3),
                "forwards": {name: one["forwards"] for name, one in last.items()},
                "same_tokens": last["old"]["tokens"] == last["new"]["tokens"],
            }
        )
    return rows


def main(values: flags.FlagValues) -> None:
    """Measure, print the results, and write the record."""
    old = check_checkout("old", values.old)
    notes, sizes = load_notes(), model_sizes(values)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in ("causal demo", "diffusion", "autoregressive")}
        write_causal_demo(folders["causal demo"])
        write_random_checkpoint(folders["diffusion"], checkpoint_config(sizes, "float32", DIFFUSION))
        write_random_checkpoint(folders["autoregressive"], checkpoint_config(sizes, "float32", CAUSAL))
        models = [str(DEMO), *map(str, folders.values())]
        with checkouts(_CHILD, {"old": old, "new": None}, models, {"JAX_PLATFORMS": "cpu"}) as both:
            rows = measure(both, values.warmup, values.rounds)
    for row in rows:
        spread = {
            name: f"{row[name].median:8.1f} ({row[name].minimum:.1f} to {row[name].maximum:.1f})" for name in both
        }
        same = "same tokens" if row["same_tokens"] else "OTHER TOKENS"
        print(f"{row['generation']:<24} old {spread['old']} ms, new {spread['new']} ms, {row['ratio']:.2f}x, {same}")
    record = build_record(
        "versions",
        kind="measured",
        settings={
            "old_commit": repository_commit(old),
            "rounds": values.rounds,
            "warmup": values.warmup,
            "model": sizes,
        },
        results=rows,
        notes=notes,
    )
    print(write_record(record, values.output_dir, values.record))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
