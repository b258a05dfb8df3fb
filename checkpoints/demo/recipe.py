"""The demo's recipe: every number that decides the result, apart from steps, seed and source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, apart from the number of steps, the seed and the source."""

    vocabulary: int = 1536
    hidden: int = 256
    intermediate: int = 640
    layers: int = 6
    kv_heads: int = 2
    group: int = 4  # query heads per KV head
    programs: int = 200_000  # generated functions
    library_share: float = 0.08  # of the functions drawn, from the standard library
    # Functions follow one another on a canvas, an end token after each, and the last is cut off. Filling the canvas
    # with end tokens instead was tried: confident end tokens then spread from the right and leave empty bodies.
    canvas: int = 128
    longest_function: int = 127
    rows: int = 32  # canvases in a step
    # Kinds of canvases, see `canvases.py`; the rest are packed ones.
    # Packed ones teach most for what they cost; open ones are what decoding meets, and end the training.
    open_shares: tuple[tuple[int, float], ...] = ((0, 0.4), (400, 0.15))  # (from this step, share)
    open_share_of_decay: float = 0.5
    whole_share: float = 0.05
    ordered_share: float = 0.5  # of the bodies, whose tokens are given from the left as in decoding, not anywhere
    tail_weight: float = 0.1  # of tokens after the first function of an open canvas
    heaviest: float = 4.0  # bound of n / k, the weight of k masked tokens of n
    # Muon for the layers' matrices, AdamW for the rest; updates are scaled alike, so both share one learning rate.
    learning_rate: float = 2e-3
    final_learning_rate: float = 2e-5
    momentum: float = 0.95
    warmup_steps: int = 100
    decay_share: float = 0.35  # of the steps, at the end: the learning rate falls along a cosine
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    averaging: float = 0.998  # decay of the exponential moving average that is saved
    evaluate_every: int = 250  # steps
    save_minutes: float = 4.0

    def decays_from(self, steps: int) -> int:
        """The step from which the learning rate falls, of `steps` in all."""
        return round(steps * (1 - self.decay_share))

    def open_share(self, step: int, steps: int) -> float:
        """The share of open canvases in a step."""
        if step >= self.decays_from(steps):
            return self.open_share_of_decay
        return [share for start, share in self.open_shares if start <= step][-1]
