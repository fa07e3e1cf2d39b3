"""The audit: every documented log format, right and wrong models, unreadable input."""

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.configs import find_model, preset, read_config
from kvlab.errors import KvlabError
from kvlab.notebook.page_questions import answer_json
from kvlab.sheet import SheetError, audit, read_log
from kvlab.specs import DATA_DIR

LOGS = DATA_DIR / "engine_logs"
INDEX = json.loads((LOGS / "index.json").read_text())["logs"]
LLAMA = preset("llama-3-8b")
GIB = 2**30


def vllm_log(tokens: int, gib: str, longest: int = 8192, more: str = "") -> str:
    return (
        f"{more}\nAvailable KV cache memory: {gib} GiB\nGPU KV cache size: {tokens:,} tokens\n"
        f"Maximum concurrency for {longest:,} tokens per request: {tokens / longest:.2f}x\n"
    )


@pytest.mark.parametrize("entry", INDEX, ids=lambda e: e["file"])
def test_documented_logs(entry):
    report = audit(find_model(entry["model"]), (LOGS / entry["file"]).read_text())
    assert report["agrees"] is entry["agrees"], report["checks"]
    assert report["independent"] is entry["independent"]
    assert all(check["line"] for check in report["checks"])


@pytest.mark.parametrize("entry", INDEX, ids=lambda e: e["file"])
def test_colours_and_line_ends_change_nothing(entry):
    text = (LOGS / entry["file"]).read_text()
    coloured = re.sub(r"[0-9][0-9,.]*", "\x1b[1;36m\\g<0>\x1b[0m", text).replace("\n", "\r\n")
    model = find_model(entry["model"])
    assert audit(model, coloured) == audit(model, text)


def test_every_log_file_is_listed():
    assert {e["file"] for e in INDEX} == {p.name for p in LOGS.glob("*.log")}


def test_cost_14_three_numbers_of_a_log_are_one_division():
    text = (LOGS / "vllm-tokens-only.log").read_text()
    for name in ("llama-3-8b", "smollm2-135m", "qwen3-4b"):
        report = audit(preset(name), text)
        assert report["agrees"] and not report["independent"]
    tokens, concurrency = report["checks"]
    assert tokens["predicted"] == 2_042_016 and concurrency["predicted"] == 997.08


@given(
    st.integers(1, 2**21),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["bf16", "fp8", "int8_per_token_head"]),
)
def test_an_engine_that_divides_right_always_agrees(num_blocks, tp, dtype):
    """A pool of whole blocks plus a remainder under one block, printed with two decimals."""
    rate = {"bf16": 131_072, "fp8": 65_536, "int8_per_token_head": 67_584}[dtype] // tp
    memory = (num_blocks * 16 + 7) * rate
    text = vllm_log(num_blocks * 16, f"{memory / GIB:.2f}", 16)
    if float(f"{memory / GIB:.2f}") == 0:
        return
    report = audit(LLAMA, text, tensor_parallel=tp, kv_dtype=dtype)
    assert report["agrees"] is not False, report["checks"]
    if num_blocks >= 20 and memory > GIB:  # otherwise the figures are too coarse for a proof
        assert report["agrees"] and report["independent"], report["checks"]


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2, "stored as fp8"),
        (0.5, "stored as fp32"),
        (4, "4 tensor-parallel ranks"),
        (0.25, "query heads"),
    ],
)
def test_a_disagreement_names_its_cause(factor, cause):
    blocks = int(56.72 * GIB * factor / (131_072 * 16))
    report = audit(LLAMA, vllm_log(blocks * 16, "56.72"))
    memory = report["checks"][0]
    assert not report["agrees"] and not memory["agrees"] and cause in memory["why"]
    assert report["checks"][1]["agrees"], "tokens and concurrency still agree with each other"


def test_a_disagreement_without_a_usual_cause_gives_the_ratio():
    report = audit(LLAMA, vllm_log(300_000, "56.72"))
    assert "0.646 times" in report["checks"][0]["why"]


