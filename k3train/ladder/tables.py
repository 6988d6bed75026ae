"""Tables of docs/results.md, made of the records beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from k3train.config.schema import ModelConfig, expand_pattern
from k3train.ladder.arms import ABLATIONS, MIXERS, TASKS, suites
from k3train.ladder.pool import records

Record = dict[str, Any]
SHOWN = {"linear": "linear", "delta": "delta", "gated_delta": "gated delta", "kda": "KDA", "hybrid": "hybrid 3:1",
         "softmax": "softmax"}  # fmt: skip
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def spread(values: Sequence[float], digits: int) -> str:
    """`mean (lowest to highest)`; the value alone where there is one, `not run` where there is none."""
    if not values:
        return "not run"
    shown = f"{mean(values):.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def of_arm(found: Sequence[Record], arm: str, group: str | None = None) -> list[Record]:
    """The records of one arm, by seed."""
    return sorted((r for r in found if r["arm"] == arm and group in (None, r["group"])), key=lambda r: r["seed"])


def recall_table(found: Sequence[Record], task: str) -> str:
    """Accuracy on held-out episodes: a row a rung, a column a count."""
    axis, _, counts = TASKS[task]
    rows = []
    for name in MIXERS:
        arms = of_arm(found, name, task)
        cells = [spread([r["accuracy"][suite] for r in arms], 2) for suite in suites(task)]
        rows.append([SHOWN[name], *cells, str(len(arms))])
    return markdown(["accuracy by " + axis, *map(str, counts), "seeds"], rows)


def final_loss(record: Record) -> float:
    """Validation loss after the last step, nats a token."""
    return float(record["valid"][-1][1])


def text_table(found: Sequence[Record], hybrid: Sequence[Record]) -> str:
    """Validation loss of every rung; the hybrid is the baseline of the ablations."""
    rows = []
    for name in MIXERS:
        arms = list(hybrid) if name == "hybrid" else of_arm(found, name)
        parameters = f"{arms[0]['parameters']:,}" if arms else ""
        rows.append([SHOWN[name], parameters, spread([final_loss(r) for r in arms], 4), str(len(arms))])
    return markdown(["mixer", "parameters", "validation loss, nats", "seeds"], rows)


def of_departure(found: Sequence[Record], kind: str, name: str) -> list[Record]:
    """The records of an arm of an ablation; the baseline's are shared."""
    return of_arm(found, f"{kind}: {name}" if ABLATIONS[kind][name] else "baseline")


def ablation_table(found: Sequence[Record], kind: str) -> str:
    """Validation loss of an ablation's arms, the difference from the baseline seed by seed, and what else it is about."""
    base = {r["seed"]: final_loss(r) for r in of_arm(found, "baseline")}
    extra = {
        "bound": ["lowest log decay", "median", "lowest of 16 tokens"],
        "balancing": ["MaxVio, mean", "last tenth"],
    }
    rows = []
    for name in ABLATIONS[kind]:
        arms = of_departure(found, kind, name)
        apart = [final_loss(r) - base[r["seed"]] for r in arms if r["seed"] in base]
        row = [name, spread([final_loss(r) for r in arms], 4)]
        row.append("" if not ABLATIONS[kind][name] else spread(apart, 4))
        if kind == "bound":
            row += [spread([r["decay"][key] for r in arms], 2) for key in ("lowest", "median", "lowest_of_16")]
        if kind == "balancing":
            row += [spread([mean(v for _, v in r["max_vio"]) for r in arms], 2)]
            row += [spread([mean(v for _, v in r["max_vio"][-4:]) for r in arms], 2)]
        rows.append([*row, str(len(arms))])
    return markdown([kind, "validation loss, nats", "against the baseline", *extra.get(kind, []), "seeds"], rows)


def steps_table(found: Sequence[Record]) -> str:
    """Step times of two configurations taken in turn in one process."""
    rows = [
        [r["device"], r["what"], f"{r['first'] * 1e3:.1f}", f"{r['second'] * 1e3:.1f}",
         f"{r['second'] / r['first']:.3f}", f"{r['ratio'][0]:.3f} to {r['ratio'][1]:.3f}", str(r["pairs"])]
        for r in found
    ]  # fmt: skip
    head = ["machine", "model", "bound -5, ms a step", "no bound", "ratio", "middle half of ratios", "pairs of steps"]
    return markdown(head, rows)


def decode_bytes(model: ModelConfig, tokens: int, *, width: int = 2) -> int:
    """Bytes that decoding keeps of `tokens` tokens: fp32 states, convolution tails, keys and values or latents of
    `width` bytes a number."""
    inner = model.kda.heads * model.kda.head_dim
    tails = 3 * inner * (model.kda.conv_size - 1) * width
    if model.mixer == "softmax":
        linear = tails + 2 * inner * width * tokens
    else:
        linear = tails + inner * model.kda.head_dim * 4
    latents = (model.mla.kv_lora_rank + model.mla.shared_dim) * width * tokens
    layers = expand_pattern(model.pattern, model.hybrid)
    return layers.count("K") * linear + layers.count("F") * latents


def memory_table() -> str:
    """Bytes for decoding one sequence with the proportions of k3_proxy."""
    from k3train.config.compose import compose

    rows, lengths = [], (1024, 65536, 1048576)
    for name in MIXERS:
        hybrid = name == "hybrid"
        words = ["model=k3_proxy", "model.hybrid=" + ("3:1" if hybrid else "none")]
        model = compose(words if hybrid else [*words, f"model.mixer={name}"]).model
        rows.append([SHOWN[name], *(f"{decode_bytes(model, n) / 1e6:,.1f}" for n in lengths)])
    return markdown(["MB a sequence, by tokens seen", *(f"{n:,}" for n in lengths)], rows)


def tables(folder: Path) -> dict[str, str]:
    """Every table by name, from the records in `folder`."""
    recall, text, ablation = (records(folder / f"{name}.jsonl") for name in ("recall", "text", "ablation"))
    made = {f"recall_{task}": recall_table(recall, task) for task in TASKS}
    made["text"] = text_table(text, of_arm(ablation, "baseline"))
    made |= {f"ablation_{kind}": ablation_table(ablation, kind) for kind in ABLATIONS}
    made["steps"] = steps_table(records(folder / "steps.jsonl"))
    made["memory"] = memory_table()
    return made


def fill(page: str, made: dict[str, str]) -> str:
    """The page with each `<!-- table: NAME --> ... <!-- end -->` filled anew. Raises KeyError for an unknown name."""
    return BLOCK.sub(lambda match: f"{match[1]}{made[match[2]]}{match[3]}", page)
