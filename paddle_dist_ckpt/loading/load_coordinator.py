"""The coordinator's side of a load: it alone reads `.metadata`, and tells each rank what that rank needs to know."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from ..control.rounds import check_same
from ..core.garbage import no_collections
from ..core.messages import decode, encode
from ..core.parts import Arranged, IdleStatement
from ..core.shards import Kind
from ..core.text import counted, kept_once
from ..errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    RankFailureError,
)
from ..files.metadata import Metadata
from ..folder.checkpoint import Restarts, check_sizes
from ..folder.context import check_folders, folders_text
from ..folder.stored_values import read_values
from ..storage.base import FolderIdentity, Storage
from ..tree.paths import plain_key
from .answering import Answering
from .exchange_orders import ExchangeAnswer, ExchangeRequest
from .exchange_planner import ExchangePlanner
from .key_map import matcher, unmatched_text
from .left_entries import judge
from .messages import (
    NO_STATEMENT,
    STATEMENTS,
    DecideAnswer,
    DecideRequest,
    DoneRequest,
    GoOnAnswer,
    LoadAnswer,
    LoadRequest,
    Mismatch,
    WantedPaths,
)
from .mismatches import NOT_YET, MismatchCheck
from .reading import LoadContext, unreadable_on
from .stored_tensors import stored_tensors
from .together import (
    check_arranged_alike,
    check_same_sources,
    containers_in,
    found_nowhere,
    keys_of,
    wanted_together,
)
from .wording import FOUND_BY_SOME, some_of

__all__ = ["LoadCoordinator"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_NAMES = 20  # entries in a warning, or files in an error
_SHARED = 1.25  # readers of this part of a file, and more, read some of it twice


class LoadCoordinator:
    """The coordinator's answers, round by round. ``read`` is called for `.metadata` in the first one.

    Attributes:
        own: The paths of the tensors that its own rank wants; set before the first round is answered.
    """

    def __init__(self, context: LoadContext, read: Callable[[int | None], Metadata]) -> None:
        self._storage, self._session, self._options = context.storage, context.session, context.options
        self._arranger, self._read = context.arranger, read
        self.own: list[str] = []
        # From round ``request`` on:
        self._folders: dict[int, FolderIdentity]  # of ranks that have one; who has none reaches nothing
        self._groups: dict[FolderIdentity, list[int]]  # the ranks that see each folder, ascending
        self._locations: dict[int, str]  # what ranks call their folders
        self._metadata: Metadata
        self._answering: Answering
        self._mismatches: MismatchCheck
        self._complete: set[str]  # the flat keys of objects for which everything must be loaded
        self._asked_keys: set[str]  # if something stored is not read
        self._idle: list[IdleStatement] = []
        # From round ``decide`` on, if there is an exchange:
        self._reasons: dict[str, str] = {}  # why files cannot be read, by name
        self._wanted_files: list[int] = []
        self._reach: dict[int, list[int]] | None = None  # who can read each file, as positions
        self._loads: list[int] = []  # what each rank has to read
        self._begun = False  # whether something is where it was to go
        self._restarts = Restarts(context.storage)

    @no_collections()
    def request(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``request``: what the checkpoint has of what each rank wants."""
        requests = {rank: decode(data, LoadRequest) for rank, data in sorted(messages.items())}
        self._compare(requests)
        try:
            metadata = self._metadata = self._find(requests[self._session.coordinator].unique_id)
        except CheckpointNotFoundError as error:
            gone = f"{error}{folders_text(self._folders, self._locations)}"
            return dict.fromkeys(requests, encode(LoadAnswer(gone=gone)))
        first_with: dict[bytes, int] = {}  # the first rank that wants each, which mostly is the same on all
        for rank, request in requests.items():
            first_with.setdefault(request.wanted, rank)
        stored = metadata.table.paths
        stored[:] = kept_once(stored, self.own)
        wanted = {data: _wanted_paths(data, stored) for data in first_with}
        self._complete = {key for one in wanted.values() for key in one.complete}
        keys = found_nowhere(one.patterns for one in wanted.values())
        unmatched = found_nowhere(one.key_map for one in wanted.values())
        every = list(wanted.values())
        find_keys, containers = functools.partial(keys_of, every), functools.partial(containers_in, every)
        objects = {plain_key(path) for one in wanted.values() for path, has in one.values.items() if has == "object"}
        ranks, missing = self._session.ranks, self._options.allow_missing
        # Not a method, which would lead back here: all that was told would stay until Python looks for garbage.
        read = functools.partial(_stored_form, self._storage, metadata, len(self._groups) > 1)
        self._answering = Answering(metadata, ranks, keys, missing, find_keys, read, containers)
        self._mismatches = MismatchCheck(
            self._storage.location,
            metadata,
            self._answering,
            every,
            self._options,
            [unmatched_text(entry, objects) for entry in unmatched],
        )
        check_same_sources({first_with[data]: paths for data, paths in wanted.items()})
        self._asked_keys = keys_of(wanted.values()) if metadata.left_out else set()
        arranged = self._arranged(every)
        if any(arranged.values()):  # an object's entries may be stored elsewhere
            self._complete.clear()
        answered = {
            data: [(group, encode(one)) for group, one in self._answering.answer(paths, arranged[paths.rules])]
            for data, paths in wanted.items()
        }
        if thawed := self._answering.thawed():
            return dict.fromkeys(requests, encode(LoadAnswer(thawed=thawed)))
        self._answering.forget()
        return {
            rank: next(one for group, one in answered[request.wanted] if rank in group)
            for rank, request in requests.items()
        }

    def _compare(self, requests: Mapping[int, LoadRequest]) -> None:
        """See that ranks have passed the same, and see the same folder unless there are several."""
        coordinator = self._session.coordinator
        if not any(STATEMENTS in one.options.values() for one in requests.values()):
            self._arranger = None  # ranks may have passed none at all as well
        like = STATEMENTS if self._arranger is not None else repr(None)
        passed = {
            rank: (str(one.unique_id), *(like if said == NO_STATEMENT else said for said in one.options.values()))
            for rank, one in requests.items()
        }
        check_same(["unique_id", *requests[coordinator].options], passed, coordinator, shown=str)
        self._folders = {rank: one.folder for rank, one in requests.items() if one.folder is not None}
        self._locations = {rank: request.location for rank, request in requests.items()}
        self._groups = {}
        for rank, folder in self._folders.items():
            self._groups.setdefault(folder, []).append(rank)
        if not self._options.separate_folders:
            hosts = {rank: one.host for rank, one in requests.items() if one.folder is None}
            check_folders(self._folders, self._locations, hosts)

    def _find(self, unique_id: int | None) -> Metadata:
        """Read `.metadata`; the files of values have the sizes that it says, as far as they are in this folder."""
        metadata = self._read(unique_id)
        values = np.repeat(metadata.table.kinds != Kind.TENSOR, np.diff(metadata.table.first_shard))
        check_sizes(self._storage, metadata, sorted(set(metadata.table.shard_file[values].tolist())), all_here=False)
        return metadata

    def _arranged(self, wanted: Sequence[WantedPaths]) -> dict[str, dict[str, Arranged | None]]:
        """What wanted tensors are made of, by flat key, as the framework says by the rules of each rank."""
        if self._arranger is None:
            return {paths.rules: {} for paths in wanted}
        together = wanted_together(wanted)
        stored, before = stored_tensors(self._metadata), self._idle
        arrangers = {rules: self._arranger.by(rules) for rules in dict.fromkeys(paths.rules for paths in wanted)}
        arranged = {rules: one.arrange(stored, together) for rules, one in arrangers.items()}
        check_arranged_alike(wanted, arranged)
        self._idle = list(dict.fromkeys(chain.from_iterable(one.idle(stored, together) for one in arrangers.values())))
        if self._idle and self._idle != before and self._options.strict != "all":  # which raises
            shown = some_of(map(str, self._idle))
            _logger.warning("aoa_config: %d statement(s) change nothing in this load: %s", len(self._idle), shown)
        return arranged

    def decide(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``decide``: raise what does not fit; restart if files are gone; choose how to read."""
        needs = {rank: decode(data, DecideRequest) for rank, data in messages.items()}
        unused = self._judge(needs)
        missing = {name: reason for _, n in sorted(needs.items()) for name, reason in n.unreachable.items()}
        if missing and self._restarts.due(self._metadata):
            return dict.fromkeys(messages, encode(DecideAnswer(restart=True)))
        self._reasons, self._reach, self._loads = missing, None, [0] * len(self._session.ranks)
        if missing and self._options.exchange == "never":
            raise self._unread(missing, "; exchange is 'never', so no other rank may read it")
        lacking = [Mismatch.at(path, FOUND_BY_SOME) for path in self._answering.lacked_by_some()]
        decision = DecideAnswer(
            staged=any(n.staged for n in needs.values()),
            objects=any(n.objects for n in needs.values()),
            unused=unused,
            left=self._left_everywhere(needs) + lacking,
        )
        hosts = {rank: folder.host for rank, folder in self._folders.items()}
        by_host = _bytes_by_host(needs, hosts)
        probing = set[int]()
        if self._exchange_wanted(by_host, bool(missing)):
            wanted = {name for n in needs.values() for name in n.files}
            self._wanted_files = [i for i, info in enumerate(self._metadata.files) if info.name in wanted]
            files = [self._answering.files[i] for i in self._wanted_files]
            decision = msgspec.structs.replace(decision, exchange=True, files=files)
            probing = {group[0] for group in self._groups.values()}
        else:
            sizes = {info.name: info.size for info in self._metadata.files}
            shared = sorted({name for (_, name), nbytes in by_host.items() if nbytes > sizes[name] * _SHARED})
            decision = msgspec.structs.replace(decision, shared=shared)
        sharing = Counter(hosts.values())

        @functools.cache  # for nearly all ranks it is the same
        def told(ranks_on_host: int, probe: bool) -> bytes:
            return encode(msgspec.structs.replace(decision, ranks_on_host=ranks_on_host, probe=probe))

        return {rank: told(sharing[hosts[rank]] if rank in hosts else 1, rank in probing) for rank in messages}

    def _judge(self, needs: Mapping[int, DecideRequest]) -> list[str]:
        """Raise what does not fit, and warn of what may not be meant; returns the keys that no rank has asked for."""
        left = self._answering.not_asked()
        unreadable = [plain_key(path) for path in self._metadata.left_out]
        unused = [*map(self._metadata.key, left), *(k for k in unreadable if k not in self._asked_keys)]
        refused, doubtful = self._left_of_objects(left)
        self._mismatches.check({rank: n.problems for rank, n in needs.items()}, unused, refused, self._idle)
        if self._options.key_map is None:
            for text in self._mismatches.empty_texts():
                _logger.warning("%s: %s", self._storage.location, text)
        if doubtful:
            _logger.warning(
                "%d stored entries are left, for the objects there have no such entries (any more): %s",
                len(doubtful),
                some_of(doubtful, _MOST_NAMES, ", "),
            )
        if self._mismatches.unmatched:
            _logger.warning("key_map: %s", some_of(self._mismatches.unmatched))
            self._mismatches.unmatched = []
        return unused

    def _exchange_wanted(self, by_host: Iterable[tuple[str, str]], missing: bool) -> bool:
        if missing or self._options.exchange == "always":
            return len(self._session.ranks) > 1 or missing
        hosts = Counter(name for _, name in by_host)
        return self._options.exchange != "never" and any(count > 1 for count in hosts.values())

    @no_collections()
    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``exchange``: who reads what for whom, of the shards that all ranks have told of."""
        requests = {rank: decode(data, ExchangeRequest) for rank, data in messages.items()}
        self._begun = any(one.begun for one in requests.values())
        if self._reach is None:
            self._reach = self._who_reaches({rank: one.files for rank, one in requests.items()})
            found = {name: reason for one in requests.values() for name, reason in one.unreachable.items()}
            self._reasons = found | self._reasons  # which are of all ranks, if those have tried
            names = (self._metadata.files[i].name for i in self._wanted_files if i not in self._reach)
            if self._is_replaced({name: self._reasons.get(name, "no rank can read it") for name in names}):
                return dict.fromkeys(messages, encode(ExchangeAnswer(restart=True)))
        needs = [requests[rank].needs for rank in self._session.ranks]
        end = min((one.end for one in requests.values() if one.end), default=0)
        planner = ExchangePlanner(
            self._metadata,
            self._answering.first_block,
            self._session.ranks,
            self._reach,
            needs,
            self._options.staging_bytes,
            self._loads,
            end,
        )
        return {rank: encode(order) for rank, order in planner.orders().items()}

    def _who_reaches(self, opened: Mapping[int, Sequence[str]]) -> dict[int, list[int]]:
        """The positions of the ranks that can read each file, by its number: those that see a folder of which the first
        rank has opened it."""
        number = {info.name: i for i, info in enumerate(self._metadata.files)}
        files = {rank: opened[group[0]] for group in self._groups.values() for rank in group}
        reach: dict[int, list[int]] = {}
        for place, rank in enumerate(self._session.ranks):
            for name in files.get(rank, ()):
                reach.setdefault(number[name], []).append(place)
        return reach

    def done(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Rounds ``open``, ``staged``, ``read`` and ``restore``: go on if every rank has done its part."""
        said = {rank: decode(data, DoneRequest) for rank, data in sorted(messages.items())}
        self._mismatches.check({rank: one.problems for rank, one in said.items()})
        gone = {name: reason for one in said.values() for name, reason in one.gone.items()}
        return dict.fromkeys(messages, encode(GoOnAnswer(self._is_replaced(gone), self._left_everywhere(said))))

    def _left_everywhere(self, said: Mapping[int, DecideRequest | DoneRequest]) -> list[Mismatch]:
        """The first problem with each tensor of which some ranks leave their parts, so that all others do as well,
        whatever paths it has there."""
        found: dict[tuple[str, ...], dict[str, Mismatch]] = {}
        leaving: Counter[tuple[str, ...]] = Counter()
        for rank, one in sorted(said.items()):
            tied = self._answering.tied if one.torn else {}
            torn = {path: tied.get(plain_key(path), (path,)) for path in one.torn}
            leaving.update(set(torn.values()))
            for problem in one.problems:
                if problem.path in torn:
                    told = Mismatch(problem.key, f"{problem} (rank {rank})", problem.path)
                    found.setdefault(torn[problem.path], {}).setdefault(problem.path, told)
        left = list[Mismatch]()
        for paths, problems in found.items():
            if leaving[paths] < len(said):
                first = next(iter(problems.values()))
                others = (path for path in paths if path not in problems)
                left += [*problems.values(), *(Mismatch.at(path, f"the same tensor as {first}") for path in others)]
        return left

    def _is_replaced(self, gone: Mapping[str, str]) -> bool:
        """Whether files are gone since the checkpoint was replaced; raise if they are gone for another reason."""
        if gone and not self._restarts.due(self._metadata, self._begun):
            raise self._unread(gone, "")
        return bool(gone)

    def _unread(self, reasons: Mapping[str, str], more: str) -> CheckpointError:
        """What to raise of files that cannot be read: damage if one is gone, or is another one than was written.

        Else it is a failure of the ranks that cannot open what is there.
        """
        some = sorted(reasons.items())[:_MOST_NAMES]
        lines = [f"  {reason if name in reason else f'{name}: {reason}'}" for name, reason in some]
        text = f"{counted(len(reasons), 'data file')} of the checkpoint cannot be read{more}:\n" + "\n".join(lines)
        text += folders_text(self._folders, self._locations)
        failed = {unreadable_on(reason): CheckpointError(reason) for reason in reasons.values()}
        if None in failed:
            return CheckpointCorruptedError(text)
        if len(self._session.ranks) == 1:
            return CheckpointError(text)
        return RankFailureError(text, {rank: error for rank, error in failed.items() if rank is not None})

    def _left_of_objects(self, paths: Sequence[str]) -> tuple[list[Mismatch], list[str]]:
        """A problem for each stored entry of an object of a user's class that no rank wants, and that may not be left;
        and the keys of those that may, and are worth a warning.

        Of other formats nobody knows whether it is one.
        """
        if self._metadata.format not in ("native", "present") or not self._complete:
            return [], []
        allowed = matcher(self._options.allow_unused)
        unused = [path for path in paths if not allowed(self._metadata.key(path))]
        left = judge(self._metadata, self._answering.names, self._answering.asked, unused, sorted(self._complete))
        return [Mismatch(key, f"{key}: stored, but {NOT_YET}") for key in left.refused], left.doubtful


def _wanted_paths(data: bytes, stored: list[str]) -> WantedPaths:
    """What a rank wants; the paths of tensors that are stored are in memory once."""
    wanted = decode(data, WantedPaths)
    return msgspec.structs.replace(wanted, tensors=kept_once(wanted.tensors, stored))


def _bytes_by_host(needs: Mapping[int, DecideRequest], hosts: Mapping[int, str]) -> Counter[tuple[str, str]]:
    """How much the ranks of a host would read of a file, by host and file."""
    wanted: Counter[tuple[str, str]] = Counter()
    for rank, need in needs.items():
        for name, nbytes in need.files.items():
            wanted[hosts.get(rank, ""), name] += nbytes
    return wanted


def _stored_form(storage: Storage, metadata: Metadata, in_folders: bool, place: int) -> Any:
    """See :class:`.stored_paths.StoredPaths`; None of a value that is in another folder, if there are several."""
    file = metadata.files[metadata.table.shard_file[metadata.table.first_shard[place]]]
    if in_folders and file.name not in storage.names():
        return None
    (found,) = read_values(storage, metadata, [place], as_trees=True)
    if isinstance(found, CheckpointCorruptedError):
        raise found
    return found
