"""What two ranks that read for each other take for a tensor of very many shards of one byte.

    python -m test.torture.many_shards [SHARDS]

Prints for a tensor of 4096 shards, and for one of this many (2**20), what it has on the disk, and for the coordinator
and the other rank the memory that became resident in a load, and how long it took. That is to be at most 64 MiB more.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmark import machine
from test.ranks.pool import RankPool

from .budgets import bytes_on_disk
from .crafting import Entry, write_checkpoint

__all__ = ["load_with_exchange"]

_COLUMNS = 256
_LOAD = "test.torture.many_shards:load_with_exchange"  # by its name, since this module is run


def load_with_exchange(folder: str, rows: int) -> tuple[float, float]:
    """Load all of it on this rank, too; the memory that it took beyond what there was, in MiB, and the seconds."""
    import paddle

    from paddle_dist_ckpt import LoadOptions, load_state_dict

    tensor = paddle.zeros([rows, _COLUMNS], "uint8")
    before, start = machine.reset_peak_memory()["VmRSS"], time.perf_counter()
    load_state_dict({"w": tensor}, folder, options=LoadOptions(exchange="always", timeout=300))
    taken = (machine.used_memory()["VmHWM"] - before) / (1 << 20), time.perf_counter() - start
    assert (tensor.numpy() == ord("x")).all()
    return taken


def _main(shards: int) -> None:
    with RankPool(2) as pool, tempfile.TemporaryDirectory() as scratch:
        for count in (1 << 12, shards):
            rows, folder = count // _COLUMNS, Path(scratch, str(count))
            cuts = [list(range(1, rows)), list(range(1, _COLUMNS))]
            write_checkpoint(folder, {"/w": Entry([rows, _COLUMNS], cuts, "uint8", 0, b"x" * (rows * _COLUMNS))})
            taken = pool.run(_LOAD, str(folder), rows, ranks=2, timeout=600)
            said = "; ".join(f"{mebibytes:.0f} MiB, {seconds:.1f} s" for mebibytes, seconds in taken)
            print(f"{rows * _COLUMNS} shards, {bytes_on_disk(folder) / (1 << 20):.0f} MiB on the disk: {said}")


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 20)
