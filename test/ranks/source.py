"""The program of a process that imports Paddle and the library once and then forks ranks: see forks.py.

    python -m test.ranks.source DESCRIPTOR

DESCRIPTOR is a socket, through which requests come. The source ends when the other side is gone.
"""

from __future__ import annotations

import gc
import socket
import sys

import ml_dtypes  # noqa: F401  (as what follows without a use: so that ranks need not, each for itself)
import numpy as np
import numpy.ma
import numpy.random
import paddle
import paddle.distributed.auto_parallel.api
import pytest  # noqa: F401

import paddle_dist_ckpt.paddle_adapter
import paddle_dist_ckpt.public
import paddle_dist_ckpt.testing  # noqa: F401
from test.ranks import worker
from test.ranks.forks import serve


def main() -> int:
    """Serve; in each rank that is forked, run the worker, or the script that is named. Returns the exit code."""
    gc.freeze()  # what is there now is never garbage; to look for it takes a rank half a second when it ends
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        arguments = serve(requests)
    if arguments is None:
        return 0
    np.random.seed()  # as in every process that is started anew
    paddle.seed(int(np.random.randint(1 << 31)))
    if arguments[0].endswith(".py"):
        worker.run_program(*arguments)
        return 0
    return worker.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
