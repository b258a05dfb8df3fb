"""Batches: each line is answered once, in any order; errors name bad lines, and torn lines and full disks are safe."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import DEMO
from launch.batches import facts as batch_facts
from launch.batches import folder as batch_folder
from launch.batches import progress as batch_progress
from launch.batches.folder import BatchFolder
from launch.batches.records import DIGEST, evalplus_records
from runtime import DiffusionConfig, Engine
from runtime.execution.rows import row_seed
from sharding.errors import InputError
from tests.launch.mistakes import refusal
from tests.launch.small_batches import launch, write
from tests.launch.tiny import write_tiny_checkpoint

LINES: list[dict[str, Any]] = [
    {"id": "a", "prompt": "def add(a, b):\n"},
    {"id": "b", "prompt": "def f(x):\n", "max_new_tokens": 3, "n": 2},
    {"id": "c", "prompt": [5, 6, 7], "temperature": 1.0, "seed": 9, "cache": "dual", "block_length": 2},
    {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "import os\n", "n": 2, "logprobs": 0, "seed": 4}},
    {"task_id": "HumanEval/0", "prompt": "def g(", "entry_point": "g", "stop": "\n"},
]


def fails(capsys: pytest.CaptureFixture[str], source: Path, output: Path | str, *more: str) -> str:
    return refusal(capsys, lambda: launch(source, output, "", *more))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_log_probabilities(found: list[dict[str, Any]]) -> tuple[list[str], list[float]]:
    """Return sorted records without their log-probabilities, and these: their last digits depend on the number of rows.

    Without the digests, which cover the log-probabilities.
    """
    kept, numbers = [], []
    for record in sorted(json.loads(json.dumps(found)), key=json.dumps):
        del record[DIGEST]
        for choice in record.get("response", {}).get("body", {}).get("choices", []):
            numbers += choice["logprobs"].pop("token_logprobs")
        kept.append(json.dumps(record))
    return kept, numbers


def check_same(others: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    (kept, numbers), (our_kept, our_numbers) = map(without_log_probabilities, (others, ours))
    assert kept == our_kept
    assert len(our_numbers) > 0
    np.testing.assert_allclose(numbers, our_numbers, atol=2e-5)


def check_results(checkpoint: Path, found: list[dict[str, Any]]) -> None:
    """Check the results of ``LINES``: tokens, seeds, log-probabilities, a request body, a stop string."""
    # The engine generates the same text from this prompt and seed alone.
    engine = Engine.load(checkpoint, "tensor=1")
    config = DiffusionConfig.published(4, 1.0, seed=[row_seed(9, "c")], cache="dual", block_length=2)
    alone = engine.generate_tokens([[5, 6, 7]], None, config).sequences[0, 3:].tolist()
    assert found[3]["tokens"] == alone[: len(found[3]["tokens"])]
    assert found[3]["seed"] == row_seed(9, "c")
    body = found[4]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    assert body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"] == body["usage"]["total_tokens"]
    assert "\n" not in found[5]["text"]


def test_rows_of_a_batch_end_early(tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An end token or stop string saves forward passes and changes no record, except where a line has no early stop."""
    prompt = "def is_even(number):\n"
    lines = [{"id": name, "prompt": prompt, "seed": 1, "temperature": 0.2} for name in "ab"]
    lines[1] |= {"stop": " %"}
    made, forwards = [], []
    for early_stop in (True, False):
        own = [line | ({} if early_stop else {"early_stop": False}) for line in lines]
        if not early_stop:
            del own[1]["early_stop"], own[1]["stop"]
            own[1] |= {"early_stop": False}
        source, output = write(tmp_path / f"{early_stop}.jsonl", own), tmp_path / f"out {early_stop}"
        launch(source, output, compiled, "--max_new_tokens=32", "--slots=2")
        forwards.append(int(re.findall(r"^(\d+) forward passes", capsys.readouterr().err, re.M)[0]))
        made.append(records(output / "sorted.jsonl"))
    (ended, stopped), (whole, uncut) = made
    assert ended == whole
    assert stopped["text"] == uncut["text"].partition(" %")[0]
    assert stopped["tokens"] == uncut["tokens"][: len(stopped["tokens"])]
    assert stopped["finish_reason"] == "stop"
    assert forwards[0] < forwards[1] / 2


