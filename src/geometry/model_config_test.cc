// What each model caches, worked out by hand from its config's fields, and what a config that is wrong is told.
#include "kvloom/geometry/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#ifndef KVLOOM_SOURCE_DIR
#error "the build says where the source tree is: -DKVLOOM_SOURCE_DIR=..."
#endif

namespace kvloom {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string read_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string sample(const std::string& name) {
  return read_file(std::filesystem::path(KVLOOM_SOURCE_DIR) / "samples" / (name + ".json"));
}

CacheShape shape_of(const std::string& name, KvDtype dtype = KvDtype::automatic) {
  auto shape = read_model_config(sample(name), dtype, name);
  EXPECT_TRUE(shape) << name << ": " << (shape ? "" : to_string(shape.error()));
  return shape ? *shape : CacheShape();
}

// One line a group: `name: layers x heads x (plane bytes + ...) = bytes` per token, or per request where `state` stands before.
std::string table(const CacheShape& shape) {
  std::string out;
  for (const CacheGroup& group : shape.groups()) {
    std::vector<std::string> planes;
    for (const PlaneShape& plane : group.planes) planes.push_back(fmt::format("{} {}", plane.name, plane.bytes));
    std::string window;
    if (group.window)
      window = fmt::format(" {} {}", group.window->kind == Window::Kind::sliding ? "sliding" : "chunked", group.window->tokens);
    out += fmt::format("{}{}: {} x {} x ({}) = {}{}\n", group.kind == GroupKind::state ? "state " : "", group.name,
                       group.layers.size(), group.heads, fmt::join(planes, " + "),
                       group.row_bytes().value * static_cast<std::int64_t>(group.layers.size()), window);
  }
  return out + fmt::format("token {} request {}\n", shape.bytes_per_token().value, shape.bytes_per_request().value);
}

std::string table(const std::string& name, KvDtype dtype) { return table(shape_of(name, dtype)); }

std::vector<std::int32_t> layers(const CacheShape& shape, const std::string& group) {
  std::vector<std::int32_t> out;
  if (const CacheGroup* found = shape.find(group))
    for (const LayerId layer : found->layers) out.push_back(layer.value);
  return out;
}

// ---- the golden table: bytes per token and group

TEST(ModelConfigGolden, Llama3) {
  // No head_dim: 4096 / 32 = 128 and 8192 / 64 = 128. 8 KV heads; k and v 128 x 2 B each.
  EXPECT_EQ(table("llama-3.1-8b", KvDtype::bf16),
            "kv: 32 x 8 x (k 256 + v 256) = 131072\ntoken 131072 request 0\n");  // 32 x 8 x 512
  EXPECT_EQ(table("llama-3.1-70b", KvDtype::bf16),
            "kv: 80 x 8 x (k 256 + v 256) = 327680\ntoken 327680 request 0\n");  // 80 x 8 x 512
  EXPECT_EQ(table("llama-3.1-8b", KvDtype::fp8), "kv: 32 x 8 x (k 128 + v 128) = 65536\ntoken 65536 request 0\n");  // half
  EXPECT_EQ(table("llama-3.1-70b", KvDtype::fp8), "kv: 80 x 8 x (k 128 + v 128) = 163840\ntoken 163840 request 0\n");
}

TEST(ModelConfigGolden, Qwen3) {
  // head_dim 128 stands in the config: hidden_size / num_attention_heads would give 64. sliding_window null,
  // use_sliding_window false: full.
  EXPECT_EQ(table("qwen3-0.6b", KvDtype::bf16),
            "kv: 28 x 8 x (k 256 + v 256) = 114688\ntoken 114688 request 0\n");  // 28 x 8 x 512
  EXPECT_EQ(table("qwen3-30b-a3b", KvDtype::bf16),
            "kv: 48 x 4 x (k 256 + v 256) = 98304\ntoken 98304 request 0\n");  // 48 x 4 x 512
  EXPECT_EQ(table("qwen3-235b-a22b", KvDtype::bf16),
            "kv: 94 x 4 x (k 256 + v 256) = 192512\ntoken 192512 request 0\n");  // 94 x 4 x 512
  EXPECT_EQ(table("qwen3-235b-a22b", KvDtype::fp8), "kv: 94 x 4 x (k 128 + v 128) = 96256\ntoken 96256 request 0\n");
}

TEST(ModelConfigGolden, GptOss) {
  // 36 layers, every other one sliding over 128: 18 and 18. 8 heads of 64 x 2 B. No dtype in the config: 2 bytes.
  EXPECT_EQ(table("gpt-oss-120b", KvDtype::automatic),
            "kv: 18 x 8 x (k 128 + v 128) = 36864\n"  // 18 x 8 x 256
            "kv_swa: 18 x 8 x (k 128 + v 128) = 36864 sliding 128\n"
            "token 73728 request 0\n");
  EXPECT_EQ(table("gpt-oss-120b", KvDtype::fp8),
            "kv: 18 x 8 x (k 64 + v 64) = 18432\n"
            "kv_swa: 18 x 8 x (k 64 + v 64) = 18432 sliding 128\n"
            "token 36864 request 0\n");
}

TEST(ModelConfigGolden, Gemma4) {
  // 30 layers, every 6th full: 5 and 25. Full: global_head_dim 512 x 2 B, num_global_key_value_heads 2 (attention_k_eq_v: K
  // and V share a projection, but not norm and rope, so both are cached). Sliding over 1024: 8 heads of 256 x 2 B.
  // num_kv_shared_layers 0.
  EXPECT_EQ(table("gemma-4-26b-a4b", KvDtype::bf16),
            "kv: 5 x 2 x (k 1024 + v 1024) = 20480\n"                   // 5 x 2 x 2048
            "kv_swa: 25 x 8 x (k 512 + v 512) = 204800 sliding 1024\n"  // 25 x 8 x 1024
            "token 225280 request 0\n");
}

TEST(ModelConfigGolden, MiMo) {
  // hybrid_layer_pattern: 0 at layers 0, 5, 11, ..., 47 = 9 full, 39 sliding over 128. Keys 192 x 2 B, values 128 x 2 B; 4
  // heads full, 8 sliding. attention_chunk_size stands there too; the pattern goes before it.
  EXPECT_EQ(table("mimo-v2-flash", KvDtype::bf16),
            "kv: 9 x 4 x (k 384 + v 256) = 23040\n"                    // 9 x 4 x 640
            "kv_swa: 39 x 8 x (k 384 + v 256) = 199680 sliding 128\n"  // 39 x 8 x 640
            "token 222720 request 0\n");
  EXPECT_THAT(layers(shape_of("mimo-v2-flash"), "kv"), ElementsAre(0, 5, 11, 17, 23, 29, 35, 41, 47));
}

TEST(ModelConfigGolden, Llama4) {
  // No list of layers: every 4th has no rope and attends to everything, 12 of 48; 36 in chunks of 8192. 8 heads of 128 x 2 B.
  EXPECT_EQ(table("llama-4-scout", KvDtype::bf16),
            "kv: 12 x 8 x (k 256 + v 256) = 49152\n"                    // 12 x 8 x 512
            "kv_swa: 36 x 8 x (k 256 + v 256) = 147456 chunked 8192\n"  // 36 x 8 x 512
            "token 196608 request 0\n");
  EXPECT_THAT(layers(shape_of("llama-4-scout"), "kv"), ElementsAre(3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47));
}

TEST(ModelConfigGolden, MiniMaxM3) {
  // 60 layers, 4 heads of 128 x 2 B. Layers 3..59 sparse: 57 index keys of 128 x 2 B, in the model's dtype under fp8 as well.
  // num_mtp_modules 7 (num_nextn_predict_layers 1 stands there too), each with an index key.
  EXPECT_EQ(table("minimax-m3", KvDtype::bf16),
            "kv: 60 x 4 x (k 256 + v 256) = 122880\n"    // 60 x 4 x 512
            "draft: 7 x 4 x (k 256 + v 256) = 14336\n"   // 7 x 4 x 512
            "index_k: 57 x 1 x (key 256) = 14592\n"      // 57 x 256
            "draft_index_k: 7 x 1 x (key 256) = 1792\n"  // 7 x 256
            "token 153600 request 0\n");
  EXPECT_EQ(table("minimax-m3", KvDtype::fp8),
            "kv: 60 x 4 x (k 128 + v 128) = 61440\n"
            "draft: 7 x 4 x (k 128 + v 128) = 7168\n"
            "index_k: 57 x 1 x (key 256) = 14592\n"
            "draft_index_k: 7 x 1 x (key 256) = 1792\n"
            "token 84992 request 0\n");
}

TEST(ModelConfigGolden, DeepSeekV3AndKimiK2) {
  // MLA, one head: 512 + 64 elements; 1152 B in bf16, 576 B in fp8. V3 has one MTP layer, K2 none.
  EXPECT_EQ(table("deepseek-v3", KvDtype::bf16),
            "latent: 61 x 1 x (latent 1152) = 70272\n"  // 61 x 1152
            "draft: 1 x 1 x (latent 1152) = 1152\n"
            "token 71424 request 0\n");
  EXPECT_EQ(table("deepseek-v3", KvDtype::fp8),
            "latent: 61 x 1 x (latent 576) = 35136\n"
            "draft: 1 x 1 x (latent 576) = 576\n"
            "token 35712 request 0\n");
  EXPECT_EQ(table("kimi-k2", KvDtype::bf16), "latent: 61 x 1 x (latent 1152) = 70272\ntoken 70272 request 0\n");
  EXPECT_EQ(table("kimi-k2", KvDtype::fp8), "latent: 61 x 1 x (latent 576) = 35136\ntoken 35136 request 0\n");
}

TEST(ModelConfigGolden, DeepSeekV32) {
  // DSA on all 61 layers and the MTP layer. Index keys: 128 x 1 B and one f32 scale, whatever the KV dtype.
  EXPECT_EQ(table("deepseek-v3.2", KvDtype::bf16),
            "latent: 61 x 1 x (latent 1152) = 70272\n"
            "draft: 1 x 1 x (latent 1152) = 1152\n"
            "index_k: 61 x 1 x (key 128 + scale 4) = 8052\n"  // 61 x 132
            "draft_index_k: 1 x 1 x (key 128 + scale 4) = 132\n"
            "token 79608 request 0\n");
  // 512 x 1 B, 512 / 128 = 4 scales of 4 B, 64 x 2 B: 512 + 16 + 128 = 656.
  EXPECT_EQ(table("deepseek-v3.2", KvDtype::fp8_dsa),
            "latent: 61 x 1 x (latent 656) = 40016\n"  // 61 x 656
            "draft: 1 x 1 x (latent 656) = 656\n"
            "index_k: 61 x 1 x (key 128 + scale 4) = 8052\n"
            "draft_index_k: 1 x 1 x (key 128 + scale 4) = 132\n"
            "token 48856 request 0\n");
}

TEST(ModelConfigGolden, Glm52) {
  // kv_cache_scheme says 8-bit float: automatic is plain fp8, 576 B. indexer_types: "full" at 0, 1, 2, 6, 10, ..., 74 = 21 of
  // 78; the MTP layer owns an indexer besides (index_share_for_mtp_iteration shares among its own draft steps).
  const std::string fp8 =
      "latent: 78 x 1 x (latent 576) = 44928\n"  // 78 x 576
      "draft: 1 x 1 x (latent 576) = 576\n"
      "index_k: 21 x 1 x (key 128 + scale 4) = 2772\n"  // 21 x 132
      "draft_index_k: 1 x 1 x (key 128 + scale 4) = 132\n"
      "token 48408 request 0\n";
  EXPECT_EQ(table("glm-5.2", KvDtype::automatic), fp8);
  EXPECT_EQ(table("glm-5.2", KvDtype::fp8), fp8);
  EXPECT_EQ(table("glm-5.2", KvDtype::fp8_dsa),
            "latent: 78 x 1 x (latent 656) = 51168\n"  // 78 x 656
            "draft: 1 x 1 x (latent 656) = 656\n"
            "index_k: 21 x 1 x (key 128 + scale 4) = 2772\n"
            "draft_index_k: 1 x 1 x (key 128 + scale 4) = 132\n"
            "token 54728 request 0\n");
  EXPECT_EQ(table("glm-5.2", KvDtype::bf16),
            "latent: 78 x 1 x (latent 1152) = 89856\n"  // 78 x 1152
            "draft: 1 x 1 x (latent 1152) = 1152\n"
            "index_k: 21 x 1 x (key 128 + scale 4) = 2772\n"
            "draft_index_k: 1 x 1 x (key 128 + scale 4) = 132\n"
            "token 93912 request 0\n");
  const CacheShape shape = shape_of("glm-5.2");
  EXPECT_EQ(shape.layers(), 78);
  EXPECT_THAT(layers(shape, "draft"), ElementsAre(78));
  EXPECT_THAT(layers(shape, "index_k"),
              ElementsAre(0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74));
}

TEST(ModelConfigGolden, KimiK3) {
  // 93 layers: 24 MLA (4, 8, ..., 92 and 93, counted from 1), 69 KDA. Each KDA layer: q, k, v convolutions of 96 heads x 128
  // channels x (4 - 1) inputs x 2 B = 96 x 768 = 73,728 B; a state of 96 heads x 128 x 128 x 4 B = 96 x 65,536 = 6,291,456 B.
  EXPECT_EQ(table("kimi-k3", KvDtype::bf16),
            "latent: 24 x 1 x (latent 1152) = 27648\n"        // 24 x 1152
            "state conv_q: 69 x 96 x (conv 768) = 5087232\n"  // 69 x 73,728
            "state conv_k: 69 x 96 x (conv 768) = 5087232\n"
            "state conv_v: 69 x 96 x (conv 768) = 5087232\n"
            "state ssm: 69 x 96 x (ssm 65536) = 434110464\n"  // 69 x 6,291,456
            "token 27648 request 449372160\n");
  EXPECT_EQ(shape_of("kimi-k3", KvDtype::fp8).bytes_per_token(), Bytes(13824));  // 24 x 576; states keep their dtypes
  EXPECT_EQ(shape_of("kimi-k3", KvDtype::fp8).bytes_per_request(), Bytes(449372160));
  const auto latent = layers(shape_of("kimi-k3"), "latent");
  EXPECT_EQ(latent.front(), 3);
  EXPECT_EQ(latent[22], 91);
  EXPECT_EQ(latent.back(), 92);
}

TEST(ModelConfigGolden, Qwen35) {
  // 48 layers, every 4th full: 12 of 2 heads x 256 x 2 B; one MTP layer, full attention too. 36 GDN layers: q and k 16 heads x
  // 128 x 3 x 2 B, v 64 heads x 128 x 3 x 2 B, state 64 heads x 128 x 128 x 4 B.
  EXPECT_EQ(table("qwen3.5-122b-a10b", KvDtype::bf16),
            "kv: 12 x 2 x (k 512 + v 512) = 24576\n"  // 12 x 2 x 1024
            "draft: 1 x 2 x (k 512 + v 512) = 2048\n"
            "state conv_q: 36 x 16 x (conv 768) = 442368\n"  // 36 x 16 x 768
            "state conv_k: 36 x 16 x (conv 768) = 442368\n"
            "state conv_v: 36 x 64 x (conv 768) = 1769472\n"  // 36 x 64 x 768
            "state ssm: 36 x 64 x (ssm 65536) = 150994944\n"  // 36 x 64 x 65,536
            "token 26624 request 153649152\n");
  EXPECT_EQ(shape_of("qwen3.5-122b-a10b").find("ssm")->note, "[64 heads, 128, 128] of 4 B per request");
}

TEST(ModelConfigGolden, NemotronH) {
  // 52 letters: 23 M, 6 *, 23 E. Attention: 2 heads x 128 x 2 B. Mamba2: x 64 heads x 64 x 3 x 2 B, B and C 8 groups x 128 x 3
  // x 2 B, state 64 heads x 64 x 128 x 4 B. (expand 2 x hidden 2688 is not the inner size; 64 x 64 is.)
  EXPECT_EQ(table("nemotron-3-nano-30b", KvDtype::bf16),
            "kv: 6 x 2 x (k 256 + v 256) = 6144\n"           // 6 x 2 x 512
            "state conv_x: 23 x 64 x (conv 384) = 565248\n"  // 23 x 64 x 384
            "state conv_b: 23 x 8 x (conv 768) = 141312\n"   // 23 x 8 x 768
            "state conv_c: 23 x 8 x (conv 768) = 141312\n"
            "state ssm: 23 x 64 x (ssm 32768) = 48234496\n"  // 23 x 64 x 32,768
            "token 6144 request 49082368\n");
  EXPECT_THAT(layers(shape_of("nemotron-3-nano-30b"), "kv"), ElementsAre(5, 12, 19, 26, 33, 42));
}

TEST(ModelConfigGolden, DeepSeekV4IsRefused) {
  const auto shape = read_model_config(sample("deepseek-v4-pro"), KvDtype::automatic, "deepseek-v4-pro");
  ASSERT_FALSE(shape);
  EXPECT_EQ(shape.error().code, Code::unsupported);
  EXPECT_THAT(
      shape.error().message,
      HasSubstr("deepseek-v4-pro: compress_ratios is an array of 62: it makes one cached row stand for up to 128 tokens"));
  EXPECT_THAT(shape.error().message, HasSubstr("can't be sharded yet"));
}

// ---- samples against the full files

const std::map<std::string, std::string> kFiles = {
    {"DeepSeek-V3.2", "deepseek-v3.2"},
    {"DeepSeek-V3", "deepseek-v3"},
    {"DeepSeek-V4-Pro", "deepseek-v4-pro"},
    {"GLM-5.2-NVFP4", "glm-5.2"},
    {"Kimi-K2-Instruct", "kimi-k2"},
    {"Kimi-K3", "kimi-k3"},
    {"Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"},
    {"Meta-Llama-3.1-70B", "llama-3.1-70b"},
    {"Meta-Llama-3.1-8B", "llama-3.1-8b"},
    {"MiMo-V2-Flash", "mimo-v2-flash"},
    {"MiniMax-M3", "minimax-m3"},
    {"NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b"},
    {"Qwen3-0.6B", "qwen3-0.6b"},
    {"Qwen3-235B-A22B", "qwen3-235b-a22b"},
    {"Qwen3-30B-A3B", "qwen3-30b-a3b"},
    {"Qwen3.5-122B-A10B", "qwen3.5-122b-a10b"},
    {"gemma-4-26B-A4B", "gemma-4-26b-a4b"},
    {"gpt-oss-120b", "gpt-oss-120b"},
};

TEST(ModelConfig, EverySampleIsDescribedButOne) {
  int refused = 0;
  for (const auto& [file, name] : kFiles) refused += read_model_config(sample(name), KvDtype::automatic, name) ? 0 : 1;
  EXPECT_EQ(refused, 1);
}

// The whole configs are not part of the project. Where they lie beside it (or where KVLOOM_MODELS says) they must say what our
// samples say.
TEST(ModelConfig, FullFilesSayWhatTheSamplesSay) {
  const char* said = std::getenv("KVLOOM_MODELS");
  const std::filesystem::path models =
      said ? said : std::filesystem::path(KVLOOM_SOURCE_DIR) / ".." / "shared" / "data" / "models";
  for (const auto& [file, name] : kFiles) {
    const auto path = models / (file + ".json");
    const std::string full = std::filesystem::exists(path) ? read_file(path) : sample(name);
    for (const KvDtype dtype : {KvDtype::automatic, KvDtype::bf16, KvDtype::fp8, KvDtype::fp8_dsa})
      EXPECT_EQ(read_model_config(full, dtype, name), read_model_config(sample(name), dtype, name))
          << path << " as " << to_string(dtype);
  }
}

// ---- single rules

std::string llama(const std::string& more) {
  return R"({"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16)" + more + "}";
}
std::string mla(const std::string& more) {
  return R"({"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64)" + more + "}";
}
CacheShape shape_of_text(const std::string& text, KvDtype dtype = KvDtype::automatic) {
  auto shape = read_model_config(text, dtype);
  EXPECT_TRUE(shape) << (shape ? "" : to_string(shape.error())) << "\n" << text;
  return shape ? *shape : CacheShape();
}

