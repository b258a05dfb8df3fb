"""Prompts from ``--prompt``, ``--prompt_file`` or standard input, and their tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from absl import flags

from checkpoints import CheckpointFolder
from launch.flags.decoding import steps_follow_tokens
from launch.process.path_flags import define_paths
from launch.process.startup import is_main_process, this_host
from runtime import (
    DiffusionConfig,
    InputError,
    ModelConfig,
    SamplingConfig,
    TextTokenizer,
    check_request,
    encode_prompts,
    read_rows,
    read_stop,
    unpadded_rows,
    with_steps_for_masks,
)

MAX_PROMPT_BYTES = 16 << 20


def define_prompt_flags(values: flags.FlagValues) -> None:
    """Define the flags for prompts and suffixes."""
    # absl adds "; repeat this option to specify a list of values" to each help text.
    flags.DEFINE_multi_string("prompt", [], "Text to complete", flag_values=values)
    define_paths("prompt_file", "File whose contents are a prompt", values)
    flags.DEFINE_multi_string(
        "suffix", [], "Infilling: text after the completion, one for each prompt", flag_values=values
    )


def read_prompts(values: flags.FlagValues) -> list[str]:
    """Read the prompts from flags or standard input.

    Raises:
      InputError: there is no prompt, a prompt is empty, or a file is not UTF-8 text.
    """
    prompts = list(values.prompt)
    for name in values.prompt_file:
        try:
            with Path(name).open("rb") as file:
                prompts.append(_read(file, f"--prompt_file={name}"))
        except OSError as error:
            raise InputError(f"--prompt_file={name}: cannot be read ({error.strerror})") from error
    if not prompts:
        # All hosts use the standard input of host 0.
        prompts = [this_host().gather("standard input", read_standard_input() if is_main_process() else "")[0]]
    if not prompts or not all(prompts):
        raise InputError(
            "a prompt is empty or missing; give --prompt='def fibonacci(n):', --prompt_file or standard input"
        )
    return prompts


def encode_request(
    values: flags.FlagValues,
    folder: CheckpointFolder,
    model: ModelConfig,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    config: DiffusionConfig | SamplingConfig,
) -> tuple[np.ndarray, np.ndarray, Sequence[Sequence[int]], DiffusionConfig | SamplingConfig]:
    """Tokenize the prompts with their suffixes, and check that the model can run them.

    Returns:
      Token ids and attention mask int32 ``[B, S]``, the tokens of the suffixes, and the configuration: where nothing
      sets its steps, they count the masks in the prompts too, those of the prompt with the most.

    Raises:
      InputError: a prompt is too long, or the model cannot run it with this configuration.
    """
    ids, mask, suffixes = encode_prompts(tokenizer, prompts, model, suffixes=values.suffix, chat=values.chat)
    rows = unpadded_rows(ids, mask)
    if steps_follow_tokens(values, folder, model.family):
        masks = max(int((row == model.mask_token_id).sum()) for row in rows)
        config = with_steps_for_masks(config, model, masks)
    check_request(read_rows(ids, mask, model, suffixes), model, config)
    read_stop(values.stop, model, rows)
    return ids, mask, suffixes, config


def read_standard_input() -> str:
    """Read standard input; empty if it is an interactive terminal.

    Raises:
      InputError: the input is too large, or is not UTF-8 text.
    """
    if sys.stdin.isatty():
        return ""
    return _read(sys.stdin.buffer, "standard input")


def _read(file: IO[bytes], where: str) -> str:
    data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise InputError(f"{where}: larger than {MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: cannot be read as UTF-8 text ({error})") from error
