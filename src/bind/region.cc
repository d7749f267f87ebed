#include "kvloom/bind/region.h"

#include <algorithm>

namespace kvloom {
namespace {

Bytes end_of(const TensorPart& part) { return part.begin + part.length; }

// Where byte `at` lies on one side, and how many bytes go on from it in the same region.
struct Spot {
  const TensorPart* part = nullptr;
  Bytes room;
};

Expected<Spot> locate(const char* side, const TensorRegions& regions, Bytes piece, Bytes piece_end, Bytes at) {
  const TensorPart* part = regions.find(at);
  if (part != nullptr) return Spot{part, end_of(*part) - at};
  const TensorPart* before = at > piece ? regions.find(at - Bytes(1)) : nullptr;
  if (before != nullptr)
    return fail(Code::out_of_range, "{} bytes [{}, {}) reach past region {}, which ends at {}, and no region goes on there", side,
                piece.value, piece_end.value, before->region, end_of(*before).value);
  return fail(Code::out_of_range, "{} bytes [{}, {}) lie in no region", side, piece.value, piece_end.value);
}

// How many pieces from `offset` on, `step` apart, lie wholly in [begin, end).  @pre the first does
std::int64_t pieces_within(Bytes offset, Bytes step, Bytes bytes, const TensorPart& part, std::int64_t count) {
  if (step.value > 0) return std::min(count, (end_of(part) - bytes - offset).value / step.value + 1);
  if (step.value < 0) return std::min(count, (offset - part.begin).value / -step.value + 1);
  return count;
}

PlacedRun placed(const Spot& source, const Spot& target, const Run& run) {
  PlacedRun out{source.part->region, target.part->region, run};
  out.run.source_offset = run.source_offset - source.part->begin + source.part->region_offset;
  out.run.target_offset = run.target_offset - target.part->begin + target.part->region_offset;
  return out;
}

// One piece, cut wherever a region ends on either side.
Expected<void> place_piece(Bytes source_at, Bytes target_at, Bytes bytes, const TensorRegions& source,
                           const TensorRegions& target, std::vector<PlacedRun>& out) {
  for (Bytes done; done < bytes;) {
    const auto from = locate("source", source, source_at, source_at + bytes, source_at + done);
    if (!from) return tl::unexpected(from.error());
    const auto to = locate("target", target, target_at, target_at + bytes, target_at + done);
    if (!to) return tl::unexpected(to.error());
    const Bytes take = std::min({bytes - done, from->room, to->room});
    out.push_back(placed(*from, *to, {source_at + done, target_at + done, take, 1, Bytes(0), Bytes(0)}));
    done += take;
  }
  return {};
}

Expected<void> place_run(Run run, const TensorRegions& source, const TensorRegions& target, std::vector<PlacedRun>& out) {
  while (run.count > 0) {
    const TensorPart* from = source.find(run.source_offset);
    const TensorPart* to = target.find(run.target_offset);
    const bool whole = from != nullptr && to != nullptr && run.source_offset + run.bytes <= end_of(*from) &&
                       run.target_offset + run.bytes <= end_of(*to);
    std::int64_t taken = 1;
    if (whole) {
      taken = std::min(pieces_within(run.source_offset, run.source_step, run.bytes, *from, run.count),
                       pieces_within(run.target_offset, run.target_step, run.bytes, *to, run.count));
      Run part = run;
      part.count = taken;
      if (taken == 1) part.source_step = part.target_step = Bytes(0);
      out.push_back(placed({from, Bytes(0)}, {to, Bytes(0)}, part));
    } else if (auto ok = place_piece(run.source_offset, run.target_offset, run.bytes, source, target, out); !ok) {
      return ok;
    }
    run.source_offset += run.source_step * taken;
    run.target_offset += run.target_step * taken;
    run.count -= taken;
  }
  return {};
}

}  // namespace

Expected<TensorRegions> TensorRegions::make(std::vector<TensorPart> parts) {
  if (parts.empty()) return fail(Code::invalid_argument, "a tensor of no parts");
  std::sort(parts.begin(), parts.end(), [](const TensorPart& a, const TensorPart& b) { return a.begin < b.begin; });
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const TensorPart& part = parts[i];
    if (part.begin < Bytes(0) || part.length <= Bytes(0) || part.region_offset < Bytes(0) ||
        !checked_add(part.begin.value, part.length.value) || !checked_add(part.region_offset.value, part.length.value))
      return fail(Code::invalid_argument, "region {}: {} bytes at {} (region offset {}) of a tensor", part.region,
                  part.length.value, part.begin.value, part.region_offset.value);
    if (i > 0 && end_of(parts[i - 1]) > part.begin)
      return fail(Code::invalid_argument, "regions {} and {} both hold byte {} of a tensor", parts[i - 1].region, part.region,
                  part.begin.value);
  }
  TensorRegions out;
  out.parts_ = std::move(parts);
  return out;
}

TensorRegions TensorRegions::whole(Bytes length, std::int32_t region, Bytes region_offset) {
  TensorRegions out;
  out.parts_ = {{Bytes(0), length, region, region_offset}};
  return out;
}

const TensorPart* TensorRegions::find(Bytes offset) const {
  const auto after =
      std::upper_bound(parts_.begin(), parts_.end(), offset, [](Bytes at, const TensorPart& part) { return at < part.begin; });
  if (after == parts_.begin()) return nullptr;
  const TensorPart& part = *(after - 1);
  return offset < end_of(part) ? &part : nullptr;
}

Expected<void> place(std::span<const Run> runs, const TensorRegions& source, const TensorRegions& target,
                     std::vector<PlacedRun>& out) {
  const std::size_t before = out.size();
  for (const Run& run : runs)
    if (auto ok = place_run(run, source, target, out); !ok) {
      out.resize(before);
      return ok;
    }
  return {};
}

}  // namespace kvloom
