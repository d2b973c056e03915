"""A lost `.metadata` is made again from the data files: the same bytes but for the times, or a clear refusal."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from paddle_dist_ckpt import list_checkpoints, read_metadata, rebuild_metadata
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.tensors import TensorView
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError
from paddle_dist_ckpt.files import datafile
from paddle_dist_ckpt.folder import rebuild
from paddle_dist_ckpt.folder.lease import Lease
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.storage import local
from paddle_dist_ckpt.storage.local import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage, NumpyAdapter
from test.hooks import does, raises
from test.jobs import (
    SMALL,
    Killed,
    age,
    alike,
    data_files,
    files_in,
    load_whole,
    make_array,
    replaced_bytes,
    same_bits,
    save_alone,
    save_on,
    split_rows,
    without_times,
)
from test.strategies import examples
from test.whole.test_round_trip import Item, jobs


def rebuilt(folder: Any, save: str | None = None) -> Any:
    return rebuild_metadata(folder, save)


def save_ids(folder: Path) -> set[str]:
    return {path.name.split(".")[1] for path in data_files(folder)}


@given(jobs())
@examples(12)
def test_the_rebuilt_file_is_the_lost_one(job: tuple[int, int, list[Item]]) -> None:
    savers, _, things = job
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        states = [{item.key: item.saved_by(rank) for item in things if rank in item.source} for rank in range(savers)]
        save_on(states, folder, 3)
        lost = without_times(folder / "3.metadata")
        (folder / "3.metadata").unlink()
        assert rebuilt(folder).unique_id == 3
        assert (folder / "3.metadata").read_bytes() == lost


def test_everything_that_it_held_is_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = NumpyAdapter.view

    def named(self: NumpyAdapter, value: Any, path: str) -> TensorView:
        return view(self, value, path)._replace(name=f"var_{path[1:]}" if "w" in path else None)

    monkeypatch.setattr(NumpyAdapter, "view", named)
    monkeypatch.setattr(NumpyAdapter, "version", "3.1.4")
    user = {"note": "trial", "sizes": (1, 2), "nested": {"x": [None, 2**90]}, "nan": float("nan")}
    array = make_array((40, 30))
    states: list[dict[str, Any]] = [{"w": part, "n": 2**70, "t": (1, b"x")} for part in split_rows(array, 3)]
    states[2] |= {"mine": {"lr": 0.1}, "text": "long" * 2000}
    save_on(states, tmp_path, options=SaveOptions(user_metadata=user, block_bytes=8192))
    lost = without_times(tmp_path / "0.metadata")
    before = read_metadata(tmp_path, 0)
    (tmp_path / "0.metadata").unlink()
    metadata = rebuilt(tmp_path)
    assert (tmp_path / "0.metadata").read_bytes() == lost
    assert alike(metadata.user_metadata, user)
    assert metadata.variable_names == before.variable_names == {"w": "var_w"}
    assert metadata.paddle_version == "3.1.4"
    assert metadata.block_bytes == 8192
    assert metadata.world_size == 3
    assert alike(metadata.values, before.values)
    assert metadata.state_dict_metadata == before.state_dict_metadata
    assert metadata.storage_metadata == before.storage_metadata
    merged = load_whole(tmp_path)
    assert same_bits(merged["w"], array)
    assert merged["text"] == "long" * 2000
    assert merged["mine"] == {"lr": 0.1}


def test_a_damaged_metadata_is_replaced(tmp_path: Path) -> None:
    save_on([{"w": part} for part in split_rows(make_array((40, 30)), 2)], tmp_path)
    path = tmp_path / "0.metadata"
    lost = without_times(path)
    for bad in (b"", b"junk", lost[:-9], lost.replace(b'"/w"', b'"/v"')):
        path.write_bytes(bad)
        rebuilt(tmp_path)
        assert path.read_bytes() == lost


def test_a_metadata_that_is_put_back_meanwhile_is_not_replaced_by_that_of_another_save(tmp_path: Path) -> None:
    save_alone({"w": make_array((4,))}, tmp_path, 3)
    (old,) = data_files(tmp_path)
    kept, metadata = old.read_bytes(), tmp_path / "3.metadata"
    save_alone({"w": make_array((5,))}, tmp_path, 3)
    good = metadata.read_bytes()
    old.write_bytes(kept)
    metadata.write_bytes(good[:-9])
    storage = FaultyStorage(tmp_path, does("publish", "3.metadata", lambda: metadata.write_bytes(good)))
    with pytest.raises(CheckpointError, match="3.metadata was damaged, and is not any more; try again"):
        rebuilt(storage, old.name.split(".")[1])
    assert metadata.read_bytes() == good


def test_a_metadata_that_there_is_no_memory_for_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_alone({"w": make_array((4,))}, tmp_path)
    before = files_in(tmp_path)

    def lack(*args: Any, **options: Any) -> None:
        raise CheckpointCorruptedError("not read") from MemoryError()

    monkeypatch.setattr(rebuild, "look", lack)
    with pytest.raises(CheckpointCorruptedError, match="not read"):
        rebuilt(tmp_path)
    assert files_in(tmp_path) == before


def test_a_metadata_under_another_ids_name_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be any number of links to one."""
    save_alone({"w": np.ones(3)}, tmp_path, 5)
    os.link(tmp_path / "5.metadata", tmp_path / "6.metadata")
    save_alone({"w": np.ones(4)}, tmp_path, 7)
    (tmp_path / "7.metadata").unlink()
    decoded, decode = list[str](), rebuild.decode_metadata

    def note(data: bytes, name: str, *args: Any) -> Any:
        decoded.append(name)
        return decode(data, name, *args)

    monkeypatch.setattr(rebuild, "decode_metadata", note)
    assert rebuild_metadata(tmp_path).unique_id == 7
    assert "5.metadata" in decoded
    assert "6.metadata" not in decoded


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_file_is_named(tmp_path: Path, gone: int) -> None:
    save_on([{"w": part} for part in split_rows(make_array((40, 30)), 3)], tmp_path)
    (tmp_path / "0.metadata").unlink()
    data_files(tmp_path)[gone].unlink()
    before = files_in(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="coordinator" if gone == 0 else f"rank {gone} part 0"):
        rebuilt(tmp_path)
    assert files_in(tmp_path) == before


