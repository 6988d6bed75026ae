"""Names of the jobs of a sweep: the run's name and the job's overrides, sorted."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from k3train.config import compose as composing
from k3train.config.overrides import parse
from k3train.errors import ConfigError

SUFFIX_LIMIT = 80  # characters; a longer suffix is cut and ends in a hash of the whole
PLACES = ("run.", "hydra.", "hydra/", "cluster.", "cluster=")


def suffix(overrides: list[str]) -> str:
    """The sorted overrides of a job as a part of a folder name; "" where nothing is left to tell.

    run, cluster and hydra overrides are left out: they say where a run goes, not what it is. The seed stays.
    """
    bare = sorted(o.lstrip("+") for o in overrides)
    kept = [o for o in bare if not o.startswith(PLACES) or o.startswith("run.seed=")]
    text = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", ",".join(kept))
    if len(text) <= SUFFIX_LIMIT:
        return text
    digest = hashlib.sha256(",".join(kept).encode()).hexdigest()[:12]
    return f"{text[: SUFFIX_LIMIT - 13]}-{digest}"


def job_name(base: str, overrides: list[str]) -> str:
    """`base` and the suffix, joined by a dash."""
    tail = suffix(overrides)
    return f"{base}-{tail}" if tail else base


def with_params(overrides: list[str], config_dir: str | None = None) -> list[str]:
    """`overrides`, and what an experiment sweeps by itself (hydra.sweeper.params) where no override names the key.

    config_dir: a folder of configurations beside conf/. Hydra alone would sweep such a key twice, once as the
    experiment says and once as typed. Raises ConfigError.
    """
    parsed = parse(overrides)
    fixed = [text for text, override in zip(overrides, parsed) if not override.is_sweep_override()]
    if config_dir is not None:
        fixed.append(f"hydra.searchpath=['file://{Path(config_dir).absolute()}']")
    composing.register_schema()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(composing.conf_dir().resolve())):
            sweeper = hydra_compose(composing.PRIMARY, fixed, return_hydra_config=True).hydra.sweeper
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if not str(sweeper._target_).endswith(".BasicSweeper"):
        return overrides  # another plugin's params mean other things
    typed = {override.key_or_group for override in parsed}
    return overrides + [f"{key}={value}" for key, value in (sweeper.params or {}).items() if key not in typed]


def jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a sweep, as Hydra's basic sweeper makes them."""
    return [job for batch in BasicSweeper.split_arguments(parse(overrides), None) for job in batch]


def refuse_equal_names(overrides: list[str]) -> None:
    """Raise ConfigError where two jobs of a sweep would share a run folder."""
    seen: dict[str, list[str]] = {}
    for job in jobs(overrides):
        base = next((o.partition("=")[2] for o in reversed(job) if o.lstrip("+").startswith("run.name=")), "")
        name = job_name(base, job)
        if name in seen:
            raise ConfigError(
                f"two jobs of this sweep would be called {name!r} ({' '.join(job)}); give each value once"
            )
        seen[name] = job
