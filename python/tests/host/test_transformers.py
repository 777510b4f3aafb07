# Holds 264.
"""Models of transformers from shared memory, on the CPU."""

import gc
import logging
import threading

import pytest

import partywall as pw

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
shared = pytest.importorskip("partywall.torch")
from_name = pytest.importorskip("partywall.integrations.transformers").from_name

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda **more: (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **more)),
    "mixtral": lambda **more: (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **more),
    ),
}
TOKENS = torch.arange(12).reshape(1, 12)


def made(kind, dtype=torch.float32, **more):
    torch.manual_seed(0)
    cls, config = MODELS[kind](**more)
    return cls._from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("mixtral", False)])
def test_from_name_is_the_shared_model_in_place(domain, kind, tied, dtype):
    model = made(kind, dtype, tie_word_embeddings=tied)
    shared.share_module(model, "llm", domain=domain)
    cls, config = MODELS[kind](tie_word_embeddings=tied)
    loaded = from_name(cls, config, "llm", domain=domain)
    segment = shared.handle(loaded).segment
    parameters = dict(loaded.named_parameters(remove_duplicate=False))
    assert len(parameters) > 10
    assert all(parameter.data_ptr() == segment[name].data_ptr for name, parameter in parameters.items())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert {name: buffer.dtype for name, buffer in loaded.named_buffers()} == {
        name: buffer.dtype for name, buffer in model.named_buffers()
    }
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_load_module_takes_a_model_on_meta(domain, kind):
    model = made(kind, tie_word_embeddings=True)
    shared.share_module(model, "llm", move=True, domain=domain)
    cls, config = MODELS[kind](tie_word_embeddings=True)
    with torch.device("meta"):
        loaded = cls(config)
    shared.load_module(loaded.eval(), "llm", domain=domain)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.generate(TOKENS, max_new_tokens=4, do_sample=False).tolist() == model.generate(
        TOKENS, max_new_tokens=4, do_sample=False
    ).tolist()


def test_models_may_be_imported_before(domain, child, tmp_path):
    """As by a parent of warm spares, which preloads the class."""
    model = made("llama")
    model.config.save_pretrained(tmp_path)
    with shared.share_module(model, "llm", domain=domain):
        loads = child(
            """
            import transformers.models.llama.modeling_llama as llama
            from partywall.integrations.transformers import from_name
            from transformers import LlamaConfig
            config = LlamaConfig.from_pretrained(sys.argv[2])
            with pw.connect(socket=sys.argv[1]) as d:
                model = from_name(llama.LlamaForCausalLM, config, "llm", domain=d)
                say(type(model).__name__)
            """,
            domain.socket,
            str(tmp_path),
        )
        assert loads.says() == "LlamaForCausalLM"


def test_auto_classes_choose_the_class(domain):
    shared.share_module(made("llama"), "llm", domain=domain)
    _, config = MODELS["llama"]()
    loaded = from_name(transformers.AutoModelForCausalLM, config, "llm", domain=domain)
    assert type(loaded) is transformers.LlamaForCausalLM


def test_another_configuration_is_named(domain):
    shared.share_module(made("llama"), "llm", domain=domain)
    cls, config = MODELS["llama"](rms_norm_eps=1e-3)
    with pytest.raises(shared.ModuleMismatch, match="config.rms_norm_eps: 1e-06 in the segment, 0.001 in the model"):
        from_name(cls, config, "llm", domain=domain)
    # The lease ended with the failure.
    assert pw._native.flush(60)


@pytest.fixture
def never_loaded(monkeypatch):
    """Fails a test in which `from_pretrained` is called."""

    def fail(*_, **__):
        raise AssertionError("from_pretrained was called")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", fail)


# Holds 260.
def test_all_differences_are_named_before_anything_is_loaded(domain, never_loaded):
    shared.share_module(made("llama", torch.bfloat16), "llm", kept=True, domain=domain).close()
    sizes = SIZES | {"intermediate_size": 40, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, dtype="float32", attention_bias=True)
    with pytest.raises(shared.ModuleMismatch) as refused:
        from_name(transformers.LlamaForCausalLM, config, "llm", domain=domain)
    for difference in (
        "config.intermediate_size: 48 in the segment, 40 in the model",
        "model.layers.0.mlp.up_proj.weight: shape [48, 32] in the segment, [40, 32] in the model",
        "model.norm.weight: dtype bfloat16 in the segment, float32 in the model",
        "model.layers.2.self_attn.q_proj.weight: unexpected, the segment has no such tensor",
        "model.layers.0.self_attn.q_proj.bias: unexpected, the segment has no such tensor",
    ):
        assert difference in refused.value.differences
    assert config.dtype == torch.float32
    # The exception knows the frames, and these the tensors.
    del refused
    gc.collect()
    assert pw._native.flush(60)
    assert domain.holders("llm") == {1: []}