def test_a_head_size_derived_by_mistake_is_found():
    qwen = preset("qwen3-4b")
    blocks = int(20 * GIB / (92_160 * 16))
    report = audit(qwen, vllm_log(blocks * 16, "20.00"))
    assert "hidden / heads" in report["checks"][0]["why"]


def test_settings_are_read_from_the_log_and_can_be_overridden():
    text = (LOGS / "vllm-v1-one-line.log").read_text()
    report = audit(LLAMA, text)
    assert (report["tensor_parallel"], report["kv_dtype"]) == (2, "fp8")
    assert not audit(LLAMA, text, tensor_parallel=1)["agrees"]
    assert not audit(LLAMA, text, kv_dtype="bf16")["agrees"]


def test_a_block_size_in_the_log_is_used():
    tokens = int(56.72 * GIB / (131_072 * 128)) * 128
    report = audit(LLAMA, vllm_log(tokens, "56.72", more="non-default args: {'block_size': 128}"))
    assert report["agrees"]


def test_a_block_size_that_a_backend_forces_is_used():
    """20 GiB hold 305,599 tokens of DeepSeek-V3: 305,584 in blocks of 16, 305,536 in blocks of 64."""
    text = vllm_log(305_472, "20.00", 4096)  # one block kept back
    assert not audit(preset("deepseek-v3"), text)["agrees"]
    forced = "Forcing kv cache block size to 64 for FlashMLA backend."
    assert audit(preset("deepseek-v3"), f"block_size=16\n{forced}\n{text}")["agrees"]


def test_ranks_that_differ_a_little_are_one_engine():
    """Each rank prints its own figures; the engine takes the least of them for all."""
    rate = 131_072 // 2 * 16
    least, more = int(60.25 * GIB) // rate * 16, int(60.31 * GIB) // rate * 16
    lines = [
        "(EngineCore_0 pid=1) INFO config: dtype=torch.bfloat16, tensor_parallel_size=2",
        "(VllmWorker TP1 pid=3) INFO Available KV cache memory: 60.31 GiB",
        "(VllmWorker TP0 pid=2) INFO Available KV cache memory: 60.25 GiB",
        *(f"(EngineCore_0 pid=1) INFO GPU KV cache size: {n:,} tokens" for n in (more, least)),
    ]
    report = audit(LLAMA, "\n".join(lines))
    assert report["agrees"] and report["tensor_parallel"] == 2
    assert report["checks"][0]["reported"] == least
    with pytest.raises(SheetError, match="several values"):
        audit(LLAMA, "\n".join(lines).replace("60.31", "30.31"))


@pytest.mark.parametrize("device", ["# GPU", "# cuda", "# rocm", "# CUDA"])
def test_blocks_of_any_device(device):
    text = f"{device} blocks: 1952, # CPU blocks: 2048\nreserved for KV Cache is 3.81GiB"
    assert audit(LLAMA, text)["agrees"]


def test_a_pipeline_stage_holds_a_share_of_the_layers():
    text = vllm_log(163_840, "10.00", more="pipeline_parallel_size=2, kv_cache_dtype=auto")
    report = audit(LLAMA, text)
    assert report["agrees"] and any("16 of the layers" in note for note in report["notes"])
    assert not audit(LLAMA, text.replace("size=2", "size=1"))["agrees"]
    assert audit(LLAMA, text.replace("size=2", "size=1").replace("auto", "fp8_inc"))["agrees"]


@pytest.mark.parametrize("ranks", ["--tensor-parallel-size 2", "-tp 2", "-tp=2"])
def test_settings_of_a_command_line(ranks):
    text = vllm_log(
        30 * GIB // (131_072 // 4 * 16) * 16, "30.00",
        more=f"vllm serve x {ranks} --kv-cache-dtype fp8",
    )  # fmt: skip
    report = audit(LLAMA, text)
    assert report["agrees"]
    assert (report["tensor_parallel"], report["kv_dtype"]) == (2, "fp8")


@pytest.mark.parametrize("tp", [0, -1, 3])
def test_ranks_that_cannot_be_are_refused(tp):
    with pytest.raises(KvlabError, match="tensor parallel"):
        audit(LLAMA, vllm_log(160, "0.02"), tensor_parallel=tp)