TEST(ModelConfig, LayersThatShareKvOwnNone) {
  const auto shape = shape_of_text(llama(R"(, "sliding_window": 64, "num_kv_shared_layers": 2,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"])"));
  EXPECT_THAT(layers(shape, "kv_swa"), ElementsAre(0));
  EXPECT_THAT(layers(shape, "kv"), ElementsAre(1));
}

TEST(ModelConfig, WindowWithoutAListOfLayers) {
  EXPECT_THAT(layers(shape_of_text(llama(R"(, "sliding_window": 64)")), "kv_swa"), ElementsAre(0, 1, 2, 3));
  const auto upper = shape_of_text(llama(R"(, "sliding_window": 64, "use_sliding_window": true, "max_window_layers": 3)"));
  EXPECT_THAT(layers(upper, "kv"), ElementsAre(0, 1, 2));
  EXPECT_THAT(layers(upper, "kv_swa"), ElementsAre(3));
  const auto pattern = shape_of_text(llama(R"(, "sliding_window": 64, "sliding_window_pattern": 2)"));
  EXPECT_THAT(layers(pattern, "kv_swa"), ElementsAre(0, 2));
}

TEST(ModelConfig, NoRopeLayersGoBeforeTheInterval) {
  const auto listed = shape_of_text(llama(R"(, "attention_chunk_size": 64, "no_rope_layers": [0, 1, 1, 0])"));
  EXPECT_THAT(layers(listed, "kv"), ElementsAre(0, 3));
  const auto interval =
      shape_of_text(llama(R"(, "attention_chunk_size": 64, "no_rope_layers": [], "no_rope_layer_interval": 2)"));
  EXPECT_THAT(layers(interval, "kv"), ElementsAre(1, 3));
}

