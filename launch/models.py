"""List the model families: presets, ways of decoding, and how each family is verified. Needs no devices.

  diffumesh models             print a table
  diffumesh models --json      print one JSON object

A folder belongs to the family that its config.json names as model_type; if two families share one, another key
identifies the second. Presets are published configurations, which diffumesh plan takes as --model. The last column says
which code the tests compare tokens and logits with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags
from rich import box
from rich.table import Table

from launch.display.console import PipedConsole
from launch.process.startup import run_launcher
from runtime import FAMILIES, Choice, DiffusionConfig, Family, declared_parameters, parse_config


def define_flags(values: flags.FlagValues) -> None:
    """Define this command's flags."""
    flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.", flag_values=values)


def describe_family(family: Family) -> dict[str, Any]:
    """Return a family's record as JSON values: what it is, how it decodes, and how it is verified."""
    diffusion = family.objective == "masked_diffusion"
    return {
        "name": family.name,
        "model_type": family.model_type,
        "config_key": family.config_key,
        "objective": family.objective,
        "attention": family.attention,
        "prediction_offset": family.prediction_offset,
        "presets": list(family.presets),
        "decoding": {
            "schedule": family.schedule,
            "algorithm": list(family.algorithms),
            "parallel": list(family.parallel_rules) if diffusion else [],
            "cache": list(family.caches),
            "block_rule": list(family.block_rules) if diffusion else [],
            "guidance": family.guidance,
            "parameters": own_parameters(family) if diffusion else [],
            "variable_length": family.variable_length,
            "suffix": how_suffixes_are_seen(family),
        },
        "verification": {
            "reference": family.reference,
            "golden_cases": family.golden_cases,
            "summary": family.verified,
        },
    }


def own_parameters(family: Family) -> list[str]:
    """Return the numbers and switches that a diffusion family has, and others do not."""
    return [
        one.name
        for one in declared_parameters(DiffusionConfig)
        if not isinstance(one.kind, Choice)
        and (one.offered is not None or one.variable_length is not None)
        and one.values_of(family) is None
    ]


def how_suffixes_are_seen(family: Family) -> str | None:
    """Return how new tokens see the text after them: ``canvas``, or ``tokens`` of the prompt; None if they do not."""
    if family.attention == "bidirectional":
        return "canvas"
    return None if family.infilling is None else "tokens"


def family_key(family: Family) -> str:
    """Return how ``config.json`` identifies a family: its model_type and, if there is one, the additional key."""
    return f"{family.model_type}, with {family.config_key}" if family.config_key else family.model_type


def print_table(families: Iterable[Family]) -> None:
    """Print a row per family."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    for column in ("model_type", "attention", "presets", "decoding", "compared by tests with"):
        table.add_column(column, overflow="fold")
    for family in families:
        said = describe_family(family)
        ways = said["decoding"]
        names = ("algorithm", "parallel", "cache", "block_rule", "parameters")
        lines = [f"{name}: {', '.join(ways[name])}" for name in names if len(ways[name]) > (name == "block_rule")]
        lines = lines or ["token by token, with a KV cache"]
        lines += ["the canvas changes its length"] if family.variable_length else []
        lines += ["infilling (suffix)"] if ways["suffix"] else []
        presets = [f"{name} ({parse_config(raw).num_layers} layers)" for name, raw in family.presets.items()]
        table.add_row(family_key(family), family.attention, "\n".join(presets), "\n".join(lines), family.verified)
    PipedConsole(160).print(table)


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh models``: print the families, as a table or as JSON."""
    if values.json:
        print(json.dumps({"families": [describe_family(family) for family in FAMILIES]}, indent=2))
    else:
        print_table(FAMILIES)


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh models`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
