"""Which record comes when, and which rank gets it: functions, not lists."""

from aioloader.order.lanes import LaneMap
from aioloader.order.mesh import Mesh

__all__ = ["LaneMap", "Mesh"]