def test_a_batch_its_order_and_its_resumption(
    tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_progress, "SECONDS_BETWEEN_REPORTS", 0.0)
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    tiny = (f"--checkpoint={checkpoint}", "--mesh=tensor=1")
    bad = ["{", {"id": "a", "prompt": "again"}]
    source, output = write(tmp_path / "in.jsonl", [*LINES, *bad]), tmp_path / "made" / "out"
    launch(source, output, compiled, *tiny, "--skip_bad", "--slots=2", "--format=evalplus")
    err = capsys.readouterr().err
    assert "entry_point" in err
    assert re.search(
        r"^[1-6]/7 rows, [\d.]+ rows/s, [\d.]+ tokens/s, slots \d+% busy, about 0:\d\d:\d\d left$", err, re.M
    )
    assert re.search(r"^7/7 rows, .* busy$", err, re.M)
    found = records(output / "sorted.jsonl")
    assert [line.get("custom_id", (line["id"], line.get("index"))) for line in found] == [
        *(("a", 0), ("b", 0), ("b", 1), ("c", 0)),
        *("d", ("HumanEval/0", 0)),
    ]
    check_results(checkpoint, found)
    assert [(error["id"], error["line"]) for error in records(output / "errors.jsonl")] == [(None, 6), (None, 7)]
    samples = records(output / "samples.jsonl")
    assert [sample["task_id"] for sample in samples] == ["a", "b", "b", "c", "d", "d", "HumanEval/0"]
    assert samples[-1]["completion"] == found[5]["text"]

    # The order of lines and the number of slots do not change results.
    backwards, other = write(tmp_path / "back.jsonl", LINES[::-1]), tmp_path / "back"
    assert "decoding: " not in err
    launch(backwards, other, compiled, *tiny, "--slots=1", "--verbose")
    assert "decoding: " in capsys.readouterr().err
    check_same(records(other / "sorted.jsonl"), found)

    # If the file is cut anywhere, the same command restores it, and computes only missing lines.
    whole = (output / "sorted.jsonl").read_bytes()
    results = (output / "results.jsonl").read_bytes()
    (output / "results.jsonl").write_bytes(results[: results.index(b"\n") + 30])
    (output / "sorted.jsonl").unlink()
    capsys.readouterr()
    launch(source, output, compiled, *tiny, "--skip_bad", "--slots=2")
    err = capsys.readouterr().err
    assert "removed an incomplete last line" in err
    assert "1 of 6 results exist already" in err
    assert (output / "sorted.jsonl").read_bytes() == whole
    assert (output / "results.jsonl").read_bytes().startswith(results[: results.index(b"\n") + 1])
    assert len((output / "errors.jsonl").read_text().splitlines()) == 2
    # When all results exist, no model is loaded.
    monkeypatch.setattr("launch.batch.load_engine", lambda *_: pytest.fail("a model is loaded"))
    launch(source, output, compiled, *tiny, "--skip_bad")
    assert "6 of 6 results exist already" in capsys.readouterr().err

    # Different settings are refused, and the message names the difference.
    err = fails(capsys, source, output, *tiny, "--skip_bad", "--seed=5")
    assert "seed: was 0, now 5" in err
    assert "max_new_tokens: was 4, now 8" in fails(capsys, source, output, *tiny, "--skip_bad", "--max_new_tokens=8")
    with monkeypatch.context() as other_code:
        other_code.setattr(batch_facts, "code_digest", lambda: "another")
        assert "code: was" in fails(capsys, source, output, *tiny, "--skip_bad")
    assert "input: was" in fails(capsys, backwards, output, *tiny)


