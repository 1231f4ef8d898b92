"""What MkDocs needs to show these pages, which are also read in the repository (mkdocs.yml names this file).

- README.md, CONTRIBUTING.md and CHANGELOG.md, which lie beside docs/, become pages.
- docs/errors.json becomes the page "Error messages", on which the search finds each message under a heading of its own.
- A link to a file that is not a page becomes a link into the repository, or text where `repo_url` is not set. A file
  that is not there is a warning, which fails `mkdocs build --strict`.
- Lists are indented by the width of their marker, as on GitHub; Python-Markdown wants four spaces, and an empty line
  before an item that follows the second paragraph of another.
- Pictures drawn with characters have no button for copying, which would lie on them.
- A `|` of code in tables loses the backslash that it needs on GitHub. Long keys, names and paths there break after
  their dots, slashes and underscores, and nowhere else (site.css).
- Formulas become MathML, which browsers show without a script.
"""

from __future__ import annotations

import html
import json
import logging
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# the longest word of code in a table that is never broken, such as `student.hf_path`
UNBROKEN = 20
BESIDE_DOCS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# the page of docs/errors.json, which has no file of its own
ERRORS = "errors.md"
ABOUT_ERRORS = """# What is wrong, and what the program says

The program says each of these in one line `error: ...` on stderr, from one rank, and ends with status 2: before it
joins a process group or builds a model, and without making or changing the output directory. Search for the words of a
line. `DIR` is the directory of the inputs; `...` stands for words of a library. `NEMO_OPRD_TRACEBACK=1` shows the
traceback instead.
"""
PICTURE = re.compile(r"^```(\n(?:(?!```).*\n)*?.*[│┌└┬].*\n(?:(?!```).*\n)*```)$", flags=re.MULTILINE)
ITEM = re.compile(r"([-*]|\d+\.) ")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
CELL_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
CELL = re.compile(r"<td[^>]*>.*?</td>", flags=re.DOTALL)
LONG_WORD = re.compile(rf"\S{{{UNBROKEN + 1},}}")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
log = logging.getLogger("mkdocs.hooks.docs")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages whose files lie beside docs/, and the one of docs/errors.json."""
    for source, page in BESIDE_DOCS.items():
        files.append(File.generated(config, page, abs_src_path=str(_root(config) / source)))
    messages = json.loads((_root(config) / "docs" / "errors.json").read_text())
    files.append(File.generated(config, ERRORS, content=errors_page(messages)))
    return files


def errors_page(messages: dict[str, dict[str, str]]) -> str:
    """Returns the Markdown of the page of messages, from the groups of docs/errors.json."""
    lines: list[str] = [ABOUT_ERRORS]
    for group, said in messages.items():
        lines.append(f"## {group}\n")
        for entered, message in said.items():
            lines.append(f"### {entered}\n\n" + (f"`` {message} ``" if "`" in message else f"`{message}`") + "\n")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text with the links and the lists of the site; fenced blocks that begin a line stay as they are."""
    uri = page.file.src_uri
    if uri == ERRORS:
        return markdown
    source = next((file for file, name in BESIDE_DOCS.items() if name == uri), f"docs/{uri}")

    def site_link(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        if ":" in target:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = ERRORS if file == "docs/errors.json" else BESIDE_DOCS.get(file, file.removeprefix("docs/"))
        if files.get_file_from_path(on_site):
            return f"{image}[{text}]({on_site}{anchor})"
        if not (_root(config) / file).exists():
            log.warning(f"{source} links to {target}, which does not exist")
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{file}{anchor})" if config.repo_url else text

    fenced = False
    lines: list[str] = []
    for line in PICTURE.sub("``` {.text .no-copy}\\1", markdown).split("\n"):
        fenced ^= line.startswith("```")
        if not fenced:
            if ITEM.match(line) and lines and lines[-1].startswith("    "):
                lines.append("")
            line = LINK.sub(site_link, f" {line}" if line.startswith("   ") else line)
        lines.append(line)
    return "\n".join(lines)


def on_page_content(content: str, page: Page, **_: object) -> str:
    """The page's HTML with its formulas as MathML, and with the places where code in tables may break.

    The table of contents of the messages ends at their groups.
    """
    if page.file.src_uri == ERRORS:
        for title in page.toc:
            for group in title.children:
                group.children.clear()

    def mathml(formula: re.Match[str]) -> str:
        return convert(html.unescape(formula[2]).strip(), display="block" if formula[1] == "div" else "inline")

    def breakable(word: re.Match[str]) -> str:
        return re.sub(r"(?<=[\w}])([._/])(?=\w)(?!(?:py|sh|md|yaml|jsonl?)\b)", r"\1<wbr>", word[0])

    def cell(found: re.Match[str]) -> str:
        return CELL_CODE.sub(lambda code: LONG_WORD.sub(breakable, code[0].replace(r"\|", "|")), found[0])

    return CELL.sub(cell, FORMULA.sub(mathml, content))


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent
