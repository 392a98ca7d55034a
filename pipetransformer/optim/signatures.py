"""Names and arguments of the optimizers that are installed, read from source: importing torch takes seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Arguments = frozenset[str]


@cache
def torch_optimizers() -> dict[str, Arguments]:
    """Returns the classes of ``torch.optim`` with the arguments of each."""
    return _classes(_folder("torch") / "optim")


@cache
def timm_optimizers() -> dict[str, Arguments]:
    """Returns the names that ``timm.optim.create_optimizer_v2`` takes, with the arguments of each one's class.

    Those that timm takes from apex and bitsandbytes are left out.
    """
    classes = _classes(_folder("torch") / "optim") | _classes(_folder("timm") / "optim")
    calls = [(_name(call.func), call) for call in _calls(_folder("timm") / "optim" / "_optim_factory.py")]
    infos = [{each.arg: each.value for each in call.keywords} for name, call in calls if name == "OptimInfo"]
    found = {
        str(_constant(info["name"])): classes[_name(info["opt_class"])]
        for info in infos
        if info.keys() >= {"name", "opt_class"} and _name(info["opt_class"]) in classes
    }
    aliases = [tuple(map(_constant, call.args)) for name, call in calls if name == "register_alias"]
    return found | {str(alias): found[str(target)] for alias, target in aliases}


def _classes(folder: Path) -> dict[str, Arguments]:
    """Returns the optimizers that a folder's modules define, with the arguments of each."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.py"))]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def is_optimizer(name: str) -> bool:
        return name == "Optimizer" or (
            name in classes and any(is_optimizer(_name(base)) for base in classes[name].bases)
        )

    found = {}
    for name, node in classes.items():
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        if name != "Optimizer" and "__init__" in methods and is_optimizer(name):
            own = methods["__init__"].args
            found[name] = frozenset(each.arg for each in [*own.args, *own.kwonlyargs]) - {"self"}
    return found


def _calls(file: Path) -> list[ast.Call]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
