"""The attacks of the benchmark in short forms: none of them succeeds."""

from __future__ import annotations

import pytest

from benchmarks.attacks import LONG, attack_batch, attack_checkpoints, attack_hub, attack_server, attack_templates


def test_checkpoints() -> None:
    for found in attack_checkpoints(28).values():
        assert found == {"tried": 14, "found": 14}


def test_templates() -> None:
    found = attack_templates(0.5)
    assert found["refused"] == found["tried"]


def test_hub() -> None:
    found = attack_hub(4)
    assert found["cut_off"] == 4
    assert found["bytes_grown"] < 100 << 20


@pytest.mark.slow
def test_server() -> None:
    found = attack_server(8, 20)
    assert found["lists_sent"] > 0
    assert found["bytes_grown"] < 512 << 20


@pytest.mark.slow
def test_batch() -> None:
    assert attack_batch(2000)["first_result_seconds"] > 0


def test_the_long_forms_are_of_all() -> None:
    assert set(LONG) == {"checkpoints", "templates", "hub", "server", "batch"}
