// Budgets of memory: what compile and bind take must not grow with the length of the request, and giving out runs takes nothing at all.
// This executable counts every allocation of the process; so it stands alone.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "kvloom/bind/bind.h"
#include "kvloom/plan/compile.h"

namespace {
std::int64_t allocations = 0, allocated_bytes = 0;
}

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  allocated_bytes += static_cast<std::int64_t>(size);
  return std::malloc(size);
}
void* operator new(std::size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace kvloom {
namespace {

Side side_of(const char* words) {
  std::vector<LayerId> layers;
  for (std::int32_t l = 0; l < 78; ++l) layers.emplace_back(l);
  const auto shape = CacheShape::make("mla", 78, {{"latent", GroupKind::paged, layers, 1, {{"latent", 576, 1}}, {}, ""}}).value();
  return Side::make(shape, Sharding::parse(words).value()).value();
}

// Every second page from both ends: neighbours never touch, and nothing steps evenly for long.
PageTable table_of(std::int64_t pages, PageTable::Use use) {
  std::vector<PageId> ids;
  for (std::int64_t i = 0; i < pages; ++i) ids.emplace_back((i * 7919) % pages);
  return PageTable::make(std::move(ids), pages, use).value();
}

struct Taken {
  std::int64_t bind_bytes = 0, next_allocations = 0, runs = 0;
};

Taken take(const Plan& plan, std::int64_t tokens) {
  const auto source = table_of(tokens / 64 + 1, PageTable::Use::source),
             target = table_of(tokens / 64 + 1, PageTable::Use::target);
  const auto path = *plan.path(0, Rank(3), Rank(1));
  std::vector<Run> runs(256);
  Taken taken;
  std::int64_t before = allocated_bytes;
  auto bound = bind(plan, path, source, target, {1000, tokens}).value();
  taken.bind_bytes = allocated_bytes - before;
  taken.runs += static_cast<std::int64_t>(bound.next(runs));  // the first period of cuts
  before = allocations;
  while (const std::size_t n = bound.next(runs)) taken.runs += static_cast<std::int64_t>(n);
  taken.next_allocations = allocations - before;
  return taken;
}

TEST(Budget, BindTakesTheSameMemoryForAThousandTokensAndForAMillion) {
  for (const char* decode : {"dcp=4", "dcp=4:stripe=1", "dcp=4,page=16"}) {
    const Plan plan = compile(side_of("cp=8:layers"), side_of(decode)).value();
    const Taken small = take(plan, 8192), large = take(plan, 1 << 20);
    EXPECT_EQ(small.bind_bytes, large.bind_bytes) << decode;
    EXPECT_GT(large.runs, 64 * small.runs) << decode;
    EXPECT_LE(large.next_allocations, small.next_allocations + 8) << decode << ": giving out " << large.runs << " runs";
  }
}

TEST(Budget, CompileTakesTheSameMemoryForEveryLength) {
  const auto prefill = std::make_shared<const Side>(side_of("cp=8:zigzag")),
             decode = std::make_shared<const Side>(side_of("dcp=4"));
  const auto bytes = [&](std::int64_t tokens) {
    const std::int64_t before = allocated_bytes;
    const auto plan = compile(prefill, decode, tokens);
    EXPECT_TRUE(plan);
    return allocated_bytes - before;
  };
  EXPECT_EQ(bytes(std::int64_t{1} << 20), bytes(std::int64_t{1} << 40));
}

}  // namespace
}  // namespace kvloom
