"""The fields that decide what weights vLLM makes of a checkpoint."""

from typing import Any

from partywall.integrations._engine.fingerprint import common


def ranks() -> dict[str, tuple[int, int]]:
    """Returns this worker's rank and the size of each group of ranks whose weights or GPUs differ."""
    from vllm.distributed import parallel_state

    groups = {
        "tp": parallel_state.get_tp_group(),
        "pp": parallel_state.get_pp_group(),
        "dp": parallel_state.get_dp_group(),
        "pcp": parallel_state.get_pcp_group(),
    }
    return {key: (group.rank_in_group, group.world_size) for key, group in groups.items()}


def fields(vllm_config: Any, model_config: Any, load_format: str) -> dict[str, Any]:
    """Returns the fields by their names. They must be read before the model is loaded."""
    from vllm.version import __version__

    parallel = vllm_config.parallel_config
    kernel = vllm_config.kernel_config
    return {
        **common(model_config.model, model_config.revision, load_format, model_config.hf_config),
        "vllm": __version__,
        "dtype": str(model_config.dtype),
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "quantization": model_config.quantization,
        "quantization_config": model_config.quantization_config,
        "linear_backend": kernel.linear_backend,
        "moe_backend": kernel.moe_backend,
        "expert_placement": parallel.expert_placement_strategy if parallel.enable_expert_parallel else None,
    }
