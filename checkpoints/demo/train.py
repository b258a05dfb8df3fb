"""Trains the demo checkpoint: a small Dream-architecture model that writes short Python functions, by masked diffusion.

    python -m checkpoints.demo.train --output=checkpoints/demo --state=STATE_FOLDER --steps=4400

The seed determines programs, tokenizer, data order and masks. STATE_FOLDER keeps the programs and, saved every few
minutes, the state of the training; the same command resumes from it. The learning rate falls over the last part of the
steps. The state before that is saved too (`before_decay.pt`), so that a longer run can start from it. Afterwards,
delete the old manifest of digests, and write the new one with `diffumesh verify --write_manifest`. README.md in this
folder has the results.
"""

import io
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from absl import flags
from tokenizers import Tokenizer

from checkpoints.demo import corpus
from checkpoints.demo.canvases import Batch, Corpus, checking_batches, training_batch
from checkpoints.demo.model import build_model, save, tokenizer_files
from checkpoints.demo.programs import FOLDER, excluded, training_programs
from checkpoints.demo.recipe import Recipe
from checkpoints.local_files import parse_json_object, read_json_lines, replace_file

Pair = tuple[str, str]


def define_flags(values: flags.FlagValues) -> None:
    """Define this script's flags."""
    flags.DEFINE_string("output", None, "folder that receives the checkpoint", flag_values=values, required=True)
    flags.DEFINE_string("state", None, "folder of the state to resume from", flag_values=values, required=True)
    flags.DEFINE_integer("steps", 9000, "optimizer steps in all", 1, flag_values=values)
    flags.DEFINE_integer("programs", Recipe().programs, "programs that are generated", 100, flag_values=values)
    flags.DEFINE_multi_string("source", [], "folder of Python source (default: standard library)", flag_values=values)
    flags.DEFINE_enum("device", "auto", ["auto", "cpu", "cuda"], "auto takes CUDA if there is any", flag_values=values)
    flags.DEFINE_integer("seed", 0, "seed of programs, initialisation, data order and masks", flag_values=values)
    flags.DEFINE_integer("threads", os.cpu_count() or 1, "CPU threads", 1, flag_values=values)
    flags.DEFINE_bool("compile", True, "torch.compile the model", flag_values=values)


def masked_loss(model: transformers.Qwen2ForCausalLM, batch: Batch, device: torch.device) -> torch.Tensor:
    """Compute the weighted cross entropy of a batch, in nats per token."""
    hidden = model.model(input_ids=batch.noised.to(device), attention_mask={"full_attention": None}).last_hidden_state
    logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])[batch.sources.to(device)]).float()
    losses = torch.nn.functional.cross_entropy(logits, batch.targets.to(device), reduction="none")
    return (losses * batch.weights.to(device)).sum() / batch.normaliser


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Return the learning rate of a step: warm-up, constant, then a cosine over the last `decay_share` of the steps."""
    through = min(max((step + 1) / steps - 1 + recipe.decay_share, 0.0) / recipe.decay_share, 1.0)
    scale = (1 + math.cos(math.pi * through)) / 2
    rate = recipe.final_learning_rate + (recipe.learning_rate - recipe.final_learning_rate) * scale
    return rate * min(1.0, (step + 1) / recipe.warmup_steps)


def kept_pairs(path: Path, make: Callable[[], Iterable[Pair]]) -> list[Pair]:
    """Read (prompt, body) pairs from a file; make the file if it does not exist."""
    if not path.exists():
        rows = ({"prompt": prompt, "body": body} for prompt, body in make())
        replace_file(path, (f"{json.dumps(row)}\n".encode() for row in rows))
    return [(row["prompt"], row["body"]) for row in read_json_lines(path)]


def generated_pairs(count: int, seed: int) -> Iterator[Pair]:
    """Yield (prompt, body) of generated programs."""
    for program in training_programs(count, seed, excluded()):
        yield program.prompt, program.body


def library_pairs(sources: Sequence[str]) -> Iterator[Pair]:
    """Yield (prompt, body) of the standard library's functions in the training split."""
    without = excluded()
    for function in corpus.read_functions([Path(s) for s in sources] or [corpus.standard_library()]):
        prompt = function.signature.rstrip()
        if not function.held_out and not without.has(function.text):
            yield prompt, function.text[len(prompt) :]


