"""``verify``: checks every byte of a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import typer

from .arguments import CheckpointPath, Identifier, Json
from .documents import print_json
from .output import count, human_bytes, say

__all__ = ["verify"]


def verify(path: CheckpointPath, unique_id: Identifier = None, json: Json = False) -> None:
    """Check every byte of a checkpoint by its checksums.

    They were taken when it was written. Names every tensor and file that is damaged or missing, and ends with 1 if
    there are any. Of other formats it checks sizes, how tensors are laid out, and what checksums there are.

    Started by paddle.distributed.launch, the ranks share the files, by size; the first one prints.

    \b
    Examples:
      paddle-dist-ckpt verify checkpoints --id 3
      python -m paddle.distributed.launch --nproc_per_node 4 $(which paddle-dist-ckpt) verify checkpoints
    """
    from ..storage import as_source, local_path
    from .ranks import joined, print_once
    from .verification import VerifyFacts, verify_together

    def show(facts: VerifyFacts) -> int:
        facts = replace(facts, path=local_path(path))  # of a single file the file, and not its folder
        if json:
            print_json(facts)
            return 0 if facts.ok else 1
        size = f"{count(facts.files, 'file')}, {human_bytes(facts.total_bytes)}"
        if facts.ok:
            how = "every block is as it was written"
            if facts.format != "native":
                how = f"nothing is missing; checksums are there of {human_bytes(facts.verified_bytes)}, and match"
                how = how if facts.verified_bytes else "nothing is missing (there are no checksums)"
            say(f"{facts.path}  checkpoint {facts.unique_id}: {size}, {how}", "good")
            return 0
        say(f"{facts.path}  checkpoint {facts.unique_id}: {count(len(facts.problems), 'problem')} in {size}", "bad")
        for problem in facts.problems:
            say("  " + problem.text)
        return 1

    with joined("verify") as session:
        found = verify_together(session, as_source(path), unique_id, False if json else None)
        code = print_once(session, lambda: show(found[0]))
    raise typer.Exit(code)
