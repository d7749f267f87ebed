#include "kvloom/transport/shm/shm.h"

#include "kvloom/transport/shm/cpu_device.h"

namespace kvloom {

Expected<std::unique_ptr<ShmTransport>> ShmTransport::make(ShmOptions options) {
  if (options.copy_threads < 1 || options.copy_threads > 256)
    return fail(Code::invalid_argument, "copy_threads={} is not in 1..256", options.copy_threads);
  auto device = std::make_unique<shm::CpuDevice>(options.kernel, options.copy_threads);
  auto ends = open(std::move(options), "shm");
  if (!ends) return tl::unexpected(ends.error());
  return std::unique_ptr<ShmTransport>(new ShmTransport(std::move(*ends), std::move(device)));
}

}  // namespace kvloom
