"""Composed tasks on one argument: joined conditions, chained maps, and branches between two or three results."""

import random
import re
from typing import Any

from checkpoints.demo.maps import MAPS
from checkpoints.demo.parts import Map, Predicate
from checkpoints.demo.pipelines import Filled, fill
from checkpoints.demo.predicates import PREDICATES
from checkpoints.demo.tasks import Parameter, Task

_KINDS = {"number": "number", "word": "some_text"}


def clause(predicate: Predicate, kept: Filled) -> str:
    """Phrase a predicate for a single element: `is divisible by 3`, `starts with 'a'`."""
    text = kept.text
    plurals = {
        "that are ": "is ", "that end ": "ends ", "that start ": "starts ", "that begin ": "begins ",
        "that equal ": "equals ",
        "that contain ": "contains ", "that do not ": "does not ", "that have ": "has ", "with ": "has ",
        "containing ": "contains ", "starting ": "starts ", "ending ": "ends ", "not containing ": "does not contain ",
        "beginning ": "begins ", "without ": "does not contain ", "of ": "is of ",
    }  # fmt: skip
    if predicate.name == "palindromic":
        return "is a palindrome"
    for plural, single in plurals.items():
        if text.startswith(plural):
            text = single + text.removeprefix(plural).replace(" in them", " in it").replace("multiples", "a multiple")
            return text.replace("is not multiples", "is not a multiple")
    return f"is {text}" if not text.startswith(("that ", "whose ")) else f"is one {text}"


def _kept(rng: random.Random, element: str, marker: str = "", other: str = "") -> tuple[Predicate, Filled]:
    while True:
        predicate = rng.choice(PREDICATES[element])
        if predicate.name != other:
            break
    kept = fill(predicate, rng, marker, bool(marker))
    return predicate, kept


def _code(filled: Filled) -> str:
    return filled.code.replace("$x", "$a")


def _call(part: Predicate | Map, filled: Filled, value: Any, rest: tuple[Any, ...]) -> Any:
    function = part.test if isinstance(part, Predicate) else part.apply
    return function(value, *(rest if filled.parameter else filled.arguments))


def one_condition(rng: random.Random) -> Task:
    """Draw a task that tests one condition on its argument."""
    element = rng.choice(("number", "number", "word"))
    predicate, kept = _kept(rng, element, "$b")
    code, text = _code(kept), clause(predicate, kept)
    first = "has" if kept.name.endswith(("length",)) else "is"
    return Task(
        spec=f"is/{element}/{predicate.name}",
        names=tuple(
            dict.fromkeys(
                (f"is_{kept.name}", f"check_{kept.name}", kept.name if "_" in kept.name else f"{first}_{kept.name}")
            )
        ),
        parameters=(Parameter(_KINDS[element]), *((kept.parameter,) if kept.parameter else ())),
        docs=(f"?$a {text}", f"?{'a number' if element == 'number' else 'a string'} {text}"),
        bodies=((0.9, f"return {code}"), (0.1, f"if {code}:\n    return True\nreturn False")),
        oracle=lambda value, *rest: bool(_call(predicate, kept, value, rest)),
        returns="bool",
        explicit=kept.explicit,
    )


