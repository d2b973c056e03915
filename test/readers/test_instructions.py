"""Golden checkpoints whose pickles have instructions that are gone, moved, repeated, or others."""

from __future__ import annotations

import pickletools
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointError, LoadOptions, export, read_metadata, verify
from test.jobs import try_load
from test.pace import slowness
from test.readers.golden import GOLDEN
from test.readers.test_hostile import REFUSED, get, number, text, write_all
from test.strategies import draws


def instructions(data: bytes) -> list[bytes]:
    """A pickle, cut between its instructions."""
    places = [place for _, _, place in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]


_INSERTED = [
    *(bytes([code]) for code in b"().012NKMaestudlobRbQ\x81\x85\x86\x87\x88\x89\x92\x93\x94"),
    *(number(n) for n in (0, 1, -1, 2**31, 2**62, 2**64, 10**30)),
    *(text(name) for name in ("", "..", "a/b", "\ud800", "0_0.distcp", "x" * 5000)),
    *(b"c" + name for name in (b"os\nsystem\n", b"builtins\neval\n", b"builtins\ntuple\n", b"numpy\ndtype\n")),
    *(b"r" + struct.pack("<I", n) for n in (0, 1, 5, 1 << 20, 2**32 - 1)),
    *(get(n) for n in (0, 1, 5, 9, 1 << 20)),
    b"\x8e" + struct.pack("<Q", 2**63),
    b")" + b"\x85" * 300,
]


def mutated(data: bytes, generator: random.Random) -> bytes:
    """A pickle with instructions that are gone, moved, repeated, or others."""
    parts = instructions(data)
    for _ in range(generator.choice((1, 1, 2, 4))):
        at, kind = generator.randrange(len(parts)), generator.randrange(5)
        if kind == 0:
            del parts[at]
        elif kind == 1:
            parts[at] = generator.choice(_INSERTED)
        elif kind == 2:
            parts.insert(at, generator.choice(_INSERTED))
        elif kind == 3:
            other = generator.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        else:
            parts[at:at] = parts[at : at + generator.randrange(1, 12)]
    return b"".join(parts)


@pytest.mark.parametrize(
    "folder", ["paddle-2.6.2", "paddle-3.3.1", "paddle-3.3.1-flattened", "static-3.3.1", "torch-dcp-2.13"]
)
def test_instructions_at_random(folder: str, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (GOLDEN / folder).iterdir() if path.name != "expected.npz"}
    pickles = [name for name, data in sorted(files.items()) if data.startswith(b"\x80")]
    source = tmp_path / "source"
    source.mkdir()
    write_all(source, files)
    generator = random.Random(folder)
    for i in range(draws(20, 5000)):
        name = generator.choice(pickles)
        (source / name).write_bytes(mutated(files[name], generator))
        start, message = time.process_time(), "nothing"
        try:
            read_metadata(source)
            verify(source)
            export(source, tmp_path / f"out{i}")
        except REFUSED as error:
            message = str(error)
        assert 0 < len(message) < 4096
        assert time.process_time() - start < 2 * slowness()
        state = {"w": np.ones(2, np.float32)}
        if i % 10 == 0:
            for error in try_load([dict(state), dict(state)], source, options=LoadOptions(timeout=30)):
                assert isinstance(error, CheckpointError)
            assert (state["w"] == 1).all()
        (source / name).write_bytes(files[name])
