#include "kvloom/transport/cuda/copy_items.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "kvloom/bind/bind.h"
#include "kvloom/bind/laws.h"
#include "kvloom/plan/compile.h"
#include "kvloom/transport/copy.h"
#include "tests/shapes/shapes.h"

namespace kvloom::cuda {
namespace {

using Strided = Run;  // inside a test, Run is testing::Test's
constexpr std::byte kCanary{0xa5};

std::vector<std::byte> noise_of(std::size_t bytes) {
  std::vector<std::byte> out(bytes);
  std::mt19937_64 random(1);
  for (std::byte& b : out) b = static_cast<std::byte>(random() & 0xff);
  return out;
}

// Two buffers and jobs between them whose targets do not overlap.
struct Work {
  std::vector<std::byte> source, target;
  std::vector<CopyJob> jobs;
  std::int64_t total = 0;

  Work(std::size_t source_bytes, std::size_t target_bytes) : source(noise_of(source_bytes)), target(target_bytes, kCanary) {}
  void add(const Strided& run) {
    jobs.push_back({target.data(), source.data(), run});
    total += run.total().value;
  }
};

// What a warp does, vector by vector; also counts how often each target byte was written.
testing::AssertionResult execute(const CopyItem& item, Work& work, std::vector<int>& written) {
  if (item.bytes * item.count > kItemBytes) return testing::AssertionFailure() << item.bytes << " x " << item.count << " B";
  const std::size_t width = std::size_t{1} << item.log2_width;
  for (std::uint32_t v = 0; v < vector_count(item, item.log2_width); ++v) {
    const VectorPlace place = vector_place(item, v, item.log2_width);
    if (place.source % width != 0 || place.target % width != 0)
      return testing::AssertionFailure() << "vector " << v << " of " << width << " B is not aligned";
    const std::uint64_t from = place.source - reinterpret_cast<std::uintptr_t>(work.source.data());
    const std::uint64_t to = place.target - reinterpret_cast<std::uintptr_t>(work.target.data());
    if (from + width > work.source.size() || to + width > work.target.size())
      return testing::AssertionFailure() << "vector " << v << " of " << item.count << " x " << item.bytes
                                         << " B is out of bounds";
    std::memcpy(work.target.data() + to, work.source.data() + from, width);
    for (std::size_t b = 0; b < width; ++b) ++written[to + b];
  }
  return testing::AssertionSuccess();
}

// The law: the items of [begin, end) do what copy_range does, and write no byte twice.
testing::AssertionResult check_items(Work& work, std::int64_t begin, std::int64_t end) {
  std::fill(work.target.begin(), work.target.end(), kCanary);
  copy_range(copy_kernels().front(), work.jobs, begin, end);
  const std::vector<std::byte> want = work.target;
  std::fill(work.target.begin(), work.target.end(), kCanary);
  std::vector<CopyItem> items;
  append_items(work.jobs, begin, end, items);
  std::vector<int> written(work.target.size());
  for (const CopyItem& item : items)
    if (auto done = execute(item, work, written); !done) return done;
  if (work.target != want)
    return testing::AssertionFailure() << "other bytes than copy_range's in [" << begin << ", " << end << ")";
  const std::int64_t bytes = std::count(written.begin(), written.end(), 1);
  if (bytes != end - begin) return testing::AssertionFailure() << bytes << " bytes were written once, of " << end - begin;
  return testing::AssertionSuccess();
}

// The law of lists: the items of runs that differ in their offsets alone do what copy_range does.
testing::AssertionResult check_list(Work& work) {
  std::uint64_t bits = 16;
  std::vector<RunAddress> runs;
  for (const CopyJob& job : work.jobs) {
    runs.push_back({reinterpret_cast<std::uintptr_t>(job.source) + static_cast<std::uint64_t>(job.run.source_offset.value),
                    reinterpret_cast<std::uintptr_t>(job.target) + static_cast<std::uint64_t>(job.run.target_offset.value)});
    bits |= runs.back().source | runs.back().target;
  }
  auto list = list_of(work.jobs[0].run, bits & -bits);
  if (!list) return testing::AssertionFailure() << "no list";
  list->run_count = static_cast<std::uint32_t>(runs.size());
  std::fill(work.target.begin(), work.target.end(), kCanary);
  copy_range(copy_kernels().front(), work.jobs, 0, work.total);
  const std::vector<std::byte> want = work.target;
  std::fill(work.target.begin(), work.target.end(), kCanary);
  std::vector<int> written(work.target.size());
  for (std::uint32_t i = 0; i < list->count(); ++i)
    if (auto done = execute(item_of(*list, runs.data(), nullptr, i), work, written); !done) return done;
  if (work.target != want) return testing::AssertionFailure() << "other bytes than copy_range's";
  if (std::count(written.begin(), written.end(), 1) != work.total) return testing::AssertionFailure() << "a byte twice";
  return testing::AssertionSuccess();
}

constexpr std::int64_t kMostOfAJob = 60'000;

// A run of any shape whose target begins behind `at`, which moves on.
Strided any_run(std::int64_t source_bytes, std::int64_t& at) {
  const auto unit = *rc::gen::element<std::int64_t>(1, 1, 2, 4, 8, 16);
  const auto some = [&](std::int64_t most) { return unit * *rc::gen::inRange<std::int64_t>(0, most / unit + 1); };
  const auto drawn = *rc::gen::element<std::int64_t>(1, 3, 16, 40, 132, 256, 576, 656, 4608, 8193, 16'384, 16'400, 36'864, 0);
  const std::int64_t bytes = ceil_div(drawn == 0 ? 1 + some(900) : drawn, unit) * unit;
  Strided run{Bytes(0), Bytes(0), Bytes(bytes)};
  run.count = 1 + *rc::gen::inRange<std::int64_t>(0, std::min<std::int64_t>(300, kMostOfAJob / bytes) + 1);
  const std::int64_t step = bytes + some(64), span = (run.count - 1) * step;
  const std::int64_t begin = ceil_div(at, unit) * unit + some(40);
  const bool falls = *rc::gen::arbitrary<bool>();
  run.target_offset = Bytes(falls ? begin + span : begin);
  at = begin + span + bytes;
  const std::int64_t room = (source_bytes - bytes) / std::max<std::int64_t>(run.count - 1, 1) / unit * unit;
  const std::int64_t source_step = std::min(room, some(2 * bytes));
  const bool backwards = *rc::gen::arbitrary<bool>();
  const std::int64_t source_span = (run.count - 1) * source_step;
  const std::int64_t first = std::min(some(64), source_bytes - bytes - source_span);
  run.source_offset = Bytes(backwards ? first + source_span : first);
  if (run.count > 1) {
    run.target_step = Bytes(falls ? -step : step);
    run.source_step = Bytes(backwards ? -source_step : source_step);
  }
  return run;
}

RC_GTEST_PROP(CopyItems, DoWhatCopyRangeDoesForAnyPartOfAnyJobs, ()) {
  Work work(200'000, 600'000);
  std::int64_t at = *rc::gen::inRange<std::int64_t>(0, 17);
  for (int i = *rc::gen::inRange(1, 5); i > 0; --i) work.add(any_run(200'000, at));
  RC_ASSERT(at <= 600'000);
  const auto begin = *rc::gen::inRange<std::int64_t>(0, work.total + 1);
  const auto end = *rc::gen::inRange<std::int64_t>(begin, work.total + 1);
  for (const auto& part : {std::pair<std::int64_t, std::int64_t>{0, work.total}, {begin, end}}) {
    const auto held = check_items(work, part.first, part.second);
    if (!held) RC_FAIL(std::string(held.message()));
  }
}

RC_GTEST_PROP(CopyLists, OfRunsOfAKindDoWhatCopyRangeDoes, ()) {
  Work work(400'000, 600'000);
  std::int64_t at = *rc::gen::inRange<std::int64_t>(0, 17);
  const std::int64_t begin = at;
  Strided run = any_run(200'000, at);
  const std::int64_t extent = at - begin;
  RC_PRE(run.count == 1 || run.bytes.value <= kAlikeItemBytes);
  const std::int64_t most = std::min<std::int64_t>(8, (600'000 - begin) / extent),
                     unit = *rc::gen::element<std::int64_t>(1, 4, 16);
  for (std::int64_t i = *rc::gen::inRange<std::int64_t>(1, most + 1); i > 0; --i) {
    work.add(run);
    run.target_offset += Bytes(ceil_div(extent, unit) * unit);
    if (run.target_offset.value + extent > 600'000) break;
    run.source_offset += Bytes(unit * *rc::gen::inRange<std::int64_t>(0, 24'000 / unit));
  }
  const auto held = check_list(work);
  if (!held) RC_FAIL(std::string(held.message()));
}

TEST(CopyLists, AreOfItemsOfOneRound) {
  const auto shape = [](std::int64_t bytes, std::int64_t count) {
    const CopyList list = list_of({Bytes(0), Bytes(0), Bytes(bytes), count, Bytes(8 * bytes), Bytes(bytes)}, 16).value();
    return fmt::format("{} of {} x {}, {} x {} / {}", list.parts, list.whole.count, list.whole.bytes, list.last.count,
                       list.last.bytes, 1 << list.whole.log2_width);
  };
  EXPECT_EQ(shape(36'864, 1), "9 of 1 x 4096, 1 x 4096 / 16");
  EXPECT_EQ(shape(5'000, 1), "2 of 1 x 2560, 1 x 2440 / 16");
  EXPECT_EQ(shape(656, 16), "3 of 6 x 656, 4 x 656 / 16");
  EXPECT_EQ(shape(256, 64), "4 of 16 x 256, 16 x 256 / 16");
  EXPECT_EQ(shape(1, 3), "1 of 3 x 1, 3 x 1 / 1");
  EXPECT_FALSE(list_of({Bytes(0), Bytes(0), Bytes(8192), 2, Bytes(8192), Bytes(8192)}, 16)) << "pieces larger than an item";
  EXPECT_FALSE(list_of({Bytes(0), Bytes(0), Bytes(1 << 25)}, 16)) << "an engine's";
}

TEST(CopyItems, DoWhatCopyRangeDoesAtEveryCutOfAJob) {
  Work work(320, 220);
  work.add({Bytes(3), Bytes(5), Bytes(24), 5, Bytes(32), Bytes(26)});
  work.add({Bytes(200), Bytes(140), Bytes(7), 1, Bytes(0), Bytes(0)});
  work.add({Bytes(300), Bytes(200), Bytes(8), 6, Bytes(-16), Bytes(-8)});
  for (std::int64_t begin = 0; begin <= work.total; ++begin)
    for (std::int64_t end = begin; end <= work.total; ++end) ASSERT_TRUE(check_items(work, begin, end));
}

TEST(CopyItems, TheDivisionIsExactForEveryPieceAndVector) {
  for (std::uint32_t bytes = 1; bytes <= kItemBytes; ++bytes) {
    const Strided run{Bytes(1),           Bytes(1),          Bytes(bytes),
                      kItemBytes / bytes, Bytes(kItemBytes), Bytes(1 << 20)};  // odd: vectors of 1 B
    const CopyJob job{nullptr, nullptr, run};
    std::vector<CopyItem> items;
    append_items({&job, 1}, 0, run.total().value, items, kItemBytes);
    ASSERT_EQ(items.size(), 1U);
    ASSERT_EQ(items[0].log2_width, 0U);
    const std::uint32_t last = bytes * items[0].count - 1;
    for (std::uint32_t piece = 0; piece < items[0].count; ++piece)
      for (const std::uint32_t v : {piece * bytes, std::min(piece * bytes + bytes - 1, last)})
        ASSERT_EQ(vector_place(items[0], v, 0).target, 1 + (std::uint64_t{piece} << 20) + v % bytes) << v << " by " << bytes;
  }
}

// The bytes of each item, as "pieces x bytes / width".
std::vector<std::string> shapes_of(const Strided& run) {
  alignas(16) static std::byte source[16], target[16];
  const CopyJob job{target, source, run};  // addresses only: nothing is copied
  std::vector<CopyItem> items;
  append_items({&job, 1}, 0, run.total().value, items);
  std::vector<std::string> out;
  for (const CopyItem& item : items) out.push_back(fmt::format("{} x {} / {}", item.count, item.bytes, 1 << item.log2_width));
  return out;
}

TEST(CopyItems, OfPagesAndRowsHaveAboutOneSize) {
  using Lines = std::vector<std::string>;
  const auto step = [](std::int64_t bytes) { return Bytes(bytes); };
  EXPECT_EQ(shapes_of({Bytes(0), Bytes(0), Bytes(36'864)}), (Lines(3, "1 x 12288 / 16")));
  EXPECT_EQ(shapes_of({Bytes(0), Bytes(0), Bytes(18'432), 2, step(40'000), step(20'000)}), (Lines(4, "1 x 9216 / 16")));
  EXPECT_EQ(shapes_of({Bytes(0), Bytes(0), Bytes(576), 64, step(4608), step(576)}),
            (Lines{"22 x 576 / 16", "22 x 576 / 16", "20 x 576 / 16"}));
  EXPECT_EQ(shapes_of({Bytes(0), Bytes(0), Bytes(656), 8, step(5248), step(656)}), (Lines{"8 x 656 / 16"}));
  EXPECT_EQ(shapes_of({Bytes(0), Bytes(0), Bytes(256), 128, step(2048), step(256)}), (Lines(2, "64 x 256 / 16")));
  EXPECT_EQ(shapes_of({Bytes(4), Bytes(0), Bytes(8), 3, step(16), step(-12)}), (Lines{"3 x 8 / 4"}));
  EXPECT_EQ(shapes_of({Bytes(2), Bytes(0), Bytes(16'386)}), (Lines{"1 x 8704 / 2", "1 x 7682 / 2"}));
  EXPECT_EQ(shapes_of({Bytes(0), Bytes(0), Bytes(1), 3, step(2), step(1)}), (Lines{"3 x 1 / 1"}));
}

// The runs of every path of a plan, with pages in no order; each path between buffers of its own.
void check_plan_items(const CacheShape& shape, const char* from, const char* to, std::int64_t page, std::int64_t total) {
  const Plan plan = compile(shapes::side(shape, from, page), shapes::side(shape, to, page)).value();
  const laws::RequestTables tables = laws::random_tables(plan, total, 7);
  for (const Path& path : plan.paths()) {
    const auto group = static_cast<std::size_t>(path.group);
    auto bound = bind(plan, path, tables.source[group][static_cast<std::size_t>(path.source.value)],
                      tables.target[group][static_cast<std::size_t>(path.target.value)], {3, total});
    ASSERT_TRUE(bound) << bound.error().message;
    const std::vector<Strided> runs = laws::drain(*bound, 16);
    std::int64_t source_end = 1, target_end = 1;
    for (const Strided& run : runs) {
      const std::int64_t last = run.count - 1;
      source_end = std::max({source_end, run.source_offset.value, (run.source_offset + last * run.source_step).value});
      target_end = std::max({target_end, run.target_offset.value, (run.target_offset + last * run.target_step).value});
    }
    Work work(static_cast<std::size_t>(source_end) + 40'000, static_cast<std::size_t>(target_end) + 40'000);
    for (const Strided& run : runs) work.add(run);
    ASSERT_TRUE(check_items(work, 0, work.total)) << from << " to " << to;
    ASSERT_TRUE(check_items(work, work.total / 3 + 1, work.total * 2 / 3)) << from << " to " << to;
  }
}

TEST(CopyItems, OfBoundPlansDoWhatCopyRangeDoes) {
  check_plan_items(shapes::mla(2, 576), "cp=2:layers", "dcp=2", 64, 700);
  check_plan_items(shapes::mla(1, 656), "tp=1", "dcp=4:stripe=1", 64, 700);
  check_plan_items(shapes::mla(1, 576), "tp=1", "tp=1", 1, 200);
  check_plan_items(shapes::gqa(8), "tp=8", "tp=2", 16, 150);
  check_plan_items(shapes::dsa(), "tp=1", "dcp=3:value", 4, 61);
}

}  // namespace
}  // namespace kvloom::cuda
