"""Stands in for packages that are not installed and that a program imports without using them in what a test runs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _AnyAttribute(type):
    """Classes with every attribute, for annotations, base classes and decorators."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __or__(cls, _: Any) -> Any:
        return cls

    def __ror__(cls, _: Any) -> Any:
        return cls


class Absent(metaclass=_AnyAttribute):
    """Anything of an absent package. As a decorator, with or without arguments, it changes nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "remote":  # of Ray: a decorator, with or without arguments
            return lambda *args, **_: args[0] if args and callable(args[0]) else lambda decorated: decorated
        # an empty base class, which must not answer for attributes of the classes derived from it
        return type(name, (), {}) if name.endswith("Mixin") else Absent


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the given packages and everything in them. Put it first in `sys.meta_path`."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A module of its own for a name in one of the packages."""
        inside = any(fullname == name or fullname.startswith(f"{name}.") for name in self._packages)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module with every attribute."""
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""

    def install(self) -> None:
        """Makes the packages importable in this process."""
        sys.meta_path.insert(0, self)
