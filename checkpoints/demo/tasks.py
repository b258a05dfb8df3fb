"""Tasks: descriptions of functions to generate, with possible bodies, and random arguments to test them on."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORDS = [
    "apple", "banana", "cherry", "level", "noon", "Anna", "OK", "kiwi", "fig", "tea", "a", "bee", "42", "7",
    "hello", "world", "Python", "code", "data", "tree", "river", "eve", "stone", "BIG", "moon", "sun", "Radar",
    "egg", "ice", "orange", "umbrella", "x", "yes", "no", "stats", "cat", "dog", "bird", "fish",
]  # fmt: skip
TEXTS = (
    "hello world", "The quick brown fox", "a1b2 c3", "Never odd or even", "", "banana", "one two three four",
    "Hello, World!", "level", "UPPER lower 123", "an apple a day", "x", "is it 42 or 7", "eve saw a bee",
)  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A parameter. Its kind determines its values, and also its names if `names` is empty."""

    kind: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One function to be written.

    Attributes:
      spec: identifies the task regardless of constants and names. Its hash decides whether the task is held out.
      names: function names, the most explicit first.
      parameters: the parameters in order.
      docs: descriptions. The first character is the form: `=` a noun phrase, `?` a condition, `!` an imperative.
      bodies: (weight, text) of equivalent bodies, with placeholders for names.
      oracle: computes the expected result; if it is None, the bodies are only compared with each other.
      returns: type annotation of the result, or empty.
      composed: whether the task is composed of parts; only composed tasks are held out.
      explicit: whether the first name describes the task completely, so that a prompt needs no description.
      elements: variable names for one element; empty if they follow from the first parameter's name.
    """

    spec: str
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    docs: tuple[str, ...]
    bodies: tuple[tuple[float, str], ...]
    oracle: Callable[..., Any] | None = None
    returns: str = ""
    composed: bool = False
    explicit: bool = True
    elements: tuple[str, ...] = ()


def _number(rng: random.Random) -> int:
    return rng.choice(
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 17, 20, 25, 36, 49, 64, 81, 97, 100, -1, -3, -8, -10, -25)
    )


def _numbers(rng: random.Random) -> list[int]:
    return [_number(rng) for _ in range(rng.choice((0, 1, 3, 4, 5, 6, 8)))]


def _mapping(rng: random.Random) -> dict[str, int]:
    return {rng.choice(WORDS): _number(rng) for _ in range(rng.choice((1, 2, 3, 5)))}


_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "number": _number,
    "count": lambda rng: rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 20, 35, 48)),
    "small": lambda rng: rng.randint(1, 4),
    "float": lambda rng: rng.choice((0.0, 0.5, 1.0, 2.5, 10.0, 36.6, 100.0, -4.0)),
    "year": lambda rng: rng.choice((1900, 2000, 2024, 2023, 2100, 1996)),
    "numbers": _numbers,
    "some_numbers": lambda rng: [*_numbers(rng), _number(rng), _number(rng)],
    "sorted_numbers": lambda rng: sorted(set(_numbers(rng))),
    "items": lambda rng: _numbers(rng) if rng.random() < 0.5 else rng.choices(WORDS, k=rng.randint(0, 5)),
    "some_items": lambda rng: [*rng.choices((1, 2, 3, 5, 8), k=rng.randint(2, 5))],
    "item": lambda rng: rng.choice((1, 2, 3, 5, 8)),
    "lists": lambda rng: [rng.choices(range(1, 9), k=rng.randint(0, 3)) for _ in range(rng.randint(0, 4))],
    "matrix": lambda rng: [[rng.randint(0, 9) for _ in range(3)] for _ in range(rng.randint(2, 4))],
    "words": lambda rng: rng.choices(WORDS, k=rng.randint(0, 6)),
    "some_words": lambda rng: rng.choices(WORDS, k=rng.randint(2, 6)),
    "text": lambda rng: rng.choice(TEXTS),
    "some_text": lambda rng: rng.choice([text for text in TEXTS if text]),
    "letter": lambda rng: rng.choice("aeionlt"),
    "part": lambda rng: rng.choice(("a", "he", "on", "an", "lo", "el")),
    "mapping": _mapping,
    "key": lambda rng: rng.choice(WORDS),
    "pairs": lambda rng: list(_mapping(rng).items()),
    "condition": lambda rng: rng.random() < 0.5,
}

ANNOTATIONS = {
    "number": "int", "count": "int", "small": "int", "float": "float", "year": "int", "numbers": "list[int]",
    "some_numbers": "list[int]", "sorted_numbers": "list[int]", "items": "list", "some_items": "list",
    "lists": "list[list]", "matrix": "list[list[int]]", "words": "list[str]", "some_words": "list[str]",
    "text": "str", "some_text": "str", "letter": "str", "part": "str", "item": "int",
    "mapping": "dict[str, int]", "key": "str", "pairs": "list[tuple]", "condition": "bool",
}  # fmt: skip

# Names of parameters by kind. After each colon are names of its elements, the most usual first.
_LIST_NAMES = {
    "numbers": "numbers:n,number,num nums:n,num,x values:v,value,x xs:x lst:x,n data:x,value arr:x,n integers:n,i",
    "items": "items:item,x values:value,v elements:element,e lst:x,item data:x,item seq:x sequence:item,x things:thing",
    "words": "words:word,w strings:s,string names:name texts:text,t tokens:token lines:line items:item words:w",
    "text": "text:c,char string:c,char s:c,ch sentence:c,char message:c,char word:c,letter line:c,char",
    "number": "n:i number:i x:i num:i value:i k:i",
    "count": "n:i n:i number:i limit:i num:i count:i",
    "mapping": "d:key,k mapping:key,k data:key,k table:key,k dictionary:key,k scores:name,key "
    "prices:name,key counts:key,word",
    "lists": "lists:inner,sublist,lst rows:row nested:inner,sublist list_of_lists:sublist,inner groups:group",
    "matrix": "matrix:row rows:row grid:row table:row m:row",
    "pairs": "pairs:key,k items:key,k entries:key,k",
}
_ALIASES = {
    "sorted_numbers": "numbers",
    "some_numbers": "numbers",
    "some_items": "items",
    "some_words": "words",
    "some_text": "text",
}
_SINGLE_NAMES = {
    "small": "n k count times", "float": "x value amount number", "year": "year y",
    "item": "item value target x element",
    "letter": "letter char c ch character", "part": "part sub substring piece", "key": "key k name",
    "condition": "flag condition",
}  # fmt: skip
_PAIRS = ("a b", "a b", "x y", "first second", "left right", "m n", "num1 num2", "p q", "one two")
_TRIPLES = ("a b c", "a b c", "x y z", "first second third", "p q r")


def values(parameter: Parameter, rng: random.Random) -> Any:
    """Draw an argument for a parameter."""
    return _VALUES[parameter.kind](rng)


def _element(names: str, rng: random.Random) -> str:
    choices = names.split(",")
    return choices[0] if rng.random() < 0.8 else rng.choice(choices)


def choose_names(task: Task, rng: random.Random) -> dict[str, str]:
    """Choose different names for all placeholders of a task.

    `$a $b $c $d` are parameters, `$x $y $w` elements, `$v` a value, `$i $j` indices, `$r $t $n` results.
    """
    kinds = [_ALIASES.get(p.kind, p.kind) for p in task.parameters]
    own = [p.names for p in task.parameters]
    chosen: list[str] = []
    elements: list[str] = []
    if len(kinds) in (2, 3) and len(set(kinds)) == 1 and not any(own):
        chosen = rng.choice(_PAIRS if len(kinds) == 2 else _TRIPLES).split()
        elements = [rng.choice(("item", "x")) for _ in kinds]
    else:
        for kind, names in zip(kinds, own, strict=True):
            listed = dict(entry.split(":") for entry in _LIST_NAMES.get(kind, "").split())
            entries = _LIST_NAMES.get(kind, "").split()
            if names:
                name = rng.choice(names)
            elif entries:
                name = rng.choice(entries).split(":")[0]
            else:
                name = rng.choice(_SINGLE_NAMES[kind].split())
            chosen.append(name if name not in chosen else f"{name}{len(chosen) + 1}")
            elements.append(_element(listed.get(name, "item,x"), rng))
    result = dict(zip(("$a", "$b", "$c", "$d"), chosen, strict=False))
    if task.elements:
        elements[0] = _element(",".join(task.elements), rng)
    wanted = [
        ("$x", elements[0]),
        ("$y", "y"),
        ("$w", "word"),
        ("$v", "value"),
        ("$i", "i"),
        ("$j", "j"),
        ("$r", "result" if rng.random() < 0.8 else rng.choice(("output", "found", "answer"))),
        ("$t", "total"),
        ("$n", "count"),
    ]
    spare = iter(("x", "y", "z", "item", "u", "q", "res", "acc", "cnt", "pos"))
    for marker, name in wanted:
        while name in result.values():
            name = next(spare)
        result[marker] = name
    return result
