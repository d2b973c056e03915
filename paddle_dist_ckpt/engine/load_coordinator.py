"""The coordinator's side of a load: it alone reads `.metadata`, and tells each rank what that rank needs to know."""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ..core.codec import decode_metadata, table_to_record
from ..core.columns import pack_column
from ..core.metadata import Metadata
from ..core.naming import canonical_paths
from ..core.paths import is_own, plain_key
from ..core.ports import ControlSession
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError, StateDictMismatchError
from ..formats.names import metadata_name
from ..options import LoadOptions
from ..storage.base import Storage
from .commit import newest_id, nothing_text, save_of
from .exchange_orders import ExchangePlanner
from .messages import (
    Decision,
    LoadAnswer,
    LoadRequest,
    LoadResult,
    Needs,
    Opened,
    Problems,
    Reach,
    Wanted,
    decode,
    encode,
)
from .own_values import parent_of

__all__ = ["Answering", "LoadCoordinator", "check_sizes", "read_checkpoint"]

_RESTARTS = 3
_SHARED = 1.25  # readers of this part of a file, and more, read some of it twice
_MOST_HINTS = 20  # each costs a comparison with every key
_ADVICE = "rebuild_metadata can make a damaged .metadata again; to load another checkpoint, give its unique_id"


def read_checkpoint(storage: Storage, unique_id: int | None) -> Metadata:
    """Read a `.metadata` file.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptedError: it is damaged.
    """
    chosen = newest_id(storage) if unique_id is None else unique_id
    name = metadata_name(chosen)
    try:
        data = storage.read(name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(nothing_text(storage, chosen)) from None
    try:
        return decode_metadata(data, f"{storage.location}/{name}", chosen)
    except CheckpointCorruptedError as error:
        raise CheckpointCorruptedError(f"{error}. {_ADVICE}") from error


def check_sizes(storage: Storage, metadata: Metadata, files: Iterable[int], all_here: bool = True) -> None:
    """Refuse a `.metadata` whose files are not as large as it says, before anything of that size is allocated.

    Args:
        storage: The folder.
        metadata: What it says.
        files: Numbers of the files to look at.
        all_here: Whether a file that is not there is an error, or may be in another rank's folder.

    Raises:
        CheckpointCorruptedError: a file is missing or has another size.
    """
    for info in (metadata.files[i] for i in files):
        try:
            size = storage.size(info.name)
        except FileNotFoundError:
            if all_here:
                raise CheckpointCorruptedError(f"{storage.location}/{info.name} is missing") from None
            continue
        if size != info.size:
            raise CheckpointCorruptedError(f"{storage.location}/{info.name} has {size} bytes; {info.size} were written")


class LoadCoordinator:
    """The coordinator's answers, round by round. Other ranks have one too and never use it."""

    def __init__(self, storage: Storage, session: ControlSession, options: LoadOptions) -> None:
        self._storage, self._session, self._options = storage, session, options
        self._metadata: Metadata | None = None
        self._asked: set[str] = set()
        self._requests: dict[int, LoadRequest] = {}
        self._reasons: dict[str, str] = {}
        self._restarts = 0

    def request(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``request``: what the checkpoint has of what each rank wants."""
        self._requests = {rank: decode(data, LoadRequest) for rank, data in messages.items()}
        ours = self._requests[self._session.coordinator]
        for rank, request in self._requests.items():
            if request.unique_id != ours.unique_id:
                raise ValueError(
                    f"rank {rank} passed unique_id={request.unique_id}, rank {self._session.coordinator} "
                    f"unique_id={ours.unique_id}; all ranks must pass the same"
                )
            for name, choice in request.options.items():
                if choice != ours.options[name]:
                    raise ValueError(
                        f"rank {rank} passed LoadOptions({name}={choice}), rank {self._session.coordinator} "
                        f"{ours.options[name]}; all ranks must pass the same"
                    )
        metadata = self._metadata = read_checkpoint(self._storage, ours.unique_id)
        values = metadata.table.kinds[metadata.table.shard_tensor] != Kind.TENSOR
        check_sizes(self._storage, metadata, sorted(set(metadata.table.shard_file[values].tolist())), all_here=False)
        hosts = {rank: request.folder.host for rank, request in self._requests.items() if request.folder is not None}
        sharing = Counter(hosts.values())
        answering = Answering(metadata, {rank: sharing[host] for rank, host in hosts.items()})
        by_wish: dict[bytes, bytes] = {}
        for request in self._requests.values():
            if request.wanted not in by_wish:
                by_wish[request.wanted] = encode(answering.answer(decode(request.wanted, Wanted)))
        self._asked = answering.asked
        return {rank: by_wish[request.wanted] for rank, request in self._requests.items()}

    def decide(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``decide``: raise what does not fit; restart if files are gone; choose how to read."""
        needs = {rank: decode(data, Needs) for rank, data in messages.items()}
        if self._options.strict:
            _raise_problems({rank: n.problems for rank, n in needs.items()}, self._location())
        missing = {name: reason for n in needs.values() for name, reason in n.unreachable.items()}
        if missing and self._replaced():
            return dict.fromkeys(messages, encode(Decision(restart=True)))
        self._reasons = missing
        if missing and self._options.exchange == "never":
            raise CheckpointCorruptedError(
                _missing_text(missing, "; exchange is 'never', so no other rank may read it")
            )
        staged, objects = any(n.staged for n in needs.values()), any(n.objects for n in needs.values())
        if not self._exchange_wanted(needs, bool(missing)):
            shared = self._shared_files(needs)
            return dict.fromkeys(messages, encode(Decision(staged=staged, shared=shared, objects=objects)))
        assert self._metadata is not None
        wanted = {name for n in needs.values() for name in n.files}
        _, counts = self._metadata.table.blocks(self._metadata.block_bytes, len(self._metadata.files))
        chosen = [i for i, info in enumerate(self._metadata.files) if info.name in wanted]
        files, block_counts = [self._metadata.files[i] for i in chosen], counts[chosen].tolist()
        probing = {group[0] for group in self._folder_groups()}
        decision = Decision(False, True, staged, files, block_counts, objects=objects)
        probe = msgspec.structs.replace(decision, probe=True)
        return {rank: encode(probe if rank in probing else decision) for rank in messages}

    def _shared_files(self, needs: Mapping[int, Needs]) -> list[str]:
        """The files of which the ranks of some host read more than there is, and so partly the same."""
        assert self._metadata is not None
        sizes = {info.name: info.size for info in self._metadata.files}
        wanted: Counter[tuple[str, str]] = Counter()
        for rank, need in needs.items():
            folder = self._requests[rank].folder
            for name, nbytes in need.files.items():
                wanted[folder.host if folder is not None else "", name] += nbytes
        return sorted({name for (_, name), nbytes in wanted.items() if nbytes > sizes[name] * _SHARED})

    def _folder_groups(self) -> list[list[int]]:
        """The ranks that see each folder, ascending. A rank without a folder reaches nothing, so it is in none."""
        groups: dict[tuple[str, int, int], list[int]] = {}
        for rank, request in sorted(self._requests.items()):
            if request.folder is not None:
                groups.setdefault(request.folder.key, []).append(rank)
        return list(groups.values())

    def _exchange_wanted(self, needs: Mapping[int, Needs], missing: bool) -> bool:
        if missing or self._options.exchange == "always":
            return len(self._session.ranks) > 1 or missing
        if self._options.exchange == "never":
            return False
        hosts: dict[str, set[str]] = {}
        for rank, need in needs.items():
            folder = self._requests[rank].folder
            for name in need.files:
                hosts.setdefault(name, set()).add(folder.host if folder is not None else "")
        return any(len(several) > 1 for several in hosts.values())

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``exchange``: who reads what for whom."""
        assert self._metadata is not None
        reaches = {rank: decode(data, Reach) for rank, data in messages.items()}
        reach = {rank: reaches[group[0]].files for group in self._folder_groups() for rank in group}
        needs = {rank: reaches[rank].needs for rank in reaches}
        planner = ExchangePlanner(self._metadata, self._session.ranks, reach, needs)
        nobody = planner.unreached()
        if nobody:
            if self._replaced():
                return {rank: encode(planner.restart()) for rank in messages}
            reasons = {name: self._reasons.get(name, "no rank can read it") for name in nobody}
            raise CheckpointCorruptedError(_missing_text(reasons, ""))
        return {rank: encode(order) for rank, order in planner.orders().items()}

    def opened(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``open``: go on if every reader has its files."""
        gone = {name: reason for data in messages.values() for name, reason in decode(data, Opened).gone.items()}
        if not gone:
            return dict.fromkeys(messages, b"")
        if self._replaced():
            return dict.fromkeys(messages, b"restart")
        raise CheckpointCorruptedError(_missing_text(gone, ""))

    def staged(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``staged``: raise what the staged pass found not to fit."""
        problems = {rank: decode(data, Problems).problems for rank, data in messages.items()}
        if self._options.strict:
            _raise_problems(problems, self._location())
        return dict.fromkeys(messages, b"")

    def done(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``read``: everything is where it belongs."""
        assert self._metadata is not None
        paths = [*self._metadata.table.paths, *(path for path, _ in self._metadata.value_records)]
        unused = [self._metadata.key(path) for path in paths if path not in self._asked]
        return dict.fromkeys(messages, encode(LoadResult(unused)))

    def restored(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``restore``: every rank has given its objects their states."""
        return dict.fromkeys(messages, b"")

    def _location(self) -> str:
        assert self._metadata is not None
        return f"checkpoint {self._metadata.unique_id} in {self._storage.location}"

    def _replaced(self) -> bool:
        """Whether the checkpoint is another one by now, so that missing files are no wonder."""
        assert self._metadata is not None
        if save_of(self._storage, self._metadata.unique_id) == self._metadata.save_id:
            return False
        self._restarts += 1
        if self._restarts > _RESTARTS:
            raise CheckpointCorruptedError(f"{self._location()} was replaced {self._restarts} times during this load")
        return True


def _raise_problems(by_rank: Mapping[int, Sequence[str]], where: str) -> None:
    """Raise all problems at once, each said once with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, problems in sorted(by_rank.items()):
        for problem in problems:
            ranks.setdefault(problem, []).append(rank)
    if not ranks:
        return
    everyone = len(by_rank)
    lines = [
        problem if len(having) == everyone else f"{problem} (rank {', '.join(map(str, having))})"
        for problem, having in ranks.items()
    ]
    advice = "LoadOptions(strict=False) loads what fits"
    if any("the target has dtype" in line for line in lines):
        advice += "; LoadOptions(cast=True) converts dtypes"
    text = f"{where} does not fit the state_dict, which was left as it was; {len(lines)} problem(s):"
    raise StateDictMismatchError("\n".join([text, *lines, f"({advice})"]), lines)


def _missing_text(reasons: Mapping[str, str], more: str) -> str:
    lines = [f"  {reason if name in reason else f'{name}: {reason}'}" for name, reason in sorted(reasons.items())[:20]]
    return f"{len(reasons)} data file(s) of the checkpoint cannot be read{more}:\n" + "\n".join(lines)


class Answering:
    """Looks up in one checkpoint what ranks want."""

    def __init__(self, metadata: Metadata, ranks_on_host: dict[int, int]) -> None:
        self._metadata, self._ranks_on_host = metadata, ranks_on_host
        self._values: dict[str, Any] = dict(metadata.value_records)
        self._paths = sorted([*metadata.table.paths, *self._values])
        self._first_block, self._block_counts = metadata.table.blocks(metadata.block_bytes, len(metadata.files))
        self._blobs = set(np.flatnonzero(metadata.table.kinds == Kind.VALUE).tolist())
        self._missing = 0
        self.asked: set[str] = set()

    def answer(self, wanted: Wanted) -> LoadAnswer:
        """What the checkpoint has of a wish."""
        index, paths = self._metadata.table.index, self._metadata.table.paths
        tensors: set[int] = set()
        values: dict[str, Any] = {}
        odd: dict[str, str] = {}
        stored: dict[str, str] = {}
        for path in wanted.tensors:
            place = index.get(path) if path not in wanted.canonical else None
            if place is None:
                place = self._place_of(path, wanted.canonical.get(path))
                if place is not None and paths[place] != path:
                    stored[path] = paths[place]
            if place is not None and place not in self._blobs:
                tensors.add(place)
            else:
                odd[path] = self._what_is(path)
        for path, present in wanted.values:
            self._answer_value(path, present, tensors, values, odd)
        self.asked.update(paths[t] for t in tensors)
        self.asked.update(values)
        return self._assemble(sorted(tensors), values, odd, stored)

    def _place_of(self, path: str, canonical: str | None) -> int | None:
        """Where the tensor is that is wanted under a path, of which there is no tensor or which is not to be relied on.

        Args:
            path: The path.
            canonical: What it is in terms that do not depend on the run, if the path does.
        """
        index = self._metadata.table.index
        if canonical is None:
            return self._by_canonical.get(path)
        place = index.get(canonical, self._by_canonical.get(canonical))
        if place is not None or path in self._canonical:
            return place
        return index.get(path)  # it is not known which parameter that is of, so only its name speaks for it

    @cached_property
    def _canonical(self) -> dict[str, str]:
        """The stored tensors whose paths depend on the run that saved them, with what they are in other terms."""
        return canonical_paths(self._metadata.table.paths, self._metadata.table.names)

    @cached_property
    def _by_canonical(self) -> dict[str, int]:
        """Where the stored tensors are whose paths depend on the run, by what they are in other terms."""
        index = self._metadata.table.index
        return {canonical: index[path] for path, canonical in self._canonical.items()}

    def _answer_value(
        self, path: str, present: str, tensors: set[int], values: dict[str, Any], odd: dict[str, str]
    ) -> None:
        place = self._metadata.table.index.get(path)
        if present == "object":
            self._answer_object(path, tensors, values, odd)
        elif present == "own":
            self._answer_own(path, tensors, odd)
        elif path in self._values:
            if (present == "dict") != _is_dict(self._values[path]) and present != "none":
                odd[path] = "a dict" if _is_dict(self._values[path]) else "a value that is no dict"
            else:
                values[path] = self._values[path]
        elif place is not None and place in self._blobs:
            tensors.add(place)
        elif present == "none":
            self._answer_subtree(path, tensors, values, odd)
        elif present != "dict" or place is not None:  # an empty dict wants nothing
            odd[path] = self._what_is(path)

    def _answer_object(self, path: str, tensors: set[int], values: dict[str, Any], odd: dict[str, str]) -> None:
        """All values and arrays at or below a path; the tensors there have to be wanted by themselves."""
        whole = path in self._values or self._metadata.table.index.get(path) in self._blobs
        below = [path] if whole else self._below(path)
        if not below or (path in self._values and not _is_dict(self._values[path])):
            odd[path] = self._what_is(path)
            return
        for found in below:
            place = self._metadata.table.index.get(found)
            if place is None:
                values[found] = self._values[found]
            elif place in self._blobs or self._metadata.table.kinds[place] == Kind.ARRAY:
                tensors.add(place)
            elif place not in tensors:
                odd[found] = self._what_is(found)

    def _answer_own(self, path: str, tensors: set[int], odd: dict[str, str]) -> None:
        """What every rank has of its own at a path."""
        below = self._below(path)
        if not below or not all(is_own(found) and parent_of(found) == path for found in below):
            odd[path] = self._what_is(path)
            return
        tensors.update(self._metadata.table.index[found] for found in below)

    def _answer_subtree(self, path: str, tensors: set[int], values: dict[str, Any], odd: dict[str, str]) -> None:
        """All that is below a path, if that is values alone."""
        below = self._below(path)
        index = self._metadata.table.index
        held = [p for p in below if p in index and index[p] not in self._blobs]
        if not below or held:
            odd[path] = (
                self._what_is(path) if not held else f"a container of tensors, such as {self._metadata.key(held[0])}"
            )
            return
        for found in below:
            if found in self._values:
                values[found] = self._values[found]
            else:
                tensors.add(index[found])

    def _below(self, path: str) -> list[str]:
        first = bisect.bisect_left(self._paths, path + "/")
        last = bisect.bisect_left(self._paths, path + "0")  # "0" is the character after "/"
        return self._paths[first:last]

    def _what_is(self, path: str) -> str:
        place = self._metadata.table.index.get(path)
        if path in self._values or place in self._blobs:
            return "a value"
        if place is not None:
            table = self._metadata.table
            shape = list(table.layouts[table.layout_of[place]].shape)
            return f"a tensor of shape {shape} and dtype {table.dtypes[place].name}"
        if self._below(path):
            return "a container"
        self._missing += 1
        return f"missing{self._hint(path) if self._missing <= _MOST_HINTS else ''}"

    def _hint(self, path: str) -> str:
        """Where what is wanted may be instead."""
        key = plain_key(path)
        nested = self._metadata.flat_mapping.get(key)
        if nested is not None:
            place = "".join(f"[{part!r}]" if isinstance(part, (str, int)) else f"[{part.at}]" for part in nested)
            return f"; the checkpoint has it nested otherwise, as state_dict{place}"
        keys = list(self._metadata.flat_mapping)
        close = difflib.get_close_matches(key, keys, 1, cutoff=0.8) if len(keys) <= 5000 and len(key) > 3 else []
        return f"; is {close[0]!r} meant?" if close else ""

    def _assemble(
        self, tensors: list[int], values: dict[str, Any], odd: dict[str, str], stored: dict[str, str]
    ) -> LoadAnswer:
        metadata = self._metadata
        table, shards = metadata.table.select(tensors)
        used, renumbered = np.unique(table.shard_file, return_inverse=True)
        record = table_to_record(table)
        files = [metadata.files[i] for i in used.tolist()]
        special = metadata.special_keys
        return LoadAnswer(
            unique_id=metadata.unique_id,
            save_id=metadata.save_id,
            block_bytes=metadata.block_bytes,
            files=files,
            block_counts=pack_column(self._block_counts[used]),
            tensors=msgspec.structs.replace(record, shard_file=pack_column(renumbered.reshape(-1))),
            starts=pack_column(metadata.table.data_offsets[shards]),
            blocks=pack_column(self._first_block[shards]),
            keys={path: special[path] for path in (*table.paths, *values) if path in special} if special else {},
            values=sorted(values.items()),
            odd=odd,
            ranks_on_host=self._ranks_on_host,
            stored=stored,
            saved_by=metadata.world_size,
        )


def _is_dict(tree: Any) -> bool:
    return isinstance(tree, dict) and "dict" in tree
