"""The demo's training recipe."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the trained model, except the number of steps, the seed and the source folders."""

    vocabulary: int = 1536
    hidden: int = 256
    intermediate: int = 640
    layers: int = 6
    kv_heads: int = 2
    group: int = 4  # query heads per KV head
    programs: int = 200_000  # generated functions
    library_share: float = 0.08  # share of the drawn functions that come from the standard library
    # A canvas is filled with functions, each followed by an end token, and the last one is cut off. If the canvas is
    # padded with end tokens instead, decoding commits end tokens from the right and leaves bodies empty.
    canvas: int = 128
    longest_function: int = 127
    rows: int = 32  # canvases per step
    # Shares of the kinds of canvases, see `canvases.py`; the rest is packed. Packed canvases teach the most per step.
    # Open canvases resemble decoding, so their share is higher at the end of training.
    open_shares: tuple[tuple[int, float], ...] = ((0, 0.4), (400, 0.15))  # (from this step, share)
    open_share_of_decay: float = 0.5
    whole_share: float = 0.05
    ordered_share: float = 0.5  # share of the bodies that are masked at their right end as in decoding, not at random
    tail_weight: float = 0.1  # weight of the tokens after the first function of an open canvas
    heaviest: float = 4.0  # upper limit of n / k, the weight of k masked tokens out of n
    # Muon for the layers' matrices, AdamW for the rest. Muon's updates are scaled to AdamW's, so both share a rate.
    learning_rate: float = 2e-3
    final_learning_rate: float = 2e-5
    momentum: float = 0.95
    warmup_steps: int = 100
    decay_share: float = 0.35  # share of the steps, at the end, in which the learning rate falls along a cosine
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    averaging: float = 0.998  # decay of the exponential moving average of the weights; the average is saved
    evaluate_every: int = 250  # in steps
    save_minutes: float = 4.0

    def decays_from(self, steps: int) -> int:
        """Return the step at which the learning rate starts to fall, for a run of ``steps`` steps."""
        return round(steps * (1 - self.decay_share))

    def open_share(self, step: int, steps: int) -> float:
        """Return the share of open canvases in a step."""
        if step >= self.decays_from(steps):
            return self.open_share_of_decay
        return [share for start, share in self.open_shares if start <= step][-1]
