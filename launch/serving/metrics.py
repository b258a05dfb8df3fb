"""What is measured, in Prometheus' form: vLLM's names under our prefix, and what is particular to denoising."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_PER_FORWARD = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)


class Metrics:
    """The server's counters. Safe for several threads."""

    def __init__(self, model_name: str) -> None:
        """Make them, all at nothing."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"diffumesh:{name}", text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"diffumesh:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(**self._labels)

        self._requests = counter("request_success", "Completions that are done.", "finished_reason")
        self._refused = counter("request_refused", "Requests that were not taken.", "reason")
        self._aborted = counter("request_given_up", "Requests that were taken and not finished.", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of rows that got a slot.").labels(**self._labels)
        self._generated = counter("generation_tokens", "Tokens of completions.").labels(**self._labels)
        self._committed = counter("committed_tokens", "Tokens set on canvases.").labels(**self._labels)
        self._forwards = counter("forwards", "Forward passes over the slots.").labels(**self._labels)
        self._steps = counter("denoise_steps", "Denoise steps of rows that are done.").labels(**self._labels)
        self.first = histogram("time_to_first_token_seconds", "Until the first token of a row stands.", _SECONDS)
        self.pieces = histogram("inter_token_latency_seconds", "Between two pieces of a stream's row.", _SECONDS)
        self.between = histogram(
            "request_time_per_output_token_seconds", "From the first token to the end, a token.", _SECONDS
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self.queued = histogram("request_queue_time_seconds", "Until a row got its slot.", _SECONDS)
        self.inference = histogram("request_inference_time_seconds", "That a row was in its slot.", _SECONDS)
        self._prompts = histogram("request_prompt_tokens", "Prompt tokens of a row.", _TOKENS)
        self._lengths = histogram("request_generation_tokens", "Tokens of a completion.", _TOKENS)
        self._tokens_per_forward = histogram(
            "tokens_per_forward", "Tokens of a row that each of its forward passes set.", _PER_FORWARD
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when somebody asks."""
        gauge = Gauge(f"diffumesh:{name}", text, ["model_name"], registry=self.registry)
        gauge.labels(**self._labels).set_function(value)

    def refused(self, reason: str) -> None:
        """A request was not taken."""
        self._refused.labels(**self._labels, reason=reason).inc()

    def aborted(self, reason: str) -> None:
        """A request that was accepted is not finished."""
        self._aborted.labels(**self._labels, reason=reason).inc()

    def inserted(self, prompt_tokens: int, waited: float) -> None:
        """A row has got a slot."""
        self._prompt.inc(prompt_tokens)
        self._prompts.observe(prompt_tokens)
        self.queued.observe(waited)

    def forwards(self, count: int) -> None:
        """The devices have run so many forward passes."""
        self._forwards.inc(count)

    def row_finished(self, committed: int, steps: int, denoised: bool, seconds: float) -> None:
        """A row is done: tokens committed in so many steps of its own, denoise steps or not, in so many seconds."""
        self._committed.inc(committed)
        if denoised:
            self._steps.inc(steps)
        self.inference.observe(seconds)
        if steps:
            self._tokens_per_forward.observe(committed / steps)

    def completed(self, reason: str, tokens: int) -> None:
        """A completion is handed out."""
        self._requests.labels(**self._labels, finished_reason=reason).inc()
        self._generated.inc(tokens)
        self._lengths.observe(tokens)

    def text(self) -> bytes:
        """All of them as Prometheus reads them."""
        return generate_latest(self.registry)
