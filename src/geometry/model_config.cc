// Reads a config by its fields, never by its architecture's name: a model nobody has seen is described if its fields say enough.
// Sources beside each rule: "vLLM" and "SGLang" mean the code of vllm-project/vllm and sgl-project/sglang as read in 2026.
#include "kvloom/geometry/model_config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "kvloom/geometry/config_fields.h"
#include "kvloom/geometry/layer_kinds.h"

namespace kvloom {
namespace {

// Bounds on what a config may say: far above any model, low enough that no product of three of them leaves 64 bits.
constexpr std::int64_t kMaxHeads = 1 << 16;
constexpr std::int64_t kMaxWidth = 1 << 20;  // elements in one head, or along one side of a state
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr std::int64_t kScaleBlock = 128;  // elements that share one f32 scale, in DSA's latent rows and index keys (SGLang)

// ---- the model as the families see it

struct Model {
  ConfigFields text;                  // the language model's part of the config
  std::int64_t layers = 0;            // num_hidden_layers
  std::int64_t draft = 0;             // MTP layers, with ids from `layers` up
  std::vector<LayerKind> kinds = {};  // [layers]
  KvDtype dtype = KvDtype::bf16;
  std::vector<CacheGroup> groups = {};

  std::int64_t kv_element() const { return dtype == KvDtype::bf16 ? 2 : 1; }  // bytes
  bool has(LayerKind kind) const { return std::find(kinds.begin(), kinds.end(), kind) != kinds.end(); }
};

// Index keys of MiniMax-M3 and convolution states keep the model's dtype, whatever the KV dtype is. Engines serve a checkpoint
// that says float32 in 16 bits unless told otherwise (vLLM and SGLang, dtype "auto"), and one that says nothing as well
// (gpt-oss): always 2 bytes.
constexpr std::int64_t kModelElement = 2;

// MiniMax-M3 says both num_mtp_modules (7) and num_nextn_predict_layers (1): vLLM builds, and caches, num_mtp_modules layers.
const char* draft_key(const ConfigFields& text) {
  for (const char* key : {"num_mtp_modules", "num_nextn_predict_layers", "mtp_num_hidden_layers"})
    if (text.has(key)) return key;
  return nullptr;
}

std::int64_t draft_layers(const ConfigFields& text) {
  const char* key = draft_key(text);
  const std::int64_t layers = key ? text.number(key, 0, kMaxConfigLayers) : 0;
  // Nemotron-H says what one module is made of: one attention and one feed-forward layer are possible.
  constexpr std::array modules = {"*E", "*-"};
  if (layers > 0 && text.has("hybrid_override_pattern")) text.word("mtp_hybrid_override_pattern", modules);
  return layers;
}

// ---- groups

std::vector<LayerId> ids(std::int64_t first, std::int64_t count) {
  std::vector<LayerId> out;
  for (std::int64_t i = 0; i < count; ++i) out.emplace_back(static_cast<std::int32_t>(first + i));
  return out;
}

std::vector<LayerId> layers_of(const Model& model, LayerKind kind) {
  std::vector<LayerId> out;
  for (std::size_t i = 0; i < model.kinds.size(); ++i)
    if (model.kinds[i] == kind) out.emplace_back(static_cast<std::int32_t>(i));
  return out;
}

PlaneShape plane(std::string name, std::int64_t elements, std::int64_t element_bytes) {
  return {std::move(name), elements * element_bytes, element_bytes};
}

// A group without layers is none.
void add(Model& model, CacheGroup group) {
  if (!group.layers.empty()) model.groups.push_back(std::move(group));
}

struct Heads {
  std::int64_t count = 1, key = 1, value = 1;  // heads, elements of a key, of a value
};

Heads base_heads(const ConfigFields& text) {
  const auto query_heads = [&] { return text.count("num_attention_heads", kMaxHeads); };
  Heads heads;
  heads.count = text.has("num_key_value_heads") ? text.count("num_key_value_heads", kMaxHeads) : query_heads();
  if (text.has("head_dim")) {
    heads.key = text.count("head_dim", kMaxWidth);
  } else {
    const std::int64_t hidden = text.count("hidden_size", kMaxWidth);
    if (hidden % query_heads() != 0)
      text.refuse(Code::invalid_argument, "head_dim",
                  fmt::format("is missing, and num_attention_heads={} does not divide hidden_size={}", query_heads(), hidden));
    heads.key = std::max<std::int64_t>(1, hidden / query_heads());
  }
  heads.value = text.count_or("v_head_dim", kMaxWidth, heads.key);
  return heads;
}

// Gemma 4: full layers have a head size of their own, and a head count of their own where keys and values share a projection.
Heads full_heads(const ConfigFields& text, Heads heads) {
  if (text.has("global_head_dim")) heads.key = heads.value = text.count("global_head_dim", kMaxWidth);
  if (text.flag_or("attention_k_eq_v", false)) heads.count = text.count_or("num_global_key_value_heads", kMaxHeads, heads.count);
  return heads;
}

// MiMo-V2: sliding layers have counts of their own.
Heads window_heads(const ConfigFields& text, Heads heads) {
  heads.count = text.count_or("swa_num_key_value_heads", kMaxHeads, heads.count);
  heads.key = text.count_or("swa_head_dim", kMaxWidth, heads.key);
  heads.value = text.count_or("swa_v_head_dim", kMaxWidth, heads.value);
  return heads;
}

void add_kv(Model& model, std::string name, std::vector<LayerId> layers, const Heads& heads, std::optional<Window> window = {}) {
  const std::int64_t e = model.kv_element();
  add(model, {std::move(name),
              GroupKind::paged,
              std::move(layers),
              static_cast<std::int32_t>(heads.count),
              {plane("k", heads.key, e), plane("v", heads.value, e)},
              window,
              ""});
}

// Keys and values of windowed layers are one group, whatever the window's kind. vLLM keeps chunked layers in full unless
// VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE is set; the window says what attention reads, not what an engine keeps.
void describe_gqa(Model& model) {
  const ConfigFields& text = model.text;
  const Heads base = base_heads(text);
  add_kv(model, "kv", layers_of(model, LayerKind::full), full_heads(text, base));
  const bool sliding = model.has(LayerKind::sliding), chunked = model.has(LayerKind::chunked);
  if (sliding && chunked)
    text.refuse(Code::unsupported, "layer_types", "has sliding and chunked layers; a model with both has no group for each yet");
  if (sliding)
    add_kv(model, "kv_swa", layers_of(model, LayerKind::sliding), window_heads(text, base),
           Window{Window::Kind::sliding, text.count("sliding_window", kMaxTokens)});
  else if (chunked)
    add_kv(model, "kv_swa", layers_of(model, LayerKind::chunked), base,
           Window{Window::Kind::chunked, text.count("attention_chunk_size", kMaxTokens)});
  if (model.draft > 0 && (sliding || chunked))
    text.refuse(Code::unsupported, draft_key(text),
                "counts draft layers, but the config does not say whether theirs is full or windowed attention");
  add_kv(model, "draft", ids(model.layers, model.draft), full_heads(text, base));
}

// MiniMax-M3: on sparse layers one index key a token, of the model's dtype (SGLang MiniMaxSparseKVPool; vLLM indexer_kv_dtype,
// bf16 unless told otherwise), no scales and no index values. MTP layers are always sparse (vLLM MiniMaxM3MTP:
// force_sparse_attn).
void describe_msa(Model& model) {
  const ConfigFields sparse = model.text.object("sparse_attention_config");
  if (!sparse.flag_or("use_sparse_attention", true)) return;
  const auto key = plane("key", sparse.count("sparse_index_dim", kMaxWidth), kModelElement);
  const auto is_sparse = sparse.numbers("sparse_attention_freq", model.layers, 0, 1);
  const auto no_values = sparse.numbers("sparse_disable_index_value", model.layers, 0, 1);
  std::vector<LayerId> layers;
  for (std::size_t i = 0; i < is_sparse.size(); ++i) {
    if (is_sparse[i] == 0) continue;
    if (no_values[i] == 0)
      sparse.refuse(Code::unsupported, fmt::format("sparse_disable_index_value[{}]", i),
                    "is 0: a cache of index values has no known layout; 1 is possible");
    layers.emplace_back(static_cast<std::int32_t>(i));
  }
  const std::string note = "one index key a token in the model's dtype, whatever the KV dtype";
  add(model, {"index_k", GroupKind::paged, std::move(layers), 1, {key}, {}, note});
  add(model, {"draft_index_k", GroupKind::paged, ids(model.layers, model.draft), 1, {key}, {}, note});
}

// [kv_lora_rank + qk_rope_head_dim]. fp8-dsa: the rank in fp8 with one f32 scale for 128 elements, then the rope part in 2
// bytes (SGLang). NoPE models (mla_use_nope) cache the same row.
PlaneShape latent_plane(const Model& model) {
  const std::int64_t rank = model.text.count("kv_lora_rank", kMaxWidth), rope = model.text.count("qk_rope_head_dim", kMaxWidth);
  if (model.dtype != KvDtype::fp8_dsa) return plane("latent", rank + rope, model.kv_element());
  if (rank % kScaleBlock != 0)
    model.text.refuse(Code::unsupported, "kv_lora_rank",
                      fmt::format("is {}; fp8-dsa rows need a multiple of {}", rank, kScaleBlock));
  return plane("latent", rank + rank / kScaleBlock * 4 + rope * 2, 1);
}

void describe_mla(Model& model) {
  if (model.has(LayerKind::sliding) || model.has(LayerKind::chunked))
    model.text.refuse(Code::unsupported, "kv_lora_rank",
                      "comes with windowed layers; latent rows under a window are not known yet");
  const PlaneShape row = latent_plane(model);
  add(model, {"latent", GroupKind::paged, layers_of(model, LayerKind::full), 1, {row}, {}, ""});
  add(model, {"draft", GroupKind::paged, ids(model.layers, model.draft), 1, {row}, {}, ""});
}

// Which layers own an indexer; "shared" ones reuse the choice of the one before. indexer_types, else index_topk_pattern (F,
// S), else every index_topk_freq-th after index_skip_topk_offset (transformers GlmMoeDsaConfig; vLLM and SGLang have the same
// rule). DeepSeek-V3.2: all.
std::vector<LayerId> indexer_layers(const Model& model) {
  constexpr std::array words = {"full", "shared"};
  const ConfigFields& text = model.text;
  std::vector<std::size_t> shares(static_cast<std::size_t>(model.layers), 0);
  if (text.has("indexer_types")) {
    shares = text.words("indexer_types", model.layers, words);
  } else if (text.has("index_topk_pattern")) {
    shares = text.letters("index_topk_pattern", model.layers, "FS");
  } else {
    const auto every_nth = text.count_or("index_topk_freq", kMaxConfigLayers, 1),
               offset = text.number_or("index_skip_topk_offset", 0, kMaxConfigLayers, 2);
    for (std::int64_t i = 0; i < model.layers; ++i)
      shares[static_cast<std::size_t>(i)] = std::max<std::int64_t>(i - offset + 1, 0) % every_nth == 0 ? 0 : 1;
  }
  std::vector<LayerId> out;
  for (std::size_t i = 0; i < shares.size(); ++i)
    if (shares[i] == 0) out.emplace_back(static_cast<std::int32_t>(i));
  return out;
}

// Keys are always fp8 with a f32 scale for 128 elements, whatever the KV dtype (SGLang index_k_with_scale_buffer). A draft
// layer owns an indexer always: SGLang's resolver says so for next-n layers, and under index_share_for_mtp_iteration vLLM lets
// the first draft step compute its own choice and only later steps of the same layer reuse it.
void describe_index(Model& model) {
  const std::int64_t dim = model.text.count("index_head_dim", kMaxWidth);
  if (dim % kScaleBlock != 0)
    model.text.refuse(Code::unsupported, "index_head_dim",
                      fmt::format("is {}; index keys have a scale for each {} elements", dim, kScaleBlock));
  const std::vector<PlaneShape> planes = {plane("key", dim, 1), plane("scale", std::max<std::int64_t>(1, dim / kScaleBlock), 4)};
  const std::string note = "fp8 keys and f32 scales, whatever the KV dtype";
  add(model, {"index_k", GroupKind::paged, indexer_layers(model), 1, planes, {}, note});
  add(model, {"draft_index_k", GroupKind::paged, ids(model.layers, model.draft), 1, planes, {}, note});
}

// ---- states

// The last kernel - 1 inputs of a causal convolution. Engines keep q, k, v (or x, B, C) as bands of one tensor; each band is
// split over TP by its own heads, so each is a group.
void add_conv(Model& model, std::string name, std::int64_t heads, std::int64_t width, std::int64_t kernel) {
  add(model, {std::move(name),
              GroupKind::state,
              layers_of(model, LayerKind::recurrent),
              static_cast<std::int32_t>(heads),
              {plane("conv", width * (kernel - 1), kModelElement)},
              {},
              fmt::format("[{} heads, {} channels, {} inputs] of {} B per request", heads, width, kernel - 1, kModelElement)});
}

void add_ssm(Model& model, std::int64_t heads, std::int64_t rows, std::int64_t columns, std::int64_t element_bytes) {
  add(model, {"ssm",
              GroupKind::state,
              layers_of(model, LayerKind::recurrent),
              static_cast<std::int32_t>(heads),
              {plane("ssm", rows * columns, element_bytes)},
              {},
              fmt::format("[{} heads, {}, {}] of {} B per request", heads, rows, columns, element_bytes)});
}

// Engines differ on a state whose dtype the config does not name (vLLM: the model's; SGLang: its own), so it has to be named.
std::int64_t state_element(const ConfigFields& text, const char* key) {
  constexpr std::array words = {"float32", "bfloat16", "float16"};
  return text.word(key, words) == 0 ? 4 : 2;
}

// Gated DeltaNet (Qwen3-Next, Qwen3.5).
// vLLM gated_delta_net_state_shape: conv over q, k, v; state [value heads, value dim, key dim].
void describe_gdn(Model& model) {
  const ConfigFields& text = model.text;
  const std::int64_t key_heads = text.count("linear_num_key_heads", kMaxHeads),
                     key_dim = text.count("linear_key_head_dim", kMaxWidth);
  const std::int64_t value_heads = text.count("linear_num_value_heads", kMaxHeads),
                     value_dim = text.count("linear_value_head_dim", kMaxWidth);
  const std::int64_t kernel = text.number("linear_conv_kernel_dim", 2, kMaxWidth);
  add_conv(model, "conv_q", key_heads, key_dim, kernel);
  add_conv(model, "conv_k", key_heads, key_dim, kernel);
  add_conv(model, "conv_v", value_heads, value_dim, kernel);
  add_ssm(model, value_heads, value_dim, key_dim, state_element(text, "mamba_ssm_dtype"));
}

// Kimi Delta Attention. vLLM kda_state_shape, kda_state_dtype: heads of one size for q, k and v; the state is always f32.
void describe_kda(Model& model) {
  const ConfigFields linear = model.text.object("linear_attn_config");
  const std::int64_t heads = linear.count("num_heads", kMaxHeads), dim = linear.count("head_dim", kMaxWidth);
  const std::int64_t kernel = linear.number("short_conv_kernel_size", 2, kMaxWidth);
  for (const char* name : {"conv_q", "conv_k", "conv_v"}) add_conv(model, name, heads, dim, kernel);
  add_ssm(model, heads, dim, dim, 4);
}

// Mamba2 (Nemotron-H).
// vLLM mamba2_state_shape: conv over x (heads x head dim; `expand` is not read), B and C (groups x state size).
void describe_mamba2(Model& model) {
  const ConfigFields& text = model.text;
  const std::int64_t heads = text.count("mamba_num_heads", kMaxHeads), head_dim = text.count("mamba_head_dim", kMaxWidth);
  const std::int64_t groups = text.count("n_groups", kMaxHeads), state = text.count("ssm_state_size", kMaxWidth);
  const std::int64_t kernel = text.number("conv_kernel", 2, kMaxWidth);
  add_conv(model, "conv_x", heads, head_dim, kernel);
  add_conv(model, "conv_b", groups, state, kernel);
  add_conv(model, "conv_c", groups, state, kernel);
  add_ssm(model, heads, head_dim, state, state_element(text, "mamba_ssm_cache_dtype"));
}

void describe_states(Model& model) {
  if (!model.has(LayerKind::recurrent)) return;
  if (model.text.has("linear_attn_config")) return describe_kda(model);
  if (model.text.has("linear_num_value_heads")) return describe_gdn(model);
  if (model.text.has("mamba_num_heads")) return describe_mamba2(model);
  model.text.refuse(Code::unsupported, "layer_types",
                    "has recurrent layers of no known kind; known are Gated DeltaNet (linear_num_value_heads), "
                    "Kimi Delta Attention (linear_attn_config) and Mamba2 (mamba_num_heads)");
}

// ---- dtype, refusals, the whole

// Fields of caches that have no group yet. To describe such a model without them would lose part of its cache.
void refuse_unknown(const ConfigFields& text) {
  struct Unknown {
    const char* key;
    const char* why;
  };
  constexpr std::array unknown = {
      // DeepSeek-V4: rows for 4 and for 128 tokens, a 128-token ring and compressor states (SGLang deepseek_v4_memory_pool).
      Unknown{"compress_ratios",
              "makes one cached row stand for up to 128 tokens and needs per-request compressor states that the config does not "
              "size"},
      Unknown{"layers_block_type", "lists Mamba layers whose state has no group yet"},        // Jamba, Bamba, Zamba
      Unknown{"mamba_d_state", "belongs to a Mamba state that has no group yet"},             // Falcon-H1
      Unknown{"conv_L_cache", "belongs to a short convolution state that has no group yet"},  // LFM2
      Unknown{"index_kpool", "pools index keys over several tokens"},                         // GLM successors
      Unknown{"cross_attention_layers", "lists layers that cache an encoder's keys and values"},
  };
  for (const auto& [key, why] : unknown)
    if (text.has(key))
      text.refuse(Code::unsupported, key, fmt::format("is {}: it {}; such a cache can't be sharded yet", text.shown(key), why));
  if (text.flag_or("is_encoder_decoder", false))
    text.refuse(Code::unsupported, "is_encoder_decoder", "is true; caches of an encoder's keys and values can't be sharded yet");
  if (text.has("attn_type_list") && !text.all_ones("attn_type_list"))  // MiniMax: 1 is softmax attention, 0 lightning attention
    text.refuse(Code::unsupported, "attn_type_list",
                "has layers of linear attention, whose state has no group yet; such a cache can't be sharded yet");
  if (text.has("index_head_dim") && !text.has("kv_lora_rank"))
    text.refuse(Code::unsupported, "index_head_dim",
                "names an indexer beside attention without kv_lora_rank; only MLA with an indexer is known");
}

// What the quantisation says of the KV cache, in the words of compressed-tensors (kv_cache_scheme) and ModelOpt (either).
std::optional<KvDtype> quantized_dtype(const ConfigFields& config) {
  if (!config.has("quantization_config")) return std::nullopt;
  const ConfigFields quantization = config.object("quantization_config");
  if (quantization.has("kv_cache_scheme")) {
    constexpr std::array types = {"float"};
    const ConfigFields scheme = quantization.object("kv_cache_scheme");
    scheme.number("num_bits", 8, 8);
    scheme.word("type", types);
    return KvDtype::fp8;
  }
  if (!quantization.has("kv_cache_quant_algo")) return std::nullopt;
  constexpr std::array algorithms = {"FP8"};
  quantization.word("kv_cache_quant_algo", algorithms);
  return KvDtype::fp8;
}

KvDtype resolve_dtype(KvDtype wanted, const ConfigFields& outer, const ConfigFields& text) {
  if (wanted == KvDtype::fp8_dsa && !(text.has("kv_lora_rank") && text.has("index_head_dim")))
    text.refuse(Code::unsupported, text.has("kv_lora_rank") ? "index_head_dim" : "kv_lora_rank",
                "is missing, so this is not a DSA model; kv dtype fp8-dsa is for those only, possible: auto, bf16, fp8");
  if (wanted != KvDtype::automatic) return wanted;
  constexpr std::array words = {"bfloat16", "float16", "float32"};
  for (const ConfigFields* config : {&text, &outer})
    for (const char* key : {"dtype", "torch_dtype"})
      if (config->has(key)) config->word(key, words);
  if (const auto inner = quantized_dtype(text)) return *inner;
  return quantized_dtype(outer).value_or(KvDtype::bf16);
}

// Models that also see or hear keep the language model's fields one level down.
ConfigFields text_part(const ConfigFields& outer) {
  for (const char* key : {"text_config", "language_config", "llm_config"})
    if (outer.has(key)) return outer.object(key);
  return outer;
}

void describe(Model& model) {
  const bool mla = model.text.has("kv_lora_rank"), msa = !mla && model.text.has("sparse_attention_config");
  if (mla) describe_mla(model);
  if (mla && model.text.has("index_head_dim")) describe_index(model);
  if (!mla && (model.draft > 0 || model.has(LayerKind::full) || model.has(LayerKind::sliding) || model.has(LayerKind::chunked)))
    describe_gqa(model);
  if (msa) describe_msa(model);
  describe_states(model);
}

}  // namespace

Expected<CacheShape> read_model_config(std::string_view json, KvDtype dtype, std::string_view name) {
  const auto config = Config::parse(json, name);
  if (!config) return tl::unexpected(config.error());
  const ConfigFields outer = config->root();
  Model model{text_part(outer)};
  const ConfigFields& text = model.text;
  refuse_unknown(text);
  model.dtype = resolve_dtype(dtype, outer, text);
  model.layers = text.count("num_hidden_layers", kMaxConfigLayers);
  model.draft = draft_layers(text);
  model.kinds = layer_kinds(text, model.layers);
  // The last layers of Gemma 3n and 4 may read the K and V of earlier ones (transformers: num_kv_shared_layers).
  const std::int64_t shared = text.number_or("num_kv_shared_layers", 0, model.layers - 1, 0);
  std::fill(model.kinds.end() - shared, model.kinds.end(), LayerKind::none);
  describe(model);
  if (config->wrong()) return tl::unexpected(*config->wrong());
  return CacheShape::make(std::string(name), static_cast<std::int32_t>(model.layers), std::move(model.groups));
}

Expected<KvDtype> parse_kv_dtype(std::string_view text) {
  for (const KvDtype dtype : {KvDtype::automatic, KvDtype::bf16, KvDtype::fp8, KvDtype::fp8_dsa})
    if (text == to_string(dtype)) return dtype;
  return fail(Code::parse, "kv dtype '{}' is unknown; possible: auto, bf16, fp8, fp8-dsa", text);
}

const char* to_string(KvDtype dtype) {
  switch (dtype) {
    case KvDtype::automatic: return "auto";
    case KvDtype::bf16: return "bf16";
    case KvDtype::fp8: return "fp8";
    case KvDtype::fp8_dsa: return "fp8-dsa";
  }
  return "?";
}

}  // namespace kvloom
