#include "kvloom/bind/bind.h"

#include <algorithm>
#include <numeric>

namespace kvloom {
namespace {

constexpr std::int64_t kMaxSegments = std::int64_t{1} << 16;  // of one period; longer periods are walked in parts

struct PageSizes {
  std::int64_t source, target;
  std::int64_t larger() const { return std::max(source, target); }
  std::int64_t common() const { return std::gcd(source, target); }
};

// One stretch [begin, begin + length) of tokens that are neighbours on both sides: up to a page border, then blocks of the size that
// divides both pages, then the rest. The larger page's border is taken, since the smaller one's fall between.
void add_interval(std::int64_t source, std::int64_t target, std::int64_t length, PageSizes pages, std::vector<Blocks>& out) {
  const std::int64_t slot = pages.source >= pages.target ? source % pages.source : target % pages.target;
  const std::int64_t head = std::min(length, slot == 0 ? 0 : pages.larger() - slot);
  const auto single = [&](std::int64_t from, std::int64_t size) {
    if (size > 0) out.push_back({size, 1, 1, source + from, 0, 0, target + from, 0, 0});
  };
  single(0, head);
  const std::int64_t block = pages.common();
  const std::int64_t blocks = (length - head) / block;
  if (blocks > 0) out.push_back({block, 1, blocks, source + head, 0, block, target + head, 0, block});
  single(head + blocks * block, length - head - blocks * block);
}

// Positions of a family's segments on both sides step evenly (postcondition of intersect), so two evaluations a level give the steps.
void add_family(const StridedSet& family, const StridedSet& source, const StridedSet& target, PageSizes pages,
                std::vector<Blocks>& out) {
  const std::int64_t start = family.start();
  const std::int64_t s = source.count_below(start), t = target.count_below(start);
  if (family.interval()) return add_interval(s, t, family.length(), pages, out);
  const auto inner = [&](const StridedSet& side, std::int64_t at) {
    return family.flat() ? 0 : side.count_below(start + family.inner_stride()) - at;
  };
  const auto step = [&](const StridedSet& side, std::int64_t at) { return side.count_below(start + family.stride()) - at; };
  const Blocks blocks{family.length(),  family.inner_count(), family.count(), s, inner(source, s), step(source, s), t,
                      inner(target, t), step(target, t)};
  if (family.length() <= pages.larger()) return out.push_back(blocks);
  for (std::int64_t k = 0; k < blocks.count; ++k)  // long segments: zigzag has two of them
    for (std::int64_t i = 0; i < blocks.inner_count; ++i)
      add_interval(s + k * blocks.source_step + i * blocks.source_inner, t + k * blocks.target_step + i * blocks.target_inner,
                   blocks.length, pages, out);
}

// Blocks after which both sides stand at the same slot again.
std::int64_t period_of(const Blocks& blocks, const BoundSide& source, const BoundSide& target) {
  const std::int64_t a = source.page_tokens / std::gcd(source.page_tokens, blocks.source_step);
  const std::int64_t b = target.page_tokens / std::gcd(target.page_tokens, blocks.target_step);
  return checked_mul(a / std::gcd(a, b), b).value_or(kUnbounded);
}

// Blocks until the side with the larger page enters a new one, so that periods begin at its border.
std::int64_t blocks_to_border(const Blocks& blocks, const BoundSide& source, const BoundSide& target) {
  const bool by_source = source.page_tokens >= target.page_tokens;
  const std::int64_t page = by_source ? source.page_tokens : target.page_tokens;
  const std::int64_t slot = (by_source ? blocks.source : blocks.target) % page;
  const std::int64_t step = by_source ? blocks.source_step : blocks.target_step;
  if (step <= 0 || slot < step) return 0;
  return std::min(blocks.count, ceil_div(page - slot, step));
}

}  // namespace

// ---- runs ----

// Joins what touches, then what steps evenly. Local copies live in registers while a lane is given out.
struct BoundPath::Joiner {
  Run run, block;
  Run* out;
  Run* end;  // one before the caller's last: closing may give out one more

  void put(std::int64_t s, std::int64_t t, std::int64_t n) {
    if (s == block.source_offset.value + block.bytes.value && t == block.target_offset.value + block.bytes.value) {
      block.bytes.value += n;
      return;
    }
    close_block();
    block.source_offset.value = s;
    block.target_offset.value = t;
    block.bytes.value = n;
    block.count = 1;
  }

