"""Estimated latency of one completion with drafts: the planner's passes, and the accepted steps that were measured.

The number of steps that drafts save depends on the text. It is taken from a measured record of
:mod:`benchmarks.drafts`, whose model is the demo; another model accepts more or fewer. The rest is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.records import note_lines
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology

MODEL, PROMPT, NEW_TOKENS = "diffucoder-7b", 256, 256
# Topology, mesh, and the axis over which the drafts of a row are divided.
MACHINES = (("h200", "tensor=1", "none"), ("v5e-8", "tensor=8", "none"), ("v5e-8", "data=8", "data"))


def latencies(accepted: Mapping[int, float]) -> list[dict[str, Any]]:
    """Estimate the time of one completion on each machine, without drafts and with each number of drafts.

    Args:
      accepted: measured average number of accepted steps per pass, by ``draft_steps``.
    """
    rows: list[dict[str, Any]] = []
    for machine, mesh, axis in MACHINES:
        topology, spec = parse_topology(machine), MeshSpec.parse(mesh)
        alone = 0.0
        for drafts in (0, *accepted):
            workload = Workload(
                preset(MODEL),
                "bfloat16",
                1,
                PROMPT,
                NEW_TOKENS,
                NEW_TOKENS,
                draft_steps=drafts,
                draft_axis=axis if drafts else "none",
            )
            found = estimate_workload(workload, topology, spec)
            # The plan has one pass per step; each accepted step saves one of them.
            seconds = found.seconds / (1.0 + accepted.get(drafts, 0.0))
            alone = alone or seconds
            row = {
                "machine": machine,
                "mesh": mesh,
                "draft_axis": workload.draft_axis,
                "draft_steps": drafts,
                "measured_accepted_per_pass": accepted.get(drafts),
                "ms_per_pass": 1e3 * found.main_phase.seconds,
                "seconds": seconds,
                "times_as_fast": alone / seconds,
                "fits": found.fits,
            }
            rows.append(row)
            print(
                f"{machine:<6} {mesh:<9} {drafts} drafts  {row['ms_per_pass']:7.2f} ms per pass  {seconds:6.2f} s  "
                f"{row['times_as_fast']:.2f}x",
                flush=True,
            )
    return rows


def latency_table(record: dict[str, Any]) -> str:
    """Convert an estimated record to a Markdown table with a row per machine, mesh and number of drafts."""
    settings = record["settings"]
    lines = [
        "| machine | mesh | `draft_steps` | `draft_axis` | accepted per pass, measured on the demo | ms per pass "
        "| s per completion | as fast as without | fits |",
        "|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in record["results"]:
        accepted = row["measured_accepted_per_pass"]
        cells = [
            row["machine"],
            f"`{row['mesh']}`",
            row["draft_steps"],
            row["draft_axis"],
            "" if accepted is None else f"{accepted:.2f}",
            f"{row['ms_per_pass']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['times_as_fast']:.2f}x",
            "yes" if row["fits"] else "no",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    made = (
        f"Estimated: {settings['model']} in {settings['dtype']}, one completion of {settings['prompt']} + "
        f"{settings['new_tokens']} tokens, exact decoding, one step per token. Accepted steps are those of "
        f"mode `{settings['accepted_in_mode']}` in the record of commit `{(settings['measured_commit'] or '')[:7]}`."
    )
    return "\n".join([*lines, "", made, *note_lines(record)])