TEST(ModelConfig, IndexersByPatternAndByFrequency) {
  const auto pattern = shape_of_text(mla(R"(, "index_head_dim": 128, "index_topk_pattern": "FSSF", "index_topk_freq": 4)"));
  EXPECT_THAT(layers(pattern, "index_k"), ElementsAre(0, 3));
  const auto frequency = shape_of_text(mla(R"(, "index_head_dim": 128, "index_topk_freq": 2, "index_skip_topk_offset": 2)"));
  EXPECT_THAT(layers(frequency, "index_k"), ElementsAre(0, 1, 3));
}

TEST(ModelConfig, KvDtypeByTheConfigsQuantisation) {
  EXPECT_EQ(shape_of_text(mla(R"(, "quantization_config": {"kv_cache_quant_algo": "FP8"})")).bytes_per_token(), Bytes(4 * 576));
  EXPECT_EQ(shape_of_text(mla(R"(, "quantization_config": {"kv_cache_scheme": null})")).bytes_per_token(), Bytes(4 * 1152));
  EXPECT_EQ(shape_of_text(mla(R"(, "dtype": "float32")")).bytes_per_token(), Bytes(4 * 1152)) << "engines serve it in 16 bits";
  EXPECT_EQ(shape_of_text(R"({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "text_config": )" +
                          mla("") + "}")
                .bytes_per_token(),
            Bytes(4 * 576))
      << "a quantisation outside of text_config counts";
  EXPECT_EQ(shape_of_text(mla(R"(, "quantization_config": {"kv_cache_quant_algo": "NVFP4"})"), KvDtype::bf16).bytes_per_token(),
            Bytes(4 * 1152))
      << "who says the dtype is not asked about the config's";
}