def two_conditions(rng: random.Random) -> Task:
    """Draw a task that tests two conditions on its argument: both, at least one, or the first but not the second."""
    element = rng.choice(("number", "number", "word"))
    one, kept = _kept(rng, element)
    two, other = _kept(rng, element, "", one.name)
    how = rng.choice(("and", "and", "or", "but_not"))
    code, name = {
        "and": (f"{_code(kept)} and {_code(other)}", "and"),
        "or": (f"{_code(kept)} or {_code(other)}", "or"),
        "but_not": (f"{_code(kept)} and not ({_code(other)})", "but_not"),
    }[how]
    if how == "but_not" and " " not in _code(other):
        code = code.replace("(" + _code(other) + ")", _code(other))
    words = {"and": "and", "or": "or", "but_not": "but it is not true that it"}[how]
    if how == "but_not" and two.adjective:
        text = f"$a {clause(one, kept)} but not {other.text}"
    else:
        text = f"$a {clause(one, kept)} {words} {clause(two, other)}"

    def run(value: Any) -> bool:
        first, second = (bool(_call(p, f, value, ())) for p, f in ((one, kept), (two, other)))
        return {"and": first and second, "or": first or second, "but_not": first and not second}[how]

    return Task(
        spec=f"is/{element}/{how}/" + "/".join(sorted((one.name, two.name))),
        names=(f"is_{kept.name}_{name}_{other.name}", f"{kept.name}_{name}_{other.name}"),
        parameters=(Parameter(_KINDS[element]),),
        docs=(f"?{text}",),
        bodies=((1.0, f"return {code}"),),
        oracle=run,
        returns="bool",
        composed=True,
        explicit=kept.explicit and other.explicit,
    )


_SINGULAR = {
    "squares": "square", "cubes": "cube", "doubles": "double", "triples": "triple", "halves": "half",
    "negatives": "negate", "absolute_values": "absolute", "strings": "to_string", "lengths": "length",
    "last_digits": "last_digit", "first_letters": "first_letter", "last_letters": "last_letter",
}  # fmt: skip


def one_map(rng: random.Random) -> Task:
    """Draw a task that applies one map to its argument."""
    element = rng.choice(("number", "word"))
    map_ = rng.choice(MAPS[element])
    mapped = fill(map_, rng, "$b", True)
    name = _SINGULAR.get(map_.name, mapped.name)
    return Task(
        spec=f"map/{element}/{map_.name}",
        names=(name, f"get_{name}", f"{name}_of"),
        parameters=(Parameter(_KINDS[element]), *((mapped.parameter,) if mapped.parameter else ())),
        docs=(
            "=" + mapped.single.format("$a"),
            "=" + mapped.single.format("a number" if element == "number" else "a string"),
        ),
        bodies=((1.0, f"return {_code(mapped)}"),),
        oracle=lambda value, *rest: _call(map_, mapped, value, rest),
        returns={"number": "int", "word": "str"}[map_.result] if map_.name != "halves" else "float",
        explicit=mapped.explicit,
    )


def two_maps(rng: random.Random) -> Task:
    """Draw a task that applies two maps to its argument, one after the other: `the square of n, plus 3`."""
    element = rng.choice(("number", "word"))
    while True:
        one = rng.choice(MAPS[element])
        if one.result in MAPS:
            two = rng.choice(MAPS[one.result])
            if one.name != two.name:
                break
    first, second = fill(one, rng, "", False), fill(two, rng, "", False)
    inner = _code(first)
    # The inner expression needs parentheses if it has several terms, unless it becomes the only argument of a call.
    if " " in re.sub(r"\(.*\)", "", inner) or inner.startswith("-"):
        outer = second.code
        inside = re.fullmatch(r"\w+\(\$x\)", outer) is not None
        code = outer.replace("$x", inner if inside else f"({inner})")
    else:
        code = second.code.replace("$x", inner)
    return Task(
        spec=f"maps/{element}/{one.name}/{two.name}",
        names=(f"{first.name}_then_{second.name}", f"{second.name}_of_{first.name}"),
        parameters=(Parameter(_KINDS[element]),),
        docs=("=" + second.single.format(first.single.format("$a")),),
        bodies=((1.0, f"return {code}"),),
        oracle=lambda value: _call(two, second, _call(one, first, value, ()), ()),
        composed=True,
        explicit=first.explicit and second.explicit,
    )


