"""Ranks talking: rounds of messages among a group, with deadlines on silence and failures told to everyone."""

from paddle_dist_ckpt.control.bootstrap import BootstrapStore
from paddle_dist_ckpt.control.hub import ZmqHub
from paddle_dist_ckpt.control.in_process import InProcessWorld
from paddle_dist_ckpt.control.schedule import Schedule
from paddle_dist_ckpt.control.sigterm import on_sigterm
from paddle_dist_ckpt.control.solo import SoloHub

__all__ = ["BootstrapStore", "InProcessWorld", "Schedule", "SoloHub", "ZmqHub", "on_sigterm"]
