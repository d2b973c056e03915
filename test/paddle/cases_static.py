"""Functions that test_static.py sends to ranks: one model, trained by a static-graph program or as a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.static.dist_input_spec import DistributedInputSpec
from paddle.nn import functional

from paddle_dist_ckpt import (
    LoadOptions,
    SaveOptions,
    export_state_dict,
    gather_state_dict,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
    scatter_state_dict,
)
from test.paddle.outcomes import Outcome, outcome_of
from test.ranks import static

RANKS = 4
LAYOUTS: dict[str, tuple[Any, list[str]]] = {
    "dp2_mp2": ([[0, 1], [2, 3]], ["dp", "mp"]),
    "mp2_dp2": ([[0, 1], [2, 3]], ["mp", "dp"]),
    "mp4": ([[0, 1, 2, 3]], ["dp", "mp"]),
    "dp4": ([[0], [1], [2], [3]], ["dp", "mp"]),
}
FORMS = {
    "objects": False,  # the layer and the optimizer themselves
    "dicts": False,  # their state_dicts
    "program": True,  # the DistModel itself
    "program_dict": True,  # its state_dict
    "program_split": True,  # its parameters' and its optimizer's
}
_WIDTH = 8
_SAVE_ALONE, _LOAD_ALONE = SaveOptions(no_dist=True), LoadOptions(no_dist=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What ranks do: make a model, load, train, save.

    Attributes:
        form: A key of FORMS: what is loaded and saved; this decides whether it is a static-graph program.
        layout: A key of LAYOUTS.
        seed: For the first parameters. With odd ones the layers are made in another order, so that the same variable
            names, numbered in order, belong to other layers of the same shape.
        load: The folder to load from.
        steps: The numbers of the steps, which choose the data.
        save: The folder to save to.
        rate: The learning rate.
        schedule: Whether it falls.
        half: Whether the parameters are bfloat16, with master weights.
        nest: Keys of dicts around the state.
        moved: Wanted keys, and the stored ones in their place.
    """

    form: str
    layout: str = "dp2_mp2"
    seed: int = 0
    load: str | None = None
    steps: range = range(0)
    save: str | None = None
    rate: float = 0.05
    schedule: bool = False
    half: bool = False
    nest: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()


def train(run: Run) -> list[float]:
    """The losses of this rank's part of the data, or of all."""
    job = _Job(run)
    if run.load is not None:
        job.load(run.load)
    losses = [job.step(number) for number in run.steps]
    if run.save is not None:
        save_state_dict(job.state(), run.save)
    return losses


def evaluate(run: Run, number: int) -> list[float]:
    """The loss of one step before it, of a loaded model; of a program in eval mode."""
    job = _Job(run, "eval")
    if run.load is not None:
        job.load(run.load)
    return [job.loss(number)]


def save_weights(run: Run) -> None:
    """Save a model without its optimizer."""
    save_state_dict({"model": _Job(run).net}, str(run.save))


def load_weights(run: Run, mode: str) -> list[tuple[float, float]]:
    """Load what has no master weights into a program that has, in a mode; gives the sums of each parameter and its
    master."""
    program = _Job(run, mode).program
    options = LoadOptions(allow_missing=["*.master_weight", "*learning_rate*"])
    load_state_dict({"model": program}, str(run.load), options=options)
    program.train()
    sums = {key: float(one._local_value().cast("float32").sum()) for key, one in program.state_dict().items()}
    masters = sorted(value for key, value in sums.items() if "_fp32_master_" in key)
    parameters = sorted(value for key, value in sums.items() if key.endswith((".weight", ".bias")))
    return list(zip(parameters, masters, strict=True))


def save_without_state(run: Run, what: str) -> Outcome:
    """Save a program that was never set to train, or what one was made of."""
    job = _Job(run, None if what in ("program", "evaluated") else "train")
    if what == "evaluated":
        job.program.eval()
    state = {"model": {"layer": job.net, "optimizer": job.optimizer}.get(what, job.program)}
    return outcome_of(lambda: save_state_dict(state, str(run.save)))


