"""Batches that workers read ahead are bit for bit those that the rank would read, and no worker is left."""

import multiprocessing
import os
import signal
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from support.command import MARK, environment, processes
from support.command import train as train_command
from support.input_runs import counting_answers, run_ahead
from support.plans import plan
from support.pool import Pool
from support.resumes import run_on
from support.samples import RandomImages, RandomText
from torch import Tensor

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Loading, Parallel
from pipetransformer.data.base import ImageFormat, Split
from pipetransformer.data.images.folders import from_folder
from pipetransformer.data.images.sources import from_arrays
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.images.transforms import ImageTransforms, parse_transforms
from pipetransformer.data.map_style import MapStyleSplit
from pipetransformer.data.tasks import image_classification
from pipetransformer.data.unlabelled import ScoredSplit
from pipetransformer.errors import UserError
from pipetransformer.runtime.batch import Batch
from pipetransformer.training import input_reader
from pipetransformer.training.input_reader import InputReader, default_num_workers, open_inputs
from pipetransformer.training.loader import BatchLoader, ComingBatch

NUM, SIDE, BATCH = 14, 10, 5
TIMEOUT_S = 60.0
Started = Callable[[], list[BaseProcess]]
PLANS = {
    "one device": plan(0, 0, [7], 1, 1),
    "pipeline": plan(0, 0, [3, 7], 1, 4),
    "replicas": plan(0, 0, [7], 3, 1),
    "both": plan(0, 0, [3, 7], 2, 2),
}
DRAWN = parse_transforms(["RandomHorizontalFlip", {"name": "RandomErasing", "p": 0.5}])


def write_pictures(folder: Path) -> Path:
    """Two classes of pictures, larger than the model's, to train on and to evaluate on."""
    generator = np.random.default_rng(0)
    for number in range(NUM):
        for split in ("train", "test"):
            file = folder / split / "ab"[number % 2] / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (SIDE + 2, SIDE, 3), dtype=np.uint8)).save(file)
    return folder


