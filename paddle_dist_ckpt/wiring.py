"""Puts the parts together for one save, load or export: who takes part, the folder, the framework's tensors."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NoReturn, TypeVar

import msgspec

from .arguments import as_integer, checked, checked_timeout
from .control.ranks import Ranks
from .core.naming import naming
from .core.parts import Arranger
from .exporting.export import export_checkpoint
from .exporting.formats import ExportRequest
from .files.metadata import Metadata
from .files.names import MOST_IDS
from .folder.selection import Chosen, Selection
from .loading.choosing import choose
from .loading.load import load
from .loading.making import arranger_for
from .loading.merged import load_merged
from .loading.reading import LoadContext
from .loading.staging import piece_bytes
from .options import LoadOptions, SaveOptions
from .recipes import distinct_text
from .reports import ExportReport, LoadReport, SaveReport
from .saving.async_save import AsyncSave
from .saving.save import After, save
from .saving.save_memory import SaveContext, SaveMemory
from .saving.turn import Ticket
from .storage import Storage, as_source, as_storage, bounded, bounded_folders
from .tree.state_dict import Adapter

__all__ = [
    "Find",
    "arranger_of",
    "check_bool",
    "checked_id",
    "comparable",
    "connected",
    "enter_with",
    "export_with",
    "folder_of",
    "load_whole",
    "load_with",
    "members",
    "naming_folder",
    "paddles",
    "pass_over_last_save",
    "prepare_save",
    "refuse",
    "save_kind",
    "save_with",
    "source_of",
]

_LONGEST_TEXT = 1000  # of a recipe that is compared with those of other ranks, before its digest
Options = TypeVar("Options", SaveOptions, LoadOptions)
Find = Callable[[], tuple[dict[Any, Any], Adapter]]
"""Finds the state_dict, and what makes its tensors accessible; called when other ranks will hear of what it raises."""


def connected(process_group: Any, coordinator_rank: int, options: SaveOptions | LoadOptions) -> Ranks:
    """The ranks of a Paddle group, connected. See :func:`.paddle_adapter.connect`."""
    from .paddle_adapter import connect

    return connect(process_group, coordinator_rank, options.no_dist, options.timeout)


def enter_with(options: Any, kind: type[Options]) -> tuple[Options, Callable[[], object]]:
    """Options to enter a session with, and what to call in there: it raises TypeError if a user passed none of them.

    So the other ranks hear of it, and none of them takes this rank's next call for this one.
    """
    if options is None or isinstance(options, kind):
        return options or kind(), lambda: None
    alone = options.get("no_dist") if isinstance(options, Mapping) else getattr(options, "no_dist", False)
    return kind(no_dist=alone is True), lambda: checked("options", options, kind)


def refuse(ranks: Ranks, options: SaveOptions | LoadOptions, error: Exception, kind: str) -> NoReturn:
    """Raise on all ranks, on those that did not ask for it as well; ``kind`` is what their session is called."""
    with ranks.session(kind, options.timeout) as made, made:
        raise error


def paddles(
    ranks: Ranks,
    state_dict: dict[Any, Any],
    staging_bytes: int | None = None,
    check: Callable[[], object] = lambda: None,
) -> Find:
    """Finds a state_dict of Paddle's tensors: to be saved, or given the staging memory of a load, to be filled.

    ``check`` raises what else is wrong with this rank's arguments.
    """
    from .paddle_adapter import PaddleAdapter

    piece = None if staging_bytes is None else piece_bytes(staging_bytes)

    def find() -> tuple[dict[Any, Any], Adapter]:
        check()
        return state_dict, PaddleAdapter(ranks.rank, piece)

    return find


def naming_folder(path: Any) -> AbstractContextManager[None]:
    """Has errors that leave the block name the folder that a user means by ``path``, if it is one."""
    try:
        return naming(as_storage(path).location)
    except (TypeError, ValueError, OSError):  # which is raised where the other ranks hear of it
        return nullcontext()


def save_with(
    ranks: Ranks,
    find: Find,
    path: Any,
    unique_id: int | None,
    in_background: bool,
    options: SaveOptions,
    after: After | None = None,
    replace_newest: bool = False,
    kind: str = "save_state_dict",
) -> SaveReport | AsyncSave:
    """Save what is found together with other ranks. See :func:`paddle_dist_ckpt.save_state_dict`.

    Args:
        after: What else every rank does in the session, if anything.
        replace_newest: Without a number, replace the newest checkpoint, by the coordinator's listing.
        kind: What the session is called.
    """
    with naming_folder(path) if ranks.within is None else nullcontext():
        ticket, made = Ticket(), ranks.make_session(save_kind(in_background, kind), options.timeout)
        # One within another call takes no turn: that call's session is open already.
        memory = ranks.memory.setdefault("save", SaveMemory()) if ranks.within is None else SaveMemory()
        try:
            memory.turn.join(ticket)
            with ExitStack() as opened:
                session = opened.enter_context(made)
                unique_id = checked_id(unique_id)  # all of this in the session, so that the other ranks hear of it
                check_bool("async_save", in_background)
                state_dict, adapter = find()
                find_storage, bound = functools.partial(as_storage, path), options.progress_timeout
                storage = opened.enter_context(bounded(find_storage, path, bound, ranks.rank, memory.unfinished))
                context = SaveContext(storage, session, ranks.transport, adapter, memory, replace_newest, ticket)
                return save(state_dict, opened, context, unique_id, options, in_background, after)
        finally:
            # An interrupt may have kept the block from ending what it had begun: see Turn, and Ending.
            ticket.over = (
                ticket.over or not ticket.goes_on
            )  # first, as it calls nothing, so that no other comes between
            if not ticket.goes_on:
                made.__exit__(*sys.exc_info())


def save_kind(in_background: bool, kind: str = "save_state_dict") -> str:
    """What the session of a save is called: all ranks must make it in the background, or none."""
    return f"{kind}(async_save=True)" if in_background else kind


def prepare_save(ranks: Ranks, nbytes: int) -> None:
    """Have memory ready for a snapshot of this size, by a thread, before the first save in the background."""
    ranks.memory.setdefault("save", SaveMemory()).prepare_snapshot(nbytes)


def pass_over_last_save(ranks: Ranks) -> None:
    """Wait for the ranks' save in the background, and have the next one not raise its failure."""
    ranks.memory.setdefault("save", SaveMemory()).pass_over_last()


