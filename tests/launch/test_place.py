"""A process's place among the hosts, from flags and from the variables of each cluster manager."""

from __future__ import annotations

import pytest
from absl import flags

from launch.hosts.place import Place, define_place_flags, find_place
from sharding.errors import InputError


def place(environment: dict[str, str] | None = None, *arguments: str) -> Place:
    values = flags.FlagValues()
    define_place_flags(values)
    values(["test", *arguments])
    return find_place(values, environment or {})


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n"}
LWS = {"LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "job-0.job.default"}
JAX = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "10.1.1.1:700"}


@pytest.mark.parametrize(
    ("environment", "host", "hosts", "coordinator"),
    [
        (TORCHRUN, 3, 16, "node-a:29501"),
        ({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"}, 3, 16, "node-a:8476"),
        (SKYPILOT, 1, 2, "10.0.0.4:8476"),
        (LWS, 2, 4, "job-0.job.default:8476"),
        (JAX, 1, 2, "10.1.1.1:700"),
        (TORCHRUN | JAX, 1, 2, "10.1.1.1:700"),
        (LWS | SKYPILOT | TORCHRUN, 3, 16, "node-a:29501"),
    ],
    ids=["torchrun", "no-port", "skypilot", "lws", "jax", "jax-first", "torchrun-first"],
)
def test_variables(environment: dict[str, str], host: int, hosts: int, coordinator: str) -> None:
    found = place(environment)
    assert (found.host, found.hosts, found.coordinator) == (host, hosts, coordinator)
    assert found.control_port == int(coordinator.rpartition(":")[2]) + 1
    assert found.bind == "[::]"


def test_flags_come_first() -> None:
    given = ["--coordinator_address=[fd00::1]:5000", "--num_processes=3", "--process_id=2"]
    found = place(TORCHRUN, *given)
    assert found == Place(2, 3, "[fd00::1]:5000", 5001, "[::]", None)
    ported = place(TORCHRUN, *given, "--coordinator_port=65535", "--coordinator_bind_address=10.0.0.1")
    assert (ported.coordinator, ported.control_port, ported.bind) == ("[fd00::1]:65535", 65534, "10.0.0.1")
    assert place(TORCHRUN, "--num_processes=1").hosts == 1
    assert place({}).hosts == 1


def test_loopback_is_not_opened_to_others() -> None:
    for name in ("localhost", "127.0.0.1", "127.1.2.3", "[::1]"):
        assert place(JAX | {"JAX_COORDINATOR_ADDRESS": f"{name}:700"}).bind == "127.0.0.1"
    assert place(JAX | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1.example:700"}).bind == "[::]"


def test_a_process_for_each_device_or_one_for_all() -> None:
    assert place(TORCHRUN).local_devices is None
    assert place(TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}).local_devices == (3,)
    assert place(TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).local_devices is None
    slurm = {"SLURM_LOCALID": "5", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    assert place(TORCHRUN | slurm).local_devices == (5,)
    assert place(TORCHRUN | slurm, "--local_device_ids=0,1").local_devices == (0, 1)


@pytest.mark.parametrize("tasks", [2, 16])
def test_slurm_as_jax_detects_it(monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    """JAX reads the environment itself; this checks that it finds what we expect."""
    around = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "gpu[07-08],other",
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "JAX_COORDINATOR_PORT": "20022",
    }
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    found = place(around | {"SLURM_STEP_TASKS_PER_NODE": f"{tasks // 2}(x2)"})
    assert (found.host, found.hosts, found.coordinator, found.control_port) == (1, tasks, "gpu07:20022", 20023)
    assert found.local_devices == (None if tasks == 2 else (1,))


def test_open_mpi_as_jax_detects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    found = place({})
    assert (found.host, found.hosts, found.coordinator_host) == (3, 4, "10.96.0.1")


def test_open_mpi_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;usock")
    for name, value in {"SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(InputError, match=r"OMPI_MCA_orte_hnp_uri='1531576320.0;usock' in the environment: expected"):
        place({})


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import clusters

    def silent(*arguments: object) -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", silent)
    for uri in (None, "4096.0;tcp6://[fe80::1]:43370"):
        if uri is not None:
            monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", uri)
        with pytest.raises(RuntimeError, match="no answer"):
            place({})


def test_a_pod_of_no_indexed_job_is_alone(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert place({}).hosts == 1
    assert not recwarn.list


@pytest.mark.parametrize("slices", [1, 2])
def test_a_tpu_slice_as_jax_detects_it(monkeypatch: pytest.MonkeyPatch, slices: int) -> None:
    """On TPUs, the TPU runtime's place wins over other variables."""
    from jax._src import cloud_tpu_init
    from jax._src.clusters import cloud_tpu_cluster, cluster

    for module in (cloud_tpu_init, cloud_tpu_cluster, cluster):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4")
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", str(slices))
    monkeypatch.setenv("MEGASCALE_SLICE_ID", str(slices - 1))
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "127.0.0.1:7000")
    found = place(TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert (found.host, found.hosts) == (4 * slices - 1, 4 * slices)
    assert (found.coordinator, found.control_port, found.local_devices) == ("127.0.0.1:8482", 8483, None)
    # Simulated devices are local to this host.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert place({}).hosts == 1


@pytest.mark.parametrize(
    ("environment", "arguments", "says"),
    [
        ({}, ["--num_processes=4"], "--coordinator_address, --process_id missing"),
        ({}, ["--coordinator_address=a:1", "--num_processes=2", "--process_id=2"], "host 2 of 2"),
        ({}, ["--coordinator_address=a:99999", "--num_processes=2", "--process_id=0"], "the port must be 1 to 65535"),
        ({}, ["--coordinator_address=a b:1", "--num_processes=2", "--process_id=0"], "expected a name"),
        ({}, ["--coordinator_address=$(id):1", "--num_processes=2", "--process_id=0"], "expected a name"),
        (TORCHRUN | {"RANK": "first"}, [], "RANK='first'"),
        (TORCHRUN | {"RANK": "16"}, [], "host 16 of 16"),
        (TORCHRUN | {"WORLD_SIZE": "999999999"}, [], "WORLD_SIZE"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, [], "MASTER_PORT"),
        (
            {},
            ["--coordinator_address=a:9", "--num_processes=2", "--process_id=0", "--control_port=9"],
            "--control_port=9 is the coordinator's port",
        ),
        (JAX, ["--local_device_ids=0,0"], "different numbers"),
        (JAX, ["--local_device_ids=a"], "different numbers"),
        ({}, ["--local_device_ids=abc"], "--local_device_ids=abc: only for runs of several processes"),
        ({}, ["--local_device_ids=0,1"], "CUDA_VISIBLE_DEVICES"),
        (JAX, ["--local_device_ids=0", "--num_processes=1"], "only for runs of several processes"),
        (JAX | {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "1"}, ["--local_device_ids=0"], "only for runs of several"),
    ],
)
def test_what_makes_no_sense(environment: dict[str, str], arguments: list[str], says: str) -> None:
    with pytest.raises(InputError) as error:
        place(environment, *arguments)
    assert says in str(error.value)
