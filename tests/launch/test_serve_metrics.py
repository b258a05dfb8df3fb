"""/metrics: all names, and the counts of requests of each kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import transformers

from runtime import DiffusionConfig, Engine, RendererStartError, SamplingConfig, SchedulerPolicy
from tests.launch.served import Served, served, wait_for
from tests.launch.tiny import write_tiny_checkpoint

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "programs_compiled": "gauge",
    "programs_cached": "gauge",
    "programs_remaining": "gauge",
    "computed_positions": "gauge",
    "useful_positions": "gauge",
    "request_success_total": "counter",
    "request_refused_total": "counter",
    "request_given_up_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "committed_tokens_total": "counter",
    "forwards_total": "counter",
    "denoise_steps_total": "counter",
    "accepted_steps_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "tokens_per_forward": "histogram",
}
PROMPT = [5, 6, 7]
BLOCKS = DiffusionConfig(max_new_tokens=24, steps=8, block_length=6, algorithm="entropy", temperature=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def there(folder: Path) -> Iterator[Served]:
    """A server that decodes in blocks and observes every denoise step."""
    engine = Engine.load(folder, "tensor=1", devices=jax.devices()[:1])
    with served(engine, BLOCKS) as found:
        assert found.server.serving.scheduler is not None
        found.server.serving.scheduler.policy = SchedulerPolicy(max_iterations=1)
        yield found


def ask(found: Served, **changes: object) -> str:
    answer = found.post("/v1/completions", {"prompt": PROMPT, "seed": 3, **changes})
    assert answer.status_code == 200, answer.text
    return answer.text


def test_every_name_and_no_other(there: Served) -> None:
    ask(there)
    text = there.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE diffumesh:(\S+) (\S+)$", text, re.MULTILINE))
    # The client library adds a series with the start time of each counter.
    assert {name: kind for name, kind in kinds.items() if not name.endswith("_created")} == NAMES
    said = {name for name in NAMES if re.search(rf"^diffumesh:{name}\S* ", text, re.MULTILINE)}
    assert set(NAMES) - said == {"request_refused_total", "request_given_up_total"}, "nobody was"


def test_what_diffusion_counts(there: Served) -> None:
    ask(there)
    assert there.metric("time_to_first_token_seconds_count") == 1, "not of streams alone"
    assert there.metric("request_time_per_output_token_seconds_count") == 1
    assert there.metric("inter_token_latency_seconds_count") == 0, "there is nothing between one piece"
    assert there.metric("denoise_steps_total") == 8
    assert there.metric("accepted_steps_total") == 0
    assert there.metric("committed_tokens_total") == there.metric("generation_tokens_total") == 24
    assert there.metric("forwards_total") == 8
    assert there.metric("tokens_per_forward_count") == 1
    assert there.metric("tokens_per_forward_sum") == 24 / 8
    assert there.metric("request_prompt_tokens_sum") == there.metric("prompt_tokens_total") == len(PROMPT)
    assert there.metric("request_generation_tokens_sum") == 24
    # The first token is committed long before the last.
    assert there.metric("time_to_first_token_seconds_sum") < there.metric("e2e_request_latency_seconds_sum")
    text = ask(there, stream=True)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [event for event in events if event["choices"][0]["text"]]
    assert there.metric("time_to_first_token_seconds_count") == 2
    assert there.metric("inter_token_latency_seconds_count") >= len(pieces) - 1 >= 1
    ask(there, max_tokens=0, steps=1, prompt=[5, there.engine.config.mask_token_id, 7])
    assert there.metric("time_to_first_token_seconds_count") == 3


def test_requests_that_the_server_turns_away_while_it_reads_them(
    there: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RendererStartError("cannot start the process (Resource temporarily unavailable)")

    monkeypatch.setattr(there.server.reader, "generation", fail)
    answer = there.post("/v1/completions", {"prompt": "a"})
    assert answer.status_code == 503
    assert there.metric("request_refused_total") == 1


def test_what_autoregressive_models_count(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    config = transformers.Qwen2Config.from_pretrained(folder)
    config.architectures = None
    transformers.Qwen2ForCausalLM(config).save_pretrained(own)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own / name).write_bytes((folder / name).read_bytes())
    engine = Engine.load(own, "tensor=1", devices=jax.devices()[:1])
    with served(engine, SamplingConfig(max_new_tokens=9)) as found:
        ask(found)
        wait_for(lambda: found.metric("num_requests_running") == 0)
        assert found.metric("denoise_steps_total") == 0, "none of these tokens was masked"
        assert found.metric("committed_tokens_total") == found.metric("generation_tokens_total") == 9
        assert found.metric("tokens_per_forward_sum") == 1
        assert found.metric("time_to_first_token_seconds_count") == 1
