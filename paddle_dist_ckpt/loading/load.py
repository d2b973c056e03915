"""Loading into a state_dict, whose tensors are filled in place, and whose objects are given their states."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from ..core.frames import with_room_for_frames
from ..errors import CheckpointError
from ..files.metadata import Metadata
from ..reports import LoadReport
from ..tree.building import assign_all
from ..tree.paths import plain_key
from ..tree.state_dict import Leaves, flatten
from .load_rounds import Holder, LeavesLoad
from .messages import Mismatch
from .reading import LoadContext
from .wording import LEFT, NOT_TAKEN, some_of

__all__ = ["load"]

_logger = logging.getLogger("paddle_dist_ckpt")


@with_room_for_frames
def load(
    state_dict: dict[Any, Any],
    context: LoadContext,
    unique_id: int | None,
    scan: Any = None,
    read: Callable[[int | None], Metadata] | None = None,
    thaws: bool = True,
) -> LoadReport:
    """Fill a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.load_state_dict`.

    Args:
        state_dict: This rank's.
        context: This rank's surroundings.
        unique_id: Which checkpoint; None for the newest.
        scan: Finds the leaves that are asked for, and is cached; None for all of the state_dict.
        read: See :class:`.load_rounds.LeavesLoad`.
        thaws: Whether optimizers make entries for parameters that are not trained now, if the checkpoint has such.
    """
    if scan is None:
        scan = functools.cache(lambda: flatten(state_dict, context.adapter))
    return LeavesLoad(_StateDict(state_dict, context, scan, thaws), context, unique_id, read).run()


class _StateDict(Holder):
    """One that a user has passed. The arguments are those of :func:`load`."""

    warning = "\nTargets are partly written: load again, or do not use them."

    def __init__(self, state_dict: dict[Any, Any], context: LoadContext, scan: Any, thaws: bool) -> None:
        self._state_dict, self._context, self._adapter = state_dict, context, context.adapter
        self._scan, self.thaws = scan, thaws

    def scan(self) -> Leaves:
        leaves: Leaves = self._scan()
        return leaves

    def thaw(self, pairs: Sequence[tuple[str, str]]) -> None:
        leaves = self.scan()
        tensors = dict(zip(leaves.tensor_paths, leaves.tensors, strict=True))
        for opened in leaves.objects:
            parameters = [tensors[path] for optimizer, path in pairs if optimizer == opened.path and path in tensors]
            if parameters:
                self._adapter.make_entries(opened.value, list(map(self._adapter.token, parameters)))
        self._scan.cache_clear()

    def change(self, untouched: Container[str]) -> None:
        leaves = self.scan()
        pairs = zip(leaves.tensor_paths, leaves.tensors, strict=True)
        self._adapter.change([tensor for path, tensor in pairs if path not in untouched])

    def renew(self, untouched: Container[str], lacking: Container[str]) -> set[str]:
        leaves = self.scan()
        tokens = dict(zip(leaves.tensor_paths, map(self._adapter.token, leaves.tensors), strict=True))
        filled = {token for path, token in tokens.items() if path not in untouched}
        lost = {path: token for path, token in tokens.items() if path in lacking}
        try:
            found = self._adapter.renew(leaves, filled, set(lost.values()))
        except Exception as error:
            raise CheckpointError(f"master weights that are not stored could not be set: {error}") from error
        return {path for path, token in lost.items() if token in found}

    def restore(self, values: Mapping[str, Any], untouched: Container[str]) -> list[Mismatch]:
        left = list[Mismatch]()
        for opened, state in assign_all(self._state_dict, self.scan(), values):
            if opened.path in untouched:
                continue
            key, kind = plain_key(opened.path), type(opened.value).__name__
            try:
                not_taken = self._adapter.restore(opened.value, state)
            except Exception as error:
                raise CheckpointError(
                    f"{key}: the {kind} did not take its state: {type(error).__name__}: {error}; "
                    f"LoadOptions(key_map={{{key!r}: None}}) leaves it as it is"
                ) from error
            left += [
                Mismatch(f"{key}.{name}", f"{key}.{name}: {LEFT}, for the {kind} {NOT_TAKEN}") for name in not_taken
            ]
        if left and self._context.is_coordinator:
            _logger.warning("%s: %s", self._context.storage.location, some_of(map(str, left)))
        return left
