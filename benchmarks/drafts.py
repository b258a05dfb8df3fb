"""Lossless speculation: what drafts save on the demo checkpoint, and whether its tokens are those without drafts.

  python -m benchmarks.drafts                      the first held-out tasks, one at a time, with 1, 3 and 7 drafts
  python -m benchmarks.drafts --prompts=20 --other_prompts=5 --modes=exact_greedy,dual_threshold
  python -m benchmarks.drafts --estimate           latencies of a 7B model, from the accepted steps of that record
  python -m benchmarks.drafts --tune               accepted steps for several thresholds of guesses; writes no record

Each prompt is completed without drafts and with each number of drafts, in turn, with the same seed. Tokens, commit
steps and histories of each pair of runs are compared, and so are the log-probabilities of the chosen tokens, which
every run computes. In float32 they agree, except for near-ties; runs that differ are counted. For greedy decoding
without a cache, the record has the margin of each: the gap between the logits of two tokens, or between the confidences
of two positions, at the first difference. In bfloat16, and with int8, rounding decides more often, so the share of
equal tokens is reported.

``--tune`` uses the development tasks, which are in no record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks.demo_quality import SETS, read_held_out
from benchmarks.draft_plans import MODEL, NEW_TOKENS, PROMPT, latencies, latency_table
from benchmarks.models import DIFFUSION
from benchmarks.records import (
    Timing,
    build_record,
    define_record_flags,
    integers,
    load_notes,
    note_lines,
    use_cores,
    write_record,
)
from checkpoints import parse_json_object
from launch.process.startup import run_launcher, this_host
from runtime import DiffusionConfig, Engine, GenerationResult
from runtime.decoding import draft_chain
from sharding.errors import InputError

_DEVELOPMENT = "development_tasks.jsonl"
# The mode whose accepted steps the estimates use: the default decoding at the temperature of base models.
ESTIMATED_MODE = "exact_sampled"


@dataclass(frozen=True)
class Mode:
    """A decoding mode.

    Attributes:
      changes: fields that differ from exact greedy decoding.
      all_prompts: run on ``--prompts`` prompts; otherwise on ``--other_prompts``.
      drafts: numbers of drafts; None for those of ``--drafts``.
      dtype: dtype of weights that are not quantized, and of activations.
      quantize: quantization of the weights.
      kv_cache: dtype of the cache.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    all_prompts: bool = False
    drafts: tuple[int, ...] | None = None
    dtype: str = "float32"
    quantize: str = "none"
    kv_cache: str = "model"

    def config(self, new_tokens: int) -> DiffusionConfig:
        """Return the decoding parameters, without drafts: one step per token, with log-probabilities."""
        base: dict[str, Any] = {"steps": new_tokens, "algorithm": "entropy", "log_probabilities": True}
        return DiffusionConfig(max_new_tokens=new_tokens, **(base | self.changes))

    def engine(self, checkpoint: str) -> Engine:
        """Load the checkpoint on one device."""
        return Engine.load(checkpoint, "tensor=1", self.dtype, quantize=self.quantize, kv_cache=self.kv_cache)


_PUBLISHED = DIFFUSION.published_settings("")
_THRESHOLD = {"parallel": "threshold", "algorithm": "maskgit_plus", "block_length": 32}
_DUAL = {"cache": "dual", **_THRESHOLD}
MODES = {
    "exact_greedy": Mode(all_prompts=True),
    ESTIMATED_MODE: Mode(_PUBLISHED, all_prompts=True),
    "exact_sampled_stop": Mode({**_PUBLISHED, "early_stop": True}),
    "threshold": Mode(_THRESHOLD),
    "factor": Mode({**_THRESHOLD, "parallel": "factor"}),
    "frechet": Mode({**_THRESHOLD, "parallel": "frechet"}),
    "entropy_bound": Mode({**_THRESHOLD, "parallel": "entropy_bound"}),
    "origin": Mode({**_PUBLISHED, "algorithm": "origin"}),
    "prefix_threshold": Mode({"cache": "prefix", **_THRESHOLD}),
    "dual_threshold": Mode(_DUAL),
    "exact_greedy_bfloat16": Mode(drafts=(3,), dtype="bfloat16"),
    "exact_greedy_int8": Mode(drafts=(3,), quantize="int8"),
    "dual_threshold_int8": Mode(_DUAL, drafts=(3,), quantize="int8", kv_cache="int8"),
}
# The modes whose guesses depend on the constant that is tuned, its values, and the number of drafts.
TUNED, TUNED_DRAFTS = ("threshold", "factor", "frechet", "prefix_threshold", "dual_threshold"), 3
SCALES = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1)


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_string("checkpoint", "checkpoints/demo", "Folder with the tasks in it.", flag_values=values)
    flags.DEFINE_integer("prompts", 200, "Prompts of the exact modes.", 1, 10000, flag_values=values)
    flags.DEFINE_integer("other_prompts", 50, "Prompts of the other modes.", 1, 10000, flag_values=values)
    flags.DEFINE_integer("new_tokens", 64, "Masks appended.", 1, 4096, flag_values=values)
    flags.DEFINE_list("drafts", ["1", "3", "7"], "Numbers of drafts.", flag_values=values)
    flags.DEFINE_list("modes", list(MODES), "Which modes.", flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)
    flags.DEFINE_bool("estimate", False, "Estimate latencies from the record; measure nothing.", flag_values=values)
    flags.DEFINE_bool("tune", False, "Print accepted steps by the threshold of guesses.", flag_values=values)
    define_record_flags(values)


