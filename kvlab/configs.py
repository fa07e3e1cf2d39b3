"""A Hugging Face config.json -> ModelSpec. Facts in, shapes out; no costs here.

Standard library only: the same code reads a config that a reader pastes into the rendered page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.specs import DATA_DIR, HardwareSpec, LayerSpec, ModelSpec, RopeSpec


class ConfigError(KvlabError):
    """A config that cannot be read. `.field` names the key that is missing or wrong."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


def read_config(source: Mapping | str | Path, name: str | None = None) -> ModelSpec:
    """Read a config.json (a mapping, a path, or JSON text) into a ModelSpec."""
    if not isinstance(source, Mapping):
        text = source if isinstance(source, str) and source.lstrip()[:1] == "{" else None
        if text is None:
            path = Path(source)
            if path.is_dir():
                path = path / "config.json"
            text = path.read_text()
        source = json.loads(text)
    num_layers = source["num_hidden_layers"]
    heads = source["num_attention_heads"]
    kv_heads = source.get("num_key_value_heads") or heads
    head_dim = source.get("head_dim") or source["hidden_size"] // heads
    scaling = dict(source.get("rope_parameters") or source.get("rope_scaling") or {})
    rope_type = str(scaling.pop("rope_type", scaling.pop("type", "default")))
    theta = scaling.pop("rope_theta", None) or source.get("rope_theta") or 10_000.0
    return ModelSpec(
        name=name or source.get("_name") or source.get("_name_or_path") or "unnamed",
        num_layers=num_layers,
        hidden_size=source["hidden_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=source.get("intermediate_size"),
        vocab_size=source["vocab_size"],
        layers=(LayerSpec("full", kv_heads, head_dim, head_dim),) * num_layers,
        tie_word_embeddings=bool(source.get("tie_word_embeddings")),
        rms_norm_eps=source.get("rms_norm_eps", 1e-5),
        max_position_embeddings=source.get("max_position_embeddings"),
        rope=RopeSpec(float(theta), head_dim, rope_type, tuple(sorted(scaling.items()))),
        model_type=source.get("model_type", "llama"),
    )


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


def preset(name: str) -> ModelSpec:
    """The ModelSpec of data/models/<name>.json, for example preset("llama-3-8b")."""
    path = DATA_DIR / "models" / f"{_slug(name)}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        raise ConfigError("name", f"given {name!r}; expected one of: {known}")
    return read_config(path)


def find_model(name_or_path: str | Path) -> ModelSpec:
    """A preset's name, else a config.json or a folder that holds one."""
    path = Path(name_or_path)
    if path.exists():
        return read_config(path)
    return preset(str(name_or_path))


def hardware(name: str) -> HardwareSpec:
    """The HardwareSpec of data/hardware/<name>.json, for example hardware("h100-sxm")."""
    path = DATA_DIR / "hardware" / f"{_slug(name)}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.json"))) or "none yet"
        raise ConfigError("hardware", f"given {name!r}; expected one of: {known}")
    facts = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("_")}
    return HardwareSpec(**facts)
