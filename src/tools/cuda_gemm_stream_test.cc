// By the fake driver (tests/cuda) and a cuBLAS that only counts: what a load takes of a GPU, gives back, and says when it goes wrong.
#include "kvloom/tools/cuda_gemm_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cuda/fake_driver.h"

namespace kvloom {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr ModelSizes kSmall{.hidden = 64, .heads = 4, .kv_heads = 2, .head = 16, .mlp = 96, .layers = 3};
constexpr LoadLimits kLimits{.context = 300, .rows = 128, .scores = 1 << 16, .decode_rows = 4};

int products_seen = 0;
BlasStatus next_status = 0;

std::shared_ptr<const Blas> counting_blas() {
  products_seen = 0;
  next_status = 0;
  auto out = std::make_shared<Blas>();
  out->create = [](BlasHandle* handle) { return *handle = &products_seen, 0; };
  out->destroy = [](BlasHandle) { return 0; };
  out->set_stream = [](BlasHandle, CUstream) { return 0; };
  out->set_workspace = [](BlasHandle, void*, std::size_t) { return 0; };
  out->status_text = [](BlasStatus) { return "CUBLAS_STATUS_NOT_SUPPORTED"; };
  out->gemm = [](BlasHandle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*,
                 void*, int, int, int, int) { return ++products_seen, next_status; };
  out->gemm_strided_batched = [](BlasHandle, int, int, int, int, int, const void*, const void*, int, int, long long, const void*,
                                 int, int, long long, const void*, void*, int, int, long long, int, int,
                                 int) { return ++products_seen, next_status; };
  out->elapsed = [](float* milliseconds, CUevent, CUevent) { return *milliseconds = 2.5F, CUDA_SUCCESS; };
  return out;
}

Expected<std::unique_ptr<GemmStream>> open_load(std::int64_t layers) {
  using enum LoadBuffer;
  return GemmStream::make(*cuda::Gpu::open(cuda::fake_driver(), 0), counting_blas(), kSmall, kLimits,
                          {input, output, keys, values, scores}, layers);
}

TEST(GemmStream, PutsListsTellsTimesAndGivesBackAllThatItTook) {
  cuda::fake::reset();
  const cuda::fake::Live before = cuda::fake::live();
  {
    const auto stream = open_load(3);
    ASSERT_TRUE(stream) << stream.error().message;
    EXPECT_EQ((*stream)->layers(), 3U);
    for (int round = 0; round < 2; ++round) {
      const std::vector<Product> layer = prefill_layer(kSmall, kLimits, 100, 300);
      ASSERT_TRUE((*stream)->event());
      products_seen = 0;
      for (std::size_t i = 0; i < 5; ++i) ASSERT_TRUE((*stream)->put(layer, i));
      EXPECT_EQ(products_seen, static_cast<int>(5 * layer.size()));
      ASSERT_TRUE((*stream)->event());
      ASSERT_TRUE((*stream)->event());
      const auto mark = (*stream)->mark();
      ASSERT_TRUE(mark);
      EXPECT_GT(*(*stream)->wait(*mark), 0);
      EXPECT_THAT(*(*stream)->times(), ElementsAre(2.5, 2.5));
      EXPECT_TRUE((*stream)->times()->empty());
    }
  }
  EXPECT_EQ(cuda::fake::live(), before) << to_string(cuda::fake::live());
}

TEST(GemmStream, SaysWhatWentWrongAndOnWhichGpu) {
  cuda::fake::reset();
  cuda::fake::fail_next("cuMemAlloc", CUDA_ERROR_OUT_OF_MEMORY);
  const auto none = open_load(1);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::exhausted);
  EXPECT_THAT(none.error().message, HasSubstr("B for a load on GPU 0, beside its cache: CUDA_ERROR_OUT_OF_MEMORY"));

  const auto stream = open_load(1);
  ASSERT_TRUE(stream) << stream.error().message;
  next_status = 15;
  const auto refused = (*stream)->put(decode_layer(kSmall, kLimits), 0);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "a product on GPU 0: CUBLAS_STATUS_NOT_SUPPORTED");

  cuda::fake::fail_when_run("cuStreamWriteValue32", CUDA_ERROR_ILLEGAL_ADDRESS);
  const auto mark = (*stream)->mark();
  ASSERT_TRUE(mark);
  EXPECT_THAT((*stream)->wait(*mark).error().message, HasSubstr("the load of GPU 0: CUDA_ERROR_ILLEGAL_ADDRESS"));
  cuda::fake::reset();
}

TEST(Blas, SaysWhereItWasSoughtAndWhatToPass) {
  EXPECT_THAT(Blas::load("/nowhere/libcublas.so.13").error().message, HasSubstr("--cublas /nowhere/libcublas.so.13: "));
  EXPECT_THAT(Blas::load(KVLOOM_SOURCE_DIR).error().message, HasSubstr("no libcublas.so.13 or .12 that loads is in this folder"));
}

}  // namespace
}  // namespace kvloom
