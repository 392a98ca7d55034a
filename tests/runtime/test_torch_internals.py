"""The page about torch's internals names what the code relies on, and the installed libraries have it."""

import pkgutil
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "torch_internals.md").read_text()
ROWS = re.findall(r"^\| `([\w.]+)` \| `([\w./]+)` \| (.*) \|$", PAGE, re.MULTILINE)
PRIVATE = re.compile(r"\b(?:torch|DistributedDataParallel|storage)\._(?!_)\w+|torch\.utils\._\w+")


@pytest.mark.parametrize(("name", "file", "why"), ROWS, ids=[f"{name}-{file}" for name, file, _ in ROWS])
def test_a_listed_name_exists_and_is_used_where_the_page_says(name: str, file: str, why: str) -> None:
    holder, _, leaf = name.rpartition(".")
    if (older := re.search(r"the older `(\w+)`", why)) and not hasattr(pkgutil.resolve_name(holder), leaf):
        name = older[1]  # of an instance
        assert torch.__version__ < "2.15", "newer releases have the name itself"
    else:
        pkgutil.resolve_name(name)
    assert name.rpartition(".")[2] in (ROOT / "pipetransformer" / file).read_text()


def test_the_page_lists_every_private_name_of_torch_that_the_package_uses() -> None:
    listed = {(name.rpartition(".")[2], file) for name, file, _ in ROWS}
    used = set()
    for path in (ROOT / "pipetransformer").rglob("*.py"):
        for line in path.read_text().splitlines():
            for private in PRIVATE.findall(line):
                leaf = line.rpartition(" ")[2] if "import" in line else private.rpartition(".")[2]
                used.add((leaf, str(path.relative_to(ROOT / "pipetransformer"))))
    assert used <= listed, f"not on the page: {used - listed}"
