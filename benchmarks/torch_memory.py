"""Peak memory of one case in one library, as JSON on standard output; benchmarks.compare_torch starts one per library.

python -m benchmarks.torch_memory --library=torch --part=generate --random=mid-size --batch=1 --canvas=2048
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from benchmarks.models import define_model_flags, model_sizes
from benchmarks.process_memory import peak_resident_bytes
from benchmarks.torch_cases import (
    PARTS,
    Case,
    ForwardPass,
    case_config,
    cases,
    define_case_flags,
    jax_generation,
    random_engine,
    random_torch_model,
    torch_generation,
)
from benchmarks.torch_models import BACKENDS, import_torch, run_in_onednn
from launch.process.startup import run_launcher
from runtime.models.families import parse_config
from runtime.planner.presets import preset
from sharding.errors import InputError

LIBRARIES = ("jax", "torch")
DTYPES = ("float32", "bfloat16")


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""
    define_model_flags(values)
    define_case_flags(values)
    flags.DEFINE_enum("library", None, LIBRARIES, "Which library to run.", required=True, flag_values=values)
    flags.DEFINE_enum("part", None, PARTS, "The part of the comparison.", required=True, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Dtype of weights and activations.", flag_values=values)
    flags.DEFINE_enum("backend", "default", BACKENDS, "PyTorch's library for matrix products.", flag_values=values)


def _jax_call(case: Case, sizes: dict[str, int], dtype: str) -> Callable[[], Any]:
    engine = random_engine(case.part, sizes, dtype)
    ids = case.prompts(engine.config.vocab_size)
    if case.config is not None:
        return lambda: jax_generation(case, engine, ids)
    compiled = ForwardPass.compile(engine, ids)
    return lambda: jax.block_until_ready(compiled.logits())


def _torch_call(case: Case, sizes: dict[str, int], dtype: str, backend: str, torch: Any) -> Callable[[], Any]:
    model = random_torch_model(case.part, sizes, dtype, "cpu")
    if backend == "onednn":
        run_in_onednn(torch, model)
    config = preset("gpt2") if case.part == "gpt2" else parse_config(case_config(case.part, sizes, dtype))
    tokens = torch.from_numpy(case.prompts(config.vocab_size))

    def call() -> None:
        with torch.inference_mode():
            if case.config is None:
                model(tokens)
            else:
                torch_generation(case, model, config, tokens)

    return call


def main(values: flags.FlagValues) -> None:
    """Make the model, run the case twice, and print the peaks before and after, in bytes."""
    found = list(cases(values.part, values, "cpu"))
    if len(found) != 1:
        raise InputError(f"the flags give {len(found)} cases; give one batch, one canvas and one number of new tokens")
    [case], sizes = found, model_sizes(values)
    torch = import_torch() if values.library == "torch" else None
    if torch is None:
        jax.devices()
    before = peak_resident_bytes()
    if torch is None:
        call = _jax_call(case, sizes, values.dtype)
    else:
        call = _torch_call(case, sizes, values.dtype, values.backend, torch)
    call()
    first = peak_resident_bytes()
    call()
    print(json.dumps({"before_bytes": before, "first_call_bytes": first, "peak_bytes": peak_resident_bytes()}))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
