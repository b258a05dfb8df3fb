"""``diffumesh generate``: results on standard output; for a mistake, one message and exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags
from safetensors.numpy import load_file, save_file

from checkpoints import DEMO, open_folder
from launch import generate, main
from launch.display import canvas_view
from launch.display.completions import write_unfinished
from launch.process import interruption, startup
from runtime import CompletionBuilder, TextTokenizer, row_seeds
from runtime.execution import generation
from tests import golden_cases
from tests.launch.mistakes import refusal
from tests.launch.test_history_html import embedded

PROMPT = "def add(a, b):\n"
QUICK = ["--mesh=data=1", "--max_new_tokens=8"]


def launch(*arguments: str) -> None:
    generate.run(["generate", *QUICK, *arguments])


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refusal(capsys, lambda: launch(*arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the model folder, which a test may damage."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(DEMO / file, tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"--prompt={PROMPT}", "--prompt=def f(x):\n", "--num_return_sequences=2"]
    generate.run(["generate", "--max_new_tokens=8", "--json", "--verbose", "--seed=3", *prompts])
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [(line["prompt"], line["index"]) for line in lines] == [
        (PROMPT, 0),
        (PROMPT, 1),
        ("def f(x):\n", 0),
        ("def f(x):\n", 1),
    ]
    for line in lines:
        assert set(line) >= {"prompt", "index", "text", "tokens", "finish_reason", "stats"}
        assert line["finish_reason"] in ("stop", "length")
        assert line["stats"]["forwards"] > 0
    assert "mesh data=" in captured.err
    assert re.search(r"Loaded \d+ MB of bfloat16 weights", captured.err)
    assert "algorithm=entropy" in captured.err


def test_slow_libraries_are_not_imported() -> None:
    """Each takes about as long to import as the demo takes to load and to generate."""
    program = (
        "import sys; from launch import generate; generate.run(sys.argv[1:]); "
        "print({'torch', 'transformers', 'orbax', 'huggingface_hub', 'tensorflow'} & sys.modules.keys())"
    )
    arguments = ["generate", *QUICK, "--max_new_tokens=2", f"--prompt={PROMPT}"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(PROMPT)
    assert done.stdout.splitlines()[-1] == "set()"


def test_same_seed_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("5", "5"):
        launch(f"--prompt={PROMPT}", f"--seed={seed}", "--temperature=1")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(PROMPT)


def test_standard_input_and_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompt.py").write_text(PROMPT, encoding="utf-8-sig")  # as editors on Windows do
    launch(f"--prompt_file={tmp_path / 'prompt.py'}")
    from_file = capsys.readouterr().out
    launch(f"--prompt={PROMPT}")
    assert capsys.readouterr().out == from_file
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode("utf-8-sig"))))
    launch()
    assert capsys.readouterr().out == from_file


def test_masks_in_a_prompt_are_filled(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "def add(a, b):\n    return a<|mask|><|mask|>b\n"
    launch("--json", f"--prompt={prompt}", "--max_new_tokens=0", "--steps=2", "--suppress_mask")
    line = json.loads(capsys.readouterr().out)
    assert line["text"] == ""
    assert line["masks_left"] == 0
    assert line["filled_prompt"].startswith("def add(a, b):\n    return a")
    assert "<|mask|>" not in line["filled_prompt"]
    # By default there is a step for each mask. Of three, Dream's first commits nothing, and its last two tokens.
    for given, passes in (((), 2), (("--steps=1",), 1)):
        launch("--json", "--prompt=def add(a, b):\n    return a<|mask|><|mask|><|mask|>", "--max_new_tokens=0", *given)
        assert json.loads(capsys.readouterr().out)["stats"]["forwards"] == passes


def test_the_text_before_a_suffix_is_filled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "history.html"
    prompts = ["--prompt=def f(x):\n", f"--prompt={PROMPT}", "--suffix=    return y\n", "--suffix="]
    launch(*prompts, "--seed=3", "--json", "--num_return_sequences=2")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["suffix"] for line in lines] == ["    return y\n"] * 2 + [""] * 2
    launch(*prompts, "--seed=3", "--num_return_sequences=2", f"--history_html={page}")
    text = capsys.readouterr().out
    for line in lines[:2]:
        assert f"def f(x):\n{line['text']}    return y\n" in text
    assert page.read_text(encoding="utf-8").count('"return",-1') == 2
    assert "suffixes: expected a string for each of the 2 prompts" in fails(capsys, *prompts[:-1])


def test_stop_strings_cut_text_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    launch("--json", f"--prompt={PROMPT}", "--temperature=0")
    whole = json.loads(capsys.readouterr().out)
    stop = whole["text"].strip()[1:3]
    launch("--json", f"--prompt={PROMPT}", "--temperature=0", f"--stop={stop}")
    cut = json.loads(capsys.readouterr().out)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].find(stop)]
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]
    assert len(cut["tokens"]) < len(whole["tokens"])


def test_chat_template(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = [f"--checkpoint={folder}", "--chat", "--json", "--prompt=Add two numbers."]
    assert "no chat template" in fails(capsys, *arguments)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}def {% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    launch(*arguments)
    chatted = json.loads(capsys.readouterr().out)
    launch(f"--checkpoint={folder}", "--json", "--prompt=# Add two numbers.\ndef ")
    assert chatted["tokens"] == json.loads(capsys.readouterr().out)["tokens"]


def test_history_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "history.html"
    # Seven blocks of eight steps are six steps more than --steps.
    blocks = ["--max_new_tokens=50", "--steps=50", "--block_length=8", "--noearly_stop"]
    for more, steps in (([], 8), (blocks, 56)):
        launch(f"--prompt={PROMPT}", f"--history_html={page}", *more)
        (row,) = embedded(page.read_text(encoding="utf-8"))["rows"]
        assert (row["title"], row["steps"]) == (PROMPT.strip(), steps)
        assert "".join(text for text, _, end in row["tokens"] if not end) + "\n" == capsys.readouterr().out
        assert "".join(text for text, step, _ in row["tokens"] if step == -1) == PROMPT


def test_explain_counts_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for quantize in ("none", "int8", "int4"):
        launch("--explain", "--mesh=tensor=1", "--dtype=float32", f"--quantize={quantize}")
        found = re.search(r"([\d.]+) GB per device", capsys.readouterr().out)
        assert found is not None
        sizes.append(float(found[1]))
    assert 0 < sizes[2] < sizes[1] < sizes[0] / 3  # of float32


def test_explain_shows_the_mesh_and_the_dtype_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Of rows that do not run at the same time, one counts; on CPU, weights are float32."""
    titles = []
    for most in (1, 8):
        generate.run(["generate", "--explain", "--prompt=x", "--num_return_sequences=8", f"--max_batch={most}"])
        titles.append(next(line for line in capsys.readouterr().out.splitlines() if " on data=" in line))
    assert "on data=1," in titles[0]
    assert "on data=8," in titles[1]
    assert all("float32" in title for title in titles)


