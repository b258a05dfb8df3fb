"""Writes the held-out tasks: `python -m checkpoints.demo.write_tasks`. They change only when the generator does.

The tasks are fixed before a training run; the run reads the file and leaves out what it holds.
"""

import json

from checkpoints.demo.programs import FOLDER, Program, held_out_programs

COUNT = 600
DEVELOPMENT_COUNT = 200  # further ones, to look at while training
SEED = 20_000


def programs() -> tuple[list[Program], list[Program]]:
    """(held-out tasks, development tasks): different bodies and signatures, none of them trained on."""
    drawn = held_out_programs(COUNT + DEVELOPMENT_COUNT, SEED)
    return drawn[:COUNT], drawn[COUNT:]


def lines(tasks: list[Program]) -> str:
    """One JSON object a line."""
    rows = (
        {"name": p.name, "spec": p.spec, "style": p.style, "prompt": p.prompt, "completion": p.body, "tests": p.tests}
        for p in tasks
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Writes both files."""
    held_out, development = programs()
    (FOLDER / "held_out_tasks.jsonl").write_text(lines(held_out), encoding="utf-8")
    (FOLDER / "development_tasks.jsonl").write_text(lines(development), encoding="utf-8")


if __name__ == "__main__":
    main()
