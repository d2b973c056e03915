"""What there is to load in a folder, and why there is nothing where somebody has looked for it, in words."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ..core.text import counted, encodable
from ..files.names import metadata_id, metadata_name, parse_claim, parse_data_file, step_name, step_of
from ..readers.others import LOOK, left_by_download, what_it_is
from ..storage.base import Storage
from ..storage.capabilities import has_folders, is_part
from .catalogs import foreign_ids
from .foreign import foreign_id
from .ids import committed_ids, no_folder_text

__all__ = ["listed_ids", "managers_text", "nothing_text", "numbers_text", "steps_text", "warn_of_folders"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST = 10  # ids, steps or folders that are named
_STEP = re.compile(r"[0-9]{1,18}$")
_OF_TRAINERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model_state.pdparams",
    "model_state.pdparams.index.json",
    ".metadata",
    "0.metadata",
)
_OF_OTHERS = ".distcp"  # which says nothing of itself
_OF_TORCHS_RANK = re.compile(r"__[0-9]+\.metadata")
_NOT_READ = (".bin", ".pt", ".pth", ".ckpt", ".pdiparams")
_MOST_LOOKS = 100  # into folders of steps


def listed_ids(storage: Storage) -> list[int]:
    """The ids of a folder's checkpoints, ascending. If it has none and is a manager's, a warning names the steps."""
    ids = committed_ids(storage) or foreign_ids(storage)
    if not ids and (managers := managers_text(storage)):
        root = storage.location
        _logger.warning(
            "%s: no checkpoint is listed, for %s, or call CheckpointManager(%r).all_steps()", root, managers, root
        )
    return ids


def nothing_text(storage: Storage, unique_id: int | None) -> str:
    """Why a folder has no checkpoint, or none of this number."""
    if (text := no_folder_text(storage)) is not None:
        return text
    if (data_file := _data_file(storage)) is not None:
        return data_file
    place, which = storage.location, "" if unique_id is None else f" with unique_id {unique_id}"
    if unique_id is not None and is_part(storage):  # the folder may well hold one
        place = "/".join([place, *map(encodable, storage.names()[:1])])
    return "; ".join([f"{place} holds no committed checkpoint{which}", *_reasons(storage, unique_id)])


def _data_file(storage: Storage) -> str | None:
    """What to say of a path to a data file of a committed checkpoint, which is not the checkpoint."""
    folder = storage.location
    try:
        names = storage.names()
        parsed = parse_data_file(names[0]) if len(names) == 1 else None
        if parsed is None:
            return None
        storage.modified(metadata_name(parsed.unique_id))
        if storage.names() != names:  # committed just now
            return None
    except OSError:
        return None
    return f"{folder}/{names[0]} is a data file of checkpoint {parsed.unique_id}: pass the folder {folder}"


def _reasons(storage: Storage, unique_id: int | None) -> Iterator[str]:
    others = [] if unique_id is None else committed_ids(storage) or foreign_ids(storage)  # else one would be read
    names = storage.names()
    if len(others) == 1:
        yield f"its only one has the id {others[0]}"
    elif others:
        yield f"it has those with the ids {numbers_text(others)}"
    refused = next((reason for name in names if (reason := _refused(storage, name, unique_id)) is not None), None)
    if refused is not None:
        yield refused
    incomplete = [
        name
        for name in names
        if (parsed := parse_data_file(name)) is not None
        and unique_id in (None, parsed.unique_id)  # first: there may be as many others as files
        and parsed.unique_id not in others
    ]
    managers = managers_text(storage, unique_id)
    if incomplete and not refused:
        yield _incomplete_text(names, incomplete)
    elif managers:
        yield f"{managers}, or call CheckpointManager({storage.location!r}).restore(state)"
    elif not others and not refused:
        yield from _what_is_there(storage, names)


def _what_is_there(storage: Storage, names: Sequence[str]) -> Iterator[str]:
    """What there is in place of a checkpoint, in a folder or under the path of a file."""
    below = _with_checkpoints(storage, names)
    if below:
        found = "there is a checkpoint" if len(below) == 1 else "there are checkpoints"
        shown = ", ".join(map(encodable, below[-_MOST:]))
        more = "..., " if len(below) > _MOST else ""
        yield f"{found} in {more}{shown}: pass {storage.location}/{encodable(below[-1])}"
        return
    if any(parse_claim(name) is not None for name in names):
        yield "somebody is saving to it or deleting there, or has not come to an end"
        return
    if theirs := [name for name in names if name.endswith(_OF_OTHERS)]:
        number = foreign_id(theirs[0])
        which = ".metadata" if number is None else metadata_name(number)
        found = f"it has {counted(len(theirs), 'data file')} of another format, such as {encodable(theirs[0])}"
        of_rank = next(filter(_OF_TORCHS_RANK.fullmatch, names), None)
        if of_rank is None:
            yield f"{found}, but no {which}: copy it here too"
        else:
            yield (
                f"{found}, and in {of_rank} what one rank saved, as torch writes it with use_collectives=False, which "
                "is not read: load it with torch, and save it without"
            )
        return
    kinds = [(name, kind) for name in names if (kind := _kind_of(storage, name, len(names) == 1)) is not None]
    if kinds:
        yield f"its file {encodable(kinds[0][0])} is {kinds[0][1]}"
    elif len(names) == 1 and _can(storage.size, names[0]):
        yield (
            f"its file {encodable(names[0])} is of no format that is known; single files are told by names, which "
            "end with .safetensors, .pdparams or .pdopt"
        )


def _with_checkpoints(storage: Storage, names: Sequence[str]) -> list[str]:
    """The folders in a trainer's folder that hold checkpoints, those of later steps behind."""
    found: list[str] = []
    if not has_folders(storage):
        return found
    by_step = sorted(names, key=lambda name: (int(match[0]) if (match := _STEP.search(name)) else -1, name))
    for name in by_step[-_MOST_LOOKS:]:
        for folder in (name, f"{name}/model_state"):
            if any(_can(storage.modified, f"{folder}/{file}") for file in _OF_TRAINERS):
                found.append(folder)
    return found


