#include "kvloom/tools/cuda_blas.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <array>

namespace kvloom {
namespace {

constexpr std::array kBlasNames = {"libcublas.so.13", "libcublas.so.12"};

std::string why_not() {
  const char* why = dlerror();
  return why != nullptr ? why : "it does not load";
}

// A library that stands beside another one it needs may not say so: that one first.
void* open_beside(const std::string& folder, const std::string& name) {
  std::string lt = name;
  lt.insert(lt.find("cublas") + 6, "Lt");
  dlopen((folder + lt).c_str(), RTLD_NOW | RTLD_GLOBAL);
  return dlopen((folder + name).c_str(), RTLD_NOW | RTLD_LOCAL);
}

Expected<void*> open_blas(const std::string& path) {
  struct stat status {};
  const bool folder = !path.empty() && stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  std::string why;
  if (!path.empty() && !folder) {
    const std::size_t slash = path.rfind('/');
    const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
    const std::string in = slash == std::string::npos ? "" : path.substr(0, slash + 1);
    if (void* library = name.starts_with("libcublas.") ? open_beside(in, name) : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
      return library;
    return fail(Code::unsupported, "--cublas {}: {}: say the file libcublas.so.13 (or .12), or the folder that has it", path,
                why_not());
  }
  for (const char* name : kBlasNames) {
    if (void* library = open_beside(folder ? path + "/" : "", name)) return library;
    if (why.empty()) why = why_not();
  }
  if (folder)
    return fail(Code::unsupported, "--cublas {}: no libcublas.so.13 or .12 that loads is in this folder ({})", path, why);
  return fail(Code::unsupported,
              "no cuBLAS ({}): install it (Debian: libcublas-13-0 of NVIDIA's repository; pip: nvidia-cublas), or say where "
              "libcublas.so.13 is by --cublas PATH",
              why);
}

template <class Function>
Expected<void> find_symbol(void* library, const char* symbol, Function*& out) {
  out = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (out == nullptr) return fail(Code::unsupported, "cuBLAS has no {}: CUDA 12 or newer is wanted", symbol);
  return {};
}

}  // namespace

Expected<std::shared_ptr<const Blas>> Blas::load(const std::string& path) {
  const auto library = open_blas(path);
  if (!library) return tl::unexpected(library.error());
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return fail(Code::unsupported, "no CUDA driver: {}", why_not());
  auto out = std::make_shared<Blas>();
  for (auto ok :
       {find_symbol(*library, "cublasCreate_v2", out->create), find_symbol(*library, "cublasDestroy_v2", out->destroy),
        find_symbol(*library, "cublasSetStream_v2", out->set_stream),
        find_symbol(*library, "cublasSetWorkspace_v2", out->set_workspace),
        find_symbol(*library, "cublasGetStatusString", out->status_text), find_symbol(*library, "cublasGemmEx", out->gemm),
        find_symbol(*library, "cublasGemmStridedBatchedEx", out->gemm_strided_batched),
        find_symbol(driver, "cuEventElapsedTime", out->elapsed)})
    if (!ok) return tl::unexpected(ok.error());
  return std::shared_ptr<const Blas>(std::move(out));
}

}  // namespace kvloom