def test_an_autoregressive_checkpoint(
    gpt2: Path, tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(gpt2, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    said = {"messages": [{"role": "user", "content": "Add."}], "temperature": 0}
    lines = [
        {"id": "a", "prompt": "def f(", "max_tokens": 3, "logprobs": True},
        {"id": "b", "prompt": "import", "n": 2},
        {"id": "c", "prompt": "Add.", "temperature": 0},
        {"id": "d", **said},
        {"custom_id": "e", "body": {**said, "logprobs": True}},
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out"
    more = (f"--checkpoint={folder}", "--mesh=data=-1,tensor=1")
    launch(source, output, compiled, *more, "--chat", "--format=evalplus")
    found = records(output / "sorted.jsonl")
    names = [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("d", 0)]
    assert [(line["id"], line["index"]) for line in found[:-1]] == names
    assert len(found[0]["tokens"]) == len(found[0]["log_probabilities"]) <= 3
    assert "masks_left" not in found[0]
    # With --chat, a prompt is a user's message.
    (choice,) = found[-1]["response"]["body"]["choices"]
    assert found[3]["tokens"] == found[4]["tokens"]
    assert choice["message"] == {"role": "assistant", "content": found[3]["text"]}
    assert [one["logprob"] <= 0 for one in choice["logprobs"]["content"]] == [True] * len(found[3]["tokens"])
    samples = records(output / "samples.jsonl")
    assert samples[-1] == {"task_id": "e", "solution": found[3]["text"]}
    bad = write(tmp_path / "bad.jsonl", [{"id": "a", "prompt": "x", "steps": 3}])
    capsys.readouterr()
    assert "steps: not supported by this checkpoint, which is autoregressive" in fails(
        capsys, bad, tmp_path / "other", *more
    )


BAD: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "not valid JSON"),
    ("[]", "expected an object"),
    ({"prompt": "x"}, "id: expected a string"),
    ({"id": "", "prompt": "x"}, "id: expected a string"),
    ({"id": "1", "prompt": ""}, "the prompt is empty"),
    ({"id": "2"}, "either a prompt or messages"),
    ({"id": "3", "prompt": "x " * 5000}, "the model allows"),
    ({"id": "4", "prompt": "x", "max_tokens": 10**6}, "the model allows"),
    ({"id": "5", "prompt": "x", "temperature": "hot"}, "temperature is 'hot'"),
    ({"id": "6", "prompt": "x", "n": 0}, "n is 0"),
    ({"id": "7", "prompt": "x", "seed": -1}, "seed is -1"),
    ({"id": "8", "prompt": [1, 10**9]}, "is not a token id"),
    ({"id": "9", "prompt": "x", "algorithm": "best"}, "algorithm is 'best'"),
    ({"id": "10", "prompt": "x", "stop": [""]}, "stop: expected"),
    ({"id": "11", "prompt": "x", "max_tokens": 3, "max_new_tokens": 4}, "twice"),
    ({"id": "12", "prompt": "x", "suppress_mask": "no"}, "expected true or false"),
    ({"id": "13", "messages": [{"role": "user", "content": "hi"}]}, "no chat template"),
    ({"id": "14", "messages": "hi"}, "messages: expected"),
    ({"custom_id": "15", "body": {"prompt": "x", "tools": [1]}}, "tools: not supported"),
    ({"custom_id": "16", "prompt": "x"}, "body: expected an object"),
    ({"id": "good", "prompt": "x"}, "first used on line"),
    ('{"id": "17", "prompt": "x", "top_p": NaN}', "top_p is nan"),
    ('{"id": "18", "prompt": "\\ud800"}', "not valid UTF-8"),
]


def test_bad_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start in (0, 12):
        part = BAD[start : start + 12]
        source = write(tmp_path / "in.jsonl", [{"id": "good", "prompt": "x"}, *(line for line, _ in part)])
        err = fails(capsys, source, tmp_path / "out")
        assert f"{len(part)} lines cannot be run" in err
        said = [line for line in err.splitlines() if line.startswith(f"{source}:")]
        for number, ((_, message), line) in enumerate(zip(part, said, strict=True), 2):
            assert line.startswith(f"{source}:{number}: ")
            assert message in line
    assert not (tmp_path / "out").exists(), "nothing is written for an input that is refused"
    assert "cannot be read" in fails(capsys, tmp_path / "none.jsonl", tmp_path / "out")
    assert "expected a local folder" in fails(capsys, tmp_path / "in.jsonl", "gs://bucket/out")
    (tmp_path / "in.jsonl").write_text("\n")
    assert "the file has no lines" in fails(capsys, tmp_path / "in.jsonl", tmp_path / "out")


def test_two_writers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, source = tmp_path / "out", write(tmp_path / "in.jsonl", LINES[:1])
    held = BatchFolder(output)
    assert "another process is writing there" in fails(capsys, source, output)
    held.close()
    BatchFolder(output).close()


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(InputError, match="cannot be written to"):
            BatchFolder(place)
    full = tmp_path / "full"
    full.mkdir()
    (full / "results.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match="No space left on device"):
        BatchFolder(full).append([{"id": "a", "index": 0}])

    # If the disk is full after half a line, earlier results stay intact.
    output = BatchFolder(tmp_path / "out")
    output.append([{"id": "a", "index": 0}])
    real = os.write
    monkeypatch.setattr(batch_folder.os, "write", lambda handle, data: real(handle, data[: len(data) // 2]))
    with pytest.raises(InputError, match="Results so far are intact"):
        output.append([{"id": "b", "index": 0}])
    monkeypatch.undo()
    assert output.done({("a", 0), ("b", 0)}) == {("a", 0)}
    output.append([{"id": "b", "index": 0}, {"id": "b", "index": 0}])
    with pytest.raises(InputError, match=r"results.jsonl:3: a result that appears twice"):
        output.done({("a", 0), ("b", 0)})
    with pytest.raises(InputError, match=r"results.jsonl:2: a result that belongs to no line"):
        output.done({("a", 0)})
    (tmp_path / "out" / "results.jsonl").write_text("?\n")
    with pytest.raises(InputError, match="not written by this run"):
        output.done(set())


def test_evalplus_samples_of_a_line_with_messages(tmp_path: Path, compiled: str) -> None:
    """Also without --chat, the answer to messages is a complete solution."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("diffumesh.manifest.json", "diffumesh.files.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    lines = [
        {"id": "a", "prompt": "def f(x):", "max_tokens": 8},
        {"id": "b", "messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 8},
        {"custom_id": "c", "body": {"prompt": "def f(x):", "max_tokens": 8}},
        {"id": "d", "prompt": [50, 60], "max_tokens": 8},
    ]
    source = write(tmp_path / "in.jsonl", lines)
    solutions = {"": {"b"}, "--chat": {"a", "b", "c"}}
    for flag, expected in solutions.items():
        output = tmp_path / f"out{flag}"
        launch(source, output, compiled, f"--checkpoint={folder}", "--format=evalplus", *filter(None, [flag]))
        found = records(output / "samples.jsonl")
        assert {one["task_id"] for one in found if "solution" in one} == expected
        assert {one["task_id"] for one in found if "completion" in one} == set("abcd") - expected


def test_evalplus_samples_of_a_chat() -> None:
    answer = "Here it is:\n```python\ndef f():\n    return 1\n```\nThat is all."
    assert evalplus_records({"id": "t", "text": answer}, {"t"}) == [
        {"task_id": "t", "solution": "def f():\n    return 1\n"}
    ]
    assert evalplus_records({"id": "t", "text": "pass"}, {"t"}) == [{"task_id": "t", "solution": "pass"}]
