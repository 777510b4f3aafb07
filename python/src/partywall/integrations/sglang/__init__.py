"""SGLang: weights in shared memory, and new weights by name.

SGLang finds `register` by itself, through the entry-point group `sglang.srt.plugins`. With the load format `partywall`
the first engine loads the weights, and all others map them:

    python -m sglang.launch_server --model-path MODEL --load-format partywall \
        --model-loader-extra-config '{"name": "llama"}'

The custom weight loader `load` takes a name instead of tensors. Start the server with `--custom-weight-loader partywall.integrations.sglang.load`, and send one pair for each name.
SGLang moves the second element of a pair to its GPU, so it is an empty tensor:

    d.put("policy", dict(model.named_parameters()))                 # trainer

    engine.update_weights_from_tensor(
        [("policy@2", torch.empty(0))], load_format="partywall.integrations.sglang.load"
    )
"""

from collections.abc import Callable, Iterable
from typing import Any

import partywall as pw
from partywall.integrations._engine.settings import LOAD_FORMAT, Settings
from partywall.integrations._names import opened

TIMEOUT = 10.0
"""Seconds that `load` waits for a name that does not exist yet."""


_registered = False


def register() -> None:
    """Makes the load format known. SGLang calls this in each of its processes.

    SGLang's own formats are an enumeration, so hooks of its plug-in framework are needed: where it checks the format,
    where a scheduler makes its workers, and where updates begin and end, which process weights in place. They leave
    engines with other formats as they are. The loader is imported when an engine uses it.
    """
    global _registered
    if _registered:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_load_format_choices

    add_load_format_choices([LOAD_FORMAT])
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    for target, hook in {
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format": _choose,
        "sglang.srt.managers.scheduler.Scheduler.init_model_worker": _in_turn,
        f"{updater}.begin_weight_update": _unless_shared,
        f"{updater}.end_weight_update": _unless_shared,
    }.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    _registered = True


def _choose(verify: Callable[[Any], None], load_config: Any) -> None:
    """Puts the class of the loader in the place of its name, as SGLang takes it from Python."""
    if load_config.load_format != LOAD_FORMAT:
        verify(load_config)
        return
    from partywall.integrations.sglang.loader import PartywallModelLoader

    load_config.load_format = PartywallModelLoader


def _in_turn(make: Callable[[Any], None], scheduler: Any) -> None:
    """Has engines that start on one GPU measure its memory one after another: from before SGLang's first measurement
    until keys and values are allocated."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.runtime_context import get_device, get_model, get_parallel

    if get_model().load_format != LOAD_FORMAT:
        make(scheduler)
        return
    import torch

    from partywall.integrations._engine import turn

    given = LoadConfig(model_loader_extra_config=get_model().model_loader_extra_config).model_loader_extra_config
    settings = Settings.read(given)
    device = get_device()
    gpu = torch.device(device.device, device.gpu_id) if device.device == "cuda" else torch.device(device.device)
    turn.take(get_parallel().world_group, gpu, settings.connect, settings.timeout)
    try:
        make(scheduler)
    finally:
        turn.end()


def _unless_shared(process: Callable[..., None], updater: Any, **arguments: Any) -> None:
    """Leaves out what an update does to all layers before and after SGLang has refused it for shared weights."""
    from partywall.torch import handle

    if handle(updater.get_model()) is None:
        process(updater, **arguments)


def load(model: Any, names: str | Iterable[str | tuple[str, Any]]) -> None:
    """Loads versions, each a name or `NAME@VERSION`, into a model by its `load_weights`.

    All names are opened before the model changes, in the domain that the environment chooses. Raises `NameNotFound` if
    one does not exist within the timeout, `RemoteDevice` if its memory is on another GPU than the model, and
    `ValueError` for tensors in place of names.
    """
    import torch

    meant = [_name(entry) for entry in ([names] if isinstance(names, str) else names)]
    if not meant:
        raise ValueError("there is no name to load: pass [(NAME, torch.empty(0))]")
    place = next(iter(model.parameters())).device
    device = place if place.type == "cuda" else None
    segments: list[pw.Segment] = []
    with pw.connect() as domain:
        try:
            for name in meant:
                segments.append(opened(domain, name, TIMEOUT, device))
            named = [item for segment in segments for item in segment.items()]
            model.load_weights([(name, torch.from_dlpack(tensor)) for name, tensor in named])
        finally:
            for segment in segments:
                segment.close()


def _name(entry: Any) -> str:
    name, placeholder = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{entry!r} is not a name: pass (NAME, torch.empty(0)), where NAME is such as 'policy@2'")
    if placeholder is not None and placeholder.numel() > 0:
        raise ValueError(f"{name!r} comes with a tensor, but this loader takes names: pass ({name!r}, torch.empty(0))")
    return name
