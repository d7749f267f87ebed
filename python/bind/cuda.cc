// cuda.cc: GPU memory and an engine's CUDA streams.  Stage: python.  libcuda is looked up when somebody asks for a GPU: nothing is linked.
#include "kvloom/transport/cuda/cuda.h"

#include "kvloom/transport/cuda/device_work.h"
#include "python/bind/carrier.h"

namespace kvloom::python {
namespace {

const cuda::GpuPtr& gpu_of(const Carrier& carrier) {
  const auto* transport = dynamic_cast<const CudaTransport*>(&carrier.transport());
  if (transport == nullptr)
    refuse(Code::unsupported, "the transport {} has no CUDA streams: make one with kvloom.cuda_transport",
           carrier.abilities().name);
  return transport->gpu_owner();
}

// A cudaStream_t, which is a CUstream.
CUstream stream_of(std::uintptr_t stream) { return reinterpret_cast<CUstream>(stream); }

}  // namespace

std::shared_ptr<Carrier> open_cuda(const std::string& listen, int device, bool allocate_on_host) {
  CudaOptions options;
  options.listen = listen;
  options.device = device;
  options.allocate_on_host = allocate_on_host;
  return std::make_shared<Carrier>(take(CudaTransport::make(std::move(options))),
                                   allocate_on_host ? std::nullopt : std::optional(device));
}

std::shared_ptr<DeviceWork> record_work(const Carrier& carrier, std::uintptr_t stream) {
  return take(cuda::StreamWork::record(gpu_of(carrier), stream_of(stream)));
}

std::shared_ptr<LayerGate> make_gate(const Carrier& carrier) { return take(cuda::StreamGate::make(gpu_of(carrier))); }

std::optional<int> gpu_at(const Carrier& carrier, std::uintptr_t address) {
  const auto* transport = dynamic_cast<const CudaTransport*>(&carrier.transport());
  if (transport == nullptr) return std::nullopt;
  const cuda::Gpu& gpu = *transport->gpu_owner();
  const cuda::Current here = gpu.current();
  unsigned type = 0;  // CUmemorytype; 0: the driver does not know it
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
  void* values[] = {&type};
  const bool known = gpu.driver().cuPointerGetAttributes(1, names, values, address) == CUDA_SUCCESS;
  return known && (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED) ? std::optional(gpu.ordinal()) : std::nullopt;
}

void wait_at(LayerGate& gate, std::uintptr_t stream, LayerId layer) {
  take(dynamic_cast<cuda::StreamGate&>(gate).wait(stream_of(stream), layer));
}

}  // namespace kvloom::python
