from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from runtime.planner.hlo import bytes_by_axis, count_by_kind, read_collectives

SIZES = {"data": 2, "sequence": 1, "kv": 4, "group": 1}


def module(groups: str, operation: str = "all-reduce", shape: str = "f32[4,8]{1,0}") -> str:
    return (
        "ENTRY %main (x: f32[4,8]) -> f32[4,8] {\n"
        "  %x = f32[4,8]{1,0} parameter(0)\n"
        f"  ROOT %c = {shape} {operation}(%x), channel_id=1, {groups}, to_apply=%add\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("kv",)),
        ("replica_groups=[2,4]<=[8]", ("kv",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}", ("kv",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("kv",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("data",)),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("data", "kv")),
    ],
)
def test_groups_in_every_spelling(groups: str, axes: tuple[str, ...]) -> None:
    (found,) = read_collectives(module(groups))
    assert found.axes(SIZES) == axes
    assert found.payload == 4 * 8 * 4


def test_asynchronous_ones_count_their_results() -> None:
    groups = "replica_groups=[2,4]<=[8]"
    (gather,) = read_collectives(module(groups, "all-gather-start", "(f32[1,8]{1,0}, f32[4,8]{1,0})"))
    assert gather.payload == 128
    pair = "((f32[1,8]{1,0}, s32[2]{0}), (f32[4,8]{1,0}, s32[8]{0}))"
    (combined,) = read_collectives(module(groups, "all-gather-start", pair))
    assert combined.payload == 128 + 32
    (scatter,) = read_collectives(module(groups, "reduce-scatter", "f32[1,8]{1,0}"))
    assert scatter.payload == 128  # what it begins with


def test_what_is_sent_between_slices() -> None:
    text = module("is_host_transfer=true", "send", "(s32[1,1,128]{2,1,0}, u32[], token[])")
    assert not read_collectives(text)
    handler = 'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}'
    (found,) = read_collectives(text.replace("is_host_transfer=true", f"is_host_transfer=true, {handler}"))
    assert (found.kind, found.payload, found.axes(SIZES)) == ("send", 512, ("data",))


def test_a_group_that_cannot_be_read_is_not_lost() -> None:
    moved = bytes_by_axis(read_collectives(module("replica_groups=some_other_way")), SIZES, [1])
    assert moved == {("all-reduce", ("unread",)): 128}


def test_loops_are_multiplied_out() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "kv"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def program(x: jax.Array, count: jax.Array) -> jax.Array:
        def shard(x: jax.Array, count: jax.Array) -> jax.Array:
            x = jax.lax.psum(x, "data")
            x = jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(jax.lax.psum(x, "kv")), x)
            return jax.lax.while_loop(
                lambda state: state[0] < count, lambda s: (s[0] + 1, jnp.sin(jax.lax.psum(s[1], "kv"))), (0, x)
            )[1]

        spec = jax.P("data", "kv")
        return jax.shard_map(shard, mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec, check_vma=False)(x, count)

    text = jax.jit(program).lower(jnp.zeros((8, 8)), jnp.int32(3)).compile().as_text()
    shard = 4 * 2 * 4
    assert text is not None
    moved = bytes_by_axis(read_collectives(text), {"data": 2, "kv": 4}, [1, 10])
    assert moved == {("all-reduce", ("data",)): shard, ("all-reduce", ("kv",)): 5 * shard + 10 * shard}
    assert count_by_kind(read_collectives(text), [1, 10]) == {"all-reduce": 1 + 5 + 10}


def test_a_combined_collective_has_the_scope_of_its_loop() -> None:
    """XLA on GPU combines small all-reduces into one without metadata."""
    piece, pair = "f32[4]{0}", "replica_groups={{0,1}}, to_apply=%add"
    text = (
        f"%add (a: f32[], b: f32[]) -> f32[] {{\n  ROOT %a = f32[] parameter(0)\n}}\n"
        f"%body (p: {piece}) -> {piece} {{\n  %p = {piece} parameter(0)\n"
        f'  %named = {piece} all-reduce(%p), {pair}, metadata={{op_name="step/own"}}\n'
        f"  ROOT %q = {piece} all-reduce(%named), {pair}\n}}\n"
        f"%cond (c: {piece}) -> pred[] {{\n  ROOT %c = pred[] constant(1)\n}}\n"
        f"ENTRY %main (x: {piece}) -> {piece} {{\n  %x = {piece} parameter(0)\n"
        f'  ROOT %w = {piece} while(%x), condition=%cond, body=%body, metadata={{op_name="step/refresh/while"}}\n}}\n'
    )
    assert [one.scope for one in read_collectives(text)] == ["step/own", "step/refresh/while"]


