"""The libraries that are compared, in one table; each is a :class:`benchmark.peers.base.Checkpointer`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PEERS", "PROBES", "Peer", "peers_named"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A library under measurement, as it is used.

    Attributes:
        name: What results call it.
        title: What tables call it.
        environment: ``"paddle"`` or ``"torch"``: the virtual environment that has it.
        implementation: Module in this package and class, with a colon between.
    """

    name: str
    title: str
    environment: str
    implementation: str


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "paddle_dist_ckpt", "paddle", "on_paddle:Ours"),
        Peer("paddle_builtin", "Paddle's own", "paddle", "on_paddle:PaddleBuiltin"),
        Peer("torch_dcp", "torch DCP", "torch", "on_torch:TorchDcp"),
        Peer("probe", "probe, cached", "paddle", "probes:Probe"),
        Peer("probe_range", "probe, sync_file_range", "paddle", "probes:RangeProbe"),
        Peer("probe_direct", "probe, O_DIRECT", "paddle", "probes:DirectProbe"),
        Peer("ours_async", "paddle_dist_ckpt", "paddle", "on_paddle:OursInBackground"),
        Peer("torch_dcp_async", "torch DCP, by a thread", "torch", "on_torch:AsyncTorchDcp"),
        Peer(
            "torch_dcp_async_cached",
            "torch DCP, by a thread, staging memory kept",
            "torch",
            "on_torch:CachedAsyncTorchDcp",
        ),
        Peer("torch_dcp_async_process", "torch DCP, by a process", "torch", "on_torch:ProcessAsyncTorchDcp"),
        Peer("ours_device", "paddle_dist_ckpt", "paddle", "on_device:OursOnDevice"),
        Peer("ours_formats", "paddle_dist_ckpt", "paddle", "on_paddle:OursAndPaddle"),
        Peer("ours_exchange", "paddle_dist_ckpt", "paddle", "on_paddle:OursOnHosts"),
        Peer("ours_replicas", "paddle_dist_ckpt", "paddle", "on_paddle:OursComparing"),
    )
}
PROBES = ("probe", "probe_range", "probe_direct")


def peers_named(*names: str) -> tuple[Peer, ...]:
    """These peers, in this order."""
    return tuple(PEERS[name] for name in names)
