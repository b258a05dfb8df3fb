"""Measure how often the demo checkpoint writes a function that works.

    python -m benchmarks.demo_quality

There are three sets of prompts. Results go to standard output and to benchmarks/results/demo_quality.json:

* ``held_out_tasks``: combinations of parts that training has not seen, with tests;
* ``plain_tasks``: common functions, with tests;
* ``library``: 200 held-out functions of the standard library, which have no tests. A completion counts as parsed when
  prompt + completion is valid Python; because a trivial body would parse too, the numbers of body lines and distinct
  bodies and the agreement with the original are reported as well.

A task is passed (pass@1) when its one completion passes all tests, in a restricted child process.
checkpoints/demo/README.md has a table of the record.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import difflib
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from benchmarks.records import build_record, define_record_flags, load_notes, note_lines, write_record
from checkpoints.demo.sandbox import run_tests
from checkpoints.local_files import read_json_lines
from launch.process.profiling import check_profiling, define_profiling_flags, profile_again
from launch.process.startup import run_launcher, this_host
from runtime import Completion, DiffusionConfig, Engine
from runtime.decoding.parameters import MAX_NEW_TOKENS, MAX_STEPS
from sharding.errors import InputError

# Names of the sets in the table
_TITLES = {"held_out_tasks": "held-out tasks", "plain_tasks": "plain functions", "library": "standard library"}
SETS = {"held_out_tasks": "held_out_tasks.jsonl", "plain_tasks": "plain_tasks.jsonl", "library": "held_out.jsonl"}
BATCH = 64  # prompts per batch; the prompts of a set are ordered by length
TRIVIAL_BODIES = ("pass", "return", "return None", "...")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_string("checkpoint", "checkpoints/demo", "folder of the model", flag_values=values)
    flags.DEFINE_string("tasks", None, "folder of the sets (default: the checkpoint's)", flag_values=values)
    flags.DEFINE_multi_enum("set", list(SETS), list(SETS), "sets to complete", flag_values=values)
    flags.DEFINE_integer("limit", None, "prompts of each set, from its first", 1, flag_values=values)
    flags.DEFINE_string("mesh", None, "mesh, as for the launchers (default: chosen)", flag_values=values)
    flags.DEFINE_string("dtype", "float32", "dtype of the weights on the devices", flag_values=values)
    flags.DEFINE_integer("new_tokens", 64, "masks appended", 1, MAX_NEW_TOKENS, flag_values=values)
    flags.DEFINE_integer("steps", None, "denoise steps (default: new_tokens)", 1, MAX_STEPS, flag_values=values)
    flags.DEFINE_string("algorithm", "entropy", "order of unmasking", flag_values=values)
    flags.DEFINE_float("temperature", 0.2, "0 is greedy", 0.0, flag_values=values)
    flags.DEFINE_float("top_p", 0.95, "nucleus", 0.0, 1.0, flag_values=values)
    flags.DEFINE_integer("top_k", 50, "most probable tokens kept", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "seed of sampling", 0, flag_values=values)
    flags.DEFINE_integer("samples", 0, "completions printed in full", 0, flag_values=values)
    define_record_flags(values)
    define_profiling_flags(values)


def decoding_config(values: flags.FlagValues) -> DiffusionConfig:
    """Return the decoding parameters of the flags."""
    return DiffusionConfig(
        max_new_tokens=values.new_tokens,
        steps=values.steps or values.new_tokens,
        algorithm=values.algorithm,
        temperature=values.temperature,
        top_p=values.top_p,
        top_k=values.top_k,
        alg_temp=0.0,
        seed=values.seed,
    )


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson, 1927)."""
    share = successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return (middle - spread) / (1 + z * z / trials), (middle + spread) / (1 + z * z / trials)


