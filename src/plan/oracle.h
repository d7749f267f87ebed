// oracle.h: the slow, obvious twin of plans and bindings.  Stage: compile.  Part of the sentence: "a cache layout is a function
// from a coordinate (layer, token, head, plane byte) to a byte in a region of a rank", one coordinate at a time.
// It reads the sharding words and answers by the formulas that the engines use; it knows no strided set, no meeting and no run,
// so that it can be wrong only in ways of its own. The laws (plan/laws.h, bind/laws.h) hold what is fast against it.
// Values only.  Layers are global ids, heads global, tokens positions in the request, planes in the order of the group's shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvloom/base/units.h"
#include "kvloom/geometry/side.h"

namespace kvloom {

// One side and one request of `total` tokens.  Groups are indices of side.groups().
class Oracle {
 public:
  // @pre `side` outlives this
  Oracle(const Side& side, std::int64_t total);

  const Side& side() const { return *side_; }
  std::int64_t total() const { return total_; }

  bool holds_layer(std::size_t group, Rank rank, LayerId layer) const;
  bool holds_head(std::size_t group, Rank rank, std::int64_t head) const;
  // `page`: what the page table says of the token's column; only ownership by page value reads it.
  bool holds_token(std::size_t group, Rank rank, std::int64_t token, std::int64_t page) const;
  // How many of the tokens [begin, end) the rank holds, by arithmetic.  @pre not ownership by page value
  std::int64_t count_tokens(std::size_t group, Rank rank, std::int64_t begin, std::int64_t end) const;
  bool by_value(std::size_t group) const { return facts_[group].by_value; }

  // What a side that has [0, prefix) still needs when the request has come to `end` tokens is [first_wanted, end_wanted):
  // windows and states of the group considered; empty if they cross.
  std::int64_t first_wanted(std::size_t group, std::int64_t prefix, std::int64_t end) const;
  std::int64_t end_wanted(std::size_t group, std::int64_t end) const;

  // Where a token that the rank holds stands: the column of its page table and the slot of that page.
  struct Spot {
    std::int64_t column = 0, slot = 0;
    friend bool operator==(const Spot&, const Spot&) = default;
  };
  Spot spot(std::size_t group, Rank rank, std::int64_t token) const;
  // Columns that a page table for the whole request has.
  std::int64_t columns(std::size_t group, Rank rank) const;
  // From the start of the rank's tensor of (group, layer), the token's column holding `page`.  @pre the rank holds token and head
  std::int64_t address(std::size_t group, Rank rank, std::int64_t token, std::int64_t head, std::size_t plane, std::int64_t byte,
                       std::int64_t page) const;

  // Ranks with equal signs hold the same layers, heads and tokens: they are replicas. Negative: the rank has nothing of it.
  std::int64_t sign(std::size_t group, Rank rank) const;

  // All bytes that the side's ranks want, replicas counted each.
  std::int64_t wanted_bytes(std::size_t group, std::int64_t prefix) const;

 private:
  struct Facts {
    const GroupSide* side = nullptr;
    bool uncut = false;           // replicated, or on one rank: no axis is cut
    std::int64_t only_rank = -1;  // of a group on one rank
    bool by_value = false;
    std::int64_t turns = 1;   // ranks that take turns at the tokens; 1: nobody does
    std::int64_t stripe = 1;  // tokens a turn
  };
  struct Seat {
    std::int64_t tp = 0, cp = 0, pp = 0;
  };
  Seat seat(Rank rank) const;
  std::int64_t turn(Rank rank) const;
  std::int64_t zigzag_chunk() const;
  bool uncut_holds(const Facts& facts, Rank rank) const;
  bool splits_request(std::size_t group) const;
  std::int64_t stage_of(std::int64_t layer) const;
  std::int64_t own_tokens_before(std::size_t group, Rank rank, std::int64_t token) const;

  const Side* side_;
  std::int64_t total_;
  std::vector<Facts> facts_;
};

}  // namespace kvloom
