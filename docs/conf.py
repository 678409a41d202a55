"""How Sphinx builds these pages: Markdown by MyST, and a reference from the docstrings, which are Markdown too."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import fuel_parallel
from fuel_parallel.version import __version__

sys.path.insert(0, str(Path(__file__).parent))
import ops_page

project = "fuel-parallel"
copyright = "the fuel-parallel authors"
version = release = __version__

# Modules of a device are read for their docstrings, whether its library is there or not.
if importlib.util.find_spec("pyopencl") is None:
    sys.modules["pyopencl"] = MagicMock()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"


def write_reference(app: Any) -> None:
    """A page of ops, one for `fuel_parallel` and one for each part of it, with what `__all__` or public names offer."""
    folder = Path(app.srcdir, "api")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.rst"):
        old.unlink()
    parts = [one.name for one in pkgutil.iter_modules(fuel_parallel.__path__)]
    pages = {"fuel_parallel": "fuel_parallel", **{part: f"fuel_parallel.{part}" for part in parts}}
    for page, module in pages.items():
        # What `fuel_parallel` offers is indexed where it comes from.
        options = [":members:", ":show-inheritance:", *([":no-index:"] if page == module else [])]
        text = [module, "=" * len(module), "", f".. automodule:: {module}", *(f"   {option}" for option in options), ""]
        (folder / f"{page}.rst").write_text("\n".join(text))
    (folder / "ops.rst").write_text(ops_page.page(lambda line: "".join(rest_from_markdown([line]))))


LIST_ITEM = re.compile(r"(-|\d+\.) ")
CODE = re.compile(r"(`+[^`]+`+)")
# What reST would take for markup in plain text: a lone star, `name_`, `|name|`. Balanced *emphasis* stays.
STRAY_MARKUP = re.compile(r"(?<![\w*])\*{1,2}\w[^*]*\*{1,2}(?![\w*])|[*|\\]|(?<=\w)_(?!\w)")


def rest_from_markdown(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring in Markdown, as reST: code blocks by indentation, tables, lists, no stray markup.

    Sections such as `Args:` pass unchanged, for Napoleon; they differ from code in that no blank line precedes them.
    """
    before = ""  # the last line that was not blank
    after_blank = True
    code: int | None = None  # the indentation of the code block that we are in
    for line in lines:
        text = line.strip()
        indentation = len(line) - len(line.lstrip())
        deeper = indentation > len(before) - len(before.lstrip())
        if not text:
            after_blank = True
            yield line
            continue
        if code is not None and (indentation < code or (text[0] != "|" and before.lstrip().startswith("|"))):
            code = None
            yield ""
        in_item = bool(LIST_ITEM.match(before.lstrip()))
        if code is None and not text.startswith(">>>"):
            table = text.startswith("|")
            if table or (after_blank and deeper and before and not in_item):
                code = indentation + 1 if table else indentation
                yield from ("", " " * (indentation - (0 if table else 1)) + "::", "")
            elif LIST_ITEM.match(text) and not after_blank and not in_item and not deeper:
                yield ""
        if code is not None:
            yield " " + line
        elif text.startswith((">>>", "...")) or (before.lstrip().startswith((">>>", "...")) and not after_blank):
            yield line
        else:
            pieces = CODE.split(line)
            pieces[::2] = [STRAY_MARKUP.sub(escaped, piece) for piece in pieces[::2]]
            yield "".join(pieces)
        before, after_blank = line, False


def escaped(markup: re.Match[str]) -> str:
    """Emphasis as it is, anything else behind a backslash."""
    return markup[0] if len(markup[0]) > 1 else "\\" + markup[0]


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For autodoc: rewrites `lines` in place."""
    lines[:] = list(rest_from_markdown(lines))


def setup(app: Any) -> None:
    """Called by Sphinx; the priority puts us before Napoleon."""
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
