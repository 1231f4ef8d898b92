"""Functions named by MODULE:FUNCTION: built-in ones, and a user's own from Python's path or the working directory.

Losses and graders (`evaluation/grading/graders.py`) are named in this way.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def is_import_path(text: str) -> bool:
    """Returns whether a text has the form MODULE:FUNCTION."""
    module, _, function = text.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def import_function(key: str, path: str, page: str) -> Callable[..., Any]:
    """Returns the function that MODULE:FUNCTION names; an error inside the user's module keeps its own traceback.

    Args:
        key: what the user set to `path`, for messages. Example: "loss.representation.kind".
        page: the page of the documentation that describes such functions.

    Raises:
        ValueError: there is no such module, or it has no such function.
    """
    if not path.startswith("nemo_oprd.") and not {"", os.getcwd()} & set(sys.path):
        # `python -m` and torchrun's -m put the working directory first; the command nemo-oprd does not
        sys.path.insert(0, os.getcwd())
    module_name, _, name = path.partition(":")
    key = f"{key}={path}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists and imports one that does not
        raise ValueError(
            f"{key}: no module {error.name!r}; expected one on Python's path or in the working directory: correct the "
            "name, start in the directory that holds it, or set PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "correct the name"
        raise ValueError(f"{key}: module {module_name!r} has no {name!r}; expected a function in it: {hint}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{key} is {type(function).__name__}, expected a function; name one ({page})")
    return function
