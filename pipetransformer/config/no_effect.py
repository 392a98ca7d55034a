"""Settings that have no effect, or make a run depend on its plans: each is told once, with the reason."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pipetransformer.config.schema import HALF_PRECISIONS, Config, SimulationConfig
from pipetransformer.config.sections import Cache
from pipetransformer.freeze.base import ON_UNFREEZE, FreezePolicy
from pipetransformer.freeze.schedule import FixedSchedule

_OF_STORES = ("memory_gib", "disk_gib", "storage", "augmentation")


def warnings(config: Config, num_steps: int | None = None, decision_every: int | None = None) -> list[str]:
    """Returns a text for each such setting.

    Args:
        num_steps: Optimizer steps of the run, where its data is known.
        decision_every: Those from one freeze decision to the next.
    """
    texts = [*_of_randomness(config), *_of_cache(config), *_of_freezing(config), *_own_rates(config.freeze)]
    texts += [*_of_decisions(config.freeze, num_steps, decision_every), *_of_the_rate(config, num_steps)]
    return [*texts, *_of_plans(config), *_of_a_run(config, num_steps)]


def _of_randomness(config: Config) -> list[str]:
    texts = []
    on_mesh = config.parallel.splits_stages and config.parallel.mesh.num_ranks > 1
    if config.randomness == "device" and config.parallel.arrangement == "elastic" and not on_mesh:
        texts.append(
            "randomness=device lets dropout follow the division of batches into replicas and micro-batches, so the "
            "result depends on the plans; parallel=data keeps one division"
        )
    if config.randomness == "device" and config.parallel.splits_stages:
        texts.append("randomness=device has no effect on a mesh: its ranks draw their parts of what a sample draws")
    return texts


def _of_cache(config: Config) -> list[str]:
    cache, texts = config.cache, []
    if cache.variants != 1 and cache.augmentation != "variants":
        texts.append(f"cache.variants={cache.variants} has no effect without cache.augmentation=variants")
    if cache.path is not None and not cache.enabled:
        texts.append(f"cache.path={cache.path} has no effect with cache=off: nothing is read or stored there")
    elif cache.path is not None and cache.disk_gib == 0:
        texts.append("cache.path has no effect with cache.disk_gib=0: only what lies on disk outlives the run")
    elif cache.path is not None and config.freeze.never_freezes:
        texts.append(f"cache.path={cache.path} has no effect with freeze=none: of layers that train nothing is stored")
    texts += [] if cache.enabled else _given(cache, "cache", _OF_STORES, "with cache=off")
    if cache.wait_s != Cache().wait_s and not (cache.path and config.freeze.is_static):
        texts.append(
            f"cache.wait_s={cache.wait_s:g} has no effect without cache.path= and a policy that freezes no more after "
            "the start, as freeze=prefix: no other run waits for a store"
        )
    if not config.parallel.autopipe and cache.enabled and not config.freeze.never_freezes:
        texts.append("the cache has no effect with parallel.autopipe=false: the stages keep all their layers")
    return texts


def _given(options: Any, section: str, names: Sequence[str], when: str) -> list[str]:
    """Returns a text for each of these options that has been given."""
    return [f"{name}={value} has no effect {when}" for name, value in _changed(options, section, names).items()]


def _changed(options: Any, section: str, names: Sequence[str]) -> dict[str, Any]:
    """Returns the values of those options of a section that are not the usual ones."""
    usual = {each.name: each.default for each in fields(options)}
    return {f"{section}.{name}": getattr(options, name) for name in names if getattr(options, name) != usual[name]}


def _of_freezing(config: Config) -> list[str]:
    freeze, texts = config.freeze, []
    if freeze.guard is not None and freeze.never_freezes:
        texts.append("freeze.guard has no effect with freeze=none: nothing ever freezes")
    elif freeze.guard is not None and freeze.is_static:
        texts.append("freeze.guard has no effect with this policy: nothing freezes after the start")
    for name in ("target_fraction", "target_seconds"):
        if getattr(freeze, name) is not None and freeze.is_static:
            texts.append(f"freeze.{name} has no effect: this policy decides nothing after the start")
    if freeze.guard is None:
        texts += _given(config.guard, "guard", ("freeze",), "without freeze.guard=, the fall that is taken")
    if freeze.on_unfreeze != ON_UNFREEZE[0] and not config.may_unfreeze:
        texts.append(
            f"freeze.on_unfreeze={freeze.on_unfreeze} has no effect: neither the policy nor the guard of a freeze "
            "(freeze.guard=) ever unfreezes a block"
        )
    return texts


def _of_decisions(freeze: FreezePolicy, num_steps: int | None, every: int | None) -> list[str]:
    """Tells that a run has no freeze decision, as one of a single epoch with ``interval=null``, or too few of them."""
    has_target = freeze.target_fraction is not None or freeze.target_seconds is not None  # it freezes between decisions
    if freeze.is_static or has_target or num_steps is None or every is None:
        return []
    interval = "null, once per epoch," if freeze.interval is None else f"{freeze.interval:g}"
    if num_decisions := (num_steps - 1) // every:
        return _cut_off(freeze, num_decisions, interval)
    return [
        f"no block freezes after the start: with freeze.interval={interval} the first decision would come after step "
        f"{every:,}, and the run has {num_steps:,}; give a smaller fraction of the run, as 0.1"
    ]


def _cut_off(freeze: FreezePolicy, num_decisions: int, interval: str) -> list[str]:
    """Tells what a policy does not come to in the decisions that a run has.

    Args:
        interval: The fraction of the run between two of them, in words.
    """
    if freeze.decisions_needed > num_decisions:
        return [
            f"no block freezes after the start: this policy needs {freeze.decisions_needed} decisions to freeze one, "
            f"and with freeze.interval={interval} the run has {num_decisions}; give a smaller fraction of the run, as "
            f"{1 / (freeze.decisions_needed + 1):.2g}"
        ]
    listed = list(freeze.num_frozen) if isinstance(freeze, FixedSchedule) else [0]
    if listed[-1] > listed[:num_decisions][-1]:
        return [
            f"freeze.num_frozen={listed} stops at {listed[num_decisions - 1]}: with freeze.interval={interval} the run "
            f"has {num_decisions} of its {len(listed)} decisions; leave out the others, or give a smaller fraction of "
            "the run"
        ]
    return []


def _own_rates(freeze: FreezePolicy) -> list[str]:
    """Tells that learning rates do not follow a prefix that somebody else holds."""
    given = [name for name in ("guard", "target_fraction", "target_seconds") if getattr(freeze, name) is not None]
    if not (freeze.has_own_rates and given):
        return []
    return [
        f"freeze.{given[0]} changes what freezes, and not the rates of this policy: a block whose rate is zero by then "
        "learns no more, frozen or not"
    ]


def _of_the_rate(config: Config, num_steps: int | None) -> list[str]:
    optim, defaults = config.optim, {each.name: each.default for each in fields(config.optim)}
    used = {
        "final_fraction": ("linear", "cosine", "polynomial"),
        "power": ("polynomial",),
        "gamma": ("step",),
    }
    texts = []
    if num_steps is not None and (optim.warmup_steps or 0) > num_steps:
        texts.append(
            f"optim.warmup_steps={optim.warmup_steps} is longer than the run of {num_steps:,} steps, whose rate never "
            "comes to its peak; give fewer, or a fraction in their place as optim.warmup=0.1"
        )
    return texts + [
        f"optim.{name}={getattr(optim, name):g} has no effect with optim.schedule={optim.schedule}: it is of "
        f"{' and '.join(schedules)}"
        for name, schedules in used.items()
        if getattr(optim, name) != defaults[name] and optim.schedule not in schedules
    ]


def _of_plans(config: Config) -> list[str]:
    parallel, texts = config.parallel, []
    if parallel.offload_path is not None and parallel.device_chunk_gib is None:
        texts.append(f"parallel.offload_path={parallel.offload_path} has no effect without parallel.device_chunk_gib=")
    if parallel.tp == 1 and parallel.tp_algorithm != "1d":
        texts.append(f"parallel.tp_algorithm={parallel.tp_algorithm} has no effect without parallel.tp= above 1")
    sums_more_than_two = any(size not in (1, 2) for size in parallel.mesh_sizes.values())
    if parallel.reduce_dtype != "float32" and not (sums_more_than_two and config.precision in HALF_PRECISIONS):
        texts.append(
            f"parallel.reduce_dtype={parallel.reduce_dtype} has no effect without a precision of 16 bits, and "
            "parallel.tp=, cp= or dp_shard= above 2: the sum of two numbers is rounded once in any case"
        )
    if config.baseline and parallel.arrangement == "sharded":
        texts.append("baseline=true has no effect with parallel=sharded: no sharded run goes to another arrangement")
    elif config.baseline and config.freeze.frozen_at_start:
        texts.append("baseline=true has no effect: static plans freeze nothing, and blocks are frozen from the start")
    if not parallel.autopipe and parallel.autodp and not config.freeze.never_freezes:
        texts.append("parallel.autodp has no effect with parallel.autopipe=false: no device becomes free")
    return texts


def _of_a_run(config: Config, num_steps: int | None) -> list[str]:
    evaluate, checkpoint, guard, texts = config.evaluate, config.checkpoint, config.guard, []
    freeze = config.freeze
    if evaluate.min_delta and evaluate.patience is None:
        texts.append(f"evaluate.min_delta={evaluate.min_delta} has no effect without evaluate.patience=")
    if evaluate.patience is not None and evaluate.every_epochs is None and evaluate.every_steps is None:
        texts.append(
            f"evaluate.patience={evaluate.patience} has no effect with evaluate.every_epochs=null: only the end of the "
            "run is evaluated; give evaluate.every_steps= or evaluate.every_epochs="
        )
    if evaluate.every_epochs is not None and evaluate.every_epochs > config.epochs:
        texts.append(
            f"evaluate.every_epochs={evaluate.every_epochs} has no effect with epochs={config.epochs}: the end of the "
            "run is evaluated anyway"
        )
    if not checkpoint.enabled:
        texts += _given(checkpoint, "checkpoint", ("every_steps", "every_minutes", "keep"), "with checkpoint=off")
    saved_every = checkpoint.every_steps if checkpoint.enabled else None
    done_every = ("evaluate", evaluate.every_steps, "evaluated"), ("checkpoint", saved_every, "saved")
    for section, every, done in done_every:
        if every is not None and num_steps is not None and every > num_steps:
            texts.append(
                f"{section}.every_steps={every} has no effect: the run has {num_steps:,} steps, after the last of "
                f"which it is {done} anyway"
            )
    if guard.max_norm_ratio is None:
        texts += _given(guard, "guard", ("exploding",), "without guard.max_norm_ratio=")
    actions = [guard.not_finite, *([] if guard.max_norm_ratio is None else [guard.exploding])]
    if "skip" not in actions:
        texts += _given(guard, "guard", ("max_skips",), "where guard.not_finite= and guard.exploding= skip no step")
    if "roll_back" not in actions and freeze.guard is None:
        texts += _given(guard, "guard", ("max_rollbacks",), "without guard.not_finite=roll_back or freeze.guard=")
    if config.launch.shrink and config.num_restarts == 0:
        reason = "launch.max_restarts=0" if config.launch.max_restarts == 0 else "checkpoint=off"
        texts.append(f"launch.shrink=true has no effect with {reason}: no rank is started again")
    if config.resume.allow and config.resume.run is None:
        allowed = ",".join(config.resume.allow)
        texts.append(f"resume.allow=[{allowed}] has no effect without resume=: the run starts with its own settings")
    return texts


def not_counted(config: SimulationConfig) -> list[str]:
    """Returns the options that change the time of a run, and not that of its simulation."""
    budgets = ("memory_gib", "disk_gib", "storage") if config.cache.enabled and not config.freeze.never_freezes else ()
    given = _changed(config.cache, "cache", budgets)
    others = {"batching": "uniform", "randomness": "sample", "compile": False, "baseline": False}
    given |= {name: getattr(config, name) for name, default in others.items() if getattr(config, name) != default}
    return [f"{name}={str(value).lower()}" for name, value in given.items()]
