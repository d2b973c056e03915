"""Why there is nothing to load where somebody has looked for it, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from ..files.names import metadata_id, metadata_name, parse_claim, parse_data_file, step_name, step_of
from ..storage.base import Storage
from .catalogs import foreign_ids
from .ids import committed_ids

__all__ = ["nothing_text", "steps_text"]

_MOST = 10  # ids or steps that are named
_MOST_LOOKS = 100  # into folders of steps


def nothing_text(storage: Storage, unique_id: int | None = None) -> str:
    """Why a folder has no checkpoint, or none of this number."""
    try:
        storage.identity()
    except FileNotFoundError:
        return f"there is no folder {storage.location}"
    which = "" if unique_id is None else f" with unique_id {unique_id}"
    return "; ".join([f"{storage.location} holds no committed checkpoint{which}", *_reasons(storage, unique_id)])


def _reasons(storage: Storage, unique_id: int | None) -> Iterator[str]:
    others = committed_ids(storage) or foreign_ids(storage)
    names = storage.names()
    if len(others) == 1:
        yield f"its only one has the id {others[0]}"
    elif others:
        yield f"it has those with the ids {_listed(others)}"
    refused = [reason for name in names if (reason := _refused(storage, name, unique_id)) is not None]
    yield from refused[:1]
    incomplete = [
        name
        for name in names
        if (parsed := parse_data_file(name)) is not None
        and parsed.unique_id not in others
        and unique_id in (None, parsed.unique_id)
    ]
    steps = _committed(storage, [step for name in names if (step := step_of(name)) is not None])
    if incomplete and not refused:
        yield _incomplete_text(names, incomplete)
    elif steps:
        latest = f"{storage.location}/{step_name(steps[-1])}"
        yield (
            f"it is a CheckpointManager's folder with {steps_text(steps)}: load from {latest}, the latest, or call "
            f"CheckpointManager({storage.location!r}).restore(state)"
        )
    elif len(names) == 1 and not others and not refused:
        shown = names[0].encode(errors="backslashreplace").decode()  # it may be no text
        yield f"its file {shown} is of no format that is known"


def steps_text(steps: Sequence[int]) -> str:
    """Steps in words."""
    if not steps:
        return "no committed step"
    return f"step{'s' if len(steps) > 1 else ''} {_listed(steps)}"


def _listed(numbers: Sequence[int]) -> str:
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
        return f"{name} is a link to something that is not there"
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
    for step in sorted(steps)[-_MOST_LOOKS:]:
        with suppress(OSError):
            storage.modified(f"{step_name(step)}/{metadata_name(step)}")
            found.append(step)
    return found