def test_files_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = datafile.split_in_parts
    name = "paddle_dist_ckpt.saving.file_plan.split_in_parts"
    monkeypatch.setattr(name, lambda table: split(table, 2000))
    state = {f"w{i}": make_array((50,), seed=i) for i in range(40)} | {"n": 1}
    save_on([state, {"x": make_array((9,))}], tmp_path)
    count = len(data_files(tmp_path))
    assert count > 4
    path = tmp_path / "0.metadata"
    lost = without_times(path)
    assert alike(load_whole(tmp_path), state | {"x": make_array((9,))})
    path.unlink()
    rebuilt(tmp_path)
    assert path.read_bytes() == lost
    path.unlink()
    (tmp_path / next(p.name for p in data_files(tmp_path) if ".2.safetensors" in p.name)).unlink()
    with pytest.raises(CheckpointNotFoundError, match="rank 0 part 2"):
        rebuilt(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_on([{"w": part, "n": 7, "s": "text"} for part in split_rows(make_array((40, 30)), 2)], tmp_path)
    (tmp_path / "0.metadata").unlink()
    before = files_in(tmp_path)
    silent, unnamed = [], []
    for path in data_files(tmp_path):
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        text = len(data[:header].rstrip(b" "))
        step = 1 if path.name.startswith("0_") else 5  # the coordinator's has all that others have, and more
        for place in [*range(0, text, step), header - 1, header, header + 777, len(data) - 1]:
            with replaced_bytes(path, {place: data[place] ^ 0x01}):
                try:
                    rebuilt(tmp_path)
                    silent.append(data[max(0, place - 20) : place + 9])
                except CheckpointError as error:
                    if path.name not in str(error):
                        unnamed.append(f"{data[max(0, place - 20) : place + 9]!r}: {error}")
                finally:
                    for made in tmp_path.glob("*.metadata"):
                        made.unlink()
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointError):
            rebuilt(tmp_path)
        path.write_bytes(data)
    assert files_in(tmp_path) == before
    rebuilt(tmp_path)
    assert not silent, silent
    assert not unnamed, unnamed[:20]


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    save_on([{"w": part} for part in split_rows(make_array((40, 30)), 2)], tmp_path)
    (tmp_path / "0.metadata").unlink()
    first, second = data_files(tmp_path)
    second.rename(tmp_path / first.name.replace("0_0", "5_0"))
    with pytest.raises(CheckpointNotFoundError, match="renamed"):
        rebuilt(tmp_path)


