"""The schema of decoding parameters: how a parameter is declared, and how a value is checked against it.

Each field of a configuration is declared once, by :func:`parameter`: type, bounds, default, help, aliases, and whether
its value is compiled into the program. Everything else derives from these declarations: validation, command-line flags,
the fields of batch lines and HTTP requests, OpenAPI, server modes, and the table in the README.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharding.errors import InputError

_KEY = "parameter"
# An error message quotes at most this many characters of a wrong value.
_SHOWN = 80


@dataclass(frozen=True)
class Requirement:
    """A setting of another parameter without which a parameter has no effect.

    Attributes:
      field: name of the other parameter.
      values: the values of that parameter that satisfy the requirement.
      when_given: check the requirement only if the caller gave the parameter explicitly. A value inherited from a
        preset or a checkpoint is then ignored instead of rejected.
    """

    field: str
    values: tuple[Any, ...]
    when_given: bool = False

    def met(self, config: Any) -> bool:
        """Return whether a configuration satisfies the requirement."""
        return getattr(config, self.field) in self.values

    def spelled(self, spell: Callable[[str], str] = str) -> str:
        """Return the setting in words, such as ``cache=dual or cache=prefix``.

        ``spell`` turns the name of a parameter into the form the reader knows, such as a flag.
        """
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


def _wrong(name: str, value: Any, expected: str) -> ParameterError:
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
            raise _wrong(name, value, self.expected)
        if not self.low <= int(value) <= self.high:
            raise _wrong(name, value, self.expected)
        return int(value)

    def parse(self, text: str) -> Any:
        """Parse a number. Other text is returned as it is, and :meth:`read` rejects it."""
        return _number(int, text)


@dataclass(frozen=True)
class Real:
    """A finite number from ``low`` to ``high``.

    Attributes:
      low, high: the bounds, which are allowed themselves unless ``exclusive`` is set.
      exclusive: the bounds themselves are not allowed.
      smallest: the smallest number above 0 that is allowed; 0 itself always is.
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
            raise _wrong(name, value, self.expected)
        inside = self.low < number < self.high if self.exclusive else self.low <= number <= self.high
        if not inside or 0.0 < number < self.smallest:
            raise _wrong(name, value, self.expected)
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
            raise _wrong(name, value, self.expected)
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
            raise _wrong(name, value, self.expected)
        return bool(value)

    def parse(self, text: str) -> Any:
        """Parse ``true`` or ``false``. Any other text is returned unchanged, and :meth:`read` rejects it."""
        return {"true": True, "false": False}.get(text, text)


@dataclass(frozen=True)
class Seeds:
    """One seed for a whole batch, or one per row. An HTTP request and a line of a batch file have a single seed."""

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
            raise _wrong(name, value, self.expected) from None

    def _one(self, name: str, value: Any) -> int:
        try:
            return self.seed.read(name, value)
        except ParameterError:
            raise _wrong(name, value, self.expected) from None

    def parse(self, text: str) -> Any:
        """Parse seeds separated by commas. Other text is returned as it is, and :meth:`read` rejects it."""
        parts = text.split(",")
        if not all(part.isascii() and part.isdigit() for part in parts):
            return text
        seeds = [self.seed.parse(part) for part in parts]
        return seeds[0] if len(seeds) == 1 else seeds


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
            raise _wrong(name, value, self.expected) from None
        if len(found) > self.count:
            raise ParameterError(name, f"has {len(found)} entries; expected {self.expected}")
        return found

    def parse(self, text: str) -> Any:
        """Parse ids separated by commas. Other text is returned as it is, and :meth:`read` rejects it."""
        found = [_number(int, part) for part in text.split(",")]
        return text if str in map(type, found) else found


Kind = Integer | Real | Choice | Boolean | Seeds | TokenIds


