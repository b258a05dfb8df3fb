"""The meshes that a workload could run on, from which the planner chooses."""

from __future__ import annotations

from runtime.models.declarations import tensor_sizes
from runtime.models.families import weights_class
from runtime.planner.workload import Workload
from sharding.errors import MeshError
from sharding.heads import HeadLayout
from sharding.links import Wiring
from sharding.mesh import MeshSpec
from sharding.topology import Topology


def candidate_meshes(workload: Workload, topology: Topology) -> list[MeshSpec]:
    """Return the meshes to choose from, for a workload on a topology.

    They use all devices, can be mapped onto the interconnect, divide the model (and its draft model), and leave no
    device with only padding to compute.
    """
    devices, slices = topology.num_devices, topology.num_slices
    platform, found = topology.chip.platform, []
    models = [(workload.config, workload.quantization)]
    if workload.draft is not None:
        models.append((workload.draft.config, workload.draft.quantization))
    divisors = [tensor_sizes(model, weights_class(model), devices // slices, how) for model, how in models]
    sizes = [size for size in divisors[0] if all(size in found for found in divisors)]
    most = workload.batch * (1 + workload.draft_steps if workload.divides_drafts else 1)
    for tensor in sizes:
        if devices % tensor:
            continue
        rest = devices // tensor
        for data in (count for count in range(1, rest + 1) if rest % count == 0):
            if data % slices or data > max(most, slices):
                continue
            spec = MeshSpec(data=data, sequence=rest // data, tensor=tensor)
            layout = workload.layout(spec)
            tokens = workload.prompt + workload.new_tokens
            if spec.sequence > 1 and workload.canvas(layout, platform) > max(512, 2 * tokens):
                continue
            if _can_be_laid_out(topology, spec, layout.heads):
                found.append(spec)
    return found


def _can_be_laid_out(topology: Topology, spec: MeshSpec, heads: HeadLayout) -> bool:
    try:
        Wiring(topology, spec, heads).check_hosts()
    except MeshError:
        return False
    return True
