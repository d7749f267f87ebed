// copy_measure.h: how fast this host carries pages, by the ways there are.  Stage: tools (the `bench` verb, bench/copy_bench.cc).
// GB/s mean little from one minute to the next on a shared host; ratios inside one run do: so every way runs in turn, several
// times, and medians are told. Pieces go from a random place to a random place. Memory is touched before, 4 KiB pages, working
// set 2 x memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"

namespace kvloom {

enum class CopyWay : std::uint8_t {
  contiguous,     // memcpy of all of it: the anchor. With n threads, n parts
  memcpy_pieces,  // memcpy of each piece, private memory
  own_pieces,     // our copy loop, private memory
  reads_peer,     // our copy loop, out of a read-only mapped memfd into private memory: a target that copies
  writes_peer,    // our copy loop, out of private memory into a mapped memfd: a source that copies
  shm_push,       // the shm transport, from the post in one process to the notice in the other
};
std::string_view to_string(CopyWay way);

struct CopyOptions {
  Bytes memory{1 << 30};  // of each side
  std::vector<Bytes> pieces{Bytes(36'864), Bytes(4'096), Bytes(1'024), Bytes(576), Bytes(256)};
  std::vector<int> threads{1, 2};
  int repetitions = 7;
  std::uint64_t seed = 1;
};

struct CopyRow {
  CopyWay way;
  Bytes piece;  // of contiguous: all of it
  int threads;
  double gb_per_s;  // median, 1e9 B/s
  double ratio;     // to contiguous with one thread, of the same run
};

// What is measured on: the memory, and a forked process that is the source of shm_push. Ends with the process that made it.
class CopyBed {
 public:
  // @pre no other thread runs (it forks)    @error exhausted (memory), io
  static Expected<std::unique_ptr<CopyBed>> make(const CopyOptions& options);
  virtual ~CopyBed() = default;

  // Does it once.  @pre piece and threads are among the options    @error unavailable (the other process died)
  virtual Expected<double> seconds(CopyWay way, Bytes piece, int threads) = 0;
  // How many bytes that moves.
  virtual Bytes moved(CopyWay way, Bytes piece) const = 0;
};

// Every way, piece and thread count, `repetitions` times in turn.
Expected<std::vector<CopyRow>> measure_copies(const CopyOptions& options);

// way, piece, threads, GB/s, ratio
void print_copies(std::FILE* out, const std::vector<CopyRow>& rows);

}  // namespace kvloom
