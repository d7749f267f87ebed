#include "kvloom/tools/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string_view>

namespace kvloom {
namespace {

// The number that a file consists of ("max" is none).
std::optional<std::int64_t> number_in(const std::string& file) {
  std::ifstream in(file);
  std::string word;
  std::int64_t value = 0;
  if (!(in >> word)) return std::nullopt;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return value;
}

// "MemTotal:  1234 kB" in bytes.
std::optional<std::int64_t> meminfo(std::string_view key) {
  std::ifstream in("/proc/meminfo");
  std::string name, unit;
  std::int64_t value = 0;
  while (in >> name >> value) {
    std::getline(in, unit);
    if (name == key) return value * 1024;
  }
  return std::nullopt;
}

// This process's control group, as version 2 mounts it ("0::/path") or version 1's memory controller.
void read_cgroup(Memory& memory) {
  std::ifstream in("/proc/self/cgroup");
  std::string line;
  constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;  // version 1 writes "none" as a number near 2^63
  const auto take = [&](const std::string& limit_file, const std::string& used_file) {
    const auto limit = number_in(limit_file);
    if (!limit || *limit >= kNoLimit || (memory.cgroup_limit && *memory.cgroup_limit <= *limit)) return;
    memory.cgroup_limit = limit;
    memory.cgroup_used = number_in(used_file);
  };
  const auto walk = [&](std::string path, const std::string& root, const std::string& limit, const std::string& used) {
    for (;; path.erase(path.rfind('/'))) {
      if (path == "/") path.clear();
      take(fmt::format("{}{}/{}", root, path, limit), fmt::format("{}{}/{}", root, path, used));
      if (path.empty()) return;
    }
  };
  while (std::getline(in, line)) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos || line.size() <= second + 1 || line[second + 1] != '/')
      continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) walk(path, "/sys/fs/cgroup", "memory.max", "memory.current");
    if (controllers == "memory") walk(path, "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes");
  }
}

}  // namespace

std::optional<std::int64_t> Memory::usable() const {
  std::optional<std::int64_t> out = available;
  if (cgroup_limit) {
    const std::int64_t left = std::max<std::int64_t>(0, *cgroup_limit - cgroup_used.value_or(0));
    out = out ? std::min(*out, left) : left;
  }
  return out;
}

Memory read_memory() {
  Memory memory;
  memory.total = meminfo("MemTotal:");
  memory.available = meminfo("MemAvailable:");
  read_cgroup(memory);
  return memory;
}

}  // namespace kvloom
