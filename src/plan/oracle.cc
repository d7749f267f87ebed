#include "kvloom/plan/oracle.h"

#include <algorithm>

namespace kvloom {
namespace {

// Block d of n things over N: the first n mod N blocks are one longer.
std::int64_t block_begin(std::int64_t n, std::int64_t parts, std::int64_t d) {
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < d; ++i) begin += n / parts + (i < n % parts ? 1 : 0);
  return begin;
}

std::int64_t block_of(std::int64_t n, std::int64_t parts, std::int64_t index) {
  std::int64_t d = 0;
  while (d + 1 < parts && index >= block_begin(n, parts, d + 1)) ++d;
  return d;
}

}  // namespace

Oracle::Oracle(const Side& side, std::int64_t total) : side_(&side), total_(total) {
  const Sharding& words = side.sharding();
  for (const GroupSide& group : side.groups()) {
    Facts facts;
    facts.side = &group;
    const auto own = words.groups().find(group.name);
    const GroupWords none;
    const GroupWords& said = own == words.groups().end() ? none : own->second;
    facts.uncut = said.holders == GroupWords::Holders::replicated || said.holders == GroupWords::Holders::one_rank;
    if (said.holders == GroupWords::Holders::one_rank) facts.only_rank = said.rank;
    if (!facts.uncut && group.kind == GroupKind::paged) {
      const bool interleave = words.cp_rule() == CpRule::interleave;
      facts.turns = words.dcp() * (interleave ? words.cp() : 1);
      facts.by_value = facts.turns > 1 && (said.by_value || (words.dcp_by_value() && !said.stripe));
      facts.stripe = interleave ? words.cp_stripe() : words.dcp_stripe();
      if (said.stripe) facts.stripe = *said.stripe;
      if (facts.stripe == 0) facts.stripe = group.layout.page_tokens();
    }
    facts_.push_back(facts);
  }
}

Oracle::Seat Oracle::seat(Rank rank) const {
  const Sharding& words = side_->sharding();
  return {rank.value % words.tp(), rank.value / words.tp() % words.cp(), rank.value / words.tp() / words.cp()};
}

// Whose turn it is when (token / stripe) mod turns says so: vLLM's total_cp_rank = pcp rank x dcp size + dcp rank.
std::int64_t Oracle::turn(Rank rank) const {
  const Sharding& words = side_->sharding();
  const Seat at = seat(rank);
  return (words.cp_rule() == CpRule::interleave ? at.cp * words.dcp() : 0) + at.tp % words.dcp();
}

bool Oracle::uncut_holds(const Facts& facts, Rank rank) const { return facts.only_rank < 0 || facts.only_rank == rank.value; }

// Zigzag or blocked context parallelism, which cut the request's length.
bool Oracle::splits_request(std::size_t group) const {
  const CpRule rule = side_->sharding().cp_rule();
  return !facts_[group].uncut && facts_[group].side->kind == GroupKind::paged &&
         (rule == CpRule::zigzag || rule == CpRule::blocked);
}

std::int64_t Oracle::zigzag_chunk() const {
  const std::int64_t chunks = 2 * std::int64_t{side_->sharding().cp()};
  return (total_ + chunks - 1) / chunks;
}

// ---- who holds what ----

std::int64_t Oracle::stage_of(std::int64_t layer) const {
  const Sharding& words = side_->sharding();
  if (layer >= side_->shape().layers()) return words.pp() - 1;
  if (words.pp_layers().empty()) return block_of(side_->shape().layers(), words.pp(), layer);
  std::int64_t stage = 0;
  for (std::int64_t end = words.pp_layers()[0]; layer >= end; end += words.pp_layers()[static_cast<std::size_t>(stage)]) ++stage;
  return stage;
}

