"""Refuses options that cannot be, and names those without effect, before the model or the data is loaded."""

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pipetransformer.autocache.writable import check_writable
from pipetransformer.config.kinds import check_config
from pipetransformer.config.schema import (
    BATCHINGS,
    CONF,
    HALF_PRECISIONS,
    PRECISIONS,
    RANDOMNESS,
    Config,
    SimulationConfig,
)
from pipetransformer.config.sections import (
    AUGMENTATIONS,
    FREEZE_ACTIONS,
    SAVED,
    STEP_ACTIONS,
    STORAGE,
    Cache,
    Checkpointing,
    Guard,
    Launch,
    Loading,
)
from pipetransformer.config.validate_parallel import check_parallel, one_of
from pipetransformer.errors import UserError
from pipetransformer.freeze.base import ON_UNFREEZE

if TYPE_CHECKING:
    from pipetransformer.data.base import DatasetSpec
    from pipetransformer.freeze.base import FreezePolicy
    from pipetransformer.models.base import ModelSpec


def validate(config: Config, with_data: bool = True) -> None:
    """Checks the options, before model and data are loaded.

    Args:
        with_data: The options of the dataset count too, and what they name has to be there.

    Raises:
        UserError: With the option, the reason and the remedy.
    """
    check_config(config)
    check_modality(config.model, config.dataset)
    _check_numbers(config)
    one_of("precision", config.precision, PRECISIONS)
    one_of("batching", config.batching, BATCHINGS)
    one_of("randomness", config.randomness, RANDOMNESS)
    _check_cache(config.cache)
    _check_require(config)
    _check_loader(config.loader)
    _check_checkpoint(config.checkpoint)
    _check_evaluate(config)
    _check_launch(config.launch)
    _check_guard(config)
    check_parallel(config)
    _check_dry_run(config)
    if isinstance(config, SimulationConfig):
        _check_simulation(config)
    elif config.cache.enabled and config.cache.path is not None:
        check_writable(Path(config.cache.path))
    config.model.check()
    if with_data:
        config.dataset.check()


def check_batch(batch_size: int, num_samples: int) -> None:
    """Refuses a global batch with more samples than there are.

    Raises:
        UserError: With both numbers.
    """
    if batch_size > num_samples:
        raise UserError(f"batch_size={batch_size} is larger than the {num_samples} training samples; lower batch_size")


def _check_numbers(config: Config) -> None:
    """Refuses numbers of the run and of its section ``parallel`` that are not positive; a seed may be 0."""
    for prefix, section in (("", config), ("parallel.", config.parallel)):
        for each in fields(section):
            value = getattr(section, each.name)
            if each.name == "seed" and value < 0:
                raise UserError(f"seed={value} is below 0; give 0 or more")
            if each.name != "seed" and isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise UserError(f"{prefix}{each.name}={value} must be above 0")


def _check_cache(cache: Cache) -> None:
    one_of("cache.storage", cache.storage, STORAGE)
    one_of("cache.augmentation", cache.augmentation, AUGMENTATIONS)
    for name, value in (("memory_gib", cache.memory_gib), ("disk_gib", cache.disk_gib)):
        if value < 0:
            raise UserError(f"cache.{name}={value} is below 0; give the most that it may take, or 0 for none")
    if not cache.wait_s >= 0:
        raise UserError(f"cache.wait_s={cache.wait_s} is below 0; give the longest wait for another run, or 0 for none")
    if cache.variants < 1:
        raise UserError(f"cache.variants={cache.variants} must be at least 1: the random draws of each sample")
    if cache.path is not None and not str(cache.path).strip():
        raise UserError("cache.path= is empty; give a folder, or null for a cache that ends with the run")
    if cache.enabled and cache.memory_gib == cache.disk_gib == 0:
        raise UserError("cache.memory_gib=0 and cache.disk_gib=0 leave no room; raise one of them, or give cache=off")


def _check_require(config: Config) -> None:
    """Refuses a run that requires a cache and never has one."""
    reasons = (
        ("cache=off", not config.cache.enabled),
        ("freeze=none, which freezes nothing to store", config.freeze.never_freezes),
        ("parallel.autopipe=false, which keeps the stages", not config.parallel.autopipe),
    )
    for reason, is_so in reasons:
        if config.cache.require and is_so:
            raise UserError(f"cache.require=true is not possible with {reason}; drop one of them")


def _check_loader(loader: Loading) -> None:
    if loader.num_workers is not None and loader.num_workers < 0:
        raise UserError(f"loader.num_workers={loader.num_workers} is below 0; give 0 for none, or null for a choice")
    if loader.prefetch_factor < 1:
        raise UserError(
            f"loader.prefetch_factor={loader.prefetch_factor} is below 1; loader.num_workers=0 reads nothing ahead"
        )


