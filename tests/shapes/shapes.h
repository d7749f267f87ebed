// shapes.h: small models and sharding words that the laws are checked on.  Rows are a few bytes: every byte can be looked at.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kvloom/geometry/side.h"

namespace kvloom::shapes {

inline std::vector<LayerId> layer_ids(std::int32_t begin, std::int32_t end) {
  std::vector<LayerId> out;
  for (std::int32_t l = begin; l < end; ++l) out.emplace_back(l);
  return out;
}

inline CacheShape made(std::string model, std::int32_t layers, std::vector<CacheGroup> groups) {
  return CacheShape::make(std::move(model), layers, std::move(groups)).value();
}

// One head of one plane: what tensor parallelism can only replicate.
inline CacheShape mla(std::int32_t layers = 5, std::int64_t bytes = 2) {
  return made("mla", layers, {{"latent", GroupKind::paged, layer_ids(0, layers), 1, {{"latent", bytes, 1}}, {}, {}}});
}

inline CacheShape gqa(std::int32_t heads, std::int32_t layers = 3) {
  return made("gqa", layers, {{"kv", GroupKind::paged, layer_ids(0, layers), heads, {{"k", 2, 1}, {"v", 2, 1}}, {}, {}}});
}

// A second group of two planes, on some of the layers.
inline CacheShape dsa() {
  return made(
      "dsa", 5,
      {{"latent", GroupKind::paged, layer_ids(0, 5), 1, {{"latent", 3, 1}}, {}, {}},
       {"index_k", GroupKind::paged, {LayerId(0), LayerId(2), LayerId(3)}, 1, {{"keys", 2, 1}, {"scales", 1, 1}}, {}, {}}});
}

// Layers of three kinds: all tokens, a sliding window, chunks.
inline CacheShape hybrid() {
  const auto window = [](Window::Kind kind, std::int64_t tokens) { return Window{kind, tokens}; };
  const std::vector<PlaneShape> kv = {{"k", 1, 1}, {"v", 1, 1}};
  return made("hybrid", 6,
              {{"full", GroupKind::paged, {LayerId(0), LayerId(3)}, 2, kv, {}, {}},
               {"sliding", GroupKind::paged, {LayerId(1), LayerId(2), LayerId(5)}, 2, kv, window(Window::Kind::sliding, 7), {}},
               {"chunked", GroupKind::paged, {LayerId(4)}, 2, kv, window(Window::Kind::chunked, 10), {}}});
}

// Attention on every second layer, a state per request on the others.
inline CacheShape stateful() {
  return made("stateful", 4,
              {{"kv", GroupKind::paged, {LayerId(1), LayerId(3)}, 2, {{"k", 2, 1}, {"v", 2, 1}}, {}, {}},
               {"ssm", GroupKind::state, {LayerId(0), LayerId(2)}, 24, {{"conv", 1, 1}, {"ssm", 3, 1}}, {}, {}}});
}

// Three layers and a draft layer behind them.
inline CacheShape drafted() {
  const std::vector<PlaneShape> kv = {{"k", 1, 1}, {"v", 1, 1}};
  return made(
      "drafted", 3,
      {{"kv", GroupKind::paged, layer_ids(0, 3), 2, kv, {}, {}}, {"draft", GroupKind::paged, layer_ids(3, 4), 2, kv, {}, {}}});
}

inline std::vector<CacheShape> all() { return {mla(), gqa(8), gqa(2), dsa(), hybrid(), stateful(), drafted()}; }

// Fits every shape above: heads are 1, 2 or 8, of states 24. `page` stands in for what the words leave out.
inline const std::vector<std::string>& words() {
  static const std::vector<std::string> list = {"tp=1",
                                                "tp=2",
                                                "tp=4",
                                                "tp=8",
                                                "tp=8,dcp=4",
                                                "tp=8,dcp=2:stripe=1",
                                                "dcp=4",
                                                "dcp=3",
                                                "dcp=2:stripe=1",
                                                "dcp=4:stripe=2",
                                                "dcp=4:value",
                                                "dcp=3:value",
                                                "tp=4,dcp=2:value",
                                                "cp=8:layers",
                                                "cp=3:layers",
                                                "cp=2:layers,tp=2",
                                                "cp=4:zigzag",
                                                "cp=3:zigzag,tp=2",
                                                "cp=4:blocked",
                                                "cp=3:interleave=1",
                                                "cp=2:interleave=2",
                                                "cp=2:interleave=2,tp=4,dcp=2",
                                                "cp=4",
                                                "cp=2,tp=2",
                                                "pp=4",
                                                "pp=2",
                                                "pp=2,cp=2:layers,tp=2",
                                                "pp=2,dcp=2",
                                                "pp=3,cp=2"};
  return list;
}

inline Side side(const CacheShape& shape, const std::string& text, std::int64_t page = 4) {
  auto sharding = Sharding::parse(text);
  if (!sharding) ADD_FAILURE() << sharding.error().message;
  auto made = Side::make(shape, sharding.value(), page);
  if (!made) ADD_FAILURE() << shape.model() << ": " << made.error().message;
  return made.value();
}

// A law that holds, or the sentence that says where it does not.
inline testing::AssertionResult holds(const Expected<void>& law) {
  if (law) return testing::AssertionSuccess();
  return testing::AssertionFailure() << law.error().message;
}

// An error whose message has these words.
template <class T>
testing::AssertionResult says(const Expected<T>& result, const std::string& words) {
  if (result) return testing::AssertionFailure() << "no error, wanted one that says: " << words;
  if (result.error().message.find(words) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << result.error().message << "' does not say: " << words;
}

}  // namespace kvloom::shapes
