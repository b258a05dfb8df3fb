"""The schema of decoding parameters: what a parameter is, and how a value is checked against it.

A field of a configuration is declared once, by :func:`parameter`: type, bounds, default, help, aliases, and whether its
value is compiled into the program. Validation, command-line flags, lines of a batch, bodies of HTTP requests, OpenAPI,
modes of a server and the table in the README derive from these declarations.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharding.errors import InputError

_KEY = "parameter"
# Characters of a wrong value that an error repeats.
_SHOWN = 80


@dataclass(frozen=True)
class Requirement:
    """A setting of another parameter that a parameter needs.

    Attributes:
      field: the other parameter.
      values: those of its values that will do.
      when_given: checked only if a caller gives the parameter explicitly; an inherited value is ignored instead.
    """

    field: str
    values: tuple[str, ...]
    when_given: bool = False

    def met(self, config: Any) -> bool:
        """Whether a configuration has the setting."""
        return getattr(config, self.field) in self.values

    def spelled(self, spell: Callable[[str], str] = str) -> str:
        """The setting in words, such as ``cache=dual or cache=prefix``; ``spell`` writes the name of a parameter."""
        return " or ".join(f"{spell(self.field)}={value}" for value in self.values)


class ParameterError(InputError):
    """A decoding parameter whose value is wrong, or does not go with another one.

    Attributes:
      field: name of the parameter.
      problem: what is wrong with it, the rest of the sentence that its name begins.
      requirement: the setting that it needs, where that is what is wrong.
    """

    def __init__(self, field: str, problem: str, requirement: Requirement | None = None) -> None:
        self.problem, self.requirement = problem, requirement
        super().__init__(self._sentence(field, str), field=field)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The sentence with names of parameters as ``spell`` writes them: flags, or fields of a request."""
        return self._sentence(self.field or "", spell)

    def _sentence(self, field: str, spell: Callable[[str], str]) -> str:
        needs = "" if self.requirement is None else f" {self.requirement.spelled(spell)}"
        return f"{spell(field)} {self.problem}{needs}"


def _wrong(name: str, value: Any, expected: str) -> ParameterError:
    return ParameterError(name, f"is {value!r:.{_SHOWN}}; expected {expected}")


def plain_number(value: float) -> str:
    """A number as people write it: 1000000 and 0.00001, not 1e+06 and 1e-05, unless it is very large or very small."""
    if value and not 1e-9 <= abs(value) < 1e16:
        return f"{value:g}"
    return str(np.format_float_positional(value, trim="-"))


@dataclass(frozen=True)
class Integer:
    """An integer from ``low`` to ``high``, both allowed."""

    low: int
    high: int

    @property
    def expected(self) -> str:
        """The values in words."""
        return f"an integer from {self.low} to {self.high}"

    def read(self, name: str, value: Any) -> int:
        """The value as Python's own, numbers of NumPy too.

        Raises:
          ParameterError: it is none of these values.
        """
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise _wrong(name, value, self.expected)
        if not self.low <= int(value) <= self.high:
            raise _wrong(name, value, self.expected)
        return int(value)

    def parse(self, text: str) -> Any:
        """The number that a text says, or the text itself, which :meth:`read` refuses."""
        return _number(int, text)


@dataclass(frozen=True)
class Real:
    """A finite number from ``low`` to ``high``.

    Attributes:
      low, high: bounds.
      exclusive: the bounds themselves are not allowed.
      smallest: the smallest number beside 0.
    """

    low: float
    high: float
    exclusive: bool = False
    smallest: float = 0.0

    @property
    def expected(self) -> str:
        """The values in words."""
        if self.exclusive:
            return f"a number between {plain_number(self.low)} and {plain_number(self.high)}, both excluded"
        if self.smallest:
            return f"0, or a number from {plain_number(self.smallest)} to {plain_number(self.high)}"
        return f"a number from {plain_number(self.low)} to {plain_number(self.high)}"

    def read(self, name: str, value: Any) -> float:
        """The value as Python's own, numbers of NumPy too.

        Raises:
          ParameterError: it is none of these values.
        """
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise _wrong(name, value, self.expected)
        number = float(value)
        inside = self.low < number < self.high if self.exclusive else self.low <= number <= self.high
        if not inside or 0.0 < number < self.smallest:
            raise _wrong(name, value, self.expected)
        return number

    def parse(self, text: str) -> Any:
        """The number that a text says, or the text itself, which :meth:`read` refuses."""
        return _number(float, text)


@dataclass(frozen=True)
class Choice:
    """One of a few names."""

    choices: tuple[str, ...]

    @property
    def expected(self) -> str:
        """The values in words."""
        return f"one of {', '.join(self.choices)}"

    def read(self, name: str, value: Any) -> str:
        """The value.

        Raises:
          ParameterError: it is none of these names.
        """
        if not isinstance(value, str) or value not in self.choices:
            raise _wrong(name, value, self.expected)
        return value

    def parse(self, text: str) -> str:
        """The text."""
        return text


@dataclass(frozen=True)
class Boolean:
    """True or false."""

    expected = "true or false"

    def read(self, name: str, value: Any) -> bool:
        """The value as Python's own, NumPy's too.

        Raises:
          ParameterError: it is neither.
        """
        if not isinstance(value, (bool, np.bool_)):
            raise _wrong(name, value, self.expected)
        return bool(value)

    def parse(self, text: str) -> Any:
        """The value that a text says, or the text itself, which :meth:`read` refuses."""
        return {"true": True, "false": False}.get(text, text)