def damaged_png() -> bytes:
    """A picture whose checksums are right and whose pixels end early, which only decoding finds."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header, pixels = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0), zlib.compress(b"\0" * 7)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def pictures(folder: Path) -> ImageSplit:
    wanted = ImageFormat(SIDE, 3)
    transforms = ImageTransforms(DRAWN, SIDE)
    source = from_folder(folder).train
    return ImageSplit("train", source, wanted, image_classification(2), augment=True, transforms=transforms)


def own_texts() -> MapStyleSplit:
    generator = np.random.default_rng(0)
    rows = [
        {"input_ids": list(range(1, 2 + length)), "attention_mask": [1] * (1 + length), "labels": length % 3}
        for length in generator.integers(1, 9, NUM).tolist()
    ]
    return MapStyleSplit("train", rows, torch.nn.CrossEntropyLoss(reduction="none"))


def shape(inputs: Tensor) -> torch.Size:
    return torch.Size((len(inputs), inputs.shape[1], 4))


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> list[Split]:
    return [
        pictures(write_pictures(tmp_path_factory.mktemp("pictures"))),
        RandomImages(NUM, mixup="elem"),
        RandomText(NUM),
        own_texts(),
    ]


@pytest.fixture(scope="module")
def reader(splits: list[Split]) -> Iterator[InputReader]:
    with InputReader(splits, num_workers=2, timeout_s=TIMEOUT_S) as reader:
        yield reader


@pytest.fixture
def started() -> Started:
    """Returns the processes that the test has started and that live."""
    before = {*multiprocessing.active_children()}
    return lambda: [each for each in multiprocessing.active_children() if each not in before]


def steps(first: int = 0, num: int = 6) -> list[ComingBatch]:
    """Batches of some epochs, each in another order."""
    orders = [np.random.default_rng(epoch).permutation(NUM) for epoch in range(3)]
    coming = [ComingBatch(order[i : i + BATCH], 0, epoch) for epoch, order in enumerate(orders) for i in (0, 5, 10)]
    return [each._replace(step=step) for step, each in enumerate(coming)][first : first + num]


def read(loader: BatchLoader, coming: Sequence[ComingBatch], topology: Topology, targets: bool = True) -> list[Batch]:
    batches = []
    for ids, step, epoch in coming:
        loader.set_epoch(epoch)
        batches.append(loader.batch(ids, topology, step, targets))
    return batches


def are_same(one: Any, other: Any) -> bool:
    """Compares batches, bit for bit."""
    if isinstance(one, Batch):
        return all(are_same(getattr(one, each.name), getattr(other, each.name)) for each in fields(Batch))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def differences(reader: InputReader, split: Split, chosen: Plan, taken: list[Any]) -> list[int]:
    """Reads three epochs on every rank of a plan, and returns the ranks whose batches depend on workers."""
    ahead, plain = BatchLoader.uncached(split, shape, 1, reader), BatchLoader.uncached(split, shape, 1)
    found = []
    for rank in range(chosen.num_stages * chosen.num_replicas):
        topology, coming, before = Topology(chosen, rank), steps(), len(taken)
        ahead.prefetch(coming, topology)
        if not are_same(read(ahead, coming, topology), read(plain, coming, topology)):
            found.append(rank)
        reads = topology.is_first or "targets" in split.read_ahead
        assert len(taken) - before == (len(coming) if reads else 0), "every batch was read by a worker"
    return found


@pytest.mark.parametrize("arrangement", PLANS)
@pytest.mark.parametrize("number", range(4), ids=["pictures", "mixed", "texts", "own"])
def test_workers_read_what_the_rank_would_at_any_topology(
    number: int, arrangement: str, splits: list[Split], reader: InputReader
) -> None:
    with counting_answers() as taken:
        assert differences(reader, splits[number], PLANS[arrangement], taken) == []


def ignoring_the_epoch(split: Split, request: input_reader.InputRequest) -> input_reader.Samples:
    return input_reader.Samples(split.inputs(request.ids.tolist(), request.num_tokens))


def in_another_order(split: Split, request: input_reader.InputRequest) -> input_reader.Samples:
    return input_reader.Samples(split.inputs(request.ids.tolist()[::-1], request.num_tokens, request.epoch))


@pytest.mark.parametrize("wrong", [ignoring_the_epoch, in_another_order])
def test_workers_that_read_otherwise_would_be_noticed(wrong: Any, splits: list[Split]) -> None:
    with mock.patch.object(input_reader, "read_samples", wrong):
        reader = InputReader(splits, num_workers=1, timeout_s=TIMEOUT_S)
    with reader, counting_answers() as taken:
        assert differences(reader, splits[0], PLANS["one device"], taken) == [0]


def test_answers_in_another_order_than_that_of_the_steps_would_be_noticed(
    splits: list[Split], reader: InputReader
) -> None:
    ahead, plain = (BatchLoader.uncached(splits[0], shape, 1, each) for each in (reader, None))
    topology, coming = Topology(PLANS["one device"], 0), steps()
    ahead.prefetch(coming, topology)
    first, second, *_ = list(reader._coming.pending)
    reader._coming.pending[0], reader._coming.pending[1] = second, first
    swapped = [coming[1], coming[0]]
    assert not are_same(read(ahead, swapped, topology), read(plain, swapped, topology))


def test_the_order_is_kept_through_a_transition_and_an_evaluation(splits: list[Split], reader: InputReader) -> None:
    ahead, plain = (BatchLoader.uncached(splits[0], shape, 1, each) for each in (reader, None))
    before, after = Topology(PLANS["pipeline"], 0), Topology(PLANS["replicas"], 1)
    with counting_answers() as taken:
        ahead.prefetch(iter(steps(0, 9)), before)
        assert are_same(read(ahead, steps(0, 2), before), read(plain, steps(0, 2), before))
        ahead.prefetch(iter(steps(2, 7)), after)
        assert are_same(read(ahead, steps(2, 3), after), read(plain, steps(2, 3), after))
        ahead.prefetch(steps(0, 3), after, targets=False)
        assert are_same(read(ahead, steps(0, 3), after, False), read(plain, steps(0, 3), after, False))
        assert len(taken) == 2 + 3 + 3
        ahead.prefetch(iter(steps(5, 4)), after)
        skipped = steps(0, 1)  # announced by nobody
        assert are_same(read(ahead, skipped, before), read(plain, skipped, before))
        assert len(taken) == 8
        assert are_same(read(ahead, steps(5, 4), after), read(plain, steps(5, 4), after))
        assert len(taken) == 12


def test_reading_ahead_draws_nothing_from_the_global_generator(splits: list[Split], reader: InputReader) -> None:
    before, ahead = torch.get_rng_state(), BatchLoader.uncached(splits[2], shape, 1, reader)
    ahead.prefetch(steps(), Topology(PLANS["one device"], 0))
    assert torch.equal(before, torch.get_rng_state())


def test_a_picture_that_cannot_be_read_is_told_as_without_workers(
    tmp_path: Path, started: Callable[[], list[BaseProcess]]
) -> None:
    folder = write_pictures(tmp_path)
    split = pictures(folder)
    (folder / "train" / "b" / "03.png").write_bytes(damaged_png())
    coming, topology, told = [ComingBatch(np.arange(NUM))], Topology(PLANS["one device"], 0), []
    for num_workers in (0, 1):
        with InputReader([split], num_workers, timeout_s=TIMEOUT_S) as reader:
            loader = BatchLoader.uncached(split, lambda _: torch.Size((1, 1, 1)), 1, reader)
            loader.prefetch(coming, topology)
            with pytest.raises(UserError) as error:
                read(loader, coming, topology)
            told.append(str(error.value))
        assert started() == []
    assert told[0] == told[1]
    assert "03.png cannot be read as a picture" in told[0]
    assert "\n" not in told[0]


class Awkward(Exception):
    """An error that only its own process can make."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Odd(RandomText):
    """Texts whose reading does something else in a worker."""

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        if epoch == 1:
            raise Awkward(1, 2)
        if epoch == 2:
            os.read(os.pipe()[0], 1)  # for ever
        return super().inputs(ids, num_tokens, epoch)


