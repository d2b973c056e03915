"""Ranks talking: rounds of messages among a group, with deadlines on silence and failures told to everyone."""

from .bootstrap import BootstrapStore
from .hub import ZmqHub
from .in_process import InProcessWorld
from .schedule import Schedule
from .sigterm import on_sigterm
from .solo import SoloHub

__all__ = ["BootstrapStore", "InProcessWorld", "Schedule", "SoloHub", "ZmqHub", "on_sigterm"]
