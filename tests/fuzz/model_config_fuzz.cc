// Any text as a config, for every KV dtype: nothing throws, overflows or hangs; what comes out is a valid shape or an error
// with words. Seeds: samples/.  model_config_fuzz -max_len=16384 corpus samples
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kvloom/geometry/model_config.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const kvloom::CacheShape& shape) {
  require(shape.layers() > 0 && !shape.groups().empty());
  require(shape.bytes_per_token().value >= 0 && shape.bytes_per_request().value >= 0);
  require(shape.bytes_per_token() + shape.bytes_per_request() > kvloom::Bytes(0));
  for (const kvloom::CacheGroup& group : shape.groups()) {
    require(group.row_bytes() > kvloom::Bytes(0) && shape.find(group.name) != nullptr);
    const bool draft = group.name.rfind("draft", 0) == 0;
    require((group.layers.front().value >= shape.layers()) == draft && (group.layers.back().value >= shape.layers()) == draft);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using kvloom::KvDtype;
  const std::string_view text(reinterpret_cast<const char*>(data), size);  // NOLINT: the fuzzer's interface is bytes
  for (const KvDtype dtype : {KvDtype::automatic, KvDtype::bf16, KvDtype::fp8, KvDtype::fp8_dsa}) {
    const auto shape = kvloom::read_model_config(text, dtype, "fuzz");
    if (shape)
      check(*shape);
    else
      require(!shape.error().message.empty());
  }
  return 0;
}
