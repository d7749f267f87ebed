// copy.h: the copy loop of a CPU: many pieces, anywhere to anywhere.  Stage: carry.
// Law: equal to memcpy, whatever the alignment, length and kernel.
// glibc's memcpy uses ordinary stores below a threshold taken from the size of the last cache (tens of MB on a server), so every
// page of a KV cache pays for reading the lines that it is about to overwrite. Streaming stores do not; they lose where a piece
// has few whole lines. So: by piece. The kernel is a value that is passed in: tests run each one, and nobody asks the CPU twice.
// Source: Intel 64 optimization manual 7.4 (non-temporal stores); numbers in docs/decisions/0002-who-copies-in-shm.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvloom/base/run.h"

namespace kvloom {

struct Piece {
  std::byte* to = nullptr;          // [bytes]
  const std::byte* from = nullptr;  // [bytes]; does not overlap `to`
  std::size_t bytes = 0;
};

struct CopyKernel {
  std::string_view name;  // "plain", "avx2", "avx512"
  // @post every byte is in place, and ordered before any later store of this thread (streaming stores are fenced)
  void (*copy)(std::span<const Piece> pieces);
};

// From here on a piece is streamed: 576 B gain 1.3 at whole lines of 64 B and 1.1 off them, 36 KiB 1.55.
inline constexpr std::size_t kStreamingBytes = 512;
// The same for a piece that is whole lines of the target: 256 B gain 1.25 (off them they would lose a fifth).
inline constexpr std::size_t kStreamingLineBytes = 256;

// All kernels that this CPU can run, the fastest last; never empty. Asks the CPU: call it once, at set-up.
std::vector<CopyKernel> copy_kernels();
CopyKernel best_copy_kernel();

// A run and the two places that its offsets count from.
struct CopyJob {
  std::byte* target = nullptr;
  const std::byte* source = nullptr;
  Run run;
};

// Seen as one stream of bytes (job by job, piece by piece), copies bytes [begin, end) of it: so any number of threads share jobs
// of any shape.
// @pre runs are checked; 0 <= begin <= end <= the sum of their totals    @cost no allocation
void copy_range(const CopyKernel& kernel, std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end);

}  // namespace kvloom
