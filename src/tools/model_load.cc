#include "kvloom/tools/model_load.h"

#include <algorithm>
#include <cmath>

#include "kvloom/base/units.h"

namespace kvloom {
namespace {

constexpr std::int64_t kTokenAlign = 64;  // tokens: leading dimensions of 128 B, without which tensor cores are not used well

std::int64_t rounded(std::int64_t tokens) { return ceil_div(tokens, kTokenAlign) * kTokenAlign; }

std::int64_t qkv_width(const ModelSizes& s) { return (s.heads + 2 * s.kv_heads) * s.head; }

// The weights of a layer, one after another: QKV, O, up and gate, down.
struct Weights {
  std::int64_t qkv = 0, o, up_gate, down, end;
  explicit Weights(const ModelSizes& s)
      : o(s.hidden * qkv_width(s)),
        up_gate(o + s.heads * s.head * s.hidden),
        down(up_gate + 2 * s.mlp * s.hidden),
        end(down + s.mlp * s.hidden) {}
};

// out[rows, width] = in[rows, k] times weights [width, k], all by rows: by columns that is the transposed of each.
Product linear(std::int64_t rows, std::int64_t k, std::int64_t width, std::int64_t weights) {
  return {.a_transposed = true,
          .m = width,
          .n = rows,
          .k = k,
          .scale = 1.0F / std::sqrt(static_cast<float>(k)),
          .a = {LoadBuffer::weights, weights, k},
          .b = {LoadBuffer::input, 0, k},
          .c = {LoadBuffer::output, 0, width}};
}

// Queries that go at once beside this many keys.
std::int64_t queries_at_once(const ModelSizes& s, const LoadLimits& limits, std::int64_t keys) {
  const std::int64_t most = limits.scores / (s.heads * keys);
  return std::clamp<std::int64_t>(most >= kTokenAlign ? most / kTokenAlign * kTokenAlign : most, 1, limits.rows);
}

// The queries [begin, end) beside all keys before `end`.
void attend(const ModelSizes& s, const LoadLimits& limits, std::int64_t begin, std::int64_t end, std::vector<Product>& out) {
  const std::int64_t keys = rounded(end), rows = (end - begin) * (s.heads / s.kv_heads), cache = rounded(limits.context) * s.head;
  out.push_back({.a_transposed = true,
                 .m = keys,
                 .n = rows,
                 .k = s.head,
                 .batch = s.kv_heads,
                 .scale = 1.0F / std::sqrt(static_cast<float>(s.head)),
                 .a = {LoadBuffer::keys, 0, s.head, cache},
                 .b = {LoadBuffer::input, 0, s.head, rows * s.head},
                 .c = {LoadBuffer::scores, 0, keys, rows * keys}});
  out.push_back({.m = s.head,
                 .n = rows,
                 .k = keys,
                 .batch = s.kv_heads,
                 .scale = 1.0F / std::sqrt(static_cast<float>(keys)),
                 .a = {LoadBuffer::values, 0, s.head, cache},
                 .b = {LoadBuffer::scores, 0, keys, rows * keys},
                 .c = {LoadBuffer::output, 0, s.head, rows * s.head}});
}

}  // namespace

std::int64_t ModelSizes::layer_weights() const { return Weights(*this).end; }

std::int64_t room(LoadBuffer buffer, const ModelSizes& s, const LoadLimits& limits) {
  const std::int64_t rows = std::max(limits.rows, limits.decode_rows);
  switch (buffer) {
    case LoadBuffer::weights: return s.layer_weights();
    case LoadBuffer::input: return rows * std::max({s.hidden, s.mlp, s.heads * s.head});
    case LoadBuffer::output: return rows * std::max({2 * s.mlp, qkv_width(s), s.hidden});
    case LoadBuffer::keys:
    case LoadBuffer::values: return s.kv_heads * rounded(limits.context) * s.head;
    case LoadBuffer::scores: return std::max(limits.scores, s.heads * rounded(limits.context));
  }
  return 0;
}

std::vector<Product> prefill_layer(const ModelSizes& s, const LoadLimits& limits, std::int64_t begin, std::int64_t end) {
  const Weights weights(s);
  std::vector<Product> out;
  for (std::int64_t from = begin; from < end; from += limits.rows) {
    const std::int64_t to = std::min(end, from + limits.rows), rows = to - from;
    out.push_back(linear(rows, s.hidden, qkv_width(s), weights.qkv));
    for (std::int64_t first = from; first < to;) {
      const std::int64_t past = std::min(to, first + queries_at_once(s, limits, rounded(to)));
      attend(s, limits, first, past, out);
      first = past;
    }
    out.push_back(linear(rows, s.heads * s.head, s.hidden, weights.o));
    out.push_back(linear(rows, s.hidden, 2 * s.mlp, weights.up_gate));
    out.push_back(linear(rows, s.mlp, s.hidden, weights.down));
  }
  return out;
}

std::vector<Product> decode_layer(const ModelSizes& s, const LoadLimits& limits) {
  const Weights weights(s);
  return {linear(limits.decode_rows, s.hidden, qkv_width(s), weights.qkv),
          linear(limits.decode_rows, s.heads * s.head, s.hidden, weights.o),
          linear(limits.decode_rows, s.hidden, 2 * s.mlp, weights.up_gate),
          linear(limits.decode_rows, s.mlp, s.hidden, weights.down)};
}

}  // namespace kvloom
