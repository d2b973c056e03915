"""The library in the place of ``paddle.distributed``'s own checkpoint functions, for programs that call these."""

from __future__ import annotations

import dataclasses
import glob
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .api import load_merged_state_dict
from .arguments import checked
from .core.protocols import ControlSession
from .errors import CheckpointNotFoundError
from .export_calls import export_request
from .files.metadata import Metadata
from .files.names import metadata_id
from .folder.checkpoint import why_unknown
from .folder.foreign import Format, look
from .folder.ids import NO_FOLDER
from .folder.selection import Selection, unread, warn_of_unread
from .folder_calls import read_metadata
from .options import LoadOptions, SaveOptions
from .reports import ExportReport, LoadReport, SaveReport
from .saving.async_save import AsyncSave
from .state_exports import export_filled_with
from .wiring import connected, export_with, load_with, naming_folder, paddles, refuse, save_with, source_of

__all__ = ["install", "uninstall"]

_logger = logging.getLogger("paddle_dist_ckpt")

# Arguments of Paddle that change nothing here: their defaults, and why that is so.
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "safetensors": (False, "data files are safetensors files always"),
    "save_replicas": (False, "every byte is written once"),
    "mw_name_compatibility": (True, "names of optimizer variables are matched always"),
    "worker_groups": (None, "data are exchanged over the process group"),
    "comm_method": ("broadcast", "LoadOptions(exchange=...) says how data are exchanged"),
    "num_workers": (1, "a rank reads with as many threads as its part of the host's cores allows"),
    "allow_full_load": (True, "a `.metadata` is read by itself always"),
}
_NO_TRANSFORM = (
    "load_transform is not supported: tensors are loaded as they were saved, and what is quantized is for the program "
    "to convert. Pass None"
)


