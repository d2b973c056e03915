"""A training job's model and optimizer saved by one call, and loaded by one.

The idea is that of `hfai.checkpoint <https://doc.hfai.high-flyer.cn/api/checkpoint.html>`_: one name for each
checkpoint, ranks that share the work of writing what all of them have, and a load that gives the whole state to any
process. What is stored is a checkpoint like any other: ``{"model": ..., "optimizer": ..., **others}``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from .arguments import checked_integer
from .errors import CheckpointCorruptedError, CheckpointNotFoundError, StateDictMismatchError
from .files.metadata import Metadata
from .folder.catalogs import foreign_ids
from .folder.checkpoint import Restarts, read_checkpoint
from .folder.ids import metadata_ids
from .folder.selection import Selection
from .options import LoadOptions, SaveOptions
from .reports import SaveReport, loaded_line
from .storage import Storage, as_source
from .tree.state_dict import Adapter
from .wiring import checked_id, connected, load_whole, load_with, naming_folder, paddles, save_with

__all__ = ["load", "model_state_dict", "optimizer_state_dict", "rng_state", "save", "set_rng_state"]

_UNIQUE_ID = 0  # a folder holds one such checkpoint, which each save replaces
_logger = logging.getLogger("paddle_dist_ckpt")
_OURS = ("model", "optimizer")
_NO_OPTIONS = "load takes no options; load_state_dict({'model': model}, path, options=LoadOptions(...)) does."
_ADVICE = "An optimizer's entries are named after the parameters: pass model beside optimizer."


def save(
    path: str | os.PathLike[str] | Storage, model: Any, optimizer: Any = None, others: Any = None, group: Any = None
) -> SaveReport:
    """Save models, optimizers and whatever else a training job needs, together with the other ranks of the group.

    Every rank of the group calls it. Models may be wrapped for data parallelism or not; keys have no prefix either way.
    The ranks share the work of writing tensors that are equal on all of them, such as parameters and optimizer states
    in data parallelism: each writes about the same number of bytes, and large tensors are split for that. For tensors
    that differ, such as buffers, the copy of the group's first rank is saved, with a warning. DistTensors are saved as
    by :func:`paddle_dist_ckpt.save_state_dict`. A checkpoint that an earlier call saved there is replaced once the new
    one is completely on disk, not before.

    The idea is that of ``hfai.checkpoint.save``.

    Args:
        path: The folder: a str, a PathLike, or a :class:`Storage`. It is for this checkpoint alone.
        model: A ``paddle.nn.Layer``, or a list of them.
        optimizer: One of Paddle's optimizers, or a list of them. One that has not taken a step is saved with the
            accumulators that its first step would start from. Its entries are named after the parameters.
        others: A dict of anything else that :func:`paddle_dist_ckpt.save_state_dict` takes: values, tensors, objects
            such as a learning rate's scheduler, :class:`PerRank` values.
        group: The Paddle group whose ranks save together; None for the default group, or for this process if it is
            the only one.

    Returns:
        What was saved, in bytes and seconds.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank; or ``others`` has the key ``model`` or
            ``optimizer``. Nothing was written.
        UnsupportedValueError: something cannot be stored; or most tensors differ among the ranks, so that all but the
            first one's would be lost. Nothing was written.
        RankFailureError: a rank failed. The checkpoint that was there before is unchanged.
        CheckpointTimeoutError: a rank did not join the call, or went silent.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import save
        >>> model = paddle.nn.Linear(4, 2)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> save("latest", model, optimizer, others={"epoch": 3}).unique_id  # a later save replaces it
        0
    """
    from .paddle_adapter import arguments

    options = SaveOptions()
    with naming_folder(path):
        ranks = connected(group, arguments.first_rank(group), options)

    def find() -> tuple[dict[Any, Any], Adapter]:
        state = {"model": arguments.layers(model), **_objects(None, optimizer)}
        return paddles(ranks, {**state, **_checked_others(others)})()

    report = save_with(ranks, find, path, _UNIQUE_ID, False, options, kind="save")
    assert isinstance(report, SaveReport)
    return report


def load(
    path: str | os.PathLike[str] | Storage,
    model: Any = None,
    optimizer: Any = None,
    map_location: Any = None,
    nthreads: int = 8,
    *,
    unique_id: int | None = None,
) -> dict[Any, Any]:
    """Load what :func:`save` saved on any number of ranks, or a checkpoint of another format.

    Each process loads on its own and does not wait for others. Without ``model`` and ``optimizer``, the whole state is
    returned, as whole tensors. With them, their data is read directly into their own tensors, and ``others`` are
    returned as well; of a DistTensor only this rank's part is read. An optimizer needs its model too, since its entries
    are named after the parameters. A checkpoint of another format that has neither ``model`` nor ``optimizer`` at the
    top level is assumed to be that of a model.

    The idea is that of ``hfai.checkpoint.load``.

    Args:
        path: The folder, or a file of another format: a str, a PathLike, or a :class:`Storage`.
        model: A ``paddle.nn.Layer``, or a list of them, as they were saved; wrapped for data parallelism or not.
        optimizer: One of Paddle's optimizers, or a list of them. One that has not taken a step gets its accumulators.
        map_location: Where to put returned tensors: None for Paddle's current device, ``"cpu"``, another device's name,
            or a Place. The tensors of a model or optimizer that was passed stay where they are.
        nthreads: How many threads read; 0 reads in the calling thread, one piece after another.
        unique_id: Which checkpoint of the folder; None for 0, which :func:`save` writes, or for the newest if there is
            no 0. If 0 is loaded and there are newer ones, a warning in the log names them.

    Returns:
        ``{"model": ..., "optimizer": ..., **others}``, without what was not saved. If ``model`` or ``optimizer`` is
        passed, its entry is the state_dict of that object; if only one of the two is passed, the other is left out.

    Raises:
        StateDictMismatchError: the checkpoint does not fit the objects; lists every problem. They were not touched.
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptedError: stored bytes are not what was written. Objects may be partly filled then; the message
            says so.
        CheckpointError: reading failed, or the checkpoint kept being replaced meanwhile.
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import load, save
        >>> model = paddle.nn.Linear(4, 2)
        >>> report = save("latest", model, others={"epoch": 3})
        >>> list(load("latest")["model"]["weight"].shape)  # whole tensors
        [4, 2]
        >>> load("latest", paddle.nn.Linear(4, 2))["epoch"]  # fills the layer
        3
    """
    from .paddle_adapter import arguments

    storage, threads, place = as_source(path), _checked_threads(nthreads), arguments.place_of(map_location)
    objects = _objects(model, optimizer)
    asked = checked_id(unique_id)
    chosen = _default_id(storage) if asked is None else asked
    if not objects:
        return load_whole(storage, chosen, Selection(), False, LoadOptions(), place, threads)
    others = _load_into(objects, storage, chosen, place, threads)
    return {**{name: arguments.each(value, arguments.state_of) for name, value in objects.items()}, **others}


def model_state_dict(
    loaded: Mapping[str, Any], model: Any, *, frozen: bool = True, variable_names: bool = False
) -> dict[str, Any]:
    """What was loaded of a model, as this run's model takes it; nothing else is in it, and nothing is missing.

    Args:
        loaded: ``load(path)["model"]``, or that of ``load_merged_state_dict(path)``: whole tensors by structured name.
        model: A ``paddle.nn.Layer``, wrapped for data parallelism or not.
        frozen: Whether parameters that are not trained (``stop_gradient``) are among them.
        variable_names: Give them the names of this run's variables (``linear_3.w_0``), for
            ``set_state_dict(..., use_structured_name=False)``.

    Returns:
        The loaded tensors, not copies; but where the model's state has its parameters in another dtype, as that of
        ``amp.decorate(save_dtype=...)``, copies in their own.

    Raises:
        StateDictMismatchError: an entry of the model is missing, or has another shape or dtype, or is distributed in
            this run; lists every problem.
        TypeError: an argument is invalid.

    Examples:
        >>> import paddle, paddle_dist_ckpt
        >>> model = paddle.nn.Linear(2, 3)
        >>> report = paddle_dist_ckpt.save("checkpoint", model)
        >>> state = paddle_dist_ckpt.load("checkpoint")
        >>> taken = model.set_state_dict(paddle_dist_ckpt.model_state_dict(state["model"], model))
    """
    from .paddle_adapter import arguments, run_names

    layer = arguments.layers(model)
    if isinstance(layer, (list, tuple)):
        raise TypeError("model must be a paddle.nn.Layer; call this for each of several")
    return run_names.model_state_of_run(_checked_mapping(loaded), layer, frozen, variable_names)


def optimizer_state_dict(loaded: Mapping[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """What was loaded of an optimizer under the names that Paddle has in this run, for ``optimizer.set_state_dict()``.

    A checkpoint names an optimizer's entries after the parameters (``fc.weight.moment1``); Paddle's own setter wants
    ``linear_3.w_0_moment1_0``, which is another name in each run.

    An optimizer that has not taken a step gets its accumulators, as by a load into the object, and those of parameters
    that are frozen if there are such among what was loaded.

    Args:
        loaded: ``load(path)["optimizer"]``, or that of ``load_merged_state_dict(path)``, nested and with whole tensors.
        model: The model, or the list of models, beside which the optimizer was saved.
        optimizer: One of Paddle's optimizers, wrapped by fleet or not.

    Returns:
        The loaded tensors under other names, not copies; but master weights are copies.

    Raises:
        StateDictMismatchError: an entry of the optimizer is missing, or has another shape or dtype, or is distributed
            in this run; lists every problem.
        UnsupportedValueError: the optimizer's setter does not take all of its state (LBFGS, LookAhead).
        TypeError: an argument is invalid.

    Examples:
        >>> import paddle, paddle_dist_ckpt
        >>> model = paddle.nn.Linear(2, 3)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> report = paddle_dist_ckpt.save("checkpoint", model, optimizer)
        >>> state = paddle_dist_ckpt.load("checkpoint")
        >>> optimizer.set_state_dict(paddle_dist_ckpt.optimizer_state_dict(state["optimizer"], model, optimizer))
    """
    from .paddle_adapter import arguments, run_names

    if isinstance(optimizer, (list, tuple)):
        raise TypeError("optimizer must be one optimizer; call this for each of several")
    one = arguments.optimizers(optimizer)
    return run_names.optimizer_state_of_run(_checked_mapping(loaded), arguments.layers(model), one)


def _checked_mapping(loaded: Any) -> Mapping[str, Any]:
    if not isinstance(loaded, Mapping):
        raise TypeError(f"loaded must be a mapping of keys to tensors, not {type(loaded).__name__}")
    return loaded


def _default_id(storage: Storage) -> int | None:
    """0, the id that :func:`save` takes; None, for the newest, of a folder that has others alone."""
    try:
        ids = [*foreign_ids(storage), *metadata_ids(storage)]
    except (OSError, CheckpointNotFoundError):  # whoever reads the checkpoint says so
        return _UNIQUE_ID
    if ids and _UNIQUE_ID not in ids:
        return None
    newer = sorted({number for number in ids if number > _UNIQUE_ID})
    if newer:
        _logger.warning(
            "%s: load takes the checkpoint with the id %d, and the folder has newer ones (%s): load(path, ..., "
            "unique_id=%d) takes another, and load_state_dict({'model': model}, path) the newest",
            storage.location,
            _UNIQUE_ID,
            ", ".join(map(str, newer)),
            newer[-1],
        )
    return _UNIQUE_ID


def _load_into(
    objects: dict[str, Any], storage: Storage, unique_id: int | None, place: str | None, threads: int
) -> dict[Any, Any]:
    """Fill the objects, and return what was saved beside models and optimizers: all of one and the same save."""
    restarts = Restarts(storage)
    while True:
        metadata = read_checkpoint(storage, unique_id)
        tops = {path.split("/", 2)[1] for path in metadata.table.paths}
        is_model = metadata.format != "native" and tops.isdisjoint(_OURS)
        try:
            others = {} if is_model else _load_others(metadata, storage, place, threads)
            _fill(objects, storage, metadata, threads, is_model)
        except (StateDictMismatchError, CheckpointCorruptedError, CheckpointNotFoundError) as error:
            if restarts.due(metadata):
                continue
            if not isinstance(error, StateDictMismatchError):
                raise
            advice = [_ADVICE] if "model" not in objects else []
            advice += [_NO_OPTIONS] if "LoadOptions(" in str(error) else []
            raise StateDictMismatchError("\n".join([str(error), *advice]), error.problems) from None
        if not restarts.due(metadata):
            return others


def _fill(objects: dict[str, Any], storage: Storage, metadata: Metadata, threads: int, is_model: bool) -> None:
    """Fill the objects; ``is_model``: the checkpoint has a model's keys at the top."""
    options = LoadOptions(no_dist=True, key_map=_keys_at_top(objects, metadata) if is_model else None)
    ranks = connected(None, 0, options)
    find = paddles(ranks, objects, options.staging_bytes)
    report = load_with(ranks, find, storage, metadata.unique_id, options, kind="load", threads=threads, is_part=True)
    # The others have been loaded before.
    unused = tuple(key for key in report.unused_keys if is_model or key.partition(".")[0] in _OURS)
    _logger.info("%s", loaded_line(dataclasses.replace(report, unused_keys=unused)))


