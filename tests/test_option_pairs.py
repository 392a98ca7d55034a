"""Any two options go together, or are refused in a line: a run under any of them trains as one device does.

Each run is a row of a covering array: among all rows every value of an option meets every value of each other one. It
stops half way and goes on under the arrangement of the next row. ``make matrix`` runs all rows, the suite some.
"""

import itertools
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.jobs import TINY, Job, play, run_job
from support.pool import Pool
from support.texts import text_run, write_decoder, write_encoder, write_table
from torch import Tensor
from torch.testing import assert_close

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder

IS_WHOLE = "MATRIX" in os.environ
EVERY = 19
Row = Mapping[str, str]
Pair = tuple[tuple[str, str], ...]
ARRANGEMENTS: dict[str, tuple[str, ...]] = {  # the number of ranks first
    "1 single": ("parallel=single",),
    "2 data": ("parallel=data",),
    "2 pipeline": ("parallel=pipeline",),
    "3 elastic": (),
    "4 elastic": ("parallel.num_stages=2",),
    "2 interleaved": ("parallel=pipeline", "parallel.stages_per_rank=2", "parallel.schedule=interleaved1f1b"),
    "2 sharded": ("parallel=sharded",),
    "2 tp": ("parallel=megatron",),
    "4 stages of tp": ("parallel=pipeline", "parallel.tp=2"),
    "2 rows": ("parallel.dp_shard=2",),
    "2 ring": ("parallel=ring",),
    "4 cube": ("parallel.tp=2", "parallel.tp_algorithm=3d"),
    "2 chunks": ("parallel=chunks", "parallel.device_chunk_gib=1e-4"),
}
MESHES = ("2 tp", "4 stages of tp", "2 rows", "2 ring", "4 cube")
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "arrangement": ARRANGEMENTS,
    "microbatches": {"open": (), "2": ("parallel.num_microbatches=2",)},
    "recompute": {"open": (), "yes": ("parallel.recompute=true",)},
    "planning": {"all": (), "no autopipe": ("parallel.autopipe=false",), "no autodp": ("parallel.autodp=false",)},
    "cache": {
        "on": (),
        "off": ("cache=off",),
        "disk": ("cache.memory_gib=0",),
        "small": ("cache.memory_gib=1e-6", "cache.disk_gib=0"),
    },
    "baseline": {"no": (), "yes": ("baseline=true",)},
    "trace": {"no": (), "yes": ("trace=true",)},
    "model": {"vit": (), "bert": (), "gpt2": ()},
    "freeze": {
        "none": ("freeze=none",),
        "schedule": ("freeze=schedule", "freeze.num_frozen=[1,2]", "freeze.interval=0.25"),
        "paper": ("freeze=pipetransformer", "freeze.interval=0.25"),
        "prefix": ("freeze=prefix", "freeze.num_blocks=1"),
        "freezeout": ("freeze=freezeout",),
        "cka": ("freeze=cka", "freeze.interval=0.25"),
        "budget": ("freeze=pipetransformer", "freeze.interval=0.25", "freeze.target_fraction=0.3"),
    },
    "optim": {"adamw": (), "sgd": ("optim=sgd",), "lamb": ("optim=lamb",)},
    "peft": {"none": (), "lora": ("peft=lora",)},
    "evaluate": {
        "last": (),
        "best": ("evaluate.save=best",),
        "steps": ("evaluate.every_steps=3", "evaluate.every_epochs=null"),
    },
    "guard": {
        "plain": (),
        "norms": ("guard.max_norm_ratio=1.5", "guard.exploding=skip"),
        "freeze": ("freeze.guard=0.01", "guard.freeze=unfreeze"),
    },
    "batching": {"uniform": (), "bucketed": ("batching=bucketed",)},
    "checkpoint": {"on": ("checkpoint.every_steps=2", "checkpoint.keep=9"), "off": ("checkpoint=off",)},
    "clip": {"default": (), "tight": ("optim.clip_norm=0.1",)},
    "precision": {"float64": ("precision=float64",)},
}
ARRANGING = ("arrangement", "microbatches", "recompute", "planning", "cache", "baseline", "trace")
"""Options that must not change the result; all others may."""
REFUSED: dict[Pair, str] = {
    (("evaluate", "best"), ("checkpoint", "off")): "evaluate.save=best takes the weights from a checkpoint",
    **{(("arrangement", mesh), ("peft", "lora")): "does not go with peft=, since no mesh splits" for mesh in MESHES},
    **{(("arrangement", mesh), ("model", "gpt2")): "no tp_plan says how GPT2Model is split" for mesh in MESHES},
}


