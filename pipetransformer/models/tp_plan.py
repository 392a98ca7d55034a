"""How the parameters of a layer are split over the ranks of a mesh: rules by the names of its modules.

The words are those of transformers' ``base_model_tp_plan``. A plan names every module that has parameters of its own
or mixes the columns of its input; one that is not named is refused, so that a new kind of block cannot slip through::

    {"attention.self.query": "colwise", "attention.output.dense": "rowwise", "*.LayerNorm": "norm"}

A name may have ``*`` for any part of it. The first rule that fits counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.mesh import Box, Style


@dataclass(frozen=True)
class Heads:
    """Integer attributes of an attention module that count its heads or their width: each rank has its part."""

    attributes: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """Parameters of the embedding that add to its output, and the dimension of each that is the model's width."""

    dims: Mapping[str, int]


Rule = str | Heads | Column
"""``colwise``, ``rowwise``, ``packed_colwise:3`` (three matrices in one), ``norm``, ``column_norm`` (in the embedding),
``embedding``, ``hidden`` (a vector as wide as the model), ``replicated``; or one of the classes above."""
TpPlan = Mapping[str, Rule]


@dataclass(frozen=True)
class Part:
    """The part of a parameter that a rank has.

    Attributes:
        style: By which the mesh splits it.
        dims: The dimensions of the two spans of a box; ``None`` for one that the parameter lacks.
        groups: Matrices that are packed in the first of them; each is cut by itself.
    """

    style: Style
    dims: tuple[int | None, int | None] = (0, 1)
    groups: int = 1

    def cut(self, whole: Tensor, box: Box) -> Tensor:
        """Returns the part of a whole tensor that is in a box, as a view or a copy."""
        shape = list(whole.shape)
        for dim, groups, start, end in self._ranges(whole.shape, box):
            shape[dim] = groups * (end - start)
        return self._view(whole, box).reshape(shape)

    def paste(self, whole: Tensor, box: Box, own: Tensor) -> None:
        """Copies a part to its place in the whole tensor."""
        view = self._view(whole, box)
        view.copy_(own.reshape(view.shape))

    def _view(self, whole: Tensor, box: Box) -> Tensor:
        """Returns the part as a view, in which a packed dimension is two."""
        for dim, groups, start, end in reversed(self._ranges(whole.shape, box)):  # those before keep their numbers
            whole, dim = (whole, dim) if groups == 1 else (whole.unflatten(dim, (groups, -1)), dim + 1)
            whole = whole.narrow(dim, start, end - start)
        return whole

    def _ranges(self, shape: Sequence[int], box: Box) -> list[tuple[int, int, int, int]]:
        """Returns each dimension that is cut, the matrices in it, and from where to where it is cut in each of them."""
        found: list[tuple[int, int, int, int]] = []
        for (first, last), dim, groups in zip(box, self.dims, (self.groups, 1), strict=True):
            if dim is not None:
                size = shape[dim] // groups
                start, end = (edge.numerator * size / edge.denominator for edge in (first, last))
                assert start % 1 == end % 1 == 0, (tuple(shape), box)
                if (start, end) != (0, size):
                    found.append((dim, groups, int(start), int(end)))
        return found


WHOLE_PART = Part("whole", (None, None))
"""The part of a parameter that no mesh splits, and of a buffer."""
_LINEAR: dict[str, tuple[Style, Style]] = {"colwise": ("colwise", "inner"), "rowwise": ("rowwise", "hidden")}
_VECTORS: dict[str, Style] = {"norm": "hidden", "hidden": "hidden", "column_norm": "column", "replicated": "whole"}


def parts(module: nn.Module, plan: TpPlan) -> dict[str, Part]:
    """Returns the part of each parameter of a layer's module, by name.

    Raises:
        UserError: A parameter has no rule.
    """
    return {name: part for path, rule in ruled(module, plan) for name, part in _parts(module, path, rule)}


