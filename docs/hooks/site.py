"""Pages that MkDocs cannot make from docs/ alone: files of the repository that pages link to, and parts of README.md.

A link out of docs/ works in the repository as it stands. For the site the file behind it becomes a page, too::

    docs/methods/none.md    ── ../../experiments/default_freeze/README.md ──►  a page, whose own links are followed
                            ── ../../pipetransformer/freeze/none.py       ──►  a page with the code
    <!-- README.md: Models -->  in a page                                 ──►  that section of README.md
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS, README = "docs/", "README.md"
LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[#)])")
SECTION = re.compile(r"<!-- README\.md: (.+?) -->")
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link(?![^>]*rel="?(?:canonical|prev|next)))\b[^>]*\b(?:src|href)=["']?(https?://[^"'\s>]+)"""
)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".csv": "text", ".sbatch": "bash", ".cff": "yaml"}


def on_files(files: Files, config: MkDocsConfig, **kwargs: Any) -> Files:
    """Adds the experiments, what pages link to, and what those link to in turn."""
    pending = [in_repository(page.src_uri) for page in files.documentation_pages()]
    wanted = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(f"experiments/*/{README}"))]
    while pending or wanted:
        while wanted:
            path = wanted.pop()
            if not path.startswith(DOCS) and files.get_file_from_path(page_of(path)) is None:
                files.append(_file(path, config))
                pending += [path] * path.endswith(".md")
        if pending:
            path = pending.pop()
            wanted += links(path, (ROOT / path).read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Puts in sections of the README, and turns each link to a file into one to its page."""
    uri = page.file.src_uri
    source = in_repository(uri)
    if not (ROOT / source).is_file():  # the page of a file of code: it has no links
        return markdown
    own = with_pages(markdown, source, uri)
    return SECTION.sub(lambda name: with_pages(readme_section(name[1]), README, uri), own)


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Refuses a page that fetches anything from the network when it is read.

    Raises:
        PluginError: With the address.
    """
    if fetched := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches {fetched[1]}; keep a copy in docs/")
    return output


def in_repository(uri: str) -> str:
    """Returns the path in the repository of a page's source."""
    return DOCS + uri if (ROOT / DOCS / uri).is_file() else uri


def page_of(path: str) -> str:
    """Returns the source of the page that shows a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if path == README:
        return "index.md"
    return f"{path}.md" if Path(path).suffix in LANGUAGES else path


def links(path: str, text: str) -> Iterator[str]:
    """Yields the files of the repository that a page links to; of a folder its README."""
    for link in LINK.findall(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if (ROOT / target).is_dir():
            target = f"{target}/{README}"
        if (ROOT / target).is_file():
            yield target


def with_pages(text: str, path: str, uri: str) -> str:
    """Returns the text of ``path``, shown on the page ``uri``, with links to pages."""

    def relative(link: re.Match[str]) -> str:
        target = next(links(path, f"]({link[1]})"), None)
        return posixpath.relpath(page_of(target), posixpath.dirname(uri) or ".") if target else link[1]

    return LINK.sub(relative, text)


def readme_section(heading: str) -> str:
    """Returns a section of README.md without its heading.

    Raises:
        ValueError: There is none.
    """
    _, found, rest = (ROOT / README).read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    if not found:
        raise ValueError(f"README.md has no section {heading}")
    return rest.partition("\n## ")[0]


def _file(path: str, config: MkDocsConfig) -> File:
    language = LANGUAGES.get(Path(path).suffix)
    if language is None:
        return File(path, str(ROOT), config.site_dir, config.use_directory_urls)
    code = (ROOT / path).read_text(encoding="utf-8")
    return File.generated(config, page_of(path), content=f"# {path}\n\n````{language}\n{code}````\n")