def covering(seed: int = 0, num_tries: int = 30) -> Iterator[Row]:
    """Rows among which every pair of values occurs that is not refused, each the best of several drawn ones."""
    draw = random.Random(seed)
    values = ([(name, value) for value in OPTIONS[name]] for name in OPTIONS)
    left = {pair for one, other in itertools.combinations(values, 2) for pair in itertools.product(one, other)}
    left -= REFUSED.keys()
    while left:
        first = dict(draw.choice(sorted(left)))
        drawn = ({name: first.get(name) or draw.choice([*OPTIONS[name]]) for name in OPTIONS} for _ in range(num_tries))
        rows = [row for row in drawn if not REFUSED.keys() & pairs(row)]
        if rows:
            yield (row := max(rows, key=lambda row: len(left & pairs(row))))
            left -= pairs(row)


def pairs(row: Row) -> set[Pair]:
    return {*itertools.combinations(row.items(), 2)}


ROWS = [*covering()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_encoder(folder / "bert")
    write_decoder(folder / "gpt2")
    write_table(folder / "train.tsv", [0, 1, 0, 1] * 4)
    write_table(folder / "dev.tsv", [0, 1, 0, 1])
    return folder


def options(row: Row, files: Path, *arranged: str) -> tuple[str, ...]:
    """The command line of a row under an arrangement."""
    if (model := row["model"]) == "vit":
        sizes = "{patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}"
        base = (*TINY, f"model.options={sizes}")
    else:
        base = (*text_run(files / model, "sst2", files, model), "batch_size=4", "epochs=2")
    own = (OPTIONS[name][value] for name, value in row.items() if name not in ARRANGING)
    return (*base, "optim.lr=0.01", *itertools.chain.from_iterable(own), *arranged)


def arranging(row: Row) -> tuple[str, ...]:
    return (*itertools.chain.from_iterable(OPTIONS[name][row[name]] for name in ARRANGING),)


def num_ranks(row: Row) -> int:
    return int(row["arrangement"].split()[0])


@pytest.mark.thinned("[19]", "[38]")
@pytest.mark.parametrize("number", range(0, len(ROWS), 1 if IS_WHOLE else EVERY))
def test_a_run_under_any_two_options_trains_as_one_device_does(
    number: int, pool: Pool, files: Path, tmp_path: Path
) -> None:
    row = ROWS[number]
    single = run_job(pool, 1, tmp_path / "one", *options(row, files, "parallel=single"), made_up_times=True)
    arranged = options(row, files, *arranging(row))
    job = run_job(pool, num_ranks(row), tmp_path / "run", *arranged, made_up_times=True)
    assert (single.error, job.error) == ("", "")
    check_equal(job, single)
    after = next(each for each in itertools.islice(itertools.cycle(ROWS), number + 1, None) if fits(each, row))
    if row["checkpoint"] != "off":
        published = CheckpointFolder(job.folder / FOLDER).published()
        for later in published[len(published) // 2 :]:
            shutil.rmtree(later)
        resumed = options(row, files, *arranging(after), "resume=auto")
        assert {*pool.run(num_ranks(after), play, resumed, job.folder, True)} == {""}
        assert len(job.events("resume")) == 1
        check_equal(job, single)


def fits(after: Row, row: Row) -> bool:
    """Whether a run can go on under the arrangement of another row."""
    return not REFUSED.keys() & pairs({**row, **{name: after[name] for name in ARRANGING}})


def check_equal(job: Job, single: Job) -> None:
    assert job.losses == pytest.approx(single.losses, rel=0, abs=1e-10)
    assert job.summary["metrics"] == single.summary["metrics"]
    assert_close(weights(job), weights(single), rtol=0, atol=1e-9)
    assert sum(job.summary["time_parts"].values()) == pytest.approx(job.summary["train_seconds"])


def weights(run: Job) -> dict[str, Tensor]:
    """The numbers in ``model/``, or those of the adapters there."""
    found = sorted((run.folder / "model").glob("*.safetensors"))
    assert found, "a model is saved"
    return {f"{file.name} {name}": value for file in found for name, value in load_file(file).items()}


LEFT_OUT = {  # of the meshes, which one check refuses, one is left for each model; all by make matrix
    *((("arrangement", mesh), ("peft", "lora")) for mesh in MESHES[1:]),
    *((("arrangement", mesh), ("model", "gpt2")) for mesh in MESHES[:-1]),
}
SOME_REFUSED = [pair for pair in REFUSED if IS_WHOLE or pair not in LEFT_OUT]


@pytest.mark.thinned("evaluate", "lora")
@pytest.mark.parametrize("pair", SOME_REFUSED, ids=str)
def test_options_that_do_not_go_together_are_refused_in_a_line(
    pair: Pair, pool: Pool, files: Path, tmp_path: Path
) -> None:
    row = {**{name: next(iter(values)) for name, values in OPTIONS.items()}, **dict(pair)}
    job = run_job(pool, num_ranks(row), tmp_path / "run", *options(row, files, *arranging(row)), made_up_times=True)
    assert REFUSED[pair] in job.error
    assert "\n" not in job.error
