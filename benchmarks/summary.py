"""The two tables of speed in README.md, measured and estimated, with rows from records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]
Read = Callable[[str], Record | None]

# Decoding modes of the demo in the summary, with their descriptions. Each row ends at its end token.
_MODES = {
    "exact": "exact, greedy, one token per step",
    "fast_dllm": "Fast-dLLM as published (dual cache, blocks of 32, threshold 0.9)",
    "dual_8_once": "dual cache, blocks of 8, threshold 0.9, one refresh",
}


def measured_table(read: Read) -> str:
    """Return the table of measurements, with the commands that made them.

    Args:
      read: returns the record at a path in ``benchmarks/results``; None if it does not exist.
    """
    rows = [(what, result, machine_of(record), f"`{command}`") for what, result, record, command in _measured(read)]
    return _table(("what", "result", "machine", "command"), rows)


def estimated_table(read: Read) -> str:
    """Return the table of estimates by ``python -m benchmarks.plans``: the best mesh of each machine.

    Args:
      read: as for :func:`measured_table`.
    """
    rows = []
    for name in ("v4_2x2x1", "v5e_2x4", "v5e_4x4", "2xv5e_16x16", "v5p_2x2x2", "8xh100", "2x8xh200"):
        record = read(f"plans/{name}")
        if record is None:
            continue
        best, settings = record["results"]["meshes"][0], record["settings"]
        estimate = best["estimated"]
        rows.append(
            (
                f"{record['results']['topology']}, {settings['batch']} x ({settings['prompt']} + "
                f"{settings['new_tokens']}) tokens",
                f"`{','.join(axis for axis in best['mesh'].split(',') if not axis.endswith('=1')) or 'data=1'}`",
                f"{1e3 * estimate['phases'][0]['seconds']:.1f}",
                f"{estimate['tokens_per_second']:,.0f}",
                f"{estimate['memory_bytes_per_device'] / 1e9:.1f}",
            )
        )
    return _table(("machine and workload", "best mesh", "ms per step", "tokens/s", "GB per device"), rows)


def _measured(read: Read) -> Iterator[tuple[str, str, Record, str]]:
    """Yield what was measured, the result, the record, and the command."""
    if (modes := read("diffusion_modes")) is not None:
        for name, words in _MODES.items():
            if (row := modes["results"].get(name)) is not None:
                passed = f"{row['passed_rate']:.1%} of tasks pass"
                speed = f"{row['tokens_per_second']:.0f} tokens/s ({row['of_exact']:.1f}x), {passed}"
                yield f"demo, {words}", speed, modes, _command(modes)
    if (torch := read("compare_torch")) is not None:
        for kind, words in (("generate", "masked diffusion"), ("autoregressive", "cached decoding")):
            yield from _beside_torch(torch, kind, words)
    if (passes := read("gpu_passes")) is not None:
        each = [f"{row['pass']} {row['new']['timing']['median']:.1f} ms" for row in passes["results"]]
        yield "7.6B shape, one row of 512", ", ".join(each), passes, "python -m benchmarks.gpu_passes"
    if (scheduler := read("offline_scheduler")) is not None:
        each = [row["throughput_ratio"] for row in scheduler["results"].values()]
        result = f"{min(each):.2f}x to {max(each):.2f}x the throughput"
        yield "continuous batching versus a call per batch", result, scheduler, _command(scheduler)
    if (full := read("full_checkpoint")) is not None:
        convert = full["results"]["convert"]
        result = f"{convert['seconds']:.0f} s, peak {convert['peak_resident_bytes'] / 1e9:.1f} GB of host memory"
        goals = full["results"]["goals"]
        result += f"; {sum(row['met'] for row in goals)} of {len(goals)} goals met"
        yield "conversion of a 15.2 GB checkpoint", result, full, "python -m benchmarks.full_checkpoint --folder=DIR"
    if (server := read("serve")) is not None and (lone := server["results"].get("lone")):
        each = [row["times_generate"] for row in lone]
        result = f"{min(each):.2f}x to {max(each):.2f}x the time of `engine.generate` (medians of {len(each)} lengths)"
        yield "a single request to the server", result, server, "python -m benchmarks.serve --old=DIR"


def _beside_torch(record: Record, kind: str, words: str) -> Iterator[tuple[str, str, Record, str]]:
    """Yield a row for the cases of all models on one core."""
    models: dict[str, list[Record]] = {}
    for row in record["results"].get(kind, ()):
        if row.get("cores") == 1 and "out_of_memory" not in row:
            models.setdefault(row["model"], []).append(row)
    if not models:
        return
    speeds = []
    for model, rows in models.items():
        each = [row["times_as_fast"]["median"] for row in rows]
        speeds.append(f"{model} {min(each):.1f}x to {max(each):.1f}x")
    rows = [row for own in models.values() for row in own]
    same = all(row["share_of_equal_new_tokens"] == 1.0 for row in rows)
    # Samples of two generators cannot be equal, so greedy generations are compared in their place.
    equal = f"; same {'greedy ' if 'samples' in rows[0] else ''}tokens" if same else ""
    yield f"speed beside PyTorch on one core, {words}", f"{', '.join(speeds)}{equal}", record, _command(record)


def machine_of(record: Record) -> str:
    """Return the device that a record was made on: an accelerator, or the processor."""
    found = record["machine"]
    if found["platform"] in (None, "cpu"):
        return f"{found['cores']} cores, {' '.join(found['processor'].replace('(R)', '').split())}"
    return f"{found['device_count']} x {found['device_kind'].removeprefix('NVIDIA ')}"


def _command(record: Record) -> str:
    return str(record["command"])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows))