def _check_checkpoint(checkpoint: Checkpointing) -> None:
    for name, least in (("every_steps", 1), ("every_minutes", 0), ("keep", 1), ("keep_best", 0)):
        value = getattr(checkpoint, name)
        if value is not None and not value >= least:
            raise UserError(f"checkpoint.{name}={value} is below {least}; checkpoint=off writes no checkpoints")


def _check_evaluate(config: Config) -> None:
    evaluate = config.evaluate
    one_of("evaluate.save", evaluate.save, SAVED)
    for name in ("every_epochs", "every_steps", "patience"):
        value = getattr(evaluate, name)
        if value is not None and value < 1:
            raise UserError(f"evaluate.{name}={value} is below 1; give 1 or more, or null for none")
    if not evaluate.min_delta >= 0:
        raise UserError(f"evaluate.min_delta={evaluate.min_delta} is below 0; give the gain that a new best has")
    if evaluate.save == "best" and not config.checkpoint.enabled:
        raise UserError(
            "evaluate.save=best takes the weights from a checkpoint, and none is written; drop checkpoint=off, or take "
            "evaluate.save=last"
        )


def _check_dry_run(config: Config) -> None:
    """Refuses a dry run in the folder of another run, whose record it would replace."""
    if config.dry_run and (config.resume.run is not None or config.overwrite):
        other = "overwrite=true" if config.overwrite else f"resume={config.resume.run}"
        raise UserError(f"dry_run=true estimates a run that starts, and {other} is about another one; drop one of them")


def _check_launch(launch: Launch) -> None:
    if launch.max_restarts is not None and launch.max_restarts < 0:
        raise UserError(f"launch.max_restarts={launch.max_restarts} is below 0; give 0 for no restart")


def _check_guard(config: Config) -> None:
    guard = config.guard
    if guard.max_norm_ratio is not None and not guard.max_norm_ratio > 1:
        raise UserError(
            f"guard.max_norm_ratio={guard.max_norm_ratio} must be above 1: times the mean norm of the last steps"
        )
    for name in ("max_skips", "max_rollbacks"):
        if getattr(guard, name) < 1:
            raise UserError(f"guard.{name}={getattr(guard, name)} is below 1; take stop for what ends the run at once")
    for name, choices, is_used in (
        ("not_finite", STEP_ACTIONS, True),
        ("exploding", STEP_ACTIONS, guard.max_norm_ratio is not None),
        ("freeze", FREEZE_ACTIONS, config.freeze.guard is not None),
    ):
        one_of(f"guard.{name}", getattr(guard, name), choices)
        if getattr(guard, name) == "roll_back" and is_used and not config.checkpoint.enabled:
            raise UserError(
                f"guard.{name}=roll_back goes back to a checkpoint, and none is written; drop checkpoint=off, or take "
                f"guard.{name}={choices[1]}"
            )


def check_modality(model: "ModelSpec", dataset: "DatasetSpec") -> None:
    """Refuses a model that cannot read the dataset's samples.

    Raises:
        UserError: With the models that can.
    """
    if model.modality != dataset.modality:
        raise UserError(
            f"{model.name} reads {model.modality}s and the dataset holds {dataset.modality}s; choose a model for "
            f"{dataset.modality}s (model={', '.join(_models(dataset.modality))}) or another dataset"
        )


def _models(modality: str) -> list[str]:
    """Returns the options of ``model=`` whose class reads images or texts."""
    targets = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(CONF.glob("model/*.yaml"))
    }
    classes = {name: each["_target_"].rpartition(".") for name, each in targets.items()}
    return [
        name for name, (module, _, cls) in classes.items() if getattr(import_module(module), cls).modality == modality
    ]


def _check_simulation(config: SimulationConfig) -> None:
    if config.pipeline.schedule is not None:
        one_of("pipeline.schedule", config.pipeline.schedule, ("gpipe", "1f1b"))
    if config.num_samples is None:
        raise UserError(
            f"dataset {config.dataset.name} does not say how many training samples it has; give num_samples="
        )
    if config.num_samples < config.batch_size:
        raise UserError(
            f"num_samples={config.num_samples} must be at least batch_size={config.batch_size}: they are an epoch's"
        )
    if config.parallel.world_size is not None and config.parallel.arrangement != "single":  # which has one itself
        raise UserError(
            f"parallel.world_size={config.parallel.world_size} has no effect here: the devices are cluster.num_nodes x "
            "cluster.devices_per_node"
        )
    if config.parallel.device_chunk_gib is not None:
        raise UserError(
            "parallel.device_chunk_gib has no effect here: no cluster says how fast its host memory is; drop it"
        )
    config.cluster.speed(config.precision)  # refuses a precision whose speed is not known


