"""Signals are the same at any topology, cached or not, and equal their formulas in one process (float64, 1e-10)."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
from support.cases import Case
from support.mesh_plans import plan_on
from support.plans import HEAD, plan, sharded
from support.pool import Pool
from support.signalling import MEASURED, MUTATIONS, SignalReference, measure
from support.trainings import Plans, train_elastic, watch_reference

from pipetransformer.errors import UserError
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.runtime.signals import probe
from pipetransformer.runtime.signals.base import SignalContext
from pipetransformer.runtime.signals.collect import COLLECTORS, SignalCollectors

# two freezes and a thaw, over as many ranks
ALONE: Plans = {
    0: plan(0, 0, [HEAD], 1, 2),
    2: plan(2, 2, [HEAD], 1, 3),
    4: plan(4, 4, [HEAD], 1, 1),
    5: plan(1, 0, [HEAD], 1, 2),
}
TWO: Plans = {
    0: plan(0, 0, [3, HEAD], 1, 2),
    2: plan(2, 1, [4, HEAD], 1, 3),
    4: plan(4, 4, [HEAD], 2, 2),
    5: plan(1, 1, [4, HEAD], 1, 2),
}
FOUR: Plans = {
    0: plan(0, 0, [1, 3, 5, HEAD], 1, 4),
    2: plan(2, 2, [4, 5, HEAD], 1, 3),  # the fourth rank is idle
    4: plan(4, 0, [5, HEAD], 2, 2),
    5: plan(1, 1, [5, HEAD], 2, 2),
}
SHARDED: Plans = {0: sharded(0, 0, 2, 1), 2: sharded(2, 2, 2, 1), 4: sharded(4, 4, 2, 2), 5: sharded(1, 0, 2, 1)}
TP, CP, GRID = StageMesh(tp=2), StageMesh(cp=2), StageMesh(dp_shard=2, tp=2, algorithm="2d")
MESH: Plans = {
    0: plan_on(TP, microbatches=2),
    2: plan_on(TP, frozen=2, level=2, microbatches=2),
    4: plan_on(TP, frozen=4, level=4),
    5: plan_on(TP, frozen=1, microbatches=2),
}
MESHES: Plans = {
    0: plan_on(GRID),
    2: plan_on(CP, 2, frozen=2, level=1, microbatches=2),
    4: plan_on(SINGLE, replicas=4, frozen=4, level=4),
    5: plan_on(TP, replicas=2, frozen=1),
}
SEQUENCES = {
    "1": (1, ALONE), "2": (2, TWO), "4": (4, FOUR), "2, sharded": (2, SHARDED), "2, tp": (2, MESH),
    "4, meshes": (4, MESHES),
}  # fmt: skip


def expected(case: Case, plans: Plans) -> SignalReference:
    reference = SignalReference(case)
    watch_reference(case, {step: one.num_frozen for step, one in plans.items()}, reference)
    return reference


def assert_same(found: list[dict[str, tuple[float, ...]]], reference: SignalReference) -> None:
    assert len(found) == len(reference.found) == 3
    for own, other in zip(found, reference.found, strict=True):
        assert own.keys() == other.keys()
        for name, values in own.items():
            assert values == pytest.approx(other[name], rel=0, abs=1e-10), name


ROWS = [
    ("1", "vit", "adamw"),
    ("2", "bert_qa", "adamw_ema"),
    ("4", "bert_mlm", "sgd"),
    ("2, sharded", "vit", "lamb"),
    ("2, tp", "bert_qa", "adamw"),
    ("4, meshes", "vit", "adamw"),
]
if "MATRIX" in os.environ:
    ROWS += [
        ("4", "vit", "lamb"),
        ("2, sharded", "bert_qa", "adamw"),
        ("2, tp", "vit", "lamb"),
        ("4, meshes", "bert", "sgd"),
    ]


@pytest.mark.thinned("4-bert_mlm", "2, sharded-vit", "4, meshes-vit")
@pytest.mark.parametrize(("sequence", "kind", "optimizer"), ROWS)
def test_every_signal_is_what_its_formula_gives_in_one_process(
    sequence: str, kind: str, optimizer: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    world, plans = SEQUENCES[sequence]
    case = Case(kind, bert_config, dropout=0.1, optimizer=optimizer)
    ranks = pool.run(world, measure, case, plans, str(tmp_path))
    assert_same(ranks[0][0], expected(case, plans))
    assert all(rank == ranks[0] for rank in ranks), "every rank decides alike"


def test_signals_of_adapters_are_those_of_what_trains(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    world, plans = SEQUENCES["2"]
    case = Case("bert_qa", bert_config, dropout=0.1, lora=True)
    ranks = pool.run(world, measure, case, plans, str(tmp_path))
    assert_same(ranks[0][0], expected(case, plans))


@pytest.fixture(scope="module")
def unbroken(bert_config: Path) -> SignalReference:
    return expected(Case("bert_qa", bert_config, dropout=0.1), TWO)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_measurement_is_noticed(
    mutation: str, pool: Pool, unbroken: SignalReference, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("bert_qa", bert_config, dropout=0.1)
    found, _ = pool.run(2, measure, case, TWO, str(tmp_path), (), mutation)[0]
    with pytest.raises(AssertionError):
        assert_same(found, unbroken)


def test_measuring_changes_nothing(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert_qa", bert_config, dropout=0.1)
    _, losses = pool.run(2, measure, case, TWO, str(tmp_path))[0]
    assert losses == pool.run(2, train_elastic, case, TWO, str(tmp_path))[0].losses


def test_signals_that_nobody_asks_for_are_not_measured(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, dropout=0.1)
    found, _ = pool.run(1, measure, case, ALONE, str(tmp_path), ("loss_drop",))[0]
    assert {name for one in found for name in one} == {"gradient_norm", "loss_drop"}
    assert set(MEASURED) > {"gradient_norm", "loss_drop"}


@pytest.mark.parametrize("name", ["feature_change", "plasticity"])
def test_nothing_is_probed_where_all_blocks_are_frozen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(plan=SimpleNamespace(num_frozen=2), num_layers=4)
    collector = COLLECTORS[name](cast("SignalContext", SimpleNamespace(runtime=runtime)))
    references = {"references": [[[1.0]], [[2.0]]]}
    collector.load_state_dict(references)
    monkeypatch.setattr(probe, "probe_grams", mock.Mock(side_effect=AssertionError))
    assert collector.read() == [0.0, 0.0]
    collector.start_anew()
    assert collector.state_dict() == references
    runtime.plan.num_frozen = 1
    with pytest.raises(AssertionError):
        collector.read()


def test_a_run_decides_by_the_shares_of_a_step_that_it_has_decided_by() -> None:
    measured = iter([(1.0, 0.6, 0.4), (1.0, 0.5, 0.3)])
    context = cast("SignalContext", SimpleNamespace(step_shares=lambda: next(measured)))
    first, resumed = COLLECTORS["step_share"](context), COLLECTORS["step_share"](context)
    assert [*first.read()] == [*first.read()] == [1.0, 0.6, 0.4]
    first.start_anew()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [*resumed.read()] == [1.0, 0.6, 0.4]
    of_an_earlier_release = COLLECTORS["step_share"](context)
    of_an_earlier_release.load_state_dict({})
    assert [*of_an_earlier_release.read()] == [1.0, 0.5, 0.3]


def test_a_signal_that_nobody_measures_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"nobody measures: temperature; there are gradient_norm, .*plasticity"):
        SignalCollectors(("gradient_norm", "temperature"), None)  # type: ignore[arg-type]
