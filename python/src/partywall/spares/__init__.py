"""Warm spares: processes that have imported everything and wait for the death of a worker, to continue in its place.

    from partywall import spares

    def main(name):
        with pw.connect() as d:
            model = ...                   # connect, use CUDA and map the weights here
            serve(model)

    if __name__ == "__main__":
        spares.run(main, "llm/policy", preload=["torch", "transformers"])

or, with `main` in `server.py`, from a shell:

    python -m partywall.spares --preload torch,transformers server.py:main llm/policy

Imports take seconds, and mapping a model takes milliseconds. The parent imports the modules once, never uses CUDA, and
forks: a fork has the modules at once, and CUDA works in it. `main` runs in a worker; `spares` further forks wait. If a
worker dies, a spare calls `main` immediately, and a new spare is forked.
"""

from partywall.spares._parent import run

__all__ = ["run"]
