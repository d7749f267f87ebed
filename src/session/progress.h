// progress.h: what a source says through the transport, behind its bytes: which layers are there now, and that all of them are.
// Stage: stream.  Values; one encoding of fixed-width little-endian fields, read by one function that checks everything (decode_progress).
// The transport tells a notice only after all writes with its tag that were posted before it are visible, so a notice may be believed as far
// as its sender may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/landing/coverage.h"

namespace kvloom {

inline constexpr std::size_t kMaxPayload = std::size_t{64} << 10;  // bytes that ride with completion
inline constexpr std::size_t kMaxParts = 4096;                     // layers of one notice

// Bytes of one layer that this notice stands behind.
struct LandedPart {
  CacheLayer layer;
  Bytes bytes;
  friend bool operator==(const LandedPart&, const LandedPart&) = default;
};

struct Progress {
  std::vector<LandedPart> parts;
  bool last = false;               // nothing comes after it
  std::vector<std::byte> payload;  // only with `last`: first token, draft hidden state, log-probabilities; opaque
  friend bool operator==(const Progress&, const Progress&) = default;
};

// How many parts a notice of `most` bytes has room for beside a payload of `payload`: 0 if not even that fits.
std::size_t parts_that_fit(std::size_t payload, std::size_t most);

// @pre at most kMaxParts parts and kMaxPayload bytes of payload
std::vector<std::byte> encode_progress(const Progress& progress);
// @error parse: cut short, too long, counts over the limits, negative groups, layers or bytes, a payload without `last`; unsupported:
//        another version
Expected<Progress> decode_progress(std::span<const std::byte> bytes);

}  // namespace kvloom
