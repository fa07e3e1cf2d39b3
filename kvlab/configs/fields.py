"""From a config.json to single checked fields; whatever a file may hold is refused here by name.

A config.json may come from anywhere, also pasted into a page, so it is treated as data that can
be wrong in any way: too big, too deep, not JSON, the same key twice, a vision tower on top.

Rules, the same for every field: null counts as absent; a key and its old name may both be there
only if they agree; a whole number is an int (not True, not 32.0, not "32"); what a file leaves
out is filled in only where its model type says so, and then a note says it.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvlab.errors import KvlabError
from kvlab.specs import DATA_DIR

#: Larger than any real field; smaller than what would make a layer list eat the memory.
LARGEST = 10**9
MOST_LAYERS = 4096
MOST_BYTES = 16 * 2**20
MOST_NESTED = 64
MOST_LEVELS = 4
#: A whole string, or one bracket: what is left of JSON when only its depth matters.
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')


class ConfigError(KvlabError):
    """A config that cannot be read. `.field` names the key that is missing or wrong."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 50, 50


def show(value: object) -> str:
    """A value for an error message, cut short: whatever it is, however deep or large."""
    if value is None:
        return "null"
    if isinstance(value, int) and not -(LARGEST**2) < value < LARGEST**2:
        return f"a number of {value.bit_length()} bits"
    text = " ".join(_SHORT.repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


@functools.cache
def model_types() -> dict[str, Any]:
    """data/model_types.json; a table of its "facts" becomes name -> what that name means."""
    types = json.loads((DATA_DIR / "model_types.json").read_text("utf-8"))
    for fact, rows in types["facts"].items():
        types["facts"][fact] = {name: row["means"] for row in rows for name in row["names"]}
    return types


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
        path = path / "config.json" if path.is_dir() else path
        if path.stat().st_size > MOST_BYTES:
            size = f"larger than {MOST_BYTES:,} bytes"
            raise ConfigError(str(path), f"{size}; expected a config.json")
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError, TypeError) as error:
        reason = type(error).__name__ if isinstance(error, UnicodeDecodeError) else error
        unread = f"cannot be read ({reason}); expected a config.json, or its folder"
        raise ConfigError(show(str(source)), unread) from None
    return parse_config(text), path.parent.name if path.name == "config.json" else path.stem


def parse_config(text: str) -> Mapping:
    """JSON text as a dictionary; the same key twice with two values is refused."""
    if len(text) > MOST_BYTES:
        size = f"longer than {MOST_BYTES:,} characters"
        raise ConfigError("config", f"{size}; expected a config.json")
    if (depth := _depth(text)) > MOST_NESTED:
        raise ConfigError("config", f"nested {depth:,} deep; expected a config.json")
    try:
        data = json.loads(text.lstrip("\ufeff"), object_pairs_hook=_without_repeats)
    except ValueError as error:
        raise ConfigError("config", f"not JSON ({error}); expected one JSON object") from None
    if not isinstance(data, Mapping):
        raise ConfigError("config", f"given {show(data)}; expected one JSON object")
    return data


def _depth(text: str) -> int:
    """Levels of brackets. Parsers recurse, and in a browser too deep a text would end Python."""
    depth = deepest = 0
    for bracket in BRACKETS.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(bracket[0], 0)
        deepest = max(deepest, depth)
    return deepest


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
    where, wrappers = "", model_types()["wrappers"]
    for _ in range(MOST_LEVELS):
        inner = [k for k in wrappers if isinstance(config.get(k), Mapping) and config[k]]
        if not inner:
            return config, where
        config = config[inner[0]]
        where += f"{inner[0]}."
    raise ConfigError(where[:-1], f"nested more than {MOST_LEVELS} levels deep; expected two")


class Watched(dict):
    """A config that knows which of its keys were asked for."""

    def __init__(self, data: Mapping):
        super().__init__(data)
        self.asked: set[object] = set()

    def __getitem__(self, key: object) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: object, default: Any = None) -> Any:
        """As of a dictionary; the key counts as asked for."""
        self.asked.add(key)
        return super().get(key, default)