TEST(ModelConfig, NemotronDraftIsOneAttentionLayerAModule) {
  const auto shape = shape_of_text(
      llama(R"(, "hybrid_override_pattern": "*E-*", "num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E")"));
  EXPECT_THAT(layers(shape, "kv"), ElementsAre(0, 3));
  EXPECT_THAT(layers(shape, "draft"), ElementsAre(4, 5));
}

TEST(ModelConfig, KvDtypeWordsParseBack) {
  for (const KvDtype dtype : {KvDtype::automatic, KvDtype::bf16, KvDtype::fp8, KvDtype::fp8_dsa})
    EXPECT_EQ(parse_kv_dtype(to_string(dtype)), dtype);
  const auto unknown = parse_kv_dtype("fp4");
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().message, "kv dtype 'fp4' is unknown; possible: auto, bf16, fp8, fp8-dsa");
}

// ---- bad input, with the words it gets

Error refusal(const std::string& text, KvDtype dtype = KvDtype::automatic) {
  auto shape = read_model_config(text, dtype, "m");
  EXPECT_FALSE(shape) << text.substr(0, 200);
  return shape ? Error{} : shape.error();
}

TEST(ModelConfigRefuses, TextThatIsNoJsonObject) {
  EXPECT_EQ(refusal("").message, "m: is empty; a config is one JSON object");
  EXPECT_EQ(refusal(" \n").message, "m: is empty; a config is one JSON object");
  EXPECT_EQ(refusal("{\n  \"a\": 1,\n  ?}").message, "m: not JSON: cannot be read on from byte 14 (line 3, column 3)");
  EXPECT_EQ(refusal("{\"a\": ").message, "m: not JSON: ends too early, at byte 6 (line 1, column 7)");
  EXPECT_EQ(refusal("{} {}").message, "m: not JSON: cannot be read on from byte 3 (line 1, column 4)");
  EXPECT_EQ(refusal("{\"a\": 1e999}").message, "m: not JSON: holds a number that no 64 bits hold");
  EXPECT_EQ(refusal("{\"a\": \"\xff\"}").code, Code::parse);
  EXPECT_EQ(refusal("[1, 2]").message, "m: is an array of 2; a config is one JSON object");
  EXPECT_EQ(refusal("3").message, "m: is 3; a config is one JSON object");
  EXPECT_EQ(refusal("[]").code, Code::parse);
}