def parses(text: str) -> bool:
    """Return whether ``text`` is valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are a warning, not an error
            ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def statement_lines(body: str) -> int:
    """Return the number of lines that are not blank."""
    return sum(bool(line.strip()) for line in body.splitlines())


def share(name: str, successes: int, trials: int) -> dict[str, Any]:
    """Return a count with its share and interval, under names for a record."""
    interval = [round(bound, 4) for bound in wilson_interval(successes, trials)]
    return {name: successes, f"{name}_rate": round(successes / trials, 4), f"{name}_rate_95": interval}


def library_figures(
    held_out: Sequence[dict[str, Any]], completions: Sequence[Completion], engine: Engine
) -> dict[str, Any]:
    """Return the results for a set without tests. ``held_out`` and ``completions`` have the same order."""
    bodies = [completion.text.strip() for completion in completions]
    references = [row["completion"].strip() for row in held_out]
    encode = engine.tokenizer.encode
    agreement = [
        difflib.SequenceMatcher(None, encode(reference), encode(body), autojunk=False).ratio()
        for reference, body in zip(references, bodies, strict=True)
    ]
    mean = 1 / len(bodies)
    return {
        "mean_body_lines": round(sum(map(statement_lines, bodies)) * mean, 4),
        "mean_reference_lines": round(sum(map(statement_lines, references)) * mean, 4),
        "trivial_bodies": sum(body in TRIVIAL_BODIES for body in bodies),
        "distinct_bodies": round(len(set(bodies)) * mean, 4),
        "distinct_references": round(len(set(references)) * mean, 4),
        "exact_bodies": sum(body == reference for body, reference in zip(bodies, references, strict=True)),
        "token_agreement": round(sum(agreement) * mean, 4),
    }


def task_figures(tasks: Sequence[dict[str, Any]], completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the results for a set with tests: passed tasks, kinds of failures, and passes by kind of prompt."""
    outcomes = [
        run_tests(task["prompt"] + completion.text, task["tests"])
        for task, completion in zip(tasks, completions, strict=True)
    ]
    passed = [outcome == "passed" for outcome in outcomes]
    kinds: dict[str, dict[str, list[bool]]] = {"style": {}, "family": {}}
    for task, good in zip(tasks, passed, strict=True):
        if "spec" in task:
            kinds["style"].setdefault(task["style"], []).append(good)
            kinds["family"].setdefault(task["spec"].split("/")[0], []).append(good)
    return {
        **share("passed", sum(passed), len(passed)),
        "outcomes": dict(collections.Counter(outcomes).most_common()),
        **{
            f"passed_by_{kind}": {name: [sum(some), len(some)] for name, some in sorted(found.items())}
            for kind, found in kinds.items()
            if found
        },
        "failed": [task["name"] for task, good in zip(tasks, passed, strict=True) if not good],
    }


