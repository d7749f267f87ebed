// What a user's program looks like: it sees installed headers and find_package(kvloom), nothing of the source tree.
// It plans a model of 6 layers from a layer split over 3 ranks to pages over 2 ranks, moves the bytes itself, and looks at each of them.
#include <kvloom/bind/bind.h>
#include <kvloom/geometry/model_config.h>
#include <kvloom/plan/compile.h>

#include <cstring>
#include <iostream>

namespace {

using namespace kvloom;

constexpr const char* kConfig =
    R"({"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "dtype": "bfloat16"})";
constexpr std::int64_t kTokens = 100, kPrefix = 10, kPages = 16;

// The byte of (layer, token, plane, byte): what every rank must hold, wherever.
char content(std::int64_t layer, std::int64_t token, std::size_t plane, std::int64_t byte) {
  return static_cast<char>((layer * 131 + token * 31 + static_cast<std::int64_t>(plane) * 7 + byte) % 113 + 1);
}

PageTable table(std::int64_t step) {
  std::vector<PageId> pages;
  for (std::int64_t i = 0; i < kPages; ++i) pages.emplace_back(i * step % kPages);
  return PageTable::make(pages, kPages, PageTable::Use::target).value();
}

// Visits every row that `rank` holds of one layer.
template <class Row>
void rows(const GroupSide& side, Rank rank, const PageTable& pages, Row row) {
  const StridedSet own = side.tokens.part(side.places[static_cast<std::size_t>(rank.value)].tokens, kTokens);
  const std::int64_t page_tokens = side.layout.page_tokens();
  for (std::int64_t token = 0; token < kTokens; ++token) {
    if (!own.contains(token)) continue;
    const std::int64_t at = own.count_below(token), page = pages.pages()[static_cast<std::size_t>(at / page_tokens)].value;
    for (std::size_t p = 0; p < side.planes.size(); ++p)
      for (std::int64_t x = 0; x < side.planes[p].bytes; ++x)
        row(token, p, x, page * side.layout.page_stride() + side.layout.planes()[p].at(at % page_tokens, 0, x));
  }
}

Expected<std::int64_t> move_and_check() {
  auto shape = read_model_config(kConfig);
  if (!shape) return tl::unexpected(shape.error());
  auto prefill = Side::make(*shape, *Sharding::parse("cp=3:layers,page=8"));
  auto decode = Side::make(*shape, *Sharding::parse("dcp=2,page=16,layout=hnd"));
  if (!prefill) return tl::unexpected(prefill.error());
  if (!decode) return tl::unexpected(decode.error());
  auto plan = compile(*prefill, *decode);
  if (!plan) return tl::unexpected(plan.error());
  const GroupSide &from = *plan->groups()[0].source, &to = *plan->groups()[0].target;
  const PageTable sources = table(5), targets = table(3);
  std::int64_t moved = 0, wrong = 0;
  for (std::int32_t layer = 0; layer < 6; ++layer)
    for (std::int32_t d = 0; d < 2; ++d) {
      std::vector<char> decode_tensor(static_cast<std::size_t>(kPages * to.layout.page_stride()), 0);
      for (const Path& path : plan->paths()) {
        if (path.target != Rank(d) || !path.layers.contains(layer)) continue;
        std::vector<char> prefill_tensor(static_cast<std::size_t>(kPages * from.layout.page_stride()), 0);
        rows(from, path.source, sources, [&](auto token, auto p, auto x, auto at) {
          prefill_tensor[static_cast<std::size_t>(at)] = content(layer, token, p, x);
        });
        auto bound = bind(*plan, path, sources, targets, {kPrefix, kTokens});
        if (!bound) return tl::unexpected(bound.error());
        std::vector<Run> runs(16);
        while (const std::size_t n = bound->next(runs))
          for (std::size_t i = 0; i < n; ++i)
            for (std::int64_t k = 0; k < runs[i].count; ++k) {
              const Bytes s = runs[i].source_offset + runs[i].source_step * k,
                          t = runs[i].target_offset + runs[i].target_step * k;
              std::memcpy(decode_tensor.data() + t.value, prefill_tensor.data() + s.value,
                          static_cast<std::size_t>(runs[i].bytes.value));
              moved += runs[i].bytes.value;
            }
      }
      rows(to, Rank(d), targets, [&](auto token, auto p, auto x, auto at) {
        const char want = token < kPrefix ? char{0} : content(layer, token, p, x);
        wrong += decode_tensor[static_cast<std::size_t>(at)] != want;
      });
    }
  if (wrong != 0) return fail(Code::io, "{} of {} bytes are wrong", wrong, moved);
  return moved;
}

}  // namespace

int main() {
  const auto moved = move_and_check();
  if (!moved) {
    std::cerr << kvloom::to_string(moved.error()) << "\n";
    return 1;
  }
  std::cout << *moved << " bytes moved, all of them right\n";
  return *moved == (kTokens - kPrefix) * 6 * 32 ? 0 : 1;
}
