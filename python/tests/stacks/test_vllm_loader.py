# Holds 34, 293, 294.
"""The load format `partywall` in vLLM, with a small Llama whose embeddings are tied.

On a CPU vLLM repacks the weights of linear layers into memory of its own, unless it does without oneDNN: then it uses
them where they are, as on a GPU, and engines can map them.
"""

import contextlib
import json
import os
import signal

import pytest

from .. import conftest
from .conftest import WATCHDOG
from .test_vllm import MODELS, VLLM, answer

SERVER = """
import json
import os
os.setsid()
import transformers
import vllm.model_executor.models.llama
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
for line in sys.stdin:
    code, arguments, socket = json.loads(line)
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["PARTYWALL_SOCKET"] = socket
            sys.argv[1:] = arguments
            exec(code, globals())
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    say("ENDED")
"""
"""Imports vLLM once, which takes longer than all else, and runs code in forks."""

IN_PLACE = """
import vllm._custom_ops
vllm._custom_ops._supports_onednn = False
"""

ENGINE = """
try:
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=2, **json.loads(sys.argv[1]))
    sampling = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": [3, 5, 7, 11]}], sampling, use_tqdm=False)
    say("TOKENS", json.dumps(list(output.outputs[0].token_ids)))
except Exception as error:
    say("REFUSED", type(error).__name__, str(error).replace(chr(10), " "))
"""

LOADER = """
import hashlib
import tempfile
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
torch.set_num_threads(1)

def configure(**extra):
    arguments = EngineArgs(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        load_format="partywall",
        model_loader_extra_config={"name": "llama", "mode": "shared"} | extra,
    )
    return arguments.create_engine_config()

def initialize(config):
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
        initialize_model_parallel(1, 1)

def load(config):
    with set_current_vllm_config(config):
        return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)

def digest(model):
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()
"""


@pytest.fixture(scope="module")
def server():
    """The process that has imported vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "WATCHDOG", WATCHDOG)
        started = conftest.Child(SERVER, **VLLM)
        yield started
        # With what its forks have started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.kill()


@pytest.fixture
def run(server, socket, domain):
    """Runs code with arguments in a fork. Returns the rest of the lines that begin with one of the words."""

    def run(code, arguments, *words):
        server.tell(json.dumps([code, [str(argument) for argument in arguments], socket]))
        said = []
        while (line := answer(server, *words, "ENDED"))[0] != "ENDED":
            said.append(line)
        return said

    return run


@pytest.fixture
def model(run, tmp_path):
    """The folder of a model whose embeddings are tied."""
    code = MODELS.replace("tie_word_embeddings=False", "tie_word_embeddings=True")
    assert len(run(code, [tmp_path], "saved")) == 2
    return tmp_path / "v1"


@pytest.fixture
def engine(run):
    """Starts an engine, and returns its tokens or why it was refused."""

    def start(model, in_place=False, **arguments):
        arguments = {"model": str(model), "dtype": "float32"} | arguments
        [said] = run((IN_PLACE if in_place else "") + ENGINE, [json.dumps(arguments)], "TOKENS", "REFUSED")
        return said

    return start


def partywall(**settings):
    return {"load_format": "partywall", "model_loader_extra_config": {"name": "llama"} | settings}


def forget_checkpoint(model):
    """Deletes the weights, and leaves the configuration."""
    for file in model.glob("*.safetensors"):
        file.unlink()


@pytest.mark.case("C1")
@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_engines_give_the_tokens_of_the_default_loader(engine, model, domain, mode):
    in_place = mode == "shared"
    expected = engine(model, in_place)
    assert expected[0] == "TOKENS"
    assert engine(model, in_place, **partywall(mode=mode)) == expected
    forget_checkpoint(model)
    for _ in range(2):
        assert engine(model, in_place, **partywall(mode=mode)) == expected
    with domain.open("llama/tp0of1") as segment:
        assert segment.metadata["partywall.layout"] == ("processed" if mode == "shared" else "loaded")


@pytest.mark.case("C2")
def test_another_configuration_is_refused_and_each_difference_named(engine, model, domain):
    # On a CPU the weights of linear layers are nowhere else once vLLM has repacked them.
    refused, why = engine(model, **partywall(mode="shared"))
    assert refused == "REFUSED" and "UnsupportedModel" in why and "repacked" in why
    assert domain.ls() == []
    assert engine(model, **partywall())[0] == "TOKENS"
    refused, why = engine(model, **partywall(), dtype="bfloat16")
    assert refused == "REFUSED" and "ModuleMismatch" in why
    assert "dtype: 'torch.float32' in the segment, 'torch.bfloat16' in the engine" in why
    refused, why = engine(model, **partywall(mode="shared"))
    assert refused == "REFUSED" and "have to be copied" in why


ELECTION = (
    LOADER
    + IN_PLACE
    + """
