"""The verbs of the command line: what each needs, and where its work is done. Rooms are imported when called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3train.errors import EnvironmentError_


@dataclass(frozen=True)
class Verb:
    """One verb.

    target: "module:function", called with a Config, or with the words typed where `words` is true.
    section: the schema section that bare keys belong to. ranks: it runs on every rank of the layout.
    """

    summary: str
    target: str
    section: str | None = None
    ranks: bool = False
    words: bool = False


VERBS: dict[str, Verb] = {
    "train": Verb("train a model, or go on with a run of the same name", "k3train.train.run:run_training", None, True),
    "evaluate": Verb(
        "held-out loss and recall suites of a run or an export", "k3train.evaluate.commands:evaluate", "evaluate"
    ),
    "generate": Verb("write text with a run or an export", "k3train.inference.commands:generate", "generate"),
    "quantize": Verb("quantise exported experts to MXFP4", "k3train.weights.commands:quantize", "quantize"),
    "export": Verb("write a checkpoint as a Hugging Face folder", "k3train.weights.commands:export", "export"),
    "import": Verb("start a run from a Hugging Face folder", "k3train.weights.commands:import_", "imports", True),
    "convert": Verb(
        "make a run of one engine into one of the other", "k3train.engine.deepspeed_convert:convert", words=True
    ),
    "plan": Verb("parameters, memory, FLOPs and time of a configuration", "k3train.planning.command:plan"),
    "submit": Verb("render an sbatch script and hand it to Slurm", "k3train.submit:submit"),
    "data prepare": Verb("turn text into an indexed dataset", "k3train.commands:data_prepare", "data"),
    "doctor": Verb("look at the machine; name each problem and its cure", "k3train.doctor:doctor", words=True),
    "report": Verb("write one HTML page about one or more runs", "k3train.commands:report", words=True),
    "track replay": Verb("push a metrics.jsonl to W&B", "k3train.commands:replay", words=True),
    "track workspace": Verb("build the W&B workspace", "k3train.commands:workspace", words=True),
    "checkpoint list": Verb("list a run's checkpoints", "k3train.commands:checkpoint_list", words=True),
    "checkpoint verify": Verb("check a run's checksums", "k3train.commands:checkpoint_verify", words=True),
    "checkpoint prune": Verb("delete old checkpoints of a run", "k3train.commands:checkpoint_prune", words=True),
    "demo memory": Verb(
        "the associative-memory toy: what each mixer remembers", "k3train.demo.memory:main", words=True
    ),
}


def call(name: str, argument: Any) -> int | None:
    """Import the verb's room and run it. Raises EnvironmentError_ where this build lacks the room."""
    return _resolve(name)(argument)


def _resolve(name: str) -> Callable[[Any], int | None]:
    module, _, function = VERBS[name].target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise EnvironmentError_(f"`k3train {name}` is not part of this version ({module} is missing)") from None
