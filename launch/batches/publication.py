"""The end of a batch: host 0 writes the files in the order of the input, and the other hosts wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from launch.batches.folder import RESULTS, SAMPLES, SORTED, BatchFolder
from launch.batches.lines import Batch
from launch.batches.records import Key, evalplus_records
from launch.process.startup import say, this_host

SECONDS_BETWEEN_REPORTS = 5.0


def publish(output: BatchFolder | None, order: Sequence[Key], batch: Batch, evalplus: bool) -> None:
    """Write the sorted results, and the samples for EvalPlus, once every result exists. All hosts call this together.

    It returns on all hosts when the files are written. A host that ended before would wait for host 0 under
    ``--shutdown_timeout``, which is too short for the results of a large batch.

    Args:
      output: the output folder; None on hosts that do not write.
      order: the keys of the results, in the order of the input.
      batch: the contents of the input file.
      evalplus: whether to write the samples.

    Raises:
      InputError: a file cannot be written.
    """
    if output is None:
        while not _report(finished=False):
            pass
        return
    tick = partial(next, _reports())
    found = output.sort(order, tick)
    if evalplus:
        chats = {line.id for line in batch.lines if line.chat}

        def samples() -> Iterator[dict[str, str]]:
            for one in found:
                tick()
                yield from evalplus_records(one, chats)

        output.write(SAMPLES, samples())
    say(
        f"{len(found)} results in {output.path / RESULTS}, in the input's order in {output.path / SORTED}"
        + (f"; {len(batch.bad)} lines in errors.jsonl" if batch.bad else "")
    )
    _report(finished=True)


def _report(*, finished: bool) -> bool:
    """Note progress on all hosts, and return whether host 0 has finished."""
    this_host().mark()
    return bool(this_host().gather("published", finished)[0])


def _reports() -> Iterator[None]:
    """Yield for each record that host 0 reads or writes, and report every few seconds that there is progress.

    The other hosts then make the same progress, so that a host 0 that is stuck is behind them.
    """
    latest = time.monotonic()
    while True:
        if time.monotonic() - latest >= SECONDS_BETWEEN_REPORTS:
            _report(finished=False)
            latest = time.monotonic()
        yield
