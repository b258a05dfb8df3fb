"""The adapter for lm-evaluation-harness; skipped if the harness is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval.api.model")

from checkpoints import DEMO
from launch import lm_eval_adapter
from launch.harness.model import HarnessModel
from sharding.errors import InputError
from tests.launch.mistakes import refusal

DOCUMENTS = [
    {"context": "def add(a, b):\n", "good": "    return a + b", "bad": "    import b b b"},
    {"context": "def is_even(number):\n    return number % 2 ", "good": "== 0", "bad": "+ zebra"},
]
UNTIL = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
# Tasks in the harness's format; JSON is valid YAML.
TASKS: dict[str, dict[str, Any]] = {
    "tiny_complete": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{good}}",
        "generation_kwargs": UNTIL,
        "metric_list": [{"metric": "exact_match"}],
    },
    "tiny_choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{[good, bad]}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
}


def request(*args: object) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_what_the_harness_asks() -> None:
    model = HarnessModel(slots=2, mesh="tensor=1;data=-1", mc_samples=32, algorithm="maskgit_plus")
    prompts = ["def add(a, b):\n", "def add(a, b):\n", "import os\n"]
    texts = model.generate_until([request(prompt, UNTIL) for prompt in prompts])
    assert texts[0] != texts[1], "the same context again is another sample"
    assert model.generate_until([request(prompt, UNTIL) for prompt in prompts[::-1]])[0] == texts[2]
    # The harness has several names for the limit, and a temperature alone means to sample.
    drawn: dict[str, Any] = {"temperature": 5.0, "until": []}
    limited = [
        model.generate_until([request(prompts[2], drawn | changes)])
        for changes in (
            {"max_gen_toks": 4, "do_sample": True},
            {"max_gen_toks": 4},
            {"max_new_tokens": 4, "max_tokens": 9},
            {"max_completion_tokens": 4},
            {"max_gen_toks": 4, "do_sample": False},
        )
    ]
    assert limited[0] == limited[1] == limited[2] == limited[3] != limited[4]
    likely, unlikely = model.loglikelihood(
        [request("def set(self, value):\n    ", text) for text in ("self.value = value", "value = import value")]
    )
    assert likely[0] > unlikely[0]
    assert likely[1] is False
    with pytest.raises(InputError, match="autoregressive"):
        model.loglikelihood_rolling([request("text")])


def test_wrong_model_args() -> None:
    with pytest.raises(InputError, match="best_of"):
        HarnessModel(best_of=3)


def test_wrong_model_args_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lm_eval_adapter, "cli_evaluate", lambda: HarnessModel(checkpoint="/no/such/folder"))
    monkeypatch.setattr(sys, "argv", ["adapter", "run", "--tasks=tiny"])
    with pytest.raises(SystemExit) as ended:
        lm_eval_adapter.run()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: /no/such/folder")


@pytest.mark.parametrize("arguments", [["run", "--model=diffumesh"], ["--model", "diffumesh", "--tasks"]])
def test_a_command_without_tasks(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["adapter", *arguments])
    assert refusal(capsys, lm_eval_adapter.run).startswith("error: give --tasks=")


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["ls", "tasks"], ["run", "--help"], ["run", "--model=x", "-C", "f.yaml"], ["--model=x", "--task=a"]],
)
def test_commands_that_name_tasks_or_need_none(arguments: list[str]) -> None:
    lm_eval_adapter.check_tasks(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("diffusion", 1), ("autoregressive", 1), ("diffusion", 2)])
def test_tasks_from_end_to_end(kind: str, processes: int, gpt2: Path, tmp_path: Path) -> None:
    """The harness's command records the answers of the model for tasks from a folder, and one process writes them."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**source, "test_split": "test", **task}))
    checkpoint = DEMO if kind == "diffusion" else gpt2
    own = f"checkpoint={checkpoint},mesh=tensor=1;data=-1,slots=2,mc_samples=8"
    command = [sys.executable, "-m", "launch.lm_eval_adapter", "run", "--model=diffumesh", f"--model_args={own}"]
    more = [f"--tasks={','.join(TASKS)}", f"--include_path={tmp_path}", f"--output_path={tmp_path}", "--log_samples"]
    if processes > 1:
        local = ["launch.local", f"--num_processes={processes}", "--devices_per_process=1", "--"]
        command = [sys.executable, "-m", *local, *command]
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *more], env=os.environ | home, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.rglob("results_*.json")
    metrics = json.loads(summary.read_text())["results"]
    samples = {
        name: [json.loads(line) for line in next(tmp_path.rglob(f"samples_{name}_*.jsonl")).read_text().splitlines()]
        for name in TASKS
    }
    model = HarnessModel(checkpoint=str(checkpoint), mesh="tensor=1;data=-1", slots=2, mc_samples=8)
    contexts = [document["context"] for document in DOCUMENTS]
    texts = model.generate_until([request(context, UNTIL) for context in contexts])
    assert [sample["resps"] for sample in samples["tiny_complete"]] == [[[text]] for text in texts]
    pairs = [(document["context"], document[which]) for document in DOCUMENTS for which in ("good", "bad")]
    expected = np.array([value for value, _ in model.loglikelihood([request(*pair) for pair in pairs])]).reshape(2, 2)
    found = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples["tiny_choose"]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert metrics["tiny_choose"]["acc,none"] == np.mean(expected[:, 0] > expected[:, 1])
    if kind == "diffusion":
        assert metrics["tiny_choose"]["acc,none"] == 1.0
