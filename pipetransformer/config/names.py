"""The options behind other names: of the fields that errors of other rooms name, and of other tools' arguments."""

from collections.abc import Mapping
from dataclasses import fields

from pipetransformer.config.sections import Cache, Parallel
from pipetransformer.errors import UserError, name_fields


def of_section(section: str, spec: type) -> dict[str, str]:
    """Maps the fields of a section of the configuration to its options."""
    return {field.name: f"{section}.{field.name}" for field in fields(spec)}


ACCUMULATION = (
    "parallel.num_microbatches=<number> is gradient accumulation; batch_size is the global batch, which stays as it is"
)
OF_OTHER_TOOLS = dict.fromkeys(
    ("accumulate", "accumulation", "gradient_accumulation", "gradient_accumulation_steps", "accumulate_grad_batches"),
    ACCUMULATION,
) | {
    theirs: f"{ours} sets it"
    for ours, names in {
        "model.name=<name or folder>": ("model_name_or_path", "model_id"),
        "dataset.path=<file or folder>": ("train_file", "data_dir", "data_path"),
        "dataset.max_length=<tokens>": ("max_seq_length", "max_seq_len", "max_length"),
        "epochs=<number>": ("num_train_epochs", "max_epochs", "max_steps"),
        "batch_size=<samples of all devices together>": (
            "per_device_train_batch_size", "train_batch_size", "global_batch_size",
        ),
        "optim.lr=<peak rate>": ("learning_rate",),
        "optim.warmup=<fraction of the run>": ("warmup_ratio",),
        "optim.schedule=<name>": ("lr_scheduler_type", "lr_scheduler"),
        "optim.clip_norm=<norm>": ("max_grad_norm", "gradient_clip_val"),
        "precision=<bfloat16 or float16>": ("bf16", "fp16", "mixed_precision"),
        "compile=true": ("torch_compile",),
        "parallel.recompute=true": ("gradient_checkpointing", "activation_checkpointing"),
        "parallel.world_size=<number>": (
            "devices", "num_devices", "gpus", "num_gpus", "num_processes", "nproc_per_node",
        ),
        "parallel.tp=<ranks>": ("tensor_parallel_size", "tp_size"),
        "parallel=sharded": ("fsdp", "deepspeed"),
        "parallel=<arrangement>": ("strategy",),
        "loader.num_workers=<number>": ("dataloader_num_workers",),
        "evaluate.every_steps=<number>": ("eval_steps", "val_check_interval"),
        "checkpoint.every_steps=<number>": ("save_steps",),
        "checkpoint.keep=<number>": ("save_total_limit",),
        "log_every_steps=<number>": ("logging_steps", "log_every_n_steps"),
        "resume=<folder>": ("resume_from_checkpoint", "ckpt_path"),
        "logger=<name>": ("report_to",),
        "hydra.run.dir=<folder>": ("output_dir", "run_dir", "save_dir", "default_root_dir"),
    }.items()
    for theirs in names
}  # fmt: skip
"""For arguments of transformers' Trainer, Lightning, accelerate and others, what sets the same here."""

OPTIONS = of_section("parallel", Parallel) | of_section("cache", Cache) | {"num_devices": "parallel.world_size"}


def in_options(error: BaseException | str, names: Mapping[str, str] = OPTIONS) -> str:
    """Returns the message of an error with options in place of fields.

    Args:
        error: An error, or its message with fields in backticks; text without them stays as it is.
        names: The option of each field.
    """
    message = error.message if isinstance(error, UserError) else str(error)
    return name_fields(message, names)
