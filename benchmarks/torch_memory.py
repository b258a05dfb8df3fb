"""Compare memory with PyTorch (transformers) on CPU: the longest case of each part, in a process for each library.

  python -m benchmarks.torch_memory                                                        float32, some minutes
  python -m benchmarks.torch_memory --dtype=bfloat16 --record=torch_memory_bfloat16

The cases are those of :mod:`benchmarks.compare_torch`. A process runs its case twice. What counts is its peak of
resident memory, compilation included, beyond what it had before it made the model: after the start of JAX, or after
the import of PyTorch and of the model's class. For float32, PyTorch runs with each of its libraries for matrix
products, and the smaller peak counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags

from benchmarks.compare_torch import MODELS, check_cases, run_process, sizes_of, subjects
from benchmarks.models import define_model_flags
from benchmarks.process_memory import peak_resident_bytes
from benchmarks.records import build_record, define_record_flags, load_notes, write_record
from benchmarks.torch_cases import (
    DTYPES,
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
from benchmarks.torch_models import backends, import_model_class, import_torch, run_in_onednn
from checkpoints import parse_json_object
from launch.process.startup import run_launcher
from runtime.models.config import ModelConfig
from runtime.models.families import parse_config
from runtime.planner.presets import preset
from sharding.errors import InputError

_LIBRARIES = ("jax", "torch")
# Flags that a process for one case gets from this one.
_OWN_FLAGS = ("output_dir", "record", "parts", "random", "library", "backend")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_model_flags(values, MODELS)
    define_case_flags(values)
    flags.DEFINE_list("parts", list(PARTS), f"Which of {', '.join(PARTS)} to run.", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Dtype of weights and activations.", flag_values=values)
    text = "Run the one case that the other flags give, in this process and library, and print its memory as JSON."
    flags.DEFINE_enum("library", None, _LIBRARIES, text, flag_values=values)
    text = "PyTorch's library for matrix products, with --library=torch."
    flags.DEFINE_enum("backend", "default", backends("cpu", "float32"), text, flag_values=values)


def _longest_cases(values: flags.FlagValues) -> Iterator[tuple[str, Case]]:
    """Yield the longest case of each part, with the name of its model."""
    for name, parts in subjects(values):
        for part in parts:
            yield name, max(cases(part, values, "cpu"), key=lambda one: (one.canvas, one.batch))


def _model_config(case: Case, sizes: dict[str, int], dtype: str) -> ModelConfig:
    return preset("gpt2") if case.part == "gpt2" else parse_config(case_config(case.part, sizes, dtype))


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
    config = _model_config(case, sizes, dtype)
    tokens = torch.from_numpy(case.prompts(config.vocab_size))

    def call() -> None:
        with torch.inference_mode():
            if case.config is None:
                model(tokens, use_cache=False)
            else:
                torch_generation(case, model, config, tokens)

    return call


def run_case(values: flags.FlagValues) -> dict[str, int]:
    """Make a model and run its case twice, in this process. Return the peaks before and after, in bytes.

    Raises:
      InputError: the flags give more than one case.
    """
    found = list(_longest_cases(values))
    if len(found) != 1:
        raise InputError(f"--library: the flags give {len(found)} cases; give one part and one model")
    [(name, case)] = found
    sizes = sizes_of(name, values)
    if values.library == "jax":
        jax.devices()
        before = peak_resident_bytes()
        call = _jax_call(case, sizes, values.dtype)
    else:
        torch = import_torch()
        import_model_class(_model_config(case, sizes, values.dtype))
        before = peak_resident_bytes()
        call = _torch_call(case, sizes, values.dtype, values.backend, torch)
    call()
    first = peak_resident_bytes()
    call()
    return {"before_bytes": before, "first_call_bytes": first, "peak_bytes": peak_resident_bytes()}


def measure(values: flags.FlagValues) -> list[dict[str, Any]]:
    """Run the longest case of each part in processes of their own, and return a row for each."""
    given = [values[name].serialize() for name in values if values[name].present and name not in _OWN_FLAGS]
    rows = []
    for name, case in _longest_cases(values):
        own = [*given, f"--parts={case.part}", *([] if name == "gpt2" else [f"--random={name}"])]

        def peaks(*library: str, own: list[str] = own) -> dict[str, int]:
            printed = run_process("torch_memory", [*own, *library], read=True)
            peak: dict[str, int] = parse_json_object(printed.strip().splitlines()[-1].encode())
            return peak

        torch = {backend: peaks("--library=torch", f"--backend={backend}") for backend in backends("cpu", values.dtype)}
        own_peaks = peaks("--library=jax")
        used = [own_peaks, min(torch.values(), key=lambda peak: peak["peak_bytes"])]
        megabytes = [(peak["peak_bytes"] - peak["before_bytes"]) / 1e6 for peak in used]
        print(f"{case.part} {name}: JAX {megabytes[0]:.0f} MB, PyTorch {megabytes[1]:.0f} MB", flush=True)
        rows.append({"part": case.part, "model": name, **case.sizes, "jax": own_peaks, "torch": torch})
    return rows


def main(values: flags.FlagValues) -> None:
    """Run one case, or all of them in processes of their own, and write the record."""
    check_cases(values)
    if values.library:
        print(json.dumps(run_case(values)))
        return
    notes = load_notes()
    import_torch()
    record = build_record(
        "torch_memory",
        kind="measured",
        settings={
            "models": {name: sizes_of(name, values) for name, _ in subjects(values)},
            "dtype": values.dtype,
            "torch_attention": "sdpa",
        },
        results={"rows": measure(values)},
        devices=jax.devices()[:1],
        notes=notes,
    )
    print(f"written: {write_record(record, values.output_dir, values.record)}")


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
