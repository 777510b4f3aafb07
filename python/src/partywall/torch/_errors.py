"""Exceptions about tensors and models of torch."""

from typing import Any

from partywall._errors import Error


class ModuleMismatch(Error, ValueError):
    """The model differs from the one that was shared. The model is unchanged."""

    differences: tuple[str, ...]
    """One sentence for each difference."""

    def __init__(
        self,
        what: str,
        differences: tuple[str, ...],
        advice: str = "build the model as it was when it was shared, or share it again",
    ) -> None:
        self._what = what
        self.differences = differences
        shown = [f"\n  {difference}" for difference in differences[:_SHOWN]]
        if len(differences) > _SHOWN:
            shown.append(f"\n  … and {len(differences) - _SHOWN} more: see .differences")
        super().__init__(f"{what}:{''.join(shown)}", advice, "module-mismatch")

    def __str__(self) -> str:
        return f"{self._message}\n{self.advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._what, self.differences, self.advice)


class ChecksumMismatch(Error, ValueError):
    """Tensors in shared memory are not those that were shared. The model is unchanged."""


class TensorInUse(Error, RuntimeError):
    """A tensor of the model cannot be replaced, because other objects use its memory. The model is unchanged."""


class Expired(Error, LookupError):
    """A tensor that was sent cannot be received any more: its time has passed, or its sender has ended."""


class LoaderWorkerDied(Error, RuntimeError):
    """A worker of a `DataLoader` was killed, or has ended by itself. The text names it."""


class ReductionsPatched(Error, RuntimeError):
    """Another library has replaced the functions of `torch.multiprocessing`. Nothing is changed."""


class UnsupportedTensor(Error, TypeError):
    """A tensor of the model cannot be shared."""


_SHOWN = 200
