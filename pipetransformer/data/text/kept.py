"""Tokenised texts that are kept between runs, and shared by the ranks of one.

They lie in the cache of the ``datasets`` library, under a digest of all that they depend on: the texts themselves, the
tokenizer, and the versions of the libraries. The first process that needs them makes and writes them; all others map
the same files into memory::

    <cache of datasets>/pipetransformer/tokens/
      <digest>/            tokens.ids.values.npy, tokens.ids.starts.npy, ...
      <digest>.lock        held by the process that makes them
      <digest>.incomplete  until all files are there; one that was killed leaves it to the next

An edited text or tokenizer has another digest. What is there may be deleted at any time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from filelock import FileLock, Timeout

from pipetransformer.data.base import Digest
from pipetransformer.data.hub import cache_folder
from pipetransformer.data.text.split import padding_id
from pipetransformer.errors import UserError

VERSION = 2  # change it with what the tokenising functions compute, or old tokens are read
LOCK_TIMEOUT_S = 3600.0  # of one process for another one that tokenises the same texts
LIBRARIES = ("tokenizers", "transformers")
SETTINGS = ("truncation_side", "model_input_names", "eos_token_id", "split_special_tokens")
T = TypeVar("T")


def kept(tokenize: Callable[..., T], texts: Callable[[], Iterable[Any]], tokenizer: Any, *options: int) -> T:
    """Returns ``tokenize(texts(), tokenizer, *options)``, computed once for all processes and runs.

    Args:
        tokenize: Computes a dataclass of arrays, integers and further such dataclasses.
        texts: Returns strings in nested iterables or dataclasses, the same ones whenever it is called.
        tokenizer: A fast tokenizer of transformers.
        options: Further arguments of ``tokenize``.

    Raises:
        UserError: From ``tokenize``, or another process takes too long.
    """

    def make() -> T:
        return tokenize(texts(), tokenizer, *options)

    kind, named = get_type_hints(tokenize)["return"], _digest(tokenize.__name__, texts(), tokenizer, options)
    if named is None:
        return make()
    folder = cache_folder() / "pipetransformer" / "tokens" / named
    for _ in range(2):
        made = None if folder.is_dir() else _make_once(folder, make)
        if made is not None:
            return made
        try:
            return _read(kind, folder, "tokens")
        except (OSError, ValueError, EOFError):  # a file is missing, or shorter than it was
            shutil.rmtree(folder, ignore_errors=True)
    return make()


def _digest(kind: str, texts: Iterable[Any], tokenizer: Any, options: tuple[int, ...]) -> str | None:
    """Returns a digest of all that tokens depend on; ``None`` for a tokenizer with code of its own."""
    digest = Digest("tokenised texts")
    digest.add(VERSION, kind, padding_id(tokenizer), *options, *map(metadata.version, LIBRARIES))
    content = _content(tokenizer)
    if content is None:
        return None
    digest.add(content)
    _add_texts(digest, texts)
    return digest.hex()


def _content(tokenizer: Any) -> bytes | None:
    """Returns the content of a tokenizer's files, as they were read."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # each call sets both anew; here they would be those of the last one
    backend.no_padding()
    settings = {name: getattr(tokenizer, name, None) for name in SETTINGS}
    try:
        return f"{type(tokenizer).__qualname__} {settings} {backend.to_str()}".encode()
    except Exception:  # the library's own: a part that is written in Python cannot be serialised
        return None


def _add_texts(digest: Digest, value: Any) -> None:
    """Adds strings in their nested order, and where each of them and each list ends."""
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, str):
        digest.add(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, int):
        digest.add(value)
    elif isinstance(value, list) and all(isinstance(text, str) for text in value):
        digest.add(np.array([len(text) for text in value], dtype=np.int64))
        digest.add("".join(value).encode("utf-8", "surrogatepass"))
    else:
        for each in value:
            digest.add("next")
            _add_texts(digest, each)
        digest.add("end")


def _make_once(folder: Path, make: Callable[[], T]) -> T | None:
    """Makes and writes what is kept, unless another process has meanwhile; returns it where it cannot be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S)
        lock.acquire()
    except Timeout as error:
        raise UserError(f"another process has held {error.lock_file} for {LOCK_TIMEOUT_S:.0f} s; end it") from None
    except OSError:
        return make()
    try:
        if folder.is_dir():
            return None
        made = make()
        return None if _write(made, folder) else made
    finally:
        lock.release()


def _write(value: Any, folder: Path) -> bool:
    """Writes all files of a folder, or nothing where there is no room."""
    incomplete = folder.with_suffix(".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    try:
        incomplete.mkdir()
        for name, array in _arrays(value, "tokens").items():
            np.save(incomplete / f"{name}.npy", array, allow_pickle=False)
        incomplete.rename(folder)
    except OSError:
        return False
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
    return True


def _arrays(value: Any, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of nested dataclasses by their path; ``None`` has none."""
    if is_dataclass(value):
        parts = (_arrays(getattr(value, each.name), f"{name}.{each.name}") for each in fields(value))
        return {path: array for part in parts for path, array in part.items()}
    return {} if value is None else {name: np.asarray(value)}


def _read(kind: Any, folder: Path, name: str) -> Any:
    """Reads what :func:`_write` has written; arrays stay in their files until they are used."""
    if get_origin(kind) is UnionType:  # with None
        return _read(get_args(kind)[0], folder, name) if any(folder.glob(f"{name}.*")) else None
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{each.name: _read(hints[each.name], folder, f"{name}.{each.name}") for each in fields(kind)})
    array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return array if kind is np.ndarray else array.tolist()
