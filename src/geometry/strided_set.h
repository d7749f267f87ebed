// strided_set.h: the index sets that sharding rules make.  Stage: describe.  Part of the sentence: where a coordinate's axis is cut.
// A strided set is a nested family of line segments: `count` blocks, a `stride` apart, each of `inner_count` segments of `length`
// indices, an `inner_stride` apart. Flat families, intervals and the empty set are the simple cases; counts may be unbounded.
// Values only, canonical from birth: touching segments join, single blocks are flat.  Law: check_strided_set (against enumeration).
// Text: `none` | `start+length` | `start+length/stride*count` | `start+length/inner_stride*inner_count/stride*count`; `inf` for unbounded.
// Source: Ramaswamy & Banerjee 1995 (FALLS); Isaila & Tichy 2002 (nesting).
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"

namespace kvloom {

// "No end": indices stay below it.
inline constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

class StridedSet {
 public:
  StridedSet() = default;  // the empty set
  static StridedSet none() { return {}; }
  static StridedSet all() { return interval(0, kUnbounded); }
  // [begin, end); empty if end <= begin.  @pre begin >= 0
  static StridedSet interval(std::int64_t begin, std::int64_t end);

  // @error invalid_argument if a number is negative, segments overlap (stride < length), or the last index does not fit
  static Expected<StridedSet> make(std::int64_t start, std::int64_t length, std::int64_t stride, std::int64_t count);
  static Expected<StridedSet> make(std::int64_t start, std::int64_t length, std::int64_t inner_stride, std::int64_t inner_count,
                                   std::int64_t stride, std::int64_t count);
  static Expected<StridedSet> parse(std::string_view text);

  std::int64_t start() const { return start_; }
  std::int64_t length() const { return length_; }              // kUnbounded: an interval without end
  std::int64_t inner_stride() const { return inner_stride_; }  // 0 where inner_count is 1
  std::int64_t inner_count() const { return inner_count_; }
  std::int64_t stride() const { return stride_; }  // 0 where count is 1
  std::int64_t count() const { return count_; }    // kUnbounded: repeats for ever

  bool empty() const { return count_ == 0; }
  bool interval() const { return count_ == 1 && inner_count_ == 1; }
  bool flat() const { return inner_count_ <= 1; }
  bool bounded() const { return count_ != kUnbounded && length_ != kUnbounded; }
  // One past the last index; kUnbounded if there is none.
  std::int64_t end() const;
  bool contains(std::int64_t index) const;
  // Members below `index`: also the position of a member within the set.  @cost O(1)
  std::int64_t count_below(std::int64_t index) const;
  std::int64_t count_in(std::int64_t begin, std::int64_t end) const {
    return end <= begin ? 0 : count_below(end) - count_below(begin);
  }
  // The number of members.  @pre bounded()
  std::int64_t size() const { return count_below(end()); }
  // Indices after which the set looks the same: its stride; 1 for an interval without end; 0 if it is bounded.
  std::int64_t period() const;

  friend bool operator==(const StridedSet&, const StridedSet&) = default;

 private:
  StridedSet(std::int64_t start, std::int64_t length, std::int64_t inner_stride, std::int64_t inner_count, std::int64_t stride,
             std::int64_t count);
  void canonicalise();

  std::int64_t start_ = 0;
  std::int64_t length_ = 0;
  std::int64_t inner_stride_ = 0;
  std::int64_t inner_count_ = 0;
  std::int64_t stride_ = 0;
  std::int64_t count_ = 0;
};

std::string to_string(const StridedSet& set);
// Sets joined by '|'; "none" where there is none.
std::string to_string(const std::vector<StridedSet>& sets);

// The part of `set` within [begin, end): a cut block at the head, whole blocks, a cut block at the tail; ascending, disjoint.
// @post at most 5 families  @cost O(1)
std::vector<StridedSet> clip(const StridedSet& set, std::int64_t begin, std::int64_t end);

// Where two flat sets meet.  Law: check_intersect (against enumeration).
// Both repeat, so they meet in a pattern that repeats every lcm(a.stride, b.stride): found with one modular inverse, not by walking.
// @pre a.flat() and b.flat()
// @post every index of the result is in a and in b, each once; families are disjoint, sorted by start; within one family a step from
//       segment to segment moves the position in a (and in b) by one constant, and so does a step from block to block
// @cost O(log stride + families), independent of count
std::vector<StridedSet> intersect(const StridedSet& a, const StridedSet& b);

}  // namespace kvloom
