from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from pipetransformer.autodp.transition import Transition, first_transition
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.cost import kind_of_plan
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, LayerShard, MeshProfile, Profile, Traffic
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.config.sections import Parallel
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.mesh import StageMesh
from pipetransformer.planning.planner import Planner, RemainingRun

MIB = 2**20
BATCH_SIZE = 16
EIGHT = (10,) * 8


def planner(
    memory_mib: int | None = None, bandwidth: float = 1e12, blocks_mib: Sequence[int] = EIGHT, **parallel: object
) -> Planner:
    second = AffineTime(0.0, 1.0)
    blocks = tuple(LayerProfile("block", second, second, second, 0.0, size * MIB, MIB // 16, 0) for size in blocks_mib)
    cluster = Cluster(4, None if memory_mib is None else memory_mib * MIB, Link(1e-3, bandwidth))
    return Planner(Profile(blocks, 2.0), cluster, Parallel(**parallel), BATCH_SIZE)  # type: ignore[arg-type]


def shape(plan: object) -> tuple[int, int]:
    return plan.pipeline_size, plan.num_replicas  # type: ignore[attr-defined]


def test_without_a_budget_the_first_plan_is_plain_data_parallelism() -> None:
    assert shape(planner().initial()) == (1, 4)


def test_stages_become_fewer_and_replicas_more_as_blocks_freeze() -> None:
    elastic = planner(memory_mib=115)  # two active layers of 40 or, replicated, 50 MiB, and no third
    plans = [elastic.initial()]
    plans += [elastic.next(plans[0], num_frozen, num_frozen) for num_frozen in (4, 6)]
    assert [shape(plan) for plan in plans] == [(4, 1), (2, 2), (1, 4)]


def remaining(
    num_steps: int = 1000, num_samples: int = 160, overhead_s: float = 0.0, may_cache: bool = True
) -> RemainingRun:
    return RemainingRun(num_steps, num_samples, overhead_s, may_cache)


def transition(elastic: Planner, num_frozen: int, rest: RemainingRun, plan: Plan | None = None) -> Transition:
    return elastic.transition(first_transition(plan) if plan else elastic.first, num_frozen, rest)


def test_without_autopipe_the_stages_stay_and_the_prediction_follows() -> None:
    rigid = planner(memory_mib=115, autopipe=False)
    first = rigid.initial()
    later = transition(rigid, 4, remaining()).after
    assert (later.stages, later.num_replicas) == (first.stages, first.num_replicas)
    assert (later.num_frozen, later.cache_level) == (4, 0)
    assert later.predicted_step_s == rigid.predict(later) < first.predicted_step_s


def test_with_a_long_way_to_go_it_packs_replicates_and_caches() -> None:
    choice = transition(planner(memory_mib=115), 4, remaining())
    assert (shape(choice.after), choice.after.cache_level) == ((2, 2), 4)
    assert "s, more than the" in choice.reason


@pytest.mark.parametrize(
    "rest", [remaining(num_steps=0), remaining(overhead_s=1e6)], ids=["no time left", "a dear one"]
)
def test_a_transition_that_does_not_pay_freezes_and_leaves_the_rest_as_it_is(rest: RemainingRun) -> None:
    elastic = planner(memory_mib=115)
    choice = transition(elastic, 4, rest)
    assert choice.after.num_frozen == 4
    assert (choice.after.stages, choice.after.cache_level) == (elastic.initial().stages, 0)
    assert choice.reason.startswith("keeps the current stages: ")


def test_a_cache_that_takes_longer_to_fill_than_it_saves_is_left_out() -> None:
    choice = transition(planner(memory_mib=115), 4, remaining(num_samples=10**6))
    assert (choice.after.num_frozen, choice.after.cache_level) == (4, 0)


@pytest.mark.parametrize(("read_s", "level"), [(0.0, 4), (0.5, 4), (1e4, 0)])
def test_pictures_that_are_slow_to_decode_are_not_read_once_more_for_less_than_it_saves(
    read_s: float, level: int
) -> None:
    known, filled = planner(memory_mib=115), remaining(num_samples=160)
    elastic = Planner(replace(known.profile, fill_read_s=read_s), known.cluster, Parallel(), BATCH_SIZE)
    choice = transition(elastic, 4, filled)
    assert choice.after.cache_level == level
    if level:
        more_s = choice.cost_s - transition(known, 4, filled).cost_s
        assert more_s == pytest.approx(160 * read_s / 4), "four devices divide the samples"


@pytest.mark.parametrize(("read_s", "level"), [(0.0, 4), (0.5, 4), (1e3, 0)])
def test_a_cache_that_misses_pictures_which_are_slow_to_decode_is_left_out(read_s: float, level: int) -> None:
    """Workers read ahead of steps without a cache, and of none that it misses."""
    known = planner()
    partial = replace(known.profile, fill_read_s=read_s, cache_miss_rate=0.25)
    elastic = Planner(partial, known.cluster, Parallel(), BATCH_SIZE)
    assert transition(elastic, 4, remaining(num_samples=1)).after.cache_level == level


def test_a_fill_from_stored_features_reads_no_input() -> None:
    known = planner(memory_mib=115)
    elastic = Planner(replace(known.profile, fill_read_s=1e4), known.cluster, Parallel(), BATCH_SIZE)
    cached = elastic.next(elastic.initial(), 2, 2)
    assert transition(elastic, 4, remaining(), cached).after.cache_level == 4


def test_moving_layers_over_a_slow_link_counts() -> None:
    fast, slow = planner(memory_mib=115), planner(memory_mib=115, bandwidth=1e5)
    assert transition(fast, 4, remaining(num_steps=20)).after.num_replicas == 2
    assert transition(slow, 4, remaining(num_steps=20)).after.num_replicas == 1


FILL_S = 3 * 160 / 4  # the embedding and two blocks of all samples on four devices


@pytest.mark.parametrize(("num_steps", "level"), [(1000, 2), (1, 0)])
def test_after_unfreezing_the_cache_is_filled_from_the_input_where_that_pays(num_steps: int, level: int) -> None:
    elastic = planner(memory_mib=115)
    frozen = elastic.next(elastic.initial(), 6, 6)
    choice = transition(elastic, 2, remaining(num_steps=num_steps), frozen)
    assert (choice.after.num_frozen, choice.after.cache_level) == (2, level)
    assert (choice.cost_s >= FILL_S) == bool(level), "what was stored is void, so that it begins at the input"
    assert choice.reason.startswith(
        "the current plan is no longer valid: blocks 3 to 6 train again, which voids the stored output of block 6; "
        f"caching {'block 2' if level else 'nothing'} ends the run "
    )


def test_a_level_below_the_blocks_that_train_again_stays() -> None:
    elastic = planner(memory_mib=115)
    frozen = replace(elastic.next(elastic.initial(), 2, 2), num_frozen=6)  # reading more did not pay
    choice = transition(elastic, 5, remaining(num_steps=1), frozen)
    assert (choice.after.num_frozen, choice.after.cache_level) == (5, 2)
    assert choice.cost_s < 1, "nothing is filled"
    assert "block 6 trains again; caching block 2 ends the run" in choice.reason


def test_what_unfreezes_altogether_caches_nothing() -> None:
    elastic = planner(memory_mib=115)
    choice = transition(elastic, 0, remaining(), elastic.next(elastic.initial(), 6, 6))
    assert (choice.after.num_frozen, choice.after.cache_level, choice.after.stages) == (0, 0, elastic.initial().stages)


def test_without_autodp_the_replicas_stay() -> None:
    packed = planner(memory_mib=115, autodp=False)
    assert shape(packed.next(packed.initial(), 6, 6)) == (1, 1)


def test_what_is_fixed_holds_for_every_plan() -> None:
    pinned = planner(num_stages=2, num_replicas=1, num_microbatches=8, schedule="gpipe")
    for plan in (pinned.initial(), pinned.next(pinned.initial(), 3, 3)):
        assert (*shape(plan), plan.num_microbatches, plan.schedule) == (2, 1, 8, "gpipe")


def test_fixed_stages_give_way_where_the_cache_leaves_fewer_layers() -> None:
    pinned = planner(num_stages=4)
    assert shape(pinned.next(pinned.initial(), 6, 6))[0] == 1


def test_constraints_that_contradict_are_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="need 6 devices, and there are 4"):
        planner(num_stages=3, num_replicas=2).initial()


def test_fixed_chunks_give_way_where_the_cache_leaves_fewer_layers() -> None:
    pinned = planner(num_stages=4, stages_per_rank=2, schedule="interleaved1f1b", num_microbatches=8)
    first = pinned.initial()
    assert (first.pipeline_size, first.stages_per_rank) == (2, 2)
    later = pinned.next(first, 5, 5)
    assert (later.num_stages, later.stages_per_rank, later.schedule) == (2, 1, "interleaved1f1b")
    assert planner(stages_per_rank=2).next(first, 5, 5).stages_per_rank == 1


@pytest.mark.parametrize("stages_per_rank", [None, 2])
def test_stages_that_give_way_stay_on_their_devices(stages_per_rank: int | None) -> None:
    pinned = planner(num_stages=4, stages_per_rank=stages_per_rank, num_replicas=2, num_microbatches=4, autodp=False)
    first = pinned.initial()
    assert (shape(first), first.stages_per_rank) == ((2, 2), 2)
    later = pinned.next(first, 4, 4)  # three layers are left
    assert (shape(later), later.stages_per_rank) == ((2, 2), 1)


def test_a_run_stays_where_no_other_plan_keeps_what_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = planner()
    first = elastic.initial()

    def nothing_fits(*_: object) -> Plan:
        raise InfeasiblePlan("no plan fits")

    monkeypatch.setattr(Planner, "next", nothing_fits)
    stayed = transition(elastic, 3, remaining(), first).after
    assert (stayed.stages, stayed.num_frozen, stayed.cache_level) == (first.stages, 3, 0)
    with pytest.raises(InfeasiblePlan, match="no plan fits"):
        transition(elastic, 1, remaining(), stayed)


def test_a_run_that_loses_its_cache_computes_what_was_cached() -> None:
    elastic = planner()
    cached = transition(elastic, 3, remaining()).after
    assert cached.cache_level == 3
    lost = transition(elastic, 4, remaining(may_cache=False), cached)
    assert (lost.after.num_frozen, lost.after.cache_level) == (4, 0)
    assert lost.reason == "the current plan is no longer valid: the cache is off"


def test_shards_stay_on_all_devices_and_keep_the_budget() -> None:
    sharded = planner(memory_mib=150, arrangement="sharded")  # 8 blocks of 40 MiB: 80 on each of four, and 40 whole
    plans = [sharded.initial()]
    plans += [sharded.next(plans[0], num_frozen, num_frozen) for num_frozen in (4, 6)]
    assert [(plan.stages, plan.num_replicas, plan.fsdp) for plan in plans] == [
        (((0, 7),), 4, True), (((5, 7),), 4, True), (((7, 7),), 4, True),
    ]  # fmt: skip
    assert not sharded.static.fsdp
    with pytest.raises(InfeasiblePlan, match="a sharded plan does not fit"):
        planner(memory_mib=100, arrangement="sharded").initial()


def test_shards_are_compared_with_shards_where_nothing_else_fits() -> None:
    unequal = 10, 1  # 40 MiB on one device, or 44 over four and 21 whole
    sharded = planner(35, blocks_mib=unequal, arrangement="sharded")
    assert sharded.static == sharded.initial()
    with pytest.raises(InfeasiblePlan, match="no plan fits"):
        _ = planner(35, blocks_mib=unequal).static


def test_the_static_plan_ignores_what_is_fixed() -> None:
    assert shape(planner(num_stages=4).static) == shape(planner().initial())


def test_a_measured_step_corrects_the_predictions_of_its_kind() -> None:
    elastic = planner(memory_mib=115)
    first = elastic.initial()
    before = elastic.predict(first)
    assert elastic.correct(first, 3 * before) == before
    assert elastic.predict(first) == pytest.approx(3 * before, rel=0.01)
    assert elastic.correct(first, 2 * before) == pytest.approx(3 * before, rel=0.01)
    assert elastic.predict(first) == pytest.approx(2 * before, rel=0.01), "the last measurement counts"


@pytest.mark.parametrize("autopipe", [True, False])
def test_the_seconds_of_frozen_prefixes_follow_what_steps_have_shown(autopipe: bool) -> None:
    elastic = planner(num_replicas=4, autopipe=autopipe)
    before = elastic.frozen_step_seconds(may_cache=False)
    elastic.correct(elastic.initial(), 1.2 * elastic.predict(elastic.initial()))
    after = elastic.frozen_step_seconds(may_cache=False)
    assert after == pytest.approx([1.2 * seconds for seconds in before], rel=0.01)


def test_a_kind_that_turns_out_slow_gives_way_to_another() -> None:
    elastic = planner(bandwidth=1e12)
    assert shape(elastic.initial()) == (1, 4)
    elastic.correct(elastic.initial(), 100 * elastic.predict(elastic.initial()))
    assert shape(elastic.fastest()) != (1, 4)
    assert shape(elastic.static) != (1, 4), "the run is compared with what is now the best static plan"
    after = transition(elastic, 0, remaining()).after
    assert shape(after) == shape(elastic.fastest())


@pytest.mark.parametrize(("factor", "level"), [(1.0, 4), (30.0, 0)])
def test_a_cache_that_turns_out_slow_is_left_and_not_filled_again(factor: float, level: int) -> None:
    elastic = planner(num_stages=1, num_replicas=4, num_microbatches=1)
    elastic.correct(elastic.initial(), elastic.predict(elastic.initial()))
    cached = transition(elastic, 4, remaining()).after
    assert cached.cache_level == 4
    elastic.correct(cached, factor * elastic.predict(cached))
    left = transition(elastic, 4, remaining(), cached).after
    assert left.cache_level == level
    elastic.correct(left, elastic.predict(left))
    assert transition(elastic, 4, remaining(), left).after.cache_level == level
    required = replace(remaining(), must_cache=True)
    assert transition(elastic, 4, required, cached).after.cache_level == 4


def test_a_plan_that_does_not_read_the_cache_which_is_required_is_left_for_that_reason() -> None:
    elastic = planner(num_stages=1, num_replicas=4, num_microbatches=1)
    frozen = elastic.keep(elastic.initial(), 4)
    filled = transition(elastic, 4, replace(remaining(), must_cache=True), frozen)
    assert (frozen.cache_level, filled.after.cache_level) == (0, 4)
    assert filled.reason == "the current plan is no longer valid: cache.require=true has all frozen blocks cached"


def test_a_machine_that_is_slow_for_all_kinds_changes_no_plan() -> None:
    elastic = planner()
    first = elastic.initial()
    for plan in elastic.static_candidates():
        elastic.correct(plan, 7 * elastic.predict(plan))
    assert shape(elastic.fastest()) == shape(first)
    assert elastic.predict(first) == pytest.approx(7 * planner().predict(first), rel=0.01)


def test_a_fill_costs_as_much_more_as_steps_do() -> None:
    cost = transition(planner(), 4, remaining()).cost_s
    slow = planner()
    slow.correct(slow.initial(), 10 * slow.predict(slow.initial()))
    fill_s, slow_fill_s = cost, slow._costed(transition(planner(), 4, remaining()), remaining()).cost_s
    assert slow_fill_s > 5 * fill_s


def test_the_static_candidates_are_the_fastest_of_each_kind() -> None:
    candidates = planner().static_candidates()
    assert shape(candidates[0]) == (1, 4)
    assert {shape(plan) for plan in candidates} == {(1, 1), (1, 4), (2, 2), (4, 1)}
    seconds = [plan.predicted_step_s for plan in candidates]
    assert seconds == sorted(seconds)
    assert all(plan.num_frozen == plan.cache_level == 0 for plan in candidates)


def test_what_does_not_fit_the_memory_is_no_static_candidate() -> None:
    shapes = {shape(plan) for plan in planner(memory_mib=115).static_candidates()}
    assert shapes
    assert all(num_stages > 1 for num_stages, _ in shapes)


@pytest.mark.parametrize(("usable_bytes", "fit"), [(None, True), (2**40, True), (1, False)])
def test_plain_arrangements_are_candidates_beside_a_pinned_mesh_where_they_fit(
    usable_bytes: int | None, fit: bool
) -> None:
    """What is measured has to be the best static plan, which a mesh that is asked for need not be."""
    mesh, elastic = StageMesh(tp=2), planner()
    layer = replace(elastic.profile.layers[0], output_bytes=1)
    shard = LayerShard(layer, *(Traffic(),) * 4)
    known = replace(elastic.profile, layers=(layer,) * 8, meshes=(MeshProfile(mesh, (shard,) * 8),))
    cluster = replace(elastic.cluster, usable_bytes=usable_bytes)
    pinned = Planner(known, cluster, Parallel(tp=2), BATCH_SIZE, meshes=(mesh,))
    kinds = {kind_of_plan(plan) for plan in pinned.static_candidates()}
    assert kinds == {"mesh", *(kind_of_plan(plan) for plan in planner().static_candidates() if fit)}
    assert pinned.initial().mesh == mesh
    assert (pinned.static.mesh == mesh) != fit, "two ranks of a mesh take as long as one without it"


@pytest.mark.parametrize("stages_per_rank", [1, None])
def test_a_static_candidate_interleaves_its_stages_only_where_the_run_may(stages_per_rank: int | None) -> None:
    elastic = planner(memory_mib=115, stages_per_rank=stages_per_rank)
    with mock.patch("pipetransformer.planning.planner.best_plan", side_effect=best_plan) as search:
        elastic.static_candidates()
    assert {call.kwargs["constraints"].stages_per_rank for call in search.call_args_list} == {stages_per_rank}
