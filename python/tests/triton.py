"""Stands in for Triton Inference Server: a process that knows nothing of Partywall opens the handles of regions."""

REGIONS = """
import ctypes
import os

driver = ctypes.CDLL(os.environ.get("PARTYWALL_LIBCUDA", "libcuda.so.1"))


def call(name, *arguments):
    code = getattr(driver, name)(*arguments)
    assert code == 0, f"{name}: {code}"


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class Regions:
    def __init__(self):
        self.known = {}
        call("cuInit", 0)

    def register(self, name, raw_handle, device_id, byte_size):
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device_id)
        call("cuCtxSetCurrent", context)
        call("cuIpcOpenMemHandle_v2", ctypes.byref(address), Handle.from_buffer_copy(raw_handle), 1)
        self.known[name] = context, address.value, byte_size

    def read(self, name, byte_size, offset):
        context, address, size = self.known[name]
        assert offset + byte_size <= size, "the server refuses what lies beyond the region"
        found = (ctypes.c_ubyte * byte_size)()
        call("cuCtxSetCurrent", context)
        call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(address + offset), ctypes.c_size_t(byte_size))
        return bytes(found)

    def unregister(self, name):
        context, address, _ = self.known.pop(name)
        call("cuCtxSetCurrent", context)
        call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
"""
"""What the server does with CUDA's shared memory, by the driver."""

SERVER = (
    REGIONS
    + """
import concurrent.futures
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self):
        self.regions = Regions()

    def CudaSharedMemoryRegister(self, request, context):
        self.regions.register(request.name, request.raw_handle, request.device_id, request.byte_size)
        return service_pb2.CudaSharedMemoryRegisterResponse()

    def CudaSharedMemoryUnregister(self, request, context):
        self.regions.unregister(request.name)
        return service_pb2.CudaSharedMemoryUnregisterResponse()

    def ModelInfer(self, request, context):
        [given] = request.inputs
        asked = given.parameters
        region, size, offset = (asked[f"shared_memory_{key}"] for key in ("region", "byte_size", "offset"))
        found = self.regions.read(region.string_param, size.int64_param, offset.int64_param)
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, raw_output_contents=[found])
        answer.outputs.add(name="OUTPUT0", datatype=given.datatype, shape=given.shape)
        return answer


server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
say(port)
told()
server.stop(None).wait()
"""
)
"""A server for `tritonclient` whose model returns its input. Says its port, and ends when it is told."""
