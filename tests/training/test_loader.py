from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.caches import make_cache
from support.cases import SEED
from support.plans import plan
from support.samples import RandomImages, RandomText
from support.trainings import mixed_by_timm
from torch import Tensor

from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.reader import FeatureReader
from pipetransformer.autodp.topology import Topology
from pipetransformer.data.base import ImageFormat, Split
from pipetransformer.data.images.mixing import MODES
from pipetransformer.data.images.sources import from_arrays
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.tasks import image_classification
from pipetransformer.training.loader import LENGTH_STEP, BatchLoader, sample_source
from pipetransformer.training.world import NodeLayout

HIDDEN_SIZE, NUM_SAMPLES = 6, 20


def loader(split: Split) -> BatchLoader:
    source = sample_source(split, lambda inputs: torch.Size((len(inputs), inputs.shape[1], HIDDEN_SIZE)))
    return BatchLoader(split, source, seed=1)


TEXT, IMAGES = RandomText(NUM_SAMPLES), RandomImages(NUM_SAMPLES)
FIRST, LAST = (Topology(plan(0, 0, [3, 7], 1, 4), rank) for rank in (0, 1))


def test_a_batch_is_padded_to_a_multiple_of_the_length_step_but_not_past_the_longest_sample() -> None:
    reader, longest = loader(TEXT), int(TEXT.lengths.max())
    short = np.flatnonzero(TEXT.lengths <= LENGTH_STEP)
    assert reader.padded(short) == LENGTH_STEP
    assert LENGTH_STEP < longest < 2 * LENGTH_STEP
    assert reader.padded(np.arange(NUM_SAMPLES)) == longest
    assert loader(IMAGES).padded(np.arange(NUM_SAMPLES)) is None


@settings(max_examples=30, deadline=None)
@given(num_samples=st.integers(1, 12), num_replicas=st.integers(1, 4), num_microbatches=st.integers(1, 5))
def test_replicas_and_micro_batches_have_one_shape_and_every_sample_is_in_one_share(
    num_samples: int, num_replicas: int, num_microbatches: int
) -> None:
    reader, ids = loader(TEXT), np.arange(num_samples)
    whole = plan(0, 0, [7], num_replicas, num_microbatches)
    read = [reader.batch(ids, Topology(whole, rank=replica)) for replica in range(num_replicas)]
    assert len({batch.hidden_shape for batch in read}) == 1
    assert all(len(batch) % num_microbatches == 0 for batch in read)
    real = np.concatenate([batch.ids[batch.weights.numpy() > 0] for batch in read])
    assert sorted(real.tolist()) == ids.tolist()
    assert all(batch.loss_divisor == num_samples for batch in read)


def test_the_loss_is_divided_by_the_weights_of_the_whole_global_batch_on_every_replica() -> None:
    weighted = RandomText(NUM_SAMPLES)
    weighted.loss_weights = np.arange(NUM_SAMPLES, dtype=np.float64)
    read = [loader(weighted).batch(np.array([3, 0, 5]), Topology(plan(0, 0, [7], 2, 1), rank)) for rank in (0, 1)]
    assert [batch.loss_divisor for batch in read] == [8, 8]


def test_a_global_batch_in_which_nothing_counts_has_a_loss_of_zero() -> None:
    weighted = RandomText(NUM_SAMPLES)
    weighted.loss_weights = np.zeros(NUM_SAMPLES)
    assert loader(weighted).batch(np.arange(2), Topology(plan(0, 0, [7], 1, 1), 0)).loss_divisor == 1


def test_a_stage_loads_only_what_it_reads() -> None:
    reader, ids = loader(TEXT), np.arange(8)
    first, last = (reader.batch(ids, topology) for topology in (FIRST, LAST))
    assert first.inputs is not None
    assert (first.targets, last.inputs) == (None, None)
    assert last.targets is not None
    assert first.context.keys() == last.context.keys() == {"attention_mask", "token_type_ids"}
    assert reader.batch(ids, LAST, targets=False).targets is None


def test_the_keys_of_a_sample_depend_on_the_step_and_not_on_the_arrangement() -> None:
    reader, ids = loader(IMAGES), np.arange(8)
    alone, halves = Topology(plan(0, 0, [7], 1, 1), 0), plan(0, 0, [7], 2, 2)
    one = reader.batch(ids, alone, step=3).keys
    two = [reader.batch(ids, Topology(halves, rank), step=3).keys for rank in (0, 1)]
    assert torch.equal(one, torch.cat(two))
    assert not torch.equal(one, reader.batch(ids, alone, step=4).keys)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_replicas", "num_microbatches"), [(1, 1), (1, 4), (2, 2), (3, 1), (4, 2)])
