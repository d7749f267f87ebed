#include "kvloom/session/progress.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <type_traits>

namespace kvloom {
namespace {

// All of a notice, without gaps:
//   version u8, last u8 (0 or 1), parts u16, payload u32 (bytes), parts x (group i32, layer i32, bytes i64), payload
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kHeadBytes = 8, kPartBytes = 16;
static_assert(kMaxParts <= std::numeric_limits<std::uint16_t>::max() && kMaxPayload <= std::numeric_limits<std::uint32_t>::max());

constexpr std::size_t bytes_of(std::size_t parts, std::size_t payload) { return kHeadBytes + parts * kPartBytes + payload; }

template <class T>
void put(std::vector<std::byte>& out, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i)
    out.push_back(static_cast<std::byte>(static_cast<std::make_unsigned_t<T>>(value) >> (8 * i)));
}

// Takes a field off the front.  @pre it is there
template <class T>
T take(std::span<const std::byte>& from) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= std::to_integer<std::uint64_t>(from[i]) << (8 * i);
  from = from.subspan(sizeof(T));
  return static_cast<T>(value);
}

struct Head {
  bool last;
  std::size_t parts;    // are there
  std::size_t payload;  // bytes; are there
};

// Takes the head off the front; what it tells is all of the rest.
Expected<Head> take_head(std::span<const std::byte>& from) {
  const std::size_t size = from.size();
  if (size < kHeadBytes) return fail(Code::parse, "a progress notice of {} B: its head alone has {}", size, kHeadBytes);
  const auto version = take<std::uint8_t>(from);
  if (version != kVersion)
    return fail(Code::unsupported, "a progress notice of version {}: this kvloom reads version {}", version, kVersion);
  const auto last = take<std::uint8_t>(from);
  if (last > 1) return fail(Code::parse, "a progress notice whose `last` is {}, neither 0 nor 1", last);
  const std::size_t parts = take<std::uint16_t>(from), payload = take<std::uint32_t>(from);
  if (parts > kMaxParts) return fail(Code::parse, "a progress notice of {} layers: at most {} are read", parts, kMaxParts);
  if (payload > kMaxPayload)
    return fail(Code::parse, "a progress notice with a payload of {} B: at most {} are read", payload, kMaxPayload);
  if (payload > 0 && last == 0)
    return fail(Code::parse, "a progress notice with a payload of {} B that is not the last one", payload);
  if (size != bytes_of(parts, payload))
    return fail(Code::parse, "a progress notice of {} B is {}: {} layers and a payload of {} B make {}", size,
                size < bytes_of(parts, payload) ? "cut short" : "too long", parts, payload, bytes_of(parts, payload));
  return Head{last == 1, parts, payload};
}

}  // namespace

std::size_t parts_that_fit(std::size_t payload, std::size_t most) {
  const std::size_t taken = bytes_of(0, payload);
  return most < taken ? 0 : std::min(kMaxParts, (most - taken) / kPartBytes);
}

std::vector<std::byte> encode_progress(const Progress& progress) {
  assert(progress.parts.size() <= kMaxParts && progress.payload.size() <= kMaxPayload);
  std::vector<std::byte> out;
  out.reserve(bytes_of(progress.parts.size(), progress.payload.size()));
  put(out, kVersion);
  put(out, static_cast<std::uint8_t>(progress.last ? 1 : 0));
  put(out, static_cast<std::uint16_t>(progress.parts.size()));
  put(out, static_cast<std::uint32_t>(progress.payload.size()));
  for (const LandedPart& part : progress.parts) {
    put(out, part.layer.group);
    put(out, part.layer.layer.value);
    put(out, part.bytes.value);
  }
  out.insert(out.end(), progress.payload.begin(), progress.payload.end());
  return out;
}

Expected<Progress> decode_progress(std::span<const std::byte> bytes) {
  const auto head = take_head(bytes);
  if (!head) return tl::unexpected(head.error());
  Progress out;
  out.last = head->last;
  out.parts.reserve(head->parts);
  for (std::size_t i = 0; i < head->parts; ++i) {
    const auto group = take<std::int32_t>(bytes), layer = take<std::int32_t>(bytes);
    const auto landed = take<std::int64_t>(bytes);
    if (group < 0 || layer < 0 || landed < 0)
      return fail(Code::parse, "a progress notice: part {} is {} B of group {} layer {}", i, landed, group, layer);
    out.parts.push_back({{group, LayerId(layer)}, Bytes(landed)});
  }
  out.payload.assign(bytes.begin(), bytes.end());
  return out;
}

}  // namespace kvloom
