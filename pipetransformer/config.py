"""What a user may write, and its conversion to plain values. The only module besides ``train.py`` that knows Hydra.

``schema`` comes first in the defaults list, so that Hydra refuses unknown keys and wrong types of the general options.
A group with a ``_target_`` (model, dataset, freeze, optim, logger) is checked against the dataclass that it names:
adding one takes its file and its YAML, nothing here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from hydra.utils import get_class, instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pipetransformer.autocache.writable import Unwritable, check_writable
from pipetransformer.autopipe.plan import SCHEDULES, SKIPS_GRADIENTS

SPEC_GROUPS = ("model", "dataset", "freeze", "optim", "logger")
WHAT_IF_GROUPS = ("cluster", "shape")
PRECISIONS = ("float32", "float64", "bfloat16", "float16")
STORAGE = ("exact", "float32", "bfloat16", "float16", "int8")
AUGMENTATIONS = ("off", "first_draw", "variants")
ARRANGEMENTS = ("elastic", "data", "sharded", "pipeline", "single")


class UserError(CompactHydraException):
    """Something that the user can mend; shown without a stack trace."""


@dataclass(frozen=True)
class Parallel:
    """Devices, and what is fixed of the plan. ``None`` leaves the choice to the planner.

    Attributes:
        arrangement: One of :data:`ARRANGEMENTS`. ``elastic`` is planned and changes; ``data`` has the whole model on
            every device, ``sharded`` a share of each layer on every device (FSDP2), ``pipeline`` one pipeline over all
            devices, ``single`` one device, from start to end.
        world_size: Processes, one per device; ``None``: one per GPU, or two without a GPU.
        device_memory_gib: What weights, gradients, optimizer state and activations may take on one device.
        num_stages, num_replicas, num_microbatches, schedule: Fixed for the whole run when given.
        num_chunks: Stages of each device, likewise.
        checkpoint: Keep only the inputs of layers for backward and compute the rest again, likewise.
        autopipe: Re-partition the active layers when blocks freeze.
        autodp: Turn freed devices into replicas.
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout_s: Longest wait for another process before the run stops with an error.
    """

    arrangement: str = "elastic"
    world_size: int | None = None
    device_memory_gib: float | None = None
    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    num_chunks: int | None = 1
    checkpoint: bool | None = None
    autopipe: bool = True
    autodp: bool = True
    device: str = "auto"
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Cache:
    """Where frozen features go.

    Attributes:
        path: Folder of stores that outlive the run, for runs with the same frozen layers to find; ``None`` keeps them
            in the run folder for as long as the run lasts.
        memory_gib: Shared memory of a node, at most.
        disk_gib: Disk of a node, at most.
        storage: One of :data:`STORAGE`.
        augmentation: One of :data:`AUGMENTATIONS`: what to do with a transform that is random.
        variants: Random draws of each sample, with ``augmentation=variants``.
    """

    enabled: bool = True
    path: str | None = None
    memory_gib: float = 2.0
    disk_gib: float = 20.0
    storage: str = "exact"
    augmentation: str = "off"
    variants: int = 1

    def folder(self, run_dir: Path) -> Path:
        """What a run calls its own until it ends."""
        return run_dir / "cache"

    @property
    def num_draws(self) -> int:
        """Random draws of each sample that are kept; 0 where a random transform keeps the cache off."""
        return {"off": 0, "first_draw": 1, "variants": self.variants}[self.augmentation]


@dataclass(frozen=True)
class Config:
    """One run, as plain values: the specs of the groups and the general options.

    Attributes:
        batch_size: Samples of one optimizer step over all replicas, whatever the topology.
        precision: One of :data:`PRECISIONS`. The last two are of matrix products, under autocast; weights, optimizer
            state, the cache and what goes between stages stay float32. float16 scales the loss.
        eval_every_epochs: Epochs between two evaluations; the end of the run is always evaluated.
        log_every_steps: Steps between two step lines in the log where there is no terminal.
        trace: Write what every rank does in one step of each plan; that step is slower.
    """

    model: Any = MISSING
    dataset: Any = MISSING
    freeze: Any = MISSING
    optim: Any = MISSING
    logger: Any = MISSING
    parallel: Parallel = field(default_factory=Parallel)
    cache: Cache = field(default_factory=Cache)
    seed: int = 1
    epochs: int = 3
    batch_size: int = 32
    precision: str = "float32"
    eval_every_epochs: int = 1
    log_every_steps: int = 20
    trace: bool = False


@dataclass(frozen=True)
class Arrangement:
    """A static pipeline, one stage on a device, to compare with; ``None`` leaves the choice to the planner."""

    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class WhatIf(Config):
    """A run that is only simulated: what it would be started with, and what stands for devices, model and data.

    Attributes:
        cluster: The devices, a :class:`~pipetransformer.simulate.hardware.Hardware`.
        shape: The model's size, a :class:`~pipetransformer.autopipe.analytic.Shape`.
        pipeline: The static pipeline that the run is compared with.
        num_samples: Training samples of an epoch.
    """

    cluster: Any = MISSING
    shape: Any = MISSING
    pipeline: Arrangement = field(default_factory=Arrangement)
    num_samples: int = MISSING


SECTIONS = {"parallel": Parallel, "cache": Cache, "pipeline": Arrangement}
C = TypeVar("C", bound=Config)


def register(schema: type[Config] = Config) -> None:
    """Makes the schema known to Hydra under the name that ``conf/config.yaml`` uses."""
    ConfigStore.instance().store(name="schema", node=_schema(schema))


def _schema(spec: type) -> DictConfig:
    """A dataclass as types and names to merge values into; frozen ones would refuse them."""
    schema = OmegaConf.structured(spec)
    OmegaConf.set_readonly(schema, False)
    for key in schema:
        if not OmegaConf.is_missing(schema, key) and isinstance(schema[key], DictConfig):
            OmegaConf.set_readonly(schema[key], False)
    return schema


def compose_what_if(conf: Path, overrides: Sequence[str] = ()) -> WhatIf:
    """``conf/simulate.yaml`` with overrides, from Python."""
    register(WhatIf)
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        return load(compose("simulate", list(overrides)), WhatIf)


def build(node: DictConfig, **runtime: Any) -> Any:
    """Instantiates a checked node; the only caller of Hydra's ``instantiate``."""
    return instantiate(node, _convert_="all", **runtime)