@register_model_loader("announcing")
class Announcing(DefaultModelLoader):
    def __init__(self, load_config):
        load_config.load_format = "auto"
        super().__init__(load_config)

    def load_weights(self, model, model_config):
        super().load_weights(model, model_config)
        os.write(building, os.getpid().to_bytes(4, "little"))
        os.read(go, 1)

def start():
    pid = os.fork()
    if pid == 0:
        try:
            config = configure(load_format="announcing")
            initialize(config)
            os.write(done, digest(load(config)).encode())
        finally:
            os._exit(0)
    return pid

begun, building = os.pipe()
ready, done = os.pipe()
go, start_now = os.pipe()
pids = {start() for _ in range(8)}
builders = []
for _ in range(3):
    builders.append(int.from_bytes(os.read(begun, 4), "little"))
    if len(builders) < 3:
        os.kill(builders[-1], signal.SIGKILL)
os.write(start_now, b"g")
for pid in pids:
    os.waitpid(pid, 0)
digests = os.read(ready, 8 * 64).decode()
os.close(building)
each = [digests[i:i + 64] for i in range(0, len(digests), 64)]
say("RESULT", json.dumps([len(set(builders) & pids), len(each), len(set(each))]))
"""
)


@pytest.mark.case("C3")
def test_one_of_eight_engines_builds_and_the_next_one_if_it_is_killed(run, model, domain):
    assert run(ELECTION, [model], "RESULT") == [("RESULT", "[3, 6, 1]")]
    assert [name.name for name in domain.ls()] == ["llama/tp0of1"]


@pytest.mark.case("C4")
def test_mapped_memory_is_subtracted_from_the_budget(run, model, domain):
    code = """
from types import SimpleNamespace
from vllm.v1.worker.utils import request_memory
def external(**extra):
    config = configure(**extra)
    return get_model_loader(config.load_config).get_external_weight_memory(config)
config = configure()
initialize(config)
before = external()
model = load(config)
snapshot = SimpleNamespace(total_memory=1 << 30, free_memory=1 << 30, device_="cpu")
budget = request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=1.0), external())
say("RESULT", json.dumps([before, external(), external(mode="auto"), external(mode="copy"), (1 << 30) - budget]))
"""
    [(_, said)] = run(LOADER + IN_PLACE + code, [model], "RESULT")
    with domain.open("llama/tp0of1") as segment:
        mapped = segment.nbytes
    assert json.loads(said) == [0, mapped, mapped, 0, mapped] and mapped > 0


@pytest.mark.case("C5")
def test_buffers_may_be_filled_and_eplb_is_refused(run, model):
    code = """
config = configure()
initialize(config)
built = load(config)
mapped = load(configure())
inside = {tensor.data_ptr for tensor in pw.torch.handle(mapped).segment.values()}
for model in built, mapped:
    for name, buffer in model.named_buffers():
        buffer.fill_(2)
say("BUFFERS", json.dumps([
    sorted({name.rpartition(".")[2] for name, _ in mapped.named_buffers()}),
    all(parameter.data_ptr() in inside for parameter in mapped.parameters()),
]))
config = configure()
config.parallel_config.enable_eplb = True
try:
    load(config)
except ValueError as error:
    say("REFUSED", error)
"""
    [(_, buffers), (_, refused)] = run(LOADER + IN_PLACE + code, [model], "BUFFERS", "REFUSED")
    names, shared = json.loads(buffers)
    assert "_k_scale" in names and "cos_sin_cache" in names and shared
    assert "EPLB" in refused
