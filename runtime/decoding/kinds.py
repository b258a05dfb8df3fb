"""Types and bounds of decoding parameters, and the error for a wrong value."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharding.errors import InputError

# An error message quotes at most this many characters of a wrong value.
_SHOWN = 80


@dataclass(frozen=True)
class Requirement:
    """A setting of another parameter without which a parameter has no effect.

    Attributes:
      field: name of the other parameter.
      values: the values of that parameter that satisfy the requirement; None for every value except None.
      when_given: check the requirement only if the caller gave the parameter explicitly. A value inherited from a
        preset or a checkpoint is then ignored instead of rejected.
    """

    field: str
    values: tuple[Any, ...] | None
    when_given: bool = False

    def met(self, config: Any) -> bool:
        """Return whether a configuration satisfies the requirement."""
        value = getattr(config, self.field)
        return value is not None if self.values is None else value in self.values

    def spelled(self, spell: Callable[[str], str] = str) -> str:
        """Return the setting in words, such as ``cache=dual or cache=prefix``.

        ``spell`` turns the name of a parameter into the form the reader knows, such as a flag.
        """
        if self.values is None:
            return spell(self.field)
        return " or ".join(f"{spell(self.field)}={value}" for value in self.values)


class ParameterError(InputError):
    """A decoding parameter has a wrong value, or a value that conflicts with another parameter.

    Attributes:
      field: name of the parameter.
      problem: what is wrong; the message is the parameter's name followed by this text.
      requirement: the setting of another parameter that is missing, or None if the value itself is wrong.
    """

    def __init__(self, field: str, problem: str, requirement: Requirement | None = None) -> None:
        self.problem, self.requirement = problem, requirement
        super().__init__(self._sentence(field, str), field=field)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the message with parameter names as ``spell`` writes them: as flags, or as fields of a request."""
        return self._sentence(self.field or "", spell)

    def _sentence(self, field: str, spell: Callable[[str], str]) -> str:
        needs = "" if self.requirement is None else f" {self.requirement.spelled(spell)}"
        return f"{spell(field)} {self.problem}{needs}"


def wrong_value(name: str, value: Any, expected: str) -> ParameterError:
    """Return the error for a value, given a phrase that names the allowed ones."""
    try:
        shown = f"{value!r:.{_SHOWN}}"
    except (ValueError, RecursionError):  # an integer with more digits than Python prints, or a deeply nested list
        shown = f"of type {type(value).__name__} and too long"
    return ParameterError(name, f"is {shown}; expected {expected}")


def plain_number(value: float) -> str:
    """Format a number without an exponent (1000000 and 0.00001), unless it is below 1e-9 or at least 1e16."""
    if value and not 1e-9 <= abs(value) < 1e16:
        return f"{value:g}"
    return str(np.format_float_positional(value, trim="-"))


@dataclass(frozen=True)
class Integer:
    """An integer from ``low`` to ``high``, both included."""

    low: int
    high: int

    @property
    def expected(self) -> str:
        """A phrase that names the allowed values, for error messages."""
        return f"an integer from {self.low} to {self.high}"

    def read(self, name: str, value: Any) -> int:
        """Check a value and return it as a Python int. NumPy integers are accepted.

        Raises:
          ParameterError: the value is not an integer, or is out of bounds.
        """
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise wrong_value(name, value, self.expected)
        if not self.low <= int(value) <= self.high:
            raise wrong_value(name, value, self.expected)
        return int(value)

    def parse(self, text: str) -> Any:
        """Parse a number. Other text is returned as it is, and :meth:`read` rejects it."""
        return _number(int, text)


@dataclass(frozen=True)
class IntegerOrWord:
    """An integer, or one word in its place."""

    integer: Integer
    word: str

    @property
    def expected(self) -> str:
        """A phrase that names the allowed values, for error messages."""
        return f"{self.integer.expected}, or {self.word}"

    def read(self, name: str, value: Any) -> int | str:
        """Check a value and return the word, or a Python int.

        Raises:
          ParameterError: the value is neither the word nor an integer, or is out of bounds.
        """
        if isinstance(value, str) and value == self.word:
            return self.word
        try:
            return self.integer.read(name, value)
        except ParameterError:
            raise wrong_value(name, value, self.expected) from None

    def parse(self, text: str) -> Any:
        """Parse a number. Other text is returned as it is, and :meth:`read` accepts the word alone."""
        return self.integer.parse(text)


