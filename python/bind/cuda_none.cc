// cuda_none.cc: the extension without CUDA.  Stage: python.
#include "python/bind/carrier.h"

namespace kvloom::python {
namespace {

[[noreturn]] void refuse_cuda() {
  refuse(Code::unsupported, "this kvloom was built without CUDA: install it with -Ccmake.define.KVLOOM_CUDA=ON (docs/python.md)");
}

}  // namespace

std::shared_ptr<Carrier> open_cuda(const std::string&, int, bool) { refuse_cuda(); }
std::shared_ptr<DeviceWork> record_work(const Carrier&, std::uintptr_t) { refuse_cuda(); }
std::shared_ptr<LayerGate> make_gate(const Carrier&) { refuse_cuda(); }
std::optional<int> gpu_at(const Carrier&, std::uintptr_t) { return std::nullopt; }
void wait_at(LayerGate&, std::uintptr_t, LayerId) { refuse_cuda(); }

}  // namespace kvloom::python
