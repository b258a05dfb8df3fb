"""Single tasks: common functions that are written by hand and not composed of parts, one block of text per task.

A blank line ends a block. The first line of a block has function names, `|`, and the kinds of the parameters; a kind
may be followed by a colon and names. Lines that start with `=`, `?` or `!` are descriptions (see `Task.docs`). A line
that starts with `-` begins a body, and the most usual body comes first. All bodies of a task must give equal results.
"""

from checkpoints.demo import (
    counting_functions,
    list_functions,
    nested_functions,
    number_functions,
    set_functions,
    text_functions,
)
from checkpoints.demo.tasks import Parameter, Task


def parse(text: str) -> list[Task]:
    """Parse the tasks of a module's blocks."""
    tasks = []
    for block in text.strip().split("\n\n"):
        head, *lines = block.split("\n")
        names, parameters = head.split("|")
        docs = tuple(line for line in lines if line[0] in "=?!")
        bodies = "\n".join(lines[len(docs) :]).removeprefix("-").split("\n-")
        weights = (1.0,) if len(bodies) == 1 else (0.85, *[0.15 / (len(bodies) - 1)] * (len(bodies) - 1))
        described = [part.partition(":") for part in parameters.split()]
        first_names = names.split()
        tasks.append(
            Task(
                spec=f"single/{first_names[0]}",
                names=tuple(first_names),
                parameters=tuple(Parameter(kind, tuple(own.split(",")) if own else ()) for kind, _, own in described),
                docs=docs,
                bodies=tuple(zip(weights, bodies, strict=True)),
            )
        )
    return tasks


_MODULES = (number_functions, counting_functions, text_functions, list_functions, set_functions, nested_functions)
SINGLES = [task for module in _MODULES for task in parse(module.BLOCKS)]