def odd(num_workers: int = 1) -> tuple[InputReader, BatchLoader]:
    split = Odd(NUM)
    reader = InputReader([split], num_workers, timeout_s=TIMEOUT_S)
    return reader, BatchLoader.uncached(split, shape, 1, reader)


def test_an_error_of_a_library_reaches_the_rank_with_its_trace() -> None:
    reader, loader = odd()
    coming, topology = [ComingBatch(np.arange(3), 0, 1)], Topology(PLANS["one device"], 0)
    with reader:
        loader.prefetch(coming, topology)
        with pytest.raises(RuntimeError, match="Awkward: 1 and 2") as error:
            read(loader, coming, topology)
    assert "raise Awkward(1, 2)" in str(error.value.__cause__)


def test_a_worker_that_hangs_is_ended_with_the_others(
    monkeypatch: pytest.MonkeyPatch, started: Callable[[], list[BaseProcess]]
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    reader, loader = odd()
    loader.prefetch([ComingBatch(np.arange(3), 0, 2)], Topology(PLANS["one device"], 0))
    assert len(started()) == 1
    reader.close()
    assert started() == []
    reader.close()  # may come twice


def kill_and_read(pid: int, loader: BatchLoader, topology: Topology) -> None:
    """The error may come at any moment after the first line: torch raises it where the signal of the end arrives."""
    os.kill(pid, signal.SIGKILL)
    loader.prefetch(steps(0, 2), topology)


def test_a_worker_that_is_killed_is_named_and_one_that_is_asked_to_end_goes_on(
    started: Callable[[], list[BaseProcess]],
) -> None:
    reader, loader = odd()
    topology, (worker,) = Topology(PLANS["one device"], 0), started()
    assert worker.pid is not None
    with reader:
        loader.prefetch(steps(0, 2), topology)
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # as a scheduler sends to all processes
            os.kill(worker.pid, each)
        assert len(read(loader, steps(0, 2), topology)) == 2
        with pytest.raises(RuntimeError, match=f"DataLoader worker .*{worker.pid}"):
            kill_and_read(worker.pid, loader, topology)
    assert started() == []


def test_workers_are_as_many_as_the_cores_leave(splits: list[Split], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    source = from_arrays(np.zeros((NUM, SIDE, SIDE), dtype=np.uint8), np.zeros(NUM, dtype=np.int64))
    in_memory = ImageSplit("train", source, ImageFormat(), image_classification(1))
    resized = ImageSplit("train", source, ImageFormat(size=SIDE + 1), image_classification(1))
    assert (in_memory.is_slow, resized.is_slow) == (False, True)
    assert default_num_workers(splits, cpu, 2) == 3
    assert default_num_workers(splits, gpu, 4) == 3
    assert default_num_workers(splits, gpu, 1) == input_reader.MAX_WORKERS
    assert default_num_workers(splits, cpu, 4) == 1, "its core is free while it waits for others"
    assert default_num_workers([*splits[1:], in_memory], gpu, 1) == 0, "all lies in memory"
    to_predict = ScoredSplit(resized, [{}] * NUM, ("a",))
    assert default_num_workers([to_predict], gpu, 1) == input_reader.MAX_WORKERS
    assert to_predict.read_ahead == ("inputs",)


@pytest.mark.parametrize(
    ("options", "is_daemon", "note"),
    [
        (Loading(), False, ""),
        (Loading(prefetch_factor=4), False, "loader.prefetch_factor=4 has no effect: no worker reads ahead"),
        (Loading(num_workers=2), True, "loader.num_workers=2 has no effect: a daemonic process cannot start others"),
    ],
)
def test_an_option_without_effect_is_named(
    options: Loading, is_daemon: bool, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RandomText(NUM)
    config = mock.Mock(spec=Config, loader=options, parallel=Parallel())
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": is_daemon})
    reader, notes = open_inputs(config, [text], torch.device("cpu"))
    assert (reader.num_workers, notes) == (0, [note] * bool(note))


class Drawn(list[Any]):
    """Samples with noise from torch's global generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.rand(2, 3), 0


def drawn(seed: int, rank: int) -> list[float]:
    """Returns the inputs of a batch that a worker of a rank has read."""
    split = MapStyleSplit("train", Drawn(range(NUM)), torch.nn.CrossEntropyLoss(reduction="none"))
    config = mock.Mock(spec=Config, loader=Loading(num_workers=1), parallel=Parallel(timeout_s=TIMEOUT_S), seed=seed)
    of_world = {"is_initialized": True, "get_rank": rank, "get_world_size": 2}
    with mock.patch.multiple(dist, **{name: mock.Mock(return_value=value) for name, value in of_world.items()}):
        reader, _ = open_inputs(config, [split], torch.device("cpu"))
    with reader:
        loader, topology = BatchLoader.uncached(split, shape, 1, reader), Topology(PLANS["one device"], 0)
        loader.prefetch(steps(0, 1), topology)
        (batch,) = read(loader, steps(0, 1), topology)
    assert batch.inputs is not None
    return batch.inputs.flatten().tolist()


def test_what_a_data_set_draws_in_a_worker_follows_from_the_seed_and_the_rank() -> None:
    first, *others = (drawn(*key) for key in ((1, 0), (1, 1), (2, 0)))
    assert first not in others
    assert others[0] != others[1]
    assert first == drawn(1, 0)


def run_options(folder: Path) -> tuple[str, ...]:
    model = "model.options={patch_size: 5, embed_dim: 16, depth: 2, num_heads: 2}"
    data = "dataset=image_folder", f"dataset.path={folder}", f"model.image_size={SIDE}", "dataset.augment=true"
    return (*data, "dataset.transforms=[RandomHorizontalFlip]", "dataset.mixup=0.5", model, "logger=none", "epochs=3")


@pytest.mark.thinned("num_stages")
@pytest.mark.parametrize("arrangement", ["parallel.num_stages=2", "parallel.num_replicas=2"])
def test_a_run_with_workers_goes_on_after_a_stop_and_a_freeze_as_one_without(
    arrangement: str, pool: Pool, tmp_path: Path
) -> None:
    folder = write_pictures(tmp_path / "pictures")
    options = (*run_options(folder), "precision=float64", f"batch_size={BATCH}", "optim.lr=0.01", "freeze.interval=0.4")
    plain, ahead = (*options, "loader.num_workers=0"), (*options, arrangement, "loader.num_workers=1")
    (whole,) = pool.run(1, run_on, plain, tmp_path / "whole", [0, 1])
    begun = pool.run(1, run_on, plain, tmp_path / "parted", [0, 1], 2)[0]
    ranks = pool.run(2, run_ahead, ahead, tmp_path / "parted", [0, 1])
    rest = ranks[0][0]
    assert (rest.first, rest.differences, len(whole.losses)) == (2, [], 9)
    assert begun.losses + rest.losses == pytest.approx(whole.losses, abs=1e-10)
    assert len({shape[0] for shape in rest.plans}) == 2, "a block froze on the way"
    num_read = 7 + 3 * 3  # steps, and the batches of each epoch's evaluation
    assert [taken for _, taken, _ in ranks] == [num_read, 0 if "stages" in arrangement else num_read]
    assert [left for _, _, left in ranks] == [0, 0]


@pytest.mark.thorough  # every run reads a damaged picture in a worker: test_a_picture_that_cannot_be_read_...
def test_a_forked_run_that_fails_in_a_worker_says_so_in_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures")
    (folder / "train" / "a" / "04.png").write_bytes(damaged_png())
    mark = environment()[MARK]
    options = (*run_options(folder), "loader.num_workers=1", "dataset.transforms=[]")
    ended = train_command(tmp_path, *options, f"batch_size={BATCH}", "parallel.world_size=1", **{MARK: mark})
    assert ended.code == 1
    last = ended.err.strip().splitlines()[-1]
    assert "04.png cannot be read as a picture" in last
    assert last.endswith("repair or remove it")
    assert processes(mark) == []
