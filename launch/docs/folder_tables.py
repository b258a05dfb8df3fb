"""Write the tables of runtime/README.md, sharding/README.md and checkpoints/README.md from the code.

python -m launch.docs.folder_tables      replaces the text between each table's markers
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from checkpoints import FORMATS
from launch.docs.marked_tables import markdown, replace_table
from runtime import FAMILIES
from runtime.planner import PRESETS, HeadLayout, preset

_ROOT = Path(__file__).parents[2]
_TENSOR_SIZES = (1, 2, 4, 8, 16, 32)


def families() -> str:
    """Return a Markdown table with a row per model family, from the ``Family`` records."""
    lines = []
    for family in FAMILIES:
        kind = f"`{family.model_type}`" + (f" with `{family.config_key}`" if family.config_key else "")
        cells = (kind, family.objective, family.attention, str(family.prediction_offset))
        algorithms = _codes(family.algorithms)
        rules = _codes(family.parallel_rules) if algorithms else ""
        lines.append((*cells, algorithms, rules, _codes(family.presets), family.verified))
    head = ("`model_type`", "objective", "attention", "offset", "`algorithm`", "`parallel`", "presets", "compared with")
    return markdown(head, lines)


def heads() -> str:
    """Return a Markdown table of the ``kv x group`` split and the query heads per device, by tensor size and heads."""
    models: dict[tuple[int, int], list[str]] = {}
    for name in PRESETS:
        config = preset(name)
        models.setdefault((config.num_heads, config.num_kv_heads), []).append(name)
    head = ["query heads / KV heads", *(f"tensor={size}" for size in _TENSOR_SIZES), "presets"]
    lines = []
    for (queries, kv_heads), names in models.items():
        splits = [_split(HeadLayout.for_tensor(queries, kv_heads, size)) for size in _TENSOR_SIZES]
        lines.append((f"{queries} / {kv_heads}", *splits, _codes(names)))
    return markdown(head, lines)


def formats() -> str:
    """Return a Markdown table with a row per checkpoint format."""
    head = ("format", "recognized by", "dtypes", "loads directly", "manifest", "written by")
    return markdown(
        head,
        (
            (
                one.name,
                _codes(one.files),
                ", ".join(one.dtypes),
                "yes" if one.loads else "no",
                one.digests,
                f"`diffumesh {one.written_by}`" if one.written_by else "",
            )
            for one in FORMATS
        ),
    )


TABLES = {
    "runtime/README.md": ("model families", families),
    "sharding/README.md": ("heads", heads),
    "checkpoints/README.md": ("formats", formats),
}


def write(page: str, text: str) -> str:
    """Return a page, given its path and text, with its table regenerated.

    Raises:
      InputError: the page has no place for it.
    """
    name, table = TABLES[page]
    return replace_table(text, name, table())


def _split(layout: HeadLayout) -> str:
    """Describe a split: ``4 x 2: 4`` is kv x group, then the query heads of one device."""
    shards = layout.group if layout.shards_group else 1
    own = layout.num_kv_heads // layout.kv * layout.padded_queries_per_kv // shards
    padded = layout.padded_queries_per_kv > layout.queries_per_kv
    note = " (padded)" if padded else "" if layout.shards_group else " (replicated)"
    return f"{layout.kv} x {layout.group}: {own}{note}"


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    for page in TABLES:
        (_ROOT / page).write_text(write(page, (_ROOT / page).read_text("utf-8")), "utf-8")
