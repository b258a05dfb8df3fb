"""Parts that generated programs are composed of: sources, predicates, maps and aggregates.

Texts and code contain placeholders: `$x` for the element, `$a` for the first parameter, `$k` and `$j` for constants of
the part, which a parameter may replace. Each part also has a Python function that computes what its code must compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """The elements that a generated function works on, such as the numbers of a list or the characters of a string.

    Attributes:
      name: its name in the ``spec`` of a task.
      kind: kind of the function's first parameter, as in :class:`checkpoints.demo.tasks.Parameter`.
      element: type of the elements: ``number``, ``word`` or ``character``.
      code: expression that the function iterates over; ``$a`` is the first parameter.
      values: function that returns the elements of an argument.
      nouns: plural nouns for the elements, for descriptions.
      tails: phrases that end a description, such as " in the list".
      suffix: ending of function names, such as ``_in_dict``.
      elements: variable names for one element; empty if they follow from the parameter's name.
    """

    name: str
    kind: str
    element: str
    code: str
    values: Callable[[Any], Sequence[Any]]
    nouns: tuple[str, ...]
    tails: tuple[str, ...]
    suffix: str = ""
    elements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predicate:
    """A condition on one element.

    Attributes:
      name: its name, for function names and the ``spec`` of a task.
      text: its description, such as `even` or `greater than $k`.
      code: the condition as an expression.
      test: the condition as a function of the element and the constants.
      adjective: whether the description is an adjective, which goes before the noun; others go after it.
      synonyms: other descriptions.
    """

    name: str
    text: str
    code: str
    test: Callable[..., bool]
    adjective: bool = False
    constants: str = ""  # kind of each constant, see `pipelines.constant`
    synonyms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Map:
    """A function of one element.

    Attributes:
      name: its name, for function names and the ``spec`` of a task.
      text: description of all results; `{}` is the noun phrase of the elements, in the plural.
      code: the result as an expression.
      apply: the result as a function of the element and the constants.
      result: type of the result: ``number``, ``word`` or ``character``.
    """

    name: str
    text: str
    code: str
    apply: Callable[..., Any]
    result: str
    single: str  # description of one result; `{}` is the element
    verb: str = ""  # first word of function names such as square_even_numbers
    constants: str = ""


@dataclass(frozen=True)
class Aggregate:
    """A function of all elements, such as their sum or the list of them.

    A body has the placeholders `$E` (mapped element), `$S` (iterable), `$C` (" if condition" or nothing), `$P` (the
    condition alone) and, in loops, `$I` (an `if` line or nothing; the next line is indented below an `if` line).
    """

    name: str
    text: str
    bodies: tuple[tuple[float, str], ...]
    apply: Callable[[list[Any]], Any]
    results: tuple[str, ...]  # types of mapped elements that it accepts
    returns: str
    names: tuple[str, ...]
    condition: str = "may"  # whether it may, must or must not have a predicate
    mapped: bool = True  # whether it may have a map
    full: bool = False  # whether `apply` takes (index, element, mapped element) triples instead of mapped elements


def _digits(n: int) -> list[int]:
    return [int(d) for d in str(n)]


SOURCES = (
    Source(
        "numbers",
        "numbers",
        "number",
        "$a",
        list,
        ("numbers", "numbers", "values", "integers"),
        ("", "", " in $a", " in the list", " of a list"),
    ),
    Source(
        "range",
        "count",
        "number",
        "range(1, $a + 1)",
        lambda n: range(1, n + 1),
        ("numbers", "integers"),
        (" from 1 to $a",),
        "_up_to_n",
        ("i", "n"),
    ),
    Source(
        "dict_values",
        "mapping",
        "number",
        "$a.values()",
        lambda d: list(d.values()),
        ("values",),
        (" of $a", " of the dictionary", " in the dictionary $a"),
        "_in_dict",
        ("value", "v"),
    ),
    Source(
        "digits",
        "count",
        "number",
        "map(int, str($a))",
        _digits,
        ("digits",),
        (" of $a", " of a number"),
        "",
        ("d", "digit"),
    ),
    Source("words", "words", "word", "$a", list, ("words", "words", "strings"), ("", "", " in $a", " in the list")),
    Source(
        "text_words",
        "text",
        "word",
        "$a.split()",
        str.split,
        ("words",),
        (" in the text", " of $a", " in a sentence", " in $a"),
        "_in_text",
        ("word", "w"),
    ),
    Source("dict_keys", "mapping", "word", "$a", list, ("keys",), (" of $a", " of the dictionary"), "_in_dict"),
    Source(
        "characters",
        "text",
        "character",
        "$a",
        list,
        ("characters", "letters"),
        ("", " in $a", " of $a", " in the text"),
    ),
)


def _product(values: list[Any]) -> Any:
    result = 1
    for value in values:
        result *= value
    return result


def _frequencies(values: list[Any]) -> dict[Any, int]:
    return {value: values.count(value) for value in values}


def _group(triples: list[Any]) -> dict[Any, list[Any]]:
    return {key: [x for _, x, y in triples if y == key] for _, _, key in triples}


_ALL = ("number", "word", "character")
_LOOP = "$r = {}\nfor $x in $S:\n$I$r{}\nreturn $r"

AGGREGATES = (
    Aggregate(
        "list",
        "a list of {}",
        ((0.85, "return [$E for $x in $S$C]"), (0.15, _LOOP.format("[]", ".append($E)"))),
        list,
        ("number", "word"),
        "list",
        ("",),
    ),
    Aggregate(
        "sum",
        "the sum of {}",
        ((0.8, "return sum($E for $x in $S$C)"), (0.2, _LOOP.format("0", " += $E"))),
        sum,
        ("number",),
        "number",
        ("sum", "total", "add_up"),
    ),
    Aggregate(
        "count",
        "the number of {}",
        ((0.8, "return sum(1 for $x in $S if $P)"), (0.2, _LOOP.format("0", " += 1"))),
        len,
        _ALL,
        "int",
        ("count", "number_of", "how_many"),
        "must",
        False,
    ),
    Aggregate(
        "product",
        "the product of {}",
        ((1.0, _LOOP.format("1", " *= $E")),),
        _product,
        ("number",),
        "number",
        ("product", "multiply"),
    ),
    Aggregate(
        "max",
        "the largest of {}",
        ((1.0, "return max($E for $x in $S$C)"),),
        max,
        ("number",),
        "number",
        ("max", "largest", "maximum"),
    ),
    Aggregate(
        "min",
        "the smallest of {}",
        ((1.0, "return min($E for $x in $S$C)"),),
        min,
        ("number",),
        "number",
        ("min", "smallest", "minimum"),
    ),
    Aggregate(
        "average",
        "the average of {}",
        ((1.0, "$r = [$E for $x in $S$C]\nreturn sum($r) / len($r)"),),
        lambda v: sum(v) / len(v),
        ("number",),
        "float",
        ("average", "mean"),
    ),
    Aggregate(
        "set", "the set of {}", ((1.0, "return {$E for $x in $S$C}"),), set, _ALL, "set", ("set", "unique", "distinct")
    ),
    Aggregate(
        "sorted",
        "a sorted list of {}",
        ((1.0, "return sorted($E for $x in $S$C)"),),
        sorted,
        _ALL,
        "list",
        ("sorted", "sort"),
    ),
    Aggregate(
        "any",
        "whether any of {}",
        ((1.0, "return any($P for $x in $S)"),),
        any,
        _ALL,
        "bool",
        ("any", "has"),
        "must",
        False,
    ),
    Aggregate(
        "all",
        "whether all of {}",
        ((1.0, "return all($P for $x in $S)"),),
        all,
        _ALL,
        "bool",
        ("all", "only"),
        "must",
        False,
    ),
    Aggregate(
        "first",
        "the first of {}, or None",
        ((1.0, "for $x in $S:\n    if $P:\n        return $E\nreturn None"),),
        lambda v: v[0] if v else None,
        _ALL,
        "",
        ("first", "find_first"),
        "must",
    ),
    Aggregate(
        "last",
        "the last of {}, or None",
        ((1.0, "$r = None\nfor $x in $S:\n    if $P:\n        $r = $E\nreturn $r"),),
        lambda v: v[-1] if v else None,
        _ALL,
        "",
        ("last", "find_last"),
        "must",
    ),
    Aggregate(
        "join",
        "{} joined into one string",
        ((1.0, 'return "".join($E for $x in $S$C)'),),
        "".join,
        ("word", "character"),
        "str",
        ("join", "concatenate"),
    ),
    Aggregate(
        "join_comma",
        "{} joined by commas",
        ((1.0, 'return ",".join($E for $x in $S$C)'),),
        ",".join,
        ("word", "character"),
        "str",
        ("join_with_commas", "comma_separated"),
    ),
    Aggregate(
        "join_space",
        "{} joined by spaces",
        ((1.0, 'return " ".join($E for $x in $S$C)'),),
        " ".join,
        ("word", "character"),
        "str",
        ("join_with_spaces", "space_separated"),
    ),
    Aggregate(
        "longest",
        "the longest of {}",
        ((1.0, "return max(($E for $x in $S$C), key=len)"),),
        lambda v: max(v, key=len),
        ("word",),
        "str",
        ("longest",),
    ),
    Aggregate(
        "shortest",
        "the shortest of {}",
        ((1.0, "return min(($E for $x in $S$C), key=len)"),),
        lambda v: min(v, key=len),
        ("word",),
        "str",
        ("shortest",),
    ),
    Aggregate(
        "indices",
        "the indices of {}",
        ((1.0, "return [$i for $i, $x in enumerate($S) if $P]"),),
        lambda v: [i for i, _, _ in v],
        _ALL,
        "list",
        ("indices_of", "positions_of"),
        "must",
        False,
        True,
    ),
    Aggregate(
        "frequencies",
        "how often each of {} occurs, as a dict",
        ((1.0, _LOOP.format("{}", "[$E] = $r.get($E, 0) + 1")),),
        _frequencies,
        _ALL,
        "dict",
        ("frequencies_of", "count_each_of", "tally"),
    ),
    Aggregate(
        "to_dict",
        "a dict from each of {} to $M",
        ((1.0, "return {$x: $E for $x in $S$C}"),),
        lambda v: {x: y for _, x, y in v},
        _ALL,
        "dict",
        ("dict_of", "map_to"),
        "may",
        True,
        True,
    ),
    Aggregate(
        "group",
        "{} grouped by $M, as a dict of lists",
        ((1.0, _LOOP.format("{}", ".setdefault($E, []).append($x)")),),
        _group,
        _ALL,
        "dict",
        ("group_by", "group"),
        "may",
        True,
        True,
    ),
)
