"""The files for clusters: they are valid, and scripts run against simulated tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CLUSTER = Path(__file__).parent.parent.parent / "launch" / "cluster"
REPOSITORY = CLUSTER.parent.parent
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
SLICES = {"v5e-8": (1, 8), "v5e-16": (4, 4), "v4-32": (4, 4), "v5p-32": (4, 4)}


def check_with(linter: str, path: Path) -> None:
    """Run a linter from the extra [test]."""
    program = shutil.which(linter, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, f"{linter} comes with the extra [test]"
    done = subprocess.run([program, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    check_with("shellcheck", script)


def test_container_file_is_clean() -> None:
    check_with("hadolint", CLUSTER / "Containerfile")


def apply_patch(document: Any, patches: list[dict[str, Any]]) -> None:
    """Apply the operations of JSON Patch that the overlays use."""
    for patch in patches:
        assert patch["op"] == "replace"
        *path, last = [int(key) if key.isdigit() else key for key in patch["path"].split("/")[1:]]
        place = document
        for key in path:
            place = place[key]
        place[last]  # raises if there is nothing to replace
        place[last] = patch["value"]


def jobset(name: str) -> dict[str, Any]:
    import yaml

    document = yaml.safe_load((CLUSTER / "gke" / "base" / "jobset.yaml").read_text())
    overlay = yaml.safe_load((CLUSTER / "gke" / name / "kustomization.yaml").read_text())
    assert overlay["resources"] == ["../base"]
    for patch in overlay["patches"]:
        apply_patch(document, yaml.safe_load(patch["patch"]))
    return document


@pytest.mark.parametrize("name", SLICES)
def test_jobset(name: str) -> None:
    import kubernetes_validate

    from launch import generate
    from sharding.mesh import MeshSpec

    document = jobset(name)
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(document["spec"]) == {"failurePolicy", "replicatedJobs"}
    for rule in document["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]), "the rule of JobSet's webhook"
    (replicated,) = document["spec"]["replicatedJobs"]
    assert set(replicated) == {"name", "replicas", "template"}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": replicated["template"]["spec"]}
    kubernetes_validate.validate(job, "1.30", strict=True)

    spec = job["spec"]
    hosts, chips = SLICES[name]
    assert spec["parallelism"] == spec["completions"] == hosts
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    product = 1
    for side in topology:
        product *= int(side)
    assert product == hosts * chips
    # Our exit codes and flags.
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }
    from absl import flags

    values = flags.FlagValues()
    generate.define_flags(values)
    assert values(container["args"]) == ["generate"]
    assert MeshSpec.parse(values.mesh).size == hosts * chips
    # Compiled programs and downloads outlive the pods, and all of them have the same.
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert mount["name"] == volume["name"]
    assert volume["persistentVolumeClaim"] == {"claimName": cache_claim()["metadata"]["name"]}
    home = {one["name"]: one.get("value") for one in container["env"]}["HF_HOME"]
    for folder in (values.compile_cache, home):
        assert Path(folder).is_relative_to(mount["mountPath"])


def cache_claim() -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load((CLUSTER / "gke" / "cache.yaml").read_text())
    return found


def test_the_claim_of_the_cache_is_for_several_nodes() -> None:
    import kubernetes_validate

    claim = cache_claim()
    kubernetes_validate.validate(claim, "1.30", strict=True)
    assert claim["kind"] == "PersistentVolumeClaim"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlays")
@pytest.mark.parametrize("name", SLICES)
def test_kustomize_renders_the_same(name: str) -> None:
    import yaml

    done = subprocess.run(
        ["kubectl", "kustomize", CLUSTER / "gke" / name], capture_output=True, text=True, check=True, timeout=60
    )
    rendered, ours = yaml.safe_load(done.stdout), jobset(name)
    ours["metadata"]["name"] += f"-{name}"
    pod = ours["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["image"] = "REGION-docker.pkg.dev/PROJECT/diffumesh/diffumesh:tpu"
    assert rendered == ours


def test_container_file_copies_what_the_package_needs() -> None:
    import tomllib

    text = (CLUSTER / "Containerfile").read_text()
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    roots = set(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == roots
    extras = set(re.findall(r"EXTRA=(\w+)", text))
    assert extras <= set(settings["project"]["optional-dependencies"])
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        assert name in text
    assert re.search(r"^USER 1000$", text, re.MULTILINE), "not as root"


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(0, 0, False), (2, 0, False), (42, 0, True), (42, 5, False)]
)
def test_slurm_script(tmp_path: Path, code: int, restarts: int, requeued: bool) -> None:
    said = "$JAX_COORDINATOR_PORT ${#DIFFUMESH_HOSTS_SECRET} $SRUN_CPUS_PER_TASK $*"
    programs = {
        "srun": f'#!/bin/bash\necho "{said}"; echo "noise" >&2; exit {code}\n',
        "scontrol": f'#!/bin/bash\necho "$@" > {tmp_path}/requeued\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_RESTART_COUNT": str(restarts),
        "PYTHON": "python3.12",
    }
    command = [CLUSTER / "slurm.sh", "generate", "--prompt=a b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == code
    assert done.stdout == "29422 64 32 --kill-on-bad-exit=0 python3.12 -m launch.main generate --prompt=a b\n"
    assert (tmp_path / "requeued").exists() == requeued
    assert subprocess.run([CLUSTER / "slurm.sh"], env=environment, check=False, capture_output=True).returncode == 2


def test_slurm_directives() -> None:
    text = (CLUSTER / "slurm.sh").read_text()
    head = text[: text.index("set -uo")]
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", head, re.MULTILINE))
    assert directives["ntasks-per-node"] == "1"
    assert directives["signal"].startswith("TERM@")  # sent to the job steps, not to the batch shell
    assert "requeue" in directives


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(CLUSTER / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": REPOSITORY}}
    )
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "correct sums" in printed
    assert "def is_even" in printed
    assert "0 programs compiled" in printed