bool Oracle::holds_layer(std::size_t group, Rank rank, LayerId layer) const {
  const Facts& facts = facts_[group];
  const std::vector<LayerId>& owned = facts.side->layers;
  if (std::find(owned.begin(), owned.end(), layer) == owned.end()) return false;
  if (facts.uncut) return uncut_holds(facts, rank);
  const Sharding& words = side_->sharding();
  const Seat at = seat(rank);
  if (stage_of(layer.value) != at.pp) return false;
  if (words.cp_rule() != CpRule::layers) return true;
  if (layer.value >= side_->shape().layers()) return at.cp == words.cp() - 1;
  std::int64_t begin = 0, end = 0;  // the stage's layers
  for (std::int64_t l = 0; l < side_->shape().layers(); ++l) {
    if (stage_of(l) < at.pp) ++begin;
    if (stage_of(l) <= at.pp) ++end;
  }
  return block_of(end - begin, words.cp(), layer.value - begin) == at.cp;
}

bool Oracle::holds_head(std::size_t group, Rank rank, std::int64_t head) const {
  const Facts& facts = facts_[group];
  if (facts.uncut) return uncut_holds(facts, rank);
  const Sharding& words = side_->sharding();
  const std::int64_t turns = facts.side->kind == GroupKind::state ? 1 : words.dcp();  // a state has no tokens to take turns at
  const std::int64_t slices = words.tp() / turns, slice = seat(rank).tp / turns, heads = facts.side->heads;
  if (slices >= heads) return slice * heads / slices == head;  // each head on several slices
  return head / (heads / slices) == slice;
}

bool Oracle::holds_token(std::size_t group, Rank rank, std::int64_t token, std::int64_t page) const {
  const Facts& facts = facts_[group];
  if (facts.uncut) return uncut_holds(facts, rank);
  if (facts.side->kind == GroupKind::state) return token == 0;
  if (splits_request(group)) {
    const std::int64_t parts = side_->sharding().cp(), d = seat(rank).cp;
    if (side_->sharding().cp_rule() == CpRule::blocked) return block_of(total_, parts, token) == d;
    const std::int64_t chunk = token / zigzag_chunk();
    return chunk == d || chunk == 2 * parts - 1 - d;
  }
  if (facts.turns == 1) return true;
  if (facts.by_value) return page % facts.turns == turn(rank);
  return token / facts.stripe % facts.turns == turn(rank);
}

// Members of the rank's own tokens below `token`, with the request's length taken as it is.
std::int64_t Oracle::own_tokens_before(std::size_t group, Rank rank, std::int64_t token) const {
  const Facts& facts = facts_[group];
  if (facts.uncut) return uncut_holds(facts, rank) ? token : 0;
  if (splits_request(group)) {
    const std::int64_t parts = side_->sharding().cp(), d = seat(rank).cp;
    const auto inside = [&](std::int64_t begin, std::int64_t end) {
      return std::clamp(token, begin, std::max(begin, end)) - begin;
    };
    if (side_->sharding().cp_rule() == CpRule::blocked)
      return inside(block_begin(total_, parts, d), block_begin(total_, parts, d + 1));
    const std::int64_t chunk = zigzag_chunk(), mirror = 2 * parts - 1 - d;
    return inside(d * chunk, (d + 1) * chunk) + inside(mirror * chunk, (mirror + 1) * chunk);
  }
  if (facts.turns == 1) return token;
  const std::int64_t cycle = facts.stripe * facts.turns;
  return token / cycle * facts.stripe + std::clamp<std::int64_t>(token % cycle - turn(rank) * facts.stripe, 0, facts.stripe);
}

std::int64_t Oracle::count_tokens(std::size_t group, Rank rank, std::int64_t begin, std::int64_t end) const {
  if (end <= begin) return 0;
  return own_tokens_before(group, rank, end) - own_tokens_before(group, rank, begin);
}

std::int64_t Oracle::sign(std::size_t group, Rank rank) const {
  const Facts& facts = facts_[group];
  if (facts.uncut) return uncut_holds(facts, rank) ? 0 : -1;
  const Sharding& words = side_->sharding();
  const Seat at = seat(rank);
  const bool cut_by_cp = words.cp_rule() == CpRule::layers || splits_request(group);
  std::int64_t head = 0;
  while (!holds_head(group, rank, head)) ++head;
  const std::int64_t tokens = facts.turns > 1 ? turn(rank) : 0;
  return ((at.pp * words.cp() + (cut_by_cp ? at.cp : 0)) * facts.side->heads + head) * (std::int64_t{words.cp()} * words.dcp()) +
         tokens;
}

