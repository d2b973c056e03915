"""Opens what others wrote: a checkpoint of another format becomes a plain value, a catalog of what it has and where.

Nothing that is read is executed, and of tensors' data nothing is read.
"""

from .catalog import Reader
from .paddle import PaddleReader
from .pdparams import PdparamsReader
from .safetensors import SafetensorsReader
from .static_auto import PaddleStaticReader
from .torch_dcp import TorchDCPReader

__all__ = ["READERS"]

READERS: tuple[Reader, ...] = (
    PaddleReader(),
    TorchDCPReader(),
    PaddleStaticReader(),
    SafetensorsReader(),
    PdparamsReader(),  # behind safetensors, beside which trainers put files such as scheduler.pdparams
)
"""The readers of all formats. Where several find a checkpoint among the same names, the first of them is meant."""
