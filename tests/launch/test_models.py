"""``diffumesh models`` prints the families' records, and the records match the tests."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from launch import models
from launch.main import LAUNCHERS
from runtime.models.config import Family
from runtime.models.families import FAMILIES, find_family
from tests import golden_cases
from tests.runtime.decoding import test_autoregressive


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    models.run(["models", "--json"])
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)["families"]
    return found


def family_of(golden: golden_cases.Golden) -> Family:
    return find_family(json.loads((golden.folder / "config.json").read_text()))


def test_the_records_say_how_many_golden_cases_there_are() -> None:
    counted: Counter[str] = Counter()
    for golden in golden_cases.golden_folders({}):
        counted[family_of(golden).name] += len(golden.cases)
    assert {family.name: family.golden_cases for family in FAMILIES} == {
        family.name: counted[family.name] for family in FAMILIES
    }
    assert counted.keys() <= {family.name for family in FAMILIES}


def test_the_records_name_the_code_that_made_the_golden_cases() -> None:
    """``made_with`` of a golden folder names transformers if the reference is transformers, as the code does."""
    seen = 0
    for golden in golden_cases.golden_folders({}):
        stored = json.loads((golden.folder / "cases.json").read_text())
        if isinstance(stored, dict):
            reference = "transformers" if "transformers" in stored["about"]["made_with"] else "original code"
            assert family_of(golden).reference == reference
            seen += 1
    assert seen >= 5
    # A family without golden cases is compared with transformers, by a test that runs it.
    for family in FAMILIES:
        if not family.golden_cases:
            assert family.reference == "transformers"
            assert any(name.startswith(family.model_type) for name in test_autoregressive.MODELS)


def test_json_has_every_family_preset_and_way_of_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert [one["model_type"] for one in found] == [family.model_type for family in FAMILIES]
    for one, family in zip(found, FAMILIES, strict=True):
        assert one["presets"] == list(family.presets)
        assert one["verification"] == {
            "reference": family.reference,
            "golden_cases": family.golden_cases,
            "summary": family.verified,
        }
        diffusion = family.objective == "masked_diffusion"
        ways = dict(one["decoding"])  # type: ignore[call-overload]
        parameters, suffix = ways.pop("parameters"), ways.pop("suffix")
        assert ways == {
            "schedule": family.schedule,
            "algorithm": list(family.algorithms),
            "parallel": list(family.parallel_rules) if diffusion else [],
            "cache": list(family.caches),
            "block_rule": list(family.block_rules) if diffusion else [],
            "guidance": family.guidance,
            "variable_length": family.variable_length,
        }
        assert ("sub_block_length" in parameters) == family.block_causal
        assert ("expand_budget" in parameters) == family.variable_length
        assert ("cfg_scale" in parameters) == family.guidance
        assert ("draft_steps" in parameters) == (diffusion and not family.variable_length)
        seen = {"dream": "canvas", "llada": "canvas", "dreamon": "canvas", "qwen2": "tokens", "qwen3": "tokens"}
        assert suffix == seen.get(family.name)


def test_dreamon_is_told_from_dream_by_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = [one for one in listed(capsys) if one["name"] == "dreamon"]
    assert (found["model_type"], found["config_key"], found["presets"]) == ("Dream", "expand_token_id", ["dreamon-7b"])
    assert found["decoding"]["cache"] == ["none"]  # type: ignore[index]
    models.run(["models"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Dream, with expand_token_id" in text
    assert "dreamon-7b" in text


def test_the_table_has_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert "models" in LAUNCHERS
    models.run(["models"])
    text = " ".join(capsys.readouterr().out.split())
    for family in FAMILIES:
        assert family.model_type in text
        for name in (*family.presets, *family.algorithms):
            assert name in text
