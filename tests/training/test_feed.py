import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import plan
from support.samples import RandomImages, RandomText

from pipetransformer.autodp.topology import Position
from pipetransformer.data.base import Split
from pipetransformer.training.feed import LENGTH_STEP, Feed

HIDDEN_SIZE, NUM_SAMPLES = 6, 20
FIRST, LAST = Position(replica=0, device=0), Position(replica=0, device=1)


def feed(split: Split) -> Feed:
    return Feed(split, lambda inputs: torch.Size((len(inputs), inputs.shape[1], HIDDEN_SIZE)), seed=1)


TEXT, IMAGES = RandomText(NUM_SAMPLES), RandomImages(NUM_SAMPLES)
TWO_STAGES = plan(0, 0, [3, 7], 1, 4)


def test_a_batch_is_padded_to_a_multiple_of_the_length_step_but_not_past_the_longest_sample() -> None:
    reader, longest = feed(TEXT), int(TEXT.lengths.max())
    short = np.flatnonzero(TEXT.lengths <= LENGTH_STEP)
    assert reader.padded(short) == LENGTH_STEP
    assert LENGTH_STEP < longest < 2 * LENGTH_STEP
    assert reader.padded(np.arange(NUM_SAMPLES)) == longest
    assert feed(IMAGES).padded(np.arange(NUM_SAMPLES)) is None


@settings(max_examples=30, deadline=None)
@given(num_samples=st.integers(1, 12), num_replicas=st.integers(1, 4), num_microbatches=st.integers(1, 5))
def test_replicas_and_micro_batches_have_one_shape_and_every_sample_is_in_one_share(
    num_samples: int, num_replicas: int, num_microbatches: int
) -> None:
    reader, ids = feed(TEXT), np.arange(num_samples)
    whole = plan(0, 0, [7], num_replicas, num_microbatches)
    read = [reader.batch(ids, whole, Position(replica, 0)) for replica in range(num_replicas)]
    assert len({batch.hidden_shape for batch, _ in read}) == 1
    assert all(len(batch) % num_microbatches == 0 for batch, _ in read)
    real = np.concatenate([part.ids[part.weights > 0] for _, part in read])
    assert sorted(real.tolist()) == ids.tolist()
    assert all(batch.num_samples == num_samples for batch, _ in read)


def test_a_stage_loads_only_what_it_reads() -> None:
    reader, ids = feed(TEXT), np.arange(8)
    first, last = (reader.batch(ids, TWO_STAGES, place)[0] for place in (FIRST, LAST))
    assert first.inputs is not None
    assert (first.targets, last.inputs) == (None, None)
    assert last.targets is not None
    assert first.context.keys() == last.context.keys() == {"attention_mask", "token_type_ids"}
    assert reader.batch(ids, TWO_STAGES, LAST, targets=False)[0].targets is None


def test_the_keys_of_a_sample_depend_on_the_step_and_not_on_the_arrangement() -> None:
    reader, ids = feed(IMAGES), np.arange(8)
    one = reader.batch(ids, plan(0, 0, [7], 1, 1), FIRST, step=3)[0].keys
    two = [reader.batch(ids, plan(0, 0, [7], 2, 2), Position(replica, 0), step=3)[0].keys for replica in (0, 1)]
    assert torch.equal(one, torch.cat(two))
    assert not torch.equal(one, reader.batch(ids, plan(0, 0, [7], 1, 1), FIRST, step=4)[0].keys)


@pytest.mark.parametrize("split", [IMAGES, TEXT], ids=["images", "text"])
def test_the_source_of_the_cache_reads_the_same_samples(split: Split) -> None:
    reader = feed(split)
    num_tokens = int(reader.source.lengths.max())
    inputs, context = reader.source.read(np.array([4, 2]), num_tokens)
    assert torch.equal(inputs, split.inputs([4, 2], None if split.lengths is None else num_tokens))
    assert context.keys() == split.context([4, 2], num_tokens).keys()
