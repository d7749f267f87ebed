// content.h: bytes whose right value anyone can work out: what `run` fills caches with and checks them against.  Stage: tools.
// A byte is a function of its coordinate (request, group, layer, token, head, plane, byte) and of nothing else: no plan, no rank, no address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvloom/base/units.h"

namespace kvloom {

struct RowCoordinate {
  std::int32_t group = 0;
  LayerId layer;
  std::int64_t token = 0, head = 0, plane = 0;
  std::int64_t request = 0;
};

// Writes the row's bytes [0, out.size()).
void content_row(const RowCoordinate& row, std::span<std::byte> out);

// What memory holds that nobody should write: a function of whose it is and where, so that a misplaced canary shows too.
void canary(std::uint64_t owner, std::int64_t offset, std::span<std::byte> out);

}  // namespace kvloom
