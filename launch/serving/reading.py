"""From a body to rows: what is asked for, in which slots it can be done, and for how many rows."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.openai.bodies import Asked, Defaults, by_our_names, check_prompt_size, read_asked
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

# Seeds that are made here are exact in JavaScript too.
_SEED_BITS = 53


@dataclass(frozen=True)
class Reading:
    """What a request comes to.

    Attributes:
      asked: of each prompt.
      rows: prompt by prompt, sample by sample.
      pool: index of the pool whose slots they get.
    """

    asked: Sequence[Asked]
    rows: Sequence[RowRequest]
    pool: int

    def stop_tests(self, defaults: Defaults) -> list[StopTest | None]:
        """The tests that end rows at their stop strings."""
        stops = [self.of(row).stop for row in range(len(self.rows))]
        return stop_tests(defaults.tokenizer, defaults.end_token_ids, stops)

    def of(self, index: int) -> Asked:
        """What was asked of a row."""
        return self.asked[index // self.asked[0].samples]


@dataclass(frozen=True)
class Mode:
    """A way of decoding that is compiled in.

    Attributes:
      config: what a request has in common with all of its slots.
      pool: index of its pool.
    """

    config: DiffusionConfig | SamplingConfig
    pool: int


class Reader:
    """Reads bodies for the slots that there are. Reading takes time where prompts are long: not for the loop."""

    def __init__(self, defaults: Defaults, modes: Sequence[Mode], limits: Limits) -> None:
        """Take what requests start from, the ways of decoding, and bounds."""
        self._defaults, self._modes, self._limits = defaults, modes, limits
        self.widest = 0
        self._executor: Executor | None = None

    @property
    def modes(self) -> list[dict[str, Any]]:
        """What is compiled into each way of decoding, the default first."""
        return [compiled_values(mode.config) for mode in self._modes]

    def serve(self, executor: Executor) -> None:
        """Read for these slots from now on."""
        self._executor = executor
        self.widest = max(pool.width for pool in executor.pools)

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        try:
            return bool(self._defaults.tokenizer.chat_template)
        except CheckpointError:
            return False

    def generation(self, body: CompletionBody | ChatBody) -> Reading:
        """What is to be generated.

        Raises:
          ApiError: a request that is wrong, too large, or for which no program is compiled.
        """
        self._check_model(body.model)
        fields = body.decoding()
        try:
            changes = by_our_names(fields)
            prompts = _several(changes["prompt"]) if "prompt" in changes else [None]
            samples = changes.get("num_return_sequences", self._defaults.samples)
            if len(prompts) * samples > self._limits.rows:
                raise invalid(f"{len(prompts) * samples} completions; at most {self._limits.rows} a request", "n")
            asked = []
            for prompt in prompts:
                own = changes if prompt is None else changes | {"prompt": prompt}
                self._check_size(own)
                asked.append(read_asked(own, self._defaults))
        except CheckpointError:
            # Of what is read here only the chat template is the checkpoint's.
            raise invalid("messages: this model has no chat template; see /v1/completions", "messages") from None
        except InputError as error:
            raise from_input_error(error) from None
        seed = changes.get("seed", secrets.randbits(_SEED_BITS))
        seeds = row_seeds(seed, len(asked), samples)
        pools = [self._pool(one) for one in asked]
        # All rows of a request share a pool, so that it is clear what waits for what.
        pool = max(pools)
        rows = [
            RowRequest(one.tokens, one.config, seeds[number * samples + sample])
            for number, one in enumerate(asked)
            for sample in range(samples)
        ]
        return Reading(asked, rows, pool)

    def scoring(self, body: ScoreBody) -> tuple[list[list[int]], list[ScorePass]]:
        """Rows that are to be scored, and in which passes.

        Raises:
          ApiError: a request that is wrong or too large.
        """
        assert self._executor is not None
        self._check_model(body.model)
        given = _several(body.input)
        if len(given) > self._limits.rows:
            raise invalid(f"{len(given)} rows; at most {self._limits.rows} a request", "input")
        try:
            rows = [self._tokens(row, "input") for row in given]
            targets = rows if body.targets is None else [self._tokens(row, "targets") for row in _several(body.targets)]
        except InputError as error:
            raise from_input_error(error) from None
        if [len(row) for row in rows] != [len(row) for row in targets]:
            raise invalid("targets: as many rows as input, of as many tokens each", "targets")
        longest = max(map(len, rows))
        if longest > self.widest:
            raise self._too_long(longest, "input")
        width = min(width for width in self._executor.score_widths if width >= longest)
        batch = self._executor.score_rows
        temperature = 1.0 if body.temperature is None else body.temperature
        passes = [
            ScorePass(rows[start : start + batch], targets[start : start + batch], temperature, width, batch)
            for start in range(0, len(rows), batch)
        ]
        return rows, passes

    def _tokens(self, row: Any, name: str) -> list[int]:
        self._check_size({"prompt": row})
        if isinstance(row, str):
            row = self._defaults.tokenizer.encode(row)
        wrong = [token for token in row if token >= self._defaults.model.vocab_size]
        if wrong or not row:
            why = f"{wrong[0]} is no token" if wrong else "a row has at least one token"
            raise invalid(f"{name}: {why}", name)
        return row

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._defaults.model_name:
            raise ApiError(404, "there is no such model here; see /v1/models", "model_not_found", "model")

    def _check_size(self, changes: dict[str, Any]) -> None:
        """Refuse what cannot fit before it is tokenized.

        Raises:
          InputError: the prompt, or the texts of all messages, cannot fit.
        """
        texts = [changes["prompt"]] if "prompt" in changes else []
        for message in changes.get("messages", []):
            content = message["content"]
            texts += [content] if isinstance(content, str) else [part["text"] for part in content]
        for text in texts:
            check_prompt_size(text, self.widest)
        if "messages" in changes:
            check_prompt_size("".join(texts), self.widest)

    def _too_long(self, length: int, name: str) -> ApiError:
        return invalid(f"{length} tokens, new ones included; this server has room for {self.widest}", name)

    def _pool(self, asked: Asked) -> int:
        """The slots in which a row can be done.

        Raises:
          ApiError: there are none.
        """
        assert self._executor is not None
        length = RowRequest(asked.tokens, asked.config, 0).canvas_length
        if length > self.widest:
            raise self._too_long(length, "max_tokens")
        mode = next((mode for mode in self._modes if can_run(mode.config, asked.config)), None)
        if mode is None:
            there = "; ".join(describe(mode.config) for mode in self._modes)
            raise invalid(f"{describe(asked.config)}: no such programs are compiled here, but {there} (--mode)")
        pool = self._executor.pools[mode.pool]
        if (steps := pool.steps_per_block(asked.config)) > pool.max_steps:
            raise invalid(f"{steps} steps a block; at most {pool.max_steps}", "steps")
        return mode.pool


def describe(config: DiffusionConfig | SamplingConfig) -> str:
    """What of a configuration is compiled in, for people: as a mode of the server says it."""
    named = {one.name: one for one in declared_parameters(type(config))}
    # Choices tell ways of decoding apart; of the rest what is not the default.
    said = {
        name: value
        for name, value in compiled_values(config).items()
        if value != named[name].default or isinstance(named[name].kind, Choice)
    }
    return ", ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in said.items()
    )


def _several(prompt: Any) -> list[Any]:
    """One prompt or several, as several: texts, or lists of token ids."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
