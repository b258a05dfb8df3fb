"""Tables of records: what stands in which cell."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.autoregressive import autoregressive_table


@pytest.mark.parametrize("uncached", [True, False])
def test_rows_of_the_autoregressive_table(uncached: bool) -> None:
    def row(cached: bool, mean: float) -> dict[str, Any]:
        rate = {"mean": mean, "deviation": 0.24}
        sizes = {"weight_bytes": 124_400_000, "cache_bytes": 4_700_000}
        return {"variant": "int8", "new_tokens": 15, "cached": cached, "tokens_per_second": rate, **sizes}

    record = {
        "kind": "measured",
        "settings": {"prompt": 16, "batch": 1, "trials": 5, "cores": 2},
        "machine": {"processor": "Some CPU"},
        "results": [row(True, 30.04), *[row(False, 12.0)][: int(uncached)]],
    }
    lines = autoregressive_table(record).splitlines()
    assert lines[2] == f"| int8 | 15 | 30.0 ± 0.2 | {'12.0 ± 0.2' if uncached else ''} | 124.4 | 4.7 |"
    assert lines[-1] == "Measured: prompt of 16, batch 1, 5 trials, 2 CPU cores, Some CPU."
