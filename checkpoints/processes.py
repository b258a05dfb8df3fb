"""Processes that write one checkpoint together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkpoints.errors import OtherProcessError


def _alone(text: str) -> list[str]:
    return [text]


@dataclass(frozen=True)
class Processes:
    """The processes that work together, and which of them this is; by default there is only this one.

    Attributes:
      index: index of this process.
      count: number of processes.
      exchange: sends a text to all processes, waits for theirs, and returns them by index. All processes call it.
    """

    index: int = 0
    count: int = 1
    exchange: Callable[[str], list[str]] = _alone

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which does the work that must be done only once."""
        return self.index == 0

    def agree(self, stage: Callable[[], str]) -> list[str]:
        """Run a stage on every process. All of them continue, or all of them fail.

        Args:
          stage: this process's part; all processes receive the text that it returns.

        Returns:
          The texts of all processes, by index.

        Raises:
          OtherProcessError: another process failed; the message has its index and its error.
          BaseException: this process failed, with this error.
        """
        try:
            said = stage()
        except BaseException as error:
            # The others wait for this process, so they are told first.
            self.exchange(json.dumps({"failed": str(error) or type(error).__name__}))
            raise
        answers = [json.loads(text) for text in self.exchange(json.dumps({"said": said}))]
        for index, answer in enumerate(answers):
            if "failed" in answer:
                raise OtherProcessError(f"process {index} of {self.count} failed: {answer['failed']}")
        return [answer["said"] for answer in answers]

    def owners(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Divide named tensors among the processes in shares of about equal size; return each one's process by name."""
        loads, found = [0] * self.count, {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            found[name] = loads.index(min(loads))
            loads[found[name]] += sizes[name]
        return found

    def share(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the names in this process's share, in the order of ``sizes``."""
        owners = self.owners(sizes)
        return [name for name in sizes if owners[name] == self.index]
