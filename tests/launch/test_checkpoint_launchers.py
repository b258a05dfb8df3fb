"""The commands convert, verify, inspect and export: output, refusals and exit codes."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from checkpoints import DEMO, CheckpointFolder, open_folder
from checkpoints.manifest import MANIFEST_FILE
from launch import convert, export, inspect, verify
from launch.process import startup
from sharding.errors import InputError
from tests.checkpoints.small import MICRO, contents, to_canonical, write_source
from tests.checkpoints.test_legacy_conversion import legacy_tree

NO_CACHE = "--compile_cache="


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_source(tmp_path_factory.mktemp("source"), MICRO)
    (folder / "LICENSE").write_text("\n  A Licence of Its Own, Version 3\n")
    return folder


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_canonical(source, tmp_path_factory.mktemp("canonical") / "checkpoint")


@pytest.fixture(scope="module")
def legacy(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("legacy") / "params.pkl"
    path.write_bytes(pickle.dumps(legacy_tree(load_file(source / "model.safetensors")), protocol=4))
    return path


def refused(run: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the only line on standard error, after a check that standard output is empty and the exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(["launcher", *arguments])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert not said.out
    assert said.err.startswith("error: ")
    return said.err


def test_the_demo_is_verified_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails after a training, delete its manifest, then run ``diffumesh verify --write_manifest``."""
    verify.run(["verify"])
    said = capsys.readouterr()
    assert "bytes of weights intact" in said.out
    assert "older version" not in said.err


def test_the_demo_is_inspected_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    inspect.run(["inspect"])
    assert capsys.readouterr().out.startswith(f"{DEMO}: Hugging Face safetensors\n")


def test_there_and_back(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.run(["convert", f"--source={source}", f"--output={tmp_path / 'checkpoint'}", NO_CACHE])
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'checkpoint'}\n"
    assert "the weights' licence, LICENSE: A Licence of Its Own, Version 3" in said.err
    assert (tmp_path / "checkpoint" / "LICENSE").read_text() == (source / "LICENSE").read_text()
    verify.run(["verify", f"--checkpoint={tmp_path / 'checkpoint'}"])
    assert "bytes of weights intact" in capsys.readouterr().out
    export.run(["export", f"--checkpoint={tmp_path / 'checkpoint'}", f"--output={tmp_path / 'back'}"])
    assert capsys.readouterr().out == f"{tmp_path / 'back'}\n"
    assert contents(tmp_path / "back") == contents(source)
    assert len({path.stat().st_mode for path in (tmp_path / "back").iterdir()}) == 1, (
        "all are readable by the same users"
    )


