"""Tools for testing code that uses aioloader; nothing here is needed to train."""

from aioloader.testing.leaks import Resources, resources, wait_until_clean

__all__ = ["Resources", "resources", "wait_until_clean"]
