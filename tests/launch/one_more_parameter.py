"""A script that declares two more fields of the diffusion configuration before it imports anything else.

One is compiled, the other one is a run-time argument. The script prints a JSON object with the result of each way to
set the compiled one, and with the values that the denoise loop reads.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import flags
from pydantic import ValidationError

from runtime.decoding import parameters
from runtime.decoding.schema import Integer, Real, Requirement, exposed_parameters, parameter


@dataclass(frozen=True)
class Patient(parameters.DiffusionConfig):
    """A configuration with two more parameters."""

    patience: int = parameter(
        3,
        Integer(1, 9),
        "Steps to wait.",
        aliases=("pat",),
        compiled=True,
        mode=True,
        in_loop=True,
        requires=(Requirement("parallel", ("threshold",)),),
    )
    pace: float | None = parameter(None, Real(0.0, 1.0), "Share of a step.", optional=True, in_loop=True, off=0.25)


parameters.DiffusionConfig = Patient  # type: ignore[misc]
parameters.EXPOSED_PARAMETERS = exposed_parameters(Patient, parameters.SamplingConfig)


def read_in_the_loop(patience: int, paces: list[float | None]) -> list[list[float]]:
    """The compiled value and the value of each row, as the denoise loop reads them in its first two steps."""
    from runtime.decoding import diffusion
    from runtime.execution.row_request import RowRequest
    from runtime.execution.slot_kinds import DiffusionSlots
    from tests import golden_cases

    found: list[list[float]] = []
    commit = diffusion.commit

    def reading(forward: Any, program: Any, request: Any, *others: Any) -> Any:
        jax.debug.callback(lambda pace: found.append([program.patience, *pace.tolist()]), request.pace)
        return commit(forward, program, request, *others)

    diffusion.commit = reading
    config = Patient(max_new_tokens=4, parallel="threshold", patience=patience)
    rows = [RowRequest([1, 2, 3], config.replace(pace=pace), seed=0) for pace in paces]
    slots = DiffusionSlots(golden_cases.engine().runner, config, 64, len(rows))
    slots.insert(dict(enumerate(rows)))
    slots.run(2)
    jax.effects_barrier()
    return found


def main(folder: Path) -> dict[str, Any]:
    from checkpoints import DEMO, open_folder
    from launch.batches.lines import read_batch
    from launch.docs.parameter_table import table
    from launch.flags.decoding import decoding_config, define_decoding_flags
    from launch.flags.model import read_tokenizer
    from launch.flags.server import read_modes
    from launch.openai.bodies import Defaults
    from launch.serving.app import Application
    from launch.serving.bodies import ChatBody, CompletionBody
    from launch.serving.errors import from_input_error, from_validation_error
    from launch.serving.reading import describe
    from runtime.models.families import parse_config
    from sharding.errors import InputError

    opened = open_folder(str(DEMO))
    model = parse_config(opened.config)

    def of_flags(*arguments: str) -> Any:
        values = flags.FlagValues()
        define_decoding_flags(values)
        values(["x", *arguments])
        return decoding_config(values, opened, model)

    config = of_flags()
    defaults = Defaults("demo", model, read_tokenizer(opened), config, True, (), 0, False, 1, ())
    lines = [
        {"id": "1", "prompt": "x", "patience": 5, "parallel": "threshold"},
        {"id": "2", "prompt": "x", "pat": 10, "parallel": "threshold"},
        {"custom_id": "3", "body": {"prompt": "x", "pat": 6, "parallel": "threshold"}},
    ]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    batch = read_batch(folder / "in.jsonl", defaults)
    body = {"prompt": "x", "patience": 5}
    found: dict[str, Any] = {
        "flag": of_flags("--patience=5", "--parallel=threshold").patience,
        "default": config.patience,
        "lines": [line.config.patience for line in batch.lines],
        "bad": [line.message for line in batch.bad],
        "body": CompletionBody.model_validate(body).decoding(),
        "openapi": [
            Application("1").openapi()["components"]["schemas"][kind]["properties"]["patience"]["anyOf"][0]
            for kind in ("CompletionBody", "ChatBody")
        ],
        "table": [line for line in table().splitlines() if "`patience`" in line],
        "loop": read_in_the_loop(7, [0.75, None]),
        "mode": describe(read_modes(["patience=7,parallel=threshold"], defaults))[1],
    }
    try:
        of_flags("--patience=5")
    except InputError as error:
        found["flag error"] = (str(error), error.field)
        found["http error"] = from_input_error(error.__cause__).body()["error"]  # type: ignore[arg-type]
    try:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "patience": 10})
    except ValidationError as error:
        found["body error"] = from_validation_error(error).body()["error"]
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