def load(node: DictConfig, kind: type[C] = Config) -> C:
    """Checks a composed configuration and turns it into plain values, without importing torch.

    Args:
        kind: What ``conf/config.yaml`` (or, for a :class:`WhatIf`, ``conf/simulate.yaml``) was composed for.

    Raises:
        UserError: A key that does not exist, a value of the wrong type, or values that do not fit together.
    """
    try:
        groups = SPEC_GROUPS + (WHAT_IF_GROUPS if issubclass(kind, WhatIf) else ())
        specs = {group: build(_checked(group, node[group])) for group in SPEC_GROUPS}
        _check_modality(specs["model"], specs["dataset"])  # a text model's shape asks the dataset for its length
        specs |= {group: build(_checked(group, node[group])) for group in groups if group not in specs}
        others = {key: value for key, value in node.items() if key not in groups}
        general = cast("DictConfig", OmegaConf.merge(_schema(kind), others))
        values = {key: general[key] for key in general if key not in groups}
        values |= {key: build_plain(SECTIONS[key], general[key]) for key in SECTIONS if key in values}
        config = kind(**specs, **values)
        check(config)
    except ValueError as error:
        raise UserError(str(error)) from None
    except Unwritable as error:
        raise UserError(str(error)) from error
    except OmegaConfBaseException as error:
        raise UserError(str(error).split("\n")[0]) from error
    except CompactHydraException as error:
        cause = error.__cause__ or error
        raise UserError(str(cause)) from None
    return config


def build_plain(cls: type, node: DictConfig) -> Any:
    return cls(**cast("Mapping[str, Any]", OmegaConf.to_container(node, resolve=True)))


def _checked(group: str, node: DictConfig) -> DictConfig:
    """Merges a group into the dataclass named by its ``_target_``, which types and names every key."""
    spec = get_class(node["_target_"])
    schema = _schema(spec)
    values = {key: value for key, value in node.items() if key != "_target_"}
    try:
        checked = OmegaConf.merge(schema, values)
    except ConfigKeyError:
        names = [spec_field.name for spec_field in dataclasses.fields(spec)]
        unknown = next(key for key in values if key not in names)
        raise ValueError(_unknown(f"{group}.{unknown}", names)) from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{group}.{error.key}: {str(error).splitlines()[0]}") from None
    missing = OmegaConf.missing_keys(checked)
    if missing:
        raise ValueError("give a value to " + ", ".join(f"{group}.{key}" for key in sorted(missing)))
    return OmegaConf.create({"_target_": node["_target_"], **cast("dict[str, Any]", OmegaConf.to_container(checked))})


def _unknown(key: str, names: list[str]) -> str:
    """What to say of a full key whose last part is not one of the names at its place."""
    *parents, last = key.split(".")
    near = get_close_matches(last, names, n=1)
    hint = f"did you mean {'.'.join([*parents, near[0]])}?" if near else f"there are: {', '.join(names)}"
    return f"{key} does not exist; {hint}"


def explain(error: CompactHydraException) -> str:
    """One message for what the user can mend: Hydra's own, but for a key or value that does not fit."""
    cause = error.__cause__
    if not isinstance(cause, OmegaConfBaseException) or cause.full_key is None:
        return str(error)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        key, names = str(cause.full_key), [str(name) for name in cause.parent_node if name != "_target_"]
        is_open = key.split(".")[-2:-1] == ["options"]
        return f"{key} is not set yet; add it as +{key}=" if is_open else _unknown(key, names)
    return f"{cause.full_key}: {str(cause).splitlines()[0]}"