def test_two_complete_saves_must_be_named(tmp_path: Path) -> None:
    for version in (1, 2):
        save_alone({"w": np.full(9, version)}, tmp_path)
        (tmp_path / "0.metadata").unlink()
    names = save_ids(tmp_path)
    with pytest.raises(CheckpointError) as error:
        rebuilt(tmp_path)
    assert all(name in str(error.value) for name in names)
    there = ", ".join(sorted(names))
    with pytest.raises(
        CheckpointNotFoundError, match=f"save '0123' without a .metadata; there are files of save {there}$"
    ):
        rebuilt(tmp_path, "0123")
    assert list_checkpoints(tmp_path) == []
    found = {int(load_whole(tmp_path, rebuilt(tmp_path, name).unique_id)["w"][0]) for name in sorted(names)}
    assert found == {1, 2}
    assert list_checkpoints(tmp_path) == [0, 1], "the second one takes the next id"
    with pytest.raises(CheckpointNotFoundError):
        rebuilt(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"save '0123456789abcdef' .* with each of these ids: 0, 1$"):
        rebuilt(tmp_path, "0123456789abcdef")


def test_an_incomplete_save_does_not_stand_in_the_way_of_a_complete_one(tmp_path: Path) -> None:
    for version in (1, 2):
        save_on([{"w": part} for part in split_rows(np.full((9, 4), version), 2)], tmp_path)
        (tmp_path / "0.metadata").unlink()
        if version == 1:
            data_files(tmp_path)[0].unlink()
    assert rebuilt(tmp_path).unique_id == 0
    assert (load_whole(tmp_path)["w"] == 2).all()


@pytest.mark.parametrize("taken_by", ["ours", "pickle", "newer"])
def test_an_id_that_is_taken_becomes_the_next(tmp_path: Path, taken_by: str) -> None:
    save_alone({"w": np.full(9, 1)}, tmp_path, 4)
    good = (tmp_path / "4.metadata").read_bytes()
    (tmp_path / "4.metadata").unlink()
    if taken_by == "ours":
        save_alone({"w": np.full(9, 2)}, tmp_path, 4)
    elif taken_by == "pickle":
        (tmp_path / "4.metadata").write_bytes(b"\x80\x04junk")
    else:
        (tmp_path / "4.metadata").write_bytes(good.replace(b"[1,0]", b"[2,0]"))
    other = (tmp_path / "4.metadata").read_bytes()
    lost = sorted(save_ids(tmp_path), key=lambda name: name in other.decode("latin-1"))[0]
    metadata = rebuilt(tmp_path, lost)
    assert metadata.unique_id == 5
    assert (tmp_path / "4.metadata").read_bytes() == other
    assert (load_whole(tmp_path, 5)["w"] == 1).all()


def test_rebuilt_files_are_protected_like_any_checkpoint(tmp_path: Path) -> None:
    save_on([{"w": part} for part in split_rows(make_array((40, 30)), 2)], tmp_path)
    (tmp_path / "0.metadata").unlink()
    rebuilt(tmp_path)
    for path in tmp_path.iterdir():
        age(path)
    save_alone({"x": 1}, tmp_path)
    save_alone({"x": 2}, tmp_path, 1)
    assert same_bits(load_whole(tmp_path, 0)["w"], make_array((40, 30)))


