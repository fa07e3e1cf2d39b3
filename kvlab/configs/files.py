"""From text or a file to the dictionary that describes the language model.

A config.json may come from anywhere, also pasted into a page, so it is treated as data that can
be wrong in any way: too big, too deep, not JSON, the same key twice, a vision tower on top.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from kvlab.configs.fields import ConfigError, show
from kvlab.specs import DATA_DIR

MOST_BYTES = 16 * 2**20
MOST_LEVELS = 4
MOST_NESTED = 64
#: A whole string, or one bracket: what is left of JSON when only its depth matters.
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')

#: Keys under which multimodal configs keep the language model, likeliest first.
WRAPPERS = (
    "text_config",
    "thinker_config",
    "llm_config",
    "vlm_config",
    "language_config",
    "language_model_config",
    "text_model_config",
    "language_model",
    "text_model",
    "llm",
    "decoder",
)


@functools.cache
def model_types() -> dict:
    """What each type means by an absent key ("defaults"), and the types compared ("known")."""
    return json.loads((DATA_DIR / "model_types.json").read_text("utf-8"))


def load_config(source: Mapping | str | Path) -> tuple[Mapping, str | None]:
    """(the dictionary, a name for it) from a dictionary, JSON text, a file or a folder.

    A folder means its config.json. Raises ConfigError for whatever is not one JSON object.
    """
    if isinstance(source, Mapping):
        return source, None
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n")[:1] in ("{", "["):
        return parse_config(source), None
    try:
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                str(path), f"larger than {MOST_BYTES:,} bytes; expected a config.json"
            )
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError, TypeError) as error:
        reason = type(error).__name__ if isinstance(error, UnicodeDecodeError) else error
        raise ConfigError(
            show(str(source)), f"cannot be read ({reason}); expected a config.json, or its folder"
        ) from None
    name = path.parent.name if path.name == "config.json" else path.stem
    return parse_config(text), name


def parse_config(text: str) -> Mapping:
    """JSON text as a dictionary; the same key twice with two values is refused."""
    if len(text) > MOST_BYTES:
        raise ConfigError(
            "config", f"longer than {MOST_BYTES:,} characters; expected a config.json"
        )
    # Parsers recurse, and inside a browser too deep a text would end the whole Python: count first.
    depth = deepest = 0
    for bracket in BRACKETS.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(bracket[0], 0)
        deepest = max(deepest, depth)
    if deepest > MOST_NESTED:
        raise ConfigError("config", f"nested {deepest:,} deep; expected a config.json")
    try:
        data = json.loads(text.lstrip("\ufeff"), object_pairs_hook=_without_repeats)
    except ValueError as error:
        raise ConfigError("config", f"not JSON ({error}); expected one JSON object") from None
    if not isinstance(data, Mapping):
        raise ConfigError("config", f"given {show(data)}; expected one JSON object")
    return data


def _without_repeats(pairs: list) -> dict:
    result: dict = {}
    for key, value in pairs:
        if key in result and result[key] is not value and repr(result[key]) != repr(value):
            raise ConfigError(show(key), "stands twice with two values; expected one; remove one")
        result[key] = value
    return result


def language_model(config: Mapping) -> tuple[Mapping, str]:
    """(the language model's own dictionary, its place such as "text_config.").

    A nested text config wins over numbers at the top, which may be a vision tower's. A wrapper
    that does not describe a decoder leaves the top in charge.
    """
    where = ""
    for _ in range(MOST_LEVELS):
        inner = [
            (key, config[key])
            for key in WRAPPERS
            if isinstance(config.get(key), Mapping) and config[key]
        ]
        if not inner:
            return config, where
        key, config = inner[0]
        where += f"{key}."
    raise ConfigError(
        where.rstrip("."), f"nested more than {MOST_LEVELS} levels deep; expected two"
    )
