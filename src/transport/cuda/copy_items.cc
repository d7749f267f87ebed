#include "kvloom/transport/cuda/copy_items.h"

#include <algorithm>
#include <bit>

#include "kvloom/base/units.h"
#include "kvloom/transport/copy.h"

namespace kvloom::cuda {
namespace {

constexpr std::int64_t kCut =
    512;  // big pieces are cut at multiples: what 32 lanes read at once, and whole lines where the piece has such
constexpr std::int64_t kMostAlikeBytes = 16 << 20;  // of a run: what a copy engine does better, and no count overflows

// Equal pieces of any size and number.
struct Pieces {
  std::uint64_t source = 0, target = 0;
  std::int64_t bytes = 0, count = 0, source_step = 0, target_step = 0;
};

// @pre bytes * count is 1 to kItemBytes
CopyItem item_of(const Pieces& pieces) {
  CopyItem item;
  item.source = pieces.source;
  item.target = pieces.target;
  item.bytes = static_cast<std::uint32_t>(pieces.bytes);
  item.count = static_cast<std::uint32_t>(pieces.count);
  std::uint64_t bits = item.source | item.target | item.bytes | 16;
  if (item.count > 1) {
    item.source_step = pieces.source_step;
    item.target_step = pieces.target_step;
    bits |= static_cast<std::uint64_t>(item.source_step) | static_cast<std::uint64_t>(item.target_step);
  }
  item.log2_width = static_cast<std::uint32_t>(std::countr_zero(bits));
  item.reciprocal = 1;  // of one piece: its index is 0 for every vector
  if (item.count == 1) return item;
  const std::uint64_t per_piece = item.bytes >> item.log2_width;
  item.reciprocal = static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + per_piece - 1) / per_piece);  // 2^32 is 0
  return item;
}

// As few items of `most` bytes as there can be, of about one size.
void append_pieces(Pieces pieces, std::int64_t most, std::vector<CopyItem>& out) {
  if (pieces.bytes <= most) {
    const std::int64_t items = ceil_div(pieces.count, most / pieces.bytes);
    const std::int64_t group = ceil_div(pieces.count, items);
    for (std::int64_t i = 0; i < pieces.count; i += group) {
      Pieces some = pieces;
      some.source += static_cast<std::uint64_t>(i * pieces.source_step);
      some.target += static_cast<std::uint64_t>(i * pieces.target_step);
      some.count = std::min(group, pieces.count - i);
      out.push_back(item_of(some));
    }
    return;
  }
  const std::int64_t part = ceil_div(ceil_div(pieces.bytes, ceil_div(pieces.bytes, most)), kCut) * kCut;
  for (std::int64_t i = 0; i < pieces.count; ++i) {
    const std::uint64_t source = pieces.source + static_cast<std::uint64_t>(i * pieces.source_step);
    const std::uint64_t target = pieces.target + static_cast<std::uint64_t>(i * pieces.target_step);
    for (std::int64_t at = 0; at < pieces.bytes; at += part) {
      const auto skip = static_cast<std::uint64_t>(at);
      out.push_back(item_of({source + skip, target + skip, std::min(part, pieces.bytes - at), 1, 0, 0}));
    }
  }
}

// Bytes [begin, end) of one job's stream: the rest of a piece, whole pieces, the start of a piece.
void append_job(const CopyJob& job, std::int64_t begin, std::int64_t end, std::int64_t most, std::vector<CopyItem>& out) {
  const Run& run = job.run;
  const std::int64_t bytes = run.bytes.value;
  const auto add = [&](std::int64_t piece, std::int64_t skip, std::int64_t take, std::int64_t count) {
    if (take <= 0 || count <= 0) return;
    const std::int64_t source = (run.source_offset + piece * run.source_step).value + skip;
    const std::int64_t target = (run.target_offset + piece * run.target_step).value + skip;
    append_pieces({reinterpret_cast<std::uintptr_t>(job.source) + static_cast<std::uint64_t>(source),
                   reinterpret_cast<std::uintptr_t>(job.target) + static_cast<std::uint64_t>(target), take, count,
                   run.source_step.value, run.target_step.value},
                  most, out);
  };
  const std::int64_t first = ceil_div(begin, bytes), last = end / bytes;  // whole pieces
  if (first > last) return add(last, begin - last * bytes, end - begin, 1);
  add(first - 1, bytes - (first * bytes - begin), first * bytes - begin, 1);
  add(first, 0, bytes, last - first);
  add(last, 0, end - last * bytes, 1);
}

}  // namespace

std::optional<CopyList> list_of(const Run& like, std::uint64_t alignment) {
  const std::int64_t bytes = like.bytes.value, count = like.count;
  if (bytes * count > kMostAlikeBytes || (count > 1 && bytes > kAlikeItemBytes)) return std::nullopt;
  CopyList list;
  std::int64_t group = 1;  // pieces of a part
  std::int64_t piece = bytes;
  if (count == 1) {
    piece = ceil_div(ceil_div(bytes, ceil_div(bytes, std::int64_t{kAlikeItemBytes})), kCut) * kCut;
    list.source_step = list.target_step = piece;
    piece = std::min(piece, bytes);
    list.parts = static_cast<std::uint32_t>(ceil_div(bytes, piece));
  } else {
    group = ceil_div(count, ceil_div(count, kAlikeItemBytes / bytes));
    list.source_step = group * like.source_step.value;
    list.target_step = group * like.target_step.value;
    list.parts = static_cast<std::uint32_t>(ceil_div(count, group));
  }
  // A part's address is the run's and some steps: what divides all of them divides it.
  std::uint64_t bits = alignment;
  if (list.parts > 1) bits |= static_cast<std::uint64_t>(list.source_step) | static_cast<std::uint64_t>(list.target_step);
  const auto item = [&](std::int64_t of, std::int64_t pieces) {
    CopyItem out = item_of({bits, bits, of, pieces, like.source_step.value, like.target_step.value});
    out.source = out.target = 0;
    return out;
  };
  const std::int64_t before = list.parts - 1;
  list.whole = item(piece, group);
  list.last = count == 1 ? item(bytes - before * piece, 1) : item(bytes, count - before * group);
  return list;
}

void append_items(std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end, std::vector<CopyItem>& out,
                  std::uint32_t most) {
  for (const CopyJob& job : jobs) {
    if (end <= 0) break;
    const std::int64_t total = job.run.total().value;
    if (begin < total) append_job(job, std::max<std::int64_t>(begin, 0), std::min(end, total), most, out);
    begin -= total;
    end -= total;
  }
}

}  // namespace kvloom::cuda