def test_replicas_read_their_rows_of_the_mixed_global_batch(
    num_replicas: int, num_microbatches: int, mode: str
) -> None:
    images, ids = RandomImages(NUM_SAMPLES, mixup=mode), np.array([3, 14, 1, 5, 9, 2, 6, 0])
    reader, split_plan = loader(images), plan(0, 0, [3, 7], num_replicas, num_microbatches)
    assert images.mixing is not None
    reader._seed = SEED
    for step in range(4):
        own = images.inputs(ids.tolist(), None), images.targets(ids.tolist())
        wanted = mixed_by_timm(images.mixing, step, *own)
        ranks = [Topology(split_plan, rank) for rank in range(2 * num_replicas)]
        batches = [reader.batch(ids, rank, step) for rank in ranks]
        real = [batch.weights > 0 for batch in batches]
        inputs = [batch.inputs[rows] for batch, rows in zip(batches, real, strict=True) if batch.inputs is not None]
        targets = [batch.targets[rows] for batch, rows in zip(batches, real, strict=True) if batch.targets is not None]
        torch.testing.assert_close(torch.cat(inputs), wanted[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(torch.cat(targets), wanted[1], rtol=0, atol=1e-14)


def test_a_picture_is_decoded_once_though_it_is_a_partner_too(monkeypatch: pytest.MonkeyPatch) -> None:
    images, read = RandomImages(NUM_SAMPLES, mixup="batch"), []
    pixels = images.inputs
    monkeypatch.setattr(images, "inputs", lambda ids, *rest: read.append(len(ids)) or pixels(ids, *rest))
    reader = loader(images)
    read.clear()
    reader.batch(np.arange(8), Topology(plan(0, 0, [7], 1, 1), 0))
    assert read == [8]


def test_evaluation_mixes_nothing() -> None:
    reader, ids = loader(RandomImages(NUM_SAMPLES, mixup="batch")), np.arange(8)
    inputs = reader.batch(ids, Topology(plan(0, 0, [7], 1, 1), 0), targets=False).inputs
    assert inputs is not None
    assert torch.equal(inputs, IMAGES.inputs(ids.tolist(), None))


@pytest.mark.parametrize("split", [IMAGES, TEXT], ids=["images", "text"])
def test_the_source_of_the_cache_reads_the_same_samples(split: Split) -> None:
    reader = loader(split)
    num_tokens = int(reader.source.lengths.max())
    ids = np.array([4, 2])
    inputs, context = reader.source.inputs(ids, num_tokens), reader.source.context(ids, num_tokens)
    assert torch.equal(inputs, split.inputs([4, 2], None if split.lengths is None else num_tokens))
    assert context.keys() == split.context([4, 2], num_tokens).keys()


@pytest.mark.parametrize("num_draws", [1, 3])
def test_cached_draws_of_a_random_transform_are_used_in_turn(num_draws: int, tmp_path: Path) -> None:
    """What an epoch reads from the cache is what the split would show in the epoch of that draw."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, 8, 8), dtype=np.uint8)
    split = ImageSplit(
        "train", from_arrays(pixels, np.zeros(10, dtype=np.int64)), ImageFormat(), image_classification(1), augment=True
    )
    source = sample_source(split, lambda inputs: torch.Size((len(inputs), 8, 8)), num_draws)
    cache = make_cache(tmp_path, source, feature_format=FeatureFormat(8, torch.float32))
    loader = BatchLoader(split, source, seed=1, reader=cache.reader)

    def inputs(cache_level: int, epoch: int) -> Tensor:
        loader.set_epoch(epoch)
        read = loader.batch(np.arange(10), Topology(plan(1, cache_level, [7], 1, 1), 0)).inputs
        assert read is not None
        return read

    seen = inputs(cache_level=0, epoch=5)
    cache.open()
    cache.advance(1, [(source, np.arange(10 * num_draws))], lambda x, _: x[:, 0])
    cache.start_reading(None)
    assert torch.equal(inputs(cache_level=0, epoch=5), seen), "filling does not redraw the present epoch"
    for epoch in range(2 * num_draws):
        assert torch.equal(inputs(1, epoch), inputs(0, epoch % num_draws)[:, 0])
    assert num_draws == 1 or not torch.equal(inputs(1, 0), inputs(1, 1))
    cache.close()


def test_nodes_that_store_a_part_of_the_features_read_the_samples_that_they_store() -> None:
    source = sample_source(TEXT, lambda inputs: torch.Size((len(inputs), inputs.shape[1], HIDDEN_SIZE)))
    ids, reader, nodes = np.arange(8), FeatureReader(), NodeLayout((2, 2), index=0)
    whole = BatchLoader(TEXT, source, seed=1, reader=reader)
    partial = BatchLoader(TEXT, source, seed=1, reader=reader, nodes=nodes)

    def ids_of(loader: BatchLoader, cache_level: int) -> list[list[int]]:
        """Samples of each pipeline of two stages, as its last rank loads them."""
        chosen = plan(1, cache_level, [4, 7], 2, 1)
        places = [Topology(chosen, rank) for rank in range(4)]
        last = {place.replica: place for place in places if place.is_last}
        return [loader.batch(ids, last[replica]).ids.tolist() for replica in range(2)]

    assert ids_of(whole, cache_level=1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids_of(partial, cache_level=1) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ids_of(partial, cache_level=0) == [[0, 1, 2, 3], [4, 5, 6, 7]]
