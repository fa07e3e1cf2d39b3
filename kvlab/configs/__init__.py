"""Models and cards by name: the presets in data/, and the config reader they go through.

read_config(source)      any config.json -> ModelSpec
preset("llama-3-8b")     a model of data/models
find_model(text)         a preset, a Hugging Face id, a file or a folder
hardware("h100-sxm")     a card of data/hardware
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from kvlab.configs.fields import ConfigError, show
from kvlab.configs.files import parse_config
from kvlab.configs.reader import read_config
from kvlab.specs import DATA_DIR, HardwareSpec, ModelSpec

__all__ = [
    "ConfigError",
    "find_model",
    "hardware",
    "hardware_names",
    "model_index",
    "model_names",
    "preset",
    "preset_named",
    "read_config",
]


def _slug(name: str) -> str:
    return "-".join(str(name).lower().replace("_", " ").replace("-", " ").split())


def model_names() -> list[str]:
    """The presets: stems of data/models/*.json, sorted."""
    return sorted(path.stem for path in (DATA_DIR / "models").glob("*.json"))


@functools.cache
def model_index() -> dict[str, dict]:
    """Preset -> its published name, Hugging Face id, source, and parameters where counted."""
    index = {}
    for stem in model_names():
        facts = json.loads((DATA_DIR / "models" / f"{stem}.json").read_text("utf-8"))
        index[stem] = {key: facts[f"_{key}"] for key in ("name", "hf_id", "source")}
        index[stem]["params"] = facts.get("_params")
    return index


def preset_named(text: str) -> str | None:
    """The preset that a slug, a published name or a Hugging Face id means, if any."""
    wanted = _slug(text)
    if wanted in model_index():
        return wanted
    for stem, facts in model_index().items():
        if wanted in (_slug(facts["name"]), _slug(facts["hf_id"])):
            return stem
    return None


def preset(name: str) -> ModelSpec:
    """The ModelSpec of data/models/<name>.json, for example preset("llama-3-8b").

    The published name (Llama-3-8B) and the Hugging Face id name the same file.
    """
    stem = preset_named(name)
    if stem is None:
        raise ConfigError(
            "model", f"given {show(name)}; expected one of: {', '.join(model_names())}"
        )
    return read_config(DATA_DIR / "models" / f"{stem}.json")


def find_model(name_or_path: str | Path) -> ModelSpec:
    """A preset by name or Hugging Face id, else a config.json or a folder that holds one."""
    text = str(name_or_path)
    stem = preset_named(text)
    if stem is not None:
        return preset(stem)
    if text.strip() and ("/" in text or "\\" in text or text.endswith(".json") or _exists(text)):
        return read_config(Path(text))
    return preset(text)


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long, or a null byte in it
        return False


def hardware_names() -> list[str]:
    """The cards: stems of data/hardware/*.json, sorted."""
    return sorted(path.stem for path in (DATA_DIR / "hardware").glob("*.json"))


def hardware(name: str) -> HardwareSpec:
    """The HardwareSpec of data/hardware/<name>.json, for example hardware("h100-sxm")."""
    path = DATA_DIR / "hardware" / f"{_slug(name)}.json"
    if path.stem not in hardware_names():
        listed = ", ".join(hardware_names()) or "none"
        raise ConfigError("hardware", f"given {show(name)}; expected one of: {listed}")
    facts = {k: v for k, v in parse_config(path.read_text("utf-8")).items() if k[:1] != "_"}
    return HardwareSpec(**facts)
