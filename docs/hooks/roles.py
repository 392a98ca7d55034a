"""The reStructuredText of docstrings as Markdown: roles (``:class:`~package.Name```), literals and code blocks."""

import re
from typing import Any

import griffe

NAMES = re.compile(r"^( +)(\w+(?:, \w+)+)(?=: )", re.MULTILINE)  # attributes that a docstring describes together
ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):`(~?)([\w.]+)`")


def as_markdown(text: str) -> str:
    """Replaces each role by the name that it shows, double backticks by single ones, and ``::`` before a block."""
    text = ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    text = NAMES.sub(lambda found: found[0].replace(", ", ",\u00a0"), text)  # griffe reads a type after a blank
    return re.sub(r"::(?=\n\s*\n)", ":", text.replace("``", "`"))


class Roles(griffe.Extension):
    """Changes each docstring where griffe has just read it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
