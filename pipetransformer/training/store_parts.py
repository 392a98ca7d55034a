"""The parts that the samples of a store depend on, by names that a user knows, to say what makes a store stale."""

from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pipetransformer.autocache.about import DATASET
from pipetransformer.config.schema import Config
from pipetransformer.report.secrets import redact

TABLES = {".arrow", ".conll", ".conllu", ".csv", ".gz", ".json", ".jsonl", ".parquet", ".tsv", ".txt"}
MAX_READ = 64 << 20  # bytes of a file that is known by its content; a larger one is known by size and time
MAX_LISTED = 50_000  # files of a folder of pictures that are looked at
OF_SAMPLES = {
    "dataset": (
        "augment", "completion", "config", "delimiter", "eval_fraction", "eval_path", "eval_split", "hub", "hub_name",
        "image", "image_column", "label", "label_column", "label_separator", "labels", "long", "max_eval_samples",
        "max_length", "max_train_samples", "pack", "prompt", "revision", "root", "sample_by", "separator", "stride",
        "tags", "task", "text", "tokens", "train_split", "transforms", "validation_fraction", "version_2",
    ),
    "model": ("image_size", "name", "num_channels", "pretrained"),
}  # fmt: skip


def named_parts(config: Config, tokenizer: Any = None) -> dict[str, str]:
    """Returns the parts by name: ``dataset``, ``file <name>``, ``tokenizer``, ``revision`` and options.

    Args:
        config: Of the run.
        tokenizer: Of the model; ``None`` for pictures.
    """
    dataset, parts = config.dataset, dict[str, str]()
    parts[DATASET] = type(dataset).__name__ + " " + str(Path(dataset.path).resolve() if dataset.path else dataset.name)
    if dataset.path is not None:
        with suppress(OSError):  # a file that cannot be read is told where the data is loaded
            parts |= {f"file {name}": digest for name, digest in _files(Path(dataset.path))}
    if tokenizer is not None:
        parts["tokenizer"] = _tokenizer(tokenizer)
    if (found := revision(config.model.name)) is not None:
        parts["revision of the model"] = found
    for group, names in OF_SAMPLES.items():
        spec = getattr(config, group)
        parts |= {f"{group}.{name}": str(getattr(spec, name)) for name in names if hasattr(spec, name)}
    return redact(parts)


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the tables of a dataset with digests of their content; of any other files one digest of all."""
    if path.is_file():
        yield path.name, _digest(path)
        return
    tables = [file for file in sorted(path.iterdir()) if file.suffix in TABLES and file.is_file()]
    yield from ((file.name, _digest(file)) for file in tables)
    if not tables:
        stamps = blake2b(digest_size=8)
        for number, file in enumerate(sorted(path.rglob("*"))):
            if number < MAX_LISTED and file.is_file():
                stamps.update(f"{file.relative_to(path)} {_stamp(file)}\n".encode())
        yield f"a file in {path.name}", stamps.hexdigest()


def _digest(file: Path) -> str:
    if file.stat().st_size > MAX_READ:
        return _stamp(file)
    return blake2b(file.read_bytes(), digest_size=8).hexdigest()


def _stamp(file: Path) -> str:
    facts = file.stat()
    return f"{facts.st_size} bytes of {facts.st_mtime_ns}"


def _tokenizer(tokenizer: Any) -> str:
    """Returns a digest of all that a fast tokenizer does, its special tokens included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(tokenizer)
    return blake2b(f"{words} {tokenizer.special_tokens_map}".encode(), digest_size=8).hexdigest()


def revision(name: str) -> str | None:
    """Returns what tells states of a model apart: of a folder its files, of the hub the commit that is here."""
    for scheme in ("local-dir:", "hf-hub:", "hf_hub:"):  # timm's
        name = name.removeprefix(scheme)
    folder = Path(name)
    if folder.is_dir():
        files = (file for file in sorted(folder.iterdir()) if file.is_file())
        return blake2b("\n".join(f"{file.name} {_stamp(file)}" for file in files).encode(), digest_size=8).hexdigest()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, _, wanted = name.partition("@")
    if "/" not in repository:
        return None
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=wanted or None)
    except HFValidationError:  # a name that the model's library alone knows
        return None
    return Path(found).parent.name if isinstance(found, str) else None
