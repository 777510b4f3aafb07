"""Ray: a tensor transport whose objects outlive the actor that made them.

Register it in the driver before any actor is created, and name it where an actor returns tensors:

    import partywall.integrations.ray

    partywall.integrations.ray.register()

    @ray.remote(num_gpus=0.5, enable_tensor_transport=True)
    class Trainer:
        @ray.method(tensor_transport="PARTYWALL")
        def weights(self):
            return list(self.model.parameters())

Tensors are copied once, when the actor returns them. Receivers map the copy, read-only, on the driver's machine. To and
from actors on other machines Ray carries copies, as ordinary objects.
"""

import atexit
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import partywall as pw

TRANSPORT = "PARTYWALL"
"""The name of the transport."""

_drivers: list[pw.Domain] = []


def register(domain: str | None = None, *, socket: str | None = None) -> None:
    """Registers the transport for the actors that this process will create.

    Call it after `ray.init`. `domain` and `socket` are as for `connect`. The objects' names belong to this process:
    they end with it, however it ends. Calling this again does nothing. Raises `ValueError` if another transport has
    the name.
    """
    if _drivers:
        return
    here = ray.get_runtime_context().get_node_id()
    driver = pw.connect(domain, socket=socket)

    # Ray sends the class to each actor. It is defined here, so that its values travel with it.
    class Transport(PartywallTransport):
        broker = driver.socket
        owner = driver.token
        node = here

    try:
        register_tensor_transport(TRANSPORT, ["cuda", "cpu"], Transport, torch.Tensor)
    except ValueError:
        driver.close()
        raise
    _drivers.append(driver)
    atexit.register(driver.close)


@dataclass
class PartywallTransportMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """The description of an object that travels to its receivers."""

    name: str | None = None
    """`NAME@VERSION` of its tensors; an object without tensors has none."""


class PartywallTransport(TensorTransportManager):  # type: ignore[misc]
    """Puts the tensors of an object under a name of the job, from which receivers open them."""

    broker: str
    owner: str
    node: str

    def __init__(self) -> None:
        self._domain: pw.Domain | None = None
        # Ray calls a transport from several threads.
        self._lock = threading.Lock()

    def tensor_transport_backend(self) -> str:
        """Returns the name of the transport."""
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        """Returns true: a receiver needs nothing from the source."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Returns true, so that Ray kills no actor after a failed transfer."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Returns true: Ray has registered the transport with the actor."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> PartywallTransportMetadata:
        """Copies the tensors into shared memory. Raises `ValueError` unless all of them are on one device."""
        devices = {tensor.device for tensor in rdt_object}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"the tensors of an object must be on one device, but these are on {names}: return them separately"
            )
        meta = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        if not rdt_object:
            return PartywallTransportMetadata(meta)
        device = devices.pop().type
        tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in rdt_object]
        name = self._name(obj_id)
        if self._is_here():
            put = _put(self._connected(), name, self.owner, tensors)
        else:
            copies = [tensor.cpu() for tensor in tensors]
            put = ray.get(self._at_driver(_put_copies).remote(self.broker, name, self.owner, copies))
        return PartywallTransportMetadata(meta, device, put)

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Returns nothing: both sides know the name."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: PartywallTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Maps the tensors, or copies them into `target_buffers`. Raises `NameNotFound` if the job has ended."""
        name = tensor_transport_metadata.name
        if name is None:
            return []
        if self._is_here():
            with self._connected().open(name) as segment:
                tensors = _tensors(segment)
        else:
            tensors = ray.get(self._at_driver(_copies).remote(self.broker, name))
        if not target_buffers:
            # What came from another machine is in host memory.
            device = tensor_transport_metadata.tensor_device
            return [tensor if tensor.device.type == device else tensor.to(device) for tensor in tensors]
        for buffer, tensor in zip(target_buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return target_buffers

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: CommunicatorMetadata
    ) -> None:
        """Is never called: the transport is one-sided."""
        raise NotImplementedError("receivers open the tensors by name: there is nothing to send")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: PartywallTransportMetadata, tensors: list[Any]
    ) -> None:
        """Removes the name of an object that has no reference left. Receivers keep what they have mapped."""
        if tensor_transport_meta.name is None:
            return
        try:
            self._connected().rm(self._name(obj_id))
        except pw.NameNotFound:
            # The driver, which owns it, has ended.
            pass

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Does nothing: no side of a transfer waits for the other."""

    def _connected(self) -> pw.Domain:
        with self._lock:
            if self._domain is None:
                self._domain = pw.connect(socket=self.broker, start=False)
                weakref.finalize(self, self._domain.close)
            return self._domain

    def _is_here(self) -> bool:
        """Returns whether this actor is on the driver's machine. Says once in each process that it is not."""
        global _said
        here = ray.get_runtime_context().get_node_id()
        if here != self.node and not _said:
            _said = True
            _log.warning(
                "the driver is on node %s and this actor on %s: between them Ray carries copies of tensors", self.node, here
            )
        return bool(here == self.node)

    def _at_driver(self, function: Any) -> Any:
        """Returns a task of Ray that runs on the driver's machine, sees its GPUs, and leaves none of their memory."""
        seeing = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=there, runtime_env=seeing)(function)

    def _name(self, obj_id: str) -> str:
        # Jobs of different clusters may count their objects alike.
        return f"ray/{self.owner}/{obj_id}"


def _put(domain: pw.Domain, name: str, owner: str, tensors: list[Any]) -> str:
    put = domain.put(name, {str(index): tensor for index, tensor in enumerate(tensors)}, owner=owner)
    return f"{put.name}@{put.version}"


def _tensors(segment: pw.Segment) -> list[Any]:
    return [torch.from_dlpack(segment[str(index)]) for index in range(len(segment))]


def _put_copies(broker: str, name: str, owner: str, tensors: list[Any]) -> str:
    with pw.connect(socket=broker, start=False) as domain:
        return _put(domain, name, owner, tensors)


def _copies(broker: str, name: str) -> list[Any]:
    with pw.connect(socket=broker, start=False) as domain, domain.open(name) as segment:
        return [tensor.cpu().clone() for tensor in _tensors(segment)]


_said = False
"""Whether this process has said that tensors are copied."""

_log = logging.getLogger(__name__)
