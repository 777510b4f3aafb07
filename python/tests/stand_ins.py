"""Stand-ins with the signatures of vLLM 0.32, Ray 2.60, verl 0.9, torch 2.11 and cupy 14, as far as they are used.

`cargo xtask stacks` runs the integrations with the real packages.
"""

import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partywall as pw


@dataclass(frozen=True)
class Device:
    """A `torch.device`."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Tensor(np.ndarray):
    """An array with the methods of a torch tensor on the CPU."""

    device = Device("cpu")

    def detach(self) -> "Tensor":
        return self

    def resolve_conj(self) -> "Tensor":
        return self

    def resolve_neg(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def clone(self) -> "Tensor":
        return self.copy()

    def numel(self) -> int:
        return self.size

    def copy_(self, source: "Tensor") -> "Tensor":
        self[...] = source
        return self


def tensor(items: Any, dtype: str = "float32") -> Tensor:
    return np.asarray(items, dtype).view(Tensor)


class Model:
    """A model that records the weights that it is given."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device or Device("cpu")
        self.calls: list[str] = []
        self.weights: dict[str, Any] = {}

    def parameters(self) -> Iterator[Any]:
        yield types.SimpleNamespace(device=self.device)

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        self.calls.append("load")
        self.weights.update({name: weight.clone() for name, weight in weights})


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> types.ModuleType:
    """Installs a module, with the packages above it."""
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    above, _, last = name.rpartition(".")
    if above:
        parent = sys.modules.get(above) or module(monkeypatch, above)
        monkeypatch.setattr(parent, last, made, raising=False)
    return made


def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_dlpack(given: Any) -> Tensor:
        return np.from_dlpack(given).view(Tensor)

    module(monkeypatch, "torch", from_dlpack=from_dlpack, Tensor=Tensor, device=Device)


class BaseModelLoader:
    """vLLM's loader: it makes a model, fills it and has its layers process their weights."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        return 0

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        return model_config.model_class()

    def load_weights(self, model: Any, model_config: Any) -> None:
        raise NotImplementedError

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        import torch

        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        with device:
            model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self.load_weights(model, model_config)
        process_weights_after_loading(model, model_config, device)
        return model.eval()


class QuantizeMethodBase:
    """What a layer does with its weights."""

    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: Any) -> None:
        pass


processed: ContextVar[bool] = ContextVar("processed", default=False)
"""Whether layers are to take their weights as processed."""


@contextlib.contextmanager
def weights_already_processed() -> Iterator[None]:
    token = processed.set(True)
    try:
        yield
    finally:
        processed.reset(token)


def process_weights_after_loading(model: Any, model_config: Any, target_device: Any) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            if processed.get() and not method.supports_pre_processed_weights:
                raise RuntimeError(f"{type(method).__name__} does not support pre-processed weights")
            method.process_weights_after_loading(module)
    for module in model.modules():
        if hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading(model_config.dtype)


@dataclass(frozen=True)
class Group:
    """A worker's place in a group of ranks."""

    rank_in_group: int = 0
    world_size: int = 1


def vllm_loaders(monkeypatch: pytest.MonkeyPatch, groups: dict[str, Group] | None = None) -> dict[str, type]:
    """Installs vLLM's loaders, and returns the registered ones."""
    registered: dict[str, type] = {}

    def register_model_loader(load_format: str) -> Any:
        def register(loader: type) -> type:
            assert issubclass(loader, BaseModelLoader) and load_format not in registered
            registered[load_format] = loader
            return loader

        return register

    places = {key: Group() for key in ("world", "tp", "pp", "dp", "pcp")} | (groups or {})
    module(monkeypatch, "vllm.version", __version__="0.32.0")
    module(
        monkeypatch,
        "vllm.distributed.parallel_state",
        **{f"get_{key}_group": lambda place=place: place for key, place in places.items()},
    )
    module(
        monkeypatch,
        "vllm.platforms",
        current_platform=types.SimpleNamespace(is_cpu=lambda: False),
    )
    module(monkeypatch, "vllm.utils.torch_utils", set_default_torch_dtype=contextlib.nullcontext)
    module(monkeypatch, "vllm.model_executor.utils", weights_already_processed=weights_already_processed)
    module(
        monkeypatch, "vllm.model_executor.layers.quantization.base_config", QuantizeMethodBase=QuantizeMethodBase
    )
    loaders = module(
        monkeypatch,
        "vllm.model_executor.model_loader",
        register_model_loader=register_model_loader,
        get_model_loader=lambda config: registered[config.load_format](config),
    )
    module(monkeypatch, f"{loaders.__name__}.base_loader", BaseModelLoader=BaseModelLoader)
    module(
        monkeypatch, f"{loaders.__name__}.utils", process_weights_after_loading=process_weights_after_loading
    )
    return registered


