#include "kvloom/plan/plan.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "kvloom/plan/compile.h"
#include "kvloom/plan/laws.h"
#include "kvloom/plan/oracle.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::says;
using shapes::side;

// ---- every listed pair ----

// The words of the source; all words stand on the target's side.
class PlanOfListedPairs : public testing::TestWithParam<std::size_t> {};

TEST_P(PlanOfListedPairs, KeepsEveryLaw) {
  const std::string& from = shapes::words()[GetParam()];
  std::int64_t n = static_cast<std::int64_t>(GetParam());
  for (const CacheShape& shape : shapes::all())
    for (const std::string& to : shapes::words()) {
      ++n;
      const std::int64_t total = 1 + n * 7 % 40, prefix = n % 3 == 0 ? 0 : n * 5 % (total + 1);
      const Side source = side(shape, from, n % 2 == 0 ? 4 : 6), target = side(shape, to, n % 5 < 3 ? 4 : 2);
      const auto plan = compile(source, target, total);
      ASSERT_TRUE(plan) << from << " to " << to << " of " << shape.model() << ": " << plan.error().message;
      ASSERT_TRUE(holds(laws::check_plan(*plan, laws::whole(total, prefix))))
          << from << " to " << to << " of " << shape.model() << ", tokens [" << prefix << ", " << total << ")";
    }
}

INSTANTIATE_TEST_SUITE_P(Words, PlanOfListedPairs, testing::Range<std::size_t>(0, shapes::words().size()));

}  // namespace
}  // namespace kvloom
