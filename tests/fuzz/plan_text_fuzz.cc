// Any text as a plan and as a side: nothing throws, overflows or hangs; what parses prints to exactly itself, so no text makes
// a plan that compile would not make.  Seeds: corpus/plan_text_fuzz.  plan_text_fuzz -max_len=8192 -timeout=30
// tests/fuzz/corpus/plan_text_fuzz
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kvloom/geometry/side_text.h"
#include "kvloom/plan/explain.h"
#include "kvloom/plan/text.h"
#include "kvloom/plan/wire.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);  // NOLINT: the fuzzer's interface is bytes
  const auto side = kvloom::parse_side(text);
  require(side ? to_string(*side) == text : !side.error().message.empty());
  const auto plan = kvloom::parse_plan(text);
  require(plan ? to_string(*plan) == text : !plan.error().message.empty());
  if (plan) {
    const auto again = kvloom::decode(kvloom::encode(*plan));
    require(again && to_string(*again) == text);
    require(!kvloom::explain(*plan, kvloom::Rank(0), kvloom::Rank(0), {0, 1000}).empty());
  }
  return 0;
}
