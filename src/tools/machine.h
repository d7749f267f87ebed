// machine.h: what this machine has: for doctor, and for saying beforehand that memory will not do.  Stage: tools.
// Only tools ask the system.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvloom {

// Bytes; nothing where the system does not say, or sets no limit.
struct Memory {
  std::optional<std::int64_t> total;
  std::optional<std::int64_t> available;     // without swapping
  std::optional<std::int64_t> cgroup_limit;  // of this container; the least of all groups above
  std::optional<std::int64_t> cgroup_used;

  // What can be taken now, both limits considered.
  std::optional<std::int64_t> usable() const;
};
Memory read_memory();

}  // namespace kvloom
