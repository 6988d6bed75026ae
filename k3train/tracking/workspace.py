"""The W&B workspace of a project as code: which sections and panels, in which order, over which metrics.

`SECTIONS` is the plan; `build_workspace` turns it into wandb-workspaces objects (the optional extra `workspace`);
without a key the same workspace is written as JSON, to be looked at or saved later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.errors import EnvironmentError_
from k3train.tracking.wandb import has_api_key


@dataclass(frozen=True)
class Lines:
    """A line panel over `keys`, or over all keys that match `pattern` (one line a layer)."""

    title: str
    keys: tuple[str, ...] = ()
    pattern: str = ""
    log_y: bool = False
    range_y: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Media:
    """A gallery of pictures with a step slider."""

    title: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A named group of panels; `columns` of them side by side."""

    name: str
    panels: tuple[Lines | Media, ...]
    columns: int = 3
    open: bool = True


SECTIONS: tuple[Section, ...] = (
    Section(
        "Loss",
        (
            Lines("Training loss", ("train/loss",)),
            Lines("Validation loss", ("valid/loss", "valid/unigram_loss")),
            Lines("Bits per byte", ("valid/bits_per_byte",)),
        ),
    ),
    Section(
        "Expert load",
        (
            Media("Load of every expert (white is a fair share)", ("moe/load_heatmap",)),
            Lines("MaxVio of the worst layer", ("moe/max_vio",), range_y=(0.0, None)),
            Lines("MaxVio of each layer", pattern=r"moe/max_vio_per_layer/\d+", range_y=(0.0, None)),
            Lines("Router bias, least and greatest", ("moe/bias_min", "moe/bias_max")),
        ),
        columns=2,
    ),
    Section(
        "Decay",
        (
            Media("Distribution of the decays (a row a layer, 0 to 1 across)", ("kda/decay_histogram_heatmap",)),
            Lines("Mean decay", ("kda/decay_mean",)),
            Lines("Log decay, quantiles", ("kda/log_decay_p05", "kda/log_decay_p50", "kda/log_decay_p95")),
            Lines("Share of channels near the bound", ("kda/near_bound_share",), range_y=(0.0, None)),
        ),
        columns=2,
    ),
    Section("Depth attention", (Media("Which block each sublayer reads", ("depth/attention_heatmap",)),), columns=1),
    Section(
        "Throughput",
        (
            Lines("Tokens per second", ("train/tokens_per_second",), range_y=(0.0, None)),
            Lines("Seconds per step", ("train/step_seconds",), range_y=(0.0, None)),
            Lines("MFU", ("train/mfu",), range_y=(0.0, None)),
            Lines("TFLOP/s a device", ("train/tflops",), range_y=(0.0, None)),
            Lines("Seconds to write a checkpoint", ("checkpoint/save_seconds",), range_y=(0.0, None)),
        ),
    ),
    Section(
        "Health",
        (
            Lines("Gradient norm", ("train/grad_norm",), log_y=True),
            Lines("Clipped steps", ("train/clipped",), range_y=(0.0, 1.0)),
            Lines("Skipped steps, in all", ("train/skipped_steps",), range_y=(0.0, None)),
            Lines("Learning rate", ("train/lr",)),
            Lines("Memory", ("train/memory_gb",), range_y=(0.0, None)),
            Lines("Tokens consumed", ("train/consumed_tokens",)),
        ),
        open=False,
    ),
)


def build_workspace(project: str, entity: str | None = None, name: str = "K3 pretraining") -> Any:
    """The wandb-workspaces `Workspace` of `SECTIONS`; needs neither a key nor a network.

    Raises:
        EnvironmentError_: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise EnvironmentError_(
            f"the W&B workspace needs wandb-workspaces ({error}); install it with `uv sync --extra workspace`"
        ) from error

    def panel(plan: Lines | Media) -> Any:
        if isinstance(plan, Media):
            keys = list(plan.keys)
            return reports.MediaBrowser(title=plan.title, media_keys=keys, gallery_axis="step", num_columns=1)
        return reports.LinePlot(
            title=plan.title,
            y=list(plan.keys),
            metric_regex=plan.pattern or None,
            range_y=plan.range_y,
            log_y=plan.log_y or None,
        )

    sections = [
        workspaces.Section(
            name=section.name,
            panels=[panel(plan) for plan in section.panels],
            is_open=section.open,
            layout_settings=workspaces.SectionLayoutSettings(
                columns=section.columns, rows=-(-len(section.panels) // section.columns)
            ),
        )
        for section in SECTIONS
    ]
    settings = workspaces.WorkspaceSettings(smoothing_type="exponential", smoothing_weight=10, max_runs=20)
    return workspaces.Workspace(
        entity=entity or "",
        project=project,
        name=name,
        sections=sections,
        settings=settings,
        auto_generate_panels=False,
    )


def workspace_json(workspace: Any) -> dict[str, Any]:
    """The workspace as the JSON that `save` would send."""
    # the package offers no public way; the version is pinned and a test holds it to this
    return json.loads(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))


def publish_workspace(
    project: str,
    entity: str | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    say: Callable[[str], None] = print,
) -> Path | None:
    """Save the workspace to W&B when there is a key; write it as JSON when there is none, or when `output` is given.

    Returns the path of the JSON, None when only W&B was written to. A refused save falls back to the JSON.
    """
    online = has_api_key() and output is None
    workspace = build_workspace(project, entity)
    if online:
        try:
            if not entity:
                import wandb

                workspace.entity = wandb.Api().default_entity or ""
            workspace.save()
            say(f"saved to W&B: {workspace.url}")
            return None
        except Exception as error:
            say(f"W&B refused the workspace ({type(error).__name__}: {error}); writing it as JSON instead")
    path = Path(output or "workspace.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(workspace_json(workspace), indent=2) + "\n")
    reason = "" if online or output is not None else " (no W&B key was found)"
    say(f"wrote {path}{reason}")
    return path
