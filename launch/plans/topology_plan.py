"""The plan of one machine: the meshes that fit it, ranked, and those that do not; and what they are planned for."""

from __future__ import annotations

from runtime import MeshSpec
from runtime.planner import CompiledPhase, Estimate, Topology, Workload, out_of_memory


def workload_words(workload: Workload) -> str:
    """Return the settings of a workload in words, for the titles of tables and pictures."""
    quantized = "" if workload.quantization == "none" else f", {workload.quantization} weights"
    words = f"{workload.dtype}{quantized}, batch {workload.batch}, {workload.prompt} + {workload.new_tokens} tokens"
    if workload.config.objective == "autoregressive":
        return words
    # A canvas of variable length has no number of steps.
    words += "" if workload.config.family.variable_length else f", {workload.steps} steps"
    words += f", cache {workload.cache}"
    words += "" if workload.cache == "none" else f", blocks of {workload.block_length}"
    return words + (f", {workload.draft_steps} drafts per row, none accepted" if workload.draft_steps else "")


class TopologyPlan:
    """The ranked meshes of one machine, the compiler's results for the best of them, and a verdict.

    Attributes:
      topology: the machine.
      fitting: the estimates of the meshes that fit, best first.
      others: the estimates of the meshes that do not fit.
      why_none: why the requested mesh is impossible or does not fit; None otherwise.
      compiled: the compiler's results, by index in ``fitting``.
      refused: for each mesh that the compiler refused, a line that says why.
      notes: lines for the user.
    """

    def __init__(
        self, topology: Topology, fitting: list[Estimate], others: list[Estimate], why_none: str | None = None
    ) -> None:
        """Create the plan from ranked meshes, of which none has been compiled."""
        self.topology, self.fitting, self.others = topology, fitting, others
        self.why_none = why_none
        self.compiled: dict[int, list[CompiledPhase]] = {}
        self.refused: dict[MeshSpec, str] = {}
        self.notes: list[str] = []

    def refuse(self, number: int, reason: str) -> None:
        """Move the mesh with this index in ``fitting`` to ``others``, because the compiler refused it."""
        found = self.fitting.pop(number)
        self.others.insert(0, found)
        self.refused[found.spec] = f"{found.spec}: {reason}"
        self.notes.append(f"left out, {self.refused[found.spec]}")

    @property
    def verdict(self) -> str:
        """The reason why the first mesh is the best, or why no mesh fits."""
        if not self.fitting:
            if self.refused:
                return f"{self.topology}: {'; '.join(self.refused.values())}"
            return self.why_none or out_of_memory(self.others, self.topology)
        best = self.fitting[0]
        tensor = next((one for one in self.fitting if one.spec.tensor == one.spec.size), None)
        other = tensor if tensor is not None and tensor is not best else None
        return best.explain_against(other) if other is not None else f"{best.spec} is the fastest that fits (estimated)"