def test_one_collective_spread_over_fusions_counts_once() -> None:
    inner = module("replica_groups=[2,4]<=[8]").removeprefix("ENTRY ")
    calls = "".join(
        f"  %f{number} = f32[4,8]{{1,0}} fusion(%x), kind=kCustom, calls=%part{number}\n" for number in range(3)
    )
    entry = "ENTRY %entry (x: f32[4,8]) -> f32[4,8] {\n  %x = f32[4,8]{1,0} parameter(0)\n" + calls + "}\n"
    parts = "".join(inner.replace("%main", f"%part{number}") for number in range(3))
    assert len(read_collectives(parts + entry)) == 1
    # Outside fusions, equal channels mean nothing, because manual collectives all have the same one.
    twice = inner.replace(
        "  ROOT", "  %d = f32[4,8]{1,0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8]\n  ROOT"
    )
    assert len(read_collectives("ENTRY " + twice)) == 2


def unrolled(kind: str) -> str:
    """Four devices pass pieces of a product on, in a body without the loop that a windowed product has."""
    scope = 'metadata={op_name="layer/mlp/dot_general"}'
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    lines, last = [], "x" if kind == "all-gather" else "sum0"
    for turn in range(3):
        if kind == "reduce-scatter":
            lines.append(f"%sum{turn} = bf16[4,8]{{1,0}} fusion(%{last if turn else 'x'}), calls=%part, {scope}")
            last = f"sum{turn}"
        start = f"(bf16[4,8]{{1,0}}, bf16[4,8]{{1,0}}) collective-permute-start(%{last}), channel_id={turn + 1}"
        lines.append(f"%start{turn} = {start}, {pairs}, {scope}")
        lines.append(f"%last{turn} = bf16[4,8]{{1,0}} collective-permute-done(%start{turn}), {scope}")
        last = f"last{turn}"
    body = "".join(f"  {line}\n" for line in lines)
    return f"ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {{\n  %x = bf16[4,8]{{1,0}} parameter(0)\n{body}}}\n"


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_an_unrolled_windowed_product_is_one_collective(kind: str) -> None:
    (found,) = read_collectives(unrolled(kind))
    assert (found.kind, found.payload, found.axes(SIZES)) == (kind, 4 * 4 * 8 * 2, ("kv",))
    # A permutation that belongs to no product stays one.
    permuted = read_collectives(unrolled(kind).replace("dot_general", "roll"))
    assert [one.kind for one in permuted] == ["collective-permute"] * 3


def test_the_last_turn_after_a_windowed_loop_is_part_of_it() -> None:
    piece, pairs = "bf16[4,8]{1,0}", "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    text = (
        f"%windowed_dot_general_body_rs (p: ({piece})) -> ({piece}) {{\n"
        f"  %p = ({piece}) parameter(0)\n  %s = {piece} get-tuple-element(%p), index=0\n"
        f"  ROOT %q = {piece} collective-permute(%s), {pairs}\n}}\n"
        f"%cond (c: ({piece})) -> pred[] {{\n  %c = ({piece}) parameter(0)\n}}\n"
        f"ENTRY %main (x: {piece}) -> {piece} {{\n"
        f"  %x = {piece} parameter(0)\n  %t = ({piece}) tuple(%x)\n"
        f"  %w = ({piece}) while(%t), condition=%cond, body=%windowed_dot_general_body_rs\n"
        f"  %g = {piece} get-tuple-element(%w), index=0\n"
        f"  ROOT %last = {piece} collective-permute(%g), {pairs}\n}}\n"
    )
    assert [(one.kind, one.payload) for one in read_collectives(text)] == [("reduce-scatter", 4 * 64)]
    apart = read_collectives(text.replace("collective-permute(%g)", "collective-permute(%x)"))
    assert [one.kind for one in apart] == ["reduce-scatter", "collective-permute"]
