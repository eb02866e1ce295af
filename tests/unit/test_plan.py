"""Plans: who writes what, what is read, and geometry that must be refused."""

import math

import pytest

from ckptmgr.core import chunking
from ckptmgr.core.boxes import Box
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Part, Shard, Unit, Wanted, plan_restore, plan_save, waves


def leaf(shape, chunk, name="params.w", dtype="float32"):
    return StoredLeaf(tuple(name.split(".")), "array", shape, dtype, name, dtype, shape, chunk)


def tree(*leaves):
    return StoredTree(tuple(leaves), None)


LOW, HIGH = Box((0,), (4,)), Box((4,), (8,))


def test_a_shard_of_whole_chunks_is_written_as_it_lies():
    made = plan_save(tree(leaf((8,), (2,))), [[Shard(LOW, (0,), 1), Shard(HIGH, (0,), 0)]], 0)
    assert made.parts == (Part(0, LOW, ((1, LOW),)), Part(0, HIGH, ((0, HIGH),)))
    assert made.nbytes == 32


def test_shards_smaller_than_a_chunk_are_gathered():
    made = plan_save(tree(leaf((8,), (8,))), [[Shard(LOW, (0,), 0), Shard(HIGH, (0,), 1)]], 0)
    assert made.parts == (Part(0, Box((0,), (8,)), ((0, LOW), (1, HIGH))),)


def test_each_process_keeps_its_own_part_of_the_same_plan():
    shards = [[Shard(LOW, (0,), 0), Shard(HIGH, (1,), 0)]]
    stored = tree(leaf((8,), (4,)))
    made = [plan_save(stored, shards, process) for process in range(3)]
    assert [plan.parts for plan in made] == [
        (Part(0, LOW, ((0, LOW),)),),
        (Part(0, HIGH, ((0, HIGH),)),),
        (),
    ]
    assert [plan.nbytes for plan in made] == [16, 16, 0]
    assert all(plan.tree is stored for plan in made)


def test_parts_carry_the_number_of_their_leaf_and_skip_leaves_without_an_array():
    stored = tree(StoredLeaf(("s",), "string", value="x"), leaf((), (), "n"), leaf((0,), (1,), "z"))
    scalar = Box((), ())
    made = plan_save(stored, [[], [Shard(scalar, (0,), 0)], [Shard(Box((0,), (0,)), (0,), 0)]], 0)
    assert made.parts == (Part(1, scalar, ((0, scalar),)),)
    assert made.nbytes == 4


@pytest.mark.parametrize(
    ("leaves", "elements", "sizes"),
    [
        (4096, 300, [4096]),
        (4097, 300, [2049, 2048]),
        (10_000, 300, [3334, 3334, 3332]),
        (30_000, 300, [7500] * 4),
        (30_000, 256, [30_000]),  # 1 KiB each: their values are written anew with the keys
    ],
)
def test_many_small_leaves_go_in_a_few_waves_and_never_in_many(leaves, elements, sizes):
    box = Box((0,), (elements,))
    stored = tree(*(leaf((elements,), (elements,), f"n{i}") for i in range(leaves)))
    made = plan_save(stored, [[Shard(box, (0,), 0)]] * leaves, 0)
    found = waves(made, 0, 2**40)
    assert [len(wave) for wave in found] == sizes
    assert [job.leaf for wave in found for job in wave] == list(range(leaves))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([LOW], r"leaf 'params.w': elements \[4:8\] would be written 0 times"),
        ([LOW, HIGH, HIGH], r"leaf 'params.w': elements \[4:8\] would be written 2 times"),
        ([LOW, Box((4,), (9,))], r"leaf 'params.w': box \[4:9\] lies outside"),
        ([], r"leaf 'params.w': elements \[0:8\] would be written 0 times"),
    ],
    ids=["gap", "overlap", "outside", "nothing"],
)
def test_wrong_geometry_is_refused_naming_leaf_and_box(shards, message):
    with pytest.raises(ValueError, match=message):
        plan_save(tree(leaf((8,), (4,))), [[Shard(box, (0,), 0) for box in shards]], 0)


def test_a_scalar_that_nobody_writes_is_refused():
    with pytest.raises(ValueError, match="leaf 'n'"):
        plan_save(tree(leaf((), (), "n")), [[]], 0)


