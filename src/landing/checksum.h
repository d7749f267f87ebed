// checksum.h: a checksum of KV cache that does not depend on how it is sharded.  Stage: land.
// Law (check_checksum): the sum over all ranks of a side, each replica group counted once, is the same on every side that holds the same
// bytes, whatever rules, page sizes, layouts and tables it has; and one wrong bit, or two rows that have changed places, changes it.
// Each row (layer, token, head, plane) is hashed by itself and mixed with its coordinate; rows are added, so their order does not matter.
// Source: XXH3 (xxHash) for the rows; a commutative sum of row hashes as in set hashing (Bellare & Micciancio 1997).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/geometry/side.h"

namespace kvloom {

struct Checksum {
  std::uint64_t sum = 0;  // of row hashes, modulo 2^64
  std::int64_t rows = 0;

  Checksum& operator+=(const Checksum& other) {
    sum += other.sum;
    rows += other.rows;
    return *this;
  }
  friend bool operator==(const Checksum&, const Checksum&) = default;
};

// 16 hex digits and the number of rows: "9a3c...:1024".
std::string to_string(const Checksum& checksum);

// One row.  `bytes`: [plane bytes], contiguous.
Checksum row_checksum(LayerId layer, std::int64_t token, std::int64_t head, std::int64_t plane, std::span<const std::byte> bytes);

// What `rank` holds of tokens [begin, end) of one layer: its tensor and its page table.
// @pre the rank holds the layer; the table covers the tokens and `tensor` its pages (bind checks both for a transfer); total as in compile
// @cost one pass over the bytes; docs/measurements says at how many GB/s
Checksum checksum(const GroupSide& group, Rank rank, LayerId layer, std::span<const std::byte> tensor,
                  std::span<const PageId> table, std::int64_t begin, std::int64_t end, std::int64_t total);

}  // namespace kvloom
