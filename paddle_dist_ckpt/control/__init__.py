"""Ranks talking: rounds of messages among a group, with deadlines on silence and failures told to everyone."""

from .agreement import AgreedHub, RefusingHub
from .bootstrap import BootstrapStore
from .hub import TcpHub
from .ranks import NoTransport, SoloHub

__all__ = ["AgreedHub", "BootstrapStore", "NoTransport", "RefusingHub", "SoloHub", "TcpHub"]
