// copy_items.h: what the copy kernel does, as a list of work and the arithmetic of its indices.  Stage: carry.  Values only.
// Runs become *items* of up to 16 KiB: count pieces of `bytes` each, at absolute addresses. A warp takes one item at a time, so items of
// one size load the warps evenly, whether they are a third of a page or sixty rows of one. An item is read and written in vectors of
// 16, 8, 4, 2 or 1 bytes: the widest that divides its addresses, steps and piece.
// Runs that differ in their offsets alone (most: pages in no order) are not worded as items one by one: a CopyList says once what each
// consists of, items of 4 KiB, and where each run lies, in 16 bytes.
// Law (copy_items_test.cc): the items of any part of any stream of jobs, executed through vector_place, do what copy_range does; each byte
// once, each access aligned. The kernel (copy_kernel.cu) and the fake driver of the tests walk items by this very function.
// Thread: any.  Source: an item of 12 KiB is 3 rounds of 8 loads of 16 B in each of 32 lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#ifdef __CUDACC__
#define KVLOOM_HD __host__ __device__ __forceinline__
#else
#define KVLOOM_HD inline
#endif

namespace kvloom {
struct CopyJob;  // kvloom/transport/copy.h
struct Run;
}  // namespace kvloom

namespace kvloom::cuda {

// No item moves more: then (index of a vector) x (vectors of a piece) is below 2^32, which makes the division in vector_place exact.
inline constexpr std::uint32_t kItemBytes = 16384;
// Of alike runs, which cost the CPU the same whatever the size of their items: one round of a warp's loads, so that all warps end together.
inline constexpr std::uint32_t kAlikeItemBytes = 4096;

// Piece i goes from source + i * source_step to target + i * target_step.  48 bytes: a lane reads it in three loads.
struct alignas(16) CopyItem {
  std::uint64_t source = 0;      // address
  std::uint64_t target = 0;      // address
  std::int64_t source_step = 0;  // bytes; 0 where count is 1
  std::int64_t target_step = 0;  // bytes
  std::uint32_t bytes = 0;       // of a piece; bytes * count is 1 to kItemBytes
  std::uint32_t count = 0;       // pieces
  std::uint32_t reciprocal = 0;  // ceil(2^32 / vectors of a piece); 0: a piece is one vector; 1: there is one piece
  std::uint32_t log2_width = 0;  // vectors of 1 << log2_width bytes; 0 to 4
};
static_assert(sizeof(CopyItem) == 48);

// How a kernel (copy_kernel.cu) says that all of it is in place: a stream's write of the word would come microseconds later.
struct Done {
  std::uint64_t counter = 0;  // address in the GPU's memory, of a word that is 0 between launches: blocks that are done
  std::uint64_t word = 0;     // address in pinned memory: becomes `mark`; 0: a kernel behind this one says it
  std::uint32_t mark = 0;
};

// A start of few items goes with its kernel's launch: no list has to be brought to the GPU before.
inline constexpr std::uint32_t kFewItems = 16;
inline constexpr std::uint32_t kFewItemBytes = 4096;  // one round of a warp's loads: for the least time, not the least work

// The parameter of kvloom_copy_few.
struct FewItems {
  Done done;
  std::uint32_t count = 0;
  CopyItem items[kFewItems];  // [count]
};
static_assert(sizeof(FewItems) <= 4096);  // what a launch may bring. Source: CUDA C++ programming guide, "Kernel parameters"

// Where a run begins.  Addresses.
struct RunAddress {
  std::uint64_t source = 0, target = 0;
};
static_assert(sizeof(RunAddress) == 16);

// The parameter of kvloom_copy_list: `run_count` runs that differ in where they are alone, each of `parts` items, and `item_count` items more.
// Part p of the run at `a` is `whole`, or `last` where it is the last one, at a.source + p * source_step and a.target + p * target_step.
struct CopyList {
  Done done;
  std::uint64_t runs = 0;   // address in the GPU's memory: [run_count] RunAddress
  std::uint64_t items = 0;  // the same: [item_count] CopyItem
  std::uint32_t run_count = 0;
  std::uint32_t parts = 1;  // of each run; count() < 2^32
  std::uint32_t item_count = 0;
  std::int64_t source_step = 0, target_step = 0;
  CopyItem whole, last;  // at address 0
  KVLOOM_HD std::uint32_t count() const { return run_count * parts + item_count; }
};

struct VectorPlace {
  std::uint64_t source = 0;  // address
  std::uint64_t target = 0;  // address
};

KVLOOM_HD std::uint32_t vector_count(const CopyItem& item, std::uint32_t log2_width) {
  return (item.bytes * item.count) >> log2_width;
}

// a * b / 2^32
KVLOOM_HD std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);  // the compiler takes the other form apart, and holds its parts in registers that it has not got
#else
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(a) * b) >> 32);
#endif
}

// Where vector v of the item is read and written. `log2_width` is the item's: a kernel passes it as a constant.
// The quotient v / per_piece is floor(v * ceil(2^32 / per_piece) / 2^32), exact for v * per_piece < 2^32.
// Source: Granlund & Montgomery 1994, theorem 4.2.  @pre v < vector_count
KVLOOM_HD VectorPlace vector_place(const CopyItem& item, std::uint32_t v, std::uint32_t log2_width) {
  const std::uint32_t per_piece = item.bytes >> log2_width;
  const std::uint32_t piece = item.reciprocal == 0 ? v : high_product(v, item.reciprocal);
  const std::uint64_t within = static_cast<std::uint64_t>(v - piece * per_piece) << log2_width;
  const std::int64_t i = piece;
  return {item.source + static_cast<std::uint64_t>(i * item.source_step) + within,
          item.target + static_cast<std::uint64_t>(i * item.target_step) + within};
}

// Item i of all.  `runs`, `items`: where the list's addresses are seen.  @pre i < list.count()
KVLOOM_HD CopyItem item_of(const CopyList& list, const RunAddress* runs, const CopyItem* items, std::uint32_t i) {
  const std::uint32_t run = i / list.parts, part = i - run * list.parts;
  if (run >= list.run_count) return items[i - list.run_count * list.parts];
  CopyItem item = part + 1 < list.parts ? list.whole : list.last;
  item.source = runs[run].source + static_cast<std::uint64_t>(part * list.source_step);
  item.target = runs[run].target + static_cast<std::uint64_t>(part * list.target_step);
  return item;
}

// A list of runs like this one whose addresses are multiples of `alignment`, a power of two; how many and where is still to be said.
// Empty: such runs are items, for their pieces are too large, or they have too many.  @pre the run is checked
std::optional<CopyList> list_of(const Run& like, std::uint64_t alignment);

// Appends the items of bytes [begin, end) of the stream of jobs, as copy_range (copy.h) would copy them, of at most `most` bytes each.
// @pre most <= kItemBytes; runs are checked; 0 <= begin <= end <= the sum of their totals    @cost O(items); allocates where `out` has to grow
void append_items(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end, std::vector<CopyItem>& out,
                  std::uint32_t most = kItemBytes);

}  // namespace kvloom::cuda
