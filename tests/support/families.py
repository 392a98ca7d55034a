"""The README's table of model families, made from the rows of the contract test."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipetransformer.config.compose import CONF
from pipetransformer.models.base import Head

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
WRITE = "WRITE_FAMILIES"  # environment variable that has the README written anew
HEADS = {"image": "images", "sequence": "texts", "token": "tokens", "span": "answers", "causal": "next token"}


class Row(Protocol):
    """A row of the contract test."""

    @property
    def name(self) -> str: ...

    @property
    def head(self) -> Head: ...


@dataclass(frozen=True)
class Family:
    """What the table says of a family besides its heads.

    Attributes:
        title: Its name in the field.
        options: Files of ``conf/model``.
        rows: What the rows' names begin with.
        also: Other models on the hub that are built alike, as far as they were looked at.
        note: What a user has to know.
    """

    title: str
    options: Sequence[str]
    rows: Sequence[str]
    also: str = ""
    note: str = ""


_FREEZES_WITH_BLOCK_1 = "the blocks have {} in common, which freeze with block 1"
_ONE_SIZE = "positions for one image size"
_TIED = "a head for the next token that is the word embeddings freezes with them; `model.untie=true`"
FAMILIES = (
    Family("ViT, DeiT (timm)", ("vit_tiny", "vit", "deit"), ("vit_tiny", "deit"), "`vit_*`, `deit_*`, `deit3_*`"),
    Family(
        "EVA, EVA-02 (timm)",
        ("eva02",),
        ("eva02", "vit_small"),
        "`eva_*`, `eva02_*`, `vit_*_rope_*`, `vit_pe_*`, `vit_*_dinov3`",
        "rotary positions for one image size, computed on each device",
    ),
    Family("ViT", ("vit_hf",), ("vit",), note=_ONE_SIZE),
    Family("DINOv2", ("dinov2",), ("dinov2",), note="images of any multiple of 14 pixels; its mask token is left out"),
    Family("SigLIP", ("siglip",), ("siglip",), note=f"vision tower without pooling; {_ONE_SIZE}"),
    Family("BERT", ("bert", "bert_large"), ("bert",), "MiniLM, ERNIE"),
    Family("RoBERTa", ("roberta",), ("roberta",), "XLM-RoBERTa, CamemBERT"),
    Family("DistilBERT", ("distilbert",), ("distilbert",)),
    Family("ELECTRA", ("electra",), ("electra",)),
    Family("ModernBERT", ("modernbert",), ("modernbert",)),
    Family("DeBERTa-v2, v3", ("deberta",), ("deberta-v2",), note=_FREEZES_WITH_BLOCK_1.format("relative positions")),
    Family("MPNet", ("mpnet",), ("mpnet",), note=_FREEZES_WITH_BLOCK_1.format("relative positions")),
    Family(
        "ALBERT", ("albert",), ("albert",), note="its blocks are one, which runs again and again and freezes as a whole"
    ),
    Family("GPT-2", ("gpt2",), ("gpt2",), note=_TIED),
    Family("Llama", ("llama",), ("llama",), note=_TIED),
    Family("Qwen2", ("qwen2",), ("qwen2",), note=_TIED),
    Family("Qwen3", ("qwen3",), ("qwen3",), note=_TIED),
    Family("Gemma 3", ("gemma3",), ("gemma3_text",), note=f"text models; {_TIED}"),
)


def table(rows: Iterable[Row]) -> str:
    """Returns the table in Markdown.

    Raises:
        AssertionError: A row belongs to no family, or a family has no row.
    """
    heads: dict[str, set[str]] = {}
    for row in rows:
        heads.setdefault(title_of(row), set()).add(row.head.kind)
    missing = {family.title for family in FAMILIES} - heads.keys()
    assert not missing, f"no row tests {missing}"
    lines = ["| family | `model=` | for example | heads for | note |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        options = " ".join(f"`{name}`" for name in family.options)
        examples = ", ".join([*(f"`{_hub_name(name)}`" for name in family.options), *filter(None, [family.also])])
        kinds = ", ".join(word for kind, word in HEADS.items() if kind in heads[family.title])
        lines.append(f"| {family.title} | {options} | {examples} | {kinds} | {family.note} |")
    return "\n".join(lines)


def title_of(row: Row) -> str:
    """Returns the title of the family of a row."""
    return _family_of(row.name.partition(" ")[0]).title


def options_of(row: Row) -> Sequence[str]:
    """Returns the files of ``conf/model`` of the family of a row."""
    return _family_of(row.name.partition(" ")[0]).options


def _family_of(name: str) -> Family:
    """Returns the first family to which a row's name belongs; timm's names go on after an underscore."""
    for family in FAMILIES:
        if any(name == own or name.startswith(f"{own}_") for own in family.rows):
            return family
    raise AssertionError(f"no family of tests/support/families.py has the row {name}")


def _hub_name(option: str) -> str:
    """Returns the published model that a file of ``conf/model`` names."""
    lines = (CONF / "model" / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("name: ").split("#")[0].strip() for line in lines if line.startswith("name: "))
