// model_config.h: a Hugging Face config.json in, the model's cache groups out.  Stage: describe.  Values only: takes text, opens no file.
// Source of each rule: the field of the config that it reads, named in model_config.cc beside it; sizes by hand in model_config_test.cc.
#pragma once

#include <string>
#include <string_view>

#include "kvloom/base/error.h"
#include "kvloom/geometry/cache_shape.h"

namespace kvloom {

enum class KvDtype : std::uint8_t {
  automatic,  // what the config says: its KV-cache quantisation if it names one, else its dtype
  bf16,       // 2 bytes an element
  fp8,        // 1 byte an element; a plain MLA latent row of 512 + 64 is 576 B
  fp8_dsa,    // DSA latent rows of 656 B: 512 fp8, 4 scales of 4 B, 64 rope elements of 2 B. DSA models only.
};

// "auto", "bf16", "fp8", "fp8-dsa"
Expected<KvDtype> parse_kv_dtype(std::string_view text);
const char* to_string(KvDtype dtype);

// @post paged groups `kv` (planes k, v), `kv_swa`, `latent` (MLA), `index_k` (planes key, scale), `draft...`; state groups per kind
// @error parse: not JSON, with the place; invalid_argument: a field that is missing, of the wrong type or out of range, by its path;
//        unsupported: the field and why such a cache can't be sharded yet
Expected<CacheShape> read_model_config(std::string_view json, KvDtype dtype = KvDtype::automatic,
                                       std::string_view name = "model");

}  // namespace kvloom