def complete(engine: Engine, rows: Sequence[dict[str, Any]], config: DiffusionConfig, seed: int) -> list[Completion]:
    """Return a completion of each prompt, in order. Each batch has prompts of similar length and its own seed."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["prompt"]))
    found: dict[int, Completion] = {}
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        seeded = config.replace(seed=seed + start)
        found |= dict(zip(part, engine.generate([rows[i]["prompt"] for i in part], config=seeded), strict=True))
        this_host().mark()  # the run is slow, but does not hang
    return [found[i] for i in range(len(rows))]


def read_held_out(folder: Path, name: str = SETS["library"]) -> list[dict[str, Any]]:
    """Read held-out prompts and completions, with tests if the set has them.

    Raises:
      InputError: the folder has no such file.
    """
    path = folder / name
    if not path.is_file():
        raise InputError(f"--checkpoint={folder}: contains no {name} (JSON lines, each with a prompt and a completion)")
    return read_json_lines(path)


def measure(
    engine: Engine, name: str, rows: Sequence[dict[str, Any]], config: DiffusionConfig, values: flags.FlagValues
) -> dict[str, Any]:
    """Complete the prompts of one set and return its results. Print the first completions and a line of results."""
    started = time.perf_counter()
    completions = complete(engine, rows, config, values.seed)
    seconds = time.perf_counter() - started
    parsed = [parses(row["prompt"] + completion.text) for row, completion in zip(rows, completions, strict=True)]
    result: dict[str, Any] = {
        "prompts": len(rows),
        "seconds": round(seconds, 1),
        **share("parsed", sum(parsed), len(parsed)),
        "finished": sum(completion.finish_reason == "stop" for completion in completions),
        "masks_left": sum(completion.masks_left for completion in completions),
    }
    tested = "tests" in rows[0]
    result |= task_figures(rows, completions) if tested else library_figures(rows, completions, engine)
    for row, completion in list(zip(rows, completions, strict=True))[: values.samples]:
        verdict = "parses" if parses(row["prompt"] + completion.text) else "does not parse"
        if tested:
            verdict = "fails" if row["name"] in result["failed"] else "passes"
        print(f"# {row['name']}: {verdict}")
        print(row["prompt"] + completion.text, end="\n\n")
    parts = [f"{name}:"]
    for figure in ("passed", "parsed"):
        if figure in result:
            low, high = result[f"{figure}_rate_95"]
            rate = result[f"{figure}_rate"]
            parts.append(
                f"{result[figure]} of {len(rows)} {figure} ({rate:.1%}, 95 % interval {low:.1%} to {high:.1%});"
            )
    if not tested:
        parts.append(f"body lines {result['mean_body_lines']:.2f}; token agreement {result['token_agreement']:.3f};")
    print(*parts, f"{seconds:.0f} s", flush=True)
    return result


def demo_quality_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per set, and lists of what passes and fails."""
    results, settings, machine = record["results"], record["settings"], record["machine"]
    decoding = settings["decoding"]

    def cell(row: dict[str, Any], name: str) -> str:
        if name not in row:
            return ""
        low, high = row[f"{name}_rate_95"]
        return f"**{row[name]}** ({row[f'{name}_rate']:.1%}; {low:.1%} to {high:.1%})"

    head = f"| set | prompts | pass all tests | parse | finished within {decoding['max_new_tokens']} tokens |"
    lines = [head, "|---|---:|---:|---:|---:|"]
    for name, row in results.items():
        cells = (_TITLES[name], row["prompts"], cell(row, "passed"), cell(row, "parsed"), row["finished"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for name, row in results.items():
        if styles := row.get("passed_by_style"):
            each = (f"{style.replace('_', ' ')} {passed} of {count}" for style, (passed, count) in styles.items())
            lines += ["", f"By kind of prompt, {_TITLES[name]} passed of all: {', '.join(each)}."]
        if failures := {why: count for why, count in row.get("outcomes", {}).items() if why != "passed"}:
            each = (f"{why} {count}" for why, count in failures.items())
            lines += ["", f"How the other {_TITLES[name]} fail: {', '.join(each)}."]
    if tested := [row for row in results.values() if "passed" in row]:
        parsed, count = (sum(row[name] for row in tested) for name in ("parsed", "prompts"))
        lines += ["", f"Of the {count} completions with tests, {parsed} parse ({parsed / count:.1%})."]
    if plain := results.get("plain_tasks", {}).get("failed"):
        lines += ["", f"Plain functions that fail: {', '.join(f'`{name}`' for name in plain)}."]
    how = (
        f"{decoding['max_new_tokens']} new tokens in {decoding['steps']} steps, {decoding['algorithm']}, temperature "
        f"{decoding['temperature']:g}, top_p {decoding['top_p']:g}, top_k {decoding['top_k']}, {settings['dtype']}"
    )
    made = (
        f"{record['kind'].capitalize()}: `{record['command']}`, one completion per prompt, {how}, "
        f"{machine['device_count']} x {machine['device_kind']} ({machine['processor']}); 95 % intervals by Wilson."
    )
    return "\n".join([*lines, "", made, *note_lines(record)])


def main(values: flags.FlagValues) -> None:
    """Complete every set and write the record."""
    check_profiling(values)
    folder = Path(values.checkpoint)
    tasks = Path(values.tasks or folder)
    sets = {name: read_held_out(tasks, SETS[name])[: values.limit] for name in values.set}
    config = decoding_config(values)
    notes = load_notes()
    engine = Engine.load(str(folder), mesh=values.mesh, dtype=values.dtype)
    results = {name: measure(engine, name, rows, config, values) for name, rows in sets.items()}
    again = [row["prompt"] for row in next(iter(sets.values()))[:8]]
    profile_again(values, "8 prompts", lambda: engine.generate(again, config=config), engine.program_texts)
    record = build_record(
        "demo_quality",
        kind="measured",
        settings={"dtype": values.dtype, "mesh": str(engine.layout.spec), "decoding": dataclasses.asdict(config)},
        results=results,
        devices=jax.devices(),
        notes=notes,
    )
    print(write_record(record, values.output_dir, values.record))


def run(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
