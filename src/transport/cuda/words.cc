#include "kvloom/transport/cuda/words.h"

#include <cstring>

namespace kvloom::cuda {

static_assert(std::has_unique_object_representations_v<Words>, "no padding: it travels as it stands");
static_assert(sizeof(Words) <= 1024, "the tail of a message");

Expected<void> Words::add_part(std::uint64_t bytes) {
  if (sizes > 0 && parts[sizes - 1].bytes == bytes) {
    ++parts[sizes - 1].count;
    return {};
  }
  if (sizes == kMostSizes)
    return fail(Code::unsupported, "memory of parts of more than {} different sizes in turn: lend it in several regions",
                kMostSizes);
  parts[sizes++] = {bytes, 1};
  return {};
}

std::vector<std::byte> encode(const Words& words) {
  std::vector<std::byte> out(sizeof(Words));
  std::memcpy(out.data(), &words, sizeof(Words));
  return out;
}

Expected<Words> decode(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(Words))
    return fail(Code::parse, "{} B of words about memory; there are {}", bytes.size(), sizeof(Words));
  Words out;
  std::memcpy(&out, bytes.data(), sizeof(Words));
  const auto kind = static_cast<std::uint32_t>(out.kind);
  if (kind < 1 || kind > 3) return fail(Code::parse, "memory of kind {}: neither IPC, VMM nor host", kind);
  if (out.sizes > Words::kMostSizes) return fail(Code::parse, "parts of {} sizes", out.sizes);
  if (out.kind == Words::Kind::vmm && out.sizes == 0) return fail(Code::parse, "VMM memory of no parts");
  return out;
}

}  // namespace kvloom::cuda