class Trainer:
    """Model, optimizers and moving average, with their state on disk."""

    def __init__(self, recipe: Recipe, device: torch.device, steps: int) -> None:
        self.recipe, self.device, self.steps, self.step = recipe, device, steps, 0
        self.master = build_model(recipe).to(device)
        self.worker = build_model(recipe).to(device, torch.bfloat16)  # a copy of the master, which computes gradients
        self.worker.model.rotary_emb.inv_freq = self.master.model.rotary_emb.inv_freq  # angles stay float32
        self.parameters = list(self.master.parameters())
        self.copies = list(self.worker.parameters())
        self.average = [p.detach().clone() for p in self.parameters]
        matrices = [p for n, p in self.master.named_parameters() if p.ndim == 2 and ".layers." in n]
        others = [p for n, p in self.master.named_parameters() if p.ndim != 2 or ".layers." not in n]
        adjust, betas = "match_rms_adamw", (recipe.beta1, recipe.beta2)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, 0.0, recipe.weight_decay, momentum=recipe.momentum, adjust_lr_fn=adjust),
            torch.optim.AdamW(others, 0.0, betas, weight_decay=0.0, fused=True),
        ]
        self.copy(self.parameters)

    def copy(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy weights to the worker."""
        torch._foreach_copy_([p.data for p in self.copies], [p.data for p in parameters])

    def train(self, batch: Batch) -> torch.Tensor:
        """Run one optimizer step, and return the loss."""
        rate = learning_rate(self.recipe, self.step, self.steps)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        loss = masked_loss(self.worker, batch, self.device)
        loss.backward()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            parameter.grad = copy.grad.float() if copy.grad is not None else None
            copy.grad = None
        torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            self.copy(self.parameters)
            keep = min(self.recipe.averaging, (self.step + 1) / (self.step + 10))
            torch._foreach_lerp_(self.average, [p.data for p in self.parameters], 1 - keep)
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self, check: Sequence[Batch]) -> float:
        """Return the mean loss of the averaged weights on these batches, in nats per body token."""
        self.copy(self.average)
        with torch.compiler.set_stance("force_eager"):  # training does not compile these shapes
            losses = [masked_loss(self.worker, batch, self.device).item() for batch in check]
        self.copy(self.parameters)
        return sum(losses) / len(losses)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the averaged weights by name."""
        return dict(zip((n for n, _ in self.master.named_parameters()), self.average, strict=True))

    def save(self, path: Path, record: dict[str, Any]) -> None:
        """Save the state for resuming."""
        state = {"master": self.master.state_dict(), "average": self.average, "step": self.step, "record": record}
        data = io.BytesIO()
        torch.save({**state, "optimizers": [o.state_dict() for o in self.optimizers]}, data)
        replace_file(path, [data.getbuffer()])

    def load(self, path: Path) -> dict[str, Any]:
        """Restore the state that `save` wrote; return its record."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.master.load_state_dict(state["master"])
        torch._foreach_copy_(self.average, state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.copy(self.parameters)
        record: dict[str, Any] = state["record"]
        return record


def first_record(
    values: flags.FlagValues, recipe: Recipe, data: Corpus, parameters: int, device: str
) -> dict[str, Any]:
    """Return the contents of training.json for a run, without the log."""
    return {
        "command": f"python -m checkpoints.demo.train --steps={values.steps} --seed={values.seed}",
        "recipe": asdict(recipe),
        "corpus": {
            "generated": data.generated, "library": len(data.rows) - data.generated, "tokens": data.tokens,
        },
        "parameters": parameters,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__),
                     "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{values.threads} CPU threads",
        "log": [],
    }  # fmt: skip


def check_state(values: flags.FlagValues, recipe: Recipe) -> None:
    """Write the settings that the contents of the state folder depend on, or compare them with those written there.

    The recipe is one of them, so that all steps of a run follow the one in its record.

    Raises:
      flags.Error: the state was made with other settings.
    """
    path = Path(values.state) / "settings.json"
    settings = {"seed": values.seed, "source": list(values.source), **asdict(recipe)}
    now = parse_json_object(json.dumps(settings).encode())  # as it is read again, with lists for tuples
    if not path.exists():
        for name in ("state.pt", "library.jsonl", "tokenizer.json"):
            if path.with_name(name).exists():
                raise flags.Error(f"--state={values.state} contains {name}, but not {path.name}; use another folder")
        replace_file(path, [json.dumps(settings).encode()])
        return
    before = parse_json_object(path.read_bytes())
    changes = [f"{name}: was {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]
    if changes:
        raise flags.Error(f"--state={values.state} is of another run ({'; '.join(changes)}); use another folder")


def prepare(values: flags.FlagValues, recipe: Recipe) -> tuple[Corpus, list[Batch], Tokenizer]:
    """Return the training data, fixed batches of development tasks, and the tokenizer; generated on the first run."""
    folder = Path(values.state)
    name = f"programs-{values.programs}-{values.seed}.jsonl"
    generated = kept_pairs(folder / name, lambda: generated_pairs(values.programs, values.seed))
    library = kept_pairs(folder / "library.jsonl", lambda: library_pairs(values.source))
    kept = folder / "tokenizer.json"
    if not kept.exists():
        texts = (prompt + body for prompt, body in [*generated[:60_000], *library[::4]])
        replace_file(kept, [corpus.train_tokenizer(texts, recipe.vocabulary).to_str().encode()])
    tokenizer = Tokenizer.from_file(str(kept))
    data = Corpus(generated, library, tokenizer, recipe)
    tasks = [(row["prompt"], row["completion"]) for row in read_json_lines(FOLDER / "development_tasks.jsonl")]
    check = checking_batches(Corpus(tasks, (), tokenizer, recipe), recipe, values.seed)
    return data, check, tokenizer


def main(values: flags.FlagValues) -> None:
    """Generate programs, train from a saved state or from scratch, and save the checkpoint."""
    recipe, folder = Recipe(programs=values.programs), Path(values.output)
    state = Path(values.state) / "state.pt"
    state.parent.mkdir(parents=True, exist_ok=True)
    check_state(values, recipe)
    name = values.device if values.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(values.threads)
    torch.manual_seed(values.seed)
    data, check, tokenizer = prepare(values, recipe)
    trainer = Trainer(recipe, torch.device(name), values.steps)
    size = sum(p.numel() for p in trainer.parameters)
    record = trainer.load(state) if state.exists() else first_record(values, recipe, data, size, name)
    record["command"] = f"python -m checkpoints.demo.train --steps={values.steps} --seed={values.seed}"
    if values.compile:
        for layer in trainer.worker.model.layers:  # all layers are equal, so this compiles once
            layer.compile(dynamic=False)
    print(
        f"{len(data.rows)} functions, {data.tokens} tokens; {size} parameters on {name}; step {trainer.step}",
        flush=True,
    )
    files = tokenizer_files(tokenizer, recipe)
    spent = record["log"][-1]["seconds"] if record["log"] else 0.0
    started = saved = time.monotonic()
    recent: list[torch.Tensor] = []
    while trainer.step < values.steps:
        recent.append(trainer.train(training_batch(data, recipe, values.seed, trainer.step, values.steps)))
        last = trainer.step == values.steps
        if last or trainer.step % recipe.evaluate_every == 0:
            entry = {"step": trainer.step, "tokens": trainer.step * recipe.rows * recipe.canvas,
                     "seconds": round(spent + time.monotonic() - started, 1),
                     "train_loss": round(float(torch.stack(recent).mean()), 4),
                     "development_loss": round(trainer.held_out_loss(check), 4)}  # fmt: skip
            record["log"].append(entry)
            recent.clear()
            print(json.dumps(entry), flush=True)
        if trainer.step == recipe.decays_from(values.steps):
            trainer.save(state.with_name("before_decay.pt"), record)
        if last or time.monotonic() - saved > recipe.save_minutes * 60:
            trainer.save(state, record)
            if not last:
                save(folder, {**files, "training.json": record}, trainer.weights())
            saved = time.monotonic()
    # After the loop, also for a run that ended after its last state was saved, or goes on with another folder.
    save(folder, {**files, "training.json": record}, trainer.weights())
    print(f"saved {folder}: {sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6:.1f} MB")


def run() -> None:
    """Parse the command line and train; exit with 2 if a flag is wrong."""
    values = flags.FlagValues()
    define_flags(values)
    if "--help" in sys.argv[1:]:
        print(__doc__, values.get_help(), sep="\n")
        return
    try:
        if len(values(sys.argv)) > 1:
            raise flags.Error("only flags are expected; see --help")
        main(values)
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
