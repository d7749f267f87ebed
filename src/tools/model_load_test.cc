#include "kvloom/tools/model_load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace kvloom {
namespace {

// Past the last element that a product touches.
std::int64_t reach(const Operand& operand, std::int64_t rows, std::int64_t columns, std::int64_t batch) {
  return operand.offset + (batch - 1) * operand.stride + (columns - 1) * operand.lead + rows;
}

void check_inside(const std::vector<Product>& products, const ModelSizes& sizes, const LoadLimits& limits) {
  for (const Product& p : products) {
    ASSERT_GT(p.m * p.n * p.k * p.batch, 0);
    ASSERT_LE(std::max({p.m, p.n, p.k, p.a.lead, p.b.lead, p.c.lead}), INT32_MAX);
    ASSERT_GE(p.a.lead, p.a_transposed ? p.k : p.m);
    ASSERT_GE(p.b.lead, p.k);
    ASSERT_GE(p.c.lead, p.m);
    EXPECT_LE(p.a_transposed ? reach(p.a, p.k, p.m, p.batch) : reach(p.a, p.m, p.k, p.batch), room(p.a.buffer, sizes, limits));
    EXPECT_LE(reach(p.b, p.k, p.n, p.batch), room(p.b.buffer, sizes, limits));
    EXPECT_LE(reach(p.c, p.m, p.n, p.batch), room(p.c.buffer, sizes, limits));
  }
}

double operations(const std::vector<Product>& products) {
  double sum = 0;
  for (const Product& p : products) sum += p.operations();
  return sum;
}

TEST(ModelLoad, EveryOperandLiesInsideOfItsBuffer) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    LoadLimits limits;
    limits.context = std::uniform_int_distribution<std::int64_t>(1, round % 10 == 0 ? 1 << 20 : 40'000)(random);
    const auto end = std::uniform_int_distribution<std::int64_t>(1, limits.context)(random);
    const auto begin = std::max<std::int64_t>(0, end - std::uniform_int_distribution<std::int64_t>(1, 20'000)(random));
    SCOPED_TRACE(testing::Message() << begin << " to " << end << " of " << limits.context);
    check_inside(prefill_layer({}, limits, begin, end), {}, limits);
  }
  check_inside(decode_layer({}, {}), {}, {});
}

// 2 x weights x tokens, and of attention at least the causal half, and not much more.
TEST(ModelLoad, OperationsAreThoseOfTheModel) {
  const ModelSizes sizes;
  for (const std::int64_t tokens : {2048, 8192, 16384, 32768}) {
    LoadLimits limits;
    limits.context = tokens;
    const auto of = static_cast<double>(tokens), linear = 2.0 * static_cast<double>(sizes.layer_weights()) * of,
               causal = 2.0 * static_cast<double>(sizes.heads * sizes.head) * of * of;
    double chunked = 0;
    for (std::int64_t begin = 0; begin < tokens; begin += 2048)
      chunked += operations(prefill_layer(sizes, limits, begin, begin + 2048));
    EXPECT_GE(chunked, linear + causal);
    EXPECT_LE(chunked, linear + causal + 4.0 * static_cast<double>(sizes.heads * sizes.head) * of * 2048);
    EXPECT_NEAR(operations(prefill_layer(sizes, limits, 0, tokens)), chunked, 0.1 * chunked);
  }
}

TEST(ModelLoad, ADecodeStepReadsEachWeightOnce) {
  std::int64_t read = 0;
  for (const Product& p : decode_layer({}, {})) {
    EXPECT_EQ(p.a.offset, read);
    read += p.m * p.k;
  }
  EXPECT_EQ(read, ModelSizes().layer_weights());
}

}  // namespace
}  // namespace kvloom
