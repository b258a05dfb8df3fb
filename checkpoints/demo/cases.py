"""Cases: arguments with their results, chosen so that a program's tests detect small mistakes.

Arguments are drawn as for training, or near the constants of the program: numbers beside a limit, words that contain
a letter or have one letter more or fewer. Of these, a set is selected that detects every mutant of the program
that one of them detects, and that is balanced over the results.
"""

import ast
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from checkpoints.demo.mutants import mutants
from checkpoints.demo.tasks import WORDS, Parameter, Task, values

LEAST = 12  # cases of a program, if that many of its arguments differ
_DRAWN = 400

Function = Callable[..., Any]
Case = tuple[tuple[Any, ...], Any]


class _Edges:
    """Draws arguments near the constants of a program."""

    def __init__(self, text: str, rng: random.Random) -> None:
        constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        self.rng = rng
        whole = [c for c in constants if isinstance(c, int) and not isinstance(c, bool) and abs(c) <= 1000]
        self.numbers = [number for c in (0, 1, 10, 100, *whole) for number in (c - 1, c, c + 1, 2 * c)]
        self.lengths = [c + d for c in whole for d in (-1, 0, 1) if 0 < c + d < 16] or [1, 2, 3]
        self.parts = [c for c in constants if isinstance(c, str) and 0 < len(c) < 4] or list("aeionlt")

    def number(self) -> int:
        return self.rng.choice(self.numbers)

    def word(self) -> str:
        rng, word = self.rng, self.rng.choice(WORDS)
        choices: tuple[Callable[[], str], ...] = (
            lambda: word,
            lambda: rng.choice(self.parts) + word,
            lambda: word + rng.choice(self.parts),
            lambda: word[:1] + rng.choice(self.parts) + word[1:],
            lambda: (word * 8)[: rng.choice(self.lengths)],
            lambda: word + word[::-1],
            lambda: str(abs(self.number())),
            word.upper,
        )
        return rng.choice(choices)()

    def _mixed(self, drawn: list[Any], one: Callable[[], Any]) -> list[Any]:
        return self.rng.sample([*drawn, *(one() for _ in range(self.rng.randint(1, 3)))], k=len(drawn) or 1)

    def value(self, parameter: Parameter) -> Any:
        """Draw an argument. Kinds without edges of their own are drawn as for training."""
        rng, drawn, kind = self.rng, values(parameter, self.rng), parameter.kind
        if kind == "number":
            return self.number()
        if kind == "count":
            return rng.choice([number for number in self.numbers if 0 < number <= 120])
        if kind in ("numbers", "some_numbers"):
            return self._mixed(drawn, self.number)
        if kind == "sorted_numbers":
            return sorted(set(self._mixed(drawn, self.number)))
        if kind in ("words", "some_words"):
            return self._mixed(drawn, self.word)
        if kind in ("text", "some_text"):
            return " ".join(self.word() for _ in range(rng.choice((1, 1, 2, 3))))
        if kind == "mapping":
            return {self.word(): self.number() for _ in range(rng.randint(1, 4))}
        return drawn


def _result(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Call a function with a copy of the arguments. Return its result, or the exception."""
    try:
        return function(*copy.deepcopy(arguments))
    except Exception as error:
        return error


def _same(found: Any, expected: Any) -> bool:
    """Whether a test accepts a result."""
    if isinstance(expected, float):
        return isinstance(found, int | float) and abs(found - expected) < 1e-6
    return bool(found == expected)


def _drawn_cases(task: Task, text: str, functions: Sequence[Function], rng: random.Random) -> Iterator[Case]:
    """Yield different arguments with results in which the oracle and all bodies of a task agree."""
    edges, known = _Edges(text, rng), set()
    for _ in range(_DRAWN):
        arguments = tuple(edges.value(p) if rng.random() < 0.6 else values(p, rng) for p in task.parameters)
        results = [_result(f, arguments) for f in (task.oracle or functions[0], *functions)]
        expected = results[0]
        short = len(repr(arguments)) + len(repr(expected)) < 400
        if isinstance(expected, Exception | complex) or not short or repr(arguments) in known:
            continue
        if all(_same(found, expected) and isinstance(found, bool) == isinstance(expected, bool) for found in results):
            known.add(repr(arguments))
            yield arguments, expected


def _define(text: str, name: str) -> Function:
    space: dict[str, Any] = {}
    exec(text, space)
    function: Function = space[name]
    return function


def detected(text: str, name: str, cases: Sequence[Case]) -> list[set[int]]:
    """Return for each mutant of a function the numbers of the cases that detect it."""
    wrong = [_define(mutant, name) for mutant in mutants(text)]
    return [
        {n for n, (arguments, expected) in enumerate(cases) if not _same(_result(function, arguments), expected)}
        for function in wrong
    ]


def strong_cases(task: Task, text: str, name: str, functions: Sequence[Function], rng: random.Random) -> list[Case]:
    """Choose the cases of a held-out program.

    Args:
      task: the program's task.
      text: the program.
      name: its function's name.
      functions: all bodies of the task as functions; their results must agree.
      rng: generator of the arguments.

    Returns:
      At least ``LEAST`` cases, unless fewer arguments exist.
    """
    cases = list(_drawn_cases(task, text, functions, rng))
    remaining = [numbers for numbers in detected(text, name, cases) if numbers]
    chosen: list[int] = []
    while remaining:
        best = max(range(len(cases)), key=lambda n: sum(n in numbers for numbers in remaining))
        chosen.append(best)
        remaining = [numbers for numbers in remaining if best not in numbers]
    groups: list[list[int]] = []  # the cases of each result
    for number, (_, result) in enumerate(cases):
        group = next((g for g in groups if cases[g[0]][1] == result), [])
        if not group:
            groups.append(group)
        group.append(number)
    while len(chosen) < min(LEAST, len(cases)):
        open_groups = [group for group in groups if not set(group) <= set(chosen)]
        rarest = min(open_groups, key=lambda group: len(set(group) & set(chosen)))
        chosen.append(next(number for number in rarest if number not in chosen))
    return [cases[number] for number in chosen]