def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs vLLM's weight transfer beside its loaders, and returns the factory of its engines."""
    vllm_loaders(monkeypatch)
    module(
        monkeypatch,
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=lambda model: model.calls.append("initialize"),
        finalize_layerwise_reload=lambda model, config: model.calls.append("finalize"),
    )
    return vllm_transfer(monkeypatch)


def vllm_transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs vLLM's weight transfer alone, and returns the factory of its engines."""

    @dataclass
    class InitInfo:
        pass

    @dataclass
    class UpdateInfo:
        pass

    class Engine:
        init_info_cls: type
        update_info_cls: type

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            self.config, self.device, self.model = config, device, model
            self.model_config = vllm_config.model_config

        def parse_init_info(self, given: dict[str, Any]) -> Any:
            try:
                return self.init_info_cls(**given)
            except TypeError as error:
                raise ValueError(f"invalid init_info: {error}") from error

        def parse_update_info(self, given: dict[str, Any]) -> Any:
            try:
                return self.update_info_cls(**given)
            except TypeError as error:
                raise ValueError(f"invalid update_info: {error}") from error

        def update_weights(self, given: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(given))

    class Factory:
        _registry: dict[str, Any] = {}

        @classmethod
        def register_engine(cls, name: str, path: str, class_name: str | None = None) -> None:
            if name in cls._registry:
                raise ValueError(f"{name} is already registered")
            cls._registry[name] = (path, class_name)

        @classmethod
        def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
            path, class_name = cls._registry[config.backend]
            __import__(path)
            return getattr(sys.modules[path], class_name)(config, vllm_config, device, model)

    transfer = "vllm.distributed.weight_transfer"
    module(
        monkeypatch,
        f"{transfer}.base",
        WeightTransferEngine=Engine,
        WeightTransferInitInfo=InitInfo,
        WeightTransferUpdateInfo=UpdateInfo,
    )
    module(monkeypatch, f"{transfer}.factory", WeightTransferEngineFactory=Factory)
    module(
        monkeypatch,
        "vllm.model_executor.model_loader.mtp_validation",
        disable_mtp_completeness_check=contextlib.nullcontext,
    )
    return Factory


def vllm_config(enable_prefix_caching: bool = False) -> Any:
    """What a weight-transfer engine reads of vLLM's configuration."""
    cache = types.SimpleNamespace(enable_prefix_caching=enable_prefix_caching)
    return types.SimpleNamespace(model_config="config", cache_config=cache)


class LLM:
    """An engine of vLLM with one worker, whose scheduler keeps what the model makes of whole blocks of prompts."""

    BLOCK = 16

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._blocks: dict[tuple[int, ...], float] = {}

    def start_weight_update(self) -> None:
        self._worker.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self._worker.update_weights(request.update_info)

    def finish_weight_update(self) -> None:
        self._worker.finish_weight_update()

    def reset_prefix_cache(self) -> bool:
        self._blocks.clear()
        return True

    def generate(self, prompt: list[int]) -> list[float]:
        """Returns a number for each block, which depends on the weights and on the prompt up to its end."""
        weight = float(self._worker.model.weights["weight"].sum())
        numbers = []
        for end in range(self.BLOCK, len(prompt) + self.BLOCK, self.BLOCK):
            begin = tuple(prompt[:end])
            made = self._blocks.get(begin, weight * sum(begin))
            if len(begin) == end:
                self._blocks[begin] = made
            numbers.append(made)
        return numbers


def ray(monkeypatch: pytest.MonkeyPatch, node: str = "node") -> dict[str, Any]:
    """Installs Ray's tensor transports, and returns the registered ones."""
    registered: dict[str, Any] = {}

    class TensorTransportManager:
        pass

    @dataclass
    class TensorTransportMetadata:
        tensor_meta: list[Any]
        tensor_device: str | None = None

    @dataclass
    class CommunicatorMetadata:
        extra: list[Any] = field(default_factory=list)

    def register_tensor_transport(name: str, devices: list[str], manager: type, data_type: type) -> None:
        if name in registered:
            raise ValueError(f"Transport {name} already registered.")
        registered[name] = manager

    context = types.SimpleNamespace(get_node_id=lambda: node)

    def remote(**options: Any) -> Any:
        """Runs tasks at once, here, and keeps what was asked for."""
        tasks.append(options)
        return lambda function: types.SimpleNamespace(remote=function)

    tasks: list[dict[str, Any]] = []
    module(
        monkeypatch, "ray", get_runtime_context=lambda: context, remote=remote, get=lambda found: found, tasks=tasks
    )
    module(
        monkeypatch,
        "ray.util.scheduling_strategies",
        NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft),
    )
    module(
        monkeypatch,
        "ray.experimental.rdt.tensor_transport_manager",
        TensorTransportManager=TensorTransportManager,
        TensorTransportMetadata=TensorTransportMetadata,
        CommunicatorMetadata=CommunicatorMetadata,
    )
    monkeypatch.setattr(
        sys.modules["ray.experimental"], "register_tensor_transport", register_tensor_transport, raising=False
    )
    return registered


