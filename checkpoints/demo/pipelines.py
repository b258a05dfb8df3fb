"""Composed tasks: a source, an optional predicate, an optional map and an aggregate, with constants or parameters."""

import random
from dataclasses import dataclass
from typing import Any

from checkpoints.demo.maps import MAPS
from checkpoints.demo.parts import AGGREGATES, SOURCES, Aggregate, Map, Predicate, Source
from checkpoints.demo.predicates import PREDICATES
from checkpoints.demo.tasks import Parameter, Task

_PARAMETER_NAMES = {
    "n": ("k", "limit", "threshold", "bound", "value", "minimum"),
    "d": ("k", "divisor", "factor", "d"),
    "u": ("digit", "d", "last"),
    "l": ("length", "k", "size", "limit"),
    "e": ("k", "times", "power", "count"),
    "c": ("letter", "char", "ch", "character"),
    "s": ("suffix", "part", "extra", "other"),
}
_PARAMETER_KINDS = {"n": "number", "d": "small", "u": "small", "l": "small", "e": "small", "c": "letter", "s": "part"}


def constant(kind: str, rng: random.Random) -> Any:
    """Draw a constant: `n` integer, `d` divisor, `u` digit, `l` length, `e` small factor, `c` letter, `s` string."""
    if kind == "n":
        return rng.choice((rng.randint(0, 10), rng.randint(0, 20), rng.choice((25, 30, 50, 99, 100, 1000))))
    if kind == "d":
        return rng.choice((2, 3, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11))
    if kind == "u":
        return rng.randint(0, 9)
    if kind == "l":
        return rng.randint(1, 8)
    if kind == "e":
        return rng.randint(2, 5)
    if kind == "c":
        return rng.choice("abcdefghijklmnoprstuvwxyz")
    return rng.choice(("s", "!", "?", "-", "_", ".", "x", "ing", "er", "es", "#", "*"))


def literal(value: Any) -> str:
    """Write a constant as Python code."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def word_of(value: Any) -> str:
    """Write a constant for use in a function's name; empty if it is not alphanumeric."""
    text = str(value)
    return text if text.isalnum() and text.isascii() else ""


@dataclass
class Filled:
    """A predicate or map whose constants are filled in. In `arguments`, None stands for a parameter."""

    code: str
    text: str
    name: str
    single: str
    arguments: tuple[Any, ...]
    parameter: Parameter | None
    explicit: bool  # whether the name contains all constants


def fill(part: Predicate | Map, rng: random.Random, marker: str, may_have_parameter: bool) -> Filled:
    """Fill random constants into a part. If allowed, a single constant sometimes becomes the parameter `marker`."""
    kinds = part.constants
    drawn = sorted((constant(kind, rng) for kind in kinds), key=str if "c" in kinds else None)
    if kinds == "nn" and drawn[0] == drawn[1]:
        drawn[1] += 5
    text = part.text
    if isinstance(part, Predicate) and part.synonyms and rng.random() < 0.5:
        text = rng.choice(part.synonyms)
    single = part.single if isinstance(part, Map) else ""
    code, name, parameter, arguments, explicit = part.code, part.name, None, tuple(drawn), True
    if len(kinds) == 1 and may_have_parameter and rng.random() < 0.3:
        parameter = Parameter(_PARAMETER_KINDS[kinds], _PARAMETER_NAMES[kinds])
        code, text, single = (t.replace("$k", marker) for t in (code, text, single))
        arguments = (None,)
    else:
        for symbol, value in zip(("$k", "$j"), drawn, strict=False):
            code = code.replace(symbol, literal(value))
            shown = f"'{value}'" if isinstance(value, str) else str(value)
            text, single = text.replace(symbol, shown), single.replace(symbol, shown)
            if word_of(value):
                name += ("_and_" if symbol == "$j" else "_") + word_of(value)
            else:
                explicit = False
    return Filled(code, text, name, single, arguments, parameter, explicit)


