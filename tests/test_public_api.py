"""What users can import is what the modules say they offer, and all of it is documented."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import aioloader


def modules() -> list[str]:
    found = pkgutil.walk_packages(aioloader.__path__, "aioloader.")
    return ["aioloader", *sorted(module.name for module in found if not module.name.endswith("__main__"))]


def is_defined_in(module: ModuleType, value: object) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__


def test_the_package_offers_what_it_lists() -> None:
    missing = [name for name in aioloader.__all__ if not hasattr(aioloader, name)]
    assert not missing
    assert len(set(aioloader.__all__)) == len(aioloader.__all__)
    assert "Loader" in aioloader.__all__


@pytest.mark.parametrize("name", aioloader.__all__)
def test_public_objects_are_documented(name: str) -> None:
    value = getattr(aioloader, name)
    if callable(value):
        assert value.__doc__, f"aioloader.{name} has no docstring"
        assert not value.__doc__.startswith(f"{name}("), f"aioloader.{name} has only the docstring that dataclasses generate"


@pytest.mark.parametrize("name", modules())
def test_a_module_lists_what_it_defines(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    listed = getattr(module, "__all__", [])
    defined = {key for key, value in vars(module).items() if not key.startswith("_") and is_defined_in(module, value)}
    assert defined <= set(listed), f"{name} defines public names that it does not list"
    assert all(hasattr(module, key) for key in listed)
