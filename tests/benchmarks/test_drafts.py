"""The benchmark of drafts: a small run, its tables, the estimates from it, margins, and wrong flags."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from absl import flags

from benchmarks import draft_plans, drafts
from benchmarks.drafts import MODES, margin
from benchmarks.report import fill_tables
from runtime import Engine
from runtime.decoding import draft_chain
from sharding.errors import InputError
from tests import golden_cases
from tests.compilation import optimized


def run(folder: Path, *arguments: str) -> None:
    values = flags.FlagValues()
    drafts.define_flags(values)
    values(["drafts", *arguments, f"--output_dir={folder}"])
    drafts.main(values)


def test_a_small_run_and_its_estimates(tmp_path: Path) -> None:
    chosen = ["exact_sampled"]
    with optimized():
        run(tmp_path, "--modes=exact_sampled", "--prompts=2", "--drafts=3", "--new_tokens=32")
    record = json.loads((tmp_path / "drafts.json").read_text())
    assert record["kind"] == "measured"
    rows = {(row["mode"], row["draft_steps"]): row for row in record["results"]}
    assert list(rows) == [(name, count) for name in chosen for count in (0, 3)]
    for name in chosen:
        plain, drafted = rows[name, 0], rows[name, 3]
        assert drafted["prompts"] == len(drafted["ms"]["each"]) == 2
        assert drafted["differing"] == 0
        assert drafted["equal_tokens"] == 1.0
        assert drafted["largest_log_probability_difference"] <= 1e-4
        assert drafted["tokens"] == plain["tokens"]
        # Each accepted step is a pass less, and each pass computes four canvases.
        assert drafted["passes_per_token"] * (1 + drafted["accepted_per_pass"]) == pytest.approx(
            plain["passes_per_token"]
        )
        assert drafted["accepted_per_pass"] > 0
        ratio = 4 * drafted["passes_per_token"] / plain["passes_per_token"]
        assert drafted["positions_per_token"] == pytest.approx(ratio * plain["positions_per_token"], rel=0.1)
        assert "accepted_per_pass" not in plain
    run(tmp_path, "--estimate")
    estimated = json.loads((tmp_path / "drafts_estimated.json").read_text())
    assert estimated["kind"] == "estimated"
    assert estimated["settings"]["accepted_in_mode"] == "exact_sampled"
    accepted = rows["exact_sampled", 3]["accepted_per_pass"]
    assert [row["measured_accepted_per_pass"] for row in estimated["results"]] == [None, accepted] * 3
    text = "".join(f"<!-- table: {name}.json -->\n<!-- end of table -->\n" for name in ("drafts", "drafts_estimated"))
    table = fill_tables(text, tmp_path)
    assert table.count("| 2 of 2 | 100.00% |") == 1
    assert table.count("\n| v5e-8 | `data=8` |") == 2
    assert "Estimated: diffucoder-7b in bfloat16, one completion of 256 + 256 tokens" in table


@pytest.mark.slow
def test_agreement_with_rounding_is_reported(tmp_path: Path) -> None:
    """In bfloat16, and with int8 weights and an int8 cache: how many prompts and tokens are equal."""
    names = [name for name, mode in MODES.items() if mode.dtype == "bfloat16" or mode.quantize == "int8"]
    assert {MODES[name].kv_cache for name in names} == {"model", "int8"}
    with optimized():
        run(tmp_path, f"--modes={','.join(names)}", "--other_prompts=3", "--new_tokens=24")
    rows = json.loads((tmp_path / "drafts.json").read_text())["results"]
    assert [(row["mode"], row["draft_steps"]) for row in rows] == [(name, count) for name in names for count in (0, 3)]
    lines = fill_tables("<!-- table: drafts.json -->\n<!-- end of table -->\n", tmp_path).splitlines()
    for name, plain, drafted in zip(names, rows[::2], rows[1::2], strict=True):
        assert "equal_tokens" not in plain
        assert drafted["prompts"] == 3
        assert (drafted["largest_log_probability_difference"] is None) == (drafted["differing"] == 3)
        # All tokens of the prompts that do not differ are equal, and each prompt has as many.
        assert drafted["equal_tokens"] >= 1 - drafted["differing"] / 3 - 1e-9
        # Rounding changes few decisions; drafts of another canvas or with other bits would change most tokens.
        assert drafted["equal_tokens"] > 0.5
        (line,) = [line for line in lines if line.startswith(f"| `{name}` | 3 |")]
        assert f"| {3 - drafted['differing']} of 3 | {drafted['equal_tokens']:.2%} |" in line


def test_latencies() -> None:
    rows = {(row["machine"], row["mesh"], row["draft_steps"]): row for row in draft_plans.latencies({1: 0.5, 7: 1.0})}
    for machine, mesh, axis in draft_plans.MACHINES:
        plain, one, seven = (rows[machine, mesh, count] for count in (0, 1, 7))
        assert plain["times_as_fast"] == 1.0
        assert (plain["draft_axis"], seven["draft_axis"]) == ("none", axis)
        assert plain["seconds"] / seven["seconds"] == pytest.approx(seven["times_as_fast"])
        # A pass over more canvases takes longer, so the gain is less than the number of steps of a pass.
        assert one["ms_per_pass"] > plain["ms_per_pass"]
        assert seven["times_as_fast"] < 2.0
    # A device computes eight canvases on tensor=8, and one on data=8.
    assert rows["v5e-8", "tensor=8", 7]["ms_per_pass"] > 2 * rows["v5e-8", "tensor=8", 0]["ms_per_pass"]
    assert rows["v5e-8", "data=8", 7]["ms_per_pass"] < 2 * rows["v5e-8", "data=8", 0]["ms_per_pass"]


def test_margins() -> None:
    """The gap between two tokens at one position, and the range of the confidences of two positions."""
    mask, logits = 9, np.zeros((1, 4, 10), np.float32)
    logits[0, 0, 5], logits[0, 0, 6] = 2.0, 1.5  # the output at position 0 predicts position 1
    logits[0, 1, 5] = 5.0
    seen: list[Any] = []

    def run_model(ids: np.ndarray) -> np.ndarray:
        seen.append(ids[0].tolist())
        return logits

    config = SimpleNamespace(mask_token_id=mask, family=SimpleNamespace(prediction_offset=1))
    engine = cast(Engine, SimpleNamespace(config=config, logits=run_model))
    plain = np.array([[3, mask, mask, 7], [3, 5, mask, 7], [3, 5, 5, 7]], np.int32)
    found = np.array([[3, mask, mask, 7], [3, 6, mask, 7], [3, 6, 5, 7]], np.int32)
    assert margin(engine, found, plain, np.array([3], np.int32)) == pytest.approx(0.5)
    found[1] = [3, mask, 5, 7]
    range_of_confidences = margin(engine, found, plain, np.array([3], np.int32))
    assert 0.1 < range_of_confidences < 2.3
    assert seen == [[3, mask, mask, 7]] * 2
    # The very first step differs: the canvas before it is the prompt with masks.
    margin(engine, found[1:], plain[1:], np.array([3], np.int32))
    assert seen[-1] == [3, mask, mask, mask]


def test_every_mode_is_a_configuration() -> None:
    model = golden_cases.engine().config
    for mode in MODES.values():
        config = mode.config(64)
        assert config.drafts == 0
        assert config.replace(draft_steps=7).drafts == 7
        assert config.algorithm in model.family.algorithms


@pytest.mark.slow
def test_tuning_changes_only_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "TUNED", ("threshold", "factor"))
    monkeypatch.setattr(drafts, "SCALES", (0.5, 1.0))
    run(tmp_path, "--tune", "--other_prompts=10", "--new_tokens=32")
    lines = [line.split(" accepted")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("scale")]
    assert [line.split()[1:3] for line in lines] == [
        [scale, name] for scale in ("0.50", "1.00") for name in ("threshold", "factor")
    ]
    low, high = (float(lines[place].split()[-1]) for place in (0, 2))
    assert low != high, "the constant is in the compiled program"
    assert draft_chain.GUESSED_THRESHOLD_SCALE == 1.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes=exact_greedy,warp"], "--modes: warp is not one of exact_greedy"),
        (["--drafts=0"], "--drafts=0"),
        (["--drafts=1,64"], "draft_steps is 64; expected"),
        (["--checkpoint=/nowhere", "--modes=exact_greedy"], "/nowhere"),
        (["--estimate"], "measure it first: python -m benchmarks.drafts"),
        (["--estimate", "--tune"], "set one of them"),
    ],
)
def test_mistakes(arguments: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        run(tmp_path, *arguments)


def test_an_estimate_needs_its_mode(tmp_path: Path) -> None:
    (tmp_path / "drafts.json").write_text(json.dumps({"commit": "abc", "results": []}))
    with pytest.raises(InputError, match="has no mode exact_sampled"):
        run(tmp_path, "--estimate")
    (tmp_path / "drafts.json").write_text('{"results": [3]}')
    with pytest.raises(InputError, match="is not a record of this benchmark"):
        run(tmp_path, "--estimate")
