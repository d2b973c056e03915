"""What the coordinator of a save tells ranks that have its plan already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paddle_dist_ckpt.core.messages import decode
from paddle_dist_ckpt.files.metadata import SaveInfo
from paddle_dist_ckpt.saving import save_coordinator
from paddle_dist_ckpt.saving.messages import PlanAnswer, SaveRequest
from paddle_dist_ckpt.storage.base import Folder, FolderIdentity

HOSTS = ["a", "a", "b"]  # of the ranks


def test_each_rank_is_told_what_holds_for_it() -> None:
    folders = {rank: FolderIdentity(host, 1, 1) for rank, host in enumerate(HOSTS)}
    requests = {
        rank: SaveRequest(None, Folder(folder, None), 4096, b"", None, 7 if rank else 0, b"", [], None)
        for rank, folder in folders.items()
    }
    save = SaveInfo(
        save_id="0" * 16, unique_id=0, world_size=3, block_bytes=4096, created="", library="", paddle_version=None
    )
    ordered: Any = SimpleNamespace(
        planned=SimpleNamespace(plan_id=7, rank_plans={0: b"the plan of rank 0"}),
        lease=SimpleNamespace(doomed=["a file of a dead save"]),
        leaders=frozenset([0, 2]),
        save=save,
        compared=None,
    )
    orders = [decode(data, PlanAnswer) for _, data in sorted(save_coordinator._orders(ordered, requests).items())]
    assert [order.ranks_on_host for order in orders] == [2, 2, 1]
    assert [order.dead for order in orders] == [["a file of a dead save"], [], ["a file of a dead save"]]
    ordered.lease.doomed = []
    orders = [decode(data, PlanAnswer) for _, data in sorted(save_coordinator._orders(ordered, requests).items())]
    assert [order.dead for order in orders] == [None, None, None], "there is nothing to be cleared"
    assert [order.plan for order in orders] == [b"the plan of rank 0", None, None]
