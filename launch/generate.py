"""Complete prompts with a diffusion or autoregressive language model on any mesh.

  diffumesh generate --prompt='def fibonacci(n):'              the demo checkpoint, on the devices of this machine
  diffumesh generate --checkpoint=apple/DiffuCoder-7B-cpGRPO --chat --mesh=tensor=8 --prompt='Sort a list.'
  diffumesh generate --devices=8 --mesh=data=2,tensor=4 ...    the same on 8 simulated CPU devices
  diffumesh generate --checkpoint=DIR --mesh=tensor=8 --explain    print the layout of the weights, and stop
  diffumesh generate --cache=dual --parallel=threshold ...    in blocks with a cache: faster, and approximate

Prompts come from --prompt, --prompt_file or standard input. Completions go to standard output, everything else to
standard error. Decoding flags override the checkpoint's generation_config.json, which overrides the preset: by
default, the settings that the model's authors publish.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from absl import flags

from launch.display.canvas_view import CanvasView, check_display, observed, row_titles, write_history
from launch.display.completions import summary, write_completions, write_unfinished
from launch.display.explain import explain
from launch.flags.decoding import decoding_config, define_decoding_flags, define_request_flags, describe, notices
from launch.flags.model import (
    define_model_flags,
    fingerprints,
    load_engine,
    open_checkpoint,
    open_draft_checkpoint,
    read_mesh,
    read_tokenizer,
)
from launch.flags.prompts import define_prompt_flags, encode_request, read_prompts
from launch.hosts.preflight import digest
from launch.process.interruption import Interruption
from launch.process.path_flags import define_path
from launch.process.profiling import check_profiling, define_profiling_flags, traced, write_programs
from launch.process.startup import define_device_flags, is_main_process, run_launcher, say, start_devices, this_host
from runtime import CompletionBuilder, DiffusionConfig, end_tokens, row_seeds

# The flags that --help shows; --helpfull shows all.
FIRST_FLAGS = (
    "prompt", "prompt_file", "chat", "checkpoint", "mesh", "devices", "max_new_tokens", "num_return_sequences",
    "temperature", "seed", "watch", "json", "explain",
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""

    def switch(name: str, text: str) -> None:
        flags.DEFINE_bool(name, False, text, flag_values=values)

    define_model_flags(values)
    define_prompt_flags(values)
    flags.DEFINE_integer(
        "max_batch", None, "Maximum rows to run at once. Default: as memory allows.", 1, flag_values=values
    )
    define_decoding_flags(values)
    define_request_flags(values)
    switch("json", "Print one JSON line per completion.")
    switch("watch", "Show the canvas as it unmasks, in the terminal.")
    define_path("history_html", "File for an HTML page that replays the generation.", values)
    switch("verbose", "Print all decoding parameters, the mesh and the size of the weights.")
    switch("explain", "Print the layout of every weight on the mesh, and stop.")
    define_profiling_flags(values)
    define_device_flags(values)


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh generate``: complete the prompts, and print the completions."""
    mesh = read_mesh(values)
    folder, model = open_checkpoint(values)
    draft = open_draft_checkpoint(values, folder)
    check_profiling(values)
    if values.explain:
        explain(values, folder, model, mesh, draft)
        return
    tokenizer = read_tokenizer(folder)
    config = decoding_config(values, folder, model)
    config = config.with_end_tokens(end_tokens(model, folder, tokenizer), default=True)
    check_display(values, folder.name, config)
    prompts = read_prompts(values)
    ids, mask, suffixes, config = encode_request(values, folder, model, tokenizer, prompts, config)
    seeds = row_seeds(config.seed, len(prompts), values.num_return_sequences)

    # The tokens, because hosts may render a chat at another time.
    tokens = digest(json.dumps([ids.tolist(), mask.tolist(), suffixes]))
    start_devices(values, fingerprints(folder, draft) | {"prompts": tokens}, end_within=0)
    samples = values.num_return_sequences
    engine = load_engine(values, folder, mesh, len(prompts) * samples, values.max_batch, draft)
    if values.verbose:
        say(describe(config))
    for sentence in notices(values, folder, model.family, [config], draft=draft):
        say(sentence)
    view, titles = CanvasView(engine, ids, mask, samples, suffixes), row_titles(prompts, samples)

    ends = (*engine.end_token_ids, *config.stop_token_ids)
    builder = CompletionBuilder(engine.tokenizer, engine.config.mask_token_id, ends)
    tests = engine.stop_tests([values.stop] * (len(prompts) * samples), config.stop_token_ids)
    interruption = Interruption(
        len(tests), lambda rows: write_unfinished(rows, prompts, titles, seeds, builder, values)
    )
    with traced(values), interruption:
        tests = interruption.stop_tests(tests)
        with observed(view, titles, watch=values.watch) as (progress, watch):
            result = engine.generate_tokens(
                ids,
                mask,
                config,
                num_return_sequences=samples,
                watch=watch,
                progress=interruption.report(progress),
                stop_tests=tests,
                suffixes=suffixes,
            )
    if values.dump_hlo is not None:
        write_programs(values, engine.program_texts())
    completions = builder.build_batch(prompts, ids, mask, result, values.stop, values.suffix, interruption.cut_short)
    if is_main_process():
        write_completions(completions, titles, result.stats, values)
        if values.history_html is not None and isinstance(config, DiffusionConfig):
            write_history(values.history_html, view, result, titles, config, completions)
    say(summary(completions, result, ids.shape[1], interruption.signal if interruption.cut_short else None))
    if interruption.cut_short:
        this_host().finish()
        sys.exit(interruption.exit_code)


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh generate`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv, FIRST_FLAGS)


if __name__ == "__main__":
    run()
