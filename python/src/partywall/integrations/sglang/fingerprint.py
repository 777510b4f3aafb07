"""The fields that decide what weights SGLang makes of a checkpoint. Importing this module imports SGLang and torch."""

from operator import attrgetter
from typing import Any

import torch
from sglang.srt.runtime_context import get_exec, get_model, get_parallel
from sglang.version import __version__

from partywall.integrations._engine.fingerprint import common

PARALLEL = (
    *("moe_ep_rank", "moe_ep_size", "moe_dp_rank", "moe_dp_size", "attn_dp_size", "attn_cp_size"),
    *("moe_dense_tp_size", "enable_dp_lm_head"),
)
"""How the ranks divide the weights, beside those of tensor and pipeline parallelism."""

EXEC = (
    *("moe.moe_a2a_backend", "moe.moe_runner_backend", "moe.ep_num_redundant_experts", "moe.init_expert_location"),
    *("moe.disable_shared_experts_fusion", "features.enable_fp32_lm_head"),
    *("kernel.fp8_gemm_runner_backend", "kernel.fp4_gemm_runner_backend"),
)
"""What layers make of their weights."""


def ranks() -> dict[str, tuple[int, int]]:
    """Returns this worker's rank and the size of each group of ranks whose weights or GPUs differ.

    Replicas of data parallelism are on GPUs of their own. With attention in data parallel they are ranks of `tp`.
    """
    parallel = get_parallel()
    return {
        "tp": (parallel.tp_rank, parallel.tp_size),
        "pp": (parallel.pp_rank, parallel.pp_size),
        "dp": (parallel.dp_rank or 0, parallel.dp_size),
    }


def fields(model_config: Any, load_format: str) -> dict[str, Any]:
    """Returns the fields by their names. They must be read before the model is loaded."""
    return {
        **common(model_config.model_path, model_config.revision, load_format, model_config.hf_config),
        "sglang": __version__,
        "torch": torch.__version__,
        "dtype": str(model_config.dtype),
        "quantization": model_config.quantization,
        "model_impl": get_model().model_impl,
        "kv_cache_dtype": get_model().kv_cache_dtype,
        **{key: getattr(get_parallel(), key) for key in PARALLEL},
        **{key.rpartition(".")[2]: attrgetter(key)(get_exec()) for key in EXEC},
    }
