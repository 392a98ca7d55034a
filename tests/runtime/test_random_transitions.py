"""Design promise 3: whatever plans follow each other, nothing but the arrangement changes."""

import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import NUM_BLOCKS, Case
from support.exactness import assert_equal
from support.plans import HEAD, PlanShape, arrangements
from support.pool import Pool
from support.trainings import NUM_STEPS, train_elastic, train_reference

from pipetransformer.autopipe.plan import Plan

WORLD = 4
SHAPES = st.builds(
    PlanShape,
    arrangement=st.sampled_from([pair for world in range(1, WORLD + 1) for pair in arrangements(world)]),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved1f1b"]),
    num_microbatches=st.integers(1, 4),
    num_frozen=st.integers(0, NUM_BLOCKS),
    cached=st.booleans(),
    recompute=st.booleans(),
    rank_order=st.sampled_from(["pipeline-first", "replica-first"]),
).filter(lambda shape: shape.is_possible)
SEQUENCES = st.dictionaries(st.integers(1, NUM_STEPS - 1), SHAPES, min_size=2, max_size=5)
EXHAUSTED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.thorough  # every run goes through the sequences of test_elastic.py, test_unfreezing.py, test_tied.py
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=EXHAUSTED)
@given(
    sequence=SEQUENCES,
    kind=st.sampled_from(["vit", "bert", "bert_mlm"]),
    optimizer=st.sampled_from(["adamw", "sgd", "lamb"]),
    parks=st.booleans(),
)
def test_any_sequence_of_plans_trains_as_one_process_does(
    sequence: dict[int, PlanShape], kind: str, optimizer: str, parks: bool, pool: Pool, bert_config: Path
) -> None:
    """Freezing more, thawing, more or fewer stages, wider, narrower, idle ranks, with and without the cache."""
    case = Case(kind, bert_config, 0.2, optimizer, parks=parks)
    plans = {0: Plan(0, 0, ((0, HEAD),), WORLD, num_microbatches=1)}
    plans |= {step: sequence[step].plan(Random(step)) for step in sorted(sequence)}
    with tempfile.TemporaryDirectory() as folder:
        trace = pool.run(WORLD, train_elastic, case, plans, folder)[0]
    assert_equal(trace, train_reference(case, {step: plan.num_frozen for step, plan in plans.items()}))