def _keys_at_top(objects: dict[str, Any], metadata: Metadata) -> Callable[[str], str]:
    """Where a checkpoint has a model's entries at the top: without our ``model.``; but what is part of a larger model
    may be stored there under its name in that one, which is often ``model.`` too."""
    from .paddle_adapter import arguments

    stored = {metadata.key(path) for path in metadata.table.paths}
    model = objects.get("model")
    own = set() if model is None or isinstance(model, (list, tuple)) else set(arguments.state_of(model))

    def stored_key(key: str) -> str:
        at_top = key.removeprefix("model.")
        in_larger = at_top not in stored and key in stored and key not in own
        return key if in_larger else at_top

    return stored_key


def _load_others(metadata: Metadata, storage: Storage, place: str | None, threads: int) -> dict[Any, Any]:
    paths = metadata.paths
    keys = [metadata.key(path) for path in paths if path.split("/", 2)[1] not in _OURS]
    if not keys:
        return {}
    selection = Selection(keys=keys)
    return load_whole(storage, metadata.unique_id, selection, False, LoadOptions(), place, threads, is_part=True)


def _objects(model: Any, optimizer: Any) -> dict[str, Any]:
    """The checked ones of those that are not None, under the keys at which they are saved."""
    from .paddle_adapter import arguments

    kinds = {"model": (model, arguments.layers), "optimizer": (optimizer, arguments.optimizers)}
    return {name: checked(given) for name, (given, checked) in kinds.items() if given is not None}


