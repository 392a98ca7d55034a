"""``--help``: the groups, and every option of what the arguments choose, from the comments of the YAML files."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from pipetransformer.config.arguments import choices, groups
from pipetransformer.config.schema import CONF

MORE = "--help shows the options of what stands beside it, as in: {command} --help {example}"
HEAD = """\
Fine-tunes a Transformer on several devices. Blocks that have converged freeze from the bottom up; the others are
packed into fewer devices, the freed devices become replicas, and the frozen blocks' output is read from a cache.

  pipetransformer-train                                     a small ViT on digits, no download
  pipetransformer-train model=bert dataset=glue/sst2 epochs=3 optim.lr=2e-5
  pipetransformer-train -m freeze=none,pipetransformer seed=1,2      one run for each combination

Write name=value; a group takes one of its options, a list stands in brackets; -v shows more. In a checkout
`python train.py` does the same. README.md has a table of the options; --hydra-help is about Hydra.
"""
SIMULATION_HEAD = """\
Simulates a run on devices that are not there: its plans, its speed-up, and a trace of one step for each plan. It takes
seconds and no torch. The options are those of pipetransformer-train, and the groups cluster, pipeline and shape.

  pipetransformer-simulate                                           ViT-B/16 on the paper's cluster
  pipetransformer-simulate cluster=dgx model=bert_large dataset=squad batch_size=64 cluster.num_nodes=4

In a checkout `python -m pipetransformer.simulate` does the same.
"""
HYDRA = "\nhydra:"  # begins the part of config.yaml that is not about training
DEFAULTS = re.compile(r"^defaults:\n((?:[ #].*\n|\n)*)", re.MULTILINE)
OVERRIDE = re.compile(r'^  - (?:override )?/?(\w+): "?([\w/]+)"?', re.MULTILINE)
PARENT = re.compile(r"^  - (?!_self_)([\w/]+) *(?:#.*)?$", re.MULTILINE)  # a file that this one builds on
OPTION = re.compile(r"(\w+):")


def print_help(arguments: Sequence[str] = (), simulation: bool = False) -> None:
    """Prints :func:`help_text`, to a reader who may stop in the middle, such as ``head``."""
    try:
        print(help_text(arguments, simulation), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end


def help_text(arguments: Sequence[str] = (), simulation: bool = False) -> str:
    """Returns the help for the groups' options that the arguments choose, or else the default ones."""
    chosen = _chosen({name: value for name, _, value in (each.partition("=") for each in arguments)}, simulation)
    command, example = ("simulate", "cluster=dgx") if simulation else ("train", "dataset=text freeze=prefix")
    more = MORE.format(command=f"pipetransformer-{command}", example=example)
    lines = [SIMULATION_HEAD if simulation else HEAD, "Groups and their options\n"]
    for group in groups(simulation):
        lines += wrap(", ".join(choices(group)), 110, initial_indent=f"  {group:<11} ", subsequent_indent=" " * 14)
    lines += ["", *wrap(more, 120), "", "General options\n"]
    for name in ("config", "simulate") if simulation else ("config",):
        lines += _indented(_body(CONF / f"{name}.yaml"))
    for group in groups(simulation):
        file = CONF / group / f"{chosen.get(group)}.yaml"
        if file.is_file() and group != "experiment":
            lines += ["", f"{group}={chosen[group]}\n", *_indented(_options(file))]
    return "\n".join(lines)


def _chosen(given: Mapping[str, str], simulation: bool) -> dict[str, str]:
    """Returns the option of each group: the one given, else the one that a chosen file sets, else the usual one."""
    texts = [(CONF / f"{name}.yaml").read_text(encoding="utf-8") for name in ("config", "simulate")[: 1 + simulation]]
    chosen = dict(OVERRIDE.findall("".join(texts))) | dict(given)
    for group in ("experiment", *groups(simulation)):  # an experiment may set the data set, which may set the policy
        for file in _files(CONF / group / f"{chosen.get(group)}.yaml"):
            chosen |= dict(OVERRIDE.findall(_defaults(file))) | dict(given)
    return {"shape": chosen["model"]} | chosen


def _defaults(file: Path) -> str:
    """Returns the lines of a YAML file's defaults list."""
    found = DEFAULTS.search(file.read_text(encoding="utf-8"))
    return found[1] if found else ""


def _files(file: Path) -> Iterator[Path]:
    """Yields the files that a file of a group builds on, the lowest first, and itself; none where there is none."""
    if file.is_file():
        for name in PARENT.findall(_defaults(file)):
            yield from _files((CONF if name.startswith("/") else file.parent) / f"{name.removeprefix('/')}.yaml")
        yield file


def _options(file: Path) -> list[str]:
    """Returns the options of a file of a group with those of the files that it builds on, each with its own value."""
    lines = list[str]()
    for each in _files(file):
        lines = _merged(lines, _body(each))
    return lines


def _merged(lines: Sequence[str], own: Sequence[str]) -> list[str]:
    """Returns the lines of a file with those of one that builds on it, whose values take the place of the others."""
    if not lines or any(line.startswith(" ") for line in own):  # sections stand for themselves
        return [*lines, *own]
    values = {_name(line): line for line in own}
    kept = [_with_comment(values.pop(_name(line), line), line) for line in lines]
    notes = [line for line in values.values() if line.startswith("#")]
    return [*notes, *kept, *(line for line in values.values() if line not in notes)]


def _name(line: str) -> str:
    """Returns the option that a line sets, or the line."""
    found = OPTION.match(line)
    return found[1] if found else line


def _with_comment(line: str, other: str) -> str:
    """Returns a line with the comment of another one that sets the same option, where it has none of its own."""
    comment = other.partition(" #")[2]
    return line if "#" in line or not comment else f"{line}  #{comment}"


def _body(file: Path) -> list[str]:
    """Returns the options of a YAML file with their comments: without defaults list, class and Hydra's part."""
    text = DEFAULTS.sub("", file.read_text(encoding="utf-8").partition(HYDRA)[0])
    return [line for line in text.splitlines() if line.strip() and not re.match(r"# @package|\s*_target_:", line)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
