"""Refuses options of the section ``parallel`` that cannot be, alone or with others."""

from pathlib import Path

from pipetransformer.autocache.writable import check_writable
from pipetransformer.autopipe.constraints import PlanConstraints, check_constraints
from pipetransformer.autopipe.schedules import REFUSED, SCHEDULES
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import ARRANGEMENTS, TP_ALGORITHMS, Parallel
from pipetransformer.errors import InfeasiblePlan, UserError
from pipetransformer.mesh import REDUCE_DTYPES

MANY = 10**9  # layers or devices, where their number is not known yet


def check_parallel(config: Config) -> None:
    """Refuses whatever is wrong with the arrangement of devices, by the options alone.

    Raises:
        UserError: With the option, the reason and the remedy.
    """
    parallel = config.parallel
    one_of("parallel.device", parallel.device, ("auto", "cpu", "cuda"))
    _check_arrangement(parallel)
    _check_mesh(config)
    _check_chunks(config)
    _check_compile(config)
    if parallel.schedule in REFUSED:
        raise UserError(
            f"parallel.schedule={parallel.schedule} {REFUSED[parallel.schedule]}; choose one of {', '.join(SCHEDULES)}"
        )
    if parallel.schedule is not None:
        one_of("parallel.schedule", parallel.schedule, tuple(SCHEDULES))
    _check_plan(parallel, config.batch_size)


def _check_plan(parallel: Parallel, batch_size: int) -> None:
    """Refuses constraints that no model could meet, as far as the number of devices is known."""
    constraints = PlanConstraints(
        num_stages=parallel.num_stages,
        num_replicas=parallel.num_replicas,
        num_microbatches=parallel.num_microbatches,
        schedule=parallel.schedule,
        recompute=parallel.recompute,
        stages_per_rank=parallel.stages_per_rank,
    )
    try:
        check_constraints(constraints, range(MANY), parallel.world_size or MANY, batch_size)
    except InfeasiblePlan as error:
        raise UserError(in_options(error)) from None


def _check_arrangement(parallel: Parallel) -> None:
    one_of("parallel.arrangement", parallel.arrangement, ARRANGEMENTS)
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


def _check_mesh(config: Config) -> None:
    """Refuses what does not go with several ranks that run a stage together."""
    parallel = config.parallel
    one_of("parallel.tp_algorithm", parallel.tp_algorithm, TP_ALGORITHMS)
    one_of("parallel.reduce_dtype", parallel.reduce_dtype, REDUCE_DTYPES)
    if not parallel.splits_stages:
        return
    mesh, sizes = parallel.mesh, parallel.mesh_sizes  # which refuses what no mesh can be
    options = (f"parallel.{name}={'null' if size is None else size}" for name, size in sizes.items() if size != 1)
    given = " ".join(options)
    if parallel.arrangement in ("sharded", "single"):
        raise UserError(
            f"{given} lets several ranks run a stage together, and parallel={parallel.arrangement} does not; "
            "drop one of them"
        )
    if parallel.arrangement != "elastic" and None in sizes.values():
        raise UserError(
            f"parallel={parallel.arrangement} is one arrangement from start to end, and {given} leaves it "
            "open; give numbers, or take parallel=elastic"
        )
    if parallel.world_size is not None and mesh.num_ranks > parallel.world_size:
        raise UserError(
            f"{given} takes {mesh.num_ranks} processes, more than parallel.world_size="
            f"{parallel.world_size}; raise it or lower the others"
        )
    if config.compile:
        raise UserError(f"{given} does not go with compile=true, which no mesh has yet; drop one of them")
    if config.has_adapters and mesh.num_ranks > 1:
        raise UserError(f"{given} does not go with peft=, since no mesh splits layers with adapters; drop one of them")


def _check_chunks(config: Config) -> None:
    """Refuses what does not go with weights that lie in host memory."""
    parallel = config.parallel
    if parallel.device_chunk_gib is None:
        return
    given = f"parallel.device_chunk_gib={parallel.device_chunk_gib:g}"
    others = {
        "parallel=sharded, which has each layer in parts on all devices": parallel.arrangement == "sharded",
        "parallel.tp=, cp= and dp_shard=": parallel.splits_stages,
        "parallel.recompute=false: a layer's backward pass runs it again": parallel.recompute is False,
        "parallel.stages_per_rank= above 1": (parallel.stages_per_rank or 1) > 1,
        "compile=true": config.compile,
    }
    for name, is_given in others.items():
        if is_given:
            raise UserError(f"{given} does not go with {name}; drop one of them")
    if parallel.offload_path is not None:
        check_writable(Path(parallel.offload_path), _no_place_for_chunks)


def _no_place_for_chunks(path: Path, error: OSError) -> UserError:
    return UserError(
        f"parallel.offload_path={path} cannot be written ({error}); name another folder, or drop it to keep chunks in "
        "host memory"
    )


def _check_compile(config: Config) -> None:
    if config.compile and config.parallel.arrangement == "sharded":
        raise UserError(
            "compile=true does not go with parallel=sharded, which all-gathers a layer between the calls of its "
            "modules; drop one of them"
        )


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a value that is none of the choices."""
    if value not in choices:
        raise UserError(f"{name}={value} is unknown; choose one of {', '.join(choices)}")
