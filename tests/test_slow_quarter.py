"""Quarters of the slow tests: the four together contain each test exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Files with 1, 3 and 40 slow tests, and fast ones among them."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = slow")
    for name, count in (("one", 1), ("three", 3), ("forty", 40)):
        slow = f"@pytest.mark.slow\n@pytest.mark.parametrize('n', range({count}))\ndef test_slow(n): pass\n"
        pytester.makepyfile(**{f"test_{name}": f"import pytest\n{slow}def test_fast(): pass\n"})
    return pytester


def names(suite: pytest.Pytester, *arguments: str) -> list[str]:
    result = suite.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *arguments)
    return [line for line in result.outlines if "::" in line]


def test_four_days_have_every_slow_test_once(suite: pytest.Pytester) -> None:
    days = [names(suite, f"--slow-quarter={20_000 + day}") for day in range(4)]
    every = [name for name in names(suite) if "slow" in name]
    assert len(every) == 44
    assert sorted(name for day in days for name in day) == sorted(every)
    assert names(suite, "--slow-quarter=20012") == days[0]
    again = [names(suite, f"--slow-quarter={20_000 + day}") for day in (1, 5, 9)]
    assert sorted(again[0]) == sorted(again[1]) == sorted(again[2])
    assert len({one[0] for one in again}) > 1, "each time another file comes first"
    for day in days:
        numbers = [int(name.split("[")[1][:-1]) for name in day if "forty" in name]
        assert numbers == list(range(numbers[0], numbers[0] + 10)), (
            "a quarter consists of adjacent tests, which share compiled programs"
        )


def test_what_begins_too_late_is_named(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("--begin-within=0", "-rs", "-p", "no:cacheprovider", "test_one.py")
    result.assert_outcomes(skipped=2)
    for name in ("test_slow[[]0]", "test_fast"):
        result.stdout.fnmatch_lines([f"SKIPPED*test_one.py::{name} has not begun within 0 seconds*"])
    suite.runpytest_inprocess("--begin-within=5", "-p", "no:cacheprovider", "test_one.py").assert_outcomes(passed=2)


def test_what_runs_too_long_is_stopped_and_named(suite: pytest.Pytester) -> None:
    """In its call, in a fixture and in an event loop; what ends in time is not disturbed."""
    suite.makepyfile(
        test_long="""
        import asyncio, pytest, time
        @pytest.fixture
        def slow(): time.sleep(60)
        def test_short(): pass
        def test_call(): time.sleep(60)
        def test_fixture(slow): pass
        def test_loop(): asyncio.run(asyncio.sleep(60))
        """
    )
    for name in ("call", "fixture", "loop"):
        chosen = (f"test_long.py::test_{one}" for one in ("short", name))
        result = suite.runpytest_inprocess("--end-within=1s", "-rs", "-p", "no:cacheprovider", *chosen)
        result.assert_outcomes(passed=1, skipped=1)
        result.stdout.fnmatch_lines([f"SKIPPED*test_long.py::test_{name} has not ended within * seconds*"])
