"""Has a checkpoint of Paddle's found no more, since one of ours stands for it."""

from __future__ import annotations

import logging
from contextlib import closing

from ..errors import CheckpointError
from ..files.names import metadata_name
from ..storage.base import Storage
from ..storage.capabilities import what_is_on_disk
from .foreign import Format, look

__all__ = ["put_aside"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_BYTES = 1 << 30
_MOST_HOLES = 16 << 20


def put_aside(storage: Storage, unique_id: int, temporary: str) -> None:
    """Give a `.metadata` of Paddle's another name.

    Trainers insist on one `.metadata` a folder; Paddle's own functions would have overwritten this one.

    Args:
        storage: The folder.
        unique_id: Its number. If it is gone, or not Paddle's any more, nothing is done.
        temporary: A name that the new one may have until it is complete.

    Raises:
        CheckpointError: it is too large to be one of Paddle's.
        OSError: it has its name still.
    """
    name = metadata_name(unique_id)
    if look(storage, name)[0] is not Format.PADDLE:
        return
    with closing(storage.open(name)) as file:
        _, on_disk = what_is_on_disk(file, name)
        if file.size > min(_MOST_BYTES, on_disk + _MOST_HOLES):
            raise CheckpointError(f"{storage.location}/{name} is too large to be one of Paddle's")
        data = storage.read(name, file.size)
    storage.publish(f"{name}.replaced", data, temporary, replace=True)
    # IMPORTANT: what stands there now is what was kept, and not what somebody has saved under its number meanwhile.
    try:
        if storage.read(name, len(data) + 1) != data:
            return
    except (FileNotFoundError, IsADirectoryError):
        return
    storage.delete(name)
    storage.sync()
    _logger.info("%s: %s is called %s.replaced now", storage.location, name, name)
