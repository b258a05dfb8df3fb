"""Metrics in Prometheus format: vLLM's names with the prefix ``diffumesh:``, and metrics of denoising."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_PER_FORWARD = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)


class Metrics:
    """The server's counters, gauges and histograms. All methods are safe to call from several threads."""

    def __init__(self, model_name: str) -> None:
        """Start all metrics at zero, labelled with the served model's name."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"diffumesh:{name}", text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"diffumesh:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(**self._labels)

        self._requests = counter("request_success", "Finished completions.", "finished_reason")
        self._refused = counter(
            "request_refused",
            "Requests refused because of the queue or the state of the server, not for what they ask.",
            "reason",
        )
        self._aborted = counter("request_given_up", "Accepted requests that were aborted.", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of rows that were inserted into a slot.").labels(
            **self._labels
        )
        self._generated = counter("generation_tokens", "Tokens of finished completions.").labels(**self._labels)
        self._committed = counter("committed_tokens", "Tokens committed to canvases.").labels(**self._labels)
        self._forwards = counter("forwards", "Forward passes of the model.").labels(**self._labels)
        self._steps = counter("denoise_steps", "Denoise steps of finished rows.").labels(**self._labels)
        self._accepted = counter(
            "accepted_steps", "Steps and tokens of finished rows that drafts allowed, without a pass of their own."
        ).labels(**self._labels)
        self.first = histogram(
            "time_to_first_token_seconds",
            "Seconds from the arrival of a request until a row's first text could be streamed.",
            _SECONDS,
        )
        self.pieces = histogram(
            "inter_token_latency_seconds", "Seconds between two chunks of a streamed row.", _SECONDS
        )
        self.between = histogram(
            "request_time_per_output_token_seconds",
            "Seconds per output token, from a row's first token to its end.",
            _SECONDS,
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "Seconds from the arrival of a request to its end.", _SECONDS
        )
        self.queued = histogram("request_queue_time_seconds", "Seconds that a row waited for a slot.", _SECONDS)
        self.inference = histogram("request_inference_time_seconds", "Seconds that a row spent in its slot.", _SECONDS)
        self._prompts = histogram("request_prompt_tokens", "Prompt tokens per row.", _TOKENS)
        self._lengths = histogram("request_generation_tokens", "Tokens per completion.", _TOKENS)
        self._tokens_per_forward = histogram(
            "tokens_per_forward", "Tokens committed per forward pass of a row.", _PER_FORWARD
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed when ``/metrics`` is requested."""
        gauge = Gauge(f"diffumesh:{name}", text, ["model_name"], registry=self.registry)
        gauge.labels(**self._labels).set_function(value)

    def refused(self, reason: str) -> None:
        """Count a refused request."""
        self._refused.labels(**self._labels, reason=reason).inc()

    def aborted(self, reason: str) -> None:
        """Count an accepted request that was aborted before it was finished."""
        self._aborted.labels(**self._labels, reason=reason).inc()

    def inserted(self, prompt_tokens: int, waited: float) -> None:
        """Count a row that was inserted into a slot.

        Args:
          prompt_tokens: number of tokens of its prompt.
          waited: seconds that it waited for the slot.
        """
        self._prompt.inc(prompt_tokens)
        self._prompts.observe(prompt_tokens)
        self.queued.observe(waited)

    def forwards(self, count: int) -> None:
        """Count forward passes of the model."""
        self._forwards.inc(count)

    def row_finished(self, committed: int, steps: int, denoised: bool, seconds: float, accepted: int = 0) -> None:
        """Count a finished row.

        Args:
          committed: number of tokens that were committed to its canvas.
          steps: number of its denoise steps or decoded tokens.
          denoised: whether they were denoise steps.
          seconds: time that the row spent in its slot.
          accepted: number of its steps without a forward pass of their own.
        """
        self._committed.inc(committed)
        self._accepted.inc(accepted)
        if denoised:
            self._steps.inc(steps)
        self.inference.observe(seconds)
        if (passes := steps - accepted) > 0:
            self._tokens_per_forward.observe(committed / passes)

    def completed(self, reason: str, tokens: int) -> None:
        """Count a completion of ``tokens`` tokens that was returned to a client, with its finish reason."""
        self._requests.labels(**self._labels, finished_reason=reason).inc()
        self._generated.inc(tokens)
        self._lengths.observe(tokens)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
