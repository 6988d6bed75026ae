"""The dotted keys of the schema: their types, and the nearest right one for a wrong one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing

from k3train.config.activations import REFUSED
from k3train.config.schema import CHOICES, Config


@dataclasses.dataclass(frozen=True)
class Key:
    """One leaf of the schema."""

    kind: type  # int, float, bool, str or list
    optional: bool  # null is a value

    def describe(self) -> str:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of texts"}
        return words[self.kind] + (" or null" if self.optional else "")


def _leaf(hint: object) -> Key:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [a for a in arguments if a is not type(None)]
        return Key(_leaf(inner[0]).kind, optional=True)
    return Key(list if typing.get_origin(hint) is list else typing.cast(type, hint), optional=False)


def _walk(cls: type, prefix: str = "") -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            keys |= _walk(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            keys[prefix + name] = _leaf(hint)
    return keys


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every leaf of the schema by dotted name, in the schema's order."""
    return _walk(Config)


@functools.cache
def sections() -> frozenset[str]:
    """Every dotted name that is not a leaf: `model`, `model.kda`, ..."""
    return frozenset(k.rsplit(".", depth)[0] for k in all_keys() for depth in range(1, k.count(".") + 1))


def nearest(key: str, limit: int = 3) -> list[str]:
    """Schema keys that someone who typed `key` most likely meant, best first; may be empty.

    A key whose last part is right is looked up by that part (`lr` gives `optim.lr`), else by spelling.
    """
    known = list(all_keys())
    last = key.rsplit(".", 1)[-1]
    same_last = [k for k in known if k.rsplit(".", 1)[-1] == last]
    ranked = sorted(same_last, key=lambda k: -difflib.SequenceMatcher(None, key, k).ratio())
    ranked += [k for k in difflib.get_close_matches(key, known, limit, cutoff=0.75) if k not in ranked]
    if not ranked:
        lasts = difflib.get_close_matches(last, {k.rsplit(".", 1)[-1] for k in known}, 2, cutoff=0.7)
        ranked = [k for name in lasts for k in known if k.rsplit(".", 1)[-1] == name]
    return ranked[:limit]


def did_you_mean(key: str) -> str:
    """A sentence naming the nearest keys, or where the keys are listed."""
    found = nearest(key)
    if not found:
        return "`k3train train --cfg job` lists every key"
    return "did you mean " + " or ".join(found) + "?"


def choice_error(key: str, value: object) -> str | None:
    """The complaint about a value outside CHOICES, or None."""
    allowed = CHOICES.get(key)
    if allowed is None or value in allowed:
        return None
    if f"{key}={value}" in REFUSED:
        return f"{key}={value}: {REFUSED[f'{key}={value}']}"
    close = difflib.get_close_matches(str(value), allowed, 1, cutoff=0.5)
    hint = f"did you mean {key}={close[0]}?" if close else f"type for example {key}={allowed[0]}"
    return f"{key}={value}: choose one of {', '.join(allowed)}; {hint}"
