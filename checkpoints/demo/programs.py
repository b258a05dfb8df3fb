"""Generated programs: tasks written in many styles, each executed once, and the split into training and held-out ones.

The hash of a composed task's parts decides whether it is held out. Constants and names do not matter, so a held-out
combination of parts is never trained on. Training also excludes every program whose body (compared with its names
replaced) equals that of a held-out task, or whose signature equals that of a held-out or plain task.
"""

import ast
import copy
import functools
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints.demo.branches import BRANCHES
from checkpoints.demo.cases import strong_cases
from checkpoints.demo.pipelines import pipeline
from checkpoints.demo.singles import SINGLES
from checkpoints.demo.tasks import ANNOTATIONS, Task, choose_names, values
from checkpoints.local_files import read_json_lines

HELD_OUT_SHARE = 0.06  # share of the combinations of parts
FOLDER = Path(__file__).parent
TASK_FILES = ("held_out_tasks.jsonl", "development_tasks.jsonl", "plain_tasks.jsonl")

_SENTENCES = {
    "=": ("Return {}.", "Return {}.", "Return {}.", "Returns {}.", "Compute {}.", "Get {}.", "Return {}", "{}.", "{}"),
    "?": ("Return True if {}, else False.", "Return whether {}.", "Check whether {}.", "Check if {}.", "True if {}.",
          "Return True if {}.", "Whether {}."),
    "!": ("{}.", "{}.", "{}"),
}  # fmt: skip
_STYLES = ("none", "docstring", "examples", "comment", "example_comment")


@dataclass(frozen=True)
class Program:
    """One function. `body` starts with the newline after the prompt, and has no newline at its end.

    `tests` are assert statements that the function passes.
    """

    name: str
    spec: str
    style: str
    prompt: str
    body: str
    tests: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole function."""
        return self.prompt + self.body


class NoTestsError(ValueError):
    """A program has too few tests: with its random constants, it returns a result for too few random arguments."""


class _Renaming(ast.NodeTransformer):
    """Replaces the function's own names by numbered ones, in order of occurrence; attributes and builtins are kept."""

    def __init__(self, own: set[str]) -> None:
        self.own = own
        self.numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"v{len(self.numbers)}") if name in self.own else name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._number(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._number(node.arg))


def _definition(text: str) -> ast.FunctionDef:
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    if len(found) != 1:
        raise ValueError("expected one function")
    return found[0]


def body_hash(text: str) -> str:
    """Hash a function's parameters and body, regardless of names, annotations, docstring, comments and layout."""
    function = _definition(text)
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        function.body = function.body[1:]
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} | {function.name}
    own |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    renaming = _Renaming(own)
    renamed = [renaming.visit(part) for part in (function.args, *function.body)]
    return hashlib.sha256("\n".join(map(ast.dump, renamed)).encode()).hexdigest()[:16]


def signature_hash(text: str) -> str:
    """Hash a function's name and the names of its parameters."""
    function = _definition(text)
    names = [function.name, *(node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg))]
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


def is_held_out(task: Task) -> bool:
    """Whether a task is held out from training: a fixed share of the composed tasks, selected by a hash."""
    share = int.from_bytes(hashlib.sha256(task.spec.encode()).digest()[:8], "big") / 2**64
    return task.composed and share < HELD_OUT_SHARE


@functools.cache
def _tasks_by_weight() -> tuple[list[Any], list[float]]:
    choices: list[Any] = [lambda rng: rng.choice(SINGLES), pipeline]
    weights = [38.0, 42.0]
    for make, weight in BRANCHES:
        choices.append(make)
        weights.append(weight * 20 / sum(w for _, w in BRANCHES))
    return choices, weights


def draw_task(rng: random.Random) -> Task:
    """Draw a task; it may be held out."""
    choices, weights = _tasks_by_weight()
    task: Task = rng.choices(choices, weights)[0](rng)
    return task


def shown(value: Any) -> str:
    """Write a value as Python code. Sets are sorted, so that the text is the same in every process."""
    if isinstance(value, set):
        return "{" + ", ".join(sorted(map(repr, value))) + "}" if value else "set()"
    return repr(value)