def test_outputs_that_are_refused(source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--overwrite" in refused(convert.run, capsys, f"--source={source}", f"--output={checkpoint}", NO_CACHE)
    assert "--output is missing" in refused(convert.run, capsys, f"--source={source}", NO_CACHE)
    assert "--overwrite" in refused(export.run, capsys, f"--checkpoint={checkpoint}", f"--output={source}")
    assert "to a local folder" in refused(
        export.run, capsys, f"--checkpoint={checkpoint}", "--output=gs://bucket/folder"
    )
    assert "not a valid output folder" in refused(convert.run, capsys, f"--source={source}", "--output=.", NO_CACHE)
    for where in (source / "config.json", source / ("x" * 250)):
        assert str(where) in refused(
            export.run, capsys, f"--checkpoint={checkpoint}", f"--output={where}", "--overwrite"
        )
    assert contents(checkpoint) == contents(source)


def test_damage_is_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    largest = max(copy.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert "tensor" in refused(verify.run, capsys, f"--checkpoint={copy}")
    (copy / MANIFEST_FILE).unlink()
    assert "not finished" in refused(verify.run, capsys, f"--checkpoint={copy}")


def test_the_manifest_of_a_huggingface_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_source(tmp_path / "model", MICRO)
    assert "--write_manifest writes it" in refused(verify.run, capsys, f"--checkpoint={folder}")
    verify.run(["verify", f"--checkpoint={folder}", "--write_manifest"])
    assert "intact" in capsys.readouterr().out
    inspect.run(["inspect", f"--checkpoint={folder}"])
    assert "digests       of every chunk" in capsys.readouterr().out
    said = refused(verify.run, capsys, f"--checkpoint=file://{folder}", "--write_manifest")
    assert "on this machine" in said


@pytest.mark.parametrize("kind", ["canonical", "huggingface"])
def test_what_is_inside(kind: str, source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint if kind == "canonical" else source
    count = sum(len(value) for value in contents(source).values()) // 2
    inspect.run(["inspect", f"--checkpoint={folder}", "--tensors", "--device_memory=0.001"])
    said = capsys.readouterr().out
    assert ("canonical (Orbax)" if kind == "canonical" else "Hugging Face safetensors") in said
    assert "architecture  dream: 2 layers, 56 wide" in said
    assert f"parameters    {count:,} in {len(contents(source))} tensors" in said
    assert f"weights       {2 * count:,} bytes, bfloat16" in said
    assert ("digests       of every chunk" if kind == "canonical" else "digests       none") in said
    assert "tensor=1 " in said
    assert "fits in 0.001 GB" in said
    assert "model.layers.1.mlp.down_proj.weight  bfloat16 [56, 64]" in said


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantized_checkpoint_has_as_many_parameters(
    quantize: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scales are none, and int4 stores two in a byte."""
    output = tmp_path / "quantized"
    convert.run(["convert", f"--source={source}", f"--output={output}", f"--quantize={quantize}"])
    inspect.run(["inspect", f"--checkpoint={output}"])
    count = sum(len(value) for value in contents(source).values()) // 2
    assert f"parameters    {count:,} in" in capsys.readouterr().out


def test_what_is_inside_a_pickle(source: Path, legacy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect.run(["inspect", f"--checkpoint={legacy}", "--tensors"])
    said = capsys.readouterr().out
    assert "legacy pickle, indexed without being unpickled" in said
    assert "params/Dense_0/kernel  bfloat16 [56, 96]" in said
    assert "biases        none" in said
    assert "--config" in said
    inspect.run(["inspect", f"--checkpoint={legacy}", f"--config={source / 'config.json'}"])
    said = capsys.readouterr().out
    assert "architecture  dream: 2 layers" in said
    assert "tensor=2 " in said
    inspect.run(["inspect", f"--checkpoint={legacy}", f"--config={source}"])
    assert capsys.readouterr().out == said
    assert "no such file" in refused(inspect.run, capsys, "--checkpoint=/nowhere/params.pkl")
    assert "requires a params.pkl" in refused(inspect.run, capsys, f"--checkpoint={source}", "--config=config.json")


def test_a_config_that_is_named_and_not_there(
    source: Path, legacy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing --config is an error; the config.json beside the weights does not replace it."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "other.json"):
        shutil.copy(source / "config.json", tmp_path / "model" / name)
    other = tmp_path / "model" / "other.json"
    for config in (other, tmp_path / "config.json", tmp_path / "nowhere", "~no-such-user/config.json"):
        assert f"--config={config}: " in refused(inspect.run, capsys, f"--checkpoint={legacy}", f"--config={config}")
        arguments = [f"--source={legacy}", f"--config={config}", f"--output={tmp_path / 'out'}", NO_CACHE]
        assert f"--config={config}: " in refused(convert.run, capsys, *arguments)


def test_a_config_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    for launcher in (inspect, verify):
        assert f"{tmp_path}/config.json" in refused(launcher.run, capsys, f"--checkpoint={tmp_path}")


def test_what_hosts_compare_before_they_convert_a_pickle(
    source: Path, legacy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts compare the pickle and the folder that supplies the biases, because each may have its own copy."""
    seen: list[dict[str, str]] = []

    def compare(values: Any, inputs: dict[str, str]) -> None:
        seen.append(inputs)
        raise InputError("enough")

    monkeypatch.setattr(convert, "start_devices", compare)
    pickles = [legacy, Path(shutil.copy(legacy, tmp_path / "params.pkl")), tmp_path / "other.pkl"]
    data = bytearray(legacy.read_bytes())
    data[-100] ^= 1
    pickles[2].write_bytes(data)
    donors = [source, Path(shutil.copytree(source, tmp_path / "donor"))]
    (donors[1] / "LICENSE").write_text("Another")
    for path, donor in [(pickles[0], donors[0]), (pickles[1], donors[0]), (pickles[2], donors[0]), (legacy, donors[1])]:
        flags = [f"--source={path}", f"--config={source}", f"--biases_from={donor}", f"--output={tmp_path / 'out'}"]
        with pytest.raises(SystemExit):
            convert.run(["convert", *flags])
    first, same, other_pickle, other_donor = seen
    assert first == same
    assert {key for key in first if first[key] != other_pickle[key]} == {"source"}
    assert {key for key in first if first[key] != other_donor[key]} == {"biases"}


def test_a_folder_called_like_a_licence_has_no_notice(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "LICENSES").mkdir()
    (tmp_path / "LICENSE.txt").symlink_to("nowhere")
    convert.print_licence(CheckpointFolder(tmp_path, "folder"))
    assert capsys.readouterr().err == ""


def test_an_export_whose_model_has_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(tmp_path / "source", MICRO)
    config = json.loads((source / "config.json").read_text())
    said = []
    for number, more in enumerate([{}, {"auto_map": {"AutoModel": "modeling_dream.DreamModel"}}]):
        (source / "config.json").write_text(json.dumps(config | more))
        export.run(["export", f"--checkpoint={source}", f"--output={tmp_path / str(number)}"])
        said.append("copy the *.py files" in capsys.readouterr().err)
    assert said == [False, True]


def test_progress_where_there_is_no_terminal(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, lines in [(3600.0, False), (0.0, True)]:
        monkeypatch.setattr(startup, "SECONDS_BETWEEN_LINES", seconds)
        convert.run(["convert", f"--source={source}", f"--output={tmp_path / 'out'}", "--overwrite", NO_CACHE])
        said = capsys.readouterr().err
        assert ("\nconverting: 0.00 of 0.00 GB, " in said and " MB/s, about 0:00:00 left\n" in said) == lines


@pytest.mark.parametrize("cache", ["/proc/none", "~nobody_of_this_name"])
def test_a_url_without_a_cache_folder(source: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """The small files are downloaded for this process only."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert open_folder(source.as_uri()).config == open_folder(source).config
