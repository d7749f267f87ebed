#include "kvloom/transport/cuda/gpu.h"

#include <cstring>
#include <utility>

#include "kvloom/transport/cuda/contexts.h"
#include "kvloom/transport/cuda/copy_kernel.h"

namespace kvloom::cuda {
namespace {

Expected<std::array<std::byte, 16>> uuid_of(const Driver& driver, CUdevice device) {
  CUuuid uuid = {};
  if (auto ok = check(driver, driver.cuDeviceGetUuid(&uuid, device), "asking for a GPU's UUID"); !ok)
    return tl::unexpected(ok.error());
  std::array<std::byte, 16> out;
  std::memcpy(out.data(), uuid.bytes, out.size());
  return out;
}

}  // namespace

Expected<std::shared_ptr<const Gpu>> Gpu::open(std::shared_ptr<const Driver> driver, int ordinal) {
  Contexts& contexts = *driver->contexts;
  return contexts.gpu(ordinal, [&] { return open_first(driver, ordinal); });
}

Expected<std::shared_ptr<const Gpu>> Gpu::open_first(std::shared_ptr<const Driver> driver, int ordinal) {
  if (auto ok = cuda::check(*driver, driver->cuInit(0), "starting CUDA", Code::unsupported); !ok)
    return tl::unexpected(ok.error());
  int count = 0;
  if (auto ok = cuda::check(*driver, driver->cuDeviceGetCount(&count), "counting GPUs"); !ok) return tl::unexpected(ok.error());
  if (ordinal < 0 || ordinal >= count)
    return fail(Code::unsupported, "GPU {} of {}: this process sees GPUs 0 to {} (nvidia-smi; CUDA_VISIBLE_DEVICES)", ordinal,
                count, count - 1);
  std::shared_ptr<Gpu> gpu(new Gpu(std::move(driver)));
  gpu->ordinal_ = ordinal;
  if (auto ok = gpu->load(); !ok) return tl::unexpected(ok.error());
  return gpu;
}

Expected<void> Gpu::load() {
  if (auto ok = check(driver_->cuDeviceGet(&device_, ordinal_), "opening GPU {}", ordinal_); !ok) return ok;
  char name[128] = {};
  if (auto ok = check(driver_->cuDeviceGetName(name, sizeof(name) - 1, device_), "asking GPU {} for its name", ordinal_); !ok)
    return ok;
  name_ = name;
  auto uuid = uuid_of(*driver_, device_);
  if (!uuid) return tl::unexpected(uuid.error());
  uuid_ = *uuid;
  if (auto ok = check(driver_->cuDeviceGetAttribute(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
                      "asking GPU {} for its size", ordinal_);
      !ok)
    return ok;
  if (auto ok = check(driver_->cuDevicePrimaryCtxRetain(&context_, device_), "the context of GPU {}", ordinal_); !ok) return ok;
  const Current here = current();
  if (auto ok = check(driver_->cuModuleLoadData(&module_, copy_kernel_image()), "loading the copy kernel on {}", name_); !ok)
    return ok;
  for (const auto& [kernel, symbol] : {std::pair(&copy_list_, "kvloom_copy_list"), std::pair(&copy_few_, "kvloom_copy_few")})
    if (auto ok = check(driver_->cuModuleGetFunction(kernel, module_, symbol), "finding {}", symbol); !ok) return ok;
  return {};
}

Gpu::~Gpu() {
  if (context_ == nullptr) return;
  {
    const Current here = current();
    gate_words_.free_all(*driver_);
    if (module_ != nullptr) driver_->cuModuleUnload(module_);
  }
  driver_->cuDevicePrimaryCtxRelease(device_);
}

Expected<int> Gpu::ordinal_of(const std::array<std::byte, 16>& uuid) const {
  int count = 0;
  if (auto ok = check(driver_->cuDeviceGetCount(&count), "counting GPUs"); !ok) return tl::unexpected(ok.error());
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    if (auto ok = check(driver_->cuDeviceGet(&device, ordinal), "opening GPU {}", ordinal); !ok)
      return tl::unexpected(ok.error());
    const auto its = uuid_of(*driver_, device);
    if (!its) return tl::unexpected(its.error());
    if (*its == uuid) return ordinal;
  }
  return fail(Code::unsupported, "the peer's GPU is not visible here: let both processes see it (CUDA_VISIBLE_DEVICES)");
}

}  // namespace kvloom::cuda
