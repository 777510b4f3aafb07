# Holds 292.
"""The weight-transfer engine in vLLM, with a small Llama whose embeddings are not tied."""

import json
import os

import pytest

from .conftest import WATCHDOG

MODELS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
for version in 1, 2:
    torch.manual_seed(version)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(f"{sys.argv[1]}/v{version}")
    say("saved")
"""

ENGINE = """
import json
import os
from dataclasses import asdict
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
llm = LLM(
    model=sys.argv[1],
    skip_tokenizer_init=True,
    dtype="float32",
    enforce_eager=True,
    max_model_len=64,
    max_num_seqs=2,
    weight_transfer_config=WeightTransferConfig(backend="partywall"),
)
def tokens():
    sampling = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": list(range(3, 43))}], sampling, use_tqdm=False)
    say("TOKENS", json.dumps(list(output.outputs[0].token_ids)))
def update(info):
    llm.start_weight_update()
    try:
        llm.update_weights(WeightTransferUpdateRequest(update_info=json.loads(info)))
    except Exception as error:
        say("REFUSED", type(error).__name__, str(error).replace(chr(10), " "))
        return
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    say("UPDATED")
tokens()
for line in sys.stdin:
    what, _, rest = line.strip().partition(" ")
    if what == "init":
        llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=json.loads(rest)))
        say("INITIALISED")
    elif what == "update":
        update(rest)
    else:
        tokens()
"""

TRAINER = """
from transformers import AutoModelForCausalLM
d = pw.connect(socket=sys.argv[1])
for version in 1, 2:
    model = AutoModelForCausalLM.from_pretrained(f"{sys.argv[2]}/v{version}")
    d.put("policy", dict(model.named_parameters()))
say("COMMITTED")
told()
"""

VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def answer(child, *wanted):
    """Returns the rest of the child's next line that begins with one of the words. vLLM writes lines of its own."""
    while line := child.says():
        word, _, rest = line.partition(" ")
        if word in wanted:
            return word, rest
    pytest.fail(f"the child has ended with {child.end()}, without {wanted}")


def ask(child, line, *wanted):
    child.tell(line)
    return answer(child, *wanted)


@pytest.fixture
def models(child, tmp_path):
    """A folder with two models of one shape."""
    maker = child(MODELS, str(tmp_path), **VLLM)
    assert [answer(maker, "saved") for _ in range(2)] and maker.end() == 0
    return tmp_path


@pytest.mark.case("B1")
def test_update_gives_the_tokens_of_a_fresh_load(child, models, socket, domain):
    trainer = child(TRAINER, socket, str(models), **VLLM)
    answer(trainer, "COMMITTED")
    engine = child(ENGINE, f"{models}/v1", PARTYWALL_SOCKET=socket, **VLLM)
    before = answer(engine, "TOKENS")
    ask(engine, "init {}", "INITIALISED")
    # A name that is missing leaves the engine as it was.
    ask(engine, "init " + json.dumps({"timeout": 0}), "INITIALISED")
    missing = ask(engine, "update " + json.dumps({"name": "missing"}), "REFUSED", "UPDATED")
    assert missing[0] == "REFUSED" and "missing" in missing[1]
    assert ask(engine, "tokens", "TOKENS") == before
    assert ask(engine, "update " + json.dumps({"name": "policy@2"}), "UPDATED", "REFUSED")[0] == "UPDATED"
    after = ask(engine, "tokens", "TOKENS")
    assert engine.end() == 0
    fresh = child(ENGINE, f"{models}/v2", PARTYWALL_SOCKET=socket, **VLLM)
    assert after == answer(fresh, "TOKENS") and after != before
    with domain.open("policy") as left:
        assert trainer.end() == 0
        left.wait_withdrawn(WATCHDOG)
    assert domain.ls() == []


@pytest.mark.case("B1")
def test_engine_is_found_by_name_and_registered_once(child):
    code = """
    from vllm.plugins import load_general_plugins
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    load_general_plugins()
    from partywall.integrations import vllm
    vllm.register()
    say(WeightTransferEngineFactory._registry["partywall"]().__name__)
    try:
        WeightTransferEngineFactory.register_engine("partywall", "somewhere", "Engine")
    except ValueError as error:
        say(error)
    """
    found = child(code, **VLLM)
    answer(found, "PartywallWeightTransferEngine")
    assert "already registered" in answer(found, "Weight")[1]
    assert found.end() == 0


@pytest.mark.case("B2")
def test_update_unpickles_nothing_and_refuses_other_fields(child, models, socket, domain):
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ
    trainer = child(TRAINER, socket, str(models), **VLLM)
    answer(trainer, "COMMITTED")
    # The engine is a process of its own here, so what it is told travels as it does with a server.
    environment = VLLM | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    engine = child(ENGINE, f"{models}/v1", PARTYWALL_SOCKET=socket, **environment)
    before = answer(engine, "TOKENS")
    ask(engine, "init {}", "INITIALISED")
    for given in {"name": "policy@2", "extra": 1}, {"names": ["policy@2"]}, {"name": 2}, {}:
        refused = ask(engine, "update " + json.dumps(given), "REFUSED", "UPDATED")
        assert refused[0] == "REFUSED", given
    assert ask(engine, "tokens", "TOKENS") == before
    assert ask(engine, "update " + json.dumps({"name": "policy@2"}), "UPDATED", "REFUSED")[0] == "UPDATED"
    assert ask(engine, "tokens", "TOKENS") != before
    assert engine.end() == 0
