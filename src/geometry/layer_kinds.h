// layer_kinds.h: which layers of a config attend to what, and so which cache they own.  Stage: describe.  Values only.
// Configs say it in seven ways, each a function of the .cc with its source; a config that says none of them attends in full.
#pragma once

#include <cstdint>
#include <vector>

#include "kvloom/geometry/config_fields.h"

namespace kvloom {

inline constexpr std::int64_t kMaxConfigLayers = 4096;  // far above any model

enum class LayerKind : std::uint8_t {
  full,       // attention over all tokens
  sliding,    // attention over the last sliding_window tokens
  chunked,    // attention since the last multiple of attention_chunk_size
  recurrent,  // a state per request: GDN, KDA, Mamba2
  none,       // owns no cache: MLP and MoE layers of Nemotron-H, layers that read another layer's K and V
};

// `text`: the language model's part of the config.
// @post [layers]    @error (remembered by `text`) a list of another length, a kind that is not known, a window without its layers
std::vector<LayerKind> layer_kinds(const ConfigFields& text, std::int64_t layers);

}  // namespace kvloom
