// cache.h: the pools and pages of one simulated rank, with bytes whose right value anyone can work out.  Drives the session code.
// Byte = f(transfer, group, layer, token, head, plane, byte): so a byte of another request, layer or attempt shows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvloom/bind/page_table.h"
#include "kvloom/geometry/side.h"
#include "kvloom/plan/plan.h"
#include "kvloom/sim/random.h"

namespace kvloom::sim {

inline constexpr std::int64_t kNobody = -1;

// Pages by owner. The one that was given back last is handed out first, so a late write meets a new owner soon.
class Pool {
 public:
  explicit Pool(std::int64_t pages, Random& random);
  // @pre enough are free
  std::vector<PageId> take(std::int64_t count, std::int64_t owner);
  void give_back(const std::vector<PageId>& pages);
  std::int64_t owner(std::int64_t page) const { return owners_[static_cast<std::size_t>(page)]; }
  std::int64_t size() const { return static_cast<std::int64_t>(owners_.size()); }
  std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }

 private:
  std::vector<std::int64_t> owners_;
  std::vector<PageId> free_;
};

// One rank's memory.  A pool whose pages have ranks by their value is shared by the ranks of its side.
class Cache {
 public:
  Cache(std::shared_ptr<const Side> side, Rank rank, std::vector<std::shared_ptr<Pool>> pools);

  // Columns of a page table that holds the first `tokens` tokens on this rank.
  std::int64_t columns(std::size_t group, std::int64_t tokens, std::int64_t total) const;
  Pool& pool(std::size_t group) { return *pools_[group]; }
  const Side& side() const { return *side_; }
  Rank rank() const { return rank_; }
  bool holds(std::size_t group, LayerId layer) const;

  // Writes the tokens [begin, end) of `transfer` that this rank holds.  `table`: [columns].
  void fill(std::int64_t transfer, std::size_t group, LayerId layer, std::int64_t begin, std::int64_t end, std::int64_t total,
            const std::vector<PageId>& table);
  // The first token of [begin, end) with a wrong byte; -1 if all are right.
  std::int64_t check(std::int64_t transfer, std::size_t group, LayerId layer, std::int64_t begin, std::int64_t end,
                     std::int64_t total, const std::vector<PageId>& table);
  void poison(std::size_t group, const std::vector<PageId>& pages);
  // A physical page of this rank, as its pool numbers it.
  std::int64_t pool_page(std::size_t group, std::int64_t page) const;
  std::vector<std::uint8_t>& bytes(std::size_t group, LayerId layer);

 private:
  template <class Visit>
  std::int64_t rows(std::int64_t transfer, std::size_t group, LayerId layer, std::int64_t begin, std::int64_t end,
                    std::int64_t total, const std::vector<PageId>& table, Visit visit);

  std::shared_ptr<const Side> side_;  // shared with the plans that name it
  Rank rank_;
  std::vector<std::shared_ptr<Pool>> pools_;  // [groups]; owners: the caches of a side
  std::map<std::pair<std::size_t, LayerId>, std::vector<std::uint8_t>> bytes_;
};

}  // namespace kvloom::sim
