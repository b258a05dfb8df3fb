"""Prompts from ``--prompt``, ``--prompt_file`` or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

from absl import flags

from launch.process.path_flags import define_paths
from launch.process.startup import is_main_process, this_host
from runtime import InputError

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
