#include "kvloom/tools/cuda_gpus.h"

#include <algorithm>

#include "kvloom/tools/print.h"
#include "kvloom/transport/cuda/choice.h"
#include "kvloom/transport/cuda/driver.h"

namespace kvloom {
namespace {

std::vector<GpuChoice> gpu_choices() {
  constexpr Bytes kPage{36'864}, kRow{576};  // 64 tokens of 576 B: MLA in fp8
  constexpr std::int64_t kPages = 64, kRows = 64, kRanks = 4;
  const Run steps{Bytes(0), Bytes(0), kPage, kPages, kPage * kRanks, kPage};
  const Run alone{Bytes(0), Bytes(0), kPage, 1, Bytes(0), Bytes(0)};
  const Run rows{Bytes(0), Bytes(0), kRow, kRows, kRow * kRanks, kRow};
  return {{fmt::format("{} pages of {} B, in steps", kPages, count_text(kPage.value)), cuda::explain(steps)},
          {fmt::format("a page of {} B, alone", count_text(kPage.value)), cuda::explain(alone)},
          {fmt::format("{} pieces of {} B, in steps", kRows, count_text(kRow.value)), cuda::explain(rows)}};
}

Expected<GpuSeen> gpu_seen(const cuda::Driver& driver, int ordinal) {
  GpuSeen out;
  out.ordinal = ordinal;
  CUdevice device = 0;
  if (auto ok = cuda::check(driver, driver.cuDeviceGet(&device, ordinal), Code::io, "opening GPU {}", ordinal); !ok)
    return tl::unexpected(ok.error());
  char name[128] = {};
  if (auto ok =
          cuda::check(driver, driver.cuDeviceGetName(name, sizeof(name) - 1, device), Code::io, "the name of GPU {}", ordinal);
      !ok)
    return tl::unexpected(ok.error());
  out.name = name;
  for (const auto& [value, attribute] : {std::pair(&out.multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                                         std::pair(&out.copy_engines, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)})
    if (auto ok = cuda::check(driver, driver.cuDeviceGetAttribute(value, attribute, device), Code::io, "attribute {} of GPU {}",
                              static_cast<int>(attribute), ordinal);
        !ok)
      return tl::unexpected(ok.error());
  return out;
}

Expected<GpuLink> gpu_link(const cuda::Driver& driver, int from, int to) {
  GpuLink out{from, to};
  CUdevice reader = 0, read = 0;
  int access = 0, atomics = 0;
  for (const CUresult result :
       {driver.cuDeviceGet(&reader, from), driver.cuDeviceGet(&read, to), driver.cuDeviceCanAccessPeer(&access, reader, read)})
    if (auto ok = cuda::check(driver, result, Code::io, "peer access of GPU {} to GPU {}", from, to); !ok)
      return tl::unexpected(ok.error());
  out.peer_access = access != 0;
  if (!out.peer_access) return out;
  for (const CUresult result :
       {driver.cuDeviceGetP2PAttribute(&out.performance_rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, reader, read),
        driver.cuDeviceGetP2PAttribute(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, reader, read)})
    if (auto ok = cuda::check(driver, result, Code::io, "the link of GPU {} to GPU {}", from, to); !ok)
      return tl::unexpected(ok.error());
  out.native_atomics = atomics != 0;
  return out;
}

// Fills what the driver says; the sentence of how it went.
Expected<std::string> look_at_all(const cuda::Driver& driver, GpuLook& out) {
  int version = 0, count = 0;
  if (auto ok = cuda::check(driver, driver.cuDriverGetVersion(&version), "the driver's version"); !ok)
    return tl::unexpected(ok.error());
  out.driver = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  if (auto ok = cuda::check(driver, driver.cuDeviceGetCount(&count), "counting GPUs"); !ok) return tl::unexpected(ok.error());
  if (count == 0) return fail(Code::unsupported, "no GPU is visible (nvidia-smi; CUDA_VISIBLE_DEVICES)");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    auto seen = gpu_seen(driver, ordinal);
    if (!seen) return tl::unexpected(seen.error());
    out.gpus.push_back(std::move(*seen));
  }
  for (int from = 0; from < count; ++from)
    for (int to = 0; to < count; ++to) {
      if (from == to) continue;
      const auto link = gpu_link(driver, from, to);
      if (!link) return tl::unexpected(link.error());
      out.links.push_back(*link);
    }
  const auto apart = std::count_if(out.links.begin(), out.links.end(), [](const GpuLink& link) { return !link.peer_access; });
  std::string why =
      fmt::format("processes of one host; {} GPU{}, a driver for CUDA {}", count, count == 1 ? "" : "s", out.driver);
  if (apart > 0) why += fmt::format("; {} of {} pairs can't read each other", apart, out.links.size());
  return why;
}

}  // namespace

Expected<std::string> explain_gpu_copy(const Run& run) { return cuda::explain(run); }

GpuLook look_at_gpus() {
  GpuLook out;
  out.choices = gpu_choices();
  const auto driver = cuda::Driver::load();
  auto why = driver ? look_at_all(**driver, out) : tl::unexpected(driver.error());
  out.works = why.has_value();
  out.why = why ? std::move(*why) : why.error().message;
  return out;
}

}  // namespace kvloom