def check(config: Config) -> None:
    """What can be seen to be wrong without loading the model or the data."""
    positive = {"epochs": config.epochs, "batch_size": config.batch_size, "log_every_steps": config.log_every_steps}
    parallel = config.parallel
    positive |= {"eval_every_epochs": config.eval_every_epochs, "parallel.timeout_s": parallel.timeout_s}
    positive |= {
        f"parallel.{name}": getattr(parallel, name)
        for name in ("world_size", "device_memory_gib", "num_stages", "num_replicas", "num_microbatches", "num_chunks")
    }
    for name, value in positive.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be above 0")
    _one_of("precision", config.precision, PRECISIONS)
    _one_of("parallel.device", parallel.device, ("auto", "cpu", "cuda"))
    _check_cache(config.cache)
    _check_arrangement(parallel)
    if parallel.schedule in SKIPS_GRADIENTS:
        raise ValueError(
            f"parallel.schedule={parallel.schedule} leaves gradients out where a stage below is frozen, and torch does "
            f"not say so; choose one of {', '.join(SCHEDULES)}"
        )
    if parallel.schedule is not None:
        _one_of("parallel.schedule", parallel.schedule, SCHEDULES)
    if isinstance(config, WhatIf):
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
            raise ValueError(f"cache.{name}={value} is below 0; give the most that it may take, or 0 for none")
    if cache.variants < 1:
        raise ValueError(f"cache.variants={cache.variants} must be at least 1: the random draws of each sample")
    if cache.enabled and cache.memory_gib == cache.disk_gib == 0:
        raise ValueError("cache.memory_gib=0 and cache.disk_gib=0 leave no room; raise one of them, or give cache=off")


def _check_modality(model: Any, dataset: Any) -> None:
    if model.modality != dataset.modality:
        raise ValueError(
            f"{model.name} reads {model.modality}s and the dataset holds {dataset.modality}s; "
            f"choose a model for {dataset.modality}s (model={_MODELS[dataset.modality]}) or another dataset"
        )


def _check_what_if(config: WhatIf) -> None:
    if config.pipeline.schedule is not None:
        _one_of("pipeline.schedule", config.pipeline.schedule, ("gpipe", "1f1b"))
    if config.num_samples < config.batch_size:
        raise ValueError(
            f"num_samples={config.num_samples} must be at least batch_size={config.batch_size}: they are an epoch's"
        )
    config.cluster.speed(config.precision)  # refuses a precision whose speed is not known


def _check_arrangement(parallel: Parallel) -> None:
    _one_of("parallel.arrangement", parallel.arrangement, ARRANGEMENTS)
    if parallel.arrangement == "elastic":
        return
    for name in ("num_stages", "num_replicas"):
        if getattr(parallel, name) is not None:
            raise ValueError(
                f"parallel={parallel.arrangement} fixes the stages and replicas, and so does parallel.{name}="
                f"{getattr(parallel, name)}; drop it or take parallel=elastic"
            )
    if parallel.arrangement == "sharded":
        _check_sharded(parallel)
    if parallel.arrangement == "single" and parallel.world_size not in (None, 1):
        raise ValueError(
            f"parallel=single is one process, not parallel.world_size={parallel.world_size}; drop it or take "
            "parallel=data"
        )


def _check_sharded(parallel: Parallel) -> None:
    for name, given in (("schedule", parallel.schedule), ("num_chunks", parallel.num_chunks)):
        if given not in (None, 1):
            raise ValueError(
                f"parallel=sharded runs all layers on every device, without stages that parallel.{name}={given} could "
                "arrange; drop it or take parallel=pipeline"
            )


_MODELS = {"image": "vit_tiny, vit or deit", "text": "bert, roberta, distilbert or electra"}


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value} is unknown; choose one of {', '.join(choices)}")


def warnings(config: Config) -> list[str]:
    """Settings that have no effect, each with the reason."""
    parallel = config.parallel
    texts = []
    if config.cache.variants != 1 and config.cache.augmentation != "variants":
        texts.append(f"cache.variants={config.cache.variants} has no effect without cache.augmentation=variants")
    if not parallel.autopipe and config.cache.enabled and not config.freeze.never_freezes:
        texts.append("the cache has no effect with parallel.autopipe=false: the stages keep all their layers")
    if not parallel.autopipe and parallel.autodp and not config.freeze.never_freezes:
        texts.append("parallel.autodp has no effect with parallel.autopipe=false: no device becomes free")
    return texts


def as_plain(node: DictConfig) -> dict[str, Any]:
    """The resolved configuration as plain containers, for the record."""
    return cast("dict[str, Any]", OmegaConf.to_container(node, resolve=True))


def write_resolved(node: DictConfig, folder: Path) -> None:
    """Keeps the resolved configuration in the run folder."""
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(node, resolve=True))
