"""How good are completions of the 200 held-out prompts of the demo checkpoint?

    python -m benchmarks.demo_quality

Prints one line of figures and writes benchmarks/results/demo_quality.json. checkpoints/demo/README.md holds the numbers
to expect. A completion counts as parsed when prompt + completion is valid Python; because a trivial body would parse
too, body lines, distinct bodies and agreement with the held-out original stand beside it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from benchmarks.records import build_record, define_record_flags, write_record
from launch.profiling import check_profiling, define_profiling_flags, profile_again
from launch.startup import run_launcher
from runtime import Completion, DiffusionConfig, Engine
from runtime.decoding.parameters import MAX_NEW_TOKENS, MAX_STEPS
from sharding.errors import InputError

TRIVIAL_BODIES = ("pass", "return", "return None", "...")


def define_flags(values: flags.FlagValues) -> None:
    """Defines this benchmark's flags."""
    flags.DEFINE_string("checkpoint", "checkpoints/demo", "folder with held_out.jsonl in it", flag_values=values)
    flags.DEFINE_string("mesh", None, "mesh, as for the launchers (default: chosen)", flag_values=values)
    flags.DEFINE_string("dtype", "float32", "dtype of the weights on the devices", flag_values=values)
    flags.DEFINE_integer("new_tokens", 64, "masks appended", 1, MAX_NEW_TOKENS, flag_values=values)
    flags.DEFINE_integer("steps", None, "denoise steps (default: new_tokens)", 1, MAX_STEPS, flag_values=values)
    flags.DEFINE_string("algorithm", "entropy", "order of unmasking", flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy", 0.0, flag_values=values)
    flags.DEFINE_float("top_p", 0.95, "nucleus", 0.0, 1.0, flag_values=values)
    flags.DEFINE_integer("top_k", 50, "most probable tokens kept", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "seed of sampling", 0, flag_values=values)
    flags.DEFINE_integer("samples", 0, "completions printed in full", 0, flag_values=values)
    define_record_flags(values)
    define_profiling_flags(values)


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927)."""
    share = successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return (middle - spread) / (1 + z * z / trials), (middle + spread) / (1 + z * z / trials)


def parses(text: str) -> bool:
    """Whether `text` is valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are a warning, not an error
            ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def statement_lines(body: str) -> int:
    """Lines with something on them."""
    return sum(bool(line.strip()) for line in body.splitlines())


def figures(held_out: Sequence[dict[str, str]], completions: Sequence[Completion], engine: Engine) -> dict[str, Any]:
    """The quality figures of one run; `held_out` and `completions` run in parallel."""
    bodies = [completion.text.strip() for completion in completions]
    references = [row["completion"].strip() for row in held_out]
    parsed = [parses(row["prompt"] + completion.text) for row, completion in zip(held_out, completions, strict=True)]
    low, high = wilson_interval(sum(parsed), len(parsed))
    encode = engine.tokenizer.encode
    agreement = [
        difflib.SequenceMatcher(None, encode(reference), encode(body), autojunk=False).ratio()
        for reference, body in zip(references, bodies, strict=True)
    ]
    mean = 1 / len(bodies)
    return {
        "prompts": len(bodies),
        "parsed": sum(parsed),
        "parse_rate": sum(parsed) * mean,
        "parse_rate_95": [round(low, 4), round(high, 4)],
        "finished": sum(completion.finish_reason == "stop" for completion in completions),
        "masks_left": sum(completion.masks_left for completion in completions),
        "mean_body_lines": sum(map(statement_lines, bodies)) * mean,
        "mean_reference_lines": sum(map(statement_lines, references)) * mean,
        "trivial_bodies": sum(body in TRIVIAL_BODIES for body in bodies),
        "distinct_bodies": len(set(bodies)) * mean,
        "distinct_references": len(set(references)) * mean,
        "exact_bodies": sum(body == reference for body, reference in zip(bodies, references, strict=True)),
        "token_agreement": sum(agreement) * mean,
    }


def read_held_out(folder: Path) -> list[dict[str, str]]:
    """Prompts and completions that a checkpoint's training has not seen.

    Raises:
      InputError: the folder has no ``held_out.jsonl``.
    """
    path = folder / "held_out.jsonl"
    if not path.is_file():
        raise InputError(
            f"--checkpoint={folder}: there is no held_out.jsonl in it, with a prompt and completion a line"
        )
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(values: flags.FlagValues) -> None:
    """Completes every held-out prompt and writes the record."""
    check_profiling(values)
    folder = Path(values.checkpoint)
    held_out = read_held_out(folder)
    config = DiffusionConfig(
        max_new_tokens=values.new_tokens,
        steps=values.steps or values.new_tokens,
        algorithm=values.algorithm,
        temperature=values.temperature,
        top_p=values.top_p,
        top_k=values.top_k,
        alg_temp=0.0,
        seed=values.seed,
    )
    engine = Engine.load(str(folder), mesh=values.mesh, dtype=values.dtype)
    started = time.perf_counter()
    completions = engine.generate([row["prompt"] for row in held_out], config=config)
    seconds = time.perf_counter() - started
    again = [row["prompt"] for row in held_out[:8]]
    profile_again(values, "8 prompts", lambda: engine.generate(again, config=config), engine.program_texts)
    result = figures(held_out, completions, engine)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
    record = build_record(
        "demo_quality",
        kind="measured",
        settings={"dtype": values.dtype, "mesh": str(engine.layout.spec), "decoding": dataclasses.asdict(config)},
        results={"seconds": round(seconds, 1), **rounded},
        devices=jax.devices(),
    )
    for row, completion in list(zip(held_out, completions, strict=True))[: values.samples]:
        print(f"# {row['name']}: {'parses' if parses(row['prompt'] + completion.text) else 'does not parse'}")
        print(row["prompt"] + completion.text, end="\n\n")
    low, high = result["parse_rate_95"]
    print(
        f"{result['parsed']} of {result['prompts']} parse ({result['parse_rate']:.1%}, 95 % interval {low:.1%} to "
        f"{high:.1%}); body lines {result['mean_body_lines']:.2f} (originals {result['mean_reference_lines']:.2f}); "
        f"distinct {result['distinct_bodies']:.1%}; trivial {result['trivial_bodies']}; "
        f"exact {result['exact_bodies']}; token agreement {result['token_agreement']:.3f}; {seconds:.0f} s"
    )
    print(write_record(record, values.output_dir, values.record))


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
