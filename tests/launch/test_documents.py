"""Documents: flags in their commands exist, links are valid, and generated parts are up to date."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbclient
import pytest
from absl import flags

from checkpoints.demo.sandbox import run_tests
from launch import generate
from launch.docs import api_reference, canvas_picture, folder_tables, hardware_table
from launch.docs.examples import infilling, openai_client, rl_rollouts
from launch.main import LAUNCHERS
from runtime import DiffusionConfig
from tests.launch.served import demo, served

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("*/README.md")),
    *sorted(path for path in (ROOT / "launch").rglob("*.md") if path != ROOT / "launch" / "README.md"),
]
# Prefixes of commands in documents whose next word is a subcommand.
COMMAND = re.compile(r"(?:diffumesh|slurm\.sh|tpu-vm\.sh run|-m launch\.main|diffumesh:\w+) ([a-z]+)(?= |$)(.*)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """Return the lines of a page's shell blocks, with continued lines joined."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_commands_have_flags_that_exist(page: Path) -> None:
    found = 0
    for line in commands(page):
        match = COMMAND.search(line)
        if not match or match[1] not in LAUNCHERS:
            continue
        values = flags.FlagValues()
        importlib.import_module(f"launch.{match[1]}").define_flags(values)
        words = [word for word in shlex.split(match[2], comments=True) if word.startswith("--")]
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.lstrip("-").partition("=")[0]
            assert name in values or name.removeprefix("no") in values or name in ("help", "helpfull"), line
        found += 1
    assert found or page != ROOT / "README.md"


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_modules_and_links_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for module in set(re.findall(r"python3? -m ((?:launch|benchmarks|checkpoints)(?:\.[a-z0-9_]+)+)", text)):
        assert importlib.util.find_spec(module) is not None, module
    for target in re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


def test_the_picture_is_that_of_a_run() -> None:
    picture = (ROOT / "launch" / "docs" / "canvas.svg").read_text("utf-8")
    assert canvas_picture.draw(canvas_picture.run_demo()) == picture, "python -m launch.docs.canvas_picture"


def test_the_reference_is_that_of_the_docstrings() -> None:
    stored = (ROOT / "launch" / "docs" / "api.md").read_text("utf-8")
    assert api_reference.reference() == stored, "python -m launch.docs.api_reference launch/docs/api.md"
    for name in ("generate_tokens", "stream_tokens", "log_likelihoods", "replace_weights", "score"):
        assert f"\n### `{name}`\n" in stored


def test_the_machines_are_those_of_the_planner() -> None:
    stored = (ROOT / "launch" / "docs" / "hardware.md").read_text("utf-8")
    assert f"<!-- machines -->\n{hardware_table.table()}<!-- end of machines -->" in stored, (
        "python -m launch.docs.hardware_table launch/docs/hardware.md"
    )


def test_the_families_are_those_of_the_planner() -> None:
    stored = (ROOT / "launch" / "docs" / "hardware.md").read_text("utf-8")
    assert f"<!-- families -->\n{hardware_table.families()}<!-- end of families -->" in stored, (
        "python -m launch.docs.hardware_table launch/docs/hardware.md"
    )
    assert stored.count("\nNot shown: ") == 2
    for model, _ in hardware_table.FAMILIES:
        assert f"| `{model}` |" in stored


@pytest.mark.parametrize("page", folder_tables.TABLES)
def test_the_tables_of_the_folders(page: str) -> None:
    stored = (ROOT / page).read_text("utf-8")
    assert folder_tables.write(page, stored) == stored, "python -m launch.docs.folder_tables"


def test_the_example_of_infilling(capsys: pytest.CaptureFixture[str]) -> None:
    text, score = infilling.main()
    assert f"{infilling.BEFORE}{text}{infilling.AFTER}" in capsys.readouterr().out
    engine = demo()
    masks = len(engine.tokenizer.encode(text))
    assert masks in infilling.LENGTHS
    # The same prompt as a text, with the mask token written out.
    mask = engine.tokenizer.decode([engine.config.mask_token_id], skip_special_tokens=False)
    config = DiffusionConfig.published(0, steps=masks, temperature=0.0)
    [filled] = engine.generate(f"{infilling.BEFORE}{mask * masks}{infilling.AFTER}", config)
    assert filled.filled_prompt == f"{infilling.BEFORE}{text}{infilling.AFTER}"
    # Another text after the gap gives another gap.
    other, _ = infilling.fill(engine, infilling.BEFORE, "):\n    return first + second\n", infilling.LENGTHS)
    assert other != text
    assert score < 0


def test_the_example_of_openais_client(capsys: pytest.CaptureFixture[str]) -> None:
    engine = demo()
    config = engine.with_end_tokens(DiffusionConfig.published(32))
    with served(engine, config) as found:
        whole, streamed, scored = openai_client.main(found.url)
    expected = engine.generate(openai_client.PROMPT, DiffusionConfig.published(32, steps=16, seed=1))[0].text
    assert whole == expected
    assert streamed.strip()
    assert scored.strip()
    assert "return" in capsys.readouterr().out


def test_the_example_of_rollouts() -> None:
    advantages, means = rl_rollouts.main(new_tokens=16)
    assert advantages.shape == means.shape == (len(rl_rollouts.PROMPTS) * rl_rollouts.SAMPLES,)
    assert abs(advantages.reshape(-1, rl_rollouts.SAMPLES).sum(axis=1)).max() < 1e-6
    assert (means <= 0).all()
    assert means.min() < -0.01


def test_the_example_of_evalplus(tmp_path: Path) -> None:
    script = ROOT / "launch" / "docs" / "examples" / "evalplus.sh"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", str(script), str(tmp_path), "--devices=1", "--steps=8"],
        cwd=ROOT, env=environment, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    samples = [json.loads(line) for line in (tmp_path / "results" / "samples.jsonl").read_text().splitlines()]
    assert [sample["task_id"] for sample in samples] == ["HumanEval/0", "HumanEval/1"]
    assert all(set(sample) == {"task_id", "completion"} for sample in samples)


def test_the_local_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat

    notebook = nbformat.read(ROOT / "launch" / "docs" / "examples" / "local.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without outputs"
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    )
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "--- step 0" in printed
    assert "--- step 32" in printed
    assert "def count_vowels" in printed


def test_the_first_command_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's function is correct."""
    match = COMMAND.search(commands(ROOT / "README.md")[0])
    assert match
    assert match[1] == "generate"
    generate.run(["diffumesh generate", *shlex.split(match[2])])
    printed = capsys.readouterr().out
    assert printed.startswith("def is_even(number):\n")
    expected = {number: number % 2 == 0 for number in range(-3, 9)}
    assert run_tests(printed, [f"assert is_even({number}) is {even}" for number, even in expected.items()]) == "passed"
    assert run_tests(printed, ["assert is_even(7)"]) == "wrong"


def test_the_python_of_the_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    [program] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    assert "return" in capsys.readouterr().out
