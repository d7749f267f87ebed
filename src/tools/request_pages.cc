#include "kvloom/tools/request_pages.h"

#include <algorithm>

#include "kvloom/tools/content.h"
#include "kvloom/tools/rank_memory.h"
#include "kvloom/tools/tables.h"

namespace kvloom {
namespace {

constexpr std::int64_t kTensorAlign = 4096;
constexpr std::int64_t kMostAtOnce = 64 << 20;  // bytes that are checked or put by one call

// Calls `take` with the index of the first page and the number of pages, for each stretch of pages that lie one behind the other.
// @pre ascending
template <class Take>
Expected<void> by_stretches(std::span<const PageId> pages, std::int64_t page_bytes, Take take) {
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(1, kMostAtOnce / page_bytes));
  for (std::size_t first = 0, past = 0; first < pages.size(); first = past) {
    past = first + 1;
    while (past < pages.size() && past - first < most && pages[past].value == pages[past - 1].value + 1) ++past;
    if (auto ok = take(first, past - first); !ok) return ok;
  }
  return {};
}

std::vector<PageId> sorted(std::span<const PageId> pages) {
  std::vector<PageId> out(pages.begin(), pages.end());
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace

Expected<std::unique_ptr<RequestPages>> RequestPages::make(std::shared_ptr<const Side> side, Rank rank,
                                                           std::vector<std::int64_t> pool_pages, std::uint64_t seed,
                                                           const RankTransport& transport) {
  std::unique_ptr<RequestPages> out(new RequestPages(std::move(side), rank));
  for (const GroupSide& group : out->side_->groups())
    if (group.tokens.rule == TokenRule::value)
      return fail(Code::unsupported, "group {}: pages that have ranks by their value need one allocator for all ranks",
                  group.name);
  std::int64_t length = 0;
  std::vector<PlacedTensor> placed;
  for (const HeldTensor& held : held_tensors(*out->side_, rank)) {
    const auto g = static_cast<std::size_t>(held.first);
    const auto bytes = checked_mul(pool_pages[g], out->side_->groups()[g].layout.page_stride());
    const auto next = bytes ? checked_add(length, ceil_div(*bytes, kTensorAlign) * kTensorAlign) : std::nullopt;
    if (!next) return fail(Code::overflow, "the cache of rank {} does not fit 63 bits", rank.value);
    out->tensors_[held] = {length, *bytes};
    placed.push_back({held.first, held.second, {{Bytes(0), Bytes(*bytes), 0, Bytes(length)}}});
    length = *next;
  }
  std::vector<const Region*> regions;
  if (length > 0) {
    auto store = transport.allocate(Bytes(length));
    if (!store) return tl::unexpected(store.error());
    out->store_ = std::move(*store);
    regions.push_back(&out->store_.region());
  }
  auto local = LocalCache::make(out->side_, rank, regions, std::move(placed));
  if (!local) return tl::unexpected(local.error());
  out->local_ = std::move(*local);
  out->pool_pages_ = std::move(pool_pages);
  std::mt19937_64 random(seed * 1009 + static_cast<std::uint64_t>(rank.value));
  for (const std::int64_t pages : out->pool_pages_) {
    std::vector<PageId>& free = out->free_.emplace_back();
    for (std::int64_t page = 0; page < pages; ++page) free.emplace_back(page);
    std::shuffle(free.begin(), free.end(), random);
  }
  for (const auto& [held, place] : out->tensors_)
    for (const PageId page : out->free_[static_cast<std::size_t>(held.first)]) out->canary_page(held.first, held.second, page);
  if (auto ok = out->store_.put_all(); !ok) return tl::unexpected(ok.error());
  return out;
}

std::span<std::byte> RequestPages::tensor(std::int32_t group, LayerId layer) const {
  const Place& place = tensors_.at({group, layer});
  return store_.memory().subspan(static_cast<std::size_t>(place.offset), static_cast<std::size_t>(place.length));
}

std::span<std::byte> RequestPages::page(std::int32_t group, LayerId layer, PageId id) const {
  const auto stride = static_cast<std::size_t>(page_bytes(group));
  return tensor(group, layer).subspan(static_cast<std::size_t>(id.value) * stride, stride);
}

std::int64_t RequestPages::offset_of(std::int32_t group, LayerId layer, PageId id) const {
  return tensors_.at({group, layer}).offset + id.value * page_bytes(group);
}

void RequestPages::canary_page(std::int32_t group, LayerId layer, PageId id) const {
  canary(owner(), offset_of(group, layer, id), page(group, layer, id));
}

Expected<void> RequestPages::put_pages(const HeldTensor& held, std::span<const PageId> pages) const {
  const std::vector<PageId> ascending = sorted(pages);
  const std::int64_t bytes = page_bytes(held.first);
  return by_stretches(ascending, bytes, [&](std::size_t first, std::size_t count) {
    return store_.put(offset_of(held.first, held.second, ascending[first]), static_cast<std::int64_t>(count) * bytes);
  });
}

Expected<std::int64_t> RequestPages::count_wrong(const HeldTensor& held, std::span<const PageId> pages,
                                                 std::span<const std::byte> expected) const {
  std::int64_t wrong = 0;
  const auto bytes = static_cast<std::size_t>(page_bytes(held.first));
  auto ok = by_stretches(pages, page_bytes(held.first), [&](std::size_t first, std::size_t count) {
    return store_.count_wrong(offset_of(held.first, held.second, pages[first]), expected.subspan(first * bytes, count * bytes))
        .map([&](std::int64_t more) { wrong += more; });
  });
  if (!ok) return tl::unexpected(ok.error());
  return wrong;
}

std::int64_t RequestPages::columns(std::size_t group, std::int64_t tokens, std::int64_t total) const {
  return columns_needed(side_->groups()[group], rank_, tokens, total);
}

Expected<std::vector<CacheTable>> RequestPages::take(std::int64_t request, std::int64_t tokens, std::int64_t total) {
  auto& tables = requests_[request];
  tables.resize(side_->groups().size());
  std::vector<CacheTable> out(tables.size());
  for (std::size_t g = 0; g < tables.size(); ++g) {
    const auto wanted = static_cast<std::size_t>(columns(g, tokens, total));
    if (wanted > tables[g].size()) {
      const std::size_t more = wanted - tables[g].size();
      if (more > free_[g].size())
        return fail(Code::exhausted, "group {}: {} pages are wanted, {} are free", side_->groups()[g].name, more,
                    free_[g].size());
      tables[g].insert(tables[g].end(), free_[g].end() - static_cast<std::ptrdiff_t>(more), free_[g].end());
      free_[g].resize(free_[g].size() - more);
    }
    out[g] = {tables[g], pool_pages_[g]};
  }
  return out;
}

Expected<void> RequestPages::give_back(std::int64_t request) {
  const auto at = requests_.find(request);
  if (at == requests_.end()) return {};
  for (const auto& [held, place] : tensors_) {
    const std::vector<PageId>& pages = at->second[static_cast<std::size_t>(held.first)];
    for (const PageId page : pages) canary_page(held.first, held.second, page);
    if (auto ok = put_pages(held, pages); !ok) return ok;
  }
  for (std::size_t g = 0; g < free_.size(); ++g) free_[g].insert(free_[g].end(), at->second[g].begin(), at->second[g].end());
  requests_.erase(at);
  return {};
}

Expected<void> RequestPages::fill(std::int64_t request, LayerId layer, std::int64_t begin, std::int64_t end, std::int64_t total) {
  const auto& tables = requests_.at(request);
  for (const auto& [held, place] : tensors_) {
    if (held.second != layer) continue;
    const auto g = static_cast<std::size_t>(held.first);
    const GroupSide& group = side_->groups()[g];
    const bool state = group.kind == GroupKind::state;
    if (state && end < total) continue;
    const std::vector<PageId>& table = tables[g];
    write_rows({&group, rank_, held.first, layer, total, request}, table, state ? 0 : begin, state ? 1 : end,
               tensor(held.first, layer));
    // The pages that have these rows: all of a state's.
    const StridedSet own = group.tokens.part(group.places[static_cast<std::size_t>(rank_.value)].tokens, total);
    const std::int64_t page_tokens = group.layout.page_tokens();
    const std::int64_t first = state ? 0 : own.count_below(begin) / page_tokens;
    const auto past = state ? static_cast<std::int64_t>(table.size()) : ceil_div(own.count_below(end), page_tokens);
    if (first >= past) continue;
    const auto changed = std::span(table).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(past - first));
    if (auto ok = put_pages(held, changed); !ok) return ok;
  }
  return {};
}

Expected<std::int64_t> RequestPages::wrong_bytes(std::int64_t request, TokenRange range, std::int64_t total) const {
  const auto& tables = requests_.at(request);
  std::int64_t wrong = 0;
  std::vector<std::byte> expected;
  std::vector<PageId> compact;  // of each column: which of the ascending pages it has
  for (const auto& [held, place] : tensors_) {
    const auto g = static_cast<std::size_t>(held.first);
    const GroupSide& group = side_->groups()[g];
    const std::vector<PageId> pages = sorted(tables[g]);
    compact.clear();
    for (const PageId page : tables[g]) compact.emplace_back(std::lower_bound(pages.begin(), pages.end(), page) - pages.begin());
    canaries(held, pages, expected);
    const TokenRange want = kvloom::wanted(group, range);
    write_rows({&group, rank_, held.first, held.second, total, request}, compact, want.begin, want.end, expected);
    const auto more = count_wrong(held, pages, expected);
    if (!more) return more;
    wrong += *more;
  }
  return wrong;
}

Expected<std::int64_t> RequestPages::wrong_free_bytes() const {
  std::int64_t wrong = 0;
  std::vector<std::byte> expected;
  for (const auto& [held, place] : tensors_) {
    const std::vector<PageId> pages = sorted(free_[static_cast<std::size_t>(held.first)]);
    canaries(held, pages, expected);
    const auto more = count_wrong(held, pages, expected);
    if (!more) return more;
    wrong += *more;
  }
  return wrong;
}

void RequestPages::canaries(const HeldTensor& held, std::span<const PageId> pages, std::vector<std::byte>& out) const {
  const auto bytes = static_cast<std::size_t>(page_bytes(held.first));
  out.resize(pages.size() * bytes);
  for (std::size_t i = 0; i < pages.size(); ++i)
    canary(owner(), offset_of(held.first, held.second, pages[i]), std::span(out).subspan(i * bytes, bytes));
}

std::int64_t RequestPages::taken() const {
  std::int64_t taken = 0;
  for (std::size_t g = 0; g < free_.size(); ++g) taken += pool_pages_[g] - static_cast<std::int64_t>(free_[g].size());
  return taken;
}

std::vector<LayerId> RequestPages::layers() const {
  std::vector<LayerId> out;
  for (const auto& [held, place] : tensors_) out.push_back(held.second);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace kvloom