TEST(ModelConfigRefuses, TextThatIsTooDeepOrTooLarge) {
  EXPECT_EQ(refusal(std::string(1000000, '[')).message, "m: nests deeper than 64 levels at byte 64 (line 1, column 65)");
  std::string objects;
  for (int i = 0; i < 100; ++i) objects += "{\"a\":";
  EXPECT_THAT(refusal(objects).message, HasSubstr("nests deeper than 64 levels"));
  EXPECT_EQ(refusal(R"({"a": "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"[["})").code,
            Code::invalid_argument)
      << "brackets in a string are not depth";
  EXPECT_EQ(refusal(std::string((4 << 20) + 1, ' ')).message, "m: has 4194305 bytes; a config has at most 4194304");
}

TEST(ModelConfigRefuses, MissingFieldsByTheirPath) {
  EXPECT_EQ(refusal("{}").message, "m: num_hidden_layers is missing; it must be an integer from 1 to 4096");
  EXPECT_EQ(refusal(R"({"text_config": {"num_hidden_layers": 4}})").message,
            "m: text_config.num_attention_heads is missing; it must be an integer from 1 to 65536");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 4, "num_key_value_heads": 2})").message,
            "m: hidden_size is missing; it must be an integer from 1 to 1048576");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 4, "kv_lora_rank": 512})").message,
            "m: qk_rope_head_dim is missing; it must be an integer from 1 to 1048576");
  EXPECT_EQ(refusal(llama(R"(, "full_attention_interval": 2, "linear_num_value_heads": 4)")).message,
            "m: linear_num_key_heads is missing; it must be an integer from 1 to 65536");
  EXPECT_EQ(
      refusal(llama(R"(, "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"])")).message,
      "m: sliding_window is missing; it must be an integer from 1 to 1099511627776");
  EXPECT_EQ(refusal(mla(R"(, "linear_attn_config": {"full_attn_layers": [1, 2, 3, 4]})")).message,
            "m: linear_attn_config.kda_layers is missing; it must be an array of at most num_hidden_layers=4 layer numbers");
  EXPECT_EQ(refusal(llama(R"(, "hybrid_override_pattern": "*E**", "num_nextn_predict_layers": 1)")).message,
            "m: mtp_hybrid_override_pattern is missing; possible: *E, *-");
}

