from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import plan
from tests.figures import assert_texts_are_apart, captured
from tests.launch.test_plan import HERE, run


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, because commands write ``plan.png``."""
    monkeypatch.chdir(tmp_path)


def drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return the figure, after a check that no text overlaps another or leaves the figure."""
    figures = captured(monkeypatch)
    run(capsys, *arguments, "--plot=plan.png")
    (found,) = figures
    assert_texts_are_apart(found, found.axes[0].get_yticklabels())
    return found


def names(figure: Any) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def numbers(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.SVG", b"<?xml"), ("plan.pdf", b"%PDF")])
def test_a_plot(name: str, start: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, "--topology=v5e:2x2", f"--plot={tmp_path / name}")
    assert (tmp_path / name).read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_an_old_plot_stays_if_the_new_one_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is there a part of the new one."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    path.write_bytes(b"old")

    def full(file: int) -> None:
        assert path.read_bytes() == b"old", "the new picture is in another file until it is complete"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as caught:
        run(capsys, "--topology=v5e:2x2", f"--plot={path}")
    assert caught.value.code == 2
    assert f"--plot={path}: cannot be written (No space left on device)\n" in capsys.readouterr().err
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_plot_names_every_mesh_of_a_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(monkeypatch, capsys, "--topology=v5e:4x4", "--batch=16")
    assert len(names(figure)) == len(set(names(figure))) == 14
    assert {"tensor=16", "data=8,tensor=2", "data=2,sequence=2,tensor=4"} <= set(names(figure))
    time, memory, rate = figure.axes
    assert time.get_title(loc="left") == "ms per pass (denoise step)"
    assert all(number.endswith(" of 16.9") for number in numbers(memory))
    assert rate.get_title(loc="left") == "tokens/s per chip"
    rates = [float(number) for number in numbers(rate)]
    assert rates == sorted(rates, reverse=True)


def test_a_plot_of_all_machines_names_the_best_mesh_of_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(monkeypatch, capsys, "--topology=all", "--batch=12", "--price_per_chip_hour=2")
    machines = dict(name.split("  ") for name in names(figure))
    assert machines.keys() == set(plan.MACHINES)
    assert machines["1xh200"] == "data=1"
    assert machines["v5e:2x4"] == "data=4,sequence=2"
    title = "$ per million tokens, at $2 per chip-hour"
    (shown,) = (one for one in figure.axes[2].findobj(lambda one: getattr(one, "get_text", str)() == title))
    assert not shown.get_parse_math(), "what is between two dollar signs would be a formula"
    assert numbers(figure.axes[1])[names(figure).index("1xh200  data=1")].endswith(" of 113.5")


def test_a_plot_shows_what_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, capsys, "--topology=v5e:2x4", "--dtype=float32")
    assert "gray: does not fit" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--batch=2", "bfloat16, batch 2, 256 + 256 tokens, 256 steps, cache none; "),
        (
            "--quantize=int8 --steps=64 --cache=dual --block_length=16",
            "bfloat16, int8 weights, batch 1, 256 + 256 tokens, 64 steps, cache dual, blocks of 16; ",
        ),
        (
            "--draft_steps=3 --cache=dual",
            "batch 1, 256 + 256 tokens, 256 steps, cache dual, blocks of 32, 3 drafts per row, none accepted; ",
        ),
        ("--model=dreamon-7b --new_tokens=64", "bfloat16, batch 1, 256 + 64 tokens, cache none; "),
        ("--model=qwen2.5-7b --quantize=int4", "bfloat16, int4 weights, batch 1, 256 + 256 tokens; "),
    ],
)
def test_titles_name_the_whole_workload(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    figures = captured(monkeypatch)
    out = run(capsys, "--topology=v5e:2x4", *arguments.split(), "--plot=plan.png")
    title = " ".join(out[: out.index("GB/chip")].split())
    assert words in title
    (figure,) = figures
    assert words in figure.get_suptitle()
    assert_texts_are_apart(figure, figure.axes[0].get_yticklabels())


def test_a_plot_needs_matplotlib_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as caught:
        plan.run([*HERE[:2], "--topology=v5e:2x4", f"--plot={tmp_path / 'plan.png'}"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "needs matplotlib" in captured.err
    assert "compiling" not in captured.err