def _number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Parameter:
    """One decoding parameter.

    Attributes:
      kind: type and bounds of the value.
      help: what the parameter does, in a sentence or two.
      aliases: other names that batch lines and HTTP requests may use.
      optional: None is a valid value.
      zero_is_none: flags and requests write 0 to mean None.
      idle: values that have no effect, besides the default. Requirements are not checked for them.
      compiled: whether the value is part of the compiled program. A :class:`Requirement` here means "only with that
        setting of another parameter". Otherwise the value is a run-time argument of each row.
      variant: there is one program for the default, and one for all other values, which runs the default too.
      general: value whose program also runs every other value, at little cost; slots are compiled for it.
      in_loop: the decoding loops read the value under the parameter's name: in the compiled settings if ``compiled`` is
        True, otherwise as an array with one value per row; see :mod:`runtime.decoding.loop_parameters`.
      off: value that stands for None in that array, and among compiled values.
      requires: settings of other parameters without which this one has no effect.
      variable_length: whether it is for models whose canvas changes its length, or for the others; None for both.
      mode: a server's ``--mode`` can set it.
      exposed: flags and requests can set it. Otherwise only Python code can.
      from_model: the engine sets it from the model, so no caller does, and requests to one model never differ in it.
      flag_default: value of the flag when it is not given; None leaves the value to the preset and the checkpoint.
      flag_help: text that the flag's help adds after ``help``.
      in_checkpoint: key in a checkpoint's ``generation_config.json``; empty if there is none.
      http: field name in HTTP requests. Empty means ``name``; None means that OpenAI's request format already defines
        the field.
      name, default: name and default of the dataclass field that declares the parameter.
    """

    kind: Kind
    help: str
    aliases: tuple[str, ...] = ()
    optional: bool = False
    zero_is_none: bool = False
    idle: tuple[Any, ...] = ()
    compiled: bool | Requirement = False
    variant: bool = False
    general: Any = None
    in_loop: bool = False
    off: Any = None
    requires: tuple[Requirement, ...] = ()
    variable_length: bool | None = None
    mode: bool = False
    exposed: bool = True
    from_model: bool = False
    flag_default: Any = None
    flag_help: str = ""
    in_checkpoint: str = ""
    http: str | None = ""
    name: str = ""
    default: Any = None

    def read(self, value: Any) -> Any:
        """Check a value and return it as the corresponding Python type.

        Raises:
          ParameterError: the value has the wrong type, or is out of bounds.
        """
        return None if value is None and self.optional else self.kind.read(self.name, value)

    def from_request(self, value: Any) -> Any:
        """Translate the value of a flag or a request: 0 becomes None if ``zero_is_none``. The value is not checked."""
        return None if self.zero_is_none and type(value) is int and value == 0 else value

    def is_compiled(self, config: Any) -> bool:
        """Return whether the value of a configuration is part of its compiled program."""
        if isinstance(self.compiled, Requirement):
            return self.compiled.met(config)
        return self.compiled or (self.variant and getattr(config, self.name) != self.default)

    def applies(self, config: Any) -> bool:
        """Return whether the other settings of a configuration let the parameter have an effect."""
        return all(one.when_given or one.met(config) for one in self.requires)

    @property
    def http_name(self) -> str:
        """Name of the field in the body of an HTTP request."""
        return self.http or self.name


def parameter(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    """Declare a field of a configuration. ``more`` sets further attributes of :class:`Parameter`."""
    return dataclasses.field(default=default, metadata={_KEY: Parameter(kind, help, **more)})


def same_as(config: type, name: str) -> Any:
    """Declare a field exactly like the field ``name`` of another configuration class."""
    (found,) = (one for one in dataclasses.fields(config) if one.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)


def declared_parameters(config: type) -> tuple[Parameter, ...]:
    """Return the parameters that a configuration class declares, one per field."""
    return tuple(
        dataclasses.replace(field.metadata[_KEY], name=field.name, default=field.default)
        for field in dataclasses.fields(config)
    )


def exposed_parameters(*configs: type) -> dict[str, Parameter]:
    """Return, by name, the parameters that flags, batch lines and HTTP requests can set.

    If several configuration classes declare a parameter of the same name, the first declaration is used.
    """
    found: dict[str, Parameter] = {}
    for config in configs:
        for one in declared_parameters(config):
            if one.exposed and not one.from_model:
                found.setdefault(one.name, one)
    return found


def validate(config: Any) -> None:
    """Check every field of a configuration, and convert each value to the corresponding Python type in place.

    Raises:
      ParameterError: a value has the wrong type, is out of bounds, or conflicts with another parameter.
    """
    declared = declared_parameters(type(config))
    for one in declared:
        object.__setattr__(config, one.name, one.read(getattr(config, one.name)))
    for one in declared:
        value = getattr(config, one.name)
        if value != one.default and value not in one.idle:
            _check_requirements(one, config, when_given=False)


def check_given(config: Any, names: Iterable[str]) -> None:
    """Check that every parameter that a caller set explicitly has an effect, even if it was set to its default.

    Raises:
      ParameterError: a given parameter has no effect in this configuration.
    """
    given = set(names)
    for one in declared_parameters(type(config)):
        if one.name in given and getattr(config, one.name) not in one.idle:
            _check_requirements(one, config, when_given=True)
            if one.variable_length is False and config.variable_length:
                raise ParameterError(one.name, "is not available for models whose canvas changes its length")


def _check_requirements(one: Parameter, config: Any, when_given: bool) -> None:
    for requirement in one.requires:
        if requirement.when_given == when_given and not requirement.met(config):
            raise ParameterError(one.name, "requires", requirement)


def dependents(config: type, name: str) -> Sequence[Parameter]:
    """Return the parameters that have an effect only with certain values of the parameter ``name``."""
    return [
        one
        for one in declared_parameters(config)
        if any(requirement.field == name and not requirement.when_given for requirement in one.requires)
    ]
