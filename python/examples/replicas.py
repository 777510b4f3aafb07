"""A trainer on one host commits versions of a policy. Other hosts copy the newest one again and again, and serve it.

    python replicas.py                 # four hosts and the trainer's, all on this machine
    python replicas.py --hosts 2 --steps 100

On machines of their own, each with a bridge (docs/hosts.md):

    python replicas.py train --steps 1000     # first, on the one with `--host trainer --export 'examples/*'`
    python replicas.py serve                  # on each of the others

What is committed while a host copies is left out there. A version appears on a host in one step, when all of it has
arrived and is verified, so no request sees a part of one, and the version before stays readable for those that use it.
"""

import argparse
import sys
import time
from contextlib import ExitStack

import numpy as np
from local_hosts import host, output

import partywall as pw

POLICY = "examples/policy"
LAYERS = 8
SIZE = 1 << 18
"""Elements of each layer."""


def train(steps: int) -> None:
    """Commits a version after each step. The last one stays when the trainer has ended."""
    with pw.connect() as domain:
        policy = {f"layers.{layer}": np.zeros(SIZE, "float32") for layer in range(LAYERS)}
        for step in range(1, steps + 1):
            time.sleep(0.05)  # Stands in for a step of training.
            for layer in policy.values():
                layer.fill(step)
            last = {"last": "yes"} if step == steps else {}
            domain.put(POLICY, policy, kept=True, metadata={"step": str(step), **last})
            if step == 1:
                print("there is a policy to serve", flush=True)
        print(f"{steps} versions of {policy['layers.0'].nbytes * LAYERS >> 20} MiB committed", flush=True)


def serve() -> None:
    """Follows the trainer's versions until the last one."""
    origin = f"//trainer/{POLICY}"
    with pw.connect() as domain, domain.follow(origin, device="host") as replicas:
        steps, mixed = [], 0
        for policy in replicas:
            with policy:
                step = int(policy.metadata["step"])
                steps.append(step)
                mixed += any(bool((np.asarray(layer) != step).any()) for layer in policy.values())
                if "last" in policy.metadata:
                    break
        said = f"{len(steps)} versions came, the last one of step {steps[-1]}; {mixed} were of more than one step"
        print(said, flush=True)


def play(hosts: int, steps: int) -> None:
    """Plays all hosts on this machine."""
    with ExitStack() as stack:
        trainer = stack.enter_context(host("trainer", "--export", "examples/*"))
        servers = [
            stack.enter_context(host(f"server{number}", "--connect", trainer.endpoint)) for number in range(hosts)
        ]
        training = trainer.run(sys.executable, __file__, "train", "--steps", str(steps))
        assert training.stdout is not None
        print(training.stdout.readline(), end="")
        programs = [server.run(sys.executable, __file__, "serve") for server in servers]
        print(output(training), end="")
        for number, program in enumerate(programs):
            print(f"//server{number}: {output(program)}", end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["train", "serve"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    match given.role:
        case "train":
            train(given.steps)
        case "serve":
            serve()
        case None:
            play(given.hosts, given.steps)


if __name__ == "__main__":
    main()