def load_with(
    ranks: Ranks,
    find: Find,
    path: Any,
    unique_id: int | None,
    options: LoadOptions,
    offload: bool = False,
    kind: str = "load_state_dict",
    threads: int | None = None,
    is_part: bool = False,
) -> LoadReport:
    """Load into what is found together with other ranks. See :func:`paddle_dist_ckpt.load_state_dict`.

    Args:
        kind: What the session is called.
        threads: How many threads read; None for all that the host offers.
        is_part: Whether the caller logs what is loaded.
    """
    with naming_folder(path), ranks.session(kind, options.timeout) as made, made as session:
        unique_id = checked_id(unique_id)  # all of this in the session, so that the other ranks hear of it
        check_bool("offload", offload)
        state_dict, adapter = find()
        transport = ranks.host_transport if offload else ranks.transport
        arranger = arranger_of(options, others=len(session.ranks) > 1)
        with source_of(path, options, ranks.rank) as storage:
            context = LoadContext(storage, session, transport, adapter, options, threads, offload, arranger, is_part)
            return load(state_dict, context, unique_id)


def source_of(path: Any, options: LoadOptions, rank: int = 0) -> AbstractContextManager[Storage]:
    """The storage to read from that a user means by ``path``, until the end of the block, as the options bound it."""
    return folder_of(as_source, path, options.progress_timeout, rank)


