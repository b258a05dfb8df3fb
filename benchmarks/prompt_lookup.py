"""Measure speculation of autoregressive models, by prompt lookup and by a draft model: forward passes per token.

  python -m benchmarks.prompt_lookup                        3, 7 and 15 drafts
  python -m benchmarks.prompt_lookup --drafts=1,63 --functions=20

Three workloads:

* ``editing``: the prompt is a function of the demo's held-out library, and the new tokens are the same function with
  its first parameter renamed. How many drafts are right depends only on the text, so no model runs: the passes are
  those of any model that writes this text.
* ``random``: greedy and sampled text of a Qwen2 model of the demo's size with random weights, on the same prompts. Text
  of a random model repeats itself more than that of a trained one, so this checks the counts and the tokens of the
  engine, with and without drafts, rather than predicting a saving. Two choices within rounding (1e-5 in the logits) may
  resolve differently with drafts: the record has the margin of each difference, and it is printed.
* ``draft model``: the same model and prompts with a draft model, which has the same weights in int4. It guesses well
  but is not smaller, so this too checks counts and tokens rather than predicting a saving of time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.demo_quality import read_held_out
from benchmarks.records import build_record, define_record_flags, integers, kind_of_devices, load_notes, write_record
from checkpoints import DEMO, open_folder
from launch.process.startup import run_launcher
from runtime import Engine, SamplingConfig, TextTokenizer, parse_config
from runtime.decoding.prompt_lookup import look_up
from runtime.decoding.sampling import TOKEN_STREAM, gumbel_noise, position_keys
from runtime.execution.rows import row_seeds, seed_words
from sharding.errors import InputError

_INSTRUCTION = "\n\n# The same function with another name for its first parameter\n"
_PARAMETER = re.compile(r"\(\s*(?:self,\s*)?([a-z_]\w*)")
_NEW_NAME = "renamed"
# Positions of the array in which a text is looked up; longer texts are left out.
_POSITIONS = 512
_SAMPLED = {"temperature": 0.7, "top_p": 0.9}
# Workloads on the random model, by the parameter that sets the number of drafts.
_WORKLOADS = {"prompt_lookup": "random", "draft_tokens": "draft model"}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_list("drafts", ["3", "7", "15"], "Numbers of drafts per pass.", flag_values=values)
    flags.DEFINE_integer("functions", 50, "Functions to edit.", 1, flag_values=values)
    flags.DEFINE_integer("rows", 4, "Prompts of the random model.", 1, flag_values=values)
    flags.DEFINE_integer("new_tokens", 128, "Tokens that the random model writes per prompt.", 1, flag_values=values)
    define_record_flags(values)


def edits(count: int) -> list[tuple[str, str]]:
    """Return the first functions that have a parameter to rename: the text before the edited function, and that."""
    found = []
    for own in read_held_out(DEMO):
        code = own["prompt"] + own["completion"]
        if (name := _PARAMETER.search(own["prompt"])) and name[1] != "self":
            found.append((code + _INSTRUCTION, re.sub(rf"\b{name[1]}\b", _NEW_NAME, code)))
    return found[:count]


def passes_to_write(prompt: Sequence[int], new: Sequence[int], guess: Callable[..., jax.Array]) -> int:
    """Return the number of passes, prefill included, in which prompt lookup writes the tokens ``new``.

    Args:
      prompt: the tokens before.
      new: the tokens that a model writes.
      guess: :func:`look_up` for a number of drafts.
    """
    text = np.zeros((1, _POSITIONS), np.int32)
    text[0, : len(prompt) + len(new)] = [*prompt, *new]
    length, passes = len(prompt) + 1, 1
    while length < len(prompt) + len(new):
        guessed = np.asarray(guess(jnp.asarray(text), jnp.array([length], jnp.int32)))[0]
        wanted = text[0, length : len(prompt) + len(new)][: len(guessed)]
        right = int(np.cumprod(guessed[: len(wanted)] == wanted).sum())
        length, passes = length + right + 1, passes + 1
    return passes


def measure_editing(pairs: Sequence[tuple[list[int], list[int]]], drafts: int) -> dict[str, Any]:
    """Count the passes and tokens of all edits."""
    guess = jax.jit(partial(look_up, drafts))
    passes = sum(passes_to_write(prompt, new, guess) for prompt, new in pairs)
    return _row("editing", drafts, passes, sum(len(new) for _, new in pairs))


def margin(engine: Engine, found: np.ndarray, plain: np.ndarray, prompt: int, config: SamplingConfig) -> float | None:
    """Return how close the choice was at the first token in which two sequences ``[S]`` differ; None if none does.

    It is the gap between the scores of the two tokens, see :func:`scores_of`.
    """
    if (found == plain).all():
        return None
    place = int(np.argmax(found != plain))
    scores = scores_of(engine, plain[:place], prompt, config)
    return abs(float(scores[found[place]]) - float(scores[plain[place]]))


def scores_of(engine: Engine, text: np.ndarray, prompt: int, config: SamplingConfig) -> np.ndarray:
    """Return the numbers ``[V]`` whose largest is the next token of a text, if filters keep that token.

    They are the logits, divided by the temperature, with the noise of the token's position.

    Args:
      engine: the model.
      text: tokens of the row so far, ``[S]``.
      prompt: number of tokens of its prompt.
      config: decoding parameters of the row alone; the seed is a number.
    """
    scores: np.ndarray = engine.logits(text[None])[0, -1] / (config.temperature or 1.0)
    if not config.temperature:
        return scores
    seeds, place = jnp.asarray(seed_words(row_seeds(config.seed, 1))), len(text)
    keys = position_keys(seeds, jnp.int32(place - prompt), TOKEN_STREAM, jnp.array([[place]], jnp.int32))
    return scores + np.asarray(gumbel_noise(keys, len(scores)))[0, 0]


def measure_random(
    engine: Engine, prompts: Sequence[list[int]], config: SamplingConfig, counts: Sequence[int], parameter: str
) -> list[dict[str, Any]]:
    """Count the passes of each prompt alone for several numbers of drafts, and compare its tokens with no drafts.

    Args:
      engine: the model.
      prompts: tokens of the prompts.
      config: decoding parameters without drafts.
      counts: the numbers of drafts.
      parameter: the decoding parameter that they are set by.
    """
    kind = f"{_WORKLOADS[parameter]}, {'sampled' if config.temperature else 'greedy'}"
    results = []
    expected = [engine.generate_tokens([prompt], None, config).sequences[0] for prompt in prompts]
    for drafts in counts:
        passes, margins = 0, []
        for prompt, plain in zip(prompts, expected, strict=True):
            found = engine.generate_tokens([prompt], None, config.replace(**{parameter: drafts}))
            passes += found.stats.forwards
            gap = margin(engine, found.sequences[0], plain, len(prompt), config)
            if gap is not None:
                margins.append(gap)
                print(f"{kind}, {drafts} drafts: tokens differ, at a margin of {gap:.2g}")
        row = _row(kind, drafts, passes, len(prompts) * config.max_new_tokens)
        results.append(row | {"prompts": len(prompts), "equal": len(prompts) - len(margins), "margins": margins})
    return results


def _row(workload: str, drafts: int, passes: int, tokens: int) -> dict[str, Any]:
    row = {"workload": workload, "drafts": drafts, "forwards": passes, "tokens": tokens}
    row["forwards_per_token"] = round(passes / tokens, 4)
    row["accepted_per_pass"] = round((tokens - passes) / passes, 3)
    print(f"{workload:<22} {drafts:>3} drafts  {row['forwards_per_token']:.3f} forward passes per token")
    return row


def with_draft_model(engine: Engine) -> Engine:
    """Return an engine of the same weights whose draft model is their int4 copy."""
    copy = Engine.random(engine.config, "data=1", "float32", quantize="int4")
    return Engine(engine.layout, engine.weights, draft=copy.runner)


def prompt_lookup_table(record: Mapping[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per workload and number of drafts."""
    lines = [
        "| workload | drafts per pass | passes/token | accepted per pass | equal prompts |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in record["results"]:
        equal = f"{row['equal']} of {row['prompts']}" if "prompts" in row else "no model runs"
        lines.append(
            f"| {row['workload']} | {row['drafts']} | {row['forwards_per_token']:.3f} | {row['accepted_per_pass']:.2f} "
            f"| {equal} |"
        )
    return "\n".join([*lines, "", f"{record['kind'].capitalize()}: `{record['command']}`."])


def main(values: flags.FlagValues) -> None:
    """Measure all workloads with each number of drafts, and write the record."""
    counts = integers("drafts", values.drafts)
    if wrong := [count for count in counts if count < 1]:
        raise InputError(f"--drafts: {wrong[0]} is not at least 1", field="drafts")
    notes, folder = load_notes(), open_folder(DEMO)
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer is not None, "the demo has a tokenizer"
    tokens = [(tokenizer.encode(prompt), tokenizer.encode(new)) for prompt, new in edits(values.functions)]
    tokens = [(prompt, new) for prompt, new in tokens if len(prompt) + len(new) <= _POSITIONS]
    prompts = [prompt for prompt, _ in tokens[: values.rows]]
    model = parse_config(folder.config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    engine, greedy = Engine.random(model, "data=1", "float32"), SamplingConfig(max_new_tokens=values.new_tokens)
    engines = {"prompt_lookup": engine, "draft_tokens": with_draft_model(engine)}
    results = [measure_editing(tokens, drafts) for drafts in counts]
    for parameter, own in engines.items():
        for config in (greedy, greedy.replace(**_SAMPLED)):
            results += measure_random(own, prompts, config, counts, parameter)
    record = build_record(
        "prompt_lookup",
        kind=kind_of_devices(jax.devices()),
        settings={"edited_functions": len(tokens), "rows": len(prompts), "new_tokens": values.new_tokens},
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