def warnings(config: Config) -> list[str]:
    """Settings that have no effect or make a run depend on its plans, each with the reason."""
    parallel = config.parallel
    texts = []
    if config.randomness == "device" and parallel.arrangement == "elastic":
        texts.append(
            "randomness=device lets dropout follow the division of batches into replicas and micro-batches, so the "
            "result depends on the plans; parallel=data keeps one division"
        )
    if config.cache.variants != 1 and config.cache.augmentation != "variants":
        texts.append(f"cache.variants={config.cache.variants} has no effect without cache.augmentation=variants")
    if config.cache.path is not None and config.cache.enabled and config.cache.disk_gib == 0:
        texts.append("cache.path has no effect with cache.disk_gib=0: only what lies on disk outlives the run")
    if config.freeze.guard is not None and config.freeze.never_freezes:
        texts.append("freeze.guard has no effect with freeze=none: nothing ever freezes")
    elif config.freeze.guard is not None and config.freeze.is_static:
        texts.append("freeze.guard has no effect with this policy: nothing freezes after the start")
    for name in ("target_fraction", "target_seconds"):
        if getattr(config.freeze, name) is not None and config.freeze.is_static:
            texts.append(f"freeze.{name} has no effect: this policy decides nothing after the start")
    texts += _own_rates(config.freeze)
    if parallel.splits_stages and config.randomness == "device":
        texts.append("randomness=device has no effect on a mesh: its ranks draw their parts of what a sample draws")
    if parallel.offload_path is not None and parallel.device_chunk_gib is None:
        texts.append(f"parallel.offload_path={parallel.offload_path} has no effect without parallel.device_chunk_gib=")
    if not parallel.splits_stages and parallel.tp_algorithm != "1d":
        texts.append(f"parallel.tp_algorithm={parallel.tp_algorithm} has no effect without parallel.tp= above 1")
    sums_more_than_two = any(size not in (1, 2) for size in parallel.mesh_sizes.values())
    if parallel.reduce_dtype != "float32" and not (sums_more_than_two and config.precision in HALF_PRECISIONS):
        texts.append(
            f"parallel.reduce_dtype={parallel.reduce_dtype} has no effect without a precision of 16 bits, and "
            "parallel.tp=, cp= or dp_shard= above 2: the sum of two numbers is rounded once in any case"
        )
    if config.cache.wait_s != Cache().wait_s and not (config.cache.path and config.freeze.is_static):
        texts.append(
            f"cache.wait_s={config.cache.wait_s:g} has no effect without cache.path= and a policy that freezes no more "
            "after the start, as freeze=prefix: no other run waits for a store"
        )
    if config.guard.freeze != Guard().freeze and config.freeze.guard is None:
        texts.append(f"guard.freeze={config.guard.freeze} has no effect without freeze.guard=, the fall that is taken")
    if config.freeze.on_unfreeze != ON_UNFREEZE[0] and not config.may_unfreeze:
        texts.append(
            f"freeze.on_unfreeze={config.freeze.on_unfreeze} has no effect: neither the policy nor the guard of a "
            "freeze (freeze.guard=) ever unfreezes a block"
        )
    if config.evaluate.min_delta and config.evaluate.patience is None:
        texts.append(f"evaluate.min_delta={config.evaluate.min_delta} has no effect without evaluate.patience=")
    if config.guard.exploding != Guard().exploding and config.guard.max_norm_ratio is None:
        texts.append(f"guard.exploding={config.guard.exploding} has no effect without guard.max_norm_ratio=")
    if config.baseline and parallel.arrangement == "sharded":
        texts.append("baseline=true has no effect with parallel=sharded: no sharded run goes to another arrangement")
    elif config.baseline and config.freeze.frozen_at_start:
        texts.append("baseline=true has no effect: static plans freeze nothing, and blocks are frozen from the start")
    if not parallel.autopipe and config.cache.enabled and not config.freeze.never_freezes:
        texts.append("the cache has no effect with parallel.autopipe=false: the stages keep all their layers")
    if not parallel.autopipe and parallel.autodp and not config.freeze.never_freezes:
        texts.append("parallel.autodp has no effect with parallel.autopipe=false: no device becomes free")
    return texts


def _own_rates(freeze: "FreezePolicy") -> list[str]:
    """Tells that learning rates do not follow a prefix that somebody else holds."""
    given = [name for name in ("guard", "target_fraction", "target_seconds") if getattr(freeze, name) is not None]
    if not (freeze.has_own_rates and given):
        return []
    return [
        f"freeze.{given[0]} changes what freezes, and not the rates of this policy: a block whose rate is zero by then "
        "learns no more, frozen or not"
    ]
