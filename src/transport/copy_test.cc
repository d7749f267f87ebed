#include "kvloom/transport/copy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "kvloom/transport/copy_crew.h"

namespace kvloom {

void PrintTo(const CopyKernel& kernel, std::ostream* out);
void PrintTo(const CopyKernel& kernel, std::ostream* out) { *out << kernel.name; }

namespace {

constexpr std::byte kCanary{0xa5};

class CopyKernels : public testing::TestWithParam<CopyKernel> {};
INSTANTIATE_TEST_SUITE_P(All, CopyKernels, testing::ValuesIn(copy_kernels()),
                         [](const auto& kernel) { return std::string(kernel.param.name); });

std::vector<std::byte> noise(std::size_t bytes) {
  std::vector<std::byte> out(bytes);
  std::mt19937_64 random(1);
  for (std::byte& b : out) b = static_cast<std::byte>(random() & 0xff);
  return out;
}

// One piece at these places of a line; the bytes around it must stay.
void check_piece(const CopyKernel& kernel, std::span<const std::byte> source, std::vector<std::byte>& target, std::size_t to,
                 std::size_t from, std::size_t bytes) {
  const std::span<std::byte> around = std::span(target).first(to + bytes + 128);
  std::fill(around.begin(), around.end(), kCanary);
  const Piece piece{target.data() + to, source.data() + from, bytes};
  kernel.copy({&piece, 1});
  ASSERT_TRUE(std::equal(piece.to, piece.to + bytes, piece.from)) << "bytes=" << bytes << " to=" << to << " from=" << from;
  const auto canary = [](std::byte b) { return b == kCanary; };
  ASSERT_TRUE(std::all_of(around.begin(), around.begin() + static_cast<std::ptrdiff_t>(to), canary))
      << "bytes=" << bytes << " to=" << to << " from=" << from;
  ASSERT_TRUE(std::all_of(around.begin() + static_cast<std::ptrdiff_t>(to + bytes), around.end(), canary))
      << "bytes=" << bytes << " to=" << to << " from=" << from;
}

TEST_P(CopyKernels, CopyEveryLengthAtSomeAlignments) {
  const auto source = noise(9000);
  std::vector<std::byte> target(9000);
  for (std::size_t bytes = 0; bytes <= 8192; ++bytes) {
    check_piece(GetParam(), source, target, 64 + bytes * 7 % 64, bytes * 13 % 64, bytes);
  }
}

TEST_P(CopyKernels, CopySomeLengthsAtEveryAlignment) {
  const auto source = noise(10000);
  std::vector<std::byte> target(10000);
  for (const std::size_t bytes : {1u,   31u,  63u,  64u,  65u,   127u,  128u,  255u,  256u,  320u, 511u,
                                  512u, 513u, 576u, 656u, 2047u, 2048u, 2049u, 2111u, 4096u, 8191u}) {
    for (std::size_t to = 0; to < 64; ++to) {
      for (std::size_t from = 0; from < 64; ++from) check_piece(GetParam(), source, target, to, from, bytes);
    }
  }
}

TEST_P(CopyKernels, CopyBigPieces) {
  const auto source = noise((5 << 20) + 200);
  std::vector<std::byte> target((5 << 20) + 400);
  for (const std::size_t bytes : {36'864ul, 65'537ul, 1ul << 20, (5ul << 20) + 1})
    check_piece(GetParam(), source, target, 77, 13, bytes);
}

TEST_P(CopyKernels, CopyManyPiecesOfAllSizesAtOnce) {
  const auto source = noise(1 << 20);
  std::vector<std::byte> target(1 << 20, kCanary);
  std::vector<std::byte> want = target;
  std::mt19937_64 random(2);
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at + 10'000 < target.size();) {
    const std::size_t bytes = random() % 5 == 0 ? random() % 8192 : random() % 700;
    const std::size_t from = random() % (source.size() - bytes);
    pieces.push_back({target.data() + at, source.data() + from, bytes});
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), bytes, want.begin() + static_cast<std::ptrdiff_t>(at));
    at += bytes + random() % 50;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  GetParam().copy(pieces);
  EXPECT_TRUE(target == want);
}

