"""From Hydra's groups and overrides to one checked, typed Config; and its way to and from a file."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from k3train.config import checks
from k3train.config.keys import all_keys, choice_error, did_you_mean
from k3train.config.overrides import check_overrides
from k3train.config.schema import CHOICES, Config
from k3train.errors import ConfigError, EnvironmentError_

PRIMARY = "k3train"


def conf_dir() -> Path:
    """The folder of config groups: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{PRIMARY}.yaml").is_file():
            return folder
    raise ConfigError(f"conf/{PRIMARY}.yaml is neither in {package} nor beside it; reinstall k3train")


def register_schema() -> None:
    """Make the dataclasses known to Hydra as the config `schema`, which the primary config starts from."""
    ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: list[str] | None = None, *, config_dir: Path | str | None = None) -> Config:
    """Compose, check and return the configuration of one run.

    overrides: as on the command line, `["model=k3_tiny", "train.steps=10"]`. config_dir: a folder like conf/.
    Raises ConfigError (LayoutError for parallel sizes) naming what is wrong and what to type.
    """
    return to_config(compose_unchecked(list(overrides or []), config_dir=config_dir))


def compose_unchecked(overrides: list[str], *, config_dir: Path | str | None = None) -> DictConfig:
    """Compose only: keys and types are checked, values are not, and interpolations stay. Raises ConfigError."""
    folder = Path(config_dir) if config_dir is not None else conf_dir()
    check_overrides(overrides, folder)
    register_schema()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder.resolve())):
            return hydra_compose(config_name=PRIMARY, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_readable(error)) from error


def to_config(composed: DictConfig) -> Config:
    """Turn a composed DictConfig into dataclasses, then check it. Raises ConfigError or LayoutError."""
    config = _typed(composed)
    checks.check(config)
    checks.check_corpus(config)
    return config


def _typed(composed: DictConfig) -> Config:
    for key, value in leaves(OmegaConf.to_container(composed, resolve=False)):
        if key not in all_keys():
            raise ConfigError(f"there is no key {key} (value {value!r}); {did_you_mean(key)}")
    try:
        if OmegaConf.get_type(composed) is not Config:
            composed = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), composed))
        config = cast(Config, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise ConfigError(_readable(error)) from error
    for key in CHOICES:
        complaint = choice_error(key, checks.get(config, key))
        if complaint:
            raise ConfigError(complaint)
    return config


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested dicts; lists are values."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _readable(error: Exception) -> str:
    """Hydra's and OmegaConf's own message in one line, with the nearest key where one is missing."""
    cause: BaseException = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = getattr(cause, "full_key", None)
    text = f"{key}: {lines[0]}" if key and lines else " ".join(lines)
    if isinstance(cause, ConfigKeyError) and key:
        text += f"; {did_you_mean(key)}"
    return text


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dicts of a Config."""
    return dataclasses.asdict(config)


def dump(config: Config) -> str:
    """The config as YAML text."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, width=1000)


def parse(text: str, source: str) -> Config:
    """Read what `dump` wrote. Keys added to the schema since take their defaults; unknown ones are refused.

    source: what to call the text in errors. Raises ConfigError.
    """
    try:
        loaded = OmegaConf.create(text)
    except Exception as error:
        raise ConfigError(f"{source} is not readable as YAML: {error}") from error
    if not isinstance(loaded, DictConfig) or not loaded:
        raise ConfigError(f"{source} holds no configuration")
    try:
        return _typed(loaded)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def save_resolved(config: Config, path: Path | str) -> None:
    """Write the config as YAML, atomically: beside, fsynced, renamed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(dump(config))
        file.flush()
        os.fsync(file.fileno())
    Path(name).chmod(0o644)
    Path(name).replace(target)


def load_resolved(path: Path | str) -> Config:
    """Read a file of save_resolved, as `parse` does. Raises ConfigError."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{file} is not there; a run folder holds its configuration as config.yaml")
    return parse(file.read_text(encoding="utf-8"), str(file))


def diff(saved: Config, asked: Config, section: str = "") -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, as {key: (saved, asked)}; `section` keeps keys below it ("model")."""
    old, new = dict(leaves(to_dict(saved))), dict(leaves(to_dict(asked)))
    within = [k for k in new if not section or k.startswith(section + ".")]
    return {k: (old.get(k), new[k]) for k in within if old.get(k) != new[k]}


def adopt_model(config: Config, overrides: list[str]) -> Config:
    """The configuration with the saved model of an existing run folder, where no override names a model.

    So a run that was imported goes on by its name alone. The backend stays as asked. Raises ConfigError.
    """
    typed = {word.lstrip("+~").partition("=")[0].partition(".")[0].partition("/")[0] for word in overrides}
    file = Path(config.run.dir) / config.run.name / "config.yaml"
    if typed & {"model", "experiment"} or not file.is_file():
        return config
    saved = load_resolved(file).model
    model = dataclasses.replace(saved, backend=config.model.backend)
    if model == config.model:
        return config
    adopted = dataclasses.replace(config, model=model)
    checks.check(adopted)
    print(f"the model of {file.parent}: {saved.name}", flush=True)
    return adopted


def check_run_folder(config: Config) -> Config | None:
    """Compare the run folder's saved configuration with the one asked for.

    Returns the saved Config, or None where the folder is new or its run never came to a first step. Raises
    ConfigError, showing the difference, where the saved model is another one: its checkpoints could not be resumed.
    """
    file = Path(config.run.dir) / config.run.name / "config.yaml"
    begun = (file.parent / "metrics.jsonl").is_file() or any(file.parent.glob("checkpoints/step-*"))
    if not begun or not file.is_file():
        return None
    saved = load_resolved(file)
    different = {k: v for k, v in diff(saved, config, "model").items() if k not in ("model.name", "model.backend")}
    if different:
        shown = "\n".join(f"  {k}: saved {_show(a)}, asked {_show(b)}" for k, (a, b) in different.items())
        back = " ".join(f"{k}={_show(a)}" for k, (a, _) in different.items())
        raise ConfigError(
            f"{file.parent} holds a run of another model:\n{shown}\n"
            f"type run.name=OTHER to start another run, or go on with the saved one: {back}"
        )
    return saved


def claim_run_folder(config: Config) -> Path:
    """Make the run folder and try to write there and beside its checkpoints, before anything takes time.

    Tried and not asked: permissions say nothing of full disks, quotas and other users' servers. Raises
    EnvironmentError_ where a file cannot be written.
    """
    folder = Path(config.run.dir) / config.run.name
    for inner in ("", "checkpoints", "logs"):
        place = folder / inner
        try:
            if inner and not place.exists():
                continue
            if not place.exists():
                place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place, prefix=".writing-") as file:
                file.write(bytes(4096))
                file.flush()
        except OSError as error:
            raise unwritable(config, place, error) from error
    return folder


def unwritable(config: Config, place: Path, error: OSError) -> EnvironmentError_:
    """The error of a run folder, or a folder in it, that refuses files."""
    return EnvironmentError_(
        f"run.dir={config.run.dir}: {place} cannot be written ({error.strerror or error}); make room or allow writing "
        "there, or type run.dir=ELSEWHERE"
    )


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
