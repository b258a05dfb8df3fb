"""Several processes that work on one checkpoint together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkpoints.errors import OtherProcessError


def _alone(text: str) -> list[str]:
    return [text]


@dataclass(frozen=True)
class Processes:
    """This process among those that work together; by itself by default.

    Attributes:
      index: of this one.
      count: of all.
      exchange: hands a text to all and returns everyone's, by index; waits for all. Every process calls it alike.
    """

    index: int = 0
    count: int = 1
    exchange: Callable[[str], list[str]] = _alone

    @property
    def is_first(self) -> bool:
        """Whether this process does what one alone must do."""
        return self.index == 0

    def agree(self, stage: Callable[[], str]) -> list[str]:
        """Run a stage on every process. They go on together, or fail together.

        Args:
          stage: this process's part; what it returns goes to all.

        Returns:
          What every process returned, by index.

        Raises:
          OtherProcessError: names another process that failed, with what it said.
          BaseException: this one's own.
        """
        try:
            said = stage()
        except BaseException as error:
            # The others wait for this one: they are told before anything else.
            self.exchange(json.dumps({"failed": str(error) or type(error).__name__}))
            raise
        answers = [json.loads(text) for text in self.exchange(json.dumps({"said": said}))]
        for index, answer in enumerate(answers):
            if "failed" in answer:
                raise OtherProcessError(f"process {index} of {self.count} failed: {answer['failed']}")
        return [answer["said"] for answer in answers]

    def owners(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Divide named things among the processes, so that all have about the same size; the owner of each by name."""
        loads, found = [0] * self.count, {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            found[name] = loads.index(min(loads))
            loads[found[name]] += sizes[name]
        return found

    def share(self, sizes: Mapping[str, int]) -> list[str]:
        """This process's share of named things, in the order of ``sizes``."""
        owners = self.owners(sizes)
        return [name for name in sizes if owners[name] == self.index]
