"""The schema of decoding parameters: how a parameter is declared, and how a value is checked against it.

Each field of a configuration is declared once, by :func:`parameter`: type, bounds, default, help, aliases, and whether
its value is compiled into the program. Everything else derives from these declarations: validation, command-line flags,
the fields of batch lines and HTTP requests, OpenAPI, server modes, and the table in the README.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.decoding.kinds import Kind, ParameterError, Requirement, Seeds, wrong_value
from runtime.models.config import Family

_KEY = "parameter"
ConfigT = TypeVar("ConfigT", bound=Any)


@dataclass(frozen=True)
class Parameter:
    """One decoding parameter.

    Attributes:
      kind: type and bounds of the value.
      help: what the parameter does, in a sentence or two.
      aliases: other names that batch lines and HTTP requests may use.
      optional: None is a valid value.
      zero_is_none: 0, or -1 as for vLLM, means None.
      count_of: what a number stands for in a request, where 0 means True and no other number is supported; empty if
        requests write true or false.
      idle: values that have no effect, besides the default. Requirements are not checked for them.
      compiled: whether the value is part of the compiled program. A :class:`Requirement` here means "only with that
        setting of another parameter". Otherwise the value is a run-time argument of each row.
      variant: there is one program for the default, and one for all other values, which runs the default too.
      general: value whose program also runs every other value, at little cost; slots are compiled for it.
      in_loop: the decoding loops read the value under the parameter's name: in the compiled settings if ``compiled`` is
        True, otherwise as an array with one value per row; see :mod:`runtime.decoding.loop_parameters`.
      off: value that stands for None in that array, and among compiled values.
      requires: settings of other parameters without which this one has no effect.
      offered: what a model's family has: a tuple of values, or whether it has values other than the default. None if
        every family has all values.
      variable_length: whether it is for models whose canvas changes its length, or for the others; None for both.
      mode: a server's ``--mode`` can set it.
      exposed: flags and requests can set it under its name. Otherwise only Python code can.
      given_as: name and value by which flags and requests set the value that is not the default, if that name is one
        that other models have; see :func:`own_names`.
      request_only: a server's flags do not set it, because every request has its own value.
      speed_only: the tokens do not depend on it, so it is not part of what identifies a batch run.
      from_model: the engine sets it from the model, so no caller does, and requests to one model never differ in it.
      flag_default: value of the flag when it is not given; None leaves the value to the preset and the checkpoint.
      flag_help: text that the flag's help adds after ``help``.
      in_checkpoint: key in a checkpoint's ``generation_config.json``; empty if there is none.
      http: field name in HTTP requests. Empty means ``name``; None means that OpenAI's request format already defines
        the field, under the first alias.
      name, default: name and default of the dataclass field that declares the parameter.
    """

    kind: Kind
    help: str
    aliases: tuple[str, ...] = ()
    optional: bool = False
    zero_is_none: bool = False
    count_of: str = ""
    idle: tuple[Any, ...] = ()
    compiled: bool | Requirement = False
    variant: bool = False
    general: Any = None
    in_loop: bool = False
    off: Any = None
    requires: tuple[Requirement, ...] = ()
    offered: Callable[[Family], tuple[Any, ...] | bool] | None = None
    variable_length: bool | None = None
    mode: bool = False
    exposed: bool = True
    given_as: tuple[str, Any] | None = None
    request_only: bool = False
    speed_only: bool = False
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
        if self.zero_is_none:
            value = self.from_request(value)
        return None if value is None and self.optional else self.kind.read(self.name, value)

    def from_request(self, value: Any) -> Any:
        """Translate the value of a flag or a request: 0 may mean None or True, and -1 None. Others are not checked.

        Raises:
          ParameterError: the value is neither a boolean nor 0, where 0 means True.
        """
        if self.zero_is_none and type(value) is int and value in (0, -1):
            return None
        if self.count_of and not isinstance(value, bool):
            if type(value) is not int or value != 0:
                raise wrong_value(self.name, value, f"true, false, or 0: {self.count_of} are not supported")
            return True
        return value

    @property
    def per_row(self) -> bool:
        """Whether the value differs per row, such as the seed, instead of being shared by a request's rows."""
        return isinstance(self.kind, Seeds)

    @property
    def request_kind(self) -> Kind:
        """Type and bounds of the value in a batch line, which has a single seed, or of one seed of an HTTP request."""
        return self.kind.seed if isinstance(self.kind, Seeds) else self.kind

    @property
    def request_name(self) -> str:
        """Name by which flags and requests set it; see ``given_as``."""
        return self.name if self.given_as is None else self.given_as[0]

    def spelled(self, value: Any) -> str:
        """Return a value as flags and requests write it, such as ``cache=none``."""
        if self.given_as is not None and value != self.default:
            value = self.given_as[1]
        return f"{self.request_name}={str(value).lower() if isinstance(value, bool) else value}"

    def values_of(self, family: Family) -> tuple[Any, ...] | None:
        """Return the values that the models of a family have; None if they have all."""
        found = True if self.offered is None else self.offered(family)
        if self.variable_length not in (None, family.variable_length):
            found = False
        if isinstance(found, bool):
            return None if found else (self.default,)
        return found

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
        return self.aliases[0] if self.http is None else self.http or self.name


def parameter(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    """Declare a field of a configuration. ``more`` sets further attributes of :class:`Parameter`."""
    return dataclasses.field(default=default, metadata={_KEY: Parameter(kind, help, **more)})


def same_as(config: type, name: str) -> Any:
    """Declare a field exactly like the field ``name`` of another configuration class."""
    (found,) = (one for one in dataclasses.fields(config) if one.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)


def declared_parameters(config: type) -> tuple[Parameter, ...]:
    """Return the parameters that a configuration class declares, one per field."""
    return _declared(config)


# Every request reads them, several times.
@functools.cache
def _declared(config: type) -> tuple[Parameter, ...]:
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


def own_names(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of flags or a request, with the names and values of this class for those set by ``given_as``."""
    found = dict(given)
    for one in declared_parameters(config):
        if one.given_as is not None and one.given_as in found.items():
            del found[one.given_as[0]]
            found[one.name] = not one.default
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


def change_settings(config: ConfigT, changes: Mapping[str, Any]) -> ConfigT:
    """Return a copy of a configuration with these fields changed.

    Parameters that the changes do not name, and that have no effect with one of the new values, get their defaults:
    published settings with a threshold can be changed to a rule without one.

    Raises:
      ParameterError: a value has the wrong type, is out of bounds, or conflicts with another parameter.
    """
    idle = {
        one.name: one.default
        for one in declared_parameters(type(config))
        for needed in one.requires
        if needed.field in changes and needed.values is not None and not needed.when_given
        if changes[needed.field] not in needed.values
    }
    return dataclasses.replace(config, **(idle | dict(changes)))


def dependents(config: type, name: str) -> Sequence[Parameter]:
    """Return the parameters that have an effect only with certain values of the parameter ``name``."""
    return [
        one
        for one in declared_parameters(config)
        if any(
            requirement.field == name and requirement.values is not None and not requirement.when_given
            for requirement in one.requires
        )
    ]
