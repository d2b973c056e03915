"""What GPUs alone have, and a sample of what all devices share, on a machine that has some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import SaveOptions, load_merged_state_dict, load_state_dict, save_state_dict
from paddle_dist_ckpt.core.memory import address_of
from paddle_dist_ckpt.paddle_adapter import device
from paddle_dist_ckpt.paddle_adapter.device import pinned_memory
from paddle_dist_ckpt.paddle_adapter.device_copies import DeviceCopies, PaddleDevices
from paddle_dist_ckpt.paddle_adapter.device_memory import TensorBytes

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("cases_gpu.py")


def test_without_a_gpu_there_is_no_pinned_memory() -> None:
    if paddle.is_compiled_with_cuda():
        pytest.skip("this Paddle has pinned memory")
    assert pinned_memory(4096) is None
    assert address_of(PaddleDevices().host_memory(5000)) % 4096 == 0


def test_pinned_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("no more of it")

    monkeypatch.setattr(device, "_pinned_place", lambda: "pinned")
    monkeypatch.setattr(paddle, "to_tensor", refuse)
    assert pinned_memory(4096) is None
    assert len(PaddleDevices().host_memory(4096)) == 4096
    assert "4096 bytes of pinned memory cannot be had" in caplog.text


def test_pinned_memory_begins_at_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """With host memory in the place of pinned memory."""
    monkeypatch.setattr(device, "_pinned_place", paddle.CPUPlace)
    for nbytes in (1, 4096, 10_000):
        memory = pinned_memory(nbytes)
        assert memory is not None
        assert len(memory) == nbytes
        assert address_of(memory) % 4096 == 0
        memory[:] = 7
        assert memory.sum() == 7 * nbytes
    assert pinned_memory(0) is None


@pytest.mark.gpu
def test_copies_to_pinned_memory_do_not_wait() -> None:
    memory = pinned_memory(64 << 20)
    assert memory is not None
    tensor = paddle.arange(16 << 20, dtype="float32")
    copies = DeviceCopies()
    copies.read([(TensorBytes.of(tensor), 0, address_of(memory), len(memory))], memory)
    copies.mark().wait()
    assert np.array_equal(memory.view("float32"), np.arange(16 << 20, dtype="float32"))


@pytest.mark.gpu
def test_a_save_and_a_load(tmp_path: Path) -> None:
    state = {"x": paddle.arange(1 << 22, dtype="float32"), "y": paddle.ones([300, 500], dtype="bfloat16").t()}
    expected = {name: tensor.astype("float32").numpy() for name, tensor in state.items()}
    save_state_dict(state, tmp_path)
    pending = save_state_dict(state, tmp_path, async_save=True, options=SaveOptions(progress=False))
    for tensor in state.values():
        tensor.zero_()
    pending.result()
    load_state_dict(state, tmp_path)
    merged = load_merged_state_dict(tmp_path)
    for name, array in expected.items():
        assert np.array_equal(state[name].astype("float32").numpy(), array)
        assert np.array_equal(merged[name].astype("float32").numpy(), array)


@pytest.mark.gpu
def test_exchange_over_nccl_and_on_the_host(tmp_path: Path) -> None:
    if paddle.device.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    launch = [sys.executable, "-m", "paddle.distributed.launch", "--devices", "0,1", "--log_dir", str(tmp_path / "log")]
    done = subprocess.run([*launch, str(PROGRAM), str(tmp_path / "x")], cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0
