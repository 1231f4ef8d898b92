"""Characters of foreign text that a browser would not show, or would obey, made visible: `U+202E` in a frame.

A response may hold controls that turn the text after them around (bidirectional overrides), characters without a width,
or a NUL, which HTML drops. Nothing of the page's own text holds them, so every text that a template puts in is treated.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from markupsafe import Markup, escape

# controls (Cc), formats such as bidirectional controls and zero width (Cf), separators of lines (Zl, Zp), and halves of
# surrogate pairs (Cs), which no UTF-8 file can hold; without the line feed and the tab
_SHOWN_BY_A_BROWSER = "\n\t"
_CATEGORIES = ("Cc", "Cf", "Zl", "Zp", "Cs")
_MAYBE = re.compile(r"[^\n\t -~\u00a0-\u00ac\u00ae-\u05ff]")  # what may be one of them: most texts have none


def in_text(value: Any) -> Any:
    """For jinja2's `finalize`: a text as HTML with its invisible characters framed; other values, and HTML, as is."""
    if not isinstance(value, str) or isinstance(value, Markup) or _MAYBE.search(value) is None:
        return value
    return Markup("").join(
        Markup('<span class="control" title="{}">{}</span>').format(_name(each), code_point(each))
        if _is_invisible(each)
        else escape(each)
        for each in value
    )


def in_attribute(value: str) -> str:
    """The same for attributes and `<title>`, which hold no elements: `[U+202E]`. Not escaped yet."""
    return "".join(f"[{code_point(each)}]" if _is_invisible(each) else each for each in value)


def code_point(character: str) -> str:
    """Example: "U+202E"."""
    return f"U+{ord(character):04X}"


def _is_invisible(character: str) -> bool:
    return character not in _SHOWN_BY_A_BROWSER and unicodedata.category(character) in _CATEGORIES


def _name(character: str) -> str:
    return unicodedata.name(character, "control character").lower()