// ---- what is wanted ----

std::int64_t Oracle::first_wanted(std::size_t group, std::int64_t prefix, std::int64_t end) const {
  const GroupSide& side = *facts_[group].side;
  if (side.kind == GroupKind::state) return 0;
  if (!side.window) return prefix;
  const std::int64_t size = side.window->tokens;
  return std::max(prefix, side.window->kind == Window::Kind::sliding ? end - size : end - end % size);
}

std::int64_t Oracle::end_wanted(std::size_t group, std::int64_t end) const {
  return facts_[group].side->kind == GroupKind::state ? std::min<std::int64_t>(1, end) : end;
}

std::int64_t Oracle::wanted_bytes(std::size_t group, std::int64_t prefix) const {
  const GroupSide& side = *facts_[group].side;
  const std::int64_t begin = first_wanted(group, prefix, total_), end = std::max(begin, end_wanted(group, total_));
  std::int64_t sum = 0;
  for (std::int32_t r = 0; r < side_->ranks(); ++r) {
    std::int64_t layers = 0, row = 0;
    for (const LayerId layer : side.layers) layers += holds_layer(group, Rank(r), layer) ? 1 : 0;
    for (std::int64_t head = 0; head < side.heads; ++head)
      for (const PlaneShape& plane : side.planes) row += holds_head(group, Rank(r), head) ? plane.bytes : 0;
    // By page value the ranks that take turns share the tokens in some way: count them all for the first of them.
    const std::int64_t tokens = !by_value(group)     ? count_tokens(group, Rank(r), begin, end)
                                : turn(Rank(r)) == 0 ? end - begin
                                                     : 0;
    sum += layers * row * tokens;
  }
  return sum;
}

// ---- where it stands ----

Oracle::Spot Oracle::spot(std::size_t group, Rank rank, std::int64_t token) const {
  const Facts& facts = facts_[group];
  const std::int64_t page = facts.side->layout.page_tokens();
  if (facts.uncut || facts.side->kind == GroupKind::state || facts.by_value || (facts.turns == 1 && !splits_request(group)))
    return {token / page, token % page};
  if (splits_request(group)) {
    const std::int64_t own = own_tokens_before(group, rank, token);
    return {own / page, own % page};
  }
  // vLLM: one table for all that take turns; a column is a widened page.
  const std::int64_t wide = page * facts.turns, off = token % wide;
  return {token / wide, off / (facts.turns * facts.stripe) * facts.stripe + off % facts.stripe};
}

std::int64_t Oracle::columns(std::size_t group, Rank rank) const {
  const Facts& facts = facts_[group];
  if (facts.side->kind == GroupKind::state) return 1;
  const std::int64_t page = facts.side->layout.page_tokens();
  const std::int64_t own = splits_request(group) ? own_tokens_before(group, rank, total_) : total_;
  const std::int64_t wide = page * (facts.uncut || facts.by_value ? 1 : facts.turns);
  return (own + wide - 1) / wide;
}

std::int64_t Oracle::address(std::size_t group, Rank rank, std::int64_t token, std::int64_t head, std::size_t plane,
                             std::int64_t byte, std::int64_t page) const {
  const Facts& facts = facts_[group];
  std::int64_t first = 0;
  while (!holds_head(group, rank, first)) ++first;
  const PlaneLayout& layout = facts.side->layout.planes()[plane];
  const std::int64_t own_page = facts.by_value ? page / facts.turns : page;
  const std::int64_t content =
      layout.content_stride == 0 ? byte : byte / layout.element_bytes * layout.content_stride + byte % layout.element_bytes;
  return own_page * facts.side->layout.page_stride() + layout.offset + spot(group, rank, token).slot * layout.token_stride +
         (head - first) * layout.head_stride + content;
}

}  // namespace kvloom
