// landing.cc: a checksum of KV cache that does not depend on how it is sharded.  Stage: python.
#include <nanobind/ndarray.h>

#include <algorithm>

#include "kvloom/landing/checksum.h"
#include "kvloom/tools/tables.h"
#include "python/bind/bind.h"
#include "python/bind/values.h"

namespace kvloom::python {
namespace {

using Tensor = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// What the C++ function takes for granted.
void check(const GroupSide& side, Rank rank, LayerId layer, std::size_t bytes, const std::vector<PageId>& pages, TokenRange range,
           std::int64_t total) {
  const Place& place = side.places[static_cast<std::size_t>(rank.value)];
  const auto at = std::lower_bound(side.layers.begin(), side.layers.end(), layer);
  const bool held = place.holds && at != side.layers.end() && *at == layer &&
                    side.layer_parts[static_cast<std::size_t>(place.layers)].contains(at - side.layers.begin());
  if (!held) refuse(Code::invalid_argument, "rank {} does not hold layer {} of {}", rank.value, layer.value, side.name);
  if (range.end > total) refuse(Code::out_of_range, "tokens up to {} of a request of {}", range.end, total);
  const std::int64_t columns = columns_needed(side, rank, range.end, total);
  if (columns > static_cast<std::int64_t>(pages.size()))
    refuse(Code::out_of_range, "{} tokens take {} columns of the page table: it has {}", range.end, columns, pages.size());
  std::int64_t extent = 0;  // from a page's start to one past its last byte
  for (const PlaneLayout& plane : side.layout.planes())
    extent = std::max(extent, plane.at(side.layout.page_tokens() - 1, side.layout.heads() - 1, plane.bytes - 1) + 1);
  const std::int64_t parts = side.tokens.rule == TokenRule::value ? side.tokens.parts : 1;
  for (const PageId page : pages)
    if (page.value < 0 || page.value / parts > (static_cast<std::int64_t>(bytes) - extent) / side.layout.page_stride() ||
        static_cast<std::int64_t>(bytes) < extent)
      refuse(Code::out_of_range, "page {} does not lie in a tensor of {} B with pages of {} B", page.value, bytes,
             side.layout.page_stride());
}

std::pair<std::uint64_t, std::int64_t> sum(const Side& side, const std::string& group, std::int32_t rank, std::int32_t layer,
                                           const Tensor& tensor, nb::handle page_ids, const RangeWords& words,
                                           std::optional<std::int64_t> total) {
  const TokenRange range = to_bounded_range(words);
  const auto pages = to_pages(page_ids);
  const GroupSide& of = side.groups()[static_cast<std::size_t>(group_index(side, group))];
  const std::int64_t length = total.value_or(range.end);
  check_tokens(length, "total");
  check(of, checked(side, rank), LayerId(layer), tensor.nbytes(), pages, range, length);
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(tensor.data()), tensor.nbytes());
  const FreeGil free;
  const Checksum out = checksum(of, Rank(rank), LayerId(layer), bytes, pages, range.begin, range.end, length);
  return {out.sum, out.rows};
}

}  // namespace

void bind_landing(nb::module_& m) {
  m.def("checksum", sum, "side"_a, "group"_a, "rank"_a, "layer"_a, "tensor"_a, "pages"_a, "range"_a, "total"_a = nb::none(),
        nb::sig("def checksum(side: Side, group: str, rank: int, layer: int, tensor: kvloom.typing.Memory, pages: "
                "kvloom.typing.Pages, range: "
                "tuple[int, int], total: int | None = None) -> tuple[int, int]"),
        "A checksum of what `rank` holds of tokens `range` of one layer, as (sum modulo 2^64, rows).\n\n"
        "Added over the ranks of a side, each group of replicas once, it is the same on every side that holds the same bytes, "
        "however they are "
        "sharded and laid out. `tensor`: uint8 [bytes], contiguous, in host memory: the rank's tensor of (group, layer). "
        "`pages`: its page table.\n"
        "Raises InvalidArgument, OutOfRange. Source: XXH3 of each row, added (Bellare & Micciancio 1997).");
}

}  // namespace kvloom::python
