"""What each way of decoding costs and what it is worth: the demo checkpoint over its held-out prompts.

  python -m benchmarks.diffusion_modes                       one prompt at a time, as a table and a plot
  python -m benchmarks.diffusion_modes --prompts=20 --modes=exact,rival,dual_threshold

Every mode completes the same prompts, greedily, one at a time, after a warm-up with the very shapes. Beside the cost
(forwards and computed positions per token, tokens per second) stands what came out: the share that parses with its
95 % interval, agreement with the held-out originals and with the exact algorithm's completions, and a Monte Carlo bound
of the nats per token under the exact model (Sahoo et al., 2024), all modes with the same noise.

``rival`` is the dual cache with the threshold rule as published for Fast-dLLM (Wu et al., 2025), batch 1: a full
forward at each block's start commits the block's first token, then windows of the block commit what passes the
threshold.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.demo_quality import parses, read_held_out, wilson_interval
from benchmarks.records import build_record, define_record_flags, load_notes, use_cores, write_record
from launch.profiling import check_profiling, define_profiling_flags, profile_again
from launch.startup import run_launcher
from runtime import DiffusionConfig, Engine
from runtime.batching import bucket_length
from runtime.kv_cache import abstract_cache, cache_bytes_per_device, cache_dtype
from runtime.models.cached import fill_rows, run_window
from runtime.models.transformer import project_logits
from sharding.errors import InputError

# Noised copies of each completion for the bound of its likelihood.
_COPIES = 8


@dataclass(frozen=True)
class Mode:
    """One way of decoding.

    Attributes:
      changes: to the exact configuration; None for the rival.
      rival_block: positions of the rival's blocks.
      quantize: of the weights.
      dtype: of weights that are not quantized, and of activations.
      kv_cache: dtype of the cache.
    """

    changes: dict[str, Any] | None
    quantize: str = "none"
    dtype: str = "float32"
    kv_cache: str = "model"
    rival_block: int = 32


_THRESHOLD = {"parallel": "threshold", "algorithm": "maskgit_plus"}
_STOP = {"cache": "dual", "block_length": 8, "early_stop": True, **_THRESHOLD}
_ONCE = {**_STOP, "refresh_blocks": 0}
MODES = {
    "exact": Mode({}),
    "exact_bfloat16": Mode({}, dtype="bfloat16"),
    "exact_int8": Mode({}, "int8"),
    "exact_early_stop": Mode({"early_stop": True}),
    "blocks_32": Mode({"block_length": 32}),
    "dual_32": Mode({"cache": "dual", "block_length": 32}),
    "dual_32_refresh_8": Mode({"cache": "dual", "block_length": 32, "refresh_interval": 8}),
    "dual_8": Mode({"cache": "dual", "block_length": 8}),
    "prefix_32": Mode({"cache": "prefix", "block_length": 32}),
    "threshold": Mode({"block_length": 32, **_THRESHOLD}),
    "rival": Mode(None),
    "rival_8": Mode(None, rival_block=8),
    "dual_threshold": Mode({"cache": "dual", "block_length": 32, **_THRESHOLD}),
    "dual_threshold_16": Mode({"cache": "dual", "block_length": 16, **_THRESHOLD}),
    "dual_threshold_8": Mode({"cache": "dual", "block_length": 8, **_THRESHOLD}),
    "dual_threshold_8_stop": Mode(_STOP),
    "dual_factor_8_stop": Mode({**_STOP, "parallel": "factor"}),
    "dual_threshold_8_stop_2": Mode({**_STOP, "refresh_blocks": 2}),
    "dual_threshold_8_stop_once": Mode(_ONCE),
    "dual_threshold_8_stop_once_bfloat16": Mode(_ONCE, dtype="bfloat16"),
    "dual_threshold_8_stop_once_int8": Mode(_ONCE, "int8"),
    "dual_threshold_8_stop_once_int8_cache": Mode(_ONCE, "int8", kv_cache="int8"),
}
# Modes that only make a step between two others; --modes names them where they are wanted.
_BETWEEN = ("exact_early_stop", "blocks_32", "dual_32_refresh_8", "dual_threshold_16", "threshold")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_string("checkpoint", "checkpoints/demo", "Folder with held_out.jsonl in it.", flag_values=values)
    flags.DEFINE_integer("prompts", 200, "Held-out prompts to complete.", 1, 10000, flag_values=values)
    flags.DEFINE_integer("new_tokens", 64, "Masks appended.", 1, 4096, flag_values=values)
    flags.DEFINE_list("modes", [name for name in MODES if name not in _BETWEEN], "Which modes.", flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)
    flags.DEFINE_string(
        "plot", None, "Where to draw speed against quality. Default: beside the record.", flag_values=values
    )
    define_record_flags(values)
    define_profiling_flags(values)


class Rival:
    """Fast-dLLM's dual cache with threshold, one row at a time, the whole generation one program."""

    def __init__(self, engine: Engine, new_tokens: int, block: int = 32, threshold: float = 0.9) -> None:
        """Take the model's weights; ``new_tokens`` is a multiple of ``block``."""
        self._engine, self._new, self._block, self._threshold = engine, new_tokens, block, threshold

    def _generate(self, weights: Any, canvas: jax.Array, length: jax.Array, cache: Any) -> tuple[Any, ...]:
        forward, mask = self._engine._runner.forward(canvas.shape[1]), self._engine.config.mask_token_id
        lengths, places = length[None], jnp.arange(self._block + 1)

        def choose(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            probabilities = jax.nn.softmax(project_logits(forward, weights, hidden), axis=-1)
            return probabilities.argmax(axis=-1)[0], probabilities.max(axis=-1)[0]

        forwards = jnp.zeros((2,), jnp.int32)  # over the canvas, over windows
        for number in range(self._new // self._block):
            start = length - self._new + number * self._block
            hidden, cache = fill_rows(forward, weights, cache, canvas, lengths, jnp.zeros((1,), jnp.int32))
            first, _ = choose(jax.lax.dynamic_slice_in_dim(hidden, start - 1, 1, axis=1))
            canvas = canvas.at[0, start].set(first[0])
            forwards = forwards.at[0].add(1)

            def masked(canvas: jax.Array, start: jax.Array = start) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(canvas[0], start, self._block) == mask

            def window(carry: Any, start: jax.Array = start) -> Any:
                canvas, cache, forwards = carry
                tokens = jnp.take(canvas, start - 1 + places, axis=1)
                hidden, cache = run_window(forward, weights, cache, tokens, (start - 1)[None], lengths)
                chosen, certainty = choose(hidden[:, : self._block])
                certainty = jnp.where(masked(canvas, start), certainty, -1.0)
                kept = (certainty > self._threshold) | (jnp.arange(self._block) == certainty.argmax())
                block = jax.lax.dynamic_slice_in_dim(canvas[0], start, self._block)
                # The original would try a predicted MASK for ever; it is left out here.
                block = jnp.where(kept & (certainty >= 0), jnp.where(chosen == mask, 0, chosen), block)
                canvas = jax.lax.dynamic_update_slice(canvas, block[None], (0, start))
                return canvas, cache, forwards.at[1].add(1)

            canvas, cache, forwards = jax.lax.while_loop(
                lambda carry: masked(carry[0]).any(), window, (canvas, cache, forwards)
            )
        return canvas, forwards, cache

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Complete one row ``[1, S]``: new tokens, forwards, positions computed."""
        length = ids.shape[1] + self._new
        width = bucket_length(length)
        canvas = np.full((1, width), self._engine.config.pad_token_id, np.int32)
        canvas[0, : ids.shape[1]] = ids[0]
        canvas[0, ids.shape[1] : length] = self._engine.config.mask_token_id
        shapes = abstract_cache(self._engine.layout, 1, width, self._engine.dtype)
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)
        arguments = (self._engine.weights, jnp.asarray(canvas), jnp.int32(length), cache)
        # Compiled as the engine compiles its own programs, and its cache updated in place like theirs.
        program = self._engine._programs.get(
            ("rival", self._block, self._new, width),
            lambda: jax.jit(self._generate, donate_argnums=3).lower(*arguments),
        )
        canvas_out, counts, _ = program(*arguments)
        full, windows = np.asarray(counts).tolist()
        new = np.asarray(canvas_out)[0, ids.shape[1] : length]
        return new, full + windows, full * length + windows * (self._block + 1)


def likelihood(
    engine: Engine, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], new_tokens: int
) -> float:
    """A Monte Carlo upper bound of the nats per token of completions under the model, the same noise at every call.

    Completions have at most ``new_tokens`` tokens.
    """
    generator = np.random.default_rng(0)
    mask = engine.config.mask_token_id
    nats = tokens = 0.0
    for first in range(0, len(prompts), 32):
        rows, weights = [], []
        for prompt, new in zip(prompts[first : first + 32], completions[first : first + 32], strict=True):
            for copy in range(_COPIES):
                ratio = (copy + 0.5) / _COPIES
                noised = generator.random(new_tokens)[: len(new)] < ratio
                rows.append((prompt, new, noised))
                weights.append(noised / ratio / _COPIES)
            tokens += len(new)
        width = max(len(prompt) + len(new) for prompt, new, _ in rows)
        ids, targets = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.int32)
        real = np.zeros_like(ids)
        for place, (prompt, new, noised) in enumerate(rows):
            own = len(prompt) + len(new)
            targets[place, width - own :] = np.concatenate([prompt, new])
            ids[place, width - own :] = np.concatenate([prompt, np.where(noised, mask, new)])
            real[place, width - own :] = 1
        scores = engine.score(ids, targets, real)
        for score, weight in zip(scores, weights, strict=True):
            nats -= float((score[width - len(weight) :] * weight).sum()) if len(weight) else 0.0
    return nats / max(tokens, 1)


def run_mode(
    engine: Engine, mode: Mode, base: DiffusionConfig, prompts: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Complete every prompt: new tokens up to and with the first end token, and the cost."""
    ends = set(engine.end_token_ids)
    rival = Rival(engine, base.max_new_tokens, mode.rival_block) if mode.changes is None else None
    config = base
    if mode.changes is not None:
        changes = dict(mode.changes)
        if changes.pop("early_stop", False):
            changes["stop_token_ids"] = engine.end_token_ids
        config = base.replace(**changes)

    def complete(prompt: np.ndarray) -> tuple[np.ndarray, int, int]:
        if rival is not None:
            return rival(prompt[None])
        made = engine.generate_tokens(prompt[None], None, config)
        return made.sequences[0, len(prompt) :], made.stats.forwards, made.stats.positions

    widths = {bucket_length(len(prompt) + base.max_new_tokens): prompt for prompt in prompts}
    for prompt in widths.values():
        complete(prompt)
    completions, forwards, positions = [], 0, 0
    start = time.perf_counter()
    made = [complete(prompt) for prompt in prompts]
    seconds = time.perf_counter() - start
    for new, own_forwards, own_positions in made:
        end = next((place + 1 for place, token in enumerate(new.tolist()) if token in ends), len(new))
        completions.append(new[:end])
        forwards, positions = forwards + own_forwards, positions + own_positions
    tokens = sum(map(len, completions))
    cost = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "forwards_per_token": forwards / tokens,
        "positions_per_token": positions / tokens,
    }
    return completions, cost


def cache_bytes(engine: Engine, mode: Mode, length: int) -> int:
    """Bytes of one row's cache; 0 where the mode has none."""
    if mode.changes is not None and mode.changes.get("cache", "none") == "none":
        return 0
    return cache_bytes_per_device(engine.layout, 1, bucket_length(length), cache_dtype(mode.kv_cache, engine.dtype))


def modes_table(record: dict[str, Any]) -> str:
    """A record of this benchmark as a Markdown table: a row a mode, cost beside what came out."""
    results, settings, machine = record["results"], record["settings"], record["machine"]
    exact = results.get("exact")
    lines = [
        "| mode | tokens/s | of exact | forwards/token | positions/token | of exact | parses (95 %) | as held out "
        "| as exact | nats/token | weights MB | cache MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in results.items():
        faster = "" if exact is None else f"{row['tokens_per_second'] / exact['tokens_per_second']:.1f}x"
        fewer = "" if exact is None else f"1/{exact['positions_per_token'] / row['positions_per_token']:.1f}"
        low, high = row["parse_rate_95"]
        cells = [
            f"`{name}`",
            f"{row['tokens_per_second']:.0f}",
            faster,
            f"{row['forwards_per_token']:.2f}",
            f"{row['positions_per_token']:.1f}",
            fewer,
            f"{row['parse_rate']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['held_out_agreement']:.2f}",
            "" if row["exact_agreement"] is None else f"{row['exact_agreement']:.2f}",
            f"{row['nats_per_token']:.2f}",
            f"{row['weight_bytes'] / 1e6:.1f}",
            f"{row['cache_bytes'] / 1e6:.1f}" if "cache_bytes" in row else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    where = f"{settings['prompts']} prompts, {settings['new_tokens']} masks each, {settings['cores']} CPU cores"
    return "\n".join([*lines, "", f"Measured: {where}, jax {record['versions']['jax']}, {machine['processor']}."])


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Speed against quality, a point for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for name, row in results.items():
        low, high = row["parse_rate_95"]
        rate, speed = row["parse_rate"], row["tokens_per_second"]
        axes.errorbar(speed, rate, yerr=[[rate - low], [high - rate]], fmt="o", capsize=3)
        axes.annotate(name, (speed, rate), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_xlabel("tokens per second, one prompt at a time")
    axes.set_ylabel("share of completions that parse (95 % interval)")
    axes.set_title("Demo checkpoint, held-out prompts: speed against quality")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(values: flags.FlagValues) -> None:
    """Run every mode and write the record, the table and the plot."""
    check_profiling(values)
    unknown = [name for name in values.modes if name not in MODES]
    if unknown:
        raise InputError(f"--modes: {', '.join(unknown)} is not one of {', '.join(MODES)}")
    if values.new_tokens % 32:
        raise InputError(f"--new_tokens={values.new_tokens}: the rival's blocks want a multiple of 32")
    folder = Path(values.checkpoint)
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("the plot needs matplotlib: pip install 'diffumesh[bench]'")
    cores = use_cores(values.cores)
    notes = load_notes(cores)
    held_out = read_held_out(folder)[: values.prompts]
    base = DiffusionConfig(max_new_tokens=values.new_tokens, steps=values.new_tokens, algorithm="entropy")

    @functools.cache
    def engine_of(dtype: str, quantize: str, kv_cache: str) -> Engine:
        return Engine.load(folder, "tensor=1", dtype, quantize=quantize, kv_cache=kv_cache)

    judge = engine_of("float32", "none", "model")
    prompts = [np.array(judge.tokenizer.encode(row["prompt"]), np.int32) for row in held_out]
    originals = [judge.tokenizer.encode(row["completion"].strip()) for row in held_out]
    results: dict[str, dict[str, Any]] = {}
    exact: list[np.ndarray] | None = None
    matcher = functools.partial(difflib.SequenceMatcher, None, autojunk=False)
    for name in values.modes:
        mode = MODES[name]
        engine = engine_of(mode.dtype, mode.quantize, mode.kv_cache)
        made, cost = run_mode(engine, mode, base, prompts)
        again = functools.partial(run_mode, engine, mode, base, prompts[:2])
        profile_again(values, name, again, engine.program_texts)
        exact = made if name == "exact" else exact
        texts = [judge.tokenizer.decode(new.tolist()) for new in made]
        parsed = sum(parses(row["prompt"] + text) for row, text in zip(held_out, texts, strict=True))
        bodies = [judge.tokenizer.encode(text.strip()) for text in texts]
        results[name] = cost | {
            "parse_rate": parsed / len(prompts),
            "parse_rate_95": [round(bound, 4) for bound in wilson_interval(parsed, len(prompts))],
            "held_out_agreement": float(
                np.mean([matcher(a=one, b=two).ratio() for one, two in zip(originals, bodies, strict=True)])
            ),
            "exact_agreement": None
            if exact is None
            else float(
                np.mean([matcher(a=one.tolist(), b=two.tolist()).ratio() for one, two in zip(exact, made, strict=True)])
            ),
            "nats_per_token": likelihood(judge, prompts, made, base.max_new_tokens),
            "weight_bytes": engine.layout.bytes_per_device(mode.dtype),
            "cache_bytes": cache_bytes(engine, mode, max(map(len, prompts)) + base.max_new_tokens),
        }
        row = results[name]
        print(
            f"{name:<28} {row['tokens_per_second']:7.1f} tok/s {row['forwards_per_token']:6.3f} fwd/tok "
            f"{row['positions_per_token']:7.1f} pos/tok  parse {row['parse_rate']:.3f} "
            f"[{row['parse_rate_95'][0]:.3f}, {row['parse_rate_95'][1]:.3f}]  nats {row['nats_per_token']:.3f}",
            flush=True,
        )
    record = build_record(
        "diffusion_modes",
        kind="measured",
        settings={"prompts": len(prompts), "new_tokens": values.new_tokens, "modes": values.modes, "cores": cores},
        results=results,
        devices=jax.devices(),
        notes=notes,
    )
    path = write_record(record, values.output_dir, values.record)
    print(path)
    plot = Path(values.plot) if values.plot else path.with_suffix(".png")
    draw(results, plot)
    print(plot)


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
