// model_load.h: the matrix products of a dense model's forward pass, as a list: what `run --stream --load gemm` has a GPU compute.  Stage: tools.
// Values only: no device, no library; cuda_load.h runs such a list by cuBLAS.
// A prefill layer of the tokens [begin, end): QKV, attention, O, up and gate, down. Attention is QK^T and PV over all tokens before, as batches
// with a KV head each, its queries cut so that scores fit their buffer: causal to within such a cut. There is no softmax, no norm, no
// activation, and scores go through memory, which a fused attention would not do: more memory traffic than a real layer of these sizes has.
// A decode step reads the weights of each layer for a few rows, so it is bound by memory. It reads no KV cache.
// No product reads what another wrote but PV the scores, so values stay those that the buffers were filled with, however often it is run.
// Law (model_load_test.cc): every operand lies inside of its buffer (`room`), and the operations are those of the closed formula.
// Units: elements of bf16 (2 B); matrices by columns, as BLAS has them: C[m, n] = scale * op(A)[m, k] B[k, n].
// Source of the sizes: Qwen2.5-14B's config.json (hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size;
// num_hidden_layers 48).
#pragma once

#include <cstdint>
#include <vector>

namespace kvloom {

struct ModelSizes {
  std::int64_t hidden = 5120, heads = 40, kv_heads = 8, head = 128, mlp = 13824, layers = 48;
  std::int64_t layer_weights() const;  // elements
};

struct LoadLimits {
  std::int64_t context = 0;                     // tokens of the longest request
  std::int64_t rows = 8192;                     // tokens of one product; more are several
  std::int64_t scores = std::int64_t{1} << 30;  // elements, of queries x context of all heads
  std::int64_t decode_rows = 16;                // requests of a decode step
};

enum class LoadBuffer : std::uint8_t { weights, input, output, keys, values, scores };

struct Operand {
  LoadBuffer buffer = LoadBuffer::input;
  std::int64_t offset = 0;  // of the first matrix
  std::int64_t lead = 0;    // from a column to the next
  std::int64_t stride = 0;  // from a matrix of the batch to the next
};

struct Product {
  bool a_transposed = false;
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  float scale = 1;
  Operand a, b, c;
  double operations() const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) * static_cast<double>(batch);
  }
};

// Elements that a buffer needs for every list below.
std::int64_t room(LoadBuffer buffer, const ModelSizes& sizes, const LoadLimits& limits);

// One layer for the tokens [begin, end) of a request.  @pre 0 <= begin < end <= limits.context
std::vector<Product> prefill_layer(const ModelSizes& sizes, const LoadLimits& limits, std::int64_t begin, std::int64_t end);
// One layer of a decode step.
std::vector<Product> decode_layer(const ModelSizes& sizes, const LoadLimits& limits);

}  // namespace kvloom
