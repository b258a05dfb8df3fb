"""Write the table of machines in the hardware guide, from the planner's estimates.

python -m launch.docs.hardware_table launch/docs/hardware.md      replaces the text between the table's markers
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from runtime.planner import Estimate, Workload, parse_topology, preset, rank

MODEL = "diffucoder-7b"
MACHINES = (
    "l4", "rtx4090", "a100-40gb", "a100", "h100", "h200", "4xl4", "8xa100", "8xh100", "8xh200", "2x8xh200",
    "v5e:2x2", "v5e:2x4", "v5e:4x4", "v4:2x2x1", "v4:2x2x4", "v5p:2x2x1", "v6e:2x2", "v6e:2x4",
)  # fmt: skip
# Rows, tokens of each prompt, new tokens: one prompt, a batch, a long canvas.
WORKLOADS = ((1, 256, 256), (16, 256, 256), (1, 1024, 1024))
_MARKED = re.compile(r"(<!-- machines -->\n).*?(<!-- end of machines -->)", re.DOTALL)


def table() -> str:
    """Return a Markdown table with a row per machine: for each workload the mesh ranked first, and its estimates."""
    head = ["machine", "usable GB per device", "weights"]
    head += [f"{rows} x ({prompt} + {new})" for rows, prompt, new in WORKLOADS]
    lines = [head, ["---"] * len(head)]
    for machine in MACHINES:
        topology = parse_topology(machine)
        for quantization in ("none", "int8"):
            found = [_best(machine, *workload, quantization) for workload in WORKLOADS]
            if any(found):
                break
        usable = f"{topology.chip.usable_bytes / 1e9:.1f}"
        dtype = "bfloat16" if quantization == "none" else quantization
        lines.append([f"`{topology}`", usable, dtype if any(found) else "do not fit", *map(_cell, found)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(text: str) -> str:
    """Return a document with its table regenerated."""
    return _MARKED.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)


def _best(machine: str, rows: int, prompt: int, new_tokens: int, quantization: str) -> Estimate | None:
    workload = Workload(preset(MODEL), "bfloat16", rows, prompt, new_tokens, new_tokens, "none", 32, quantization)
    fitting, _ = rank(workload, parse_topology(machine))
    return fitting[0] if fitting else None


def _cell(found: Estimate | None) -> str:
    if found is None:
        return "does not fit"
    axes = {"data": found.spec.data, "sequence": found.spec.sequence, "tensor": found.spec.tensor}
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "tensor=1"
    return (
        f"`{mesh}`, {1e3 * found.main_phase.seconds:.1f} ms, {found.tokens_per_second:.0f} tokens/s, "
        f"{found.memory.total / 1e9:.1f} GB"
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(write(path.read_text("utf-8")), "utf-8")