TEST(ModelConfigRefuses, StateWhoseDtypeIsNotNamed) {
  const std::string gdn =
      R"(, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
      "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4)";
  EXPECT_EQ(refusal(llama(gdn)).message, "m: mamba_ssm_dtype is missing; possible: float32, bfloat16, float16");
  EXPECT_EQ(refusal(llama(gdn + R"(, "mamba_ssm_dtype": "fp4")")).message,
            "m: mamba_ssm_dtype is \"fp4\"; possible: float32, bfloat16, float16");
}

TEST(ModelConfigRefuses, WrongTypes) {
  EXPECT_EQ(refusal(R"({"num_hidden_layers": "61"})").message,
            "m: num_hidden_layers is \"61\"; it must be an integer from 1 to 4096");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 61.5})").message,
            "m: num_hidden_layers is 61.5; it must be an integer from 1 to 4096");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": true})").message,
            "m: num_hidden_layers is true; it must be an integer from 1 to 4096");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": [1, 2]})").message,
            "m: num_hidden_layers is an array of 2; it must be an integer from 1 to 4096");
  EXPECT_EQ(refusal(R"({"text_config": 3})").message, "m: text_config is 3; it must be an object");
  EXPECT_EQ(refusal(llama(R"(, "sliding_window": 4, "use_sliding_window": "yes")")).message,
            "m: use_sliding_window is \"yes\"; it must be true or false");
  EXPECT_EQ(refusal(llama(R"(, "layer_types": [1, 2, 3, 4])")).message.substr(0, 31), "m: layer_types[0] is 1; possibl");
  EXPECT_EQ(refusal(llama(R"(, "dtype": 16)")).message, "m: dtype is 16; possible: bfloat16, float16, float32");
  EXPECT_EQ(refusal(llama(R"(, "quantization_config": [])")).message,
            "m: quantization_config is an array of 0; it must be an object");
}

