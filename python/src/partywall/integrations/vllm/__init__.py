"""vLLM: weights in shared memory, and new weights by name.

vLLM finds `register` by itself, through the entry-point group `vllm.general_plugins`. With the load format `partywall`
the first engine loads the weights, and all others map them:

    vllm serve MODEL --load-format partywall --model-loader-extra-config '{"name": "llama"}'

The weight-transfer backend `partywall` brings the weights of a trainer into a running engine. The trainer commits a
version, and the engine is told its name:

    d.put("policy", dict(model.named_parameters()))                 # trainer

    llm = LLM(..., weight_transfer_config=WeightTransferConfig(backend="partywall"))
    llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    llm.start_weight_update()
    llm.update_weights(WeightTransferUpdateRequest(update_info={"name": "policy@2"}))
    llm.finish_weight_update()
    llm.reset_prefix_cache()                                    # else vLLM goes on with blocks of the old weights

The same works through the HTTP routes, between `/pause` and `/resume`: all that travels is JSON, and nothing is
unpickled.
"""

BACKEND = "partywall"
"""The name of the load format and of the weight-transfer backend."""

_registered = False


def register() -> None:
    """Registers the loader and the weight-transfer engine. vLLM calls this in each of its processes, perhaps several
    times.

    The engine is imported when vLLM first creates one, and torch when a loader first loads. Raises `ValueError` if
    another plug-in has taken the name of the weight-transfer backend.
    """
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader

    from partywall.integrations.vllm.loader import PartywallModelLoader

    module = f"{__name__}.weight_transfer"
    WeightTransferEngineFactory.register_engine(BACKEND, module, "PartywallWeightTransferEngine")
    register_model_loader(BACKEND)(PartywallModelLoader)
    _registered = True
