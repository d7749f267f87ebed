// words.h: what a process says of GPU memory that a peer is to read, as the words of an offer.  Stage: carry.  Values only.
// Law: decode gives what encode was given; everything else is refused. Sizes are not believed yet: map asks the driver.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"

namespace kvloom::cuda {

struct Words {
  enum class Kind : std::uint32_t { ipc = 1, vmm = 2, host = 3 };
  static constexpr std::size_t kMostSizes = 32;

  // `count` parts of `bytes` each
  struct Parts {
    std::uint64_t bytes = 0;
    std::uint64_t count = 0;
  };

  Kind kind = Kind::ipc;
  std::uint32_t sizes = 0;                // of `parts`, that are used
  std::array<std::byte, 16> uuid{};       // of the GPU; host: zero
  std::uint64_t offset = 0;               // of the region in its allocation or its first part, bytes
  std::uint64_t address = 0;              // ipc: for a reader in the same process
  CUipcMemHandle ipc{};                   // ipc
  std::array<Parts, kMostSizes> parts{};  // vmm: in order; a descriptor for each part

  // @error unsupported: parts of more than kMostSizes sizes
  Expected<void> add_part(std::uint64_t bytes);
};

std::vector<std::byte> encode(const Words& words);
// @error parse
Expected<Words> decode(std::span<const std::byte> bytes);

}  // namespace kvloom::cuda