def verl(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Installs verl's checkpoint engines, and returns the registered ones."""
    registered: dict[str, Any] = {}

    class CheckpointEngine:
        pass

    class CheckpointEngineRegistry:
        @staticmethod
        def register(backend: str) -> Any:
            def wrap(cls: type) -> type:
                registered[backend] = cls
                return cls

            return wrap

    module(
        monkeypatch,
        "verl.checkpoint_engine",
        CheckpointEngine=CheckpointEngine,
        CheckpointEngineRegistry=CheckpointEngineRegistry,
    )
    return registered


class TorchAllocator:
    """Two functions of a library, called as torch calls them."""

    def __init__(self, path: str, allocate: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self._allocate, self._free = getattr(library, allocate), getattr(library, free)
        self._allocate.restype = ctypes.c_void_p
        self.names = allocate, free

    def allocate(self, size: int, device: int = 0) -> int:
        """Returns an address, or 0."""
        return self._allocate(ctypes.c_ssize_t(size), ctypes.c_int(device), None) or 0

    def free(self, address: int) -> None:
        self._free(ctypes.c_void_p(address), ctypes.c_ssize_t(0), ctypes.c_int(0), None)


def torch_pools(monkeypatch: pytest.MonkeyPatch, version: str = "2.8.0") -> Any:
    """Installs torch's pools of memory, which call the allocator's functions as torch does. Returns the module."""

    class OutOfMemoryError(RuntimeError):
        pass

    class CUDAPluggableAllocator:
        def __init__(self, path: str, allocate: str, free: str) -> None:
            self._allocator = TorchAllocator(path, allocate, free)

        def allocator(self) -> TorchAllocator:
            return self._allocator

    class MemPool:
        def __init__(self, allocator: TorchAllocator) -> None:
            self.functions = allocator

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, device: int) -> Iterator[None]:
        made.active.append((pool, device))
        try:
            yield
        finally:
            made.active.remove((pool, device))

    def allocate(size: int) -> int:
        pool, device = made.active[0]
        address = pool.functions.allocate(size, device)
        if not address:
            raise OutOfMemoryError("CUDA out of memory")
        return address

    memory = types.SimpleNamespace(CUDAPluggableAllocator=CUDAPluggableAllocator)
    cuda = types.SimpleNamespace(
        MemPool=MemPool,
        use_mem_pool=use_mem_pool,
        memory=memory,
        init=lambda: None,
        current_device=lambda: 0,
        device=lambda _: contextlib.nullcontext(),
    )
    made: Any = module(
        monkeypatch,
        "torch",
        __version__=version,
        cuda=cuda,
        OutOfMemoryError=OutOfMemoryError,
        device=Device,
        strided="strided",
        Tensor=lambda address: types.SimpleNamespace(layout="strided", data_ptr=lambda: address),
        active=[],
        allocate=allocate,
    )
    # The rest of the package needs more of torch.
    package = module(monkeypatch, "partywall.torch")
    package.__path__ = [str(Path(pw.__file__).parent / "torch")]
    for name in "_pool", "_version":
        monkeypatch.delitem(sys.modules, f"partywall.torch.{name}", raising=False)
    return made


def cupy_pools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs cupy's allocators. Returns the module."""

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            super().__init__(status)
            self.status = status

    class Memory:
        def __init__(self, size: int, allocate: Any, free: Any) -> None:
            self._free, self._device = free, made.device
            self.ptr = allocate(size, made.device)

        def __del__(self) -> None:
            if hasattr(self, "ptr"):
                self._free(self.ptr, self._device)

    class PythonFunctionAllocator:
        def __init__(self, allocate: Any, free: Any) -> None:
            self._functions = allocate, free

        def malloc(self, size: int) -> Memory:
            return Memory(size, *self._functions)

    class MemoryPool:
        def __init__(self, allocator: Any) -> None:
            self.malloc = allocator

    @contextlib.contextmanager
    def using_allocator(allocator: Any) -> Iterator[None]:
        before = vars(made.thread).get("allocator")
        made.thread.allocator = allocator
        try:
            yield
        finally:
            made.thread.allocator = before

    cuda = types.SimpleNamespace(
        Device=lambda _: types.SimpleNamespace(id=0),
        MemoryPool=MemoryPool,
        PythonFunctionAllocator=PythonFunctionAllocator,
        using_allocator=using_allocator,
        runtime=types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
    )
    made: Any = module(
        monkeypatch, "cupy", cuda=cuda, device=0, thread=threading.local(), allocate=lambda n: made.thread.allocator(n)
    )
    monkeypatch.delitem(sys.modules, "partywall.integrations.cupy", raising=False)
    return made
