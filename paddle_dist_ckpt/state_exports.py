"""Exports of what no checkpoint holds as it is wanted: saved to a hidden folder first, and exported from there."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from .control.ranks import Ranks
from .core.messages import encode
from .core.parts import SourceTensor
from .core.protocols import ControlSession
from .core.shards import Kind
from .errors import CheckpointError, UnsupportedValueError
from .exporting.export import check_free, check_same_export
from .exporting.formats import ExportRequest
from .files.metadata import Metadata
from .files.names import DEFAULT_SUFFIX
from .folder.checkpoint import read_checkpoint
from .folder.hidden import HiddenFolder
from .loading.merged import add_leaf
from .loading.recipes import match_recipes
from .loading.staging import piece_bytes
from .loading.stored_tensors import stored_tensors
from .loading.wording import LEFT_BY_AOA
from .options import LoadOptions, SaveOptions
from .reports import ExportReport
from .storage import bounded_folders
from .tree.paths import plain_key
from .tree.state_dict import Adapter, Leaves
from .visible import visible
from .wiring import arranger_of, comparable, export_with, load_with, paddles, save_with, source_of

__all__ = ["export_filled_with", "export_state_with"]

_logger = logging.getLogger("paddle_dist_ckpt")


def export_state_with(
    ranks: Ranks, state_dict: dict[Any, Any], request: ExportRequest, options: SaveOptions, source: str = ""
) -> ExportReport:
    """Export a state_dict together with other ranks. See :func:`paddle_dist_ckpt.export_state_dict`.

    ``source`` is the folder that it was loaded from, if it was.
    """
    suffix = options.data_suffix or DEFAULT_SUFFIX
    request = msgspec.structs.replace(request, block_bytes=options.block_bytes, data_suffix=suffix)
    with _hidden_folder(ranks, request, options, source) as (within, hidden):
        save_with(within, paddles(ranks, state_dict), hidden, 0, False, options)
        return export_with(within, hidden, request, LoadOptions(**_shared(options)))


@contextmanager
def _hidden_folder(
    ranks: Ranks, request: ExportRequest, options: SaveOptions, source: str
) -> Iterator[tuple[Ranks, str]]:
    """A folder beside the place where the export is to be, made and removed by the coordinator; the same on all ranks.
    With it, the ranks within one session for all that is done with it.

    Raises:
        FileExistsError: what is to be written is there.
    """
    out, made, hidden = Path(request.out), list[HiddenFolder](), ""

    def place(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        check_free(request, folders)
        made.append(HiddenFolder(out, f".{out.name}.state-{secrets.token_hex(8)}", folders))
        made[0].make(source, 0o700)
        return dict.fromkeys(messages, str(made[0].path).encode())

    with bounded_folders(options.progress_timeout, ranks.rank) as folders:
        try:
            with ranks.session("export_state_dict", options.timeout) as opened, opened as session:
                hidden = session.gather_scatter("place", lambda: b"", place).decode()
                yield dataclasses.replace(ranks, within=session), hidden
        finally:
            for folder in made:
                folder.remove()
            if hidden and not made:  # a save prepares its folder on each rank, and may have when it was removed already
                with suppress(OSError, CheckpointError):
                    folders.run("removing", hidden, Path(hidden).rmdir)


def export_filled_with(
    ranks: Ranks, path: Any, request: ExportRequest, options: LoadOptions, offload: bool
) -> ExportReport:
    """Export tensors under the keys, in the shapes and of the types that a checkpoint has, as a load with these options
    fills them; together with other ranks, of which each holds as many of them whole.

    What the load leaves as it is is left out.

    Raises:
        UnsupportedValueError: a key is one of several tensors' if it is not escaped.
        Otherwise what a load and an export raise.
    """
    with ranks.session("merge_sharded_state_dict", options.timeout) as made, made as session:
        within = dataclasses.replace(ranks, within=session)
        return _export_filled(session, within, path, request, options, offload)


def _export_filled(
    session: ControlSession, ranks: Ranks, path: Any, request: ExportRequest, options: LoadOptions, offload: bool
) -> ExportReport:
    from .paddle_adapter import PaddleAdapter

    metadata, source = _read_together(session, path, request, options)
    stored, place = stored_tensors(metadata), "cpu" if offload else None
    asked = set(stored if request.keys is None else request.keys)
    keys = [key for key in stored if key in asked]
    _check_one_meaning(metadata, keys)
    mine = keys[session.ranks.index(ranks.rank) :: len(session.ranks)]
    state: dict[Any, Any] = {}

    def find() -> tuple[dict[Any, Any], Adapter]:  # in the session, so that all ranks hear of one that has no memory
        adapter, leaves = PaddleAdapter(ranks.rank, piece_bytes(options.staging_bytes), place), Leaves()
        for key in mine:
            add_leaf(leaves, key, Kind.TENSOR, stored[key].shape, stored[key].dtype, adapter.empty, key)
        state.update(zip(mine, leaves.tensors, strict=True))
        return state, adapter

    recipes = options.recipes or {}  # those of what is not asked for, or not stored, make nothing that is written
    patterns = match_recipes(recipes, {key: key for key in keys}).patterns
    recipes = {key: one for key, one in recipes.items() if patterns[key]}
    filling = dataclasses.replace(options, recipes=recipes or None, allow_unused=["*"])  # what is not written
    report = load_with(ranks, find, path, metadata.unique_id, filling, offload)
    if ranks.rank == session.coordinator:
        _warn_of_new(options, stored)
    left = set(report.skipped_keys)
    for reason in report.skipped:
        _logger.log(logging.INFO if LEFT_BY_AOA in reason else logging.WARNING, "left out: %s", reason)
    state = {key: tensor for key, tensor in state.items() if key not in left}
    request = msgspec.structs.replace(request, keys=None, unique_id=None)
    return export_state_with(ranks, state, request, SaveOptions(**_shared(options)), source)


def _read_together(
    session: ControlSession, path: Any, request: ExportRequest, options: LoadOptions
) -> tuple[Metadata, str]:
    """What the checkpoint holds, which each rank reads for itself, when the place of the export is known to be free and
    all ranks to ask for the same; with its folder."""
    found: list[tuple[Metadata, str]] = []

    def read() -> bytes:
        with source_of(path, options, session.rank) as storage:
            found.append((read_checkpoint(storage, request.unique_id), storage.location))
        return encode(comparable(request, options))

    def check(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        check_same_export(messages, session.coordinator)
        check_free(request, folders)
        return dict.fromkeys(messages, b"")

    with bounded_folders(options.progress_timeout, session.rank) as folders:
        session.gather_scatter("read", read, check)
    return found[0]


def _check_one_meaning(metadata: Metadata, keys: Sequence[str]) -> None:
    """Refuse keys that mean something else in a flat state_dict: there another stored tensor may be called so.

    Raises:
        UnsupportedValueError: there are such keys.
    """
    special = metadata.special_keys
    unclear = {*special.values(), *map(plain_key, special)}
    found = [key for key in keys if key in unclear]
    if found:
        raise UnsupportedValueError(
            f"{visible(', '.join(found[:5]))}: such keys are escaped, or others are for their sake, and with an "
            "aoa_config they could be taken for each other; export() with such LoadOptions does not ask by them"
        )


def _warn_of_new(options: LoadOptions, stored: Mapping[str, SourceTensor]) -> None:
    arranger = arranger_of(options)
    try:
        made = {} if arranger is None else arranger.arrange(stored, None)
    except ValueError:  # a pattern stands for wanted keys, of which there are none where everything is to be made
        return
    new = [key for key in made if key not in stored]
    if new:
        _logger.warning("only tensors under stored keys are written, and not %s", ", ".join(new[:20]))


def _shared(options: LoadOptions | SaveOptions) -> dict[str, Any]:
    """What a load and a save of one export have in common."""
    names = ("timeout", "progress", "progress_timeout", "separate_folders")
    return {name: getattr(options, name) for name in names}