TEST(ModelConfigRefuses, CountsOutOfBounds) {
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 0})").message, "m: num_hidden_layers is 0; it must be from 1 to 4096");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": -4})").message, "m: num_hidden_layers is -4; it must be from 1 to 4096");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 1000000000})").message,
            "m: num_hidden_layers is 1000000000; it must be from 1 to 4096");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 18446744073709551615})").message,
            "m: num_hidden_layers is 18446744073709551615; it must be from 1 to 4096");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 1e30})").message,
            "m: num_hidden_layers is 1e+30; it must be an integer from 1 to 4096");
  EXPECT_EQ(refusal(R"({"text_config": {"num_hidden_layers": 4, "num_key_value_heads": -4, "head_dim": 16}})").message,
            "m: text_config.num_key_value_heads is -4; it must be from 1 to 65536");
  EXPECT_EQ(refusal(llama(R"(, "num_kv_shared_layers": 4)")).message, "m: num_kv_shared_layers is 4; it must be from 0 to 3");
  EXPECT_EQ(refusal(llama(R"(, "num_nextn_predict_layers": -1)")).message,
            "m: num_nextn_predict_layers is -1; it must be from 0 to 4096");
  EXPECT_EQ(refusal(llama(R"(, "sliding_window": 0)")).message, "m: sliding_window is 0; it must be from 1 to 1099511627776");
  EXPECT_EQ(refusal(R"({"num_hidden_layers": 4, "num_attention_heads": 3, "hidden_size": 16})").message,
            "m: head_dim is missing, and num_attention_heads=3 does not divide hidden_size=16");
}

TEST(ModelConfigRefuses, ProductsThatLeave64Bits) {
  // A state of 2^20 x 2^20 x 4 B = 2^42 B a head; x 2^16 heads x 2^12 layers = 2^70 B.
  std::string kda;
  for (int i = 1; i <= 4096; ++i) kda += (i > 1 ? ", " : "") + std::to_string(i);
  const auto error = refusal(
      R"({"num_hidden_layers": 4096, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": {"num_heads": 65536,
      "head_dim": 1048576, "short_conv_kernel_size": 4, "full_attn_layers": [], "kda_layers": [)" +
      kda + "]}}");
  EXPECT_EQ(error.code, Code::overflow);
  EXPECT_EQ(error.message, "group ssm: 4398046511104 B x 65536 heads x 4096 layers does not fit 64 bits");
}

TEST(ModelConfigRefuses, ListsThatDoNotFitTheLayers) {
  EXPECT_EQ(refusal(llama(R"(, "layer_types": ["full_attention"])")).message,
            "m: layer_types is an array of 1; it must be an array with one entry for each of num_hidden_layers=4");
  EXPECT_EQ(refusal(llama(R"(, "hybrid_layer_pattern": [0, 1, 0, 1, 0])")).message,
            "m: hybrid_layer_pattern is an array of 5; it must be an array with one entry for each of num_hidden_layers=4");
  EXPECT_EQ(refusal(mla(R"(, "index_head_dim": 128, "indexer_types": ["full"])")).message,
            "m: indexer_types is an array of 1; it must be an array with one entry for each of num_hidden_layers=4");
  EXPECT_EQ(refusal(llama(R"(, "hybrid_override_pattern": "M*")")).message,
            "m: hybrid_override_pattern is a string of 2; it must be a string of num_hidden_layers=4 letters");
  EXPECT_EQ(refusal(llama(R"(, "sparse_attention_config": {"sparse_index_dim": 8, "sparse_attention_freq": []})")).message,
            "m: sparse_attention_config.sparse_attention_freq is an array of 0; it must be an array with one entry for each of "
            "num_hidden_layers=4");
}

TEST(ModelConfigRefuses, LayersThatStandTwiceOrNowhere) {
  const auto with = [](const std::string& kda, const std::string& full) {
    return mla(R"(, "linear_attn_config": {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "kda_layers": )" + kda +
               R"(, "full_attn_layers": )" + full + "}");
  };
  EXPECT_EQ(refusal(with("[1, 2, 2]", "[4]")).message, "m: linear_attn_config.kda_layers[2] is 2, which stands twice");
  EXPECT_EQ(refusal(with("[1, 2, 3]", "[3]")).message,
            "m: linear_attn_config.full_attn_layers names layer 3, which kda_layers names too");
  EXPECT_EQ(refusal(with("[1, 2]", "[4]")).message,
            "m: linear_attn_config.full_attn_layers and kda_layers both leave out layer 3 of 4");
  EXPECT_EQ(refusal(with("[0, 1, 2]", "[4]")).message, "m: linear_attn_config.kda_layers[0] is 0; it must be from 1 to 4");
  EXPECT_EQ(refusal(with("[1, 2, 3]", "[5]")).message, "m: linear_attn_config.full_attn_layers[0] is 5; it must be from 1 to 4");
  EXPECT_EQ(
      refusal(with("[1, 2, 3, 4, 4]", "[]")).message,
      "m: linear_attn_config.kda_layers is an array of 5; it must be an array of at most num_hidden_layers=4 layer numbers");
}

TEST(ModelConfigRefuses, UnknownWords) {
  EXPECT_EQ(refusal(mla(R"(, "index_head_dim": 128, "indexer_types": ["full", "half", "full", "full"])")).message,
            "m: indexer_types[1] is \"half\"; possible: full, shared");
  EXPECT_EQ(
      refusal(llama(R"(, "layer_types": ["full_attention", "full_attention", "spiral_attention", "full_attention"])")).message,
      "m: layer_types[2] is \"spiral_attention\"; possible: full_attention, attention, deepseek_sparse_attention, "
      "minimax_m3_sparse, "
      "sliding_attention, chunked_attention, linear_attention, mamba, mlp, moe");
  EXPECT_EQ(refusal(llama(R"(, "hybrid_override_pattern": "M*EX")")).message,
            "m: hybrid_override_pattern[3] is \"X\"; possible: M, *, E, -");
  EXPECT_EQ(refusal(llama(R"(, "dtype": "float8")")).message, "m: dtype is \"float8\"; possible: bfloat16, float16, float32");
  EXPECT_EQ(refusal(llama(R"(, "dtype": ")" + std::string(100, 'x') + "\"")).message,
            "m: dtype is \"" + std::string(36, 'x') + "...; possible: bfloat16, float16, float32");
  EXPECT_EQ(refusal(llama(R"(, "quantization_config": {"kv_cache_quant_algo": "NVFP4"})")).message,
            "m: quantization_config.kv_cache_quant_algo is \"NVFP4\"; possible: FP8");
  EXPECT_EQ(refusal(llama(R"(, "quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "float"}})")).message,
            "m: quantization_config.kv_cache_scheme.num_bits is 4; it must be 8");
}

