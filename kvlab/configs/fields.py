"""Reading single fields of a config.json: old names, nulls, types, ranges, contradictions.

Rules, the same for every field: null counts as absent; a key and its old name may both be there
only if they agree; a whole number is an int (not True, not 32.0, not "32"); what a file leaves
out is filled in only where its model type says so, and then a note says it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

from kvlab.errors import KvlabError

#: Larger than any real field; smaller than what would make a layer list eat the memory.
LARGEST = 10**9
MOST_LAYERS = 4096

#: canonical name -> the names that older or other model types give the same field
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim", "dim", "hidden_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "num_query_heads"),
    "num_key_value_heads": (
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "kv_n_heads",
        "n_kv_head",
        "multi_query_group_num",
        "num_multi_query_heads",
        "num_query_groups",
        "num_attention_groups",
    ),
    "head_dim": ("attention_head_dim", "kv_channels", "head_size", "d_head"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "d_ff", "ffn_dim", "block_ff_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": (
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "model_max_length",
    ),
    "sliding_window": ("sliding_window_size", "attention_window_size", "window_size"),
    "layer_types": ("layers_block_type",),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
}
KOSMOS = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention_heads",
    "hidden_size": "embed_dim",
}
#: Old names of single model types, too general to try elsewhere.
EXTRA_ALIASES: dict[str, dict[str, str]] = {
    "kosmos_2_text_model": KOSMOS,
    "kosmos_2_5_text_model": KOSMOS,
    "gpt_neo": {"layer_types": "attention_layers"},
    "xglm": {"num_attention_heads": "attention_heads"},
    "trocr": {
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
    },
}
#: Names that mean something else in one model type, so they are no alias there.
NOT_ALIASES = {
    "longcat_flash": {"num_layers"},
    "mamba2": {"num_heads", "head_dim"},
    "zamba2": {"kv_channels"},
    "mimo_v2_flash": {"sliding_window_size"},
    "openelm": {"ffn_dim", "model_max_length"},
    "exaone": {"hidden_dim"},
    "git": {"sliding_window_size"},  # Grok-2 goes by this name, and its -1 means no window
}
#: Sub-dictionaries in which some families keep their attention fields.
ATTENTION_BLOCKS = ("attn_config", "attention_config", "linear_attn_config")


def words(text: str) -> tuple[str, ...]:
    """The names in a line of text: long lists of model types stay readable that way."""
    return tuple(text.split())


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


class Fields:
    """One config dictionary, read field by field; notes pile up in `.notes`.

    where     prefix of field names in errors, such as "text_config."
    defaults  what the model type fills in when a key is absent
    """

    def __init__(self, data: Mapping, model_type: str, defaults: Mapping, where: str = ""):
        self.data = data
        self.model_type = model_type
        self.defaults = defaults
        self.where = where
        self.notes: list[str] = []

    def name(self, key: str) -> str:
        """The field's full name, for an error."""
        return self.where + key

    def fail(self, key: str, message: str) -> ConfigError:
        """The error to raise about one field."""
        return ConfigError(self.name(key), message)

    def note(self, text: str) -> None:
        """Keep one decision of the reader for the reader of the result."""
        if text not in self.notes:
            self.notes.append(text)

    def names(self, key: str) -> tuple[str, ...]:
        """The field's name and its old names in this model type."""
        skip = NOT_ALIASES.get(self.model_type, ())
        extra = EXTRA_ALIASES.get(self.model_type, {}).get(key)
        found = (key, *ALIASES.get(key, ()), *([extra] if extra else ()))
        return tuple(k for k in found if k == key or k not in skip)

    def declared(self, key: str) -> bool:
        """True if the file names the field at all, even as null."""
        return any(name in self.data for name in self.names(key))

    def raw(self, key: str) -> object:
        """The value as it stands, or None if absent or null; old names are tried too."""
        found: dict[str, object] = {}
        places = [self.data, *(self.data.get(block) for block in ATTENTION_BLOCKS[:2])]
        for place in places:
            if not isinstance(place, Mapping):
                continue
            for name in self.names(key):
                if place.get(name) is not None:
                    found.setdefault(name, place[name])
        if not found:
            return None
        (first, value), *others = found.items()
        for name, other in others:
            if type(other) is type(value) and other != value and key != "max_position_embeddings":
                raise self.fail(
                    first,
                    f"given {show(value)}, but {name} says {show(other)}; expected one value; "
                    f"remove the wrong one",
                )
        return value

    def count(self, key: str, least: int = 1, most: int = LARGEST) -> int | None:
        """A whole number in [least, most], or None if absent."""
        return self.check_count(key, self.raw(key), least, most)

    def check_count(
        self, key: str, value: object, least: int = 1, most: int = LARGEST
    ) -> int | None:
        """`value` as a whole number in [least, most]; None stays None."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(
                key,
                f"given {show(value)}; expected a whole number from {least} to {most:,}; "
                f"correct it, or remove it if the model does without",
            )
        return value

    def default_count(self, key: str, least: int = 1) -> int | None:
        """As `count`, but an absent field takes its model type's own default, with a note."""
        value = self.count(key, least)
        if value is None and key in self.defaults and not self._null(key):
            value = self.defaults[key]
            self.note(f"{key} is not in the file; {self.model_type} means {value} by that")
        return value

    def _null(self, key: str) -> bool:
        """True where an explicit null means something else than absence to the model type."""
        return key == "num_key_value_heads" and self.declared(key)

    def needed(self, key: str, why: str, least: int = 1, most: int = LARGEST) -> int:
        """As `default_count`, but absence is an error that says what the field is needed for."""
        value = self.default_count(key, least)
        if value is None:
            others = ", ".join(self.names(key)[1:])
            known_as = f" (also known as {others})" if others else ""
            raise self.fail(key, f"missing{known_as}; expected a whole number, {why}; add it")
        return self.check_count(key, value, least, most)

    def flag(self, key: str) -> bool | None:
        """True, False, or None if absent."""
        value = self.data.get(key)
        if value is None and isinstance(self.data.get("attn_config"), Mapping):
            value = self.data["attn_config"].get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"given {show(value)}; expected true or false; correct it")
        return value

    def number(self, key: str, value: object) -> float | None:
        """`value` as a finite positive number; None stays None."""
        if value is None:
            return None
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not 0 < value < 1e30:
            raise self.fail(key, f"given {show(value)}; expected a positive number; correct it")
        return float(value)

    def block(self, key: str) -> Mapping:
        """A sub-dictionary, empty if absent."""
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.fail(key, f"given {show(value)}; expected an object; correct it")
        return value

    def items(self, key: str, length: int | None = None) -> list | None:
        """A list (of `length` entries), or None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise self.fail(key, f"given {show(value)}; expected a list; correct it")
        if length is not None and len(value) != length:
            raise self.fail(
                key, f"has {len(value)} entries; expected {length}, one a layer; correct one"
            )
        return list(value)
