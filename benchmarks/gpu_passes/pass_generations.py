"""The child process that runs the generations of one checkout, from which the time of a pass follows.

It runs as a script with the checkout's root on ``PYTHONPATH``, and imports only names that old checkouts have too. Its
argument is a JSON object of models by name, each with ``config``, ``dtype`` and ``quantize``. Each line of standard
input is a JSON object: ``model``, ``rows``, ``prompt``, ``new_tokens``, ``steps`` (None for an autoregressive model),
and ``block_length`` (None without a cache); ``trace`` and ``programs`` name folders for a trace and for the optimized
HLO. Each answer is a line of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from runtime import DiffusionConfig, Engine, SamplingConfig


def random_engine(model: dict[str, Any]) -> Engine:
    """Make an engine with random weights on the first device."""
    families = importlib.import_module("runtime.models.config")
    if hasattr(families.ModelConfig, "from_huggingface"):  # checkouts from before 2026-11-13
        config = families.ModelConfig.from_huggingface(model["config"])
    else:
        config = importlib.import_module("runtime.models.families").parse_config(model["config"])
    return Engine.random(config, "data=1", model["dtype"], devices=jax.devices()[:1], quantize=model["quantize"])


def request_of(asked: dict[str, Any]) -> DiffusionConfig | SamplingConfig:
    """Return the decoding parameters, with the published sampling."""
    if asked["steps"] is None:
        return SamplingConfig(asked["new_tokens"], temperature=0.7, top_p=0.9)
    blocks = {} if asked["block_length"] is None else {"cache": "dual", "block_length": asked["block_length"]}
    return DiffusionConfig.published(asked["new_tokens"], steps=asked["steps"], **blocks)


def run(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """Run one generation and return seconds, passes, and what was compiled."""
    shape = asked["rows"], asked["prompt"]
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size - 2, shape).astype(np.int32)
    request = request_of(asked)
    with jax.profiler.trace(asked["trace"]) if asked.get("trace") else contextlib.nullcontext():
        start = time.perf_counter()
        stats = engine.generate_tokens(ids, config=request).stats
        seconds = time.perf_counter() - start
    if asked.get("programs"):
        folder = Path(asked["programs"])
        folder.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(engine.program_texts().values()):
            (folder / f"{number}.hlo").write_text(text, encoding="utf-8")
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": seconds,
        "forwards": stats.forwards,
        "compiled": stats.compiled_programs,
        "compile_seconds": round(stats.compile_seconds, 2),
        "peak_bytes": memory.get("peak_bytes_in_use"),
    }


def main(models: dict[str, dict[str, Any]]) -> None:
    """Answer commands until standard input ends. Only the model of the last command is kept in memory."""
    print(json.dumps({"device": jax.devices()[0].device_kind}), flush=True)
    held: dict[str, Engine] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["model"] not in held:
            held.clear()
            gc.collect()
            held[asked["model"]] = random_engine(models[asked["model"]])
        print(json.dumps(run(held[asked["model"]], asked)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