# Holds 260.
@pytest.mark.parametrize("options", [{"dtype": torch.float16}, {"dtype": "float16"}, {"torch_dtype": torch.float16}])
def test_dtype_of_the_options_is_compared(domain, never_loaded, options):
    shared.share_module(made("llama"), "llm", domain=domain)
    cls, config = MODELS["llama"]()
    with pytest.raises(shared.ModuleMismatch, match=r"norm.weight: dtype float32 in the segment, float16 in the model"):
        from_name(cls, config, "llm", domain=domain, **options)


# Holds 260.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_that_loading_keeps_in_another_dtype_are_no_difference(domain, dtype):
    class Kept(transformers.LlamaForCausalLM):
        _keep_in_fp32_modules = ["input_layernorm"]
        _keep_in_fp32_modules_strict = ["model.norm", "layers.*.mlp"]

    config = transformers.LlamaConfig(**SIZES, dtype=dtype)
    with torch.no_grad():
        state = {name: tensor.clone() for name, tensor in made("llama").state_dict().items()}
    model = Kept.from_pretrained(None, config=config, state_dict=state)
    assert model.model.norm.weight.dtype == model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    shared.share_module(model, "llm", domain=domain)
    loaded = from_name(Kept, config, "llm", domain=domain)
    assert {name: p.dtype for name, p in loaded.named_parameters()} == {
        name: p.dtype for name, p in model.named_parameters()
    }


# Holds 260.
def test_options_of_the_class_are_part_of_what_is_compared(domain):
    sizes = {key: SIZES[key] for key in ("hidden_size", "vocab_size", "num_attention_heads")}
    config = transformers.BertConfig(**sizes)
    model = transformers.BertModel(config, add_pooling_layer=False)
    shared.share_module(model, "bert", domain=domain)
    loaded = from_name(transformers.BertModel, config, "bert", domain=domain, add_pooling_layer=False)
    assert loaded.pooler is None and shared.handle(loaded).version == 1
    with pytest.raises(shared.ModuleMismatch, match="pooler.dense.weight: unexpected"):
        from_name(transformers.BertModel, config, "bert", domain=domain)


def test_configuration_is_an_object(domain):
    with pytest.raises(TypeError, match=r"not 'llama': use AutoConfig.from_pretrained\(\)"):
        from_name(transformers.LlamaForCausalLM, "llama", "llm", domain=domain)


def test_wrong_arguments_are_named_before_anything_is_opened(domain):
    config = transformers.LlamaConfig(**SIZES)
    for cls in "LlamaForCausalLM", torch.nn.Linear:
        with pytest.raises(TypeError, match="cls is a class of models of transformers"):
            from_name(cls, config, "llama", domain=domain)
    for option in "state_dict", "pretrained_model_name_or_path":
        with pytest.raises(TypeError, match=f"takes no {option}="):
            from_name(transformers.LlamaForCausalLM, config, "llama", domain=domain, **{option: None})


def test_the_warm_up_is_replaced_for_the_call_and_the_thread(domain, caplog, monkeypatch):
    calls = []
    modeling = transformers.modeling_utils
    monkeypatch.setattr(modeling, "caching_allocator_warmup", lambda *_: calls.append(threading.get_ident()))
    before = modeling.caching_allocator_warmup
    shared.share_module(made("llama"), "llm", domain=domain)

    def probe(*_, **__):
        assert modeling.caching_allocator_warmup is not before
        modeling.caching_allocator_warmup(None, {}, None)
        other = threading.Thread(target=modeling.caching_allocator_warmup, args=(None, {}, None))
        other.start()
        other.join()
        raise RuntimeError("injected")

    cls, config = MODELS["llama"]()
    with caplog.at_level(logging.INFO), monkeypatch.context() as patched:
        patched.setattr(cls, "from_pretrained", probe)
        with pytest.raises(RuntimeError, match="injected"):
            from_name(cls, config, "llm", domain=domain)
    assert modeling.caching_allocator_warmup is before
    # Only that of the other thread.
    assert len(calls) == 1 and calls[0] != threading.get_ident()
    assert "caching_allocator_warmup" in caplog.text

    monkeypatch.delattr(modeling, "caching_allocator_warmup")
    with pytest.warns(RuntimeWarning, match="caching_allocator_warmup"):
        model = from_name(cls, config, "llm", domain=domain)
    assert not hasattr(modeling, "caching_allocator_warmup") and shared.handle(model).version == 1
