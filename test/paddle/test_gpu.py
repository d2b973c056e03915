"""What GPUs alone have, and a sample of what all devices share, on a machine that has some."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import SaveOptions, load_merged_state_dict, load_state_dict, save_state_dict
from paddle_dist_ckpt.core.memory import address_of
from paddle_dist_ckpt.paddle_adapter import device
from paddle_dist_ckpt.paddle_adapter.device import at_device, pinned_memory
from paddle_dist_ckpt.paddle_adapter.device_copies import DeviceCopies, PaddleDevices
from paddle_dist_ckpt.paddle_adapter.device_memory import TensorBytes
from paddle_dist_ckpt.paddle_adapter.device_streams import recorded, wait_for

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("cases_gpu.py")


def test_without_a_gpu_there_is_no_pinned_memory() -> None:
    if paddle.is_compiled_with_cuda():
        pytest.skip("this Paddle has pinned memory")
    assert pinned_memory(4096) is None
    assert address_of(PaddleDevices().host_memory(5000)) % 4096 == 0


def test_pinned_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of GPUs Paddle gives address 0 then, with memory that must never be given back."""
    given_back = []

    class Nothing:
        def _set_dims(self, dims: list[int]) -> None:
            assert dims == [8192]

        def _mutable_data(self, place: str, dtype: Any) -> int:
            assert place == "pinned"
            assert dtype == paddle.base.core.VarDesc.VarType.UINT8
            return 0

        def __del__(self) -> None:
            given_back.append(self)

    monkeypatch.setattr(device, "_pinned_place", lambda: "pinned")
    monkeypatch.setattr(device.core, "DenseTensor", Nothing, raising=False)
    assert pinned_memory(4096) is None
    assert len(PaddleDevices().host_memory(4096)) == 4096
    gc.collect()
    assert not given_back
    assert "4096 bytes of pinned memory cannot be had, so other memory is used: Paddle has no more of it" in caplog.text


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


class _Cuda(threading.local):
    """CUDA's current device of each thread."""

    device = 0

    def set_device(self, number: int) -> None:
        self.device = number


class _Event:
    """An event of CUDA: it is one of the device that is current for the thread that makes it."""

    def __init__(self, cuda: _Cuda) -> None:
        self.device = cuda.device

    def record(self, stream: int) -> None:
        if stream != self.device:
            raise OSError("(External) CUDA error(400), invalid resource handle.")

    def query(self) -> bool:
        return True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    """A process whose device is gpu:3, where the stand-in for a stream is the number of its device."""
    made = _Cuda()
    monkeypatch.setattr(device.core, "set_cuda_current_device_id", made.set_device, raising=False)
    monkeypatch.setattr(device, "_current_place", lambda: "gpu:3")
    monkeypatch.setattr(device, "name_of", str)
    monkeypatch.setattr(device, "_place_guard", nullcontext)
    monkeypatch.setattr(paddle.device, "_convert_to_place", str)
    monkeypatch.setattr(paddle.device, "Event", lambda: _Event(made))
    return made


def _on_another_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    assert found, "it has failed"
    return found[0]


@pytest.mark.parametrize("number", [3, 5])
def test_events_of_other_threads_are_of_the_streams_device(cuda: _Cuda, number: int) -> None:
    """Of the process's own device, and of another one."""
    assert cuda.device == 0
    event = _on_another_thread(lambda: recorded(number, f"gpu:{number}", ()))
    wait_for(event)
    assert event.device == number


def test_pinned_memory_of_other_threads_touches_no_other_device(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    def made(*_: object) -> None:
        devices.append(cuda.device)
        raise MemoryError("no more of it")

    monkeypatch.setattr(device, "_pinned_place", lambda: "pinned")
    monkeypatch.setattr(device, "_allocate", made)
    assert _on_another_thread(lambda: pinned_memory(4096) is None)
    assert devices == [3]


def test_another_device_is_current_for_a_while(cuda: _Cuda) -> None:
    with at_device("gpu:5"):
        assert cuda.device == 5
    assert cuda.device == 3


def test_a_device_that_another_thread_has_made_current_for_a_while_is_not_gone_back_to(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This thread asks for one while the other has gpu:5, and gets it when the other has gone back to gpu:3."""
    current, asked = ["gpu:3"], threading.Event()

    @contextmanager
    def guard(place: str) -> Iterator[None]:
        before, current[0] = current[0], place
        yield
        current[0] = before

    def place() -> str:
        if threading.current_thread() is threading.main_thread():
            asked.set()
        return current[0]

    def other(entered: threading.Event) -> None:
        with at_device("gpu:5"):
            entered.set()
            assert asked.wait(60)

    monkeypatch.setattr(device, "_place_guard", guard)
    monkeypatch.setattr(device, "_current_place", place)
    entered = threading.Event()
    thread = threading.Thread(target=other, args=(entered,))
    thread.start()
    assert entered.wait(60)
    with at_device("gpu:4"):
        assert cuda.device == 4
    thread.join()
    assert cuda.device == 3


def test_a_device_that_is_no_gpu_leaves_cuda_alone(cuda: _Cuda) -> None:
    with at_device("test_device:5"):
        assert cuda.device == 0


@pytest.mark.gpu
def test_copies_of_other_threads() -> None:
    """On the last device, as CUDA's own current one is the first."""
    place = f"gpu:{paddle.device.cuda.device_count() - 1}"
    with at_device(place):
        tensor = paddle.arange(1 << 20, dtype="float32")

    def read() -> Any:
        array, copies = np.empty(1 << 20, "float32"), DeviceCopies()
        copies.read([(TensorBytes.of(tensor), 0, address_of(array), array.nbytes)], array)
        copies.mark().wait()
        return array

    assert np.array_equal(_on_another_thread(read), np.arange(1 << 20, dtype="float32"))


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
