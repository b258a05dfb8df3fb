"""Canvases for training: functions one after another, partly masked for masked diffusion.

A function has a prompt (signature and description) and a body, which ends with an end token. There are three kinds of
canvases:

* packed: all prompts are visible, and each body is masked with its own noise level;
* open: the first function is masked like a packed one. The functions after it are usually masked completely, prompts
  included, and have a small weight in the loss. They cannot be predicted, so the model learns low confidence after the
  first end token, and decoding commits these positions last. Decoding works on such canvases;
* whole: prompts are masked like bodies, so that the model also learns from prompts of other forms.

Dimension letters: B rows, S canvas length, M masked positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Tokenizer

from checkpoints.demo import corpus
from checkpoints.demo.recipe import Recipe


class Corpus:
    """Token ids of all functions, and the lengths of their prompts. Generated functions come first."""

    def __init__(self, generated: Sequence[tuple[str, str]], library: Sequence[tuple[str, str]], tokenizer: Tokenizer,
                 recipe: Recipe) -> None:  # fmt: skip
        """Encode (prompt, body) pairs, and drop functions that are too long."""
        self.end = corpus.token_id(tokenizer, corpus.END)
        self.mask = corpus.token_id(tokenizer, corpus.MASK)
        self.rows: list[np.ndarray] = []
        self.prompts: list[int] = []
        self.generated = 0
        for functions in (generated, library):
            for start in range(0, len(functions), 10_000):  # encoding all at once would need gigabytes
                self._add(
                    [_cut(*f, start + i) for i, f in enumerate(functions[start : start + 10_000])], tokenizer, recipe
                )
            self.generated = self.generated or len(self.rows)
        self.tokens = sum(map(len, self.rows))

    def _add(self, functions: list[tuple[str, str]], tokenizer: Tokenizer, recipe: Recipe) -> None:
        heads, bodies = (tokenizer.encode_batch_fast(list(texts)) for texts in zip(*functions, strict=True))
        for head, body in zip(heads, bodies, strict=True):
            ids = [*head.ids, *body.ids, self.end]
            if len(ids) <= recipe.longest_function + 1:
                self.rows.append(np.array(ids, np.int16))
                self.prompts.append(len(head.ids))

    def draw(self, generator: np.random.Generator, count: tuple[int, int], library_share: float) -> np.ndarray:
        """Draw an array of this shape with indices of random functions, some of them from the standard library."""
        generated = generator.integers(0, self.generated, count)
        if self.generated == len(self.rows):
            return generated
        library = generator.integers(self.generated, len(self.rows), count)
        return np.where(generator.random(count) < library_share, library, generated)


def _cut(prompt: str, body: str, number: int) -> tuple[str, str]:
    """Move the newline, or newline and indent, from body to prompt in half of the functions.

    The prompts of users differ in the same way.
    """
    kind = number % 10
    if kind >= 5 or not body.startswith("\n    "):
        return prompt, body
    return (prompt + "\n", body[1:]) if kind < 2 else (prompt + "\n    ", body[5:])


@dataclass
class Batch:
    """One training batch.

    Attributes:
      noised: ``[B, S]``, canvases with masks.
      sources: ``[M]``, for each masked position the index into the flattened ``[B * S]`` outputs that predicts it.
      targets: ``[M]``, the tokens under the masks.
      weights: ``[M]``, weights of their losses.
      normaliser: number that the weighted sum of losses is divided by.
    """

    noised: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    normaliser: float


def mask_body(length: int, generator: np.random.Generator, recipe: Recipe) -> np.ndarray:
    """Choose which tokens of a body to mask, bool [length]: at random, or at the right end as in decoding.

    The number k of masked tokens is uniform in 1..n for a body of n tokens. Losses with the weight n / k then estimate
    the diffusion bound on the negative log-likelihood (except that the weight is limited to ``recipe.heaviest``).
    """
    count = int(generator.integers(1, length + 1))
    if generator.random() >= recipe.ordered_share:
        return np.asarray(generator.permutation(length) < count)
    masked = np.arange(length) >= length - count
    if generator.random() < 0.5:  # some tokens further right are committed early
        masked &= (generator.random(length) < 0.85) | (np.arange(length) == length - count)
    return np.asarray(masked)


def _noise(rows: Sequence[int], data: Corpus, kind: str, length: int, recipe: Recipe,
           generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:  # fmt: skip
    """Fill and mask one canvas. Return ids [S], masked [S], loss weights [S], and the weighted number of tokens."""
    ids = np.full(length + 128, data.end, np.int64)
    masked, weights = np.zeros(length + 128, bool), np.zeros(length + 128, np.float32)
    place, counted = 0, 0.0
    tail_hidden = generator.random() < 0.75
    for number, row in enumerate(rows):
        text, prompt = data.rows[row], data.prompts[row]
        end, start = place + len(text), place + prompt
        ids[place:end] = text
        tail = kind == "open" and number > 0
        if tail or kind == "whole":
            start = place
        hidden = np.ones(end - start, bool) if tail and tail_hidden else mask_body(end - start, generator, recipe)
        weight = min(len(hidden) / hidden.sum(), recipe.heaviest) * (recipe.tail_weight if tail else 1.0)
        masked[start:end] = hidden
        weights[start:end] = weight * hidden
        counted += (end - start) * (recipe.tail_weight if tail else 1.0)
        place = end
        if place >= length:
            break
    return ids[:length], masked[:length], weights[:length], counted


def make_batch(data: Corpus, canvases: np.ndarray, kinds: Sequence[str], recipe: Recipe,
               generator: np.random.Generator) -> Batch:  # fmt: skip
    """Build a training batch: fill each canvas with functions one after another, and mask some of their tokens.

    Args:
      data: the functions.
      canvases: ``[B, functions]``, the indices of the functions of each canvas. What does not fit is cut off.
      kinds: what is masked on each canvas. ``packed``: tokens of every body. ``whole``: tokens of prompts and bodies.
        ``open``: tokens of the first function's body; of the functions after it, any tokens or all.
      recipe: length of canvases, and how to mask and weight.
      generator: draws the masks.
    """
    length = recipe.canvas
    parts = [
        _noise(rows, data, kind, length, recipe, generator) for rows, kind in zip(canvases.tolist(), kinds, strict=True)
    ]
    ids, masked, weight = (np.stack([part[i] for part in parts]) for i in range(3))
    row, column = np.nonzero(masked)
    # Padding to a multiple of 512 keeps the number of shapes, and of compilations, small. Padding has weight 0.
    surplus = -len(row) % 512
    # The output at position i - 1 predicts the token at i; position 0 has its own output.
    sources = row * length + np.maximum(column - 1, 0)

    def padded(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.pad(values, (0, surplus)))

    return Batch(
        noised=torch.from_numpy(np.where(masked, data.mask, ids)),
        sources=padded(sources),
        targets=padded(ids[row, column]),
        weights=padded(weight[row, column]),
        normaliser=float(sum(part[3] for part in parts)),
    )


def training_batch(data: Corpus, recipe: Recipe, seed: int, step: int, steps: int) -> Batch:
    """Return the batch of one of ``steps`` steps. It depends only on the seed and the step, so a run can be resumed."""
    generator = np.random.default_rng((seed, step))
    drawn = data.draw(generator, (recipe.rows, 16), recipe.library_share)
    kind = generator.random(recipe.rows)
    share = recipe.open_share(step, steps)
    kinds = np.where(kind < share, "open", np.where(kind < share + recipe.whole_share, "whole", "packed"))
    return make_batch(data, drawn, kinds.tolist(), recipe, generator)


def checking_batches(data: Corpus, recipe: Recipe, seed: int) -> list[Batch]:
    """Return batches for evaluation: each function of ``data`` starts one open canvas, and only its body has weight."""
    recipe = replace(recipe, tail_weight=0.0)
    number = np.arange(len(data.rows))
    alone = np.stack([np.roll(number, -i)[:16] for i in number])
    batches = []
    for i, part in enumerate(np.array_split(alone, max(1, len(number) // recipe.rows))):
        generator = np.random.default_rng((seed, i))
        batches.append(make_batch(data, part, ["open"] * len(part), recipe, generator))
    return batches
