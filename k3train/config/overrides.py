"""Overrides as typed on a command line, checked before Hydra composes them.

Hydra lets `+model.kda.decay_bond=-5` through silently and reads `None` as text; here both are refused, and every
message names the key that was probably meant.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from k3train.config.keys import Key, all_keys, choice_error, did_you_mean, sections
from k3train.errors import ConfigError

_NULL_WORDS = {"None", "none", "Null", "NULL", "nil", "~"}


def groups(config_dir: Path) -> dict[str, list[str]]:
    """Config groups of a folder and their options, sorted."""
    found = {}
    for folder in sorted(p for p in config_dir.iterdir() if p.is_dir()):
        options = sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.yaml"))
        if options:
            found[folder.name] = options
    return found


def check_overrides(overrides: list[str], config_dir: Path, *, extra_groups: bool = False) -> None:
    """Refuse overrides that name no key or group, or whose value has the wrong type.

    extra_groups: options outside `config_dir` may exist (a folder given with --config-dir); group options are then
    left to Hydra. Sweeps (`a=1,2`) are checked value by value. Raises ConfigError.
    """
    known_groups = groups(config_dir)
    for text, override in zip(overrides, parse(overrides)):
        name = override.key_or_group
        if name == "hydra" or name.startswith(("hydra.", "hydra/")):
            continue
        if name in known_groups and not (name in sections() and isinstance(override.value(), dict)):
            _check_group(text, override, known_groups[name], extra_groups)
        elif "/" in name or "@" in text.partition("=")[0]:
            raise ConfigError(f"{text}: there is no config group {name!r}; the groups are {', '.join(known_groups)}")
        else:
            _check_key(text, override)


def refuse_sweeps(overrides: list[str], *, sweepable: bool = True) -> None:
    """Refuse several values of a key where one job runs; to be asked before `check_overrides`, which looks at each.

    sweepable: -m may be typed. Raises ConfigError.
    """
    for text, override in zip(overrides, parse(overrides)):
        name = override.key_or_group
        if not override.is_sweep_override() or name.startswith(("hydra.", "hydra/")):
            continue
        key = all_keys().get(name)
        if key is None and "." in name:
            continue  # for check_overrides, which knows the nearest key
        cure = _cure(name, key, text.partition("=")[2]) if key is not None else ""
        sweep = "; type -m to run a job for each" if sweepable else ""
        raise ConfigError(f"{text} are several values, and one run takes one{cure}{sweep}")


def parse(overrides: list[str]) -> list[Override]:
    """Parse override texts. Raises ConfigError with Hydra's reason."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            if "=" not in text:
                raise ConfigError(f"{text!r} is not an override: type key=value; {did_you_mean(text)}") from None
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{text!r} cannot be read ({reason}); quote the value: \"{text.split('=')[0]}='...'\""
            ) from None
    return parsed


def _check_group(text: str, override: Override, options: list[str], extra_groups: bool) -> None:
    name = override.key_or_group
    if override.is_add():
        raise ConfigError(f"{text}: {name} is a config group that is there already; type {text.lstrip('+')}")
    if override.is_delete():
        raise ConfigError(
            f"{text}: the group {name} cannot be removed; type {name}=OPTION, one of {', '.join(options)}"
        )
    for value in _values(override):
        if value is None and name == "experiment":
            continue
        if extra_groups or str(value) in options or (isinstance(value, list) and set(map(str, value)) <= set(options)):
            continue
        close = difflib.get_close_matches(str(value), options, 1, cutoff=0.4)
        hint = f"; did you mean {name}={close[0]}?" if close else ""
        raise ConfigError(f"{name}={value}: no such {name}; there are {', '.join(options)}{hint}")


def _check_key(text: str, override: Override) -> None:
    name = override.key_or_group
    if override.is_delete():
        raise ConfigError(
            f"{text}: a key cannot be removed; give it another value"
            + (f" ({name}=null)" if name in all_keys() and all_keys()[name].optional else "")
        )
    for value in _values(override):
        _check_value(name, value, text)
    if override.is_add() and not override.is_force_add():
        raise ConfigError(f"{text}: {name} is there already; leave out the +: {text.lstrip('+')}")


def _check_value(name: str, value: object, text: str) -> None:
    if name in sections():
        if not isinstance(value, dict):
            raise ConfigError(
                f"{text}: {name} is a section; give one of its keys, such as "
                f"{next(k for k in all_keys() if k.startswith(name + '.'))}=..."
            )
        for inner, inner_value in value.items():
            _check_value(f"{name}.{inner}", inner_value, text)
        return
    if name not in all_keys():
        raise ConfigError(f"{text}: there is no key {name}; {did_you_mean(name)}")
    complaint = value_error(name, value)
    if complaint:
        raise ConfigError(complaint)


def value_error(name: str, value: object) -> str | None:
    """What is wrong with `value` for the schema key `name`, or None."""
    key = all_keys()[name]
    text = value.text if isinstance(value, QuotedString) else value
    if isinstance(text, str) and "${" in text:
        return None  # resolved, and typed, at composition
    if text is None:
        return None if key.optional else f"{name}=null: {name} needs {key.describe()}, null is not a value of it"
    if isinstance(text, str) and text in _NULL_WORDS and text not in _choices(name):
        if key.optional:
            return f"{name}={text}: nothing is written null; type {name}=null"
        if key.kind is not str:
            return f"{name}={text}: {name} needs {key.describe()}"
    if not _fits(key, text):
        return f"{name}={text} is {_kind_of(text)}, and {name} needs {key.describe()}{_cure(name, key, text)}"
    return choice_error(name, str(text) if key.kind is str else text)


def _choices(name: str) -> tuple[str, ...]:
    from k3train.config.schema import CHOICES

    return CHOICES.get(name, ())


def _fits(key: Key, value: object) -> bool:
    if key.kind is bool:
        return isinstance(value, bool) or str(value).lower() in ("true", "false")
    if isinstance(value, bool):
        return False
    if key.kind is int:
        return isinstance(value, int) or (isinstance(value, str) and value.lstrip("-").isdigit())
    if key.kind is float:
        return isinstance(value, int | float) or (isinstance(value, str) and _is_number(value))
    if key.kind is list:
        return isinstance(value, list)
    return isinstance(value, str | int | float)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind_of(value: object) -> str:
    names = {bool: "true/false", int: "a whole number", float: "a number with a fraction or exponent", str: "text"}
    return names.get(type(value), "a " + type(value).__name__)


def _cure(name: str, key: Key, value: object) -> str:
    if key.kind is int and isinstance(value, float) and value == int(value):
        return f"; type {name}={int(value)}"
    if key.kind is list and isinstance(value, str):
        return f"; type {name}=[{value}]"
    if key.kind is str:
        return f"; quote it: {name}='\"{value}\"'"
    return ""


def _values(override: Override) -> list[object]:
    """The values an override stands for: one, or each of a sweep's."""
    if override.is_sweep_override() and override.is_discrete_sweep():
        return list(override.sweep_iterator())
    return [override.value()]
