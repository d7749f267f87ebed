// gpu.h: one GPU of this process: its primary context, its names, the copy kernel.  Stage: carry.  A resource; shared by what stands on it.
// Thread: any; `current` makes it the calling thread's for as long as it lives, and costs 100 ns.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "kvloom/transport/cuda/driver.h"
#include "kvloom/transport/cuda/gate_words.h"

namespace kvloom::cuda {

class Gpu {
 public:
  // One object for a GPU, for as long as anybody has it (contexts.h).
  // @error unsupported (no driver, no such GPU), exhausted, io; sentences say what to do
  static Expected<std::shared_ptr<const Gpu>> open(std::shared_ptr<const Driver> driver, int ordinal);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  const Driver& driver() const { return *driver_; }
  const std::shared_ptr<const Driver>& driver_owner() const { return driver_; }
  int ordinal() const { return ordinal_; }
  CUdevice device() const { return device_; }
  CUcontext context() const { return context_; }
  const std::array<std::byte, 16>& uuid() const { return uuid_; }
  const std::string& name() const { return name_; }
  CUfunction copy_list() const { return copy_list_; }
  CUfunction copy_few() const { return copy_few_; }
  int multiprocessors() const { return multiprocessors_; }
  Contexts& contexts() const { return *driver_->contexts; }
  GateWords& gate_words() const { return gate_words_; }

  Current current() const { return Current(*driver_, context_); }
  template <class... Args>
  Expected<void> check(CUresult result, fmt::format_string<Args...> format, Args&&... args) const {
    return cuda::check(*driver_, result, fmt::format(format, std::forward<Args>(args)...));
  }

  // The ordinal here of the GPU with this UUID.  @error unsupported: it is not visible to this process
  Expected<int> ordinal_of(const std::array<std::byte, 16>& uuid) const;

 private:
  explicit Gpu(std::shared_ptr<const Driver> driver) : driver_(std::move(driver)) {}
  static Expected<std::shared_ptr<const Gpu>> open_first(std::shared_ptr<const Driver> driver, int ordinal);
  Expected<void> load();

  std::shared_ptr<const Driver> driver_;  // shared with the transport that it was made for
  int ordinal_ = 0;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::array<std::byte, 16> uuid_{};
  std::string name_;
  int multiprocessors_ = 0;
  CUmodule module_ = nullptr;
  CUfunction copy_list_ = nullptr;
  CUfunction copy_few_ = nullptr;
  mutable GateWords gate_words_;
};

using GpuPtr = std::shared_ptr<const Gpu>;  // shared by a transport's device, its memories, queues and the work of its engine

}  // namespace kvloom::cuda
