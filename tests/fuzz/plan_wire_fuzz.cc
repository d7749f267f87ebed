// Any bytes as a plan: nothing throws, overflows, reads outside of them or hangs; what decodes is encoded to bytes that decode
// to the same. Any byte may also be damaged on its way: the digest lets only the same plan through.
// Seeds: corpus/plan_wire_fuzz.  plan_wire_fuzz -max_len=4096 -timeout=30 tests/fuzz/corpus/plan_wire_fuzz
#include <cstdint>
#include <cstdlib>
#include <span>

#include "kvloom/plan/text.h"
#include "kvloom/plan/wire.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto plan = kvloom::decode(std::span(data, size));
  if (!plan) {
    require(!plan.error().message.empty());
    return 0;
  }
  const auto again = kvloom::decode(kvloom::encode(*plan));
  require(again && to_string(*again) == to_string(*plan));
  return 0;
}