def folder_of(
    find: Callable[[Any], Storage], path: Any, progress_timeout: float | None, rank: int = 0
) -> AbstractContextManager[Storage]:
    """The storage that ``find`` makes of what a user passes as ``path``, until the end of the block.

    Raises:
        ValueError: ``progress_timeout`` is out of range.
    """
    if progress_timeout is not None:
        progress_timeout = checked_timeout("progress_timeout", progress_timeout)
    return bounded(functools.partial(find, path), path, progress_timeout, rank)


def arranger_of(options: LoadOptions, others: bool = False) -> Arranger | None:
    """What reads Paddle's own configuration of what tensors are made of, if there is one; without a statement it is
    none, unless there are other ranks, which may have some."""
    if options.aoa_config is None or not (others or options.aoa_config.get("aoa_statements")):
        return None
    from .paddle_adapter.aoa import PaddleArranger

    return PaddleArranger(options.aoa_config)


def _digest_of_rules(options: LoadOptions) -> str:
    """By which ranks can tell whether they ask for the same to be made."""
    recipes = [(key, distinct_text(recipe, _LONGEST_TEXT)) for key, recipe in (options.recipes or {}).items()]
    rules = repr((recipes, options.aoa_config)) if recipes or options.aoa_config else ""
    return hashlib.sha256(rules.encode("utf-8", "surrogatepass")).hexdigest()


def load_whole(
    path: Any,
    unique_id: int | None,
    selection: Selection,
    flat: bool,
    options: LoadOptions,
    place: str | None = None,
    threads: int | None = None,
    is_part: bool = False,
) -> dict[Any, Any]:
    """Load whole Paddle tensors into this process alone. See :func:`paddle_dist_ckpt.load_merged_state_dict`.

    Args:
        place: Where the tensors shall be; None for Paddle's current device.
        threads: How many threads read; None for all that the host offers.
        is_part: Whether the caller logs what is loaded.
    """
    from .paddle_adapter import PaddleAdapter

    adapter = PaddleAdapter(0, piece_bytes(options.staging_bytes), place)
    with source_of(path, options) as storage:
        return load_merged(
            storage, adapter, unique_id, selection, flat, options, threads, arranger_of(options), is_part
        )


def comparable(request: ExportRequest, options: LoadOptions) -> ExportRequest:
    """The request with that by which ranks can tell whether they ask for the same to be made."""
    return msgspec.structs.replace(request, made=_digest_of_rules(options))


def export_with(ranks: Ranks, path: Any, request: ExportRequest, options: LoadOptions) -> ExportReport:
    """Export a checkpoint together with other ranks. See :func:`paddle_dist_ckpt.export`."""
    request = comparable(request, options)
    with (
        ranks.session("export", options.timeout) as made,
        made as session,
        source_of(path, options, ranks.rank) as storage,
        bounded_folders(options.progress_timeout, ranks.rank) as folders,
    ):
        session.end_collectives()  # it has none
        arranger = arranger_for(options, arranger_of(options))

        def choose_all(metadata: Metadata) -> Chosen:
            return choose(metadata, storage.location, request.selection, arranger, options.strict)

        separate = options.separate_folders
        return export_checkpoint(session, storage, request, choose_all, options.progress, folders, separate)


def members(process_group: Any, options: LoadOptions) -> Ranks:
    """The ranks of a Paddle group; this process alone, without Paddle, if it was not launched as one of several."""
    if process_group is None and "paddle" not in sys.modules and os.environ.get("PADDLE_TRAINERS_NUM", "1") == "1":
        return Ranks.alone()
    return connected(process_group, 0, options)


def checked_id(unique_id: int | None) -> int | None:
    """Return a unique_id that may be one.

    Raises:
        ValueError: it may not.
    """
    if unique_id is None:
        return None
    number = as_integer(unique_id)
    if number is None or not 0 <= number < MOST_IDS:
        raise ValueError(f"unique_id must be None or an integer from 0 to below 10**18, not {unique_id!r}")
    return number


def check_bool(name: str, value: bool) -> None:
    """Raises TypeError: an argument is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {value!r}")
