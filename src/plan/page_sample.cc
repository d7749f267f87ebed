#include "kvloom/plan/page_sample.h"

#include <algorithm>
#include <optional>

namespace kvloom {
namespace {

// The n-th member.  @pre n below the size
std::int64_t nth(const StridedSet& set, std::int64_t n) {
  const std::int64_t block = set.length() == kUnbounded ? kUnbounded : set.length() * set.inner_count();
  const std::int64_t rest = n % block;
  return set.start() + n / block * set.stride() + rest / set.length() * set.inner_stride() + rest % set.length();
}

std::optional<std::int64_t> next_member(std::span<const StridedSet> families, std::int64_t from) {
  std::optional<std::int64_t> best;
  for (const StridedSet& family : families) {
    const std::int64_t below = family.count_below(from);
    if (family.bounded() && below >= family.size()) continue;
    const std::int64_t member = nth(family, below);
    if (!best || member < *best) best = member;
  }
  return best;
}

// The tokens from the first to the last of the page that holds `token`, as [begin, end).
TokenRange page_around(const StridedSet& part, std::int64_t page_tokens, std::int64_t token) {
  const std::int64_t first = part.count_below(token) / page_tokens * page_tokens, last = first + page_tokens - 1;
  const bool ends = part.bounded() && last >= part.size();
  return {nth(part, first), ends ? part.end() : nth(part, last) + 1};
}

class Cutter {
 public:
  Cutter(const Plan& plan, const Path& path) : path_(path), group_(plan.groups()[static_cast<std::size_t>(path.group)]) {
    const Place &from = place(*group_.source, path.source), &to = place(*group_.target, path.target);
    source_ = group_.source->tokens.part(from.tokens, plan.total());
    target_ = group_.target->tokens.part(to.tokens, plan.total());
    const auto first_head = [](const GroupSide& side, const Place& at) {
      return side.head_parts[static_cast<std::size_t>(at.heads)].start();
    };
    heads_ = {path.heads.start() - first_head(*group_.source, from), path.heads.start() - first_head(*group_.target, to),
              path.heads.size()};
  }

  PageSample run(TokenRange range) {
    const std::int64_t source_page = group_.source->layout.page_tokens(), target_page = group_.target->layout.page_tokens();
    out_.source_page = source_page > target_page;
    const StridedSet& part = out_.source_page ? source_ : target_;
    const auto member = next_member(path_.tokens, range.begin);
    if (!member || *member >= range.end) return out_;
    TokenRange page = page_around(part, std::max(source_page, target_page), *member);
    if (page.begin < range.begin)  // cut by the prefix: the next one
      if (const auto next = next_member(path_.tokens, page.end); next && *next < range.end) {
        const TokenRange other = page_around(part, std::max(source_page, target_page), *next);
        if (other.end <= range.end) page = other;
      }
    out_.whole = page.begin >= range.begin && page.end <= range.end;
    cut({std::max(page.begin, range.begin), std::min(page.end, range.end)});
    for (const TokenPiece& piece : out_.pieces) expand(group_.source->layout, group_.target->layout, heads_, piece, out_.runs);
    return out_;
  }

 private:
  static const Place& place(const GroupSide& side, Rank rank) { return side.places[static_cast<std::size_t>(rank.value)]; }

  void cut(TokenRange window) {
    std::vector<std::pair<std::int64_t, std::int64_t>> segments;  // token, length
    for (const StridedSet& family : path_.tokens)
      for (const StridedSet& part : clip(family, window.begin, window.end))
        for (std::int64_t k = 0; k < part.count(); ++k)
          for (std::int64_t i = 0; i < part.inner_count(); ++i)
            segments.emplace_back(part.start() + k * part.stride() + i * part.inner_stride(), part.length());
    std::sort(segments.begin(), segments.end());
    for (const auto& [token, length] : segments) add(source_.count_below(token), target_.count_below(token), length);
  }

  // Neighbours on both sides, cut where a page ends on either.
  void add(std::int64_t source, std::int64_t target, std::int64_t length) {
    out_.tokens += length;
    while (length > 0) {
      const std::int64_t source_page = group_.source->layout.page_tokens(), target_page = group_.target->layout.page_tokens();
      const std::int64_t s = source % source_page, t = target % target_page;
      const std::int64_t take = std::min({length, source_page - s, target_page - t});
      if (!extend({source / source_page, target / target_page}, s, t, take)) out_.pieces.push_back({s, t, take, 1, 0, 0});
      pages_ = {source / source_page, target / target_page};
      source += take;
      target += take;
      length -= take;
    }
  }

  // Goes on in the last piece, if that lies in the same two pages and steps evenly.
  bool extend(std::pair<std::int64_t, std::int64_t> pages, std::int64_t s, std::int64_t t, std::int64_t take) {
    if (out_.pieces.empty() || pages != pages_) return false;
    TokenPiece& last = out_.pieces.back();
    if (last.count == 1 && s == last.source_slot + last.length && t == last.target_slot + last.length) {
      last.length += take;
      return true;
    }
    if (take != last.length) return false;
    if (last.count == 1) {
      last.source_step = s - last.source_slot;
      last.target_step = t - last.target_slot;
      last.count = 2;
      return true;
    }
    if (s != last.source_slot + last.count * last.source_step || t != last.target_slot + last.count * last.target_step)
      return false;
    ++last.count;
    return true;
  }

  const Path& path_;
  const GroupPlan& group_;
  StridedSet source_, target_;
  HeadSlice heads_;
  std::pair<std::int64_t, std::int64_t> pages_{-1, -1};
  PageSample out_;
};

}  // namespace

PageSample sample_page(const Plan& plan, const Path& path, TokenRange range) { return Cutter(plan, path).run(range); }

}  // namespace kvloom
