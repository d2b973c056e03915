"""``convert``: a checkpoint in another format."""

from __future__ import annotations

import dataclasses
import os
from enum import Enum
from typing import Annotated

import typer

from .arguments import CheckpointPath, Identifier, Json
from .documents import print_json
from .output import count, human_bytes, say

__all__ = ["Cast", "Keys", "MostBytes", "Out", "Prefix", "Rules", "Target", "convert"]

_MOST_SHOWN = 10


class Target(str, Enum):
    """The formats that there are."""

    native = "native"
    safetensors = "safetensors"
    paddle = "paddle"
    pdparams = "pdparams"


Out = Annotated[
    str,
    typer.Argument(metavar="OUT", help="The folder to make (for pdparams the file); must be new.", show_default=False),
]
Prefix = Annotated[
    str | None, typer.Option("--prefix", metavar="KEY", help="Only what is below this key; names are without it.")
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="Only this key, or a pattern such as '*.weight'. May be repeated."),
]
Cast = Annotated[
    str | None,
    typer.Option("--dtype", metavar="TYPE", help="Convert floating-point tensors to this type, such as bfloat16."),
]
Rules = Annotated[
    str | None,
    typer.Option(
        "--recipes",
        metavar="FILE",
        help="Make tensors by the recipes, or the aoa_config, of this file; see the command recipes, which shows what "
        "they make. A Python file is run.",
    ),
]
MostBytes = Annotated[
    int,
    typer.Option(
        "--max-shard-bytes", metavar="N", min=1, help="The most bytes of tensors in a file, if it has several."
    ),
]


def convert(
    path: CheckpointPath,
    out: Out,
    to: Annotated[Target, typer.Option("--to", help="The format.", show_default=False)],
    unique_id: Identifier = None,
    prefix: Prefix = None,
    key: Keys = None,
    dtype: Cast = None,
    recipes: Rules = None,
    max_shard_bytes: MostBytes = 5_000_000_000,
    json: Json = False,
) -> None:
    """Write a checkpoint of any format in another one.

    native: a checkpoint of this library, with checksums, and with the values. safetensors: as Hugging Face lays it out.
    paddle: for Paddle's own dist.load_state_dict. pdparams: one file for paddle.load, with the values.

    Tensors are written whole, in little memory, and bit by bit as they are stored, but for --dtype and --recipes; with
    these, --prefix and --key select by the names that tensors get. Every block that is read is verified, where the
    format has checksums. OUT is there when all of it is, or not at all. Started by paddle.distributed.launch, several
    processes share the files.

    \b
    Examples:
      paddle-dist-ckpt convert paddle_checkpoint checkpoints --to native
      paddle-dist-ckpt convert checkpoints model.pdparams --to pdparams --prefix model
      paddle-dist-ckpt convert checkpoints for_torch --to safetensors --recipes transposed.py
      python -m paddle.distributed.launch --nproc_per_node 4 $(which paddle-dist-ckpt) \\
          convert checkpoints for_others --to safetensors --dtype bfloat16
    """
    from ..export_calls import export
    from ..options import LoadOptions
    from ..wiring import members, refuse
    from .making import read_rules

    rules = LoadOptions()
    try:
        rules = rules if recipes is None else read_rules(recipes)
    except Exception as error:  # perhaps of this host's file alone
        refuse(members(None, rules), rules, error, "export")
    report = export(
        path,
        out,
        to.value,
        unique_id=unique_id,
        prefix=prefix,
        keys=key or None,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        options=dataclasses.replace(rules, progress=False if json else None),
    )
    if os.environ.get("PADDLE_TRAINER_ID", "0") != "0":
        return
    if json:
        print_json(report)
        return
    say(f"{report.path}  {report.format}", "head")
    say(f"{count(len(report.files), 'file')}, {human_bytes(report.total_bytes)}, {count(report.tensors, 'tensor')}")
    if report.left_out:
        shown = ", ".join(report.left_out[:_MOST_SHOWN])
        more = ", …" if len(report.left_out) > _MOST_SHOWN else ""
        say(f"left out: {shown}{more}", "faint")
