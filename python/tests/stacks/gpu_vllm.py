"""Runs the real vLLM on one GPU with its weights in shared memory, and writes down what that changes.

    python python/tests/stacks/gpu_vllm.py --report FILE.md [--budget SECONDS] [--only STEP,…]

Needs vLLM 0.32, transformers and a torch with CUDA. The model is a Llama of 8 GB with random weights. Engines are forks
of this process, which has imported vLLM and does not use CUDA; the steps `process` and `spares` start processes of
their own. A step that fails is written down as failed, and the next one begins.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine is one process, so that one SIGKILL ends all of it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
PROMPTS = [[3, 5, 7, 11], [1], list(range(2, 66)), [(i * 37) % 113 for i in range(150)]]
REQUESTS = 32
"""Requests that an engine works on at a time when its rate is measured: 128 tokens in, 64 out."""
KILLS = 10
HIDDEN, LAYERS, INNER, VOCABULARY, KEYS = 4096, 32, 6144, 32000, 1024


def make_model(folder: Path) -> None:
    """Writes a checkpoint in the shape of an 8B model, with half of its MLP and of its vocabulary."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder.mkdir(parents=True)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    torch.manual_seed(7)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        shapes |= {f"{attention}{which}_proj": (HIDDEN, HIDDEN) for which in "qo"}
        shapes |= {f"{attention}{which}_proj": (KEYS, HIDDEN) for which in "kv"}
        shapes |= {f"{mlp}{which}_proj": (INNER, HIDDEN) for which in ("gate", "up")}
        shapes |= {f"{mlp}down_proj": (HIDDEN, INNER)}
    tensors = {
        f"{name}.weight": (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu()
        for name, shape in shapes.items()
    }
    norms = ["model.norm"]
    for layer in range(LAYERS):
        norms += [f"model.layers.{layer}.{which}_layernorm" for which in ("input", "post_attention")]
    tensors |= {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def options(model: Path, share: float, **more: Any) -> dict[str, Any]:
    """The arguments of `LLM` for an engine with a share of the GPU's memory."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": REQUESTS,
        "seed": 0,
        "gpu_memory_utilization": share,
        **more,
    }


def shared(name: str = "llama", **settings: Any) -> dict[str, Any]:
    return {"load_format": "partywall", "model_loader_extra_config": {"name": name, **settings}}


def first_token(llm: Any) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": PROMPTS[0]}], sampling, use_tqdm=False)


def serve(arguments: str) -> None:
    """An engine that answers once and then serves nobody: what `partywall.spares` calls, and a process of its own."""
    from vllm import LLM

    began = time.time()
    llm = LLM(**json.loads(arguments))
    ready = time.time()
    first_token(llm)
    line = {"pid": os.getpid(), "began": began, "ready": ready, "first": time.time()}
    print("@@ " + json.dumps(line), flush=True)
    while True:
        time.sleep(60)


class Engine:
    """An engine in a fork of this process, which answers one command at a time."""

    def __init__(self, log: Path, arguments: dict[str, Any], **environment: str) -> None:
        told, answers = os.pipe(), os.pipe()
        self.log = log
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with log.open("ab") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                os.environ.update(environment)
                self._run(arguments, os.fdopen(told[0]), os.fdopen(answers[1], "w"))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        os.close(told[0])
        os.close(answers[1])
        self._told, self._answers = os.fdopen(told[1], "w"), os.fdopen(answers[0])

    def ready(self) -> dict[str, Any]:
        """Waits for the engine. Returns its tokens, its blocks of keys and values, and how long it took."""
        return self._answer()

    def ask(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self._answer()

    def tell(self, command: str, *arguments: Any) -> None:
        self._told.write(json.dumps([command, *arguments]) + "\n")
        self._told.flush()

    def answer(self) -> Any:
        return self._answer()

    def end(self) -> None:
        """Kills the engine, as it would end at the worst moment."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._told.close()
        self._answers.close()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine has ended: {self.log.read_text(errors='replace')[-1500:]}")
        return json.loads(line)

    def _run(self, arguments: dict[str, Any], commands: Any, answers: Any) -> None:
        from vllm import LLM, SamplingParams

        began = time.time()
        llm = LLM(**arguments)

        def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
            sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            return [list(output.outputs[0].token_ids) for output in llm.generate(given, sampling, use_tqdm=False)]

        def rate(seconds: float) -> float:
            done, start = 0, time.time()
            while time.time() - start < seconds:
                # Other prompts each time, so that the prefix cache does not answer.
                generate([[(done * 131 + at * 7 + i * i) % 30000 for i in range(128)] for at in range(REQUESTS)], 64)
                done += REQUESTS
            return done / (time.time() - start)

        doing = {
            "tokens": lambda: generate(PROMPTS, 32),
            "rate": rate,
            "sleep": lambda level: llm.sleep(level=level),
            "wake": lambda: llm.wake_up(),
        }
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        found: Any = {"seconds": time.time() - began, "blocks": blocks, "tokens": generate(PROMPTS, 32)}
        while True:
            answers.write(json.dumps(found) + "\n")
            answers.flush()
            command, *given = json.loads(commands.readline())
            found = doing[command](*given)


class Run:
    """What the steps share, and what they have found."""

    def __init__(self, folder: Path, budget: float) -> None:
        self.folder, self.until = folder, time.time() + budget
        self.model = folder / "model"
        self.rows: list[tuple[str, str]] = []
        self.wanted: Any = None

    def note(self, what: str, found: str) -> None:
        self.rows.append((what, found))
        print(f"[{self.until - time.time():6.0f} s left] {what}: {found}", flush=True)

    @contextlib.contextmanager
    def engines(self, *arguments: dict[str, Any], **environment: str) -> Iterator[list[Engine]]:
        """Starts engines at the same moment, and kills them at the end."""
        started = [Engine(self.folder / "engines.log", each, **environment) for each in arguments]
        try:
            yield started
        finally:
            for engine in started:
                engine.end()

    def same(self, tokens: Any) -> str:
        return "its tokens are the same" if tokens == self.wanted else "ITS TOKENS DIFFER"


def step_alone(run: Run) -> None:
    with run.engines(options(run.model, 0.25)) as [engine]:
        found = engine.ready()
    run.wanted = found["tokens"]
    run.note("default loader, forked", f"ready {found['seconds']:.1f} s after the fork, {found['blocks']} blocks")
    for what in "builds the weights", "takes them", "takes them, the builder dead":
        with run.engines(options(run.model, 0.25, **shared())) as [engine]:
            found = engine.ready()
        run.note(
            f"partywall, forked, {what}",
            f"ready {found['seconds']:.1f} s after the fork, {found['blocks']} blocks; {run.same(found['tokens'])}",
        )


def step_together(run: Run) -> None:
    """Two engines that start at the same moment: how many blocks each has, which says what it has counted."""
    for what, more in ("default loader", {}), ("partywall", shared()):
        with run.engines(*[options(run.model, 0.3, **more)] * 2) as pair:
            found = []
            for engine in pair:
                try:
                    found.append(f"{engine.ready()['blocks']} blocks")
                except RuntimeError as error:
                    found.append(f"FAILED ({str(error).splitlines()[-1][:120]})")
        run.note(f"two at the same moment, {what}", ", ".join(found))


def step_replicas(run: Run) -> None:
    with mps(run.folder) as under_mps:
        for what, count, more, environment in [
            ("one engine", 1, shared(), {}),
            ("two, one copy of the weights, time-sliced", 2, shared(), {}),
            ("two, one copy of the weights, MPS", 2, shared(), under_mps),
            ("two, a copy each, MPS", 2, {}, under_mps),
        ]:
            # MPS gives the memory of a killed client back a little later.
            time.sleep(1.0)
            before = used()
            started = []
            try:
                # One after the other, because engines with a copy of their own take no turns.
                for _ in range(count):
                    engine = Engine(run.folder / "engines.log", options(run.model, 0.2, **more), **environment)
                    started.append(engine)
                    assert engine.ready()["tokens"] == run.wanted
                memory = used() - before
                for engine in started:
                    engine.tell("rate", 8.0)
                rates = [engine.answer() for engine in started]
            finally:
                for engine in started:
                    engine.end()
            run.note(what, f"{sum(rates):.1f} requests a second, {memory / 1e9:.1f} GB of the GPU more than before")


def step_sleep(run: Run) -> None:
    with run.engines(options(run.model, 0.25, enable_sleep_mode=True, **shared(mode="shared"))) as [engine]:
        found = engine.ready()
        awake = used()
        said = [run.same(found["tokens"])]
        for level in 1, 2:
            engine.ask("sleep", level)
            asleep = used()
            engine.ask("wake")
            said.append(f"level {level} gives back {(awake - asleep) / 1e9:.1f} GB; {run.same(engine.ask('tokens'))}")
    run.note("sleep with shared weights", "; ".join(said))


def step_process(run: Run) -> None:
    """A new process for each engine, with the checkpoint in the page cache."""
    for what, more in ("default loader", {}), ("partywall", shared()):
        began = time.time()
        command = [sys.executable, __file__, "--serve", json.dumps(options(run.model, 0.25, **more))]
        with process(run.folder / "process.log", command) as lines:
            found = next(lines)
        run.note(
            f"{what}, a new process",
            f"first token after {found['first'] - began:.1f} s, of it {found['began'] - began:.1f} s to import vLLM and "
            f"{found['ready'] - found['began']:.1f} s `LLM()`",
        )


def step_spares(run: Run) -> None:
    killed(run, "SIGKILL of an engine, a spare takes over", KILLS)


def step_compiled(run: Run) -> None:
    killed(run, "the same, with torch.compile and CUDA graphs", 3, enforce_eager=False)


def killed(run: Run, what: str, kills: int, **more: Any) -> None:
    """Kills the engine that serves, again and again, and measures until the next one's first token."""
    arguments = json.dumps(options(run.model, 0.25, **shared(), **more))
    command = [sys.executable, "-m", "partywall.spares", "--preload", "vllm.entrypoints.llm", f"{__file__}:serve", arguments]
    began, times = time.time(), []
    with process(run.folder / "spares.log", command) as lines:
        found = next(lines)
        run.note(f"{what}: the first", f"first token after {found['first'] - began:.1f} s")
        for _ in range(kills):
            # As long as a spare needs to be forked.
            time.sleep(1.0)
            at = time.time()
            os.kill(found["pid"], signal.SIGKILL)
            found = next(lines)
            times.append(found["first"] - at)
    times.sort()
    run.note(
        what, f"first token after {statistics.median(times):.2f} s (median of {kills}; {times[0]:.2f} to {times[-1]:.2f})"
    )


@contextlib.contextmanager
def process(log: Path, command: list[str]) -> Iterator[Iterator[dict[str, Any]]]:
    """Starts a program that prints what `serve` does. Its process group ends with the block."""
    with log.open("ab") as errors:
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", start_new_session=True
        )

    def lines() -> Iterator[dict[str, Any]]:
        assert started.stdout is not None
        for line in started.stdout:
            if line.startswith("@@ "):
                yield json.loads(line[3:])
        raise RuntimeError(f"it has ended: {log.read_text(errors='replace')[-1500:]}")

    try:
        yield lines()
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Runs MPS in a folder of its own. Gives the environment of its clients."""
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for path in pipes.values():
        Path(path).mkdir()
    control = {"env": os.environ | pipes, "check": True}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], **control)  # type: ignore[call-overload]
    try:
        yield pipes
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", **control)  # type: ignore[call-overload]


def used() -> int:
    """Returns the used bytes of the GPU, without CUDA in this process."""
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, check=True
    )
    return int(asked.stdout.split()[0]) << 20


def machine() -> str:
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm", "torch", "transformers"))
    return f"{time.strftime('%Y-%m-%d')}, {asked.stdout.strip().splitlines()[0]}, {os.cpu_count()} processors; {versions}"


STEPS: dict[str, Callable[[Run], None]] = {
    "alone": step_alone,
    "together": step_together,
    "replicas": step_replicas,
    "sleep": step_sleep,
    "spares": step_spares,
    "process": step_process,
    "compiled": step_compiled,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path)
    parser.add_argument("--budget", type=float, default=420)
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--serve")
    parser.add_argument("--make", type=Path)
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # What was found is written down also if there is a time limit from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.serve:
        serve(given.serve)
    if given.make:
        make_model(given.make)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run = Run(Path(folder), given.budget)
        os.environ["PARTYWALL_SOCKET"] = f"{folder}/broker.sock"
        # CUDA must not be used in this process, which engines are forked from.
        making = subprocess.Popen([sys.executable, __file__, "--make", str(run.model)])
        from vllm import LLM  # noqa: F401

        assert making.wait() == 0
        try:
            for name in given.only.split(","):
                if time.time() > run.until:
                    run.note(name, "LEFT OUT: no time")
                    continue
                try:
                    STEPS[name](run)
                except Exception as error:
                    run.note(name, f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[-400:]}")
        finally:
            if given.report:
                table = "".join(f"| {what} | {found} |\n" for what, found in run.rows)
                given.report.write_text(f"{machine()}\n\n| case | found |\n|---|---|\n{table}")
                for log in Path(folder).glob("*.log"):
                    given.report.with_name(log.name).write_bytes(log.read_bytes()[-200_000:])
            subprocess.run(["partywall", "stop", "--force"], check=False)


if __name__ == "__main__":
    main()
