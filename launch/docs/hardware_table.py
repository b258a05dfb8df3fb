"""Write the tables of machines and of model families in the hardware guide, from the planner's estimates.

python -m launch.docs.hardware_table launch/docs/hardware.md      replaces the text between each table's markers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launch.docs.marked_tables import markdown, replace_table
from runtime.planner import Estimate, Workload, parse_topology, preset, rank

MODEL = "diffucoder-7b"
MACHINES = (
    "l4", "rtx4090", "a100-40gb", "a100", "h100", "h200", "4xl4", "8xa100", "8xh100", "8xh200", "2x8xh200",
    "v5e:2x2", "v5e:2x4", "v5e:4x4", "v4:2x2x1", "v4:2x2x4", "v5p:2x2x1", "v6e:2x2", "v6e:2x4",
)  # fmt: skip
# Rows, tokens of each prompt, new tokens: one prompt, a batch, a long canvas.
WORKLOADS = ((1, 256, 256), (16, 256, 256), (1, 1024, 1024))

# Presets and their caches, from the models that compute the whole canvas to the autoregressive ones.
FAMILIES = (
    ("diffucoder-7b", "none"), ("llada-8b", "none"), ("diffucoder-7b", "dual"), ("llada-8b", "dual"),
    ("fast_dllm_v2-7b", "exact"), ("sdar-8b", "exact"), ("qwen2.5-7b", "none"),
)  # fmt: skip
FAMILY_MACHINES = ("v5e:2x4", "v4:2x2x2", "8xh100")
FAMILY_WORKLOAD = (16, 256, 256)


def table() -> str:
    """Return a Markdown table with a row per machine: for each workload the mesh ranked first, and its estimates.

    A line below says what it does not show.
    """
    head = ["machine", "usable GB per device", "weights"]
    head += [f"{rows} x ({prompt} + {new})" for rows, prompt, new in WORKLOADS]
    lines = []
    for machine in MACHINES:
        topology = parse_topology(machine)
        for quantization in ("none", "int8"):
            found = [_best(machine, _workload(*one, quantization)) for one in WORKLOADS]
            if any(found):
                break
        usable = f"{topology.chip.usable_bytes / 1e9:.1f}"
        dtype = "bfloat16" if quantization == "none" else quantization
        lines.append([f"`{topology}`", usable, dtype if any(found) else "do not fit", *map(_cell, found)])
    return markdown(head, lines) + "\nNot shown: measured times; KV caches; parallel decoding.\n"


def _workload(rows: int, prompt: int, new_tokens: int, quantization: str) -> Workload:
    return Workload(preset(MODEL), "bfloat16", rows, prompt, new_tokens, new_tokens, quantization=quantization)


def families() -> str:
    """Return a Markdown table with a row per model and cache: on each machine the mesh ranked first, and its estimates.

    Every step commits one token per row, so that the families differ only in what a step computes. A line below says
    what it does not show.
    """
    rows, prompt, new = FAMILY_WORKLOAD
    head = ["model", "attention", "cache", "positions per token", *(f"`{machine}`" for machine in FAMILY_MACHINES)]
    lines = []
    for model, cache in FAMILIES:
        config = preset(model)
        length = config.attention_block_length or Workload.block_length
        workload = Workload(config, "bfloat16", rows, prompt, new, new, cache, length)
        found = [_best(machine, workload) for machine in FAMILY_MACHINES]
        kept = "KV" if config.objective == "autoregressive" else cache
        lines.append([f"`{model}`", config.family.attention, kept, _positions(workload, found), *map(_rates, found)])
    return markdown(head, lines) + "\nNot shown: measured times; parallel decoding; the quality of the text.\n"


_TABLES = {"machines": table, "families": families}


def write(text: str) -> str:
    """Return a document with its tables regenerated.

    Raises:
      InputError: the document has no place for one of them.
    """
    for name, make in _TABLES.items():
        text = replace_table(text, name, make())
    return text


def _best(machine: str, workload: Workload) -> Estimate | None:
    fitting, _ = rank(workload, parse_topology(machine))
    return fitting[0] if fitting else None


def _positions(workload: Workload, found: Sequence[Estimate | None]) -> str:
    """Return how many positions are computed for each new token, all phases together."""
    estimate = next(filter(None, found))
    # The rows of a phase are those of one data shard.
    computed = sum(one.phase.rows * one.phase.positions * one.phase.forwards for one in estimate.phases)
    return str(round(computed * estimate.spec.data / (workload.batch * workload.new_tokens)))


def _mesh(found: Estimate) -> str:
    axes = {"data": found.spec.data, "sequence": found.spec.sequence, "tensor": found.spec.tensor}
    return ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "tensor=1"


def _rates(found: Estimate | None) -> str:
    if found is None:
        return "does not fit"
    return f"`{_mesh(found)}`, {found.tokens_per_second:.0f} tokens/s, {found.memory.total / 1e9:.1f} GB"


def _cell(found: Estimate | None) -> str:
    if found is None:
        return "does not fit"
    return (
        f"`{_mesh(found)}`, {1e3 * found.main_phase.seconds:.1f} ms, {found.tokens_per_second:.0f} tokens/s, "
        f"{found.memory.total / 1e9:.1f} GB"
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(write(path.read_text("utf-8")), "utf-8")
