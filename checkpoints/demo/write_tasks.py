"""Writes the held-out tasks: `python -m checkpoints.demo.write_tasks`. They change only if the generator changes.

Run it before training: training reads the files and excludes their tasks.
"""

import json

from checkpoints.demo.programs import FOLDER, Program, held_out_programs

COUNT = 600
DEVELOPMENT_COUNT = 200  # more tasks, for evaluation during training
SEED = 20_000


def programs() -> tuple[list[Program], list[Program]]:
    """Return the held-out tasks and the development tasks. Their bodies and signatures all differ."""
    drawn = held_out_programs(COUNT + DEVELOPMENT_COUNT, SEED)
    return drawn[:COUNT], drawn[COUNT:]


def lines(tasks: list[Program]) -> str:
    """Write tasks as JSON lines."""
    rows = (
        {"name": p.name, "spec": p.spec, "style": p.style, "prompt": p.prompt, "completion": p.body, "tests": p.tests}
        for p in tasks
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Write both files."""
    held_out, development = programs()
    (FOLDER / "held_out_tasks.jsonl").write_text(lines(held_out), encoding="utf-8")
    (FOLDER / "development_tasks.jsonl").write_text(lines(development), encoding="utf-8")


if __name__ == "__main__":
    main()