def load_optimizer(run: Run) -> Outcome:
    """Load an optimizer's state without its parameters, which alone would tell whose it is."""
    optimizer = {"optimizer": _Job(run).state()["optimizer"]}
    return outcome_of(lambda: load_state_dict(optimizer, str(run.load)) and None)


def variable_names(path: str) -> dict[str, str]:
    """The variable name of each tensor that has one in a checkpoint."""
    return {key: name for key, name in read_metadata(path).variable_names.items() if name is not None}


def save_arrays(path: str) -> None:
    """Save arrays of which nothing but the keys says what they are: those of variables."""
    arrays = {"linear_0.w_0": 1, "linear_0.w_0_moment1_0": 2, "linear_0.w_0_fp32_master_0": 3, "learning_rate_0": 4}
    save_state_dict(
        {"model": {key: np.full(4, value, np.float32) for key, value in arrays.items()}}, path, options=_SAVE_ALONE
    )


def load_named(path: str, keys: Mapping[str, str]) -> Outcome:
    """Load tensors of four zeros, whose keys and variable names are given; gives their first elements."""
    state = {key: paddle.zeros([4]) for key in keys}
    for key, name in keys.items():
        state[key].name = name

    def load() -> dict[str, float]:
        load_state_dict({"model": state}, path, options=_LOAD_ALONE)
        return {key: float(value[0]) for key, value in state.items()}

    return outcome_of(load)


def move_masters(path: str, from_static: bool) -> dict[str, float]:
    """Save master weights and their moments as one kind of job names them, and load as the other kind does."""
    writer, reader = _mixed(from_static, "linear_0.w_0.dist", 1), _mixed(not from_static, "linear_3.w_0", 0)
    save_state_dict(writer, path, options=_SAVE_ALONE)
    load_state_dict(reader, path, options=_LOAD_ALONE)
    return {"parameter": _first(reader["model"]["fc.weight"]), **{key: _first(it) for key, it in _states(reader)}}