def install(
    unique_id_policy: Literal["paddle", "next"] = "paddle",
    *,
    foreign: Literal["error", "former"] = "error",
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> AbstractContextManager[object]:
    """Put this library's functions in the place of ``paddle.distributed``'s, for programs that call those.

    ``paddle.distributed.save_state_dict``, ``load_state_dict`` and ``load_merged_state_dict`` are replaced, and what
    goes with them: ``merge_sharded_state_dict`` exports by :func:`export`, ``clear_async_save_task_queue`` waits for
    saves in the background, ``paddle.load`` of a `.metadata` of this library returns its :class:`Metadata`, and
    ``load_state_dict_metadata`` what that has of the same name. They are replaced wherever one of Paddle's modules has
    them, and take every argument that those of Paddle 2.6 to 3.3 take. To be called on every rank, before other modules
    import the functions by name, for these keep what they have.

    It lasts until :func:`uninstall`, or as a context manager until the end of the block. Who installs again puts
    another layer over the first one, with its own arguments; :func:`uninstall` takes off the one that was put on last,
    and a block its own. When the last one is gone, Paddle's functions are where they were. A function that somebody
    else has put over ours meanwhile stays, and our functions that somebody still has do what the former ones do.

    Args:
        unique_id_policy: What a save without a ``unique_id`` does. ``"paddle"`` replaces the newest checkpoint in the
            folder, atomically, as Paddle 3 takes the newest id again: a job that saves into one folder over and over
            needs room for two checkpoints, and fills no disk that it has not filled before. If the newest is one of
            Paddle's own, its `.metadata` gets the ending ``.replaced`` when the save is committed. ``"next"`` takes the
            newest id + 1 and keeps all, as Paddle's documentation has it and Paddle 2.6 does.
        foreign: What becomes of a load from a folder in which no reader finds a checkpoint that it can read.
            ``"error"`` raises; ``"former"`` calls the function that was there before, on every rank.
        save_options: How to save. Names of data files end in ``.shards`` unless ``data_suffix`` is given.
        load_options: How to load.

    Returns:
        A context manager, which need not be used as one.

    Raises:
        TypeError, ValueError: an argument is invalid. Nothing was replaced.

    Examples:
        >>> import paddle
        >>> import paddle_dist_ckpt
        >>> with paddle_dist_ckpt.install():
        ...     report = paddle.distributed.save_state_dict({"w": paddle.ones([2, 3])}, "checkpoint")
        >>> paddle_dist_ckpt.verify("checkpoint").ok
        True
    """
    if unique_id_policy not in ("paddle", "next"):
        raise ValueError(f"unique_id_policy must be 'paddle' or 'next', not {unique_id_policy!r}")
    if foreign not in ("error", "former"):
        raise ValueError(f"foreign must be 'error' or 'former', not {foreign!r}")
    save_options = checked("save_options", save_options, SaveOptions) or SaveOptions()
    if save_options.data_suffix is None:  # trainers rename and remove *.safetensors, and count the names in them
        save_options = dataclasses.replace(save_options, data_suffix=".shards")
    load_options = checked("load_options", load_options, LoadOptions) or LoadOptions()
    from .paddle_adapter.patches import Replacement, in_dynamic_mode

    replaces, asks_former = unique_id_policy == "paddle", foreign == "former"
    ours = _DropIn(replaces, asks_former, save_options, load_options, lambda name: replacement.former(name))
    with_tensors = ("save_state_dict", "load_state_dict", "load_merged_state_dict", "merge_sharded_state_dict")
    others = ("clear_async_save_task_queue", "load_state_dict_metadata", "load")
    functions = {name: in_dynamic_mode(getattr(ours, name)) for name in with_tensors}
    replacement = Replacement(functions | {name: getattr(ours, name) for name in others})
    return replacement


def uninstall() -> None:
    """Undo the last :func:`install` that is in force, so that the functions from before it are back.

    Without one that is in force, it does nothing.

    Examples:
        >>> import paddle
        >>> import paddle_dist_ckpt
        >>> before = paddle.distributed.save_state_dict
        >>> installed = paddle_dist_ckpt.install()
        >>> paddle_dist_ckpt.uninstall()
        >>> paddle.distributed.save_state_dict is before
        True
    """
    from .paddle_adapter.patches import newest_replacement

    newest = newest_replacement()
    if newest is not None:
        newest.end()


class _FolderNotFoundError(CheckpointNotFoundError, FileNotFoundError):
    """There is no such folder, as programs catch it that resume if there is something."""


@contextmanager
def _no_folder_as_by_paddle() -> Iterator[None]:
    """Raise what is a FileNotFoundError too, as Paddle's is, if there is no folder; on all ranks, who hear the same."""
    try:
        yield
    except CheckpointNotFoundError as error:
        if not str(error).startswith(NO_FOLDER):
            raise
        raise _FolderNotFoundError(str(error)) from None


@dataclass(frozen=True, eq=False)
class _DropIn:
    """Functions that are called as Paddle's are.

    Attributes:
        replace_newest: Whether a save without a unique_id replaces the newest checkpoint.
        asks_former: Whether a load that finds nothing it can read is left to the function that was there before.
        save_options: How to save.
        load_options: How to load.
        former: Gives the function that was there before, by its name.
        saves: The saves in the background that were begun, as long as somebody knows of them.
    """

    replace_newest: bool
    asks_former: bool
    save_options: SaveOptions
    load_options: LoadOptions
    former: Callable[[str], Callable[..., Any]]
    saves: weakref.WeakSet[AsyncSave] = field(default_factory=weakref.WeakSet)

    def save_state_dict(
        self,
        state_dict: dict[Any, Any],
        path: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        unique_id: int | None = None,
        async_save: bool = False,
        safetensors: bool = False,
        save_replicas: bool = False,
    ) -> SaveReport | AsyncSave:
        """:func:`paddle_dist_ckpt.save_state_dict`, called as that of paddle.distributed is."""
        _log_without_effect("save_state_dict", safetensors=safetensors, save_replicas=save_replicas)
        options, replace = self.save_options, self.replace_newest
        with naming_folder(path):
            ranks = connected(process_group, coordinator_rank, options)
        find = paddles(ranks, state_dict)
        saved = save_with(ranks, find, path, unique_id, async_save, options, replace_newest=replace)
        if isinstance(saved, AsyncSave):
            self.saves.add(saved)
        return saved

    @_no_folder_as_by_paddle()
    def load_state_dict(
        self,
        state_dict: dict[Any, Any],
        path: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        unique_id: int | None = None,
        offload: bool = False,
        mw_name_compatibility: bool = True,
        aoa_config: Any = None,
        safetensors: bool = False,
        worker_groups: Any = None,
        comm_method: str = "broadcast",
        *,
        load_transform: Any = None,
        num_workers: int = 1,
    ) -> LoadReport | None:
        """:func:`paddle_dist_ckpt.load_state_dict`, called as that of paddle.distributed is."""
        of_paddle: dict[str, Any] = {
            "mw_name_compatibility": mw_name_compatibility,
            "safetensors": safetensors,
            "worker_groups": worker_groups,
            "comm_method": comm_method,
            "num_workers": num_workers,
        }
        _log_without_effect("load_state_dict", **of_paddle)
        options = self.load_options
        with naming_folder(path):
            ranks = connected(process_group, coordinator_rank, options)
        try:
            if load_transform is not None:
                raise NotImplementedError(_NO_TRANSFORM)
            options = _with_statements(options, aoa_config)
        except (NotImplementedError, TypeError) as error:
            refuse(ranks, options, error, "load_state_dict")
        find = paddles(ranks, state_dict, options.staging_bytes)
        if not self.asks_former:
            return load_with(ranks, find, path, unique_id, options, offload)
        with ranks.session("load_state_dict, which asks who can read it", options.timeout) as made, made as session:
            reason = _agreed_why_unknown(session, options, path, unique_id)
            if reason is None:
                return load_with(dataclasses.replace(ranks, within=session), find, path, unique_id, options, offload)
        of_paddle |= {"process_group": process_group, "coordinator_rank": coordinator_rank, "unique_id": unique_id}
        self._ask_former(
            "load_state_dict", reason, state_dict, path, offload=offload, aoa_config=aoa_config, **of_paddle
        )
        return None

    @_no_folder_as_by_paddle()
    def load_merged_state_dict(
        self,
        path: Any,
        prefix: str | None = None,
        unique_id: int | None = None,
        offload: bool = False,
        aoa_config: Any = None,
        safetensors: bool = False,
    ) -> dict[Any, Any]:
        """:func:`paddle_dist_ckpt.load_merged_state_dict`, called as that of paddle.distributed is: with flat keys."""
        _log_without_effect("load_merged_state_dict", safetensors=safetensors)
        options = _with_statements(self.load_options, aoa_config)
        options = dataclasses.replace(options, key_map=None, cast=False, resize=None)  # which are for what is filled
        if self.asks_former and (reason := _why_unknown(options, path, unique_id)):
            more = {"unique_id": unique_id, "offload": offload, "aoa_config": aoa_config, "safetensors": safetensors}
            found: dict[Any, Any] = self._ask_former("load_merged_state_dict", reason, path, prefix=prefix, **more)
            return found
        keys = f"{glob.escape(prefix)}.*" if prefix else None  # parts of a key count too, not only those of a path
        loaded = load_merged_state_dict(path, None, unique_id, offload, keys=keys, flat=True, options=options)
        return {key.removeprefix(f"{prefix}."): value for key, value in loaded.items()} if prefix else loaded

    @_no_folder_as_by_paddle()
    def merge_sharded_state_dict(
        self,
        load_path: Any,
        save_path: Any,
        prefix: str | None = None,
        safetensor_prefix: str = "model",
        skip_postfix_list: Collection[str] = (),
        process_group: Any = None,
        unique_id: int | None = None,
        offload: bool = False,
        aoa_config: Any = None,
        safetensors: bool = False,
    ) -> ExportReport:
        """:func:`paddle_dist_ckpt.export` as safetensors, called as Paddle's function of this name is.

        With an ``aoa_config`` the stored keys are written, each as the statements fill it; so they are with recipes, or
        an ``aoa_config``, of the options.
        """
        _log_without_effect("merge_sharded_state_dict", safetensors=safetensors)
        ranks, options = connected(process_group, 0, self.load_options), self.load_options
        patterns = aoa_config is None and not (options.aoa_config or options.recipes)
        try:
            options = _with_statements(options, aoa_config)
            options = dataclasses.replace(options, key_map=None, resize=None)  # which are for a program's own tensors
            if isinstance(skip_postfix_list, str):  # of which each letter would be an ending
                raise TypeError(f"skip_postfix_list must be a list of endings, not {skip_postfix_list!r}")
            metadata = self._metadata(load_path, unique_id)
            if metadata.format == "native":  # others have no numbers of ours
                unique_id = metadata.unique_id  # whose keys these are: a newer one may be saved meanwhile
            there, endings = metadata.state_dict_metadata, tuple(skip_postfix_list)
            not_read = unread(metadata, Selection())
            keys, left = (
                [key for key in some if key.startswith(prefix or "") and not key.endswith(endings)]
                for some in (there, not_read)
            )
            if patterns:  # one that is stored counts as itself, and the pattern of another may be one
                keys = [escaped if (escaped := glob.escape(key)) not in there else key for key in keys]
            request = export_request(save_path, unique_id=unique_id, keys=keys, stem=safetensor_prefix, of_torch=False)
        except Exception as error:
            refuse(ranks, options, error, "export" if patterns else "merge_sharded_state_dict")
        warn_of_unread({key: not_read[key] for key in left})
        if patterns:
            report = export_with(ranks, load_path, request, options)
        else:
            report = export_filled_with(ranks, load_path, request, options, offload)
        return dataclasses.replace(report, left_out=(*report.left_out, *left))

    def clear_async_save_task_queue(self) -> None:
        """Wait until the saves in the background have ended, all of them.

        Raises:
            CheckpointError: one has failed, and nobody has been told. If several have, another call tells of the next.
        """
        try:
            self.former("clear_async_save_task_queue")()
        finally:  # what is raised of one must not have the caller believe that no other goes on
            saves = list(self.saves)
            for save in saves:
                save.wait()
        for save in saves:
            self.saves.discard(save)
            save.raise_unobserved()

    def load_state_dict_metadata(self, path: Any, allow_full_load: bool = True) -> Any:
        """What a `.metadata` says of tensors and their shards; of another than ours what the former one returns."""
        _log_without_effect("load_state_dict_metadata", allow_full_load=allow_full_load)
        ours = self._our_metadata(path)
        if ours is None:
            return self.former("load_state_dict_metadata")(path, allow_full_load)
        return ours.state_dict_metadata

    def load(self, path: Any, **configs: Any) -> Any:
        """``paddle.load``; of a `.metadata` of this library its :class:`Metadata`."""
        ours = self._our_metadata(path)
        return self.former("load")(path, **configs) if ours is None else ours

    def _our_metadata(self, path: Any) -> Metadata | None:
        """What a `.metadata` of this library holds; None if the path is not of such a file."""
        if not isinstance(path, (str, os.PathLike)) or not isinstance(place := os.fspath(path), str):
            return None
        unique_id, folder = metadata_id(Path(place).name), Path(place).parent
        with suppress(NotADirectoryError, ValueError):  # somewhere in the path is a file; it is a URL
            if unique_id is not None:
                with source_of(folder, self.load_options) as storage:
                    is_ours = look(storage, Path(place).name)[0] is Format.OURS
                return self._metadata(folder, unique_id) if is_ours else None
        return None

    def _metadata(self, path: Any, unique_id: int | None) -> Metadata:
        return read_metadata(path, unique_id, progress_timeout=self.load_options.progress_timeout)

    def _ask_former(self, name: str, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Call the former function for what no reader can read.

        It is not given arguments that are what they are by default: an older Paddle may not know them.
        """
        _logger.warning("%s is left to the function that was there before: %s", name, reason)
        defaults = {key: one.default for key, one in inspect.signature(getattr(self, name)).parameters.items()}
        return self.former(name)(*args, **{key: value for key, value in kwargs.items() if value != defaults[key]})


def _why_unknown(options: LoadOptions, path: Any, unique_id: int | None, rank: int = 0) -> str | None:
    """Why no reader can read what is in a folder; None if one can."""
    try:
        with source_of(path, options, rank) as storage:
            return why_unknown(storage, unique_id)
    except (TypeError, ValueError):
        return None  # the load says what is wrong


def _agreed_why_unknown(session: ControlSession, options: LoadOptions, path: Any, unique_id: int | None) -> str | None:
    """The same as the coordinator sees it, for all ranks."""

    def decide(asked: Mapping[int, bytes]) -> dict[int, bytes]:
        reason = _why_unknown(options, path, unique_id, session.rank)
        return dict.fromkeys(asked, (reason or "").encode(errors="backslashreplace"))

    return session.gather_scatter("look", lambda: b"", decide).decode() or None


def _log_without_effect(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        default, reason = _WITHOUT_EFFECT[name]
        if value != default:
            _logger.debug("%s: %s=%r changes nothing here: %s", function, name, value, reason)


def _with_statements(options: LoadOptions, aoa_config: Any) -> LoadOptions:
    """The options with an aoa_config, if there is one. An empty mapping is none to Paddle either."""
    return options if aoa_config is None or aoa_config == {} else dataclasses.replace(options, aoa_config=aoa_config)
