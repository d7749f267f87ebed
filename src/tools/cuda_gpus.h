// cuda_gpus.h: the GPUs of this machine, for doctor and plan: what they are, how they reach each other, and how runs would be copied.  Stage: tools.
// cuda_gpus.cc where CUDA is built, else cuda_gpus_none.cc: CMake picks. Makes no context, so it takes no memory of a GPU.
#pragma once

#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/run.h"

namespace kvloom {

struct GpuSeen {
  int ordinal = 0;  // as CUDA_VISIBLE_DEVICES leaves them
  std::string name;
  int multiprocessors = 0, copy_engines = 0;
};

// Of an ordered pair of two GPUs.
struct GpuLink {
  int from = 0, to = 0;         // ordinals
  bool peer_access = false;     // `from` can read `to`'s memory
  bool native_atomics = false;  // NVLink has them, PCIe has not
  int performance_rank = 0;     // as the driver ranks the links of this machine: 0 is the fastest
};

// Which way a run would be copied, and why (cuda/choice.h).
struct GpuChoice {
  std::string run, choice;
};

struct GpuLook {
  bool works = false;  // CUDA is built, its driver is there, and a GPU
  std::string why;     // it works, or does not and what to do
  std::string driver;  // "12.8": the CUDA that it can do
  std::vector<GpuSeen> gpus;
  std::vector<GpuLink> links;
  std::vector<GpuChoice> choices;

  // nullptr: there is no such pair
  const GpuLink* link(int from, int to) const {
    for (const GpuLink& link : links)
      if (link.from == from && link.to == to) return &link;
    return nullptr;
  }
};

GpuLook look_at_gpus();

// "copy engine (2-D): 92.9 us beside 158.0 us by the kernel", of a run alone. Asks no driver.  @error as cuda_is_built
Expected<std::string> explain_gpu_copy(const Run& run);

}  // namespace kvloom
