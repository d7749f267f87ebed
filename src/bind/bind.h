// bind.h: a path and two page tables in, runs out.  Stage: bind.  Part of the sentence: "... cut into the fewest strided runs".
// Families of the path are cut to the wanted range and at the page borders of both sides. The cuts repeat (the borders of both sides and
// the families have a common period), so one period is worked out and the rest is table look-ups. Pieces that touch on both sides join;
// then pieces of equal size at constant steps become one run (a progression of pages).
// Law: check_bind (against the element-by-element oracle).  All layers of a path share these runs: offsets are from the start of the
// rank's tensor of (group, layer).
// A BoundPath streams: it keeps one period of cuts, never the list of runs, and allocates nothing while it gives out runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/run.h"
#include "kvloom/bind/page_table.h"
#include "kvloom/plan/plan.h"
#include "kvloom/plan/run_template.h"

namespace kvloom {

// One side of a bound path: its table, page size, and (token rule `value`) whose pages count.
struct BoundSide {
  const PageId* pages = nullptr;  // [columns], the caller's table
  std::int64_t page_tokens = 1;
  std::int64_t page_stride = 0;  // bytes
  std::int64_t parts = 0;  // rule `value`: ids are virtual, page v counts if v mod parts == part and is page v div parts; else 0
  std::int64_t part = 0;
};

// A stretch of tokens as equal blocks: block k, segment i begins at position source + k * source_step + i * source_inner on its rank.
struct Blocks {
  std::int64_t length = 0, inner_count = 1, count = 1;
  std::int64_t source = 0, source_inner = 0, source_step = 0;
  std::int64_t target = 0, target_inner = 0, target_step = 0;
};

// A run of one cut: page-relative offsets, and the columns whose pages it joins.
struct CellRun {
  std::int64_t source_column = 0, target_column = 0;
  std::size_t lane = 0;  // the n-th run of its piece; lanes are given out one after another so that progressions of pages show
  Run run;
};

class BoundPath {
 public:
  // Gives out the next runs, at most runs.size() of them; 0 when there are no more.  @pre runs.size() >= 2
  // @cost about 2 ns a page; no allocation but when a new period of cuts begins
  std::size_t next(std::span<Run> runs);
  // Begins again.
  void rewind();
  // Bytes of one layer.
  Bytes bytes() const { return bytes_; }

 private:
  friend class Binder;
  struct Joiner;
  bool next_period();
  void build_cells(const Blocks& blocks, std::int64_t first, std::int64_t count);
  void add_piece(std::int64_t source, std::int64_t target, std::int64_t length);
  void begin_lane(std::size_t first);
  bool give_out_pages(Joiner& joiner);
  template <bool kFiltered>
  void give_out_cell(Joiner& joiner, const CellRun& cell);
  template <bool kFiltered>
  bool give_out_lane(Joiner& joiner);
  template <bool kFiltered>
  bool give_out(Joiner& joiner);

  BoundSide source_, target_;
  const PageLayout* source_layout_ = nullptr;  // in the plan
  const PageLayout* target_layout_ = nullptr;
  HeadSlice heads_;
  Bytes bytes_;
  std::vector<Blocks> blocks_;  // what is to be moved: a few per family

  // Where we are: blocks_[at_], from block block_.
  std::size_t at_ = 0;
  std::int64_t block_ = 0;
  // The period that is being given out: cells_ `repeats_` times, the columns moving on by the advances.
  std::vector<CellRun> cells_;
  std::int64_t repeats_ = 0, source_advance_ = 0, target_advance_ = 0;
  std::size_t lane_begin_ = 0, lane_end_ = 0, cell_ = 0;
  std::int64_t repeat_ = 0;
  // Scratch of build_cells.
  struct Cut {
    std::int64_t source_column, target_column;
    TokenPiece piece;
  };
  std::vector<Cut> cuts_;
  std::vector<Run> scratch_;
  // What is joined but not yet given out.
  Run open_run_{Bytes(0), Bytes(0), Bytes(-1), 0, Bytes(0), Bytes(0)};
  Run open_block_{Bytes(0), Bytes(0), Bytes(-1), 0, Bytes(0), Bytes(0)};
};

// `range`: tokens [prefix, total) of the request; windows and states of the group are applied here.
// @pre `path` is one of plan's; plan and both tables outlive the result
// @error out_of_range: a table too short for its last token, a column that names no page, a range past the plan's total;
//        invalid_argument: a pool whose pages of one plane reach into a plane that begins after them;
//        overflow: a pool whose byte offsets do not fit 63 bits
Expected<BoundPath> bind(const Plan& plan, const Path& path, const PageTable& source, const PageTable& target, TokenRange range);
// What of it lies in `chunk`, for requests that go out piece by piece: chunks that cut wanted(group, range) without a gap move together what
// the whole moves.  The tables only have to reach as far as the chunk does.  @pre chunk is in wanted(group, range)
Expected<BoundPath> bind(const Plan& plan, const Path& path, const PageTable& source, const PageTable& target, TokenRange range,
                         TokenRange chunk);

}  // namespace kvloom
