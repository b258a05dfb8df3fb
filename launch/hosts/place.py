"""Process index, number of hosts and coordinator address, from flags or from the cluster manager's environment."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from absl import flags

from runtime import InputError

MAX_HOSTS = 1 << 14
DEFAULT_PORT = 8476
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])")

# Variable in which Open MPI tells a process where it was started.
_OPEN_MPI = "OMPI_MCA_orte_hnp_uri"
# Variables with the index of a process on its machine and the number of processes there.
_LOCAL_RANKS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


@dataclass(frozen=True)
class Place:
    """The position of one host in a run.

    Attributes:
      host: process index of this host, from 0.
      hosts: number of hosts.
      coordinator: ``name:port`` of host 0, where JAX's coordination service listens.
      control_port: port of host 0 where its supervisor listens.
      bind: address that host 0 listens on.
      local_devices: ids of the devices that this process uses; None for all devices of the machine.
    """

    host: int
    hosts: int
    coordinator: str = ""
    control_port: int = 0
    bind: str = ""
    local_devices: tuple[int, ...] | None = None

    @property
    def coordinator_host(self) -> str:
        """Name or address of host 0."""
        return self.coordinator.rpartition(":")[0]

    @property
    def is_on_one_machine(self) -> bool:
        """Whether host 0 is reached, and can be reached, through loopback only."""
        return all(_LOOPBACK.fullmatch(name) for name in (self.coordinator_host, self.bind))


def define_place_flags(values: flags.FlagValues) -> None:
    """Define the flags of a host's position, and of how long hosts wait for each other."""

    def integer(name: str, text: str, low: int, high: int) -> None:
        flags.DEFINE_integer(name, None, text, low, high, flag_values=values)

    flags.DEFINE_string(
        "coordinator_address", None, "Address of host 0, as name:port. Default: detected.", flag_values=values
    )
    integer(
        "num_processes",
        "Number of processes of the run, normally one per host. 1: run alone, even inside a detected cluster.",
        1,
        MAX_HOSTS,
    )
    integer("process_id", "Process index of this host, from 0.", 0, MAX_HOSTS - 1)
    integer(
        "coordinator_port", f"Port of JAX's coordination service. Default: as detected, else {DEFAULT_PORT}.", 1, 65535
    )
    integer(
        "control_port",
        "Port of host 0 to which the supervisors of all hosts connect. Default: the coordinator's port plus 1.",
        1,
        65535,
    )
    flags.DEFINE_string(
        "coordinator_bind_address",
        None,
        "Address that host 0 listens on. Default: all addresses, or loopback for a local coordinator.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "local_device_ids",
        None,
        "In a run of several processes: ids of the devices that this one uses. Default: all.",
        flag_values=values,
    )

    def seconds(name: str, default: int, text: str) -> None:
        flags.DEFINE_integer(name, default, f"Seconds {text}", 1, 1 << 20, flag_values=values)

    seconds("initialization_timeout", 300, "until a host that has not joined counts as missing.")
    seconds("heartbeat_timeout", 60, "without a heartbeat until a host counts as dead.")
    seconds("shutdown_timeout", 300, "that hosts wait for each other at the end.")
    seconds("stall_timeout", 1800, "without progress on any host until all hosts print their stacks and stop.")


def find_place(values: flags.FlagValues, environment: Mapping[str, str] | None = None) -> Place:
    """Find the position of this process.

    Sources, in this order: flags; ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``; on a Cloud
    TPU JAX's detection; torchrun; SkyPilot; LeaderWorkerSet; JAX's detection elsewhere (Open MPI, Slurm, Kubernetes).

    Args:
      values: parsed flags, as :func:`define_place_flags` defines them.
      environment: environment variables; default ``os.environ``. JAX's own detection always looks at the real one.

    Raises:
      InputError: flags or variables are invalid or incomplete.
      RuntimeError: a service that JAX asks (metadata server, Kubernetes, DNS) does not answer.
    """
    around = os.environ if environment is None else environment
    if values.num_processes == 1:
        return _alone(values)
    given = {name: values[name].value for name in ("coordinator_address", "num_processes", "process_id")}
    absent = [name for name, value in given.items() if value is None]
    if not absent:
        found = given["process_id"], given["num_processes"], given["coordinator_address"], "flags"
    elif len(absent) < len(given):
        raise InputError(f"--{', --'.join(absent)} missing: give all of --{', --'.join(given)}, or none of them")
    else:
        detected = _from_variables(around) or _from_jax(values)
        if detected is None:
            return _alone(values)
        found = detected
    host, hosts, address, where = found
    if not 1 <= hosts <= MAX_HOSTS or not 0 <= host < hosts:
        raise InputError(f"{where}: host {host} of {hosts}; expected an index from 0 and at most {MAX_HOSTS} hosts")
    if hosts == 1:
        return _alone(values)
    name, port = _split_address(address, values.coordinator_port, where)
    if values.control_port == port:
        raise InputError(f"--control_port={port} is the coordinator's port ({where}); name another one")
    return Place(
        host=host,
        hosts=hosts,
        coordinator=f"{name}:{port}",
        control_port=values.control_port or (port + 1 if port < 65535 else port - 1),
        bind=values.coordinator_bind_address or ("127.0.0.1" if _LOOPBACK.fullmatch(name) else "[::]"),
        local_devices=_local_devices(values.local_device_ids, around),
    )