TEST(ModelConfigRefuses, DsaRowsOfModelsWithoutDsa) {
  EXPECT_EQ(
      refusal(sample("llama-3.1-8b"), KvDtype::fp8_dsa).message,
      "m: kv_lora_rank is missing, so this is not a DSA model; kv dtype fp8-dsa is for those only, possible: auto, bf16, fp8");
  EXPECT_EQ(
      refusal(sample("deepseek-v3"), KvDtype::fp8_dsa).message,
      "m: index_head_dim is missing, so this is not a DSA model; kv dtype fp8-dsa is for those only, possible: auto, bf16, fp8");
  EXPECT_EQ(refusal(sample("kimi-k3"), KvDtype::fp8_dsa).message.substr(0, 32), "m: text_config.index_head_dim is");
}

TEST(ModelConfigRefuses, CachesThatHaveNoGroupYet) {
  const auto unsupported = [](const std::string& text, const std::string& words) {
    const Error error = refusal(text);
    EXPECT_EQ(error.code, Code::unsupported) << error.message;
    EXPECT_THAT(error.message, HasSubstr(words));
  };
  unsupported(llama(R"(, "mamba_d_state": 128)"), "m: mamba_d_state is 128: it belongs to a Mamba state that has no group yet");
  unsupported(llama(R"(, "layers_block_type": [])"), "m: layers_block_type is an array of 0: it lists Mamba layers");
  unsupported(llama(R"(, "is_encoder_decoder": true)"), "m: is_encoder_decoder is true; caches of an encoder's");
  unsupported(mla(R"(, "index_head_dim": 128, "index_kpool": 4)"),
              "m: index_kpool is 4: it pools index keys over several tokens");
  unsupported(llama(R"(, "attn_type_list": [0, 1, 1, 1])"), "m: attn_type_list has layers of linear attention");
  unsupported(llama(R"(, "index_head_dim": 128)"), "m: index_head_dim names an indexer beside attention without kv_lora_rank");
  unsupported(llama(R"(, "sliding_window": 64, "attn_logit_softcapping": 50.0)"),
              "m: sliding_window is 64, but nothing says for which layers");
  unsupported(llama(R"(, "sliding_window": 64, "num_nextn_predict_layers": 1)"),
              "does not say whether theirs is full or windowed attention");
  unsupported(llama(R"(, "layer_types": ["linear_attention", "full_attention", "full_attention", "full_attention"])"),
              "recurrent layers of no known kind");
  unsupported(mla(R"(, "sliding_window": 64)"), "m: kv_lora_rank comes with windowed layers");
  unsupported(mla(R"(, "index_head_dim": 100)"), "m: index_head_dim is 100; index keys have a scale for each 128 elements");
  unsupported(llama(
                  R"(, "sparse_attention_config": {"sparse_index_dim": 8, "sparse_attention_freq": [0, 1, 1, 1],
                       "sparse_disable_index_value": [0, 1, 0, 1]})"),
              "m: sparse_attention_config.sparse_disable_index_value[2] is 0: a cache of index values has no known layout");
  EXPECT_TRUE(read_model_config(llama(R"(, "attn_type_list": [1, 1, 1, 1])")));  // MiniMax-M2
}

TEST(ModelConfigRefuses, ModelsThatCacheNothing) {
  EXPECT_EQ(refusal(llama(R"(, "layer_types": ["mlp", "mlp", "mlp", "moe"])")).message, "m: has no cache group");
}

}  // namespace
}  // namespace kvloom
