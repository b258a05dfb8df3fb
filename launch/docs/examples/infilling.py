"""Fill a gap in the middle of a text, with the text before it and after it as context.

  python -m launch.docs.examples.infilling

A prompt of a diffusion model may contain mask tokens, and the model fills them from the context on both sides. One mask
becomes one token, and the right number of masks is not known in advance. This example therefore tries several numbers
and keeps the text whose tokens were most likely when they were committed. ``diffumesh generate --json``, ``diffumesh
batch`` and the server accept such prompts too, and return the filled prompt as ``filled_prompt``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffumesh import DEMO, DiffusionConfig, Engine

BEFORE = "def square("
AFTER = "):\n    return number * number\n"
LENGTHS = (1, 2, 3)


def fill(engine: Engine, before: str, after: str, lengths: Sequence[int]) -> tuple[str, float]:
    """Fill the gap between two texts.

    Args:
      engine: a diffusion model.
      before, after: the texts around the gap.
      lengths: the lengths of the gap to try, in tokens.

    Returns:
      The text of the gap and its mean log-probability per token, for the length with the highest such mean.
    """
    tokenizer = engine.tokenizer
    head, tail = tokenizer.encode(before), tokenizer.encode(after)
    found = []
    for length in lengths:
        ids = np.array([[*head, *[engine.config.mask_token_id] * length, *tail]])
        # No new tokens follow the prompt: only its masks are filled, one token per step.
        config = DiffusionConfig.published(0, steps=length, temperature=0.0, log_probabilities=True)
        result = engine.generate_tokens(ids, np.ones_like(ids), config)
        gap = slice(len(head), len(head) + length)
        assert result.log_probabilities is not None
        text = tokenizer.decode(result.sequences[0, gap].tolist())
        found.append((text, float(result.log_probabilities[0, gap].mean())))
    return max(found, key=lambda one: one[1])


def main() -> tuple[str, float]:
    """Fill the gap of a small program, and print the program."""
    engine = Engine.load(DEMO)
    text, score = fill(engine, BEFORE, AFTER, LENGTHS)
    print(f"{BEFORE}{text}{AFTER}")
    print(f"the gap is {text!r}, {score:.2f} per token")
    return text, score


if __name__ == "__main__":
    main()
