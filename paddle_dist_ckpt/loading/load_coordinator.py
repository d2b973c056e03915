"""The coordinator's side of a load: it alone reads `.metadata`, and tells each rank what that rank needs to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ..core.messages import decode, encode
from ..core.protocols import ControlSession
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, StateDictMismatchError
from ..files.metadata import Metadata
from ..folder.checkpoint import Restarts, check_sizes, read_checkpoint
from ..options import LoadOptions
from ..storage.base import Storage
from ..tree.names import is_of_run
from .answering import Answering
from .exchange_orders import ExchangePlanner
from .messages import (
    DecideAnswer,
    DecideRequest,
    ExchangeAnswer,
    ExchangeRequest,
    GoOnAnswer,
    LoadRequest,
    OpenAnswer,
    OpenRequest,
    ReadAnswer,
    StagedRequest,
    WantedPaths,
)

__all__ = ["LoadCoordinator"]

_SHARED = 1.25  # readers of this part of a file, and more, read some of it twice


class LoadCoordinator:
    """The coordinator's answers, round by round."""

    def __init__(self, storage: Storage, session: ControlSession, options: LoadOptions) -> None:
        self._storage, self._session, self._options = storage, session, options
        self._metadata: Metadata  # from round ``request`` on, like the next two
        self._asked: set[str]
        self._requests: dict[int, LoadRequest]
        self._reasons: dict[str, str] = {}
        self._restarts = Restarts(storage)

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
        hosts = {
            rank: request.folder.identity.host for rank, request in self._requests.items() if request.folder is not None
        }
        sharing = Counter(hosts.values())
        answering = Answering(metadata, {rank: sharing[host] for rank, host in hosts.items()})
        answered: dict[bytes, bytes] = {}
        for request in self._requests.values():
            if request.wanted not in answered:
                answered[request.wanted] = encode(answering.answer(decode(request.wanted, WantedPaths)))
        self._asked = answering.asked
        return {rank: answered[request.wanted] for rank, request in self._requests.items()}

    def decide(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``decide``: raise what does not fit; restart if files are gone; choose how to read."""
        needs = {rank: decode(data, DecideRequest) for rank, data in messages.items()}
        if self._options.strict:
            _raise_problems({rank: n.problems for rank, n in needs.items()}, self._location())
        missing = {name: reason for n in needs.values() for name, reason in n.unreachable.items()}
        if missing and self._restarts.due(self._metadata):
            return dict.fromkeys(messages, encode(DecideAnswer(restart=True)))
        self._reasons = missing
        if missing and self._options.exchange == "never":
            raise CheckpointCorruptedError(
                _missing_text(missing, "; exchange is 'never', so no other rank may read it")
            )
        staged, objects = any(n.staged for n in needs.values()), any(n.objects for n in needs.values())
        if not self._exchange_wanted(needs, bool(missing)):
            shared = self._shared_files(needs)
            return dict.fromkeys(messages, encode(DecideAnswer(staged=staged, shared=shared, objects=objects)))
        wanted = {name for n in needs.values() for name in n.files}
        _, counts = self._metadata.table.blocks(self._metadata.block_bytes, len(self._metadata.files))
        chosen = [i for i, info in enumerate(self._metadata.files) if info.name in wanted]
        files, block_counts = [self._metadata.files[i] for i in chosen], counts[chosen].tolist()
        probing = {group[0] for group in self._folder_groups()}
        decision = DecideAnswer(False, True, staged, files, block_counts, objects=objects)
        probe = msgspec.structs.replace(decision, probe=True)
        return {rank: encode(probe if rank in probing else decision) for rank in messages}

    def _shared_files(self, needs: Mapping[int, DecideRequest]) -> list[str]:
        """The files of which the ranks of some host read more than there is, and so partly the same."""
        sizes = {info.name: info.size for info in self._metadata.files}
        wanted: Counter[tuple[str, str]] = Counter()
        for rank, need in needs.items():
            folder = self._requests[rank].folder
            for name, nbytes in need.files.items():
                wanted[folder.identity.host if folder is not None else "", name] += nbytes
        return sorted({name for (_, name), nbytes in wanted.items() if nbytes > sizes[name] * _SHARED})

    def _folder_groups(self) -> list[list[int]]:
        """The ranks that see each folder, ascending. A rank without a folder reaches nothing, so it is in none."""
        groups: dict[tuple[str, int, int], list[int]] = {}
        for rank, request in sorted(self._requests.items()):
            if request.folder is not None:
                groups.setdefault(request.folder.identity, []).append(rank)
        return list(groups.values())

    def _exchange_wanted(self, needs: Mapping[int, DecideRequest], missing: bool) -> bool:
        if missing or self._options.exchange == "always":
            return len(self._session.ranks) > 1 or missing
        if self._options.exchange == "never":
            return False
        hosts: dict[str, set[str]] = {}
        for rank, need in needs.items():
            folder = self._requests[rank].folder
            for name in need.files:
                hosts.setdefault(name, set()).add(folder.identity.host if folder is not None else "")
        return any(len(several) > 1 for several in hosts.values())

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``exchange``: who reads what for whom."""
        reaches = {rank: decode(data, ExchangeRequest) for rank, data in messages.items()}
        reach = {rank: reaches[group[0]].files for group in self._folder_groups() for rank in group}
        needs = {rank: reaches[rank].needs for rank in reaches}
        planner = ExchangePlanner(self._metadata, self._session.ranks, reach, needs)
        nobody = planner.unreached()
        if nobody:
            if self._restarts.due(self._metadata):
                return dict.fromkeys(messages, encode(ExchangeAnswer(restart=True)))
            reasons = {name: self._reasons.get(name, "no rank can read it") for name in nobody}
            raise CheckpointCorruptedError(_missing_text(reasons, ""))
        return {rank: encode(order) for rank, order in planner.orders().items()}

    def opened(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``open``: go on if every reader has its files."""
        gone = {name: reason for data in messages.values() for name, reason in decode(data, OpenRequest).gone.items()}
        if not gone:
            return dict.fromkeys(messages, encode(OpenAnswer()))
        if self._restarts.due(self._metadata):
            return dict.fromkeys(messages, encode(OpenAnswer(restart=True)))
        raise CheckpointCorruptedError(_missing_text(gone, ""))

    def staged(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``staged``: raise what the staged pass found not to fit."""
        problems = {rank: decode(data, StagedRequest).problems for rank, data in messages.items()}
        if self._options.strict:
            _raise_problems(problems, self._location())
        return dict.fromkeys(messages, encode(GoOnAnswer()))

    def done(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``read``: everything is where it belongs."""
        paths = [*self._metadata.table.paths, *(path for path, _ in self._metadata.value_records)]
        unused = [self._metadata.key(path) for path in paths if path not in self._asked]
        return dict.fromkeys(messages, encode(ReadAnswer(unused)))

    def restored(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``restore``: every rank has given its objects their states."""
        return dict.fromkeys(messages, encode(GoOnAnswer()))

    def _location(self) -> str:
        return f"checkpoint {self._metadata.unique_id} in {self._storage.location}"


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
    if any("missing" in line and is_of_run(line.partition(":")[0]) for line in lines):
        advice += "; an optimizer's entries can be told by its parameters: save and load the model in the same call"
    text = f"{where} does not fit the state_dict, which was left as it was; {len(lines)} problem(s):"
    raise StateDictMismatchError("\n".join([text, *lines, f"({advice})"]), lines)


def _missing_text(reasons: Mapping[str, str], more: str) -> str:
    lines = [f"  {reason if name in reason else f'{name}: {reason}'}" for name, reason in sorted(reasons.items())[:20]]
    return f"{len(reasons)} data file(s) of the checkpoint cannot be read{more}:\n" + "\n".join(lines)