def complete(engine: Engine, prompt: np.ndarray, config: DiffusionConfig) -> tuple[GenerationResult, float, float]:
    """Complete a prompt ``[S]``. Return the result of a call that compiles nothing, and its wall and CPU seconds."""
    while True:
        start, cpu = time.perf_counter(), time.process_time()
        made = engine.generate_tokens(prompt[None], None, config, history=True)
        seconds = time.perf_counter() - start, time.process_time() - cpu
        this_host().mark()  # the benchmark is slow, but does not hang
        if not made.stats.compiled_programs:
            return made, *seconds


def margin(engine: Engine, found: np.ndarray, plain: np.ndarray, prompt: np.ndarray) -> float:
    """Return how close the decision was at which two histories ``[steps, W]`` of greedy exact decoding first differ.

    It is the largest gap between the logits of two tokens that were chosen for the same position; or if positions
    differ, the range of their confidences, which are negative entropies in nats.
    """
    mask, offset = engine.config.mask_token_id, engine.config.family.prediction_offset
    start = np.append(prompt, np.full(plain.shape[1] - len(prompt), mask, plain.dtype))
    step = int(np.argmax((found != plain).any(axis=1)))
    places = np.flatnonzero(found[step] != plain[step])
    before = plain[step - 1] if step else start
    logits = np.roll(engine.logits(before[None])[0].astype(np.float64), offset, axis=0)[places]
    ours, theirs = found[step, places], plain[step, places]
    both = (ours != mask) & (theirs != mask)
    if both.any():
        rows = np.arange(len(places))
        return float(np.abs(logits[rows, ours] - logits[rows, theirs])[both].max())
    logits -= logits.max(axis=-1, keepdims=True)
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return float(np.ptp((shares * np.log(shares + 1e-10)).sum(axis=-1)))


def equality(
    engine: Engine,
    config: DiffusionConfig,
    prompts: Sequence[np.ndarray],
    found: Sequence[GenerationResult],
    plain: Sequence[GenerationResult],
) -> dict[str, Any]:
    """Compare the runs with drafts with those without, prompt by prompt.

    Returns:
      The number of prompts whose tokens, commit steps or histories differ; the share of equal new tokens; the largest
      difference of log-probabilities among equal prompts, None without such prompts; and the margins of the
      differences, None where :func:`margin` is not defined.
    """
    has_margin = not config.in_blocks and config.temperature == 0 and str(engine.dtype) == "float32"
    margins: list[float] = []
    equal_tokens = new_tokens = differing = 0
    largest: float | None = None
    for prompt, one, other in zip(prompts, found, plain, strict=True):
        assert one.history is not None
        assert other.history is not None
        same = one.sequences[0, len(prompt) :] == other.sequences[0, len(prompt) :]
        equal_tokens, new_tokens = equal_tokens + int(same.sum()), new_tokens + len(same)
        pairs = ((one.sequences, other.sequences), (one.commit_steps, other.commit_steps), (one.history, other.history))
        if all(np.array_equal(*pair) for pair in pairs):
            assert one.log_probabilities is not None
            assert other.log_probabilities is not None
            largest = max(largest or 0.0, float(np.abs(one.log_probabilities - other.log_probabilities).max()))
            continue
        differing += 1
        if has_margin:
            margins.append(margin(engine, one.history[:, 0], other.history[:, 0], prompt))
    return {
        "differing": differing,
        "margins": margins if has_margin else None,
        "equal_tokens": equal_tokens / new_tokens,
        "largest_log_probability_difference": largest,
    }


