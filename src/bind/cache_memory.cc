#include "kvloom/bind/cache_memory.h"

#include <algorithm>

namespace kvloom {

std::vector<HeldTensor> held_tensors(const Side& side, Rank rank) {
  std::vector<HeldTensor> out;
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(side.groups().size()); ++g) {
    const GroupSide& group = side.groups()[static_cast<std::size_t>(g)];
    const Place& place = group.places[static_cast<std::size_t>(rank.value)];
    if (!place.holds) continue;
    const StridedSet& layers = group.layer_parts[static_cast<std::size_t>(place.layers)];
    for (std::int64_t l = layers.start(); l < layers.start() + layers.size(); ++l)
      out.emplace_back(g, group.layers[static_cast<std::size_t>(l)]);
  }
  return out;
}

namespace {

Expected<void> check_parts(const PlacedTensor& tensor, std::span<const Bytes> regions) {
  for (const TensorPart& part : tensor.parts) {
    if (part.region < 0 || static_cast<std::size_t>(part.region) >= regions.size())
      return fail(Code::out_of_range, "group {} layer {}: region {} of {}", tensor.group, tensor.layer.value, part.region,
                  regions.size());
    const Bytes length = regions[static_cast<std::size_t>(part.region)];
    const auto end = checked_add(part.region_offset.value, part.length.value);
    if (part.region_offset < Bytes(0) || part.length < Bytes(0) || !end || *end > length.value)
      return fail(Code::out_of_range, "group {} layer {}: {} B at {} of region {}, which has {} B", tensor.group,
                  tensor.layer.value, part.length.value, part.region_offset.value, part.region, length.value);
  }
  return {};
}

}  // namespace

Expected<CacheMemory> CacheMemory::make(const Side& side, Rank rank, std::span<const Bytes> regions,
                                        std::vector<PlacedTensor> tensors) {
  if (rank.value < 0 || rank.value >= side.ranks())
    return fail(Code::invalid_argument, "rank {} of a side of {} ranks", rank.value, side.ranks());
  CacheMemory out;
  for (PlacedTensor& tensor : tensors) {
    if (auto ok = check_parts(tensor, regions); !ok) return tl::unexpected(ok.error());
    auto parts = TensorRegions::make(std::move(tensor.parts));
    if (!parts) return fail(parts.error().code, "group {} layer {}: {}", tensor.group, tensor.layer.value, parts.error().message);
    if (!out.tensors_.try_emplace({tensor.group, tensor.layer}, std::move(*parts)).second)
      return fail(Code::invalid_argument, "group {} layer {} is there twice", tensor.group, tensor.layer.value);
  }
  const auto held = held_tensors(side, rank);
  for (const auto& [tensor, parts] : out.tensors_)
    if (!std::binary_search(held.begin(), held.end(), tensor))
      return fail(Code::invalid_argument, "rank {} does not hold group {} layer {}", rank.value, tensor.first,
                  tensor.second.value);
  return out;
}

}  // namespace kvloom
