"""The schema of decoding parameters: values, requirements, and compiled parameters."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from runtime import DiffusionConfig, SamplingConfig
from runtime.decoding.compatibility import can_run, compiled_values
from runtime.decoding.kinds import (
    Boolean,
    Choice,
    Integer,
    IntegerOrWord,
    ParameterError,
    Real,
    Requirement,
    Seeds,
    TokenIds,
)
from runtime.decoding.parameters import AUTOREGRESSIVE_PARAMETERS, EXPOSED_PARAMETERS
from runtime.decoding.schema import change_settings, check_given, declared_parameters, dependents
from runtime.execution.specialization import generalized

KINDS: list[tuple[Any, list[Any], list[Any]]] = [
    (Integer(0, 5), [0, 5, np.int32(3)], [-1, 6, True, 1.0, "1", None, 10**30]),
    (IntegerOrWord(Integer(0, 5), "auto"), [0, 5, "auto", np.int32(3)], [-1, 6, True, 1.0, "1", "automatic", None]),
    (Real(0.0, 1.0), [0, 1, 0.5, np.float32(0.25)], [-0.1, 1.1, True, "1", float("nan"), float("inf"), None]),
    (Real(0.0, 1.0, exclusive=True), [0.5], [0, 1, 0.0, 1.0]),
    (Real(0.0, 9.0, smallest=0.1), [0, 0.1, 9], [0.09, 1e-300]),
    (Choice(("a", "b")), ["a", "b"], ["c", "", None, 0, ["a"]]),
    (Boolean(), [True, False, np.bool_(True)], [0, 1, "true", None]),
    (Seeds(Integer(0, 9)), [0, [1, 2], np.array([3, 4])], [-1, 1.5, "7", [1, -2], None, True, np.array(1.5)]),
    (TokenIds(2, 9), [(), [1, 2], np.array([3])], [[1, 2, 3], [-1], [10], 5, "12"]),
]


@pytest.mark.parametrize(("kind", "right", "wrong"), KINDS, ids=lambda value: str(value)[:30])
def test_values(kind: Any, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        read = kind.read("x", value)
        assert type(read) in (int, float, str, bool, tuple), "Python's own"
        np.testing.assert_array_equal(read, value)
    for value in wrong:
        with pytest.raises(ParameterError, match=r"^x ") as found:
            kind.read("x", value)
        assert found.value.field == "x"
        assert len(str(found.value)) < 300


def test_values_that_no_float_holds_or_python_cannot_print_are_wrong() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    huge = 10**5000  # more digits than Python prints
    for kind, *_ in KINDS:
        for value in (10**400, -(10**400), Fraction(10**400), huge, Fraction(huge), nested, [10**400], [huge]):
            with pytest.raises(ParameterError, match=r"^x ") as found:
                kind.read("x", value)
            assert len(str(found.value)) < 300
    with pytest.raises(ParameterError, match="is of type int and too long; expected an integer from 0 to 5"):
        Integer(0, 5).read("x", huge)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Integer(0, 5), "4", 4),
        (Integer(0, 5), "4.5", "4.5"),
        (IntegerOrWord(Integer(0, 5), "auto"), "4", 4),
        (IntegerOrWord(Integer(0, 5), "auto"), "auto", "auto"),
        (IntegerOrWord(Integer(0, 5), "auto"), "none", "none"),
        (Real(0, 1), "4", 4.0),
        (Real(0, 1), "four", "four"),
        (Choice(("a",)), "4", "4"),
        (Boolean(), "true", True),
        (Boolean(), "false", False),
        (Boolean(), "1", "1"),
        (Seeds(Integer(0, 9)), "7", 7),
        (Seeds(Integer(0, 9)), "7,8", [7, 8]),
        (Seeds(Integer(0, 9)), "7,", [7]),
        (Seeds(Integer(0, 9)), ",", ","),
        (Seeds(Integer(0, 9)), "7, 8", "7, 8"),
        (Seeds(Integer(0, 9)), "-1", "-1"),
        (TokenIds(2, 9), "1,2", [1, 2]),
        (TokenIds(2, 9), "1,x", "1,x"),
    ],
)
def test_texts(kind: Any, text: str, value: Any) -> None:
    parsed = kind.parse(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_an_error_spells_names_as_its_reader_does() -> None:
    with pytest.raises(ParameterError) as found:
        DiffusionConfig(refresh_interval=4)
    error = found.value
    assert error.field == "refresh_interval"
    assert str(error) == "refresh_interval requires cache=dual or cache=prefix"
    assert error.spelled(lambda name: f"--{name}") == "--refresh_interval requires --cache=dual or --cache=prefix"
    with pytest.raises(ParameterError) as found:
        DiffusionConfig(steps=0)
    assert found.value.spelled(lambda name: f"--{name}") == "--steps is 0; expected an integer from 1 to 65536"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"refresh_interval": 3}, "refresh_interval"),
        ({"refresh_blocks": 0}, "refresh_blocks"),
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": 0.5, "parallel": "factor"}, "threshold"),
        ({"factor": 2.0, "parallel": "threshold"}, "factor"),
        ({"alg_temp": 0.5, "parallel": "factor", "algorithm": "entropy"}, "alg_temp"),
    ],
)
def test_settings_that_need_another_one(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as found:
        DiffusionConfig(**changes)
    assert found.value.field == field
    # Values without effect have no requirements.
    DiffusionConfig(refresh_interval=None, refresh_blocks=1, threshold=0.9, alg_temp=0.0, parallel="factor")


def test_what_is_given_must_count() -> None:
    scheduled, ruled = DiffusionConfig(alg_temp=0.5), DiffusionConfig(parallel="threshold", alg_temp=0.0)
    check_given(scheduled, ["steps", "eps"])
    check_given(ruled, ["threshold", "alg_temp"])
    for config, name in ((ruled, "steps"), (ruled, "eps"), (scheduled, "alg_temp")):
        with pytest.raises(ParameterError) as found:
            check_given(config, [name])
        assert found.value.field == name


def test_requirements_name_parameters_and_their_values() -> None:
    for config in (DiffusionConfig, SamplingConfig):
        declared = {one.name: one for one in declared_parameters(config)}
        for one in declared.values():
            conditions = [*one.requires, *([one.compiled] if isinstance(one.compiled, Requirement) else [])]
            for requirement in conditions:
                other = declared[requirement.field]
                wanted = (4,) if requirement.values is None else requirement.values
                assert [other.read(value) for value in wanted] == [*wanted]
                if isinstance(other.kind, Choice):
                    assert set(requirement.values) < set(other.kind.choices)
    assert [one.name for one in dependents(DiffusionConfig, "cache")] == [
        "sub_block_cache",
        "refresh_interval",
        "refresh_blocks",
        "suffix_window",
        "block_rule",
        "cfg_scale",
        "draft_axis",
    ]


def test_settings_that_belong_to_a_replaced_value_go_with_it() -> None:
    config = DiffusionConfig(cache="dual", refresh_interval=3, parallel="threshold", threshold=0.5)
    assert change_settings(config, {"cache": "dual", "steps": 7}) == config.replace(steps=7)
    assert change_settings(config, {"cache": "prefix"}) == config.replace(cache="prefix")
    assert change_settings(config, {"cache": "none"}) == DiffusionConfig(parallel="threshold", threshold=0.5)
    assert change_settings(config, {"cache": "none", "parallel": "none"}) == DiffusionConfig()
    with pytest.raises(ParameterError, match="threshold requires"):
        change_settings(config, {"parallel": "none", "threshold": 0.7})


def test_defaults_are_values_and_names_are_unique() -> None:
    for config in (DiffusionConfig, SamplingConfig):
        for one in declared_parameters(config):
            assert one.read(one.default) == one.default
            assert one.help.endswith("."), one.name
    names = [name for one in EXPOSED_PARAMETERS.values() for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))
    assert set(AUTOREGRESSIVE_PARAMETERS) < set(EXPOSED_PARAMETERS)


def test_what_is_compiled_in() -> None:
    plain, dual = DiffusionConfig(), DiffusionConfig(cache="dual")
    assert compiled_values(plain) == {
        "algorithm": "origin",
        "confidence_dtype": "float32",
        "suppress_mask": False,
        "greedy": False,
        "cache": "none",
        "block_rule": "default",
        "parallel": "none",
    }
    assert compiled_values(dual) == compiled_values(plain) | {"cache": "dual", "block_length": 32, "refresh_blocks": 1}
    assert compiled_values(SamplingConfig(use_cache=False)) == {"use_cache": False}
    # Without a cache, the block length is a run-time argument.
    assert can_run(plain, plain.replace(block_length=8, steps=3, temperature=1.0, top_p=0.5, seed=4))
    assert can_run(dual, dual.replace(block_length=32, refresh_interval=4))
    for changes in ({"block_length": 8}, {"cache": "prefix"}, {"parallel": "factor"}, {"suppress_mask": True}):
        assert not can_run(dual, dual.replace(**changes))
    once = dual.replace(refresh_blocks=4)
    assert can_run(once, dual)
    assert can_run(once, dual.replace(refresh_blocks=0))
    assert not can_run(dual, once)
    prefix = dual.replace(cache="prefix")
    assert can_run(prefix, prefix.replace(refresh_blocks=4))
    assert not can_run(plain, SamplingConfig())
    # With block-causal attention, the mask is compiled in too.
    for cache in ("none", "exact"):
        four, eight = (plain.replace(cache=cache, block_length=n, attention_block_length=n) for n in (4, 8))
        assert can_run(four, four.replace(steps=3))
        assert not can_run(four, eight)
        assert not can_run(eight, four)
        assert compiled_values(eight)["block_length"] == 8
    # Programs with guidance also serve rows without guidance.
    guided = plain.replace(cfg_scale=1.5)
    assert can_run(guided, plain)
    assert can_run(guided, guided.replace(cfg_scale=0.5))
    assert not can_run(plain, guided)


def test_slots_are_compiled_for_general_values() -> None:
    general = {"temperature": 1.0, "top_p": 0.5, "top_k": 1, "log_probabilities": True}
    for config in (SamplingConfig(), DiffusionConfig(parallel="threshold"), DiffusionConfig(cache="dual")):
        positions = {"alg_temp": 1.0} if compiled_values(config).get("parallel") == "none" else {}
        assert generalized(config) == config.replace(**general, **positions)
        assert can_run(generalized(config), config)
        assert can_run(config, generalized(config))


@pytest.mark.parametrize("config", [DiffusionConfig, SamplingConfig])
def test_top_k_of_zero_keeps_all(config: type[DiffusionConfig | SamplingConfig]) -> None:
    assert config(top_k=0).top_k is config(top_k=-1).top_k is None
    assert config(top_k=1).replace(top_k=0) == config()