def test_wrong_geometry_of_one_process_is_refused_by_all():
    for process in range(2):
        with pytest.raises(ValueError, match="leaf 'params.w'"):
            plan_save(tree(leaf((8,), (4,))), [[Shard(LOW, (0,), 0)]], process)


def test_the_second_leaf_of_a_shape_is_checked_with_its_own_shards():
    good, bad = [Shard(LOW, (0,), 0), Shard(HIGH, (0,), 1)], [Shard(LOW, (0,), 0)]
    with pytest.raises(ValueError, match="leaf 'b'"):
        plan_save(tree(leaf((8,), (4,), "a"), leaf((8,), (4,), "b")), [good, bad], 0)


def restore(leaves, wanted, **changes):
    options = {"whole_chunks": True, "unit_bytes": 1, "host_bytes": 1000, **changes}
    return plan_restore(leaves, wanted, **options)


def test_a_chunk_that_two_boxes_share_is_read_once():
    made = restore([leaf((8,), (4,))], [Wanted(0, (Box((0,), (3,)), Box((2,), (8,))), 36)])
    assert made.units == (Unit(0, LOW, (0, 1), ((0,),)), Unit(0, HIGH, (1,), ((1,),)))
    assert (made.wanted_bytes, made.read_bytes, made.target_bytes) == (36, 32, 36)


def test_without_digests_only_what_is_wanted_is_read():
    made = restore([leaf((8,), (4,))], [Wanted(0, (Box((1,), (3,)),))], whole_chunks=False)
    assert made.units == (Unit(0, Box((1,), (3,)), (0,)),)
    assert made.over_read == 1.0


def test_without_digests_small_chunks_are_read_together():
    made = restore(
        [leaf((64,), (4,))],
        [Wanted(0, (Box((0,), (64,)),))],
        whole_chunks=False,
        unit_bytes=128,
    )
    assert [unit.box for unit in made.units] == [Box((0,), (32,)), Box((32,), (64,))]


def test_a_cut_chunk_counts_as_over_read():
    made = restore([leaf((8,), (8,))], [Wanted(0, (Box((0,), (2,)),))])
    assert made.over_read == 4.0
    assert restore([], []).over_read == 1.0


def test_nothing_is_read_of_an_array_without_elements():
    made = restore([leaf((0, 3), (1, 3))], [Wanted(0, (Box((0, 0), (0, 3)),))])
    assert (made.units, made.read_bytes) == ((), 0)


def test_a_scalar_is_read_as_its_one_chunk():
    made = restore([leaf((), (), "n")], [Wanted(0, (Box((), ()),))])
    assert made.units == (Unit(0, Box((), ()), (0,), ((),)),)


def test_a_plan_never_claims_more_memory_than_it_moves():
    one = [leaf((8,), (4,))]
    small = restore(one, [Wanted(0, (LOW,))], host_bytes=10**9)
    assert small.peak_host_bytes == 32  # 16 read, 16 for the value
    assert restore(one, [Wanted(0, (LOW, HIGH))], host_bytes=1).peak_host_bytes == 16


def test_the_notes_of_a_plan_are_kept():
    assert restore([], [], notes=["axis gone"]).notes == ("axis gone",)


def test_leaves_that_share_their_shards_are_cut_by_their_own_chunks():
    shared = [Shard(LOW, (0,), 0), Shard(HIGH, (0,), 1)]
    leaves = leaf((8,), (8,), "a"), leaf((8,), (4,), "b"), leaf((8,), (8,), "c", "int8")
    made = plan_save(tree(*leaves), [shared] * 3, 0)
    gathered = Box((0,), (8,)), ((0, LOW), (1, HIGH))
    assert made.parts == (
        Part(0, *gathered),
        Part(1, LOW, ((0, LOW),)),
        Part(1, HIGH, ((1, HIGH),)),
        Part(2, *gathered),
    )
    assert made.nbytes == 32 + 32 + 8


# -- what several processes hold ----------------------------------------------------------------


