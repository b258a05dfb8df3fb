"""Runs a server in the test's process, without flags or signals."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import jax
import openai
import pytest

from checkpoints import DEMO
from launch.hosts.host import Host
from launch.openai.bodies import Defaults
from launch.serving.http import listen
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from launch.serving.reading import Mode
from launch.serving.server import Server
from runtime import (
    DiffusionConfig,
    Engine,
    Executor,
    PoolShape,
    SamplingConfig,
    SchedulerPolicy,
    StepOutcome,
    StepPlan,
)

PATIENCE = 60.0


class OneHost(Host):
    """The only host of a server; a test can tell it to shut down."""

    def end(self) -> None:
        self._terminated = True


@dataclasses.dataclass
class Served:
    """A running server and its parts."""

    url: str
    engine: Engine
    server: Server
    host: OneHost
    defaults: Defaults
    thread: threading.Thread

    def client(self, **arguments: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **arguments)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE, **arguments)

    def post(self, path: str, body: Any, **arguments: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE, **arguments)

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"diffumesh:{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def wait_for(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)


def timed(outcome: StepOutcome, seconds: float) -> StepOutcome:
    """Return a step's outcome with its time set to ``seconds`` per iteration."""
    pools = [
        dataclasses.replace(
            pool, runs=[dataclasses.replace(run, seconds=seconds * run.iterations) for run in pool.runs]
        )
        for pool in outcome.pools
    ]
    return dataclasses.replace(outcome, pools=pools)


def demo(mesh: str = "tensor=1", devices: int = 1) -> Engine:
    return Engine.load(DEMO, mesh, devices=jax.devices()[:devices])


@contextmanager
def served(
    engine: Engine,
    config: DiffusionConfig | SamplingConfig,
    more: Sequence[DiffusionConfig | SamplingConfig] = (),
    *,
    canvas: Sequence[int] = (128,),
    slots: int = 2,
    steps: int | None = 64,
    keys: Keys | None = None,
    names: Sequence[str] = (),
    limits: Limits | None = None,
    template: str | None = None,
    name: str = "demo",
    programs: int = 1,
) -> Iterator[Served]:
    """Serve an engine with these modes in a context."""
    tokenizer = engine.tokenizer
    if template is not None:
        tokenizer.chat_template = template
    defaults = Defaults(name, engine.config, tokenizer, config, True, engine.end_token_ids, 0, False, 1, ())
    configs = [config, *more]
    widths = tuple(canvas) if len(canvas) > 1 else None
    shapes = [PoolShape(one, max(canvas), slots, steps, widths, programs) for one in configs]
    modes = [Mode(one, number) for number, one in enumerate(configs)]
    host, own = OneHost(), listen("127.0.0.1", 0)
    server = Server(own, defaults, modes, limits or Limits(), keys or Keys(), names, host, "1.2.3")
    url = f"http://127.0.0.1:{own.getsockname()[1]}"
    executor, ready = Executor(engine.runner, shapes), threading.Event()
    thread = threading.Thread(target=lambda: server.run(executor, ready.set), daemon=True)
    thread.start()
    try:
        assert ready.wait(300)
        yield Served(url, engine, server, host, defaults, thread)
    finally:
        host.end()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def offline(found: Served, prompts: list[str], **changes: Any) -> list[Any]:
    """Return the completions of ``engine.generate`` with the same parameters."""
    own = dict(changes)
    samples, stop, suffixes = own.pop("n", 1), own.pop("stop", ()), own.pop("suffixes", ())
    if "max_new_tokens" in own:
        own.setdefault("steps", own["max_new_tokens"])
    config = found.defaults.config.replace(**own)
    return found.engine.generate(prompts, config, num_return_sequences=samples, stop=stop, suffixes=suffixes)


@contextmanager
def slowly(found: Served, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.5) -> Iterator[threading.Event]:
    """Until the event is set, every step takes ``seconds`` and runs one iteration."""
    executor, scheduler, gate = found.server.serving.executor, found.server.serving.scheduler, threading.Event()
    assert executor is not None
    assert scheduler is not None
    real = executor.execute

    def execute(plan: StepPlan) -> StepOutcome:
        if plan.pools:
            gate.wait(seconds)
        return real(plan)

    with monkeypatch.context() as changed:
        changed.setattr(executor, "execute", execute)
        changed.setattr(scheduler, "policy", SchedulerPolicy(max_iterations=1))
        yield gate
        gate.set()