def cost(made: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return forward passes, computed positions and accepted steps of completions."""
    tokens = sum(one.stats.tokens for one in made)
    passes = sum(one.stats.row_passes for one in made)
    found: dict[str, Any] = {
        "tokens": tokens,
        "passes_per_token": sum(one.stats.forwards for one in made) / tokens,
        "positions_per_token": sum(one.stats.positions for one in made) / tokens,
    }
    if passes:
        found["accepted_per_pass"] = sum(one.stats.accepted_steps for one in made) / passes
    return found


def measure_mode(
    engine: Engine, name: str, prompts: Sequence[np.ndarray], new_tokens: int, drafts: Sequence[int]
) -> list[dict[str, Any]]:
    """Complete every prompt without drafts and with each number of drafts, in turn.

    Returns:
      One result without drafts, and one per number of drafts.
    """
    config = MODES[name].config(new_tokens)
    counts = (0, *drafts)
    made: dict[int, list[GenerationResult]] = {count: [] for count in counts}
    wall: dict[int, list[float]] = {count: [] for count in counts}
    cpu: dict[int, list[float]] = {count: [] for count in counts}
    for seed, prompt in enumerate(prompts):
        for count in counts:
            one, seconds, cpu_seconds = complete(engine, prompt, config.replace(draft_steps=count, seed=seed))
            made[count].append(one)
            wall[count].append(seconds)
            cpu[count].append(cpu_seconds)
    times = {count: Timing.of(wall[count], cpu[count]) for count in counts}
    rows: list[dict[str, Any]] = []
    for count in counts:
        row: dict[str, Any] = {
            "mode": name,
            "draft_steps": count,
            "prompts": len(prompts),
            **cost(made[count]),
            "ms": times[count],
        }
        if count:
            row["times_as_fast"] = times[count].times_as_fast_as(times[0])
            row |= equality(engine, config, prompts, made[count], made[0])
        rows.append(row)
        print_row(row)
    return rows


def print_row(row: Mapping[str, Any]) -> None:
    """Print one line with a result of :func:`measure_mode`."""
    text = (
        f"{row['mode']:<22} {row['draft_steps']} drafts  {row['passes_per_token']:.2f} passes/token  "
        f"{row['positions_per_token']:7.1f} positions/token  {row['ms'].median:7.1f} ms"
    )
    if row["draft_steps"]:
        text += (
            f"  {row['times_as_fast']['median']:.2f}x  {row['accepted_per_pass']:.2f} accepted/pass  "
            f"{row['differing']} of {row['prompts']} differ"
        )
    print(text, flush=True)


def encoded(engine: Engine, tasks: Sequence[Mapping[str, Any]], count: int) -> list[np.ndarray]:
    """Return the tokens of the first prompts of a set."""
    return [np.array(engine.tokenizer.encode(task["prompt"]), np.int32) for task in tasks[:count]]


def measure(values: flags.FlagValues, drafts: Sequence[int]) -> None:
    """Measure every mode and write the record."""
    tasks = read_held_out(Path(values.checkpoint), SETS["held_out_tasks"])
    cores, notes = use_cores(values.cores), load_notes()
    results: list[dict[str, Any]] = []
    for name in values.modes:
        mode = MODES[name]
        engine = mode.engine(values.checkpoint)
        count = values.prompts if mode.all_prompts else values.other_prompts
        prompts = encoded(engine, tasks, count)
        results += measure_mode(engine, name, prompts, values.new_tokens, mode.drafts or drafts)
    settings = {name: values[name].value for name in ("prompts", "other_prompts", "new_tokens", "modes")}
    record = build_record(
        "drafts",
        kind="measured",
        settings=settings | {"drafts": list(drafts), "cores": cores},
        results=results,
        devices=jax.devices()[:1],
        notes=notes,
    )
    print(write_record(record, values.output_dir, values.record))


def estimate(values: flags.FlagValues) -> None:
    """Estimate latencies from the accepted steps of the measured record, and write a record of its own.

    Raises:
      InputError: there is no measured record, it cannot be read, or it lacks the mode.
    """
    name = values.record or "drafts"
    path = Path(values.output_dir) / f"{name}.json"
    if not path.is_file():
        raise InputError(f"--estimate: there is no {path}; measure it first: python -m benchmarks.drafts")
    try:
        measured = parse_json_object(path.read_bytes())
        rows = [row for row in measured["results"] if row["mode"] == ESTIMATED_MODE and row["draft_steps"]]
        commit = measured["commit"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"--estimate: {path} is not a record of this benchmark ({error!r})") from error
    if not rows:
        raise InputError(f"--estimate: {path} has no mode {ESTIMATED_MODE}; measure it first: --modes={ESTIMATED_MODE}")
    accepted = {row["draft_steps"]: row["accepted_per_pass"] for row in rows}
    settings = {"model": MODEL, "dtype": "bfloat16", "batch": 1, "prompt": PROMPT, "new_tokens": NEW_TOKENS}
    settings |= {"accepted_in_mode": ESTIMATED_MODE, "measured_commit": commit}
    notes = [f"accepted steps per pass are those that {path.name} measured on the demo, which is another model"]
    record = build_record("drafts", kind="estimated", settings=settings, results=latencies(accepted), notes=notes)
    print(write_record(record, values.output_dir, f"{name}_estimated"))


def tune(values: flags.FlagValues) -> None:
    """Print the accepted steps per pass for each scale of the thresholds that guesses use."""
    tasks, before = read_held_out(Path(values.checkpoint), _DEVELOPMENT), draft_chain.GUESSED_THRESHOLD_SCALE
    try:
        for scale in SCALES:
            draft_chain.GUESSED_THRESHOLD_SCALE = scale
            jax.clear_caches()  # traces contain the constant
            engine = MODES[TUNED[0]].engine(values.checkpoint)
            prompts = encoded(engine, tasks, values.other_prompts)
            for name in TUNED:
                config = MODES[name].config(values.new_tokens).replace(draft_steps=TUNED_DRAFTS)
                found = cost([complete(engine, prompt, config)[0] for prompt in prompts])
                print(
                    f"scale {scale:.2f}  {name:<16} {found['accepted_per_pass']:.3f} accepted per pass, "
                    f"{found['passes_per_token']:.3f} passes per token",
                    flush=True,
                )
    finally:
        draft_chain.GUESSED_THRESHOLD_SCALE = before
        jax.clear_caches()


def main(values: flags.FlagValues) -> None:
    """Measure, estimate or tune, as the flags say.

    Raises:
      InputError: a flag is wrong, or a file is missing.
    """
    unknown = [name for name in values.modes if name not in MODES]
    if unknown:
        raise InputError(f"--modes: {', '.join(unknown)} is not one of {', '.join(MODES)}")
    if values.estimate and values.tune:
        raise InputError("--estimate and --tune are two different runs; set one of them")
    drafts = integers("drafts", values.drafts)
    DiffusionConfig(draft_steps=max(drafts))
    if values.estimate:
        estimate(values)
    elif values.tune:
        tune(values)
    else:
        measure(values, drafts)


def drafts_table(record: dict[str, Any]) -> str:
    """Convert a record to Markdown: a row per mode and number of drafts, or the estimated latencies."""
    if record["kind"] == "estimated":
        return latency_table(record)
    settings, machine = record["settings"], record["machine"]
    lines = [
        "| mode | `draft_steps` | accepted per pass | passes/token | positions/token | ms per prompt "
        "| as fast as without | equal prompts | equal tokens | log-probabilities apart |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in record["results"]:
        cells = [
            f"`{row['mode']}`",
            str(row["draft_steps"]),
            f"{row['accepted_per_pass']:.2f}" if row["draft_steps"] else "",
            f"{row['passes_per_token']:.2f}",
            f"{row['positions_per_token']:.1f}",
            f"{row['ms']['median']:.0f} ± {row['ms']['deviation']:.0f}",
        ]
        if row["draft_steps"]:
            apart = row["largest_log_probability_difference"]
            cells += [
                "{median:.2f}x ({minimum:.2f} to {maximum:.2f})".format(**row["times_as_fast"]),
                f"{row['prompts'] - row['differing']} of {row['prompts']}",
                f"{row['equal_tokens']:.2%}",
                "" if apart is None else f"{apart:.1e}",
            ]
        else:
            cells += [""] * 4
        lines.append("| " + " | ".join(cells) + " |")
    exact, others, masks = (settings[name] for name in ("prompts", "other_prompts", "new_tokens"))
    modes = "" if exact == others else f" in `exact_greedy` and `exact_sampled`, {others} in the other modes"
    where = (
        f"the first {exact} held-out tasks{modes}, {masks} masks each, one at a time, {settings['cores']} CPU cores; "
        "each prompt without and with drafts in turn (ms: median ± deviation over prompts; as fast as without: median, "
        "minimum, maximum)"
    )
    text = [*lines, "", f"Measured: {where}, jax {record['versions']['jax']}, {machine['processor']}."]
    margins = [
        f"`{row['mode']}`, {row['draft_steps']} drafts: {max(row['margins']):.1e}"
        for row in record["results"]
        if row.get("margins")
    ]
    if margins:
        text += ["", f"Largest margin of a difference: {'; '.join(margins)}."]
    return "\n".join([*text, *note_lines(record)])


def run(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
