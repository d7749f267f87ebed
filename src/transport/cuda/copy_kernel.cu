// copy_kernel.cu: pages in no order, copied by a few SMs.  Stage: carry.  The GPU that has the targets pulls: reads cross NVLink, writes
// are local. So what counts is bytes in flight on the read side: each lane has 8 loads of 16 B under way before it stores the first, 4 KiB
// a warp, 128 KiB an SM. What the link gives for that is latency * rate = about 1.5 us * 400 GB/s = 600 KiB, so 8 SMs are enough.
// Law: copy_items.h, by whose functions it walks.  Launch: any number of blocks of whole warps, up to 1024 threads, no shared memory.
// Capturable: all that kvloom_copy_list needs stands in its parameter, and in memory that the GPU reads.
#include "kvloom/transport/cuda/copy_items.h"

namespace kvloom::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kBatch = 8;                               // loads of a lane in flight
constexpr unsigned kSmallLanes = 8;                          // that share a small item
constexpr unsigned kSmallBytes = kSmallLanes * kBatch * 16;  // one batch of them
constexpr unsigned kAll = 0xffffffffu;

// Read once and never again, by nobody else while we run: past L1. `volatile` keeps a batch of loads together, before its stores.
__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
template <class Vector>
__device__ __forceinline__ Vector load(const Vector* from) {
  return __ldcs(from);
}

template <class Vector>
__device__ __forceinline__ constexpr unsigned log2_width() {
  return sizeof(Vector) == 16 ? 4 : sizeof(Vector) == 8 ? 3 : sizeof(Vector) == 4 ? 2 : sizeof(Vector) == 2 ? 1 : 0;
}

// An item of one piece needs no division, and its addresses differ by constants.
template <class Vector, bool kOnePiece>
__device__ __forceinline__ VectorPlace place_of(const CopyItem& item, unsigned first, unsigned more) {
  if constexpr (!kOnePiece) return vector_place(item, first + more, log2_width<Vector>());
  const std::uint64_t within = (static_cast<std::uint64_t>(first) + more) * sizeof(Vector);
  return {item.source + within, item.target + within};
}

// The same number, but the compiler does not know: what is worked out from it is worked out anew.
__device__ __forceinline__ unsigned forget(unsigned v) { return __shfl_sync(kAll, v, threadIdx.x % kWarp); }

// kBatch vectors of each of kLanes lanes, from vector `first` of this lane on. Not kWhole: some lie behind the item's end.
// Called by whole warps.
template <class Vector, unsigned kLanes, bool kWhole, bool kOnePiece>
__device__ __forceinline__ void copy_batch(const CopyItem& item, unsigned first, unsigned vectors) {
  Vector held[kBatch];
#pragma unroll
  for (unsigned b = 0; b < kBatch; ++b) {
    if (!kWhole) held[b] = Vector{};  // or the registers of what is not loaded stay in use around every loop
    if (kWhole || first + b * kLanes < vectors)
      held[b] = load(reinterpret_cast<const Vector*>(place_of<Vector, kOnePiece>(item, first, b * kLanes).source));
  }
  if (!kOnePiece) first = forget(first);  // or 8 addresses would be held beside 8 vectors: more than 64 registers
#pragma unroll
  for (unsigned b = 0; b < kBatch; ++b) {
    if (kWhole || first + b * kLanes < vectors)
      __stcs(reinterpret_cast<Vector*>(place_of<Vector, kOnePiece>(item, first, b * kLanes).target), held[b]);
  }
}

template <class Vector, bool kOnePiece>
__device__ __forceinline__ void copy_item(const CopyItem& item, unsigned lane) {
  const unsigned vectors = vector_count(item, log2_width<Vector>());
  unsigned done = 0;
#pragma unroll 1
  for (; done + kBatch * kWarp <= vectors; done += kBatch * kWarp)
    copy_batch<Vector, kWarp, true, kOnePiece>(item, done + lane, vectors);
  if (done < vectors) copy_batch<Vector, kWarp, false, false>(item, done + lane, vectors);
}

__device__ __forceinline__ bool is_small(const CopyItem& item) {
  return item.log2_width == 4 && item.bytes * item.count <= kSmallBytes;
}

__device__ __forceinline__ void copy_by_warp(const CopyItem& item, unsigned lane) {
  switch (item.log2_width) {
    case 4: item.count == 1 ? copy_item<uint4, true>(item, lane) : copy_item<uint4, false>(item, lane); break;
    case 3: copy_item<uint2, false>(item, lane); break;
    case 2: copy_item<unsigned, false>(item, lane); break;
    case 1: copy_item<unsigned short, false>(item, lane); break;
    default: copy_item<unsigned char, false>(item, lane); break;
  }
}

// Items item_at(0) to item_at(count - 1).  Warp w takes w, w + warps, ...; four small ones of those at once, 8 lanes each, or a page of one
// row would leave most of a warp's loads unused.
template <class ItemAt>
__device__ __forceinline__ void copy_all(ItemAt item_at, unsigned count) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warps = gridDim.x * (blockDim.x / kWarp);
  for (unsigned i = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp; i < count; i += warps) {
    const CopyItem item = item_at(i);
    if (is_small(item)) {
      const unsigned mine = i + lane / kSmallLanes * warps;
      const CopyItem own = item_at(mine < count ? mine : i);
      if (__all_sync(kAll, is_small(own))) {
        copy_batch<uint4, kSmallLanes, false, false>(own, lane % kSmallLanes, mine < count ? vector_count(own, 4) : 0);
        i += 3 * warps;
        continue;
      }
    }
    copy_by_warp(item, lane);
  }
}

// By the last block to be done. The counter goes round to 0 by itself.
__device__ __forceinline__ void say(const Done& done) {
  if (done.word == 0) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  const unsigned last = gridDim.x - 1;
  if (atomicInc(reinterpret_cast<unsigned*>(done.counter), last) != last) return;
  __threadfence_system();
  *reinterpret_cast<volatile unsigned*>(done.word) = done.mark;
}

}  // namespace
}  // namespace kvloom::cuda

extern "C" __global__ void __launch_bounds__(1024, 1) kvloom_copy_list(const __grid_constant__ kvloom::cuda::CopyList list) {
  using namespace kvloom::cuda;
  const auto* __restrict__ runs = reinterpret_cast<const RunAddress*>(list.runs);
  const auto* __restrict__ items = reinterpret_cast<const CopyItem*>(list.items);
  copy_all([&list, runs, items](unsigned i) { return item_of(list, runs, items, i); }, list.count());
  say(list.done);
}

extern "C" __global__ void __launch_bounds__(1024, 1) kvloom_copy_few(const __grid_constant__ kvloom::cuda::FewItems few) {
  using namespace kvloom::cuda;
  copy_all([&few](unsigned i) { return few.items[i]; }, few.count);
  say(few.done);
}