class _Tied(paddle.nn.Layer):
    """Two layers of one weight."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.embed, self.head = (paddle.nn.Linear(4, 4, bias_attr=False) for _ in range(2))
        self.embed.weight = dist.shard_tensor(self.embed.weight, mesh, [dist.Replicate()])
        self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.embed(x))


def _tied_program(net: Any, optimizer: Any, batch: Any) -> Any:
    spec = [[DistributedInputSpec.from_dtensor(batch, name)] for name in "xy"]
    program = dist.to_static(net, None, _loss, optimizer, input_spec=spec)
    program.train()
    return program


def _tied() -> tuple[Any, Any, Any]:
    """A model, its optimizer, and a batch."""
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    net = _Tied(mesh)
    optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(0.01, parameters=net.parameters()))
    return net, optimizer, dist.shard_tensor(paddle.ones([2, 4]), mesh, [dist.Replicate()])


def save_in_mode(path: str, mode: str) -> list[str]:
    """The keys of a program that was trained, and is saved, gathered and exported in a mode."""
    net, optimizer, batch = _tied()
    program = _tied_program(net, optimizer, batch)
    program(batch, batch)
    getattr(program, mode)()
    seen, find = list[str](), type(program).dist_main_program

    def find_and_look(model: Any, mode: str) -> Any:
        seen.append(program._engine._mode)  # as another thread may, which runs the program
        return find(model, mode)

    with patch.object(type(program), "dist_main_program", find_and_look):
        save_state_dict({"model": program}, path, options=_SAVE_ALONE)
        gathered = gather_state_dict({"model": program}, options=_SAVE_ALONE)
        export_state_dict({"model": program}, f"{path}-exported", options=_SAVE_ALONE)
    assert set(seen) == {mode} == {program._engine._mode}
    keys = sorted(read_metadata(path).state_dict_metadata)
    assert sorted(f"model.{key}" for key in gathered["model"]) == keys
    assert sorted(read_metadata(f"{path}-exported").state_dict_metadata) == keys
    return keys


def save_and_load_without_pir(path: str, mode: str) -> list[str]:
    """The keys of a program of the older kind, for which Paddle asks for GPUs, that is saved and loaded in a mode."""
    memory = SimpleNamespace(name="", total_memory=1 << 34, major=7, minor=0)
    paddle.device.cuda.get_device_properties = lambda *_: memory
    paddle.device.synchronize = lambda *_: None
    net, *_ = _tied()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
    ones = paddle.ones([2, 4])
    loader = paddle.io.DataLoader(paddle.io.TensorDataset([ones, ones]), batch_size=2)
    program = dist.to_static(net, loader, _loss, optimizer)
    program(ones, ones)
    getattr(program, mode)()
    save_state_dict({"model": program}, path, options=_SAVE_ALONE)
    load_state_dict({"model": program}, path, options=_LOAD_ALONE)
    return sorted(read_metadata(path).state_dict_metadata)


def move_tied(path: str, from_static: bool) -> list[dict[str, list[float]]]:
    """Train and save a model of tied parameters as one kind of job, and load it as the other kind, which saves it."""
    paddle.disable_static()
    states: list[dict[str, Any]] = []
    for is_static in (from_static, not from_static):
        net, optimizer, batch = _tied()
        if is_static:
            program = _tied_program(net, optimizer, batch)
            if not states:
                program(batch, batch)
            states.append({"model": program})
        else:
            if not states:
                _loss(net(batch), batch).backward()
                optimizer.step()
            states.append({"model": net, "optimizer": optimizer})
    save_state_dict(states[0], path, options=_SAVE_ALONE)
    load_state_dict(states[1], path, options=_LOAD_ALONE)
    save_state_dict(states[1], f"{path}/again", options=_SAVE_ALONE)
    found = []
    for folder in (path, f"{path}/again"):
        entries = {key: value for part in load_merged_state_dict(folder).values() for key, value in part.items()}
        found.append({
            key: np.asarray(value).ravel().tolist() for key, value in sorted(entries.items()) if "weight" in key
        })  # fmt: skip
    return found


class _Tables(paddle.nn.Layer):
    """A layer that uses tensors which are not in its state, and others that are; its first weight is not trained."""

    def __init__(self, mesh: Any, fill: float) -> None:
        super().__init__()
        fixed = paddle.nn.initializer.Constant(fill)
        self.first, self.last = (paddle.nn.Linear(4, 4, weight_attr=fixed, bias_attr=False) for _ in range(2))
        for layer in (self.first, self.last):
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Replicate()])
        self.first.weight.stop_gradient = True
        self.register_buffer("mean", paddle.full([4], fill))
        self.register_buffer("table", paddle.full([4], fill), persistable=False)
        spread = dist.shard_tensor(paddle.full([4], fill), mesh, [dist.Replicate()])
        self.register_buffer("spread", spread, persistable=False)
        self.attribute = paddle.full([4], fill)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x)) * self.mean * self.table * self.spread * self.attribute


class _CenterLoss(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", paddle.full([4], 0.0))

    def forward(self, output: Any, labels: Any) -> Any:
        return ((output - self.center - labels) ** 2).mean()


def _with_tables(fill: float, loss: Any) -> tuple[Any, Callable[[], Any]]:
    """A layer, and what makes a program of it."""
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    batch = dist.shard_tensor(paddle.ones([2, 4]), mesh, [dist.Replicate()])
    spec = [[DistributedInputSpec.from_dtensor(batch, name)] for name in "xy"]
    layer = _Tables(mesh, fill)
    optimizer = dist.shard_optimizer(paddle.optimizer.SGD(0.01, parameters=[layer.last.weight]))

    def make() -> Any:
        program = dist.to_static(layer, None, loss, optimizer, input_spec=spec)
        program.train()
        return program

    return layer, make


def move_tables(path: str) -> tuple[dict[str, float], list[str], list[str]]:
    """Load what a layer saved into a program that has tables of its own.

    Returns:
        A number of each tensor that the program has then, the keys that it saves, and those of a program whose loss has
        a buffer.
    """
    paddle.disable_static()
    save_state_dict({"model": _with_tables(2.0, _loss)[0]}, path, options=_SAVE_ALONE)
    program = _with_tables(3.0, _loss)[1]()
    options = LoadOptions(no_dist=True, allow_missing=["*learning_rate*"])
    load_state_dict({"model": program}, path, options=options)
    numbers = {key: float(one._local_value().max()) for key, one in program.state_dict().items()}
    others = _with_tables(4.0, _CenterLoss())[1]()
    keys = []
    for folder, each in ((f"{path}/again", program), (f"{path}/others", others)):
        save_state_dict({"model": each}, folder, options=_SAVE_ALONE)
        keys.append(sorted(read_metadata(folder).state_dict_metadata))
    return numbers, keys[0], keys[1]


def scatter_to_tables() -> tuple[list[str], dict[str, float]]:
    """What is trained of a program, by its keys; and a number of each of its weights when it was given a whole."""
    paddle.disable_static()
    whole = gather_state_dict({"model": _with_tables(2.0, _loss)[0]})
    program = _with_tables(3.0, _loss)[1]()
    trained = sorted(gather_state_dict({"model": program}, frozen=False)["model"])
    options = LoadOptions(allow_missing=["*learning_rate*"])
    scatter_state_dict(whole, {"model": program}, frozen=False, options=options)
    state = program.state_dict()
    return trained, {key: float(state[key]._local_value().max()) for key in ("first.weight", "last.weight")}


def _mixed(is_static: bool, name: str, scale: int) -> dict[str, Any]:
    """The state of a parameter with a master weight, under the keys of a program or of an optimizer."""

    def tensor(variable: str, value: int) -> Any:
        made = paddle.full([4], value * scale, "float32")
        made.name = variable
        return made

    parameter, master = tensor(name, 1), tensor(f"{name}_fp32_master_0", 2)
    moments = {f"{name}_fp32_master_0_{kind}_0": tensor(f"{name}_fp32_master_0_{kind}_0", value)
               for kind, value in (("moment1", 3), ("moment2", 4))}  # fmt: skip
    if is_static:
        return {"model": {"fc.weight": parameter, f"{name}_fp32_master_0": master, **moments}}
    return {"model": {"fc.weight": parameter}, "optimizer": {**moments, "master_weights": {name: master}}}


def _states(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    optimizer = state.get("optimizer", state["model"])
    masters = optimizer.get("master_weights", {})
    found = [*optimizer.items(), *(("master_0", value) for value in masters.values())]
    kinds = ("master_0", "moment1_0", "moment2_0")
    return [(kind, value) for kind in kinds for key, value in found if key.endswith(kind)]


def _first(tensor: Any) -> float:
    return float(tensor[0])


class _Net(paddle.nn.Layer):
    """An embedding and two linear layers of one shape."""

    def __init__(self, mesh: Any, reverse: bool, half: bool) -> None:
        super().__init__()
        self.embedding = paddle.nn.Embedding(16, _WIDTH)
        made = {name: paddle.nn.Linear(_WIDTH, _WIDTH) for name in sorted(("up", "down"), reverse=not reverse)}
        self.up, self.norm, self.down = made["up"], paddle.nn.LayerNorm(_WIDTH), made["down"]
        dims = {"up": (1, 0), "down": (0, None), "norm": (None, None), "embedding": (None, None)}
        for name, (weight, bias) in dims.items():
            layer = getattr(self, name)
            layer.weight = dist.shard_tensor(layer.weight, mesh, _placements(mesh, "mp", weight))
            if name != "embedding":
                layer.bias = dist.shard_tensor(layer.bias, mesh, _placements(mesh, "mp", bias))
        if half:
            self.to(dtype="bfloat16")

    def forward(self, ids: Any) -> Any:
        up, down, norm = ((_wide(each.weight), _wide(each.bias)) for each in (self.up, self.down, self.norm))
        hidden = functional.embedding(ids, _wide(self.embedding.weight))
        hidden = functional.layer_norm(functional.relu(functional.linear(hidden, *up)), [_WIDTH], *norm)
        return functional.linear(hidden, *down)


def _wide(parameter: Any) -> Any:
    """It in a type in which CPUs multiply."""
    return parameter if parameter.dtype == paddle.float32 else parameter.astype("float32")


def _placements(mesh: Any, axis: str, dim: int | None) -> list[Any]:
    return [dist.Shard(dim) if name == axis and dim is not None else dist.Replicate() for name in mesh.dim_names]


def _arrays(number: int) -> tuple[Any, Any]:
    numbers = np.random.default_rng(number)
    return numbers.integers(0, 16, (8, 3)), numbers.standard_normal((8, 3, _WIDTH)).astype(np.float32)


def _loss(output: Any, labels: Any) -> Any:
    return ((output - labels) ** 2).mean()


class _Job:
    """A model that is trained."""

    def __init__(self, run: Run, mode: str | None = "train") -> None:
        paddle.disable_static()  # a program that could not be made leaves this on
        static.install(RANKS)
        self.run, self.is_static = run, FORMS[run.form]
        ranks, names = LAYOUTS[run.layout]
        self.mesh = dist.ProcessMesh(ranks, dim_names=names)
        paddle.seed(run.seed)
        with paddle.utils.unique_name.guard():
            self.net = _Net(self.mesh, bool(run.seed % 2), run.half)
        self.schedule = paddle.optimizer.lr.StepDecay(run.rate, step_size=2) if run.schedule else None
        self.optimizer = self._make_optimizer(self.schedule or run.rate)
        self.program = self._make_program(mode) if self.is_static else None

    def _make_optimizer(self, rate: Any) -> Any:
        if self.run.half:
            made = paddle.optimizer.SGD(rate, parameters=self.net.parameters(), multi_precision=True)
        else:
            made = paddle.optimizer.AdamW(rate, parameters=self.net.parameters(), weight_decay=0.1)
        return dist.shard_optimizer(made)

    def _make_program(self, mode: str | None) -> Any:
        ids, labels = self.batch(0)
        spec = DistributedInputSpec.from_dtensor
        specs = [[spec(ids, "ids")], [spec(labels, "labels")]]  # Paddle's own guess is that mesh dimension 0 cuts data
        program = dist.to_static(self.net, None, _loss, self.optimizer, input_spec=specs)
        if mode is not None:
            program.train()  # only this gives programs the layer's parameters
            getattr(program, mode)()
        return program

    def state(self) -> dict[str, Any]:
        """What is saved and loaded."""
        net, optimizer, program = self.net, self.optimizer, self.program
        make = {
            "objects": lambda: {"model": net, "optimizer": optimizer},
            "dicts": lambda: {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
            "program": lambda: {"model": program},
            "program_dict": lambda: {"model": program.state_dict()},
            "program_split": lambda: {"model": program.state_dict("param"), "optimizer": program.state_dict("opt")},
        }[self.run.form]
        return functools.reduce(lambda state, key: {key: state}, reversed(self.run.nest), make())

    def load(self, path: str) -> None:
        """Load, and give back what was not filled in place."""
        state = self.state()
        load_state_dict(state, path, options=LoadOptions(key_map=dict(self.run.moved)))
        for key in self.run.nest:
            state = state[key]
        if self.run.form == "dicts":
            self.optimizer.set_state_dict(state["optimizer"])
        elif self.run.form in ("program_dict", "program_split"):
            self.program.set_state_dict({key: value for part in state.values() for key, value in part.items()})

    def step(self, number: int) -> float:
        """Train with one batch."""
        loss = self.loss(number)
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def loss(self, number: int) -> float:
        """One batch's loss; of a program in train mode, and of a layer, it is a step of training."""
        ids, labels = self.batch(number)
        if self.is_static:
            return float(self.program(ids, labels))
        loss = _loss(self.net(ids), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return float(loss)

    def batch(self, number: int) -> list[Any]:
        """Inputs and labels."""
        placements = _placements(self.mesh, "dp", 0)
        return [dist.shard_tensor(paddle.to_tensor(array), self.mesh, placements) for array in _arrays(number)]
