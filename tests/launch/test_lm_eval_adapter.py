"""The adapter for lm-evaluation-harness; skipped if the harness is not installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absl import flags

pytest.importorskip("lm_eval.api.model")

from checkpoints import DEMO, folder_fingerprint, open_folder
from launch import lm_eval_adapter
from launch.harness import model as harness_model
from launch.harness.model import HarnessModel
from launch.hosts.faults import HostsDifferError
from launch.hosts.host import Host
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
    assert model.tokenizer_name == f"demo-{folder_fingerprint(open_folder(DEMO))}"
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


def test_contexts_begin_with_the_tokenizers_first_token(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(gpt2, folder)
    own: dict[str, Any] = {"checkpoint": str(folder), "mesh": "tensor=1;data=-1", "slots": 2}
    with pytest.raises(InputError, match="has no bos_token that is in its vocabulary") as found:
        HarnessModel(**own, add_bos_token=True)
    assert found.value.field == "add_bos_token"
    with pytest.raises(InputError, match="add_bos_token is 3; expected true or false"):
        HarnessModel(**own, add_bos_token=3)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|beginoftext|>"}))
    plain, model = HarnessModel(**own), HarnessModel(**own, add_bos_token=True)
    encode = model.engine.tokenizer.encode
    (bos,) = encode("<|beginoftext|>")
    seen: list[list[int]] = []

    def keep(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        seen.extend(context for context, _ in pairs)
        return [(0.0, False)] * len(pairs)

    for one in (plain, model):
        monkeypatch.setattr(one.engine, "log_likelihoods", keep)
        one.loglikelihood([request("def f(", "x"), request("", "x"), request("<|beginoftext|>def", " f")])
        one.loglikelihood_rolling([request("import os")])
    end = model.engine.end_token_ids[0]
    assert seen[:4] == [encode("def f("), [end], [bos, *encode("def")], [end]]
    assert seen[4:] == [[bos, *encode("def f(")], [bos], [bos, *encode("def")], [bos]]
    asked = {"until": [], "max_gen_toks": 3}
    expected = plain.generate_until([request("<|beginoftext|>import", asked)])
    assert model.generate_until([request("import", asked)]) == expected


class Pair(Host):
    """Simulates the second of two hosts. The first says the same, except what a test sets by topic."""

    count = 2
    process_index = 1

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, Any]] = []
        self.other: dict[str, dict[str, str]] = {}

    def gather(self, topic: str, value: Any) -> list[Any]:
        self.said.append((topic, value))
        return [value | self.other[topic] if topic in self.other else value, value]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    host = Pair()
    monkeypatch.setattr(harness_model, "this_host", lambda: host)
    monkeypatch.setattr(lm_eval_adapter, "this_host", lambda: host)
    monkeypatch.setenv("LOCAL_RANK", "to be restored")
    monkeypatch.delenv("LOCAL_RANK")
    return host


@pytest.mark.parametrize("name", ["checkpoint", "model_args"])
def test_hosts_with_different_models(name: str, pair: Pair) -> None:
    pair.other["model"] = {name: "another"}
    with pytest.raises(HostsDifferError, match=f"{name} is .* on host 1, and another on the others") as found:
        HarnessModel()
    assert found.value.hosts == [1]


def test_hosts_with_different_requests(pair: Pair, gpt2: Path) -> None:
    """Nothing is computed before all hosts have said what the harness asked them."""
    model = HarnessModel(checkpoint=str(gpt2), mesh="tensor=1;data=-1")
    asked = {
        "generate_until": [("import os\n", UNTIL), ("import os\n", UNTIL | {"until": ["\n"]}), ("import re\n", UNTIL)],
        "loglikelihood": [("import", " os"), ("import", " re")],
        "loglikelihood_rolling": [("import os",), ("import re",)],
    }
    for call, requests in asked.items():
        pair.other = {f"requests of {call}": {"their number": "7"}}
        for one in requests:
            with pytest.raises(HostsDifferError, match="their number is 1 on host 1, and 7 on the others"):
                getattr(model, call)([request(*one)])
    model_topic, *topics = [topic for topic, _ in pair.said]
    assert model_topic == "model"
    assert topics == [f"requests of {call}" for call, requests in asked.items() for _ in requests]
    digests = [value["their digest"] for _, value in pair.said[1:]]
    assert len(set(digests)) == len(digests)
    assert "LOCAL_RANK" not in os.environ, "the tasks were imported with it"
    pair.other = {}
    assert len(model.loglikelihood([request("import", " os")])) == 1
    assert os.environ["LOCAL_RANK"] == "1", "this host would write results too"


@pytest.mark.parametrize(("more", "rank"), [([], None), (["--use_cache=answers"], "1"), (["-C", "f.yaml"], "1")])
def test_a_host_before_and_after_a_run(
    more: list[str], rank: str | None, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that asks the model nothing, because all answers are in its database, reaches the end alone.

    The harness names this database by the rank. Without one, tasks are imported first: where the rank is not 0, some
    of them do not download data that they need.
    """
    compared: dict[str, str] = {}
    ranks = []

    def evaluate() -> None:
        ranks.append(os.environ.get("LOCAL_RANK"))
        pair.gather("requests of loglikelihood", {})

    monkeypatch.setattr(lm_eval_adapter, "start_devices", lambda values, inputs, **more: compared.update(inputs))
    monkeypatch.setattr(lm_eval_adapter, "cli_evaluate", evaluate)
    monkeypatch.setattr(sys, "argv", ["adapter", "run", "--tasks=tiny", *more])
    lm_eval_adapter.main(flags.FlagValues())
    assert set(compared) == {"arguments", "lm_eval"}
    assert ranks == [rank]
    assert [topic for topic, _ in pair.said] == ["requests of loglikelihood", "end of the harness"]


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
