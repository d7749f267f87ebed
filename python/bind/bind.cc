// bind.cc: bind: a path and two page tables in, runs out.  Stage: python.
#include "kvloom/bind/bind.h"

#include <nanobind/ndarray.h>

#include <array>
#include <memory>

#include "python/bind/bind.h"
#include "python/bind/values.h"

namespace kvloom::python {
namespace {

using Rows = std::vector<std::array<std::int64_t, 6>>;  // as Run's fields stand
using Runs = nb::ndarray<nb::array_api, const std::int64_t, nb::shape<-1, 6>>;

Rows all_runs(BoundPath bound) {
  Rows rows;
  std::array<Run, 256> runs;
  while (const std::size_t n = bound.next(runs))
    for (const Run& run : std::span(runs).first(n))
      rows.push_back({run.source_offset.value, run.target_offset.value, run.bytes.value, run.count, run.source_step.value,
                      run.target_step.value});
  return rows;
}

Runs bind_path(const HeldPath& held, const PageTable& source, const PageTable& target, const RangeWords& range,
               const RangeWords& chunk) {
  auto rows = std::make_unique<Rows>();
  {
    const FreeGil free;
    *rows = all_runs(chunk ? take(bind(*held.plan, held.path, source, target, to_range(range), to_range(chunk)))
                           : take(bind(*held.plan, held.path, source, target, to_range(range))));
  }
  const std::size_t shape[2] = {rows->size(), 6};
  const auto* data = rows->data();
  nb::capsule owner(rows.release(), [](void* rows_of) noexcept { delete static_cast<Rows*>(rows_of); });
  return Runs(data, 2, shape, owner);
}

}  // namespace

void bind_bind(nb::module_& m) {
  nb::class_<PageTable> table_class(m, "PageTable", "Which page holds a request's n-th page of tokens, on one rank.");
  nb::enum_<PageTable::Use>(table_class, "Use", "Whether a page table's pages are read or written.")
      .value("source", PageTable::Use::source, "read only: a page may be named twice")
      .value("target", PageTable::Use::target, "written: each page at most once");
  table_class
      .def(
          "__init__",
          [](PageTable* self, nb::handle pages, std::int64_t pool_pages, PageTable::Use use) {
            new (self) PageTable(take(PageTable::make(to_pages(pages), pool_pages, use)));
          },
          "pages"_a, "pool_pages"_a, "use"_a,
          nb::sig("def __init__(self, pages: kvloom.typing.Pages, pool_pages: int, use: kvloom._kvloom.PageTable.Use) -> None"),
          "`pages`: ids [columns], of the rank's own token set; -1 stands for no page. `pool_pages`: ids are below it.\n\n"
          "Raises OutOfRange: an id outside of the pool. InvalidArgument: a target page in two columns.")
      .def("__len__", [](const PageTable& table) { return table.pages().size(); })
      .def_prop_ro("pool_pages", &PageTable::pool_pages, "Ids are below it.")
      .def_prop_ro(
          "pages", [](const PageTable& table) { return numbers(std::vector(table.pages().begin(), table.pages().end())); },
          "Ids [columns]; -1: no page.");
  m.def("bind", bind_path, "path"_a, "source"_a, "target"_a, "range"_a, "chunk"_a = nb::none(),
        nb::sig("def bind(path: Path, source: PageTable, target: PageTable, range: tuple[int, int | None] | None, chunk: "
                "tuple[int, int | "
                "None] | None = None) -> kvloom.typing.Array"),
        "The fewest strided copies that move a path's bytes of one layer (all its layers share them).\n\n"
        "`range` = (prefix, total): the tokens that are wanted; windows and states are applied here. `chunk`: what of it lies in "
        "these tokens, for "
        "requests that go out piece by piece.\nReturns int64 [runs, 6] in host memory (DLPack, buffer protocol): source offset, "
        "target offset, "
        "bytes, count, source step, target step. All but count in bytes, offsets from the start of each rank's tensor of (group, "
        "layer): piece i "
        "goes from source_offset + i * source_step to target_offset + i * target_step.\n"
        "Raises OutOfRange: a table too short for its last token, a column that names no page. InvalidArgument, Overflow.");
}

}  // namespace kvloom::python