def _plural(
    source: Source, predicate: Predicate | None, filled: Filled | None, rng: random.Random
) -> tuple[str, str, str]:
    """Return the noun phrase, long name and short name of the elements that a predicate keeps."""
    noun, tail = rng.choice(source.nouns), rng.choice(source.tails)
    if predicate is None or filled is None:
        return f"the {noun}{tail}", noun, ""
    if predicate.adjective and filled.text == predicate.text:
        return f"the {filled.text} {noun}{tail}", f"{filled.name}_{noun}", filled.name
    if source.element == "character" and predicate.name not in (
        "equal_to",
        "other_than",
        "before",
        "uppercase",
        "lowercase",
    ):
        simple = filled.name.replace("_", "-")
        if rng.random() < 0.7 and predicate.name != "alphanumeric":
            return f"the {simple}{tail}", filled.name, filled.name
    post = filled.text if not predicate.adjective else f"that are {filled.text.removeprefix('that are ')}"
    return f"the {noun} {post}{tail}", f"{noun}_{filled.name}", filled.name


def _function_names(aggregate: Aggregate, long: str, short: str, map_: Map | None, mapped: Filled | None, suffix: str,
                    rng: random.Random) -> tuple[str, ...]:  # fmt: skip
    """Return names for the function, the most explicit first."""
    head = rng.choice(aggregate.names)
    what = long
    if map_ is not None and mapped is not None:
        what = f"{mapped.name}_of_{long}"
        if map_.verb and aggregate.name == "list" and rng.random() < 0.5:
            what = f"{map_.verb}_{long}"
    elif aggregate.name == "list":
        what = f"{rng.choice(('filter', 'get', 'keep', 'select', 'find'))}_{long}" if short else f"list_{long}"
    of = "_of_" if aggregate.name in ("sum", "product", "average", "max", "min", "set") and rng.random() < 0.5 else "_"
    explicit = (
        f"{head}{of}{what}" if head and not head.endswith("_of") else f"{head}_{what}" if head else what
    ) + suffix
    names = [explicit]
    if short:
        middle = f"_{mapped.name}" if mapped else ""
        names.append(f"{head}_{short}{middle}" if head else f"{short}{middle}" if middle else f"only_{short}")
    return tuple(dict.fromkeys(name.strip("_") for name in names))


def _oracle(source: Source, aggregate: Aggregate, predicate: Predicate | None, kept: Filled | None, map_: Map | None,
            mapped: Filled | None) -> Any:  # fmt: skip
    """Return a function that computes a task's expected result, composed of the Python functions of the task's parts.

    It takes the first argument, then those of the constants that became parameters, in order.
    """

    def run(first: Any, *others: Any) -> Any:
        rest = list(others)
        tests = () if kept is None else tuple(rest.pop(0) if kept.parameter else v for v in kept.arguments)
        terms = () if mapped is None else tuple(rest.pop(0) if mapped.parameter else v for v in mapped.arguments)
        triples = [
            (i, x, x if map_ is None else map_.apply(x, *terms))
            for i, x in enumerate(source.values(first))
            if predicate is None or predicate.test(x, *tests)
        ]
        if aggregate.name in ("any", "all"):
            found = [predicate is None or predicate.test(x, *tests) for x in source.values(first)]
            return aggregate.apply(found)
        return aggregate.apply(list(triples) if aggregate.full else [y for _, _, y in triples])

    return run


def _choose(rng: random.Random) -> tuple[Source, Predicate | None, Map | None, Aggregate]:
    """Draw parts that can be combined: their types match, and the result is not trivial."""
    while True:
        source = rng.choices(SOURCES, (5, 1.5, 1.5, 1.5, 5, 1.5, 1, 3))[0]
        aggregate = rng.choices(AGGREGATES, [4 if a.name in ("list", "sum", "count") else 1 for a in AGGREGATES])[0]
        predicate = (
            rng.choice(PREDICATES[source.element]) if rng.random() < 0.75 or aggregate.condition == "must" else None
        )
        needs_map = "$M" in aggregate.text
        map_ = rng.choice(MAPS[source.element]) if aggregate.mapped and (needs_map or rng.random() < 0.5) else None
        if predicate is None and map_ is None and rng.random() < 0.8:
            continue
        if source.name in ("range", "digits") and (
            (predicate is not None and predicate.name in ("positive", "negative"))
            or (map_ is not None and map_.name == "absolute_values")
        ):
            continue
        if (map_.result if map_ else source.element) in aggregate.results:
            return source, predicate, map_, aggregate


