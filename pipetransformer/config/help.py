"""The text of ``--help``: the purpose, examples, the groups, and every option with the comment of its YAML file."""

import re
from collections.abc import Sequence
from textwrap import wrap

from pipetransformer.config.arguments import choices, groups
from pipetransformer.config.schema import CONF

HEAD = """\
Fine-tunes a Transformer on several devices. Blocks that have converged freeze from the bottom up; the others are
packed into fewer devices, the freed devices become replicas, and the frozen blocks' output is read from a cache.

  pipetransformer-train                                     a small ViT on digits, no download
  pipetransformer-train model=bert dataset=glue/sst2 epochs=3 optim.lr=2e-5
  pipetransformer-train -m freeze=none,pipetransformer seed=1,2      one run for each combination

Write name=value; a group takes one of its options, a list stands in brackets. In a checkout `python train.py` does the
same. README.md has a table of the options; --hydra-help is about Hydra.
"""
SELF, HYDRA = "_self_", "\nhydra:"


def help_text(arguments: Sequence[str] = ()) -> str:
    """Returns the help for the groups' options that the arguments choose, or else the default ones."""
    chosen = _defaults() | {name: value for name, _, value in (each.partition("=") for each in arguments)}
    lines = [HEAD, "Groups and their options\n"]
    for group in groups():
        lines += wrap(", ".join(choices(group)), 110, initial_indent=f"  {group:<11} ", subsequent_indent=" " * 14)
    lines += ["", "General options\n", *_indented(_body((CONF / "config.yaml").read_text(encoding="utf-8")))]
    for group in groups():
        file = CONF / group / f"{chosen.get(group)}.yaml"
        if file.is_file() and group != "experiment":
            lines += ["", f"{group}={chosen[group]}\n", *_indented(_body(file.read_text(encoding="utf-8")))]
    return "\n".join(lines)


def _defaults() -> dict[str, str]:
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r'^  - (\w+): "?(\w+)"?', text, flags=re.MULTILINE))


def _body(text: str) -> list[str]:
    """Returns the options of a YAML file with their comments: without defaults list, class and Hydra's part."""
    text = re.sub(r"^defaults:\n(?:[ #].*\n|\n)*", "", text.partition(HYDRA)[0], flags=re.MULTILINE)
    return [line for line in text.splitlines() if line.strip() and not re.match(r"# @package|\s*_target_:", line)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