def test_explain_needs_no_devices(capsys: pytest.CaptureFixture[str]) -> None:
    launch("--explain", "--mesh=tensor=64", f"--checkpoint={golden_cases.FOLDER}")
    out = capsys.readouterr().out
    assert "layers.q_proj" in out
    assert "('kv', 'group')" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--checkpoint=/nowhere/at/all"], "no such folder"),
        (["--algorithm=best"], "algorithm"),
        (["--steps=0"], "steps is 0"),
        (["--steps=many"], "steps"),
        (["--temperature=-1"], "temperature is -1"),
        (["--temperature=nan"], "temperature is nan"),
        (["--top_p=2"], "top_p is 2"),
        (["--eps=1"], "eps is 1"),
        (["--seed=lucky"], "--seed=lucky"),
        (["--seed=1,2,3"], "3 seeds for 1 rows"),
        (["--seed=9999999999999999999"], "seed is 9999999999999999999"),
        (["--max_new_tokens=0"], "nothing to fill"),
        (["--max_new_tokens=1000000"], "the model allows"),
        (["--mesh=tensor=3"], "is not divisible"),
        (["--mesh=data=512"], "512 devices"),
        (["--mesh=model=2"], 'unknown axis "model"'),
        (["--attention=cudnn"], "requires an NVIDIA GPU"),
        (["--history_html=/nowhere/page.html"], "no such folder"),
        (["--prompt_file=/nowhere/prompt"], "cannot be read"),
        (["--prompt_file=/dev/zero"], "larger than 16777216 bytes"),
        (["--log_probabilities"], "--log_probabilities requires --json"),
        (["--dump_hlo="], "--dump_hlo is empty"),
        (["--prompt="], "empty"),
        (["--suffix=a<|mask|>"], "the suffix contains the mask token"),
        (["--suffix=" + "a b " * 4000], "suffix tokens and 8 new tokens are"),
        (["--unknown=1"], "unknown"),
        (["stray"], '"stray" is not a flag; did you mean --prompt=stray? see --help'),
        (["/"], '"/" is not a flag; did you mean --checkpoint=/? see --help'),
        (["--max_tokens=4"], "--max_tokens is not a flag; did you mean --max_new_tokens?"),
        (["--steeps=4"], "Unknown command line flag 'steeps'. Did you mean: steps ?"),
        (["--num_return_sequences=0"], "num_return_sequences"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in fails(capsys, f"--prompt={PROMPT}", *arguments)


def test_damaged_folders(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = [f"--checkpoint={folder}", f"--prompt={PROMPT}"]
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[: len(whole) // 2])
    assert "truncated or invalid safetensors file" in fails(capsys, *arguments)
    weights.write_bytes(whole)

    tensors = load_file(weights)
    tensors["model.layers.9.extra"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    save_file(tensors, weights)
    error = fails(capsys, *arguments)
    for part in ("missing: model.norm.weight", "unknown: model.layers.9.extra", "shape: lm_head.weight"):
        assert part in error
    weights.write_bytes(whole)

    edit_config(folder, model_type="llama")
    assert "'llama'" in fails(capsys, *arguments)
    (folder / "config.json").unlink()
    assert "no config.json" in fails(capsys, *arguments)


def test_folder_without_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no tokenizer" in fails(capsys, f"--checkpoint={golden_cases.FOLDER}", f"--prompt={PROMPT}")


def test_an_empty_checkpoint_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--checkpoint is empty" in fails(capsys, "--checkpoint=", f"--prompt={PROMPT}")


@pytest.mark.parametrize("cache", ["/proc/none", "/dev/null/cache", "~nobody_of_this_name/cache"])
def test_without_a_compile_cache_it_goes_on(capsys: pytest.CaptureFixture[str], cache: str) -> None:
    launch(f"--prompt={PROMPT}", f"--compile_cache={cache}")
    said = capsys.readouterr()
    assert said.out.startswith(PROMPT)
    assert f"warning: --compile_cache={cache}: " in said.err
    assert "compiled again in every run" in said.err


def test_a_compile_cache_that_others_can_write_is_not_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Compiled programs are code. The folder stays as it is: others may need it."""
    for mode, used in ((0o777, False), (0o775, False), (0o755, True)):
        cache = tmp_path / str(mode)
        cache.mkdir()
        cache.chmod(mode)
        launch(f"--prompt={PROMPT}", f"--compile_cache={cache}")
        assert ("other users can write there; run chmod go-w" in capsys.readouterr().err) == (not used)
        assert cache.stat().st_mode & 0o777 == mode


def test_compiled_programs_are_kept_in_a_folder_and_not_in_a_bucket(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = fails(capsys, f"--prompt={PROMPT}", "--compile_cache=gs://bucket/compiled")
    assert "--compile_cache=gs://bucket/compiled: expected a folder" in said
    assert not list(tmp_path.iterdir()), "no folder with the name of the URL"


def test_one_line_says_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    launch(f"--prompt={PROMPT}")
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if not line.startswith("compiling and decoding, ")]
    found = re.match(
        r"(\d+) tokens of text in [\d.]+ s(?:, of which [\d.]+ s compiling)?; (\d+) forward passes, [\d.]+ tokens/s",
        line,
    )
    assert found is not None, line
    launch(f"--prompt={PROMPT}", "--json", "--verbose")
    said = capsys.readouterr()
    assert int(found[1]) == len(json.loads(said.out)["tokens"])
    assert "decoding: max_new_tokens=8, steps=8, algorithm=entropy" in said.err
    assert re.search(r"Loaded \d+ MB of bfloat16 weights \(\d+ MB in memory as float32\)", said.err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    @contextlib.contextmanager
    def interrupted(title: str) -> Iterator[startup.Report]:
        def report(done: int, total: int) -> None:
            startup.this_host().mark()
            if done == 16:
                signal.raise_signal(number)
                end = time.monotonic() + 60
                while number == signal.SIGTERM and not startup.this_host().draining() and time.monotonic() < end:
                    time.sleep(0.01)  # another thread receives SIGTERM

        yield report

    monkeypatch.setattr(canvas_view, "progress_bar", interrupted)
    monkeypatch.setattr(generation, "SECONDS_PER_REPORT", 0.0)  # a report after every step
    monkeypatch.setattr(interruption, "SECONDS_TO_FINISH", 0.0)  # otherwise a fast machine would finish all 48 steps
    monkeypatch.setattr(interruption, "SECONDS_TO_STOP", 600.0)  # a slow machine would not reach the next check
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        launch(f"--prompt={PROMPT}", "--max_new_tokens=48", "--noearly_stop", "--block_length=8")
    assert stop.value.code == (130 if number == signal.SIGINT else 42)
    said = capsys.readouterr()
    assert said.out.startswith(f"{PROMPT}    return ")
    line = said.err.splitlines()[-1]
    assert line.startswith(f"stopped by {number.name}: ")
    found = re.search(r"(\d+) forward passes", line)
    assert found is not None, line
    assert 16 <= int(found[1]) < 24, "a step later, of 48"
    # A step commits one token, or two at the end of some blocks.
    committed = re.search(r": (\d+) of 48 new tokens committed, printed up to the first open position; (\d+) ", line)
    assert committed is not None, line
    assert int(committed[2]) <= int(found[1]) <= int(committed[1]) <= int(found[1]) + 3
    assert signal.getsignal(signal.SIGINT) is before


def test_text_so_far_ends_where_a_completion_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """At an end token or at a stop string, whichever comes first."""
    tokenizer = TextTokenizer.from_folder(open_folder(DEMO))
    (end,) = tokenizer.encode("<|endoftext|>")[-1:]
    whole, after = tokenizer.encode("one two STOP three"), tokenizer.encode("four")
    builder = CompletionBuilder(tokenizer, -1, (end,))
    values = flags.FlagValues()
    generate.define_flags(values)
    values(["generate", "--stop=STOP"])
    rows = [whole, [*whole[:1], end, *after], ()]
    count = write_unfinished(rows, ["1: ", "2: ", "3: "], ["a", "b", "c"], [0, 0, 0], builder, values)
    assert capsys.readouterr().out == (
        f"=== a ===\n1: one two \n=== b ===\n2: {tokenizer.decode(whole[:1])}\n=== c ===\n3: \n"
    )
    assert count == len(tokenizer.encode("one two ")) + 1


@pytest.mark.parametrize("form", ["--nojson", "--chat", "--json"])
def test_text_so_far_is_printed_as_completions_are(capsys: pytest.CaptureFixture[str], form: str) -> None:
    launch(f"--prompt={PROMPT}", form.replace("--chat", "--nojson"))
    values = flags.FlagValues()
    generate.define_flags(values)
    values(["generate", form])
    whole = capsys.readouterr().out
    tokenizer = TextTokenizer.from_folder(open_folder(DEMO))
    builder = CompletionBuilder(tokenizer, -1, ())
    text = json.loads(whole)["text"] if form == "--json" else whole.removeprefix(PROMPT).removesuffix("\n")
    write_unfinished([tokenizer.encode(text)], [PROMPT], ["a title"], [row_seeds(0, 1)[0]], builder, values)
    said = capsys.readouterr().out
    if form == "--json":
        finished, unfinished = json.loads(whole), json.loads(said)
        assert list(finished) == list(unfinished)
        differ = {name for name in finished if finished[name] != unfinished[name]}
        assert {"stats", "masks_left"} <= differ <= {"stats", "masks_left", "finish_reason"}
    else:
        assert said == (whole if form == "--nojson" else f"{text}\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    generate.run(["generate", "--version"])
    assert capsys.readouterr().out.startswith("diffumesh ")


def test_console_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["diffumesh"])
    main.run()
    assert "generate" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["diffumesh", "dance"])
    with pytest.raises(SystemExit) as stop:
        main.run()
    assert stop.value.code == startup.EXIT_USER_ERROR


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """A new process with simulated devices, its own compile cache, and prompts from standard input."""
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "launch.generate", "--devices=4", "--mesh=data=2,tensor=2", "--max_new_tokens=8"]
    # As for a user: with XLA's defaults, compilation takes long enough that JAX caches the program.
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [*command, f"--compile_cache={cache}"],
        input=PROMPT,
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.startswith(PROMPT)
    assert cache.stat().st_mode & 0o077 == 0
    assert list(cache.iterdir())
    wrong = subprocess.run(
        [*command, "--mesh=data=8"], input=PROMPT, capture_output=True, text=True, env=environment, check=False
    )
    assert wrong.returncode == 2
    assert "needs 8 devices, and there are 4; a mesh that fits: data=4 (on CPU, --devices=8 simulates" in wrong.stderr
