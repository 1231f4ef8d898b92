"""Writes te_signatures.json, the interfaces that the stand-in for Transformer Engine must have, from unpacked wheels:

    pip download --no-deps transformer_engine==2.11.0 transformer_engine==2.20.2   # one at a time
    unzip ...; python tests/functional/te_record_signatures.py FOLDER ...

The source is parsed, not imported: importing needs CUDA. Only names, order and defaults of parameters are kept.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

ATTENTION = ("attention/dot_product_attention/dot_product_attention.py", "DotProductAttention")
SOURCES = {  # class in the stand-in -> its methods, each with the file and class where the real one is defined
    "Linear": {"__init__": ("module/linear.py", "Linear"), "forward": ("module/linear.py", "Linear")},
    "LayerNormLinear": {
        "__init__": ("module/layernorm_linear.py", "LayerNormLinear"),
        "forward": ("module/layernorm_linear.py", "LayerNormLinear"),
    },
    "RMSNorm": {"__init__": ("module/rmsnorm.py", "RMSNorm"), "forward": ("ops/op.py", "BasicOperation")},
    "DotProductAttention": dict.fromkeys(("__init__", "set_context_parallel_group", "forward"), ATTENTION),
}


def spelled(function: ast.FunctionDef) -> list[str]:
    """`name`, `name=default`, `*name` or `**name` of each parameter but self."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    found = [_one(name, default) for name, default in zip(positional, defaults, strict=True)][1:]
    found += [f"*{given.vararg.arg}"] if given.vararg else []
    found += [_one(name, default) for name, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return found + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _one(name: ast.arg, default: ast.expr | None) -> str:
    return name.arg + ("" if default is None else f"={ast.unparse(default)}")


def signatures(folder: Path) -> dict[str, list[str]]:
    """Of the package unpacked in `folder`."""
    found = {}
    for name, methods in SOURCES.items():
        for method, (file, definition) in methods.items():
            tree = ast.parse((folder / "transformer_engine" / "pytorch" / file).read_text())
            (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == definition)
            (function,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == method)
            found[f"{name}.{method}"] = spelled(function)
    return found


if __name__ == "__main__":
    recorded = {}
    for argument in sys.argv[1:]:
        (metadata,) = Path(argument).glob("transformer_engine-*.dist-info")
        recorded[metadata.name.removeprefix("transformer_engine-").removesuffix(".dist-info")] = signatures(
            Path(argument)
        )
    Path(__file__).with_name("te_signatures.json").write_text(json.dumps(recorded, indent=1) + "\n")
