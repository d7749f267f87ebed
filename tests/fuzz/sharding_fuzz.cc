// Any text as sharding words: nothing throws, overflows or hangs; what parses prints to itself, and makes a side of a small
// model or is refused with words.  Seeds: corpus/sharding_fuzz.  sharding_fuzz -max_len=256 tests/fuzz/corpus/sharding_fuzz
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kvloom/geometry/side.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

kvloom::CacheShape small_shape() {
  using kvloom::GroupKind;
  using kvloom::LayerId;
  return kvloom::CacheShape::make(
             "small", 4,
             {{"kv", GroupKind::paged, {LayerId(0), LayerId(2), LayerId(3)}, 4, {{"k", 4, 2}, {"v", 4, 2}}, {}, {}},
              {"ssm", GroupKind::state, {LayerId(1)}, 4, {{"ssm", 3, 1}}, {}, {}},
              {"draft", GroupKind::paged, {LayerId(4)}, 1, {{"latent", 6, 1}}, {}, {}}})
      .value();
}

void check_side(const kvloom::Sharding& sharding) {
  static const kvloom::CacheShape shape = small_shape();
  if (sharding.pages().page_tokens.value_or(0) > 4096) return;  // every byte of a page is looked at: slow, and no news
  for (const auto& [name, words] : sharding.groups())
    if (words.pages.page_tokens.value_or(0) > 4096) return;
  const auto side = kvloom::Side::make(shape, sharding, 16);
  if (!side) return require(!side.error().message.empty());
  for (const kvloom::GroupSide& group : side->groups()) {
    require(static_cast<std::int32_t>(group.places.size()) == side->ranks());
    for (const kvloom::Place& place : group.places)
      require(!place.holds ||
              (static_cast<std::size_t>(place.layers) < group.layer_parts.size() && place.tokens < group.tokens.parts &&
               static_cast<std::size_t>(place.heads) < group.head_parts.size()));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);  // NOLINT: the fuzzer's interface is bytes
  const auto sharding = kvloom::Sharding::parse(text);
  if (!sharding) {
    require(!sharding.error().message.empty());
    return 0;
  }
  require(sharding->ranks() > 0 && sharding->ranks() <= kvloom::kMaxRanks);
  const std::string printed = to_string(*sharding);
  const auto again = kvloom::Sharding::parse(printed);
  require(again && *again == *sharding && to_string(*again) == printed);
  check_side(*sharding);
  return 0;
}
