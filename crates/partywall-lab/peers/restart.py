"""A model of transformers whose worker is killed: milliseconds until the next worker has done its first forward.

    restart.py make SOCKET NAME LAYERS      random weights on the first GPU, as NAME, for as long as the program runs
    restart.py spares SOCKET NAME LAYERS    the next worker is a warm spare
    restart.py respawn SOCKET NAME LAYERS   the next worker is a new process

With 32 layers the model has the shape of Llama 3 8B. Both workers map the same weights; the difference is the process.
`restart.py work` is what the program starts.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import partywall as pw

PRELOAD = "torch,transformers.models.llama.modeling_llama,partywall.integrations.transformers"
TOKENS = 16


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "work":
        return work(*arguments)
    import peer

    if what == "make":
        with pw.connect(socket=arguments[0], start=False) as domain:
            handle = make(domain, *arguments[1:])
            peer.serve(lambda: 0)
            handle.close()
    else:
        restart(what, arguments, peer.serve)


def config(layers: int) -> Any:
    from transformers import LlamaConfig

    if layers == 0:
        # A toy for the CPU.
        small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        return LlamaConfig(vocab_size=256, **small)
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )


def make(domain: pw.Domain, name: str, layers: str) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    from partywall.torch import share_module

    with torch.device("cuda" if int(layers) else "cpu"):
        model = LlamaForCausalLM._from_config(config(int(layers)), dtype=torch.bfloat16)
    return share_module(model, name, move=True, domain=domain, kept=True)


def work(socket: str, name: str, layers: str, fd: str) -> None:
    """Does one forward, says so, and goes on until it is killed, which is thus inside a forward."""
    import torch
    from transformers import LlamaForCausalLM

    from partywall.integrations.transformers import from_name

    with pw.connect(socket=socket, start=False) as domain, torch.inference_mode():
        model = from_name(LlamaForCausalLM, config(int(layers)), name, domain=domain)
        tokens = torch.arange(TOKENS, device=model.device)[None]
        first = model(tokens).logits[0, -1].argmax().item()
        os.write(int(fd), f"{os.getpid()} {first}\n".encode())
        while True:
            model(tokens)


def restart(how: str, arguments: list[str], serve: Callable[[Callable[[], float]], None]) -> None:
    import time

    reader, writer = os.pipe()
    said = os.fdopen(reader)
    here = os.path.abspath(__file__)
    command = {
        "spares": ["-m", "partywall.spares", "--preload", PRELOAD, f"{here}:work"],
        "respawn": [here, "work"],
    }[how]

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, *command, *arguments, str(writer)], pass_fds=[writer])

    started = start()
    pid, token = said.readline().split()

    def sample() -> float:
        nonlocal started, pid
        begin = time.perf_counter()
        os.kill(int(pid), signal.SIGKILL)
        if how == "respawn":
            started.wait()
            started = start()
        pid, found = said.readline().split()
        elapsed = time.perf_counter() - begin
        if found != token:
            raise ValueError(f"the worker computed {found}, and the first one {token}")
        # The next spare has time to be forked, as between two deaths of a server.
        time.sleep(1)
        return elapsed * 1e3

    try:
        serve(sample)
    finally:
        started.terminate()
        started.wait()


if __name__ == "__main__":
    main()
