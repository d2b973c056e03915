"""Tries a filesystem that several hosts mount, from two mounts of it, which see each other's files through the server.

python -m test.torture.two_mounts PATH_A PATH_B                  # two mounts of one folder on this host
python -m test.torture.two_mounts PATH PATH --on-b "ssh other" --address 10.0.0.1
                              # the same folder here and on another host, which has this source tree at the same path,
                              # and to which this one is 10.0.0.1

The folder is to be a new one; what is made in it is removed. See the page about clusters.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paddle_dist_ckpt.manager.steps import step_folder

__all__ = ["STAGES", "Client", "Clients", "main", "tried"]

_HERE = Path(__file__).resolve().parents[2]


class Keys(socketserver.ThreadingTCPServer):
    """Serves what the ranks of a job tell each other so that they find each other."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        self.known: dict[str, str] = {}
        super().__init__((address, 0), _Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        key, value = json.loads(self.rfile.readline())
        known = self.server.known  # type: ignore[attr-defined]
        if value:
            known[key] = value
        self.wfile.write(json.dumps(known.get(key, "")).encode() + b"\n")


class Client:
    """A process that does things in one of the two mounts, one after the other."""

    def __init__(self, root: str, host: str, before: Sequence[str] = ()) -> None:
        self.root = root
        program = [sys.executable, "-m", f"{__package__}.mount_worker", host]
        self._process = subprocess.Popen(
            [*before, "env", f"PYTHONPATH={_HERE}", *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, deed: str, **arguments: Any) -> None:
        """Let it do one of :data:`.mount_worker.DEEDS`."""
        assert self._process.stdin is not None
        print(json.dumps([deed, arguments]), file=self._process.stdin, flush=True)

    def end(self) -> dict[str, Any]:
        """What has come of it: ``result`` (None if it was killed) or ``error`` and ``kinds``, and ``seconds``."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"a client of {self.root} has ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def do(self, deed: str, folder: str, **arguments: Any) -> Any:
        """Do one thing, which must succeed; returns its result."""
        self.begin(deed, path=f"{self.root}/{folder}", **arguments)
        return _result(self.end())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _result(told: dict[str, Any]) -> Any:
    assert "error" not in told, told["error"]
    return told["result"]


class Clients:
    """Two processes on each side, which do things at once; what they do is random, by a seed.

    Attributes:
        a: Those of the first mount.
        b: Those of the second.
        outcomes: What has been seen how many times.
    """

    def __init__(self, roots: Sequence[str], before: Sequence[str], address: str, seed: int) -> None:
        self.rng, self.outcomes = random.Random(seed), Counter[str]()
        self._keys, self._address, self._jobs = Keys(address), address, 0
        self.a = [Client(roots[0], "a") for _ in range(2)]
        self.b = [Client(roots[1], "b", before) for _ in range(2)]
        for client in (*self.a, *self.b):
            client.end()  # it is ready

    def close(self) -> None:
        """End all."""
        for client in (*self.a, *self.b):
            client.close()
        self._keys.shutdown()
        self._keys.server_close()

    def sides(self) -> list[list[Client]]:
        """The two sides, in any order. (Rank 0 listens, so it is on the first one.)"""
        return self.rng.sample([self.a, self.b], 2)

    def ranks(self, count: int) -> list[Client]:
        """Clients for the ranks of a job, of both sides."""
        return [self.a[0], self.b[0], self.a[1], self.b[1]][:count]

    def run(self, deed: str, folder: str, ranks: Sequence[Client], **arguments: Any) -> list[dict[str, Any]]:
        """Let some do a thing together; returns what has come of it. An argument may be a list, one for each."""
        self.begin(deed, folder, ranks, **arguments)
        return [client.end() for client in ranks]

    def begin(self, deed: str, folder: str, ranks: Sequence[Client], **arguments: Any) -> None:
        """Begin with that."""
        self._jobs += 1
        job = {"ranks": len(ranks), "key": f"job {self._jobs}", "address": self._address}
        job["port"] = self._keys.server_address[1]
        for rank, client in enumerate(ranks):
            own = {name: value[rank] if isinstance(value, tuple) else value for name, value in arguments.items()}
            client.begin(deed, job={**job, "rank": rank}, path=f"{client.root}/{folder}", **own)

    def all(self, deed: str, folder: str, ranks: Sequence[Client], **arguments: Any) -> Any:
        """Let some do a thing together, which must succeed, with the same result for all."""
        results = [_result(told) for told in self.run(deed, folder, ranks, **arguments)]
        assert all(result == results[0] for result in results), f"ranks differ: {results}"
        return results[0]


def round_trips(clients: Clients, times: int) -> None:
    """Saves of some ranks are what other numbers of ranks load, from both sides."""
    versions: dict[str, int] = {}
    for version in range(times):
        unique_id, count = clients.rng.choice((None, 0)), clients.rng.choice((1, 2, 3, 4))
        in_background = clients.rng.random() < 0.4
        arguments = {"version": version, "unique_id": unique_id, "in_background": in_background}
        saved = clients.all("save", "trips", clients.ranks(count), **arguments)
        versions[str(saved)] = version
        for number in {1, clients.rng.choice((2, 3, 4))}:
            got = clients.all("load", "trips", clients.ranks(number), unique_id=saved)
            assert got == [saved, version], f"{version} was saved as {saved}, and {got} was loaded"
        clients.outcomes["saved and loaded"] += 1
    for side in clients.sides():
        assert side[0].do("found", "trips") == versions
    clients.a[0].do("clean", "trips")


def seen_at_once(clients: Clients, times: int) -> None:
    """What one client has saved, the other one lists and loads right after that."""
    for version in range(times):
        writer, reader = (side[0] for side in clients.sides())
        unique_id = clients.rng.choice((None, 0))
        (told,) = clients.run("save", "seen", [writer], version=version, unique_id=unique_id)
        saved = _result(told)
        listed, by_number, by_list = reader.do("newest", "seen", unique_id=saved)
        clients.outcomes["listed at once" if saved in listed else "listed late"] += 1
        clients.outcomes["loaded at once" if by_number == version else "an older one of this number loaded"] += 1
        if max(listed) == saved and by_list != by_number:
            clients.outcomes["newest loaded late"] += 1
    clients.a[0].do("clean", "seen")


def rivals(clients: Clients, times: int) -> None:
    """Two jobs save at once, to one id, or to the next one."""
    for number in range(0, 2 * times, 2):
        unique_id = clients.rng.choice((None, 7))
        one, other = clients.sides()
        for client, version in ((one[0], number), (other[0], number + 1)):
            clients.begin("save", "rivals", [client], version=version, unique_id=unique_id)
        ids = [_result(client.end()) for client in (one[0], other[0])]
        loaded = [_result(clients.run("load", "rivals", [side[1]], unique_id=ids[0])[0])[1] for side in (one, other)]
        if unique_id is None:
            assert ids[0] != ids[1], "two saves have one id"
            assert loaded == [number, number], loaded
        else:
            assert set(loaded) <= {number, number + 1}, loaded
            clients.outcomes["both see one" if len(set(loaded)) == 1 else "each sees its own for a while"] += 1
        clients.outcomes["two saves at once"] += 1
    assert clients.a[0].do("found", "rivals") == clients.a[1].do("found", "rivals")
    clients.a[0].do("clean", "rivals")


def steps(clients: Clients, times: int) -> None:
    """A manager's steps, of which it keeps the last ones."""
    for number in range(times):
        chosen = [10 * number + step for step in range(5)]
        arguments = {"steps": chosen, "keep_last": 2, "in_background": clients.rng.random() < 0.5}
        left = clients.all("manage", "steps", clients.ranks(clients.rng.choice((2, 3, 4))), **arguments)
        assert left == chosen[-2:], left
        clients.outcomes["runs of a manager"] += 1
    for side in clients.sides():
        assert side[0].do("found", f"steps/{step_folder(Path(), left[-1])}") == {str(left[-1]): left[-1]}


def kills(clients: Clients, times: int) -> None:
    """A rank is killed at some moment of a save; the other side has the old one or the new one, whole."""
    before = 0
    begun = time.monotonic()
    clients.all("save", "kills", clients.ranks(2), version=before, unique_id=0)
    usual = time.monotonic() - begun
    for version in range(1, times + 1):
        ranks = clients.ranks(clients.rng.choice((2, 3, 4)))
        victim, background = clients.rng.randrange(len(ranks)), clients.rng.random() < 0.4
        after = tuple(clients.rng.uniform(0, usual) if rank == victim else None for rank in range(len(ranks)))
        arguments = {"version": version, "unique_id": 0, "in_background": background, "kill_after": after}
        told = clients.run("save", "kills", ranks, **arguments)
        for survivor in told:
            assert "error" not in survivor or "RankFailureError" in survivor["kinds"], survivor["error"]
        reported = any(each.get("result") is not None for each in told)
        ((_, now),) = {tuple(_result(clients.run("load", "kills", [side[1]])[0])) for side in clients.sides()}
        assert now == version or (now == before and not reported), f"{now} is there, {before} was, {version} was saved"
        clients.outcomes["the new one" if now == version else "the old one"] += 1
        before = now
        if clients.rng.random() < 0.2:
            clients.sides()[0][0].do("clean", "kills")
    clients.a[0].do("clean", "kills")


STAGES: dict[str, tuple[Callable[[Clients, int], None], int]] = {
    "round trips": (round_trips, 20),
    "seen at once": (seen_at_once, 200),
    "rivals": (rivals, 30),
    "steps": (steps, 6),
    "kills": (kills, 60),
}
"""What is tried, and how often."""


def tried(
    roots: Sequence[str],
    before: Sequence[str] = (),
    address: str = "127.0.0.1",
    seed: int = 0,
    share: float = 1.0,
    only: Sequence[str] = (),
) -> dict[str, Counter[str]]:
    """Try everything; returns what has been seen. Prints a line for each stage.

    Args:
        roots: The two mounts.
        before: What starts a program on the host of the second, such as ``ssh`` and its name.
        address: Of this host.
        seed: Of what is drawn.
        share: How much of it.
        only: Which stages, if not all.

    Raises:
        AssertionError: something was not as it should be.
        ValueError: something is there already, which would be removed at the end.
    """
    if there := next(Path(roots[0]).glob("*"), None):
        raise ValueError(f"{roots[0]} is to be a new folder, as all in it is removed at the end, and has {there.name}")
    seen: dict[str, Counter[str]] = {}
    with ExitStack() as ending:
        clients = Clients(roots, before, address, seed)
        ending.callback(clients.close)
        for name, (stage, times) in STAGES.items():
            if only and name not in only:
                continue
            begun, clients.outcomes = time.monotonic(), Counter()
            stage(clients, max(1, round(times * share)))
            seen[name] = clients.outcomes
            said = "; ".join(f"{what} {count}" for what, count in sorted(clients.outcomes.items()))
            print(f"{name:16} {time.monotonic() - begun:6.1f} s  {said}", flush=True)
    for folder in Path(roots[0]).iterdir():
        shutil.rmtree(folder)
    return seen


def main(words: Sequence[str] | None = None) -> None:
    """Try the filesystem that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m test.torture.two_mounts", description=__doc__.split("\n")[0])
    parser.add_argument("path_a", help="a new folder, in one mount")
    parser.add_argument("path_b", help="the same folder, in the other mount")
    parser.add_argument("--on-b", default="", help="what starts a program on the host of the second mount")
    parser.add_argument("--address", default="127.0.0.1", help="the address of this host")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(STAGES), help="one of the stages; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="how much to try, 1 by default")
    given = parser.parse_args(words)
    tried(
        (given.path_a, given.path_b), shlex.split(given.on_b), given.address, given.seed, given.share, given.only or ()
    )


if __name__ == "__main__":
    main()