  // The open block goes into the open run: as its second piece, which sets the steps, or as one more piece.
  void close_block() {
    if (block.count == 0) return;
    if (run.bytes == block.bytes) {
      if (run.count == 1) {
        run.source_step = block.source_offset - run.source_offset;
        run.target_step = block.target_offset - run.target_offset;
        run.count = 2;
        return;
      }
      if (block.source_offset == run.source_offset + run.source_step * run.count &&
          block.target_offset == run.target_offset + run.target_step * run.count) {
        ++run.count;
        return;
      }
    }
    close_run();
    run = block;
  }

  void put_strided(const Run& next) {
    close_block();
    block = {Bytes(0), Bytes(0), Bytes(-1), 0, Bytes(0), Bytes(0)};
    const bool even = run.count == 1 || (run.source_step == next.source_step && run.target_step == next.target_step);
    const bool goes_on = run.count > 0 && even && run.bytes == next.bytes &&
                         next.source_offset == run.source_offset + next.source_step * run.count &&
                         next.target_offset == run.target_offset + next.target_step * run.count;
    if (goes_on) {
      run.source_step = next.source_step;
      run.target_step = next.target_step;
      run.count += next.count;
      return;
    }
    close_run();
    run = next;
  }

  void close_run() {
    if (run.count > 0) *out++ = run;
  }