_SHORTER = (
    ("[$x for $x in $a]", "list($a)"), ("sum($x for $x in $a)", "sum($a)"), ("{$x for $x in $a}", "set($a)"),
    ("sorted($x for $x in $a)", "sorted($a)"), ("max($x for $x in $a)", "max($a)"),
    ("min($x for $x in $a)", "min($a)"), ("max(($x for $x in $a), key", "max($a, key"),
    ("min(($x for $x in $a), key", "min($a, key"), ("join($x for $x in $a)", "join($a)"),
)  # fmt: skip


def _write(text: str, source: Source, kept: Filled | None, mapped: Filled | None) -> str:
    """Fill the placeholders of an aggregate's body, and simplify code such as ``sum($x for $x in $a)``.

    The variables ``$x`` (element), ``$a`` and ``$b`` (parameters of the generated function) stay as they are.

    Args:
      text: the body, with the placeholders that :class:`checkpoints.demo.parts.Aggregate` describes.
      source: the elements to iterate over.
      kept: the condition that keeps an element; None to keep all.
      mapped: the function to apply to each element; None to use the element itself.
    """
    condition = kept.code if kept else ""
    if "$I" in text:
        before, after = text.split("$I")
        inner, rest = after.split("\n", 1)
        line = f"    if {condition}:\n        {inner}" if kept else f"    {inner}"
        text = f"{before}{line}\n{rest}"
    text = text.replace("$E", mapped.code if mapped else "$x").replace("$C", f" if {condition}" if kept else "")
    text = text.replace("$P", condition).replace("$S", source.code)
    for long, short in _SHORTER:
        text = text.replace(long, short)
    return text


def pipeline(rng: random.Random) -> Task:
    """Draw a composed task."""
    source, predicate, map_, aggregate = _choose(rng)
    kept = fill(predicate, rng, "$b", True) if predicate else None
    mapped = fill(map_, rng, "$b", kept is None or kept.parameter is None) if map_ else None
    noun, long, short = _plural(source, predicate, kept, rng)
    names = _function_names(aggregate, long, short, map_, mapped, source.suffix, rng)
    phrase = noun
    text = aggregate.text
    if map_ is not None and mapped is not None:
        if "$M" in text:
            text = text.replace("$M", mapped.single.format("it"))
        elif "{}" in mapped.text:
            phrase = ("the " if not mapped.text.startswith("{}") else "") + mapped.text.format(noun)
    docs: tuple[str, ...]
    if aggregate.name in ("any", "all"):
        docs = (f"?{aggregate.name} of the {_clause(source, predicate, kept, rng)}",)
    elif aggregate.name == "list":
        docs = (f"={phrase}", f"={phrase}", "=" + text.format(phrase))
    else:
        docs = ("=" + text.format(phrase),)
    extra = tuple(f.parameter for f in (kept, mapped) if f is not None and f.parameter is not None)
    part_names = [source.name, predicate.name if predicate else "", map_.name if map_ else "", aggregate.name]
    return Task(
        spec="/".join(part_names),
        names=names,
        parameters=(Parameter(source.kind), *extra),
        docs=docs,
        bodies=tuple((weight, _write(body, source, kept, mapped)) for weight, body in aggregate.bodies),
        oracle=_oracle(source, aggregate, predicate, kept, map_, mapped),
        returns={"number": "int"}.get(aggregate.returns, aggregate.returns),
        composed=True,
        explicit=all(f.explicit for f in (kept, mapped) if f is not None),
        elements=source.elements,
    )


def _clause(source: Source, predicate: Predicate | None, kept: Filled | None, rng: random.Random) -> str:
    """Return the clause that follows "any of the" or "all of the": `words in the list are longer than 3`."""
    noun, tail = rng.choice(source.nouns), rng.choice(source.tails)
    if predicate is None or kept is None:
        raise ValueError("any and all have a predicate")
    text = kept.text
    for plural in ("that are ", "that ", "with "):
        if text.startswith(plural):
            rest = text.removeprefix(plural)
            text = {"that are ": f"are {rest}", "that ": rest, "with ": f"have {rest}"}[plural]
            break
    else:
        text = f"are {'ones ' if text.startswith('whose ') else ''}{text}"
    return f"{noun}{tail} {text}"
