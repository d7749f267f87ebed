// request_pages.h: the memory of one rank that serves many requests: a tensor a (group, layer) in one region, a pool of pages a group, the pages
// of each request, and the right value of every byte.  Stage: tools.
// What nobody was granted holds canaries, and so does what is free: a page is checked whole, wanted rows and all the rest.
// Filled in the view of a store (rank_store.h), and put from there; checked where the bytes lie: on a GPU by a kernel.
// Thread: one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/bind/cache_memory.h"
#include "kvloom/geometry/side.h"
#include "kvloom/plan/plan.h"
#include "kvloom/session/endpoint.h"
#include "kvloom/tools/rank_transport.h"

namespace kvloom {

class RequestPages {
 public:
  // `pool_pages`: [groups]; the pages of each pool are handed out in random order.  @error as RankTransport::allocate
  static Expected<std::unique_ptr<RequestPages>> make(std::shared_ptr<const Side> side, Rank rank,
                                                      std::vector<std::int64_t> pool_pages, std::uint64_t seed,
                                                      const RankTransport& transport);

  const LocalCache& local() const { return local_; }
  const Side& side() const { return *side_; }

  // Pages that hold the first `tokens` tokens of a request of `total`, at least those that it has; the new ones come from the pools.
  // @error exhausted: a pool has not so many
  Expected<std::vector<CacheTable>> take(std::int64_t request, std::int64_t tokens, std::int64_t total);
  // Canaries again, and back to the pools.  @error this and all below: as RankStore::put and count_wrong
  Expected<void> give_back(std::int64_t request);
  // What prefill computes: the rows of tokens [begin, end) of every group's `layer` that this rank holds.
  Expected<void> fill(std::int64_t request, LayerId layer, std::int64_t begin, std::int64_t end, std::int64_t total);
  // Bytes of the request's pages that are not as they should be: rows of `range`, and canaries else.
  Expected<std::int64_t> wrong_bytes(std::int64_t request, TokenRange range, std::int64_t total) const;
  // Bytes of free pages that are no canaries any more.
  Expected<std::int64_t> wrong_free_bytes() const;
  // Pages that are not free, of all pools.
  std::int64_t taken() const;
  std::vector<LayerId> layers() const;  // that this rank holds of any group, ascending

 private:
  struct Place {
    std::int64_t offset = 0, length = 0;
  };
  RequestPages(std::shared_ptr<const Side> side, Rank rank) : side_(std::move(side)), rank_(rank) {}
  std::span<std::byte> tensor(std::int32_t group, LayerId layer) const;
  std::span<std::byte> page(std::int32_t group, LayerId layer, PageId id) const;
  std::int64_t offset_of(std::int32_t group, LayerId layer, PageId id) const;
  void canary_page(std::int32_t group, LayerId layer, PageId id) const;
  // Whole pages of one tensor, from the view to the region.
  Expected<void> put_pages(const HeldTensor& held, std::span<const PageId> pages) const;
  // Bytes of these pages, in the region, that are not as expected.  @pre ascending; expected: [pages, page_bytes]
  Expected<std::int64_t> count_wrong(const HeldTensor& held, std::span<const PageId> pages,
                                     std::span<const std::byte> expected) const;
  // What these pages hold while nobody has them: [pages, page_bytes].
  void canaries(const HeldTensor& held, std::span<const PageId> pages, std::vector<std::byte>& out) const;
  std::int64_t page_bytes(std::int32_t group) const {
    return side_->groups()[static_cast<std::size_t>(group)].layout.page_stride();
  }
  std::int64_t columns(std::size_t group, std::int64_t tokens, std::int64_t total) const;
  std::uint64_t owner() const { return 0x9a9e5 + static_cast<std::uint64_t>(rank_.value); }

  std::shared_ptr<const Side> side_;  // shared with the endpoint and its plans
  Rank rank_;
  std::vector<std::int64_t> pool_pages_;
  std::vector<std::vector<PageId>> free_;  // [groups]
  std::map<HeldTensor, Place> tensors_;
  std::map<std::int64_t, std::vector<std::vector<PageId>>> requests_;  // [groups]
  RankStore store_;
  LocalCache local_;
};

}  // namespace kvloom