@dataclass(frozen=True)
class Real:
    """A finite number from ``low`` to ``high``.

    Attributes:
      low, high: the bounds, which are allowed themselves unless ``exclusive`` is set.
      exclusive: the bounds themselves are not allowed.
      smallest: numbers between 0 and this one are not allowed. 0 itself is, unless the bounds exclude it.
    """

    low: float
    high: float
    exclusive: bool = False
    smallest: float = 0.0

    @property
    def expected(self) -> str:
        """A phrase that names the allowed values, for error messages."""
        if self.exclusive:
            return f"a number between {plain_number(self.low)} and {plain_number(self.high)}, both excluded"
        if self.smallest:
            return f"0, or a number from {plain_number(self.smallest)} to {plain_number(self.high)}"
        return f"a number from {plain_number(self.low)} to {plain_number(self.high)}"

    def read(self, name: str, value: Any) -> float:
        """Check a value and return it as a Python float. Integers and NumPy numbers are accepted.

        Raises:
          ParameterError: the value is not a finite number, or is out of bounds.
        """
        number = math.nan
        if not isinstance(value, bool) and isinstance(value, numbers.Real):
            with contextlib.suppress(OverflowError):  # an integer above all floats
                number = float(value)
        if not math.isfinite(number):
            raise wrong_value(name, value, self.expected)
        inside = self.low < number < self.high if self.exclusive else self.low <= number <= self.high
        if not inside or 0.0 < number < self.smallest:
            raise wrong_value(name, value, self.expected)
        return number

    def parse(self, text: str) -> Any:
        """Parse a number. Other text is returned as it is, and :meth:`read` rejects it."""
        return _number(float, text)


@dataclass(frozen=True)
class Choice:
    """One name out of a fixed set."""

    choices: tuple[str, ...]

    @property
    def expected(self) -> str:
        """A phrase that names the allowed values, for error messages."""
        return f"one of {', '.join(self.choices)}"

    def read(self, name: str, value: Any) -> str:
        """Check a name and return it.

        Raises:
          ParameterError: the value is not one of ``choices``.
        """
        if not isinstance(value, str) or value not in self.choices:
            raise wrong_value(name, value, self.expected)
        return value

    def parse(self, text: str) -> str:
        """Return the text unchanged."""
        return text


@dataclass(frozen=True)
class Boolean:
    """True or false."""

    expected = "true or false"

    def read(self, name: str, value: Any) -> bool:
        """Check a value and return it as a Python bool. NumPy booleans are accepted.

        Raises:
          ParameterError: the value is not a boolean.
        """
        if not isinstance(value, (bool, np.bool_)):
            raise wrong_value(name, value, self.expected)
        return bool(value)

    def parse(self, text: str) -> Any:
        """Parse ``true`` or ``false``. Any other text is returned unchanged, and :meth:`read` rejects it."""
        return {"true": True, "false": False}.get(text, text)


@dataclass(frozen=True)
class Seeds:
    """One seed for a whole batch, or one per row. A line of a batch file has a single seed."""

    seed: Integer

    @property
    def expected(self) -> str:
        """A phrase that names the allowed values, for error messages."""
        return f"{self.seed.expected}, or one per row"

    def read(self, name: str, value: Any) -> int | tuple[int, ...]:
        """Check a seed, or a sequence of seeds, and return an int or a tuple of ints.

        Raises:
          ParameterError: a seed is not an integer, or is out of bounds.
        """
        if isinstance(value, (numbers.Number, str, bytes)):
            return self._one(name, value)
        try:
            return tuple(self._one(name, seed) for seed in value)
        except TypeError:
            raise wrong_value(name, value, self.expected) from None

    def _one(self, name: str, value: Any) -> int:
        try:
            return self.seed.read(name, value)
        except ParameterError:
            raise wrong_value(name, value, self.expected) from None

    def parse(self, text: str) -> Any:
        """Parse a seed, or seeds separated by commas; one that a comma follows is a list of one.

        Other text is returned as it is, and :meth:`read` rejects it.
        """
        parts = text.removesuffix(",").split(",")
        if not all(part.isascii() and part.isdigit() for part in parts):
            return text
        seeds = [self.seed.parse(part) for part in parts]
        return seeds if "," in text else seeds[0]


@dataclass(frozen=True)
class TokenIds:
    """At most ``count`` token ids, each at most ``high``."""

    count: int
    high: int

    @property
    def expected(self) -> str:
        """A phrase that names the allowed values, for error messages."""
        return f"at most {self.count} token ids"

    def read(self, name: str, value: Any) -> tuple[int, ...]:
        """Check the ids and return them as a tuple of ints.

        Raises:
          ParameterError: an entry is not a token id, or there are too many.
        """
        one = Integer(0, self.high)
        try:
            found = tuple(one.read(name, token) for token in value)
        except TypeError:
            raise wrong_value(name, value, self.expected) from None
        if len(found) > self.count:
            raise ParameterError(name, f"has {len(found)} entries; expected {self.expected}")
        return found

    def parse(self, text: str) -> Any:
        """Parse ids separated by commas. Other text is returned as it is, and :meth:`read` rejects it."""
        found = [_number(int, part) for part in text.split(",")]
        return text if str in map(type, found) else found


Kind = Integer | IntegerOrWord | Real | Choice | Boolean | Seeds | TokenIds


def _number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text
