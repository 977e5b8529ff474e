"""Turning the references of a saved state back into items."""

from __future__ import annotations

from collections.abc import Mapping

from aioloader.errors import ResumeError
from aioloader.protocols import Item, Ref

__all__ = ["find_item"]


def find_item(items: Mapping[Ref, Item], ref: Ref) -> Item:
    """Return the item that a state refers to.

    Raises:
        ResumeError: Reading and preprocessing again did not produce this item.
    """
    item = items.get(ref)
    if item is None:
        seq, sub = ref
        differences = [(f"sample {sub} of the record with seq {seq}", "in the buffer", "not produced again")]
        raise ResumeError(differences, do="resume with the data and the preprocess function that the state was saved with")
    return item