def _checked_others(others: Any) -> dict[Any, Any]:
    if others is None:
        return {}
    if not isinstance(others, dict):
        raise TypeError(f"others must be None or a dict, not {type(others).__name__}")
    reserved = [key for key in _OURS if key in others]
    if reserved:
        raise ValueError(f"others must not have the keys {reserved}; these are for the arguments of the same names")
    return others


def _checked_threads(nthreads: int) -> int:
    """How many threads read, this one included."""
    number = checked_integer("nthreads", nthreads)
    if number < 0:
        raise ValueError(f"nthreads must not be negative, but is {nthreads}")
    return max(1, number)


def rng_state() -> dict[str, Any]:
    """The state of the random generators of Python, numpy (its global one) and Paddle, to be saved as a PerRank.

    Returns:
        A dict of plain values: ``python``, ``numpy``, ``paddle`` (by kind of device, always including ``cpu``, with one
        state per device), ``fleet`` (by name, those of fleet's tracker for model parallelism, if it has any) and
        ``device`` (the number of the device in use).

    Raises:
        UnsupportedValueError: this Paddle cannot report the state of its CPU generator, as in Paddle 2.6.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import PerRank, rng_state, save_state_dict
        >>> report = save_state_dict({"rng": PerRank(rng_state())}, "checkpoint")
    """
    from .paddle_adapter import random_state

    return random_state.rng_state()


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue with the random numbers that followed :func:`rng_state`.

    Args:
        state: What it returned, with devices of the same kind. Where another one is in use, or there are more or fewer,
            it continues with the state of the one that was in use, and the others are left as they are.

    Raises:
        ValueError: it is not such a state, or this process has other generators. Nothing has changed then.

    Examples:
        >>> import random
        >>> from paddle_dist_ckpt import rng_state, set_rng_state
        >>> state, number = rng_state(), random.random()
        >>> set_rng_state(state)
        >>> random.random() == number
        True
    """
    from .paddle_adapter import random_state

    random_state.set_rng_state(state)