struct Jobs {
  std::vector<std::byte> source = noise(1 << 20);
  std::vector<std::byte> target = std::vector<std::byte>(1 << 20, kCanary);
  std::vector<CopyJob> jobs;
  std::int64_t total = 0;

  Jobs() {
    add({Bytes(10), Bytes(20), Bytes(100'000)});
    add({Bytes(0), Bytes(200'000), Bytes(576), 100, Bytes(1152), Bytes(600)});
    add({Bytes(900'000), Bytes(400'000), Bytes(3), 1000, Bytes(-7), Bytes(5)});
    add({Bytes(5000), Bytes(900'000), Bytes(36'864), 4, Bytes(40'000), Bytes(-100'000)});
  }
  void add(Run run) {
    jobs.push_back({target.data(), source.data(), run});
    total += run.total().value;
  }
  // The bytes [begin, end) of the stream, one by one.
  std::vector<std::byte> slowly(std::int64_t begin, std::int64_t end) const {
    std::vector<std::byte> out(target.size(), kCanary);
    std::int64_t at = 0;
    for (const CopyJob& job : jobs) {
      for (std::int64_t i = 0; i < job.run.count; ++i) {
        for (std::int64_t b = 0; b < job.run.bytes.value; ++b, ++at) {
          if (at < begin || at >= end) continue;
          out[static_cast<std::size_t>((job.run.target_offset + i * job.run.target_step).value + b)] =
              source[static_cast<std::size_t>((job.run.source_offset + i * job.run.source_step).value + b)];
        }
      }
    }
    return out;
  }
};

TEST_P(CopyKernels, AnyRangeOfTheStreamIsCopiedAndNoOther) {
  Jobs j;
  const std::vector<std::int64_t> cuts{0,       1,       99'999,  100'000, 100'001,     100'576, 130'000,
                                       157'600, 157'603, 160'600, 200'000, j.total - 1, j.total};
  for (const std::int64_t begin : cuts) {
    for (const std::int64_t end : cuts) {
      if (begin > end) continue;
      std::fill(j.target.begin(), j.target.end(), kCanary);
      copy_range(GetParam(), j.jobs, begin, end);
      ASSERT_TRUE(j.target == j.slowly(begin, end)) << begin << ".." << end;
    }
  }
}

TEST(CopyKernel, PlainIsAlwaysThereAndTheFastestIsLast) {
  const auto kernels = copy_kernels();
  EXPECT_EQ(kernels.front().name, "plain");
  EXPECT_EQ(best_copy_kernel().name, kernels.back().name);
}

TEST(CopyCrew, AnyNumberOfThreadsCopyAsOne) {
  for (const int threads : {1, 2, 3, 5}) {
    CopyCrew crew(best_copy_kernel(), threads);
    EXPECT_EQ(crew.threads(), threads);
    const auto source = noise(8 << 20);
    for (int round = 0; round < 4; ++round) {
      std::vector<std::byte> target(8 << 20, kCanary);
      std::vector<CopyJob> jobs;
      for (std::int64_t i = 0; i < 200; ++i)
        jobs.push_back({target.data(), source.data(), {Bytes(i * 36'864), Bytes((199 - i) * 36'864), Bytes(36'864)}});
      crew.run(jobs, 1000, 200 * 36'864);
      for (const CopyJob& job : jobs) {
        const std::int64_t skip = job.run.source_offset.value == 0 ? 1000 : 0;
        ASSERT_TRUE(std::equal(target.begin() + job.run.target_offset.value + skip,
                               target.begin() + job.run.target_offset.value + 36'864,
                               source.begin() + job.run.source_offset.value + skip));
      }
      ASSERT_EQ(target[199 * 36'864 + 999], kCanary);
      ASSERT_EQ(target[200 * 36'864], kCanary);
    }
  }
}

}  // namespace
}  // namespace kvloom
