"""An engine's start-up log against the cost model: does the cache hold what it should?

Three figures of a log look like a proof and are not: tokens, tokens per request and concurrency
are one division. An independent check sets bytes (or memory) against tokens, because only there
does the model's shape enter. Each check says which kind it is.
"""

from __future__ import annotations

from dataclasses import replace

from kvlab import costs, kv_costs
from kvlab.audit.checks import AuditError
from kvlab.audit.logs import LogError, read_log
from kvlab.audit.pools import llama_cpp_checks, sglang_checks
from kvlab.audit.vllm import vllm_checks
from kvlab.kv_formats import storage_format
from kvlab.reports.kv import asked_model
from kvlab.specs import ModelSpec

__all__ = ["AuditError", "LogError", "ask_audit", "audit"]


def audit(
    spec: ModelSpec,
    log_text: str,
    tensor_parallel: int | None = None,
    kv_dtype: str | None = None,
) -> dict:
    """Every figure of the log that can be predicted, predicted.

    tensor_parallel, kv_dtype  override what the log says, where it says it (1 and bf16 otherwise)

    agrees is true if every check does; independent is true if one of them could have failed for a
    wrong model. Raises LogError, AuditError or ConfigError where nothing can be compared.
    """
    log = read_log(log_text)
    tp = (log.tensor_parallel or 1) if tensor_parallel is None else tensor_parallel
    storage = storage_format(kv_dtype or log.kv_dtype or "bf16")
    notes, stages = list(spec.notes), log.pipeline_parallel or 1
    if stages > 1:
        held = -(-len(spec.layers) // stages)
        notes.append(f"a pipeline stage of {stages} holds at most {held} of the layers")
        spec = replace(spec, layers=spec.layers[:held])
    if log.engine == "vLLM":
        checks = vllm_checks(spec, log, tp, storage)
    elif log.engine == "SGLang":
        checks = sglang_checks(spec, log, tp, storage)
    else:
        checks = llama_cpp_checks(spec, log)
    if not checks:
        raise AuditError(
            f"the {log.engine} log has one figure and nothing to set beside it: add the line with "
            "the memory for the cache, or the one with the concurrency"
        )
    independent = any(check["independent"] for check in checks)
    return {
        "engine": log.engine,
        "model": spec.name,
        "tensor_parallel": tp,
        "kv_dtype": storage.name,
        "kv_bytes_per_token_and_rank": float(
            costs.kv_bytes_per_token(kv_costs.per_rank(spec, tp), storage.bytes_per_element)
        ),
        "checks": checks,
        "independent": independent,
        "agrees": all(check["agrees"] for check in checks),
        "notes": notes
        + ([] if independent else ["No figure of this log depends on the model's shape."]),
    }


def ask_audit(
    log: str,
    model: str | None = None,
    config: str | None = None,
    tp: int | None = None,
    kv_dtype: str | None = None,
) -> dict:
    """`audit` of a pasted log, for a preset's name or pasted config.json text."""
    return audit(asked_model(model, config), log, tp, kv_dtype)