def _can(look: Callable[[str], object], name: str) -> bool:
    """Whether a storage's look at something succeeds: at its time if it is there, at its size if it is a file."""
    try:
        look(name)
    except OSError:
        return False
    return True


def _kind_of(storage: Storage, name: str, alone: bool) -> str | None:
    """What a file is that is not read, or what a download has left in its place, if that is known."""
    if not alone and not name.endswith(_NOT_READ):
        return None
    with suppress(OSError):
        start = storage.read(name, LOOK)
        return left_by_download(start) or what_it_is(start)
    return None


def warn_of_folders(storage: Storage, files: Sequence[str]) -> None:
    """Say so if there are folders with checkpoints beside files that are taken for one: a trainer has its model and its
    optimizer there, and its scheduler beside; a manager has its steps there."""
    names = storage.names()[-_MOST_LOOKS:] if has_folders(storage) and not is_part(storage) else []
    found = [
        name
        for name in names
        if any(_can(storage.modified, f"{name}/{file}") for file in (".metadata", metadata_name(step_of(name) or 0)))
    ]
    if found:
        here = ", ".join(map(encodable, files[:_MOST])) + ", ..." * (len(files) > _MOST)
        below = "..., " * (len(found) > _MOST) + ", ".join(map(encodable, found[-_MOST:]))
        text = "%s: what is taken is in %s, and not in the checkpoints %s: pass the folder of one of these for it"
        _logger.warning(text, storage.location, here, below)


def managers_text(storage: Storage, unique_id: int | None = None) -> str:
    """That a folder is a manager's, with which steps, and what to pass in its place for the latest, or the one that was
    asked for; nothing if it has no steps."""
    steps = _committed(storage, [step for name in storage.names() if (step := step_of(name)) is not None])
    if not steps:
        return ""
    step = unique_id if unique_id is not None and unique_id in steps else steps[-1]
    which = "the latest" if step == steps[-1] else f"step {step}"
    return (
        f"it is a CheckpointManager's folder with {steps_text(steps)}: pass {storage.location}/{step_name(step)}, "
        f"{which}"
    )


def steps_text(steps: Sequence[int]) -> str:
    """Steps in words."""
    if not steps:
        return "no committed step"
    return f"step{'s' if len(steps) > 1 else ''} {numbers_text(steps)}"


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers in words, in ascending order: of many the last ones."""
    shown = ", ".join(map(str, numbers[-_MOST:]))
    return shown if len(numbers) <= _MOST else f"..., {shown}"


def _refused(storage: Storage, name: str, unique_id: int | None) -> str | None:
    """Why a `.metadata` is not read, if it is there and is none that may be."""
    number = metadata_id(name)
    if number is None or unique_id not in (None, number):
        return None
    try:
        storage.read(name, 1)
    except IsADirectoryError as error:
        return f"{name} is not read, for {error.strerror}"
    except FileNotFoundError:
        if _can(storage.modified, name):
            return f"{name} is a link to something that is not there"
        return f"{name} is listed, but is not there: it was removed just now, or the listing is out of date"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None


def _incomplete_text(names: Sequence[str], incomplete: Sequence[str]) -> str:
    found = f"it has {len(incomplete)} data file{'s' if len(incomplete) > 1 else ''}, such as {incomplete[0]}"
    if any(parse_claim(name) is not None for name in names):
        return f"{found}, of a save that goes on, or did not complete"
    return (
        f"{found}, but no .metadata for {'them' if len(incomplete) > 1 else 'it'}: the save did not complete, or the "
        ".metadata is missing (copy it here too, or rebuild_metadata makes it again if all data files are there)"
    )


def _committed(storage: Storage, steps: Sequence[int]) -> list[int]:
    """The steps whose folders have a `.metadata`, ascending."""
    found = []
    for step in sorted(steps)[-_MOST_LOOKS:] if has_folders(storage) else ():
        with suppress(OSError):
            storage.modified(f"{step_name(step)}/{metadata_name(step)}")
            found.append(step)
    return found