  // True, and the open run is given out, if the open block is one piece of `bytes` that cannot join it.
  bool settle(std::int64_t bytes) {
    if (block.bytes.value != bytes || out >= end) return false;
    if (run.count > 0 && run.bytes > block.bytes) return false;  // the block may yet grow to the run's size
    const bool pairs = run.count == 1 && run.bytes == block.bytes;
    const bool goes_on = run.count > 1 && run.bytes == block.bytes &&
                         block.source_offset == run.source_offset + run.source_step * run.count &&
                         block.target_offset == run.target_offset + run.target_step * run.count;
    if (pairs || goes_on) return false;
    close_run();
    run = {Bytes(0), Bytes(0), Bytes(-1), 0, Bytes(0), Bytes(0)};
    return true;
  }
};

void BoundPath::rewind() {
  at_ = 0;
  block_ = 0;
  cells_.clear();
  repeats_ = repeat_ = 0;
  lane_begin_ = lane_end_ = cell_ = 0;
  open_run_ = open_block_ = {Bytes(0), Bytes(0), Bytes(-1), 0, Bytes(0), Bytes(0)};
}

// A piece of neighbours, cut at both sides' page borders; joined to the piece before where they share both pages.
void BoundPath::add_piece(std::int64_t source, std::int64_t target, std::int64_t length) {
  while (length > 0) {
    const std::int64_t s = source % source_.page_tokens, t = target % target_.page_tokens;
    const std::int64_t take = std::min({length, source_.page_tokens - s, target_.page_tokens - t});
    const std::int64_t s_column = source / source_.page_tokens, t_column = target / target_.page_tokens;
    source += take;
    target += take;
    length -= take;
    if (!cuts_.empty() && cuts_.back().source_column == s_column && cuts_.back().target_column == t_column) {
      TokenPiece& last = cuts_.back().piece;
      if (last.count == 1 && s == last.source_slot + last.length && t == last.target_slot + last.length) {
        last.length += take;
        continue;
      }
      if (last.count == 1 && take == last.length) {
        last.source_step = s - last.source_slot;
        last.target_step = t - last.target_slot;
        last.count = 2;
        continue;
      }
      if (take == last.length && s == last.source_slot + last.count * last.source_step &&
          t == last.target_slot + last.count * last.target_step) {
        ++last.count;
        continue;
      }
    }
    cuts_.push_back({s_column, t_column, {s, t, take, 1, 0, 0}});
  }
}

// Blocks [first, first + count) as runs between columns, lane by lane.
void BoundPath::build_cells(const Blocks& blocks, std::int64_t first, std::int64_t count) {
  cuts_.clear();
  for (std::int64_t k = first; k < first + count; ++k)
    for (std::int64_t i = 0; i < blocks.inner_count; ++i)
      add_piece(blocks.source + k * blocks.source_step + i * blocks.source_inner,
                blocks.target + k * blocks.target_step + i * blocks.target_inner, blocks.length);
  cells_.clear();
  for (const Cut& cut : cuts_) {
    scratch_.clear();
    expand(*source_layout_, *target_layout_, heads_, cut.piece, scratch_);
    for (std::size_t lane = 0; lane < scratch_.size(); ++lane)
      cells_.push_back({cut.source_column, cut.target_column, lane, scratch_[lane]});
  }
  std::stable_sort(cells_.begin(), cells_.end(), [](const CellRun& a, const CellRun& b) { return a.lane < b.lane; });
}

// Works out the next period of cuts; false when all blocks have been given out.
bool BoundPath::next_period() {
  if (at_ == blocks_.size()) return false;
  const Blocks& blocks = blocks_[at_];
  const std::int64_t left = blocks.count - block_;
  const std::int64_t most = std::max<std::int64_t>(1, kMaxSegments / blocks.inner_count);
  const std::int64_t head = block_ == 0 ? blocks_to_border(blocks, source_, target_) : 0;
  const std::int64_t period = period_of(blocks, source_, target_);
  std::int64_t size = std::min(left, most);
  repeats_ = 1;
  if (head > 0) {
    size = std::min(size, head);
  } else if (period <= most && period <= left) {
    size = period;
    repeats_ = left / period;
    source_advance_ = period * blocks.source_step / source_.page_tokens;
    target_advance_ = period * blocks.target_step / target_.page_tokens;
  }
  build_cells(blocks, block_, size);
  block_ += size * repeats_;
  if (block_ == blocks.count) {
    ++at_;
    block_ = 0;
  }
  begin_lane(0);
  return true;
}

// A lane of one whole-piece run a repeat, which is what pages of equal size come to: the loop that has to be fast. Pages in no order
// leave two by two (any two make a progression), and that is all that the inner loop does; what joins further goes the joiner's way.
bool BoundPath::give_out_pages(Joiner& joiner) {
  const CellRun& cell = cells_[lane_begin_];
  const std::int64_t s_stride = source_.page_stride, t_stride = target_.page_stride, bytes = cell.run.bytes.value;
  const std::int64_t s_offset = cell.run.source_offset.value, t_offset = cell.run.target_offset.value;
  const std::int64_t s_advance = source_advance_, t_advance = target_advance_, repeats = repeats_;
  const PageId* s = source_.pages + cell.source_column + repeat_ * s_advance;
  const PageId* t = target_.pages + cell.target_column + repeat_ * t_advance;
  std::int64_t repeat = repeat_;
  const auto next = [&](std::int64_t& source, std::int64_t& target) {
    source = s->value * s_stride + s_offset;
    target = t->value * t_stride + t_offset;
    s += s_advance;
    t += t_advance;
  };
  while (repeat < repeats && joiner.out < joiner.end) {
    std::int64_t s0 = 0, t0 = 0;
    next(s0, t0);
    ++repeat;
    joiner.put(s0, t0, bytes);
    if (!joiner.settle(bytes)) continue;
    Run* out = joiner.out;
    while (repeat + 2 <= repeats && out < joiner.end) {
      std::int64_t s1 = 0, t1 = 0, s2 = 0, t2 = 0;
      next(s1, t1);
      next(s2, t2);
      const std::int64_t ds = s1 - s0, dt = t1 - t0, es = s2 - s1, et = t2 - t1;
      const bool touch = (ds == bytes && dt == bytes) || (es == bytes && et == bytes);
      if (touch || (ds == es && dt == et)) {
        s -= 2 * s_advance;
        t -= 2 * t_advance;
        break;
      }
      *out++ = {Bytes(s0), Bytes(t0), Bytes(bytes), 2, Bytes(ds), Bytes(dt)};
      s0 = s2;
      t0 = t2;
      repeat += 2;
    }
    joiner.out = out;
    joiner.block.source_offset = Bytes(s0);
    joiner.block.target_offset = Bytes(t0);
  }
  repeat_ = repeat;
  return repeat == repeats;
}

// One cell of the current repeat.
template <bool kFiltered>
void BoundPath::give_out_cell(Joiner& joiner, const CellRun& cell) {
  bool mine = true;
  const auto page_of = [&mine](const BoundSide& side, std::int64_t column) {
    const std::int64_t page = side.pages[column].value;
    if (!kFiltered || side.parts == 0) return page;
    mine = mine && page % side.parts == side.part;
    return page / side.parts;
  };
  Run run = cell.run;
  run.source_offset += Bytes(page_of(source_, cell.source_column + repeat_ * source_advance_) * source_.page_stride);
  run.target_offset += Bytes(page_of(target_, cell.target_column + repeat_ * target_advance_) * target_.page_stride);
  if (kFiltered && !mine) return;
  if (run.count == 1)
    joiner.put(run.source_offset.value, run.target_offset.value, run.bytes.value);
  else
    joiner.put_strided(run);
}

// What is left of the lane; false if there was no more room.
template <bool kFiltered>
bool BoundPath::give_out_lane(Joiner& joiner) {
  if (!kFiltered && lane_end_ == lane_begin_ + 1 && cells_[lane_begin_].run.count == 1) return give_out_pages(joiner);
  for (; repeat_ < repeats_; ++repeat_, cell_ = lane_begin_)
    for (; cell_ < lane_end_; ++cell_) {
      if (joiner.out >= joiner.end) return false;
      give_out_cell<kFiltered>(joiner, cells_[cell_]);
    }
  return true;
}

// What is left of the period, lane by lane; false if there was no more room.
template <bool kFiltered>
bool BoundPath::give_out(Joiner& joiner) {
  while (lane_begin_ < cells_.size()) {
    if (!give_out_lane<kFiltered>(joiner)) return false;
    begin_lane(lane_end_);
  }
  return true;
}

void BoundPath::begin_lane(std::size_t first) {
  lane_begin_ = lane_end_ = cell_ = first;
  while (lane_end_ < cells_.size() && cells_[lane_end_].lane == cells_[lane_begin_].lane) ++lane_end_;
  repeat_ = 0;
}

std::size_t BoundPath::next(std::span<Run> runs) {
  Joiner joiner{open_run_, open_block_, runs.data(), runs.data() + runs.size() - 1};
  const bool filtered = source_.parts != 0 || target_.parts != 0;
  bool more = true;
  for (;;) {
    if (!(filtered ? give_out<true>(joiner) : give_out<false>(joiner))) break;
    if (!next_period()) {
      more = false;
      break;
    }
  }
  if (!more) {
    joiner.close_block();
    joiner.block.count = 0;
    if (joiner.out < runs.data() + runs.size()) {
      joiner.close_run();
      joiner.run.count = 0;
      joiner.run.bytes = Bytes(-1);
    }
    cells_.clear();
  }
  open_run_ = joiner.run;
  open_block_ = joiner.block;
  return static_cast<std::size_t>(joiner.out - runs.data());
}

// ---- bind ----

class Binder {
 public:
  Binder(const Plan& plan, const Path& path, const PageTable& source, const PageTable& target)
      : plan_(plan), path_(path), group_(plan.groups()[static_cast<std::size_t>(path.group)]), source_(source), target_(target) {}