def ruled(module: nn.Module, plan: TpPlan) -> Iterator[tuple[str, Rule]]:
    """Yields the path of each module that has a rule, with the rule.

    Raises:
        UserError: A module with parameters of its own, or a norm, has none; or it has one that does not exist.
    """
    for path, child in module.named_modules():
        rule = _rule(path, plan)
        own = [name for name, _ in child.named_parameters(recurse=False)]
        needs_rule = bool(own) or _is_norm(child)
        if rule is not None and needs_rule != isinstance(rule, Heads):
            _check_rule(path, child, rule, own)
            yield path, rule
        elif needs_rule:
            raise _without_rule(path, child, own)


def _check_rule(path: str, module: nn.Module, rule: Rule, own: Sequence[str]) -> None:
    if isinstance(rule, Column) and (others := [name for name in own if name not in rule.dims]):
        raise _without_rule(path, module, others)
    kinds = (*_LINEAR, "embedding", *_VECTORS)
    if isinstance(rule, str) and kind_of_rule(rule)[0] not in kinds:
        raise UserError(f"tp_plan has {path}: {rule}, which is no rule; choose one of {', '.join(kinds)}")


def check_columns(module: nn.Module, plan: TpPlan) -> None:
    """Refuses modules that mix the columns of their input, and that the plan does not name.

    They are run for it, which takes more time than all else here; once for a model is enough.

    Raises:
        UserError: There is one.
    """
    for path, child in module.named_modules():
        is_plain = next(child.parameters(recurse=False), None) is None
        if is_plain and _rule(path, plan) is None and mixes_columns(child):
            raise _without_rule(path, child, [])


def _rule(path: str, plan: TpPlan) -> Rule | None:
    return next((rule for pattern, rule in plan.items() if fnmatchcase(path, pattern)), None)


def _without_rule(path: str, module: nn.Module, own: Sequence[str]) -> UserError:
    what = f"parameters {', '.join(own)}" if own else "which mixes the columns of its input"
    return UserError(
        f"{type(module).__name__} ({path or 'the layer itself'}, {what}) has no rule for tensor parallelism; "
        "run with parallel.tp=1 parallel.cp=1 parallel.dp_shard=1, or name it in its layer's tp_plan"
    )


def _is_norm(module: nn.Module) -> bool:
    """Returns whether a module, which may have no parameters, normalizes a width of its own."""
    return isinstance(module, nn.GroupNorm) or hasattr(module, "normalized_shape")


def mixes_columns(module: nn.Module) -> bool:
    """Returns whether a module without parts gives other outputs for the halves of a width than for the whole of it.

    Activations, dropout in evaluation mode and the like do not. A module that does not run on one tensor counts as one
    that does not.
    """
    if next(module.children(), None) is not None:
        return False
    if _is_norm(module):
        return True
    run, x = copy.copy(module).eval(), torch.linspace(-2, 3, 64).sin().view(2, 4, 8)  # (B, T, D)
    try:
        with torch.no_grad():
            halves = torch.cat([run(half) for half in x.chunk(2, -1)], -1)
            return not torch.allclose(run(x), halves, equal_nan=True)
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError):
        return False


def kind_of_rule(rule: str) -> tuple[str, int]:
    """Returns the word of a rule, and the matrices that are packed in one."""
    kind, _, groups = rule.partition(":")
    return kind.removeprefix("packed_"), int(groups or 1)


def _parts(module: nn.Module, path: str, rule: Rule) -> Iterator[tuple[str, Part]]:
    child, prefix = module.get_submodule(path), f"{path}." if path else ""
    for name, parameter in child.named_parameters(recurse=False):
        yield prefix + name, _part(name, parameter, rule)


def _part(name: str, parameter: Tensor, rule: Rule) -> Part:
    if isinstance(rule, Column):
        return Part("column", (rule.dims[name], None))
    assert isinstance(rule, str), "modules that count heads have no parameters"
    kind, packed = kind_of_rule(rule)
    if kind in _LINEAR:
        matrix, vector = _LINEAR[kind]
        return Part(matrix, groups=packed) if name == "weight" else Part(vector, (0, None), packed)
    if kind == "embedding":
        return Part("embedding")
    return Part(_VECTORS[kind], (0, None))