class Fields:
    """The language model's part of a config, read field by field; notes pile up in `.notes`.

    top         the whole config, of which `data` may be a part
    where       prefix of field names in errors, such as "text_config."
    defaults    what the model type fills in when a key is absent
    """

    def __init__(self, top: Mapping):
        self.top = top
        inner, self.where = language_model(top)
        self.data = Watched(inner)
        self.notes: list[str] = []
        stated = self.data.get("model_type")
        self.typed("model_type", stated, str, "a name")
        outer = f"{top.get('model_type')}_text"  # gemma3 at the top means gemma3_text inside
        inside = self.where and outer in model_types()["known"]
        self.model_type: str = stated or (outer if inside else "")
        self.defaults = model_types()["defaults"].get(self.model_type, {})

    def fail(self, key: str, message: str) -> NoReturn:
        """Refuse the config because of one field."""
        raise ConfigError(self.where + key, message)

    def note(self, text: str) -> None:
        """Keep one decision of the reader for the reader of the result."""
        if text not in self.notes:
            self.notes.append(text)

    def names(self, key: str) -> list[str]:
        """The field's name and its old names in this model type."""
        types, own = model_types(), self.model_type
        old = types["aliases"].get(key, []) + types["aliases_of_type"].get(own, {}).get(key, [])
        return [key, *(name for name in old if name not in types["not_aliases"].get(own, ()))]

    def refuse_unread(self) -> None:
        """For an unknown type: refuse what speaks of layers, loops or caches and was not asked for.

        The reader would otherwise size such a model as if the key were not there.
        """
        types = model_types()
        known = {name for key, old in types["aliases"].items() for name in (key, *old)}
        known |= {"max_window_layers", "use_sliding_window"}  # gates of a window that is not there
        if self.raw("kv_lora_rank") is not None:
            known.add("qk_head_dim")  # the sum of two that are read
        if self.raw("layer_types") is not None:  # the list decides; a pattern says it again
            known |= {*types["flag_lists"], *types["periods"], *types["recurrent_keys"]}
            known |= {"attn_layer_period", "attn_layer_offset"}
        for key, value in self.data.items():
            name = str(key).lower()
            silent = not value or (value == 1 and value is not True and "head" not in name)
            told = any(word in name for word in types["telling_words"])
            harmless = any(word in name for word in types["harmless_words"])
            if told and not (silent or harmless or key in self.data.asked or key in known):
                self.fail(
                    name,
                    f"given {show(value)}, which the reader of an unknown model_type does not use; "
                    "expected a file without it; its cache cannot be sized",
                )

    def fact(self, table: str) -> Any:
        """What the model type means by saying nothing: its entry in a table of facts, or None."""
        return model_types()["facts"][table].get(self.model_type)

    def declared(self, key: str) -> bool:
        """True if the file names the field at all, even as null."""
        return any(name in self.data for name in self.names(key))

    def raw(self, key: str) -> Any:
        """The value as it stands, or None if absent or null; old names are tried too."""
        found: dict[str, Any] = {}
        # some families keep their attention fields in a dictionary of their own
        inner = [self.data.get(block) for block in ("attn_config", "attention_config")]
        for place in (self.data, *(block for block in inner if isinstance(block, Mapping))):
            for name in self.names(key):
                if place.get(name) is not None:
                    found.setdefault(name, place[name])
        if not found:
            return None
        (first, value), *others = found.items()
        for name, other in others:
            if type(other) is type(value) and other != value and key != "max_position_embeddings":
                clash = f"given {show(value)}, but {name} says {show(other)}"
                self.fail(first, f"{clash}; expected one value; remove the wrong one")
        return value

    def check(self, key: str, value: object, holds: bool, expected: str) -> None:
        """Refuse `value` unless it holds: every refusal of one wrong value reads like this."""
        if not holds:
            self.fail(key, f"given {show(value)}; expected {expected}")

    def typed(self, key: str, value: Any, kind: Any, expected: str) -> Any:
        """`value`, which must be None or of this kind; True and False are no numbers."""
        of_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        self.check(key, value, value is None or of_kind, f"{expected}; correct it")
        return value

    def as_count(self, key: str, value: Any, least: int = 1, most: int = LARGEST) -> int | None:
        """`value` as a whole number in [least, most]; None stays None."""
        whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        correct = "correct it, or remove it if the model does without"
        expected = f"a whole number from {least} to {most:,}; {correct}"
        self.check(key, value, value is None or whole, expected)
        return value

    def count(self, key: str, least: int = 1, most: int = LARGEST) -> int | None:
        """A whole number in [least, most], or None if absent."""
        return self.as_count(key, self.raw(key), least, most)

    def default_count(self, *keys: str, least: int = 1) -> int | None:
        """The first of these keys that the file or its model type's own defaults give.

        What a default fills in is noted. Null stays null for KV heads: "as many as query heads".
        """
        value = None
        for key in keys:
            value = self.count(key, least)
            null = key == "num_key_value_heads" and self.declared(key)
            if value is None and key in self.defaults and not null:
                value = self.defaults[key]
                self.note(f"{key} is not in the file; {self.model_type} means {value} by that")
            if value:
                return value
        return value

    def needed(self, *keys: str, why: str, least: int = 1, most: int = LARGEST) -> int:
        """As `default_count`, but absence is an error that says what the field is needed for."""
        value = self.default_count(*keys, least=least)
        if value is None:
            others = ", ".join(self.names(keys[-1])[1:])
            known_as = f" (also known as {others})" if others else ""
            self.fail(keys[-1], f"missing{known_as}; expected a whole number, {why}; add it")
        self.as_count(keys[-1], value, least, most)
        return value

    def flag(self, key: str) -> bool | None:
        """True, False, or None if absent."""
        return self.typed(key, self.raw(key), bool, "true or false")

    def as_number(self, key: str, value: Any) -> float | None:
        """`value` as a finite positive number; None stays None."""
        self.typed(key, value, int | float, "a positive number")
        self.check(key, value, value is None or 0 < value < 1e30, "a positive number; correct it")
        return None if value is None else float(value)

    def block(self, key: str) -> Mapping:
        """A sub-dictionary, empty if absent."""
        return self.typed(key, self.data.get(key), Mapping, "an object") or {}

    def items(self, key: str, length: int | None = None) -> list | None:
        """A list (of `length` entries, one a layer), or None if absent."""
        value = self.typed(key, self.raw(key), list | tuple, "a list")
        if value is not None and length is not None:
            self.one_a_layer(key, value, length)
        return None if value is None else list(value)

    def one_a_layer(self, key: str, value: Sequence, num_layers: int) -> None:
        """Refuse what has not one entry for each layer."""
        if len(value) != num_layers:
            expected = f"{num_layers}, one a layer; correct it, or num_hidden_layers"
            self.fail(key, f"has {len(value)} entries; expected {expected}")