  Expected<BoundPath> run(TokenRange range, TokenRange chunk) {
    if (range.begin < 0 || range.end < range.begin || range.end == kUnbounded)
      return fail(Code::invalid_argument, "token range [{}, {}): the prefix must be 0 or more and not beyond the tokens",
                  range.begin, range.end);
    if (plan_.total() != kUnbounded && range.end > plan_.total())
      return fail(Code::out_of_range, "token range [{}, {}) of a plan for {} tokens: compile a plan for this length", range.begin,
                  range.end, plan_.total());
    const Place& from = group_.source->places[static_cast<std::size_t>(path_.source.value)];
    const Place& to = group_.target->places[static_cast<std::size_t>(path_.target.value)];
    if (auto ok = add_side("prefill", path_.source, *group_.source, from, source_, out_.source_); !ok)
      return tl::unexpected(ok.error());
    if (auto ok = add_side("decode", path_.target, *group_.target, to, target_, out_.target_); !ok)
      return tl::unexpected(ok.error());
    out_.source_layout_ = &group_.source->layout;
    out_.target_layout_ = &group_.target->layout;
    const auto first_head = [](const GroupSide& side, const Place& at) {
      return side.head_parts[static_cast<std::size_t>(at.heads)].start();
    };
    out_.heads_ = {path_.heads.start() - first_head(*group_.source, from), path_.heads.start() - first_head(*group_.target, to),
                   path_.heads.size()};
    const TokenRange want = wanted(*group_.target, range);
    const TokenRange part{std::max(want.begin, chunk.begin), std::min(want.end, chunk.end)};
    if (auto ok = add_blocks(from, to, part); !ok) return tl::unexpected(ok.error());
    out_.bytes_ = Bytes(count_tokens() * path_.row_bytes);
    return std::move(out_);
  }

 private:
  Expected<void> add_side(const char* name, Rank rank, const GroupSide& side, const Place& place, const PageTable& table,
                          BoundSide& out) const {
    const std::int64_t parts = side.tokens.rule == TokenRule::value ? side.tokens.parts : 0;
    const std::int64_t pool = parts == 0 ? table.pool_pages() : ceil_div(table.pool_pages(), parts);
    std::int64_t extent = side.layout.page_stride();
    for (const PlaneLayout& plane : side.layout.planes()) extent = std::max(extent, plane.offset + side.layout.page_stride());
    const auto bytes = checked_mul(pool, side.layout.page_stride());
    if (!bytes || !checked_add(*bytes, extent))
      return fail(Code::overflow, "{} rank {} group {}: a pool of {} pages of {} B does not fit 63 bits", name, rank.value,
                  side.name, pool, side.layout.page_stride());
    out = {table.pages().data(), side.layout.page_tokens(), side.layout.page_stride(), parts, parts == 0 ? 0 : place.tokens};
    return check_planes_apart(name, rank, side, pool);
  }