@dataclass(frozen=True)
class Seeds:
    """One seed for a batch, or one per row; a request of a server or a line of a batch has one."""

    seed: Integer

    @property
    def expected(self) -> str:
        """The values in words."""
        return f"{self.seed.expected}, or one per row"

    def read(self, name: str, value: Any) -> int | tuple[int, ...]:
        """The seed, or the seeds.

        Raises:
          ParameterError: they are none.
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
        """A seed, seeds separated by commas, or the text itself, which :meth:`read` refuses."""
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
        """The values in words."""
        return f"at most {self.count} token ids"

    def read(self, name: str, value: Any) -> tuple[int, ...]:
        """The ids.

        Raises:
          ParameterError: they are none, or too many.
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
        """The ids that a text has between commas, or the text itself, which :meth:`read` refuses."""
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
      kind: type and bounds.
      help: what it does, in a sentence or two.
      aliases: other names for it in lines of a batch and bodies of requests.
      optional: None is a valid value.
      zero_is_none: flags and requests write 0 for None.
      idle: values that, like the default, have no effect and so no requirements.
      compiled: its value is part of the compiled program, always or with that setting of another parameter; otherwise
        it is a run-time argument of each row.
      requires: settings of other parameters without which it has no effect.
      mode: a server's ``--mode`` can set it.
      exposed: flags and requests can set it, not only Python.
      flag_default: the flag's value when it is not given; None leaves the value to the preset and the checkpoint.
      flag_help: what the flag's help says after ``help``.
      in_checkpoint: its key in a checkpoint's ``generation_config.json``; empty if it has none.
      http: its name in bodies of HTTP requests; empty for its own name, None if OpenAI's request formats define it.
      name, default: of the field that declares it.
    """

    kind: Kind
    help: str
    aliases: tuple[str, ...] = ()
    optional: bool = False
    zero_is_none: bool = False
    idle: tuple[Any, ...] = ()
    compiled: bool | Requirement = False
    requires: tuple[Requirement, ...] = ()
    mode: bool = False
    exposed: bool = True
    flag_default: Any = None
    flag_help: str = ""
    in_checkpoint: str = ""
    http: str | None = ""
    name: str = ""
    default: Any = None

    def read(self, value: Any) -> Any:
        """The value, checked, as Python's own type.

        Raises:
          ParameterError: it is out of bounds or of another type.
        """
        return None if value is None and self.optional else self.kind.read(self.name, value)

    def from_request(self, value: Any) -> Any:
        """The value that a flag or a request means, not yet checked: None for 0 where there is no other way."""
        return None if self.zero_is_none and type(value) is int and value == 0 else value

    @property
    def http_name(self) -> str:
        """Its name in bodies of HTTP requests."""
        return self.http or self.name


def parameter(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    """A field of a configuration: its default, and the other attributes of :class:`Parameter`."""
    return dataclasses.field(default=default, metadata={_KEY: Parameter(kind, help, **more)})


def same_as(config: type, name: str) -> Any:
    """A field that is declared as in another configuration."""
    (found,) = (one for one in dataclasses.fields(config) if one.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)


def declared_parameters(config: type) -> tuple[Parameter, ...]:
    """The parameters of a kind of configuration, one for each of its fields."""
    return tuple(
        dataclasses.replace(field.metadata[_KEY], name=field.name, default=field.default)
        for field in dataclasses.fields(config)
    )


def exposed_parameters(*configs: type) -> dict[str, Parameter]:
    """What flags, lines of a batch and bodies of requests can set, by name.

    Where several kinds of configuration have a parameter, the declaration of the first one is used.
    """
    found: dict[str, Parameter] = {}
    for config in configs:
        for one in declared_parameters(config):
            if one.exposed:
                found.setdefault(one.name, one)
    return found


def validate(config: Any) -> None:
    """Check every field of a configuration, and set it to its value as Python's own type.

    Raises:
      ParameterError: a value out of bounds or of another type, or one that another parameter rules out.
    """
    declared = declared_parameters(type(config))
    for one in declared:
        object.__setattr__(config, one.name, one.read(getattr(config, one.name)))
    for one in declared:
        value = getattr(config, one.name)
        if value != one.default and value not in one.idle:
            _check_requirements(one, config, when_given=False)


def check_given(config: Any, names: Iterable[str]) -> None:
    """Check parameters that a caller has given explicitly, also to their defaults, against the other ones.

    Raises:
      ParameterError: one that does nothing in this configuration.
    """
    given = set(names)
    for one in declared_parameters(type(config)):
        if one.name in given and getattr(config, one.name) not in one.idle:
            _check_requirements(one, config, when_given=True)


def _check_requirements(one: Parameter, config: Any, when_given: bool) -> None:
    for requirement in one.requires:
        if requirement.when_given == when_given and not requirement.met(config):
            raise ParameterError(one.name, "requires", requirement)


def dependents(config: type, name: str) -> Sequence[Parameter]:
    """The parameters that have a meaning only with some settings of the one that is named."""
    return [
        one
        for one in declared_parameters(config)
        if any(requirement.field == name and not requirement.when_given for requirement in one.requires)
    ]
