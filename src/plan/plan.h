// plan.h: which rank sends what to which rank.  Stage: compile.  Part of the sentence: "a plan is the map between two such layouts".
// A plan holds no path list. Each axis is cut by each side into parts, and parts meet (intersect) in closed form; the path from a source
// rank to a target rank is the product of what their parts have in common on the three axes. So a plan costs O(parts x parts) an axis.
// Where several source ranks hold the same (replicas), the plan says which of them sends: see `Senders`.
// Values only: address-free, length-free (unless a rule cuts the request's length: zigzag, blocked). Laws: plan/laws.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/geometry/side.h"

namespace kvloom {

// Tokens [begin, end) of a request: [prefix, total) is what a target asks for.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = kUnbounded;
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

// What of `range` a target still needs of one group: all of it; the window before its end; or the one row of a state.
TokenRange wanted(const GroupSide& target, TokenRange range);

// Meetings of all source parts with all target parts on one axis: [source parts, target parts], each a list of families.
class Meetings {
 public:
  Meetings() = default;
  Meetings(std::size_t source_parts, std::size_t target_parts) : target_parts_(target_parts) {
    begins_.reserve(source_parts * target_parts + 1);
  }

  std::span<const StridedSet> at(std::int32_t source, std::int32_t target) const {
    const std::size_t i = static_cast<std::size_t>(source) * target_parts_ + static_cast<std::size_t>(target);
    return {families_.data() + begins_[i], families_.data() + begins_[i + 1]};
  }
  bool any(std::int32_t source, std::int32_t target) const { return !at(source, target).empty(); }

  // Appends the next meeting in row order.
  void add(std::span<const StridedSet> families) {
    families_.insert(families_.end(), families.begin(), families.end());
    begins_.push_back(static_cast<std::uint32_t>(families_.size()));
  }

 private:
  std::size_t target_parts_ = 0;
  std::vector<std::uint32_t> begins_ = {0};
  std::vector<StridedSet> families_;
};

// Which of R replicas sends. Of the consumers of one source triple (its target ranks, in rank order) that take equally many
// layers, R at a time are served whole, one by each replica. What is left over, m' < R consumers of each such class, is dealt out
// by layers: layer l of left-over consumer j goes to replica (first + l * m') mod R, first = j + what the classes before were
// dealt. So the units (consumer, layer) that are dealt go round the replicas one by one: replicas differ by one unit at the most,
// and with layers pushed one by one all of them send at any time.
struct Senders {
  struct Share {
    std::int32_t consumer = -1;  // how-manieth consumer the target rank is; -1: none
    std::int32_t first = 0,
                 step = 0;  // its layer l (from 0) comes from replica (first + l * step) mod replicas; step 0: served whole
    friend bool operator==(const Share&, const Share&) = default;
  };
  std::int32_t replicas = 1;
  std::int32_t consumers = 0;
  std::int32_t whole = 0;     // of the consumers
  std::vector<Share> shares;  // [target ranks].  Empty where replicas == 1: nothing to choose
};

// One cache group of a plan.  Layers are counted by the target's ordinals (its `layers` list).
struct GroupPlan {
  const GroupSide* source = nullptr;  // in the plan's own sides
  const GroupSide* target = nullptr;
  Meetings layers;               // ordinals of target->layers; one interval each
  Meetings heads;                // global heads; one interval each
  Meetings tokens;               // positions in the request
  std::vector<Senders> senders;  // [source layer parts, source head parts, source token parts]

  const Senders& senders_of(const Place& source_place) const;
};

// What one source rank sends to one target rank of one group: a product.
struct Path {
  Rank source, target;
  std::int32_t group = 0;              // index in Plan::groups()
  StridedSet layers;                   // ordinals of the target's list
  StridedSet heads;                    // an interval, global
  std::span<const StridedSet> tokens;  // disjoint families; lives as long as the plan
  std::int64_t row_bytes = 0;          // of one token and layer: planes x heads of this path

  // Tokens of the path in `range`, an upper bound where a side's rule is `value`.
  std::int64_t token_count(TokenRange range) const;
};

class Plan {
 public:
  const Side& source() const { return *source_; }
  const Side& target() const { return *target_; }
  std::int64_t total() const { return total_; }  // kUnbounded: good for any length
  const std::vector<GroupPlan>& groups() const { return groups_; }

  // Nothing where the two ranks have nothing in common, or another replica sends it.  @cost O(1)
  std::optional<Path> path(std::int32_t group, Rank source, Rank target) const;
  // All paths, by source, then target, then group.
  std::vector<Path> paths() const;
  // Bytes that `path` moves for `range`, all its layers.
  Bytes bytes(const Path& path, TokenRange range) const;
  // Global ids of the path's layers.
  std::vector<LayerId> layer_ids(const Path& path) const;

 private:
  friend class Compiler;
  std::shared_ptr<const Side> source_;  // shared with the caller of compile and with copies of the plan; never changed
  std::shared_ptr<const Side> target_;
  std::int64_t total_ = kUnbounded;
  std::vector<GroupPlan> groups_;
};

}  // namespace kvloom
