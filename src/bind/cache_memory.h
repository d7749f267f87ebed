// cache_memory.h: where one rank's tensors are: for each cache group and layer that it holds, which stretches of which registered regions.
// Stage: bind.  Part of the sentence: "... to a byte in a region of a rank".  Values only: regions are indices of the owner's list.
// A rank describes its own memory to its transport, and a target rank describes its memory to each source, once a connection.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/bind/region.h"
#include "kvloom/geometry/side.h"

namespace kvloom {

struct PlacedTensor {
  std::int32_t group = 0;  // index in Side::groups()
  LayerId layer;
  std::vector<TensorPart> parts;
  friend bool operator==(const PlacedTensor&, const PlacedTensor&) = default;
};

// A (group, layer) that a rank holds.
using HeldTensor = std::pair<std::int32_t, LayerId>;
std::vector<HeldTensor> held_tensors(const Side& side, Rank rank);

class CacheMemory {
 public:
  CacheMemory() = default;
  // `regions`: their lengths.
  // Tensors that the rank holds may be left out: those can't be moved.
  // @error invalid_argument: a rank that the side has not; a tensor that the rank does not hold, or that is there twice (with group and layer);
  //        as TensorRegions::make; out_of_range: a part outside of its region
  static Expected<CacheMemory> make(const Side& side, Rank rank, std::span<const Bytes> regions,
                                    std::vector<PlacedTensor> tensors);

  // nullptr: it was left out.
  const TensorRegions* find(std::int32_t group, LayerId layer) const {
    const auto at = tensors_.find({group, layer});
    return at == tensors_.end() ? nullptr : &at->second;
  }

 private:
  std::map<HeldTensor, TensorRegions> tensors_;
};

}  // namespace kvloom
