// side_values.h: a side as plain values, for its text and wire forms.  Stage: describe.
// A Side follows from few values: the model's groups, the sharding words, the default page, and each group's layout. Only these
// travel; who reads them makes the side anew through the checked factories, so that no text and no bytes can make a side that
// breaks a law. These values come from a peer: they are bounded here, before any work that grows with them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/geometry/side.h"

namespace kvloom {

inline constexpr std::size_t kMaxGroups = 64;
inline constexpr std::size_t kMaxPlanes = 16;           // of one group
inline constexpr std::int64_t kMaxLayers = 65536;       // of all groups together
inline constexpr std::int64_t kMaxHeads = 65536;        // of one group
inline constexpr std::size_t kMaxNameBytes = 4096;      // of the model's name
inline constexpr std::size_t kMaxWordsBytes = 1 << 16;  // pp lists a number a stage
inline constexpr std::int64_t kMaxReadPieces =
    1 << 20;  // contiguous pieces of one page, all groups together: layouts are checked piece by piece

struct LayoutValues {
  std::int64_t page_tokens = 0;
  std::int64_t page_stride = 0;
  std::vector<PlaneLayout> planes;
};

struct SideValues {
  std::string words;
  std::int64_t default_page = 0;
  std::string model;
  std::int32_t layers = 0;
  std::vector<CacheGroup> groups;                    // notes are for people and do not travel
  std::vector<std::optional<LayoutValues>> layouts;  // [groups]; none for a group that the side has not
};

SideValues values_of(const Side& side);

// @post values_of(result) == values, but for words that say the same in another order
// @error exhausted: beyond a limit above; else whatever the factories refuse
// `wrong`: on error, what the error is about: "words", "layout NAME" or "" (all of it).
Expected<Side> make_side(const SideValues& values, std::string* wrong = nullptr);

}  // namespace kvloom