def one_of_two(rng: random.Random) -> Task:
    """Draw a task that applies a map if a condition holds.

    Otherwise it applies a second map, or returns the argument unchanged.
    """
    element = rng.choice(("number", "number", "word"))
    predicate, kept = _kept(rng, element)
    one, two = rng.sample(MAPS[element], 2)
    first, second = fill(one, rng, "", False), fill(two, rng, "", False)
    plain = rng.random() < 0.4
    otherwise = "$a" if plain else _code(second)
    other_text = "$a" if plain else second.single.format("$a")
    text = f"{first.single.format('$a')} if $a {clause(predicate, kept)}, otherwise {other_text}"
    name = f"{first.name}_if_{kept.name}" + ("" if plain else f"_else_{second.name}")
    condition = _code(kept)
    return Task(
        spec=f"if/{element}/{predicate.name}/{one.name}/" + ("" if plain else two.name),
        names=(name, name.replace("_else_", "_or_")),
        parameters=(Parameter(_KINDS[element]),),
        docs=(f"={text}",),
        bodies=(
            (0.8, f"if {condition}:\n    return {_code(first)}\nreturn {otherwise}"),
            (0.2, f"return {_code(first)} if {condition} else {otherwise}"),
        ),
        oracle=lambda value: (
            _call(one, first, value, ())
            if _call(predicate, kept, value, ())
            else value
            if plain
            else _call(two, second, value, ())
        ),
        composed=True,
        explicit=kept.explicit and first.explicit and (plain or second.explicit),
    )


_LABELS = (
    ("fizz", "buzz"), ("yes", "no"), ("high", "low"), ("big", "small"), ("hot", "cold"),
    ("pass", "fail"), ("foo", "bar"),
    ("ok", "error"), ("left", "right"), ("true", "false"), ("good", "bad"),
    ("red", "blue"), ("in", "out"), ("odd", "even"),
)  # fmt: skip


def labels(rng: random.Random) -> Task:
    """Draw a task that chooses among two or three strings by one or two conditions."""
    predicate, kept = _kept(rng, "number")
    one, two = rng.choice(_LABELS)
    if rng.random() < 0.2:
        one, two = kept.name.replace("_", " "), "not " + kept.name.replace("_", " ")
    if rng.random() < 0.6:
        code, text = _code(kept), clause(predicate, kept)
        return Task(
            spec=f"label/{predicate.name}/{one}",
            names=(f"{one}_or_{two}_by_{kept.name}".replace(" ", "_"), f"label_{kept.name}", "classify", "describe"),
            parameters=(Parameter("number"),),
            docs=(f"='{one}' if $a {text}, else '{two}'", f"='{one}' if $a {text} and '{two}' otherwise"),
            bodies=(
                (0.6, f'return "{one}" if {code} else "{two}"'),
                (0.4, f'if {code}:\n    return "{one}"\nreturn "{two}"'),
            ),
            oracle=lambda value: one if _call(predicate, kept, value, ()) else two,
            returns="str",
            composed=True,
            explicit=kept.explicit,
        )
    other, more = _kept(rng, "number", "", predicate.name)
    third = rng.choice(("neither", "none", "other", "medium", "zero", "rest"))
    return Task(
        spec="label/" + "/".join((predicate.name, other.name)),
        names=(f"{one}_{two}_or_{third}".replace(" ", "_"), "classify", "describe", "label"),
        parameters=(Parameter("number"),),
        docs=(f"='{one}' if $a {clause(predicate, kept)}, '{two}' if $a {clause(other, more)}, else '{third}'",),
        bodies=(
            (1.0, f'if {_code(kept)}:\n    return "{one}"\nif {_code(more)}:\n    return "{two}"\nreturn "{third}"'),
        ),
        oracle=lambda value: (
            one if _call(predicate, kept, value, ()) else two if _call(other, more, value, ()) else third
        ),
        returns="str",
        composed=True,
        explicit=False,
    )


BRANCHES = (
    (one_condition, 2.0),
    (two_conditions, 2.0),
    (one_map, 2.0),
    (two_maps, 2.0),
    (one_of_two, 2.0),
    (labels, 2.0),
)
