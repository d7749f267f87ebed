#include "kvloom/transport/shm/copy_work.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace kvloom::shm {
namespace {

using Strided = Run;  // inside a test, Run is testing::Test's

bool is_same(const CopyJob& a, const CopyJob& b) { return a.target == b.target && a.source == b.source && a.run == b.run; }

RC_GTEST_PROP(CopyWorkOf, AnyRunsIsThoseRunsInTheirOrder, ()) {
  std::byte memory[4];
  CopyWork work;
  std::vector<CopyJob> want, is;
  for (int n = *rc::gen::inRange(0, 40); n > 0; --n) {
    const auto small = [] { return Bytes(*rc::gen::inRange<std::int64_t>(0, 3)); };
    const CopyJob job{memory + *rc::gen::inRange(0, 2),
                      memory + 2 + *rc::gen::inRange(0, 2),
                      {small(), small(), Bytes(1) + small(), 1 + small().value, small(), small()}};
    work.begin(job.target, job.source, job.run);
    if (*rc::gen::inRange(0, 5) == 0) continue;  // begun, and nothing added
    work.add(job.run.source_offset, job.run.target_offset);
    want.push_back(job);
  }
  work.append_jobs(is);
  RC_ASSERT(work.runs() == want.size());
  RC_ASSERT(std::equal(is.begin(), is.end(), want.begin(), want.end(), is_same));
  work.clear();
  RC_ASSERT(work.empty() && work.stretches().empty());
}

TEST(CopyWork, SaysAKindOnce) {
  CopyWork work;
  const Strided page{Bytes(0), Bytes(0), Bytes(64)};
  for (int i = 0; i < 5; ++i) {
    work.begin(nullptr, nullptr, page);
    work.add(Bytes(64 * i), Bytes(128 * i));
  }
  ASSERT_EQ(work.stretches().size(), 1U);
  EXPECT_EQ(work.places(work.stretches()[0])[3].target, 384);
}

}  // namespace
}  // namespace kvloom::shm
