"""Numbers about a running engine."""

from aioloader.telemetry.stages import Stage, Stages

__all__ = ["Stage", "Stages"]
