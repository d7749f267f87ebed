#include "kvloom/geometry/layer_kinds.h"

#include <algorithm>
#include <array>

namespace kvloom {
namespace {

constexpr std::array kLayerWords = {"full_attention",
                                    "attention",
                                    "deepseek_sparse_attention",
                                    "minimax_m3_sparse",
                                    "sliding_attention",
                                    "chunked_attention",
                                    "linear_attention",
                                    "mamba",
                                    "mlp",
                                    "moe"};
constexpr std::array kLayerWordKinds = {LayerKind::full,    LayerKind::full,    LayerKind::full,      LayerKind::full,
                                        LayerKind::sliding, LayerKind::chunked, LayerKind::recurrent, LayerKind::recurrent,
                                        LayerKind::none,    LayerKind::none};
static_assert(kLayerWords.size() == kLayerWordKinds.size());

std::vector<LayerKind> every(std::int64_t layers, std::int64_t interval, LayerKind nth, LayerKind others) {
  std::vector<LayerKind> kinds;
  for (std::int64_t i = 0; i < layers; ++i) kinds.push_back((i + 1) % interval == 0 ? nth : others);
  return kinds;
}

// Nemotron-H: M is Mamba2, * attention, E and - are MoE and MLP.
std::vector<LayerKind> kinds_by_letter(const ConfigFields& text, std::int64_t layers) {
  constexpr std::array by_letter = {LayerKind::recurrent, LayerKind::full, LayerKind::none, LayerKind::none};
  std::vector<LayerKind> kinds;
  for (const std::size_t letter : text.letters("hybrid_override_pattern", layers, "M*E-")) kinds.push_back(by_letter[letter]);
  return kinds;
}

// Kimi Linear and K3: two lists of layers counted from 1 that together name each layer once.
std::vector<LayerKind> kinds_by_lists(const ConfigFields& text, std::int64_t layers) {
  const ConfigFields linear = text.object("linear_attn_config");
  std::vector<LayerKind> kinds(static_cast<std::size_t>(layers), LayerKind::none);
  for (const auto layer : linear.layers_from_1("kda_layers", layers))
    kinds[static_cast<std::size_t>(layer)] = LayerKind::recurrent;
  for (const auto layer : linear.layers_from_1("full_attn_layers", layers)) {
    LayerKind& kind = kinds[static_cast<std::size_t>(layer)];
    if (kind != LayerKind::none)
      linear.refuse(Code::invalid_argument, "full_attn_layers",
                    fmt::format("names layer {}, which kda_layers names too", layer + 1));
    kind = LayerKind::full;
  }
  const auto left = std::find(kinds.begin(), kinds.end(), LayerKind::none);
  if (left != kinds.end())
    linear.refuse(Code::invalid_argument, "full_attn_layers",
                  fmt::format("and kda_layers both leave out layer {} of {}", left - kinds.begin() + 1, layers));
  return kinds;
}

std::vector<LayerKind> kinds_by_word(const ConfigFields& text, std::int64_t layers) {
  std::vector<LayerKind> kinds;
  for (const std::size_t word : text.words("layer_types", layers, kLayerWords)) kinds.push_back(kLayerWordKinds[word]);
  return kinds;
}

std::vector<LayerKind> kinds_by_flag(const ConfigFields& text, const char* key, std::int64_t layers, LayerKind zero,
                                     LayerKind one) {
  std::vector<LayerKind> kinds;
  for (const std::int64_t flag : text.numbers(key, layers, 0, 1)) kinds.push_back(flag == 0 ? zero : one);
  return kinds;
}

// Llama 4: layers with rope attend in chunks, the others to everything.
// By default every 4th has no rope (transformers, Llama4TextConfig).
std::vector<LayerKind> kinds_by_chunk(const ConfigFields& text, std::int64_t layers) {
  if (text.has("no_rope_layers") && !text.is_empty_list("no_rope_layers"))
    return kinds_by_flag(text, "no_rope_layers", layers, LayerKind::full, LayerKind::chunked);
  return every(layers, text.count_or("no_rope_layer_interval", kMaxConfigLayers, 4), LayerKind::full, LayerKind::chunked);
}

// No list of layers. Qwen2 and 3: use_sliding_window, from layer max_window_layers up. Gemma 3, Cohere 2:
// sliding_window_pattern, every nth is full. Mistral: a bare sliding_window holds for all layers. Gemma 2 slides every other
// layer and its older configs don't say so.
std::vector<LayerKind> kinds_by_window(const ConfigFields& text, std::int64_t layers) {
  const auto all = [&](LayerKind kind) { return std::vector<LayerKind>(static_cast<std::size_t>(layers), kind); };
  if (!text.has("sliding_window") || !text.flag_or("use_sliding_window", true)) return all(LayerKind::full);
  if (text.has("sliding_window_pattern"))
    return every(layers, text.count("sliding_window_pattern", kMaxConfigLayers), LayerKind::full, LayerKind::sliding);
  if (text.has("attn_logit_softcapping"))
    text.refuse(Code::unsupported, "sliding_window",
                fmt::format("is {}, but nothing says for which layers; add layer_types", text.shown("sliding_window")));
  auto kinds = all(LayerKind::sliding);
  if (text.has("use_sliding_window"))
    std::fill_n(kinds.begin(), std::min(layers, text.number("max_window_layers", 0, kMaxConfigLayers)), LayerKind::full);
  return kinds;
}

}  // namespace

std::vector<LayerKind> layer_kinds(const ConfigFields& text, std::int64_t layers) {
  if (text.has("hybrid_override_pattern")) return kinds_by_letter(text, layers);
  if (text.has("linear_attn_config")) return kinds_by_lists(text, layers);
  if (text.has("layer_types")) return kinds_by_word(text, layers);
  if (text.has("hybrid_layer_pattern"))
    return kinds_by_flag(text, "hybrid_layer_pattern", layers, LayerKind::full, LayerKind::sliding);
  if (text.has("full_attention_interval"))
    return every(layers, text.count("full_attention_interval", kMaxConfigLayers), LayerKind::full, LayerKind::recurrent);
  if (text.has("attention_chunk_size")) return kinds_by_chunk(text, layers);
  return kinds_by_window(text, layers);
}

}  // namespace kvloom
