"""Functions that test_static.py sends to two ranks: a static-graph program of two pipeline stages, a rank each."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.static.dist_input_spec import DistributedInputSpec
from paddle.nn import functional

from paddle_dist_ckpt import load_state_dict, read_metadata, save_state_dict
from test.ranks import static

_WORDS, _WIDTH = 16, 8


class _Model(paddle.nn.Layer):
    """An embedding, whose weight the last layer has too. With meshes, the second layer and the last one are on another
    stage."""

    def __init__(self, meshes: list[Any]) -> None:
        super().__init__()
        self.embedding = paddle.nn.Embedding(_WORDS, _WIDTH)
        self.first, self.second = (paddle.nn.Linear(_WIDTH, _WIDTH, bias_attr=False) for _ in range(2))
        self.meshes = meshes
        for layer, mesh in zip((self.embedding, self.first, self.second), (*meshes[:1], *meshes), strict=False):
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Replicate()])

    def forward(self, ids: Any) -> Any:
        weight, hidden = self.embedding.weight, self.first(self.embedding(ids))
        for mesh in self.meshes[1:]:
            weight, hidden = (dist.reshard(one, mesh, [dist.Replicate()]) for one in (weight, hidden))
        return paddle.matmul(self.second(hidden), weight, transpose_y=True)


def _loss(output: Any, labels: Any) -> Any:
    return functional.cross_entropy(output, labels).mean()


def _program() -> Any:
    meshes = [dist.ProcessMesh([rank], dim_names=["stage"]) for rank in (0, 1)]
    dist.auto_parallel.set_mesh(dist.ProcessMesh([0, 1], dim_names=["pp"]))
    layer = _Model(meshes)
    optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(0.1, parameters=layer.parameters()))
    strategy = dist.Strategy()
    pipeline = strategy.pipeline
    pipeline.enable, pipeline.schedule_mode, pipeline.auto_parallel_sync_shared_params = True, "1F1B", True
    pipeline.pp_degree, pipeline.accumulate_steps, pipeline.micro_batch_size = 2, 2, 2
    batch = [paddle.zeros([4], "int64"), paddle.zeros([4, 1], "int64")]
    spec = [
        [DistributedInputSpec.from_dtensor(dist.shard_tensor(one, mesh, [dist.Replicate()]), name)]
        for one, mesh, name in zip(batch, meshes, "xy", strict=True)
    ]
    program = dist.to_static(layer, None, _loss, optimizer, strategy=strategy, input_spec=spec)
    program.train()
    return program


def _sums(tensors: dict[str, Any]) -> dict[str, float]:
    return {key: float(np.abs(np.asarray(one, np.float64)).sum()) for key, one in sorted(tensors.items())}


def move_shared(path: str) -> tuple[dict[str, float], list[dict[str, float]], list[list[str]]]:
    """Load what a layer and its optimizer have saved into a program whose stages share a weight, and save that.

    Returns:
        The sums of the layer's parameters and moments; those of this stage's variables after the load, and after one of
        what the program itself has saved; and the stored keys of both checkpoints.
    """
    static.install_stages()
    paddle.seed(0)
    layer = _Model([])
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    _loss(layer(paddle.arange(4)), paddle.ones([4, 1], "int64")).backward()
    optimizer.step()
    before = _sums({**layer.state_dict(), **{k: v for k, v in optimizer.state_dict().items() if "moment" in k}})
    state, loaded, keys = {"model": layer, "optimizer": optimizer}, [], []
    for folder in (f"{path}/layer", f"{path}/program"):
        save_state_dict(state, folder)
        keys.append(sorted(read_metadata(folder).state_dict_metadata))
        paddle.seed(1)
        program = _program()  # with other names than the one before
        load_state_dict({"model": program}, folder)
        loaded.append(_sums({key: one._local_value() for key, one in program.state_dict().items()}))
        state = {"model": program}
    return before, loaded, keys
