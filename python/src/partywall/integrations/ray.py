"""Ray: a tensor transport whose objects outlive the actor that made them.

Register it in the driver before any actor is created, and name it where an actor returns tensors:

    import partywall.integrations.ray

    partywall.integrations.ray.register()

    @ray.remote(num_gpus=0.5, enable_tensor_transport=True)
    class Trainer:
        @ray.method(tensor_transport="PARTYWALL")
        def weights(self):
            return list(self.model.parameters())

Tensors are copied once, when the actor returns them. Receivers map the copy, read-only, on the same machine.
"""

import atexit
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
        tensors = {str(index): tensor.detach().resolve_conj().resolve_neg() for index, tensor in enumerate(rdt_object)}
        put = self._connected().put(self._name(obj_id), tensors, owner=self.owner)
        return PartywallTransportMetadata(meta, devices.pop().type, f"{put.name}@{put.version}")

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
        with self._connected().open(name) as segment:
            tensors = [torch.from_dlpack(segment[str(index)]) for index in range(len(segment))]
        if not target_buffers:
            return tensors
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
        node = ray.get_runtime_context().get_node_id()
        if node != self.node:
            raise RuntimeError(
                f"the transport {TRANSPORT} works within one machine, but the driver is on node {self.node} and this "
                f"actor on {node}: use another transport between them"
            )
        with self._lock:
            if self._domain is None:
                self._domain = pw.connect(socket=self.broker, start=False)
                weakref.finalize(self, self._domain.close)
            return self._domain

    def _name(self, obj_id: str) -> str:
        # Jobs of different clusters may count their objects alike.
        return f"ray/{self.owner}/{obj_id}"