def test_there_is_nothing_to_rebuild(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        rebuilt(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        rebuilt(tmp_path / "absent")
    for unique_id in range(12):
        save_alone({"x": 1}, tmp_path, unique_id)
    with pytest.raises(CheckpointNotFoundError, match=r"these ids: \.\.\., 2, 3, 4, 5, 6, 7, 8, 9, 10, 11$"):
        rebuilt(tmp_path)


def test_the_save_of_a_replaced_checkpoint_that_still_lives_is_not_taken(tmp_path: Path) -> None:
    """A file that claims a part of a tensor that another file has too is refused."""
    save_on([{"w": part} for part in split_rows(make_array((40, 30)), 2)], tmp_path, options=SMALL)
    (tmp_path / "0.metadata").unlink()
    first, second = data_files(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises((CheckpointNotFoundError, CheckpointCorruptedError)):
        rebuilt(tmp_path)


def test_uneven_shards_and_empty_ones(tmp_path: Path) -> None:
    from test.jobs import sharded

    array = make_array((7, 5), "complex128")
    boxes = [[Box((0, 0), (3, 5))], [Box((3, 0), (4, 2)), Box((3, 2), (4, 3))], [Box((7, 0), (0, 5))]]
    empty = np.zeros((0, 4), "float64")
    states = [{"w": sharded(array, mine), "e": sharded(empty, [Box((0, 0), (0, 4))])} for mine in boxes]
    save_on(states, tmp_path)
    lost = without_times(tmp_path / "0.metadata")
    (tmp_path / "0.metadata").unlink()
    rebuilt(tmp_path)
    assert (tmp_path / "0.metadata").read_bytes() == lost
    assert alike(load_whole(tmp_path), {"w": array, "e": empty})


def test_nothing_is_rebuilt_beside_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone({"a": make_array((4,))}, tmp_path, 3)
    (tmp_path / "3.metadata").unlink()
    before = files_in(tmp_path)
    real = rebuild.problems_of
    other: list[Lease] = []

    def verifying(storage: LocalStorage, *args: Any) -> list[str]:
        other.append(Lease(storage, 3, automatic=False))  # a save begins meanwhile
        return real(storage, *args)

    monkeypatch.setattr(rebuild, "problems_of", verifying)
    with pytest.raises(CheckpointError, match="is being saved to, as 3"):
        rebuilt(tmp_path)
    other[0].end()
    assert files_in(tmp_path) == before

    def publishing(lease: Lease, *args: Any) -> bool:
        save = Lease(lease.storage, 4, automatic=True)
        (claim,) = save.others.of_id(3).values()  # as the save sees it, which waits then
        assert claim.deletes
        save.end()
        return publish(lease, *args)

    publish = rebuild.publish_under
    monkeypatch.setattr(rebuild, "problems_of", real)
    monkeypatch.setattr(rebuild, "publish_under", publishing)
    assert rebuilt(tmp_path).unique_id == 3
    assert not list(tmp_path.glob("3.*.claim*"))
    assert list_checkpoints(tmp_path) == [3]


@pytest.mark.parametrize("by", ["somebody who has ended", "somebody who died before"])
def test_what_is_removed_while_it_is_verified_is_not_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    save_alone({"a": make_array((4,))}, tmp_path, 3)
    (tmp_path / "3.metadata").unlink()
    real = rebuild.problems_of

    def verifying(storage: LocalStorage, metadata: Any, progress: bool | None) -> list[str]:
        found = real(storage, metadata, progress)
        if by == "somebody who has ended":
            data_files(tmp_path)[0].unlink()
        else:
            dead = Lease(storage, 4, automatic=False, deletes=True)
            dead.take_on(metadata.save_id)
            age(tmp_path / dead.name)
        return found

    monkeypatch.setattr(rebuild, "problems_of", verifying)
    with pytest.raises(CheckpointError, match="has been removed meanwhile"):
        rebuilt(tmp_path)
    assert list_checkpoints(tmp_path) == []


def test_what_two_rebuild_at_once_has_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone({"a": make_array((4,))}, tmp_path, 3)
    (tmp_path / "3.metadata").unlink()
    real, others = rebuild._complete_saves, [None]
    made: list[int] = []

    def complete_saves(storage: LocalStorage, save: str | None) -> Any:
        found = real(storage, save)
        if others:
            others.clear()
            made.append(rebuilt(tmp_path).unique_id)  # the other one, from beginning to end
        return found

    monkeypatch.setattr(rebuild, "_complete_saves", complete_saves)
    with pytest.raises(CheckpointError, match=r"save [0-9a-f]{16} has its \.metadata again meanwhile"):
        rebuilt(tmp_path)
    assert made == [3]
    assert list_checkpoints(tmp_path) == [3]
    assert len(files_in(tmp_path)) == 2, sorted(files_in(tmp_path))


def test_what_appears_under_the_id_at_the_last_moment_is_not_replaced(tmp_path: Path) -> None:
    folder, aside, saves = tmp_path / "a", tmp_path / "aside", []
    for number in (1, 2):
        save_alone({"w": np.full(9, number)}, folder, 4)
        saves.append(read_metadata(folder, 4).save_id)
        shutil.move(folder / "4.metadata", aside)

    storage = FaultyStorage(folder, does("publish", "4.metadata", lambda: shutil.copy(aside, folder / "4.metadata")))
    with pytest.raises(CheckpointError, match=r"4\.metadata appeared meanwhile; try again"):
        rebuild.rebuild(storage, saves[0], False)
    assert (load_whole(folder, 4)["w"] == 2).all()
    assert rebuilt(folder, saves[0]).unique_id == 5
    assert (load_whole(folder, 5)["w"] == 1).all()


def test_a_temporary_name_that_was_not_removed_at_once_is_removed_in_the_end(tmp_path: Path) -> None:
    save_alone({"a": make_array((4,))}, tmp_path, 3)
    (tmp_path / "3.metadata").unlink()

    class Keeping(LocalStorage):
        """Leaves the temporary name of the `.metadata` as well."""

        def publish(self, name: str, data: bytes, temporary: str, *args: Any, **kwargs: Any) -> bool:
            done = super().publish(name, data, temporary, *args, **kwargs)
            if name.endswith(".metadata"):
                os.link(tmp_path / name, tmp_path / temporary)
            return done

    rebuild.rebuild(Keeping(tmp_path), None, False)
    assert len(files_in(tmp_path)) == 2, sorted(files_in(tmp_path))


def test_a_rebuild_that_was_killed_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    save_alone({"a": make_array((4,))}, tmp_path, 3)
    original = without_times(tmp_path / "3.metadata")
    (tmp_path / "3.metadata").unlink()

    class Dying(LocalStorage):
        """Killed when the `.metadata` is complete under its temporary name, which stays."""

        def publish(self, name: str, data: bytes, temporary: str, *args: Any, **kwargs: Any) -> bool:
            if name.endswith(".metadata"):
                (tmp_path / temporary).write_bytes(data)
                raise Killed
            return super().publish(name, data, temporary, *args, **kwargs)

        def delete(self, name: str) -> None:
            raise Killed

    with pytest.raises(Killed):
        rebuild.rebuild(Dying(tmp_path), None, False)
    with pytest.raises(CheckpointError, match="is being saved to, as 3"):
        rebuilt(tmp_path)
    for claim in tmp_path.glob("*.claim"):
        age(claim)
    assert rebuilt(tmp_path).unique_id == 3
    assert (tmp_path / "3.metadata").read_bytes() == original
    assert len(files_in(tmp_path)) == 2, sorted(files_in(tmp_path))


def test_the_temporary_name_of_a_rebuild_goes_with_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be removed then; a save to the id removes the claim that speaks of it."""
    save_alone({"w": make_array((4,))}, tmp_path, 1)
    (tmp_path / "1.metadata").unlink()

    with monkeypatch.context() as patched:
        patched.setattr(local, "_remove_temporary", lambda path: None)
        rebuild_metadata(FaultyStorage(tmp_path, raises("delete", "*.metadata.tmp", errno.EPERM)))
    assert list(tmp_path.glob("1.*.metadata.tmp"))
    save_alone({"w": make_array((4,))}, tmp_path, 1)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_metadata_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    save_alone({"a": make_array((4,))}, tmp_path, 3)
    (tmp_path / "3.metadata").unlink()

    def appear(operation: str, name: str) -> None:
        if operation == "publish" and name == "3.metadata":
            (tmp_path / name).write_bytes(b"another")

    with pytest.raises(CheckpointError, match=r"/3\.metadata appeared meanwhile; try again"):
        rebuilt(FaultyStorage(tmp_path, appear))
    assert (tmp_path / "3.metadata").read_bytes() == b"another"
    assert not list(tmp_path.glob("*.claim*"))


def test_files_that_do_not_agree_on_a_tensor_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_on([{"w": part} for part in split_rows(make_array((8, 3)), 2)], tmp_path, 3)
    (tmp_path / "3.metadata").unlink()
    read_files, kinds = rebuild._read_files, iter((0, 1))

    def disagreeing(*arguments: Any) -> Any:
        files = read_files(*arguments)
        for file in files:
            file.table.kinds[:] = next(kinds)
        return files

    monkeypatch.setattr(rebuild, "_read_files", disagreeing)
    with pytest.raises(CheckpointCorruptedError, match="w: the data files do not agree on what it is"):
        rebuilt(tmp_path)
    assert not (tmp_path / "3.metadata").exists()