  // Planes that are tensors of their own (K and V apart) begin past the first one's page; its whole pool has to fit before them.
  static Expected<void> check_planes_apart(const char* name, Rank rank, const GroupSide& side, std::int64_t pool) {
    std::vector<std::int64_t> offsets;
    for (const PlaneLayout& plane : side.layout.planes()) offsets.push_back(plane.offset);
    std::sort(offsets.begin(), offsets.end());
    const std::int64_t stride = side.layout.page_stride();
    for (std::size_t i = 1, first = 0; i < offsets.size(); ++i) {
      const std::int64_t apart = offsets[i] - offsets[first];
      if (apart < stride) continue;  // in the same page
      if (pool > 0 && apart <= (pool - 1) * stride)
        return fail(Code::invalid_argument,
                    "{} rank {} group {}: a pool of {} pages of {} B reaches into the plane that begins {} B after the first: "
                    "lay it out for {} pages",
                    name, rank.value, side.name, pool, stride, apart, pool);
      first = i;
    }
    return {};
  }

  Expected<void> add_blocks(const Place& from, const Place& to, TokenRange range) {
    const StridedSet source = group_.source->tokens.part(from.tokens, plan_.total());
    const StridedSet target = group_.target->tokens.part(to.tokens, plan_.total());
    const PageSizes pages{out_.source_.page_tokens, out_.target_.page_tokens};
    std::int64_t first = kUnbounded, last = -1;
    for (const StridedSet& family : path_.tokens)
      for (const StridedSet& part : clip(family, range.begin, range.end)) {
        first = std::min(first, part.start());
        last = std::max(last, part.end() - 1);
        add_family(part, source, target, pages, out_.blocks_);
      }
    if (last < 0) return {};
    if (auto ok = check_columns("prefill", path_.source, source, out_.source_, source_, first, last); !ok) return ok;
    return check_columns("decode", path_.target, target, out_.target_, target_, first, last);
  }

  Expected<void> check_columns(const char* name, Rank rank, const StridedSet& set, const BoundSide& side, const PageTable& table,
                               std::int64_t first, std::int64_t last) const {
    const std::int64_t from = set.count_below(first) / side.page_tokens, to = set.count_below(last) / side.page_tokens;
    const auto columns = static_cast<std::int64_t>(table.pages().size());
    if (to >= columns)
      return fail(Code::out_of_range,
                  "{} rank {} group {}: token {} stands in column {} (pages of {} tokens), but the page table has {} columns",
                  name, rank.value, group_.target->name, last, to, side.page_tokens, columns);
    if (table.has_gaps())
      for (std::int64_t column = from; column <= to; ++column)
        if (table.pages()[static_cast<std::size_t>(column)] == kNoPage)
          return fail(Code::out_of_range, "{} rank {} group {}: column {} names no page, but tokens {} to {} need it", name,
                      rank.value, group_.target->name, column, first, last);
    return {};
  }

  // With rule `value` on a side, only what its pages say counts; then the table is walked.
  std::int64_t count_tokens() const {
    if (out_.source_.parts == 0 && out_.target_.parts == 0) {
      std::int64_t sum = 0;
      for (const Blocks& blocks : out_.blocks_) sum += blocks.length * blocks.inner_count * blocks.count;
      return sum;
    }
    BoundPath walk = out_;
    std::int64_t bytes = 0;
    std::vector<Run> runs(64);
    while (const std::size_t n = walk.next(runs))
      for (std::size_t i = 0; i < n; ++i) bytes += runs[i].total().value;
    return bytes / path_.row_bytes;
  }

  const Plan& plan_;
  const Path& path_;
  const GroupPlan& group_;
  const PageTable& source_;
  const PageTable& target_;
  BoundPath out_;
};

Expected<BoundPath> bind(const Plan& plan, const Path& path, const PageTable& source, const PageTable& target, TokenRange range) {
  return Binder(plan, path, source, target).run(range, {0, kUnbounded});
}

Expected<BoundPath> bind(const Plan& plan, const Path& path, const PageTable& source, const PageTable& target, TokenRange range,
                         TokenRange chunk) {
  return Binder(plan, path, source, target).run(range, chunk);
}

}  // namespace kvloom
