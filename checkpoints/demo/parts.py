"""Parts that generated programs are composed of: sources, predicates, maps and aggregates.

In texts, `$x` stands for the element, `$k` and `$j` for constants of the part (or a parameter that takes their place),
`$a` for the first parameter. Each part carries a Python function beside its text: what the text must compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VOWELS = "aeiou"


@dataclass(frozen=True)
class Source:
    """Where elements come from: parameter kind, element type, text of the iterable, noun, tail of the description."""

    name: str
    kind: str
    element: str
    code: str
    values: Callable[[Any], Sequence[Any]]
    nouns: tuple[str, ...]
    tails: tuple[str, ...]
    suffix: str = ""  # of function names
    elements: tuple[str, ...] = ()  # names of one element, where they do not follow from the parameter's


@dataclass(frozen=True)
class Predicate:
    """A condition on one element; an adjective stands before the noun, another description behind it."""

    name: str
    text: str
    code: str
    test: Callable[..., bool]
    adjective: bool = False
    constants: str = ""  # kinds: n small integer, d digit, c letter, l length
    synonyms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Map:
    """What is made of one element; `{}` in the description is the noun phrase of the elements, in the plural."""

    name: str
    text: str
    code: str
    apply: Callable[..., Any]
    result: str
    single: str  # description of one result, `{}` is the element
    verb: str = ""  # function names: square_even_numbers
    constants: str = ""


@dataclass(frozen=True)
class Aggregate:
    """What is made of all elements. `body` has `$E` (mapped element), `$S` (iterable), `$C` (" if condition" or nothing),
    `$P` (the bare condition) and, in loops, `$I` (an `if` line or nothing, which the next line is indented below)."""

    name: str
    text: str
    bodies: tuple[tuple[float, str], ...]
    apply: Callable[[list[Any]], Any]
    results: tuple[str, ...]  # element types it takes
    returns: str
    names: tuple[str, ...]
    condition: str = "may"  # may, must or must not have a predicate
    mapped: bool = True  # may have a map
    full: bool = False  # apply takes (index, element, mapped element) of each instead of mapped elements


def _digits(n: int) -> list[int]:
    return [int(d) for d in str(n)]


SOURCES = (
    Source("numbers", "numbers", "number", "$a", list, ("numbers", "numbers", "values", "integers"),
           ("", "", " in $a", " in the list", " of a list")),
    Source("range", "count", "number", "range(1, $a + 1)", lambda n: range(1, n + 1), ("numbers", "integers"),
           (" from 1 to $a",), "_up_to_n", ("i", "n")),
    Source("dict_values", "mapping", "number", "$a.values()", lambda d: list(d.values()), ("values",),
           (" of $a", " of the dictionary", " in the dictionary $a"), "_in_dict", ("value", "v")),
    Source("digits", "count", "number", "map(int, str($a))", _digits, ("digits",), (" of $a", " of a number"), "", ("d", "digit")),
    Source("words", "words", "word", "$a", list, ("words", "words", "strings"), ("", "", " in $a", " in the list")),
    Source("text_words", "text", "word", "$a.split()", str.split, ("words",),
           (" in the text", " of $a", " in a sentence", " in $a"), "_in_text", ("word", "w")),
    Source("dict_keys", "mapping", "word", "$a", list, ("keys",), (" of $a", " of the dictionary"), "_in_dict"),
    Source("characters", "text", "character", "$a", list, ("characters", "letters"), ("", " in $a", " of $a", " in the text")),
)

NUMBER_PREDICATES = (
    Predicate("even", "even", "$x % 2 == 0", lambda x: x % 2 == 0, True),
    Predicate("odd", "odd", "$x % 2 == 1", lambda x: x % 2 == 1, True),
    Predicate("positive", "positive", "$x > 0", lambda x: x > 0, True),
    Predicate("negative", "negative", "$x < 0", lambda x: x < 0, True),
    Predicate("nonzero", "non-zero", "$x != 0", lambda x: x != 0, True),
    Predicate("two_digit", "two-digit", "10 <= $x <= 99", lambda x: 10 <= x <= 99, True),
    Predicate("greater_than", "greater than $k", "$x > $k", lambda x, k: x > k, False, "n",
              ("above $k", "larger than $k", "over $k", "that are greater than $k")),
    Predicate("less_than", "less than $k", "$x < $k", lambda x, k: x < k, False, "n",
              ("below $k", "smaller than $k", "under $k", "that are less than $k")),
    Predicate("at_least", "of at least $k", "$x >= $k", lambda x, k: x >= k, False, "n", ("that are at least $k",)),
    Predicate("at_most", "of at most $k", "$x <= $k", lambda x, k: x <= k, False, "n", ("that are at most $k",)),
    Predicate("divisible_by", "divisible by $k", "$x % $k == 0", lambda x, k: x % k == 0, False, "d",
              ("that are multiples of $k", "that $k divides", "that are divisible by $k")),
    Predicate("not_divisible_by", "not divisible by $k", "$x % $k != 0", lambda x, k: x % k != 0, False, "d",
              ("that are not multiples of $k", "that are not divisible by $k")),
    Predicate("equal_to", "equal to $k", "$x == $k", lambda x, k: x == k, False, "n", ("that equal $k",)),
    Predicate("not_equal_to", "not equal to $k", "$x != $k", lambda x, k: x != k, False, "n",
              ("different from $k", "other than $k")),
    Predicate("ending_in", "ending in $k", "$x % 10 == $k", lambda x, k: x % 10 == k, False, "u",
              ("whose last digit is $k",)),
    Predicate("between", "between $k and $j", "$k <= $x <= $j", lambda x, k, j: k <= x <= j, False, "nn",
              ("from $k to $j", "in the range $k to $j")),
)

WORD_PREDICATES = (
    Predicate("longer_than", "longer than $k", "len($x) > $k", lambda x, k: len(x) > k, False, "l",
              ("with more than $k letters", "with more than $k characters", "longer than $k characters")),
    Predicate("shorter_than", "shorter than $k", "len($x) < $k", lambda x, k: len(x) < k, False, "l",
              ("with fewer than $k letters", "with less than $k characters")),
    Predicate("of_length", "of length $k", "len($x) == $k", lambda x, k: len(x) == k, False, "l",
              ("with exactly $k letters", "that have $k characters")),
    Predicate("starting_with", "starting with $k", "$x.startswith($k)", lambda x, k: x.startswith(k), False, "c",
              ("that start with $k", "that begin with $k", "beginning with $k")),
    Predicate("ending_with", "ending with $k", "$x.endswith($k)", lambda x, k: x.endswith(k), False, "c",
              ("that end with $k", "ending in $k")),
    Predicate("containing", "containing $k", "$k in $x", lambda x, k: k in x, False, "c",
              ("that contain $k", "with $k in them", "that have $k in them")),
    Predicate("without", "without $k", "$k not in $x", lambda x, k: k not in x, False, "c",
              ("not containing $k", "that do not contain $k")),
    Predicate("uppercase", "uppercase", "$x.isupper()", str.isupper, True),
    Predicate("lowercase", "lowercase", "$x.islower()", str.islower, True),
    Predicate("numeric", "numeric", "$x.isdigit()", str.isdigit, True),
    Predicate("even_length", "of even length", "len($x) % 2 == 0", lambda x: len(x) % 2 == 0),
    Predicate("odd_length", "of odd length", "len($x) % 2 == 1", lambda x: len(x) % 2 == 1),
    Predicate("palindromic", "palindromic", "$x == $x[::-1]", lambda x: x == x[::-1], True, "",
              ("that are palindromes",)),
    Predicate("starting_with_vowel", "starting with a vowel", '$x[0] in "aeiou"', lambda x: x[0] in VOWELS, False, "",
              ("that start with a vowel", "whose first letter is a vowel")),
)

CHARACTER_PREDICATES = (
    Predicate("vowels", "that are vowels", '$x in "aeiou"', lambda x: x in VOWELS),
    Predicate("consonants", "that are consonants", '$x.isalpha() and $x not in "aeiou"',
              lambda x: x.isalpha() and x not in VOWELS),
    Predicate("digits", "that are digits", "$x.isdigit()", str.isdigit),
    Predicate("letters", "that are letters", "$x.isalpha()", str.isalpha, False, "", ("that are alphabetic",)),
    Predicate("alphanumeric", "alphanumeric", "$x.isalnum()", str.isalnum, True, "", ("that are letters or digits",)),
    Predicate("uppercase", "uppercase", "$x.isupper()", str.isupper, True),
    Predicate("lowercase", "lowercase", "$x.islower()", str.islower, True),
    Predicate("spaces", "that are spaces", '$x == " "', lambda x: x == " "),
    Predicate("non_spaces", "that are not spaces", '$x != " "', lambda x: x != " "),
    Predicate("equal_to", "equal to $k", "$x == $k", lambda x, k: x == k, False, "c", ("that are $k",)),
    Predicate("other_than", "other than $k", "$x != $k", lambda x, k: x != k, False, "c",
              ("except $k", "that are not $k", "different from $k")),
    Predicate("before", "that come before $k", "$x < $k", lambda x, k: x < k, False, "c", ("before $k",)),
)

NUMBER_MAPS = (
    Map("squares", "squares of {}", "$x * $x", lambda x: x * x, "number", "the square of {}", "square"),
    Map("cubes", "cubes of {}", "$x ** 3", lambda x: x**3, "number", "the cube of {}", "cube"),
    Map("doubles", "doubles of {}", "$x * 2", lambda x: x * 2, "number", "twice {}", "double"),
    Map("triples", "triples of {}", "$x * 3", lambda x: x * 3, "number", "three times {}", "triple"),
    Map("halves", "halves of {}", "$x / 2", lambda x: x / 2, "number", "half of {}", "halve"),
    Map("negatives", "negatives of {}", "-$x", lambda x: -x, "number", "the negative of {}", "negate"),
    Map("absolute_values", "absolute values of {}", "abs($x)", abs, "number", "the absolute value of {}"),
    Map("plus", "{} increased by $k", "$x + $k", lambda x, k: x + k, "number", "{} plus $k", "", "n"),
    Map("minus", "{} decreased by $k", "$x - $k", lambda x, k: x - k, "number", "{} minus $k", "", "n"),
    Map("times", "{} multiplied by $k", "$x * $k", lambda x, k: x * k, "number", "{} times $k", "", "n"),
    Map("powers", "{} raised to the power $k", "$x ** $k", lambda x, k: x**k, "number", "{} to the power of $k", "", "e"),
    Map("remainders", "remainders of {} divided by $k", "$x % $k", lambda x, k: x % k, "number",
        "the remainder of {} divided by $k", "", "d"),
    Map("quotients", "{} divided by $k, rounded down", "$x // $k", lambda x, k: x // k, "number",
        "{} divided by $k, rounded down", "", "d"),
    Map("last_digits", "last digits of {}", "$x % 10", lambda x: x % 10, "number", "the last digit of {}"),
    Map("strings", "{} as strings", "str($x)", str, "word", "{} as a string", "stringify"),
)

WORD_MAPS = (
    Map("lengths", "lengths of {}", "len($x)", len, "number", "the length of {}"),
    Map("uppercased", "{} in upper case", "$x.upper()", str.upper, "word", "{} in upper case", "uppercase"),
    Map("lowercased", "{} in lower case", "$x.lower()", str.lower, "word", "{} in lower case", "lowercase"),
    Map("capitalized", "{}, capitalized", "$x.capitalize()", str.capitalize, "word", "{}, capitalized", "capitalize"),
    Map("reversed", "{}, reversed", "$x[::-1]", lambda x: x[::-1], "word", "{} reversed", "reverse"),
    Map("first_letters", "first letters of {}", "$x[0]", lambda x: x[0], "word", "the first letter of {}"),
    Map("last_letters", "last letters of {}", "$x[-1]", lambda x: x[-1], "word", "the last letter of {}"),
    Map("first_part", "first $k letters of {}", "$x[:$k]", lambda x, k: x[:k], "word", "the first $k letters of {}", "", "e"),
    Map("last_part", "last $k letters of {}", "$x[-$k:]", lambda x, k: x[-k:], "word", "the last $k letters of {}", "", "e"),
    Map("repeated", "{}, each repeated $k times", "$x * $k", lambda x, k: x * k, "word", "{} repeated $k times", "repeat", "e"),
    Map("with_suffix", "{} with $k appended", "$x + $k", lambda x, k: x + k, "word", "{} followed by $k", "", "s"),
    Map("with_prefix", "{} with $k in front", "$k + $x", lambda x, k: k + x, "word", "$k followed by {}", "", "s"),
    Map("removed", "{} with every $k removed", '$x.replace($k, "")', lambda x, k: x.replace(k, ""), "word",
        "{} without every $k", "", "c"),
    Map("letter_counts", "numbers of times $k occurs in {}", "$x.count($k)", lambda x, k: x.count(k), "number",
        "how often $k occurs in {}", "", "c"),
)

CHARACTER_MAPS = (
    Map("uppercased", "{} in upper case", "$x.upper()", str.upper, "character", "{} in upper case", "uppercase"),
    Map("lowercased", "{} in lower case", "$x.lower()", str.lower, "character", "{} in lower case", "lowercase"),
    Map("repeated", "{}, each repeated $k times", "$x * $k", lambda x, k: x * k, "character", "{} repeated $k times", "repeat", "e"),
    Map("doubled", "{}, each doubled", "$x * 2", lambda x: x * 2, "character", "{} doubled", "double"),
    Map("codes", "character codes of {}", "ord($x)", ord, "number", "the character code of {}"),
    Map("with_suffix", "{}, each followed by $k", "$x + $k", lambda x, k: x + k, "character", "{} followed by $k", "", "s"),
)

PREDICATES = {"number": NUMBER_PREDICATES, "word": WORD_PREDICATES, "character": CHARACTER_PREDICATES}
MAPS = {"number": NUMBER_MAPS, "word": WORD_MAPS, "character": CHARACTER_MAPS}


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
    Aggregate("list", "a list of {}", ((0.85, "return [$E for $x in $S$C]"), (0.15, _LOOP.format("[]", ".append($E)"))),
              list, ("number", "word"), "list", ("",)),
    Aggregate("sum", "the sum of {}", ((0.8, "return sum($E for $x in $S$C)"), (0.2, _LOOP.format("0", " += $E"))),
              sum, ("number",), "number", ("sum", "total", "add_up")),
    Aggregate("count", "the number of {}", ((0.8, "return sum(1 for $x in $S if $P)"),
              (0.2, _LOOP.format("0", " += 1"))), len, _ALL, "int", ("count", "number_of", "how_many"), "must", False),
    Aggregate("product", "the product of {}", ((1.0, _LOOP.format("1", " *= $E")),), _product, ("number",), "number",
              ("product", "multiply")),
    Aggregate("max", "the largest of {}", ((1.0, "return max($E for $x in $S$C)"),), max, ("number",), "number",
              ("max", "largest", "maximum")),
    Aggregate("min", "the smallest of {}", ((1.0, "return min($E for $x in $S$C)"),), min, ("number",), "number",
              ("min", "smallest", "minimum")),
    Aggregate("average", "the average of {}", ((1.0, "$r = [$E for $x in $S$C]\nreturn sum($r) / len($r)"),),
              lambda v: sum(v) / len(v), ("number",), "float", ("average", "mean")),
    Aggregate("set", "the set of {}", ((1.0, "return {$E for $x in $S$C}"),), set, _ALL, "set", ("set", "unique", "distinct")),
    Aggregate("sorted", "a sorted list of {}", ((1.0, "return sorted($E for $x in $S$C)"),), sorted, _ALL, "list", ("sorted", "sort")),
    Aggregate("any", "whether any of {}", ((1.0, "return any($P for $x in $S)"),), any, _ALL, "bool", ("any", "has"), "must", False),
    Aggregate("all", "whether all of {}", ((1.0, "return all($P for $x in $S)"),), all, _ALL, "bool", ("all", "only"), "must", False),
    Aggregate("first", "the first of {}, or None", ((1.0, "for $x in $S:\n    if $P:\n        return $E\nreturn None"),),
              lambda v: v[0] if v else None, _ALL, "", ("first", "find_first"), "must"),
    Aggregate("last", "the last of {}, or None", ((1.0, "$r = None\nfor $x in $S:\n    if $P:\n        $r = $E\nreturn $r"),),
              lambda v: v[-1] if v else None, _ALL, "", ("last", "find_last"), "must"),
    Aggregate("join", "{} joined into one string", ((1.0, 'return "".join($E for $x in $S$C)'),), "".join,
              ("word", "character"), "str", ("join", "concatenate")),
    Aggregate("join_comma", "{} joined by commas", ((1.0, 'return ",".join($E for $x in $S$C)'),), ",".join,
              ("word", "character"), "str", ("join_with_commas", "comma_separated")),
    Aggregate("join_space", "{} joined by spaces", ((1.0, 'return " ".join($E for $x in $S$C)'),), " ".join,
              ("word", "character"), "str", ("join_with_spaces", "space_separated")),
    Aggregate("longest", "the longest of {}", ((1.0, "return max(($E for $x in $S$C), key=len)"),),
              lambda v: max(v, key=len), ("word",), "str", ("longest",)),
    Aggregate("shortest", "the shortest of {}", ((1.0, "return min(($E for $x in $S$C), key=len)"),),
              lambda v: min(v, key=len), ("word",), "str", ("shortest",)),
    Aggregate("indices", "the indices of {}", ((1.0, "return [$i for $i, $x in enumerate($S) if $P]"),),
              lambda v: [i for i, _, _ in v], _ALL, "list", ("indices_of", "positions_of"), "must", False, True),
    Aggregate("frequencies", "how often each of {} occurs, as a dict",
              ((1.0, _LOOP.format("{}", "[$E] = $r.get($E, 0) + 1")),), _frequencies, _ALL, "dict",
              ("frequencies_of", "count_each_of", "tally")),
    Aggregate("to_dict", "a dict from each of {} to $M", ((1.0, "return {$x: $E for $x in $S$C}"),),
              lambda v: {x: y for _, x, y in v}, _ALL, "dict", ("dict_of", "map_to"), "may", True, True),
    Aggregate("group", "{} grouped by $M, as a dict of lists",
              ((1.0, _LOOP.format("{}", ".setdefault($E, []).append($x)")),), _group, _ALL, "dict",
              ("group_by", "group"), "may", True, True),
)
