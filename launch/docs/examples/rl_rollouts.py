"""Rollouts and scores for reinforcement learning: samples, rewards, advantages, log-probabilities under masks.

  python -m launch.docs.examples.rl_rollouts

The scores use the two coupled masks of coupled-GRPO (DiffuCoder): each completion is scored twice, under a random mask
and under the complement of that mask, so that every token is predicted exactly once. DiffuCoder's estimator also scores
a third copy, in which all tokens are masked. A trainer compares these log-probabilities before and after an update;
``Engine.replace_weights`` moves its new weights into the engine without recompiling.
"""

from __future__ import annotations

import numpy as np

from diffumesh import DEMO, DiffusionConfig, Engine

PROMPTS = ["def is_even(number):\n", "def add(first, second):\n"]
SAMPLES = 4


def reward(program: str) -> float:
    """Return 1 for a program that Python can parse, else 0."""
    try:
        compile(program, "completion", "exec")
    except SyntaxError:
        return 0.0
    return 1.0


def coupled_scores(
    engine: Engine, sequences: np.ndarray, mask: np.ndarray, completion: np.ndarray, seed: int
) -> np.ndarray:
    """Return the log-probability of each token of the completions, float32 ``[B, S + N]``, 0 elsewhere.

    Each token is predicted from a copy of its row in which it is masked.

    Args:
      engine: the policy.
      sequences: prompts and completions, integers ``[B, S + N]``.
      mask: attention mask ``[B, S + N]``.
      completion: bool ``[B, S + N]``, true at the tokens of the completions.
      seed: seed of the random mask.
    """
    chosen = np.random.default_rng(seed).random(sequences.shape) < 0.5
    scores = np.zeros(sequences.shape, np.float32)
    for hidden in (completion & chosen, completion & ~chosen):
        noised = np.where(hidden, engine.config.mask_token_id, sequences)
        scores += np.where(hidden, engine.score(noised, sequences, mask), 0.0)
    return scores


def main(new_tokens: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Sample, reward and score; return advantages ``[B]`` and mean log-probabilities per token ``[B]``."""
    engine = Engine.load(DEMO)
    config = DiffusionConfig.published(new_tokens, algorithm="origin", temperature=1.0, seed=7)
    ids, mask = engine.encode(PROMPTS)
    result = engine.generate_tokens(ids, mask, engine.with_end_tokens(config), num_return_sequences=SAMPLES)
    completions = engine.completions(PROMPTS, ids, mask, result)

    rewards = np.array([reward(one.prompt + one.text) for one in completions]).reshape(len(PROMPTS), SAMPLES)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)

    lengths = np.array([len(one.tokens) for one in completions])
    place = np.arange(result.sequences.shape[1]) - ids.shape[1]
    completion = (place >= 0) & (place < lengths[:, None])
    mask = np.repeat(np.pad(mask, ((0, 0), (0, new_tokens)), constant_values=1), SAMPLES, axis=0)
    scores = coupled_scores(engine, result.sequences, mask, completion, seed=0)

    # After an update, the trainer's tree of arrays or its checkpoint goes here. Nothing is compiled again.
    engine.replace_weights(DEMO)
    assert np.array_equal(coupled_scores(engine, result.sequences, mask, completion, seed=0), scores)

    means = scores.sum(axis=1) / np.maximum(lengths, 1)
    for one, advantage, mean in zip(completions, advantages, means, strict=True):
        print(f"advantage {advantage:+.2f}, {mean:.2f} per token, seed {one.seed}: {one.text!r}")
    return advantages, means


if __name__ == "__main__":
    main()