@pytest.mark.parametrize("factor", [1, 2])
def test_sglang_windows_have_a_pool_of_their_own(factor):
    """gpt-oss-20b: 12 windowed layers and 12 full ones, 1,024 bytes of K a token and layer."""

    def line(tokens: int, times: int) -> str:
        size = tokens * 12 * 1024 * times / GIB
        return f"KV Cache is allocated. #tokens: {tokens}, K size: {size:.2f} GB, V size: {size:.2f} GB"

    text = f"{line(60_000, 1)}\n{line(120_000, factor)}\nmax_total_num_tokens=120000"
    report = audit(preset("gpt-oss-20b"), f"{text}\n{text}")
    assert report["agrees"] is (factor == 1)
    assert len(report["checks"]) == 5
    with pytest.raises(SheetError, match="one kind of layer"):
        audit(LLAMA, text)


def test_sglang_tokens_of_another_line():
    """SGLang up to 0.4.3 prints the pool's bytes without its tokens."""
    text = (LOGS / "sglang-mha.log").read_text().replace("#tokens: 464696, ", "")
    report = audit(LLAMA, text)
    assert report["agrees"] and len(report["checks"]) == 2
    assert not audit(preset("qwen3-4b"), text)["agrees"]
    with pytest.raises(SheetError, match="max_total_num_tokens"):
        audit(LLAMA, text.replace("max_total_num_tokens", "max"))


def test_a_model_that_keeps_nothing_per_token():
    """Only cross-attention layers: no rate to divide the memory by."""
    crossed = read_config(
        {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8,
         "cross_attention_layers": [0]}
    )  # fmt: skip
    with pytest.raises(KvlabError, match="keeps nothing per token"):
        audit(crossed, (LOGS / "vllm-v1-two-lines.log").read_text())


def test_bytes_where_none_are_predicted():
    """llama.cpp once kept a second copy of the latent row as V."""
    text = (
        "size = 9 MiB (4096 cells, 61 layers, 1/1 seqs), K (f16): 274.50 MiB, V (f16): 244.00 MiB"
    )
    checks = audit(preset("deepseek-v3"), text)["checks"]
    assert [c["agrees"] for c in checks] == [True, False]
    assert "second copy" in checks[1]["why"]


def test_mla_pool_of_two_ranks_is_not_split():
    """The figures of a published SGLang log: 383,872 tokens, 19.36 GB on each of two ranks."""
    spec = read_config(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 47,
            "hidden_size": 2048,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "vocab_size": 1000,
        }
    )
    text = (
        "[TP0] server_args: tp_size=2\n"
        "[TP0] KV Cache is allocated. #tokens: 383872, KV size: 19.36 GB\n"
        "[TP1] KV Cache is allocated. #tokens: 383872, KV size: 19.36 GB\n"
    )
    report = audit(spec, text)
    assert report["agrees"] and report["independent"]


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3-8b"])
def test_whole_gigabytes_and_a_block_scaled_cache_are_plain_numbers(model):
    report = audit(preset(model), vllm_log(1_600, "40"), kv_dtype="q8_0")
    assert not report["agrees"]
    assert all(type(c["predicted"]) in (int, float) for c in report["checks"])
    json.dumps(report)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "INFO: Application startup complete.",
        "llama: KV self size  =  272.00 MiB, K (q8_0):  136.00 MiB, V (q8_0):  136.00 MiB",
        "GPU KV cache size: 1,000 tokens\nGPU KV cache size: 2,000 tokens",
        "x" * 5_000_000,
    ],
)
def test_unreadable_logs_are_named_errors(text):
    with pytest.raises(SheetError):
        audit(LLAMA, text)


def test_one_figure_alone_is_not_an_audit():
    with pytest.raises(SheetError, match="nothing to set beside"):
        audit(LLAMA, "GPU KV cache size: 1,000 tokens")


