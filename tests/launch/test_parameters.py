"""Every decoding parameter exists as a flag, in batch lines, bodies, OpenAPI, modes and the documented table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from pydantic import ValidationError

from checkpoints import DEMO, open_folder
from launch.docs import parameter_table
from launch.flags.decoding import decoding_config, define_decoding_flags, draft_notice
from launch.flags.model import read_tokenizer
from launch.flags.server import read_modes
from launch.openai.answers import logprobs
from launch.openai.bodies import Defaults, by_our_names, known, read_config
from launch.serving.app import Application
from launch.serving.bodies import ChatBody, CompletionBody
from launch.serving.errors import from_input_error
from launch.serving.reading import Mode, describe, not_offered
from runtime import DiffusionConfig, RendererStartError, SamplingConfig, can_run
from runtime.decoding.kinds import Boolean, Choice
from runtime.decoding.parameters import AUTOREGRESSIVE_PARAMETERS, EXPOSED_PARAMETERS
from runtime.decoding.schema import Parameter, declared_parameters
from runtime.models.families import parse_config
from runtime.planner.presets import preset
from sharding.errors import InputError

ROOT = Path(__file__).parents[2]
FOLDER = open_folder(str(DEMO))
MODEL = parse_config(FOLDER.config)

# Names of flags and their defaults, on which users rely.
FLAGS = {
    "preset": "published",
    "max_new_tokens": None,
    "steps": None,
    "algorithm": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "alg_temp": None,
    "eps": None,
    "seed": "0",
    "confidence_dtype": "float32",
    "suppress_mask": False,
    "log_probabilities": False,
    "block_length": None,
    "sub_block_length": None,
    "sub_block_cache": False,
    "cache": None,
    "refresh_interval": None,
    "refresh_blocks": None,
    "suffix_window": None,
    "block_rule": None,
    "parallel": None,
    "threshold": None,
    "threshold_decay": None,
    "factor": None,
    "entropy_bound": None,
    "entropy_limit": None,
    "greedy": False,
    "cfg_scale": None,
    "draft_steps": None,
    "draft_axis": None,
    "prompt_lookup": None,
    "draft_tokens": None,
    "initial_masks": None,
    "number_transfer_tokens": None,
    "expand_budget": None,
    "pad_delete_to_right": False,
    "early_stop": True,
}
MODES = [
    *("algorithm", "confidence_dtype", "suppress_mask", "block_length", "sub_block_length", "sub_block_cache", "cache"),
    *("refresh_interval", "refresh_blocks", "suffix_window", "block_rule", "parallel", "threshold", "threshold_decay"),
    *("factor", "entropy_bound", "entropy_limit", "greedy", "cfg_scale", "initial_masks", "number_transfer_tokens"),
    *("expand_budget", "pad_delete_to_right", "early_stop"),
]
# Those of them that are not compiled in: without a cache, as here, the block length is not.
OF_EACH_REQUEST = {
    *("block_length", "sub_block_length", "refresh_interval", "threshold", "factor", "entropy_bound", "entropy_limit"),
    *("number_transfer_tokens", "expand_budget", "pad_delete_to_right", "early_stop"),
}


BODIES: dict[type[CompletionBody | ChatBody], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
}


def flag_values(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    define_decoding_flags(values)
    values(["x", *arguments])
    return values


def of_flags(*arguments: str) -> Any:
    return decoding_config(flag_values(*arguments), FOLDER, MODEL)


def defaults(*arguments: str) -> Defaults:
    return Defaults("demo", MODEL, read_tokenizer(FOLDER), of_flags(*arguments), True, (7,), 0, False, 1, ())


def other_value(one: Parameter) -> Any:
    """Return a value of a parameter other than its default."""
    if isinstance(one.kind, Choice):
        return next(value for value in one.kind.choices if value != one.default)
    if isinstance(one.kind, Boolean):
        return one.default is False
    return {"max_new_tokens": 5, "steps": 3, "refresh_blocks": 2, "factor": 0.5, "threshold": 0.25}.get(
        one.name, 0.5 if "Real" in type(one.kind).__name__ else 4
    )


def settings(one: Parameter, value: Any) -> dict[str, Any]:
    """Return the value together with the settings that it requires."""
    return {one.name: value} | {needed.field: needed.values[0] if needed.values else 4 for needed in one.requires}


def test_flags_are_those_that_users_know() -> None:
    values = flag_values()
    assert {name: values[name].value for name in values} == FLAGS
    for name, one in EXPOSED_PARAMETERS.items():
        if isinstance(one.kind, Choice):
            assert tuple(values[name].parser.enum_values) == one.kind.choices
        assert one.help[1:] in values[name].help
        assert ("Diffusion: " in values[name].help) == (name not in AUTOREGRESSIVE_PARAMETERS)
        assert ("Autoregressive: " in values[name].help) == (name in ("prompt_lookup", "draft_tokens"))


@pytest.mark.parametrize("name", [name for name in EXPOSED_PARAMETERS if hasattr(DiffusionConfig, name)])
def test_a_parameter_by_flag_by_line_and_by_body(name: str) -> None:
    one = EXPOSED_PARAMETERS[name]
    value = other_value(one)
    said = settings(one, value)
    config = of_flags(*[f"--{key}={str(given).lower()}" for key, given in said.items()])
    assert getattr(config, name) == value
    if name != "seed":  # requests set their own
        for spelled in (name, *one.aliases):
            written = {spelled if key == name else key: given for key, given in said.items()}
            body = by_our_names(written)
            assert known(body) == body
            for kind, own in BODIES.items():
                if (kind, spelled) != (CompletionBody, "logprobs"):  # a number there, as in OpenAI's format
                    assert by_our_names(kind.model_validate(own | written).decoding()) == own | body
            assert getattr(read_config(body, defaults()), name) == value


def test_the_preset_of_fast_dllm() -> None:
    config = of_flags("--preset=fast-dllm", "--block_length=16", "--max_new_tokens=48")
    assert config == DiffusionConfig.fast_dllm(48, block_length=16, early_stop=True)
    scheduled = of_flags("--preset=fast-dllm", "--parallel=none", "--cache=prefix")
    assert (scheduled.steps, scheduled.cache, scheduled.block_rule) == (64, "prefix", "fast_dllm")
    with pytest.raises(InputError, match="block_rule requires --cache=dual or --cache=prefix"):
        of_flags("--preset=fast-dllm", "--cache=none")


def test_bodies_and_their_document_have_every_parameter() -> None:
    schemas = Application("1").openapi()["components"]["schemas"]
    for name, one in EXPOSED_PARAMETERS.items():
        for kind in (CompletionBody, ChatBody):
            spelled = "logprobs" if name == "log_probabilities" else one.http_name
            assert spelled in kind.model_fields
            assert spelled in schemas[kind.__name__]["properties"]
            if one.http is not None:
                assert schemas[kind.__name__]["properties"][spelled]["description"] == one.help


def test_an_autoregressive_model_has_cache_none_everywhere() -> None:
    """``cache=none`` means ``use_cache=False`` in requests and modes, as in flags; other caches are refused."""
    own, plain = dataclasses.replace(defaults(), config=SamplingConfig()), SamplingConfig(use_cache=False)
    assert read_config({"cache": "none"}, own) == plain
    assert read_modes(["cache=none"], own)[1] == plain
    with pytest.raises(InputError, match="cache: not supported by this checkpoint, which is autoregressive"):
        read_config({"cache": "dual"}, own)
    assert describe([plain, own.config]) == ["cache=none", "the defaults"]
    assert not_offered(plain, [Mode(own.config, 0)]) == "cache"


def test_a_request_may_name_drafts_where_there_are_none() -> None:
    """The value is an upper bound, so it is ignored where a pass has no drafts. Its own bounds are checked."""
    growing = dataclasses.replace(
        defaults(), config=DiffusionConfig(8, variable_length=True), model=preset("dreamon-7b")
    )
    assert read_config({"draft_steps": 3}, growing) == growing.config
    with pytest.raises(InputError, match="draft_steps is 64; expected an integer from 0 to 63"):
        read_config({"draft_steps": 64}, growing)
    for cache, drafts in (("exact", 0), ("dual", 3), ("prefix", 3), ("none", 3)):
        found = read_config({"cache": cache, "draft_steps": 3}, defaults())
        assert isinstance(found, DiffusionConfig)
        assert found.drafts == drafts


def test_a_run_without_drafts_says_so() -> None:
    (said,) = draft_notice(of_flags("--cache=dual", "--refresh_interval=1", "--draft_steps=2"))
    assert said == "--draft_steps=2 has no effect with --refresh_interval=1: every step is a refresh"
    assert draft_notice(of_flags("--cache=dual", "--refresh_interval=2", "--draft_steps=2")) == []
    assert draft_notice(of_flags("--cache=dual", "--refresh_interval=1")) == []
    assert draft_notice(of_flags("--cache=dual", "--draft_steps=auto")) == []
    (said,) = draft_notice(SamplingConfig(use_cache=False, prompt_lookup=2))
    assert said == "--prompt_lookup=2 has no effect with --cache=none: every pass computes whole rows"
    (said,) = draft_notice(SamplingConfig(use_cache=False, draft_tokens=3))
    assert said == "--draft_tokens=3 has no effect with --cache=none: every pass computes whole rows"
    assert draft_notice(SamplingConfig(prompt_lookup=2)) == draft_notice(SamplingConfig(use_cache=False)) == []


def test_drafts_by_a_number_or_auto() -> None:
    one, growing = EXPOSED_PARAMETERS["draft_steps"], DiffusionConfig(8, variable_length=True)
    assert of_flags("--draft_steps=auto").draft_steps == "auto"
    assert of_flags("--draft_steps=12").draft_steps == 12
    assert read_config({"draft_steps": "auto"}, defaults()).draft_steps == "auto"
    own_defaults = dataclasses.replace(defaults(), config=growing, model=preset("dreamon-7b"))
    assert read_config({"draft_steps": "auto"}, own_defaults) == growing
    assert can_run(DiffusionConfig(draft_steps="auto"), DiffusionConfig(draft_steps=3))
    for kind in (CompletionBody, ChatBody):
        own: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if kind is ChatBody else {"prompt": "a"}
        for value in ("auto", 0, 63):
            assert kind.model_validate({**own, "draft_steps": value}).decoding()["draft_steps"] == value
        for value in ("none", -1, 64, 1.5, True):
            with pytest.raises(ValidationError, match="draft_steps"):
                kind.model_validate({**own, "draft_steps": value})
    schema = Application("1").openapi()["components"]["schemas"]["CompletionBody"]["properties"]["draft_steps"]
    assert {"const": "auto", "type": "string"} in schema["anyOf"]
    assert one.kind.expected == "an integer from 0 to 63, or auto"


def test_modes_set_what_a_mode_can() -> None:
    assert [name for name, one in EXPOSED_PARAMETERS.items() if one.mode] == MODES
    for name in MODES:
        value = other_value(EXPOSED_PARAMETERS[name])
        text = ",".join(
            f"{key}={str(given).lower()}" for key, given in settings(EXPOSED_PARAMETERS[name], value).items()
        )
        if name in OF_EACH_REQUEST:
            with pytest.raises(InputError, match=f"{name} is set in each request"):
                read_modes([text], defaults())
        else:
            assert getattr(read_modes([text], defaults())[1], name) == value
    # What is the default of every request may be repeated.
    assert read_modes(["parallel=threshold,threshold=0.9"], defaults("--threshold=0.9"))[1].threshold == 0.9
    for text in ("steps=4", "seed=1", "cache", "preset=class"):
        with pytest.raises(InputError, match=f"--mode={text}: expected name=value"):
            read_modes([text], defaults())


def test_the_table_of_the_readme() -> None:
    readme = (ROOT / "launch" / "README.md").read_text("utf-8")
    assert parameter_table.write(readme) == readme, "python -m launch.docs.parameter_table launch/README.md"
    for config in (DiffusionConfig, SamplingConfig):
        for one in declared_parameters(config):
            assert (f"| `{one.name}`" in readme) == (not one.from_model)
    with pytest.raises(InputError, match="decoding parameters"):
        parameter_table.write("nothing")


@pytest.mark.parametrize(
    ("arguments", "said", "field"),
    [
        (["--refresh_interval=4"], "--refresh_interval requires --cache=dual or --cache=prefix", "refresh_interval"),
        (["--threshold=0.5"], "--threshold requires --parallel=threshold", "threshold"),
        (["--parallel=factor", "--steps=4"], "--steps requires --parallel=none", "steps"),
        (
            ["--draft_steps=many"],
            "--draft_steps=many: expected an integer from 0 to 63, or auto",
            "draft_steps",
        ),
        (
            ["--draft_steps=64"],
            "--draft_steps is 64; expected an integer from 0 to 63, or auto",
            "draft_steps",
        ),
        (["--steps=0"], "--steps is 0; expected an integer from 1 to 65536", "steps"),
        (["--seed=1,-2"], "--seed=1,-2: expected an integer from 0 to 9223372036854775807, or one per row", "seed"),
    ],
)
def test_errors_of_flags_are_about_flags(arguments: list[str], said: str, field: str) -> None:
    with pytest.raises(InputError) as found:
        of_flags(*arguments)
    assert (str(found.value), found.value.field) == (said, field)


@pytest.mark.parametrize(
    ("changes", "said", "param"),
    [
        ({"refresh_blocks": 4}, "refresh_blocks requires cache=dual or cache=prefix", "refresh_blocks"),
        ({"max_new_tokens": -1}, "max_tokens is -1; expected an integer from 0 to 1048576", "max_tokens"),
        ({"parallel": "factor", "eps": 0.5}, "eps requires parallel=none", "eps"),
        (
            {"log_probabilities": 3},
            "logprobs is 3; expected true, false, or 0: alternative tokens are not supported",
            "logprobs",
        ),
    ],
)
def test_errors_of_requests_name_the_field_of_the_body(changes: dict[str, Any], said: str, param: str) -> None:
    with pytest.raises(InputError) as found:
        read_config(changes, defaults())
    error = from_input_error(found.value).body()["error"]
    assert (error["message"], error["param"]) == (said, param)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"algorithm": "entropy"}, "algorithm"),
        ({"cache": "dual"}, "cache"),
        ({"cache": "prefix", "block_length": 8}, "cache"),
        ({"cache": "dual", "parallel": "threshold", "block_length": 16}, "block_length"),
        ({"cache": "dual", "parallel": "threshold", "block_length": 8, "refresh_blocks": 4}, "refresh_blocks"),
        ({"cfg_scale": 1.5}, "cfg_scale"),
    ],
)
def test_a_mode_that_is_not_offered_names_a_parameter(changes: dict[str, Any], field: str) -> None:
    modes = [
        Mode(config, number)
        for number, config in enumerate(
            [DiffusionConfig(), DiffusionConfig(cache="dual", parallel="threshold", block_length=8)]
        )
    ]
    config = DiffusionConfig(**changes)
    assert not any(can_run(mode.config, config) for mode in modes)
    assert not_offered(config, modes) == field


def test_what_a_library_says_is_left_out() -> None:
    error = InputError("not JSON (really)", field="body", detail="Expecting value: line 1")
    assert str(error) == "not JSON (really) (Expecting value: line 1)"
    said = from_input_error(error)
    assert (said.message, said.param) == ("not JSON (really)", "body")


def test_a_block_length_that_a_block_causal_server_was_not_compiled_for() -> None:
    """The attention mask depends on it. A mode with the same blocks can decode it."""
    own, other = (
        DiffusionConfig(cache="exact", algorithm="maskgit_plus", block_length=length, attention_block_length=length)
        for length in (4, 8)
    )
    assert not_offered(other, [Mode(own, 0)]) == "block_length"
    assert [can_run(mode, other) for mode in (own, other)] == [False, True]


def test_a_renderer_that_cannot_start_is_not_the_client_s_error() -> None:
    said = from_input_error(RendererStartError("cannot start the process (Resource temporarily unavailable)"))
    assert said.status == 503
    assert "Resource" not in said.message


def test_another_cache_or_rule_starts_without_what_belonged_to_the_last() -> None:
    start = defaults("--cache=dual", "--refresh_interval=8", "--parallel=threshold", "--threshold=0.5")
    changed = read_config({"cache": "prefix", "parallel": "none"}, start)
    assert isinstance(changed, DiffusionConfig)
    assert (changed.cache, changed.refresh_interval, changed.parallel, changed.threshold) == (
        "prefix",
        None,
        "none",
        0.9,
    )
    assert read_config({"cache": "dual"}, start) == start.config
    drawn = read_config({"parallel": "factor", "factor": 2.0}, defaults("--alg_temp=0.5"))
    assert isinstance(drawn, DiffusionConfig)
    assert (drawn.alg_temp, drawn.factor) == (None, 2.0)


def test_a_new_parameter_is_one_field(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.launch.one_more_parameter", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["flag"], found["default"]) == (5, 3)
    assert found["lines"] == [5, 6]
    assert found["bad"] == ["patience is 10; expected an integer from 1 to 9"]
    assert found["body"] == {"prompt": "x", "patience": 5}
    assert found["openapi"] == [{"type": "integer", "minimum": 1, "maximum": 9}] * 2
    assert len(found["table"]) == 1
    assert "| yes | `parallel=threshold` | Steps to wait. |" in found["table"][0]
    assert "patience=7" in found["mode"]
    # The rows' own values, of which the second stands for None.
    assert found["loop"] == [[7, 0.75, 0.25]] * 2
    assert found["flag error"] == ["--patience requires --parallel=threshold", "patience"]
    assert found["http error"]["param"] == found["body error"]["param"] == "patience"
    assert found["body error"]["message"] == "patience: Input should be less than or equal to 9"


def test_no_top_k_as_vllm_writes_it() -> None:
    for value in (0, -1):
        assert of_flags(f"--top_k={value}").top_k is None
        assert read_config({"top_k": value}, defaults("--top_k=5")).top_k is None
    with pytest.raises(InputError, match="--top_k is -2; expected an integer from 1"):
        of_flags("--top_k=-2")


def test_a_name_that_is_null_is_absent() -> None:
    for body in ({"max_tokens": 5, "max_completion_tokens": None}, {"max_completion_tokens": None, "max_tokens": 5}):
        assert by_our_names(body) == {"max_new_tokens": 5}
    assert by_our_names({"max_tokens": 5, "max_completion_tokens": 5}) == {"max_new_tokens": 5}
    said = "max_new_tokens is set twice, as max_tokens and as max_completion_tokens, to different values"
    for value in (6, 5.0, True):
        with pytest.raises(InputError, match=said) as found:
            by_our_names({"max_tokens": 5, "max_completion_tokens": value})
        answer = from_input_error(found.value)
        assert (answer.message, answer.param) == (said.replace("max_new_tokens", "max_tokens"), "max_tokens")


def test_bytes_of_tokens_that_are_a_part_of_a_character() -> None:
    """Clients join the bytes of tokens; null says that a token's bytes are not known."""
    tokenizer = read_tokenizer(FOLDER)
    tokens = tokenizer.encode("x = 'é🙂'")
    content = logprobs(tokenizer, tokens, [0.0] * len(tokens), chat=True)["content"]
    assert b"".join(bytes(one["bytes"]) for one in content if one["bytes"] is not None) == b"x = ''"
    assert [one["bytes"] is None for one in content] == ["\ufffd" in one["token"] for one in content]
    assert any(one["bytes"] is None for one in content)
