"""What is wrong with options, or without effect, as far as can be seen without loading the model or the data."""

from pathlib import Path
from typing import Any

from pipetransformer.autocache.writable import check_writable
from pipetransformer.autopipe.schedules import REFUSED, SCHEDULES
from pipetransformer.config.options import (
    ARRANGEMENTS,
    AUGMENTATIONS,
    PRECISIONS,
    STORAGE,
    Cache,
    Config,
    Parallel,
    SimulationConfig,
)
from pipetransformer.errors import UserError

MODELS = {"image": "vit_tiny, vit or deit", "text": "bert, roberta, distilbert or electra"}


def check(config: Config) -> None:
    """What can be seen to be wrong without loading the model or the data."""
    positive = {"epochs": config.epochs, "batch_size": config.batch_size, "log_every_steps": config.log_every_steps}
    parallel = config.parallel
    positive |= {"eval_every_epochs": config.eval_every_epochs, "parallel.timeout_s": parallel.timeout_s}
    positive |= {
        f"parallel.{name}": getattr(parallel, name)
        for name in (
            "world_size",
            "device_memory_gib",
            "num_stages",
            "num_replicas",
            "num_microbatches",
            "stages_per_rank",
        )
    }
    for name, value in positive.items():
        if value is not None and value <= 0:
            raise UserError(f"{name}={value} must be above 0")
    if config.seed < 0:
        raise UserError(f"seed={config.seed} is below 0; give 0 or more")
    _one_of("precision", config.precision, PRECISIONS)
    _one_of("parallel.device", parallel.device, ("auto", "cpu", "cuda"))
    _check_cache(config.cache)
    _check_arrangement(parallel)
    if parallel.schedule in REFUSED:
        raise UserError(
            f"parallel.schedule={parallel.schedule} {REFUSED[parallel.schedule]}; choose one of {', '.join(SCHEDULES)}"
        )
    if parallel.schedule is not None:
        _one_of("parallel.schedule", parallel.schedule, tuple(SCHEDULES))
    if isinstance(config, SimulationConfig):
        _check_what_if(config)
    elif config.cache.enabled and config.cache.path is not None:
        check_writable(Path(config.cache.path))
    config.model.check()
    config.dataset.check()


def _check_cache(cache: Cache) -> None:
    _one_of("cache.storage", cache.storage, STORAGE)
    _one_of("cache.augmentation", cache.augmentation, AUGMENTATIONS)
    for name, value in (("memory_gib", cache.memory_gib), ("disk_gib", cache.disk_gib)):
        if value < 0:
            raise UserError(f"cache.{name}={value} is below 0; give the most that it may take, or 0 for none")
    if cache.variants < 1:
        raise UserError(f"cache.variants={cache.variants} must be at least 1: the random draws of each sample")
    if cache.path is not None and not cache.path.strip():
        raise UserError("cache.path= is empty; give a folder, or null for a cache that ends with the run")
    if cache.enabled and cache.memory_gib == cache.disk_gib == 0:
        raise UserError("cache.memory_gib=0 and cache.disk_gib=0 leave no room; raise one of them, or give cache=off")


def check_modality(model: Any, dataset: Any) -> None:
    if model.modality != dataset.modality:
        raise UserError(
            f"{model.name} reads {model.modality}s and the dataset holds {dataset.modality}s; "
            f"choose a model for {dataset.modality}s (model={MODELS[dataset.modality]}) or another dataset"
        )


def _check_what_if(config: SimulationConfig) -> None:
    if config.pipeline.schedule is not None:
        _one_of("pipeline.schedule", config.pipeline.schedule, ("gpipe", "1f1b"))
    if config.num_samples < config.batch_size:
        raise UserError(
            f"num_samples={config.num_samples} must be at least batch_size={config.batch_size}: they are an epoch's"
        )
    if config.parallel.world_size is not None:
        raise UserError(
            f"parallel.world_size={config.parallel.world_size} has no effect here: the devices are cluster.num_nodes x "
            "cluster.devices_per_node"
        )
    config.cluster.speed(config.precision)  # refuses a precision whose speed is not known


def _check_arrangement(parallel: Parallel) -> None:
    _one_of("parallel.arrangement", parallel.arrangement, ARRANGEMENTS)
    if parallel.arrangement == "elastic":
        return
    for name in ("num_stages", "num_replicas"):
        if getattr(parallel, name) is not None:
            raise UserError(
                f"parallel={parallel.arrangement} fixes the stages and replicas, and so does parallel.{name}="
                f"{getattr(parallel, name)}; drop it or take parallel=elastic"
            )
    if parallel.arrangement == "sharded":
        _check_sharded(parallel)
    if parallel.arrangement == "single" and parallel.world_size not in (None, 1):
        raise UserError(
            f"parallel=single is one process, not parallel.world_size={parallel.world_size}; drop it or take "
            "parallel=data"
        )


def _check_sharded(parallel: Parallel) -> None:
    for name, given in (("schedule", parallel.schedule), ("stages_per_rank", parallel.stages_per_rank)):
        if given not in (None, 1):
            raise UserError(
                f"parallel=sharded runs all layers on every device, without stages that parallel.{name}={given} could "
                "arrange; drop it or take parallel=pipeline"
            )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name}={value} is unknown; choose one of {', '.join(choices)}")


def warnings(config: Config) -> list[str]:
    """Settings that have no effect, each with the reason."""
    parallel = config.parallel
    texts = []
    if config.cache.variants != 1 and config.cache.augmentation != "variants":
        texts.append(f"cache.variants={config.cache.variants} has no effect without cache.augmentation=variants")
    if config.cache.path is not None and config.cache.enabled and config.cache.disk_gib == 0:
        texts.append("cache.path has no effect with cache.disk_gib=0: only what lies on disk outlives the run")
    if not parallel.autopipe and config.cache.enabled and not config.freeze.never_freezes:
        texts.append("the cache has no effect with parallel.autopipe=false: the stages keep all their layers")
    if not parallel.autopipe and parallel.autodp and not config.freeze.never_freezes:
        texts.append("parallel.autodp has no effect with parallel.autopipe=false: no device becomes free")
    return texts
