#include "kvloom/transport/cuda/driver.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "kvloom/transport/cuda/contexts.h"

namespace kvloom::cuda {
namespace {

#define KVLOOM_CUDA_SYMBOL_OF(call) #call
#define KVLOOM_CUDA_SYMBOL(call) KVLOOM_CUDA_SYMBOL_OF(call)  // of what cuda.h maps the name to

// The name of the first symbol that the library lacks, or nullptr.
const char* fill(Driver& driver, void* library) {
  const char* missing = nullptr;
  const auto find = [&](const char* symbol) {
    void* found = dlsym(library, symbol);
    if (found == nullptr && missing == nullptr) missing = symbol;
    return found;
  };
#define KVLOOM_CUDA_FIND(call) driver.call = reinterpret_cast<decltype(driver.call)>(find(KVLOOM_CUDA_SYMBOL(call)));
  KVLOOM_CUDA_CALLS(KVLOOM_CUDA_FIND)
#undef KVLOOM_CUDA_FIND
  return missing;
}

#undef KVLOOM_CUDA_SYMBOL
#undef KVLOOM_CUDA_SYMBOL_OF

// "12.4" of 12040.
std::string version_text(const Driver& driver) {
  int version = 0;
  if (driver.cuDriverGetVersion == nullptr || driver.cuDriverGetVersion(&version) != CUDA_SUCCESS) return "unknown";
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

std::shared_ptr<Contexts> make_contexts() { return std::make_shared<Contexts>(); }

// Two tables would have two Contexts, and these would not know of each other's gates and pins.
Expected<std::shared_ptr<const Driver>> Driver::load() {
  static std::mutex mutex;
  static std::weak_ptr<const Driver> loaded;
  const std::lock_guard lock(mutex);
  if (auto there = loaded.lock()) return there;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return fail(Code::unsupported,
                "no CUDA driver ({}): install the NVIDIA driver (in a container: start it with --gpus), or use --transport shm",
                why != nullptr ? why : "libcuda.so.1 does not load");
  }
  auto driver = std::make_shared<Driver>();
  if (const char* missing = fill(*driver, library))
    return fail(Code::unsupported, "the CUDA driver (for CUDA {}) has no {}: install a driver for CUDA 12.0 or newer",
                version_text(*driver), missing);
  const CUresult started = driver->cuInit(0);
  auto usable =
      check(*driver, started, Code::unsupported,
            "the CUDA driver (for CUDA {}) does not start: look at nvidia-smi and CUDA_VISIBLE_DEVICES", version_text(*driver));
  if (!usable) return tl::unexpected(usable.error());
  loaded = driver;
  return std::shared_ptr<const Driver>(std::move(driver));
}

std::string to_string(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  const char* words = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr)
    return fmt::format("CUDA error {}", static_cast<int>(result));
  if (driver.cuGetErrorString(result, &words) != CUDA_SUCCESS || words == nullptr) return name;
  return fmt::format("{} ({})", name, words);
}

Expected<void> check(const Driver& driver, CUresult result, std::string_view sentence, Code code) {
  if (result == CUDA_SUCCESS) return {};
  return fail(code, "{}: {}", sentence, to_string(driver, result));
}

}  // namespace kvloom::cuda
