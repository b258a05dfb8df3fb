"""A checkpoint on a mesh as a model of lm-evaluation-harness.

Likelihoods are exact for autoregressive models. For diffusion models they are the Monte Carlo estimate of Dream's
authors, which does not report whether greedy decoding yields the text.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from checkpoints import DEMO, CheckpointFolder, folder_fingerprint, open_folder
from launch.hosts.preflight import agree, agree_on_programs, digest
from launch.process.startup import this_host
from runtime import (
    CompletionBuilder,
    DiffusionConfig,
    Engine,
    InputError,
    RowRequest,
    SamplingConfig,
    TextTokenizer,
    declared_parameters,
    row_seed,
)

# Sampling parameters of a task. The harness and the schema have the same names for them.
_SAMPLING = ("temperature", "top_p", "top_k")
# The harness's names for the number of new tokens, in the order of their priority.
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_NEW_TOKENS = 256


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"model_args: {name} is {value!r:.100}; expected true or false", field=name)
    return value


def _bos_ids(folder: CheckpointFolder, tokenizer: TextTokenizer) -> list[int]:
    """Return the id of the token that begins a text, as a list.

    Raises:
      InputError: the checkpoint has none.
    """
    token = (folder.read_json("tokenizer_config.json") or {}).get("bos_token")
    text = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.known_ids([text]) if isinstance(text, str) else ()
    if not found:
        raise InputError(
            f"model_args: add_bos_token=true, but tokenizer_config.json of {folder.name} has no bos_token that is in "
            "its vocabulary",
            field="add_bos_token",
        )
    return list(found)


class HarnessModel(LM):
    """A checkpoint on a mesh with the interface of the harness."""

    def __init__(
        self,
        checkpoint: str = str(DEMO),
        mesh: str | None = None,
        dtype: str | None = None,
        quantize: str = "none",
        kv_cache: str = "model",
        lora: str | None = None,
        slots: int | None = None,
        seed: int = 0,
        mc_samples: int = 128,
        add_bos_token: bool = False,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **decoding: Any,
    ) -> None:
        """Load the model. The harness's ``batch_size`` and ``device`` are ignored: use ``slots`` and ``mesh``.

        Args:
          checkpoint: model folder, URL or Hub name.
          mesh: axis sizes such as ``data=2;tensor=4``, because commas separate the harness's arguments; None for the
            default mesh.
          dtype, quantize, kv_cache, lora: as in :meth:`runtime.Engine.load`.
          slots: maximum number of rows on the devices at a time; None for as many as memory allows.
          seed: seed of samples and of Monte Carlo estimates.
          mc_samples: number of samples of each Monte Carlo estimate.
          add_bos_token: put ``bos_token`` of ``tokenizer_config.json`` before contexts that do not begin with it.
          batch_size, max_batch_size, device: ignored.
          decoding: decoding parameters, which override those of a task.

        Raises:
          InputError: a parameter is invalid or does not apply to this model, or hosts have different checkpoints or
            parameters.
        """
        super().__init__()
        spec = mesh.replace(";", ",") if mesh else None
        folder = open_folder(checkpoint, lora=lora)
        # The parameters may come from a file of the harness, which is not on its command line.
        given = (spec, dtype, quantize, kv_cache, slots, seed, mc_samples, add_bos_token, sorted(decoding.items()))
        facts = {"checkpoint": folder_fingerprint(folder), "model_args": repr(given)}
        agree(this_host(), "model", facts, "the hosts are about to load different models: ")
        self.engine = Engine.load(folder, spec, dtype, quantize=quantize, kv_cache=kv_cache, max_batch=slots)
        self.engine.runner.programs.before_run = agree_on_programs(this_host())
        self._name = f"{Path(checkpoint).name}-{facts['checkpoint']}"
        self._slots, self._seed, self._samples = slots, seed, mc_samples
        self._decoding = decoding
        self._bos = _bos_ids(folder, self.engine.tokenizer) if _switch("add_bos_token", add_bos_token) else []
        self._config(self._decoding)

    def _config(self, fields: dict[str, Any]) -> DiffusionConfig | SamplingConfig:
        fields = {"max_new_tokens": _DEFAULT_NEW_TOKENS, "temperature": 0.0} | fields
        known = [one.name for one in declared_parameters(type(self.engine.published())) if not one.from_model]
        for name in fields:
            if name not in known:
                raise InputError(f"model_args: unknown {name}; use {', '.join(known)}", field=name)
        return self.engine.with_end_tokens(self.engine.published(**fields))

    @staticmethod
    def _agree(call: str, requests: Sequence[object]) -> None:
        """Compare the requests of all hosts: of different ones, each host would compute a part.

        From here on, only host 0 prints and writes results.

        Raises:
          InputError: they differ.
        """
        if this_host().count > 1:
            asked = digest("".join(digest(repr(request)) for request in requests))
            facts = {"their number": str(len(requests)), "their digest": asked}
            beginning = "the hosts got different requests (they need the same data sets and databases of --use_cache): "
            agree(this_host(), f"requests of {call}", facts, beginning)
            # Where it is not 0, the harness evaluates all documents too, but neither prints nor writes results. Not
            # earlier: a task that is imported where it is not 0, such as ifeval, does not download the data it needs.
            os.environ["LOCAL_RANK"] = str(this_host().process_index)

    def _context(self, text: str) -> list[int]:
        """Return the tokens of a context, of which there is at least one."""
        tokens = self.engine.tokenizer.encode(text)
        if tokens[: len(self._bos)] != self._bos:
            tokens = self._bos + tokens
        return tokens or [self.engine.end_token_ids[0]]

    # ---- likelihoods ------------------------------------------------------------------------------------------

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and its continuation, to which spaces at the end of the context belong."""
        bare = context.rstrip()
        whole, before = (self.engine.tokenizer.encode(text) for text in (context + continuation, bare))
        new = whole[len(before) :]
        if self.engine.config.objective == "masked_diffusion":
            new = [*new, self.engine.end_token_ids[0]]
        room = self.engine.config.max_positions - len(new)
        return self._context(bare)[-max(1, room) :], new

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in its context, and whether greedy decoding yields it.

        For a diffusion model the latter is not computed and always False.
        """
        pairs = [self._pair(*request.args) for request in requests]
        self._agree("loglikelihood", pairs)
        if self.engine.config.objective == "autoregressive":
            return self.engine.log_likelihoods(pairs)
        found = self.engine.estimate_log_likelihoods(pairs, samples=self._samples, seed=self._seed)
        return [(value, False) for value in found]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each whole text, summed over its windows.

        Raises:
          InputError: the model is a diffusion model, for which rolling likelihoods are not defined.
        """
        if self.engine.config.objective == "masked_diffusion":
            raise InputError("rolling log-likelihoods (perplexity) require an autoregressive model")
        texts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.engine.tokenizer.encode(request.args[0]),
                prefix_token=self._context("")[0],
                max_seq_len=self.engine.config.max_positions - 1,
                context_len=1,
            )
            texts.append([make_disjoint_window(window) for window in windows])
        self._agree("loglikelihood_rolling", texts)
        return [sum(value for value, _ in self.engine.log_likelihoods(pairs)) for pairs in texts]

    # ---- generation -------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Generate for each (context, parameters), and cut the text at the first stop string."""
        seen: Counter[str] = Counter()
        rows, stops = [], []
        for context, asked in (request.args for request in requests):
            config = self._config(self._asked(asked) | self._decoding)
            # The same context again is another sample.
            seed = row_seed(self._seed, context, seen[context])
            seen[context] += 1
            room = self.engine.config.max_positions - config.max_new_tokens
            rows.append(RowRequest(self._context(context)[-max(1, room) :], config, seed))
            until = asked.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))
        self._agree("generate_until", list(zip(rows, stops, strict=True)))
        texts = [""] * len(rows)
        builder = CompletionBuilder(self.engine.tokenizer, self.engine.config.mask_token_id, self.engine.end_token_ids)
        for results in self.engine.scheduler(rows, self._slots, self.engine.stop_tests(stops)).run():
            for result in results:
                result.check()
                number = result.number
                texts[number] = builder.build(result.sequence, rows[number].tokens, stop=stops[number]).text
        return texts

    @staticmethod
    def _asked(parameters: dict[str, Any]) -> dict[str, Any]:
        """Return a task's parameters by their names in the schema; those of sampling only if the task samples.

        As in the harness's own models, a task without ``do_sample`` samples if its temperature is above 0, and the
        first name of the limit counts.
        """
        sample = parameters.get("do_sample")
        if sample is None:
            sample = float(parameters.get("temperature") or 0.0) > 0.0
        fields = {name: parameters[name] for name in (_SAMPLING if sample else ()) if parameters.get(name) is not None}
        limits = [parameters[name] for name in _LIMITS if parameters.get(name) is not None]
        if limits:
            fields["max_new_tokens"] = int(limits[0])
        return fields

    # ---- chat -------------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """The checkpoint's name and fingerprint: the harness caches prompts with this checkpoint's chat template."""
        return self._name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the checkpoint's chat template, which the harness records; empty if ``chat_template`` is False."""
        return self.engine.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: Iterable[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation to text."""
        return self.engine.tokenizer.render_messages(list(chat_history), add_generation_prompt)
