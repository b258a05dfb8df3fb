"""Turns the body of a request into rows for the engine, and chooses the slots that can decode them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.openai.bodies import Asked, Defaults, by_our_names, check_prompt_size, exceeds, read_asked
from launch.serving.bodies import ChatBody, CompletionBody, ScoreBody
from launch.serving.errors import ApiError, from_input_error, invalid
from launch.serving.limits import Limits
from runtime import (
    CheckpointError,
    Choice,
    DiffusionConfig,
    Executor,
    InputError,
    RowRequest,
    SamplingConfig,
    ScorePass,
    StopTest,
    can_run,
    compiled_values,
    declared_parameters,
    row_seeds,
    stop_tests,
)

# JavaScript represents integers of up to 53 bits exactly.
_SEED_BITS = 53


@dataclass(frozen=True)
class Reading:
    """The rows of one generation request.

    Attributes:
      asked: the validated request of each prompt.
      rows: the rows of the first prompt, one per sample, then those of the next prompt, and so on.
      pool: index of the pool whose slots decode the rows.
    """

    asked: Sequence[Asked]
    rows: Sequence[RowRequest]
    pool: int

    def stop_tests(self, defaults: Defaults) -> list[StopTest | None]:
        """Return, for each row, the test that ends it at its stop strings; None if it has none."""
        stops = [self.of(row).stop for row in range(len(self.rows))]
        return stop_tests(defaults.tokenizer, defaults.end_token_ids, stops)

    def of(self, index: int) -> Asked:
        """Return the validated request that a row belongs to, given the row's index."""
        return self.asked[index // self.asked[0].samples]


@dataclass(frozen=True)
class Mode:
    """A set of decoding parameters that the server has compiled programs for.

    Attributes:
      config: the parameters. A request can use the mode if programs compiled for them can run it.
      pool: index of the mode's pool in the executor.
    """

    config: DiffusionConfig | SamplingConfig
    pool: int


class Reader:
    """Turns request bodies into rows. Tokenizing a long prompt takes time, so this must not run on the event loop."""

    def __init__(self, defaults: Defaults, modes: Sequence[Mode], limits: Limits) -> None:
        """Read requests with these defaults, modes and limits. :meth:`serve` must be called before the first one."""
        self._defaults, self._modes, self._limits = defaults, modes, limits
        self.widest = 0
        self._executor: Executor | None = None

    @property
    def modes(self) -> list[dict[str, Any]]:
        """The compiled parameters of each mode, the default mode first."""
        return [compiled_values(mode.config) for mode in self._modes]

    def serve(self, executor: Executor) -> None:
        """Set the executor whose slots will decode the requests."""
        self._executor = executor
        # A bucket may be wider than the model's positions.
        self.widest = min(max(pool.width for pool in executor.pools), self._defaults.model.max_positions)

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        try:
            return bool(self._defaults.tokenizer.chat_template)
        except CheckpointError:
            return False

    def generation(self, body: CompletionBody | ChatBody) -> Reading:
        """Return the rows that a request for completions or a chat asks for.

        Raises:
          ApiError: the request is invalid or too large, or no mode can decode it.
        """
        self.check_model(body.model)
        fields = body.decoding()
        try:
            changes = by_our_names(fields)
            seed = changes.pop("seed", secrets.randbits(_SEED_BITS))
            prompts = _several(changes["prompt"]) if "prompt" in changes else [None]
            samples = changes.get("num_return_sequences", self._defaults.samples)
            self._check_number(len(prompts), samples, "num_return_sequences" in changes)
            asked = []
            for prompt in prompts:
                own = changes if prompt is None else changes | {"prompt": prompt}
                self._check_size(own)
                asked.append(read_asked(own, self._defaults))
            seeds = row_seeds(seed, len(asked), samples)
        except CheckpointError:
            # The chat template is the only part of the checkpoint that is read here.
            raise invalid("messages: The model has no usable chat template. Use /v1/completions.", "messages") from None
        except InputError as error:
            raise from_input_error(error) from None
        # All rows of a request have the same parameters, and so the same pool.
        (pool,) = {self._pool(one) for one in asked}
        rows = [
            one.request(seeds[number * samples + sample])
            for number, one in enumerate(asked)
            for sample in range(samples)
        ]
        return Reading(asked, rows, pool)

    def _check_number(self, prompts: int, samples: int, asked: bool) -> None:
        """Check the number of completions. ``asked`` says whether the request sets the number per prompt.

        Raises:
          ApiError: there are too many.
        """
        rows, most = prompts * samples, self._limits.rows
        if rows > most:
            field = "n" if asked and prompts <= most else "prompt"
            raise invalid(f"{field}: {rows} completions; at most {most} per request", field)

    def scoring(self, body: ScoreBody) -> tuple[list[list[int]], list[ScorePass]]:
        """Return the rows of a scoring request as token ids, and the forward passes that score them.

        Raises:
          ApiError: the request is invalid or too large.
        """
        assert self._executor is not None
        self.check_model(body.model)
        given = _several(body.input)
        if len(given) > self._limits.rows:
            raise invalid(f"input: {len(given)} rows; at most {self._limits.rows} per request", "input")
        rows = [self._tokens(row, "input") for row in given]
        targets = rows if body.targets is None else [self._tokens(row, "targets") for row in _several(body.targets)]
        if [len(row) for row in rows] != [len(row) for row in targets]:
            raise invalid("targets: Each row must have as many tokens as the same row of input.", "targets")
        longest = max(map(len, rows))
        width = min(width for width in self._executor.score_widths if width >= longest)
        batch = self._executor.score_rows
        temperature = 1.0 if body.temperature is None else body.temperature
        passes = [
            ScorePass(rows[start : start + batch], targets[start : start + batch], temperature, width, batch)
            for start in range(0, len(rows), batch)
        ]
        return rows, passes

    def _tokens(self, row: str | list[int], name: str) -> list[int]:
        """Return the token ids of one row of a scoring request.

        Args:
          row: the row, as text or token ids.
          name: the field that it is from, for messages.

        Raises:
          ApiError: the row is empty, too long or cannot be tokenized, or the model does not have one of its token ids.
        """
        if isinstance(row, str) and not exceeds(row, self.widest):
            try:
                row = self._defaults.tokenizer.encode(row)
            except InputError:
                raise invalid(f"{name}: The tokenizer cannot process this text.", name) from None
        if isinstance(row, str) or len(row) > self.widest:
            raise invalid(f"{name}: A row is too long; each row must fit into {self.widest} positions.", name)
        wrong = [token for token in row if token >= self._defaults.model.vocab_size]
        if wrong or not row:
            why = f"{wrong[0]} is not a token id of this model." if wrong else "A row must have at least one token."
            raise invalid(f"{name}: {why}", name)
        return row

    def check_model(self, name: str | None) -> None:
        """Check that a request names the served model or no model.

        Raises:
          ApiError: it names another model (404).
        """
        if name is not None and name != self._defaults.model_name:
            raise ApiError(404, "The model does not exist. See /v1/models.", "model_not_found", "model")

    def _check_size(self, changes: dict[str, Any]) -> None:
        """Refuse text that is too long for the widest slot, before it is tokenized.

        Raises:
          InputError: the prompt, the suffix, or all messages together, are too long.
        """
        check_prompt_size(changes.get("suffix", ""), self.widest, "suffix")
        texts = [changes["prompt"]] if "prompt" in changes else []
        for message in changes.get("messages", []):
            content = message["content"]
            texts += [content] if isinstance(content, str) else [part["text"] for part in content]
        if "messages" in changes:
            texts = ["".join(texts)]
        for text in texts:
            check_prompt_size(text, self.widest, "messages" if "messages" in changes else "prompt")

    def _pool(self, asked: Asked) -> int:
        """Return the index of the pool whose slots can decode the rows of a request.

        Raises:
          ApiError: there is none.
        """
        assert self._executor is not None
        length = asked.request(0).canvas_length
        if length > self.widest:
            raise invalid(
                f"max_tokens: The prompt and new tokens need {length} positions; this server has room for "
                f"{self.widest}.",
                "max_tokens",
            )
        mode = next((mode for mode in self._modes if can_run(mode.config, asked.config)), None)
        if mode is None:
            wanted, *offered = describe([asked.config, *(mode.config for mode in self._modes)])
            why = f"This server does not offer {wanted}. Available: {'; '.join(offered)}."
            raise from_input_error(InputError(why, field=not_offered(asked.config, self._modes)))
        pool = self._executor.pools[mode.pool]
        if (steps := pool.steps_per_block(asked.config)) > pool.max_steps:
            raise invalid(f"steps: {steps} steps per block; at most {pool.max_steps}", "steps")
        return mode.pool


def describe(configs: Sequence[DiffusionConfig | SamplingConfig]) -> list[str]:
    """Return the compiled parameters of each configuration as text, such as ``cache=dual, parallel=none``.

    Parameters in which the configurations do not differ are left out. Names out of a fixed set, such as ``cache=none``,
    are listed even if they are the default; other values only if they are not.
    """
    compiled = [compiled_values(config) for config in configs]
    named = {one.name: one for config in configs for one in declared_parameters(type(config))}
    different = {
        name for values in compiled for name in values if any(each.get(name) != values[name] for each in compiled)
    }
    texts = []
    for values in compiled:
        said = [
            named[name].spelled(value)
            for name, value in values.items()
            if name in different and (value != named[name].default or isinstance(named[name].kind, Choice))
        ]
        texts.append(", ".join(said) or "the defaults")
    return texts


def not_offered(config: DiffusionConfig | SamplingConfig, modes: Sequence[Mode]) -> str:
    """Return the parameter to name in the error for a request that none of the server's modes can decode.

    The nearest mode is the one with the fewest compiled parameters in which the request differs both from it and from
    the default mode, which is the first. One of these parameters is returned.

    Args:
      config: decoding parameters of the request.
      modes: modes of the server.

    Returns:
      The parameter's name in requests.
    """
    wanted, default = compiled_values(config), modes[0].config
    changed = [name for name in wanted if getattr(config, name) != getattr(default, name)]
    wrong = []
    for mode in modes:
        theirs = compiled_values(mode.config)
        names = [name for name in changed if name not in theirs or theirs[name] != wanted[name]]
        # Parameters that the request and the mode both have come first, because the others follow from them.
        wrong.append(sorted(names, key=lambda name: name not in theirs))
    first = min(filter(None, wrong), key=len)[0]
    return next(one.request_name for one in declared_parameters(type(config)) if one.name == first)


def _several(prompt: Any) -> list[Any]:
    """Return a list of prompts, each a text or a list of token ids, given one prompt or a list of prompts."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
