"""The code of a user's own classes with all that it names, and the values of their objects: an edit is noticed."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipetransformer.autocache.fingerprint import raw_bytes
from pipetransformer.errors import StaleStore

HERE = __name__.partition(".")[0]
OF_THE_HEAD = {"id2label", "label2id", "num_labels", "problem_type", "num_classes"}


def package_of(one: Any) -> str:
    """Returns the package that defines a class or function."""
    return (one.__module__ or "").partition(".")[0]


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; ``None`` for code that changes without its version."""
    version = getattr(sys.modules.get(package), "__version__", None)
    return version if _is_installed(package) and isinstance(version, str) else None


def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and Path(file).is_relative_to(sysconfig.get_path("purelib"))


def source_code(one: type | FunctionType) -> str:
    """Returns the source of a class or function.

    Raises:
        StaleStore: It cannot be read, so that a change of it would go unnoticed.
    """
    try:
        return inspect.getsource(one)
    except (OSError, TypeError) as error:
        raise StaleStore(
            f"the code of {one.__qualname__} cannot be read ({error}), so that stored features of an older one could "
            "not be told apart: define it in a file, or set `path`=null"
        ) from error


def own_code(ones: Iterable[type | FunctionType]) -> list[str]:
    """Returns the sources of classes and functions, and of what they name: own functions, classes and plain values.

    Raises:
        StaleStore: One of them cannot be read.
    """
    found = _Found()
    for one in ones:
        found.add(one)
    return sorted(found.texts)


class _Found:
    """Sources that were found so far, each followed to what it names."""

    def __init__(self) -> None:
        self.texts, self._seen = set[str](), set[int]()

    def add(self, one: type | FunctionType) -> None:
        if id(one) in self._seen:
            return
        self._seen.add(id(one))
        self.texts.add(source_code(one))
        if package_of(one) == HERE:  # counts by its classes alone
            return
        if isinstance(one, FunctionType):
            self._follow(one)
            return
        for base in one.__bases__:
            self._refer("", base)
        for function in filter(None, map(_function_in, vars(one).values())):
            self._follow(function)

    def _follow(self, function: FunctionType) -> None:
        code = function.__code__
        names = _names(code)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, ModuleType) and _is_own(value.__name__.partition(".")[0]):
                for inner in sorted(names & vars(value).keys()):
                    self._refer(inner, vars(value)[inner])
            else:
                self._refer(name, value)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and _has_value(cell):
                self._refer(name, cell.cell_contents)

    def _refer(self, name: str, value: Any) -> None:
        value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
        if isinstance(value, type | FunctionType):
            if _is_own(package_of(value)):
                self.add(value)
        elif not isinstance(value, ModuleType) and (plain := describe(value)) is not None:
            self.texts.add(f"{name} = {plain}")


def _is_own(package: str) -> bool:
    """Returns whether a package is the user's own, whose code changes without a version."""
    is_known = package in ("", HERE, "torch") or package in sys.stdlib_module_names
    return not (is_known or _is_installed(package))


def _names(code: CodeType) -> set[str]:
    """Returns the names that code uses, that of functions inside included."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _has_value(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it is assigned later
        return False


def _function_in(member: Any) -> FunctionType | None:
    """Returns the function of a class's member."""
    inner: Callable[..., Any] | None = member
    if isinstance(member, staticmethod | classmethod):
        inner = member.__func__
    elif isinstance(member, property):
        inner = member.fget
    elif isinstance(member, cached_property):
        inner = member.func
    inner = inspect.unwrap(inner) if isinstance(inner, FunctionType) else None
    return inner if isinstance(inner, FunctionType) else None


def describe(value: Any, inside: frozenset[int] = frozenset()) -> object:
    """Returns a value that its text describes wholly, or ``None``.

    Args:
        inside: Identities of what the value lies in.

    Raises:
        StaleStore: It is a function whose code cannot be read.
    """
    if id(value) in inside:
        return None
    inside |= {id(value)}
    if isinstance(value, Enum | torch.dtype | torch.device | complex | bytes | range | slice):
        return str(value)
    if isinstance(value, bool | int | float | str | torch.Size):
        return value
    if isinstance(value, np.generic | np.ndarray):
        value = torch.from_numpy(np.array(value)) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, tuple | list):
        return [describe(item, inside) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(describe(item, inside)) for item in value)
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return _function(value)
    if isinstance(value, partial):  # calls a block with more than its input
        return [describe(each, inside) for each in (value.func, *value.args, value.keywords)]
    return _object(value, inside)


def _tensor(value: Tensor) -> list[object]:
    about: list[object] = [str(value.dtype), list(value.shape)]
    if value.is_meta:
        return about
    own = value.detach().cpu()
    dense = own if own.layout == torch.strided else own.to_dense()
    plain = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return [*about, blake2b(raw_bytes(plain), digest_size=8).hexdigest()]


def _function(value: Any) -> object:
    function = inspect.unwrap(getattr(value, "__func__", value))
    if isinstance(function, FunctionType) and _is_own(package_of(function)):
        return [value.__qualname__, *own_code([function])]
    return value.__qualname__


def _object(value: Any, inside: frozenset[int]) -> object:
    """Describes a mapping, a configuration, or an object of an own class with its code; ``None`` for any other."""
    if isinstance(value, nn.Module):
        return None
    if hasattr(value, "to_dict"):  # a configuration of transformers, whose dict lacks the attention implementation
        config = value.to_dict() | {"attention": getattr(value, "_attn_implementation", "")}
        return {name: config[name] for name in sorted(config) if name not in OF_THE_HEAD}
    if isinstance(value, Mapping):
        return [*_members({str(name): each for name, each in value.items()}, inside)]
    code = own_code([type(value)]) if _is_own(package_of(type(value))) else []
    if is_dataclass(value) and not isinstance(value, type):
        members = {field.name: getattr(value, field.name) for field in fields(value)}
    elif code or isinstance(value, SimpleNamespace):
        members = getattr(value, "__dict__", {})
    else:
        return None
    return [type(value).__qualname__, *code, *_members(members, inside)]


def _members(members: Mapping[str, Any], inside: frozenset[int]) -> Iterator[object]:
    found = {name: describe(members[name], inside) for name in sorted(members.keys() - OF_THE_HEAD)}
    yield from ([name, each] for name, each in found.items() if each is not None)