def test_a_cache_of_other_layers_is_a_named_error():
    text = (LOGS / "llama-cpp-cells.log").read_text().replace("32 layers", "31 layers")
    with pytest.raises(SheetError, match="31 layers"):
        audit(LLAMA, text)


@given(st.text(max_size=400))
def test_any_text_gives_figures_or_a_named_error(text):
    for prefix in ("", "GPU KV cache size: ", "KV Cache is allocated. #tokens: ", "size = "):
        try:
            audit(LLAMA, prefix + text)
        except KvlabError:
            continue


def test_a_pasted_log_is_text_and_nothing_else():
    log = read_log("GPU KV cache size: 16 tokens <script>alert(1)</script>")
    assert log.tokens.value == 16


def run(*arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "kvlab", "audit", *arguments],
        capture_output=True, text=True, check=False, **settings,
    )  # fmt: skip


TEXT = (LOGS / "vllm-v1-two-lines.log").read_text()


@pytest.mark.parametrize("raw", [TEXT.encode("utf-16"), b"\xff no text\n" + TEXT.encode()])
def test_a_log_in_another_encoding(tmp_path, raw):
    """PowerShell redirects in UTF-16; a progress bar cut in two is no UTF-8."""
    path = tmp_path / "engine.log"
    path.write_bytes(raw)
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    with path.open("rb") as stream:
        piped = run("--config", "llama-3-8b", "--log", "-", stdin=stream, env=strict)
    assert piped.returncode == run("--config", "llama-3-8b", "--log", str(path)).returncode == 0


def test_command_line_status(tmp_path):
    good, bad = LOGS / "vllm-v1-two-lines.log", tmp_path / "bad.log"
    bad.write_text("nothing here")
    agreed = run("--config", "llama-3-8b", "--log", str(good), "--json")
    assert agreed.returncode == 0 and json.loads(agreed.stdout)["agrees"]
    text = run("--config", "qwen3-4b", "--log", str(good))
    assert text.returncode == 1 and "does not agree" in text.stdout
    for arguments in (
        ("--config", "llama-3-8b", "--log", str(bad)),
        ("--config", "llama-3-8b", "--log", str(tmp_path / "none.log")),
        ("--config", "no-such-model", "--log", str(good)),
    ):
        failed = run(*arguments)
        assert failed.returncode == 2 and failed.stderr.startswith("kvlab: ")
        assert "Traceback" not in failed.stderr


def test_the_page_asks_the_same_function():
    log = (LOGS / "vllm-v1-two-lines.log").read_text()
    reply = json.loads(answer_json("audit", json.dumps({"model": "llama-3-8b", "log": log})))
    assert reply["ok"]["agrees"]
    pasted = json.dumps({"model_type": "llama", "hidden_size": 4096})
    reply = json.loads(answer_json("audit", json.dumps({"config": pasted, "log": log})))
    assert reply["error"]["name"].endswith("Error") and reply["error"]["message"]


# --- the second batch: what today's engines print ----------------------------------------------

QWEN36_35B = {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248_320,
    "full_attention_interval": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
GEMMA4_31B = {
    "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 262_144,
    "num_global_key_value_heads": 4, "global_head_dim": 512, "attention_k_eq_v": True,
    "sliding_window": 1024, "max_position_embeddings": 262_144,
}  # fmt: skip
MIMO = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 48, "hidden_size": 4096,
    "num_attention_heads": 64, "num_key_value_heads": 4, "swa_num_key_value_heads": 8,
    "head_dim": 192, "v_head_dim": 128, "sliding_window": 128, "vocab_size": 152_576,
    "hybrid_layer_pattern": [int(i % 6 != 5 and i > 0) for i in range(47)] + [0],
}  # fmt: skip


def state(report, name):
    return next(check for check in report["checks"] if check["name"].startswith(name))


def hybrid_log(gib: str, tokens: int, longest: int, requests: str, more: str = "") -> str:
    return (
        f"{more}\nAvailable KV cache memory: {gib} GiB\nGPU KV cache size: {tokens:,} tokens\n"
        f"Maximum concurrency for {longest:,} tokens per request: {requests}x\n"
    )