def test_a_shard_that_two_hold_is_cut_between_its_chunks():
    stored = tree(leaf((8,), (2,)))
    whole = Box((0,), (8,))
    made = [plan_save(stored, [[Shard(whole, (0, 1), 3)]], process) for process in range(3)]
    assert made[0].parts == (
        Part(0, Box((0,), (2,)), ((3, whole),)),
        Part(0, Box((2,), (4,)), ((3, whole),)),
    )
    assert [part.box.start for part in made[1].parts] == [(4,), (6,)]
    assert made[2].parts == ()
    assert [plan.nbytes for plan in made] == [16, 16, 0]


def test_who_writes_all_of_a_shared_shard_writes_it_as_it_lies():
    shards = [[Shard(LOW, (0,), 0), Shard(HIGH, (0, 1), 1)]]
    made = [plan_save(tree(leaf((8,), (2,))), shards, process) for process in range(2)]
    assert made[0].parts == (Part(0, LOW, ((0, LOW),)),)
    assert made[1].parts == (Part(0, HIGH, ((1, HIGH),)),)


def test_shared_shards_smaller_than_a_chunk_are_gathered_by_one():
    shards = [[Shard(LOW, (0, 1), 1), Shard(HIGH, (0, 1), 0)]]
    made = [plan_save(tree(leaf((8,), (8,))), shards, process).parts for process in range(2)]
    assert sorted(made, key=len) == [(), (Part(0, Box((0,), (8,)), ((1, LOW), (0, HIGH))),)]


def test_what_each_has_for_itself_is_compared_by_all_but_process_0():
    stored = tree(leaf((8,), (4,)), leaf((8,), (4,), "b"))
    own = [Shard(LOW, (0,), 0, True), Shard(HIGH, (0,), 1, True)]
    made = [plan_save(stored, [own, [Shard(Box((0,), (8,)), (1,), 0)]], p) for p in range(3)]
    assert [[part.write for part in plan.parts] for plan in made] == [
        [True, True],
        [False, False, True],
        [False, False],
    ]
    assert [part.box for part in made[2].parts] == [LOW, HIGH]
    assert [plan.nbytes for plan in made] == [32, 32, 0]
    assert all(plan.own == {0} for plan in made)


def test_loads_are_counted_in_bytes():
    stored = tree(leaf((8,), (8,), "a", "int8"), leaf((8,), (1,), "b"))
    whole = Box((0,), (8,))
    shards = [[Shard(whole, (0,), 0)], [Shard(whole, (0, 1), 0)]]
    made = [plan_save(stored, shards, process) for process in range(2)]
    assert [plan.nbytes for plan in made] == [8 + 3 * 4, 5 * 4]


def mesh_shards(rows, columns, fsdp, replicas, process):
    """Of a matrix that is cut by rows over `fsdp` processes and lies in `replicas` such groups."""
    step = rows // fsdp
    return [
        Shard(
            Box((i * step, 0), ((i + 1) * step, columns)),
            tuple(range(i, fsdp * replicas, fsdp)),
            0 if process % fsdp == i else -1,
        )
        for i in range(fsdp)
    ]


@pytest.mark.parametrize(("fsdp", "replicas"), [(1, 7), (4, 2), (4, 6), (2, 16)])
def test_replicas_of_a_mesh_write_even_shares(fsdp, replicas):
    world, shape = fsdp * replicas, (1024, 768)
    total = 12 * math.prod(shape) * 4
    aim = chunking.shared_chunk_bytes(16 * 2**20, total, replicas)
    shards = mesh_shards(*shape, fsdp, replicas, 0)
    owners = [shard.holders for shard in shards]
    chunk = chunking.chunk_shape(shape, 4, [shard.box for shard in shards], owners, aim)
    everybody = tuple(range(world))
    stored = tree(
        *(leaf(shape, chunk, f"w{i}") for i in range(12)),
        *(leaf((768,), (768,), f"scale{i}") for i in range(24)),
    )
    nbytes = []
    for process in range(world):
        seen = mesh_shards(*shape, fsdp, replicas, process)
        scale = [Shard(Box((0,), (768,)), everybody, 1)]
        nbytes.append(plan_save(stored, [seen] * 12 + [scale] * 24, process).nbytes)
    cell = math.prod(chunk) * 4
    even = (total + 24 * 768 * 4) / world
    assert sum(nbytes) == total + 24 * 768 * 4
    assert max(nbytes) <= max(1.1 * even, even + cell)
    assert min(nbytes) >= min(0.9 * even, even - cell)
