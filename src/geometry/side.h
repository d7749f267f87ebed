// side.h: one side, prefill or decode: its sharding worked out for a model.  Stage: describe.
// Part of the sentence: "a cache layout is a function from a coordinate (layer, token, head, plane byte) to a byte in a region of a rank".
// What a rank holds of a group is a product of three index sets, one an axis; each axis is cut into disjoint parts, and a rank names its
// part of each. Ranks with the same three parts are replicas.
// Law of places (check_side): the n-th member of a rank's own token set stands in column n / page_tokens of its page table, slot
// n mod page_tokens.  For the cyclic rule that is vLLM's formula: column t / (P*N), slot ((t mod P*N) / (N*S)) * S + t mod S.
// Values only.  Layers are counted within the group (ordinals); heads globally; tokens by position in the request.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/geometry/cache_shape.h"
#include "kvloom/geometry/page_layout.h"
#include "kvloom/geometry/sharding.h"
#include "kvloom/geometry/strided_set.h"

namespace kvloom {

enum class TokenRule : std::uint8_t {
  all,      // every part is the whole axis (there is one part)
  cyclic,   // part d of N: tokens t with (t / stripe) mod N == d
  blocked,  // part d of N: block d of the request's tokens, the first (total mod N) blocks one longer.  Needs the total
  zigzag,   // part d of N: chunks d and 2N-1-d of 2N, of ceil(total / 2N) tokens.  Needs the total
  value,    // part d of N: the tokens of virtual pages v with v mod N == d; held as page v div N.  Known when tables are bound
};

struct TokenSplit {
  TokenRule rule = TokenRule::all;
  std::int32_t parts = 1;
  std::int64_t stripe = 0;  // cyclic only, tokens

  bool needs_total() const { return rule == TokenRule::blocked || rule == TokenRule::zigzag; }
  // The tokens of one part; `value` gives the whole axis, to be filtered by page.  kUnbounded: for ever; @pre a known total where it is needed
  StridedSet part(std::int32_t index, std::int64_t total) const;
  friend bool operator==(const TokenSplit&, const TokenSplit&) = default;
};

// Which part of each axis a rank has, and the how-manieth rank it is that has these three.
struct Place {
  std::int32_t layers = 0, heads = 0, tokens = 0;
  std::int32_t replica = 0;
  bool holds = true;  // false: the rank has nothing of the group (the other numbers are 0)

  friend bool operator==(const Place&, const Place&) = default;
};

// One cache group on one side.
struct GroupSide {
  std::string name;
  GroupKind kind = GroupKind::paged;
  std::vector<LayerId> layers;  // global ids; a layer's ordinal is its index here
  std::int32_t heads = 1;       // of the whole group
  std::vector<PlaneShape> planes;
  std::optional<Window> window;
  PageLayout layout;                    // of every rank: they hold equally many heads
  std::vector<StridedSet> layer_parts;  // ordinals; disjoint intervals, empty where there are more ranks than layers
  std::vector<StridedSet> head_parts;   // disjoint intervals of equal size
  TokenSplit tokens;
  std::vector<Place> places;  // [ranks]

  friend bool operator==(const GroupSide&, const GroupSide&) = default;
};

class Side {
 public:
  // `default_page`: tokens of a page where the words say none.
  // @error a word that does not fit the model (heads, layers, stripe against page), pointing at it and saying what is possible
  static Expected<Side> make(const CacheShape& shape, const Sharding& sharding, std::int64_t default_page = 64);

  const CacheShape& shape() const { return shape_; }
  const Sharding& sharding() const { return sharding_; }
  std::int64_t default_page() const { return default_page_; }
  std::int32_t ranks() const { return sharding_.ranks(); }
  const std::vector<GroupSide>& groups() const { return groups_; }  // without those that the side has not (`group:none`)
  const GroupSide* find(const std::string& group) const;

  // Replaces a group's layout, for engines that know their strides.  @error no such group, or heads or planes that differ
  Expected<void> set_layout(const std::string& group, PageLayout layout);

  // Bytes that `rank` keeps per token, averaged over a long request; state groups not counted.
  double bytes_per_token(Rank rank) const;

  friend bool operator==(const Side&, const Side&) = default;

 private:
  Side(CacheShape shape, Sharding sharding, std::int64_t default_page)
      : shape_(std::move(shape)), sharding_(std::move(sharding)), default_page_(default_page) {}

  CacheShape shape_;
  Sharding sharding_;
  std::int64_t default_page_;
  std::vector<GroupSide> groups_;
};

}  // namespace kvloom