@pytest.mark.parametrize(
    ("gib", "tokens", "requests"), [("6.01", 569_878, "4.35"), ("5.98", 567_978, "4.33")]
)
def test_aud_01_recurrent_layers_share_pages_with_attention(gib, tokens, requests):
    page = "Setting attention block size to 2096 tokens to ensure that attention page size is >="
    text = hybrid_log(gib, tokens, 131_072, requests, f"kv_cache_dtype=fp8\n{page}")
    report = audit(read_config(QWEN36_35B), text)
    assert report["verdict"] == "agrees" and report["independent"], report["checks"]
    assert state(report, "page")["predicted"] == 2096
    assert state(report, "tokens")["predicted"] == tokens
    assert state(report, "concurrency")["predicted"] == float(requests)
    assert all(check["band"] < 0.1 for check in report["checks"])
    for wrong in (hybrid_log(gib, tokens * 11 // 10, 131_072, requests, "kv_cache_dtype=fp8"),
                  hybrid_log(gib, 5_000_000, 131_072, "38.15", "kv_cache_dtype=fp8")):
        assert audit(read_config(QWEN36_35B), wrong)["verdict"] == "does not agree"
    assert audit(preset("qwen3.5-27b"), text)["verdict"] == "does not agree"


@pytest.mark.parametrize(
    ("tokens", "size", "which"), [(1_462_784, "54.52", "without"), (975_424, "43.67", "with")]
)
def test_aud_02_a_sparse_row_has_scales_and_an_indexer(tokens, size, which):
    text = f"KV Cache is allocated. #tokens: {tokens}, KV size: {size} GB\nkv_cache_dtype=fp8"
    report = audit(preset("deepseek-v3.2"), text)
    assert report["verdict"] == "agrees", report["checks"]
    assert f"{which} the indexer" in report["checks"][0]["why"]
    assert report["kv_bytes_per_token_and_rank"] == 40_016
    wrong = text.replace(size, f"{float(size) * 1.05:.2f}")
    assert audit(preset("deepseek-v3.2"), wrong)["verdict"] == "does not agree"


def test_aud_03_llama_cpp_prints_cells_alone_and_a_recurrent_memory():
    text = (
        "llama_kv_cache: size = 16384.00 MiB (262144 cells, 16 layers, 4/1 seqs)\n"
        "llama_memory_recurrent: size = 598.50 MiB (4 cells, 64 layers, 4 seqs)\n"
    )
    report = audit(preset("qwen3.5-27b"), text)
    assert report["verdict"] == "agrees", report["checks"]
    assert [c["predicted"] for c in report["checks"]] == [16_384 * 2**20, 598.5 * 2**20]
    assert "48 layers" in report["checks"][1]["why"]
    parts = text.replace("64 layers, 4 seqs)", "64 layers, 4 seqs), R (f32): 22.50 MiB, S (f32): "
                         "576.00 MiB")  # fmt: skip
    assert audit(preset("qwen3.5-27b"), parts)["verdict"] == "agrees"
    assert audit(preset("qwen3.5-27b"), text.replace("598.50", "798.00"))["agrees"] is False
    assert audit(preset("qwen3.5-27b"), text.replace("16384", "65536"))["agrees"] is False


def test_aud_04_another_rank_may_have_less():
    spec = preset("qwen3-235b-a22b")
    text = hybrid_log("8.11", 178_880, 40_960, "4.37", "tensor_parallel_size=4")
    report = audit(spec, text)
    assert report["verdict"] == "cannot be told from this log" and report["agrees"] is None
    assert "0.09 GiB less" in report["checks"][0]["why"]
    all_ranks = "Available KV cache memory: 8.11 GiB\n" * 3 + text
    assert audit(spec, all_ranks)["verdict"] == "does not agree"
    least = all_ranks.replace("8.11", "8.02", 1)
    assert audit(spec, least)["verdict"] == "agrees", "the engine takes the rank with the least"
    assert audit(spec, text.replace("178,880", "150,000"))["verdict"] == "does not agree"


def test_aud_05_windows_are_admitted_with_the_budget_of_a_step():
    spec = read_config(GEMMA4_31B)
    text = hybrid_log("64.68", 626_949, 262_144, "2.39", "max_num_batched_tokens=8192")
    report = audit(spec, text)
    assert report["verdict"] == "agrees", report["checks"]
    assert state(report, "tokens")["predicted"] == 626_949
    assert all(check["band"] < 0.02 for check in report["checks"])
    smaller = audit(spec, text.replace("8192", "2048"))
    assert smaller["verdict"] == "does not agree"
    assert state(smaller, "concurrency")["predicted"] == 2.89
    assert audit(spec, text.replace("626,949", "5,000,000"))["verdict"] == "does not agree"
    assert audit(preset("gemma-3-27b"), text)["verdict"] == "does not agree"
    unsaid = hybrid_log("64.68", 600_000, 262_144, "2.29")
    assert audit(spec, unsaid)["verdict"] == "cannot be told from this log"


def test_aud_05_older_versions_print_tokens_by_another_rule():
    """The same memory: about a ninth of the tokens up to 0.20 (vllm-project/vllm#43308)."""
    more = "Initializing a V1 LLM engine (v{}) with config: max_num_batched_tokens=8192"
    old = hybrid_log("64.68", 70_640, 262_144, "2.39", more.format("0.20.0"))
    spec = read_config(GEMMA4_31B)
    assert audit(spec, old)["verdict"] == "agrees"
    assert audit(spec, old.replace("v0.20.0", "v0.21.0"))["verdict"] == "does not agree"
    future = audit(spec, old.replace("v0.20.0", "v0.99.0"))
    assert any("0.99" in note and "may differ" in note for note in future["notes"])


def test_aud_06_int8_with_a_scale_per_token_and_head():
    tokens = int(20 * GIB / (67_584 * 16)) * 16
    text = vllm_log(tokens, "20.00", more="kv_cache_dtype=int8_per_token_head")
    assert audit(LLAMA, text)["verdict"] == "agrees"
    assert audit(LLAMA, text, kv_dtype="int8")["verdict"] == "does not agree"


def test_aud_07_one_pool_of_two_kinds_of_layers():
    lines = [f"[2026-01-31 13:50:39 TP{rank}] KV Cache is allocated. #tokens: 300288, "
             "K size: 8.38 GB, V size: 5.59 GB" for rank in range(4)]  # fmt: skip
    report = audit(read_config(MIMO), "\n".join(["page_size=64", *lines]))
    assert report["tensor_parallel"] == 4 and report["verdict"] == "agrees", report["checks"]
    assert all("one pool of two" in c["name"] for c in report["checks"])
    assert "39 layers" in report["checks"][0]["name"]
    wrong = [line.replace("8.38", "10.31") for line in lines]
    assert audit(read_config(MIMO), "\n".join(wrong))["verdict"] == "does not agree"


def test_a_wide_band_is_no_proof():
    """A block of a hundred tokens in a pool of three: nearly any model would agree."""
    report = audit(LLAMA, vllm_log(48, "0.01", 16))
    assert report["verdict"] == "cannot be told from this log"
    assert not report["independent"] and "no proof" in report["checks"][0]["why"]


def test_every_engine_rule_says_where_it_was_read():
    rules = json.loads((DATA_DIR / "engine_rules.json").read_text())["rules"]
    assert all(rule["source"] and rule["says"] for rule in rules)
    assert {rule["engine"] for rule in rules} == {"vLLM", "SGLang", "llama.cpp"}


@pytest.mark.parametrize(
    ("tokens", "longest", "requests"),
    [(78_433, 32_768, "2.39"), (116_025, 65_536, "1.77"), (152_592, 131_072, "1.16")],
)
def test_aud_05_two_steps_in_flight(tokens, longest, requests):
    """Gemma-4-26B in vLLM 0.29.0, 4.25 GiB: three printed counts, each to the token."""
    spec = read_config({**GEMMA4_31B, "num_hidden_layers": 30, "num_key_value_heads": 8,
                        "num_global_key_value_heads": 2, "num_attention_heads": 16})  # fmt: skip
    more = "LLM engine (v0.29.0) max_num_batched_tokens=2496"
    report = audit(spec, hybrid_log("4.25", tokens, longest, requests, more))
    assert report["verdict"] == "agrees" and state(report, "tokens")["predicted"] == tokens


# --- excerpts that the rules had not seen when they were written ------------------------------


DRAFTING = hybrid_log(
    "5.33", 300_220, 262_144, "1.15",
    "tensor_parallel_size=2 kv_cache_dtype=fp8 max_num_batched_tokens=8192 "
    "speculative_config={'method': 'mtp', 'num_speculative_tokens': 3}",
)  # fmt: skip


def test_draft_layers_share_the_pool():
    """noonghunna/club-3090#594: the draft layer makes a group of 17, and 3 groups of state."""
    report = audit(preset("qwen3.5-27b"), DRAFTING)
    assert report["verdict"] == "agrees" and state(report, "tokens")["predicted"] == 300_220
    assert "though the config names none" in report["notes"][-1]
    both = DRAFTING.replace("Available", "Available KV cache memory: 5.34 GiB\nAvailable")
    alone = audit(preset("qwen3.5-27b"), both.replace("'mtp'", "'ngram'"))
    assert alone["verdict"] == "does not agree"


def test_aud_04_of_a_model_whose_layers_differ():
    less = DRAFTING.replace("300,220", "295,827").replace("1.15x", "1.13x")
    report = audit(preset("qwen3.5-27b"), less)
    assert report["verdict"] == "cannot be told from this log"
    assert all("another rank may have" in check["why"] for check in report["checks"])
    both = less.replace("Available", "Available KV cache memory: 5.34 GiB\nAvailable")
    assert audit(preset("qwen3.5-27b"), both)["verdict"] == "does not agree"


def test_a_draft_model_has_a_cache_that_no_line_shows():
    report = audit(preset("qwen3.5-27b"), DRAFTING.replace("'mtp'", "'eagle'"))
    assert report["verdict"] == "cannot be told from this log" and not report["independent"]
    assert all("draft model" in check["why"] for check in report["checks"])
    more = DRAFTING.replace("'mtp'", "'eagle'").replace("300,220", "400,000")
    assert audit(preset("qwen3.5-27b"), more)["verdict"] == "does not agree"


@pytest.mark.parametrize(
    ("model", "text", "predicted"),
    [
        # NVIDIA/TensorRT-LLM#1400, #1188; triton-inference-server/tutorials#150
        ("llama-2-7b", "Allocate 69524783104 bytes for k/v cache. \n[TensorRT-LLM][INFO] Using "
         "132608 tokens in paged KV cache.", 69_524_783_104),
        ("qwen2.5-0.5b", "Allocated 4.53 GiB for max tokens in paged KV cache (395776).",
         4_863_295_488),
        ("tinyllama-1.1b", "Number of tokens per block: 32.\n[MemUsageChange] Allocated 78.30 GiB "
         "for max tokens in paged KV cache (3731744).", 84_068_728_832),
        # ikawrakow/ik_llama.cpp#259, #822
        ("deepseek-v3", "KV self size  = 1166.62 MiB, c^KV (q8_0): 1166.62 MiB, kv^T: not used\n"
         "new slot | id_slot=0 n_ctx_slot=32768", 1_223_294_976),
        ("gpt-oss-20b", "n_ctx      = 131072\nKV self size  = 6144.00 MiB, K (f16): 3072.00 MiB, "
         "V (f16): 3072.00 MiB", 3 * 2**30),
        # sgl-project/sglang#13466
        ("kimi-k2", "--tp 8\nKV Cache is allocated. #tokens: 8050, KV size: 0.53 GB", 565_689_600),
    ],
)  # fmt: skip
def test_lines_of_other_shapes(model, text, predicted):
    report = audit(preset(model), text)
    assert report["verdict"] == "agrees" and report["checks"][0]["predicted"] == predicted
    assert audit(preset("llama-3.2-1b"), text)["verdict"] == "does not agree"