def _alone(values: flags.FlagValues) -> Place:
    """Return the place of a run's only process, which uses all devices that it sees."""
    if values.local_device_ids:
        raise InputError(
            f"--local_device_ids={','.join(values.local_device_ids)}: only for runs of several processes; to use only "
            "some of this machine's devices, set CUDA_VISIBLE_DEVICES or TPU_VISIBLE_CHIPS"
        )
    return Place(0, 1)


_Found = tuple[int, int, str, str]


def _from_variables(around: Mapping[str, str]) -> _Found | None:
    """Return host, hosts, address and source of a place, from environment variables; None if they are not set."""
    if found := _variables(around, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS", "JAX_* variables"):
        return found
    if _on_tpu_vm():
        return None
    if found := _variables(around, "RANK", "WORLD_SIZE", "MASTER_ADDR", "torchrun"):
        # torchrun itself listens on MASTER_PORT.
        port = _number(around, "MASTER_PORT", 65534) + 1 if "MASTER_PORT" in around else DEFAULT_PORT
        return *found[:2], f"{found[2]}:{port}", found[3]
    if found := _variables(around, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SkyPilot"):
        return *found[:2], found[2].split()[0], found[3]
    return _variables(around, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "LeaderWorkerSet")


def _variables(around: Mapping[str, str], host: str, hosts: str, address: str, where: str) -> _Found | None:
    if not {host, hosts, address} <= around.keys() or not around[address].strip():
        return None
    return _number(around, host), _number(around, hosts), around[address].strip(), where


def _number(around: Mapping[str, str], name: str, largest: int = MAX_HOSTS) -> int:
    text = around[name].strip()
    if not re.fullmatch(r"\d{1,9}", text) or int(text) > largest:
        raise InputError(f"{name}={text[:40]!r} in the environment: expected a number of {largest} at most")
    return int(text)


def _on_tpu_vm() -> bool:
    from jax._src import cloud_tpu_init

    return cloud_tpu_init.running_in_cloud_tpu_vm


def _from_jax(values: flags.FlagValues) -> _Found | None:
    """Return host, hosts, address and source of a place from JAX's cluster detection; None if it finds no cluster.

    JAX has no public function for it that does not also connect the hosts.
    """
    from jax._src import clusters

    simulated = ("devices" in values and values.devices is not None) or os.environ.get("JAX_PLATFORMS") == "cpu"
    if simulated and _on_tpu_vm():
        return None  # the other hosts of the pod do not simulate devices
    managed = _on_tpu_vm() or {_OPEN_MPI, "SLURM_JOB_ID", "JOB_COMPLETION_INDEX"} & os.environ.keys()
    if "KUBERNETES_SERVICE_HOST" in os.environ and not managed:
        return None  # without an indexed job a pod has no index; JAX would ask Kubernetes for one and fail
    try:
        address, hosts, host, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, values.initialization_timeout
        )
    except (KeyError, ValueError) as error:
        raise InputError(f"JAX cannot read the cluster's environment variables: {error!r}") from error
    except RuntimeError as error:
        # JAX raises this also if a service does not answer, which is no user's mistake.
        uri = os.environ.get(_OPEN_MPI)
        if uri is None or re.search("tcp6?://", uri):
            raise
        raise InputError(
            f"{_OPEN_MPI}={uri[:80]!r} in the environment: expected an address, as in 4096.0;tcp://10.0.0.1:34911; "
            "correct or unset it, or give --coordinator_address, --num_processes and --process_id"
        ) from error
    if address is None or hosts is None or host is None:
        return None
    return host, hosts, address, "JAX's cluster detection"


def _split_address(address: str, port: int | None, where: str) -> tuple[str, int]:
    name, colon, text = address.rpartition(":")
    if not colon or (":" in name and not name.startswith("[")):  # no port, or an IPv6 address
        name, text = address, ""
    if port is None and text and not (re.fullmatch(r"\d{1,5}", text) and 1 <= int(text) <= 65535):
        raise InputError(
            f"{where}: coordinator {address!r}: the port must be 1 to 65535, as in 10.0.0.1:{DEFAULT_PORT}"
        )
    if not re.fullmatch(r"[\w.-]{1,253}|\[[0-9a-fA-F:.%\w]{2,60}\]", name):
        raise InputError(
            f"{where}: coordinator {address!r}: expected a name or an address, such as 10.0.0.1:{DEFAULT_PORT}"
        )
    return name, port or (int(text) if text else DEFAULT_PORT)


def _local_devices(given: Sequence[str] | None, around: Mapping[str, str]) -> tuple[int, ...] | None:
    if given:
        if not all(re.fullmatch(r"\d{1,4}", text) for text in given) or len(set(given)) < len(given):
            raise InputError(f"--local_device_ids={','.join(given)}: expected different numbers, such as 0,1,2,3")
        return tuple(int(text) for text in given)
    if around.get("JAX_LOCAL_DEVICE_IDS") or _on_tpu_vm():
        return None  # JAX reads the variable itself; on a TPU devices are not divided among processes
    for rank, count in _LOCAL_RANKS:
        # A process that is alone on its machine uses all its devices. Slurm writes "8(x2)".
        several = re.match(r"\d{1,6}", around.get(count, ""))
        if rank in around and several and int(several[0]) > 1:
            return (_number(around, rank),)
    return None


def check_coordinator_port(place: Place) -> None:
    """Check that JAX's coordination service can listen on this host, which is host 0.

    Raises:
      InputError: another program listens on the port.
    """
    address, port = place.bind.strip("[]"), int(place.coordinator.rpartition(":")[2])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections that have just closed
            tried.bind((address, port))
            tried.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"host 0 cannot listen on {place.bind}:{port} ({error.strerror}); --coordinator_port names another port"
            ) from error