def _call(name: str, arguments: tuple[Any, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _test(call: str, result: Any) -> str:
    if isinstance(result, float):
        return f"assert abs({call} - {result!r}) < 1e-6"
    return f"assert {call} == {shown(result)}"


def _cases(task: Task, functions: list[Any], rng: random.Random, many: bool) -> list[tuple[tuple[Any, ...], Any]]:
    """Return arguments with their results, computed by the oracle or, without one, by the first body.

    Raises:
      NoTestsError: too few arguments have a result.
      ValueError: a body gives a different result.
    """
    cases: list[tuple[tuple[Any, ...], Any]] = []
    for _ in range(120 if many else 16):
        arguments = tuple(values(parameter, rng) for parameter in task.parameters)
        try:
            expected = (task.oracle or functions[0])(*copy.deepcopy(arguments))
        except (ValueError, IndexError, ZeroDivisionError, StopIteration):
            continue
        for function in functions:
            found = function(*copy.deepcopy(arguments))
            if found != expected or isinstance(found, bool) != isinstance(expected, bool):
                raise ValueError(f"{task.spec}: {found!r} for {arguments}, not {expected!r}")
        if isinstance(expected, complex):
            continue
        # The examples in a held-out prompt come from these; its tests are those of checkpoints.demo.cases.
        if arguments not in [a for a, _ in cases] and not (many and expected in [r for _, r in cases[2:]]):
            cases.append((arguments, expected))
        if len(cases) == (10 if many else 6):
            break
    if len(cases) < 2:
        raise NoTestsError(f"{task.spec}: too few arguments")
    return cases


def _replace(text: str, names: dict[str, str]) -> str:
    for marker, name in names.items():
        text = text.replace(marker, name)
    return text


def _sentence(task: Task, names: dict[str, str], rng: random.Random) -> str:
    doc = rng.choice(task.docs)
    sentence = rng.choice(_SENTENCES[doc[0]]).format(_replace(doc[1:], names))
    return sentence if sentence.startswith(tuple(names.values())) else sentence[0].upper() + sentence[1:]


def _examples(name: str, cases: list[tuple[tuple[Any, ...], Any]], rng: random.Random) -> list[tuple[str, str]]:
    short = [
        (_call(name, a), shown(r)) for a, r in cases if not isinstance(r, set) and len(_call(name, a) + shown(r)) < 50
    ]
    return short[: rng.choice((1, 1, 2))]


def _prompt(task: Task, name: str, names: dict[str, str], style: str, cases: list[Any], rng: random.Random) -> str:
    """Write the prompt in one of the styles."""
    hints = rng.random() < 0.25
    parameters = [names[marker] for marker in ("$a", "$b", "$c", "$d")[: len(task.parameters)]]
    if hints:
        parameters = [f"{n}: {ANNOTATIONS[p.kind]}" for n, p in zip(parameters, task.parameters, strict=True)]
    result = f" -> {task.returns}" if hints and task.returns else ""
    head = f"def {name}({', '.join(parameters)}){result}:"
    if style == "none":
        return head
    sentence = _sentence(task, names, rng)
    examples = _examples(name, cases, rng) if style in ("examples", "example_comment") else []
    if style == "comment":
        return f"# {sentence}\n{head}"
    if style == "example_comment":
        return "\n".join([f"# {sentence}", *(f"# {call} == {value}" for call, value in examples), head])
    if not examples:
        return f'{head}\n    """{sentence}"""'
    form = rng.choice((">>> {}\n    {}", ">>> {}\n    {}", "assert {} == {}", "{} == {}", "{} -> {}"))
    lines = "\n    ".join(form.format(call, value) for call, value in examples)
    gap = "\n\n" if rng.random() < 0.6 else "\n"
    return f'{head}\n    """{sentence}{gap}    {lines}\n    """'


def write(task: Task, rng: random.Random, held_out: bool = False) -> Program:
    """Write a program for a task, and execute it on arguments to obtain its tests.

    Args:
      task: the task.
      rng: generator that draws names, style, body and the arguments of the tests.
      held_out: use the most explicit name, and more tests.

    Raises:
      NoTestsError: too few of the drawn arguments have a result.
      ValueError: a body does not compute what it should.
    """
    return _write(task, rng, held_out)[0]


def _write(task: Task, rng: random.Random, held_out: bool) -> tuple[Program, list[Any]]:
    """Do the work of :func:`write`; also return the bodies as functions."""
    names = choose_names(task, rng)
    style = rng.choices(_STYLES, (30 if task.explicit else 0, 40, 18, 9, 3))[0]
    usual = held_out or style == "none" or rng.random() < 0.6
    name = task.names[0] if usual and task.composed else rng.choice(task.names)
    if name in names.values():
        name = "get_" + name
    names["$f"] = name
    bodies = [_replace(body, names).replace("\n", "\n    ") for _, body in task.bodies]
    functions = []
    head = f"def {name}({', '.join(names[m] for m in ('$a', '$b', '$c', '$d')[: len(task.parameters)])}):"
    for body in bodies:
        space: dict[str, Any] = {}
        exec(f"{head}\n    {body}", space)
        functions.append(space[name])
    cases = _cases(task, functions, rng, many=held_out)
    number = rng.choices(range(len(bodies)), [weight for weight, _ in task.bodies])[0]
    prompt = _prompt(task, name, names, style, cases, rng)
    tests = tuple(_test(_call(name, arguments), result) for arguments, result in cases)
    return Program(name, task.spec, style, prompt, "\n    " + bodies[number], tests), functions


@dataclass(frozen=True)
class Excluded:
    """Hashes of the bodies and signatures that are excluded from training."""

    bodies: frozenset[str]
    signatures: frozenset[str]

    def has(self, text: str) -> bool:
        """Whether a function's body or signature is excluded."""
        return signature_hash(text) in self.signatures or body_hash(text) in self.bodies


def excluded(folder: Path = FOLDER) -> Excluded:
    """Return the bodies and signatures of the held-out tasks, and the signatures of the plain tasks.

    The bodies of plain functions are not excluded, because several functions share a body such as `return a + b`.
    Excluding their signatures is enough to exclude the functions.
    """
    texts = [[row["prompt"] + row["completion"] for row in read_json_lines(folder / name)] for name in TASK_FILES]
    held, plain = texts[0] + texts[1], texts[2]
    return Excluded(frozenset(map(body_hash, held)), frozenset(map(signature_hash, held + plain)))


def training_programs(count: int, seed: int, without: Excluded) -> Iterator[Program]:
    """Yield ``count`` different programs for training; they depend only on the seed."""
    rng = random.Random(seed)
    known: set[str] = set()
    while len(known) < count:
        task = draw_task(rng)
        if is_held_out(task):
            continue
        try:
            program = write(task, rng)
        except NoTestsError:
            continue
        if program.text in known or without.has(program.text):
            continue
        known.add(program.text)
        yield program


def held_out_programs(count: int, seed: int) -> list[Program]:
    """Return ``count`` held-out programs with different bodies and signatures, and tests that detect small mistakes."""
    rng = random.Random(seed)
    chosen: list[Program] = []
    bodies: set[str] = set()
    signatures: set[str] = set()
    while len(chosen) < count:
        task = draw_task(rng)
        if not is_held_out(task):
            continue
        try:
            program, functions = _write(task, rng, held_out=True)
        except NoTestsError:
            continue
        results = {test.rpartition("==")[2].rpartition(" - ")[2] for test in program.tests}
        marks = body_hash(program.text), signature_hash(program.text)
        if len(results) < 2 or marks[0] in bodies or marks[1] in signatures:
            continue
        bodies.add(marks[0])
        signatures.add(marks[1])
        # A generator of their own, so that the tests do not change which tasks are drawn.
        cases = strong_cases(task, program.text, program.name, functions, random.Random(program.text))
        tests = tuple(_test(_call(program.name, arguments), result) for arguments, result in cases)
        chosen.append(replace(program, tests=tests))
    return chosen
