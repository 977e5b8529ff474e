"""State: what a checkpoint of a loader says, whether it fits, and how those of several ranks become one and are split again."""

from aioloader.state.elastic import merge, split
from aioloader.state.fingerprint import fingerprint_hash
from aioloader.state.reading import describe, diff

__all__ = ["describe", "diff", "fingerprint_hash", "merge", "split"]
